"""Initialization of a run: whose parameters it begins with, and how every node gets them (pure).

    founder  the first waiting node is asked for its parameters, and all others take them
    best     start_nodes nodes have trained apart; the best-scored is asked, and its optimizer state goes along unless
             the others begin with a fresh one
    mean     all waiting nodes are asked; the run begins with their mean if they are related and do not score it worse
             than their own
    own      a population: each node trains its own parameters and reports their score; a lagging node is lent the best
             one's, until all descend from one node. Those become version 0, and each node's difference from them is
             pending there. With `elastic` under 1 there is no population: the first node gives the parameters, and the
             others keep their own, their difference from them pending.

With several brokers the first one decides (founder) and numbers its questions; the node that is asked brings the other
brokers their shards under that number before it answers. Another broker asks only a node with a higher number than that
of the parameters it has (if a founder fails half-way, the next one starts over), or with that very number if the node
has reconnected.

A pipeline is asked as one: each of its PCs for the parts that it holds, once all of them wait; their parameters are one
model. With pipelines only the founder's way is allowed.

Rule 1: the machine never waits for a node that has left: the next node in order takes its place.
Rule 2: one node is asked at a time, except for the mean.  Rule 3: the arrays are the aggregator's business.
Rule 4 (vote on the mean): each node with a finite score of its own parameters is sent the mean and reports its score. A
node that cannot compare, leaves, or does not answer in time does not count. The mean is refused if more than half of
those who answered find it worse than their own (`is_barrier`).
Sources: population-based training, Jaderberg et al. 2017 (exploit); elastic averaging, Zhang et al. 2015; loss
barriers, Frankle et al. 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, isnan, nan
from typing import Protocol

from zmqtrain.core.settings import AUTO_SHARDS, RunSettings
from zmqtrain.core.types import (
    BARRIER_SHARE,
    ModelSpec,
    PeerId,
    Score,
    Version,
    count_values,
    describe_mismatch,
    fault_of_pieces,
    is_barrier,
    leaves_of_parts,
    parts_of,
)
from zmqtrain.protocol.effects import Average, Disconnect, Found, HubEffect, Lend, Propose, Rewind, SendTo, Serve
from zmqtrain.protocol.members import Member, Members, MemberState, Records
from zmqtrain.protocol.messages import Fetch, Refused, Snapshot, model_from_wire

VOTE_SECONDS = 60.0
"""Time to score the mean, besides the time to send it to each node over the hub's one port."""
SLOW_BYTES_PER_SECOND = 10e6
"""Rate that this port is assumed to have at least."""


class Vote:
    """A vote on the mean. own: score of its own parameters, for each node with parameters in the mean."""

    def __init__(self, own: Mapping[PeerId, Score], model: ModelSpec) -> None:
        self._own = dict(own)
        self._said: dict[PeerId, Score] = {}
        self._seconds = VOTE_SECONDS + len(self.voters) * 4 * count_values(model) / SLOW_BYTES_PER_SECOND
        self._until: float | None = None

    @property
    def is_of_nobody(self) -> bool:
        """Whether all nodes with parameters in the mean have left."""
        return not self._own

    @property
    def voters(self) -> tuple[PeerId, ...]:
        """The nodes that can compare: their own parameters have a finite score."""
        return tuple(sorted(peer for peer, score in self._own.items() if isfinite(score)))

    def say(self, peer: PeerId, score: Score) -> None:
        """Record the score of the mean at a node; NaN: it cannot tell. Other nodes are ignored."""
        if peer in self._own:
            self._said[peer] = score

    def leave(self, peer: PeerId) -> None:
        """Remove a node that has left: it is not awaited, and its score does not count."""
        self._own.pop(peer, None)

    def is_over(self, now: float, late: float = 0.0) -> bool:
        """Return whether all have answered, or their time is over; it begins with the first call.

        late: seconds of it in which the hub itself did not listen, which do not count.
        """
        self._until = now + self._seconds if self._until is None else self._until + late
        return now >= self._until or all(peer in self._said for peer in self.voters)

    def objection(self) -> str:
        """Return, for people, why the run does not begin with the mean, and what to do; "" if it does."""
        said = {peer: self._said[peer] for peer in self.voters if not isnan(self._said.get(peer, nan))}
        worse = [peer for peer, mean in said.items() if is_barrier(self._own[peer], mean)]
        if 2 * len(worse) <= len(said):
            return ""
        worst = max(worse, key=lambda peer: said[peer] - self._own[peer])
        return (
            f"the mean of the initial parameters is worse than they are: {len(worse)} of the {len(said)} nodes that "
            f"scored it find it worse than their own by more than {BARRIER_SHARE:.0%} (at {worst.partition('#')[0]} it "
            f"scores {said[worst]:.4g}, and its own {self._own[worst]:.4g}). They are related, but lie in different "
            "valleys of the loss (a barrier at the midpoint, Frankle et al. 2020). Begin with --initial best or "
            "--initial founder, or give all nodes the same checkpoint"
        )


