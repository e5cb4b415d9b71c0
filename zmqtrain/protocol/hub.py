"""The hub's machine, without a socket or a clock: messages and `now` go in, effects come out.

Rule 1: `ALLOWED` says which message is allowed in which state; any other is a RemoteProtocolError and disconnects its
sender.  Rule 2: the hub judges a publish by its head; its content is the aggregator's business.  Rule 3: effects are
carried out in order.
Rule 4 (joining): a Hello that no sound peer says is a RemoteProtocolError; a sound one that is refused is answered with
a sentence that says what to do, and changes nothing. A duplicate Hello is dropped. A peer that says Hello again is the
same peer on a new connection: its counts go on, what was in flight on the old connection is lost. A standby, or the
master of a shard, replaces the one at its address.
Rule 5 (leaving): nothing waits for a lost peer: its data units are dealt again, another node initializes the run in its
place, its group ends, and a round that only it held up is released. Deltas received from it stay in the run, except
in synchronous runs, where all nodes must end with the same parameters. Processes of a group have a shorter timeout than
nodes. Time in which the hub itself did not listen counts for nobody.
Rule 6 (publishing): a publish in flight, accepted or landed is a duplicate and is not refused, or it would be offered
again. The order of the contributions in a release follows from who took part, where float sums depend on it. A node
that has not contributed yet is not awaited and does not count in N, except when the hub begins and in synchronous runs.
Rule 7: `state` is what a checkpoint holds besides arrays; `books` is the part that a standby hears between releases.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from math import isfinite, isnan, nan
from statistics import median
from typing import Any

from zmqtrain.core.errors import CheckpointError, FramingError, LocalProtocolError, RemoteProtocolError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import ModelSpec, PeerId, Version, count_values, is_barrier
from zmqtrain.protocol.effects import (
    Accumulate,
    Answer,
    Broadcast,
    Consult,
    Contribution,
    Disconnect,
    Expect,
    Hear,
    HubEffect,
    Rebase,
    Reduce,
    Replicate,
    SendTo,
    Serve,
    TakeBack,
)
from zmqtrain.protocol.fencing import GAP, MAX_INCARNATION, SUPERSEDED, UNKNOWN, Fence, Stamp, Verdict
from zmqtrain.protocol.groups import LATE_SECONDS, SILENCE_SECONDS, Groups
from zmqtrain.protocol.initialization import Initialization, Preemption
from zmqtrain.protocol.limits import OVER, TAKEN_BY_HUBS, HeadSizes, ProbeBudget, Quarantines, is_sound
from zmqtrain.protocol.members import (
    ADDRESS,
    ALLOWED,
    MOST_CHECKPOINTS,
    MOST_WAITING,
    Claim,
    Masters,
    Member,
    MemberState,
    Records,
    counted,
    crew,
    training,
)
from zmqtrain.protocol.messages import (
    KEY_REQUESTS,
    MAX_NAME,
    MAX_WORDS,
    Books,
    Chunk,
    Credit,
    Fetch,
    Goodbye,
    Heartbeat,
    Hello,
    Holding,
    KeyRequest,
    Message,
    Preempt,
    Probe,
    Promote,
    Publish,
    Quarantine,
    Refused,
    Report,
    Roster,
    Scalar,
    Snapshot,
    Stop,
    Welcome,
    WorkRequest,
    model_from_wire,
    model_to_wire,
    printable,
)
from zmqtrain.protocol.rounds import AfterAll, FragmentRounds, ReleaseRule
from zmqtrain.protocol.schedules import Planner, Replanning, Timetable, schedule_from_plain
from zmqtrain.protocol.standby import Tenure
from zmqtrain.protocol.units import Dealing, WorkLedger

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
        self.founding = Initialization(settings, self.members, self.records.landed, preemption, shard)
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


MOST_MEMBERS = 512
"""Peers at one hub, of any kind: the Roster, which describes all nodes, stays readable (one head)."""
MAX_LINK = 1e12
"""Bytes per second that a node may say its port has: what is made of these must stay a number."""
LEAST_LINK, LEAST_SHARE = 1.0, 1e-6
"""And at least, of what it gives of it: what follows from it is no rate else."""
CLOCK = (
    "the clock of this PC is more than a day ahead of the broker's: set the one that is wrong (timedatectl), and start "
    "this node again"
)
STATE_OF_ROLE = {
    "observer": MemberState.OBSERVER,
    "master": MemberState.MASTER,
    "process": MemberState.PROCESS,
    "standby": MemberState.STANDBY,
}
"""Who is none of these is a node: welcomed."""


def check_hello(sender: PeerId, hello: Hello) -> None:
    """Raise RemoteProtocolError for a Hello that no sound peer says."""
    fits = LEAST_SHARE <= hello.share <= 1 and 0 <= hello.link <= MAX_LINK
    if not fits or 0 < hello.link < LEAST_LINK / hello.share:
        raise RemoteProtocolError(sender, "joining", f"a Hello with a link of {hello.link}, share {hello.share}")
    if len(hello.exchange) > MAX_WORDS:
        raise RemoteProtocolError(sender, "joining", "a Hello with an exchange of that length")
    if not 0 <= hello.incarnation < MAX_INCARNATION:
        raise RemoteProtocolError(sender, "joining", f"a Hello with the incarnation {hello.incarnation}")
    if len(hello.in_flight) > MOST_WAITING or len(hello.checkpoints) > MOST_CHECKPOINTS:
        raise RemoteProtocolError(sender, "joining", "a Hello that names too many deltas or checkpoints")


def refusal_of(book: HubBook, sender: PeerId, hello: Hello) -> Refused | None:
    """Return why this hub does not take a peer of this Hello, for whatever role it gives; None if it does."""
    if hello.incarnation < book.records.incarnation(sender):
        return Refused("superseded", SUPERSEDED)
    if hello.incarnation > book.latest_incarnation:
        return Refused("clock", CLOCK)
    if hello.term > book.term and hello.run == book.run:
        return Refused("term", f"this broker knows of {book.term} takeovers, not {hello.term}")
    if hello.role == "node" and book.stopped_at is not None:
        return Refused("stopped", STOPPED)
    if len(book.members) >= MOST_MEMBERS and sender not in book.members:
        # "unknown": it says Hello again, and there may be room then
        return Refused("unknown", f"this broker has {MOST_MEMBERS} peers: try again later")
    if hello.role == "standby" and (why := _obstacle_to_standby(book, sender, hello)):
        return Refused("occupied", why)
    if hello.role == "master" and hello.run not in ("", book.run) and not book.shard:
        text = (
            f"the first master now runs {book.run}, this one has a shard of {hello.run}. Restart the first "
            "with the checkpoint of that run, or start this one again to join the new run"
        )
        return Refused("run", text)
    return None


def join(book: HubBook, sender: PeerId, hello: Hello, now: float) -> list[HubEffect]:
    """Take one Hello: let its sender in, or say why not. Raises RemoteProtocolError as `check_hello` does."""
    check_hello(sender, hello)
    if hello.incarnation and hello.incarnation == book.records.incarnation(sender):
        book.fence.count(Verdict.DOUBLE)
        return []
    refused, succeeds = refusal_of(book, sender, hello), None
    if refused is not None and refused.reason == "superseded":
        book.fence.count(Verdict.FORMER)
    if refused is None and hello.role == "master":
        why, succeeds = _claim_shard(book, sender, hello)
        refused = Refused("shard", why) if why else None
    if refused is None and hello.role == "node" and (why := _settle_exchange(book, sender, hello)):
        refused = Refused("exchange", why)
    if refused is not None:
        return [SendTo(sender, refused, Stamp(hello.incarnation))]
    effects: list[HubEffect] = []
    if hello.role == "standby" and (other := book.standby) is not None:  # it, or one in its place, begins anew
        if other.peer == sender:
            book.tenure.lost()
            effects.append(Broadcast(book.roster(now)))
        else:
            effects += lose(book, other, "another took its place at its address", now)
    before = book.members.pop(sender, None)
    book.came += before is None
    book.records.greet(sender, hello.incarnation)
    book.records.recall(sender, hello.in_flight)
    book.fence.open(sender, hello.incarnation)
    if succeeds is not None and succeeds in book.members:
        effects += lose(book, book.members[succeeds], "another broker took its place at its address", now)
    member = book.members[sender] = _member(sender, hello, before, book.came, now)
    member.counted = before.counted if before is not None else book.counts_newcomers
    if before is not None:  # what was on its way on the old connection will not come any more
        effects.append(Disconnect(sender, "again", f"{member.name} connected again"))
        effects += book.groups.gone(sender, "it connected again")
    effects.append(SendTo(sender, _welcome(book, sender)))
    if (rest := book.quarantines.rest(sender, now)) > 0:
        member.quarantined = True
        effects.append(SendTo(sender, Quarantine("again", "it was quarantined before it connected again", rest)))
    if member.state is MemberState.OBSERVER:
        effects.append(SendTo(sender, book.roster(now)))
    if member.state is MemberState.MASTER:  # nodes may wait for it
        effects.append(Broadcast(book.roster(now)))
    # units may have been sent on the old connection: it will ask again; one that is no node any more will not
    left = before if before is not None and before.is_node and not member.is_node else None
    effects += book.dealing.lost(sender, unbacked=left is not None and not book.backs(left))
    if before is not None:
        effects += book.founding.left(before)
    effects += release(book, now)
    if member.state is MemberState.STANDBY:  # a copy of what is told here, with what this has released
        effects.append(Replicate(sender))
    return effects


def _member(peer: PeerId, hello: Hello, before: Member | None, number: int, now: float) -> Member:
    """Return what is held of a peer that comes in. before: what was held of it on the connection before this."""
    state = STATE_OF_ROLE.get(hello.role, MemberState.WELCOMED)
    name = printable(hello.name, MAX_NAME)
    member = Member(peer, name, state, now, now, hello.version, hello.version < 0, number=number)
    member.link, member.share, member.checkpoints = hello.link, hello.share, hello.checkpoints
    if state is MemberState.STANDBY:
        member.address = hello.address
    if before is not None:
        member.number = before.number
        member.contributions, member.samples, member.report = before.contributions, before.samples, before.report
        member.dropped, member.steps, member.units = before.dropped, before.steps, before.units
        member.same_as = before.same_as
    return member


def _settle_exchange(book: HubBook, sender: PeerId, hello: Hello) -> str:
    """Let the first node decide how all exchange; return why another cannot take part, "" if it can."""
    if hello.exchange == book.exchange:
        return ""
    other = next((member for peer, member in book.members.items() if member.is_node and peer != sender), None)
    name = printable(hello.name, MAX_NAME)
    if other is not None:
        return (
            f"{name} would train with {_exchange_words(hello.exchange)}, and {other.name}, which is in "
            f"this run, does so with {_exchange_words(book.exchange)}: start all nodes of a run with the same"
        )
    if book.rounds.pending:
        return (
            f"{name} would train with {_exchange_words(hello.exchange)}, and deltas of nodes that "
            f"trained with {_exchange_words(book.exchange)} have not landed yet: start it again in a few seconds"
        )
    book.exchange = hello.exchange
    # what nodes in lockstep publish, at the end, is the same of all: it must land once, whole
    book.rounds = FragmentRounds(AfterAll() if book.exchange else book.rule, together=book.settings.carries_all)
    return ""


def _claim_shard(book: HubBook, sender: PeerId, hello: Hello) -> tuple[str, PeerId | None]:
    """Register the master of a shard; see `Masters.claim`."""
    if book.shard:
        return f"this broker has shard {book.shard}: register with the first, at {book.first}", None
    return book.masters.claim(sender, Claim(hello.shard, hello.address[:MAX_WORDS]))


def _welcome(book: HubBook, peer: PeerId) -> Welcome:
    """Return what a peer is told that has come in."""
    return Welcome(
        run=book.run,
        version=book.version,
        settings=book.settings.to_dict(),
        model=model_to_wire(book.model) if book.version >= 0 else (),
        landed=book.records.landed(peer),
        accepted=tuple(publish.sequence for sender, publish in book.rounds.pending if sender == peer),
        schedules=book.timetable.since(book.version),
        shard=book.shard,
        masters=(book.first,) if book.shard else book.masters.addresses,
        heard=book.records.heard(peer),
        term=book.term,
        standby=book.tenure.standby,
        called=book.members[peer].called,
        samples=book.samples,
    )


def _obstacle_to_standby(book: HubBook, sender: PeerId, hello: Hello) -> str:
    """Return why this hub takes no standby, or not this one; "" if it does."""
    if book.settings.masters > 1:
        return "this run has several masters: a standby follows one broker that has the whole model"
    if book.exchange:
        return f"the nodes of this run exchange with {_exchange_words(book.exchange)}, past the broker"
    if not ADDRESS.fullmatch(hello.address):
        return f"{hello.address[:MAX_WORDS]!r} is no address at which nodes reach it: --address tcp://HOST:PORT"
    other = book.standby
    if other is not None and other.peer != sender and other.address != hello.address:
        return f"a standby follows this broker already, at {other.address}: one is enough"
    return ""


def _exchange_words(exchange: str) -> str:
    return f"--exchange {printable(exchange)}" if exchange else "no --exchange"


LAST_WORDS_SECONDS = 0.1
"""For so long a peer whose connection is gone is heard: it may have said goodbye."""

FOUNDER_SECONDS, FOUNDER_BYTES_PER_SECOND = 30.0, 2.5e5
"""A node that was asked for its parameters, while others wait for them, announces them within this time, and sends them
at this rate at least; else the next is asked."""

OVERDUE_SECONDS = 0.1
"""A node whose heartbeat is late by so much is sent something, to learn whether its connection is gone."""


STOP_SECONDS = 45.0
"""So long after an operator has ended the run nodes have time to send what is pending; then they are sent away."""

STOPPED = "an operator has ended the run (zmqtrain stop)"
"""Why a node is sent away then, or not let in."""


def stop(book: HubBook, now: float) -> list[HubEffect]:
    """End the run: have the nodes that train drain and leave, and send all others away. Once; later it does nothing."""
    if book.stopped_at is not None:
        return []
    book.stopped_at = now
    effects = book.dealing.stop()
    effects += _send_nodes_away(book, now, frozenset(MemberState) - {MemberState.LIVE})
    return effects + release(book, now) + book.dealing.end_when_drained(book.version)


def _send_nodes_away(book: HubBook, now: float, states: Collection[MemberState]) -> list[HubEffect]:
    """Tell the nodes in these states that the run was ended, and lose them."""
    effects: list[HubEffect] = []
    for member in list(book.members.values()):
        if member.is_node and member.state in states and member.peer in book.members:
            effects.append(SendTo(member.peer, Refused("stopped", STOPPED)))
            effects += lose(book, member, STOPPED, now)
    return effects


def look_over(book: HubBook, late: float, now: float) -> list[HubEffect]:
    """Lose who has been silent for too long or cannot be reached, ask who is overdue, and end quarantines.

    late: for so many seconds nobody listened here.
    """
    effects: list[HubEffect] = []
    if book.stopped_at is not None and now - book.stopped_at >= STOP_SECONDS:
        effects += _send_nodes_away(book, now, frozenset(MemberState))
    overdue = book.settings.heartbeat_seconds + OVERDUE_SECONDS
    for member in list(book.members.values()):
        if member.peer not in book.members:  # sent away because of one that was lost before it
            continue
        process = member.state is MemberState.PROCESS
        if late:
            member.last_seen = min(now, member.last_seen + late)
        if late and member.unreachable_since is not None:
            member.unreachable_since = min(now, member.unreachable_since + late)
        silent = now - member.last_seen
        if silent > (SILENCE_SECONDS if process else book.settings.lost_seconds):
            effects += lose(book, member, f"silent for {silent:.1f} s", now)
        elif member.unreachable_since is not None:
            if now - member.unreachable_since >= LAST_WORDS_SECONDS:
                effects += lose(book, member, "its connection is gone", now)
        elif _keeps_others_waiting(book, member, late, now):
            text = "it was asked for its parameters, others wait for them, and they have not come in time"
            effects.append(SendTo(member.peer, Refused("unknown", text)))
            effects += lose(book, member, text, now)
        elif member.is_node and now - max(member.last_seen, member.asked_at) > overdue:
            member.asked_at = now  # if its connection is gone, sending says so
            effects.append(SendTo(member.peer, book.roster(now)))
        over = member.quarantined and not book.quarantines.rest(member.peer, now)
        member.quarantined = book.quarantines.rest(member.peer, now) > 0
        if over and member.state is MemberState.LIVE and book.settings.masters == 1:
            # what it has made of the shared parameters meanwhile is what it was out for, many times over
            effects.append(restart(member, OVER))
    return effects


def _keeps_others_waiting(book: HubBook, member: Member, late: float, now: float) -> bool:
    """Return whether a node that was asked for its parameters holds up others who wait, for longer than a sound one.

    At the first of several masters it announces them when it has brought the others theirs.
    """
    if member.state not in (MemberState.FOUNDING, MemberState.LENDING) or book.shard:
        member.founds_since = None
        return False
    member.founds_since = now if member.founds_since is None else min(now, member.founds_since + late)
    size = sum(sum(one.sizes) for one in member.open.values())
    if book.settings.masters > 1:
        size += 4 * count_values(book.model)
    in_time = now - member.founds_since <= FOUNDER_SECONDS + size / FOUNDER_BYTES_PER_SECOND
    waiting = (MemberState.WAITING, MemberState.APART)
    return not in_time and any(other.state in waiting for other in book.members.values())


def lose(book: HubBook, member: Member, text: str, now: float, reason: str = "lost") -> list[HubEffect]:
    """Take note that a peer is gone. text: why, for people; reason: "goodbye" if it has said so."""
    del book.members[member.peer]
    book.fence.close(member.peer)
    book.news = True
    if member.state is MemberState.OBSERVER:
        return [Disconnect(member.peer, "observer", text)]
    if member.state is MemberState.STANDBY:
        book.tenure.lost()
        return [Disconnect(member.peer, "standby", text), Broadcast(book.roster(now))]
    if member.state is MemberState.PROCESS:
        gone = book.groups.gone(member.peer, text, left=reason == "goodbye")
        return [Disconnect(member.peer, "process", text), *gone]
    if member.state is MemberState.MASTER:
        book.masters.forget(member.peer)
        return [Disconnect(member.peer, "master", text), Broadcast(book.roster(now))]
    if reason == "goodbye":
        book.tenure.said_goodbye(member.peer, member.joined)
    effects: list[HubEffect] = [Disconnect(member.peer, reason, text)]
    effects += book.dealing.lost(member.peer, unbacked=not book.backs(member))
    effects += book.founding.left(member)
    if book.exchange:  # who left before the end is no part of what the others end with
        book.rounds.forget(member.peer)
    return effects + release(book, now) + book.dealing.end_when_drained(book.version)


GRACE_SECONDS = 5.0
"""Nodes that came before the first release are awaited for so long after it, though no delta of theirs has come."""
MAX_SAMPLES = 1 << 40
"""What one publish may stand for: the sum over a run must fit in a head's 64 bits."""
MOST_WAITING_BYTES = 64 << 20
"""What one node may have on its way or waiting for a round, in bytes; more only if the model is so large: one publish
of the whole of it for each that may be on its way, and one."""


