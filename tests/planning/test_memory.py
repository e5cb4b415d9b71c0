"""What a node needs of its card and of its host, and what would fit where a plan does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as checks
from hypothesis import strategies as st

from tests.fixed import fixed_run
from tests.grids import examples
from zmqtrain.core.errors import ConfigError, ModelMismatch
from zmqtrain.core.types import LeafSpec
from zmqtrain.planning.costs import MemoryEstimate
from zmqtrain.planning.schedule import model_of

PARAMETERS = 10_000_000
MODEL = model_of(PARAMETERS)
ADAM = 8 * PARAMETERS
SETTINGS = fixed_run(every=8, delay=4)


def amount(plan, what):
    lines = {line.what: line for line in plan.lines}
    return lines[what].device_bytes, lines[what].host_bytes


def test_what_training_alone_needs_is_counted_exactly():
    plan = MemoryEstimate(MODEL, ADAM, SETTINGS, activation_bytes=123)
    assert amount(plan, "parameters") == amount(plan, "gradients") == (4 * PARAMETERS, 0)
    assert amount(plan, "optimizer") == (ADAM, 0)
    assert amount(plan, "activations of one batch") == (123, 0)


def test_the_sums_are_those_of_the_lines():
    plan = MemoryEstimate(MODEL, ADAM, SETTINGS, "host", 2)
    assert plan.device_bytes == sum(line.device_bytes for line in plan.lines)
    assert plan.host_bytes == sum(line.host_bytes for line in plan.lines)


def test_the_anchor_is_float32_whatever_the_parameters_are_and_can_be_on_the_host():
    half = tuple(LeafSpec(leaf.path, leaf.shape, "bfloat16") for leaf in MODEL)
    assert amount(MemoryEstimate(half, ADAM, SETTINGS), "parameters") == (2 * PARAMETERS, 0)
    assert amount(MemoryEstimate(half, ADAM, SETTINGS), "anchor") == (4 * PARAMETERS, 0)
    assert amount(MemoryEstimate(half, ADAM, SETTINGS, "host"), "anchor") == (0, 4 * PARAMETERS)


def test_several_batches_a_step_are_summed_in_float32():
    plan = MemoryEstimate(MODEL, ADAM, SETTINGS, batches=4)
    assert amount(plan, "sum of gradients (several batches a step)") == (4 * PARAMETERS, 0)


def test_a_fragment_is_what_travels_and_what_is_sent_is_kept_compressed_for_each_offer_in_flight():
    whole, cut = MemoryEstimate(MODEL, ADAM, SETTINGS), MemoryEstimate(MODEL, ADAM, replace(SETTINGS, fragments=4))
    assert amount(cut, "offered fragment")[0] == amount(whole, "offered fragment")[0] / 4
    several = MemoryEstimate(MODEL, ADAM, replace(SETTINGS, delay=24))
    assert amount(several, "sent, not yet landed")[1] == 3 * amount(whole, "sent, not yet landed")[1]
    assert amount(several, "offered fragment") > amount(whole, "offered fragment")


def test_what_starting_needs_more_than_training_is_a_line_of_its_own():
    plan = MemoryEstimate(MODEL, 20 * ADAM, replace(SETTINGS, fragments=32))
    assert plan.lines[-1].what.startswith("more, while the exchange is compiled")
    assert plan.device_bytes == 4 * 4 * PARAMETERS + 20 * ADAM + 3 * -(-4 * PARAMETERS // 32)


def test_a_codec_on_the_host_needs_the_fragments_there_too():
    device, host = (MemoryEstimate(MODEL, ADAM, SETTINGS, codec_on=place) for place in ("device", "host"))
    assert amount(host, "offered fragment")[0] < amount(device, "offered fragment")[0]
    assert host.host_bytes > device.host_bytes


@checks(max_examples=examples(40))
@given(
    st.integers(1, 10**8),
    st.integers(0, 3),
    st.sampled_from([1, 2, 8]),
    st.sampled_from(["device", "host"]),
    st.integers(0, 10**9),
)
def test_each_thing_that_is_advised_makes_the_card_hold_less_or_the_same(parameters, slots, fragments, place, more):
    model = model_of(max(parameters, 4096 * fragments))
    plan = MemoryEstimate(
        model, 4 * slots * parameters, replace(SETTINGS, fragments=fragments), place, activation_bytes=more
    )
    for change, *_ in plan._choices():
        if "batches" not in change.text:
            assert replace(plan, **change.fields).device_bytes <= plan.device_bytes


def test_what_fits_is_said_to_fit_and_that_activations_are_not_counted():
    plan = MemoryEstimate(MODEL, ADAM, SETTINGS)
    assert plan.advice(10**9) == "fits: 0.40 GB of 1.00 GB on the card, activations not counted"
    assert replace(plan, activation_bytes=10**8).advice(10**9) == "fits: 0.50 GB of 1.00 GB on the card"


def test_what_does_not_fit_is_answered_with_each_single_change_that_helps():
    text = MemoryEstimate(MODEL, ADAM, SETTINGS).advice(350 * 10**6)
    assert text.startswith("does not fit: 0.40 GB on the card, of which 0.35 GB can be used. It would with ")
    assert "the anchor on the host (0.18 GB)" in text and "4 fragments (0.27 GB)" in text
    assert "batches" not in text  # no activations are known that smaller batches would shrink


def test_where_no_single_change_helps_the_fewest_together_are_named():
    text = MemoryEstimate(MODEL, ADAM, SETTINGS).advice(150 * 10**6)
    assert "parameters in bfloat16" in text and " and " in text


def test_smaller_batches_help_where_activations_are_what_is_large():
    text = MemoryEstimate(MODEL, ADAM, SETTINGS, activation_bytes=4 * 10**9).advice(2 * 10**9)
    assert "4 batches a step, each 1/4 as large (1.44 GB)" in text


def test_where_nothing_helps_that_is_said_with_the_least_it_could_be():
    text = MemoryEstimate(model_of(10**9), 8 * 10**9, SETTINGS).advice(10**9)
    assert "Even with" in text and text.endswith("or a larger card")
    least = MemoryEstimate(tuple(LeafSpec("x", (4000,), "bfloat16") for _ in range(2)), 0, SETTINGS, "host").advice(10)
    assert "Take a smaller model" in least


@pytest.mark.parametrize("wrong", [{"batches": 0}, {"activation_bytes": -1}, {"opt_state_bytes": -1}])
def test_numbers_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError, match="at least one batch"):
        MemoryEstimate(MODEL, **({"opt_state_bytes": ADAM, "settings": SETTINGS} | wrong))


def test_a_model_of_whole_numbers_is_refused():
    with pytest.raises(ModelMismatch, match="step int32"):
        MemoryEstimate((LeafSpec("step", (1,), "int32"),), 0, SETTINGS)
