"""Work of this package on the memory of JAX's arrays, as a step of a program of XLA's: nothing is copied, nobody waits.

A compiled function of JAX on a processor runs some time after it was called, in a thread of XLA's, and may be given the
memory of its arguments (`donate_argnums`). What `work_on` calls is such a function. All it does is to call `work`, of
this process, with the addresses of that memory. So `work` may write into leaves that somebody still computes with
when `work_on` is called: XLA waits for those who read.

Rule 1: only on a processor, and only arrays that lie whole on one device.
Rule 2: `work` runs in a thread of XLA's. It takes the interpreter's lock like any thread, and should soon be in code
that gives the lock up. What it raises is the error of the arrays that the call returned.
Rule 3: as with `jax.pure_callback`, who waits for these arrays with the interpreter's lock in hand waits for ever. JAX
gives it up wherever it waits, but in `unsafe_buffer_pointer` of an array that is not ready.
Source: the typed foreign function interface of XLA, `xla/ffi/api/c_api.h` in jaxlib (API 0.1 and later), whose structs
are read below.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.priority import follow

logger = logging.getLogger(__name__)

Leaves = list[jax.Array]
Addresses = NDArray[np.int64]
Work = Callable[[Addresses], object]
"""Given where the values of each array begin in memory: float32, in C order."""
WorkBeside = Callable[[Addresses, Addresses], object]
"""Given the same, and then where the values of each array begin that is `Kept`."""

HANDING_SECONDS = 0.01
"""So long work waits at most for a thread that hands work over."""

_TARGET = "zmqtrain_work_on"
_DEAR = 8192
"""A program of fewer operations than a thousand or so runs in the caller's thread: so many are added."""

_ENVIRONMENT_BYTES = 64
"""No fenv_t is larger: it has 32 bytes on x86, 8 on ARM."""
_C: Any = None  # of the floating-point environment: where it is not known, XLA's stays
with contextlib.suppress(OSError):
    _C = ctypes.PyDLL("libm.so.6")

# XLA_FFI_ExecutionStage, XLA_FFI_Extension_Type, XLA_FFI_Error_Code
_EXECUTE, _METADATA, _INTERNAL = 3, 1, 13
_API_MAJOR, _API_MINOR = 0, 1