RESTART = ("restart", "this node is to begin again from the shared parameters: what it had pending is dropped")
DIVERGED = frozenset({"norm", "enormous", "non-finite"})
"""Who is quarantined for these diverges, and what it contributed just before may have been a part of that."""


def is_double(book: HubBook, member: Member, publish: Publish) -> bool:
    """Tell whether this very publish is under way, accepted or landed."""
    return (
        any(isinstance(one, Publish) and one.sequence == publish.sequence for one in member.open.values())
        or any(peer == member.peer and one.sequence == publish.sequence for peer, one in book.rounds.pending)
        or any(sequence == publish.sequence for sequence, _ in book.records.landed(member.peer))
    )


def fault_of(book: HubBook, member: Member, publish: Publish) -> tuple[str, str] | None:
    """Return the code and the sentence with which a publish is refused; None if it may come."""
    settings = book.settings
    if publish.sequence <= book.records.heard(member.peer) or publish.transfer in member.open:
        return "duplicate", f"sequence {publish.sequence} was heard before"
    if member.quarantined:
        return "quarantine", "this node is quarantined: nothing of it is taken now"
    if is_of_before(book, member, publish):
        return RESTART
    if not 0 <= publish.fragment < book.fragments:
        return "fragment", f"fragment {publish.fragment} of a run with {book.fragments}"
    if not (publish.codec == "float32" if publish.dense else book.timetable.takes(publish.codec)):
        taken = book.timetable.at(book.version).codec
        return "codec", f"coded as {printable(publish.codec)!r}; this run takes {taken!r}"
    if publish.base_version > book.version:
        return "version", f"based on version {publish.base_version}; the run is at {book.version}"
    staleness = book.version - publish.base_version
    if _too_stale(book, staleness) and settings.stale == "return" and not publish.dense:
        text = f"based on version {publish.base_version}, {staleness} behind; this run takes what is at most "
        return "stale", f"{text}{settings.max_staleness} behind"
    if not (0 <= publish.samples <= MAX_SAMPLES and 0 <= publish.steps <= MAX_SAMPLES):
        return "samples", f"stands for {publish.samples} samples in {publish.steps} steps"
    waiting = [one for peer, one in book.rounds.pending if peer == member.peer]
    waiting += [one for one in member.open.values() if isinstance(one, Publish)]
    in_flight = book.timetable.at(book.version).offers_in_flight * (book.fragments if settings.carries_all else 1)
    most_bytes = max(MOST_WAITING_BYTES, (1 + in_flight) * 4 * count_values(book.model))
    waiting_bytes = sum(sum(one.sizes) for one in (*waiting, publish))
    if len(waiting) >= max(MOST_WAITING, in_flight) or waiting_bytes > most_bytes:
        text = f"{len(waiting)} publishes of this node have not landed; no node that keeps to the settings has so "
        return "waiting", f"{text}many, or such large ones"
    return None


