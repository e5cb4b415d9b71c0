"""On what a node trains is said in a few characters, with a warning where a card is there and not used."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import pytest

from zmqtrain.core.installed import how_to_install
from zmqtrain.train import seen
from zmqtrain.train.seen import UNUSED_CARD, name_device, say_device


class Device:
    def __init__(self, kind, number=0):
        self.device_kind, self.number = kind, number


@pytest.fixture
def pc(monkeypatch):
    """Make a PC with these devices; backend: what JAX computes on."""

    def make(*kinds, backend="gpu", driver=True):
        devices = [Device(kind, number) for number, kind in enumerate(kinds)]
        monkeypatch.setattr(jax, "local_devices", lambda: devices)
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        monkeypatch.setattr(seen, "has_nvidia_driver", lambda: driver)
        monkeypatch.setattr(seen, "_said", set())

    return make


def test_a_card_is_named_and_several_are_counted(pc):
    pc("NVIDIA H100", "NVIDIA H100")
    assert name_device() == "NVIDIA H100" and name_device(everywhere=True) == "2 x NVIDIA H100"
    pc("NVIDIA A", "NVIDIA B")
    assert name_device(everywhere=True) == "NVIDIA A and NVIDIA B"


def test_a_name_is_short_and_can_be_printed(pc):
    pc("N" * 100 + "\n")
    assert name_device() == "N" * 64
    pc("a\x1b[2Jb")
    assert name_device() == "a?[2Jb"


def test_a_card_that_is_there_and_not_used_is_warned_of_with_what_to_type(pc, caplog):
    pc("cpu", backend="cpu")
    with caplog.at_level(logging.INFO, "zmqtrain"):
        assert say_device("pc-1", []) == UNUSED_CARD
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and how_to_install("cuda12") in record.getMessage()


def test_a_pc_without_a_card_is_not_warned(pc, caplog):
    pc("cpu", backend="cpu", driver=False)
    with caplog.at_level(logging.INFO, "zmqtrain"):
        assert say_device("pc-1", []) == "cpu"
    assert [record.getMessage() for record in caplog.records] == ["pc-1 trains on cpu; JAX compiles its first step"]


def test_what_jax_takes_of_a_cards_memory_is_said_once(pc, caplog):
    pc("NVIDIA H100")
    with caplog.at_level(logging.INFO, "zmqtrain"):
        say_device("pc-1", [])
        say_device("pc-2", [])
    assert caplog.text.count("XLA_PYTHON_CLIENT_PREALLOCATE=false") == 1
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_where_parameters_lie_counts_more_than_where_jax_would_put_them(pc):
    leaf = jnp.zeros(3)
    pc("NVIDIA H100")
    assert name_device([leaf]) == "cpu"
