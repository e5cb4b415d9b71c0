"""How much a peer may say, in virtual time."""

from __future__ import annotations

from zmqtrain.protocol import limits
from zmqtrain.protocol.limits import (
    FAULT_SECONDS,
    LOOP_SHARE,
    MESSAGES_AT_ONCE,
    MESSAGES_PER_SECOND,
    Hearing,
    LoopBudgets,
    MessageRates,
    cost_of,
)

HEARD, TOO_MANY, NOT_HEARD = Hearing.HEARD, Hearing.TOO_MANY, Hearing.NOT_HEARD


def flood(measure, peer="pc-1", now=0.0):
    """Say so much at once that the measure is full."""
    while (hearing := measure.take(peer, now)) is HEARD:
        pass
    return hearing


def test_a_node_that_exchanges_in_every_step_of_a_millisecond_is_heard_for_ever():
    measure = MessageRates()
    for step in range(20_000):
        now = step / 1000
        # Publish, WorkRequest, four credits of an aggregate and its chunks; a Heartbeat and a Report now and then
        assert {measure.take("pc-1", now) for _ in range(6 + (step % 500 == 0) * 2)} == {HEARD}


def test_what_queued_while_the_broker_was_stopped_for_ten_seconds_is_heard_at_once():
    measure = MessageRates()
    assert {measure.take("pc-1", 0.0) for _ in range(10 * 6 * 1000)} == {HEARD}


def test_a_flood_is_cut_off_once_and_nothing_more_of_it_is_read(monkeypatch):
    monkeypatch.setattr(limits, "MESSAGES_AT_ONCE", 100.0)
    measure = MessageRates()
    assert flood(measure) is TOO_MANY
    assert {measure.take("pc-1", 0.001) for _ in range(1000)} == {NOT_HEARD}
    assert measure.not_heard == 1001
    assert measure.take("pc-2", 0.0) is HEARD


def test_who_has_been_silent_for_a_second_is_heard_again():
    measure = MessageRates()
    flood(measure)
    assert measure.take("pc-1", 0.5) is NOT_HEARD
    assert measure.take("pc-1", 1.01) is HEARD
    assert MESSAGES_PER_SECOND < MESSAGES_AT_ONCE


def test_strangers_without_number_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(limits, "PEERS_KEPT", 8)
    measure = MessageRates()
    for number in range(100):
        measure.take(f"x-{number}", float(number))
    assert len(measure._left) == 8


def test_messages_that_take_what_ordinary_ones_take_cost_nothing_however_many_they_are():
    budgets = LoopBudgets()
    for number in range(100_000):
        assert not budgets.take("pc-1", cost_of(4e-4, 300), 1e-9 * number)
    assert budgets.is_heard("pc-1", 0.0)
    assert cost_of(0.05, 1 << 20) == 0.0 < cost_of(0.05, 1 << 10), "a large head may take longer"


def test_whose_messages_take_too_long_is_shown_out_once_and_heard_again_a_while_later():
    budgets = LoopBudgets()
    shown_out = [budgets.take("bad", cost_of(0.2, 4096), 0.0) for _ in range(10)]
    assert shown_out == [False] * 2 + [True] + [False] * 7
    assert not budgets.is_heard("bad", 1.0) and budgets.is_heard("good", 1.0)
    assert not budgets.is_heard("bad", 9.9) and budgets.is_heard("bad", 10.1)
    assert not budgets.take("bad", 0.01, 10.1) and budgets.take("bad", 0.5, 10.1)


def test_a_peer_that_takes_its_share_of_the_loop_and_no_more_is_heard_for_ever():
    budgets = LoopBudgets()
    assert not any(budgets.take("pc-1", LOOP_SHARE, float(second)) for second in range(1000))


def test_messages_that_no_sound_peer_sends_are_twenty_five_at_once():
    budgets = LoopBudgets()
    shown_out = [budgets.take("bad", FAULT_SECONDS, 0.0) for _ in range(60)]
    assert 24 <= shown_out.index(True) <= 25


def test_budgets_of_strangers_without_number_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(limits, "PEERS_KEPT", 8)
    budgets = LoopBudgets()
    for number in range(100):
        budgets.take(f"x-{number}", 5.0, float(number))
    assert len(budgets._taken) == 8
