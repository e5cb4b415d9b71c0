"""A hub alive: its socket, how bytes move, its codec thread, its checkpoints and its journal."""

__all__: list[str] = []
