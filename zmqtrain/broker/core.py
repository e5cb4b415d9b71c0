"""What the services of one broker share: the hub, its codec thread, its peers, and the order of effects.

A service handles messages of some types and carries out effects of some types; it names both in two tables, by which
the broker dispatches.  All of it runs in the broker's loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from zmqtrain.averaging.aggregator import Aggregator, TakeLeaves
from zmqtrain.averaging.snapshot import OPTIMIZER_STATE_MODELS
from zmqtrain.core.errors import ConfigError, ZmqTrainError
from zmqtrain.core.installed import how_to_upgrade
from zmqtrain.core.interfaces import Channel, HubChannel
from zmqtrain.core.types import Buffer, ModelSpec, PeerId, Version, count_values
from zmqtrain.monitor.recorder import BrokerRecorder
from zmqtrain.planning.plans import ASSUMED_BITS, typical_rate
from zmqtrain.planning.schedule import payload_rate
from zmqtrain.protocol.effects import HubEffect, Reduce
from zmqtrain.protocol.fencing import Stamp
from zmqtrain.protocol.framing import ProtocolVersionError
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.initialization import sends_optimizer_state
from zmqtrain.protocol.members import MemberState
from zmqtrain.protocol.messages import (
    MAX_WORDS,
    Hello,
    Message,
    Quarantine,
    Refused,
    Report,
    Scalar,
    Schedule,
    printable,
)
from zmqtrain.protocol.pipelines import Share
from zmqtrain.protocol.standby import TAKES_OVER
from zmqtrain.session.downlink import Downlink
from zmqtrain.session.environment import CodecExecutor, EffectQueue, clock
from zmqtrain.session.rate_limited_logger import RateLimitedLogger
from zmqtrain.session.unequal import TYPE
from zmqtrain.transport.pacing import LinkShare

logger = logging.getLogger(__name__)

OUTBOX_MODELS = 3
"""So many models may queue for a peer, besides a snapshot with its optimizer state where that is sent."""
RATE_NEWS = 1.05
"""A link counts as faster than before when it was measured so many times as fast."""
CONTRIBUTIONS_WARM, CONTRIBUTIONS_MEASURED = 8, 32
"""The cost of a contribution is measured over so many, after the first ones, for which code is compiled."""

MessageHandlers = dict[type[Message], Callable[[PeerId, Any, float], None]]
"""By type of message: (sender, message, now) -> None."""
EffectHandlers = dict[type[HubEffect], Callable[[Any], None]]


class BrokerService(Protocol):
    """A part of a broker. messages, effects: what it handles, by type."""

    messages: MessageHandlers
    effects: EffectHandlers


class BrokerAccess:
    """Who may do what at a broker's port, and how the broker reaches another. This one: a port without keys, alone.

    turned_away: connections and messages that the channel has refused in the last minute.
    connects: whether `connect` can reach another broker.
    """

    connects = False

    @property
    def turned_away(self) -> int:
        return 0

    def has_hub_keys(self, peer: PeerId) -> bool:
        """Return whether a peer came in with the hub's own pair, as brokers and standbys must."""
        return True

    def key_name(self, peer: PeerId) -> str:
        """Return the name of the key with which a peer came in, "" where there are none: a node's id stays that
        key's."""
        return ""

    def host_of(self, peer: PeerId) -> str:
        """Return the number of the machine from which a peer is connected; "" if that is not known."""
        return ""

    def is_operator(self, peer: PeerId) -> bool:
        """Return whether a peer may end the run (`zmqtrain stop`), or have a standby take over."""
        return False

    def dial(self, address: str, peer: PeerId) -> Channel:
        """Return a channel to the broker at an address, under an id; called in the loop that reads it."""
        raise ConfigError(f"this broker reaches no other, and not the one at {address}")


