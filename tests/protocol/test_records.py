"""What is remembered of peers, and of how many."""

from __future__ import annotations

from zmqtrain.protocol.records import LANDED_KEPT, RECORDS_KEPT, Records


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
