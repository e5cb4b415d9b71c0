"""The engine with its threads: any program ends as its serial execution does; who waits is told; nobody hangs."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zmqtrain as zt
from zmqtrain.engine.graph import Variable
from zmqtrain.errors import ConfigError, EngineError, EngineTimeout

SECONDS = 20.0
"""A wait that takes longer has failed; none of them does."""


@pytest.fixture
def engine() -> Iterator[zt.Engine]:
    with zt.Engine(2, name="test") as engine:
        yield engine


class Gate:
    """An operation that has begun, and goes on when it is let."""

    def __init__(self) -> None:
        self._begun, self._open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self._begun.set()
        assert self._open.wait(SECONDS)

    def wait_begun(self) -> None:
        assert self._begun.wait(SECONDS)

    def open(self) -> None:
        self._open.set()


@dataclass(frozen=True)
class Step:
    """One operation of a random program. way: how it ends."""

    read: list[int]
    mutate: list[int]
    priority: int
    way: str
    fails: bool


WAYS = ("push", "at once", "later")
VARIABLES = 4
variable_lists = st.lists(st.integers(0, VARIABLES - 1), max_size=3)
steps = st.builds(
    Step,
    variable_lists,
    variable_lists,
    st.integers(-1, 1),
    st.sampled_from(WAYS),
    st.integers(0, 7).map(lambda n: not n),
)


class Broken(Exception):
    """What a failing step raises."""


def run_serially(program: list[Step]) -> list[Any]:
    """Return what each variable holds in the end: (version, value, None), or (version, None, the step that failed)."""
    held: list[Any] = [(0, index, None) for index in range(VARIABLES)]
    for number, step in enumerate(program):
        touched = sorted({*step.read, *step.mutate})
        if failures := [held[each][2] for each in touched if held[each][2] is not None]:
            for each in step.mutate:
                held[each] = (held[each][0], None, min(failures))
            continue
        seen = tuple(held[each][1] for each in touched)
        for each in set(step.mutate):
            version = held[each][0] + 1
            held[each] = (version, None, number) if step.fails else (version, hash((number, each, seen)), None)
    return held


def push_step(engine: zt.Engine, pool: ThreadPoolExecutor, held: list[Variable], number: int, step: Step) -> None:
    touched = sorted({*step.read, *step.mutate})
    read, mutate = [held[each] for each in step.read], [held[each] for each in step.mutate]

    def compute() -> Any:
        if step.fails:
            raise Broken(number)
        seen = tuple(held[each].value for each in touched)
        for each in step.mutate:
            held[each].value = hash((number, each, seen))
        return hash((number, step.mutate[0], seen)) if step.mutate else None

    def compute_async(on_complete: Any) -> None:
        try:
            value, error = compute(), None
        except Broken as broken:
            value, error = None, broken
        if step.way == "later":
            pool.submit(on_complete, error, value)
        elif error is not None:
            raise error
        else:
            on_complete(value=value)

    if step.way == "push":
        engine.push(compute, read, mutate, step.priority)
    else:
        engine.push_async(compute_async, read, mutate, step.priority)


def outcome(engine: zt.Engine, variable: Variable) -> Any:
    try:
        value = engine.wait(variable, SECONDS)
    except Broken as broken:
        return variable.version, None, broken.args[0]
    return variable.version, value, None


def run_engine(program: list[Step], workers: int) -> tuple[list[Any], int | None]:
    """Return what each variable holds in the end, and which failure `wait_all` raised."""
    with ThreadPoolExecutor(2) as pool:
        engine = zt.Engine(workers)
        held = [engine.variable(index) for index in range(VARIABLES)]
        for number, step in enumerate(program):
            push_step(engine, pool, held, number, step)
        raised = None
        try:
            engine.wait_all(SECONDS)
        except Broken as broken:
            raised = broken.args[0]
        results = [outcome(engine, variable) for variable in held]
        engine.close(drop=True)
        return results, raised


@settings(max_examples=80, deadline=None)
@given(st.lists(steps, max_size=30), st.integers(1, 4))
def test_any_program_ends_in_the_state_of_its_serial_execution(program: list[Step], workers: int) -> None:
    results, raised = run_engine(program, workers)
    expected = run_serially(program)
    assert results == expected
    carried = [failed for _, _, failed in expected if failed is not None]
    assert (raised is not None) >= bool(carried)
    assert raised is None or (program[raised].fails and raised <= min(carried, default=raised))


def test_a_long_program_on_many_threads_ends_as_its_serial_execution() -> None:
    program = [Step([n * 7 % 4], [n * n % 4] if n % 3 else [], n % 3 - 1, WAYS[n % 3], False) for n in range(3_000)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        assert run_engine(program, 16) == (run_serially(program), None)
    finally:
        sys.setswitchinterval(before)


def test_many_threads_push_and_wait_at_once(engine: zt.Engine) -> None:
    total = engine.variable(0)

    def add() -> None:
        total.value += 1

    def push_and_wait() -> None:
        for _ in range(100):
            engine.push(add, mutate=[total])
            engine.wait(total, SECONDS)
        engine.wait_all(SECONDS)

    threads = [threading.Thread(target=push_and_wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert engine.wait(total) == total.version == 800


def test_operations_that_share_nothing_run_at_once(engine: zt.Engine) -> None:
    meeting = threading.Barrier(2)
    for _ in range(2):
        engine.push(lambda: meeting.wait(SECONDS))
    engine.wait_all(SECONDS)


def test_an_asynchronous_operation_holds_no_thread() -> None:
    ends: list[Any] = []
    with zt.Engine(1) as engine:
        sent = engine.variable()
        engine.push_async(ends.append, mutate=[sent])
        computed = engine.variable()
        engine.push(lambda: "computed", mutate=[computed])
        assert engine.wait(computed, SECONDS) == "computed"
        ends[0](value="sent")
        assert engine.wait(sent, SECONDS) == "sent"


class FakeRequest:
    """A request that is over when it is told so."""

    def __init__(self) -> None:
        self.call: Any = None
        self.followed = threading.Event()
        self.error: Exception | None = None

    def add_done_callback(self, call: Any) -> None:
        self.call = call
        self.followed.set()

    def end(self, error: Exception | None = None) -> None:
        assert self.followed.wait(SECONDS)
        self.error = error
        self.call(self)

    def wait(self) -> str:
        if self.error is not None:
            raise self.error
        return "result"


def test_an_operation_ends_with_its_request_well_or_not(engine: zt.Engine) -> None:
    good, bad = FakeRequest(), FakeRequest()
    results = [engine.variable(), engine.variable()]
    for request, result in zip((good, bad), results, strict=True):
        engine.push_request(lambda request=request: request, mutate=[result])
    good.end()
    bad.end(OSError("cable"))
    assert engine.wait(results[0], SECONDS) == "result"
    with pytest.raises(OSError, match="cable"):
        engine.wait(results[1], SECONDS)
    results[1].value = None


def test_an_operation_whose_request_cannot_begin_has_failed(engine: zt.Engine) -> None:
    a = engine.variable()
    engine.push_request(lambda: {}["request"], mutate=[a])
    with pytest.raises(KeyError):
        engine.wait(a, SECONDS)
    a.value = None


def test_priorities_decide_when_there_are_too_few_threads() -> None:
    order: list[int] = []
    with zt.Engine(1) as engine:
        gate = Gate()
        engine.push(gate)
        gate.wait_begun()
        for priority in (0, 2, 1, 2):
            engine.push(lambda priority=priority: order.append(priority), priority=priority)
        gate.open()
    assert order == [2, 2, 1, 0]


def test_an_operation_may_push_others_that_depend_on_it(engine: zt.Engine) -> None:
    count = engine.variable(0)

    def again() -> None:
        count.value += 1
        if count.value < 50:
            engine.push(again, mutate=[count])

    engine.push(again, mutate=[count])
    while engine.wait(count, SECONDS) < 50:
        pass
    assert count.version == 50


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


def test_control_c_ends_a_wait() -> None:
    with pytest.raises(KeyboardInterrupt), zt.Engine(1) as engine:
        never, main = engine.variable(), threading.get_ident()
        engine.push_async(lambda on_complete: signal.pthread_kill(main, signal.SIGINT), mutate=[never])
        engine.wait(never, SECONDS)


def test_an_exit_inside_an_operation_is_an_exception_like_others(engine: zt.Engine) -> None:
    a = engine.variable()
    engine.push(sys.exit, mutate=[a])
    with pytest.raises(SystemExit):
        engine.wait(a, SECONDS)
    a.value = None


def test_idle_threads_hold_nothing_back(engine: zt.Engine) -> None:
    class Large:
        freed = threading.Event()

        def __del__(self) -> None:
            self.freed.set()

    made = engine.variable()
    engine.push(Large, mutate=[made])
    engine.wait(made, SECONDS)
    made.value = None
    assert Large.freed.wait(SECONDS)


def test_a_trace_shows_every_operation_that_ran(tmp_path: Path) -> None:
    with zt.Engine(2, name="rank 0", trace=True) as engine:
        a, b, c = (engine.variable(name=name) for name in "abc")
        gate = Gate()
        engine.push(gate, mutate=[a], name="compute")
        gate.wait_begun()
        engine.push_async(lambda on_complete: on_complete(), read=[a], mutate=[b], name="send")
        gate.open()
        engine.push(lambda: 1 / 0, mutate=[c], name="fail", category="codec")
        engine.push(lambda: None, mutate=[c], name="skipped")
        with pytest.raises(ZeroDivisionError):
            engine.wait_all(SECONDS)
        c.value = None
        engine.write_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = {event["name"]: event for event in trace if event["ph"] == "X"}
    assert {name: event["cat"] for name, event in slices.items()} == {
        "compute": "compute",
        "send": "network",
        "fail": "codec",
    }
    assert "ZeroDivisionError" in slices["fail"]["args"]["error"]
    assert slices["send"]["args"]["read"] == ["a"] and slices["send"]["args"]["mutate"] == ["b"]
    tracks = {event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert "network 0" in tracks and any(name.startswith("rank 0 worker") for name in tracks)
    assert [event["id"] for event in trace if event["ph"] == "s"] == ["0-1"]
    assert slices["compute"]["ts"] + slices["compute"]["dur"] <= slices["send"]["ts"] + 1e-2


def test_without_a_trace_none_is_written(engine: zt.Engine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Engine\(trace=True\)"):
        engine.write_trace(tmp_path / "trace.json")
