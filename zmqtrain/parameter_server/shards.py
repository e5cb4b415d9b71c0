"""Deal keys among masters, so that all of them hold, send and receive the same number of bytes, or nearly.

Rule 1: of a key of more than `split_bytes` each master has a contiguous part, equal but for one value, cut into pieces
of at most `PIECE_BYTES`: each is pushed, stepped and pulled by itself, so that the first come back while the last go
up.  A smaller one goes whole to the master with the least.
Rule 2: what follows is a function of the keys and the order in which they were placed, and of nothing else; one master
keeps the map (`directory`), and all ask it.
Rule 3: no two masters ever differ by more than `split_bytes` (`ShardMap` says why).
Source: Li et al. 2014, Scaling Distributed Machine Learning with the Parameter Server (there ranges of hashed keys);
the dealing is list scheduling, Graham 1966.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from zmqtrain.core.errors import ConfigError

ITEM_BYTES = {"float32": 4, "float64": 8}
"""The dtypes that a key may have, and the bytes of one value."""
SPLIT_BYTES = 1 << 20
"""From here on a piece for each master is worth a message for each: about 8 ms of a port of 1 Gb/s."""
PIECE_BYTES = 4 << 20


class Piece(NamedTuple):
    """A part of a flat key that one master has: `values` of them from `start` on."""

    master: int
    start: int
    values: int

    def name(self, key: str, values: int) -> str:
        """Return what the master calls it, of a key of so many values: the key itself, or "w[0:1000]"."""
        return key if self.values == values else f"{key}[{self.start}:{self.start + self.values}]"


class ShardMap:
    """Which master has which piece of which key.

    masters: how many there are.  loads: the bytes at each.

    Why the loads never differ by more than `split_bytes`: they begin equal. A whole key, at most so large, goes to the
    one with the least, which then has at most so much more than any had at least before. A split key adds the same to
    all, and one value more to those with the least, which brings two masters nearer to each other, or, where they were
    equal, apart by one value. Raises ConfigError for less than one master, or a split_bytes below one value.
    """

    def __init__(self, masters: int, split_bytes: int = SPLIT_BYTES) -> None:
        if masters < 1:
            raise ConfigError(f"keys lie on one master at least, not on {masters}")
        if split_bytes < max(ITEM_BYTES.values()):
            raise ConfigError(f"split_bytes must be at least one value, {max(ITEM_BYTES.values())}, got {split_bytes}")
        self.masters, self.split_bytes = masters, split_bytes
        self.loads = [0] * masters
        self._pieces: dict[str, tuple[Piece, ...]] = {}

    def place(self, keys: Mapping[str, tuple[int, str]]) -> dict[str, tuple[Piece, ...]]:
        """Deal new keys, given as (values, dtype), the largest first; return the pieces of each, in order.

        A key that was placed before stays where it is, whatever size is said now.
        Raises ConfigError for a key of no values, or of another dtype than those of `ITEM_BYTES`.
        """
        for key, (values, dtype) in keys.items():
            if values < 1 or dtype not in ITEM_BYTES:
                raise ConfigError(
                    f"the key {key!r} has {values} values of {dtype}: a key has one at least, of "
                    f"{' or '.join(ITEM_BYTES)}"
                )
        new = {key: (values, ITEM_BYTES[dtype]) for key, (values, dtype) in keys.items() if key not in self._pieces}
        for key, (values, item) in sorted(new.items(), key=lambda one: (-one[1][0] * one[1][1], one[0])):
            split = values * item > self.split_bytes
            self._pieces[key] = self._split(values, item) if split else self._whole(values, item)
        return {key: self._pieces[key] for key in keys}

    def count(self, values: int, dtype: str) -> int:
        """Return in how many pieces a key lies, at most."""
        return self.masters + values * ITEM_BYTES[dtype] // PIECE_BYTES

    def add(self, key: str, dtype: str, pieces: tuple[Piece, ...]) -> None:
        """Take over what another map of as many masters has placed (a checkpoint's)."""
        for piece in pieces:
            self.loads[piece.master] += piece.values * ITEM_BYTES[dtype]
        self._pieces[key] = pieces

    def __getitem__(self, key: str) -> tuple[Piece, ...]:
        return self._pieces[key]

    def __contains__(self, key: object) -> bool:
        return key in self._pieces

    def _by_load(self) -> list[int]:
        return sorted(range(self.masters), key=lambda master: (self.loads[master], master))

    def _whole(self, values: int, item: int) -> tuple[Piece, ...]:
        master = min(range(self.masters), key=lambda master: (self.loads[master], master))
        self.loads[master] += values * item
        return (Piece(master, 0, values),)

    def _split(self, values: int, item: int) -> tuple[Piece, ...]:
        each, more = divmod(values, self.masters)
        lightest = set(self._by_load()[:more])
        pieces, start = [], 0
        for master in range(self.masters):
            end = start + each + (master in lightest)
            self.loads[master] += (end - start) * item
            step = PIECE_BYTES // item
            pieces += [Piece(master, begin, min(step, end - begin)) for begin in range(start, end, step)]
            start = end
        return tuple(pieces)
