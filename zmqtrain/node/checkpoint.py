"""Say what the checkpoints of a node hold of its exchange, and be where one of them was.

Rule 1: what the training thread knows is copied there; what the codec has to know besides it adds in its own turn.
Rule 2: a node that goes on says so before it says anything else: as which node, of which run, with what on its way.
Rule 3: where all go back to one version, so does the node, and publishes what was on its way there to the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from zmqtrain.checkpoint.folder import CheckpointFolder, Every, every_from_text
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import ModelSpec, spec_to_plain
from zmqtrain.node.codec_jobs import CodecJobs
from zmqtrain.node.inbox import Inbox
from zmqtrain.node.keeper import NodeKeeper, SavedNode, read_saved
from zmqtrain.node.offers import Offers
from zmqtrain.node.restarts import Restarts
from zmqtrain.node.units import UnitQueue
from zmqtrain.protocol.peer import Peer, PeerState

logger = logging.getLogger(__name__)


class NodeCheckpoint:
    """What one node keeps of its exchange, and goes on from.

    folder: where.  every: how often.  resuming: what the node goes on from, until it does; None for nothing.
    submit: has the codec thread do something.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        every: str,
        resuming: SavedNode | None,
        peer: Peer,
        offers: Offers,
        units: UnitQueue,
        inbox: Inbox,
        restarts: Restarts,
        jobs: CodecJobs,
        submit: Callable[[Callable[[], None]], bool],
    ) -> None:
        self.resuming = resuming
        self._steps_alone = 0
        self._peer, self._offers, self._units, self._inbox = peer, offers, units, inbox
        self._restarts, self._jobs, self._submit = restarts, jobs, submit
        jobs.keeps_sent = True

        def how_often() -> Every:
            return every_from_text(every, self._settings.mode == "strict")

        self.keeper = NodeKeeper(folder, how_often, lambda: offers.version, self.facts, jobs.kept, submit)
        """Where the training thread saves."""
        if resuming is not None:
            peer.term = int(resuming.facts["node"]["term"])
            for address in resuming.addresses:
                peer.know(address)
            peer.resume(
                resuming.run, resuming.version, resuming.settings, resuming.model, sorted(_unacked(resuming)),
                resuming.versions, int(resuming.facts["offers"]["sequence"]), resuming.schedules,
            )  # fmt: skip

    @property
    def _settings(self) -> RunSettings:
        assert self._peer.settings is not None, "what is saved or gone on from has been welcomed"
        return self._peer.settings

    # ------------------------------------------------------------------ saving

    def facts(self) -> dict[str, Any]:
        """Return what the exchange has to know (training thread)."""
        peer, version = self._peer, self._offers.version
        self._offers.hear(self._inbox.take_withdrawn())
        heard = peer.heard
        if not peer.overtaken:  # nothing of former lives is pending here: the next one need not drop it again
            self._offers.skip_to(heard + 1)
        timetable = [] if peer.timetable is None else [list(one) for one in peer.timetable.since(version)]
        node = {
            "peer": peer.peer,
            "name": peer.name,
            "run": peer.run,
            "version": version,
            "incarnation": peer.incarnation,
            "term": peer.term,
            "addresses": list(peer.addresses),
            "resets": self._restarts.resets,
            "settings": self._settings.to_dict(),
            "model": spec_to_plain(self._jobs.joined_coder.model),
            "schedules": timetable,
        }
        return {"node": node, "offers": self._offers.to_plain(), "units": self._units.to_plain()}

    # ------------------------------------------------------------------ going on

    def begin(self, model: ModelSpec) -> None:
        """The node joins with this model: have its codec be where that of the checkpoint was. Raises ModelMismatch."""
        if self.resuming is not None:
            self.resuming.check_model(model, self.keeper.folder.folder)
            self._jobs.restore(self.resuming)
            # a hub that welcomed this node before now said then what is lost, and there was no codec to hear of it
            for sequence in _unacked(self.resuming) - self._peer.in_flight:
                self._jobs.joined_coder.withdraw(sequence)

    def may_go_on(self) -> bool:
        """Return whether the node may go on from its checkpoint: in strict mode all wait for each other."""
        return self._peer.state is PeerState.LIVE or self._settings.mode != "strict"

    def go_on(self) -> None:
        """Be where the checkpoint was, that of the version to which all have gone back, if they have."""
        saved, folder, rewound = self.resuming, self.keeper.folder, self._peer.rewound
        assert saved is not None
        if rewound >= 0 and rewound != saved.version:
            earlier = read_saved(folder, rewound)
            assert earlier is not None, "a version that was named is in the folder"
            saved = earlier
        self.resuming = None
        self._offers.restore(saved.facts["offers"])
        self._units.restore(saved.facts["units"], exactly=rewound >= 0)
        unacked = _unacked(saved)
        for sequence in set(self._offers.in_flight()) - unacked:
            self._offers.withdrawn(sequence)  # it was just being withdrawn
        if rewound >= 0:
            folder.forget_after(rewound)
            for _ in self._inbox.take_withdrawn():  # as the hub was before it went back
                pass
            self._submit(lambda: self._jobs.send_again(saved))
        self.keeper.saved = saved
        where = "where all have gone back to" if rewound >= 0 else f"with {len(unacked)} deltas on their way"
        logger.info("%s goes on from version %d of %s, %s", self._peer.name, saved.version, saved.run, where)

    def stepped(self) -> None:
        """A step was made (training thread).

        Who trains alone for as long as its offers of all fragments stand for keeps all that is pending: what a former
        life has offered of it is less than what would be lost.
        """
        if self._peer.state is PeerState.CONNECTING and self._peer.timetable is not None:
            settings = self._peer.timetable.at(self._offers.version)
            self._steps_alone += 1
            turns = 1 if settings.carries_all else settings.fragments
            if self._steps_alone == settings.every * turns:
                self._peer.keep_pending()


def _unacked(saved: SavedNode) -> set[int]:
    """The offers that were on their way, coded."""
    return {int(sequence) for sequence, *_ in saved.facts["coder"]["unacked"]}
