"""A node's checkpoints: what they hold of its training thread and its exchange, when they are saved, and going on.

The training thread gives copies and continues; the codec thread adds its own state in its turn, so that all of it is of
one step boundary; a third thread writes. A failed write is a warning and is tried again. In strict mode all nodes save
at the same versions and none is left out: there a save waits for the one before.
A node that goes on introduces itself as the node that it was. Where all nodes go back to one version, it goes back too
and publishes what was in flight there, to the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from zmqtrain.checkpoint.background_writer import BackgroundWriter
from zmqtrain.checkpoint.folder import CheckpointFolder, Every, every_from_text
from zmqtrain.core.errors import CheckpointError, FramingError, ModelMismatch
from zmqtrain.core.interfaces import Clock
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Array, ModelSpec, PeerId, describe_mismatch, spec_from_plain, spec_to_plain
from zmqtrain.node.codec import Inbox, NodeCodec
from zmqtrain.node.offers import Offers, Restarts
from zmqtrain.node.units import UnitQueue
from zmqtrain.protocol.fencing import MAX_INCARNATION
from zmqtrain.protocol.messages import WireSchedule
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.protocol.schedules import Timetable

logger = logging.getLogger(__name__)

FORMAT = "zmqtrain node 1"
MOST_VERSIONS = 1 << 62
"""A checkpoint with a larger version was not written by a node."""

Facts = dict[str, Any]
Arrays = Mapping[str, NDArray[Any]]


class SavedNode:
    """The checkpoint that a node goes on from. versions: of all good checkpoints in the folder, rising.

    facts: the state of "node", "offers", "units", "coder", "sent" and "loop".  unacked: the offers that were in flight,
    encoded.
    """

    def __init__(self, facts: Facts, arrays: Arrays, versions: tuple[int, ...] = ()) -> None:
        self.facts, self.arrays, self.versions, node = facts, arrays, versions, facts["node"]
        self.peer, self.run, self.term = PeerId(str(node["peer"])), str(node["run"]), int(node["term"])
        self.version, self.incarnation = int(node["version"]), int(node["incarnation"])
        self.addresses = tuple(map(str, node.get("addresses", ())))
        self.settings, self.model = RunSettings.from_dict(node["settings"]), spec_from_plain(node["model"])
        self.schedules: tuple[WireSchedule, ...] = tuple(node.get("schedules", ()))
        self.unacked = {int(sequence) for sequence, *_ in facts["coder"]["unacked"]}
        Timetable(self.settings, self.schedules)
        if not (-1 <= self.version < MOST_VERSIONS and 0 <= self.incarnation < MAX_INCARNATION):
            raise ValueError(f"version {self.version} and incarnation {self.incarnation} cannot be")
        for name, array in arrays.items():
            if name.startswith("anchor/") and array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ValueError(f"the shared parameters {name.removeprefix('anchor/')} are not finite")

    def check_model(self, model: ModelSpec, folder: object) -> None:
        """Raise ModelMismatch, naming the leaf, unless this is the model of the checkpoint."""
        if (difference := describe_mismatch(self.model, model)) is not None:
            text = (
                f"the checkpoint in {folder} is of another model: {difference[1].replace('the run', 'the checkpoint')}"
            )
            raise ModelMismatch(f"{text}. Name another --checkpoint folder", difference[0])


def read_saved(folder: CheckpointFolder, version: int | None = None) -> SavedNode | None:
    """Return the newest checkpoint of a node (or that of a version), None if there is none. Raises CheckpointError."""
    loaded = folder.load() if version is None else folder.load_version(version)
    if loaded is None:
        return None
    facts, arrays = loaded
    if facts.get("format") != FORMAT:
        whose = "a broker's" if "contributions" in facts else "no node's"
        raise CheckpointError(
            f"{folder.folder} holds {whose} checkpoints: the broker and each node have a --checkpoint folder of "
            "their own; name another one for this node"
        )
    try:
        strict = facts["node"]["settings"].get("mode") == "strict"
        versions = folder.good_versions() if strict and version is None else ()
        return SavedNode(facts, arrays, versions)
    except (AttributeError, FramingError, LookupError, ArithmeticError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint in {folder.folder} cannot be read: {error!r}") from error


@dataclass(frozen=True)
class CheckpointOptions:
    """Where a node keeps checkpoints, how often it saves ("60s", "64" versions), and what it goes on from."""

    folder: CheckpointFolder
    every: str = ""
    saved: SavedNode | None = None


class CheckpointedNode(Protocol):
    """The node, as its checkpoints use it."""

    clock: Clock
    peer: Peer
    offers: Offers
    inbox: Inbox
    restarts: Restarts
    units: UnitQueue
    codec: NodeCodec

    def in_codec(self, job: Callable[[], None], values: int = 0) -> bool:
        """Have the codec thread do something, after all earlier jobs; False if it has too much to do."""


class NodeCheckpoint:
    """The checkpoints of one node: a `Keeping` for its training thread.

    resuming: what the node goes on from, until `go_on`; None for nothing.
    """

    def __init__(self, options: CheckpointOptions, node: CheckpointedNode) -> None:
        self.folder, self.resuming = options.folder, options.saved
        self._every_text, self._node, self._steps_alone = options.every, node, 0
        self._taken: SavedNode | None = None  # what the training thread goes on from, until it has asked for it
        self._writer = BackgroundWriter("checkpoints of this node", "training", node.clock)
        self._saved_version, self._saved_at = -1, node.clock.monotonic()
        node.codec.keeps_sent = True
        if (saved := options.saved) is not None:
            peer = node.peer
            peer.term = saved.term
            for address in saved.addresses:
                peer.search.know(address)
            peer.resume(
                saved.run, saved.version, saved.settings, saved.model, sorted(saved.unacked),
                saved.versions, int(saved.facts["offers"]["sequence"]), saved.schedules,
            )  # fmt: skip

    @property
    def _settings(self) -> RunSettings:
        assert self._node.peer.settings is not None, "a node that saves or goes on has been welcomed"
        return self._node.peer.settings

    @property
    def _every(self) -> Every:
        return every_from_text(self._every_text, self._settings.mode == "strict")

    # ------------------------------------------------------------------ saving (training thread)

    def is_due(self) -> bool:
        version, now = self._node.offers.version, self._node.clock.monotonic()
        if version < 0 or (self._writer.busy and not self._every.together):
            return False
        return now >= self._writer.retry_at or self._every.is_due(version, self._saved_version, now - self._saved_at)

    def save(self, state: Facts, arrays: Mapping[str, Array], wait: bool = False) -> None:
        self._writer.begin()
        version = self._node.offers.version

        def code() -> None:
            try:
                if (coded := self._node.codec.kept(known)) is None:
                    return self._writer.put_off("it begins again from the shared parameters just now")
                whole = (version, known | coded[0], {**arrays, **coded[1]})
                self._writer.start(version, lambda: self.folder.save(*whole))
            except BaseException:
                self._writer.cancel()  # else a waiting `save` would never return
                raise

        try:
            known = {"format": FORMAT, "loop": state, **self.facts()}
            self._saved_version, self._saved_at = version, self._node.clock.monotonic()
            taken = self._node.in_codec(code)
        except BaseException:  # Ctrl-C, perhaps
            self._writer.cancel()  # else `close` would never return
            raise
        if not taken:
            self._writer.put_off("the codec thread has too much to do")
        elif wait:
            self._writer.wait()

    def facts(self) -> Facts:
        """Return the state of the exchange, without the codec's."""
        node, peer, offers = self._node, self._node.peer, self._node.offers
        offers.withdrawn(node.inbox.take_withdrawn())
        heard = peer.heard
        if not peer.overtaken:  # nothing of former processes is pending here: the next one need not drop it again
            offers.skip_to(heard + 1)
        timetable = [] if peer.timetable is None else [list(one) for one in peer.timetable.since(offers.version)]
        known = {
            "peer": peer.peer,
            "name": peer.name,
            "run": peer.run,
            "version": offers.version,
            "incarnation": peer.incarnation,
            "term": peer.term,
            "addresses": list(peer.search.addresses),
            "resets": node.restarts.resets,
            "settings": self._settings.to_dict(),
            "model": spec_to_plain(node.codec.joined_coder.model),
            "schedules": timetable,
        }
        return {"node": known, "offers": offers.to_plain(), "units": node.units.to_plain()}

    def close(self) -> None:
        """Wait for the write in progress, however long it takes, and unlock the folder, which may then be another's."""
        self._writer.wait()
        self.folder.close()

    # ------------------------------------------------------------------ going on (training thread)

    def take(self) -> tuple[Facts, Mapping[str, Array]] | None:
        saved, self._taken = self._taken, None
        if saved is None:
            return None
        self._saved_version = saved.version
        return saved.facts["loop"], saved.arrays

    def begin(self, model: ModelSpec) -> None:
        """Restore the codec of a node that joins with this model. Raises ModelMismatch."""
        if self.resuming is not None:
            self.resuming.check_model(model, self.folder.folder)
            self._node.codec.restore(self.resuming.facts, self.resuming.arrays)
            # a hub that has already welcomed this node said then what is lost, when there was no codec to record it
            for sequence in self.resuming.unacked - self._node.peer.in_flight:
                self._node.codec.joined_coder.withdraw(sequence)

    def may_go_on(self) -> bool:
        """Return whether the node may go on from its checkpoint: in strict mode all wait for each other."""
        return self._node.peer.state is PeerState.LIVE or self._settings.mode != "strict"

    def go_on(self) -> None:
        """Restore the checkpoint: that of the version to which all nodes have gone back, if they have."""
        node, saved, rewound = self._node, self.resuming, self._node.peer.rewound
        assert saved is not None
        if rewound >= 0 and rewound != saved.version:
            earlier = read_saved(self.folder, rewound)
            assert earlier is not None, "a version that the folder's owner has named is in the folder"
            saved = earlier
        self.resuming = None
        node.offers.restore(saved.facts["offers"])
        node.units.restore(saved.facts["units"], exactly=rewound >= 0)
        node.offers.withdrawn(set(node.offers.in_flight()) - saved.unacked)  # they were just being withdrawn
        if rewound >= 0:
            self.folder.forget_after(rewound)
            for _ in node.inbox.take_withdrawn():  # as the hub was before it went back
                pass
            node.in_codec(lambda: node.codec.send_again(saved.facts, saved.arrays))
        self._taken = saved
        where = "where all have gone back to" if rewound >= 0 else f"with {len(saved.unacked)} deltas in flight"
        logger.info("%s goes on from version %d of %s, %s", node.peer.name, saved.version, saved.run, where)

    def stepped(self) -> None:
        """Record a step (training thread).

        A node that has trained alone for as many steps as its offers of all fragments stand for keeps all that is
        pending: what a former process has offered of it is less than what would be lost.
        """
        peer = self._node.peer
        if peer.state is PeerState.CONNECTING and peer.timetable is not None:
            settings = peer.timetable.at(self._node.offers.version)
            self._steps_alone += 1
            if self._steps_alone == settings.every * (1 if settings.carries_all else settings.fragments):
                peer.next_sequence = -1
