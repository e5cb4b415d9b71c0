"""Be the hub, without a socket or a clock: messages and `now` go in, effects come out.

Rule 1: `ALLOWED` says which message is welcome in which state; any other is a RemoteProtocolError, and costs that peer.
Rule 2: the hub knows publishes by their heads; what is in them is the aggregator's affair.
Rule 3: effects are carried out in the order in which they come.
Rule 4: who comes in is for `joining` to say, who goes for `leaving`, what of a publish is welcome and when a version is
due for `publishing`; what is known stands in the `HubBook`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zmqtrain.core.errors import LocalProtocolError, RemoteProtocolError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import ModelSpec, PeerId
from zmqtrain.protocol.book import HubBook
from zmqtrain.protocol.effects import (
    Accumulate,
    Answer,
    Broadcast,
    Consult,
    Expect,
    Hear,
    HubEffect,
    SendTo,
    Serve,
)
from zmqtrain.protocol.fencing import GAP, SUPERSEDED, UNKNOWN, Stamp, Verdict
from zmqtrain.protocol.founding import Preemption
from zmqtrain.protocol.groups import LATE_SECONDS
from zmqtrain.protocol.head_sizes import TAKEN_BY_HUBS, HeadSizes
from zmqtrain.protocol.joining import join
from zmqtrain.protocol.leaving import look_over, lose, stop
from zmqtrain.protocol.members import ALLOWED, Member, MemberState
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
    Refused,
    Report,
    Snapshot,
    Stop,
    WorkRequest,
)
from zmqtrain.protocol.probes import ProbeBudget, is_sound
from zmqtrain.protocol.publishing import (
    RESTART,
    fault_of,
    is_double,
    is_of_before,
    offended,
    refuse,
    release,
    restart,
    take_back,
)
from zmqtrain.protocol.rounds import ReleaseRule
from zmqtrain.protocol.schedules import Planner, Replanning
from zmqtrain.protocol.standby_messages import Books, Holding, Promote
from zmqtrain.protocol.words import MAX_NAME, MAX_WORDS, words

__all__ = ["MemberState", "ALLOWED", "Member", "Hub"]

ROSTER_SECONDS = 1.0
UNITS_OF_A_STEP = 64
"""No node takes more data units in one step: what says that it has done more lies."""
UNFOUNDED = "this run has no parameters yet: no node has joined it"
"""Why who looks on is sent no copy of them."""
MAX_SCORES = 32
"""What one Report may hold, besides words: the Roster holds those of all nodes, and is one head."""


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
        return take_back(self, version, f"the run goes back to version {version}: {words(peer)} had diverged")

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
        text = f"said goodbye: {words(goodbye.reason)}" if goodbye.reason else "said goodbye"
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
