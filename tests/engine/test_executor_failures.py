"""The engine with its threads when something is wrong: who waits is told, what cannot be is refused, nobody hangs."""

from __future__ import annotations

import gc
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import zmqtrain as zt
from tests.engine.gates import SECONDS, Gate
from zmqtrain.core.errors import ConfigError, EngineError, EngineTimeout


def test_an_exception_is_raised_to_who_waits_and_says_where_it_comes_from(engine: zt.Engine) -> None:
    a, b, c = (engine.variable(name=name) for name in "abc")
    engine.push(lambda: 1 / 0, mutate=[a], name="divide")
    engine.push(lambda: "not run", read=[a], mutate=[b])
    engine.push(lambda: "run", mutate=[c])
    for variable in (b, a, b):
        with pytest.raises(ZeroDivisionError) as raised:
            engine.wait(variable, SECONDS)
        assert raised.value.__notes__ == ["in divide, an operation of test"]
    assert engine.wait(c, SECONDS) == "run"
    with pytest.raises(ZeroDivisionError):
        engine.wait_all(SECONDS)
    a.value, b.value = 1, 2
    engine.push(lambda: a.value + b.value, read=[a, b], mutate=[c])
    assert engine.wait(c, SECONDS) == 3


def test_an_error_given_to_on_complete_is_raised_to_who_waits(engine: zt.Engine) -> None:
    a, b = engine.variable(name="a"), engine.variable()
    engine.push_async(lambda on_complete: on_complete(OSError("cable")), mutate=[a])
    with pytest.raises(OSError, match="cable"):
        engine.wait(a, SECONDS)
    engine.push_async(lambda on_complete: on_complete("result"), mutate=[b])
    with pytest.raises(EngineError, match=r"got 'result' for an error: .* on_complete\(value="):
        engine.wait(b, SECONDS)
    a.value = b.value = None


def test_the_end_of_an_engine_raises_what_nobody_was_told_of() -> None:
    with pytest.raises(KeyError, match="unseen"), zt.Engine(1) as engine:
        engine.push(lambda: {}["unseen"])


def test_an_end_is_told_once(engine: zt.Engine, caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def twice(on_complete: Any) -> None:
        on_complete()
        with pytest.raises(EngineError, match="on_complete of reckless was called twice"):
            on_complete()
        told.append("twice")
        raise ValueError("afterwards")

    a = engine.variable()
    with caplog.at_level(logging.ERROR):
        engine.push_async(twice, mutate=[a], name="reckless")
        engine.wait_all(SECONDS)
        engine.close()
    assert told == ["twice"] and a.version == 1
    assert "reckless raised after it had called on_complete" in caplog.text


@pytest.mark.parametrize("what", ["wait", "wait_all", "close"])
def test_to_wait_inside_an_operation_is_refused(engine: zt.Engine, what: str) -> None:
    a, b = engine.variable(name="a"), engine.variable(name="b")
    calls = {"wait": lambda: engine.wait(a), "wait_all": engine.wait_all, "close": engine.close}
    engine.push(calls[what], read=[a], mutate=[b], name="impatient")
    with pytest.raises(EngineError, match=rf"impatient calls {what}.*: to wait inside an operation"):
        engine.wait(b, SECONDS)
    b.value = None


def test_an_operation_touches_only_what_it_has_declared(engine: zt.Engine) -> None:
    a, b, c = (engine.variable(0, name) for name in "abc")

    def set_a() -> None:
        a.value = 1

    engine.push(lambda: c.value, read=[a], mutate=[b], name="looks")
    with pytest.raises(EngineError, match="looks looks at c, which is neither in its read nor its mutate"):
        engine.wait(b, SECONDS)
    b.value = 0
    engine.push(set_a, read=[a], mutate=[b], name="sets")
    with pytest.raises(EngineError, match="sets sets a, which is not in its mutate"):
        engine.wait(b, SECONDS)
    b.value = 0
    gate = Gate()
    engine.push(gate, read=[a], mutate=[b], name="busy")
    gate.wait_begun()
    assert a.value == 0
    with pytest.raises(EngineError, match=r"b is about to be changed by busy \(running\)"):
        _ = b.value
    gate.open()
    assert engine.wait(b, SECONDS) == 0


def test_what_cannot_be_pushed_is_refused_and_changes_nothing(engine: zt.Engine) -> None:
    a = engine.variable(name="a")

    async def coroutine() -> None:
        pass

    with zt.Engine(1) as other, pytest.raises(EngineError, match="a is a variable of another engine"):
        other.push(print, read=[a])
    for fn in (None, coroutine):
        with pytest.raises(EngineError, match="cannot be pushed"):
            engine.push(fn)  # type: ignore[arg-type]
    for read in ([1], "a"):
        with pytest.raises(EngineError, match="is no variable: make one with"):
            engine.push(print, read=read)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"mutate is a list: mutate=\[\.\.\.\] with a in it"):
        engine.push(print, mutate=a)  # type: ignore[arg-type]
    for priority in (float("nan"), "high", None):
        with pytest.raises(EngineError, match="a priority is a number"):
            engine.push(print, priority=priority)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="is no variable"):
        engine.wait("a")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="workers must be at least 1, got 0"):
        zt.Engine(0)
    assert a.version == 0 and engine.wait(a) is None


