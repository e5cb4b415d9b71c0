"""The engine with its threads: what runs at once, what waits for what, and what is told of it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

import zmqtrain as zt
from tests.engine.gates import SECONDS, Gate
from zmqtrain.core.errors import ConfigError


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
    while count.version < 50:  # the value is seen before its operation has ended
        engine.wait(count, SECONDS)
    assert engine.wait(count) == count.version == 50


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
