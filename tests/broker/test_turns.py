"""Parameters are sent in turns, and have a bounded share of the port however many fetch them, and however often."""

from __future__ import annotations

import pytest

from zmqtrain.broker.snapshots import (
    AGAIN_SECONDS,
    AGAIN_SHARE,
    AT_ONCE,
    AT_ONCE_BYTES,
    FREE,
    PATIENCE_SECONDS,
    PATIENCE_TIMES,
    SHARE,
    Turns,
)
from zmqtrain.core.types import PeerId

SIZE, RATE = 100_000_000, 125e6
NODES = [PeerId(f"pc-{number}#1") for number in range(10)]


def given(turns: Turns, now: float, size: int = SIZE) -> list[PeerId]:
    """Give all turns that there are now."""
    peers = []
    while (peer := turns.next(size, RATE, now)) is not None:
        peers.append(peer)
    return peers


def serve(turns: Turns, now: float, size: int = SIZE) -> list[PeerId]:
    """Give all turns that there are now, to peers that take what they are sent at once."""
    peers = []
    while (peer := turns.next(size, RATE, now)) is not None:
        turns.used(peer, size, now)
        turns.took(peer)
        peers.append(peer)
    return peers


def served_again(turns: Turns, began: float, seconds: float, size: int) -> list[PeerId]:
    """Let time pass; return who was served, and asks again at once."""
    peers = []
    for number in range(round(10 * seconds)):
        for peer in serve(turns, began + number / 10, size):
            peers.append(peer)
            turns.wait(peer)
    return peers


def test_one_that_fetches_alone_never_waits() -> None:
    turns = Turns()
    assert turns.wait(NODES[0]) and given(turns, 0.0) == [NODES[0]] and turns.is_due(NODES[0])


def test_few_are_served_at_once_and_the_others_in_the_order_in_which_they_came() -> None:
    turns = Turns()
    for peer in NODES:
        assert turns.wait(peer) and not turns.wait(peer)
    assert given(turns, 0.0) == NODES[:AT_ONCE] and given(turns, 0.0) == []
    turns.used(NODES[1], SIZE, 0.0)
    turns.took(NODES[1])
    turns.took(NODES[0])  # it has been sent nothing yet
    assert given(turns, 0.0) == [NODES[2]]


def test_small_models_are_sent_to_many_at_once() -> None:
    turns = Turns()
    for peer in NODES:
        turns.wait(peer)
    assert given(turns, 0.0, AT_ONCE_BYTES // 5) == NODES[:5]


@pytest.mark.parametrize("size", [SIZE, 800_000])
def test_who_fetches_again_and_again_has_a_small_share_of_the_port_and_a_newcomer_does_not_wait_for_it(
    size: int,
) -> None:
    turns = Turns()
    for peer in NODES:
        turns.wait(peer)
    first = served_again(turns, 1.0, 30.0, size)
    assert {*first} == {*NODES}
    turns.wait(PeerId("newcomer#1"))
    assert serve(turns, 31.0, size)[0] == "newcomer#1"
    turns.wait(NODES[0])
    later = served_again(turns, 32.0, 50.0, size)
    assert 0 < len(later) * size <= AGAIN_SHARE * RATE * 51.0 + 2 * size


def test_ever_new_peers_have_a_bounded_share_of_the_port_beyond_the_first() -> None:
    turns, count = Turns(), 0
    for number in range(1000):
        turns.wait(PeerId(f"stranger-{number}#1"))
        count += len(serve(turns, number / 10))
    assert count >= FREE and count * SIZE <= SHARE * RATE * 100.0 + FREE * SIZE
    assert count * SIZE >= 0.9 * SHARE * RATE * 100.0


def test_who_was_served_longest_ago_is_next_of_those_that_fetch_again_and_after_a_minute_is_a_newcomer() -> None:
    turns = Turns()
    for number, peer in enumerate(NODES[:3]):
        turns.wait(peer)
        assert serve(turns, 1.0 + number) == [peer]
    for peer in (NODES[2], NODES[0], NODES[1]):
        turns.wait(peer)
    assert turns.next(SIZE, RATE, 30.0) == NODES[0]
    turns.withdraw(NODES[0])
    later = 2.5 + AGAIN_SECONDS
    assert turns.next(SIZE, RATE, later) == NODES[1]


def test_who_takes_nothing_of_what_it_is_sent_loses_its_place_and_one_that_is_sent_nothing_yet_does_not() -> None:
    turns = Turns()
    for peer in NODES[:4]:
        turns.wait(peer)
    slow, due = given(turns, 0.0)
    turns.used(slow, SIZE, 0.0)
    patience = PATIENCE_SECONDS + PATIENCE_TIMES * SIZE / RATE
    turns.look(SIZE, RATE, 0.9 * patience)
    assert turns.places == [slow, due]
    turns.look(SIZE, RATE, 1.1 * patience)
    assert turns.places == [due] and given(turns, 1.1 * patience) == [NODES[2]]


def test_one_snapshot_is_under_way_to_a_peer_however_often_it_asks_and_who_has_gone_holds_no_place() -> None:
    turns = Turns()
    turns.wait(NODES[0])
    given(turns, 0.0)
    turns.used(NODES[0], SIZE, 0.0)
    assert turns.wait(NODES[0]) and given(turns, 0.0) == []
    turns.withdraw(NODES[0])
    assert turns.places == [NODES[0]]
    turns.forget(NODES[0])
    assert turns.places == []
