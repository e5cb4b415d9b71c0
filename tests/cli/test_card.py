"""A plan that cannot fit the card is refused before a parameter is made, and what would fit is said."""

from __future__ import annotations

import logging

import jax
import pytest

from zmqtrain.cli.node import NodeConfig, check_card
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import RunSettings
from zmqtrain.planning.costs import CARD_BYTES_OF_OTHERS
from zmqtrain.programs import load_program
from zmqtrain.train import step as footprint


def node(**options):
    return NodeConfig(hub="tcp://hub:5555", **options)


def card(megabytes):
    """A card of which so much can be used."""
    return f"{CARD_BYTES_OF_OTHERS / 1e6 + megabytes}MB"


@pytest.fixture(scope="module")
def program():
    return load_program("image", {"width": 64})


def alive(program):
    """How many arrays of the program's sizes there are; a thread that another test has left may have others."""
    sizes = {leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(program.init, 0)) if leaf.shape}
    return sum(array.shape in sizes for array in jax.live_arrays())


def test_what_fits_begins_and_says_how_much_it_takes(program, caplog):
    caplog.set_level(logging.INFO, "zmqtrain")
    check_card(program, RunSettings(), node(card_memory="6GB"))
    assert "the card: fits: " in caplog.text


def test_what_cannot_fit_is_refused_with_what_would(program):
    before = alive(program)
    with pytest.raises(ConfigError) as caught:
        check_card(program, RunSettings(), node(card_memory=card(1)))
    assert alive(program) <= before
    for said in ("does not fit", "In GB: parameters ", "activations", "--anchor host"):
        assert said in str(caught.value)


def test_an_anchor_on_the_host_makes_room(program):
    needed = None
    for megabytes in range(1, 60):
        try:
            check_card(program, RunSettings(), node(card_memory=card(megabytes), anchor="host"))
        except ConfigError:
            continue
        needed = megabytes
        break
    assert needed is not None
    with pytest.raises(ConfigError, match="the anchor on the host"):
        check_card(program, RunSettings(), node(card_memory=card(needed)))


def test_the_device_is_asked_where_the_user_does_not_say(program, monkeypatch):
    check_card(program, RunSettings(), node())  # a processor says nothing, and nothing is measured
    monkeypatch.setattr(footprint, "card_bytes", lambda: 1_000_000)
    with pytest.raises(ConfigError, match=r"of which 1\.0 MB can be used"):
        check_card(program, RunSettings(), node())


def test_a_card_of_no_size_is_refused():
    with pytest.raises(ConfigError, match="card_memory is written like 6GB"):
        node(card_memory="much")
