"""Be the hub, without a socket or a clock: messages and `now` go in, effects come out.

Rule 1: `ALLOWED` says which message is welcome in which state; any other is a RemoteProtocolError, and costs that peer.
Rule 2: the hub knows publishes by their heads; what is in them is the aggregator's affair.
Rule 3: effects are carried out in the order in which they come.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from zmqtrain.errors import CheckpointError, FramingError, LocalProtocolError, RemoteProtocolError
from zmqtrain.protocol.dealing import Dealing
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
    Reduce,
    Replicate,
    SendTo,
    Serve,
)
from zmqtrain.protocol.fencing import GAP, MAX_INCARNATION, SUPERSEDED, UNKNOWN, Fence, Stamp, Verdict
from zmqtrain.protocol.founding import Founding, Preemption
from zmqtrain.protocol.fragment_rounds import FragmentRounds
from zmqtrain.protocol.groups import LATE_SECONDS, SILENCE_SECONDS, Groups
from zmqtrain.protocol.masters import ADDRESS, Claim, Masters
from zmqtrain.protocol.members import ALLOWED, MOST_CHECKPOINTS, MOST_WAITING, Member, MemberState, training
from zmqtrain.protocol.messages import (
    KEY_REQUESTS,
    Chunk,
    Credit,
    Fetch,
    Goodbye,
    Heartbeat,
    Hello,
    KeyRequest,
    Message,
    Preempt,
    Probe,
    Publish,
    Quarantine,
    Refused,
    Report,
    Roster,
    Schedule,
    Snapshot,
    Welcome,
    WorkRequest,
    model_from_wire,
    model_to_wire,
)
from zmqtrain.protocol.probes import ProbeBudget, is_sound
from zmqtrain.protocol.quarantine import Quarantines
from zmqtrain.protocol.records import Records
from zmqtrain.protocol.rounds import AfterAll, ReleaseRule
from zmqtrain.protocol.schedules import Planner, Replanning, Timetable
from zmqtrain.protocol.standby import Tenure
from zmqtrain.protocol.standby_messages import Books, Holding, Promote
from zmqtrain.protocol.words import MAX_NAME, MAX_WORDS, words
from zmqtrain.protocol.work import WorkLedger
from zmqtrain.settings import RunSettings
from zmqtrain.types import ModelSpec, PeerId, count_values

__all__ = ["MemberState", "ALLOWED", "Member", "Hub"]

ROSTER_SECONDS = 1.0
OVERDUE_SECONDS = 0.1
"""A node whose heartbeat is late by so much is sent something, to learn whether its connection is gone."""
MAX_SCORES = 32
"""What one Report may hold, besides words: the Roster holds those of all nodes, and is one head."""
MOST_MEMBERS = 512
"""Peers at one hub, of any kind: the Roster, which describes all nodes, stays readable (one head)."""
MAX_LINK = 1e12
"""Bytes per second that a node may say its port has: what is made of these must stay a number."""
BOOKS = ("ledger", "scores", "score_version", "schedules")
"""What of a hub's state changes besides its releases, as far as a standby must know it."""
LEAST_LINK, LEAST_SHARE = 1.0, 1e-6
"""And at least, of what it gives of it: what follows from it is no rate else."""
MAX_SAMPLES = 1 << 40
"""What one publish may stand for: the sum over a run must fit in a head's 64 bits."""
MOST_WAITING_BYTES = 64 << 20
"""What one node may have on its way or waiting for a round, in bytes; more only if the model is so large: one publish
of the whole of it for each that may be on its way, and one."""


