"""The values of keys on one shard, the optimizers that step them, and how far workers may run ahead.

1. Pure: no clock, no socket; one thread calls it. Values travel as frames of at most `FRAME_BYTES`, raw and
   little-endian; `check` looks at all of them before any is used.
2. Gradients of one step are added in the given order, in the dtype of the values, then divided by their number.
3. An optimizer subtracts its step, in place, value by value: any slice may be stepped by itself with the views of its
   state. The arithmetic and its order are those of optax.sgd and optax.adam.
4. A worker's clock at a key counts the gradients that it has pushed; the key's clock is the lowest of all live workers.
   A worker that is ahead by more than the consistency allows waits with its next push, and with a pull: so a pull at
   clock c sees everything that every worker pushed before its clock c - staleness, and the worker's own pushes.
Source: momentum as in Sutskever et al. 2013; Adam: Kingma and Ba 2015, Algorithm 1. Bulk synchronous: Valiant 1990;
bounded (stale synchronous): Ho et al. 2013, More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server; asynchronous: Dean et al. 2012, Downpour SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import CodecError, ConfigError, NonFiniteDelta
from zmqtrain.core.specs import Number, format_spec, parse_spec
from zmqtrain.core.types import Buffer

Vector = NDArray[Any]
State = Mapping[str, Vector]

OPTIMIZERS: dict[str, dict[str, Number]] = {
    "sgd": {"rate": 0.01},
    "momentum": {"rate": 0.01, "momentum": 0.9, "nesterov": 0},
    "adam": {"rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
}
"""Each member of the family and the defaults of its arguments."""

_LARGEST_RATE = 1000.0


class ServerOptimizer(NamedTuple):
    """How a key's values follow from gradients.

    name: the canonical spec; `optimizer_from_spec(name)` gives this very optimizer.
    slots: the names of its state, each an array like the values, zeros at first.
    update(values, gradient, state, step): step number `step`, from 1 on. All are flat arrays of one dtype, or views of
      the same part of them; values and state are changed in place, and the gradient is used up.
    """

    name: str
    slots: tuple[str, ...]
    update: Callable[[Vector, Vector, State, int], None]


def sgd(rate: float = 0.01) -> ServerOptimizer:
    """w = w - rate * g."""

    def update(values: Vector, gradient: Vector, state: State, step: int) -> None:
        np.multiply(gradient, values.dtype.type(-rate), out=gradient)
        np.add(values, gradient, out=values)

    return ServerOptimizer(format_spec("sgd", {"rate": float(rate)}), (), update)


def momentum(rate: float = 0.01, momentum: float = 0.9, nesterov: int = 0) -> ServerOptimizer:
    """m = g + momentum * m; w = w - rate * m, or with nesterov 1, w - rate * (g + momentum * m)."""

    def update(values: Vector, gradient: Vector, state: State, step: int) -> None:
        number, trace = values.dtype.type, state["trace"]
        np.multiply(trace, number(momentum), out=trace)
        np.add(gradient, trace, out=trace)
        if nesterov:
            np.add(gradient, number(momentum) * trace, out=gradient)
            np.multiply(gradient, number(-rate), out=gradient)
        else:
            np.multiply(trace, number(-rate), out=gradient)
        np.add(values, gradient, out=values)

    arguments = {"rate": float(rate), "momentum": float(momentum), "nesterov": int(nesterov)}
    return ServerOptimizer(format_spec("momentum", arguments), ("trace",), update)


def adam(rate: float = 0.001, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8) -> ServerOptimizer:
    """m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2; w = w - rate * m' / (sqrt(v') + epsilon).

    m' = m / (1 - beta1^t) and v' = v / (1 - beta2^t) at step t.
    """

    def update(values: Vector, gradient: Vector, state: State, step: int) -> None:
        number, mean, square = values.dtype.type, state["mean"], state["square"]
        with np.errstate(under="ignore"):
            np.multiply(mean, number(beta1), out=mean)
            np.add(number(1 - beta1) * gradient, mean, out=mean)
            np.square(gradient, out=gradient)
            np.multiply(gradient, number(1 - beta2), out=gradient)
            np.multiply(square, number(beta2), out=square)
            np.add(gradient, square, out=square)
            np.divide(square, number(1 - beta2**step), out=gradient)
            np.sqrt(gradient, out=gradient)
            np.add(gradient, number(epsilon), out=gradient)
            np.divide(mean / number(1 - beta1**step), gradient, out=gradient)
            np.multiply(gradient, number(-rate), out=gradient)
        np.add(values, gradient, out=values)

    arguments = {"rate": rate, "beta1": beta1, "beta2": beta2, "epsilon": epsilon}
    name = format_spec("adam", {argument: float(value) for argument, value in arguments.items()})
    return ServerOptimizer(name, ("mean", "square"), update)


_MEMBERS: dict[str, Callable[..., ServerOptimizer]] = {"sgd": sgd, "momentum": momentum, "adam": adam}


def optimizer_from_spec(text: str) -> ServerOptimizer:
    """Return the optimizer of a spec such as "momentum:rate=0.1,momentum=0.9"; what is left out takes its default.

    Raises ConfigError: an unknown name or argument; a rate outside (0, 1000]; a momentum, beta1 or beta2 outside
    [0, 1); an epsilon outside [1e-30, 1]; a nesterov that is neither 0 nor 1.
    """
    name, arguments = parse_spec(text, OPTIMIZERS)
    for argument, value in arguments.items():
        if argument == "rate":
            fits, wanted = 0 < value <= _LARGEST_RATE, f"0 < rate <= {_LARGEST_RATE:g}"
        elif argument == "epsilon":
            fits, wanted = 1e-30 <= value <= 1, "1e-30 <= epsilon <= 1"
        elif argument == "nesterov":
            fits, wanted = value in (0, 1), "nesterov=0 or nesterov=1"
        else:
            fits, wanted = 0 <= value < 1, f"0 <= {argument} < 1"
        if not fits:
            raise ConfigError(f"{text!r}: {argument}={value:g} is not in {wanted}")
    return _MEMBERS[name](**arguments)


CONSISTENCIES: dict[str, dict[str, Number]] = {"bsp": {}, "async": {}, "bounded": {"s": 3}}
"""Each member of the family and the defaults of its arguments."""


class Consistency(NamedTuple):
    """How workers keep together.

    name: the canonical spec.  staleness: by how many clocks a worker may be ahead; None: by any number.
    averages: one step is made of the mean of all workers' gradients, when all are there; if not, one of each gradient
    as it comes.
    """

    name: str
    staleness: int | None
    averages: bool

    def may_proceed(self, ahead: int) -> bool:
        """Return whether a worker that is so many clocks ahead of the key may proceed."""
        return self.staleness is None or ahead <= self.staleness


def consistency_from_spec(text: str) -> Consistency:
    """Return the consistency of a spec: "bsp", "async", or "bounded:s=3".

    Raises ConfigError: an unknown name or argument, or an s below 0.
    """
    name, arguments = parse_spec(text, CONSISTENCIES)
    canonical = format_spec(name, arguments)
    if name == "bsp":
        return Consistency(canonical, 0, True)
    if name == "async":
        return Consistency(canonical, None, False)
    staleness = int(arguments["s"])
    if staleness < 0:
        raise ConfigError(f"{text!r}: s is by how many clocks a worker may be ahead, 0 or more; got {staleness}")
    return Consistency(canonical, staleness, False)


FRAME_BYTES = 1 << 20
"""Of one frame of values, the last one of a piece apart."""
LARGEST_VALUE = 1e18
"""A gradient, or an initial value, of which the square is no float32 any more is refused like one that is infinite."""

_BLOCK_VALUES = 65_536  # values, gradients and state stay in a core's cache between the passes


def frame_sizes(size: int) -> tuple[int, ...]:
    """Return the bytes of each frame of a piece of `size` bytes."""
    whole, rest = divmod(size, FRAME_BYTES)
    return (FRAME_BYTES,) * whole + ((rest,) if rest else ())


def is_cut(size: int, sizes: Sequence[int]) -> bool:
    """Return whether these are the frames of a piece of `size` bytes; whatever somebody claims, it costs nothing."""
    *whole, rest = sizes or (0,)
    return 0 < rest <= FRAME_BYTES and sum(sizes) == size and all(one == FRAME_BYTES for one in whole)


def cut_frames(values: Vector) -> list[memoryview]:
    """Return the frames of a flat contiguous array, little-endian; nothing is copied where the machine is that too."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    raw = little.view(np.uint8).data
    return [raw[start : start + FRAME_BYTES] for start in range(0, len(raw), FRAME_BYTES)]


