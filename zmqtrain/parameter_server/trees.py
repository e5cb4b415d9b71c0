"""Name the arrays of a tree (dicts, lists, tuples, NamedTuples) as keys, and put values in their places again.

Rule: a key is the way to its array, "layers/0/weight": the same tree gives the same keys on all clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zmqtrain.core.containers import children, like
from zmqtrain.core.errors import ConfigError


def name_leaves(tree: Any) -> dict[str, Any]:
    """Return a tree's arrays by key, in the order of the tree; None is no array.

    Raises ConfigError for a tree that is an array itself, and for keys that two of them would have.
    """
    if children(tree) is None:
        raise ConfigError(f"a dict, a list or a tuple of arrays is wanted here, not {type(tree).__name__}")
    found: dict[str, Any] = {}
    for key, leaf in _walk(tree, ""):
        if key in found:
            raise ConfigError(f"two arrays of the tree would both be the key {key!r}: rename one")
        found[key] = leaf
    return found


def rebuild(tree: Any, values: Mapping[str, Any]) -> Any:
    """Return a tree like this one, with these values in the places of its arrays."""
    return _rebuild(tree, values.__getitem__, "")


def _walk(node: Any, way: str) -> Iterator[tuple[str, Any]]:
    inside = children(node)
    if inside is None:
        if node is not None:
            yield way, node
        return
    for name, child in inside:
        yield from _walk(child, f"{way}/{name}" if way else str(name))


def _rebuild(node: Any, value_of: Callable[[str], Any], way: str) -> Any:
    inside = children(node)
    if inside is None:
        return None if node is None else value_of(way)
    return like(node, [_rebuild(child, value_of, f"{way}/{name}" if way else str(name)) for name, child in inside])
