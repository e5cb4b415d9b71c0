"""What is remembered of peers, however long ago, in a memory that does not grow."""

from __future__ import annotations

import json
import tracemalloc
from random import Random

import pytest

from zmqtrain.protocol.fencing import MAX_INCARNATION
from zmqtrain.protocol.members import LANDED_KEPT, RANGES_KEPT, RECORDS_KEPT, Records


def landed_of(records, peer="a"):
    return [sequence for sequence, _ in records.landed(peer)]


def test_what_landed_long_ago_is_said_to_who_asks_for_it():
    records = Records()
    for sequence in range(300):
        if sequence not in (7, 8, 100):
            records.land("a", sequence, sequence + 1)
    assert len(landed_of(records)) == LANDED_KEPT and 6 not in landed_of(records)
    records.recall("a", (6, 7, 8, 9, 100, 101, 999))
    assert landed_of(records)[:3] == [6, 9, 101] and len(landed_of(records)) == LANDED_KEPT + 3
    records.recall("a", ())
    assert len(landed_of(records)) == LANDED_KEPT


def test_a_checkpoint_keeps_all_of_it():
    records, again, random = Records(), Records(), Random(1)
    order = [*range(400)]
    for start in range(0, 400, 4):  # nearly in order, as they come
        part = order[start : start + 4]
        random.shuffle(part)
        order[start : start + 4] = part
    for sequence in order:
        if sequence % 50:
            records.land("a", sequence, 1)
    again.restore(json.loads(json.dumps(records.state())))
    for one in (records, again):
        one.recall("a", range(400))
        assert sorted(landed_of(one)) == [sequence for sequence in range(400) if sequence % 50]


def test_however_many_are_left_out_between_the_ranges_stay_few():
    records = Records()
    for sequence in range(0, 4000, 2):
        records.land("a", sequence, 1)
    assert len(records.state()["a"][3]) == RANGES_KEPT


def test_who_has_gone_back_may_send_again_what_had_not_landed():
    records = Records()
    records.greet("a", 5)
    records.land("a", 3, 1)
    records.hear("a", 6)
    records.forget_unlanded()
    assert (records.heard("a"), records.incarnation("a")) == (3, 5)
    records.clear()
    assert (records.heard("a"), records.landed("a"), records.incarnation("a")) == (-1, (), 5)


def test_who_only_says_hello_takes_no_place_of_those_who_have_published():
    records = Records()
    records.greet("honest", 7)
    records.hear("honest", 3)
    records.land("honest", 3, 12)
    for number in range(3 * RECORDS_KEPT):
        records.greet(f"mallory#{number}", 1)
    assert (records.heard("honest"), records.landed("honest"), records.incarnation("honest")) == (3, ((3, 12),), 7)
    assert records.incarnation("mallory#0") == 0 and records.incarnation(f"mallory#{3 * RECORDS_KEPT - 1}") == 1
    assert len(records.state()) == RECORDS_KEPT + 1


def test_the_newest_of_those_who_have_published_are_kept_and_of_each_the_newest_landings():
    records = Records()
    for number in range(RECORDS_KEPT + 1):
        records.land(f"pc-{number}", 0, 1)
    assert records.heard("pc-0") == -1 and records.heard("pc-1") == 0
    for sequence in range(LANDED_KEPT + 5):
        records.land("pc-1", sequence, sequence)
    assert len(records.landed("pc-1")) == LANDED_KEPT and records.landed("pc-1")[-1] == (
        LANDED_KEPT + 4,
        LANDED_KEPT + 4,
    )


def test_what_is_kept_of_each_node_that_has_come_and_gone_is_small():
    records = Records()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(100):
            for sequence in range(1000, 1000 + 2 * LANDED_KEPT):
                records.land(f"pc#{number}", sequence, 1000 * number + sequence)
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept < 100 * 2048


def test_writing_a_checkpoint_takes_little_memory_for_each_node_that_has_come_and_gone():
    records = Records()
    for number in range(100):
        for sequence in range(1000, 1000 + 2 * LANDED_KEPT):
            records.land(f"pc#{number}", sequence, 1000 * number + sequence)
    tracemalloc.start()
    try:
        json.dumps(records.state())
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 100 * 2048


def test_a_number_that_no_message_could_have_held_is_not_taken_over():
    most = (1 << 64) - 1
    records = Records()
    records.land("a", most, most)
    assert records.landed("a") == ((most, most),)
    with pytest.raises(OverflowError):
        records.restore({"b": [0, f"{most + 1},1", 0, []]})


def test_what_is_written_to_a_checkpoint_is_what_is_read():
    records, again = Records(), Records()
    records.greet("a", 5)
    records.land("b", 2, 9)
    records.greet("b", 6)
    again.restore(records.state())
    assert again.state() == records.state()
    assert (again.heard("a"), again.incarnation("a"), again.landed("b"), again.incarnation("b")) == (
        -1,
        5,
        ((2, 9),),
        6,
    )


def test_landings_are_read_as_they_were_written_whatever_their_order():
    records, again = Records(), Records()
    for sequence, version in ((5, 70), (6, 71), (9, 71), (3, 80), (1 << 63, 79)):
        records.land("a", sequence, version)
    again.restore(records.state())
    assert again.landed("a") == records.landed("a") == ((5, 70), (6, 71), (9, 71), (3, 80), (1 << 63, 79))


def test_landings_in_another_form_are_refused_and_not_misread():
    with pytest.raises(ValueError, match="5 70 6 71"):
        Records().restore({"a": [6, "5 70 6 71", 0, []]})


def test_the_owner_of_an_id_is_part_of_a_checkpoint_and_the_first_stays():
    records, again = Records(), Records()
    records.own("a", "pc1")
    assert records.owner("a") == "", "who says no incarnation has an id for one connection only"
    records.greet("a", 5)
    records.own("a", "pc1"), records.own("a", "pc2")
    records.land("b", 3, 4)
    records.own("b", "pc2")
    again.restore(json.loads(json.dumps(records.state())))
    assert [again.owner(peer) for peer in "abc"] == ["pc1", "pc2", ""] and again.incarnation("a") == 5
    again.restore({"a": [-1, "", 6, []], "c": [-1, "", 7, []]})  # of a release that wrote no owners
    assert (again.owner("a"), again.owner("c"), again.incarnation("a")) == ("pc1", "", 6)


def test_an_incarnation_that_nobody_sound_has_said_is_not_taken_from_a_checkpoint():
    records, again = Records(), Records()
    records.greet("a", MAX_INCARNATION - 1), records.greet("b", 5)
    again.restore(records.state(), latest_incarnation=1000)
    assert (again.incarnation("a"), again.incarnation("b")) == (0, 5)
