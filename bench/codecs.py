"""Measure how fast codecs encode and decode, in GB/s and against a plain copy, and how small and true the result is.

Rule 1: all GB/s are of float32 input or output, 1e9 bytes a second, but `add_in_GB/s`, which is of encoded bytes: what
a hub takes in while it decodes and sums.  Rule 2: a round does each operation once, a copy of the same array among
them, so that what else the machine does meets all alike; the best of all rounds counts, the medians stand beside it,
and a ratio is best to best.  Rule 3: a bar is tried on the largest array measured, and said to be missed where it is;
arrays that fit a core's cache are copied several times as fast, so a bar means something from 25M values on.

The paths: `numpy` and `numba` put slab after slab through a codec in one thread (a matrix product may take more), as a
hub does; `payload` is numpy with frames, checks and checksums; `jax` is jitted and vmapped over all whole slabs, on its
default device and with all its threads, and against a copy on that device.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from zmqtrain.codecs import fast
from zmqtrain.codecs.base import codec_from_spec
from zmqtrain.codecs.codec import Codec
from zmqtrain.codecs.payload import decode_payload, encode_payload, initial_states
from zmqtrain.core.errors import ConfigError

from report import describe_machine, print_table, write_json

__all__ = ["BARS", "PATHS", "SPECS", "Bar", "Work", "index_bits", "main", "make_values", "markdown", "measure"]

SPECS = (
    "float32",
    "bf16",
    "int8",
    "int8s",
    "int4",
    "int4s",
    "int2",
    "sign",
    "ternary",
    "topk:density=0.01+int8",
    "topk:density=0.01+int4",
    "topk:density=0.001+int8",
    "topk:density=0.05+sign",
    "blocktopk+int8",
    "randomk:density=0.01+int8",
    "dct+topk:density=0.03+int8",
    "lowrank",
    "ternary:fragments=8",
    "feedback+ternary",
    "momentum+topk:density=0.01+int8",
)
PATHS = ("numpy", "numba", "payload", "jax")
SIZES = (1 << 20, 25_000_000)
QUICK_SIZES = (200_000,)
SCALE_BLOCK = 1000
OPERATIONS = ("encode", "decode", "add", "copy")
LEAST_ROUNDS, MOST_ROUNDS = 3, 100
WHAT = ("codec", "path", "values")
SPEED = (
    *("copy_GB/s", "encode_GB/s", "encode/copy", "decode_GB/s", "decode/copy", "add_GB/s", "add/copy", "add_in_GB/s"),
    "rounds",
)
MEDIANS = tuple(f"{operation}_median_GB/s" for operation in OPERATIONS)
SIZE = ("bytes/value", "index_bits", "relative_error")

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class Bar:
    """What a row must reach. codec: its name; most: the value may not be over the bound, else not under it."""

    path: str
    codec: str
    column: str
    bound: float
    most: bool = False

    def verdict(self, rows: Sequence[Mapping[str, Any]]) -> tuple[bool | None, str]:
        """Return (whether it is reached, None if nothing was measured, and what was wanted and measured)."""
        of_this = [row for row in rows if (row["codec"], row["path"]) == (self.codec, self.path)]
        wanted = f"{self.codec}, {self.path}: {self.column} {'<=' if self.most else '>='} {self.bound:g}"
        if not of_this:
            return None, f"{wanted}: not measured"
        row = max(of_this, key=lambda row: row["values"])
        value = row[self.column]
        reached = value <= self.bound if self.most else value >= self.bound
        return reached, f"{wanted}: {value:.3g} at {row['values']:,} values"


BARS = (
    Bar("numpy", "int8:block=256", "encode/copy", 0.25),
    Bar("numpy", "topk:density=0.01+int8:block=256", "encode/copy", 0.3),
    Bar("numpy", "int8:block=256", "add_in_GB/s", 1.5),
    Bar("numpy", "topk:density=0.01+int8:block=256", "index_bits", 9.0, most=True),
    Bar("numba", "int8:block=256", "encode/copy", 1.0),
)
WORDS = {True: "met", False: "missed", None: "----"}


@dataclass(frozen=True)
class Work:
    """One codec on one path over one array: each operation does all of it, and returns when it is done.

    operations: "encode", "decode", "add" (decode onto what is there) and "copy".  decoded: what the first decode gave.
    """

    values: int
    encoded_bytes: int
    operations: Mapping[str, Callable[[], object]]
    decoded: Vector = field(repr=False)


def make_values(count: int, seed: int) -> Vector:
    """Return float32[count]: Gaussian, each 1000 values with a scale of their own, drawn as exp of a Gaussian."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(count, dtype=np.float32)
    scales = np.exp(rng.standard_normal(-(-count // SCALE_BLOCK), dtype=np.float32))
    x *= np.repeat(scales, SCALE_BLOCK)[:count]
    return x


def slab_work(codec: Codec, x: Vector) -> Work:
    """Return the work of one thread that encodes and decodes slab after slab."""
    cuts = [slice(start, min(start + codec.slab, x.size)) for start in range(0, x.size, codec.slab)]
    states = [codec.init(cut.stop - cut.start) for cut in cuts]
    encoded: list[tuple[Any, ...]] = [()] * len(cuts)
    out, target = np.zeros_like(x), np.zeros_like(x)

    def encode() -> None:
        for number, cut in enumerate(cuts):
            encoded[number], states[number] = codec.encode(x[cut], states[number])

    def decode(add: bool) -> None:
        for buffers, cut in zip(encoded, cuts, strict=True):
            codec.decode_into(buffers, out[cut], add)

    encode()
    decode(False)
    operations = {
        "encode": encode,
        "decode": lambda: decode(False),
        "add": lambda: decode(True),
        "copy": lambda: np.copyto(target, x),
    }
    return Work(x.size, sum(buffer.nbytes for buffers in encoded for buffer in buffers), operations, out.copy())


def payload_work(codec: Codec, x: Vector) -> Work:
    """Return the work of one thread that makes frames, and checks and decodes them."""
    states = initial_states([codec], [x.size])
    held = [encode_payload([codec], [x], states)]
    out, target = np.zeros_like(x), np.zeros_like(x)

    def encode() -> None:
        held[0] = encode_payload([codec], [x], states)

    def decode(add: bool) -> None:
        decode_payload([codec], held[0], [x.size], out, add)

    decode(False)
    operations = {
        "encode": encode,
        "decode": lambda: decode(False),
        "add": lambda: decode(True),
        "copy": lambda: np.copyto(target, x),
    }
    return Work(x.size, sum(map(len, held[0])), operations, out.copy())


def jax_work(codec: Codec, x: Vector) -> Work | None:
    """Return the work of jax's default device on all whole slabs at once, or None if there is not one."""
    rows = x.size // codec.slab
    if not rows:
        return None
    on_device = jnp.asarray(x[: rows * codec.slab].reshape(rows, codec.slab))
    states = jax.tree.map(lambda leaf: jnp.asarray(np.stack([leaf] * rows)), codec.init(codec.slab))
    jitted_encode = jax.jit(jax.vmap(codec.encode))
    decode_rows = jax.vmap(lambda buffers: codec.decode(buffers, codec.slab))
    jitted_decode = jax.jit(decode_rows)
    jitted_add = jax.jit(lambda total, buffers: total + decode_rows(buffers), donate_argnums=0)
    buffers, states = jax.block_until_ready(jitted_encode(on_device, states))
    decoded = np.array(jitted_decode(buffers)).reshape(-1)
    held = {"states": states, "total": jitted_add(jnp.zeros_like(on_device), buffers)}
    target = np.zeros_like(x[: rows * codec.slab])

    def encode() -> None:
        _, held["states"] = jax.block_until_ready(jitted_encode(on_device, held["states"]))

    def add() -> None:
        held["total"] = jax.block_until_ready(jitted_add(held["total"], buffers))

    def copy() -> None:
        if jax.devices()[0].platform == "cpu":
            np.copyto(target, x[: target.size])
        else:
            jnp.array(on_device, copy=True).block_until_ready()

    operations = {
        "encode": encode,
        "decode": lambda: jitted_decode(buffers).block_until_ready(),
        "add": add,
        "copy": copy,
    }
    return Work(rows * codec.slab, sum(buffer.nbytes for buffer in buffers), operations, decoded)


def measure(codec: Codec, path: str, x: Vector, seconds: float) -> dict[str, Any] | None:
    """Return one row of the table, or None if the path cannot take this array; it takes about `seconds`."""
    with _machine_code(path == "numba"):
        work = {"numpy": slab_work, "numba": slab_work, "payload": payload_work, "jax": jax_work}[path](codec, x)
        if work is None:
            return None
        times: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}
        ends = time.perf_counter() + seconds
        for number in itertools.count(1):
            for operation in OPERATIONS:
                started = time.perf_counter()
                work.operations[operation]()
                times[operation].append(time.perf_counter() - started)
            if number >= MOST_ROUNDS or (number >= LEAST_ROUNDS and time.perf_counter() >= ends):
                break
    gigabytes = 4e-9 * work.values
    best = {operation: min(taken) for operation, taken in times.items()}
    row: dict[str, Any] = {"codec": codec.name, "path": path, "values": work.values, "rounds": number}
    for operation in OPERATIONS:
        row[f"{operation}_GB/s"] = gigabytes / best[operation]
        row[f"{operation}_median_GB/s"] = gigabytes / statistics.median(times[operation])
        row[f"{operation}/copy"] = best["copy"] / best[operation]
    row["add_in_GB/s"] = 1e-9 * work.encoded_bytes / best["add"]
    row["bytes/value"] = work.encoded_bytes / work.values
    row["index_bits"] = index_bits(codec)
    row["relative_error"] = _relative_error(x[: work.values], work.decoded)
    return row


def index_bits(codec: Codec) -> float | None:
    """Return how many bits a slab spends on places for each value that it keeps; None for a codec that sends none.

    Both follow from the layouts: the last member's buffers stand last, and tell how many values it was given.
    """
    _, joined, last = codec.name.rpartition("+")
    if not joined:
        return None
    inner, sections = codec_from_spec(last), codec.layout(codec.slab)
    own = len(sections) - len(inner.layout(1))
    if not own:
        return None
    low, high = 1, codec.slab
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _size(inner.layout(middle)) <= _size(sections[own:]) else (low, middle - 1)
    return 8 * _size(sections[:own]) / low


def _size(sections: Sequence[tuple[Any, int]]) -> int:
    return sum(np.dtype(dtype).itemsize * count for dtype, count in sections)


def _relative_error(x: Vector, decoded: Vector) -> float:
    wrong, whole = 0.0, 0.0
    for start in range(0, x.size, 1 << 16):
        piece = x[start : start + (1 << 16)].astype(np.float64)
        whole += float(piece @ piece)
        piece -= decoded[start : start + (1 << 16)]
        wrong += float(piece @ piece)
    return float((wrong / whole) ** 0.5)


@contextmanager
def _machine_code(choice: bool) -> Iterator[None]:
    """Let the codecs use numba, or not, for a while."""
    fast.use(choice)
    try:
        yield
    finally:
        fast.use(None)


def _paths(wanted: Sequence[str]) -> list[str]:
    """Return the paths that there are; say which rows are left out."""
    paths = list(wanted)
    if "numba" in paths:
        try:
            with _machine_code(True):
                pass
        except ImportError as error:
            print(f"the rows of numba are left out: {error}")
            paths.remove("numba")
    return paths


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, measure, print tables and bars, write the JSON; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", nargs="+", default=SPECS, help="codecs (default: one or two of each family)")
    parser.add_argument("--path", nargs="+", choices=PATHS, default=PATHS, help="(default: all)")
    parser.add_argument("--values", nargs="+", type=int, help=f"sizes of the arrays (default: {SIZES})")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the values (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="toy size: whether it works, not how well")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 if a bar is missed")
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--markdown", action="store_true", help="print tables for a page: best GB/s, and over the copy")
    options = parser.parse_args(arguments)
    try:
        codecs = list(dict.fromkeys(codec_from_spec(spec) for spec in options.spec))
    except ConfigError as error:
        parser.error(str(error))
    sizes = options.values or (QUICK_SIZES if options.quick else SIZES)
    seconds = 0.0 if options.quick else options.seconds
    if min(sizes) < 1:
        parser.error(f"an array has at least one value, not {min(sizes)}")

    print(", ".join(f"{key} {value}" for key, value in describe_machine().items()))
    print(f"seed {options.seed}; jax runs on {jax.devices()[0].device_kind}")
    paths, rows = _paths(options.path), []
    for count in sizes:
        x = make_values(count, options.seed)
        for codec, path in itertools.product(codecs, paths):
            row = measure(codec, path, x, seconds)
            if row is None:
                print(f"left out: {codec.name}, {path}: {count:,} values are less than a slab of {codec.slab:,}")
                continue
            print(f"{codec.name}, {path}, {count:,}: {row['rounds']} rounds", file=sys.stderr, flush=True)
            rows.append({**row, "array": count, "seed": options.seed})
    if options.markdown:
        print(f"\n{markdown(rows)}\n")
    else:
        print_table([_only(row, (*WHAT, *SPEED)) for row in rows], "speed: the best of all rounds")
        print_table([_only(row, (*WHAT, *MEDIANS)) for row in rows], "speed: medians")
        print_table([_only(row, ("codec", "values", *SIZE)) for row in _once(rows)], "size and error")
    verdicts = [bar.verdict(rows) for bar in BARS]
    for reached, text in verdicts:
        print(f"- {WORDS[reached]}: {text}" if options.markdown else f"{WORDS[reached]:6}  {text}")
    if options.json:
        write_json(options.json, rows)
    return int(options.strict and any(reached is False for reached, _ in verdicts))


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table for a page of each size of array: each path's GB/s and, in brackets, over the copy."""
    paths = list(dict.fromkeys(row["path"] for row in rows))
    heads = ["codec", "bytes a value", "relative error", *(f"encode, {path}" for path in paths)]
    heads += [f"decode + add, {path}" for path in paths]
    tables = []
    for count in dict.fromkeys(row["array"] for row in rows):
        lines = [f"**{count:,} values**", "", _line(heads), "|---" + (len(heads) - 1) * "|--:" + "|"]
        by_codec: dict[str, dict[str, Mapping[str, Any]]] = {}
        for row in rows:
            if row["array"] == count:
                by_codec.setdefault(row["codec"], {})[row["path"]] = row
        for codec, of in by_codec.items():
            any_path = next(iter(of.values()))
            cells = [f"`{codec}`", f"{any_path['bytes/value']:.4g}", f"{any_path['relative_error']:.4g}"]
            cells += [_speed(of.get(path), operation) for operation in ("encode", "add") for path in paths]
            lines.append(_line(cells))
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _speed(row: Mapping[str, Any] | None, operation: str) -> str:
    return f"{row[f'{operation}_GB/s']:.2f} ({row[f'{operation}/copy']:.2f})" if row else ""


def _only(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    return {column: row[column] for column in columns}


def _once(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the first row of each codec and size: whatever the path, the bytes are the same, but for frames' heads."""
    return list({(row["codec"], row["values"]): row for row in reversed(rows)}.values())[::-1]


if __name__ == "__main__":
    sys.exit(main())