class ShardsBeside:
    """What the first of several brokers begins on its own machine for the shards of others. This one: nothing."""

    def serve(self, shard: int) -> None:
        """Serve a shard that no node serves."""

    def follow(self, shard: int, address: str) -> None:
        """Be the standby of the broker of a shard, which a node serves at this address."""

    def take(self, shard: int) -> None:
        """Take over a shard that is followed."""

    def give_leaves(self, take: TakeLeaves, shards: Iterable[int], moment: float) -> None:
        """Call `take` with what each of these shards that are here had published at a moment, in a thread of that
        shard's; from any thread."""

    def open_port(self) -> int:
        """Return a port of this machine at which something listens for a while."""
        return 0

    def try_port(self, peer: PeerId, port: int) -> None:
        """Find out whether this machine reaches a port of a node's; call `port_tried` of the broker then."""


class BrokerCore:
    """The hub and what all services of one broker use.

    behind: the frames behind the head that is being handled.  stop: set to end the broker.
    """

    def __init__(
        self, channel: HubChannel, hub: Hub, aggregator: Aggregator, access: BrokerAccess, events: BrokerRecorder | None
    ) -> None:
        self.channel, self.hub, self.aggregator, self.access = channel, hub, aggregator, access
        nobody: Any = NoEvents()
        self.events: BrokerRecorder = events or nobody
        self.stop = asyncio.Event()
        self.codec = CodecExecutor("zmqtrain-aggregate", self.stop)
        self.log = BrokerLog(hub, self.events)
        self.downlink = Downlink(channel, self)
        self.behind: Sequence[Buffer] = ()
        self.messages: MessageHandlers = {}
        self._effects: EffectHandlers = {}
        self.carry_out = EffectQueue[HubEffect](lambda effect: self._effects[type(effect)](effect)).carry_out

    def dispatch_to(self, *services: BrokerService) -> None:
        for service in services:
            assert not (self.messages.keys() & service.messages.keys() or self._effects.keys() & service.effects.keys())
            self.messages |= service.messages
            self._effects |= service.effects

    def receive(self, peer: PeerId, message: Message, now: float) -> None:
        self.carry_out(self.hub.receive(peer, message, now))

    def now(self) -> float:
        return clock.monotonic()

    def model_bytes(self) -> int:
        return 4 * sum(leaf.values for leaf in self.hub.model)

    # ------------------------------------------------------------------ sending peers away

    def expel(self, peer: PeerId, error: Exception, reason: str = "protocol") -> None:
        """Tell a peer why it cannot stay, and forget it. For the reason "unknown" a node says Hello again."""
        text = self.log.sent_away(peer, error)
        self.downlink.send(peer, Refused(reason, text))
        self.lost(peer, f"sent away: {text}")

    def reconnect(self, peer: PeerId, why: str = "it does not read what it is sent") -> None:
        """Send a peer away to come again."""
        self.expel(peer, ZmqTrainError(why), "unknown")

    # ------------------------------------------------------------------ DownlinkOwner

    def queue_bytes(self) -> int:
        models = OUTBOX_MODELS + (1 + OPTIMIZER_STATE_MODELS if sends_optimizer_state(self.hub.settings) else 0)
        return models * self.model_bytes()

    def lost(self, peer: PeerId, why: str) -> None:
        self.carry_out(self.hub.gone(peer, why, self.now()))

    def unreachable(self, peer: PeerId) -> None:
        self.hub.unreachable(peer, self.now())

    def stamp(self, peer: PeerId, counted: bool) -> Stamp:
        return self.hub.stamp(peer, counted)

    def share_of(self, peer: PeerId) -> Share | None:
        """See DownlinkOwner."""
        member = self.hub.members.get(peer)
        return None if member is None else member.holds


