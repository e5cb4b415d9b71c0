"""The hub's state machine, without a socket or a clock: messages and `now` go in, effects come out.

Rule 1: `ALLOWED` says which message is allowed in which state; any other is a RemoteProtocolError and disconnects its
sender.  Rule 2: the hub judges a publish by its head; its content is the aggregator's business.  Rule 3: effects are
carried out in order.
Rule 4 (joining): a Hello with impossible values is a RemoteProtocolError. A sound Hello that is refused is answered
with a sentence that says what to do, and changes nothing. A duplicate Hello is dropped. A peer that says Hello again is
the same peer on a new connection: its counts go on, what was in flight on the old connection is lost. A new standby, or
broker of a shard, replaces the one at its address.
Rule 5 (leaving): nothing waits for a lost peer: its data units are dealt again, another node initializes the run in its
place, its group ends, and a round that only it held up is released. Deltas received from it stay in the run, except
in synchronous runs (gradients are exchanged past the hub), where all nodes must end with the same parameters. Processes
of a group have a shorter timeout than nodes. Time in which the hub itself did not listen counts toward no timeout.
Rule 6 (publishing): a second Publish of a delta that is in flight, accepted or landed is dropped, not refused: a
refused delta is offered again. A node is awaited and counts in N from its first delta on. It counts from its joining
where a round takes one delta of each node, added in the order of the peer ids. A node that joined before the hub's
first release counts until 5 s after that release.
Rule 7 (pipelines): a pipeline is one node of several members (`pipelines`). The first node decides whether a run is one
of pipelines.
Rule 8: `state` is what a checkpoint holds besides arrays; `books` is the part that a standby hears between releases.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import isfinite, isnan, nan
from statistics import median
from typing import Any

from zmqtrain.core.errors import CheckpointError, FramingError, RemoteProtocolError
from zmqtrain.core.settings import AUTO_DELAY, AUTO_EVERY, AUTO_SHARDS, RunSettings
from zmqtrain.core.types import (
    MOST_PARTS,
    ModelSpec,
    PeerId,
    Version,
    count_values,
    is_barrier,
    leaves_of_parts,
    parts_of,
    spec_from_plain,
    spec_to_plain,
)
from zmqtrain.protocol.effects import (
    Accumulate,
    Answer,
    Broadcast,
    Consult,
    Contribution,
    Disconnect,
    Dismiss,
    Divide,
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
from zmqtrain.protocol.hosting import Hosting, division
from zmqtrain.protocol.initialization import Initialization, Preemption
from zmqtrain.protocol.limits import OVER, TAKEN_BY_HUBS, HeadSizes, ProbeBudget, Quarantines, is_sound
from zmqtrain.protocol.members import (
    ADDRESS,
    ALLOWED,
    MOST_CHECKPOINTS,
    MOST_WAITING,
    Claim,
    Member,
    Members,
    MemberState,
    Records,
    ShardRegistry,
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
    Host,
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
    replace_fields,
)
from zmqtrain.protocol.pipelines import Part, Share, Turns
from zmqtrain.protocol.rounds import AfterAll, FragmentRounds, ReleaseRule
from zmqtrain.protocol.schedules import Planner, Replanning, Timetable, schedule_from_plain
from zmqtrain.protocol.standby import PrimaryLease
from zmqtrain.protocol.units import UnitDealer

ROSTER_SECONDS = 1.0
MOST_MEMBERS = 512
"""Peers of any kind at one hub; bounded so that the Roster, which describes all nodes, fits in one head."""
MAX_LINK, LEAST_LINK, LEAST_SHARE = 1e12, 1.0, 1e-6
"""Bounds of the link rate of a node in bytes per second, and of the share of it that a node gives."""
MAX_SCORES = 32
"""Scores in one Report, besides words: the Roster holds those of all nodes in one head."""
MAX_SAMPLES = 1 << 40
"""Samples that one publish may stand for: the sum over a run must fit in 64 bits."""
MOST_WAITING_BYTES = 64 << 20
"""Bytes of one node in flight or waiting for a round; more only for a large model: one publish of all of it for each
that may be in flight, and one."""
UNITS_OF_A_STEP = 64
"""Data units that one step can have used: of those that a node says are done, more than this a step are dealt again."""
MOST_SECONDS, MOST_VERSIONS = 1e10, 1 << 62
"""A checkpoint with more seconds, versions or samples was not written by a hub."""
WORSE = 10.0
"""An evaluation with this many times the best loss has become worse."""

GRACE_SECONDS = 5.0
"""Nodes that came before the first release are awaited this long after it, even if they have not contributed."""
LAST_WORDS_SECONDS = 0.1
"""A peer without a connection is heard for this long: its Goodbye may still arrive."""
FOUNDER_SECONDS, FOUNDER_BYTES_PER_SECOND = 30.0, 2.5e5
"""While others wait, a node that was asked for its parameters must announce them within this time, and send them at
this rate at least; otherwise the next node is asked."""
OVERDUE_SECONDS = 0.1
"""A node with a heartbeat late by this much is sent a message, which fails if its connection is gone."""
STOP_SECONDS = 45.0
"""Time for nodes to drain after an operator has ended the run; after it they are disconnected."""

STOPPED = "an operator has ended the run (zmqtrain stop)"
UNFOUNDED = "this run has no parameters yet: no node has joined it"
CLOCK = (
    "the clock of this PC is more than a day ahead of the broker's: set the one that is wrong (timedatectl), and start "
    "this node again"
)
DIVIDED = (
    "the model of this run is divided among several brokers, with which a node has neither a --checkpoint nor a record "
    "of its own, nor a --link or --share, and is one process: leave these out, or start the broker with --shards 1"
)
BROKEN_PIPELINE = ("turn", "a PC of this pipeline is not here: what it offers cannot count without the others' parts")
RESTART = ("restart", "this node is to begin again from the shared parameters: what it had pending is dropped")
DIVERGED = frozenset({"norm", "enormous", "non-finite"})
"""A node quarantined for one of these diverges, and its recent contributions may have been part of that."""
STATE_OF_ROLE = {
    "observer": MemberState.OBSERVER,
    "broker": MemberState.SHARD,
    "process": MemberState.PROCESS,
    "standby": MemberState.STANDBY,
}
"""Any other role is that of a node: welcomed."""


class Hub:
    """The hub's state machine.

    settings, rule: of the run.  run: its id.  preemption: who lags in a population (initial own); None: nobody.
    planner: chooses the settings that are auto; None: they stay as they begin, or `follow` those of another broker.
    shard: index among several brokers; a broker other than the first (0) has no data units, and hears from its nodes
    who has drained.  first: address of the first, if this is another.

    version: of the last aggregate, -1 before the run is initialized.  exchange: how nodes exchange gradients in every
    step, past this hub; "": they publish to it.  latest_incarnation: the highest that a peer may say.
    complete: start_nodes nodes have come; nothing is released before.  began_at: time of this hub's first release.
    stopped_at: when an operator ended the run.  news: something happened since the last look that may change the plan.
    plan: the reasons of the last plan, as text.  best: version and loss of the evaluation with the lowest loss.
    evaluated_on, data: digests of the held-out data of the first evaluation, and of all data of the first node that
    has any.
    hosting: has nodes serve the other shards; None: their brokers are started by hand.
    widened: version and loss when the norm gate was last widened.  rests_until: nothing is taken back again before this
    version.  taken_back: the version that the run last went back to, and the version that did so.
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
        self.settings, self.rule, self.run, self.shard, self.first = settings, rule, run, shard, first
        self.exchange = ""
        self.version: Version = -1
        self.term = 0
        self.samples = self.contributions = self.refused = 0
        self.scores: dict[str, float] = {}
        self.score_version: Version = -1
        self.best: tuple[Version, float] | None = None
        self.evaluated_on = self.data = self.plan = ""
        self.members = Members()
        self.latest_incarnation = MAX_INCARNATION - 1
        self.complete = not (shard and settings.mode == "strict")
        self.began_at: float | None = None
        self.stopped_at: float | None = None
        self.news = False
        self.widened: tuple[Version, float] | None = None
        self.rests_until: Version = 0
        self.taken_back: tuple[Version, Version] = (0, 0)

        self.lease = PrimaryLease()
        self.timetable = Timetable(settings)
        self._planner = planner
        self.replanning = Replanning(self.timetable, self._planner, rule)
        self.shards = ShardRegistry(settings.shards)
        self.hosting: Hosting | None = None
        self.rounds = FragmentRounds(rule, together=settings.carries_all)
        self.turns = Turns()
        self.units = UnitDealer(settings, self.members, shard)
        self.records = Records()
        self.fence = Fence()
        self.quarantines = Quarantines()
        self.groups = Groups()
        self.initialization = Initialization(settings, self.members, self.records, preemption, shard)
        self._probes, self._head_sizes = ProbeBudget(), HeadSizes()
        self._began = self._ticked = self._rostered = now
        self._seconds_before = 0.0  # of the hubs that served this run before
        self._came = 0  # members so far, each counted on its first connection
        self._handlers: dict[type[Message], Callable[[Member, Any, float], list[HubEffect]]] = {
            Heartbeat: self._on_heartbeat,
            Goodbye: self._on_goodbye,
            Report: self._on_report,
            Host: self._on_host,
            Fetch: self._on_fetch,
            Snapshot: self._on_snapshot,
            Publish: self._on_publish,
            WorkRequest: self._on_work_request,
            Holding: lambda member, holding, now: [Hear(holding.version)],
            Promote: lambda member, promote, now: [],  # it has the run already
            Stop: self._on_stop,
            Probe: self._on_probe,
            **self.groups.handlers,
            **dict.fromkeys(KEY_REQUESTS, lambda member, request, now: [Consult(member.peer, request)]),
        }

    def begin_with(self, model: ModelSpec) -> None:
        """Begin the run with parameters of this model that are here already; no node is asked for any."""
        self.initialization.begin(model)
        self.version = 0

    # ------------------------------------------------------------------ messages

    def screen(self, sender: PeerId, stamp: Stamp, kind: type[Message], size: int) -> list[HubEffect] | None:
        """Return None for a head of `size` bytes that is to be read; else the effects in its place.

        Raises RemoteProtocolError for a kind that no hub takes, and for a head that is larger than a sound one.
        """
        member = self.members.get(sender)
        state = "joining" if member is None else member.state.value
        if kind not in TAKEN_BY_HUBS:
            raise RemoteProtocolError(sender, state, f"{kind.__name__}, which no hub takes,")
        if member is None and kind is not Hello:
            if kind in (Goodbye, Chunk, Credit):
                return []
            here = Stamp(stamp.incarnation) if stamp.incarnation else None
            return [SendTo(sender, Refused("unknown", UNKNOWN), here)]
        most = self._head_sizes.most_bytes(kind, self.model, self.version >= 0)
        if size > most:
            raise RemoteProtocolError(sender, state, f"{kind.__name__} of {size} bytes, of which {most} are read,")
        return None

    def judge(
        self, sender: PeerId, stamp: Stamp, message: Message, now: float, counted: bool = True
    ) -> list[HubEffect] | None:
        """Return None for a current message, which is to be received; for any other the effects in its place.

        counted: it came on CONTROL.
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
            text = "messages of yours were lost in flight: say Hello again"
            return [SendTo(sender, Refused("unknown", text), here), *self.gone(sender, GAP, now)]
        if verdict is None and not isinstance(message, Goodbye | Chunk | Credit):
            return [SendTo(sender, Refused("unknown", UNKNOWN), here)]
        if verdict is Verdict.FORMER and isinstance(message, Heartbeat) and stamp.incarnation:
            return [SendTo(sender, Refused("superseded", SUPERSEDED), here)]
        return []

    def stamp(self, peer: PeerId, counted: bool = True) -> Stamp:
        stamp = self.fence.stamp(peer, counted)
        return Stamp(self.records.incarnation(peer)) if stamp is None else stamp

    def receive(self, sender: PeerId, message: Message, now: float) -> list[HubEffect]:
        """Take one message. Raises RemoteProtocolError when the sender's state does not allow it."""
        if isinstance(message, Hello):
            return self._join(sender, message, now)
        member = self.members.get(sender)
        if member is None:
            return [] if isinstance(message, Goodbye) else [SendTo(sender, Refused("unknown", UNKNOWN))]
        if member.state not in ALLOWED.get(type(message), frozenset()):
            raise RemoteProtocolError(sender, member.state.value, type(message).__name__)
        member.last_seen = now
        return self._handlers[type(message)](member, message, now)

    def saw(self, peer: PeerId, now: float) -> None:
        if peer in self.members:
            self.members[peer].last_seen = now

    def measured(self, peer: PeerId, rate: float) -> None:
        member = self.members.get(peer)
        if member is not None and member.measured != rate:
            member.measured, self.news = rate, True

    def tick(self, now: float) -> list[HubEffect]:
        effects: list[HubEffect] = self.groups.tick(now)
        late, self._ticked = max(0.0, now - self._ticked - LATE_SECONDS), now
        effects += self.look_over(late, now)
        if self.settings.shards == AUTO_SHARDS:
            effects += self._divide(now)
        if self.hosting is not None and not self.exchange:
            nodes = [member for member in self.members.values() if member.is_node]
            effects += self.hosting.look(sorted(nodes, key=lambda node: node.number), now, self.version >= 0)
        effects += self._begun(self.initialization.tick(now, late))
        effects += self.release(now)
        if self.news:
            self.news = False
            live = self.members.in_state(MemberState.LIVE)
            of_a_port = max((self.model_of(one) for one in live), key=count_values, default=self.model)
            nodes = [one for one in live if not one.follows]
            if (schedule := self.replanning.look(self.version, of_a_port, nodes, now)) is not None:
                self.plan = self.replanning.text
                effects.append(Broadcast(schedule))
        if now - self._rostered >= ROSTER_SECONDS:
            self._rostered = now
            self.fence.keep(self.members)
            effects.append(Broadcast(self.roster(now)))
            if (standby := self.standby) is not None:
                effects.append(SendTo(standby.peer, Books(self.books(now))))
        return effects

    def _on_heartbeat(self, member: Member, heartbeat: Heartbeat, now: float) -> list[HubEffect]:
        if member.state is MemberState.STANDBY:
            self.lease.read(heartbeat.heard)
        elif member.is_node:
            self.lease.let_go_on(member.peer, heartbeat.heard, member.joined)
        return [SendTo(member.peer, Heartbeat(heartbeat.sent, self.records.heard(member.peer)))]

    def _on_report(self, member: Member, report: Report, now: float) -> list[HubEffect]:
        names = report.scores or {}
        long = max(len(report.waiting), len(report.data)) > MAX_WORDS or len(names) > MAX_SCORES
        long |= max(len(report.device), len(report.first_step)) > MAX_NAME or len(report.software) > MAX_WORDS
        long |= not (report.data + report.device + report.first_step + report.software).isprintable()
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

    def _on_stop(self, member: Member, message: Stop, now: float) -> list[HubEffect]:
        """End the run: nodes that train drain and leave, all others are disconnected. Later it does nothing."""
        if self.shard:
            text = f"this broker has shard {self.shard} of the run: say it to the first broker, at {self.first}"
            return [SendTo(member.peer, Refused("shard", text))]
        if self.stopped_at is not None:
            return []
        self.stopped_at = now
        effects = self.units.stop()
        effects += self._send_nodes_away(now, frozenset(MemberState) - {MemberState.LIVE})
        return effects + self.release(now) + self.units.end_when_drained(self.version)

    def _on_probe(self, member: Member, probe: Probe, now: float) -> list[HubEffect]:
        if not is_sound(probe):
            raise RemoteProtocolError(member.peer, member.state.value, "a Probe of that size")
        if self._probes.take(probe, now):
            return [Answer(member.peer, probe)]
        return [SendTo(member.peer, Refused("probe", "too many probes at a time; try again in 10 s"))]

    def _on_work_request(self, member: Member, request: WorkRequest, now: float) -> list[HubEffect]:
        effects = self.units.asked(member, request, self.backs(member), self._room_of(member)) + self.release(now)
        return effects + self.units.end_when_drained(self.version)

    def _room_of(self, member: Member) -> int | None:
        """Return how many more units the deltas of a node can stand for; None where this hub does not see them."""
        if self.exchange:
            return None
        settings = self.timetable.at(self.version)
        return UNITS_OF_A_STEP * (2 * (settings.every + settings.delay) + member.steps) - member.units

    # ------------------------------------------------------------------ joining

    def _join(self, sender: PeerId, hello: Hello, now: float) -> list[HubEffect]:
        _check_hello(sender, hello)
        if hello.incarnation and hello.incarnation == self.records.incarnation(sender):
            self.fence.count(Verdict.DUPLICATE)
            return []
        refused, succeeds = self._refusal_of(sender, hello), None
        if refused is not None and refused.reason == "superseded":
            self.fence.count(Verdict.FORMER)
        if refused is None and hello.role == "broker":
            why, succeeds = f"this broker has shard {self.shard}: register with the first, at {self.first}", None
            if not self.shard:
                why, succeeds = self.shards.claim(sender, Claim(hello.shard, hello.address[:MAX_WORDS]))
            refused = Refused("shard", why) if why else None
        if refused is None and hello.role == "node" and (why := self._settle_exchange(sender, hello)):
            refused = Refused("exchange", why)
        if refused is None and hello.role == "node" and (why := self._obstacle_to_share(sender, hello)):
            refused = Refused("pipeline", why)
        if refused is not None:
            return [SendTo(sender, refused, Stamp(hello.incarnation))]
        effects: list[HubEffect] = []
        if hello.role == "standby" and (other := self.standby) is not None:  # it, or one in its place, starts over
            if other.peer == sender:
                self.lease.lost()
                effects.append(Broadcast(self.roster(now)))
            else:
                effects += self.lose(other, "another took its place at its address", now)
        before = self.members.pop(sender, None)
        self._came += before is None
        self.records.greet(sender, hello.incarnation)
        self.records.recall(sender, hello.in_flight)
        self.fence.open(sender, hello.incarnation)
        if succeeds is not None and succeeds in self.members:
            effects += self.lose(self.members[succeeds], "another broker took its place at its address", now)
        member = self.members[sender] = self._member(sender, hello, before, now)
        if before is not None and before.holds is not None:
            effects += self._forget_in_flight(before, member)
        return effects + self._welcomed(member, before, now)

    def _forget_in_flight(self, before: Member, member: Member) -> list[HubEffect]:
        """Refuse what a PC of a pipeline had in flight on its old connection: those turns cannot be whole. before: as
        it was there; if it held other parts, nothing of its old pipeline can."""
        assert before.holds is not None
        text = f"{member.name}, which has parts of the same delta, connected again"
        if before.holds != member.holds:
            return self._refuse_parts(self.turns.forget(before.holds.pipeline), text)
        lost = [one for one in before.open.values() if isinstance(one, Publish)]
        return [one for publish in lost for one in self._refuse_parts(self.turns.refuse(before.holds, publish), text)]

    def _welcomed(self, member: Member, before: Member | None, now: float) -> list[HubEffect]:
        """Send a new member what it must know, and let go of what its old connection held. before: as it was there."""
        peer, effects = member.peer, list[HubEffect]()
        if before is not None:  # what was in flight on the old connection is lost
            effects.append(Disconnect(peer, "again", f"{member.name} connected again"))
            effects += self.groups.gone(peer, "it connected again")
        effects.append(SendTo(peer, self._welcome(member)))
        if (rest := self.quarantines.rest(peer, now)) > 0:
            member.quarantined = True
            effects.append(SendTo(peer, Quarantine("again", "it was quarantined before it connected again", rest)))
        if member.state is MemberState.OBSERVER:
            effects.append(SendTo(peer, self.roster(now)))
        if member.state is MemberState.SHARD:  # nodes may wait for it
            effects.append(Broadcast(self.roster(now)))
        # units may have been sent on the old connection: it will ask again, unless it is no node any more
        left = before if before is not None and before.is_node and not member.is_node else None
        effects += self.units.lost(peer, unbacked=left is not None and not self.backs(left))
        if before is not None:
            effects += self.initialization.left(before)
        effects += self.release(now)
        if member.state is MemberState.STANDBY:  # a copy of the hub, with the releases of just now
            effects.append(Replicate(peer))
        return effects

    def _refusal_of(self, sender: PeerId, hello: Hello) -> Refused | None:
        """Return why this hub does not take a peer of this Hello, in whatever role; None if it does."""
        if hello.incarnation < self.records.incarnation(sender):
            return Refused("superseded", SUPERSEDED)
        if hello.incarnation > self.latest_incarnation:
            return Refused("clock", CLOCK)
        if hello.term > self.term and hello.run == self.run:
            return Refused("term", f"this broker knows of {self.term} takeovers, not {hello.term}")
        if hello.role == "node" and self.stopped_at is not None:
            return Refused("stopped", STOPPED)
        if len(self.members) >= MOST_MEMBERS and sender not in self.members:
            # "unknown": it says Hello again, and there may be room then
            return Refused("unknown", f"this broker has {MOST_MEMBERS} peers: try again later")
        if hello.role == "standby" and (why := self._obstacle_to_standby(sender, hello)):
            return Refused("occupied", why)
        if hello.role == "broker" and hello.run not in ("", self.run) and not self.shard:
            text = (
                f"the first broker now runs {self.run}, this one has a shard of {hello.run}. Restart the first "
                "with the checkpoint of that run, or start this one again to join the new run"
            )
            return Refused("run", text)
        return None

    def _obstacle_to_standby(self, sender: PeerId, hello: Hello) -> str:
        """Return why this hub takes no standby, or not this one; "" if it does."""
        if self.exchange:
            return f"the nodes of this run exchange with {_exchange_flag(self.exchange)}, past the broker"
        if not ADDRESS.fullmatch(hello.address):
            return f"{hello.address[:MAX_WORDS]!r} is no address at which nodes reach it: --address tcp://HOST:PORT"
        other = self.standby
        if other is not None and other.peer != sender and other.address != hello.address:
            return f"a standby follows this broker already, at {other.address}: one is enough"
        return ""

    def _settle_exchange(self, sender: PeerId, hello: Hello) -> str:
        """Let the first node decide how all exchange; return why another cannot take part, "" if it can."""
        if hello.exchange == self.exchange:
            return ""
        other = next((member for peer, member in self.members.items() if member.is_node and peer != sender), None)
        mine = f"{printable(hello.name, MAX_NAME)} would train with {_exchange_flag(hello.exchange)}"
        theirs = _exchange_flag(self.exchange)
        if other is not None:
            return (
                f"{mine}, and {other.name}, which is in this run, does so with {theirs}: start all nodes of a run with "
                "the same"
            )
        if self.waiting:
            text = f"{mine}, and deltas of nodes that trained with {theirs} have not landed yet"
            return f"{text}: start it again in a few seconds"
        self.exchange = hello.exchange
        # synchronous nodes all publish the same at the end: it must land once, whole
        self.rounds = FragmentRounds(AfterAll() if self.exchange else self.rule, together=self.settings.carries_all)
        return ""

    def _obstacle_to_share(self, sender: PeerId, hello: Hello) -> str:
        """Return why a node cannot take part as the PC of a pipeline that it is, or as a whole node; "" if it can."""
        name, settings, share = printable(hello.name, MAX_NAME), self.settings, _share_of(hello)
        others = [member for peer, member in self.members.items() if member.is_node and peer != sender]
        known = parts_of(self.model) if self.version >= 0 else ()
        if share is None and settings.pipeline:
            return f"this run trains with pipelines: start {name} with zmqtrain-node, or with zt.PipelineNode"
        if share is None:
            if known or any(member.holds is not None for member in others):
                return (
                    f"this run is one of pipelines, and {name} would train the whole model: start it as a pipeline too"
                )
            return ""
        if any(member.holds is None for member in others) or (self.version >= 0 and not known):
            return f"{name} is a PC of a pipeline, and the nodes of this run have the whole model: use another broker"
        if known and len(set(known)) != share.parts:
            return (
                f"this run's model has {len(set(known))} parts, and that of {name} {share.parts}: give all pipelines "
                "of a run the same loss, batch and micro-batches"
            )
        mates = [one.holds for one in others if one.holds is not None and one.holds.pipeline == share.pipeline]
        if any(share.overlaps(mate) or share.parts != mate.parts for mate in mates):
            return f"another PC of its pipeline has some of the parts that {name} would have"
        if settings.shards > 1:
            return "this run has several brokers: pipelines train with one"
        if settings.mode == "strict" or settings.elastic < 1 or self.exchange:
            return "pipelines train in the default mode, without --elastic and without --exchange"
        if settings.trains_apart or settings.initial in ("mean", "own"):
            text = "this run compares nodes before they have common parameters"
            return f"{text} (--initial {settings.initial}): with pipelines say --initial founder"
        return ""

    def _member(self, peer: PeerId, hello: Hello, before: Member | None, now: float) -> Member:
        """Return the record of a peer that joins. before: its record on its last connection."""
        state = STATE_OF_ROLE.get(hello.role, MemberState.WELCOMED)
        name = printable(hello.name, MAX_NAME)
        member = Member(peer, name, state, now, now, hello.version, hello.version < 0, number=self._came)
        member.link, member.share, member.checkpoints = hello.link, hello.share, hello.checkpoints
        member.holds, member.whole = _share_of(hello), hello.whole
        if state is MemberState.STANDBY:
            member.address = hello.address
        if before is None:
            member.counted = self.counts_newcomers
            return member
        member.number, member.counted, member.same_as = before.number, before.counted, before.same_as
        member.contributions, member.samples, member.report = before.contributions, before.samples, before.report
        member.dropped, member.steps, member.units = before.dropped, before.steps, before.units
        return member

    def _welcome(self, member: Member) -> Welcome:
        peer = member.peer
        return Welcome(
            run=self.run,
            version=self.version,
            settings=self.settings.to_dict(),
            model=model_to_wire(self.model_of(member)) if self.version >= 0 else (),
            landed=self.records.landed(peer),
            accepted=tuple(publish.sequence for sender, publish in self.waiting if sender == peer),
            schedules=self.timetable.since(self.version),
            shard=self.shard,
            shards=(self.first,) if self.shard else self.shards.addresses,
            heard=self.records.heard(peer),
            term=self.term,
            standby=self.lease.standby,
            called=member.called,
            samples=self.samples,
        )

    # ------------------------------------------------------------------ leaving

    def gone(self, peer: PeerId, why: str, now: float) -> list[HubEffect]:
        """A peer is gone, and nothing that it may still have in flight counts."""
        return self.lose(self.members[peer], why, now) if peer in self.members else []

    def unreachable(self, peer: PeerId, now: float) -> None:
        """The connection to a peer is gone; messages it sent before may still be read: it is lost a moment later."""
        member = self.members.get(peer)
        if member is not None and member.unreachable_since is None:
            member.unreachable_since = now

    def look_over(self, late: float, now: float) -> list[HubEffect]:
        """Lose peers after their timeout, ask those that are overdue, and end quarantines.

        late: seconds for which this hub itself did not listen.
        """
        effects: list[HubEffect] = []
        if self.stopped_at is not None and now - self.stopped_at >= STOP_SECONDS:
            effects += self._send_nodes_away(now, frozenset(MemberState))
        for member in list(self.members.values()):
            if member.peer in self.members:  # else disconnected because of one that was lost before it
                effects += self._look_at(member, late, now)
        return effects

    def _look_at(self, member: Member, late: float, now: float) -> list[HubEffect]:
        effects: list[HubEffect] = []
        if late:
            member.last_seen = min(now, member.last_seen + late)
            if member.unreachable_since is not None:
                member.unreachable_since = min(now, member.unreachable_since + late)
        silent = now - member.last_seen
        timeout = SILENCE_SECONDS if member.state is MemberState.PROCESS else self.settings.lost_seconds
        overdue = self.settings.heartbeat_seconds + OVERDUE_SECONDS
        if silent > timeout:
            effects += self.lose(member, f"silent for {silent:.1f} s", now)
        elif member.unreachable_since is not None:
            if now - member.unreachable_since >= LAST_WORDS_SECONDS:
                effects += self.lose(member, "its connection is gone", now)
        elif self._keeps_others_waiting(member, late, now):
            text = "it was asked for its parameters, others wait for them, and they have not come in time"
            effects.append(SendTo(member.peer, Refused("unknown", text)))
            effects += self.lose(member, text, now)
        elif member.is_node and now - max(member.last_seen, member.asked_at) > overdue:
            member.asked_at = now
            effects.append(SendTo(member.peer, self.roster(now)))
        over = member.quarantined and not self.quarantines.rest(member.peer, now)
        member.quarantined = self.quarantines.rest(member.peer, now) > 0
        if over and member.state is MemberState.LIVE:
            # its pending delta since then is the offence of its quarantine many times over
            effects.append(_restart(member, OVER))
        return effects

    def _keeps_others_waiting(self, member: Member, late: float, now: float) -> bool:
        """Whether a node that was asked for its parameters takes longer than a sound one while others wait.

        At the first of several brokers it announces them after it has brought the other brokers theirs.
        """
        if member.state not in (MemberState.FOUNDING, MemberState.LENDING) or self.shard:
            member.founds_since = None
            return False
        member.founds_since = now if member.founds_since is None else min(now, member.founds_since + late)
        size = sum(sum(one.sizes) for one in member.open.values())
        if self.settings.shards > 1:
            size += 4 * count_values(self.model)
        in_time = now - member.founds_since <= FOUNDER_SECONDS + size / FOUNDER_BYTES_PER_SECOND
        return not in_time and bool(self.members.in_state(MemberState.WAITING, MemberState.APART))

    def _send_nodes_away(self, now: float, states: Collection[MemberState]) -> list[HubEffect]:
        effects: list[HubEffect] = []
        for member in list(self.members.values()):
            if member.is_node and member.state in states and member.peer in self.members:
                effects.append(SendTo(member.peer, Refused("stopped", STOPPED)))
                effects += self.lose(member, STOPPED, now)
        return effects

    def lose(self, member: Member, text: str, now: float, reason: str = "lost") -> list[HubEffect]:
        """Remove a peer that is gone. text: why, for people; reason: "goodbye" if it has said so."""
        del self.members[member.peer]
        self.fence.close(member.peer)
        self.news = True
        if member.state is MemberState.OBSERVER:
            return [Disconnect(member.peer, "observer", text)]
        if member.state is MemberState.STANDBY:
            self.lease.lost()
            return [Disconnect(member.peer, "standby", text), Broadcast(self.roster(now))]
        if member.state is MemberState.PROCESS:
            gone = self.groups.gone(member.peer, text, left=reason == "goodbye")
            return [Disconnect(member.peer, "process", text), *gone]
        if member.state is MemberState.SHARD:
            self.shards.forget(member.peer)
            return [Disconnect(member.peer, "broker", text), Broadcast(self.roster(now))]
        if reason == "goodbye":
            self.lease.said_goodbye(member.peer, member.joined)
        effects: list[HubEffect] = [Disconnect(member.peer, reason, text)]
        effects += self.units.lost(member.peer, unbacked=not self.backs(member))
        effects += self.initialization.left(member)
        if member.holds is not None:
            text = f"{member.name}, which has parts of the same delta, is gone"
            effects += self._refuse_parts(self.turns.forget(member.holds.pipeline), text)
        if self.exchange:  # a node that left before the end is no part of the common end
            self.rounds.forget(member.peer)
        return effects + self.release(now) + self.units.end_when_drained(self.version)

    def _on_goodbye(self, member: Member, goodbye: Goodbye, now: float) -> list[HubEffect]:
        text = f"said goodbye: {printable(goodbye.reason)}" if goodbye.reason else "said goodbye"
        if member.state is MemberState.STANDBY:
            self.lease.dismissed(goodbye.reason)
        return self.lose(member, text, now, reason="goodbye")

    # ------------------------------------------------------------------ parameters of the run

    def _on_fetch(self, member: Member, fetch: Fetch, now: float) -> list[HubEffect]:
        member.digest, member.held = fetch.digest[:MAX_NAME], fetch.held
        if member.state is MemberState.OBSERVER:
            if self.version < 0:
                return [SendTo(member.peer, Refused("unfounded", UNFOUNDED))]
            return [Serve(member.peer, fetch.version, (), digest=fetch.digest, held=fetch.held)]
        if member.state is MemberState.LIVE and not fetch.model:
            return []  # a score, of the mean or of its own parameters, that nobody needs any more
        if member.whole and self.settings.shards > 1:
            return self.initialization.send_away(member, "model", DIVIDED)
        if self.is_taken_back(fetch.version):  # it was not here when the others were told
            return [_restart(member, "what this node has is of versions that the run has taken back")]
        if member.restarts or member.quarantined:
            member.begins_at, member.restarts = self.version, False
        if member.state is MemberState.LIVE:
            member.known_version = fetch.version
            landed = self.records.landed(member.peer)
            return [Serve(member.peer, member.known_version, landed, digest=fetch.digest, held=fetch.held)]
        if self.shard and fetch.founding > self.initialization.number and self.version > 0:
            text = (
                f"shard {self.shard} of {self.run} is trained already, up to version {self.version}, and the first "
                "broker begins a new run: restart that with its checkpoint, or all brokers without"
            )
            return self.initialization.send_away(member, "founding", text)
        effects = self._begun(self.initialization.fetched(member, fetch))
        if member.peer not in self.members:  # it was sent away
            effects += self.units.lost(member.peer, unbacked=not self.backs(member))
        return effects

    def _on_snapshot(self, member: Member, snapshot: Snapshot, now: float) -> list[HubEffect]:
        if member.open:  # a second one would initialize the run again
            raise RemoteProtocolError(member.peer, member.state.value, "a second Snapshot")
        member.open[snapshot.transfer] = snapshot
        return [Expect(member.peer, snapshot)]

    def averaged(self) -> list[HubEffect]:
        """The parameters of an Average are related, and their mean is ready: it begins the run, or is voted on."""
        return self._begun(self.initialization.averaged())

    def unrelated(self, text: str) -> list[HubEffect]:
        """The parameters of an Average are not related: `text` explains it to the waiting nodes."""
        return self.initialization.unrelated(text)

    def _begun(self, effects: list[HubEffect]) -> list[HubEffect]:
        founded = self.initialization.founded
        if self.version >= 0 and not founded:  # it starts over: what is pending is obsolete
            self.clear_rounds()
            self.best = None
        self.version = max(self.version, 0) if founded else -1
        return effects

    # ------------------------------------------------------------------ contributions

    def _on_publish(self, member: Member, publish: Publish, now: float) -> list[HubEffect]:
        if member.holds is not None and publish.fragment >= 0:  # it counts its parts from 0
            publish = replace_fields(publish, fragment=publish.fragment + member.holds.first)
        if self._is_duplicate(member, publish):
            self.fence.count(Verdict.DUPLICATE)
            return []
        if (fault := self._fault_of(member, publish)) is not None:
            return [self._refuse(member, publish, *fault), *self._refuse_turn(member, publish)]
        if self.shard:
            member.idle = False  # it trains again
        self.records.hear(member.peer, publish.sequence)
        member.open[publish.transfer] = publish
        return [Expect(member.peer, publish)]

    def received(self, peer: PeerId, transfer: int, now: float) -> list[HubEffect]:
        """All chunks of an expected transfer are here and are sound."""
        member = self.members.get(peer)
        announcement = member.open.pop(transfer, None) if member else None
        if member is None or announcement is None:
            return []
        if isinstance(announcement, Snapshot):
            return self._begun(self.initialization.whole(member, announcement))
        if self._is_obsolete(member, announcement):
            refused: list[HubEffect] = [self._refuse(member, announcement, *RESTART), Dismiss(peer, announcement)]
            return [*refused, *self._refuse_turn(member, announcement)]
        effects, whole = list[HubEffect](), tuple[Part, ...](((peer, announcement),))
        if member.holds is not None:
            if not self.members.is_whole(member):  # a PC of it has gone meanwhile
                return [self._refuse(member, announcement, *BROKEN_PIPELINE), Dismiss(peer, announcement)]
            whole, dead = self.turns.add(member.holds, peer, announcement)
            effects += self._refuse_parts(dead, "a part of the same delta did not come, or its turn does not rise")
            if any(one is announcement for _, one in dead):
                return effects
        if whole:
            self.rounds.add(*whole[0], now)
        self.quarantines.accepted(peer, self.voter_of(peer), now)
        member.contributions, member.counted = member.contributions + 1, True
        self.units.ledger.back(peer)
        if member.holds is None or announcement.fragment == member.holds.first:  # all parts stand for the same steps
            member.samples += announcement.samples
            settings = self.timetable.at(self.version)
            member.steps += min(announcement.steps, 2 * (settings.every + settings.delay))
        member.staleness = self.version - announcement.base_version
        if not self.rounds.rule.one_each:
            effects += [Accumulate(sender, one) for sender, one in whole]
        return effects + self.release(now)

    def broken(self, peer: PeerId, transfer: int, reason: str, text: str, now: float) -> list[HubEffect]:
        """An expected transfer is not sound, or was never acceptable: refuse it; nothing of it is used."""
        member = self.members.get(peer)
        announcement = member.open.pop(transfer, None) if member else None
        if member is None or announcement is None:
            return []
        if isinstance(announcement, Snapshot):
            return self.initialization.send_away(member, reason, text) + self.initialization.left(member)
        refused = [self._refuse(member, announcement, reason, text), *self._refuse_turn(member, announcement)]
        return refused + self._offended(member, reason, text, now)

    def left_out(self, peer: PeerId, reason: str, text: str, now: float) -> list[HubEffect]:
        """A landed delta is excluded from its version's sum, because it is far larger than the others of its round."""
        member = self.members.get(peer)
        self.refused += 1
        if member is None:
            return []
        member.refused += 1
        return self._offended(member, reason, text, now)

    def _is_duplicate(self, member: Member, publish: Publish) -> bool:
        """Whether this very publish is in flight, accepted or landed."""
        known = {one.sequence for one in self._not_landed(member)}
        return publish.sequence in known.union(sequence for sequence, _ in self.records.landed(member.peer))

    def _not_landed(self, member: Member) -> list[Publish]:
        waiting = [one for peer, one in self.waiting if peer == member.peer]
        return waiting + [one for one in member.open.values() if isinstance(one, Publish)]

    def _fault_of(self, member: Member, publish: Publish) -> tuple[str, str] | None:
        """Return the code and the sentence with which a publish is refused; None if it is welcome."""
        settings = self.settings
        if publish.sequence <= self.records.heard(member.peer) or publish.transfer in member.open:
            return "duplicate", f"sequence {publish.sequence} was heard before"
        if member.quarantined:
            return "quarantine", "this node is quarantined: nothing of it is taken now"
        if self._is_obsolete(member, publish):
            return RESTART
        if (publish.turn < 0) != (member.holds is None):
            return "turn", f"turn {publish.turn}, which only the PCs of a pipeline have, and they always"
        if member.holds is not None and not self.members.is_whole(member):
            return BROKEN_PIPELINE
        if member.holds is not None and not member.holds.first <= publish.fragment < member.holds.end:
            return "fragment", f"part {publish.fragment}, which is not one of this PC's"
        if not 0 <= publish.fragment < self.fragments:
            return "fragment", f"fragment {publish.fragment} of a run with {self.fragments}"
        if not (publish.codec == "float32" if publish.dense else self.timetable.takes(publish.codec)):
            taken = self.timetable.at(self.version).codec
            return "codec", f"coded as {printable(publish.codec)!r}; this run takes {taken!r}"
        if publish.base_version > self.version:
            return "version", f"based on version {publish.base_version}; the run is at {self.version}"
        staleness = self.version - publish.base_version
        if self._too_stale(staleness) and settings.stale == "return" and not publish.dense:
            text = f"based on version {publish.base_version}, {staleness} behind; this run takes what is at most "
            return "stale", f"{text}{settings.max_staleness} behind"
        if not (0 <= publish.samples <= MAX_SAMPLES and 0 <= publish.steps <= MAX_SAMPLES):
            return "samples", f"stands for {publish.samples} samples in {publish.steps} steps"
        waiting = self._not_landed(member)
        at_once = self.fragments if settings.carries_all or member.holds is not None else 1
        in_flight = self.timetable.at(self.version).offers_in_flight * at_once
        most_bytes = max(MOST_WAITING_BYTES, (1 + in_flight) * 4 * count_values(self.model))
        waiting_bytes = sum(sum(one.sizes) for one in (*waiting, publish))
        if len(waiting) >= max(MOST_WAITING, in_flight) or waiting_bytes > most_bytes:
            text = f"{len(waiting)} publishes of this node have not landed; no node that keeps to the settings has so "
            return "waiting", f"{text}many, or such large ones"
        return None

    def _is_obsolete(self, member: Member, publish: Publish) -> bool:
        """Whether a publish was computed before its node started again, or on parameters that are taken back.

        A node that has asked for the snapshot to start again from may publish until that has come.
        """
        base, begins_at = publish.base_version, member.begins_at
        return member.restarts or (begins_at is not None and base < begins_at) or self.is_taken_back(base)

    def _refuse(self, member: Member, publish: Publish, reason: str, text: str) -> SendTo:
        member.refused += 1
        self.refused += 1
        return SendTo(member.peer, Refused(reason, text, publish.sequence))

    def _refuse_turn(self, member: Member, publish: Publish) -> list[HubEffect]:
        """Refuse the other parts of a pipeline's delta of which one is refused."""
        if member.holds is None:
            return []
        text = f"another part of the same delta was refused, at {member.name}"
        return self._refuse_parts(self.turns.refuse(member.holds, publish), text)

    def _refuse_parts(self, parts: Sequence[Part], text: str) -> list[HubEffect]:
        effects: list[HubEffect] = []
        for peer, publish in parts:
            effects.append(Dismiss(peer, publish))
            if (member := self.members.get(peer)) is not None:
                effects.append(self._refuse(member, publish, "turn", text))
        return effects

    def release(self, now: float) -> list[HubEffect]:
        """Make versions of the rounds that are due; return what the aggregator is to do for them."""
        if self.version < 0:
            return []
        effects: list[HubEffect] = []
        if self.began_at is not None and now - self.began_at >= GRACE_SECONDS and not self.rounds.rule.one_each:
            for member in self.members.values():  # nodes that have not contributed are awaited no longer
                member.counted = bool(member.contributions)
        if not self.complete:  # the first began with so many at once; here they come one after another
            self.complete = len(self.members.training) >= self.settings.start_nodes
        while self.complete and (taken := self.rounds.take(self.awaited, now)):
            first = min(self.rounds.came)
            came = {(peer, one.sequence): at - first for (peer, one), at in zip(taken, self.rounds.came, strict=True)}
            if self.rounds.rule.one_each:
                # a stated order: the sum of floats depends on it (strict mode is bit-identical)
                taken.sort(key=lambda one: one[0])
            senders = {peer for peer, _ in taken}
            contributions: list[Contribution] = []
            for peer, publish in taken:
                parts = self.turns.spread([(peer, publish)])
                late = came[peer, publish.sequence]
                own = [self._contribution(sender, one, late, peer) for sender, one in parts]
                stale = any(one.too_stale for one in own)  # a turn lands whole, with or without weight
                contributions += [replace_fields(one, too_stale=stale) for one in own]
                if self.rounds.rule.one_each:
                    effects += [Accumulate(sender, one) for sender, one in parts]
            everybody = max(len(self.members.counted | senders), self.units.nodes_at_the_end)
            scheduled = self.timetable.at(self.version)
            reduce = Reduce(
                version=self.version + 1,
                fragments=tuple(sorted({one.fragment for one in contributions})),
                contributions=tuple(contributions),
                live=len(senders) if self.exchange else everybody,
                dense=any(publish.dense for _, publish in taken),
                plain=bool(self.exchange),
                codec=scheduled.broadcast_codec if self.settings.is_planned else "",
                outer=scheduled.outer if self.settings.is_planned else "",
            )
            self.version = reduce.version
            for peer, sequence in reduce.landed:
                self.records.land(peer, sequence, self.version)
            self.samples += reduce.samples
            self.contributions += len(taken)
            effects.append(reduce)
            if self.began_at is None:
                self.began_at = now
        return effects

    def _contribution(self, peer: PeerId, publish: Publish, late: float, node: PeerId) -> Contribution:
        """node: the peer that stands for the sender: of a pipeline, the PC with part 0."""
        staleness = self.version - publish.base_version
        return Contribution(
            peer=peer,
            sequence=publish.sequence,
            fragment=publish.fragment,
            samples=publish.samples,
            score=publish.score,
            base_version=publish.base_version,
            staleness=staleness,
            too_stale=self._too_stale(staleness) and self.settings.stale == "drop" and not publish.dense,
            late=late,
            node=node if publish.turn >= 0 else PeerId(""),
            turn=publish.turn,
        )

    def _too_stale(self, staleness: int) -> bool:
        return 0 < self.settings.max_staleness < staleness

    # ------------------------------------------------------------------ nodes that diverge

    def _offended(self, member: Member, reason: str, text: str, now: float) -> list[HubEffect]:
        """A delta of this node was refused for its content: quarantine a node that repeats that."""
        seconds = self.quarantines.refused(member.peer, reason, now)
        if not seconds:
            return []
        live = {one.peer: self.voter_of(one.peer) for one in self.members.in_state(MemberState.LIVE)}
        effects: list[HubEffect] = []
        if reason == "norm" and (out := self.quarantines.wrongly(live, now)):
            if not (why := self._obstacle_to_widening(out)):
                return self._acquit(out)
            effects = [Rebase(out, why)]
        member.quarantined = True
        effects.append(SendTo(member.peer, Quarantine(reason, text, seconds)))
        if member.holds is not None:
            mates = [one for one in self.members.pipeline(member) if one is not member]
            effects += self._refuse_parts(self.turns.forget(member.holds.pipeline), f"{member.name} is quarantined")
            effects += [
                _restart(one, f"{member.name}, of the same pipeline, is quarantined")
                for one in mates
                if one.state is MemberState.LIVE
            ]
        takes_back = reason in DIVERGED and self.settings.mode == "default" and self.settings.shards == 1
        if takes_back and not self.exchange:
            effects.append(TakeBack(member.peer))
        return effects + self.release(now)

    def _obstacle_to_widening(self, out: Sequence[PeerId]) -> str:
        """Return why the norm gate may not admit larger deltas, "" if it may: the first time, and again if the shared
        parameters have not become worse since the last."""
        version, loss = self.loss(out)
        if self.widened is not None:
            widened_at, before = self.widened
            if isnan(loss) or isnan(before):
                return "it has done so once, and nobody says how the shared parameters score"
            if version <= widened_at:
                return f"it has done so at version {widened_at}, and no later one is evaluated yet"
            if is_barrier(before, loss):
                gone = f"from {before:.4g} to {loss:.4g}"
                return f"since it has done so, at version {widened_at}, the loss has gone {gone}"
        self.widened = (self.version, loss)
        return ""

    def _acquit(self, peers: Sequence[PeerId]) -> list[HubEffect]:
        """More than half cannot all be wrong: the gate is. It adapts to their size, and they are acquitted."""
        effects: list[HubEffect] = [Rebase(tuple(peers))]
        for peer in peers:
            self.quarantines.acquit(peer)
            if self.members[peer].quarantined:  # and was told so
                self.members[peer].quarantined = False
                effects.append(SendTo(peer, Quarantine("over", "the norm gate of the broker was wrong", 0.0)))
        return effects

    def take_back(self, peer: PeerId, version: Version) -> list[HubEffect]:
        """Go back, by a further version, to what was published at this one: `peer` diverged, and was part of what came
        after it. All nodes start again from that. [] if that is not to be.

        What was computed since was computed on parameters that are taken back, and is dropped where it waits. So that
        no node can hold up a run for ever, the next one is at least as many versions later as this one takes back.
        """
        if not 0 <= version < self.version or self.version < self.rests_until:
            return []
        effects: list[HubEffect] = []
        for sender, publish in self.waiting:
            if (member := self.members.get(sender)) is not None:
                effects.append(self._refuse(member, publish, *RESTART))
        self.clear_rounds()
        fragments, taken = tuple(range(self.fragments)), self.version - version
        self.version += 1
        self.rests_until, self.taken_back = self.version + taken, (version, self.version)
        live = max(1, len(self.members.training))
        effects.append(Reduce(self.version, fragments, (), live, dense=True, back_to=version))
        text = f"the run goes back to version {version}: {printable(peer)} had diverged"
        return effects + [_restart(one, text) for one in self.members.in_state(MemberState.LIVE)]

    # ------------------------------------------------------------------ the run and its members

    @property
    def model(self) -> ModelSpec:
        """The run's model; before the run has one, that of the node that is asked for its parameters."""
        return self.initialization.model

    @property
    def waiting(self) -> list[Part]:
        """The publishes that are accepted and in no version yet; of pipelines, also the parts of open turns."""
        return self.turns.parts_behind(self.rounds.pending)

    def model_of(self, member: Member) -> ModelSpec:
        """Return what a member has of the run's model."""
        share = member.holds
        return self.model if share is None else leaves_of_parts(self.model, share.first, share.end)

    @property
    def fragments(self) -> int:
        return self.settings.fragments_of(self.model)

    @property
    def live(self) -> frozenset[PeerId]:
        """The nodes that train now; an idle node has no data left."""
        members = self.members
        return frozenset(peer for peer in members.training if not (members[peer].idle or members[peer].drained))

    @property
    def awaited(self) -> frozenset[PeerId]:
        """The nodes from which a round may await a contribution; in synchronous runs, all that end together."""
        if self.exchange:
            return frozenset(peer for peer in self.members.training if not self.members[peer].drained)
        return frozenset(peer for peer in self.live if self.members[peer].counted)

    @property
    def counts_newcomers(self) -> bool:
        """Whether a new node is awaited and counted before its first delta: before this hub's first release, and where
        a round takes one delta of each node."""
        return self.rounds.rule.one_each or self.began_at is None

    @property
    def nodes(self) -> int:
        return sum(member.is_node for member in self.members.values())

    @property
    def evaluator(self) -> PeerId | None:
        """The node that scores the shared model: the one live for longest, of those with the run's held-out data. No PC
        of a pipeline has the whole of it."""
        live = [one for one in self.members.in_state(MemberState.LIVE) if one.holds is None]
        return next((one.peer for one in live if not self.evaluated_on or one.held_out == self.evaluated_on), None)

    @property
    def standby(self) -> Member | None:
        return next(iter(self.members.in_state(MemberState.STANDBY)), None)

    @property
    def worse(self) -> tuple[Version, float] | None:
        """The best evaluation, if the last one has ten times its loss or more; else None."""
        loss = self.scores.get("loss", nan)
        return self.best if self.best is not None and self.best[1] > 0 and loss >= WORSE * self.best[1] else None

    def backs(self, member: Member) -> bool:
        """Whether work of this node is in the run: it has contributed, or exchanges past this hub."""
        return bool(self.exchange or member.contributions)

    def is_taken_back(self, version: Version) -> bool:
        """Whether the parameters of this version are taken back."""
        back_to, by = self.taken_back
        return back_to < version < by

    def voter_of(self, peer: PeerId) -> str:
        """Return the voter that a peer counts as: its key, which other peers may share; without keys, the peer."""
        member = self.members.get(peer)
        return member.voter if member is not None and member.voter else peer

    def loss(self, but: Collection[PeerId]) -> tuple[Version, float]:
        """Return the version and the loss of the last evaluation; without one, the median training loss that the nodes
        except these report. NaN: not known."""
        if isfinite(loss := self.scores.get("loss", nan)):
            return self.score_version, loss
        others = [one.report.loss for one in self.members.values() if one.report is not None and one.peer not in but]
        known = [loss for loss in others if isfinite(loss)]
        return self.version, median(known) if known else nan

    def believes(self, peer: PeerId, report: Report) -> bool:
        """Whether a report's scores are the run's: the evaluator's, of a version that is not too old."""
        timely = self.score_version <= report.score_version <= self.version
        return bool(report.scores) and timely and peer == self.evaluator

    def evaluated(self, version: Version, scores: Mapping[str, float]) -> None:
        self.scores, self.score_version = dict(scores), version
        loss = self.scores.get("loss", nan)
        if isfinite(loss) and (self.best is None or loss < self.best[1]):
            self.best = version, loss

    def compare_start(self, member: Member) -> None:
        """Look for another node that made the same first step on a batch that was not dealt to both: as far as is
        known, both train on the same data."""
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
        """Whether a node trains without data units, in a run that ends when so many are done."""
        report = member.report
        limited = self.units.ledger.total > 0 and not self.shard and not member.follows
        return limited and report is not None and report.step > 0 and report.first_unit < 0

    def seconds(self, now: float) -> float:
        """Return how long the run has lasted, with what it lasted before a restart of its broker."""
        return self._seconds_before + now - self._began

    def divided(self, shards: int) -> None:
        """Take it that the model is divided among so many brokers; before anything of the run is here."""
        self.settings = self.initialization.settings = replace(self.settings, shards=shards)
        self.timetable = Timetable(self.settings)
        self.replanning = Replanning(self.timetable, self._planner, self.rule)
        self.shards = ShardRegistry(shards)
        if self.hosting is not None:
            self.hosting.divided(self.shards)

    def _divide(self, now: float) -> list[HubEffect]:
        """Decide, once all nodes wait with which the run begins, among how many brokers the model is divided."""
        waiting = self.members.in_state(MemberState.WAITING)
        if len(waiting) < self.settings.start_nodes:
            return []
        whole = self.hosting is None or self.exchange or any(one.whole for one in waiting)
        shards = 1 if whole else division(len(waiting), waiting[0].model, self.settings.fragments)
        why = ""
        if shards > 1 and self.standby is not None:
            shards, why = 1, f"{self.standby.name} is its standby, and a standby follows one broker"
        if shards > 1:
            assert self.hosting is not None
            effects, serving, why = self.hosting.trials.look(waiting, now)
            if serving is None:
                return effects
            self.hosting.spare(one.peer for one in waiting if one.peer not in serving)
            shards = 1 if why else division(len(serving), waiting[0].model, self.settings.fragments)
        self.divided(shards)
        return [Divide(shards, why), Broadcast(self.roster(now)), *self._begun(self.initialization.go_on())]

    def _on_host(self, member: Member, host: Host, now: float) -> list[HubEffect]:
        if self.hosting is None:
            return []
        if not host.shard:
            return self.hosting.trials.answered(member, host)
        if not host.unreached:
            return self.hosting.declines(member.peer, host)
        effects, holder = self.hosting.unreached(member.peer, host, self.version >= 0)
        if holder is None:
            return effects
        text = f"{member.name} does not reach it"
        return [SendTo(holder, Refused("shard", text)), *self.lose(self.members[holder], text, now)]

    def follow(self, planned: RunSettings) -> list[HubEffect]:
        """Plan as the first broker does, at another of several. planned: what holds there, or will."""
        schedule = self.replanning.follow(self.version, planned)
        return [] if schedule is None else [Broadcast(schedule)]

    def _describe(self, member: Member, software: str, now: float) -> dict[str, Scalar]:
        """software: the versions that most nodes have."""
        entry = member.describe()
        entry["silent"] = max(0.0, now - member.last_seen)
        if (report := member.report) is not None:
            if report.software not in ("", software):
                entry["software"] = printable(report.software, MAX_WORDS)
            if report.data and report.data != self.data:
                entry["other_data"] = True
        if (other := self.same_start(member)) is not None:
            entry["same_batches_as"] = other.called
        if self.takes_no_units(member):
            entry["takes_no_units"] = True
        return entry

    @property
    def crowded(self) -> dict[str, Scalar]:
        """While offers are put off, their share, and which k and d would fit where smaller ones are configured."""
        offers, given, holding = self.replanning.offers, self.settings, self.timetable.at(self.version)
        if not offers.put_off:
            return {}
        (every, delay), told = self.replanning.fits, dict[str, Scalar](put_off=offers.put_off)
        if offers.crowded and given.every != AUTO_EVERY and every > holding.every:
            told["fitting_every"] = every
        if offers.crowded and given.delay != AUTO_DELAY and delay > holding.delay:
            told["fitting_delay"] = delay
        return told

    def roster(self, now: float) -> Roster:
        settings, worse = self.timetable.at(self.version), self.worse
        nodes = [member for member in self.members.values() if member.is_node]
        installed = Counter(one.report.software for one in nodes if one.report is not None and one.report.software)
        software = max(installed, key=lambda versions: (installed[versions], versions), default="")
        return Roster(
            version=self.version,
            members=tuple(self._describe(member, software, now) for member in nodes),
            evaluator="" if (evaluator := self.evaluator) is None else self.members[evaluator].called,
            samples=self.samples,
            contributions=self.contributions,
            units_done=self.units.ledger.done_count,
            units_total=self.units.ledger.total,
            seconds=self.seconds(now),
            scores=dict(self.scores),
            score_version=self.score_version,
            every=settings.every,
            delay=settings.delay,
            shards=self.shards.addresses if not self.shard else (),
            exchange=self.exchange,
            hub={
                "term": self.term,
                "standby": self.lease.standby,
                "without": self.lease.without,
                "codec": settings.codec,
                "broadcast_codec": settings.broadcast_codec,
                "outer": settings.outer,
                "plan": self.plan,
                **self.crowded,
                **({"software": printable(software, MAX_WORDS)} if software else {}),
                **({} if self.stopped_at is None else {"ending": True}),
                **self.fence.dropped,
                **self.groups.forming,
                **({} if worse is None else {"best_version": worse[0], "best_loss": worse[1]}),
            },
        )

    # ------------------------------------------------------------------ standby, checkpoint and restart

    def in_step(self, now: float) -> list[HubEffect]:
        """The standby holds all that nodes have heard of; from now on it holds each version before they hear of it."""
        standby = self.standby
        if standby is None:
            return []
        self.lease.joined(standby.address)
        return [SendTo(standby.peer, Books(self.books(now))), Broadcast(self.roster(now))]

    def await_all(self, versions: tuple[Version, ...]) -> None:
        """In strict mode, after a restart: wait for all nodes, and go back with them to the newest of these versions
        that all of them have kept."""
        if self.version >= 0:
            self.initialization.await_all(versions)

    def rewound(self, state: dict[str, Any]) -> list[HubEffect]:
        """All nodes have kept this state's version, as a Rewind asked: restore it, and begin if all are still here."""
        self.records.clear()
        # quarantines and the standby stay as they are now
        self.restore({name: part for name, part in state.items() if name != "tenure"} | {"quarantines": {}})
        self.records.forget_unlanded()  # those will be sent again
        self.clear_rounds()
        return self._begun(self.initialization.rewound(self.version))

    def clear_rounds(self) -> None:
        self.turns = Turns()
        self.rounds = FragmentRounds(self.rounds.rule, together=self.settings.carries_all)

    def state(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "shard": self.shard,
            "founding": self.initialization.number,
            "version": self.version,
            "settings": self.settings.to_dict(),
            "model": spec_to_plain(self.model),
            "samples": self.samples,
            "contributions": self.contributions,
            "seconds": round(self._seconds_before + self._ticked - self._began, 3),
            "records": self.records.state(),
            "term": self.term,
            "tenure": self.lease.state(),
            **self._between_releases(),
        }

    def _between_releases(self) -> dict[str, Any]:
        """The part of the state that changes between releases, as far as a standby must know it."""
        return {
            "ledger": self.units.ledger.state(),
            "scores": self.scores,
            "score_version": self.score_version,
            "best": self.best,
            "data": [self.data, self.evaluated_on],
            "schedules": [list(one) for one in self.timetable.since(self.version)],
            "quarantines": self.quarantines.state(),
        }

    def books(self, now: float) -> str:
        """Return, as JSON, what a standby must hear of besides releases, and the electorate. It is bound by that once
        it has read it."""
        here = {peer: self.records.incarnation(peer) for peer in sorted(self.members.electorate)}
        told = {
            "crew": here,
            "owners": {peer: owner for peer in here if (owner := self.records.owner(peer))},
            "in_step": self.lease.follows,
            "number": self.lease.tell(here, now),
            "tenure_number": self.lease.number,
        }
        return json.dumps({**self._between_releases(), **told}, separators=(",", ":"))

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` wrote; the caller compares the settings. Raises CheckpointError."""
        try:
            self.run, self.version = str(state["run"]), int(state["version"])
            if not (-1 <= self.version < MOST_VERSIONS and 0 <= int(state["samples"]) < MOST_VERSIONS):
                raise ValueError(f"version {self.version} after {state['samples']} samples cannot be")
            self.initialization.number = int(state.get("founding", 0))
            model = model_from_wire(model_to_wire(spec_from_plain(state["model"])))  # which checks its sizes
            self.units.restore(state["ledger"])
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
                self.lease.restore(state["tenure"])
        except (AttributeError, FramingError, LookupError, ArithmeticError, TypeError, ValueError) as error:
            raise CheckpointError(f"the state of the hub cannot be read: {error!r}") from error
        if self.version >= 0:
            self.initialization.resume(model)
        self.complete |= self.version > 0

    def replay(self, version: Version, landed: tuple[tuple[str, int], ...], samples: int) -> None:
        """Record a release that is in the journal but not in the checkpoint."""
        self.version, self.complete = version, True
        for peer, sequence in landed:
            self.records.land(PeerId(peer), sequence, version)
        self.samples += samples
        self.contributions += len(landed)


def _share_of(hello: Hello) -> Share | None:
    """Return what a sound Hello says that its sender holds as one PC of a pipeline."""
    return Share(hello.pipeline, *hello.holds) if hello.pipeline else None


def _restart(member: Member, reason: str) -> SendTo:
    """Have a live node drop what it has pending, and take none of its deltas until it has fetched a snapshot."""
    member.restarts = True
    return SendTo(member.peer, Preempt(reason))


def _check_hello(sender: PeerId, hello: Hello) -> None:
    """Raise RemoteProtocolError for a Hello that no sound peer says."""
    fits = LEAST_SHARE <= hello.share <= 1 and 0 <= hello.link <= MAX_LINK
    if not fits or 0 < hello.link < LEAST_LINK / hello.share:
        raise RemoteProtocolError(sender, "joining", f"a Hello with a link of {hello.link}, share {hello.share}")
    if len(hello.exchange) > MAX_WORDS:
        raise RemoteProtocolError(sender, "joining", "a Hello with an exchange of that length")
    if not 0 <= hello.incarnation < MAX_INCARNATION:
        raise RemoteProtocolError(sender, "joining", f"a Hello with the incarnation {hello.incarnation}")
    first, end, parts = hello.holds if len(hello.holds) == 3 else (0, 0, 0)
    if (hello.pipeline or hello.holds) and not (
        0 < len(hello.pipeline) <= MAX_NAME and hello.pipeline.isprintable() and 0 <= first < end <= parts <= MOST_PARTS
    ):
        raise RemoteProtocolError(sender, "joining", f"a Hello as the PC of a pipeline that holds {hello.holds[:4]}")
    if len(hello.in_flight) > MOST_WAITING or len(hello.checkpoints) > MOST_CHECKPOINTS:
        raise RemoteProtocolError(sender, "joining", "a Hello that names too many deltas or checkpoints")


def _exchange_flag(exchange: str) -> str:
    return f"--exchange {printable(exchange)}" if exchange else "no --exchange"
