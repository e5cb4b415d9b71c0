"""The laws of the bucket, of the turns within a share, and of the rate that is measured from below."""

from __future__ import annotations

from collections import deque
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import MAX_FRAME_BYTES, PeerId
from zmqtrain.transport.pacing import (
    BURST_BYTES,
    BURST_SECONDS,
    METERED_BYTES,
    OVERTAKEN,
    Credits,
    LinkShare,
    RateMeter,
    Reservation,
    TokenBucket,
    Use,
)

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
RATE = 1e8
CHUNK = MAX_FRAME_BYTES
SLACK = 1e-3
"""Bytes that floats lose over a test."""


def burst(rate: float) -> float:
    return max(BURST_BYTES, BURST_SECONDS * rate)


# ---- what a user gives of a port


def test_with_no_link_and_the_whole_share_nothing_is_limited_and_else_the_share_of_what_is_known() -> None:
    assert LinkShare().limit(measured=1e8) is None
    assert LinkShare(share=0.5).limit() is None  # nothing is measured yet
    assert LinkShare(share=0.5).limit(measured=1e8) == 5e7
    assert LinkShare(1e9, 0.8).limit(measured=1e8) == 8e8
    assert LinkShare(1e9).limit() == 1e9


def test_what_can_be_counted_on_is_known_without_a_limit_too() -> None:
    assert LinkShare().usable(measured=1e8) == 1e8
    assert LinkShare(1e9, 0.5).usable() == 5e8
    assert LinkShare(share=0.5).usable() == 0.0


@pytest.mark.parametrize(("rate", "share"), [(-1.0, 1.0), (inf, 1.0), (0.0, 0.0), (0.0, 1.5), (0.0, float("nan"))])
def test_a_link_that_no_port_has_is_refused(rate: float, share: float) -> None:
    with pytest.raises(ConfigError):
        LinkShare(rate, share)


# ---- the bucket


def test_a_bucket_without_a_rate_never_waits() -> None:
    bucket = TokenBucket()
    bucket.pay(10**12, now=0.0)
    assert bucket.wait_seconds(10**12, now=0.0) == 0.0


@pytest.mark.parametrize("rate", [0.0, -1.0, inf, float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError):
        TokenBucket(rate)


sends = st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 2 * CHUNK)), min_size=1, max_size=40)


@settings(max_examples=examples(60))
@given(sends, st.floats(1e6, 1e9))
def test_over_any_interval_no_more_goes_than_the_burst_and_the_rate(
    wanted: list[tuple[float, int]], rate: float
) -> None:
    bucket, now, gone = TokenBucket(rate), 2.0, []
    for pause, size in wanted:
        now += pause
        now += bucket.wait_seconds(size, now)
        bucket.pay(size, now)
        gone.append((now, size))
    for first, (begin, _) in enumerate(gone):
        total = 0
        for last, (end, size) in enumerate(gone[first:]):
            total += size
            largest = max(one for _, one in gone[first : first + last + 1])
            assert total <= max(burst(rate), largest) + rate * (end - begin) + len(gone)


@given(sends)
def test_who_waits_as_long_as_told_need_not_wait_again(wanted: list[tuple[float, int]]) -> None:
    bucket, now = TokenBucket(RATE), 0.0
    for pause, size in wanted:
        now += pause
        now += bucket.wait_seconds(size, now)
        assert bucket.wait_seconds(size, now) == 0.0
        bucket.pay(size, now)


def test_control_is_paid_for_and_what_follows_waits_the_longer() -> None:
    bucket = TokenBucket(RATE)
    bucket.pay(burst(RATE), now=0.0)
    assert bucket.wait_seconds(CHUNK, now=0.0) == pytest.approx(CHUNK / RATE)
    bucket.pay(1e6, now=0.0)
    assert bucket.wait_seconds(CHUNK, now=0.0) == pytest.approx((CHUNK + 1e6) / RATE)


