"""The windows of one call: what may go out, what is lent, and what is said to be taken."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.collectives.calls import Inflow, Outflow, Part

pytestmark = pytest.mark.usefixtures("small_windows")


def flow_of(*lengths: int, bounded: bool = True, confirm: bool = False) -> Outflow:
    flow = Outflow(bounded, confirm)
    for code, length in enumerate(lengths):
        flow.put(memoryview(bytes(length)), code)
    return flow


def parts_of(flow: Outflow) -> list[tuple[int, int, int, int]]:
    """Return (bytes, total, start, code) of all that there is room for."""
    parts = iter(flow.next, None)
    return [(one.values.nbytes, one.total, one.start, one.code) for one in parts]


def test_what_is_long_is_cut_and_each_part_says_of_what() -> None:
    assert parts_of(flow_of(150, 0, 64)) == [
        (64, 150, 0, 0),
        (64, 150, 64, 0),
        (22, 150, 128, 0),
        (0, 0, 0, 1),
        (64, 64, 0, 2),
    ]


def test_there_is_room_again_when_something_was_taken() -> None:
    flow = flow_of(640)
    assert len(parts_of(flow)) == 4 and flow.next() is None
    flow.taken = 64
    assert parts_of(flow) == [(64, 640, 256, 0)]


def test_where_the_hub_has_the_window_there_is_always_room_and_nothing_is_lent() -> None:
    flow = flow_of(640, bounded=False, confirm=True)
    assert len(parts_of(flow)) == 10 and flow.is_done


def test_it_is_done_when_all_is_sent_and_what_was_not_copied_is_taken() -> None:
    flow = flow_of(64, 16)
    assert not flow.is_done
    parts_of(flow)
    assert (flow.sent, flow.lent) == (80, 64) and not flow.is_done
    flow.taken = 64
    assert flow.is_done, "the last 16 were copied"


def test_where_it_is_confirmed_what_was_copied_is_awaited_too() -> None:
    flow = flow_of(16, confirm=True)
    parts_of(flow)
    assert not flow.is_done
    flow.taken = 16
    assert flow.is_done


def test_what_was_taken_is_said_now_and_then_and_at_the_end_to_who_waits_for_it() -> None:
    flow = Inflow(1)
    flow.put(memoryview(bytes(64)), 100, 3, False)
    flow.put(memoryview(bytes(36)), 100, 3, False)
    assert list(flow.parts)[1][1:] == (100, 3)
    assert [flow.take(nbytes) for nbytes in (63, 1, 36)] == [False, True, False] and flow.taken == 100
    assert flow.finish() and not flow.finish()


def test_who_sent_copies_only_need_not_hear_that_the_last_are_taken() -> None:
    flow = Inflow(1)
    flow.put(memoryview(bytes(16)), 16, 3, False)
    assert not flow.take(16) and not flow.finish()
    flow.put(memoryview(b""), 0, 3, True)
    assert flow.finish(), "unless it asked for it"


def test_the_hub_hears_nothing() -> None:
    flow = Inflow(1, reports=False)
    flow.put(memoryview(bytes(64)), 64, 3, True)
    assert not flow.take(640) and not flow.finish()


@settings(max_examples=examples(60))
@given(st.lists(st.integers(0, 400), max_size=8), st.booleans())
def test_both_ends_together_move_everything_within_the_window(lengths: list[int], confirm: bool) -> None:
    out, into, way = flow_of(*lengths, confirm=confirm), Inflow(1), list[Part]()
    moved = 0
    while True:
        while (part := out.next()) is not None:
            way.append(part)
        assert out.sent - out.taken < 256 + 64
        if not way:
            break
        part = way.pop(0)
        nbytes = part.values.nbytes
        into.put(part.values, part.total, part.code, confirm)
        moved += nbytes
        if into.take(nbytes):
            out.taken = into.taken
    if into.finish():
        out.taken = into.taken
    assert moved == sum(lengths) and out.is_done
