"""Which versions a node has, which it lets come, and which it must fetch."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.protocol.messages import Aggregate, Snapshot
from zmqtrain.protocol.peer import Following, Step


def aggregate(version):
    return Aggregate(version, version, "float32", (0,), (1,), (64,), (), 2)


def snapshot(version, transfer=1000, sizes=(64,), **told):
    return Snapshot(transfer, version, sizes, **told)


def at(version):
    following = Following()
    following.announce(snapshot(version))
    following.whole(1000)
    return following


def test_the_next_version_is_let_come_and_is_here_when_it_is_whole():
    following = at(3)
    assert following.announce(aggregate(4)) is Step.EXPECT and (following.announced, following.version) == (4, 3)
    assert following.announce(aggregate(5)) is Step.EXPECT
    assert following.whole(4).announcement == aggregate(4) and following.version == 4
    assert following.whole(4) is None, "it was here"


def test_a_gap_asks_for_a_snapshot_and_what_was_had_is_ignored():
    following = at(3)
    assert following.announce(aggregate(5)) is Step.FETCH
    assert following.announce(aggregate(3)) is Step.NOTHING
    assert following.announced == 3


def test_a_snapshot_without_chunks_says_that_what_is_here_is_the_runs():
    following = Following()
    assert not following.confirmed
    assert following.announce(snapshot(0, sizes=())) is Step.NOTHING
    assert following.confirmed and (following.version, following.announced) == (0, 0)


def test_another_nodes_parameters_are_no_version():
    following = Following()
    assert following.announce(snapshot(-1)) is Step.EXPECT and following.announced == -1
    assert following.whole(1000).first and following.version == -1


def test_the_first_snapshot_is_told_from_later_ones():
    following = Following()
    following.announce(snapshot(2))
    assert following.whole(1000).first
    following.announce(snapshot(7, 1001))
    assert not following.whole(1001).first


def test_what_was_lost_on_its_way_is_fetched_from_the_version_that_is_here():
    following = at(3)
    following.announce(aggregate(4))
    assert following.fetch() == 3 and following.whole(4) is None
    following.announce(snapshot(5, 1001))
    following.lose()
    assert following.whole(1001) is None and following.fetch() == 3


def test_who_did_not_apply_what_came_or_got_it_spoiled_holds_nothing_until_a_snapshot_is_whole():
    following = at(3)
    following.dropped()
    assert following.fetch() == following.fetch() == -1
    following.announce(snapshot(3, 1001))
    assert following.spoiled(1001) and not following.spoiled(1001) and following.fetch() == -1
    following.announce(snapshot(3, 1002))
    following.whole(1002)
    assert following.fetch() == 3


def test_a_fresh_beginning_stays_ordered_through_whatever_is_cut_short():
    following = at(3)
    following.restart(warm=True)
    assert following.fetch() == -1
    following.announce(snapshot(4, 1001))
    following.lose()
    following.announce(snapshot(4, 1002))
    whole = following.whole(1002)
    assert whole.reset and whole.warm
    following.restart(warm=False), following.restart(warm=True)
    following.announce(snapshot(4, 1003))
    whole = following.whole(1003)
    assert whole.reset and not whole.warm, "it was ordered to begin with a fresh optimizer before"


def test_who_is_told_to_begin_anew_when_the_answer_that_it_has_all_is_on_its_way_fetches_once_more():
    following = at(3)
    assert following.fetch() == 3
    following.restart(warm=True)
    assert following.announce(snapshot(3, 1001, sizes=())) is Step.FETCH and following.fetch() == -1
    following.announce(snapshot(3, 1002))
    assert following.whole(1002).reset


def test_a_fresh_beginning_that_came_with_a_snapshot_stays_ordered_if_that_is_cut_short():
    following = at(3)
    following.announce(snapshot(4, 1003, reset=True))
    assert following.fetch() == -1
    following.announce(snapshot(4, 1004))
    assert following.whole(1004).reset
    following.announce(snapshot(5, 1005))
    assert not following.whole(1005).reset


def test_a_gap_that_nothing_shows_is_found_by_the_roster_after_a_while():
    following = at(3)
    assert not following.lags(3, 5.0, 0.0) and not following.lags(4, 5.0, 1.0)
    assert not following.lags(4, 5.0, 6.0) and following.lags(4, 5.0, 6.1)
    following.announce(aggregate(4))
    assert not following.lags(5, 5.0, 20.0), "something is on its way"
    following.whole(4)
    assert not following.lags(5, 5.0, 21.0) and following.lags(5, 5.0, 27.0)


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.sampled_from(["next", "skip", "old", "whole", "spoil", "lose", "fetch"]), st.booleans())))
def test_what_is_held_is_never_ahead_of_what_was_announced_and_nothing_grows(moves):
    following, transfers = at(0), []
    for move, newest in moves:
        if move in ("next", "skip", "old"):
            version = following.announced + {"next": 1, "skip": 2, "old": 0}[move]
            step = following.announce(aggregate(version))
            assert step is {"next": Step.EXPECT, "skip": Step.FETCH, "old": Step.NOTHING}[move]
            transfers += [version] * (step is Step.EXPECT)
        elif move == "lose":
            following.lose()
        elif move == "fetch":
            assert following.fetch() in (-1, following.version)
        elif transfers:
            transfer = transfers.pop(-1 if newest else 0)
            (following.whole if move == "whole" else following.spoiled)(transfer)
        assert following.version <= following.announced
