"""Name what is fuzzed: for each target a function of any bytes, honest inputs to begin with, and how they are mutated.

Rule 1: a target takes any bytes, returns how many frames were in them, and raises for a bug and nothing else: what the
code is meant to raise (FramingError, CodecError, CheckpointError, ...) is taken here.
Rule 2: it keeps nothing from one input to the next: a crash is reproduced from its input alone.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from zmqtrain.averaging.aggregator import Aggregator, Released
from zmqtrain.broker.checkpoint import Keeper
from zmqtrain.codecs import fast
from zmqtrain.codecs.base import codec_from_spec
from zmqtrain.codecs.codec import Codec
from zmqtrain.codecs.payload import check_payload, decode_payload, encode_payload, plan_payload, seal_frame
from zmqtrain.core.errors import (
    CheckpointError,
    CodecError,
    ConfigError,
    FramingError,
)
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import PeerId
from zmqtrain.protocol.effects import Expect
from zmqtrain.protocol.framing import (
    Assembler,
    decode_head,
    decode_message,
    encode_message,
    pack_value,
    split,
    unpack_value,
)
from zmqtrain.protocol.messages import (
    ANNOUNCEMENTS,
    Aggregate,
    Chunk,
    Fetch,
    Goodbye,
    Heartbeat,
    Preempt,
    Publish,
    Refused,
    Roster,
    Schedule,
    Snapshot,
    Welcome,
    WorkUnit,
    model_from_wire,
    model_to_wire,
)
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.transport.zmq_keys import CurveKeys, load_public_key

from fuzz_broker import run_broker
from fuzz_collectives import collective_sessions, mutate_collectives, run_collectives
from fuzz_inputs import mutate_bytes, mutate_head, mutate_session, pack_session, read_session
from fuzz_sessions import LEAVES, MODEL, honest_sessions

__all__ = ["TARGETS", "Target"]

Mutate = Callable[[bytes, Random, Sequence[bytes]], bytes]


class Target(NamedTuple):
    """What is fuzzed. run: raises for a bug; returns the frames of an input.  corpus: honest inputs.  share: of all
    frames, when all targets are fuzzed together."""

    run: Callable[[bytes], int]
    corpus: Callable[[], list[bytes]]
    mutate: Mutate
    share: float


# ---------------------------------------------------------------------- heads, and the frames of transfers


def _run_framing(data: bytes) -> int:
    """Read each frame as a head and as a packed value: both survive writing and reading; chunks are put together."""
    _, records = read_session(data)
    assembler, count = Assembler(1 << 20), 0
    for _, frames in records:
        count += len(frames)
        for frame in frames[:1]:
            with suppress(FramingError, ConfigError):  # what is read may be deeper than what is packed
                value = unpack_value(frame)
                assert repr(unpack_value(pack_value(value))) == repr(value)
            try:
                message = decode_message(frame)
                assert repr(decode_message(encode_message(message))) == repr(message)
                if isinstance(message, ANNOUNCEMENTS):
                    assembler.expect(message)
                elif isinstance(message, Chunk) and len(frames) == 2:
                    assembler.add(message, frames[1])
                elif isinstance(message, Fetch | Welcome):
                    model_from_wire(message.model)
            except FramingError:
                continue
    assert 0 <= assembler.expected_bytes <= assembler.limit_bytes
    return count


def _all_sessions() -> list[bytes]:
    hub = [(0, (encode_message(message),)) for message in _hub_messages()]
    many = [(0, (encode_message(Publish(number, number, 0, 0, "x", (3, 1), 1, 1, 0.0)),)) for number in range(3)]
    chunks = [(0, (head, bytes(frame))) for number in range(3) for head, frame in split(number, [b"abc", b"d"])]
    values = [(0, (pack_value(value),)) for value in (None, "text", [1, 2.5, b"raw"], {"a": (1, ("b", True)), 3: []})]
    return [*honest_sessions(), pack_session(0, hub), pack_session(0, [*many, *chunks]), pack_session(0, values)]


# ---------------------------------------------------------------------- payloads and their kernels

CODECS = (
    *("float32", "bf16", "int8", "int8:block=3", "int4", "int4:block=5", "ternary", "ternary:block=7"),
    *("sign", "sign:block=9", "int2", "topk:density=0.1+float32", "topk:density=0.3+int8", "dct+topk:density=0.2+int8"),
    *("lowrank:rank=2", "int8s:block=4", "int4s", "blocktopk:keep=3+int4", "randomk:density=0.3+sign"),
    *("int8:fragments=3", "topk:density=0.3+sign:block=9", "topk:density=0.05+sign"),
)
COUNTS = ((1,), (2,), (5,), (8,), (17,), (40,), (257,), (40, 5, 257), (8, 8, 300, 300))
"""The values of each segment of a payload."""
SEALED = next(number for number in range(128, 256) if number % len(COUNTS) == 0)
"""Added to the number of what is sealed again after it was changed."""
GUARD = 64
"""Values before and after what is decoded, which nobody may touch."""


@cache
def _codecs() -> tuple[Codec, ...]:
    return tuple(codec_from_spec(spec) for spec in CODECS)


def _run_payload(data: bytes) -> int:
    """Check and decode a payload in numpy and in machine code: all or nothing, nothing beyond its place, the same."""
    choice, records = read_session(data)
    codecs = _codecs()
    count = 0
    for who, frames in records:
        codec, counts = codecs[choice % len(codecs)], COUNTS[who % len(COUNTS)]
        plan = plan_payload((codec,) * len(counts), counts)
        for frame in frames:
            count += 1
            sealed = bytearray(frame)
            if who & 128 and len(sealed) >= 16:  # past the checksum
                seal_frame(plan, plan.frames[0], sealed)
            results = [_decode(codec, bytes(sealed), counts, machine) for machine in _ways()]
            assert all(result == results[0] for result in results), f"{codec.name}: numpy and machine code differ"
    return count


@cache
def _ways() -> tuple[bool, ...]:
    try:
        fast.use(True)
    except ImportError:
        return (False,)
    assert fast.kernels(1) is not None, "numba is here, and cannot compile"
    return (False, True)


def _decode(codec: Codec, frame: bytes, counts: tuple[int, ...], machine: bool) -> tuple[bytes, bytes] | str:
    fast.use(machine)
    codecs, values = (codec,) * len(counts), sum(counts)
    try:
        check_payload(codecs, [frame], counts)
    except CodecError as error:
        return type(error).__name__
    decoded = []
    for add in (False, True):
        room = np.full(values + 2 * GUARD, 12345.0, np.float32)
        out = room[GUARD : GUARD + values]
        decode_payload(codecs, [frame], counts, out=out, add=add, checked=True)
        assert (room[:GUARD] == 12345.0).all() and (room[-GUARD:] == 12345.0).all(), "written beyond its place"
        assert np.isfinite(out).all(), "what was checked is not finite"
        decoded.append(out.tobytes())
    return decoded[0], decoded[1]


def _payloads() -> list[bytes]:
    inputs = []
    random = np.random.default_rng(0)
    for choice, codec in enumerate(_codecs()):
        records = []
        for place, counts in enumerate(COUNTS):
            segments = [random.standard_normal(count, dtype=np.float32) for count in counts]
            records.append((place, tuple(map(bytes, encode_payload((codec,) * len(counts), segments)))))
        records += [(place + SEALED, frames) for place, frames in records]
        inputs.append(pack_session(choice, records))
    return inputs


def _mutate_payload(data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
    choice, records = read_session(data)
    if random.random() < 0.02:
        return mutate_bytes(data, random)
    mutated = []
    for who, frames in records:
        changed = tuple(mutate_bytes(frame, random) if random.random() < 0.8 else frame for frame in frames)
        mutated.append(((who + random.choice((0, 0, 0, 1, 7, 128))) & 255, changed))
    return pack_session(choice if random.random() < 0.95 else random.randrange(256), mutated)


# ---------------------------------------------------------------------- a node's side


def _hub_messages() -> list[Any]:
    settings = RunSettings(every=2, delay=1).to_dict()
    entry = {"peer": "pc-0#00", "name": "pc-0", "state": "live", "link_rate": 1e6}
    return [
        Welcome("run-1", 0, settings, model_to_wire(MODEL), ((0, 0),), (1,), ()),
        Snapshot(1, 0, (64,), (), 0, False),
        Chunk(1, 0),
        Heartbeat(1.0, 0),
        Roster(1, (entry,), "pc-0#00", 8, 1, 1, 2, 3.0, {"loss": 0.5}, 1, 2, 1, (), {}, ""),
        Aggregate(2, 1, "ternary", (0,), (1,), (64,), (("pc-0#00", 0),), 1),
        Chunk(2, 0),
        Schedule(4, 2, 3),
        WorkUnit((0, 1)),
        Refused("stale", "late", 1),
        Preempt("you lag"),
        Snapshot(3, 1, ()),
        Fetch(),
        Goodbye("the broker was stopped"),
        Refused("run", "another"),
    ]


def _run_peer(data: bytes) -> int:
    """Tell a node's machine anything: it says what can be written, and ends only by what its caller is to be told."""
    choice, records = read_session(data)
    peer = Peer(PeerId("pc-0#00"), "pc-0", role="observer" if choice % 5 == 4 else "node")
    assembler, now, count, sequence = Assembler(1 << 40), 0.0, 0, 0
    effects = [*peer.start(now), *peer.join(MODEL, now)]
    with suppress(ConfigError):  # the settings of a hub that this version does not know: the node says so, and ends
        for who, frames in records:
            now += 0.05
            if not frames:
                now += (0.1, 0.6, 1.1, 4.0)[who % 4]
                effects = peer.tick(now) if who & 4 else peer.resync()
                if peer.state is PeerState.LIVE:
                    sequence += 1
                    effects += peer.publish(Publish(sequence, sequence, peer.version, 0, "x", (4,), 1, 1, 0.0))
            else:
                count += len(frames)
                try:
                    stamp, message = decode_head(frames[0])
                    instead = peer.judge(stamp, message, now)
                    whole = assembler.add(message, frames[1]) if isinstance(message, Chunk) and frames[1:] else None
                    if instead is not None and stamp.incarnation:  # those without are taken, or few would be
                        effects = instead
                    else:
                        effects = peer.received(whole[0].transfer) if whole else peer.receive(message, now)
                    for effect in effects:
                        if isinstance(effect, Expect):
                            assembler.expect(effect.announcement)
                except FramingError as error:
                    effects = peer.distrust(str(error), now)
                    assembler.clear()
            for effect in effects:
                if (said := getattr(effect, "message", None)) is not None:
                    encode_message(said)
    assert isinstance(peer.state, PeerState)
    return count


