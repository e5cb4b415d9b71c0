"""The living halves: a node and a broker, each with its threads, its clock and its sockets."""

__all__: list[str] = []