class LoadMeter:
    """Measures the load of a broker's links and codec thread, and keeps traffic to its shares.

    Rates that the settings or a node say are kept to; others are measured from the run's own traffic.
    share: what training may use of this machine's port.
    """

    def __init__(self, core: BrokerCore, share: LinkShare) -> None:
        self._hub, self._downlink, self._codec, self._share = core.hub, core.downlink, core.codec, share
        self._host_of = core.access.host_of
        self._contributions_before = self._hub.contributions
        self._measured_from: tuple[int, float] | None = None
        self._limited: float | None = share.limit()
        self._downlink.limit(self._limited)

    def tick(self) -> None:
        """Tell the hub how fast its nodes' links were measured, and keep to shares of measured rates."""
        for peer, member in self._hub.members.items():
            measured = self._downlink.measured(peer)
            if measured > RATE_NEWS * member.measured:
                self._hub.measured(peer, measured)
                self.limit(peer)
        if (limit := self._share.limit(typical_rate(self._hub.members.values()))) != self._limited:
            self._limited = limit
            self._downlink.limit(limit)

    def limit(self, peer: PeerId) -> None:
        """Keep traffic with this peer to the share that it gives of its link."""
        if (member := self._hub.members.get(peer)) is not None:
            self._downlink.limit_peer(peer, LinkShare(member.link, member.share).limit(member.measured))

    def port_rate(self) -> float:
        """Return the rate of this machine's port, in bytes per second: the configured one, or a typical one of the
        nodes that have contributed."""
        known = typical_rate(member for member in self._hub.members.values() if member.contributions)
        return self._share.usable(known or payload_rate(ASSUMED_BITS))

    @property
    def port_measured(self) -> float:
        return self._downlink.port_measured

    @property
    def shards_on_nodes(self) -> bool:
        """See HubMeter: by where the connections of brokers and nodes come from."""
        members = self._hub.members
        brokers = {self._host_of(one.peer) for one in members.in_state(MemberState.SHARD)} - {""}
        return bool(brokers) and any(self._host_of(one.peer) in brokers for one in members.values() if one.is_node)

    @property
    def known_rate(self) -> float:
        """The rate of this machine's port, in bytes per second: the configured one, or as measured; 0: not known."""
        return self._share.rate or self._downlink.port_measured

    def contribution_seconds(self) -> float:
        """Return the CPU seconds of the codec thread per contribution, all its work; 0 while too few were seen."""
        count, seconds = self._hub.contributions, self._codec.seconds
        if self._measured_from is None and count >= self._contributions_before + CONTRIBUTIONS_WARM:
            self._measured_from = (count, seconds)
        before, seconds_before = self._measured_from or (count, seconds)
        here = count - before
        return (seconds - seconds_before) / here if here >= CONTRIBUTIONS_MEASURED else 0.0


OTHERS_NAMED = 1024
LOGGED_CHARACTERS = 500
"""Of the reason why a peer is sent away, which may quote the peer."""


class NoEvents:
    """Drops every event of `BrokerRecorder`."""

    def __getattr__(self, name: str) -> Any:
        return lambda *facts: None


RECENT_SECONDS, MOST_RECENT = 10.0, 64
"""An event is in the rosters of so many seconds; a roster has so many at most."""


