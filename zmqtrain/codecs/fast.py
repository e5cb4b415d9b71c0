"""The codecs' innermost loops in machine code, where numba is installed: the same bytes, sooner.

Rule 1: numba is installed with zmqtrain wherever it has a release. Without it the numpy twins run, after a warning, and
a law in the tests holds the bytes equal.
Rule 2: numba is imported when a run with large payloads begins, never earlier: importing costs half a second,
compiling some ten, once on a machine (the code is kept beside this file, or in the user's cache).
Rule 3: no fast-math and no fused multiply-add: Rule 1 of codec.py holds here too.  Rule 4: one thread, without the GIL.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from zmqtrain.codecs.codec import INFINITY_BITS, SMALLEST_MAGNITUDE_BITS, SMALLEST_SCALE_BITS, Step
from zmqtrain.core.installed import how_to_install

Made = TypeVar("Made")

logger = logging.getLogger(__name__)

LARGE_SLAB = 16_384
"""The fewest values for which machine code is worth the wait for numba; once it is here, it takes slabs of any size."""

AHEAD_VALUES = 4096
"""How far ahead of where it works a loop asks for memory: what a processor foresees of it ends with every block."""

_LINE_VALUES = 16  # of 4 bytes in a cache line

_SLABS, SLAB, _STRIDE = 1, 2, 3
"""Columns of the table of a run; see `RunLoops`."""
_DIGITS, SCALES = 4, 5
"""Those after them, of ternary."""
_INDEX, _SIGNS, MEANS, KEPT, _KIND, _LOW, _BITS, _BYTES = 4, 5, 6, 7, 8, 9, 10, 11
"""Those after them, of topk and sign: three buffers, and how the places are packed."""

_INFINITE_KEY, _SAMPLE, _RUNS, _GUESS_KEYS, _STEADY_KEYS = 0x7F80, 4096, 512, 6, 3  # as in sparsify.py

_MAGNITUDE = np.int32(0x7FFFFFFF)
_SMALLEST = np.int32(SMALLEST_MAGNITUDE_BITS)
_INFINITY, _SMALLEST_SCALE = INFINITY_BITS, SMALLEST_SCALE_BITS
_UNIT_EXPONENT = 127 + 11 + 127  # as in levels.py
_TO_16_BITS = np.float32(65536)
_NOISE = np.uint32(0xFFFF)
_FACTORS = np.array([(65535 + 3**power) // 3**power for power in range(1, 6)], np.uint16)
_GOLDEN, _FIRST_FACTOR, _SECOND_FACTOR = np.uint32(0x9E3779B9), np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


def _fetch(values: Any, index: int) -> None:
    """Ask for the cache line of values[index], which may lie after the array's end; reads nothing.

    In machine code a prefetch instruction: `_compile` puts that in this place.
    """


def _first_one(word: np.uint64) -> int:
    """Return the place of the lowest bit that is one; the word has one. As `_fetch`, `_compile` replaces it."""
    return (int(word) & -int(word)).bit_length() - 1


def _floats(address: int, count: int) -> Any:
    """Return the float32[count] that lie at an address; who calls holds the memory. `_compile` replaces it."""
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def _octets(address: int, count: int) -> Any:
    """Return the uint8[count] that lie at an address, as `_floats`."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


class Kernels(NamedTuple):
    """The loops in machine code. All arrays are contiguous and aligned.

    quantize(x, block, 1 / most, largest scale bits, 1 / each scale by its bits, None or most if
      rounded at random, codes, scales): as `_encode_numpy` of quantize.py; returns the largest magnitude's bits.
    write(codes, scales as float32, out, block, add): as `write_blocks` of quantize.py.
    pick(x, least key, kept, scratch int32[n], scratch int32[n], scratch int32[32768] of zeros, places
      int32[kept + 1], values float32[kept]): as `_largest_numpy` of sparsify.py, among the values of the least key
      or more; returns the cut's key and, 16 bits higher, the largest, or -1 if the candidates are too few.
    pack(places int32[k], low, form's first bit of the high parts, buffer uint8 of zeros): Elias-Fano as `pack_places`
      writes it; a bitmap where low is 0 and the first bit is -1.
    unpack(buffer, low, first bit of the high parts, bits in all, places int32[k]): reads what `pack` wrote, the same
      way; returns how many places there are, of which k at most are written.
    signs(x, block, scales): the scales of `_encode_signs_numpy` of levels.py; returns the largest magnitude's bits.
    scatter(places int32[k], values, out, add): out[places] += values, one after the other; without add: = values.
    step(total, live, rate, momentum, m, parameters, published): the hub's step by `total`, as `Step` has it, and then
      total = parameters - published.
    energy(frame, table, block, column of the first scales, column of how many values have some): of all slabs of a run,
      as `energy_of_scales` of codec.py.
    rebase(shared, own, begin, places int64[m, 4], row, params int64[leaves], anchor int64[leaves]): as `CodedSegments`,
      for the values from `begin` on that `shared` holds; own: as many, or none.  row: of `places`, at or before the
      first of them.  params, anchor: the leaves' addresses.
    """

    quantize: Callable[..., int]
    write: Callable[..., None]
    pick: Callable[..., int]
    pack: Callable[..., None]
    unpack: Callable[..., int]
    signs: Callable[..., int]
    scatter: Callable[..., None]
    step: Callable[..., None]
    energy: Callable[..., float]
    rebase: Callable[..., int]


class TernaryLoops(NamedTuple):
    """As `Kernels`, for the slabs of runs that `ternary` codes.

    encode(addresses int64[rows], table int64[rows, 6], block, sent uint8[k, bytes], frame uint8[bytes], places, params,
      anchor, scratch float32[n], scratch float32[n], scratch int16[block], scratch uint8[5 m]): as
      `_encode_ternary_numpy` of levels.py, for the slabs of a `RunLoops` table, there or of pinned leaves,
      less what the frames in `sent` decode to; returns the first row that holds NaN or infinity, or -1.
    write(frame uint8, table, addresses, block, add): as `write_blocks` of the digits, slab after slab.
    write_slab(digits uint8, scales uint8, out, block, add): the same, of one slab.
    check(frame, table, block, largest byte, largest scale bits): the first row with a slab that
      `_check_ternary` of levels.py refuses, or -1.
    rebase(frame, own frame uint8, table, block, places, params, anchor, scratch float32[n], scratch float32[n]): as of
      `RunLoops`; n is a block at least, here and there.
    release(frames, table, block, frame, live, rate, momentum, m, parameters, published, places, samples, scratch
      float32[n], scratch int16[block], scratch uint8[5 m]): as of `RunLoops`.
    """

    encode: Callable[..., int]
    write: Callable[..., None]
    write_slab: Callable[..., None]
    check: Callable[..., int]
    rebase: Callable[..., None]
    release: Callable[..., int]


