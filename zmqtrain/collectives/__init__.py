"""How N processes reduce, spread and exchange arrays among themselves; import from the modules."""

__all__: list[str] = []