def join_frames(frames: Sequence[Buffer], into: Vector) -> None:
    """Copy frames into a flat contiguous array of as many values. Raises CodecError if they are not as many."""
    if sum(len(frame) for frame in frames) != into.nbytes:
        raise CodecError(f"{sum(len(frame) for frame in frames)} bytes came where {into.nbytes} are due")
    start = 0
    for frame in frames:
        part = _read(frame, into.dtype)
        into[start : start + part.size] = part
        start += part.size


@dataclass
class Entry:
    """One key's piece. version: how many steps the optimizer has made of it; state: its arrays by slot."""

    values: Vector
    state: dict[str, Vector]
    version: int = 0
    frames: tuple[memoryview, ...] = field(default=(), repr=False)


class Store:
    """The values of keys, each a flat array, and what the optimizer keeps of them."""

    def __init__(self, optimizer: ServerOptimizer) -> None:
        self.optimizer = optimizer
        self.entries: dict[str, Entry] = {}

    def check(self, dtype: str, frames: Sequence[Buffer]) -> None:
        """Raise NonFiniteDelta if a value is no number, infinite, or beyond `LARGEST_VALUE`."""
        for frame in frames:
            values = _read(frame, np.dtype(dtype))
            if not (values.min() >= -LARGEST_VALUE and values.max() <= LARGEST_VALUE):  # NaN is neither
                raise NonFiniteDelta(f"a value is not finite, or beyond {LARGEST_VALUE:g}")

    def install(self, key: str, dtype: str, frames: Sequence[Buffer]) -> None:
        """Begin a key with these values, at version 0."""
        values = np.empty(sum(len(frame) for frame in frames) // np.dtype(dtype).itemsize, dtype)
        join_frames(frames, values)
        self.entries[key] = Entry(values, self._fresh(values))

    def begin(self, optimizer: ServerOptimizer, reset: bool) -> None:
        """Step by this optimizer from now on, its state fresh and versions from 0. reset: without any key."""
        self.optimizer = optimizer
        if reset:
            self.entries.clear()
        for entry in self.entries.values():
            entry.state, entry.version = self._fresh(entry.values), 0

    def _fresh(self, values: Vector) -> dict[str, Vector]:
        return {slot: np.zeros_like(values) for slot in self.optimizer.slots}

    def apply(self, key: str, gradients: Sequence[Sequence[Buffer]]) -> None:
        """Make one step by the mean of gradients, each given as its frames; none by none.

        They were checked, and are as many bytes as the key has.
        """
        if not gradients:
            return
        entry = self.entries[key]
        entry.version, entry.frames = entry.version + 1, ()
        values, dtype = entry.values, entry.values.dtype
        scratch = np.empty(min(_BLOCK_VALUES, values.size), dtype)
        count = dtype.type(len(gradients))
        start = 0
        for frames in zip(*gradients, strict=True):
            parts = [_read(frame, dtype) for frame in frames]
            for begin in range(0, parts[0].size, _BLOCK_VALUES):
                first, *others = [part[begin : begin + _BLOCK_VALUES] for part in parts]
                gradient, place = scratch[: first.size], slice(start + begin, start + begin + first.size)
                np.copyto(gradient, first)
                for other in others:
                    np.add(gradient, other, out=gradient)
                if others:
                    np.divide(gradient, count, out=gradient)
                state = {slot: array[place] for slot, array in entry.state.items()}
                self.optimizer.update(values[place], gradient, state, entry.version)
            start += parts[0].size

    def read(self, key: str) -> tuple[int, tuple[memoryview, ...]]:
        """Return a key's version and its values as frames."""
        entry = self.entries[key]
        if not entry.frames:
            entry.frames = tuple(cut_frames(entry.values.copy()))
        return entry.version, entry.frames

    def arrays(self) -> dict[str, Vector]:
        """Return copies of all values and state, for a checkpoint: "values/KEY" and "SLOT/KEY"."""
        copies = {f"values/{key}": entry.values.copy() for key, entry in self.entries.items()}
        for key, entry in self.entries.items():
            copies |= {f"{slot}/{key}": array.copy() for slot, array in entry.state.items()}
        return copies

    def restore(self, versions: Mapping[str, int], arrays: Mapping[str, Vector]) -> None:
        """Take over what `arrays` gave, with the versions then. Raises KeyError if an array is missing."""
        for key, version in versions.items():
            state = {slot: arrays[f"{slot}/{key}"] for slot in self.optimizer.slots}
            self.entries[key] = Entry(arrays[f"values/{key}"], state, version)


def _read(frame: Buffer, dtype: np.dtype[Any]) -> Vector:
    return np.frombuffer(frame, dtype.newbyteorder("<"))