def is_of_before(book: HubBook, member: Member, publish: Publish) -> bool:
    """Return whether a publish was computed before its node began again, or on parameters that are taken back.

    A node that has asked for the snapshot to begin again from may publish until that has come.
    """
    base, begins_at = publish.base_version, member.begins_at
    return member.restarts or (begins_at is not None and base < begins_at) or book.is_taken_back(base)


def refuse(book: HubBook, member: Member, publish: Publish, reason: str, text: str) -> SendTo:
    """Say that a publish is refused, and count it. reason, text: as in Refused."""
    member.refused += 1
    book.refused += 1
    return SendTo(member.peer, Refused(reason, text, publish.sequence))


def offended(book: HubBook, member: Member, reason: str, text: str, now: float) -> list[HubEffect]:
    """A delta of this node was refused for what is in it: quarantine who does that again and again."""
    seconds = book.quarantines.refused(member.peer, reason, now)
    if not seconds:
        return []
    live = {one.peer: book.voter_of(one.peer) for one in book.members.values() if one.state is MemberState.LIVE}
    told: list[HubEffect] = []
    if reason == "norm" and (out := book.quarantines.wrongly(live, now)):
        if not (why := _obstacle_to_widening(book, out)):
            return _acquit(book, out)
        told = [Rebase(out, why)]
    member.quarantined = True
    takes_back = reason in DIVERGED and book.settings.mode == "default" and book.settings.masters == 1
    back: list[HubEffect] = [TakeBack(member.peer)] if takes_back and not book.exchange else []
    return [*told, SendTo(member.peer, Quarantine(reason, text, seconds)), *back, *release(book, now)]


