"""k and d from rates and sizes: the smallest that fit, and what a run does under any."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.codecs.fragment import Layout
from zmqtrain.codecs.payload import payload_size
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import LeafSpec, count_values
from zmqtrain.planning.schedule import (
    HELD,
    Load,
    Schedule,
    best_option,
    busiest_allowed,
    density_of,
    exchange_bytes,
    fit,
    fitting_delay,
    fitting_periods,
    held_seconds,
    latency_seconds,
    model_of,
    payload_rate,
    predict,
    slowdown,
    stages,
)

MB = 10**6
LOAD = Load(nodes=4, step_seconds=0.05, bytes_up=5 * MB, bytes_down=5 * MB, node_rate=100e6, hub_rate=100e6)

loads = st.builds(
    Load,
    nodes=st.integers(1, 300),
    step_seconds=st.floats(1e-3, 10),
    bytes_up=st.integers(0, 10**9),
    bytes_down=st.integers(0, 10**9),
    node_rate=st.floats(1e6, 1e10),
    hub_rate=st.floats(1e6, 1e10),
    fragments=st.integers(1, 64),
    shards=st.integers(1, 8),
    node_seconds=st.floats(0, 10),
    hub_seconds=st.floats(0, 10),
    held_seconds=st.floats(0, 1),
)


@settings(max_examples=examples(60))
@given(loads)
def test_k_is_the_smallest_that_leaves_every_stage_and_the_training_thread_room(load):
    every = fit(load).every

    def has_room(k):
        seconds = k * load.step_seconds
        busy = max(stages(load).values()) <= busiest_allowed(load.nodes) * seconds * (1 + 1e-6)
        return busy and load.held_seconds <= HELD * seconds * (1 + 1e-6)

    assert has_room(every)
    assert every == 1 or not has_room((every - 1) * (1 - 2e-6))


@settings(max_examples=examples(60))
@given(loads, st.integers(2, 8))
def test_in_pieces_both_ways_overlap_and_an_exchange_takes_no_longer(load, pieces):
    cut = replace(load, pieces=pieces)
    up, down = (
        max(stages(load)[f"{whose} port, {way}"] for whose in ("the hub's", "a node's")) for way in ("up", "down")
    )
    slowest = max(up, down, load.node_seconds, load.hub_seconds)
    assert slowest <= latency_seconds(cut) <= latency_seconds(load) * (1 + 1e-9)
    assert fitting_delay(cut) <= fitting_delay(load)


def test_the_option_is_chosen_that_is_best_for_the_time_to_a_loss():
    codecs = ["float32", "int8", "ternary", "topk:density=0.05+sign", "topk:density=0.005+sign"]
    model = model_of(25_000_000)

    def chosen(rate, **facts):
        loads = []
        for codec in codecs:
            sizes = exchange_bytes(model, codec, codec, 4)
            load = replace(LOAD, bytes_up=4 * sizes.up, bytes_down=4 * sizes.down, node_rate=rate, hub_rate=rate)
            loads.append((codec, codec, replace(load, pieces=4, **facts)))
        return best_option(loads)

    slow, usual, fast = (chosen(rate) for rate in (1e7, 1e8, 1e12))
    assert density_of(slow.codec) < density_of(usual.codec) < density_of(fast.codec) == 1
    assert fast.time == pytest.approx(1, abs=0.02) and fast.time < usual.time < slow.time
    assert (fast.schedule, fast.outer) == (Schedule(1, 1), "sgd:rate=1")
    busy = chosen(1e12, hub_seconds=2.0)
    assert busy.schedule.every >= 40 and busy.prediction.busiest == "the hub's codec"
    assert busy.outer == "nesterov:rate=0.8,momentum=0.5"


def test_of_an_option_what_is_told_is_kept():
    loads = [("int8", "int8", LOAD)]
    assert best_option(loads, every=7).schedule.every == 7
    assert best_option(loads, delay=9).schedule.delay == 9
    assert best_option(loads).time <= best_option(loads, every=7).time
    assert all(every >= fit(LOAD).every for every in fitting_periods(LOAD))


@settings(max_examples=examples(60))
@given(loads)
def test_what_fits_is_not_put_off_and_comes_by_its_delay(load):
    schedule = fit(load)
    predicted = predict(load, schedule)
    assert predicted.period_steps == schedule.every
    assert predicted.age_steps == schedule.delay
    assert latency_seconds(load) <= schedule.delay * load.step_seconds * (1 + 1e-6)
    assert 1 / (1 + HELD) - 1e-6 <= predicted.efficiency <= 1
    assert max(predicted.port_up, predicted.port_down, predicted.node_port) <= busiest_allowed(load.nodes) + 1e-6


@settings(max_examples=examples(60))
@given(loads)
def test_a_faster_hub_or_more_shards_never_need_a_larger_k_or_d(load):
    before = fit(load)
    for better in (replace(load, hub_rate=2.5 * load.hub_rate), replace(load, shards=2 * load.shards)):
        after = fit(better)
        assert after.every <= before.every and after.delay <= before.delay


def test_the_two_ways_of_the_hubs_port_work_side_by_side():
    assert stages(LOAD)["the hub's port, up"] == pytest.approx(0.2) == stages(LOAD)["the hub's port, down"]
    assert fit(LOAD).every == 5  # 0.2 s of each way in 0.25 s; one after the other they would need 0.4 s
    assert latency_seconds(LOAD) == pytest.approx(0.4)


def test_more_than_one_exchange_is_in_flight_where_one_takes_longer_than_k_steps():
    schedule = fit(LOAD)
    assert schedule == Schedule(5, 11) and schedule.delay > schedule.every
    assert predict(LOAD, schedule).period_steps == 5
    put_off = predict(LOAD, Schedule(5, 5))  # one at a time: each takes 8 steps, and every second offer is put off
    assert (put_off.period_steps, put_off.age_steps) == (10, 8)


def test_a_k_that_is_too_small_makes_the_period_longer_and_not_the_steps():
    predicted = predict(LOAD, Schedule(1, 100))
    assert predicted.period_steps == pytest.approx(4)  # the port is full
    assert predicted.port_up == pytest.approx(1) and predicted.busiest == "the hub's port, up"
    assert predicted.efficiency == 1


def test_the_codecs_of_node_and_hub_bound_k_as_ports_do():
    assert fit(replace(LOAD, node_seconds=0.8)).every == 17
    assert fit(replace(LOAD, hub_seconds=0.8)).every == 17
    assert predict(replace(LOAD, hub_seconds=0.8), Schedule(17, 40)).busiest == "the hub's codec"


def test_training_that_is_held_makes_k_larger_until_it_loses_little():
    held = replace(LOAD, held_seconds=0.03)
    assert fit(held).every == 20
    assert predict(held, Schedule(20, 40)).efficiency == pytest.approx(1 / 1.03)


def test_shards_share_what_the_hubs_port_carries_and_not_what_a_nodes_does():
    halved = stages(replace(LOAD, shards=2))
    assert halved["the hub's port, up"] == pytest.approx(0.1)
    assert halved["a node's port, up"] == pytest.approx(0.05)


def test_shards_on_all_nodes_carry_no_more_than_a_ring_does():
    load = replace(LOAD, shards=4, on_nodes=True)
    ring = 2 * 3 / 4 * load.bytes_up / load.hub_rate
    assert stages(load)["the hub's port, up"] == pytest.approx(ring) == stages(load)["the hub's port, down"]
    with pytest.raises(ConfigError, match="6 brokers do not find a node each among 4"):
        replace(load, shards=6)


def test_one_node_waits_for_nobody():
    load = replace(LOAD, nodes=1, bytes_up=0, bytes_down=0)
    assert fit(load) == Schedule(1, 1)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"nodes": 0}, "nodes must be at least 1, got 0"),
        ({"step_seconds": 0.0}, "step_seconds must be a positive number, got 0.0"),
        ({"hub_rate": float("inf")}, "hub_rate must be a positive number"),
        ({"bytes_up": -1}, "bytes_up must not be negative"),
    ],
)
def test_a_load_that_no_run_has_is_refused(wrong, text):
    with pytest.raises(ConfigError, match=text):
        replace(LOAD, **wrong)


def test_a_step_on_the_cpu_loses_what_the_codec_takes_of_its_cores_and_one_on_a_gpu_does_not():
    assert held_seconds(0.01, 0.1, cores=4, step_cores=1) == pytest.approx(0.01)
    assert held_seconds(0.01, 0.1, cores=4, step_cores=4) == pytest.approx(0.01 + 0.1 / 4)
    with pytest.raises(ConfigError, match="a machine has cores"):
        held_seconds(0.0, 0.0, cores=0, step_cores=1)


def test_a_port_carries_less_payload_than_its_rate():
    assert payload_rate(1e9) == pytest.approx(119.5e6)
    assert payload_rate(1e9, 0.8) == pytest.approx(95.6e6)


# ---------------------------------------------------------------------- bytes


def transformer(width, layers):
    leaves = [LeafSpec("embedding", (50_000, width), "float32")]
    for layer in range(layers):
        shapes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width), (width,), (width,))
        leaves += [LeafSpec(f"{layer}/{number}", shape, "float32") for number, shape in enumerate(shapes)]
    return tuple(leaves)


@pytest.mark.parametrize("codec", ["float32", "bf16", "int8", "int4", "ternary", "topk:density=0.01+int4"])
@pytest.mark.parametrize("fragments", [1, 4])
def test_the_number_of_parameters_alone_gives_a_real_models_bytes_to_within_a_percent(codec, fragments):
    real = transformer(512, 8)
    exact = exchange_bytes(real, codec, codec, fragments)
    guess = exchange_bytes(model_of(count_values(real)), codec, codec, fragments)
    assert guess.up == pytest.approx(exact.up, rel=0.01)
    assert guess.down == pytest.approx(exact.down, rel=0.01)


def test_bytes_are_those_of_the_payload_and_little_more():
    model = transformer(256, 2)
    layout = Layout(model, 3)
    sizes = [
        payload_size(coding_from_spec("ternary").of_fragment(layout, fragment), layout.counts(fragment))
        for fragment in range(3)
    ]
    counted = exchange_bytes(model, "ternary", "int8", 3)
    assert 0 < counted.up - sum(sizes) / 3 < 1000
    assert counted.down > 4 * counted.up


@pytest.mark.parametrize("parameters", [1, 4097, 2**20, 2**20 + 1, 10**7])
def test_the_model_that_stands_for_an_unknown_one_has_its_parameters(parameters):
    assert count_values(model_of(parameters)) == parameters


def test_a_model_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least one parameter"):
        model_of(0)


@pytest.mark.parametrize(
    ("every", "delay", "fragments", "in_flight"),
    [(8, 8, 1, 0), (8, 9, 1, 1), (8, 16, 1, 1), (8, 17, 1, 2), (8, 0, 1, 0), (14, 34, 2, 1), (8, 16, 4, 0)],
)
def test_of_a_fragment_so_many_deltas_are_on_their_way_as_turns_fit_in_the_delay(every, delay, fragments, in_flight):
    assert Schedule(every, delay).deltas_in_flight(fragments) == in_flight


def test_a_dense_code_withholds_nothing_however_rarely_it_is_sent():
    often, rarely = (
        slowdown(64, turn, 2.0, "int8", "int8") / slowdown(64, turn, 2.0, "float32", "float32") for turn in (1, 10)
    )
    assert 1 < often < 1.05 and 1 < rarely < 1.05
