"""Processes that meet at a broker: how they find each other, talk, and are missed; what the hub does for them."""

__all__: list[str] = []