def test_a_clock_that_runs_backwards_adds_nothing() -> None:
    bucket = TokenBucket(RATE)
    bucket.pay(burst(RATE), now=10.0)
    assert bucket.wait_seconds(CHUNK, now=1.0) == bucket.wait_seconds(CHUNK, now=10.0) > 0


def test_another_rate_holds_at_once_and_gives_no_second_burst() -> None:
    bucket = TokenBucket(RATE)
    bucket.pay(burst(RATE), now=0.0)
    bucket.set_rate(RATE / 10)
    assert bucket.wait_seconds(CHUNK, now=0.0) == pytest.approx(10 * CHUNK / RATE)
    bucket.set_rate(None)
    assert bucket.wait_seconds(CHUNK, now=0.0) == 0.0


# ---- turns


class Port:
    """A reservation at work: what waits for it, and what has gone, in virtual time."""

    def __init__(self, rate: float | None) -> None:
        self.reservation: Reservation[str] = Reservation(rate)
        self.waiting: dict[str, deque[tuple[Use, int]]] = {}
        self.own: dict[str, TokenBucket] = {}
        self.now = 0.0
        self.gone: list[tuple[float, str, Use, int]] = []

    def ask(self, who: str, use: Use, *sizes: int) -> None:
        self.waiting.setdefault(who, deque()).extend((use, size) for size in sizes)
        self.reservation.wait(who, self.waiting[who][0][0])

    def claim(self, who: str) -> tuple[int, float]:
        size = self.waiting[who][0][1]
        return size, self.own[who].wait_seconds(size, self.now) if who in self.own else 0.0

    def run(self, until: float = inf) -> list[str]:
        """Send until nothing waits, or the time is over; return who has sent, in order."""
        first = len(self.gone)
        while True:
            who, seconds = self.reservation.turn(self.claim, self.now)
            if who is None:
                if self.now + seconds > until or seconds == inf:
                    return [one[1] for one in self.gone[first:]]
                assert seconds > 0
                self.now += seconds
                continue
            use, size = self.waiting[who].popleft()
            self.reservation.sent(who, size, self.now)
            if who in self.own:
                self.own[who].pay(size, self.now)
            self.gone.append((self.now, who, use, size))
            self.reservation.leave(who)
            if self.waiting[who]:
                self.reservation.wait(who, self.waiting[who][0][0])


def test_deltas_overtake_snapshots_and_equals_take_turns() -> None:
    port = Port(RATE)
    port.ask("s", Use.SNAPSHOT, CHUNK, CHUNK)
    port.ask("a", Use.DELTA, CHUNK, CHUNK)
    port.ask("b", Use.DELTA, CHUNK, CHUNK)
    assert port.run() == ["a", "b", "a", "b", "s", "s"]


def test_a_snapshot_goes_on_under_deltas_that_never_end() -> None:
    port = Port(RATE)
    port.ask("s", Use.SNAPSHOT, *[CHUNK] * 3)
    port.ask("a", Use.DELTA, *[CHUNK] * 40)
    sent = port.run()
    assert [index for index, who in enumerate(sent) if who == "s"] == [
        OVERTAKEN,
        2 * OVERTAKEN + 1,
        3 * OVERTAKEN + 2,
    ]


def test_one_whose_own_link_is_slow_is_passed_over_and_keeps_to_its_rate() -> None:
    port = Port(RATE)
    port.own["slow"] = TokenBucket(RATE / 20)
    port.ask("slow", Use.DELTA, *[CHUNK] * 20)
    port.ask("fast", Use.DELTA, *[CHUNK] * 200)
    port.run(until=1.0)
    of_slow = sum(size for _, who, _, size in port.gone if who == "slow")
    of_fast = sum(size for _, who, _, size in port.gone if who == "fast")
    assert of_slow <= burst(RATE / 20) + RATE / 20
    assert of_fast >= 0.9 * (RATE - of_slow)


