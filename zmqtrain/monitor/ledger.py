"""Proof from records that every acknowledged contribution is in the parameters exactly once.

Two books are compared: the hub's, what landed in which release (its journal), and each node's own, what it offered,
what it was told has landed, and what it took back (its record, one for each life of its process).

Rule 1: nothing is repaired here and nothing is forgiven: each fault is a sentence that names node, offer and version.
Rule 2: a book that was cut off by a kill is a book: what it does not say is not held against it.
Rule 3: of a pipeline's delta all parts are in one version.
Rule 4: the hub's releases are counted by version; what a later life of the hub says differently is a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import PeerId, Version
from zmqtrain.monitor.records import Record, name_of, read_records, set_aside

Key = tuple[PeerId, int]


@dataclass(frozen=True, slots=True)
class Release:
    """One release in the hub's book. landed: (peer, sequence) of each contribution; samples: that they stand for.
    turns: of each that is a part of a pipeline's delta, the pipeline, the turn and the part."""

    version: Version
    landed: tuple[Key, ...]
    samples: int = 0
    turns: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class Audit:
    """What the comparison of the books came to.

    faults: what is wrong, one sentence each; none: every acknowledged contribution landed exactly once.
    contributions: that landed.  acknowledged: of these, how many a node was told of.  unheard: the others, whose nodes
    ended or were killed before they heard.  samples: in the shared parameters.  computed: by all lives of all nodes.
    """

    faults: tuple[str, ...]
    releases: int
    contributions: int
    acknowledged: int
    samples: int
    computed: int
    lives: int

    @property
    def unheard(self) -> int:
        return self.contributions - self.acknowledged

    @property
    def goodput(self) -> float:
        """The share of the computed samples that is in the shared parameters; 0 if none were computed."""
        return self.samples / self.computed if self.computed else 0.0

    @property
    def verdict(self) -> str:
        if not self.faults:
            return f"exactly once: {self.acknowledged:,} acknowledged contributions in {self.releases:,} releases"
        return f"{len(self.faults)} faults; the first: {self.faults[0]}"


def lives_of(path: Path) -> list[list[Record]]:
    """Return the records of each life that a node's record at `path` holds, the oldest first.

    One that was killed before it said anything is left out. Raises ConfigError for a file that is no record.
    """
    files = [*(file for _, file in set_aside(path)), *([path] if path.exists() else [])]
    return [records for file in files if (records := read_records(file))]


def releases_of(records: Iterable[Record]) -> list[Release]:
    return [
        Release(
            record["version"],
            tuple((PeerId(one["peer"]), one["sequence"]) for one in record["contributions"]),
            record["samples"],
            tuple((one["pipeline"], one["turn"], one["fragment"]) for one in record["contributions"] if "turn" in one),
        )
        for record in records
        if record["kind"] == "release"
    ]


def computed_samples(life: Sequence[Record]) -> int:
    """Return how many samples a node's process has computed, as its record says.

    A step is written when the next one is made: of a life that was cut off there was one more, and it counts.
    """
    steps = [record["samples"] for record in life if record["kind"] == "step" and "samples" in record]
    if not steps:
        return 0
    each = steps[1] - steps[0] if len(steps) > 1 else steps[0]
    ended = any(record["kind"] == "node_end" for record in life)
    return int(steps[-1] - steps[0] + each + (0 if ended else each))


def audit(releases: Iterable[Release], lives: Iterable[Sequence[Record]]) -> Audit:
    """Compare the hub's book with those of its nodes. releases: of all lives of the hub; lives: of all its nodes, those
    of one that went on from checkpoints in their order.

    Raises ConfigError for a life that does not say whose it is.
    """
    faults: list[str] = []
    book, hub_samples = _hub_book(releases, faults)
    acknowledged: set[Key] = set()
    computed = 0
    nodes: list[_NodeBook] = []
    for life in lives:
        computed += computed_samples(life)
        nodes.append(_NodeBook.read(life))
    for number, node in enumerate(nodes):
        known = set[int]().union(*(one.offered for one in nodes[: number + 1] if one.peer == node.peer))
        again = set[int]().union(*(one.offered for one in nodes[number + 1 :] if one.peer == node.peer))
        faults += node.compare(book, known, again)
        acknowledged |= {(node.peer, sequence) for sequence in node.acknowledged}
    heard = len(acknowledged & book.keys())
    return Audit(tuple(faults), len(set(book.values())), len(book), heard, hub_samples, computed, len(nodes))


