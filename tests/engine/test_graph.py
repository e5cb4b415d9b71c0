"""The graph without threads: who may run when, in which order, and what becomes of those after a failure."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmqtrain.core.errors import EngineError
from zmqtrain.engine.graph import UNTOLD_FAILURES, Graph, State, Variable


@pytest.fixture
def graph() -> Graph:
    return Graph()


def variables(graph: Graph, names: str) -> list[Variable]:
    return [Variable(graph, None, name) for name in names]


def take_all(graph: Graph) -> list[str]:
    """Take all that may run now; return the names."""
    taken = []
    while (operation := graph.take()) is not None:
        taken.append(operation.name)
    return taken


def finish(graph: Graph, name: str, error: BaseException | None = None, value: object = None) -> list[str]:
    """Finish the running operation of this name; return the names of what is done by it."""
    (operation,) = [each for each in graph.unfinished.values() if each.name == name]
    assert operation.state is State.RUNNING
    return [each.name for each in graph.finish(operation, error, value)]


def test_who_reads_waits_for_who_wrote(graph: Graph) -> None:
    (a,) = variables(graph, "a")
    graph.push(None, mutate=[a], name="write")
    graph.push(None, read=[a], name="read")
    assert take_all(graph) == ["write"]
    finish(graph, "write")
    assert take_all(graph) == ["read"]


def test_who_writes_waits_for_all_who_read_before_and_those_read_at_once(graph: Graph) -> None:
    (a,) = variables(graph, "a")
    for name in ("read 1", "read 2"):
        graph.push(None, read=[a], name=name)
    graph.push(None, mutate=[a], name="write")
    assert take_all(graph) == ["read 1", "read 2"]
    finish(graph, "read 2")
    assert take_all(graph) == []
    finish(graph, "read 1")
    assert take_all(graph) == ["write"]


def test_writes_run_one_by_one_and_a_later_read_waits_for_the_last(graph: Graph) -> None:
    (a,) = variables(graph, "a")
    for name in ("write 1", "write 2"):
        graph.push(None, mutate=[a], name=name)
    graph.push(None, read=[a], name="read")
    assert take_all(graph) == ["write 1"]
    finish(graph, "write 1")
    assert take_all(graph) == ["write 2"]
    finish(graph, "write 2")
    assert take_all(graph) == ["read"]


def test_what_shares_nothing_runs_at_once_and_a_read_after_a_read_too(graph: Graph) -> None:
    a, b, c = variables(graph, "abc")
    graph.push(None, read=[a], mutate=[b], name="first")
    graph.push(None, read=[a], mutate=[c], name="second")
    graph.push(None, name="third")
    assert take_all(graph) == ["first", "second", "third"]


def test_a_reader_after_a_waiting_writer_does_not_overtake_it(graph: Graph) -> None:
    (a,) = variables(graph, "a")
    graph.push(None, read=[a], name="read 1")
    graph.push(None, mutate=[a], name="write")
    graph.push(None, read=[a], name="read 2")
    assert take_all(graph) == ["read 1"]


def test_the_highest_priority_is_taken_first_and_of_equals_what_came_first(graph: Graph) -> None:
    for name, priority in (("low", -1.0), ("first", 0), ("second", 0), ("high", 2.5)):
        graph.push(None, priority=priority, name=name)
    assert take_all(graph) == ["high", "first", "second", "low"]


def test_a_variable_in_both_is_changed_and_one_named_twice_counts_once(graph: Graph) -> None:
    a, b = variables(graph, "ab")
    operation = graph.push(None, read=[a, b, b], mutate=[a, a])
    assert (operation.read, operation.mutate) == ((b,), (a,))
    assert take_all(graph) == [operation.name]
    graph.push(None, read=[a])
    assert take_all(graph) == []


def test_a_version_counts_changes_and_the_returned_value_goes_to_the_first(graph: Graph) -> None:
    a, b = variables(graph, "ab")
    graph.push(None, mutate=[a, b], name="one")
    graph.push(None, read=[a], mutate=[b], name="two")
    take_all(graph)
    finish(graph, "one", value=7)
    take_all(graph)
    finish(graph, "two")
    assert (a.version, a.value, b.version, b.value) == (1, 7, 2, None)


def test_what_depends_on_a_failure_does_not_run_and_carries_it(graph: Graph) -> None:
    a, b, c, d = variables(graph, "abcd")
    error = ValueError("lost")
    graph.push(None, mutate=[a], name="fails")
    graph.push(None, read=[a], mutate=[b], name="reads it")
    graph.push(None, mutate=[b, c], name="writes after it")
    graph.push(None, mutate=[d], name="apart")
    assert take_all(graph) == ["fails", "apart"]
    assert finish(graph, "fails", error) == ["fails", "reads it", "writes after it"]
    finish(graph, "apart", value=1)
    for variable in (a, b, c):
        assert variable.version == (variable is a)
        with pytest.raises(ValueError, match="lost"):
            _ = variable.value
    assert d.value == 1
    assert graph.push(None, read=[c]).is_done() and take_all(graph) == []


def test_of_two_failures_the_one_pushed_first_is_carried_whichever_came_first(graph: Graph) -> None:
    a, b, c = variables(graph, "abc")
    graph.push(None, mutate=[a], name="first")
    graph.push(None, mutate=[b], name="second")
    graph.push(None, read=[b, a], mutate=[c], name="both")
    take_all(graph)
    finish(graph, "second", KeyError("second"))
    assert not c.failure
    finish(graph, "first", KeyError("first"))
    assert c.failure is not None and c.failure.operation == "first"


def test_a_failed_variable_is_mended_by_a_value(graph: Graph) -> None:
    a, b = variables(graph, "ab")
    graph.push(None, mutate=[a, b], name="fails")
    take_all(graph)
    finish(graph, "fails", ValueError())
    a.value = 5
    assert a.value == 5 and b.failure is not None
    graph.push(None, read=[a], name="runs")
    assert take_all(graph) == ["runs"]


def test_all_are_told_as_long_as_a_variable_carries_a_failure_and_once_otherwise(graph: Graph) -> None:
    (a,) = variables(graph, "a")
    graph.push(None, mutate=[a], name="kept")
    graph.push(None, name="leaves nothing")
    take_all(graph)
    finish(graph, "leaves nothing", KeyError())
    finish(graph, "kept", ValueError())
    assert [type(graph.tell_all()) for _ in range(3)] == [ValueError] * 3
    a.value = 0
    assert graph.tell_all() is None
    graph.push(None, name="nobody asked")
    take_all(graph)
    finish(graph, "nobody asked", KeyError())
    assert [type(graph.tell_all()) for _ in range(2)] == [KeyError, type(None)]


def test_who_was_told_at_a_variable_that_is_gone_is_not_told_again(graph: Graph) -> None:
    (a,) = variables(graph, "a")
    graph.push(None, mutate=[a], name="fails")
    take_all(graph)
    finish(graph, "fails", ValueError())
    with pytest.raises(ValueError):
        _ = a.value
    del a
    gc.collect()
    assert graph.tell_all() is None


def test_failures_that_nobody_asks_for_are_bounded(graph: Graph) -> None:
    for number in range(2 * UNTOLD_FAILURES):
        graph.push(None, name=str(number))
        take_all(graph)
        finish(graph, str(number), ValueError(number))
    assert len(graph._untold) == UNTOLD_FAILURES
    assert str(graph.tell_all()) == "0"


def test_an_error_keeps_the_traceback_of_where_it_happened_however_often_it_is_raised(graph: Graph) -> None:
    (a,) = variables(graph, "a")
    graph.push(None, mutate=[a], name="fails")
    take_all(graph)
    try:
        raise ValueError
    except ValueError as error:
        finish(graph, "fails", error)

    def depth() -> int:
        with pytest.raises(ValueError) as raised:
            _ = a.value
        return len(raised.traceback)

    assert len({depth() for _ in range(5)}) == 1


def test_a_value_is_not_seen_while_it_may_change_nor_set_while_it_is_read(graph: Graph) -> None:
    a, b = variables(graph, "ab")
    graph.push(None, read=[a], mutate=[b], name="adds")
    with pytest.raises(EngineError, match=r"b is about to be changed by adds \(ready to run\): call engine\.wait"):
        _ = b.value
    with pytest.raises(EngineError, match="a is in use by adds"):
        a.value = 1
    with pytest.raises(EngineError, match="b is in use by adds"):
        b.value = 1
    assert a.value is None
    take_all(graph)
    finish(graph, "adds", value=2)
    a.value = 1
    assert (a.value, b.value) == (1, 2)


def test_what_holds_up_an_operation_is_what_runs_before_it(graph: Graph) -> None:
    a, b, c = variables(graph, "abc")
    graph.push(None, mutate=[a], name="before")
    graph.push(None, name="apart")
    graph.push(None, read=[a], mutate=[b], name="between")
    graph.push(None, mutate=[c], name="also before", priority=-1)
    last = graph.push(None, read=[b, c], name="last")
    for _ in range(2):
        graph.take()
    assert [each.name for each in graph.holding_up([last])] == ["before", "also before"]
    assert last.after == (2, 3)


def test_what_is_dropped_never_runs_and_what_runs_may_end(graph: Graph) -> None:
    a, b, c = variables(graph, "abc")
    for variable in (a, b):
        graph.push(None, mutate=[variable], name=f"{variable.name} 1")
    graph.take()
    graph.push(None, mutate=[a, c], name="a 2")
    assert [each.name for each in graph.drop(EngineError("over"))] == ["b 1", "a 2"]
    assert graph.take() is None and list(graph.unfinished) == [0]
    finish(graph, "a 1", value=3)
    assert graph.unfinished == {} and graph.take() is None
    for variable in (a, b, c):
        with pytest.raises(EngineError, match="over"):
            _ = variable.value


def test_a_long_chain_of_the_skipped_is_no_deep_recursion(graph: Graph) -> None:
    (a,) = variables(graph, "a")
    for number in range(20_000):
        graph.push(None, mutate=[a], name=str(number))
    take_all(graph)
    assert len(finish(graph, "0", ValueError())) == 20_000


def test_nothing_is_held_of_what_is_done(graph: Graph) -> None:
    a, b = variables(graph, "ab")
    for number in range(10):
        graph.push(object(), read=[a], mutate=[b], name=str(number))
        take_all(graph)
        finish(graph, str(number))
    assert (graph.unfinished, a.readers, b.readers, a.writer, b.writer) == ({}, {}, {}, None, None)


names = st.lists(st.integers(0, 4), max_size=3)
pushes = st.lists(st.tuples(names, names, st.integers(-1, 1)), max_size=25)


@given(pushes, st.data())
def test_at_every_moment_just_that_may_run_which_shares_no_change_with_what_is_unfinished_before_it(
    program: list[tuple[list[int], list[int], int]], data: st.DataObject
) -> None:
    graph = Graph()
    held = variables(graph, "abcde")
    operations = [
        graph.push(None, [held[each] for each in read], [held[each] for each in mutate], priority)
        for read, mutate, priority in program
    ]

    def may_run(number: int) -> bool:
        read, mutate, _ = program[number]
        return not any(
            set(earlier_mutate) & {*read, *mutate} or {*earlier_read} & set(mutate)
            for earlier, (earlier_read, earlier_mutate, _) in enumerate(program[:number])
            if not operations[earlier].is_done()
        )

    while unfinished := [each for each in operations if not each.is_done()]:
        allowed = [each for each in unfinished if may_run(each.number)]
        assert {each for each in unfinished if each.state is not State.WAITING} == set(allowed)
        expected = min((each for each in allowed if each.state is State.READY), default=None)
        if expected is not None and data.draw(st.booleans()):
            assert graph.take() is expected
        elif running := [each for each in allowed if each.state is State.RUNNING]:
            graph.finish(data.draw(st.sampled_from(running)))
        else:
            assert graph.take() is expected
    assert [each.version for each in held] == [
        sum(number in mutate for _, mutate, _ in program) for number in range(len(held))
    ]
