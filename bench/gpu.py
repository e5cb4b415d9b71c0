"""Measure what compression costs the device that trains: codecs alone, and a node's steps with exchanges on and off.

Rule 1: a codec's time is compared with a copy of the same array on the same device in the same round; the best round
counts. GB/s are of float32 values, 1e9 bytes a second; `encode` and `decode` stay on the device, `frames` and `back`
are all that a node does: with transfers, frames and checksums.
Rule 2: what the device gives is held against numpy's bits.
Rule 3: a node trains against a broker in another process on 127.0.0.1. Blocks of steps with and without exchanges take
turns; each is measured from a device that is idle to one that is idle again, with exchanges already on their way in
the one kind and all landed in the other; the medians are compared.
Rule 4: where jax finds no accelerator there is nothing to measure: it says so and is content. `--here` runs all of it
at toy size on whatever there is, to see that it works; then no time is judged.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))  # of this checkout, installed or not

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from zmqtrain.codecs.base import codec_from_spec  # noqa: E402
from zmqtrain.codecs.codec import Codec  # noqa: E402
from zmqtrain.codecs.payload import decode_payload, encode_payload  # noqa: E402
from zmqtrain.codecs.payload_jax import DeviceCoder  # noqa: E402
from zmqtrain.core.errors import ConfigError  # noqa: E402

from report import print_table, write_json  # noqa: E402

__all__ = ["SPECS", "Size", "main", "measure_codec", "measure_node"]

SPECS = (
    "float32",
    "bf16",
    "int8",
    "int4",
    "int2",
    "ternary",
    "sign",
    "topk:density=0.01+int8",
    "blocktopk+int8",
    "randomk:density=0.01+int8",
    "dct+topk:density=0.03+int8",
    "lowrank",
)
LEAST_RATIO = 0.98
"""The speed with exchanges over that without."""
MOST_FETCHED = 1.05
"""Bytes that cross to the host over bytes that are published."""
SETTLE_SECONDS = 120.0
STOP_SECONDS = 60.0
LOOK_SECONDS = 0.0005


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured. values: of the array that codecs take; the rest: of the model, the run and the blocks."""

    values: int = 25_000_000
    rounds: int = 5
    repeats: int = 10
    width: int = 768
    layers: int = 12
    heads: int = 12
    vocabulary: int = 50_257
    context: int = 512
    batch: int = 2
    codec: str = "ternary"
    fragments: int = 8
    every: int = 8
    delay: int = 4
    blocks: int = 5
    block_exchanges: int = 8
    judged: bool = True


TOY = Size(
    values=200_000, rounds=2, repeats=1, width=64, layers=2, heads=2, vocabulary=256, context=16, batch=2, blocks=2,
    fragments=2, every=2, delay=1, block_exchanges=2, judged=False,
)  # fmt: skip


# ---------------------------------------------------------------------- codecs alone


def measure_codec(codec: Codec, x: np.ndarray[Any, Any], size: Size) -> dict[str, Any]:
    """Return one row: GB/s, their ratios to a copy on the device, and whether the bytes are numpy's."""
    slab = min(codec.slab, x.size)
    slabs = x.size // slab
    rows = jnp.array(x[: slabs * slab].reshape(slabs, slab))
    states = jax.tree.map(lambda leaf: jnp.array(np.repeat(np.asarray(leaf)[None], slabs, 0)), codec.init(slab))
    encode = jax.jit(jax.vmap(codec.encode))
    decode = jax.jit(jax.vmap(lambda buffers: codec.decode(buffers, slab)))
    copy = jax.jit(jnp.copy)
    buffers, _ = encode(rows, states)
    coder, segment = DeviceCoder(), jnp.array(x)
    frames = coder.encode([codec], [segment])
    want = encode_payload([codec], [x])
    (decoded,) = coder.decode([codec], frames, [x.size])
    same = [bytes(frame) for frame in frames] == [bytes(frame) for frame in want]
    same &= np.asarray(decoded).tobytes() == decode_payload([codec], want, [x.size]).tobytes()
    operations: dict[str, tuple[Callable[[], Any], int]] = {
        "copy": (lambda: copy(rows), rows.size),
        "encode": (lambda: encode(rows, states), rows.size),
        "decode": (lambda: decode(buffers), rows.size),
        "frames": (lambda: coder.encode([codec], [segment]), x.size),
        "back": (lambda: coder.decode([codec], frames, [x.size]), x.size),
    }
    seconds = {name: float("inf") for name in operations}
    for _ in range(size.rounds + 1):  # the first compiles
        for name, (operation, _) in operations.items():
            began = time.perf_counter()
            for _ in range(size.repeats):
                last = operation()
            jax.block_until_ready(last)  # the device does them in order
            seconds[name] = min(seconds[name], (time.perf_counter() - began) / size.repeats)
    row: dict[str, Any] = {"codec": codec.name, "values": x.size, "bytes_a_value": sum(map(len, frames)) / x.size}
    for name, (_, values) in operations.items():
        row[f"{name}_GB/s"] = 4e-9 * values / seconds[name]
    for name in ("encode", "decode"):
        row[f"{name}/copy"] = seconds["copy"] / seconds[name]
    return {**row, "same_bytes": same}


