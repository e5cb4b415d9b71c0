"""Do to a broker what no node would: each attack a function of where it is, told to stop by an event.

Rule 1: nothing of ours is on this side but what an attacker can have too: sockets, ZeroMQ, and what honest peers have
said.  Rule 2: an attack goes on as fast as the link to the broker lets it, and forgives all that fails.
Rule 3: what is drawn follows from the seed.
Source: ZeroMQ RFC 23 (ZMTP 3.0: greeting, frames), RFC 13 (ZMTP 1.0), RFC 15 (ZMTP 2.0).
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import msgpack
import zmq

from zmqtrain.core.errors import FramingError
from zmqtrain.core.types import MAX_FRAME_BYTES
from zmqtrain.protocol.framing import PROTOCOL_VERSION, decode_message, encode_message
from zmqtrain.protocol.messages import (
    MESSAGES,
    Aggregate,
    Books,
    Chunk,
    Credit,
    Fetch,
    Heartbeat,
    Hello,
    Holding,
    JoinGroup,
    Message,
    Publish,
    Refused,
    Replica,
    Roster,
    Snapshot,
    Welcome,
    WireLeaf,
)

from fuzz_inputs import mutate_session, read_session
from fuzz_sessions import honest_sessions

__all__ = ["ATTACKS", "ATTACKS_OF_MEMBERS", "Place", "attack", "largest_heads"]

LONGEST_PAUSE = 0.2
NULL_GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32
GREETINGS = (
    b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64)),  # the hello of TLS
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\x01\x00" + b"\x05\x00hello",  # ZMTP 1.0
    b"\xff" + b"\0" * 7 + b"\x01\x7f\x01\x05\x00\x04Cx#1",  # ZMTP 2.0
    NULL_GREETING.replace(b"NULL" + b"\0" * 16, b"PLAIN".ljust(20, b"\0")) + b"\x04\x0e\x05HELLO\x03abc\x03abc",
    NULL_GREETING.replace(b"NULL" + b"\0" * 16, b"GSSAPI".ljust(20, b"\0")) + b"\x04\x00",
    NULL_GREETING.replace(b"NULL" + b"\0" * 16, b"CURVE".ljust(20, b"\0")) + b"\x04\xc8\x05HELLO" + b"\x01" * 194,
    NULL_GREETING[:30],
    b"\xff" * 2000,
    b"",
)
LENGTHS = (MAX_FRAME_BYTES + (1 << 17), 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


@dataclass(frozen=True)
class Place:
    """Where the broker is, and what is known of it.

    server_key: its public CURVE key, where it has one.  keys: the public and the secret key with which attackers come,
    None: a new pair on each connection, which nobody has authorised.
    """

    host: str
    port: int
    server_key: bytes | None = None
    keys: tuple[bytes, bytes] | None = None

    @property
    def address(self) -> str:
        """As ZeroMQ connects to it."""
        return f"tcp://{self.host}:{self.port}"


Attack = Callable[[Place, threading.Event, Random], None]


def attack(name: str, place: Place, stop: threading.Event, random: Random) -> None:
    """Do one attack again and again until told to stop; what fails is tried again."""
    while not stop.is_set():
        with contextlib.suppress(OSError, zmq.ZMQError, ValueError):
            ATTACKS[name](place, stop, random)
        stop.wait(random.random() * LONGEST_PAUSE)


@contextlib.contextmanager
def _raw(place: Place) -> Iterator[socket.socket]:
    with socket.create_connection((place.host, place.port), timeout=2.0) as line:
        yield line


@contextlib.contextmanager
def _dealer(place: Place, routing_id: bytes, unread: bool = False) -> Iterator[zmq.SyncSocket]:
    """Give a socket with that routing id; unread: it takes nothing of what it is sent."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.routing_id, dealer.sndhwm, dealer.sndtimeo, dealer.rcvtimeo = 0, routing_id, 8, 500, 500
        if unread:
            dealer.rcvhwm, dealer.rcvbuf = 1, 4096
        if place.server_key is not None:
            dealer.curve_serverkey = place.server_key
            dealer.curve_publickey, dealer.curve_secretkey = place.keys or zmq.curve_keypair()
        dealer.connect(place.address)
        yield dealer


def _own_id(random: Random) -> str:
    return f"mallory#{random.randrange(1 << 32):08x}"


def _ids(random: Random) -> tuple[bytes, bytes]:
    name = _own_id(random).encode()
    return b"C" + name, b"B" + name