def _obstacle_to_widening(book: HubBook, out: Sequence[PeerId]) -> str:
    """Return why the gate is not to let deltas be larger, "" if it may: the first time, and again where the shared
    parameters have not become worse since the last."""
    version, loss = book.loss(out)
    if book.widened is None:
        book.widened = (book.version, loss)
        return ""
    widened_at, before = book.widened
    if isnan(loss) or isnan(before):
        return "it has done so once, and nobody says how the shared parameters score"
    if version <= widened_at:
        return f"it has done so at version {widened_at}, and no later one is evaluated yet"
    if is_barrier(before, loss):
        return f"since it has done so, at version {widened_at}, the loss has gone from {before:.4g} to {loss:.4g}"
    book.widened = (book.version, loss)
    return ""


def take_back(book: HubBook, version: int, text: str) -> list[HubEffect]:
    """Go back to what was published at this version, by a further one; all nodes begin again from that.

    What was computed since was computed on parameters that are taken back; it is dropped where it waits.  So that no
    node can hold a run up for good, the next one is not before as many versions as this one takes back.
    """
    if not 0 <= version < book.version or book.version < book.rests_until:
        return []
    effects: list[HubEffect] = []
    for peer, publish in book.rounds.pending:
        if (member := book.members.get(peer)) is not None:
            effects.append(refuse(book, member, publish, *RESTART))
    book.clear_rounds()
    fragments, taken = tuple(range(book.fragments)), book.version - version
    book.version += 1
    book.rests_until, book.taken_back = book.version + taken, (version, book.version)
    live = max(1, len(training(book.members)))
    effects.append(Reduce(book.version, fragments, (), live, dense=True, back_to=version))
    return effects + [restart(one, text) for one in book.members.values() if one.state is MemberState.LIVE]