# ---------------------------------------------------------------------- a node and its broker


class TokenProgram:
    """A transformer over tokens drawn at random: what a step costs does not hang on what they say."""

    def __init__(self, size: Size) -> None:
        from zmqtrain.programs.text import TextProgram, next_byte_logits

        self.size, self._logits = size, next_byte_logits
        self._bytes = TextProgram(width=size.width, layers=size.layers, heads=size.heads, context=size.context)
        self.samples_per_batch = size.batch * size.context

    def init(self, seed: int) -> Any:
        """Return the byte-level program's parameters, with an embedding of the whole vocabulary."""
        shape = (self.size.vocabulary, self.size.width)
        embedding = jax.random.normal(jax.random.key(seed), shape) / self.size.width**0.5
        return {**self._bytes.init(seed), "embedding": embedding}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Return the mean cross-entropy of the next token."""
        logits = self._logits(params, batch[:, :-1], self.size.heads)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]))

    def optimizer(self) -> optax.GradientTransformation:
        """Return the byte-level program's optimizer."""
        return self._bytes.optimizer()

    def batch(self, generator: np.random.Generator) -> np.ndarray[Any, Any]:
        """Return int32[batch, context + 1]."""
        shape = (self.size.batch, self.size.context + 1)
        return generator.integers(0, self.size.vocabulary, shape, dtype=np.int32)


class Trainer:
    """A node's training thread: the steps of `TrainingLoop`, with the exchange or without."""

    def __init__(self, node: Any, size: Size) -> None:
        from zmqtrain.train.step import MinibatchStep, TrainState
        from zmqtrain.train.sync import DelayedSync

        program = TokenProgram(size)
        self.size, self._make_state, self._generator = size, TrainState, np.random.default_rng(0)
        self._local, self._draw = MinibatchStep(program), program.batch
        state = self._local.init(0)
        self.params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        self._local.compile(state, self._draw(self._generator))
        self.node, self.sync = node, DelayedSync(node, state.params, donate=True)
        self.state = TrainState(self.sync.params, state.opt_state)
        self._loss: Any = jnp.zeros(())

    def step(self, exchange: bool) -> None:
        """Take one step; as in `DelayedSync.step`, wait for the loss of the one before."""
        before = self._loss
        self.state, self._loss, _ = self._local.step(self.state, iter([self._draw(self._generator)]))
        if exchange:
            params = self.sync.step(self.state.params, score=self._loss, samples=self.size.batch * self.size.context)
            self.state = self._make_state(params, self.state.opt_state)
        else:
            before.block_until_ready()

    def block(self, exchange: bool) -> float:
        """Return the seconds of one step, over a block of steps; leave nothing on its way."""
        steps = self.size.every * self.size.block_exchanges
        for _ in range(2 * self.size.every):
            self.step(exchange)
        jax.block_until_ready(self.state)
        began = time.perf_counter()
        for _ in range(steps):
            self.step(exchange)
        jax.block_until_ready(self.state)
        seconds = (time.perf_counter() - began) / steps
        self.settle()
        return seconds

    def settle(self) -> None:
        """Wait until what is on its way has landed, and is applied."""
        until = time.monotonic() + SETTLE_SECONDS
        while self.node.state().in_flight or self.node.peek() is not None:
            if self.node.peek() is None:
                time.sleep(LOOK_SECONDS)
            else:  # a step that takes no time
                self.state = self._make_state(self.sync.step(self.state.params, score=self._loss), self.state.opt_state)
            if time.monotonic() > until:
                raise RuntimeError(f"what was offered has not landed in {SETTLE_SECONDS:g} s")
        jax.block_until_ready(self.state)


def measure_node(size: Size, codec_on: str) -> dict[str, Any]:
    """Train with exchanges on and off in turns; return one row. Raises RuntimeError if the exchange does not work."""
    from zmqtrain.node.connect import connect

    with _broker(size) as address, connect(address, "gpu", codec_on=codec_on) as node:  # type: ignore[arg-type]
        trainer = Trainer(node, size)
        while trainer.sync.statistics().aggregates_applied < 2 * size.fragments:  # all is compiled
            trainer.step(True)
        trainer.settle()
        coder = node.device_coder
        fetched, put = (coder.bytes_fetched, coder.bytes_put) if coder else (0, 0)
        before = trainer.sync.statistics()
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * size.blocks):
            exchange = number % 4 in (1, 2)  # off, on, on, off: a drift meets both alike
            seconds[exchange].append(trainer.block(exchange))
        after = trainer.sync.statistics()
        memory = jax.devices()[0].memory_stats() or {}
        off, on = (statistics.median(seconds[exchange]) for exchange in (False, True))
        exchanges = max(1, after.aggregates_applied - before.aggregates_applied)
        return {
            "params": trainer.params,
            "codec": size.codec,
            "fragments": size.fragments,
            "every": size.every,
            "step_off_ms": 1e3 * off,
            "step_on_ms": 1e3 * on,
            "ratio": off / on,
            "spread_off": max(seconds[False]) / min(seconds[False]),
            "spread_on": max(seconds[True]) / min(seconds[True]),
            "exchanges": after.aggregates_applied - before.aggregates_applied,
            "age_steps": after.age_steps,
            "held_ms": 1e3 * (after.held_seconds - before.held_seconds) / exchanges,
            "encode_cpu_ms": 1e3 * (after.encode_seconds - before.encode_seconds) / exchanges,
            "decode_cpu_ms": 1e3 * (after.decode_seconds - before.decode_seconds) / exchanges,
            "on_device": coder is not None,
            "fetched_mb": (coder.bytes_fetched - fetched) / 1e6 if coder else None,
            "published_mb": (after.bytes_sent - before.bytes_sent) / 1e6,
            "put_mb": (coder.bytes_put - put) / 1e6 if coder else None,
            "received_mb": (after.bytes_received - before.bytes_received) / 1e6,
            "peak_gb": memory["peak_bytes_in_use"] / 1e9 if "peak_bytes_in_use" in memory else None,
        }


