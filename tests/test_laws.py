"""The laws of the one equation, whatever the network does: equal anchors bit for bit, nothing lost or landed twice.

A schedule of deliveries, delays, cut connections, deaths, newcomers, corrupt bytes, dropped aggregates, restarts of
the hub, and nodes that diverge and whose contributions are taken back, happens to the world of ledger_world.py.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fixed import fixed_run
from tests.grids import examples
from tests.ledger_world import live_world
from tests.numpy_node import BULK
from zmqtrain.broker.checkpoint import RunFolder
from zmqtrain.core.settings import AUTO_FRAGMENTS, RunSettings
from zmqtrain.core.types import LeafSpec
from zmqtrain.protocol.messages import Aggregate
from zmqtrain.protocol.schedules import Plan, Replanning

WIDE = (LeafSpec("w", (9, 4096), "float32"), LeafSpec("b", (7,), "float32"), LeafSpec("v", (5000,), "float32"))
"""Twelve blocks: up to three fragments of each of four brokers."""


def happen(world, event, number):
    names = list(world.nodes)
    node = world.nodes[names[number % len(names)]]
    lane = number % 2
    if event == "train":
        node.train()
        node.offer(number % world.fragments)
    elif event == "poll":
        for _ in range(1 + number % 3):
            node.poll()
    elif event == "work":
        node.run_jobs(1 + number % 3)
    elif event == "up":
        for _ in range(1 + number % 3):
            world.receive(node, lane)
    elif event == "down":
        for _ in range(1 + number % 3):
            node.receive(lane)
    elif event == "settle":
        world.settle()
    elif event == "pass":
        world.pass_time(0.1 * (1 + number))
    elif event == "silence":
        world.pass_time(4.0)
    elif event == "cut":
        node.line.clear()
        if number % 2:
            world.carry_out(world.hub.gone(node.id, "its connection is gone", world.now))
        node.carry_out(node.peer.distrust("cut", world.now))
    elif event == "kill" and len(names) > 1:
        world.dead[node.id] = world.nodes.pop(node.id)
        if number % 2:
            world.carry_out(world.hub.gone(node.id, "its connection is gone", world.now))
    elif event == "join" and len(names) < 5:
        world.add_node()
    elif event == "corrupt":
        node.corrupt_next = True
    elif event == "diverge" and len(names) > 1:
        node.too_large = 3  # so many are refused for their size: it is out, and what it had contributed is taken back
    elif event == "slow":
        node.slow = True
    elif event == "drop":
        queue = node.line.down[BULK]
        whole = {m.transfer for m in queue if isinstance(m, Aggregate)}
        kept = [m for m in queue if (m[1] if isinstance(m, tuple) else m.transfer) not in whole]
        queue.clear()
        queue.extend(kept)
    elif event == "save":
        world.save()
    elif event == "crash":
        world.crash()
    for one in world.nodes.values():
        one.check_pending()


USUAL = ["train"] * 6 + ["settle"] * 4 + ["poll"] * 5 + ["work"] * 3 + ["up"] * 2 + ["down"] * 2 + ["pass"] * 4
FAULTS = ["cut", "kill", "join", "corrupt", "diverge", "slow", "drop", "silence", "save", "crash"]
RELEASES = (
    "all",
    "quorum:count=0,share=0.5,patience=2",
    "immediately",
    "count:contributions=2",
    "time:seconds=0.3",
    "bounded:staleness=1",
)

SETTINGS = st.builds(
    RunSettings,
    codec=st.sampled_from(["float32", "bf16", "int8:block=256", "ternary:block=128"]),
    broadcast_codec=st.sampled_from(["float32", "int8:block=256", "ternary:block=128"]),
    fragments=st.integers(1, 3),
    release=st.sampled_from(RELEASES),
    outer=st.sampled_from(["sgd:rate=1", "nesterov:rate=0.8,momentum=0.5"]),
    every=st.just(2),
    delay=st.sampled_from([1, 4]),
)


@settings(max_examples=examples(150), derandomize=True, phases=(Phase.explicit, Phase.generate, Phase.shrink))
@given(
    run=SETTINGS,
    nodes=st.integers(1, 4),
    events=st.lists(st.tuples(st.sampled_from(USUAL + FAULTS), st.integers(0, 11)), min_size=20, max_size=120),
)
def test_whatever_the_network_does_the_laws_hold(run, nodes, events):
    world = live_world(run, nodes)
    for event, number in events:
        happen(world, event, number)
    world.drain()
    world.check_the_end()


# ---------------------------------------------------------------------- where codecs and outer optimizer are fitted

FITTED_CODECS = ("float32", "int8:block=256", "ternary:block=128", "topk:density=0.05+sign:block=512", "")
OUTERS = ("sgd:rate=1", "nesterov:rate=0.8,momentum=0.5", "")


class Fickle:
    """A planner that wants something else each time it is asked."""

    def __init__(self, seed):
        self.random, self.wanted = Random(seed), set()

    def __call__(self, model, members, now, crowded):
        codec, broadcast = self.random.choice(FITTED_CODECS), self.random.choice(FITTED_CODECS)
        self.wanted.add((codec, broadcast))
        delay = self.random.choice((1, 2, 5))
        return Plan(
            2, delay, "", codec, broadcast, self.random.choice(OUTERS), gain=self.random.choice((1.5, 2.0, 9.0))
        )


@settings(max_examples=examples(80), derandomize=True, phases=(Phase.explicit, Phase.generate, Phase.shrink))
@given(
    release=st.sampled_from(RELEASES),
    fragments=st.sampled_from([AUTO_FRAGMENTS, 1, 3]),
    nodes=st.integers(1, 4),
    seed=st.integers(0, 99),
    events=st.lists(st.tuples(st.sampled_from(USUAL + FAULTS), st.integers(0, 11)), min_size=20, max_size=120),
)
def test_the_laws_hold_whichever_codecs_follow_each_other_on_both_ways(release, fragments, nodes, seed, events):
    world = live_world(RunSettings(release=release, fragments=fragments), nodes, planner=Fickle(seed))
    for event, number in events:
        happen(world, event, number)
    world.drain()
    world.check_the_end()


@pytest.mark.parametrize("release", RELEASES)
def test_the_laws_hold_over_a_long_run_whose_codecs_change_while_deltas_of_the_former_ones_are_in_flight(
    release, monkeypatch
):
    monkeypatch.setattr("zmqtrain.core.settings.PIECES", ((1 << 20, 3),))  # so that a small model is cut, too
    random, planner = Random(release), Fickle(release)
    world = live_world(RunSettings(release=release), random.randint(2, 4), planner=planner)
    assert world.fragments == (3 if release.startswith("quorum") else 1)
    held = set()
    for _ in range(1200):
        happen(world, random.choice(FAULTS if random.random() < 0.04 else USUAL), random.randrange(12))
        held.add((world.aggregator.broadcast_coding.name, world.aggregator.outer.name))
    assert world.hub.version >= 12 and len(held) > 2, "too little happened for a test"
    world.drain()
    world.check_the_end()


def test_the_laws_hold_when_a_hub_whose_codecs_have_changed_comes_back_from_its_folder(tmp_path):
    random = Random("folder")
    world = live_world(RunSettings(release="immediately"), 3, RunFolder(tmp_path), planner=Fickle("folder"))
    held = set()
    for turn in range(8):
        for _ in range(60):
            happen(world, random.choice(USUAL), random.randrange(12))
        held.add(world.aggregator.broadcast_coding.name)
        happen(world, random.choice(("save", "crash", "cut")) if turn else "crash", turn)
    assert len(held) > 2
    world.drain()
    world.check_the_end()
    world.folder.close()


def test_a_hub_that_comes_back_without_a_schedule_that_nodes_know_takes_their_deltas_all_the_same():
    wanted = ["bf16"]

    def planner(model, members, now, crowded):
        return Plan(2, 1, "", wanted[-1], wanted[-1], gain=9.0)

    def train(turns, codec=""):
        """Train for so many turns, or until all nodes code so."""
        for _ in range(turns):
            for event in ("train", "settle", "poll", "poll", "work", "settle", "pass"):
                happen(world, event, 0), happen(world, event, 1)
            if all(node.codecs is not None and node.codecs[0] == codec for node in world.nodes.values()):
                break

    world = live_world(RunSettings(release="immediately"), 2, planner=planner)
    train(1000, "bf16")
    world.save()
    wanted.append("int8:block=256")
    train(1000, "int8:block=256")
    assert world.hub.timetable.takes("int8:block=256")
    world.crash()
    world.hub.replanning = Replanning(
        world.hub.timetable, None, world.hub.rule
    )  # no word of another schedule comes to help
    assert not world.hub.timetable.takes("int8:block=256")
    before = set(world.landed_at)
    train(20)
    assert len(world.landed_at.keys() - before) > 20
    world.drain()
    world.check_the_end()


@pytest.mark.parametrize("shards", [2, 4])
@settings(max_examples=examples(12), derandomize=True, phases=(Phase.explicit, Phase.generate, Phase.shrink))
@given(
    run=SETTINGS,
    nodes=st.integers(1, 3),
    events=st.lists(st.tuples(st.sampled_from(USUAL + FAULTS), st.integers(0, 11)), min_size=20, max_size=60),
)
def test_the_laws_hold_at_each_of_several_shards_whatever_befalls_the_others(shards, run, nodes, events):
    run = replace(run, shards=shards, initial="founder")
    worlds = [live_world(run, nodes, model=WIDE, shard=shard) for shard in range(shards)]
    for turn, (event, number) in enumerate(events):
        for shard, world in enumerate(worlds):
            fails = event in FAULTS and turn % shards != shard
            happen(world, "settle" if fails else event, number)
    for world in worlds:
        world.drain()
        world.check_the_end()
    parts = [world.aggregator.arrays() for world in worlds]
    for leaf in WIDE:
        assert sum(part.get(f"published/{leaf.path}", np.zeros(0)).size for part in parts) == leaf.values


CODECS = ("float32", "bf16", "int8:block=256", "ternary:block=128")

LONG = [(release, codec) for i, release in enumerate(RELEASES) for j, codec in enumerate(CODECS) if (i + j) % 2 == 0]
"""Every rule with two codecs, every codec with three rules."""


@pytest.mark.parametrize(("release", "codec"), LONG)
def test_the_laws_hold_over_a_long_run_with_faults(release, codec):
    random = Random(f"{release} {codec}")
    outer = random.choice(("sgd:rate=1", "nesterov:rate=0.8,momentum=0.5"))
    run = fixed_run(
        release=release, codec=codec, broadcast_codec=random.choice((codec, "float32")), outer=outer, every=2,
        fragments=random.randint(1, 3), delay=random.choice((1, 4)),
    )  # fmt: skip
    world = live_world(run, random.randint(2, 4))
    for _ in range(1200):
        happen(world, random.choice(FAULTS if random.random() < 0.04 else USUAL), random.randrange(12))
    assert world.hub.version >= 12, "too little happened for a test"
    world.drain()
    world.check_the_end()


@pytest.mark.parametrize("release", RELEASES)
def test_the_laws_hold_where_what_nodes_contributed_that_diverge_is_taken_back_again_and_again(release):
    random = Random(f"{release}, taken back")
    codec, outer = random.choice(CODECS), random.choice(("sgd:rate=1", "nesterov:rate=0.8,momentum=0.5"))
    world = live_world(fixed_run(release=release, codec=codec, outer=outer, every=2, delay=4, fragments=2), 4)
    for turn in range(900):
        fault = random.choice(("cut", "drop", "slow", "join", "save", "crash")) if random.random() < 0.02 else ""
        happen(world, "diverge" if turn % 100 == 50 else fault or random.choice(USUAL), random.randrange(12))
    assert world.taken_back, "too little happened for a test"
    world.drain()
    world.check_the_end()


def test_the_laws_hold_when_the_hub_comes_back_from_its_folder(tmp_path):
    random = Random("folder")
    run = fixed_run(release="immediately", every=2, delay=4, fragments=2, codec="ternary:block=128")
    world = live_world(run, 3, RunFolder(tmp_path))
    for turn in range(8):
        for _ in range(60):
            happen(world, random.choice(USUAL), random.randrange(12))
        happen(world, random.choice(("save", "crash", "cut")) if turn else "crash", turn)
    world.drain()
    world.check_the_end()
    world.folder.close()
