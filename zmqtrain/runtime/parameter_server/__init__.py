"""The parameter server alive: keys in a broker, and a worker with its lines to all masters."""

__all__: list[str] = []
