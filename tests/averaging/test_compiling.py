"""The machine code of a run's codecs: made before the run begins, by one program of a PC at a time."""

from __future__ import annotations

import errno
import fcntl
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, BinaryIO

import numba
import numpy as np
import pytest

from zmqtrain.averaging import compiling
from zmqtrain.codecs import fast
from zmqtrain.codecs.base import codec_from_spec
from zmqtrain.codecs.fragment import layout_of
from zmqtrain.codecs.payload import compile_loops, encode_payload
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import LeafSpec

SETTINGS = RunSettings(codec="topk:density=0.05+sign", broadcast_codec="ternary")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The codecs whose loops are asked for from now on, as in a process that has asked for none."""
    asked: list[str] = []

    def asks(name: str, loops: Callable[[], object]) -> Callable[[], object]:
        def ask() -> object:
            asked.append(name)
            return loops()

        return ask

    monkeypatch.setattr(compiling, "_compiled", set())
    monkeypatch.setattr(fast, "ternary_loops", asks("ternary", fast.ternary_loops))
    monkeypatch.setattr(fast, "topk_signs_loops", asks("topk+sign", fast.topk_signs_loops))
    return asked


def begin_run(values: int, settings: RunSettings = SETTINGS) -> None:
    compiling.compile_codecs(layout_of((LeafSpec("w", (values,), "float32"),), settings), settings)


@pytest.mark.parametrize("settings", [SETTINGS, RunSettings(shards=1)], ids=["said", "planned"])
def test_the_code_of_all_codecs_of_a_run_is_made_once(asked: list[str], settings: RunSettings) -> None:
    assert fast.kernels(fast.LARGE_SLAB) is not None, "numba is not installed: bin/test installs it"
    begin_run(fast.LARGE_SLAB, settings)
    assert {*asked} == {"ternary", "topk+sign"}
    asked.clear()
    begin_run(fast.LARGE_SLAB, settings)
    assert not asked


def test_leaves_that_are_small_alone_have_the_code_of_their_sum(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub steps parts of many leaves at once."""
    counts: list[int] = []
    monkeypatch.setattr(fast, "kernels", counts.append)
    for codec in ("int8", "float32"):
        compile_loops([codec_from_spec(codec)] * 100, [1000] * 100)
    assert counts.count(100_000) == 2


def test_a_small_model_of_many_leaves_does_not_wait_for_a_compiler(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "_tried", False)  # as in a process that has coded nothing yet
    monkeypatch.setattr(fast, "_load", lambda: asked.append("numba"))
    begin_run(fast.LARGE_SLAB - 1)
    codecs, counts = [codec_from_spec("ternary")] * 11, [fast.LARGE_SLAB - 200, *[10] * 10]
    encode_payload(codecs, [np.zeros(count, np.float32) for count in counts])
    assert not asked


def test_a_program_waits_for_another_that_compiles_but_not_without_end(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, failed = compiling._lock, threading.Semaphore(0)

    def counting(file: BinaryIO) -> bool:
        locked = lock(file)
        if not locked:
            failed.release()
        return locked

    monkeypatch.setattr(compiling, "_lock", counting)
    run = threading.Thread(target=begin_run, args=[fast.LARGE_SLAB])
    with open(fast.__file__, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        run.start()
        for _ in range(3):
            assert failed.acquire(timeout=60)
        assert run.is_alive() and not asked
    run.join(60)
    assert not run.is_alive() and compiling._compiled
    monkeypatch.setattr(compiling, "_compiled", set())
    monkeypatch.setattr(compiling, "WAIT_SECONDS", 0.0)
    with open(fast.__file__, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        begin_run(fast.LARGE_SLAB)  # the other stands still
    assert compiling._compiled


def test_where_no_file_can_be_locked_all_compile(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    begin_run(fast.LARGE_SLAB)
    assert asked and compiling._compiled


def test_code_for_which_the_disk_has_no_room_is_made_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    of, njit = fast._Compiler(numba), numba.njit

    def full(signature: Any, *, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise OSError(errno.ENOSPC, "No space left on device")
        return njit(signature, **options)

    def plus_one(value: int) -> int:
        return value + 1

    monkeypatch.setattr(of, "numba", SimpleNamespace(njit=full))
    compiled = of.jit(of.whole(of.whole), plus_one)
    assert compiled(1) == 2
    assert of.jit(of.whole(of.whole), compiled)(1) == 2, "and once more, after a try that failed further on"
