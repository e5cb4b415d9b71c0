"""Who may do what at a broker, and its status: Hello, Stop, reports, probes, rosters."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from zmqtrain.broker.checkpoint import Keeper
from zmqtrain.broker.core import BrokerCore, EffectHandlers, LoadMeter, MessageHandlers
from zmqtrain.broker.deltas import PendingUploads, Receiver
from zmqtrain.core.errors import ZmqTrainError
from zmqtrain.core.installed import package_version
from zmqtrain.core.types import PeerId
from zmqtrain.parameter_server.parameters import Parameters
from zmqtrain.protocol.effects import Answer, Broadcast, SendTo
from zmqtrain.protocol.members import MemberState
from zmqtrain.protocol.messages import (
    Hello,
    Message,
    Probed,
    Quarantine,
    Report,
    Roster,
    Scalar,
    Schedule,
    Stop,
    replace_fields,
)
from zmqtrain.session.environment import clock, environment
from zmqtrain.strategies.measures import correlation, gains

OTHER_KEYS = (
    "a broker of this run, or its standby, comes in with the hub's own keys, and this one with those of a node: start "
    "it with a copy of the keys folder of the first (--keys)"
)
NO_OPERATOR = (
    "only an operator can end the run. Say `zmqtrain stop` on the hub's own PC, or, where the hub has keys, with its "
    "own pair (--keys hub.key_secret, from its keys folder); a node ends itself with Ctrl-C"
)


class AdminService:
    """The rights of peers and the status of the run. watch: called in the broker's loop with every roster, if set."""

    def __init__(
        self,
        core: BrokerCore,
        loads: LoadMeter,
        uploads: PendingUploads,
        receiver: Receiver,
        keeper: Keeper,
        parameters: Parameters,
    ) -> None:
        self._core, self._hub, self._access = core, core.hub, core.access
        self._loads, self._uploads, self._receiver, self._keeper = loads, uploads, receiver, keeper
        self._parameters, self._virtual = parameters, environment().virtual
        self.watch: Callable[[Roster], None] | None = None
        self.messages: MessageHandlers = {Hello: self._hello, Stop: self._stop, Report: self._report}
        self.effects: EffectHandlers = {SendTo: self._send, Broadcast: self._broadcast, Answer: self._answer}

    def _hello(self, peer: PeerId, hello: Hello, now: float) -> None:
        name, hosting = self._access.key_name(peer), self._hub.hosting
        voter = f"key {name}" if name else ""
        asked = hello.role == "broker" and hosting is not None and hosting.expects(hello.shard, voter, now)
        if hello.role in ("broker", "standby") and not (asked or self._access.has_hub_keys(peer)):
            return self._core.expel(peer, ZmqTrainError(OTHER_KEYS), "keys")
        self._core.receive(peer, hello, now)
        if hello.role == "node" and hello.version > 0 and hello.run != self._hub.run:
            self._core.log.of_another_run(peer, hello)
        self._loads.limit(peer)
        if (member := self._hub.members.get(peer)) is not None:
            member.voter = voter
        self._hub.records.own(peer, name)
        if hosting is not None and name and member is not None and member.state is MemberState.SHARD:
            of_hub = self._access.has_hub_keys(peer)
            self._core.carry_out(hosting.registered(peer, hello.shard, voter, of_hub))

    def _stop(self, peer: PeerId, stop: Stop, now: float) -> None:
        if not self._access.is_operator(peer):
            return self._core.expel(peer, ZmqTrainError(NO_OPERATOR), "keys")
        nodes = self._hub.nodes
        self._core.receive(peer, stop, now)
        if self._hub.stopped_at == now:
            self._core.log.stopping(peer, nodes)

    def _report(self, peer: PeerId, report: Report, now: float) -> None:
        self._core.receive(peer, report, now)
        self._core.log.reported(peer, report)
        if self._hub.believes(peer, report):
            self._core.log.evaluated(report)

    def _send(self, effect: SendTo) -> None:
        peer, message = effect.peer, effect.message
        if isinstance(message, Quarantine) and message.seconds > 0:
            self._core.log.quarantined(peer, message)
            self._uploads.forget_norms(peer, probation=True)
        self._core.downlink.send(peer, self._described(message), effect.stamp)

    def _broadcast(self, effect: Broadcast) -> None:
        message = self._described(effect.message)
        if isinstance(message, Roster):
            self._core.events.stands(message)
            if self.watch is not None:
                self.watch(message)
        if isinstance(message, Schedule):
            self._core.log.scheduled(message)
        for peer in list(self._hub.members):
            self._core.downlink.send(peer, message)

    def _answer(self, effect: Answer) -> None:
        probed = Probed(effect.probe.number, time.time(), f"zmqtrain {package_version()}")
        self._core.downlink.answer(effect.peer, probed, effect.probe.answer)

    def _described(self, message: Message) -> Message:
        return self.describe(message) if isinstance(message, Roster) else message

    def describe(self, roster: Roster) -> Roster:
        """Add to a roster of the hub's what only the broker knows: its disk, its load, its noise, its keys."""
        here: dict[str, Scalar] = {"refused": self._hub.refused, "turned_away": self._access.turned_away}
        here |= {"waits_for_room": self._keeper.waits_for_room, "unsaved": self._keeper.writer.unsaved}
        here |= {"bytes_in": self._receiver.bytes_received, "bytes_out": self._core.downlink.bytes_sent}
        if rate := self._loads.known_rate:
            here["port_rate"] = rate
        if not self._virtual:  # there a message's size, and so its time, must not depend on this machine
            here |= {"saved_version": self._keeper.saved_version, "cpu_seconds": time.process_time()}
            here["memory_bytes"] = resident_bytes()
        if (noise := self._core.aggregator.meter.noise) is not None and roster.members:
            here["noise"], here["rho"] = noise, correlation(noise)
            count = len(roster.members)
            if any("pipeline" in member for member in roster.members):
                here["pipelines"] = count = len(self._hub.members.training)
            here["gain_next"], here["gain_last"] = gains(max(1, count), noise)
        recent = self._core.log.recent.rows(self._hub.seconds(clock.monotonic()))
        return self._parameters.describe(replace_fields(roster, hub=roster.hub | here, events=recent))


def resident_bytes() -> int:
    """Return how much memory this process has; 0 where the system does not say (it has no /proc)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
