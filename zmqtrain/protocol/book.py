"""Hold what a hub knows of its run and of its peers, and write down what must outlive it.

Rule 1: no decision is made here: `joining`, `leaving`, `publishing` and the `Hub` read it and write in it.
Rule 2: `state` is what a checkpoint holds besides the arrays, `books` what of that a standby hears between releases.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from math import isfinite, nan
from statistics import median
from typing import Any

from zmqtrain.core.errors import CheckpointError, FramingError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import ModelSpec, PeerId, Version, count_values
from zmqtrain.protocol.dealing import Dealing
from zmqtrain.protocol.fencing import MAX_INCARNATION, Fence
from zmqtrain.protocol.founding import Founding, Preemption
from zmqtrain.protocol.fragment_rounds import FragmentRounds
from zmqtrain.protocol.groups import Groups
from zmqtrain.protocol.masters import Masters
from zmqtrain.protocol.members import Member, MemberState, crew, training
from zmqtrain.protocol.messages import Publish, Roster, Scalar, model_from_wire
from zmqtrain.protocol.quarantine import Quarantines
from zmqtrain.protocol.records import Records
from zmqtrain.protocol.rounds import ReleaseRule
from zmqtrain.protocol.schedules import Timetable, schedule_from_plain
from zmqtrain.protocol.standby import Tenure
from zmqtrain.protocol.work import WorkLedger

WORSE = 10.0
"""So many times the best loss of an evaluation: from there on a later one is said to have become worse."""
MOST_SECONDS = 1e10
MOST_VERSIONS = 1 << 62
"""A checkpoint that says more versions, or samples, than this was not written by a hub."""


class HubBook:
    """A hub's run and its peers.

    version: of the last aggregate, -1 until somebody has founded the run.  exchange: how the nodes exchange gradients
    in every step, past this hub; "": they publish to it.  rule: when a round is due, if they do.
    latest_incarnation: the highest that a peer may say.
    complete: as many nodes as the run begins with have come; until then nothing is released.  began_at: when this hub
    first released something; None: it has not.  stopped_at: when an operator ended the run; None: nobody has.
    news: something has happened, since the last look, from which another plan may follow.  plan: what the last one
    follows from, in words.
    The arguments are as in `Hub`.
    """

    def __init__(
        self,
        settings: RunSettings,
        rule: ReleaseRule,
        run: str,
        now: float = 0.0,
        preemption: Preemption | None = None,
        shard: int = 0,
        first: str = "",
    ) -> None:
        self.settings, self.rule, self.run, self.shard, self.first = settings, rule, run, shard, first
        self.exchange = ""
        self.version = -1
        self.term, self.tenure = 0, Tenure()
        self.complete = not (shard and settings.mode == "strict")
        self.samples = self.contributions = self.refused = 0
        self.scores: dict[str, float] = {}
        self.score_version = -1
        self.best: tuple[int, float] | None = None
        """The evaluation with the lowest loss: its version and that loss."""
        self.evaluated_on = self.data = ""
        """Digests of the held-out data of the run's first evaluation, and of all data of the first node with any."""
        self.timetable = Timetable(settings)
        self.masters = Masters(settings.masters)
        self.members: dict[PeerId, Member] = {}
        self.came = 0  # how many members there have been, each counted on its first connection
        self.latest_incarnation = MAX_INCARNATION - 1
        self.rounds: FragmentRounds[Publish] = FragmentRounds(rule, together=settings.carries_all)
        self.dealing = Dealing(settings, self.members, shard)
        self.records = Records()
        self.fence = Fence()
        self.quarantines = Quarantines()
        self.groups = Groups()
        self.news = False
        self.widened: tuple[int, float] | None = None
        """When the norm gate was last let be wider: the version, and the loss then; None: never."""
        self.rests_until = 0
        """The version before which nothing is taken back again."""
        self.taken_back: tuple[Version, Version] = (0, 0)
        """The version to which the run went back last, and the one by which it did: what was between is gone."""
        self.plan = ""
        self.began_at: float | None = None
        self.stopped_at: float | None = None
        self.founding = Founding(settings, self.members, self.records.landed, preemption, shard)
        self._began = self._ticked = now
        self._seconds_before = 0.0  # that the run had been served for by the hubs before this one

    # ------------------------------------------------------------------ who is here

    @property
    def model(self) -> ModelSpec:
        """The run's model; before the run has one, that of the node that is asked for its parameters."""
        return self.founding.model

    @property
    def fragments(self) -> int:
        """Into how many fragments the run's model is cut."""
        return self.settings.fragments_of(count_values(self.model))

    @property
    def ledger(self) -> WorkLedger:
        """The data units: which are dealt, which are done."""
        return self.dealing.ledger

    @property
    def live(self) -> frozenset[PeerId]:
        """The nodes that train now (an idle node has no data left)."""
        return frozenset(
            peer
            for peer, member in self.members.items()
            if member.state is MemberState.LIVE and not (member.idle or member.drained or member.quarantined)
        )

    @property
    def awaited(self) -> frozenset[PeerId]:
        """The nodes from which a round may await a contribution; where nodes are in lockstep, all that end together."""
        if self.exchange:
            return frozenset(peer for peer in training(self.members) if not self.members[peer].drained)
        return frozenset(peer for peer in self.live if self.members[peer].counted)

    @property
    def counts_newcomers(self) -> bool:
        """Whether a node that comes now is awaited and counted before its first delta: before this hub has released
        anything, and where a round takes one delta of each."""
        return self.rounds.rule.one_each or self.began_at is None

    def backs(self, member: Member) -> bool:
        """Return whether work of this node is in the run: deltas have come, or it exchanges past this hub."""
        return bool(self.exchange or member.contributions)

    def is_taken_back(self, version: Version) -> bool:
        """Return whether what was published at this version is taken back, and what was computed on it with that."""
        back_to, by = self.taken_back
        return back_to < version < by

    def voter_of(self, peer: PeerId) -> str:
        """Return whose word that of a peer is: that of its key, with which others may have come in; else its own."""
        member = self.members.get(peer)
        return member.voter if member is not None and member.voter else peer

    def loss(self, but: Collection[PeerId]) -> tuple[int, float]:
        """Return how the shared parameters score, and at which version that was: on held-out data; where nobody says
        that, the median of what the nodes but these report of their training, now. NaN: not known."""
        if isfinite(loss := self.scores.get("loss", nan)):
            return self.score_version, loss
        others = [one.report.loss for one in self.members.values() if one.report is not None and one.peer not in but]
        known = [loss for loss in others if isfinite(loss)]
        return self.version, median(known) if known else nan

    @property
    def nodes(self) -> int:
        """How many nodes are here, in whatever state."""
        return sum(member.is_node for member in self.members.values())

    @property
    def evaluator(self) -> PeerId | None:
        """The node that scores the shared model: the one that has been live longest, among those whose held-out data
        are those that the run is evaluated on."""
        live = (member for member in self.members.values() if member.state is MemberState.LIVE)
        return next((one.peer for one in live if not self.evaluated_on or one.held_out == self.evaluated_on), None)

    @property
    def standby(self) -> Member | None:
        """The standby that follows this hub."""
        return next((one for one in self.members.values() if one.state is MemberState.STANDBY), None)

    @property
    def may_announce(self) -> bool:
        """Whether this hub, without its standby, may let nodes hear of what is new: see `standby.Tenure`."""
        return self.tenure.holds

    @property
    def worse(self) -> tuple[int, float] | None:
        """The best evaluation, if the last one has ten times its loss or more; else None."""
        loss = self.scores.get("loss", nan)
        return self.best if self.best is not None and self.best[1] > 0 and loss >= WORSE * self.best[1] else None

    def evaluated(self, version: int, scores: Mapping[str, float]) -> None:
        """Record an evaluation of the shared parameters."""
        self.scores, self.score_version = dict(scores), version
        loss = self.scores.get("loss", nan)
        if isfinite(loss) and (self.best is None or loss < self.best[1]):
            self.best = version, loss

    def compare_start(self, member: Member) -> None:
        """Look for another node that made the same first step as this one, on a batch that was not dealt to both: then
        both train on the same data, as far as is known."""
        mine = member.report
        for other in self.members.values():
            theirs = other.report
            if mine is None or other is member or not other.is_node or theirs is None:
                continue
            if theirs.first_step == mine.first_step and (mine.first_unit < 0 or mine.first_unit != theirs.first_unit):
                member.same_as, other.same_as = other.peer, member.peer
                return

    def same_start(self, member: Member) -> Member | None:
        """Return a node that is here and made the same first step; see `compare_start`."""
        return None if member.same_as is None else self.members.get(member.same_as)

    def takes_no_units(self, member: Member) -> bool:
        """Return whether a node trains and takes no data units, in a run that ends when so many are done."""
        report = member.report
        counted = self.ledger.total > 0 and not self.shard
        return counted and report is not None and report.step > 0 and report.first_unit < 0

    def _describe(self, member: Member) -> dict[str, Scalar]:
        entry = member.describe()
        if (other := self.same_start(member)) is not None:
            entry["same_batches_as"] = other.called
        if self.takes_no_units(member):
            entry["takes_no_units"] = True
        return entry

    def roster(self, now: float) -> Roster:
        """Describe the run and its members as they stand."""
        settings = self.timetable.at(self.version)
        worse = self.worse
        return Roster(
            version=self.version,
            members=tuple(self._describe(member) for member in self.members.values() if member.is_node),
            evaluator="" if (evaluator := self.evaluator) is None else self.members[evaluator].called,
            samples=self.samples,
            contributions=self.contributions,
            units_done=self.ledger.done_count,
            units_total=self.ledger.total,
            seconds=self._seconds_before + now - self._began,
            scores=dict(self.scores),
            score_version=self.score_version,
            every=settings.every,
            delay=settings.delay,
            masters=self.masters.addresses if not self.shard else (),
            exchange=self.exchange,
            hub={
                "term": self.term,
                "standby": self.tenure.standby,
                "without": self.tenure.without,
                "codec": settings.codec,
                "broadcast_codec": settings.broadcast_codec,
                "outer": settings.outer,
                "plan": self.plan,
                **({} if self.stopped_at is None else {"ending": True}),
                **self.fence.dropped,
                **({} if worse is None else {"best_version": worse[0], "best_loss": worse[1]}),
            },
        )

    # ------------------------------------------------------------------ what outlives it

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold besides the arrays."""
        return {
            "run": self.run,
            "shard": self.shard,
            "founding": self.founding.number,
            "version": self.version,
            "settings": self.settings.to_dict(),
            "model": [[leaf.path, list(leaf.shape), leaf.dtype] for leaf in self.model],
            "samples": self.samples,
            "contributions": self.contributions,
            "seconds": round(self._seconds_before + self._ticked - self._began, 3),
            "records": self.records.state(),
            "term": self.term,
            "tenure": self.tenure.state(),
            **self._between_releases(),
        }

    def _between_releases(self) -> dict[str, Any]:
        """What of the state changes besides the releases, as far as a standby must know it."""
        return {
            "ledger": self.ledger.state(),
            "scores": self.scores,
            "score_version": self.score_version,
            "best": self.best,
            "data": [self.data, self.evaluated_on],
            "schedules": [list(one) for one in self.timetable.since(self.version)],
            "quarantines": self.quarantines.state(),
        }

    def books(self, now: float) -> str:
        """Return what a standby must hear of besides releases, and who is its crew, as JSON; it goes by them once it
        has read them."""
        here = {peer: self.records.incarnation(peer) for peer in sorted(crew(self.members))}
        told = {
            "crew": here,
            "owners": {peer: owner for peer in here if (owner := self.records.owner(peer))},
            "in_step": self.tenure.follows,
            "number": self.tenure.tell(here, now),
            "tenure_number": self.tenure.number,
        }
        return json.dumps({**self._between_releases(), **told}, separators=(",", ":"))

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` wrote (settings are the caller's to compare). Raises CheckpointError."""
        try:
            self.run, self.version = str(state["run"]), int(state["version"])
            if not (-1 <= self.version < MOST_VERSIONS and 0 <= int(state["samples"]) < MOST_VERSIONS):
                raise ValueError(f"version {self.version} after {state['samples']} samples cannot be")
            self.founding.number = int(state.get("founding", 0))
            model = model_from_wire(
                tuple((str(path), tuple(int(n) for n in shape), str(dtype)) for path, shape, dtype in state["model"])
            )
            self.dealing.restore(state["ledger"])
            self.samples, self.contributions = int(state["samples"]), int(state["contributions"])
            if isfinite(seconds := float(state.get("seconds", 0.0))):
                self._seconds_before = min(max(0.0, seconds), MOST_SECONDS)
            self.scores = {str(name): float(score) for name, score in state["scores"].items()}
            self.score_version = int(state["score_version"])
            best = state.get("best")
            self.best = None if best is None else (int(best[0]), float(best[1]))
            self.data, self.evaluated_on = map(str, state.get("data", ("", "")))
            self.records.restore(state["records"], self.latest_incarnation)
            for schedule in state.get("schedules", ()):
                self.timetable.add(schedule_from_plain(schedule))
            self.quarantines.restore(state.get("quarantines", {}), self._began)
            self.term = int(state.get("term", 0))
            if "tenure" in state:
                self.tenure.restore(state["tenure"])
        except (AttributeError, FramingError, LookupError, ArithmeticError, TypeError, ValueError) as error:
            raise CheckpointError(f"the state of the hub cannot be read: {error!r}") from error
        if self.version >= 0:
            self.founding.resume(model)
        self.complete |= self.version > 0

    def replay(self, version: int, landed: tuple[tuple[str, int], ...], samples: int) -> None:
        """Take note of a release that is in the journal but not in the checkpoint."""
        self.version, self.complete = version, True
        for peer, sequence in landed:
            self.records.land(PeerId(peer), sequence, version)
        self.samples += samples
        self.contributions += len(landed)

    def clear_rounds(self) -> None:
        """Drop what waits for a round: of a run that begins anew, or of nodes that exchange otherwise now."""
        self.rounds = FragmentRounds(self.rounds.rule, together=self.settings.carries_all)
