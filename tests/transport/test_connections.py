"""The bounds of the connections at a port: who has too many loses its own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.transport.pacing import ConnectionLimits, Connections, Cut

SMALL = ConnectionLimits(total=12, per_address=6, half_open=6, half_open_per_address=3, handshake_seconds=5.0)


def summary(cuts: list[Cut]) -> list[tuple[int, str]]:
    return [(cut.connection.descriptor, cut.reason) for cut in cuts]


def test_an_address_with_too_many_half_open_connections_loses_its_oldest() -> None:
    table = Connections(SMALL)
    for descriptor in (1, 2, 3):
        assert table.accepted(descriptor, "a", descriptor, now=0.0) == []
    assert summary(table.accepted(4, "a", 4, now=1.0)) == [(1, "half-open")]
    assert (len(table), table.half_open) == (3, 3)


def test_a_flood_of_one_address_costs_no_connection_of_another() -> None:
    table = Connections(SMALL)
    table.accepted(100, "quiet", 1, now=0.0)
    for descriptor in range(50):
        assert 100 not in dict(summary(table.accepted(descriptor, "flood", descriptor, now=0.0)))
    assert table.get(100) is not None


def test_too_many_half_open_in_all_cost_the_address_that_has_most() -> None:
    table = Connections(SMALL)
    for descriptor, address in enumerate(["a", "b", "b", "c", "c", "c"]):
        assert table.accepted(descriptor, address, descriptor, now=0.0) == []
    assert summary(table.accepted(9, "d", 9, now=0.0)) == [(3, "half-open")]


def test_who_was_heard_is_not_half_open_and_who_was_not_is_so_however_long_ago_it_came() -> None:
    table = Connections(SMALL)
    for descriptor in (1, 2, 3):
        table.accepted(descriptor, "a", descriptor, now=0.0)
        table.proved(descriptor)
    assert table.half_open == 0
    for descriptor in (4, 5, 6):
        table.accepted(descriptor, "b", descriptor, now=0.0)
    assert summary(table.accepted(7, "b", 7, now=1e6)) == [(4, "half-open")] and table.half_open == 3


@pytest.mark.parametrize("greeted", [False, True])
def test_silent_connections_that_fill_the_port_lose_to_a_new_one_however_old_they_are(greeted: bool) -> None:
    table = Connections(ConnectionLimits(total=12, per_address=6, half_open=20, half_open_per_address=6))
    table.accepted(0, "honest", 1, now=0.0)
    table.proved(0), table.spoke(0)
    for descriptor in range(1, 12):
        table.accepted(descriptor, f"silent {descriptor % 2}", descriptor, now=1.0)
        if greeted:  # the handshake is done and the first, empty message has come
            table.proved(descriptor)
    assert summary(table.accepted(20, "new", 20, now=100.0)) == [(1, "half-open")]
    table.proved(20), table.spoke(20)
    for descriptor in range(21, 60):
        cuts = table.accepted(descriptor, f"silent {descriptor % 3}", descriptor, now=200.0)
        assert not {0, 20} & {one for one, _ in summary(cuts)}
    assert table.get(0) is not None and table.get(20) is not None


def test_an_address_has_so_many_connections_and_no_more_however_well_known() -> None:
    table = Connections(SMALL)
    for descriptor in range(6):
        assert table.accepted(descriptor, "a", descriptor, now=0.0) == []
        table.proved(descriptor)
    assert summary(table.accepted(6, "a", 6, now=0.0)) == [(6, "address")]
    table.closed(0)
    assert table.accepted(7, "a", 7, now=0.0) == []
    assert [one.descriptor for one in table.of("a")] == [1, 2, 3, 4, 5, 7]


def test_when_all_places_are_taken_by_who_has_spoken_the_new_one_goes() -> None:
    table = Connections(SMALL)
    for descriptor in range(12):
        table.accepted(descriptor, f"address {descriptor // 6}", descriptor, now=0.0)
        table.proved(descriptor), table.spoke(descriptor)
    assert summary(table.accepted(12, "c", 12, now=0.0)) == [(12, "full")]


@settings(max_examples=examples(40))
@given(
    st.lists(
        st.tuples(st.sampled_from("apsc"), st.integers(0, 30), st.sampled_from("xyz"), st.floats(0, 3)), max_size=120
    )
)
def test_no_bound_is_ever_passed(events: list[tuple[str, int, str, float]]) -> None:
    table, now = Connections(SMALL), 0.0
    open_now: dict[int, str] = {}
    for kind, descriptor, address, passed in events:
        now += passed
        if kind == "a":
            open_now[descriptor] = address
            for cut in table.accepted(descriptor, address, 1, now):
                del open_now[cut.connection.descriptor]
        elif kind == "p":
            table.proved(descriptor)
        elif kind == "s":
            table.spoke(descriptor)
        else:
            table.closed(descriptor)
            open_now.pop(descriptor, None)
        assert len(table) == len(open_now) <= SMALL.total
        assert 0 <= table.half_open <= min(SMALL.half_open, len(table))
        for one in "xyz":
            assert len(table.of(one)) == sum(of == one for of in open_now.values()) <= SMALL.per_address