_Head: list[tuple[str, Any]] = [("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p)]


_Address = ctypes.c_void_p


class _Buffer(ctypes.Structure):
    """XLA_FFI_Buffer, as far as it is read here. (218 of them, field by field and with their shapes, take 2 ms.)"""

    _fields_ = (*_Head, ("dtype", ctypes.c_int), ("data", _Address))


class _Arguments(ctypes.Structure):
    """XLA_FFI_Args. buffers: the address of an array of pointers."""

    _fields_ = (
        *_Head,
        ("size", ctypes.c_int64),
        ("types", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
    )


class _CallFrame(ctypes.Structure):
    """XLA_FFI_CallFrame, as far as it is read here."""

    _fields_ = (
        *_Head,
        ("api", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("arguments", _Arguments),
    )


class _ApiVersion(ctypes.Structure):
    """XLA_FFI_Api_Version."""

    _fields_ = (*_Head, ("major", ctypes.c_int), ("minor", ctypes.c_int))


class _Metadata(ctypes.Structure):
    """XLA_FFI_Metadata, as far as it is written here."""

    _fields_ = (("struct_size", ctypes.c_size_t), ("version", _ApiVersion))


class _MetadataExtension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension: XLA asks a handler which version of the interface it speaks."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),
    )


class _ErrorArguments(ctypes.Structure):
    """XLA_FFI_Error_Create_Args."""

    _fields_ = (*_Head, ("message", ctypes.c_char_p), ("code", ctypes.c_int))


_CreateError = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorArguments))


class _Api(ctypes.Structure):
    """XLA_FFI_Api, as far as it is read here."""

    _fields_ = (*_Head, ("version", _ApiVersion), ("internal", ctypes.c_void_p), ("create_error", _CreateError))


class _Jobs:
    """What has been handed to XLA and is not done."""

    def __init__(self) -> None:
        self._numbers, self._lock = count(), threading.Lock()
        self._handed, self._by = threading.Lock(), 0  # the first is held while the newest work is handed over
        self._waiting: dict[int, Work] = {}
        self._done: dict[int, Any] = {}

    def hand_over(self, work: Work, call: Callable[[NDArray[np.int32]], tuple[Leaves, jax.Array]]) -> Leaves:
        """Return what `call` gives for the number under which XLA will ask for the work, but for the last: what is
        ready once it has been done, or never will be."""
        with self._lock:
            self._forget()
            number = next(self._numbers) % 2**31
            self._waiting[number] = work
        try:
            with (handed := threading.Lock()), jax.transfer_guard_host_to_device("allow"):  # of the number
                self._handed, self._by = handed, threading.get_ident()
                arrays, done = call(np.array(number, np.int32))
        except BaseException:
            self._waiting.pop(number, None)
            raise
        with self._lock:
            if number in self._waiting:
                self._done[number] = done
        return arrays

    def stand_behind(self) -> None:
        """Let the thread that hands work over go first, now and at a core: not where XLA runs the work in that thread.

        It needs the interpreter's lock to go on: in a thread of XLA's that begins at once, work would take it for as
        long as it prepares, and training would wait.
        """
        if self._by == threading.get_ident():
            return
        handed = self._handed  # nobody will ever wait for this thread to release it
        if handed.acquire(timeout=HANDING_SECONDS):
            handed.release()
        follow()

    def run(self, number: int, addresses: Addresses) -> None:
        """Do what was given that number."""
        try:
            self._waiting[number](addresses)
        finally:
            with self._lock:
                self._waiting.pop(number, None)
                self._done.pop(number, None)

    def _forget(self) -> None:
        """Forget the work that will never be asked for: what the leaves were made from has failed."""
        for number, done in list(self._done.items()):
            if done.is_ready():
                self._waiting.pop(number, None)
                self._done.pop(number, None)

    def finish(self) -> None:
        """Wait until all is done: a thread of XLA's must not meet an interpreter that ends."""
        for done in list(self._done.values()):
            with contextlib.suppress(Exception):  # it has been said where the arrays were used
                done.block_until_ready()


_jobs = _Jobs()


def work_on(leaves: Leaves, spent: Leaves, work: Work, *, donate: bool) -> tuple[Leaves, Leaves]:
    """Return arrays of the shapes, dtypes and values of both, changed by `work`, which is called soon after with the
    addresses of all of them, those of `spent` first.

    leaves, spent: float32, on one processor. What is returned for `spent` has its memory, and with `donate` that for
    `leaves` has theirs; else it is a copy.
    """
    made = _jobs.hand_over(work, partial(_program(donate), spent, leaves))
    return made[len(spent) :], made[: len(spent)]


class Kept(Sequence[jax.Array]):
    """Arrays that stay where they are while work changes them, one piece of work after the other.

    A program that is handed an array and gives it back takes some µs for it, and ten times that with cold caches. So
    one small array, the *token*, stands for all of these: who works on them is handed the token, and XLA keeps the
    order. Who takes them from the sequence has ordinary arrays, whose values come after the work so far; the next work
    uses them up.

    arrays: float32, on one processor, of nobody else.  Not to be used by two threads.
    """

    def __init__(self, arrays: Leaves) -> None:
        self._arrays = arrays
        self._home = arrays[0].sharding if arrays and arrays[0].committed else None
        self._token: jax.Array | None = None
        self._addresses: Addresses = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._arrays)

    def __getitem__(self, index: Any) -> Any:
        if self._token is not None:
            _, (_, *self._arrays) = work_on([], [self._token, *self._arrays], self._check, donate=True)
            self._token = None
        return self._arrays[index]

    def block_until_ready(self) -> Kept:
        """Wait until the work so far is done, as for an array."""
        last: list[Any] = self._arrays if self._token is None else [self._token]
        for array in last:
            array.block_until_ready()
        return self

    def work_on(self, leaves: Leaves, work: WorkBeside, *, donate: bool) -> Leaves:
        """As `work_on` does for the leaves; the work may change these arrays too."""

        def both(addresses: Addresses) -> None:
            work(addresses[1:], self._addresses)

        made, (self._token,) = work_on(leaves, [self._held()], both, donate=donate)
        return made

    def look_at(self, leaves: Leaves, look: WorkBeside) -> jax.Array:
        """As `look_at` does for the leaves; nobody changes these arrays either, before `look` has returned."""
        return look_at([*leaves, self._held()], lambda addresses: look(addresses[:-1], self._addresses))

    def compile_for(self, each: Sequence[Leaves], *, donate: bool) -> None:
        """Compile what the methods need for arrays like each of these leaves. Nothing is done."""
        number, token = np.array(0, np.int32), self._make_token()
        _program(True).lower([token, *self], [], number).compile()
        for leaves in each:
            _program(donate).lower([token], leaves, number).compile()
            _looking.lower([*leaves, token], number).compile()

    def _make_token(self) -> jax.Array:
        with jax.transfer_guard_host_to_device("allow"):
            token: jax.Array = jax.device_put(np.zeros(1, np.float32), self._home)
        return token

    def _held(self) -> jax.Array:
        if self._token is None:
            given = [self._make_token(), *self._arrays]
            _, (self._token, *self._arrays) = work_on([], given, self._note, donate=True)
        return self._token

    def _note(self, addresses: Addresses) -> None:
        self._addresses = addresses[1:]

    def _check(self, addresses: Addresses) -> None:
        if not np.array_equal(addresses[1:], self._addresses):
            raise RuntimeError("this jaxlib has moved arrays that were handed to nobody: report it, with its version")


