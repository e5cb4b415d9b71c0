"""How large a payload is, by its codecs' scales."""

from __future__ import annotations

import numpy as np
import pytest

from zmqtrain.codecs import fast
from zmqtrain.codecs.base import codec_from_spec
from zmqtrain.codecs.payload import decode_payload, encode_payload, payload_norm

SPECS = [
    "float32",
    "bf16",
    "int8",
    "int4s:block=96",
    "int2",
    "ternary",
    "sign",
    "lowrank:rank=2",
    "topk:density=0.1+int4",
    "dct+int8",
    "randomk:density=0.1+int8",
    "feedback+ternary",
]


@pytest.fixture
def back_to_the_start():
    yield
    fast.use(None)


def norm_of(spec, *segments):
    codecs = (codec_from_spec(spec),) * len(segments)
    frames = encode_payload(codecs, segments)
    counts = [segment.size for segment in segments]
    return payload_norm(codecs, frames, counts), decode_payload(codecs, frames, counts)


@pytest.mark.parametrize("spec", SPECS)
def test_the_measure_is_near_the_norm_and_grows_with_it(spec):
    random = np.random.default_rng(0)
    segments = [random.normal(size=size).astype(np.float32) for size in (70_000, 1, 300)]
    measure, decoded = norm_of(spec, *segments)
    assert 0.5 < measure / np.linalg.norm(decoded) < 6
    larger, _ = norm_of(spec, *(segment * np.float32(1000) for segment in segments))
    assert larger == pytest.approx(1000 * measure, rel=0.02)


@pytest.mark.parametrize("spec", SPECS)
def test_one_value_that_is_wrong_is_seen_among_many(spec):
    values = np.random.default_rng(0).normal(size=70_000).astype(np.float32)
    measure, _ = norm_of(spec, values)
    wrong = values.copy()
    wrong[np.argmax(np.abs(values))] = 1e6
    assert norm_of(spec, wrong)[0] > 10 * measure or spec == "randomk:density=0.1+int8"  # which may not have sent it


@pytest.mark.parametrize("spec", SPECS)
def test_values_near_the_largest_float_are_measured_without_a_warning(spec):
    assert norm_of(spec, np.full(1000, 1e37, np.float32))[0] > 1e18


@pytest.mark.parametrize("spec", ["ternary", "topk:density=0.1+sign"])
def test_the_measure_is_the_same_with_machine_code_and_without(spec, back_to_the_start):
    random = np.random.default_rng(0)
    segments = [random.normal(size=size).astype(np.float32) for size in (70_000, 1, 300)]
    for scale in (1.0, 3e18):
        measures = []
        for machine_code in (True, False):
            fast.use(machine_code)
            measures.append(norm_of(spec, *(segment * np.float32(scale) for segment in segments))[0])
        assert measures[0] == measures[1]


def test_zeros_have_no_norm():
    assert norm_of("ternary", np.zeros(1000, np.float32))[0] == 0.0
    assert payload_norm((), (), ()) == 0.0


@pytest.mark.parametrize("spec", SPECS)
def test_values_whose_squares_are_smaller_than_any_float_have_a_norm_of_zero(spec):
    assert norm_of(spec, np.full(1001, 1e-29, np.float32), np.full(1, 1e-29, np.float32))[0] < 1e-18