def restart(member: Member, reason: str) -> SendTo:
    """Have a live node drop what it has pending, and take none of its deltas until it has fetched what is shared."""
    member.restarts = True
    return SendTo(member.peer, Preempt(reason))


def _acquit(book: HubBook, peers: Sequence[PeerId]) -> list[HubEffect]:
    """So many cannot all be wrong: the gate is. It takes their size, and they are let out."""
    effects: list[HubEffect] = [Rebase(tuple(peers))]
    for peer in peers:
        book.quarantines.acquit(peer)
        if book.members[peer].quarantined:  # and was told so
            book.members[peer].quarantined = False
            effects.append(SendTo(peer, Quarantine("over", "the norm gate of the broker was wrong", 0.0)))
    return effects


def release(book: HubBook, now: float) -> list[HubEffect]:
    """Make versions of the rounds that are due, and return what the aggregator is to do for them."""
    if book.version < 0:
        return []
    effects: list[HubEffect] = []
    _end_grace(book, now)
    if not book.complete:  # the first began with so many at once; here they come one after another
        book.complete = len(training(book.members)) >= book.settings.start_nodes
    while book.complete and (taken := book.rounds.take(book.awaited, now)):
        if book.rounds.rule.one_each:
            # a stated order: the sum of floats depends on it (strict mode is bit-identical)
            taken.sort(key=lambda one: one[0])
            effects += [Accumulate(peer, publish) for peer, publish in taken]
        senders = {peer for peer, _ in taken}
        everybody = max(len(counted(book.members) | senders), book.dealing.nodes_at_the_end)
        scheduled = book.timetable.at(book.version)
        reduce = Reduce(
            version=book.version + 1,
            fragments=tuple(sorted({publish.fragment for _, publish in taken})),
            contributions=tuple(_contribution(book, peer, publish) for peer, publish in taken),
            live=len(senders) if book.exchange else everybody,
            dense=any(publish.dense for _, publish in taken),
            plain=bool(book.exchange),
            codec=scheduled.broadcast_codec if book.settings.is_planned else "",
            outer=scheduled.outer if book.settings.is_planned else "",
        )
        book.version = reduce.version
        for peer, sequence in reduce.landed:
            book.records.land(peer, sequence, book.version)
        book.samples += reduce.samples
        book.contributions += len(taken)
        effects.append(reduce)
        if book.began_at is None:
            book.began_at = now
    return effects


def _end_grace(book: HubBook, now: float) -> None:
    """Await those no longer that came before the first release, and of which nothing has come for long since."""
    if book.began_at is None or now - book.began_at < GRACE_SECONDS or book.rounds.rule.one_each:
        return
    for member in book.members.values():
        member.counted = bool(member.contributions)


def _contribution(book: HubBook, peer: PeerId, publish: Publish) -> Contribution:
    staleness = book.version - publish.base_version
    return Contribution(
        peer=peer,
        sequence=publish.sequence,
        fragment=publish.fragment,
        samples=publish.samples,
        score=publish.score,
        base_version=publish.base_version,
        staleness=staleness,
        too_stale=_too_stale(book, staleness) and book.settings.stale == "drop" and not publish.dense,
    )


def _too_stale(book: HubBook, staleness: int) -> bool:
    return 0 < book.settings.max_staleness < staleness