def test_after_its_end_an_engine_takes_nothing_and_still_tells_values() -> None:
    engine = zt.Engine(2)
    a = engine.variable()
    engine.push(lambda: 1, mutate=[a])
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match=r"late was pushed to an engine that is closed: push before close\(\)"):
        engine.push(lambda: 2, mutate=[a], name="late")
    assert engine.wait(a) == a.value == 1
    assert not any(thread.is_alive() for thread in engine._threads)


def test_a_wait_that_runs_out_names_what_holds_it_up() -> None:
    engine = zt.Engine(1)
    sent, computed, waiting = (engine.variable(name=name) for name in ("sent", "computed", "waiting"))
    gate = Gate()
    engine.push_async(lambda on_complete: None, mutate=[sent], name="allreduce 3")
    engine.push(gate, mutate=[computed], name="compute 4", priority=-1)
    gate.wait_begun()
    engine.push(lambda: None, name="innocent")
    engine.push(lambda: None, read=[sent, computed], mutate=[waiting])
    with pytest.raises(
        EngineTimeout, match=r"for waiting: allreduce 3 has run for .* s and on_complete was not"
    ) as late:
        engine.wait(waiting, 0.0)
    assert late.value.operations == ("allreduce 3", "compute 4")
    with pytest.raises(EngineTimeout, match=r"compute 4 has run for .* s; innocent has no free worker of 1"):
        engine.wait_all(0.01)
    with pytest.raises(EngineTimeout):
        engine.close(timeout_seconds=0.0)
    with pytest.raises(EngineError, match="was closed before this was run"):
        engine.wait(waiting, SECONDS)
    gate.open()


def test_a_with_that_is_left_by_an_exception_waits_for_nothing() -> None:
    ends: list[Any] = []
    ran: list[int] = []
    with pytest.raises(ValueError, match="of the user"), zt.Engine(1) as engine:
        a = engine.variable()
        engine.push_async(ends.append, mutate=[a])
        engine.push(lambda: ran.append(1), mutate=[a])
        raise ValueError("of the user")
    with pytest.raises(EngineError, match="was closed before this was run"):
        engine.wait(a, SECONDS)
    for end in ends:
        end()
    assert ran == []


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Garbage is not collected: a Ctrl-C in a callback of that (jax has one, weak sets have) is raised to nobody."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_control_c_ends_a_wait() -> None:
    with pytest.raises(KeyboardInterrupt), zt.Engine(1) as engine:
        never, main = engine.variable(), threading.get_ident()
        engine.push_async(lambda on_complete: signal.pthread_kill(main, signal.SIGINT), mutate=[never])
        engine.wait(never, 2.0)  # so long it lasts if the signal comes just before the wait begins


def test_an_exit_inside_an_operation_is_an_exception_like_others(engine: zt.Engine) -> None:
    a = engine.variable()
    engine.push(sys.exit, mutate=[a])
    with pytest.raises(SystemExit):
        engine.wait(a, SECONDS)
    a.value = None
