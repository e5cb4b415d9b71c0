"""The hub under whatever peers do: joins, leaves, scores, late, double and early publishes, transfers in any order.

Rule: what they do, and what the hub must do then, stands in hub_world.py; here is in which order it may happen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.fixed import fixed_run
from tests.grids import examples
from tests.protocol.hub_world import PEERS, WIRE, HubWorld
from zmqtrain.core.settings import AUTO_FRAGMENTS
from zmqtrain.core.types import LeafSpec
from zmqtrain.protocol.messages import Fetch, Goodbye, Hello, model_to_wire

RELEASES = ("all", "quorum", "immediately", "count:contributions=2", "time:seconds=0.3", "bounded:staleness=1")
SCORES = st.sampled_from([0.25, 0.5, 0.75, 1.0, inf, nan])
SETTINGS = st.builds(
    fixed_run,
    initial=st.sampled_from(["founder", "best", "mean", "own"]),
    start_nodes=st.integers(1, 3),
    elastic=st.sampled_from([1.0, 1.0, 0.5]),
    codec=st.sampled_from(["ternary", "auto"]),
    fragments=st.sampled_from([1, 2, AUTO_FRAGMENTS]),
    max_staleness=st.sampled_from([1, 0]),
    stale=st.sampled_from(["return", "drop"]),
    units=st.sampled_from([9, 0]),
)


OTHER_WIRE = model_to_wire((LeafSpec("w", (9,), "float32"),))


class HubMachine(RuleBasedStateMachine):
    """What may happen at a hub of one release rule.  seen: as in HubWorld, of all runs."""

    release, seen, world = "", None, None

    @initialize(settings=SETTINGS, nodes=st.sampled_from([3, 4, 2, 0, 1]))
    def begin(self, settings, nodes):
        self.world = HubWorld(replace(settings, release=self.release), nodes, self.seen)

    # -- joining and leaving

    @rule(peer=st.sampled_from(PEERS), score=SCORES)
    def join(self, peer, score):
        self.world.join(peer, score)

    @rule(peer=st.sampled_from(PEERS), score=SCORES)
    def fetch(self, peer, score):
        self.world.tell(peer, Fetch(-1, WIRE, score))

    @precondition(lambda self: self.world.founders)
    @rule(peer=st.sampled_from(PEERS))
    def fetch_with_another_model(self, peer):
        self.world.tell(peer, Fetch(-1, OTHER_WIRE))

    @rule(peer=st.sampled_from(PEERS), role=st.sampled_from(["node", "node", "observer", "process"]))
    def hello(self, peer, role):
        known = self.world.version if peer in self.world.served else -1
        self.world.tell(peer, Hello(peer, role, "run-1", known))

    @precondition(lambda self: self.world.asked)
    @rule(data=st.data())
    def give(self, data):
        self.world.give(data.draw(st.sampled_from(sorted(self.world.asked))))

    @rule(peer=st.sampled_from(PEERS), gives=st.booleans())
    def speak_out_of_turn(self, peer, gives):
        """Give what nobody asked for, or publish, in whatever state."""
        if not gives:
            self.world.offer(peer, self.world.sequences[peer])
        elif peer in self.world.hub.members and peer not in self.world.asked:
            self.world.give(peer)

    @precondition(lambda self: self.world.averaging)
    @rule(related=st.sampled_from([True, True, False]))
    def average(self, related):
        self.world.average(related)

    @precondition(lambda self: self.world.voters)
    @rule(data=st.data(), score=SCORES)
    def vote(self, data, score):
        peer = data.draw(st.sampled_from(sorted(self.world.voters)))
        self.world.tell(peer, Fetch(-1, (), score))

    @rule(peer=st.sampled_from(PEERS), polite=st.booleans())
    def leave(self, peer, polite):
        if polite:
            self.world.tell(peer, Goodbye())
        else:
            self.world.crash(peer)

    @rule(cut=st.sets(st.sampled_from(PEERS), min_size=1), seconds=st.sampled_from([0.6, 4.0]))
    def partition(self, cut, seconds):
        """Some peers do not reach the hub for a while: what they say meanwhile is lost, and they may be lost too."""
        self.world.pass_time(seconds, alive=set(PEERS) - cut)

    @rule(seconds=st.sampled_from([0.1, 0.6, 4.0]), alive=st.sampled_from([True, True, False]))
    def time_passes(self, seconds, alive):
        self.world.pass_time(seconds, alive)

    # -- training

    @precondition(lambda self: self.world.served)
    @rule(but=st.sampled_from([None, *PEERS]), late=st.integers(0, 1))
    def exchange(self, but, late):
        """All who train, or all but one, offer what comes next."""
        for peer in sorted(self.world.served - {but}):
            self.world.offer(peer, self.world.sequences[peer], late)

    @precondition(lambda self: self.world.served)
    @rule(
        data=st.data(),
        which=st.sampled_from(["next", "the one after", "earlier"]),
        late=st.sampled_from([0, 2, 1, -1]),
        dense=st.sampled_from([False, False, True]),
        comes=st.booleans(),
    )
    def publish(self, data, which, late, dense, comes):
        """One that trains offers what comes next, or something out of order."""
        peer = data.draw(st.sampled_from(sorted(self.world.served)))
        sequence = self.world.sequences[peer] + (which == "the one after")
        if which == "earlier" and sequence:
            sequence = data.draw(st.integers(0, sequence - 1))
        self.world.offer(peer, sequence, late, dense, comes)

    @precondition(lambda self: self.world.served & self.world.said.keys())
    @rule(data=st.data())
    def publish_again(self, data):
        """One that trains says its last publish once more, to the letter."""
        peer = data.draw(st.sampled_from(sorted(self.world.served & self.world.said.keys())))
        self.world.publish(peer, self.world.said[peer])

    @precondition(lambda self: self.world.transfers)
    @rule(data=st.data(), sound=st.sampled_from([True, True, False]))
    def finish_transfer(self, data, sound):
        self.world.finish(data.draw(st.sampled_from(sorted(self.world.transfers))), sound)

    @precondition(lambda self: self.world.served and self.world.settings.units)
    @rule(data=st.data(), want=st.integers(0, 2), done=st.booleans())
    def work(self, data, want, done):
        self.world.ask_for_units(data.draw(st.sampled_from(sorted(self.world.served))), want, done)

    # -- what is true at any time

    @invariant()
    def the_hub_agrees_with_the_ledger(self):
        self.world.check()

    def teardown(self):
        if self.world is not None:
            self.world.check_the_end()


@pytest.mark.parametrize("release", RELEASES)
def test_whatever_peers_do_the_hub_agrees_with_the_ledger(release):
    seen = Counter()
    machine = type(f"Hub under {release}", (HubMachine,), {"release": release, "seen": seen})
    run_state_machine_as_test(
        machine, settings=hypothesis_settings(max_examples=examples(120), stateful_step_count=40, derandomize=True)
    )
    refused = seen["version"] + seen["stale"] + seen["duplicate"]
    # which examples are drawn follows from what was imported, too: these are a tenth of what is usual
    assert min(seen["released"], seen["late"], seen["double"]) > 5 and refused, f"too little happened: {seen}"


# ---------------------------------------------------------------------- the same world, step by step

A, B = PEERS[:2]


def world_of(**settings):
    given = {"initial": "founder", "release": "immediately", "max_staleness": 1}
    return HubWorld(fixed_run(**given | settings), 2)


def test_each_answer_of_a_hub_is_seen_and_counted():
    world = world_of()
    world.offer(A, 0)
    world.offer(B, 0, late=1)
    world.offer(B, 1, late=2)
    assert world.seen == {"expected": 2, "released": 2, "late": 1, "dropped": 0, "stale": 1}
    world.offer(B, 1, late=2, dense=True)  # what a node drains is never too stale; and 1 was not heard of before
    world.publish(B, world.said[B])
    world.offer(A, 2, comes=False)
    world.publish(A, world.said[A])
    world.offer(A, 1)
    world.offer(A, 3, late=-1)
    world.offer(PEERS[2], 0)
    assert world.seen == {
        "expected": 4, "released": 3, "late": 2, "dropped": 0, "stale": 1, "double": 2, "duplicate": 1, "version": 1,
        "unknown": 1,
    }  # fmt: skip
    world.settle()
    for sequence in (5, 6, 7):
        world.offer(B, sequence, comes=False)
        world.finish((B, world.transfer), sound=False)
    world.offer(B, 8)
    assert world.seen["released"] == world.hub.version == 4
    assert (world.seen["corrupt"], world.seen["quarantine"], world.hub.refused) == (3, 1, 7)
    world.check()
    world.check_the_end()


def test_a_mean_is_proposed_to_its_founders_and_founds_the_run_if_they_do_not_find_it_worse():
    world = world_of(initial="mean", start_nodes=2)
    assert world.seen == {"proposed": 1} and world.version == 0
    world.offer(A, 0), world.offer(B, 0)
    world.check_the_end()


def test_where_the_run_drops_what_is_too_stale_it_lands_and_is_marked():
    world = world_of(stale="drop", release="count:contributions=2")
    for sequence in range(2):
        world.offer(A, sequence), world.offer(B, sequence)
    world.offer(A, 2, late=1), world.offer(B, 2, late=2)
    assert world.version == 3 and (world.seen["late"], world.seen["dropped"], world.seen["stale"]) == (2, 1, 0)
    world.check_the_end()


def test_units_of_a_node_of_which_a_delta_has_come_stay_done_however_often_it_is_lost():
    world = world_of(release="time:seconds=0.3", units=9)
    world.ask_for_units(A, 1)
    world.ask_for_units(A, 0)
    world.offer(A, 0)
    for _ in range(2):
        world.tell(A, Hello(A, "node", "run-1", 0))
        world.offer(A, 1)  # out of place: it costs the node its place
        world.check()
    world.check_the_end()


def test_units_of_a_node_that_comes_again_as_another_are_dealt_again_where_no_delta_of_it_has_come():
    for role in ("observer", "process"):
        world = world_of(release="time:seconds=0.3", units=9)
        world.ask_for_units(A, 2)
        world.ask_for_units(A, 0)
        world.tell(A, Hello(A, role, "run-1", 0))
        world.crash(A)
        world.check()
        world.check_the_end()


def test_units_of_a_node_that_comes_again_with_another_model_are_dealt_again_where_no_delta_of_it_has_come():
    world = world_of(release="time:seconds=0.3", units=9)
    world.ask_for_units(A, 2)
    world.ask_for_units(A, 0)
    world.tell(A, Hello(A, "node", "run-1", 0))
    world.tell(A, Fetch(-1, OTHER_WIRE))
    assert A not in world.hub.members
    world.check()
    world.check_the_end()


@pytest.mark.parametrize("release", RELEASES)
def test_under_every_rule_what_all_offer_is_released_once(release):
    world = world_of(release=release, fragments=2, units=30)
    for sequence in range(4):
        for peer in (B, A):
            world.ask_for_units(peer, 2)
            world.offer(peer, sequence)
        world.pass_time(0.3)
        world.check()
    assert len(world.landed) == 8 and world.seen["released"] == world.version >= 4
    world.offer(A, 4)
    world.check_the_end()
    assert len(world.landed) == 9 and world.done == set(range(30))
