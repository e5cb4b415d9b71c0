"""Which snapshots are kept, for whom, and for how long."""

from __future__ import annotations

from zmqtrain.averaging.aggregator import Released
from zmqtrain.broker.snapshots import KEPT_SECONDS, MOST_KEPT, SnapshotCache
from zmqtrain.protocol.effects import Reduce, Serve

FRAMES = (b"a" * 60, b"b" * 40)


def release(version, size=10):
    reduce = Reduce(version, (0,), (), 1, False)
    return Released(version, "float32", (0,), ((b"u" * size,),)), reduce


def kept_at(shelf, version, now=0.0, digest=None):
    kept = shelf.begin(version, now)
    kept.make(FRAMES, (b"m" * 30,), (digest or f"v{version}", f"v{version} and moments"))
    return kept


def test_a_newcomer_is_sent_the_version_that_is_kept_and_what_came_since():
    shelf = SnapshotCache()
    kept = kept_at(shelf, 3)
    shelf.released(*release(4))
    assert shelf.of(Serve("pc-1", -1)) is kept
    assert kept.parts_for(Serve("pc-1", -1)) == (FRAMES, (), "v3", 0)
    assert [released.version for released, _ in kept.since] == [4]


def test_a_version_that_too_much_came_after_is_only_for_who_has_a_part_of_it():
    shelf = SnapshotCache()
    kept = kept_at(shelf, 3)
    shelf.released(*release(4, 50))
    assert shelf.of(Serve("new", -1)) is None
    again = Serve("pc-1", -1, digest="v3", held=1)
    assert shelf.of(again) is kept and kept.parts_for(again) == (FRAMES, (), "v3", 1)


def test_who_holds_a_version_from_which_aggregates_lead_on_needs_no_snapshot():
    shelf = SnapshotCache()
    kept = kept_at(shelf, 3)
    for version in (4, 5, 6):
        shelf.released(*release(version, 30))
    assert shelf.of(Serve("late", 5)) is kept and kept.parts_for(Serve("late", 5)) == ((), (), "", 0)
    assert not kept.leads_on_from(2) and not kept.leads_on_from(7)


def test_where_aggregates_are_more_than_a_snapshot_it_is_let_go():
    shelf = SnapshotCache()
    kept_at(shelf, 3)
    for version in range(4, 8):
        shelf.released(*release(version, 30))
    assert shelf.bytes == 0
    assert shelf.of(Serve("pc-1", -1, digest="v3", held=1)) is None


def test_no_more_versions_are_kept_than_may_be():
    shelf = SnapshotCache()
    for version in range(10):
        kept_at(shelf, version)
    assert shelf.bytes == MOST_KEPT * 100
    assert shelf.of(Serve("pc-1", -1, digest="v7", held=1)).version == 9


def test_what_is_being_made_is_waited_for_and_never_let_go_for_its_age():
    shelf = SnapshotCache()
    making = shelf.begin(3, 0.0)
    shelf.released(*release(4, 1000))
    shelf.forget_old(1e9)
    assert shelf.of(Serve("pc-1", -1)) is making


def test_what_nobody_began_to_fetch_for_long_is_let_go():
    shelf = SnapshotCache()
    kept_at(shelf, 3, now=10.0)
    shelf.forget_old(10.0 + KEPT_SECONDS - 1)
    assert shelf.bytes
    shelf.forget_old(10.0 + KEPT_SECONDS)
    assert not shelf.bytes


def test_optimizer_state_goes_only_to_who_is_meant_to_have_it_and_has_a_digest_of_its_own():
    kept = kept_at(SnapshotCache(), 0)
    assert kept.parts_for(Serve("a", -1, moments=True)) == (FRAMES, (b"m" * 30,), "v0 and moments", 0)
    part = Serve("a", -1, moments=True, digest="v0 and moments", held=2)
    assert kept.parts_for(part)[3] == 2
    assert kept.parts_for(Serve("a", -1, digest="v0 and moments", held=2))[3] == 0
    assert kept.parts_for(Serve("a", -1, digest="v0", held=99))[3] == 0