def _hub_sessions() -> list[bytes]:
    frames = [(encode_message(message),) for message in _hub_messages()]
    chunks = [(head, b"\0" * 64) if isinstance(decode_message(head), Chunk) else (head,) for (head,) in frames]
    plain = [(0, one) for one in chunks]
    timed = [record for one in chunks for record in ((0, one), (5, ()))]
    return [pack_session(0, plain), pack_session(1, timed), pack_session(2, [*timed, *timed])]


# ---------------------------------------------------------------------- what is read from a disk

_FILES = ("checkpoint-000000000001.safetensors", "journal-000000000001.log", "own.key_secret", "own.key")


def _run_files(data: bytes) -> int:
    """Resume from any bytes: it is skipped or refused in a sentence; keys are read or refused."""
    _, records = read_session(data)
    logger = logging.getLogger("zmqtrain")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(dir=_memory_folder()) as name, warnings.catch_warnings():
        folder = Path(name)
        for who, frames in records:
            for frame in frames[:1]:
                (folder / _FILES[who % len(_FILES)]).write_bytes(frame)
        try:
            with suppress(CheckpointError, ConfigError):
                _resume(folder)
            for read in (CurveKeys.load, load_public_key):
                for path in (folder / _FILES[2], folder / _FILES[3]):
                    with suppress(ConfigError):
                        read(path)
        finally:
            logger.setLevel(level)
    return len(records)


