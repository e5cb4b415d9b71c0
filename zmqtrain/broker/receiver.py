"""Take what peers say: heads to the hub, chunks to where their transfers are put together.

Rule 1: whatever a peer says wrong costs that peer its place, and nobody else anything.  Rule 2: a peer that says too
many messages, or whose messages take too much of this loop's time, is shown out: nothing of it is read, before any is
decoded, and its connections end.  Rule 3: in the broker's loop alone; what a message makes of the run
is the hub's to say, and others' to do.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence

from zmqtrain.broker.arrivals import Arrivals
from zmqtrain.broker.loads import Loads
from zmqtrain.broker.telling import Telling
from zmqtrain.collectives.relays import Relays
from zmqtrain.core.errors import ChannelClosed, FramingError, RemoteProtocolError, ZmqTrainError
from zmqtrain.core.interfaces import HubChannel
from zmqtrain.core.types import Buffer, Lane, PeerId
from zmqtrain.parameter_server.parameters import Parameters
from zmqtrain.protocol.effects import HubEffect
from zmqtrain.protocol.fencing import Verdict
from zmqtrain.protocol.framing import ProtocolVersionError, open_head, read_fields
from zmqtrain.protocol.group_messages import Fold, Relay, Relayed
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.keys import Initialise, Push
from zmqtrain.protocol.messages import Chunk, Credit, Hello, Probe, Refused, Report, Stop
from zmqtrain.protocol.rates import (
    FAULT_SECONDS,
    LOOP_SHARE,
    MESSAGES_PER_SECOND,
    Hearing,
    LoopBudgets,
    MessageRates,
    cost_of,
)
from zmqtrain.session.traffic import Traffic

OTHER_KEYS = (
    "a master of this run, or its standby, comes in with the hub's own keys, and this one with those of a node: start "
    "it with a copy of the keys folder of the first (--keys)"
)
NO_OPERATOR = (
    "only an operator can end the run. Say `zmqtrain stop` on the hub's own PC, or, where the hub has keys, with its "
    "own pair (--keys hub.key_secret, from its keys folder); a node ends itself with Ctrl-C"
)


class _Collecting:
    """CPU seconds that the garbage collector has taken in the thread that made this."""

    def __init__(self) -> None:
        self.seconds = self._began = 0.0
        self._thread = threading.get_ident()

    def note(self, phase: str, facts: object) -> None:
        """See gc.callbacks."""
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.seconds += time.thread_time() - self._began


class Receiver:
    """The way of what peers say to one broker.

    carry_out: does what the hub wishes.  send_away: tells a peer, with an error and a code, that it cannot stay.
    has_our_keys: whether a peer came in with this hub's own pair.  key_name: of the key it came in with, "" where none
    are asked for.  is_operator: whether a peer may end the run.  The rest: of the broker.
    rates, budgets: of each peer's messages, and of the time that they take.  bytes_received: payload and heads.
    behind: the frames behind the head that is being taken.
    """

    def __init__(
        self,
        channel: HubChannel,
        hub: Hub,
        traffic: Traffic,
        arrivals: Arrivals,
        parameters: Parameters,
        relays: Relays,
        loads: Loads,
        telling: Telling,
        carry_out: Callable[[Sequence[HubEffect]], None],
        send_away: Callable[[PeerId, Exception, str], None],
        has_our_keys: Callable[[PeerId], bool],
        key_name: Callable[[PeerId], str],
        is_operator: Callable[[PeerId], bool],
    ) -> None:
        self._channel, self._hub, self._traffic, self._arrivals = channel, hub, traffic, arrivals
        self._parameters, self._relays, self._loads, self._telling = parameters, relays, loads, telling
        self._carry_out, self._send_away, self._has_our_keys = carry_out, send_away, has_our_keys
        self._key_name, self._is_operator = key_name, is_operator
        self.rates, self.budgets = MessageRates(), LoopBudgets()
        self._collecting = _Collecting()
        self.bytes_received = 0
        self.behind: Sequence[Buffer] = ()

    async def receive_forever(self) -> None:
        """Take what comes until the channel is closed."""
        gc.callbacks.append(self._collecting.note)
        try:
            await self._receive()
        finally:
            gc.callbacks.remove(self._collecting.note)

    async def _receive(self) -> None:
        while True:
            try:
                peer, lane, frames = await self._channel.receive()
            except ChannelClosed:
                return
            self.bytes_received += sum(len(frame) for frame in frames)
            if not self._is_heard(peer, lane):
                continue
            began, fault = self._own_time(), 0.0
            try:
                self._take(peer, lane, frames)
            except ProtocolVersionError as error:
                self._traffic.send(peer, Refused("protocol", str(error)))
            except (FramingError, RemoteProtocolError) as error:
                fault = FAULT_SECONDS
                self._send_away(peer, error, "protocol")
            except Exception as error:  # a message that we did not think of costs its sender, not the run
                fault = FAULT_SECONDS
                self._telling.unthought_of(peer)
                self._send_away(peer, error, "protocol")
            self._count_time(peer, cost_of(self._own_time() - began, len(frames[0])) + fault)

    def _own_time(self) -> float:
        """The CPU seconds of this thread, but for those of Python's garbage collector, which are no peer's fault."""
        return time.thread_time() - self._collecting.seconds

    def _is_heard(self, peer: PeerId, lane: Lane) -> bool:
        """Return whether a message is read; a peer that says too many is shown out, and may come back."""
        now = time.monotonic()
        if not self.budgets.is_heard(peer, now):
            self._channel.dismiss(peer)  # again, on a new connection
            return False
        hearing = Hearing.HEARD if lane is Lane.BULK else self.rates.take(peer, now)
        if hearing is Hearing.TOO_MANY:
            self._show_out(peer, f"it says more than {MESSAGES_PER_SECOND:.0f} messages a second, for long")
        return hearing is Hearing.HEARD

    def _count_time(self, peer: PeerId, seconds: float) -> None:
        """Count the time that a message of this peer took; a peer that takes too much is shown out likewise."""
        if self.budgets.take(peer, seconds, time.monotonic()):
            self._show_out(peer, f"its messages take more than {LOOP_SHARE:.0%} of the broker's time, for long")

    def _show_out(self, peer: PeerId, text: str) -> None:
        """Send a peer away and end its connections; what is queued there is not heard."""
        self._send_away(peer, ZmqTrainError(text), "unknown")
        self._channel.dismiss(peer)

    def _take(self, peer: PeerId, lane: Lane, frames: list[Buffer]) -> None:
        now, head = time.monotonic(), open_head(frames[0])
        stamp = head.stamp
        if (instead := self._hub.screen(peer, stamp, head.kind, len(frames[0]))) is not None:
            return self._carry_out(instead)
        message = read_fields(head)
        if (instead := self._hub.judge(peer, stamp, message, now, lane is Lane.CONTROL)) is not None:
            return self._carry_out(instead)
        if isinstance(message, Chunk):
            self._take_chunk(peer, message, frames, now)
        elif isinstance(message, Credit):
            self._hub.saw(peer, now)
            self._traffic.intake.pay(len(frames[0]))
            self._traffic.acknowledged(peer, message)
            self._parameters.go_on(peer)
        elif isinstance(message, Hello) and message.role in ("master", "standby") and not self._has_our_keys(peer):
            self._send_away(peer, ZmqTrainError(OTHER_KEYS), "keys")
        elif isinstance(message, Stop) and not self._is_operator(peer):
            self._send_away(peer, ZmqTrainError(NO_OPERATOR), "keys")
        else:
            self.behind = frames[1:]
            if isinstance(message, Probe | Relay | Fold) and sum(len(frame) for frame in self.behind) != message.size:
                raise FramingError(f"a {type(message).__name__} of {message.size} bytes has others behind it")
            self._traffic.intake.pay(sum(len(frame) for frame in frames))
            nodes = self._hub.nodes if isinstance(message, Stop) else 0
            try:
                self._carry_out(self._hub.receive(peer, message, now))
            finally:
                self.behind = ()
            if isinstance(message, Stop) and self._hub.stopped_at == now:
                self._telling.stopping(peer, nodes)
            if isinstance(message, Relayed):
                self._relays.pump(peer)
            if isinstance(message, Hello):
                self._loads.limit(peer)
                if (member := self._hub.members.get(peer)) is not None:
                    member.voter = f"key {name}" if (name := self._key_name(peer)) else ""
                self._hub.records.own(peer, self._key_name(peer))
            if isinstance(message, Report):
                self._telling.reported(peer, message)
            if isinstance(message, Report) and self._hub.believes(peer, message):
                self._telling.evaluated(message)

    def _take_chunk(self, peer: PeerId, chunk: Chunk, frames: list[Buffer], now: float) -> None:
        if len(frames) != 2:
            raise FramingError("a chunk is a head and one frame")
        self._hub.saw(peer, now)
        if self._traffic.intake.has_chunk(peer, chunk):
            return self._hub.fence.count(Verdict.DOUBLE)
        if (whole := self._traffic.intake.take_chunk(peer, chunk, frames[1])) is not None:
            if isinstance(whole[0], Initialise | Push):
                self._parameters.whole(peer, whole[0], whole[1])
            else:
                self._arrivals.arrived(peer, *whole)
