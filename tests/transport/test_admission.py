"""Who may come in, and who speaks as whom."""

from __future__ import annotations

import pytest

from zmqtrain.core.types import Lane, PeerId
from zmqtrain.transport.admission import Admission, Seats, first_life, next_life

A, B = PeerId("a#1"), PeerId("b#2")


def test_nobody_has_a_name_before_it_is_known_who_comes_in() -> None:
    admission = Admission()
    assert not admission.known and admission.name_of("key") is None
    assert admission.change({"key": "pc1"}) == {}
    assert admission.known and admission.name_of("key") == "pc1"


def test_who_loses_a_name_or_gets_another_is_told_of() -> None:
    admission = Admission({"1": "pc1", "2": "pc2", "3": "pc3"})
    assert admission.change({"1": "pc1", "2": "other"}) == {"2": "pc2", "3": "pc3"}
    assert (admission.name_of("2"), admission.name_of("3")) == ("other", None)


def test_a_peer_id_that_one_name_opened_is_taken_by_no_other_even_when_it_has_left() -> None:
    seats = Seats()
    assert seats.hear(A, "pc1", "k1", b"1", 7, number=1) == ("", set())
    assert seats.hear(A, "pc2", "k2", b"2", 8, number=2)[0] == "name"
    seats.left(A, 7)
    assert seats.hear(A, "pc2", "k2", b"3", 9, number=3)[0] == "name"
    assert seats.hear(A, "pc1", "a new key of the same name", b"4", 10, number=4)[0] == ""


def test_a_later_life_ends_the_connections_of_the_former_whose_last_words_are_not_heard() -> None:
    seats = Seats()
    for descriptor in (7, 8):
        assert seats.hear(A, "pc1", "k1", b"1", descriptor, number=descriptor)[0] == ""
    assert seats.hear(A, "pc1", "k1", b"2", 9, number=9) == ("", {7, 8})
    assert seats.hear(A, "pc1", "k1", b"1", 7, number=7) == ("life", {7})
    assert seats.hear(A, "pc1", "k1", b"1", 8, number=-1) == ("life", {8})  # its connection is gone already
    seat = seats.get(A)
    assert seat is not None and seat.life == b"2" and seat.descriptors == {9: 9}


def test_a_life_that_connects_anew_is_heard_again() -> None:
    seats = Seats()
    seats.hear(A, "pc1", "k1", b"1", 7, number=1)
    seats.hear(A, "pc1", "k1", b"2", 8, number=2)
    assert seats.hear(A, "pc1", "k1", b"1", 7, number=3) == ("", {8})


@pytest.mark.parametrize(("used_again", "other"), [(1, 2), (2, 1)])
def test_last_words_of_a_channel_that_was_opened_anew_end_no_connection_of_it(used_again: int, other: int) -> None:
    seats, former = Seats(), first_life()
    life = next_life(former)
    # a former connection is gone, and one of the two new ones, neither of which is heard yet, has its descriptor
    assert seats.hear(A, "pc1", "k1", former, used_again, number=used_again) == ("", set())
    assert seats.hear(A, "pc1", "k1", life, other, number=other) == ("", set())
    assert seats.hear(A, "pc1", "k1", life, used_again, number=used_again) == ("", set())
    assert seats.hear(A, "pc1", "k1", former, 9, number=3) == ("life", set())


def test_of_those_that_have_left_the_last_ones_are_remembered_and_nobody_who_is_here_is_forgotten() -> None:
    seats, others = Seats(departed=2), [PeerId(f"c#{number}") for number in range(5)]
    seats.hear(A, "pc1", "k1", b"1", 7, number=1)
    seats.hear(B, "pc2", "k2", b"1", 8, number=2)
    seats.left(B, 8)
    for number, other in enumerate(others, start=3):
        seats.hear(other, "pc3", "k3", b"1", 9, number=number)
        seats.left(other, 9)
    assert len(seats) == 3 and seats.get(B) is None and seats.with_key("k1") == [A]
    assert [other for other in others if seats.get(other)] == others[-2:]
    seats.left(A, 7)
    assert seats.with_key("k1") == [] and seats.get(A) is not None


def test_who_is_heard_over_a_connection_that_has_ended_is_not_here() -> None:
    seats = Seats(departed=1)
    for number in range(3):
        assert seats.hear(PeerId(f"c#{number}"), "pc1", "k1", b"1", 7, number=-1) == ("", set())
    assert len(seats) == 1 and seats.with_key("k1") == []
    seats.hear(PeerId("c#2"), "pc1", "k1", b"1", 8, number=4)
    seats.hear(A, "pc1", "k1", b"1", 7, number=-1)
    assert seats.get(PeerId("c#2")) is not None


def test_a_lane_is_awaited_for_a_while_from_the_first_word_of_a_life_and_never_again_once_it_was_heard() -> None:
    seats = Seats()
    assert not seats.awaits(A, Lane.BULK, 5.0, now=100.0)  # it was never here
    for life, began in ((b"1", 100.0), (b"2", 200.0)):
        for said in (began, began + 4.0):  # what it says later does not make it younger
            seats.hear(A, "pc1", "k1", life, 7, number=int(began))
            seats.note_lane(A, Lane.CONTROL, said)
        assert seats.awaits(A, Lane.BULK, 5.0, began + 5.0) and not seats.awaits(A, Lane.BULK, 5.0, began + 5.1)
        assert not seats.awaits(A, Lane.CONTROL, 5.0, began)
        seats.note_lane(A, Lane.BULK, began + 4.0)
        assert not seats.awaits(A, Lane.BULK, 5.0, began + 4.0)
        seats.left(A, 7)
    seats.hear(A, "pc1", "k1", b"2", 8, number=300)  # the same life, which had lost all its connections
    seats.note_lane(A, Lane.CONTROL, 300.0)
    assert seats.awaits(A, Lane.BULK, 5.0, 305.0)
    seats.left(A, 8)
    assert not seats.awaits(A, Lane.BULK, 5.0, 300.0)  # nobody is there who could bring it
    seats.note_lane(B, Lane.CONTROL, 300.0)
    assert not seats.awaits(B, Lane.BULK, 5.0, 300.0)  # it has left, and is forgotten


def test_a_peer_id_stays_with_the_name_under_which_it_came_to_a_former_life_of_the_hub() -> None:
    seats = Seats()
    seats.owner_of = lambda peer: "pc1" if peer == A else ""
    assert seats.hear(A, "pc2", "k2", b"1", 7, number=1) == ("name", set()) and len(seats) == 0
    assert seats.hear(B, "pc2", "k2", b"1", 7, number=1)[0] == "" == seats.hear(A, "pc1", "k1", b"1", 8, number=2)[0]
    seats = Seats()
    seats.owner_of = lambda peer: "pc1"
    assert seats.hear(A, "", "", b"1", 7, number=1)[0] == "", "without keys an id has no owner"