def test_what_is_small_does_not_overtake_what_the_port_is_not_ready_for() -> None:
    port = Port(RATE)
    port.reservation.pay(int(burst(RATE)), 0.0)
    port.ask("large", Use.DELTA, CHUNK)
    port.ask("small", Use.DELTA, 10)
    assert port.run() == ["large", "small"]


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([Use.DELTA, Use.SNAPSHOT]), st.integers(1, CHUNK)),
        min_size=1,
        max_size=40,
    ),
    st.integers(0, 10**6),
)
def test_all_that_waits_goes_in_its_own_order_within_the_share(
    wanted: list[tuple[str, Use, int]], control: int
) -> None:
    port = Port(RATE)
    for who, use, size in wanted:
        port.ask(who, use, size)
    port.reservation.pay(control, 0.0)
    port.run()
    for who in "abc":
        assert [(use, size) for _, one, use, size in port.gone if one == who] == [
            (use, size) for one, use, size in wanted if one == who
        ]
    total = sum(size for *_, size in port.gone)
    assert total + control <= max(burst(RATE), control) + RATE * port.now + len(wanted) + SLACK


# ---- grants within shares


def grant_all(credits: Credits, seconds: float) -> dict[PeerId, int]:
    """Let chunks arrive as soon as they are granted, for so long; return the chunks by peer."""
    now, arrived = 0.0, dict.fromkeys((A, B), 0)
    while now <= seconds:
        granted = credits.grants(now)
        for peer, transfer, chunks in granted:
            arrived[peer] += chunks
            for _ in range(chunks):
                credits.arrived(peer, transfer)
        if not granted:
            assert credits.retry_seconds > 0
            now += credits.retry_seconds
    return arrived


def test_grants_keep_to_the_hubs_share_and_to_each_nodes() -> None:
    credits = Credits(4 * CHUNK)
    credits.bucket.set_rate(RATE)
    credits.limit(A, RATE / 10)
    for peer in (A, B):
        credits.ask(peer, 1, [CHUNK] * 400)
    arrived = grant_all(credits, seconds=1.0)
    assert arrived[A] * CHUNK <= burst(RATE / 10) + RATE / 10
    total = sum(arrived.values()) * CHUNK
    assert 0.95 * RATE <= total <= burst(RATE) + RATE


def test_grants_without_a_limit_ask_for_no_second_look() -> None:
    credits = Credits(CHUNK)
    credits.ask(A, 1, [CHUNK, CHUNK])
    assert credits.grants(0.0) == [(A, 1, 1)]
    assert credits.retry_seconds == inf


def test_who_is_forgotten_has_no_limit_when_it_comes_again() -> None:
    credits = Credits(CHUNK)
    credits.limit(A, 1.0)
    credits.ask(A, 1, [CHUNK, CHUNK])
    assert credits.grants(0.0) == [(A, 1, 1)]
    credits.forget(A)
    credits.ask(A, 1, [CHUNK])
    assert credits.grants(0.0) == [(A, 1, 1)]


# ---- the rate that is measured


def test_the_fastest_stretch_counts_and_never_says_more_than_the_link_can() -> None:
    meter = RateMeter()
    for began, seconds in ((0.0, 0.5), (1.0, 0.01), (2.0, 0.2)):
        meter.begun(began)
        meter.begun(began + seconds / 2)  # something more of the same stretch
        meter.over(CHUNK // 2, began + seconds / 2, idle=False)
        meter.over(CHUNK // 2, began + seconds, idle=True)
    assert meter.rate == pytest.approx(CHUNK / 0.01)


def test_few_bytes_say_nothing_of_a_rate() -> None:
    meter = RateMeter()
    meter.begun(0.0)
    meter.over(METERED_BYTES - 1, 1e-3, idle=True)
    meter.over(CHUNK, 2e-3, idle=True)  # of no stretch
    assert meter.rate == 0.0