def greet_wrongly(place: Place, stop: threading.Event, random: Random) -> None:
    """Say hello as another program does, or an older ZeroMQ, or with a mechanism that is not there."""
    with _raw(place) as line:
        line.sendall(random.choice((*GREETINGS, random.randbytes(random.randrange(1, 200)))))
        line.settimeout(0.05)
        with contextlib.suppress(TimeoutError):
            line.recv(100)


def connect_and_stay(place: Place, stop: threading.Event, random: Random) -> None:
    """Open connections as fast as can be, and say nothing on them."""
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            if stop.is_set():
                return
            stack.enter_context(_raw(place))
        stop.wait(2.0)


def drip(place: Place, stop: threading.Event, random: Random) -> None:
    """Send a greeting, or a large message, a byte at a time, and never the end of it."""
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(_raw(place)) for _ in range(40)]
        for line in lines[::2]:
            line.sendall(_handshake() + b"\x02" + struct.pack(">Q", MAX_FRAME_BYTES))
        place_in_greeting = 0
        while lines and not stop.wait(1.0):
            for line in list(lines):
                with contextlib.suppress(OSError):
                    line.sendall(NULL_GREETING[place_in_greeting % 60 : place_in_greeting % 60 + 1])
                    continue
                lines.remove(line)
            place_in_greeting += 1


def _handshake(routing_id: bytes = b"Cdrip#1") -> bytes:
    """Return a whole handshake of the mechanism NULL, as a DEALER says it."""
    properties = b"".join(
        bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", routing_id))
    )
    ready = b"\x05READY" + properties
    return NULL_GREETING + b"\x04" + bytes([len(ready)]) + ready


def announce_giants(place: Place, stop: threading.Event, random: Random) -> None:
    """Shake hands, and announce a frame that no memory holds; or thousands of frames of one message."""
    with _raw(place) as line:
        line.sendall(_handshake(b"C" + _own_id(random).encode()))
        if random.random() < 0.7:
            line.sendall(b"\x02" + struct.pack(">Q", random.choice(LENGTHS)) + b"x" * 1000)
        else:
            line.sendall(b"\x01\x01x" * 20_000)
        stop.wait(0.05)


def flood_small(place: Place, stop: threading.Event, random: Random) -> None:
    """Send small messages as fast as they go: noise, heads that are none, and some that are."""
    control, _ = _ids(random)
    messages = [
        *(random.randbytes(random.randrange(1, 60)) for _ in range(20)),
        encode_message(Hello("mallory")),
        encode_message(JoinGroup("default", 2, address="tcp://10.0.0.9:1", token="t")),
        encode_message(Chunk(1, 0)),
    ]
    with _dealer(place, control) as dealer:
        for _ in range(5000):
            if stop.is_set():
                return
            dealer.send(random.choice(messages))


def flood_hellos(place: Place, stop: threading.Event, random: Random) -> None:
    """Come in under ever new names, as nodes, processes, observers and brokers, and never stay."""
    role = random.choice(("node", "observer", "process", "broker"))
    with _dealer(place, _ids(random)[0]) as dealer:
        dealer.send(encode_message(Hello("x" * 5000, role, shard=1, address="tcp://10.0.0.9:1")))
        dealer.recv()


def flood_big(place: Place, stop: threading.Event, random: Random) -> None:
    """Send frames of 4 MiB that nobody has granted."""
    with _dealer(place, _ids(random)[1]) as dealer:
        frame = random.randbytes(1 << 16) * (MAX_FRAME_BYTES >> 16)
        for index in range(8):
            if stop.is_set():
                return
            dealer.send_multipart([encode_message(Chunk(1, index)), frame], copy=False)


def never_read(place: Place, stop: threading.Event, random: Random) -> None:
    """Come in, ask again and again, and take nothing of what is answered."""
    with _dealer(place, _ids(random)[0], unread=True) as dealer:
        for _ in range(2000):
            if stop.is_set():
                return
            dealer.send(encode_message(Hello("mallory", "observer")))


def replay(place: Place, stop: threading.Event, random: Random) -> None:
    """Say what honest peers have said, as it was, or with sizes, indexes and states that lie."""
    sessions = honest_sessions()
    for _ in range(20):
        data = random.choice(sessions)
        _say(place, stop, random, mutate_session(data, random, sessions) if random.random() < 0.7 else data)


def _say(place: Place, stop: threading.Event, random: Random, data: bytes) -> None:
    control, bulk = _ids(random)
    with _dealer(place, control) as heads, _dealer(place, bulk) as chunks:
        for _, frames in read_session(data)[1]:
            if stop.is_set():
                return
            if frames:
                (chunks if len(frames) > 1 else heads).send_multipart(frames)