ROSTER_SECONDS = 1.0
UNITS_OF_A_STEP = 64
"""No node takes more data units in one step: what says that it has done more lies."""
UNFOUNDED = "this run has no parameters yet: no node has joined it"
"""Why who looks on is sent no copy of them."""
MAX_SCORES = 32
"""What one Report may hold, besides printable: the Roster holds those of all nodes, and is one head."""


class Hub(HubBook):
    """The hub's state machine.

    settings, rule: of the run.  run: its id.  version: of the last aggregate, -1 until somebody has founded the run.
    preemption: who lags in a population (initial own); None: nobody.  planner: what k and d follow from, where the
    settings leave them open (auto); None: they stay as they begin.  shard: which of several masters this is; all but
    the first (0) have no data units, and are told by their nodes who has none left.  first: where the first is, if this
    is another.
    """

    def __init__(
        self,
        settings: RunSettings,
        rule: ReleaseRule,
        run: str,
        now: float = 0.0,
        preemption: Preemption | None = None,
        planner: Planner | None = None,
        shard: int = 0,
        first: str = "",
    ) -> None:
        super().__init__(settings, rule, run, now, preemption, shard, first)
        self.replanning = Replanning(self.timetable, planner if settings.is_planned else None)
        self._probes, self._head_sizes = ProbeBudget(), HeadSizes()
        self._rostered = now
        self._handlers: dict[type[Message], Callable[[Member, Any, float], list[HubEffect]]] = {
            Heartbeat: self._on_heartbeat,
            Goodbye: self._on_goodbye,
            Report: self._on_report,
            Fetch: self._on_fetch,
            Snapshot: self._on_snapshot,
            Publish: self._on_publish,
            WorkRequest: self._on_work_request,
            Holding: lambda member, holding, now: [Hear(holding.version)],
            Promote: lambda member, promote, now: [],  # it has the run already
            Stop: self._on_stop,
            Probe: self._on_probe,
            **self.groups.handlers,
            **dict.fromkeys(KEY_REQUESTS, self._on_key_request),
        }

    def begin_with(self, model: ModelSpec) -> None:
        """Begin the run with parameters that are here already, of this model: no node is asked for any."""
        self.founding.begin(model)
        self.version = 0

    # ------------------------------------------------------------------ what comes in

    def screen(self, sender: PeerId, stamp: Stamp, kind: type[Message], size: int) -> list[HubEffect] | None:
        """Return None for a head of `size` bytes that is to be read; else what is to be done instead.

        Raises RemoteProtocolError for a kind that no hub takes, and for a head that is larger than a sound one.
        """
        member = self.members.get(sender)
        state = "joining" if member is None else member.state.value
        if kind not in TAKEN_BY_HUBS:
            raise RemoteProtocolError(sender, state, f"{kind.__name__}, which no hub takes,")
        if member is None and kind is not Hello:
            if kind in (Goodbye, Chunk, Credit):
                return []
            return [
                SendTo(sender, Refused("unknown", UNKNOWN), Stamp(stamp.incarnation) if stamp.incarnation else None)
            ]
        most = self._head_sizes.most_bytes(kind, self.model, self.version >= 0)
        if size > most:
            raise RemoteProtocolError(sender, state, f"{kind.__name__} of {size} bytes, of which {most} are read,")
        return None

    def judge(
        self, sender: PeerId, stamp: Stamp, message: Message, now: float, counted: bool = True
    ) -> list[HubEffect] | None:
        """Return None for a message of now, which is to be received; for any other what is to be done instead.

        counted: it came on the lane of control.
        """
        if isinstance(message, Hello):  # judged when it is received
            return None
        member = self.members.get(sender)
        verdict = None if member is None else self.fence.judge(sender, stamp, counted)
        if verdict is Verdict.NOW or (verdict is None and not stamp.incarnation):
            return None
        if member is not None:
            member.dropped += 1
        here = Stamp(stamp.incarnation)
        if verdict is Verdict.GAP:
            text = "messages of yours were lost on their way: say Hello again"
            return [SendTo(sender, Refused("unknown", text), here), *self.gone(sender, GAP, now)]
        if verdict is None and not isinstance(message, Goodbye | Chunk | Credit):
            return [SendTo(sender, Refused("unknown", UNKNOWN), here)]
        if verdict is Verdict.FORMER and isinstance(message, Heartbeat) and stamp.incarnation:
            return [SendTo(sender, Refused("superseded", SUPERSEDED), here)]
        return []

    def stamp(self, peer: PeerId, counted: bool = True) -> Stamp:
        """Return the stamp of what this peer is told next. counted: on the lane of control."""
        stamp = self.fence.stamp(peer, counted)
        return Stamp(self.records.incarnation(peer)) if stamp is None else stamp

    def receive(self, sender: PeerId, message: Message, now: float) -> list[HubEffect]:
        """Take one message. Raises RemoteProtocolError when the sender's state does not allow it."""
        if isinstance(message, Hello):
            return join(self, sender, message, now)
        member = self.members.get(sender)
        if member is None:
            if isinstance(message, Goodbye):
                return []
            return [SendTo(sender, Refused("unknown", UNKNOWN))]
        if member.state not in ALLOWED.get(type(message), frozenset()):
            raise RemoteProtocolError(sender, member.state.value, type(message).__name__)
        member.last_seen = now
        return self._handlers[type(message)](member, message, now)

    def saw(self, peer: PeerId, now: float) -> None:
        """Take note that a peer lives (a chunk or a credit came from it)."""
        if peer in self.members:
            self.members[peer].last_seen = now

    def received(self, peer: PeerId, transfer: int, now: float) -> list[HubEffect]:
        """All chunks of an expected transfer are here and are sound."""
        member = self.members.get(peer)
        announcement = member.open.pop(transfer, None) if member else None
        if member is None or announcement is None:
            return []
        if isinstance(announcement, Snapshot):
            return self._begun(self.founding.whole(member, announcement))
        assert isinstance(announcement, Publish)
        if is_of_before(self, member, announcement):
            return [refuse(self, member, announcement, *RESTART)]
        self.rounds.add(peer, announcement, now)
        self.quarantines.accepted(peer, self.voter_of(peer), now)
        member.contributions, member.counted = member.contributions + 1, True
        self.ledger.back(peer)
        member.samples += announcement.samples
        settings = self.timetable.at(self.version)
        member.steps += min(announcement.steps, 2 * (settings.every + settings.delay))
        member.staleness = self.version - announcement.base_version
        accumulate: list[HubEffect] = [] if self.rounds.rule.one_each else [Accumulate(peer, announcement)]
        return accumulate + release(self, now)

    def broken(self, peer: PeerId, transfer: int, reason: str, text: str, now: float) -> list[HubEffect]:
        """An expected transfer is not sound (or was never acceptable): say so; nothing of it is used."""
        member = self.members.get(peer)
        announcement = member.open.pop(transfer, None) if member else None
        if member is None or announcement is None:
            return []
        if isinstance(announcement, Snapshot):
            return self.founding.send_away(member, reason, text) + self.founding.left(member)
        assert isinstance(announcement, Publish)
        return [refuse(self, member, announcement, reason, text), *offended(self, member, reason, text, now)]

    def left_out(self, peer: PeerId, reason: str, text: str, now: float) -> list[HubEffect]:
        """A delta that has landed is none of its version's sum, as it is far larger than the others of its round."""
        member = self.members.get(peer)
        self.refused += 1
        if member is None:
            return []
        member.refused += 1
        return offended(self, member, reason, text, now)

    def take_back(self, peer: PeerId, version: int) -> list[HubEffect]:
        """Go back to what was published at this version, by a further one: a node that diverges was a part of what came
        after it. [] if that is not to be."""
        return take_back(self, version, f"the run goes back to version {version}: {printable(peer)} had diverged")

    def gone(self, peer: PeerId, why: str, now: float) -> list[HubEffect]:
        """A peer is gone, and nothing that it may have said counts any more."""
        return lose(self, self.members[peer], why, now) if peer in self.members else []

    def unreachable(self, peer: PeerId, now: float) -> None:
        """The connection to a peer is gone, and what it said before may wait to be heard: it is lost a moment later."""
        member = self.members.get(peer)
        if member is not None and member.unreachable_since is None:
            member.unreachable_since = now

    def tick(self, now: float) -> list[HubEffect]:
        """Let time pass: silent peers are lost, rounds fall due, the roster goes out."""
        effects: list[HubEffect] = self.groups.tick(now)
        late, self._ticked = max(0.0, now - self._ticked - LATE_SECONDS), now
        effects += look_over(self, late, now)
        effects += self._begun(self.founding.tick(now, late))
        effects += release(self, now)
        if self.news:
            self.news = False
            live = [member for member in self.members.values() if member.state is MemberState.LIVE]
            if (schedule := self.replanning.look(self.version, self.model, live, now)) is not None:
                self.plan = self.replanning.text
                effects.append(Broadcast(schedule))
        if now - self._rostered >= ROSTER_SECONDS:
            self._rostered = now
            self.fence.keep(self.members)
            effects.append(Broadcast(self.roster(now)))
            if (standby := self.standby) is not None:
                effects.append(SendTo(standby.peer, Books(self.books(now))))
        return effects

    def measured(self, peer: PeerId, rate: float) -> None:
        """Take note of how fast a peer's link was seen, in bytes per second."""
        member = self.members.get(peer)
        if member is not None and member.measured != rate:
            member.measured, self.news = rate, True

    # ------------------------------------------------------------------ coming and going

    def _on_fetch(self, member: Member, fetch: Fetch, now: float) -> list[HubEffect]:
        member.digest, member.held = fetch.digest[:MAX_NAME], fetch.held
        if member.state is MemberState.OBSERVER:
            if self.version < 0:
                return [SendTo(member.peer, Refused("unfounded", UNFOUNDED))]
            return [Serve(member.peer, fetch.version, (), digest=fetch.digest, held=fetch.held)]
        if member.state is MemberState.LIVE and not fetch.model:
            return []  # how the mean scores, or its own: of a time that is over
        if self.is_taken_back(fetch.version):  # it was not here when the others were told
            return [restart(member, "what this node has is of versions that the run has taken back")]
        if member.restarts or member.quarantined:
            member.begins_at, member.restarts = self.version, False
        if member.state is MemberState.LIVE:
            member.known_version = fetch.version
            landed = self.records.landed(member.peer)
            return [Serve(member.peer, member.known_version, landed, digest=fetch.digest, held=fetch.held)]
        if self.shard and fetch.founding > self.founding.number and self.version > 0:
            text = (
                f"shard {self.shard} of {self.run} is trained already, up to version {self.version}, and the first "
                "master begins anew: restart that with its checkpoint, or all masters without"
            )
            return self.founding.send_away(member, "founding", text)
        effects = self._begun(self.founding.fetched(member, fetch))
        if member.peer not in self.members:  # it was sent away
            effects += self.dealing.lost(member.peer, unbacked=not self.backs(member))
        return effects

    def _on_snapshot(self, member: Member, snapshot: Snapshot, now: float) -> list[HubEffect]:
        if member.open:  # a second one would found the run again
            raise RemoteProtocolError(member.peer, member.state.value, "a second Snapshot")
        member.open[snapshot.transfer] = snapshot
        return [Expect(member.peer, snapshot)]

    def averaged(self) -> list[HubEffect]:
        """The parameters of an Average are related; their mean is at hand: it founds the run, or is to be judged."""
        return self._begun(self.founding.averaged())

    def unrelated(self, text: str) -> list[HubEffect]:
        """The parameters of an Average are not related: `text` explains it to those who wait."""
        return self.founding.unrelated(text)

    def _begun(self, effects: list[HubEffect]) -> list[HubEffect]:
        if self.version >= 0 and not self.founding.founded:  # it begins anew: what is pending is of no use any more
            self.clear_rounds()
            self.best = None
        self.version = max(self.version, 0) if self.founding.founded else -1
        return effects

    def preempt(self, peer: PeerId, reason: str) -> list[HubEffect]:
        """Have a live node drop what it has pending and start again from the shared parameters.

        Raises LocalProtocolError if it is not live, and where there are several masters.
        """
        if self.settings.masters > 1:
            raise LocalProtocolError(f"{peer} cannot be preempted by one of several masters: it would drop all it has")
        member = self.members.get(peer)
        if member is None or member.state is not MemberState.LIVE:
            state = "not here" if member is None else member.state.value
            raise LocalProtocolError(f"{peer} cannot be preempted while it is {state}")
        return [SendTo(peer, Preempt(reason))]

    def _on_goodbye(self, member: Member, goodbye: Goodbye, now: float) -> list[HubEffect]:
        text = f"said goodbye: {printable(goodbye.reason)}" if goodbye.reason else "said goodbye"
        if member.state is MemberState.STANDBY:
            self.tenure.dismissed(goodbye.reason)
        return lose(self, member, text, now, reason="goodbye")

    def _on_heartbeat(self, member: Member, heartbeat: Heartbeat, now: float) -> list[HubEffect]:
        if member.state is MemberState.STANDBY:
            self.tenure.read(heartbeat.heard)
        elif member.is_node:
            self.tenure.let_go_on(member.peer, heartbeat.heard, member.joined)
        return [SendTo(member.peer, Heartbeat(heartbeat.sent, self.records.heard(member.peer)))]

    def _on_report(self, member: Member, report: Report, now: float) -> list[HubEffect]:
        names = report.scores or {}
        long = max(len(report.waiting), len(report.data)) > MAX_WORDS or len(names) > MAX_SCORES
        long |= max(len(report.device), len(report.first_step)) > MAX_NAME
        long |= not (report.data + report.device + report.first_step).isprintable()
        if long or any(len(name) > MAX_NAME or not name.isprintable() for name in names):
            raise RemoteProtocolError(member.peer, member.state.value, "a Report of that length")
        begins = bool(report.first_step) and (member.report is None or not member.report.first_step)
        member.report, self.news = report, True
        if begins:
            self.compare_start(member)
        self.data = self.data or report.data
        if self.believes(member.peer, report):
            self.evaluated_on = self.evaluated_on or member.held_out
            self.evaluated(report.score_version, report.scores or {})
        return []

    def believes(self, peer: PeerId, report: Report) -> bool:
        """Return whether a report's scores are the run's: the evaluator's alone, of a version that is not too old."""
        timely = self.score_version <= report.score_version <= self.version
        return bool(report.scores) and timely and peer == self.evaluator

    def _on_stop(self, member: Member, message: Stop, now: float) -> list[HubEffect]:
        if self.shard:
            text = f"this broker has shard {self.shard} of the run: say it to the first master, at {self.first}"
            return [SendTo(member.peer, Refused("shard", text))]
        return stop(self, now)

    def _on_probe(self, member: Member, probe: Probe, now: float) -> list[HubEffect]:
        if not is_sound(probe):
            raise RemoteProtocolError(member.peer, member.state.value, "a Probe of that size")
        if self._probes.take(probe, now):
            return [Answer(member.peer, probe)]
        return [SendTo(member.peer, Refused("probe", "too many probes at a time; try again in 10 s"))]

    def _on_key_request(self, member: Member, request: KeyRequest, now: float) -> list[HubEffect]:
        return [Consult(member.peer, request)]

    # ------------------------------------------------------------------ contributions

    def _on_publish(self, member: Member, publish: Publish, now: float) -> list[HubEffect]:
        if is_double(self, member, publish):
            self.fence.count(Verdict.DOUBLE)
            return []
        if (fault := fault_of(self, member, publish)) is not None:
            return [refuse(self, member, publish, *fault)]
        if self.shard:
            member.idle = False  # it trains again
        self.records.hear(member.peer, publish.sequence)
        member.open[publish.transfer] = publish
        return [Expect(member.peer, publish)]

    # ------------------------------------------------------------------ data units

    def _on_work_request(self, member: Member, request: WorkRequest, now: float) -> list[HubEffect]:
        settings = self.timetable.at(self.version)
        room = UNITS_OF_A_STEP * (2 * (settings.every + settings.delay) + member.steps) - member.units
        if len(request.done) > room and not (self.exchange or member.quarantined):
            text = f"a WorkRequest of more units than its deltas of {member.steps} steps can stand for"
            raise RemoteProtocolError(member.peer, member.state.value, text)
        return [
            *self.dealing.asked(member, request, self.backs(member)),
            *release(self, now),
            *self.dealing.end_when_drained(self.version),
        ]

    # ------------------------------------------------------------------ life after a restart

    def in_step(self, now: float) -> list[HubEffect]:
        """The standby holds all that nodes have heard of: from now on they hear of nothing before it."""
        standby = self.standby
        if standby is None:
            return []
        self.tenure.joined(standby.address)
        return [SendTo(standby.peer, Books(self.books(now))), Broadcast(self.roster(now))]

    def await_all(self, versions: tuple[int, ...]) -> None:
        """In strict mode, after a restart: wait for all nodes, and go back with them to the newest of these versions
        that all of them have kept."""
        if self.version >= 0:
            self.founding.await_all(versions)

    def rewound(self, state: dict[str, Any]) -> list[HubEffect]:
        """All have kept this state's version, as a Rewind asked for: be there, and begin if they are all still here."""
        self.records.clear()
        now = {name: part for name, part in state.items() if name != "tenure"} | {"quarantines": {}}
        self.restore(now)  # who is out, and who follows, is so now
        self.records.forget_unlanded()  # those will be sent again
        self.clear_rounds()
        return self._begun(self.founding.rewound(self.version))
