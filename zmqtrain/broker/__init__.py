"""A hub alive: its socket, how bytes move, its codec thread, its checkpoints and its journal."""
