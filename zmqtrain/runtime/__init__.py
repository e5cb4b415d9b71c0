"""The living halves, a folder each, and what they share: a mailbox, the events they tell, the rules of a run."""

__all__: list[str] = []
