"""How N processes reduce, spread and exchange arrays among themselves; import from the modules."""
