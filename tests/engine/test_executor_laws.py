"""The engine with its threads: any program ends as its serial execution does."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import zmqtrain as zt
from tests.engine.gates import SECONDS
from tests.grids import examples
from zmqtrain.engine.graph import Variable


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


@settings(max_examples=examples(80))
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
