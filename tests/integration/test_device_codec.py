"""Nodes that compress on their device and nodes that do so on their processor are one run, bit for bit."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from runs import Trainer, broker, parameters

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import RunSettings
from zmqtrain.node import codec
from zmqtrain.node.connect import connect


def strict_run(monkeypatch, places, **settings):
    """Two nodes, pc-1 and pc-2, which compress where `places` says; their final parameters and their coders."""
    coders = {}

    def connect_there(address, name, keys=None):
        made = connect(address, name, keys=keys, codec_on=places[name])
        coders[name] = made
        return made

    monkeypatch.setattr("runs.connect", connect_there)
    run = RunSettings(mode="strict", release="all", every=2, start_nodes=2, units=8, lost_seconds=60.0, **settings)
    with broker(run) as hub:
        trainers = [Trainer(hub.address, name, params=parameters(3)) for name in places]
        params = [trainer.join() for trainer in trainers]
    return params, {name: made.device_coder for name, made in coders.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {"delay": 4, "codec": "ternary", "broadcast_codec": "ternary"},  # several on their way
        {"delay": 1, "codec": "int8:block=64;b=bf16", "broadcast_codec": "bf16"},
    ],
)
def test_a_node_on_its_device_and_one_on_its_processor_end_with_the_bits_of_two_on_theirs(monkeypatch, settings):
    mixed, coders = strict_run(monkeypatch, {"pc-1": "host", "pc-2": "device"}, **settings)
    alike, none = strict_run(monkeypatch, {"pc-1": "host", "pc-2": "host"}, **settings)
    assert coders["pc-1"] is None and set(none.values()) == {None}
    assert coders["pc-2"].bytes_fetched > 0 and coders["pc-2"].bytes_put > 0
    for one, other in zip(mixed, alike, strict=True):
        for name in one:
            assert one[name].tobytes() == other[name].tobytes()


def test_a_node_whose_parameters_are_on_a_processor_compresses_there_if_left_the_choice(monkeypatch):
    _, coders = strict_run(monkeypatch, {"pc-1": "auto", "pc-2": "auto"}, delay=1)
    assert set(coders.values()) == {None}


@pytest.mark.parametrize("there", [True, False])
def test_left_the_choice_a_node_decides_by_its_first_offer_whatever_it_took_for_granted_when_it_joined(
    monkeypatch, there
):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(codec, "on_accelerator", lambda segments: there)
    _, coders = strict_run(monkeypatch, {"pc-1": "auto", "pc-2": "host"}, delay=1)
    assert (coders["pc-1"] is not None) == there and coders["pc-2"] is None
    assert not there or coders["pc-1"].bytes_fetched > 0


class Accelerator:
    """A jax device, as far as a node looks at it."""

    platform = "gpu"


class Segment(np.ndarray):
    """An array that says where it lives."""

    def devices(self):
        return {self.home}


def segment(home):
    made = np.zeros(5, np.float32).view(Segment)
    made.home = home
    return made


def test_the_choice_goes_by_where_the_first_offer_is():
    one, other, processor = Accelerator(), Accelerator(), jax.devices("cpu")[0]
    assert codec.on_accelerator([segment(one), segment(one)])
    assert not codec.on_accelerator([segment(one), segment(other)])
    assert not codec.on_accelerator([segment(processor)])
    assert not codec.on_accelerator([jax.numpy.zeros(5)])
    assert not codec.on_accelerator([np.zeros(5, np.float32)])


def test_another_choice_is_refused():
    with pytest.raises(ConfigError, match="codec_on must be one of 'auto', 'host', 'device', got 'gpu'"):
        connect("tcp://127.0.0.1:9", codec_on="gpu")
