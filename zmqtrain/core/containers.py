"""One level of a tree of containers, taken apart and put together again: dict, list, tuple and NamedTuple.

Rule 1: what is none of these is a leaf, and None, which is nothing, is told from leaves by who asks.
Rule 2: a NamedTuple comes back as its own type, any other as the plain dict, list or tuple that it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def children(node: Any) -> list[tuple[Any, Any]] | None:
    """Return the (name, child) of each child, in the container's own order; None for what is no container.

    name: the key in a dict, the field of a NamedTuple, the place in a list or a tuple.
    """
    if isinstance(node, dict):
        return list(node.items())
    if not isinstance(node, list | tuple):
        return None
    return list(zip(getattr(node, "_fields", range(len(node))), node, strict=True))


def like(node: Any, inside: Sequence[Any]) -> Any:
    """Return a container of the kind of `node` with these in the places of its children, in the same order."""
    if isinstance(node, dict):
        return dict(zip(node, inside, strict=True))
    if isinstance(node, list):
        return list(inside)
    return type(node)(*inside) if hasattr(node, "_fields") else tuple(inside)