def _hub_book(releases: Iterable[Release], faults: list[str]) -> tuple[dict[Key, Version], int]:
    """Return by contribution the version that it is in, and the samples of all; say what cannot be."""
    by_version: dict[Version, Release] = {}
    for release in releases:
        before = by_version.setdefault(release.version, release)
        if before.landed != release.landed:
            faults.append(
                f"version {release.version} was released twice: of {_names(before.landed)}, and of "
                f"{_names(release.landed)}"
            )
    book: dict[Key, Version] = {}
    for version in sorted(by_version):
        for peer, sequence in by_version[version].landed:
            if (first := book.setdefault((peer, sequence), version)) != version:
                faults.append(f"offer {sequence} of {name_of(peer)} landed twice: in versions {first} and {version}")
        if len(set(by_version[version].landed)) < len(by_version[version].landed):
            faults.append(f"version {version} holds a contribution twice: {_names(by_version[version].landed)}")
    parts = {part for release in by_version.values() for _, _, part in release.turns}
    for version, release in sorted(by_version.items()):
        held: dict[tuple[str, int], list[int]] = {}
        for pipeline, turn, part in release.turns:
            held.setdefault((pipeline, turn), []).append(part)
        for (pipeline, turn), own in held.items():
            if sorted(own) != sorted(parts):
                faults.append(
                    f"version {version} holds {len(own)} of the {len(parts)} parts of turn {turn} of the pipeline of "
                    f"{pipeline}"
                )
    if by_version:
        missing = sorted(set(range(min(by_version), max(by_version))) - by_version.keys())
        faults += [f"version {version} is in no book of the hub" for version in missing]
    return book, sum(release.samples for release in by_version.values())


def _names(landed: Sequence[Key]) -> str:
    return ", ".join(f"{name_of(peer)}'s {sequence}" for peer, sequence in landed) or "nothing"


@dataclass
class _NodeBook:
    """What one life of a node says.

    offered: the numbers of its offers, without a gap but for those that a kill kept from being written.
    acknowledged: by offer the version with which it was told; withdrawn: by offer why.  newest: the last version that
    it applied.  reset: it dropped, when told so, what it had pending.
    """

    peer: PeerId
    offered: set[int] = field(default_factory=set)
    acknowledged: dict[int, Version] = field(default_factory=dict)
    withdrawn: dict[int, str] = field(default_factory=dict)
    newest: Version = -1
    reset: bool = False
    faults: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, life: Sequence[Record]) -> _NodeBook:
        first = next((record for record in life if record["kind"] == "node"), None)
        if first is None:
            raise ConfigError("a node's record begins with the node that joins: this one does not say whose it is")
        book = cls(PeerId(first["peer"]))
        for record in life:
            match record["kind"]:
                case "offer":
                    book.offered.add(record["sequence"])
                case "withdrawal":
                    book.withdrawn[record["sequence"]] = record["reason"]
                case "application":
                    book._apply(record)
        return book

    def _apply(self, record: Record) -> None:
        name, version = name_of(self.peer), record["version"]
        self.newest, self.reset = max(self.newest, version), self.reset or record["reset"]
        for sequence in record["landed"]:
            if (before := self.acknowledged.setdefault(sequence, version)) != version:
                self.faults.append(f"{name} was told twice of its offer {sequence}: with versions {before}, {version}")

    def compare(self, book: Mapping[Key, Version], known: set[int], again: set[int]) -> list[str]:
        """Return what differs from the hub's book. known: what this and earlier lives of the node have offered.

        again: what later lives have: a number of which the hub had never heard is used again by one that goes on from a
        checkpoint of before, and what lands under it is that life's.
        """
        faults, name = self.faults, name_of(self.peer)
        for sequence, told in sorted(self.acknowledged.items()):
            landed = book.get((self.peer, sequence))
            if landed is None:
                faults.append(f"{name} was told with version {told} that its offer {sequence} landed: it is in none")
            elif landed > told:
                faults.append(f"{name} was told with version {told} of its offer {sequence}, which is in {landed}")
            if sequence not in known:
                faults.append(f"{name} was told with version {told} of its offer {sequence}, which it never made")
        for sequence, reason in sorted(self.withdrawn.items()):
            if (self.peer, sequence) in book and sequence not in again:
                where = book[self.peer, sequence]
                faults.append(
                    f"{name} took back its offer {sequence} ({reason}), and it is in version {where}: it counts twice"
                )
        for (peer, sequence), landed in book.items():
            if peer != self.peer or not self.offered or sequence in self.acknowledged or sequence in self.withdrawn:
                continue
            if sequence not in self.offered and min(self.offered) < sequence < max(self.offered):
                faults.append(f"version {landed} holds offer {sequence} of {name}, which never made it")
            elif sequence in self.offered and landed <= self.newest and not self.reset:
                faults.append(
                    f"{name} has applied version {self.newest} and was never told that its offer {sequence} is in "
                    f"{landed}: what landed is still pending there"
                )
        return faults