class RecentEvents:
    """The events of the last seconds, for people who watch the run: a Roster carries them.

    An event has a number that grows, the seconds of the run, what it is ("joined", "left", "lost", "again",
    "quarantined", "acquitted", "taken back", "refused", "plan", "stopping", "standby"), the node and a text. One that
    is repeated while it is in the rosters is left out: a peer cannot fill them.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[float, dict[str, Scalar]]] = deque(maxlen=MOST_RECENT)
        self._count = 0

    def add(self, seconds: float, what: str, node: str, text: str) -> None:
        """seconds: of the run."""
        short = text if len(text) <= MAX_WORDS else f"{text[: MAX_WORDS - 1]}…"
        told = {"what": what, "node": printable(node), "text": printable(short)}
        self._forget(seconds)
        if any(told.items() <= event.items() for _, event in self._events):
            return
        self._count += 1
        self._events.append((seconds, {"number": self._count, "seconds": round(seconds, 3), **told}))

    def rows(self, seconds: float) -> tuple[dict[str, Scalar], ...]:
        """Return the events of the last RECENT_SECONDS, the oldest first."""
        self._forget(seconds)
        return tuple(event for _, event in self._events)

    def _forget(self, seconds: float) -> None:
        while self._events and seconds - self._events[0][0] > RECENT_SECONDS:
            self._events.popleft()


class BrokerLog:
    """The log lines of one hub, and the events that go with them: recorded, and in `recent` for the next rosters.

    Lines that peers cause are rate-limited, and their text is bounded.
    """

    def __init__(self, hub: Hub, events: BrokerRecorder) -> None:
        self._hub, self._events = hub, events
        self.recent = RecentEvents()
        self._log = RateLimitedLogger(logger)
        self._called: dict[PeerId, str] = {}  # names of the peers that were logged last
        self._said: dict[tuple[str, PeerId], None] = {}  # what was logged of a node, and is logged once
        self._worse = self._is_crowded = False

    def other_version(self, peer: PeerId, error: ProtocolVersionError) -> None:
        """A process of another protocol version came: it is told so. Logged once for each peer."""
        if self._is_first("version", peer):
            upgrade = f"upgrade this hub, and start its broker again with its --checkpoint. {TYPE}{how_to_upgrade()}"
            what = "upgrade that PC; it is told how" if error.is_older else upgrade
            self._log.warning("%s cannot come in: %s: %s", printable(peer), error, what)

    def of_another_run(self, peer: PeerId, hello: Hello) -> None:
        """A node came that has trained in another run; it leaves at once. Logged once for each."""
        if self._is_first("run", peer):
            name, run = printable(hello.name, LOGGED_CHARACTERS), printable(hello.run, LOGGED_CHARACTERS)
            text = (
                "%s belongs to %s, and this broker serves %s: it trains on alone, or ends. To go on with %s, end this "
                "broker, and start it with --checkpoint and the folder of that run; or start %s again (with --new-run, "
                "if it has a checkpoint), and it joins this one"
            )
            self._log.warning(text, name, run, self._hub.run, run, name)

    # ------------------------------------------------------------------ the run

    def founding(self, peer: PeerId, model: ModelSpec) -> None:
        logger.info("%s founded %s: %d values", self._name(peer), self._hub.run, count_values(model))

    def unrelated(self, peers: Sequence[PeerId], why: str) -> None:
        logger.warning("the initial parameters of %s cannot be averaged: %s", self._names(peers), why)

    def preempted(self, peer: PeerId, lender: PeerId) -> None:
        logger.info("%s is preempted: it goes on from the parameters of %s", self._name(peer), self._name(lender))

    def divided(self, shards: int, why: str) -> None:
        """why: the run has one broker, though a model of this size is divided."""
        if why:
            logger.warning("the model is not divided, and its nodes share the port of this machine: %s", why)
        elif shards > 1:
            text = "the model is divided among %d brokers: this one, and one on the PC of each of %d nodes, if it can"
            logger.info(text, shards, shards - 1)

    def scheduled(self, schedule: Schedule) -> None:
        why = self._hub.replanning.text
        chosen = (schedule.every, schedule.delay, schedule.codec, schedule.outer)
        logger.info("from version %d: k = %d, d = %d, %s, %s: %s", schedule.from_version, *chosen, why)
        self._events.scheduled(schedule, why)
        text = (
            f"k = {schedule.every}, d = {schedule.delay}, {schedule.codec} from version {schedule.from_version}: {why}"
        )
        self._tell("plan", "", text)

    def overflowed(self, version: Version, reduce: Reduce) -> None:
        names = self._names(peer for peer, _ in reduce.landed)
        logger.error("version %d: the deltas of %s add up to infinity; not used", version, names)

    def evaluated(self, report: Report) -> None:
        """A node has scored the shared model; an evaluation that is far worse than the best is logged once."""
        worse = self._hub.worse
        if worse is not None and not self._worse:
            version, best = worse
            loss = self._hub.scores["loss"]
            text = (
                "held-out loss %.6g at version %d, %.0f times the best (%.6g at version %d): the usual cause is a "
                "learning rate that is too high. Where this broker saves the model, it has the best version at its end"
            )
            logger.warning(text, loss, self._hub.score_version, loss / best, best, version)
        self._worse = worse is not None
        if report.scores:
            self._events.evaluated(report.score_version, self._hub.samples, report.scores)

    def reported(self, peer: PeerId, report: Report) -> None:
        """A node has reported; data, a first step or units that do not fit the run are logged once for each node."""
        self._compare_data(peer, report)
        self._crowded()
        member = self._hub.members.get(peer)
        if member is None:
            return
        other = self._hub.same_start(member)
        if other is not None and self._is_first("same start", peer):
            self._is_first("same start", other.peer)
            text = (
                "%s and %s made the same first step (the same loss, the same parameters after it): they seem to train "
                "on the same batches, and two such nodes are no faster than one. Have the broker deal the data "
                "(`for batch in node.batches(batches_of)`), or shuffle them by a seed from the node's name"
            )
            self._log.warning(text, self._name(peer), self._name(other.peer))
        if self._hub.takes_no_units(member) and self._is_first("no units", peer):
            text = (
                "%s takes no data units: --units %d neither counts nor ends what it does. In a loop of one's own "
                "`for batch in node.batches(batches_of)` takes them"
            )
            self._log.warning(text, self._name(peer), self._hub.units.ledger.total)

    def _crowded(self) -> None:
        """Offers are put off: log it once where k or d is configured, and too small."""
        told = self._hub.crowded
        fitting = [f"--{name} {told[f'fitting_{name}']}" for name in ("every", "delay") if f"fitting_{name}" in told]
        if fitting and not self._is_crowded:
            text = (
                "%.0f %% of the offers are put off, because those before had not landed: an exchange takes longer than "
                "the configured k and d leave it. %s would fit; or leave both out, and the broker chooses them"
            )
            logger.warning(text, 100 * float(told["put_off"]), " and ".join(fitting))
        self._is_crowded = bool(fitting)

    def _compare_data(self, peer: PeerId, report: Report) -> None:
        if not report.data or report.data == self._hub.data or not self._is_first("other data", peer):
            return
        theirs, ours = (printable(data, LOGGED_CHARACTERS) for data in (report.data, self._hub.data))
        text = (
            "%s has other data than the run's first node: %s, not %s (digests of training/held-out data). If that is "
            "not meant, start it with the same data; only nodes with the same held-out data evaluate the run"
        )
        self._log.warning(text, self._name(peer), theirs, ours)

    def going_back(self, version: Version) -> None:
        """All nodes are back after a restart in strict mode. version: that all have, to which the run goes back, or
        -1."""
        if version >= 0:
            text = "all %d nodes are back: the run goes on from version %d"
            logger.info(text, self._hub.nodes, version)
        elif self._hub.version > 0:
            text = "no version is kept by all %d nodes and here: the run goes on from version %d, not to the bits "
            logger.warning(text + "that it would have had", self._hub.settings.start_nodes, self._hub.version)

    def stopping(self, peer: PeerId, nodes: int) -> None:
        self._tell("stopping", "", "an operator ends the run")
        what = "one node sends what it has computed, and ends" if nodes == 1 else "no node is here"
        if nodes > 1:
            what = f"{nodes} nodes send what they have computed, and end"
        logger.warning("an operator, %s, ends the run: %s", self._name(peer), what)

    def over(self, by_first: bool = False) -> None:
        """by_first: the first broker says so."""
        if by_first:
            logger.info("the first broker says that the run is over")
        elif self._hub.stopped_at is not None:
            logger.info("an operator has ended the run, and every node has left: it is over")
        else:
            total = self._hub.units.ledger.total
            logger.info("all %d data units are done and every node has left: the run is over", total)

    def ended(self, aggregator: Aggregator, bytes_up: int, bytes_down: int) -> None:
        if isinstance(self._events, NoEvents):
            return  # no leaves are joined for nobody
        figures = {
            "version": aggregator.version,
            "samples": self._hub.samples,
            "contributions": self._hub.contributions,
            "refused": self._hub.refused,
            "dropped": dict(self._hub.fence.dropped),
            "bytes_up": bytes_up,
            "bytes_down": bytes_down,
            **self._hub.scores,
        }
        leaves = aggregator.layout.join(aggregator.published) if aggregator.version >= 0 else []
        self._events.ended(figures, leaves)

    # ------------------------------------------------------------------ the peers

    def joined(self, peer: PeerId, version: Version) -> None:
        """A node is sent the parameters for the first time, or an observer a copy of them."""
        if (member := self._hub.members.get(peer)) is not None and not member.is_node:
            return self._log.info("%s takes a copy of version %d", self._name(peer), version)
        self._log.info("%s joined at version %d (%s)", self._name(peer), version, self._count_nodes("train"))
        self._member(peer, "joined", f"at version {version}")

    def refused(self, peer: PeerId, error: Exception) -> None:
        self._tell("refused", self._name(peer), str(error))
        self._log.warning("refused what %s sent: %s", self._name(peer), error)

    def quarantined(self, peer: PeerId, quarantine: Quarantine) -> None:
        text = f"for {quarantine.seconds:.0f} s: {quarantine.reason}: {quarantine.text}"
        logger.warning("%s is quarantined %s", self._name(peer), text)
        self._member(peer, "quarantined", text)

    def taking_back(self, peer: PeerId, version: Version, before: Version) -> None:
        text = f"what was published since version {version} is taken back (the run was at {before})"
        logger.warning("%s has diverged, and was a part of the last versions: %s", self._name(peer), text)
        self._member(peer, "taken back", text)

    def rebased(self, peers: Sequence[PeerId], why: str) -> None:
        """The norm gate refuses so many nodes that it may be wrong. why: it is not made wider, "" if it is."""
        names = self._names(peers)
        if why:
            text = (
                "the norm gate turns away %s, more than half of the voters, and is not made wider for them: %s. They "
                "stay out. If they are right, start the broker again with --norm-gate none, or a larger number"
            )
            logger.error(text, names, why)
            return
        text = (
            "the norm gate turns away %s, more than half of the voters: deltas may be ten times as large from now on, "
            "and these nodes are free; it is made wider again only if the shared parameters do not become worse by that"
        )
        logger.warning(text, names)
        for peer in peers:
            self._member(peer, "acquitted", "the norm gate is made wider toward the size of its deltas")

    def message_failed(self, peer: PeerId) -> None:
        self._log.log(logging.ERROR, "a message of %s could not be taken", peer, trace=True)

    def sent_away(self, peer: PeerId, error: Exception) -> str:
        """A peer is sent away; return the reason, printable, for the peer."""
        text = printable(str(error), LOGGED_CHARACTERS)
        self._log.warning("sending %s away: %s", self._name(peer), text)
        return text

    def left(self, peer: PeerId, reason: str, text: str) -> None:
        """reason, text: as in Disconnect."""
        levels = {"goodbye": logging.INFO, "observer": logging.DEBUG, "process": logging.DEBUG}
        level = levels.get(reason, logging.WARNING)
        if reason == "again":
            self._log.info("%s", text)
        elif reason == "standby":
            rest = "" if text.endswith(TAKES_OVER) else "; the nodes go on here without it"
            logger.warning("the standby left: %s%s", text, rest)
            self._tell("standby", "", f"the standby left: {text}{rest}")
        elif reason == "broker":
            self._log.warning("%s left: %s; its shard is exchanged again when it is back", self._name(peer), text)
        else:
            self._log.log(level, "%s left: %s (%s)", self._name(peer), text, self._count_nodes("remain"))
        if reason not in ("observer", "process", "broker", "standby"):
            self._member(peer, {"goodbye": "left", "again": "again"}.get(reason, "lost"), text)

    def _member(self, peer: PeerId, what: str, text: str) -> None:
        self._events.member(peer, what, text)
        self._tell(what, self._name(peer), text)

    def _tell(self, what: str, node: str, text: str) -> None:
        self.recent.add(self._hub.seconds(clock.monotonic()), what, node, text)

    def _names(self, peers: Iterable[PeerId]) -> str:
        return ", ".join(map(self._name, peers))

    def _name(self, peer: PeerId) -> str:
        """Return a peer's name; if others here have the same (nodes of one PC), its name in the roster."""
        if (member := self._hub.members.get(peer)) is not None:
            self._called.pop(peer, None)
            self._called[peer] = member.called
            while len(self._called) > OTHERS_NAMED:
                del self._called[next(iter(self._called))]
        name = peer.rpartition("#")[0] or peer
        several = any(one != peer and one.rpartition("#")[0] == name for one in self._hub.members)
        return self._called.get(peer, name) if several else name

    def _count_nodes(self, verb: str) -> str:
        count = self._hub.nodes
        return f"{count} node{'' if count == 1 else 's'} {verb}{'s' if count == 1 else ''}"

    def _is_first(self, what: str, peer: PeerId) -> bool:
        """Return whether this was not logged of this peer yet, and record it; the newest are remembered."""
        if (what, peer) in self._said:
            return False
        self._said[what, peer] = None
        while len(self._said) > OTHERS_NAMED:
            del self._said[next(iter(self._said))]
        return True
