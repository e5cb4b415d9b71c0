"""Say how a node comes to the parameters that it begins with: it founds the run, adopts another's, or goes on.

Rule 1: who is asked to found the run answers with what it joined with, at once; one of a population, or of several
masters, with what it holds when its training thread gives it (`lend`).
Rule 2: who is lent the mean that the run may begin with has not joined: it says how that scores, and waits on.
Rule 3: who goes on from a checkpoint waits for nobody, but in strict mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zmqtrain.averaging.coder import DeltaCoder
from zmqtrain.core.types import Update, Version
from zmqtrain.node.checkpoint import NodeCheckpoint
from zmqtrain.node.codec_jobs import CodecJobs
from zmqtrain.node.inbox import Inbox
from zmqtrain.node.offers import Offers
from zmqtrain.protocol.peer import Peer, PeerState

Founding = tuple[Sequence[Any], Sequence[Any]]


class Joining:
    """How one node joins, in its training thread. checkpoint: what it saves and goes on from, None for nothing.

    wanted: whether the others wait for this node's parameters, to be lent.
    """

    def __init__(self, peer: Peer, offers: Offers, inbox: Inbox, jobs: CodecJobs) -> None:
        self.checkpoint: NodeCheckpoint | None = None
        self.wanted = False
        self._peer, self._offers, self._inbox, self._jobs = peer, offers, inbox, jobs
        self._founding: Founding = ((), ())

    @property
    def goes_on_from(self) -> Version:
        """The version of the checkpoint that the node is yet to go on from; -1: of none."""
        resuming = None if self.checkpoint is None else self.checkpoint.resuming
        return -1 if resuming is None else resuming.version

    def begin(self, coder: DeltaCoder, leaves: Sequence[Any], moments: Sequence[Any]) -> None:
        """The node joins, with these parameters and this state of its optimizer. Raises ModelMismatch."""
        self._jobs.coder, self._founding = coder, (leaves, moments)
        if self.checkpoint is not None:
            self.checkpoint.begin(coder.model)

    def is_over(self, live: bool) -> bool:
        """Return whether the hub's answer is here; of a node that goes on from a checkpoint, whether it may.

        live: whether the node takes part in the run now.
        """
        if self.checkpoint is not None and self.checkpoint.resuming is not None:
            return self.checkpoint.may_go_on()
        apart = self._peer.state is PeerState.APART
        return apart or self.lent is not None or (live and (len(self._inbox) > 0 or self._peer.confirmed))

    @property
    def lent(self) -> Update | None:
        """The mean that the run may begin with, if that is here to be scored."""
        first, settings = self._inbox.peek(), self._peer.settings
        is_mean = settings is not None and settings.initial == "mean" and first is not None and first.version < 0
        return first if is_mean else None

    def end(self) -> bool:
        """Begin where the node begins; return whether that is with the update that is here."""
        self._founding = ((), ())
        if self.checkpoint is not None and self.checkpoint.resuming is not None:
            self.checkpoint.go_on()
            return False
        if self._peer.state is PeerState.APART:
            return False
        first = self._inbox.peek()
        if first is None or first.anchor is None:  # the founder holds version 0; an aggregate that is here is the next
            self._offers.version = 0
            return False
        return True

    def answer(self, later: bool) -> Founding | None:
        """The hub asks for this node's parameters: return them, None if they will be lent (network thread).

        later: whether they will be in any case.
        """
        if self._peer.state is PeerState.APART or later:  # what it holds may change with every step
            self.wanted = True
            return None
        return self._founding
