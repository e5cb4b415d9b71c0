"""Write down what honest peers say to a broker, of every kind and under many settings: what fuzzing begins with.

Rule 1: a session is what comes in at the socket, in order, with the pauses between: see `fuzz_inputs`.
Rule 2: a session goes to its end at the broker that it was written for: what is mutated is deep in a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any

import numpy as np

from zmqtrain.averaging.coder import DENSE, encode_snapshot
from zmqtrain.averaging.snapshot import encode_optimizer_state
from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.codecs.fragment import Layout
from zmqtrain.codecs.payload import encode_payload
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Buffer, LeafSpec, PeerId
from zmqtrain.planning.rules import canonical
from zmqtrain.protocol import messages
from zmqtrain.protocol.fencing import Stamp
from zmqtrain.protocol.framing import encode_message, split
from zmqtrain.protocol.messages import (
    Credit,
    Fetch,
    Goodbye,
    GroupLost,
    Heartbeat,
    Hello,
    JoinGroup,
    Message,
    Probe,
    Publish,
    ReduceChunk,
    Relay,
    Relayed,
    Report,
    Snapshot,
    WorkRequest,
    model_to_wire,
    replace_fields,
)

from fuzz_inputs import Record, pack_session

__all__ = ["PEERS", "SETTINGS", "MODEL", "LEAVES", "honest_sessions"]

PEERS = tuple(PeerId(f"pc-{number}#{number:02}") for number in range(8))
MODEL = (LeafSpec("w", (10,), "float32"), LeafSpec("b", (3,), "float32"))
LEAVES = [np.arange(10, dtype=np.float32), np.ones(3, np.float32)]
SETTINGS: tuple[dict[str, Any], ...] = (
    {"release": "immediately", "units": 40},
    {"release": "quorum", "codec": "int8", "broadcast_codec": "int4", "fragments": 1, "every": 0, "delay": -1},
    {"release": "all", "mode": "strict", "start_nodes": 2, "units": 12, "initial": "founder"},
    {"initial": "own", "start_nodes": 2, "preemption": "score:patience=1,margin=0", "release": "immediately"},
    {"initial": "mean", "start_nodes": 2, "release": "count:contributions=2", "aggregate": "median"},
    {"shards": 2, "initial": "founder", "release": "bounded:staleness=1"},
    {"max_staleness": 1, "stale": "drop", "aggregate": "clipped:factor=2", "staleness": "compensation:strength=0.1"},
    {"codec": "topk:density=0.5+int8", "broadcast_codec": "sign", "selection": "better", "release": "time:seconds=0.1"},
)


class _Says:
    """Write down what honest peers say. incarnation: of their connections; 0: not fenced, so that a session of which
    something is left out still leads somewhere."""

    def __init__(self, seed: int, incarnation: int = 0) -> None:
        self.incarnation, self.said = incarnation, dict.fromkeys(range(len(PEERS)), 0)
        self.seed, self.settings = seed, canonical(RunSettings.from_dict(SETTINGS[seed]).at_first)
        self.records: list[Record] = []
        self.layout = Layout(MODEL, self.settings.fragments_of(MODEL), (0, self.settings.shards))
        self.transfers = 0

    def say(self, who: int, message: Message, *frames: Buffer) -> None:
        if isinstance(message, Hello):
            message, self.said[who] = replace_fields(message, incarnation=self.incarnation), 0
        if not frames:
            self.said[who] += bool(self.incarnation)
        stamp = Stamp(self.incarnation, 0 if frames else self.said[who])
        self.records.append((who, (encode_message(message, stamp), *map(bytes, frames))))

    def wait(self, how: int = 0) -> None:
        self.records.append((how, ()))

    def transfer(self, who: int, announcement: Any, frames: Sequence[Buffer]) -> None:
        self.say(who, announcement)
        for head, frame in split(announcement.transfer, frames, Stamp(self.incarnation)):
            self.records.append((who, (head, bytes(frame))))

    def number(self) -> int:
        self.transfers += 1
        return self.transfers

    def join(self, *whos: int) -> None:
        for who in whos:
            self.say(who, Hello(f"pc-{who}", link=125e6))
            self.say(who, Fetch(-1, model_to_wire(MODEL), score=float(who)))
        asked = whos if self.settings.initial == "mean" else whos[1:] if self.settings.initial == "own" else whos[:1]
        for who in asked:
            frames = encode_snapshot(self.layout, self.layout.split(LEAVES))
            moments = encode_optimizer_state([np.ones(20, np.float32)]) if self.settings.trains_apart else ()
            sizes = tuple(len(frame) for frame in (*frames, *moments))
            self.transfer(who, Snapshot(self.number(), 0, sizes, (), len(moments)), [*frames, *moments])
            self.wait()

    def publish(self, who: int, sequence: int, dense: bool = False) -> None:
        codec = DENSE if dense else self.settings.codec
        segments = [np.full(count, 0.5 + who, np.float32) for count in self.layout.counts(0)]
        frames = encode_payload(coding_from_spec(codec).of_fragment(self.layout, 0), segments)
        sizes = tuple(len(frame) for frame in frames)
        announced = Publish(self.number(), sequence, 0, 0, codec, sizes, 8, 1, nan, dense)
        self.transfer(who, announced, frames)

    @property
    def bytes(self) -> bytes:
        return pack_session(self.seed, self.records)


def _training(seed: int, incarnation: int = 0) -> bytes:
    says = _Says(seed, incarnation)
    says.join(0, 1)
    for sequence in range(3):
        for who in (0, 1):
            says.publish(who, sequence)
            says.say(who, Credit(sequence + 1, 1))
            says.say(who, Heartbeat(1.0))
        says.wait(1)
    says.say(0, Report(8, 64, 10.0, 0.5, 3.0, 0, 1, 1, "", {"loss": 0.5}, 1, 0.01))
    says.say(0, WorkRequest((), 2, False))
    says.say(1, WorkRequest((0, 1), 2, True))
    says.publish(1, 3, dense=True)
    says.say(1, Fetch(0))
    says.say(0, Probe(1, 3, 100), b"abc")
    says.say(2, Hello("watch", "observer"))
    says.say(7, Hello("deaf"))
    says.wait(2)
    says.say(0, WorkRequest((0, 1), 0, True))
    says.say(1, Goodbye("done"))
    says.wait(3)
    return says.bytes


def _groups(seed: int) -> bytes:
    says = _Says(seed)
    values = np.arange(4, dtype=np.float32).tobytes()
    for who in (0, 1, 2):
        says.say(who, Hello(f"pc-{who}", "process"))
        says.say(who, JoinGroup("g", 3, -1, "", f"tcp://127.0.0.1:{6000 + who}", "", "token"))
    for who in (0, 1, 2):
        says.say(who, ReduceChunk(1, "sum", "float32", 16 + 3), b"own", values)
        says.say(who, Relay((who + 1) % 3, 5), b"hello")
    for who in (0, 1, 2):
        says.say(who, Relayed((who - 1) % 3, 1))
        says.say(who, ReduceChunk(1, "mean", "float32", 16), values)
    says.wait(1)
    says.say(0, GroupLost(1, "silent"))
    says.say(2, Goodbye())
    says.wait(2)
    return says.bytes


def _keys(seed: int) -> bytes:
    says = _Says(seed)
    values = np.arange(10, dtype=np.float32).tobytes()
    for who in (0, 1):
        says.say(who, Hello(f"pc-{who}", "process"))
        says.say(who, messages.Enrol("", 0, 1, "bsp", "adam:rate=0.1", 2, False))
        says.say(who, messages.Declare(1, (("w", (2, 5), "float32"), ("b", (), "float64"))))
    says.transfer(0, messages.Initialise(2, "w", "float32", 0, 10, (40,)), [values])
    says.transfer(0, messages.Initialise(3, "b", "float64", 0, 1, (8,)), [b"\0" * 8])
    says.say(0, messages.Founded(("w", "b")))
    for request in (4, 5):
        for who in (0, 1):
            says.transfer(who, messages.Push(request, "w", "float32", True, (40,)), [values])
            says.say(who, Credit(request, 1))
    says.say(1, messages.Pull(9, "b"))
    says.wait(1)
    says.say(2, Hello("reader", "process"))
    says.say(2, messages.Enrol("", 0, 1, "", "", 0, True))
    says.say(2, messages.Declare(1, (("w", (), ""),)))
    says.say(2, messages.Pull(2, "w"))
    says.say(1, Goodbye())
    says.wait(2)
    return says.bytes


def _shards(seed: int) -> bytes:
    says = _Says(seed)
    says.say(3, Hello("broker", "broker", shard=1, address="tcp://127.0.0.1:5556"))
    says.join(0)
    says.say(3, Heartbeat(2.0))
    says.say(4, Hello("broker", "broker", shard=1, address="tcp://127.0.0.1:5556"))
    says.publish(0, 0)
    says.wait(1)
    return says.bytes


def _lockstep(seed: int) -> bytes:
    says = _Says(seed)
    for who in (0, 1):
        says.say(who, Hello(f"pc-{who}", exchange="allreduce:ring"))
        says.say(who, Fetch(-1, model_to_wire(MODEL)))
    says.join(0)
    says.publish(0, 0, dense=True)
    says.publish(1, 0, dense=True)
    says.say(0, Goodbye())
    says.wait(2)
    return says.bytes


def honest_sessions() -> list[bytes]:
    """Return a session for each of the settings, and of every kind of peer."""
    sessions = [_training(seed) for seed in range(len(SETTINGS))]
    return [
        *sessions,
        _training(0, 7),
        _training(1, 1 << 40),
        _groups(0),
        _keys(0),
        _keys(1),
        _shards(5),
        _lockstep(0),
    ]