def look_at(leaves: Leaves, look: Work) -> jax.Array:
    """Have `look` called soon after with the addresses of the leaves, where it must not write; return what is ready
    once it has been, or never will be.

    leaves: float32, on one processor. Nobody writes to them, or has their memory, before `look` has returned.
    """

    def call(number: NDArray[np.int32]) -> tuple[Leaves, jax.Array]:
        done: jax.Array = _looking(leaves, number)
        return [done], done

    return _jobs.hand_over(look, call)[0]


@lru_cache(maxsize=1)
def is_possible() -> bool:
    """Return whether this jaxlib calls us; the first call asks."""
    try:
        handler = jax.ffi.pycapsule(ctypes.cast(_handler, ctypes.c_void_p))  # type: ignore[no-untyped-call]
        jax.ffi.register_ffi_target(_TARGET, handler, platform="cpu")
    except Exception as error:  # of whatever kind: it is of a version that we do not know
        logger.warning("this jaxlib runs no work of ours (%s): it is done beside it, in more passes over memory", error)
        return False
    atexit.register(_jobs.finish)
    return True


@lru_cache(maxsize=2)
def _program(donate: bool) -> Any:
    # jax gives the memory of arguments to results of their form in order: so `spent` comes first on both sides
    def run(spent: Leaves, leaves: Leaves, job: jax.Array) -> tuple[Leaves, jax.Array]:
        forms = [*spent, *leaves, job]
        same = {number: number for number in range(len(forms))}
        *made, done = jax.ffi.ffi_call(_TARGET, forms, input_output_aliases=same)(*forms)
        return made, _later(done, job)

    return jax.jit(run, donate_argnums=(0, 1) if donate else (0,))


@jax.jit
def _looking(leaves: Leaves, job: jax.Array) -> jax.Array:
    done = jax.ffi.ffi_call(_TARGET, job, input_output_aliases={len(leaves): 0})(*leaves, job)
    return _later(done, job)


def _later(done: jax.Array, job: jax.Array) -> jax.Array:
    """Return a number that is known once `done` is, and takes operations enough for a program that is run later."""
    return done + jnp.sum(jnp.arange(_DEAR, dtype=jnp.int32) ^ job, dtype=jnp.int32)


def _handle(address: int) -> int | None:
    """The handler that XLA calls. Returns the address of an error, None for none."""
    frame = _CallFrame.from_address(address)
    if frame.extension:
        extension = _MetadataExtension.from_address(frame.extension)
        if extension.type == _METADATA:
            version = extension.metadata.contents.version
            version.major, version.minor = _API_MAJOR, _API_MINOR
            return None
    if frame.stage != _EXECUTE:
        return None
    _jobs.stand_behind()
    try:
        addresses = _addresses_of(frame.arguments)
        with _usual_arithmetic():
            _jobs.run(ctypes.c_int32.from_address(int(addresses[-1])).value, addresses[:-1])
    except BaseException as error:
        logger.exception("work on parameters failed")
        text = f"{type(error).__name__}: {error}".encode()
        arguments = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, text, _INTERNAL)
        created: int | None = _Api.from_address(frame.api).create_error(ctypes.byref(arguments))
        return created
    return None


def _addresses_of(arguments: _Arguments) -> Addresses:
    """Return where the values of each argument begin."""
    size, place = arguments.size, _Buffer.data.offset
    buffers = np.frombuffer((ctypes.c_int64 * size).from_address(arguments.buffers), np.int64)
    apart = np.diff(buffers)
    if size > 1 and (apart == apart[0]).all() and apart[0] >= ctypes.sizeof(_Buffer):  # side by side, as XLA has them
        memory = (ctypes.c_char * int(buffers[-1] - buffers[0] + place + 8)).from_address(int(buffers[0]))
        return np.ndarray(size, np.int64, memoryview(memory), place, (int(apart[0]),)).copy()
    return np.array([ctypes.c_int64.from_address(buffer + place).value for buffer in buffers.tolist()], np.int64)


@contextlib.contextmanager
def _usual_arithmetic() -> Iterator[None]:
    """While this lasts, this thread keeps denormals, as numpy does anywhere; XLA's threads take them for zeros."""
    if _C is None:
        yield
        return
    kept = (ctypes.c_byte * _ENVIRONMENT_BYTES)()
    _C.fegetenv(kept)
    _C.fesetenv(ctypes.c_void_p(-1))  # FE_DFL_ENV of glibc and of musl
    try:
        yield
    finally:
        _C.fesetenv(kept)


def values_at(address: int, count: int) -> NDArray[np.float32]:
    """Return the float32[count] at an address that `work` was given, while it is at work."""
    if not count:
        return np.empty(0, np.float32)
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


_handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(_handle)
