"""Which PC holds which segments: equal to brute force, within every memory, and an answer where nothing fits."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zmqtrain as zt
from tests.grids import examples
from zmqtrain.core.errors import ConfigError, DoesNotFit
from zmqtrain.pipeline.costs import PC, SegmentCost, TiedLeaf
from zmqtrain.pipeline.partition import partition
from zmqtrain.pipeline.schedule import Schedule
from zmqtrain.transport.memory import LinkModel

LINK = LinkModel(8e6, 0.01)  # a megabyte a second


def layer(name="layer", forward=0.1, backward=0.3, held=1000, carry=10, **more):
    return SegmentCost(
        name=name, forward_seconds=forward, backward_seconds=backward, parameter_bytes=held // 4, held_bytes=held,
        carry_bytes=carry, **more,
    )  # fmt: skip


def pcs_of(*memories, **more):
    return [PC(name=f"pc-{number}", memory_bytes=memory, **more) for number, memory in enumerate(memories)]


# ---------------------------------------------------------------------- brute force, in plain loops


def stage_of(costs, pc, begin, end, depth, versions):
    """Return the seconds of both passes of one stage on one card, or None if it does not fit."""
    inside = costs[begin:end]
    leaves = {leaf.name: leaf for one in inside for leaf in one.tied}.values()
    came = costs[begin - 1].carry_bytes if begin else 0
    goes = costs[end - 1].carry_bytes if end < len(costs) else 0
    memory = sum(one.held_bytes + one.activation_bytes for one in inside) + sum(leaf.held_bytes for leaf in leaves)
    memory += (versions - 1) * sum(one.parameter_bytes for one in [*inside, *leaves])
    memory += depth * came + came + goes
    passes = sum(one.forward_seconds[pc.name] for one in inside), sum(one.backward_seconds[pc.name] for one in inside)
    return passes if memory <= pc.memory_bytes else None


def wire(costs, cut):
    size = costs[cut - 1].carry_bytes if costs[cut - 1].wire_bytes is None else costs[cut - 1].wire_bytes
    return LINK.seconds(size) if 0 < cut < len(costs) else 0.0


def tied_of(costs, begin, end):
    """Return the seconds of sums with later stages, and with all others, of one stage."""
    later = everyone = 0.0
    for leaf in {leaf.name: leaf for one in costs[begin:end] for leaf in one.tied}.values():
        after, before = (any(leaf.name in {mine.name for mine in one.tied} for one in part)
                         for part in (costs[end:], costs[:begin]))  # fmt: skip
        later += after * LINK.seconds(leaf.parameter_bytes)
        everyone += (after + before) * LINK.seconds(leaf.parameter_bytes)
    return later, everyone


def best_step(costs, pcs, micro_batches, schedule, known):
    """Return the shortest step of a pipeline of all these PCs, in any order, at any cuts. known: stages seen before."""
    count, best = len(costs), float("inf")

    def stage(pc, begin, end, depth):
        """Return what a stage adds to (the period, the fill); None: it does not fit."""
        passes = stage_of(costs, pc, begin, end, depth, schedule.copies_held)
        if passes is None:
            return None
        seconds = sum(passes)
        hop = 2 * (wire(costs, end) + LINK.latency_seconds) if end < count else 0.0
        later, everyone = tied_of(costs, begin, end)
        port = wire(costs, begin) + wire(costs, end)
        port += 0.0 if schedule.flushes else everyone / micro_batches
        if schedule.name == "gpipe":
            one_way = max(wire(costs, begin), wire(costs, end))
            return sum(max(part, one_way) for part in passes), seconds + hop + later
        return max(seconds, port, hop), seconds + hop + later

    def extend(order, begin, period, fill):
        nonlocal best
        if not order:
            step = (micro_batches - 1) * period + fill if schedule.flushes else micro_batches * period
            best = min(best, step)
            return
        depth = schedule.most_in_flight(0, len(order), micro_batches)
        for end in range(begin + 1, count - len(order) + 2) if len(order) > 1 else (count,):
            key = order[0].name, begin, end, depth
            if key not in known:
                known[key] = stage(order[0], begin, end, depth)
            if known[key] is not None:
                extend(order[1:], end, max(period, known[key][0]), fill + known[key][1])

    if len(pcs) <= min(count, micro_batches):
        for order in permutations(pcs):
            extend(order, 0, 0.0, 0.0)
    return best


def groups_of(items):
    """Give every way to put some of the items in groups."""
    if not items:
        yield []
        return
    first, *rest = items
    for groups in groups_of(rest):
        yield groups  # the first is not used
        yield [[first], *groups]
        for place in range(len(groups)):
            yield [*groups[:place], [first, *groups[place]], *groups[place + 1 :]]


def best_rate(costs, pcs, micro_batches, schedule):
    steps, known, rates = {}, {}, [0.0]
    for groups in groups_of(list(pcs)):
        rate = 0.0
        for group in groups:
            names = tuple(pc.name for pc in group)
            if names not in steps:
                steps[names] = best_step(costs, group, micro_batches, schedule, known)
            rate += micro_batches / steps[names]
        rates.append(rate)
    return max(rates)


@st.composite
def problems(draw):
    pcs = pcs_of(*(draw(st.integers(200, 3000)) for _ in range(draw(st.integers(1, 5)))))
    seconds = st.floats(0.01, 1.0)
    slow = {pc.name: draw(st.floats(0.3, 3.0)) for pc in pcs}
    segments = []
    for number in range(draw(st.integers(1, 10))):
        forward, backward = draw(seconds), draw(seconds)
        tied = draw(
            st.sampled_from(
                [
                    (),
                    (),
                    (TiedLeaf(name="embedding", parameter_bytes=50_000, held_bytes=100),),
                    (TiedLeaf(name="head", parameter_bytes=9, held_bytes=20),),
                ]
            )
        )
        segments.append(
            SegmentCost(
                name=f"layer {number}",
                forward_seconds={name: forward * factor for name, factor in slow.items()},
                backward_seconds={name: backward * factor for name, factor in slow.items()},
                parameter_bytes=draw(st.integers(1, 100)),
                held_bytes=draw(st.integers(1, 500)),
                carry_bytes=draw(st.integers(0, 60)),
                wire_bytes=draw(st.sampled_from([None, 0, 1000, 200_000])),
                activation_bytes=draw(st.integers(0, 200)),
                tied=tied,
            )
        )
    micro_batches = draw(st.integers(1, 12))
    schedule = Schedule(draw(st.sampled_from(["1f1b", "gpipe", "2bw"])))
    return segments, pcs, micro_batches, schedule


@settings(max_examples=examples(60))
@given(problems())
def test_the_plan_is_that_of_brute_force_and_fits_every_memory(problem):
    costs, pcs, micro_batches, schedule = problem
    expected = best_rate(costs, pcs, micro_batches, schedule)
    if not expected:
        with pytest.raises(DoesNotFit):
            partition(costs, pcs, micro_batches, schedule=schedule.name, link=LINK)
        return
    plan = partition(costs, pcs, micro_batches, schedule=schedule.name, link=LINK)
    assert plan.micro_batches_per_second == pytest.approx(expected, rel=1e-6)
    by_name = {pc.name: pc for pc in pcs}
    for pipeline in plan.pipelines:
        assert [one.end for one in pipeline.stages[:-1]] == [one.begin for one in pipeline.stages[1:]]
        assert (pipeline.stages[0].begin, pipeline.stages[-1].end) == (0, len(costs))
        for place, one in enumerate(pipeline.stages):
            depth = schedule.most_in_flight(place, len(pipeline.stages), micro_batches)
            assert one.most_in_flight == depth and one.memory_bytes <= by_name[one.pc].memory_bytes
            assert stage_of(costs, by_name[one.pc], one.begin, one.end, depth, schedule.copies_held) is not None
    used = [one.pc for pipeline in plan.pipelines for one in pipeline.stages]
    assert sorted([*used, *plan.unused]) == sorted(by_name)


# ---------------------------------------------------------------------- what a plan should be


def test_a_model_that_fits_every_pc_is_trained_whole_on_each():
    plan = zt.partition([layer()] * 4, pcs_of(8000, 8000, 8000), link=LINK)
    assert [len(one.stages) for one in plan.pipelines] == [1, 1, 1]
    assert all(one.efficiency == pytest.approx(1.0) for one in plan.pipelines)


def test_four_pcs_of_which_two_hold_the_model_are_two_pipelines():
    plan = partition([layer()] * 4, pcs_of(2500, 2500, 2500, 2500), link=LINK)
    assert [len(one.stages) for one in plan.pipelines] == [2, 2]


def test_pcs_per_pipeline_can_be_told():
    plan = partition([layer()] * 4, pcs_of(*[8000] * 4), link=LINK, pcs_per_pipeline=4)
    assert [len(one.stages) for one in plan.pipelines] == [4]
    plan = partition([layer()] * 4, pcs_of(*[8000] * 5), link=LINK, pcs_per_pipeline=2)
    assert [len(one.stages) for one in plan.pipelines] == [2, 2] and len(plan.unused) == 1


def test_a_pc_at_half_speed_gets_half_the_layers():
    pcs = [*pcs_of(10_000, 10_000), PC(name="slow", memory_bytes=10_000, speed=0.5)]
    plan = partition([layer(held=100)] * 20, pcs, 64, link=LINK, pcs_per_pipeline=3)
    layers = {one.pc: one.end - one.begin for one in plan.pipelines[0].stages}
    assert layers == {"pc-0": 8, "pc-1": 8, "slow": 4}
    speeds, whole = 2.5, 20 * 0.4
    bubble = 1 - plan.pipelines[0].bubble
    assert plan.micro_batches_per_second * whole / speeds == pytest.approx(bubble, rel=1e-6)


def test_the_carries_in_flight_need_memory_where_they_wait():
    wide = [layer(held=100, carry=300)] * 8
    stages = partition(wide, pcs_of(1000, 5000), 8, link=LINK, pcs_per_pipeline=2).pipelines[0].stages
    assert [one.most_in_flight for one in stages] == [5, 1]
    assert stages[1].memory_bytes == 100 * (stages[1].end - stages[1].begin) + 2 * 300


def test_a_cut_is_where_little_goes_over_the_wire():
    carries = [500_000, 500_000, 1000, 500_000, 500_000]
    costs = [layer(carry=0, wire_bytes=size) for size in carries]
    (pipeline,) = partition(costs, pcs_of(3500, 3500), link=LINK).pipelines
    assert pipeline.stages[0].end == 3


def test_leaves_that_two_stages_share_are_held_by_both_and_their_sum_ends_a_step():
    embedding = TiedLeaf(name="embedding", parameter_bytes=2_000_000, held_bytes=8_000_000)
    costs = [layer(tied=(embedding,)), layer(), layer(), layer(tied=(embedding,))]
    (apart,) = partition(costs, pcs_of(8_003_000, 8_003_000), 8, link=LINK).pipelines
    assert [one.memory_bytes for one in apart.stages] == [8_002_000 + 10, 8_002_000 + 2 * 10]
    assert apart.tied_seconds == pytest.approx(2.0)
    (untied,) = partition([layer()] * 4, pcs_of(3000, 3000), 8, link=LINK).pipelines
    assert apart.step_seconds - untied.step_seconds == pytest.approx(2.0)
    both = pcs_of(12_004_000, 12_004_000)
    (without_flush,) = partition(costs, both, 8, link=LINK, schedule="2bw", pcs_per_pipeline=2).pipelines
    assert without_flush.step_seconds == pytest.approx(8 * 0.8)


@pytest.mark.parametrize(("schedule", "more"), [(Schedule("2bw"), 1000), (Schedule("2bw", predicts=False), 500)])
def test_two_versions_of_the_parameters_need_memory_without_flush_and_a_prediction_a_third(schedule, more):
    (flush,) = partition([layer()] * 4, pcs_of(4000, 4000), 8, link=LINK, pcs_per_pipeline=2).pipelines
    (no_flush,) = partition(
        [layer()] * 4, pcs_of(4000, 4000), 8, link=LINK, schedule=schedule, pcs_per_pipeline=2
    ).pipelines
    assert no_flush.stages[0].memory_bytes - flush.stages[0].memory_bytes == more


def test_too_few_micro_batches_for_the_stages_that_a_model_needs_are_named():
    with pytest.raises(DoesNotFit, match=r"2 micro-batches a step.*with 4 micro-batches it fits"):
        partition([layer()] * 4, pcs_of(1100, 1100, 1100, 1100), 2, link=LINK)


def test_a_thin_wire_is_named():
    costs = [layer(held=1000, carry=0, wire_bytes=600_000)] * 4
    (pipeline,) = partition(costs, pcs_of(2500, 2500), 8, link=LINK).pipelines
    assert pipeline.wire_bound and pipeline.period_seconds == pytest.approx(2 * (0.6 + 0.01))
    assert not partition([layer()] * 4, pcs_of(2500, 2500), 8, link=LINK).pipelines[0].wire_bound


def test_fewer_segments_than_pcs_leave_pcs_unused():
    plan = partition([layer(), layer()], pcs_of(1500, 1500, 1500), 4, link=LINK)
    assert len(plan.pipelines[0].stages) == 2 and len(plan.unused) == 1


def test_twenty_pcs_that_all_differ_are_planned_and_every_memory_is_respected():
    pcs = [PC(name=f"pc-{n}", memory_bytes=1600 + 10 * n, speed=1 + n / 50) for n in range(20)]
    plan = partition([layer()] * 8, pcs, 32, link=LINK)
    memories = {pc.name: pc.memory_bytes for pc in pcs}
    stages = [one for pipeline in plan.pipelines for one in pipeline.stages]
    assert len(stages) + len(plan.unused) == 20 and len(plan.pipelines) >= 2
    assert all(one.memory_bytes <= memories[one.pc] for one in stages)


def test_twenty_pcs_of_four_kinds_do_no_less_together_than_each_kind_apart():
    kinds = [(5500, 0.5), (7500, 0.7), (11_500, 1.0), (23_500, 1.5)]
    pcs = [PC(name=f"{m}-{n}", memory_bytes=m, speed=speed) for m, speed in kinds for n in range(5)]
    model = [layer(held=870, carry=4)] * 26
    together = partition(model, pcs, 32, link=LINK)
    apart = [partition(model, pcs[first : first + 5], 32, link=LINK) for first in range(0, 20, 5)]
    assert together.micro_batches_per_second >= sum(one.micro_batches_per_second for one in apart) * (1 - 1e-9)


# ---------------------------------------------------------------------- several cards in a PC


def cards(**more):
    return [PC(name="two cards", cards=2, **more)]


def one_stage(plan):
    return plan.pipelines[0].stages[0]


def test_several_cards_divide_the_batch_if_each_can_hold_the_stage():
    one = one_stage(partition([layer(carry=10_000)] * 4, cards(memory_bytes=5000, card_bytes_per_second=1e9)))
    assert one.sharding == "batch" and one.seconds == pytest.approx(0.8, rel=1e-3)


def test_cards_that_cannot_hold_the_stage_each_hold_a_part_of_it():
    one = one_stage(partition([layer(carry=1000)] * 4, cards(memory_bytes=2400, card_bytes_per_second=1e6)))
    assert one.sharding == "fsdp" and one.memory_bytes == 4000 // 2 + 250


def test_cards_split_the_layers_where_gathering_them_costs_more_than_their_carries():
    small = [layer(carry=1)] * 4
    one = one_stage(partition(small, cards(memory_bytes=2400, card_bytes_per_second=1e4)))
    assert one.sharding == "tensor"
    assert one.seconds == pytest.approx(4 * 0.4 / 2 + 6 * 2 * 0.5 * 4 * 1 / 1e4)


# ---------------------------------------------------------------------- what does not fit


def test_a_layer_that_fits_no_pc_is_named_with_its_bytes():
    costs = [layer(), layer("head", held=9000), layer()]
    with pytest.raises(DoesNotFit) as caught:
        partition(costs, pcs_of(4000, 5000), link=LINK)
    assert caught.value.segment == "head"
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (9000 + 30, 5000)
    assert "optimizer" in str(caught.value)


def test_a_layer_that_fits_with_smaller_micro_batches_is_told_so():
    with pytest.raises(DoesNotFit, match="half"):
        partition([layer(activation_bytes=4500)], pcs_of(4000), link=LINK)


def test_a_model_that_needs_more_pcs_is_told_how_many():
    with pytest.raises(DoesNotFit, match="2 more PCs like pc-0") as caught:
        partition([layer(carry=0)] * 4, pcs_of(1500, 1500), link=LINK)
    assert caught.value.segment == "" and caught.value.needed_bytes == 4000 and caught.value.available_bytes == 3000


def test_pipelines_that_are_too_short_are_told_how_long_they_must_be():
    with pytest.raises(DoesNotFit, match="of 4 PCs"):
        partition([layer(carry=0)] * 4, pcs_of(*[1500] * 4), link=LINK, pcs_per_pipeline=2)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: partition([], pcs_of(1)),
        lambda: partition([layer()], []),
        lambda: partition([layer()], [PC(name="a", memory_bytes=1), PC(name="a", memory_bytes=1)]),
        lambda: partition([layer()] * 4, pcs_of(*[9999] * 4), 3, pcs_per_pipeline=4),
        lambda: partition([layer()], pcs_of(9999), pcs_per_pipeline=2),
        lambda: partition([layer()], pcs_of(9999), schedule="zero-bubble"),
        lambda: partition([layer(forward={"other": 1.0})], pcs_of(9999)),
        lambda: layer(held=-4),
        lambda: layer(forward=-1.0),
        lambda: PC(name="a", memory_bytes=1, speed=0.0),
    ],
)
def test_what_is_no_question_is_a_config_error(ask):
    with pytest.raises(ConfigError):
        ask()
