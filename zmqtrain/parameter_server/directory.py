"""Where keys lie on the shards, and which client brings their first values: kept by the first shard.

1. Keys are dealt so that all shards hold nearly the same number of bytes. A key of more than `split_bytes` is split
   over all shards, in pieces of at most `PIECE_BYTES`, so that the first come back while the last are uploaded; a
   smaller key goes whole to the shard with the fewest bytes.
2. The map is a function of the keys and the order in which they were placed.
3. The client that declares a key first brings its values to all shards that have a piece of it, and then reports
   `founded`; clients that declare it later wait and take those values. If the first client is lost before, the next
   one that waits takes its place. So no key is made of two clients' values.
4. A key keeps its shape, its dtype and its place. Removing a client costs what it has asked for, however many keys.
Source: Li et al. 2014, Scaling Distributed Machine Learning with the Parameter Server (there ranges of hashed keys);
the dealing is list scheduling, Graham 1966.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from numbers import Integral
from typing import Any, NamedTuple

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import LeafSpec, PeerId, children, like

ITEM_BYTES = {"float32": 4, "float64": 8}
"""The dtypes that a key may have, and the bytes of one value."""
SPLIT_BYTES = 1 << 20
"""From here on a piece for each shard is worth a message for each: about 8 ms of a port of 1 Gb/s."""
PIECE_BYTES = 4 << 20


class Piece(NamedTuple):
    """A part of a flat key that one shard has: `values` of them from `start` on."""

    shard: int
    start: int
    values: int

    def name(self, key: str, values: int) -> str:
        """Return what the shard calls it, of a key of so many values: the key itself, or "w[0:1000]"."""
        return key if self.values == values else f"{key}[{self.start}:{self.start + self.values}]"


class ShardMap:
    """Which shard has which piece of which key.

    shards: how many there are.  loads: the bytes at each.  pieces: by key.

    Why the loads never differ by more than `split_bytes`: they begin equal. A whole key, at most so large, goes to the
    one with the least, which then has at most so much more than any had at least before. A split key adds the same to
    all, and one value more to those with the least, which brings two shards nearer to each other, or, where they were
    equal, apart by one value. Raises ConfigError for less than one shard, or a split_bytes below one value.
    """

    def __init__(self, shards: int, split_bytes: int = SPLIT_BYTES) -> None:
        if shards < 1:
            raise ConfigError(f"keys lie on one shard at least, not on {shards}")
        if split_bytes < max(ITEM_BYTES.values()):
            raise ConfigError(f"split_bytes must be at least one value, {max(ITEM_BYTES.values())}, got {split_bytes}")
        self.shards, self.split_bytes = shards, split_bytes
        self.loads = [0] * shards
        self.pieces: dict[str, tuple[Piece, ...]] = {}

    def place(self, keys: Mapping[str, tuple[int, str]]) -> dict[str, tuple[Piece, ...]]:
        """Deal new keys, given as (values, dtype), the largest first; return the pieces of each, in order.

        A key that was placed before stays where it is, whatever its size now.
        Raises ConfigError for a key of no values, or of another dtype than those of `ITEM_BYTES`.
        """
        for key, (values, dtype) in keys.items():
            if values < 1 or dtype not in ITEM_BYTES:
                raise ConfigError(
                    f"the key {key!r} has {values} values of {dtype}: a key has one at least, of "
                    f"{' or '.join(ITEM_BYTES)}"
                )
        new = {key: (values, ITEM_BYTES[dtype]) for key, (values, dtype) in keys.items() if key not in self.pieces}
        for key, (values, item) in sorted(new.items(), key=lambda one: (-one[1][0] * one[1][1], one[0])):
            split = values * item > self.split_bytes
            self.pieces[key] = self._split(values, item) if split else self._whole(values, item)
        return {key: self.pieces[key] for key in keys}

    def count(self, values: int, dtype: str) -> int:
        """Return in how many pieces a key lies, at most."""
        return self.shards + values * ITEM_BYTES[dtype] // PIECE_BYTES

    def add(self, key: str, dtype: str, pieces: tuple[Piece, ...]) -> None:
        """Take over what another map of as many shards has placed (a checkpoint's)."""
        for piece in pieces:
            self.loads[piece.shard] += piece.values * ITEM_BYTES[dtype]
        self.pieces[key] = pieces

    def _by_load(self) -> list[int]:
        return sorted(range(self.shards), key=lambda shard: (self.loads[shard], shard))

    def _whole(self, values: int, item: int) -> tuple[Piece, ...]:
        shard = self._by_load()[0]
        self.loads[shard] += values * item
        return (Piece(shard, 0, values),)

    def _split(self, values: int, item: int) -> tuple[Piece, ...]:
        each, more = divmod(values, self.shards)
        lightest = set(self._by_load()[:more])
        pieces, start = [], 0
        for shard in range(self.shards):
            end = start + each + (shard in lightest)
            self.loads[shard] += (end - start) * item
            step = PIECE_BYTES // item
            pieces += [Piece(shard, begin, min(step, end - begin)) for begin in range(start, end, step)]
            start = end
        return tuple(pieces)


MOST_KEYS = MOST_WAITS = 1 << 18
"""Keys in all, and waits for their values of one client."""
MAX_KEY_CHARACTERS, MAX_DIMENSIONS = 400, 32
MOST_VALUES = 1 << 40
MOST_PIECES = 1 << 16
"""Of the keys of one declaration: where all of them lie is one message (and 256 GiB of values)."""
ASKS = ""
"""The dtype of who only asks where a key lies."""
NOBODY = PeerId("")


def check_key(key: object) -> None:
    """Raise ConfigError for what is no name of a key: a text of 1 to `MAX_KEY_CHARACTERS` characters, valid Unicode,
    and none that a shard may call a piece of another key ("w[0:1000]", see `Piece.name`).
    """
    fits = isinstance(key, str) and 0 < len(key) <= MAX_KEY_CHARACTERS
    if not fits or any("\ud800" <= character <= "\udfff" for character in str(key)):
        text = repr(key)
        text = text if len(text) <= 80 else f"{text[:80]}..."
        raise ConfigError(f"a key is a text of 1 to {MAX_KEY_CHARACTERS} characters, or an index from 0 on, not {text}")
    if re.search(r"\[\d+:\d+\]$", str(key)):
        raise ConfigError(f"the key {key!r} is called as a piece of a key is: let it end otherwise")


def key_name(key: object) -> str:
    """Return the name of a key: a text is its own, an index (0, 1, ...) is that of an array in a list: "0", "1".

    Raises ConfigError as `check_key` does.
    """
    if not isinstance(key, bool) and isinstance(key, Integral) and int(key) >= 0:
        return str(int(key))
    check_key(key)
    return str(key)


@dataclass(frozen=True, slots=True)
class Placement:
    """A key, and which shard has which piece of it."""

    leaf: LeafSpec
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """Tell a client where keys lie. found: it brings the values of these; given: the values of these are there."""

    worker: PeerId
    request: int
    found: tuple[Placement, ...]
    given: tuple[Placement, ...]


@dataclass
class _Key:
    """founder: the client that brings the values; NOBODY: it was lost; None: they are there.  waiting: clients, in
    order, as (client, request, whether it has values of its own to bring)."""

    placement: Placement
    founder: PeerId | None
    waiting: list[tuple[PeerId, int, bool]] = field(default_factory=list)


@dataclass
class _Client:
    """brings: the keys whose values it brings.  waits: the number of its waits; waits_for: their keys."""

    brings: set[str] = field(default_factory=set)
    waits: int = 0
    waits_for: set[str] = field(default_factory=set)


class Directory:
    """Where the keys lie on so many shards."""

    def __init__(self, shards: int) -> None:
        self.map = ShardMap(shards)
        self._keys: dict[str, _Key] = {}
        self._clients: defaultdict[PeerId, _Client] = defaultdict(_Client)

    def __len__(self) -> int:
        return len(self._keys)

    def declare(self, worker: PeerId, request: int, leaves: Sequence[LeafSpec]) -> list[Placed]:
        """Take a client's keys, each with the shape and dtype of its values, or with the dtype `ASKS`.

        Raises ConfigError for an invalid key, for an unknown key that a client only asks for, and for a key that is
        there with another shape or dtype; then nothing has changed.
        """
        if len({leaf.path for leaf in leaves}) < len(leaves):
            raise ConfigError("a key is declared twice at once")
        new = {leaf.path: (leaf.values, leaf.dtype) for leaf in leaves if self._is_new(leaf)}
        if len(self._keys) + len(new) > MOST_KEYS:
            raise ConfigError(f"{len(self._keys) + len(new)} keys are more than the {MOST_KEYS} that one server has")
        if (client := self._clients[worker]).waits + len(leaves) - len(new) > MOST_WAITS:
            raise ConfigError(f"one client waits for the values of {MOST_WAITS} keys at most: wait for some")
        if (pieces := sum(self.map.count(*one) for one in new.values())) > MOST_PIECES:
            raise ConfigError(f"these keys lie in {pieces} pieces; of one declaration {MOST_PIECES} may be: split it")
        places = self.map.place(new)
        found, given = [], []
        for leaf in leaves:
            if leaf.path in places:
                self._keys[leaf.path] = _Key(Placement(leaf, places[leaf.path]), NOBODY)
            key, brings = self._keys[leaf.path], leaf.dtype != ASKS
            if key.founder is None:
                given.append(key.placement)
            elif brings and key.founder in (NOBODY, worker):
                self._bring(key, worker)
                found.append(key.placement)
            else:
                key.waiting.append((worker, request, brings))
                client.waits += 1
                client.waits_for.add(leaf.path)
        return [Placed(worker, request, tuple(found), tuple(given))] if found or given else []

    def founded(self, worker: PeerId, keys: Iterable[str]) -> list[Placed]:
        """Record that this client has brought the values of these keys; tell the clients that wait for them."""
        told: dict[tuple[PeerId, int], list[Placement]] = {}
        for name in keys:
            key = self._keys.get(name)
            if key is not None and key.founder == worker:
                key.founder, waiting, key.waiting = None, key.waiting, []
                self._clients[worker].brings.discard(name)
                for who, request, _ in waiting:
                    self._clients[who].waits -= 1
                    self._clients[who].waits_for.discard(name)
                    told.setdefault((who, request), []).append(key.placement)
        return [Placed(who, request, (), tuple(given)) for (who, request), given in told.items()]

    def lost(self, worker: PeerId) -> list[Placed]:
        """Forget a client: the next one that waits for a key, or declares it, and has values brings them."""
        told: dict[tuple[PeerId, int], list[Placement]] = {}
        client = self._clients.pop(worker, _Client())
        for name in client.waits_for:
            self._keys[name].waiting = [one for one in self._keys[name].waiting if one[0] != worker]
        for name in sorted(client.brings):
            key = self._keys[name]
            key.founder = NOBODY
            next_one = next((one for one in key.waiting if one[2]), None)
            if next_one is not None:
                self._bring(key, next_one[0])
                key.waiting.remove(next_one)
                self._clients[next_one[0]].waits -= 1
                told.setdefault(next_one[:2], []).append(key.placement)
        return [Placed(who, request, tuple(found), ()) for (who, request), found in told.items()]

    def _bring(self, key: _Key, worker: PeerId) -> None:
        key.founder = worker
        self._clients[worker].brings.add(key.placement.leaf.path)

    def state(self) -> list[Any]:
        """Return the keys that have values, for a checkpoint."""
        return [
            [key.placement.leaf.path, list(key.placement.leaf.shape), key.placement.leaf.dtype]
            + [list(piece) for piece in key.placement.pieces]
            for key in self._keys.values()
            if key.founder is None
        ]

    def restore(self, state: Iterable[Sequence[Any]]) -> None:
        """Take over what `state` gave."""
        for path, shape, dtype, *pieces in state:
            placement = Placement(LeafSpec(path, tuple(shape), dtype), tuple(Piece(*piece) for piece in pieces))
            self.map.add(path, dtype, placement.pieces)
            self._keys[path] = _Key(placement, None)

    def _is_new(self, leaf: LeafSpec) -> bool:
        known = self._keys.get(leaf.path)
        if leaf.dtype == ASKS:
            if known is None:
                raise ConfigError(f"the server has no key {leaf.path!r}: init it first")
            return False
        if known is not None and (known.placement.leaf.shape, known.placement.leaf.dtype) != (leaf.shape, leaf.dtype):
            raise ConfigError(f"the key {known.placement.leaf} is on the server; this client's is {leaf}")
        check_key(leaf.path)
        if len(leaf.shape) > MAX_DIMENSIONS:
            raise ConfigError(f"the key {leaf.path!r} has {len(leaf.shape)} dimensions; {MAX_DIMENSIONS} may be")
        if leaf.dtype not in ITEM_BYTES or not 0 < prod(leaf.shape) <= MOST_VALUES or min(leaf.shape, default=1) < 1:
            raise ConfigError(f"the key {leaf} cannot be: it has one value at least, of {' or '.join(ITEM_BYTES)}")
        return known is None


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