def _memory_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _hub_and_arrays() -> tuple[Any, Aggregator]:
    from zmqtrain.planning.rules import canonical
    from zmqtrain.protocol.hub import Hub
    from zmqtrain.protocol.rounds import release_rule_from_spec

    settings = canonical(RunSettings(release="immediately"))
    return Hub(settings, release_rule_from_spec(settings.release), "run-1"), Aggregator(settings)


def _resume(folder: Path) -> None:
    hub, aggregator = _hub_and_arrays()
    keeper = Keeper(folder)
    keeper.resume(hub, aggregator)
    keeper.close(hub.state(), aggregator)


def _files() -> list[bytes]:
    from zmqtrain.averaging.coder import encode_snapshot
    from zmqtrain.broker.checkpoint import RunFolder
    from zmqtrain.codecs.fragment import Layout

    hub, aggregator = _hub_and_arrays()
    layout = Layout(MODEL, 1, (0, 1))
    aggregator.plan(MODEL)
    aggregator.found(encode_snapshot(layout, layout.split(LEAVES)))
    state = hub.state() | {"version": 1, "model": [list(leaf) for leaf in model_to_wire(MODEL)]}
    counts = layout.counts(0)
    frames = encode_payload((codec_from_spec("float32"),) * len(counts), [np.ones(n, np.float32) for n in counts])
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        aggregator.version = 1
        folder.save(1, state, aggregator.arrays())
        folder.begin_journal(1)
        folder.release((Released(2, "float32", (0,), (frames,)), (("pc-0#00", 3),), 8), {})
        folder.close()
        CurveKeys.generate().save(Path(name), "own")
        parts = [(place, ((Path(name) / file).read_bytes(),)) for place, file in enumerate(_FILES)]
    return [pack_session(0, parts), pack_session(0, parts[:1]), pack_session(0, parts[2:])]


def _mutate_files(data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
    """Mutate one file; of a journal, as often as not, with a checksum that is right."""
    import struct
    import zlib

    seed, records = read_session(data)
    if not records:
        return random.choice(others)
    at = random.randrange(len(records))
    who, frames = records[at]
    if frames and who % len(_FILES) == 1 and len(frames[0]) > 8 and random.random() < 0.7:
        body = mutate_head(frames[0][8:], random) if random.random() < 0.5 else mutate_bytes(frames[0][8:], random)
        changed = struct.pack("<II", len(body), zlib.crc32(body)) + body
    else:
        changed = mutate_bytes(frames[0] if frames else b"", random)
    return pack_session(seed, [*records[:at], (who, (changed,)), *records[at + 1 :]])


TARGETS: dict[str, Target] = {
    "framing": Target(_run_framing, _all_sessions, mutate_session, 0.4),
    "broker": Target(run_broker, honest_sessions, mutate_session, 0.25),
    "payload": Target(_run_payload, _payloads, _mutate_payload, 0.1),
    "collectives": Target(run_collectives, collective_sessions, mutate_collectives, 0.15),
    "peer": Target(_run_peer, _hub_sessions, mutate_session, 0.09),
    "files": Target(_run_files, _files, _mutate_files, 0.01),
}
