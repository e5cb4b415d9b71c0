"""Who measures a link is answered within bounds that hold for all together, and costs nobody else anything."""

from __future__ import annotations

import pytest

from zmqtrain.core.errors import RemoteProtocolError
from zmqtrain.core.settings import RunSettings
from zmqtrain.protocol.effects import Answer, SendTo
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.limits import PROBE_BYTES, PROBE_FRAME_BYTES, PROBE_SECONDS, ProbeBudget
from zmqtrain.protocol.messages import Hello, Probe, Refused
from zmqtrain.protocol.rounds import release_rule_from_spec

LARGE = Probe(1, PROBE_FRAME_BYTES, PROBE_FRAME_BYTES)


@pytest.fixture
def hub():
    hub = Hub(RunSettings(), release_rule_from_spec("all"), "run")
    for peer in ("a", "b"):
        hub.receive(peer, Hello(peer, role="observer"), 0.0)
    return hub


def ask_for_all(hub, peer, now):
    """Probe until it is refused; return how often it was answered."""
    for count in range(PROBE_BYTES):
        (effect,) = hub.receive(peer, LARGE, now)
        if isinstance(effect, SendTo):
            assert isinstance(effect.message, Refused) and effect.message.reason == "probe"
            return count
        assert effect == Answer(peer, LARGE)
    raise AssertionError("there is no bound")


def test_an_observer_is_answered_until_the_budget_is_spent_and_again_when_its_time_is_over(hub):
    most = PROBE_BYTES // (2 * PROBE_FRAME_BYTES)
    assert ask_for_all(hub, "a", 1.0) == most
    assert ask_for_all(hub, "a", 1.0 + PROBE_SECONDS / 2) == 0
    assert ask_for_all(hub, "a", 1.0 + PROBE_SECONDS) == most


def test_the_budget_is_one_for_all_peers_so_that_many_names_take_no_more(hub):
    ask_for_all(hub, "a", 1.0)
    assert ask_for_all(hub, "b", 1.0) == 0


def test_who_is_refused_stays_and_may_still_ask_for_the_time(hub):
    ask_for_all(hub, "a", 1.0)
    assert hub.receive("a", Probe(2), 1.0) == [Answer("a", Probe(2))]
    assert "a" in hub.members


@pytest.mark.parametrize(
    "probe", [Probe(1, -1), Probe(1, 0, -1), Probe(1, PROBE_FRAME_BYTES + 1), Probe(1, 0, 1 << 40)]
)
def test_a_probe_of_a_size_that_is_not_given_costs_its_sender(hub, probe):
    with pytest.raises(RemoteProtocolError, match="a Probe of that size from a"):
        hub.receive("a", probe, 1.0)


def test_time_that_stands_still_gives_no_more():
    budget = ProbeBudget()
    taken = sum(budget.take(LARGE, 5.0) for _ in range(1000))
    assert taken == PROBE_BYTES // (2 * PROBE_FRAME_BYTES)