class TopkSignsLoops(NamedTuple):
    """As `Kernels`, for the slabs of runs that `topk` and `sign` code.

    encode(addresses, table, block, sent, frame, places, params, anchor, guess int64[2], scratch as of `pick`, rest
      float32[n], sum float32[n]): as topk and sign encode, one after the other, the slabs of a `RunLoops` table, there
      or of pinned leaves, less what the frames in `sent` decode to. guess: the last slab's cut, and whether it is a
      guess at the next one. Returns the first row that holds NaN or infinity, or -1.
    write(frame, table, addresses, block, add, scratch int32[k], scratch float32[k]): as both decode them.
    check(frame, table, block, largest scale bits, smallest scale bits, scratch int32[k]): the first row with
      a slab that one of both refuses, or -1.
    rebase(frame, own frame, table, block, places, params, anchor, scratch int32[k], scratch float32[k], scratch
      float32[n], scratch float32[n]): as of `RunLoops`.
    """

    encode: Callable[..., int]
    write: Callable[..., None]
    check: Callable[..., int]
    rebase: Callable[..., None]


_lock = threading.Lock()
_choice: bool | None = None
_loaded: Kernels | None = None
_tried = False


def use(choice: bool | None) -> None:
    """Choose for this process: True takes machine code for slabs of every size, False never takes it, None (as at the
    start) takes it if numba is installed, and has it loaded by the first large slab or run.

    Raises ImportError for True where numba is not installed.
    """
    global _choice
    if choice and _load() is None:
        raise ImportError("numba is not installed here, or cannot be imported")
    _choice = choice


def kernels(count: int) -> Kernels | None:
    """Return the loops to use for a slab of `count` values, or None: then numpy does it."""
    if _choice is False or (_choice is None and not _tried and count < LARGE_SLAB):
        return None
    return _loaded if _tried else _load()


def ternary_loops() -> TernaryLoops | None:
    """Return the loops of `ternary`, where `kernels` has some; compiled when they are first asked for. None: they
    cannot be."""
    return _compiled(_compile_ternary)


def topk_signs_loops() -> TopkSignsLoops | None:
    """Return the loops of `topk` and `sign`, where `kernels` has some; compiled when they are first asked for. None:
    they cannot be."""
    return _compiled(_compile_topk_signs)


def rebase(shared: Any, own: Any, begin: int, places: Any, params: Any, anchor: Any) -> None:
    """As `rebase` of `Kernels`, where there are some."""
    assert _loaded is not None, "used only where there are some"
    _loaded.rebase(shared, own, begin, places, 0, params, anchor)


def arguments_of(step: Step) -> tuple[np.float32, np.float32, np.float32, Any]:
    """Return a step as the loops take it."""
    return np.float32(step.live), np.float32(step.rate), np.float32(step.momentum), step.m


def energy_of_run(frame: Any, table: Any, block: int, scales: int, values: int) -> float:
    """As `energy` of `Kernels`, where there are some."""
    assert _loaded is not None, "used only where there are some"
    return _loaded.energy(frame, table, block, scales, values)


def _load() -> Kernels | None:
    """Import numba and compile, once; None where numba is not installed."""
    global _loaded, _tried
    with _lock, warnings.catch_warnings():
        if _tried:
            return _loaded
        warnings.simplefilter("ignore")  # what numba says of its own dependencies is not for our users
        try:
            import numba
        except ImportError as error:
            text = "the codecs run in numpy, in several times the processor's time and to the same bytes: %s. Type: %s"
            logger.warning(text, error, how_to_install())
        else:
            _loaded = _compiled_with(numba, partial(_compile, numba))
        _tried = True
        return _loaded


def _prefetch(numba: Any) -> Any:
    """Return `_fetch` as numba compiles it: LLVM's prefetch, to read, into all caches."""
    from llvmlite import ir

    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)

    def of_types(_: Any, values: Any, index: Any) -> Any:
        def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            place = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
            kind = ir.FunctionType(ir.VoidType(), (byte, number, number, number))
            prefetch = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
            builder.call(prefetch, [place, *(ir.Constant(number, choice) for choice in (0, 3, 1))])
            return context.get_dummy_value()

        return numba.types.void(values, numba.types.intp), write

    return numba.extending.intrinsic(of_types)


def _trailing_zeros(numba: Any) -> Any:
    """Return `_first_one` as numba compiles it: LLVM's cttz."""
    from llvmlite import ir

    def of_type(_: Any, word: Any) -> Any:
        def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

        return numba.types.int64(numba.types.uint64), write

    return numba.extending.intrinsic(of_type)


def _vector(numba: Any, kind: Any) -> Any:
    """Return `_floats` or `_octets`, as numba compiles it. kind: of its values."""

    def of_type(_: Any, address: Any) -> Any:
        def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return numba.types.CPointer(kind)(numba.types.int64), write

    pointer, carray = numba.extending.intrinsic(of_type), numba.carray

    def values_at(address: Any, count: Any) -> Any:
        return carray(pointer(address), count)

    return numba.njit(values_at)


_groups: dict[Callable[[_Compiler], Any], Any] = {}


def _compiled(compile_loops: Callable[[_Compiler], Made]) -> Made | None:
    """Return what this compiles, once in a process, whichever threads ask at the same time."""
    if compile_loops not in _groups:
        if _load() is None:
            return None
        with _lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if compile_loops not in _groups:
                of = _compiler()
                _groups[compile_loops] = _compiled_with(of.numba, partial(compile_loops, of))
    found: Made | None = _groups[compile_loops]
    return found


def _compiled_with(numba: Any, compile_loops: Callable[[], Made]) -> Made | None:
    try:
        return compile_loops()
    except numba.core.errors.NumbaError as error:
        logger.warning("numba %s cannot compile (%s): codecs run in numpy", numba.__version__, error)
        return None


