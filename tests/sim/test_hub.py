"""The simulated hub carries out every effect of the machine, or says that it does not model it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest

from zmqtrain.core.errors import LocalProtocolError
from zmqtrain.core.settings import RunSettings
from zmqtrain.protocol import effects
from zmqtrain.sim.clock import Scheduler
from zmqtrain.sim.hub import CodecTimes, SimHub

NOT_MODELLED = {"Replicate", "Hear", "Rewind", "Answer", "Forward", "Consult", "Combine", "Discard"}


@pytest.fixture
def hub():
    return SimHub(Scheduler(), RunSettings(), CodecTimes(), lambda reduce: None)


def an(effect):
    """An effect of this kind, of nothing in particular."""
    return effect(*[None] * len(effect.__dataclass_fields__))


@pytest.mark.parametrize("name", sorted(NOT_MODELLED))
def test_an_effect_that_is_not_modelled_is_an_error_that_names_it(hub, name):
    with pytest.raises(LocalProtocolError, match=f"does not model what {name}"):
        hub._carry_out_one(an(getattr(effects, name)))


def test_an_effect_of_another_kind_is_an_error(hub):
    with pytest.raises(AssertionError):
        hub._carry_out_one(SimpleNamespace(kind="new"))
    assert {one.__name__ for one in get_args(effects.HubEffect)} >= NOT_MODELLED


def test_a_mean_that_there_is_not_is_proposed_to_nobody(hub, monkeypatch):
    pushed = []
    monkeypatch.setattr(hub, "_push_snapshot", lambda peer, *rest, **named: pushed.append(peer))
    hub._carry_out_one(effects.Propose(("a", "b")))
    assert pushed == []
    hub._mean = (b"mean",)
    hub._carry_out_one(effects.Propose(("a", "b")))
    hub._carry_out_one(effects.Propose(()))
    hub._carry_out_one(effects.Propose(("a",)))
    assert pushed == ["a", "b"]


@pytest.mark.parametrize(
    ("reason", "forgotten"), [("again", False), ("observer", False), ("lost", True), ("goodbye", True)]
)
def test_a_node_that_comes_again_is_not_new_to_the_norm_gate(hub, monkeypatch, reason, forgotten):
    forgets = []
    monkeypatch.setattr(hub.aggregator.gate, "forget", lambda peer, **named: forgets.append(peer))
    hub._carry_out_one(effects.Disconnect("a", reason, "gone"))
    assert forgets == ["a"] * forgotten
