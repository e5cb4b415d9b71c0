"""Parameters are served in turns: what the broker sends and makes for those who fetch, by a clock of the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zmqtrain.averaging.aggregator import Released
from zmqtrain.broker import snapshots as snapshots_module
from zmqtrain.broker.snapshots import AGAIN_SHARE, AT_ONCE, SHARE, SnapshotService
from zmqtrain.protocol.effects import Reduce, Serve
from zmqtrain.session.environment import CodecExecutor, Suspension

SIZE, RATE = 50_000_000, 125e6
FETCHERS = [f"fetcher-{number}#1" for number in range(10)]


class Inline(CodecExecutor):
    """Jobs that are done at once, or when the test says so."""

    def __init__(self) -> None:
        self.waits = False
        self.queue: list[Any] = []

    def submit(self, work: Any, resume: Any, values: int = 0) -> None:
        self.queue.append(lambda: resume(work()))
        while self.queue and not self.waits:
            self.queue.pop(0)()

    def go_on(self) -> None:
        self.waits = False
        while self.queue:
            self.queue.pop(0)()


class Everybody:
    """The members of a hub: all."""

    def __contains__(self, peer: object) -> bool:
        return True


class World:
    """A broker's snapshots. Peers take what they are sent at the port's rate, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.version, self.copies = 1.0, 7, 0
        self.sent: list[tuple[str, int, int]] = []  # to whom, which version, how many bytes
        self.landed: dict[str, tuple[tuple[int, int], ...]] = {}
        self.said_landed: list[tuple[tuple[int, int], ...]] = []
        self.under_way: dict[str, float] = {}  # until when
        self.free_at, self.takes = 0.0, True
        self.makes = Inline()
        monkeypatch.setattr(snapshots_module, "encode_snapshot", lambda layout, flats: (memoryview(ROOM)[:layout],))
        monkeypatch.setattr(snapshots_module, "digest_of", lambda frames: "digest")
        records = SimpleNamespace(landed=lambda peer: self.landed.get(peer, ()))
        core = SimpleNamespace(
            codec=Inline(),
            aggregator=self,
            downlink=self,
            hub=SimpleNamespace(members=Everybody(), records=records),
            now=lambda: self.now,
            model_bytes=lambda: SIZE,
            share_of=lambda peer: None,
        )
        standby = SimpleNamespace(announced=lambda version: Suspension(lambda resume: resume(None)))
        self.serving = SnapshotService(
            core,  # type: ignore[arg-type]
            self.makes,
            SimpleNamespace(port_rate=lambda: RATE),  # type: ignore[arg-type]
            standby,  # type: ignore[arg-type]
        )

    # the aggregator

    def make_room(self) -> list[Any]:
        return []

    def copy(self, room: Any) -> tuple[int, Any, list[Any]]:
        self.copies += 1
        return self.version, SIZE, []

    # the downlink

    def follows(self, peer: str) -> bool:
        return True

    def follow(self, peer: str, following: bool) -> None:
        pass

    def drop_aggregates(self, peer: str) -> None:
        pass

    def send_aggregate(self, *facts: Any) -> None:
        pass

    def send_snapshot(self, peer: str, version: int, frames: Any, moments: Any, landed: Any, *facts: Any) -> bool:
        size = sum(len(frame) for frame in frames)
        self.sent.append((peer, version, size))
        self.said_landed.append(landed)
        self.free_at = max(self.now, self.free_at) + size / RATE
        self.under_way[peer] = self.free_at if self.takes else 1e9
        return True

    def holds_snapshot(self, peer: str) -> bool:
        return self.under_way.get(peer, 0.0) > self.now

    # what happens

    def fetch(self, *peers: str, known: int = -1) -> None:
        for peer in peers:
            self.serving.serve(Serve(peer, known))

    def pass_time(self, seconds: float, again: bool = False) -> None:
        """Let time pass as the broker does; again: all fetch again and again. Each second brings an aggregate."""
        for number in range(round(seconds / 0.05)):
            self.now += 0.05
            if again:
                self.fetch(*FETCHERS)
            if number % 20 == 0:
                self.version += 1
                released = Released(self.version, "float32", (0,), ((memoryview(ROOM)[: SIZE // 4],),))
                self.serving.cache.released(released, Reduce(self.version, (0,), (), 1, False))
            self.serving.tick(self.now)

    def bytes_sent(self) -> int:
        return sum(size for _, _, size in self.sent)


ROOM = bytes(SIZE)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_newcomer_that_fetches_alone_is_sent_the_parameters_at_once(world: World) -> None:
    world.fetch("newcomer#1")
    assert world.sent == [("newcomer#1", 7, SIZE)]


def test_ten_that_fetch_again_and_again_have_a_bounded_share_of_the_port_and_of_the_codec_thread(world: World) -> None:
    world.pass_time(40.0, again=True)  # all have been served once, and what is free is used up
    assert {peer for peer, _, _ in world.sent} == {*FETCHERS}
    before, copies = world.bytes_sent(), world.copies
    world.pass_time(40.0, again=True)
    assert world.bytes_sent() - before <= AGAIN_SHARE * RATE * 40.0 + 2 * SIZE
    assert world.copies - copies <= AGAIN_SHARE * RATE * 40.0 / SIZE + 2
    world.fetch("newcomer#1")
    world.pass_time(1.0, again=True)
    assert ("newcomer#1", SIZE) in [(peer, size) for peer, _, size in world.sent]


def test_ten_that_fetch_at_once_are_served_few_at_a_time_and_keep_to_their_share(world: World) -> None:
    world.fetch(*FETCHERS)
    assert [peer for peer, _, _ in world.sent] == FETCHERS[:AT_ONCE]
    world.pass_time(20.0)
    assert [peer for peer, _, _ in world.sent] == FETCHERS
    world.pass_time(10.0)
    assert world.bytes_sent() <= SHARE * RATE * 20.0 + 4 * SIZE


def test_who_needs_nothing_is_told_so_while_others_wait_and_keeps_no_place(world: World) -> None:
    world.fetch(*FETCHERS)
    world.fetch("current#1", known=7)
    assert world.sent[-1] == ("current#1", 7, 0)
    world.pass_time(20.0)
    assert len(world.sent) == 11


def test_those_that_take_nothing_cost_the_next_ones_a_few_seconds(world: World) -> None:
    world.takes = False
    world.fetch(*FETCHERS[:AT_ONCE])
    world.takes = True
    world.fetch("newcomer#1")
    world.pass_time(5.0)
    assert world.sent[-1][0] == "newcomer#1"


def test_what_has_landed_while_a_peer_waited_for_its_turn_is_said_to_have(world: World) -> None:
    world.fetch(*FETCHERS[:AT_ONCE], "waits#1")
    world.landed["waits#1"] = (3, 7), (4, 100)
    world.pass_time(2.0)
    assert world.sent[-1][0] == "waits#1" and world.said_landed[-1] == ((3, 7),)


def test_those_for_whom_a_version_was_being_made_when_the_run_went_back_are_sent_a_later_one(world: World) -> None:
    world.makes.waits = True
    world.fetch("newcomer#1")
    while world.serving.cache.of(Serve("newcomer#1", -1)) is None:
        world.makes.queue.pop(0)()
    world.serving.restart(())
    world.version = 5
    world.makes.go_on()
    assert world.sent == [("newcomer#1", 5, SIZE)]
