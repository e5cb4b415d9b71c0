"""Specs of whole models: which leaf has which codec, and what is refused."""

from __future__ import annotations

import pytest

from zmqtrain.codecs.base import Coding, by_size, codec_from_spec, coding_from_spec, per_leaf
from zmqtrain.codecs.fragment import Layout
from zmqtrain.codecs.levels import ternary
from zmqtrain.codecs.plain import bf16
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import LeafSpec

MODEL = (
    LeafSpec("embedding", (256, 64), "float32"),
    LeafSpec("layer00/dense_in", (64, 256), "float32"),
    LeafSpec("layer00/dense_norm", (64,), "float32"),
    LeafSpec("layer01/dense_in", (64, 256), "float32"),
    LeafSpec("output/bias", (1500,), "float32"),
)


def names(coding: Coding) -> list[str]:
    return [coding.of(leaf).name for leaf in MODEL]


def test_without_overrides_every_leaf_has_the_one_codec():
    assert names(coding_from_spec("int8")) == ["int8:block=256"] * 5


def test_the_first_override_that_fits_counts():
    coding = coding_from_spec("ternary;<1024=bf16;layer0?/*=int4;*bias=float32;output/*=sign")
    assert names(coding) == ["ternary:block=128", "int4:block=128", "bf16", "int4:block=128", "float32"]


def test_a_model_spec_round_trips_through_its_canonical_name():
    coding = coding_from_spec("topk:density=0.01+int4;<1024=bf16;*embedding=dct+topk+int8:block=64")
    assert coding.name == (
        "topk:density=0.01+int4:block=128;<1024=bf16;*embedding=dct:block=64+topk:density=0.01+int8:block=64"
    )
    assert coding_from_spec(coding.name) == coding


def test_functions_compose_what_specs_say():
    assert by_size(ternary(), small=bf16(), values=1024).name == "ternary:block=128;<1024=bf16"
    assert names(per_leaf(ternary(), {"*bias": bf16()})) == names(coding_from_spec("ternary;*bias=bf16"))


def test_a_fragment_has_the_codec_of_each_of_its_leaves():
    layout = Layout(MODEL, 3)
    coding = coding_from_spec("ternary;<1024=bf16;*bias=float32")
    for fragment in range(3):
        wanted = tuple(coding.of(MODEL[leaf]) for leaf in layout.leaves(fragment))
        assert coding.of_fragment(layout, fragment) == wanted


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ("ternary;bias", "cannot read 'bias'"),
        ("ternary;=int8", "'' is no pattern"),
        ("ternary;<x=int8", "'<x' is no size"),
        ("ternary;<0=int8", "'<0' is no size"),
        ("ternary;*bias=int9", "there is no 'int9'"),
        ("ternary;*bias=int8;*bias=int4", r"'\*bias' is given twice"),
        ("feedback+ternary", "feedback is for gradients"),
        ("ternary;*bias=momentum+int8", "momentum is for gradients"),
        ("ternary;*bias=int8:fragments=2", "say fragments once"),
        ("", "a codec is one of float32, bf16"),
        ("ternary;<" + 5000 * "9" + "=bf16", "characters long"),
        ("ternary;<" + 400 * "9" + "=bf16", "is no size"),
        ("ternary;<010=bf16", "'<010' is no size"),
        ("ternary;" + 600 * "[" + "=bf16", "is no pattern"),
        ("ternary;a\ud800=bf16", "printed"),
        (";".join(["ternary", *(f"a{number}=sign" for number in range(65))]), "65 overrides"),
    ],
)
def test_a_wrong_model_spec_is_refused_with_its_place(spec, place):
    with pytest.raises(ConfigError, match=place):
        coding_from_spec(spec)


def test_a_pattern_that_no_spec_could_hold_is_refused():
    for pattern in ("a;b", "a=b", "a+b", ""):
        with pytest.raises(ConfigError, match="no pattern"):
            per_leaf(ternary(), {pattern: bf16()})


def test_what_no_spec_of_a_run_may_hold_cannot_be_composed_either():
    for codec in (codec_from_spec("feedback+int8"), codec_from_spec("int8:fragments=4")):
        with pytest.raises(ConfigError, match=r"for gradients|fragments once"):
            per_leaf(ternary(), {"*bias": codec})


def test_codecs_of_one_name_are_equal_however_they_were_made():
    assert ternary(64) == codec_from_spec("ternary:block=64") != ternary(32)
    assert len({ternary(64), ternary(64), ternary(32)}) == 2


def test_equal_specs_give_the_same_codec():
    assert codec_from_spec("ternary") is codec_from_spec("ternary:block=128")