class _Compiler:
    """numba, and the types of what the loops are given (readonly) and write."""

    def __init__(self, numba: Any) -> None:
        def given(kind: Any, dimensions: int = 1, layout: str = "C") -> Any:
            return numba.types.Array(kind, dimensions, layout, readonly=True)

        def made(kind: Any) -> Any:
            return numba.types.Array(kind, 1, "C")

        self.numba = numba
        self.void, self.whole, self.real = numba.void, numba.int64, numba.float64
        self.single, self.flag = numba.float32, numba.boolean
        self.x, self.codes, self.places, self.frame = (
            given(kind) for kind in (numba.float32, numba.int8, numba.int32, numba.uint8)
        )
        self.numbers, self.table, self.row = given(numba.int64), given(numba.int64, 2), given(numba.int64, 1, "A")
        self.frames = given(numba.uint8, 2)
        self.floats, self.bytes, self.small_codes = made(numba.float32), made(numba.uint8), made(numba.int8)
        self.units, self.scales, self.written = made(numba.int16), made(numba.uint16), made(numba.int32)
        self.guess, self.samples = made(numba.int64), numba.types.Array(numba.float32, 3, "C")
        self.step = self.single, self.single, self.single, self.floats

    def jit(self, signature: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        source = getattr(function, "py_func", function)  # a first try, which failed, may have come as far as this
        try:
            compiled = self.numba.njit(signature, nogil=True, cache=True, error_model="numpy")(source)
        except (RuntimeError, OSError):  # there is no folder where the code could be kept, or no room in it
            compiled = self.numba.njit(signature, nogil=True, error_model="numpy")(source)
        return compiled  # type: ignore[no-any-return]

    def put(self, signature: Any, function: Callable[..., Any]) -> None:
        """Compile a loop that others call, and put it in its own place in this file."""
        globals()[function.__name__] = self.jit(signature, function)


@lru_cache(maxsize=1)
def _compiler() -> _Compiler:
    import numba

    return _Compiler(numba)


def _compile(numba: Any) -> Kernels:
    global _fetch, _first_one, _floats, _octets
    _fetch, _first_one = _prefetch(numba), _trailing_zeros(numba)
    _floats, _octets = _vector(numba, numba.float32), _vector(numba, numba.uint8)
    of = _compiler()
    whole, written = of.whole, of.written
    quantize = [
        whole(of.x, whole, of.single, whole, of.x, most, of.small_codes, of.scales)
        for most in (numba.types.none, whole)
    ]
    of.put(whole(of.x, whole, whole, written, written, written, written, of.floats), _pick)
    of.put(of.void(of.places, whole, whole, of.bytes), _pack)
    of.put(whole(of.frame, whole, whole, whole, written), _unpack)
    of.put(whole(of.x, whole, of.scales), _signs)
    of.put(of.real(of.frame, whole, whole, whole, whole), _energy_of_scales)
    of.put(of.void(of.floats, *of.step, of.floats, of.x), _step)
    of.put(whole(of.table, whole, whole), _row_of)
    of.put(whole(of.table, whole, of.numbers, of.numbers, whole, of.floats), _ahead)
    of.put(whole(of.x, of.x, whole, of.table, whole, of.numbers, of.numbers), _rebase)
    return Kernels(
        of.jit(quantize, _quantize),
        of.jit(of.void(of.codes, of.x, of.floats, whole, of.flag), _write),
        _pick,
        _pack,
        _unpack,
        _signs,
        of.jit(of.void(of.places, of.x, of.floats, of.flag), _scatter),
        _step,
        of.jit(of.real(of.frame, of.table, whole, whole, whole), _energy),
        _rebase,
    )


def _compile_ternary(of: _Compiler) -> TernaryLoops:
    whole, scratch, model = of.whole, (of.floats, of.units, of.bytes), (of.table, of.numbers, of.numbers)
    of.put(of.void(of.frame, whole, of.frame, whole, whole, whole, whole, of.floats, whole), _write_digits)
    of.put(of.void(of.bytes, whole, of.bytes), _pack_digits)
    of.put(whole(of.x, whole, of.bytes, whole, of.units, of.bytes, whole, whole), _ternary_blocks)
    return TernaryLoops(
        of.jit(whole(of.numbers, of.table, whole, of.frames, of.bytes, *model, of.floats, *scratch), _ternary),
        of.jit(of.void(of.frame, of.table, of.numbers, whole, of.flag), _write_ternary),
        of.jit(of.void(of.frame, of.frame, of.floats, whole, of.flag), _write_ternary_slab),
        of.jit(whole(of.frame, of.table, whole, whole, whole), _check_ternary),
        of.jit(of.void(of.frame, of.frame, of.table, whole, *model, of.floats, of.floats), _rebase_ternary),
        of.jit(
            whole(
                *(of.numbers, of.table, whole, of.bytes, *of.step, of.floats, of.x, of.numbers),
                *(of.samples, *scratch),
            ),
            _release_ternary,
        ),
    )


def _compile_topk_signs(of: _Compiler) -> TopkSignsLoops:
    whole, written, floats = of.whole, of.written, of.floats
    of.put(whole(of.x, whole, whole, written), _sampled_key)
    of.put(of.void(of.frame, of.row, whole, whole, written, floats), _read_signs)
    of.put(whole(of.x, whole, of.bytes, whole, whole), _write_signs)
    of.put(of.void(of.x, of.frames, of.row, whole, whole, written, floats, floats, floats), _less_sent)
    of.put(of.void(of.frame, of.row, whole, whole, written, floats, floats), _write_slab)
    scratch = (written, written, written, written, floats, floats, floats)
    model = (of.table, of.numbers, of.numbers)
    return TopkSignsLoops(
        of.jit(whole(of.numbers, of.table, whole, of.frames, of.bytes, *model, of.guess, *scratch), _topk_signs),
        of.jit(of.void(of.frame, of.table, of.numbers, whole, of.flag, written, floats), _write_topk_signs),
        of.jit(whole(of.frame, of.table, whole, whole, whole, written), _check_topk_signs),
        of.jit(
            of.void(of.frame, of.frame, of.table, whole, *model, written, floats, floats, floats), _rebase_topk_signs
        ),
    )


# What follows is compiled. Integers have 64 bits unless they are cast; loops over slices become vectors, but not where
# a branch jumps over them.


def _quantize(
    x: Any,
    block: int,
    inverse: np.float32,
    largest_scale_bits: int,
    reciprocals: Any,
    most: int | None,
    codes: Any,
    scales: Any,
) -> int:
    worst, bits = 0, x.view(np.int32)
    for number in range(scales.size):
        start = number * block
        values, patterns, target = x[start : start + block], bits[start : start + block], codes[start : start + block]
        for i in range(start + AHEAD_VALUES, start + AHEAD_VALUES + block, _LINE_VALUES):
            _fetch(x, i)
        largest = np.int32(0)
        for i in range(patterns.size):
            largest = max(largest, np.int32(patterns[i] & _MAGNITUDE))
        worst = max(worst, int(largest))
        exact = np.float32(np.int32(largest).view(np.float32) * inverse).view(np.int32)
        scale = min(int((exact + 0xFFFF) >> 16), largest_scale_bits) if largest >= _SMALLEST else 0
        scales[number], reciprocal = scale, reciprocals[scale]
        if most is None:
            for i in range(values.size):
                target[i] = np.int8(np.rint(values[i] * reciprocal))
        else:
            top = np.int32(most)
            place = np.uint32(start)
            for i in range(values.size):
                noise = np.uint32(np.uint32(patterns[i]) ^ np.uint32(np.uint32(place + np.uint32(i)) * _GOLDEN))
                noise = np.uint32(np.uint32(noise ^ (noise >> 16)) * _FIRST_FACTOR)
                noise = np.uint32(np.uint32(noise ^ (noise >> 15)) * _SECOND_FACTOR)
                noise = np.uint32(noise ^ (noise >> 16)) & _NOISE
                units = np.int32(np.rint(values[i] * reciprocal * _TO_16_BITS))
                code = np.int32(np.int32(units + np.int32(noise)) >> 16)
                target[i] = np.int8(min(max(code, np.int32(-top)), top))
    return worst


def _write(codes: Any, scales: Any, out: Any, block: int, add: bool) -> None:
    for number in range(scales.size):
        start, scale = number * block, scales[number]
        source, target = codes[start : start + block], out[start : start + block]
        if add:
            for i in range(target.size):
                target[i] += np.float32(source[i]) * scale
        else:
            for i in range(target.size):
                target[i] = np.float32(source[i]) * scale


def _ternary(
    addresses: Any,
    table: Any,
    block: int,
    sent: Any,
    frame: Any,
    places: Any,
    params: Any,
    anchor: Any,
    rest: Any,
    known: Any,
    units: Any,
    digits: Any,
) -> int:
    spoiled, at, piece = -1, 0, rest.size // block * block
    for row in range(table.shape[0]):
        slabs, slab, stride = table[row, _SLABS], table[row, SLAB], table[row, _STRIDE]
        first, scales_first, width = table[row, _DIGITS], table[row, SCALES], (slab + 4) // 5
        given = 0 if places.shape[0] else slabs * slab
        values = _floats(addresses[row], given)
        for begin in range(0, slabs * slab, slab):
            for start in range(0, slab, piece):
                size, scales_at, here = min(piece, slab - start), scales_first + start // block * 2, begin + start
                x, ours, behind = rest[:size], 0, 0
                if given:
                    source, ours = values[here : here + size], addresses[row] + 4 * (here + size)
                    for i in range(size):
                        x[i] = source[i]
                else:
                    at = _ahead(places, at, params, anchor, table[row, 0] + here, x)
                    after = table[row, 0] + here + size
                    following = _row_of(places, at, after)
                    inside, leaf = 4 * (places[following, 3] + after - places[following, 0]), places[following, 2]
                    ours, behind = params[leaf] + inside, anchor[leaf] + inside
                if sent.shape[0] == 1:
                    _write_digits(sent[0], first, sent[0], scales_at, width, start, block, x, -1)
                elif sent.shape[0]:
                    less = known[:size]
                    for one in range(sent.shape[0]):
                        _write_digits(sent[one], first, sent[one], scales_at, width, start, block, less, min(one, 1))
                    for i in range(size):
                        x[i] -= less[i]
                into = digits[start : start + size]
                if _ternary_blocks(x, block, frame, scales_at, units, into, ours, behind) >= _INFINITY and spoiled < 0:
                    spoiled = row
            _pack_digits(digits, slab, frame[first : first + width])
            first += stride
            scales_first += stride
    return spoiled


def _pack_digits(digits: Any, count: int, packed: Any) -> None:
    three, width = np.uint8(3), packed.size
    for i in range(count, 5 * width):
        digits[i] = 1
    for i in range(width):
        upper = np.uint8(digits[i + 4 * width] * three + digits[i + 3 * width])
        upper = np.uint8(upper * three + digits[i + 2 * width])
        upper = np.uint8(upper * three + digits[i + width])
        packed[i] = np.uint8(upper * three + digits[i])


def _release_ternary(
    frames: Any,
    table: Any,
    block: int,
    frame: Any,
    live: np.float32,
    rate: np.float32,
    momentum: np.float32,
    m: Any,
    parameters: Any,
    published: Any,
    places: Any,
    samples: Any,
    total: Any,
    units: Any,
    digits: Any,
) -> int:
    spoiled, piece, sampled = -1, total.size // block * block, 0
    while sampled < places.size and places[sampled] < table[0, 0]:
        sampled += 1
    for row in range(table.shape[0]):
        slabs, slab, stride = table[row, _SLABS], table[row, SLAB], table[row, _STRIDE]
        first, scales_first, width = table[row, _DIGITS], table[row, SCALES], (slab + 4) // 5
        for begin in range(table[row, 0], table[row, 0] + slabs * slab, slab):
            for start in range(0, slab, piece):
                size, scales_at = min(piece, slab - start), scales_first + start // block * 2
                here, after = begin + start, sampled
                while after < places.size and places[after] < here + size:
                    after += 1
                rest = total[:size]
                for i in range(size):
                    rest[i] = np.float32(0)
                for one in range(frames.size):
                    sent = _octets(frames[one], frame.size)
                    for i in range(sampled, after):
                        samples[0, one, i] = rest[places[i] - here]
                    _write_digits(sent, first, sent, scales_at, width, start, block, rest, 1)
                    for i in range(sampled, after):
                        samples[1, one, i] = rest[places[i] - here]
                sampled = after
                mine, theirs = parameters[here : here + size], published[here : here + size]
                _step(rest, live, rate, momentum, m[here : here + size], mine, theirs)
                ours, behind = parameters.ctypes.data + 4 * (here + size), published.ctypes.data + 4 * (here + size)
                into = digits[start : start + size]
                if _ternary_blocks(rest, block, frame, scales_at, units, into, ours, behind) >= _INFINITY:
                    spoiled = row if spoiled < 0 else spoiled
            _pack_digits(digits, slab, frame[first : first + width])
            first += stride
            scales_first += stride
    return spoiled


def _ternary_blocks(
    x: Any, block: int, frame: Any, scales_at: int, units: Any, digits: Any, ours: int, behind: int
) -> int:
    """Write the digits of whole blocks, and their scales; return the largest magnitude's bits. ours, behind: where the
    values begin that are read next, which are asked for meanwhile, block by block; 0: nowhere."""
    worst = 0
    for start in range(0, x.size, block):
        for i in range(start, start + block, _LINE_VALUES):
            if ours:
                _fetch(_floats(ours, 0), i)
            if behind:
                _fetch(_floats(behind, 0), i)
        values, target = x[start : start + block], digits[start : start + block]
        size, patterns = values.size, values.view(np.int32)
        largest = np.int32(0)
        for i in range(size):
            largest = max(largest, np.int32(patterns[i] & _MAGNITUDE))
        worst = max(worst, int(largest))
        alive, exponent = largest >= _SMALLEST, largest >> 23
        factor = np.int32((262 - exponent) << 23 if alive else 0).view(np.float32)
        total = np.int32(0)
        for i in range(size):
            unit = np.int32(values[i] * factor)
            units[i] = np.int16(unit)
            total = np.int32(total + abs(unit))
        threshold = np.int32(total * 717 // (size * 1024))
        above, below = np.int16(threshold), np.int16(-threshold)
        kept, kept_sum = np.int32(0), np.int32(0)
        for i in range(size):
            magnitude = np.int32(abs(np.int32(units[i])))
            kept = np.int32(kept + (np.int32(1) if magnitude > threshold else np.int32(0)))
            kept_sum = np.int32(kept_sum + (magnitude if magnitude > threshold else np.int32(0)))
        for i in range(size):
            target[i] = np.uint8(np.uint8(1) + np.uint8(units[i] > above) - np.uint8(units[i] < below))
        mean = np.float32(((2 * kept_sum + kept) << 8) // max(int(kept), 1)).view(np.int32)
        rounded = (mean + 0x7FFF + ((mean >> 16) & 1)) >> 16
        scale = min(int(rounded + ((exponent - (127 + 8 + 9)) << 7)), 0x7F7F) if alive else 0
        frame[scales_at] = scale & 255
        frame[scales_at + 1] = scale >> 8
        scales_at += 2
    return worst


def _write_ternary(frame: Any, table: Any, addresses: Any, block: int, add: bool) -> None:
    for row in range(table.shape[0]):
        slabs, slab, stride = table[row, _SLABS], table[row, SLAB], table[row, _STRIDE]
        first, scales_first, width = table[row, _DIGITS], table[row, SCALES], (slab + 4) // 5
        out = _floats(addresses[row], slabs * slab)
        for begin in range(0, out.size, slab):
            _write_digits(frame, first, frame, scales_first, width, 0, block, out[begin : begin + slab], int(add))
            first += stride
            scales_first += stride


def _write_ternary_slab(packed: Any, scales: Any, out: Any, block: int, add: bool) -> None:
    _write_digits(packed, 0, scales, 0, (out.size + 4) // 5, 0, block, out, int(add))


def _check_ternary(frame: Any, table: Any, block: int, largest_byte: int, largest_scale: int) -> int:
    for row in range(table.shape[0]):
        slabs, slab, stride = table[row, _SLABS], table[row, SLAB], table[row, _STRIDE]
        first, scales_first = table[row, _DIGITS], table[row, SCALES]
        width, blocks = (slab + 4) // 5, (slab + block - 1) // block
        for _ in range(slabs):
            packed, scales = frame[first : first + width], frame[scales_first : scales_first + 2 * blocks]
            largest, odd = np.uint8(0), 0
            for i in range(width):
                largest = max(largest, packed[i])
            for i in range(blocks):
                scale = int(scales[2 * i]) | int(scales[2 * i + 1]) << 8
                odd |= (scale > largest_scale) | ((scale != 0) & (scale < _SMALLEST_SCALE))
            for place in range(slab, 5 * width):
                odd |= int(packed[place % width]) // 3 ** (place // width) % 3 != 1
            if odd or largest > largest_byte:
                return row
            first += stride
            scales_first += stride
    return -1


def _write_digits(
    packed: Any, first: int, scales: Any, scales_at: int, width: int, start: int, block: int, out: Any, add: int
) -> None:
    """Decode a slab's values from `start` on, where a block begins, into `out`. first: the slab's first byte in
    `packed`.  scales_at: the byte of that block's scale.  add: 1 adds, -1 subtracts, 0 writes."""
    three, one = np.uint32(3), np.int16(1)
    plane, place, left = start // width, first + start % width, width - start % width
    for begin in range(0, out.size, block):
        scale = np.int32((int(scales[scales_at]) | int(scales[scales_at + 1]) << 8) << 16).view(np.float32)
        if add < 0:
            scale = -scale
        scales_at += 2
        done, end = begin, min(begin + block, out.size)
        while done < end:  # a block may reach into the next plane
            size = min(end - done, left)
            # byte * factor / 65536 has the fraction of byte / 3 ** (plane + 1), near enough: its first digit to base
            # three is byte // 3 ** plane % 3, for all bytes that hold five digits
            factor = _FACTORS[plane]
            source, target = packed[place : place + size], out[done : done + size]
            if add:
                for i in range(size):
                    fraction = np.uint16(np.uint16(source[i]) * factor)
                    digit = np.int16(np.uint16(np.uint32(np.uint32(fraction) * three) >> 16))
                    target[i] += np.float32(np.int16(digit - one)) * scale
            else:
                for i in range(size):
                    fraction = np.uint16(np.uint16(source[i]) * factor)
                    digit = np.int16(np.uint16(np.uint32(np.uint32(fraction) * three) >> 16))
                    target[i] = np.float32(np.int16(digit - one)) * scale
            done += size
            place += size
            left -= size
            if not left:
                plane, place, left = plane + 1, first, width


def _pick(x: Any, least: int, kept: int, candidates: Any, keys: Any, histogram: Any, places: Any, values: Any) -> int:
    bits, threshold, whole = x.view(np.int32), np.int32(least << 16), x.size >> 6
    count, largest = 0, 0
    for number in range(whole + 1):
        start, word = number << 6, np.uint64(0)
        if number < whole:
            for i in range(64):
                word |= np.uint64(np.int32(bits[start + i] & _MAGNITUDE) >= threshold) << np.uint64(i)
        else:
            for i in range(bits.size - start):
                word |= np.uint64(np.int32(bits[start + i] & _MAGNITUDE) >= threshold) << np.uint64(i)
        while word:
            place = start + _first_one(word)
            key = int(bits[place] & _MAGNITUDE) >> 16
            candidates[count], keys[count] = place, key
            histogram[key] += 1
            largest = max(largest, key)
            count += 1
            word &= word - np.uint64(1)
    cut, above = largest, histogram[largest]
    while above < kept and cut > least:
        cut -= 1
        above += histogram[cut]
    at_cut = kept - (above - histogram[cut])  # of those at the cut the first so many
    for key in range(least, largest + 1):
        histogram[key] = 0
    if count < kept:
        return -1
    picked = 0
    for number in range(count):
        key = keys[number]
        places[picked] = candidates[number]
        equal = 1 if key == cut else 0
        picked += 1 if (key > cut) | (equal * at_cut > 0) else 0
        at_cut -= equal & (1 if at_cut > 0 else 0)
    for number in range(kept):
        values[number] = x[places[number]]
    return largest << 16 | cut


def _pack(places: Any, low: int, first: int, buffer: Any) -> None:
    if first < 0:
        for place in places:
            buffer[place >> 3] |= np.uint8(1 << (place & 7))
        return
    mask, held, width, byte = (1 << low) - 1, 0, 0, 0
    for number in range(places.size):
        held |= (places[number] & mask) << width
        width += low
        while width >= 8:
            buffer[byte] = held & 255
            held >>= 8
            width -= 8
            byte += 1
    buffer[byte] |= np.uint8(held)
    for number in range(places.size):
        bit = first + (places[number] >> low) + number
        buffer[bit >> 3] |= np.uint8(1 << (bit & 7))


def _unpack(buffer: Any, low: int, first: int, bits: int, places: Any) -> int:
    start, count, kept, rank = max(first, 0), 0, places.size, 1 if first >= 0 else 0
    for byte in range(start >> 3, (bits + 7) >> 3, 8):
        word = np.uint64(0)
        if byte + 8 <= buffer.size:
            for i in range(8):
                word |= np.uint64(buffer[byte + i]) << np.uint64(8 * i)
        else:
            for i in range(buffer.size - byte):
                word |= np.uint64(buffer[byte + i]) << np.uint64(8 * i)
        base = 8 * byte - start
        if base < 0:  # the low bits end within this byte
            word = word >> np.uint64(-base) << np.uint64(-base)
        if 8 * byte + 64 > bits:
            word &= (np.uint64(1) << np.uint64(bits - 8 * byte)) - np.uint64(1)
        while word:
            if count < kept:
                places[count] = (base + _first_one(word) - rank * count) << low
            count += 1
            word &= word - np.uint64(1)
    if low:
        mask, held, width, byte = (1 << low) - 1, 0, 0, 0
        for number in range(min(kept, count)):
            while width < low:
                held |= int(buffer[byte]) << width
                width += 8
                byte += 1
            places[number] |= held & mask
            held >>= low
            width -= low
    return count


def _signs(x: Any, block: int, scales: Any) -> int:
    worst, bits = 0, x.view(np.int32)
    for number in range(scales.size):
        start = number * block
        values, patterns = x[start : start + block], bits[start : start + block]
        largest = np.int32(0)
        for i in range(patterns.size):
            largest = max(largest, np.int32(patterns[i] & _MAGNITUDE))
        worst = max(worst, int(largest))
        exponent = int(largest) >> 23 if largest >= _SMALLEST else 0
        factor = np.int32((_UNIT_EXPONENT - exponent) << 23 if exponent else 0).view(np.float32)
        total = np.int32(0)
        for i in range(values.size):
            total = np.int32(total + np.int32(np.rint(abs(values[i]) * factor)))
        mean = np.int32(np.float32(np.float32(total) * np.float32(1.0 / values.size)).view(np.int32))
        rounded = (int(mean) + 0x7FFF + ((int(mean) >> 16) & 1)) >> 16
        scale = min(rounded + ((exponent - (127 + 11)) << 7), 0x7F7F)
        scales[number] = scale if exponent and total > 0 else 0
    return worst


# The columns of a table of topk and sign: 4, 5, 6 where the index, the signs and the scales begin; 7 how many values
# are kept; 8 the form of the index (0: 16 bits a place, 1: a bitmap, 2: Elias-Fano), 9 its low bits, 10 its bits, 11
# its bytes. moved: how many bytes a slab lies behind the first of its row.


def _topk_signs(
    addresses: Any,
    table: Any,
    block: int,
    sent: Any,
    frame: Any,
    model: Any,
    params: Any,
    anchor: Any,
    guess: Any,
    candidates: Any,
    keys: Any,
    histogram: Any,
    picked: Any,
    values: Any,
    rest: Any,
    total: Any,
) -> int:
    at = 0
    for row in range(table.shape[0]):
        slabs, slab, stride, kept = table[row, _SLABS], table[row, SLAB], table[row, _STRIDE], table[row, KEPT]
        everything, places, found = _floats(addresses[row], slabs * slab), picked[: kept + 1], values[:kept]
        for number in range(slabs):
            x, moved = everything[number * slab : (number + 1) * slab], number * stride
            if model.shape[0]:
                x = rest[:slab]
                at = _ahead(model, at, params, anchor, table[row, 0] + number * slab, x)
            if sent.shape[0]:
                _less_sent(x, sent, table[row], block, moved, picked, values, rest, total)
                x = rest[:slab]
            first = guess[0] - _GUESS_KEYS if guess[1] else _sampled_key(x, kept, 2, histogram)
            first = min(max(first, 1), _INFINITE_KEY)
            cut = _pick(x, first, kept, candidates, keys, histogram, places, found)
            if cut < 0:
                first = min(_sampled_key(x, kept, 5, histogram), first)
                cut = _pick(x, first, kept, candidates, keys, histogram, places, found)
            if cut < 0:
                cut = _pick(x, 0, kept, candidates, keys, histogram, places, found)
            if cut >> 16 >= _INFINITE_KEY:
                return row
            cut &= 0x7FFF
            guess[0], guess[1] = cut, 1 if abs(cut - guess[0]) <= _STEADY_KEYS else 0
            index = table[row, _INDEX] + moved
            if table[row, _KIND] == 0:
                for i in range(kept):
                    frame[index + 2 * i] = places[i] & 255
                    frame[index + 2 * i + 1] = places[i] >> 8
            else:
                high = kept * table[row, _LOW] if table[row, _KIND] == 2 else -1
                _pack(places[:kept], table[row, _LOW], high, frame[index : index + table[row, _BYTES]])
            if _write_signs(found, block, frame, table[row, _SIGNS] + moved, table[row, MEANS] + moved) >= _INFINITY:
                return row
    return -1


def _less_sent(
    x: Any, sent: Any, columns: Any, block: int, moved: int, picked: Any, values: Any, rest: Any, total: Any
) -> None:
    """Write a slab, less the sum of what the frames in `sent` have of it, to `rest`."""
    kept = columns[KEPT]
    if sent.shape[0] == 1:
        for i in range(x.size):
            rest[i] = x[i]
        _read_signs(sent[0], columns, block, moved, picked, values)
        for i in range(kept):
            rest[picked[i]] += -values[i]
        return
    for i in range(x.size):
        total[i] = np.float32(0)
    for one in range(sent.shape[0]):
        _read_signs(sent[one], columns, block, moved, picked, values)
        for i in range(kept):
            total[picked[i]] = total[picked[i]] + values[i] if one else values[i]
    for i in range(x.size):
        rest[i] = x[i] - total[i]


def _sampled_key(x: Any, kept: int, spreads: int, histogram: Any) -> int:
    """As `_sampled_key` of sparsify.py: the same sample, and so the same key."""
    runs, length, step = 1, x.size, x.size
    if x.size > 2 * _SAMPLE:
        runs, length, step = _RUNS, _SAMPLE // _RUNS, x.size // _RUNS - 1 | 1
    bits, largest = x.view(np.int32), 0
    for run in range(runs):
        for i in range(run * step, run * step + length):
            key = int(bits[i] & _MAGNITUDE) >> 16
            histogram[key] += 1
            largest = max(largest, key)
    expected = kept * (runs * length) / x.size
    rank = min(runs * length, int(expected + spreads * (expected**0.5 + 1)))
    found, above = largest, histogram[largest]
    while above < rank:
        found -= 1
        above += histogram[found]
    for run in range(runs):
        for i in range(run * step, run * step + length):
            histogram[int(bits[i] & _MAGNITUDE) >> 16] = 0
    return found


def _write_signs(values: Any, block: int, frame: Any, signs_at: int, scales_at: int) -> int:
    """As `sign` encodes values, into a frame of zeros; return the largest magnitude's bits."""
    worst, bits = 0, values.view(np.int32)
    one = np.zeros(1, np.uint16)
    for start in range(0, values.size, block):
        piece = values[start : start + block]
        worst = max(worst, _signs(piece, block, one))
        frame[scales_at] = one[0] & 255
        frame[scales_at + 1] = one[0] >> 8
        scales_at += 2
    for i in range(values.size):
        frame[signs_at + (i >> 3)] |= np.uint8((1 if bits[i] < 0 else 0) << (i & 7))
    return worst


def _read_signs(frame: Any, columns: Any, block: int, moved: int, places: Any, values: Any) -> None:
    """Read the places and the values of one slab, as topk and sign have written them."""
    index, kept = columns[_INDEX] + moved, columns[KEPT]
    signs_at, scales_at = columns[_SIGNS] + moved, columns[MEANS] + moved
    if columns[_KIND] == 0:
        for i in range(kept):
            places[i] = int(frame[index + 2 * i]) | int(frame[index + 2 * i + 1]) << 8
    else:
        high = kept * columns[_LOW] if columns[_KIND] == 2 else -1
        _unpack(frame[index : index + columns[_BYTES]], columns[_LOW], high, columns[_BITS], places[:kept])
    for start in range(0, kept, block):
        scale = np.int32((int(frame[scales_at]) | int(frame[scales_at + 1]) << 8) << 16).view(np.float32)
        for i in range(start, min(start + block, kept)):
            negative = int(frame[signs_at + (i >> 3)]) >> (i & 7) & 1
            values[i] = np.float32(1 - 2 * negative) * scale
        scales_at += 2


def _write_topk_signs(frame: Any, table: Any, addresses: Any, block: int, add: bool, places: Any, values: Any) -> None:
    for row in range(table.shape[0]):
        slabs, slab, stride, kept = table[row, _SLABS], table[row, SLAB], table[row, _STRIDE], table[row, KEPT]
        out = _floats(addresses[row], slabs * slab)
        for number in range(slabs):
            target = out[number * slab : (number + 1) * slab]
            if add:
                _read_signs(frame, table[row], block, number * stride, places, values)
                for i in range(kept):
                    target[places[i]] += values[i]
            else:
                _write_slab(frame, table[row], block, number * stride, places, values, target)


def _write_slab(frame: Any, columns: Any, block: int, moved: int, places: Any, values: Any, out: Any) -> None:
    _read_signs(frame, columns, block, moved, places, values)
    for i in range(out.size):
        out[i] = np.float32(0)
    for i in range(columns[KEPT]):
        out[places[i]] = values[i]


def _check_topk_signs(frame: Any, table: Any, block: int, largest_scale: int, smallest_scale: int, places: Any) -> int:
    for row in range(table.shape[0]):
        slabs, slab, stride, kept = table[row, _SLABS], table[row, SLAB], table[row, _STRIDE], table[row, KEPT]
        blocks, spare = (kept + block - 1) // block, 8 * table[row, _BYTES] - table[row, _BITS]
        for moved in range(0, slabs * stride, stride):
            index = table[row, _INDEX] + moved
            signs_at, scales_at = table[row, _SIGNS] + moved, table[row, MEANS] + moved
            buffer, odd, found = frame[index : index + table[row, _BYTES]], 0, kept
            if table[row, _KIND] == 0:
                for i in range(kept):
                    places[i] = int(buffer[2 * i]) | int(buffer[2 * i + 1]) << 8
            else:
                high = kept * table[row, _LOW] if table[row, _KIND] == 2 else -1
                found = _unpack(buffer, table[row, _LOW], high, table[row, _BITS], places[:kept])
                odd |= int(buffer[buffer.size - 1]) >> (8 - spare) != 0
            if found != kept:
                return row
            for i in range(1, kept):
                odd |= places[i] <= places[i - 1]
            odd |= places[kept - 1] >= slab
            if kept & 7:
                odd |= int(frame[signs_at + (kept >> 3)]) >> (kept & 7) != 0
            for i in range(scales_at, scales_at + 2 * blocks, 2):
                scale = int(frame[i]) | int(frame[i + 1]) << 8
                odd |= (scale > largest_scale) | ((scale != 0) & (scale < smallest_scale))
            if odd:
                return row
    return -1


def _energy(frame: Any, table: Any, block: int, scales: int, values: int) -> float:
    """Return the energy of all slabs. scales, values: the columns of the first scales, and of how many values have
    one."""
    energy = 0.0
    for row in range(table.shape[0]):
        scales_at, count = table[row, scales], table[row, values]
        blocks = (count + block - 1) // block
        for _ in range(table[row, _SLABS]):
            energy += _energy_of_scales(frame, scales_at, blocks, block, count)
            scales_at += table[row, _STRIDE]
    return energy


def _energy_of_scales(frame: Any, first: int, blocks: int, block: int, count: int) -> float:
    """As `energy_of_scales` of codec.py, where the largest code is 1; the scales' bytes begin at `first`."""
    total, scale = 0.0, np.float32(0)
    for i in range(first, first + 2 * blocks, 2):
        scale = np.int32((int(frame[i]) | int(frame[i + 1]) << 8) << 16).view(np.float32)
        total += float(np.float32(scale * scale))
    return max(0.0, block * total - (block * blocks - count) * float(scale) * float(scale))


def _scatter(places: Any, values: Any, out: Any, add: bool) -> None:
    if add:
        for number in range(places.size):
            out[places[number]] += values[number]
    else:
        for number in range(places.size):
            out[places[number]] = values[number]


def _step(
    total: Any,
    live: np.float32,
    rate: np.float32,
    momentum: np.float32,
    m: Any,
    parameters: Any,
    published: Any,
) -> None:
    if m.size:
        for i in range(total.size):
            gradient = np.float32(total[i] / live)
            moved = np.float32(np.float32(m[i] * momentum) + gradient)
            m[i] = moved
            new = parameters[i] + np.float32(np.float32(np.float32(moved * momentum) + gradient) * rate)
            parameters[i] = new
            total[i] = new - published[i]
    else:
        for i in range(total.size):
            new = parameters[i] + np.float32(np.float32(total[i] / live) * rate)
            parameters[i] = new
            total[i] = new - published[i]


def _row_of(places: Any, row: int, value: int) -> int:
    """Return the row of `CodedSegments`' table in which a value lies; row: one at or before it."""
    after = places.shape[0]
    if value >= places[row, 0] + places[row, 1]:
        while after - row > 1:
            middle = (row + after) // 2
            if places[middle, 0] <= value:
                row = middle
            else:
                after = middle
    return row


def _ahead(places: Any, row: int, params: Any, anchor: Any, begin: int, out: Any) -> int:
    """Write params - anchor of pinned leaves, of the values from `begin` on. row: of `places`, at or before the first
    of them; returns that of the last."""
    done = 0
    while done < out.size:
        row = _row_of(places, row, begin + done)
        inside, leaf = begin + done - places[row, 0], places[row, 2]
        size, first = min(out.size - done, places[row, 1] - inside), 4 * (places[row, 3] + inside)
        ours, behind = _floats(params[leaf] + first, size), _floats(anchor[leaf] + first, size)
        target = out[done : done + size]
        for i in range(size):
            target[i] = ours[i] - behind[i]
        done += size
    return row


def _rebase(shared: Any, own: Any, begin: int, places: Any, row: int, params: Any, anchor: Any) -> int:
    """See `Kernels`. row: of the table, at or before the first value; returns that of the last."""
    done = 0
    while done < shared.size:
        row = _row_of(places, row, begin + done)
        inside, leaf = begin + done - places[row, 0], places[row, 2]
        size, first = min(shared.size - done, places[row, 1] - inside), 4 * (places[row, 3] + inside)
        ours, behind = _floats(params[leaf] + first, size), _floats(anchor[leaf] + first, size)
        step = shared[done : done + size]
        for i in range(size):
            behind[i] += step[i]
        if own.size:
            mine = own[done : done + size]
            for i in range(size):
                ours[i] += np.float32(step[i] - mine[i])
        else:
            for i in range(size):
                ours[i] += step[i]
        done += size
    return row


def _rebase_ternary(
    frame: Any, own: Any, table: Any, block: int, places: Any, params: Any, anchor: Any, shared: Any, known: Any
) -> None:
    at, piece = 0, shared.size // block * block
    for row in range(table.shape[0]):
        slabs, slab, stride = table[row, _SLABS], table[row, SLAB], table[row, _STRIDE]
        first, scales_first, width = table[row, _DIGITS], table[row, SCALES], (slab + 4) // 5
        for begin in range(table[row, 0], table[row, 0] + slabs * slab, slab):
            for start in range(0, slab, piece):
                size, scales_at = min(piece, slab - start), scales_first + start // block * 2
                _write_digits(frame, first, frame, scales_at, width, start, block, shared[:size], 0)
                if own.size:
                    _write_digits(own, first, own, scales_at, width, start, block, known[:size], 0)
                at = _rebase(shared[:size], known[: size if own.size else 0], begin + start, places, at, params, anchor)
            first += stride
            scales_first += stride


def _rebase_topk_signs(
    frame: Any,
    own: Any,
    table: Any,
    block: int,
    places: Any,
    params: Any,
    anchor: Any,
    picked: Any,
    values: Any,
    shared: Any,
    known: Any,
) -> None:
    at = 0
    for row in range(table.shape[0]):
        slabs, slab, stride = table[row, _SLABS], table[row, SLAB], table[row, _STRIDE]
        step, mine = shared[:slab], known[: slab if own.size else 0]
        for number in range(slabs):
            _write_slab(frame, table[row], block, number * stride, picked, values, step)
            if own.size:
                _write_slab(own, table[row], block, number * stride, picked, values, mine)
            at = _rebase(step, mine, table[row, 0] + number * slab, places, at, params, anchor)
