"""Spec strings on the ground: arguments taken out of them, and the fragments that a run's codec may name."""

from __future__ import annotations

import pytest

from zmqtrain.errors import ConfigError
from zmqtrain.settings import RunSettings
from zmqtrain.specs import split_argument


@pytest.mark.parametrize(
    ("text", "rest", "value"),
    [
        ("ternary", "ternary", None),
        ("ternary:block=64", "ternary:block=64", None),
        ("ternary:fragments=8", "ternary", 8),
        ("ternary:block=64,fragments=8", "ternary:block=64", 8),
        ("ternary:fragments=8,block=64", "ternary:block=64", 8),
        ("topk:density=0.1+int4:fragments=2;<9=bf16", "topk:density=0.1+int4;<9=bf16", 2),
        ("ternary;*bias=int8:fragments=4", "ternary;*bias=int8:fragments=4", None),
        ("topk:fragments=4+int8", "topk:fragments=4+int8", None),
    ],
)
def test_an_argument_is_taken_out_of_a_spec_wherever_it_stands(text, rest, value):
    assert split_argument(text, "fragments") == (rest, value)


def test_an_argument_that_is_no_whole_number_is_refused():
    with pytest.raises(ConfigError, match="'x' in 'fragments=x' is not a whole number"):
        split_argument("ternary:fragments=x", "fragments")


def test_a_codec_that_names_fragments_sets_those_of_the_run():
    settings = RunSettings(codec="ternary:block=64,fragments=8")
    assert (settings.codec, settings.fragments) == ("ternary:block=64", 8)
    assert RunSettings.from_dict(settings.to_dict()) == settings


def test_a_codec_and_a_run_that_name_different_fragments_are_refused():
    assert RunSettings(codec="ternary:fragments=8", fragments=8).fragments == 8
    with pytest.raises(ConfigError, match="says fragments=8, the setting fragments says 4"):
        RunSettings(codec="ternary:fragments=8", fragments=4)


@pytest.mark.parametrize("settings", [{}, {"elastic": 0.5}])
def test_strict_mode_and_nodes_of_their_own_parameters_exclude_each_other(settings):
    with pytest.raises(ConfigError, match="say --initial best"):
        RunSettings(mode="strict", release="all", initial="own", **settings)


@pytest.mark.parametrize("settings", [{"minibatch": "timed:seconds=0.3"}, {"mode": "strict", "release": "all"}])
def test_where_steps_take_as_long_on_all_nodes_or_are_to_be_repeated_no_k_follows_from_speed(settings):
    assert RunSettings(local_updates="dynamic").follows_speed
    assert not RunSettings(local_updates="dynamic", **settings).follows_speed