class Hub:
    """The hub's state machine.

    settings, rule: of the run.  run: its id.  version: of the last aggregate, -1 until somebody has founded the run.
    preemption: who lags in a population (initial own); None: nobody.  planner: what k and d follow from, where the
    settings leave them open (auto); None: they stay as they begin.
    shard: which of several masters this is; all but
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
        self.settings, self.run, self.shard, self._first = settings, run, shard, first
        self.exchange = ""
        """How the nodes exchange gradients in every step, past this hub; "": they publish to it."""
        self.timetable = Timetable(settings)
        self.replanning = Replanning(self.timetable, planner if settings.is_planned else None)
        self._news = False  # since the last look whether another plan is due
        self.masters = Masters(settings.masters)
        self.version = -1
        self.members: dict[PeerId, Member] = {}
        self.rounds: FragmentRounds[Publish] = FragmentRounds(rule, settings.fragments)
        self._rule = rule
        self._dealing = Dealing(settings, self.members, shard)
        self._complete = not (shard and settings.mode == "strict")
        self.samples = self.contributions = self.refused = 0
        self.scores: dict[str, float] = {}
        self.score_version = -1
        self._records = Records()
        self.fence = Fence()
        self.term, self.tenure = 0, Tenure()
        self._probes = ProbeBudget()
        self._quarantines = Quarantines()
        self._groups = Groups()
        self._founding = Founding(settings, self.members, self._records.landed, preemption, shard)
        self._began = self._rostered = self._ticked = now
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
            Probe: self._on_probe,
            **self._groups.handlers,
            **dict.fromkeys(KEY_REQUESTS, self._on_key_request),
        }

    # ------------------------------------------------------------------ what comes in

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
        return Stamp(self._records.incarnation(peer)) if stamp is None else stamp

    def receive(self, sender: PeerId, message: Message, now: float) -> list[HubEffect]:
        """Take one message. Raises RemoteProtocolError when the sender's state does not allow it."""
        if isinstance(message, Hello):
            return self._on_hello(sender, message, now)
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
            return self._begun(self._founding.whole(member, announcement))
        assert isinstance(announcement, Publish)
        self.rounds.add(peer, announcement, now)
        self._quarantines.accepted(peer)
        member.contributions += 1
        member.samples += announcement.samples
        member.staleness = self.version - announcement.base_version
        accumulate: list[HubEffect] = [] if self.rounds.rule.one_each else [Accumulate(peer, announcement)]
        return accumulate + self._release(now)

    def broken(self, peer: PeerId, transfer: int, reason: str, text: str, now: float) -> list[HubEffect]:
        """An expected transfer is not sound (or was never acceptable): say so; nothing of it is used."""
        member = self.members.get(peer)
        announcement = member.open.pop(transfer, None) if member else None
        if member is None or announcement is None:
            return []
        if isinstance(announcement, Snapshot):
            return self._founding.send_away(member, reason, text) + self._founding.left(member)
        assert isinstance(announcement, Publish)
        return [self._refuse(member, announcement, reason, text), *self._offended(member, reason, text, now)]

    def gone(self, peer: PeerId, why: str, now: float) -> list[HubEffect]:
        """The connection to a peer is gone."""
        return self._lose(self.members[peer], why, now) if peer in self.members else []

    def tick(self, now: float) -> list[HubEffect]:
        """Let time pass: silent peers are lost, rounds fall due, the roster goes out."""
        effects: list[HubEffect] = self._groups.tick(now)
        late, self._ticked = max(0.0, now - self._ticked - LATE_SECONDS), now
        overdue = self.settings.heartbeat_seconds + OVERDUE_SECONDS
        for member in list(self.members.values()):
            process = member.state is MemberState.PROCESS
            if process and late:  # it may have spoken while nobody listened here, and its group is lost with it
                member.last_seen = min(now, member.last_seen + late)
            silent = now - member.last_seen
            if silent > (SILENCE_SECONDS if process else self.settings.lost_seconds):
                effects += self._lose(member, f"silent for {silent:.1f} s", now)
            elif member.is_node and now - max(member.last_seen, member.asked_at) > overdue:
                member.asked_at = now  # if its connection is gone, sending says so
                effects.append(SendTo(member.peer, self.roster(now)))
            member.quarantined = self._quarantines.rest(member.peer, now) > 0
        effects += self._release(now)
        if self._news:
            self._news = False
            live = [member for member in self.members.values() if member.state is MemberState.LIVE]
            if (schedule := self.replanning.look(self.version, self.model, live, now)) is not None:
                effects.append(Broadcast(schedule))
        if now - self._rostered >= ROSTER_SECONDS:
            self._rostered = now
            self.fence.keep(self.members)
            effects.append(Broadcast(self.roster(now)))
            if (standby := self.standby) is not None:
                effects.append(SendTo(standby.peer, Books(self.books())))
        return effects

    # ------------------------------------------------------------------ who is here

    @property
    def model(self) -> ModelSpec:
        """The run's model; before the run has one, that of the node that is asked for its parameters."""
        return self._founding.model

    @property
    def live(self) -> frozenset[PeerId]:
        """The nodes that train now and from which a contribution can be awaited (an idle node has no data left)."""
        return frozenset(
            peer
            for peer, member in self.members.items()
            if member.state is MemberState.LIVE and not (member.idle or member.drained or member.quarantined)
        )

    @property
    def nodes(self) -> int:
        """How many nodes are here, in whatever state."""
        return sum(member.is_node for member in self.members.values())

    @property
    def evaluator(self) -> PeerId | None:
        """The node that scores the shared model: the one that has been live longest."""
        return next((peer for peer, member in self.members.items() if member.state is MemberState.LIVE), None)

    def roster(self, now: float) -> Roster:
        """Describe the run and its members as they stand."""
        settings = self.timetable.at(self.version)
        return Roster(
            version=self.version,
            members=tuple(member.describe() for member in self.members.values() if member.is_node),
            evaluator=self.evaluator or "",
            samples=self.samples,
            contributions=self.contributions,
            units_done=self.ledger.done_count,
            units_total=self.ledger.total,
            seconds=now - self._began,
            scores=dict(self.scores),
            score_version=self.score_version,
            every=settings.every,
            delay=settings.delay,
            masters=self.masters.addresses if not self.shard else (),
            exchange=self.exchange,
            hub={"term": self.term, "standby": self.tenure.standby, **self.fence.dropped},
        )

    def measured(self, peer: PeerId, rate: float) -> None:
        """Take note of how fast a peer's link was seen, in bytes per second."""
        member = self.members.get(peer)
        if member is not None and member.measured != rate:
            member.measured, self._news = rate, True

    # ------------------------------------------------------------------ coming and going

    def _on_hello(self, sender: PeerId, hello: Hello, now: float) -> list[HubEffect]:
        fits = LEAST_SHARE <= hello.share <= 1 and 0 <= hello.link <= MAX_LINK
        if not fits or 0 < hello.link < LEAST_LINK / hello.share:
            raise RemoteProtocolError(sender, "joining", f"a Hello with a link of {hello.link}, share {hello.share}")
        if len(hello.exchange) > MAX_WORDS:
            raise RemoteProtocolError(sender, "joining", "a Hello with an exchange of that length")
        if not 0 <= hello.incarnation < MAX_INCARNATION:
            raise RemoteProtocolError(sender, "joining", f"a Hello with the incarnation {hello.incarnation}")
        if len(hello.in_flight) > MOST_WAITING or len(hello.checkpoints) > MOST_CHECKPOINTS:
            raise RemoteProtocolError(sender, "joining", "a Hello that names too many deltas or checkpoints")
        known, answer = self._records.incarnation(sender), Stamp(hello.incarnation)
        if known and hello.incarnation <= known:
            if hello.incarnation == known:
                self.fence.count(Verdict.DOUBLE)
                return []
            self.fence.count(Verdict.FORMER)
            return [SendTo(sender, Refused("superseded", SUPERSEDED), answer)]
        if hello.term > self.term and hello.run == self.run:
            return [
                SendTo(sender, Refused("term", f"this broker knows of {self.term} takeovers, not {hello.term}"), answer)
            ]
        if len(self.members) >= MOST_MEMBERS and sender not in self.members:
            # "unknown": it says Hello again, and there may be room then
            text = f"this broker has {MOST_MEMBERS} peers: try again later"
            return [SendTo(sender, Refused("unknown", text), answer)]
        name, succeeds = words(hello.name, MAX_NAME), None
        if hello.role == "standby" and (why := self._obstacle(sender, hello)):
            return [SendTo(sender, Refused("occupied", why), answer)]
        if hello.role == "master":
            if hello.run not in ("", self.run) and not self.shard:
                text = (
                    f"the first master now runs {self.run}, this one has a shard of {hello.run}. Restart the first "
                    "with the checkpoint of that run, or start this one again to join the new run"
                )
                return [SendTo(sender, Refused("run", text), answer)]
            why, succeeds = self._claim(sender, hello)
            if why:
                return [SendTo(sender, Refused("shard", why), answer)]
        if hello.role == "node" and (why := self._settle_exchange(sender, hello)):
            return [SendTo(sender, Refused("exchange", why), answer)]
        before = self.members.pop(sender, None)
        self._records.greet(sender, hello.incarnation)
        self._records.recall(sender, hello.in_flight)
        self.fence.open(sender, hello.incarnation)
        effects: list[HubEffect] = []
        if succeeds is not None and succeeds in self.members:
            effects += self._lose(self.members[succeeds], "another broker took its place at its address", now)
        if before is not None:  # what was on its way on the old connection will not come any more
            effects.append(Disconnect(sender, "again", f"{name} connected again"))
            effects += self._groups.gone(sender, "it connected again")
        roles = {"observer": MemberState.OBSERVER, "master": MemberState.MASTER, "process": MemberState.PROCESS}
        roles["standby"] = MemberState.STANDBY
        state = roles.get(hello.role, MemberState.WELCOMED)
        member = Member(sender, name, state, now, now, hello.version, hello.version < 0)
        member.link, member.share, member.checkpoints = hello.link, hello.share, hello.checkpoints
        if before is not None:
            member.contributions, member.samples, member.report = before.contributions, before.samples, before.report
            member.dropped = before.dropped
        self.members[sender] = member
        welcome = Welcome(
            run=self.run,
            version=self.version,
            settings=self.settings.to_dict(),
            model=model_to_wire(self.model) if self.version >= 0 else (),
            landed=self._records.landed(sender),
            accepted=tuple(publish.sequence for peer, publish in self.rounds.pending if peer == sender),
            schedules=self.timetable.since(self.version),
            shard=self.shard,
            masters=(self._first,) if self.shard else self.masters.addresses,
            heard=self._records.heard(sender),
            term=self.term,
            standby=self.tenure.standby,
        )
        effects.append(SendTo(sender, welcome))
        if (rest := self._quarantines.rest(sender, now)) > 0:
            member.quarantined = True
            effects.append(SendTo(sender, Quarantine("again", "it was quarantined before it connected again", rest)))
        if state is MemberState.OBSERVER:
            effects.append(SendTo(sender, self.roster(now)))
        if state is MemberState.STANDBY:
            member.address = hello.address
            effects.append(Replicate(sender))
        if state is MemberState.MASTER:  # nodes may wait for it
            effects.append(Broadcast(self.roster(now)))
        effects += self._dealing.lost(sender)  # units may have been on their way to it: it will ask again
        if before is not None:
            effects += self._founding.left(before)
        return effects + self._release(now)

    def _settle_exchange(self, sender: PeerId, hello: Hello) -> str:
        """Let the first node decide how all exchange; return why another cannot take part, "" if it can."""
        if hello.exchange == self.exchange:
            return ""
        other = next((member for peer, member in self.members.items() if member.is_node and peer != sender), None)
        name = words(hello.name, MAX_NAME)
        if other is not None:
            return (
                f"{name} would train with {_exchange_words(hello.exchange)}, and {other.name}, which is in "
                f"this run, does so with {_exchange_words(self.exchange)}: start all nodes of a run with the same"
            )
        if self.rounds.pending:
            return (
                f"{name} would train with {_exchange_words(hello.exchange)}, and deltas of nodes that "
                f"trained with {_exchange_words(self.exchange)} have not landed yet: start it again in a few seconds"
            )
        self.exchange = hello.exchange
        # what nodes in lockstep publish, at the end, is the same of all: it must land once, whole
        self.rounds = FragmentRounds(AfterAll() if self.exchange else self._rule, self.settings.fragments)
        return ""

    @property
    def standby(self) -> Member | None:
        """The standby that follows this hub."""
        return next((one for one in self.members.values() if one.state is MemberState.STANDBY), None)

    def _obstacle(self, sender: PeerId, hello: Hello) -> str:
        """Return why this hub takes no standby, or not this one; "" if it does."""
        if self.settings.masters > 1:
            return "this run has several masters: a standby follows one broker that has the whole model"
        if self.exchange:
            return f"the nodes of this run exchange with {_exchange_words(self.exchange)}, past the broker"
        if not ADDRESS.fullmatch(hello.address):
            return f"{hello.address[:MAX_WORDS]!r} is no address at which nodes reach it: --address tcp://HOST:PORT"
        other = self.standby
        if other is not None and other.peer != sender and other.address != hello.address:
            return f"a standby follows this broker already, at {other.address}: one is enough"
        return ""

    def _claim(self, sender: PeerId, hello: Hello) -> tuple[str, PeerId | None]:
        """Register the master of a shard; see `Masters.claim`."""
        if self.shard:
            return f"this broker has shard {self.shard}: register with the first, at {self._first}", None
        return self.masters.claim(sender, Claim(hello.shard, hello.address[:MAX_WORDS]))

    def _on_fetch(self, member: Member, fetch: Fetch, now: float) -> list[HubEffect]:
        member.digest, member.held = fetch.digest[:MAX_NAME], fetch.held
        if member.state is MemberState.LIVE:
            member.known_version = fetch.version
            landed = self._records.landed(member.peer)
            return [Serve(member.peer, member.known_version, landed, digest=fetch.digest, held=fetch.held)]
        if self.shard and fetch.founding > self._founding.number and self.version > 0:
            text = (
                f"shard {self.shard} of {self.run} is trained already, up to version {self.version}, and the first "
                "master begins anew: restart that with its checkpoint, or all masters without"
            )
            return self._founding.send_away(member, "founding", text)
        return self._begun(self._founding.fetched(member, fetch))

    def _on_snapshot(self, member: Member, snapshot: Snapshot, now: float) -> list[HubEffect]:
        if member.open:  # a second one would found the run again
            raise RemoteProtocolError(member.peer, member.state.value, "a second Snapshot")
        member.open[snapshot.transfer] = snapshot
        return [Expect(member.peer, snapshot)]

    def averaged(self) -> list[HubEffect]:
        """The parameters of an Average are related; their mean is at hand in the place of the first one's."""
        return self._begun(self._founding.averaged())

    def unrelated(self, text: str) -> list[HubEffect]:
        """The parameters of an Average are not related: `text` explains it to those who wait."""
        return self._founding.unrelated(text)

    def _begun(self, effects: list[HubEffect]) -> list[HubEffect]:
        if self.version >= 0 and not self._founding.founded:  # it begins anew: what is pending is of no use any more
            self.rounds = FragmentRounds(self.rounds.rule, self.settings.fragments)
        self.version = max(self.version, 0) if self._founding.founded else -1
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
        text = f"said goodbye: {words(goodbye.reason)}" if goodbye.reason else "said goodbye"
        if member.state is MemberState.STANDBY:
            self.tenure.dismissed(goodbye.reason)
        return self._lose(member, text, now, reason="goodbye")

    def _lose(self, member: Member, text: str, now: float, reason: str = "lost") -> list[HubEffect]:
        del self.members[member.peer]
        self.fence.close(member.peer)
        self._news = True
        effects: list[HubEffect] = [Disconnect(member.peer, reason, text)]
        if member.state is MemberState.OBSERVER:
            return [Disconnect(member.peer, "observer", text)]
        if member.state is MemberState.STANDBY:
            self.tenure.lost(training(self.members))
            return [Disconnect(member.peer, "standby", text), Broadcast(self.roster(now))]
        if reason == "goodbye":
            self.tenure.said_goodbye()
        if member.state is MemberState.PROCESS:
            gone = self._groups.gone(member.peer, text, left=reason == "goodbye")
            return [Disconnect(member.peer, "process", text), *gone]
        if member.state is MemberState.MASTER:
            self.masters.forget(member.peer)
            return [Disconnect(member.peer, "master", text), Broadcast(self.roster(now))]
        effects += self._dealing.lost(member.peer)
        effects += self._founding.left(member)
        if self.exchange:  # who left before the end is no part of what the others end with
            self.rounds.forget(member.peer)
        return effects + self._release(now) + self._dealing.end_when_drained(self.version)

    def _on_heartbeat(self, member: Member, heartbeat: Heartbeat, now: float) -> list[HubEffect]:
        return [SendTo(member.peer, Heartbeat(heartbeat.sent, self._records.heard(member.peer)))]

    def _on_report(self, member: Member, report: Report, now: float) -> list[HubEffect]:
        names = report.scores or {}
        long = len(report.waiting) > MAX_WORDS or len(names) > MAX_SCORES
        if long or any(len(name) > MAX_NAME or not name.isprintable() for name in names):
            raise RemoteProtocolError(member.peer, member.state.value, "a Report of that length")
        member.report, self._news = report, True
        if report.scores and self.score_version <= report.score_version <= self.version:
            self.scores, self.score_version = dict(report.scores), report.score_version
        return []

    def _on_probe(self, member: Member, probe: Probe, now: float) -> list[HubEffect]:
        if not is_sound(probe):
            raise RemoteProtocolError(member.peer, member.state.value, "a Probe of that size")
        if self._probes.take(probe, now):
            return [Answer(member.peer, probe)]
        return [SendTo(member.peer, Refused("probe", "too many probes at a time; try again in 10 s"))]

    def _on_key_request(self, member: Member, request: KeyRequest, now: float) -> list[HubEffect]:
        return [Consult(member.peer, request)]

    # ------------------------------------------------------------------ contributions

    def _offended(self, member: Member, reason: str, text: str, now: float) -> list[HubEffect]:
        """A delta of this node was refused for what is in it: quarantine who does that again and again."""
        seconds = self._quarantines.refused(member.peer, reason, now)
        if not seconds:
            return []
        member.quarantined = True
        return [SendTo(member.peer, Quarantine(reason, text, seconds)), *self._release(now)]

    def _on_publish(self, member: Member, publish: Publish, now: float) -> list[HubEffect]:
        if self._is_double(member, publish):
            self.fence.count(Verdict.DOUBLE)
            return []
        if publish.sequence <= self._records.heard(member.peer) or publish.transfer in member.open:
            return [self._refuse(member, publish, "duplicate", f"sequence {publish.sequence} was heard before")]
        if member.quarantined:
            return [self._refuse(member, publish, "quarantine", "this node is quarantined: nothing of it is taken now")]
        if not 0 <= publish.fragment < self.settings.fragments:
            text = f"fragment {publish.fragment} of a run with {self.settings.fragments}"
            return [self._refuse(member, publish, "fragment", text)]
        if publish.codec != ("float32" if publish.dense else self.settings.codec):
            text = f"coded as {words(publish.codec)!r}; this run takes {self.settings.codec!r}"
            return [self._refuse(member, publish, "codec", text)]
        if publish.base_version > self.version:
            text = f"based on version {publish.base_version}; the run is at {self.version}"
            return [self._refuse(member, publish, "version", text)]
        staleness = self.version - publish.base_version
        if self._too_stale(staleness) and self.settings.stale == "return" and not publish.dense:
            text = f"based on version {publish.base_version}, {staleness} behind; this run takes what is at most "
            return [self._refuse(member, publish, "stale", f"{text}{self.settings.max_staleness} behind")]
        if not (0 <= publish.samples <= MAX_SAMPLES and 0 <= publish.steps <= MAX_SAMPLES):
            text = f"stands for {publish.samples} samples in {publish.steps} steps"
            return [self._refuse(member, publish, "samples", text)]
        waiting = [one for peer, one in self.rounds.pending if peer == member.peer]
        waiting += [one for one in member.open.values() if isinstance(one, Publish)]
        in_flight = self.timetable.at(self.version).offers_in_flight
        most_bytes = max(MOST_WAITING_BYTES, (1 + in_flight) * 4 * count_values(self.model))
        waiting_bytes = sum(sum(one.sizes) for one in (*waiting, publish))
        if len(waiting) >= max(MOST_WAITING, in_flight) or waiting_bytes > most_bytes:
            text = f"{len(waiting)} publishes of this node have not landed; no node that keeps to the settings has so "
            return [self._refuse(member, publish, "waiting", f"{text}many, or such large ones")]
        if self.shard:
            member.idle = False  # it trains again
        self._records.hear(member.peer, publish.sequence)
        member.open[publish.transfer] = publish
        return [Expect(member.peer, publish)]

    def _is_double(self, member: Member, publish: Publish) -> bool:
        """Tell whether this very publish is under way, accepted or landed: to refuse it would have it offered again."""
        return (
            any(isinstance(one, Publish) and one.sequence == publish.sequence for one in member.open.values())
            or any(peer == member.peer and one.sequence == publish.sequence for peer, one in self.rounds.pending)
            or any(sequence == publish.sequence for sequence, _ in self._records.landed(member.peer))
        )

    def _refuse(self, member: Member, publish: Publish, reason: str, text: str) -> SendTo:
        member.refused += 1
        self.refused += 1
        return SendTo(member.peer, Refused(reason, text, publish.sequence))

    def _release(self, now: float) -> list[HubEffect]:
        if self.version < 0:
            return []
        effects: list[HubEffect] = []
        if not self._complete:  # the first began with so many at once; here they come one after another
            self._complete = len(training(self.members)) >= self.settings.start_nodes
        while self._complete and (taken := self.rounds.take(self._awaited(), now)):
            if self.rounds.rule.one_each:
                # a stated order: the sum of floats depends on it (strict mode is bit-identical)
                taken.sort(key=lambda one: one[0])
                effects += [Accumulate(peer, publish) for peer, publish in taken]
            senders = {peer for peer, _ in taken}
            everybody = max(len(training(self.members) | senders), self._dealing.nodes_at_the_end)
            reduce = Reduce(
                version=self.version + 1,
                fragments=tuple(sorted({publish.fragment for _, publish in taken})),
                contributions=tuple(self._contribution(peer, publish) for peer, publish in taken),
                live=len(senders) if self.exchange else everybody,
                dense=any(publish.dense for _, publish in taken),
                plain=bool(self.exchange),
            )
            self.version = reduce.version
            for peer, sequence in reduce.landed:
                self._records.land(peer, sequence, self.version)
            self.samples += reduce.samples
            self.contributions += len(taken)
            effects.append(reduce)
        return effects

    def _awaited(self) -> frozenset[PeerId]:
        """The nodes from which a round may await a contribution: all that end together, where nodes are in lockstep."""
        if not self.exchange:
            return self.live
        return frozenset(peer for peer in training(self.members) if not self.members[peer].drained)

    def _contribution(self, peer: PeerId, publish: Publish) -> Contribution:
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
        )

    def _too_stale(self, staleness: int) -> bool:
        return 0 < self.settings.max_staleness < staleness

    # ------------------------------------------------------------------ data units

    def _on_work_request(self, member: Member, request: WorkRequest, now: float) -> list[HubEffect]:
        return [
            *self._dealing.asked(member, request),
            *self._release(now),
            *self._dealing.end_when_drained(self.version),
        ]

    @property
    def ledger(self) -> WorkLedger:
        """The data units: which are dealt, which are done."""
        return self._dealing.ledger

    # ------------------------------------------------------------------ life after a restart

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold besides the arrays."""
        return {
            "run": self.run,
            "shard": self.shard,
            "founding": self._founding.number,
            "version": self.version,
            "settings": self.settings.to_dict(),
            "model": [[leaf.path, list(leaf.shape), leaf.dtype] for leaf in self.model],
            "ledger": self.ledger.state(),
            "samples": self.samples,
            "contributions": self.contributions,
            "scores": self.scores,
            "score_version": self.score_version,
            "records": self._records.state(),
            "schedules": [list(one) for one in self.timetable.since(self.version)],
            "term": self.term,
            "tenure": self.tenure.state(len(training(self.members))),
        }

    def books(self) -> str:
        """Return what a standby must hear of besides releases, and who is live, as JSON."""
        state = {name: part for name, part in self.state().items() if name in BOOKS}
        crew = {"nodes": sorted(training(self.members)), "in_step": self.tenure.follows}
        return json.dumps({**state, **crew}, separators=(",", ":"))

    def in_step(self) -> list[HubEffect]:
        """The standby holds all that nodes have heard of: from now on they hear of nothing before it."""
        standby = self.standby
        if standby is None:
            return []
        self.tenure.joined(standby.address)
        return [SendTo(standby.peer, Books(self.books())), Broadcast(self.roster(self._rostered))]

    @property
    def may_announce(self) -> bool:
        """Whether this hub, without its standby, has enough of its nodes to go on: see `standby.Tenure`."""
        return self.tenure.holds(len(training(self.members)))

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` wrote (settings are the caller's to compare). Raises CheckpointError."""
        try:
            self.run, self.version = str(state["run"]), int(state["version"])
            self._founding.number = int(state.get("founding", 0))
            model = model_from_wire(
                tuple((str(path), tuple(int(n) for n in shape), str(dtype)) for path, shape, dtype in state["model"])
            )
            self._dealing.restore(state["ledger"])
            self.samples, self.contributions = int(state["samples"]), int(state["contributions"])
            self.scores = {str(name): float(score) for name, score in state["scores"].items()}
            self.score_version = int(state["score_version"])
            self._records.restore(state["records"])
            schedules = [tuple(int(number) for number in one) for one in state.get("schedules", ())]
            for from_version, every, delay in schedules:
                self.timetable.add(Schedule(every, delay, from_version))
            self.term = int(state.get("term", 0))
            if "tenure" in state:
                self.tenure.restore(state["tenure"])
        except (AttributeError, FramingError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the state of the hub cannot be read: {error!r}") from error
        if self.version >= 0:
            self._founding.resume(model)
        self._complete |= self.version > 0

    def await_all(self, versions: tuple[int, ...]) -> None:
        """In strict mode, after a restart: wait for all nodes, and go back with them to the newest of these versions
        that all of them have kept."""
        if self.version >= 0:
            self._founding.await_all(versions)

    def rewound(self, state: dict[str, Any]) -> list[HubEffect]:
        """All have kept this state's version, as a Rewind asked for: be there, and begin if they are all still here."""
        self._records.clear()
        self.restore(state)
        self._records.forget_unlanded()  # those will be sent again
        self.rounds = FragmentRounds(self.rounds.rule, self.settings.fragments)
        return self._begun(self._founding.rewound(self.version))

    def replay(self, version: int, landed: tuple[tuple[str, int], ...], samples: int) -> None:
        """Take note of a release that is in the journal but not in the checkpoint."""
        self.version, self._complete = version, True
        for peer, sequence in landed:
            self._records.land(PeerId(peer), sequence, version)
        self.samples += samples
        self.contributions += len(landed)


def _exchange_words(exchange: str) -> str:
    return f"--exchange {words(exchange)}" if exchange else "no --exchange"