@contextlib.contextmanager
def _broker(size: Size) -> Iterator[str]:
    """Start a broker in a process of its own; yield its address."""
    argv = [sys.executable, str(Path(__file__).resolve()), "broker", json.dumps(asdict(size))]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        if not (address := process.stdout.readline().strip()):
            raise RuntimeError(f"the broker ended with {process.wait()}")
        yield address
    finally:
        process.stdin.close()
        try:
            process.wait(STOP_SECONDS)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _be_broker(size: Size) -> None:
    from zmqtrain.broker.serve import BrokerThread
    from zmqtrain.core.settings import FIXED, RunSettings

    settings = RunSettings(
        outer=FIXED["outer"],
        every=size.every,
        delay=size.delay,
        codec=size.codec,
        broadcast_codec=size.codec,
        fragments=size.fragments,
        evaluate_seconds=0.0,
        lost_seconds=30.0,
    )
    with BrokerThread("tcp://127.0.0.1:0", settings) as broker:
        print(broker.address, flush=True)
        sys.stdin.read()


# ---------------------------------------------------------------------- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables and verdicts, write the JSON; return 0 unless something is wrong (1)."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--here", action="store_true", help="toy size, on whatever device jax has")
    parser.add_argument("--spec", nargs="+", default=SPECS, help="codecs (default: one or two of each family)")
    parser.add_argument("--part", choices=("codecs", "node"), help="(default: both)")
    parser.add_argument("--batch", type=int, help=f"windows of a step (default {Size.batch}: it fits 6 GB)")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    options = parser.parse_args(arguments)
    device = jax.devices()[0]
    if device.platform == "cpu" and not options.here:
        print("there is no GPU here (jax finds a CPU alone), and nothing to measure; --here runs at toy size")
        return 0
    try:
        codecs = [codec_from_spec(spec) for spec in options.spec]
    except ConfigError as error:
        parser.error(str(error))
    size = TOY if options.here else Size()
    size = Size(**{**asdict(size), "batch": options.batch or size.batch})
    print(f"on {device.device_kind} ({device.platform}), jax {jax.__version__}")
    rows: list[dict[str, Any]] = []
    verdicts: list[tuple[str, bool]] = []
    if options.part != "node":
        x = np.random.default_rng(0).standard_normal(size.values, dtype=np.float32) * np.float32(1e-3)
        for codec in codecs:
            rows.append(measure_codec(codec, x, size))
            verdicts.append((f"{codec.name}: the device's bytes and values are numpy's", rows[-1]["same_bytes"]))
        print_table(rows, f"codecs, {size.values:,} values")
    if options.part != "codecs":
        try:
            row = measure_node(size, "device" if options.here else "auto")
        except RuntimeError as error:
            raise SystemExit(f"gpu: {error}") from error
        print_table([{"": key, "node": value} for key, value in row.items()], "a node")
        verdicts += _judge(row, size)
        rows.append(row)
    for text, passed in verdicts:
        print(f"{'PASS' if passed else 'FAIL'}: {text}")
    if options.json:
        write_json(options.json, rows)
    return 0 if all(passed for _, passed in verdicts) else 1


def _judge(row: dict[str, Any], size: Size) -> list[tuple[str, bool]]:
    if not row["on_device"]:
        return [("the node compresses on its device", False)]
    share = row["fetched_mb"] / row["published_mb"]
    verdicts = [
        ("the node compresses on its device", True),
        (
            f"bytes that leave the device over bytes published: {share:.4f} (at most {MOST_FETCHED})",
            share <= MOST_FETCHED,
        ),
    ]
    if size.judged:
        ratio = row["ratio"]
        text = f"speed with exchanges over that without: {ratio:.4f} (at least {LEAST_RATIO})"
        verdicts.append((text, ratio >= LEAST_RATIO))
    return verdicts


if __name__ == "__main__":
    if sys.argv[1:2] == ["broker"]:
        _be_broker(Size(**json.loads(sys.argv[2])))
    else:
        sys.exit(main())
