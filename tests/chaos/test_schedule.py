"""Schedules of faults: the same from the same seed, in order, fair to their targets, and in peace at both ends."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.chaos.schedule import BROKER, KINDS, RANGES, Fault, check_kinds, draw_schedule
from zmqtrain.core.errors import ConfigError

NODES = tuple(f"pc-{number}" for number in range(6))


def test_the_same_seed_gives_the_same_faults_and_another_one_others():
    assert draw_schedule(3, 300, NODES, KINDS) == draw_schedule(3, 300, NODES, KINDS)
    assert draw_schedule(3, 300, NODES, KINDS) != draw_schedule(4, 300, NODES, KINDS)


@settings(max_examples=examples(30))
@given(st.integers(0, 2**32), st.floats(20, 2000), st.integers(1, 9), st.integers(0, 3))
@example(272871158, 32.68210599897864, 6, 0)  # one begins with the last millisecond
def test_faults_are_in_order_within_their_ranges_and_fair(seed, seconds, count, broker_faults):
    nodes = NODES[:count] if count <= 6 else tuple(f"n{number}" for number in range(count))
    faults = draw_schedule(seed, seconds, nodes, KINDS, mean_seconds=4, broker_faults=broker_faults)
    assert list(faults) == sorted(faults)
    peace = min(0.1 * seconds, 15.0)
    begin, end = round(peace, 3), round(seconds - peace, 3)  # a schedule tells its times in milliseconds
    for fault in faults:
        drawn = RANGES[fault.kind]
        assert begin <= fault.at <= end and fault.ends_at <= end + 0.11
        assert fault.seconds <= drawn.seconds[1] and drawn.severity[0] <= fault.severity <= drawn.severity[1]
    assert [fault.kind for fault in faults if fault.target == BROKER] == ["kill"] * broker_faults
    of_nodes = [fault for fault in faults if fault.target != BROKER]
    for fault in of_nodes:
        beside = [other for other in of_nodes if other.at <= fault.at <= other.ends_at and other is not fault]
        assert len(beside) < max(1, len(nodes) // 3) and all(other.target != fault.target for other in beside)


def test_a_long_schedule_has_every_kind():
    assert {fault.kind for fault in draw_schedule(0, 1200, NODES, KINDS, mean_seconds=5)} == set(KINDS)


def test_the_faults_of_the_broker_are_one_in_each_part_of_the_run():
    faults = [fault for fault in draw_schedule(1, 1000, NODES, ("kill",), broker_faults=2) if fault.target == BROKER]
    assert len(faults) == 2 and faults[0].at < 500 < faults[1].at


def test_a_fault_reads_as_a_line():
    assert str(Fault(1.0, "stop", "pc-1", 12.34)) == "stop pc-1 for 12.3 s"
    assert str(Fault(1.0, "kill", BROKER)) == "kill broker"
    assert str(Fault(1.0, "clock", "pc-2", 0.0, -40.0)) == "clock pc-2, -40 days"


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ConfigError, match="there is no fault 'kil'; the faults are kill"):
        check_kinds(["kil"])
    with pytest.raises(ConfigError, match="no fault is named"):
        check_kinds([])
    assert check_kinds(["stop", "kill"]) == ("kill", "stop")
    with pytest.raises(ConfigError, match="takes some time"):
        draw_schedule(0, 0, NODES, KINDS)
    with pytest.raises(ConfigError, match="different names"):
        draw_schedule(0, 10, ("a", "a"), KINDS)