def announce_lies(place: Place, stop: threading.Event, random: Random) -> None:
    """Announce one byte or a terabyte, and send more, or less, or what was not asked for."""
    control, bulk = _ids(random)
    sizes = random.choice(((1,), (1 << 40,), (4 << 20,) * 1000, (-1,), (0,), tuple(range(1, 2000)), ()))
    announced = [
        Publish(1, 0, 0, 0, "ternary:block=128", sizes, 1, 1, 0.0),
        Snapshot(2, 0, sizes),
        Fetch(-1, (("w", (1 << 39,), "float32"),)),
    ]
    with _dealer(place, control) as heads, _dealer(place, bulk) as chunks:
        heads.send(encode_message(Hello("mallory")))
        for message in announced:
            heads.send(encode_message(message))
        for transfer in (1, 2):
            for index in (0, 1, -1, 1 << 40):
                chunks.send_multipart(
                    [encode_message(Chunk(transfer, index)), random.randbytes(random.choice((1, 5000)))]
                )


def largest_heads(random: Random, size: int = (1 << 20) - 4096) -> Iterator[bytes]:
    """Give heads of `size` bytes of every kind: each field as long as it can be, nested, and named again and again."""
    for kind in random.sample(MESSAGES, len(MESSAGES)):
        name = msgpack.packb(kind.__name__)
        beginning = b"\x95" + b"".join(msgpack.packb(part) for part in (PROTOCOL_VERSION, 0, 0)) + name
        names = [*kind.__struct_fields__] or ["x"]
        for filling in (b"\x80", b"\x90", b"\x01", b"\x92\x90\x80", b"\xc0", b"\xa1x"):  # maps, lists, numbers, ...
            for long in names:
                pairs = [(one, b"\x01") for one in names if one != long]
                count = size // len(filling)
                value = b"\xdd" + struct.pack(">I", count) + filling * count
                yield beginning + _map([*pairs, (long, value)])
        yield beginning + _map([(names[0], b"\x91" * 400 + b"\x90")] * (size // 430))
        yield beginning + _map([(one, msgpack.packb("x" * 50)) for one in names] * (size // (60 * len(names))))


def _map(pairs: Sequence[tuple[str, bytes]]) -> bytes:
    return b"\xdf" + struct.pack(">I", len(pairs)) + b"".join(msgpack.packb(name) + value for name, value in pairs)


def send_largest_heads(place: Place, stop: threading.Event, random: Random, connections: int = 1) -> None:
    """Say every message at its largest, from so many connections in turn, as members of every kind and as none."""
    with contextlib.ExitStack() as stack:
        dealers = [stack.enter_context(_dealer(place, _ids(random)[0])) for _ in range(connections)]
        heads = largest_heads(random)
        while not stop.is_set():
            for dealer in dealers:
                with contextlib.suppress(zmq.Again):
                    if random.random() < 0.5:
                        dealer.send(encode_message(Hello("mallory", random.choice(("node", "process", "observer")))))
                    dealer.send(next(heads))


def send_largest_heads_from_ten(place: Place, stop: threading.Event, random: Random) -> None:
    """The same from ten connections at once."""
    send_largest_heads(place, stop, random, 10)


def join_and_be_silent(place: Place, stop: threading.Event, random: Random, members: int = 60) -> None:
    """Join with sixty nodes that send heartbeats and never publish; stay until told to stop."""
    _be_members(place, stop, random, members, again=False)


def join_with_four_and_be_silent(place: Place, stop: threading.Event, random: Random) -> None:
    """The same with four nodes."""
    _be_members(place, stop, random, 4, again=False)


def fetch_again_and_again(place: Place, stop: threading.Event, random: Random) -> None:
    """Join with ten nodes that fetch the parameters, all at once, again and again."""
    _be_members(place, stop, random, 10, again=True)


def _be_members(place: Place, stop: threading.Event, random: Random, members: int, again: bool) -> None:
    with contextlib.ExitStack() as stack:
        pairs = []
        for _ in range(members):
            control, bulk = _ids(random)
            pairs.append([stack.enter_context(_dealer(place, one)) for one in (control, bulk)])
            pairs[-1][1].send(b"")
        model: dict[int, tuple[WireLeaf, ...]] = {}
        beat = 0
        for heads, _ in pairs:
            heads.send(encode_message(Hello("mallory")))
        while not stop.wait(0.05):
            beat += 1
            for number, (heads, chunks) in enumerate(pairs):
                with contextlib.suppress(zmq.Again):
                    for message in _heard(heads):
                        if isinstance(message, Welcome):
                            model[number] = message.model
                            heads.send(encode_message(Fetch(-1, message.model)))
                        elif isinstance(message, Refused) and message.reason == "unknown":
                            heads.send(encode_message(Hello("mallory")))
                    for message in _heard(chunks):
                        if isinstance(message, Snapshot | Aggregate | Chunk):
                            heads.send(encode_message(Credit(message.transfer, 1)))
                    if again and number in model:
                        heads.send(encode_message(Fetch(-1, model[number])))
                    if beat % 10 == 0:
                        heads.send(encode_message(Heartbeat(float(beat))))


def confirm_late(place: Place, stop: threading.Event, random: Random, seconds: float = 1.8) -> None:
    """Be the standby: once in step, confirm each version so many seconds after it has come."""
    control, bulk = _ids(random)
    hello = encode_message(Hello("mallory", "standby", address="tcp://10.99.9.9:5555"))
    with _dealer(place, control) as heads, _dealer(place, bulk) as chunks:
        chunks.send(b"")
        heads.send(hello)
        parts: dict[int, tuple[int, int]] = {}  # of a transfer: its version, and how many chunks are to come
        due: deque[tuple[float, int]] = deque()
        in_step, read, beat_at = False, 0, 0.0
        while not stop.wait(0.01):
            now = time.monotonic()
            with contextlib.suppress(zmq.Again):
                for message in _heard(heads):
                    if isinstance(message, Books):
                        told = json.loads(message.text)
                        in_step, read = told["in_step"], told["number"]
                    elif isinstance(message, Refused):
                        parts, due, in_step = {}, deque(), False
                        heads.send(hello)
                for message in _heard(chunks):
                    if not isinstance(message, Replica | Aggregate | Chunk):
                        continue
                    heads.send(encode_message(Credit(message.transfer, 1)))
                    if not isinstance(message, Chunk):
                        parts[message.transfer] = message.version, len(message.sizes)
                    elif message.transfer in parts:
                        version, left = parts[message.transfer]
                        parts[message.transfer] = version, left - 1
                        if left == 1:
                            due.append((now + seconds * in_step, version))
                while due and due[0][0] <= now:
                    heads.send(encode_message(Holding(due.popleft()[1])))
                if now - beat_at > 0.3:
                    heads.send(encode_message(Heartbeat(now, read)))
                    beat_at = now


def _heard(dealer: zmq.SyncSocket) -> Iterator[Message]:
    """Yield the messages that have arrived."""
    while dealer.poll(0):
        with contextlib.suppress(FramingError):
            yield decode_message(dealer.recv_multipart()[0])


def steal(place: Place, stop: threading.Event, random: Random) -> None:
    """Look on, learn who is here, and come in under the ids of others."""
    with _dealer(place, _ids(random)[0]) as dealer:
        dealer.send(encode_message(Hello("mallory", "observer")))
        known: Sequence[str] = ()
        while not known:
            message = decode_message(dealer.recv())
            known = [str(one["peer"]) for one in message.members] if isinstance(message, Roster) else ()
    for peer in known:
        for lane in (b"C", b"B"):
            with _dealer(place, lane + peer.encode()) as dealer:
                dealer.send(encode_message(Hello("mallory")))


ATTACKS: dict[str, Attack] = {
    "greet_wrongly": greet_wrongly,
    "connect_and_stay": connect_and_stay,
    "drip": drip,
    "announce_giants": announce_giants,
    "flood_small": flood_small,
    "flood_hellos": flood_hellos,
    "flood_big": flood_big,
    "never_read": never_read,
    "replay": replay,
    "announce_lies": announce_lies,
    "steal": steal,
    "send_largest_heads": send_largest_heads,
    "send_largest_heads_from_ten": send_largest_heads_from_ten,
    "join_and_be_silent": join_and_be_silent,
    "join_with_four_and_be_silent": join_with_four_and_be_silent,
    "fetch_again_and_again": fetch_again_and_again,
    "confirm_late": confirm_late,
}
ATTACKS_OF_MEMBERS = (
    "send_largest_heads",
    "send_largest_heads_from_ten",
    "join_and_be_silent",
    "join_with_four_and_be_silent",
    "fetch_again_and_again",
)
"""What is worse with a key that the broker knows."""