def sends_optimizer_state(settings: RunSettings) -> bool:
    """Return whether optimizer state travels with the parameters that a run is initialized with."""
    return settings.trains_apart and not settings.fresh_moments


class Preemption(Protocol):
    """Decides which node of a population has lagged for so long that it adopts another's parameters."""

    def report(self, peer: PeerId, score: Score) -> PeerId | None:
        """Take a peer's score (NaN: not known); return the peer whose parameters it is to adopt now, or None."""

    def forget(self, peer: PeerId) -> None:
        """Start over with this node: it has left, or has new parameters."""


class Initialization:
    """The initialization of one run.

    members: shared with the hub; a member with another model is sent away here.  preemption: None preempts nobody.
    shard: index among several brokers.  number: of the last question, at the first of several brokers; at another, of
    the parameters that it has.  founded: the run has parameters.  started: nodes have been served with them.
    """

    def __init__(
        self,
        settings: RunSettings,
        members: Members,
        records: Records,
        preemption: Preemption | None = None,
        shard: int = 0,
    ) -> None:
        self.settings, self._members, self._records, self._preemption = settings, members, records, preemption
        self._in = members.in_state
        self._shard, self._start_nodes = shard, 1 if shard else settings.start_nodes
        self.number = 0
        self.model: ModelSpec = ()
        self.founded = self.started = False
        self._population = settings.initial == "own" and settings.elastic == 1
        self._enough = False  # start_nodes nodes have been here: from then on fewer will do
        self._gathered: dict[PeerId, Snapshot] = {}
        self._averaging: tuple[tuple[PeerId, Snapshot], ...] = ()  # until their mean is accepted or refused
        self._vote: Vote | None = None
        self._borrowers: tuple[PeerId, ...] = ()  # of the lending member; nobody: its parameters begin the run
        self._laggards: set[PeerId] = set()
        self._lent_to: dict[PeerId, set[PeerId]] = {}  # by lender: its borrowers
        self._declined_by: dict[PeerId, set[PeerId]] = {}  # and those of them that keep their own
        self._disbelieved: set[PeerId] = set()  # lenders whose parameters most borrowers found worse than their own
        self._kept: tuple[Version, ...] | None = None  # in strict mode after a restart: where the hub could go back to
        self._at: Version | None = None  # where it has gone back to
        self._rewinding = False

    def resume(self, model: ModelSpec) -> None:
        """The run was initialized before this hub began."""
        self.model, self.founded, self.started = model, True, True

    def begin(self, model: ModelSpec) -> None:
        """The run begins with parameters that are here before any node is."""
        self.model, self.founded = model, True

    def await_all(self, versions: tuple[Version, ...]) -> None:
        """Serve nobody before start_nodes wait, and then from the newest of these versions that all of them kept."""
        self.started, self._kept = False, versions

    def rewound(self, version: Version) -> list[HubEffect]:
        self.started, self._rewinding, self._at = False, False, version
        self._kept = tuple(one for one in self._kept or () if one <= version)
        return self.serve_waiting()

    # ------------------------------------------------------------------ messages

    def fetched(self, member: Member, fetch: Fetch) -> list[HubEffect]:
        """A member that is not live asks for parameters, or reports the score of its own or of the mean."""
        if self._is_vote(member, fetch):
            return []
        member.score, member.scored = fetch.score, True
        if member.state in (MemberState.APART, MemberState.LENDING):
            if fetch.model and member.lineage != member.peer:
                self._declined(member)
            return self._compare(member)
        member.known_version = fetch.version
        member.model = model_from_wire(fetch.model)
        if not member.model:
            return self.send_away(member, "model", "a node that joins must describe its model; this one described none")
        share = member.holds
        if share is not None and set(parts_of(member.model)) != set(range(share.first, share.end)):
            return self.send_away(member, "model", "the leaves that it describes are not those of the parts it holds")
        if self._shard and self._is_asked(fetch.founding):
            return self._start_over(member, fetch.founding)
        if self.founded:
            member.move(MemberState.WAITING)
            return self.serve_waiting()
        if self._population:
            member.move(MemberState.APART)
            member.lineage = member.peer
            away = self._send_others_away(MemberState.APART)
            return away + (self._compare(member) if member.peer in self._members else [])
        member.move(MemberState.WAITING)
        return self.go_on()

    def whole(self, member: Member, snapshot: Snapshot) -> list[HubEffect]:
        """The parameters of a member that was asked for them are here, and sound."""
        if member.state is MemberState.LENDING:
            return self._lent(member, snapshot)
        member.move(MemberState.WAITING)
        if self.settings.initial == "mean":
            self._gathered[member.peer] = snapshot
            return self.go_on()
        if member.holds is not None:
            return self._gave_parts(member, snapshot)
        member.known_version = 0
        return self._found(member.peer, snapshot)

    def _gave_parts(self, member: Member, snapshot: Snapshot) -> list[HubEffect]:
        """The parameters of one PC of a pipeline are here: the run begins with those of all of its PCs."""
        if self.founded:  # by another pipeline, as a PC of this one was lost
            return self.serve_waiting()
        self._gathered[member.peer] = snapshot
        pipeline = self._members.pipeline(member)
        if not (self._members.is_whole(member) and all(one.peer in self._gathered for one in pipeline)):
            return self.go_on()
        parts = tuple((one.peer, self._gathered[one.peer]) for one in pipeline)
        model = tuple(leaf for one in pipeline for leaf in one.model)
        if why := fault_of_pieces(model):
            return [effect for one in pipeline for effect in self.send_away(one, "model", why)] + self.go_on()
        self._gathered.clear()
        self.model = model
        for one in pipeline:
            one.known_version = 0
        return self._found(*parts[0], others=parts[1:])

    def averaged(self) -> list[HubEffect]:
        """The gathered parameters are related: the run begins with their mean, unless the vote refuses it."""
        gave = dict(self._averaging)
        vote = Vote({one.peer: one.score for one in self._in(MemberState.WAITING) if one.peer in gave}, self.model)
        if len(gave) > 1 and (vote.voters or vote.is_of_nobody):
            self._vote = vote
            return [Propose(vote.voters)]
        return self._begin_with_mean()

    def tick(self, now: float, late: float = 0.0) -> list[HubEffect]:
        """Let time pass: a vote on the mean may be over. late: seconds in which the hub itself did not listen."""
        vote = self._vote
        if vote is None or not vote.is_over(now, late):
            return []
        self._vote = None
        if vote.is_of_nobody:
            self._averaging = ()
            return [Propose(()), *self.go_on()]
        if why := vote.objection():
            return [Propose(()), *self.unrelated(why)]
        return self._begin_with_mean()

    def unrelated(self, text: str) -> list[HubEffect]:
        """The gathered parameters have no usable mean: refuse the waiting nodes; others may try again."""
        self._averaging = ()
        effects: list[HubEffect] = []
        for member in self._in(MemberState.WAITING):
            effects += self.send_away(member, "initial", text)
        return effects

    def left(self, member: Member) -> list[HubEffect]:
        """A member has gone, or has connected again: nothing more is awaited of it."""
        self._gathered.pop(member.peer, None)
        self._disbelieved.discard(member.peer)
        self._lent_to.pop(member.peer, None)
        self._declined_by.pop(member.peer, None)
        self._forget(member.peer)
        return self.go_on()

    # ------------------------------------------------------------------ whose parameters

    def go_on(self) -> list[HubEffect]:
        """Ask the next node for its parameters, if none is being asked."""
        if self._shard or self.settings.shards == AUTO_SHARDS:  # the first asks, once it is decided how many there are
            return []
        if any(member.holds is not None for member in self._in(MemberState.WAITING)) and not self.founded:
            return self._ask_pipeline()
        if self.founded or self._averaging or self._in(MemberState.FOUNDING, MemberState.LENDING):
            return []
        if self._population:
            return self._go_on_apart()
        if self._gathered:
            self._averaging = tuple(sorted(self._gathered.items()))
            self._gathered.clear()
            return [Average(self._averaging, self.model)]
        waiting = self._in(MemberState.WAITING)
        if self.settings.initial in ("best", "mean"):
            self._enough |= len(waiting) >= self._start_nodes
            if not self._enough:
                return []
        if self.settings.initial == "mean":
            self._enough = False  # a node that fails to be averaged is replaced by another
            effects = self._send_others_away(MemberState.WAITING)
            for member in self._in(MemberState.WAITING):
                effects += self._ask(member, MemberState.FOUNDING)
            return effects
        if self.settings.initial == "best":
            waiting.sort(key=lambda member: member.rank)
        return self._ask(waiting[0], MemberState.FOUNDING) if waiting else []

    def _ask_pipeline(self) -> list[HubEffect]:
        """Ask the PCs of the first pipeline that is whole for what each holds; a PC that has come again, once more."""
        here = [*self._in(MemberState.FOUNDING), *(self._members[peer] for peer in self._gathered)]
        asked = [one for one in here if self._members.is_whole(one)]  # one that has lost a PC holds up nobody
        waiting = [one for one in self._in(MemberState.WAITING) if one.peer not in self._gathered]
        for member in asked or waiting:
            pipeline = self._members.pipeline(member)
            ready = all(one.state in (MemberState.WAITING, MemberState.FOUNDING) for one in pipeline)
            if not (ready and self._members.is_whole(member)):
                continue
            effects: list[HubEffect] = []
            for one in pipeline:
                if one in waiting:
                    effects += self._ask(one, MemberState.FOUNDING)
            self.model = tuple(leaf for one in pipeline for leaf in one.model)
            return effects
        return []

    def _is_vote(self, member: Member, fetch: Fetch) -> bool:
        """Record the score of the mean, if this is one; it may come after the vote is over."""
        voting = self._vote is not None or (self.founded and self.settings.initial == "mean")
        if member.state is not MemberState.WAITING or not voting:
            return False
        if self._vote is not None:
            self._vote.say(member.peer, nan if fetch.model else fetch.score)  # a node that fetches has not got the mean
        return not fetch.model

    def _begin_with_mean(self) -> list[HubEffect]:
        (peer, snapshot), self._averaging = self._averaging[0], ()
        return self._found(peer, snapshot)

    def _go_on_apart(self) -> list[HubEffect]:
        apart = self._in(MemberState.APART)
        self._enough |= len(apart) >= self.settings.start_nodes
        believed = [member for member in apart if member.peer not in self._disbelieved]
        if not believed or not self._enough:
            return []
        best = min(believed, key=lambda member: member.rank)
        unknown = all(member.scored and isnan(member.score) for member in apart)  # nothing to compare by: as `founder`
        if unknown or all(member.lineage == best.lineage for member in believed):
            self._borrowers = ()
            return self._ask(best, MemberState.LENDING)
        others = [m for m in apart if m.peer in self._laggards and m.lineage != best.lineage and m.rank > best.rank]
        if not others:
            return []
        self._borrowers = tuple(sorted(member.peer for member in others))
        return self._ask(best, MemberState.LENDING)

    def _compare(self, reporter: Member) -> list[HubEffect]:
        """A node of the population has reported its score."""
        population = self._in(MemberState.APART, MemberState.LENDING)
        compared = [reporter] if self._enough else population  # the first comparison is of all that are here
        self._enough |= len(population) >= self.settings.start_nodes
        if self._enough and self._preemption is not None:
            for one in compared:
                if one.peer in self._disbelieved:
                    continue
                better = self._members.get(self._preemption.report(one.peer, one.score) or one.peer, one)
                if better.lineage != one.lineage:
                    self._laggards.add(one.peer)
        return self.go_on()

    def _declined(self, member: Member) -> None:
        """A borrower keeps its own parameters: the lent ones score worse on its held-out data.

        If more than half of the borrowers decline, the lender's scores are disbelieved: its parameters are lent to
        nobody, and the population does not wait for it to agree.
        """
        lender, member.lineage = member.lineage, member.peer
        if lender is None or lender not in self._members:
            return
        lent, declined = self._lent_to.get(lender, set()), self._declined_by.setdefault(lender, set())
        declined.add(member.peer)
        if 2 * len(declined) > len(lent):
            self._disbelieved.add(lender)
            if self._preemption is not None:
                self._preemption.forget(lender)

    def _lent(self, lender: Member, snapshot: Snapshot) -> list[HubEffect]:
        borrowers, self._borrowers = self._borrowers, ()
        lender.move(MemberState.APART)
        if not borrowers:
            return self._found(lender.peer, snapshot, lender.lineage)
        taking = [m for m in self._in(MemberState.APART) if m.peer in borrowers and m.lineage != lender.lineage]
        for member in taking:
            self._lent_to.setdefault(lender.peer, set()).add(member.peer)
            member.lineage, member.score, member.scored = lender.lineage, nan, False
            self._forget(member.peer)
        return [Lend(lender.peer, snapshot, tuple(member.peer for member in taking)), *self.go_on()]

    def _ask(self, member: Member, state: MemberState) -> list[HubEffect]:
        member.move(state)
        self.model = member.model
        if self.settings.shards == 1:
            return [SendTo(member.peer, Fetch())]
        self.number += not self._shard
        return [SendTo(member.peer, Fetch(founding=self.number))]

    def _is_asked(self, number: int) -> bool:
        """Whether, at another broker than the first, the node with this number gives the parameters now; it may have
        reconnected in between."""
        again = number == self.number > 0 and not self.founded and not self._in(MemberState.FOUNDING)
        return number > self.number or again

    def _start_over(self, founder: Member, number: int) -> list[HubEffect]:
        """Take the parameters of the node that the first broker has asked now, and drop those of an earlier one, which
        nobody has trained on."""
        effects: list[HubEffect] = []
        for member in self._in(MemberState.WAITING, MemberState.FOUNDING, MemberState.LIVE):
            effects += self.send_away(member, "founding", "another node founds the run, as the first broker says")
        self.founded = self.started = False
        self.number = number
        return effects + self._ask(founder, MemberState.FOUNDING)

    def _found(
        self,
        peer: PeerId,
        snapshot: Snapshot,
        lineage: PeerId | None = None,
        others: tuple[tuple[PeerId, Snapshot], ...] = (),
    ) -> list[HubEffect]:
        self.founded = True
        self._laggards.clear()
        effects: list[HubEffect] = [Found(peer, snapshot, self.model, others)]
        for member in self._in(MemberState.APART):
            member.move(MemberState.WAITING)
            member.newcomer = member.lineage != lineage  # all others go on from their own
        return effects + self.serve_waiting()

    # ------------------------------------------------------------------ parameters for every node

    def serve_waiting(self) -> list[HubEffect]:
        """Send the run's parameters to the waiting nodes, once start_nodes wait."""
        effects = self._send_others_away(MemberState.WAITING, self.model)
        waiting = self._in(MemberState.WAITING)
        nodes = [one for one in waiting if not one.follows]
        if not (self.started or self._population or len(nodes) >= self._start_nodes):
            return effects
        rewound = False
        if self._kept is not None:
            common = set(self._kept).intersection(*(member.checkpoints for member in waiting))
            target = max(common, default=-1)
            rewound = target == self._at
            if self._rewinding or not (rewound or target < 0):
                ask: list[HubEffect] = [] if self._rewinding else [Rewind(target)]
                self._rewinding = True
                return effects + ask
            if target < 0:
                effects.append(Rewind(target))
            self._kept = None
        first, self.started = not self.started, True
        for member in waiting:
            member.move(MemberState.LIVE)
            member.idle = False
            reset = self._population and member.newcomer
            moments = first and sends_optimizer_state(self.settings) and (reset or self.settings.initial == "best")
            member.newcomer = False
            landed = self._records.landed(member.peer)
            known = self._at if rewound and self._at is not None else member.known_version
            digest, held = member.digest, member.held
            effects.append(Serve(member.peer, known, landed, moments, reset, rewound, digest, held))
        return effects

    def _send_others_away(self, state: MemberState, model: ModelSpec = ()) -> list[HubEffect]:
        """Send members of that state with another model away; without one, the first member's."""
        effects: list[HubEffect] = []
        for member in self._in(state):
            if member.holds is not None and not self.founded:  # its parts are its own
                continue
            model = model or member.model
            share = member.holds
            own = model if share is None else leaves_of_parts(model, share.first, share.end)
            difference = describe_mismatch(own, member.model)
            if difference is not None:
                effects += self.send_away(member, "model", f"{difference[1]}; start this node with the run's model")
        return effects

    def send_away(self, member: Member, reason: str, text: str) -> list[HubEffect]:
        del self._members[member.peer]
        self._gathered.pop(member.peer, None)
        self._forget(member.peer)
        return [SendTo(member.peer, Refused(reason, text)), Disconnect(member.peer, reason, text)]

    def _forget(self, peer: PeerId) -> None:
        self._laggards.discard(peer)
        if self._vote is not None:
            self._vote.leave(peer)
        if self._preemption is not None:
            self._preemption.forget(peer)
