"""Spec strings on the ground: arguments taken out of them, and the fragments that a run's codec may name."""

from __future__ import annotations

import re

import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import AUTO_FRAGMENTS, FIRST, FITTED, FIXED, RunSettings
from zmqtrain.core.specs import parse_spec, split_argument
from zmqtrain.core.types import LeafSpec


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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'': no name stands there; choose one of all, b:count=3,share=0.5"),
        ("c", "'c': there is no 'c'; choose one of all, b:count=3,share=0.5"),
        ("all:", "'all:': nothing stands where an argument should; all takes no arguments"),
        ("b:count=2,", "nothing stands where an argument should; b takes count=3, share=0.5"),
        ("b:cont=2", "cannot read 'cont=2' (did you mean count?); b takes count=3, share=0.5"),
        ("b:count=2,count=2", "count is given twice; leave one out"),
        ("b:count=2.0", "'2.0' in 'count=2.0' is not a whole number, as 2"),
        ("b:share=inf", "'inf' in 'share=inf' is not a finite number, as 0.5"),
        ("b:share=1e999", "'1e999' in 'share=1e999' is not a finite number, as 0.5"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_with_the_place_and_the_choices(text, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_spec(text, {"all": {}, "b": {"count": 3, "share": 0.5}})


def test_auto_gives_way_to_what_is_chosen_and_to_what_holds_at_first_and_what_is_told_stays():
    run = RunSettings(codec="int8", every=5)
    first = run.at_first
    assert run.is_planned and not first.is_planned
    told = {"codec": "int8", "every": 5, "fragments": AUTO_FRAGMENTS}
    assert {name: getattr(first, name) for name in FITTED} == FITTED | FIRST | told
    chosen = run.scheduled(every=9, delay=7, codec="bf16", broadcast_codec="", outer="sgd:rate=1")
    assert (chosen.every, chosen.delay, chosen.codec, chosen.broadcast_codec) == (5, 7, "int8", "auto")
    assert chosen.outer == "sgd:rate=1"


def test_nothing_is_auto_where_bits_may_not_depend_on_times():
    run = RunSettings(codec="int8", mode="strict", release="all")
    assert {name: getattr(run, name) for name in FITTED} == FIXED | {"codec": "int8"}
    assert not run.is_planned and not run.carries_all and run.at_first == run


@pytest.mark.parametrize(
    ("release", "values", "fragments"),
    [
        ("quorum", 1, 1),
        ("quorum", 1 << 17, 1),
        ("quorum", (1 << 17) + 1, 2),
        ("quorum", 25_000_000, 4),
        ("quorum:count=2", 100_000_000, 8),
        ("immediately", 100_000_000, 1),
        ("all", 100_000_000, 1),
    ],
)
def test_auto_fragments_follow_from_the_size_of_the_model(release, values, fragments):
    model = (LeafSpec("w", (values,), "float32"),)
    assert RunSettings(release=release).fragments_of(model) == fragments
    assert RunSettings(release=release, fragments=3).fragments_of(model) == 3


def test_of_a_run_that_carries_all_one_more_offer_of_each_fragment_may_be_in_flight():
    assert RunSettings(every=2, delay=4).offers_in_flight == 3 and RunSettings().offers_in_flight == 1
    assert RunSettings(every=2, delay=4, fragments=1).offers_in_flight == 2
    assert RunSettings().at_first.offers_in_flight == 2


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"every": -1}, 'every must be "auto" or at least 1, got -1'),
        ({"delay": -2}, 'delay must be "auto" or at least 0, got -2'),
        ({"fragments": -1}, 'fragments must be "auto" or at least 1, got -1'),
        ({"fresh_moments": "no"}, "setting fresh_moments must be true or false, got 'no'"),
        ({"every": 2.0}, "setting every must be a whole number, got 2.0"),
        ({"elastic": "1"}, "setting elastic must be a number, got '1'"),
        ({"release": 3}, "setting release must be a text, got 3"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(setting, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        RunSettings.from_dict(setting)


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
