"""Whose parameters a living broker's run begins with: who gives them, who gets them, what costs a node its place."""

from __future__ import annotations

from math import nan

import numpy as np
import pytest

from tests.broker.wires import LEAVES, MODEL, lived
from zmqtrain.averaging.coder import encode_snapshot
from zmqtrain.averaging.snapshot import encode_optimizer_state
from zmqtrain.protocol.messages import Fetch, Goodbye, Hello, Refused, Snapshot, model_to_wire


def wants(peers, peer, score):
    peers.wire.say(peer, Hello(peer))
    peers.wire.say(peer, Fetch(-1, model_to_wire(MODEL), score))


def give(peers, peer, leaves=LEAVES, moments=(), transfer=1):
    frames = [*encode_snapshot(peers.layout, leaves), *moments]
    peers.transfer(peer, lambda sizes: Snapshot(transfer, 0, sizes, (), len(moments)), frames)


def snapshots(peers):
    return {peer: message for peer, message in peers.wire.bulk if isinstance(message, Snapshot)}


def test_the_founders_optimizer_state_goes_to_the_nodes_of_the_founding_and_to_none_later():
    async def story(peers):
        wants(peers, "a#1", 2.0)
        wants(peers, "b#1", 1.0)
        await peers.until(lambda: peers.wire.asked("b#1"))
        give(peers, "b#1", moments=encode_optimizer_state([np.ones(20, np.float32)]))
        await peers.until(lambda: len(snapshots(peers)) == 2)
        assert (snapshots(peers)["a#1"].moments, snapshots(peers)["b#1"].sizes) == (1, ())
        assert len(peers.broker.snapshots.moments) == 1
        peers.publish("a#1", 0, transfer=7)
        await peers.until(lambda: peers.broker.aggregator.version == 1)
        wants(peers, "c#1", 0.0)
        await peers.until(lambda: "c#1" in snapshots(peers))
        assert snapshots(peers)["c#1"].moments == 0 and len(peers.broker.snapshots.moments) == 0

    lived(story, initial="best", start_nodes=2, fresh_moments=False)


@pytest.mark.parametrize("wrong", ["many", "all", "unasked", "infinite"])
def test_an_optimizer_state_that_cannot_be_right_costs_its_node_its_place_and_the_next_best_founds(wrong):
    state = {
        "many": encode_optimizer_state([np.ones(100_000, np.float32)]),
        "infinite": [bytes(encode_optimizer_state([np.ones(4, np.float32)])[0][:-4]) + b"\x00\x00\x80\x7f"],
    }.get(wrong, encode_optimizer_state([np.ones(4, np.float32)]))

    async def story(peers):
        wants(peers, "a#1", 1.0)
        wants(peers, "b#1", 2.0)
        await peers.until(lambda: peers.wire.asked("a#1"))
        if wrong == "all":
            peers.transfer("a#1", lambda sizes: Snapshot(1, 0, sizes, (), len(sizes)), state)
        else:
            give(peers, "a#1", moments=state)
        await peers.until(lambda: peers.wire.asked("b#1"))
        assert any(peer == "a#1" and isinstance(message, Refused) for peer, message in peers.wire.sent)
        give(peers, "b#1")
        await peers.until(lambda: peers.broker.aggregator.version == 0)

    lived(story, initial="best", start_nodes=2, fresh_moments=wrong == "unasked")


def test_one_of_a_population_is_lent_what_another_gave():
    async def story(peers):
        wants(peers, "a#1", 1.0)
        wants(peers, "b#1", 2.0)
        await peers.until(lambda: peers.wire.asked("a#1"))
        give(peers, "a#1", moments=encode_optimizer_state([np.ones(20, np.float32)]))
        await peers.until(lambda: "b#1" in snapshots(peers))
        lent = snapshots(peers)["b#1"]
        assert (lent.version, lent.moments, lent.reset) == (-1, 1, True)
        await peers.until(lambda: peers.wire.asked("a#1") == 2)
        give(peers, "a#1", transfer=2)
        await peers.until(lambda: snapshots(peers)["b#1"].version == 0)
        assert not snapshots(peers)["b#1"].reset and not peers.broker.uploads.whole

    lived(story, initial="own", start_nodes=2, preemption="score:patience=1,margin=0", fresh_moments=False)


def test_the_mean_of_related_parameters_founds_and_who_left_is_not_in_it():
    async def story(peers):
        for peer in ("a#1", "b#1", "c#1"):
            wants(peers, peer, nan)
        await peers.until(lambda: peers.wire.asked("c#1"))
        give(peers, "a#1", [3 * LEAVES[0]])
        give(peers, "c#1", [LEAVES[0] * 100])
        await peers.until(lambda: len(peers.broker.uploads.whole) == 2)
        peers.wire.say("c#1", Goodbye())
        give(peers, "b#1", [LEAVES[0]])
        await peers.until(lambda: peers.broker.aggregator.version == 0)
        np.testing.assert_array_equal(peers.broker.aggregator.parameters[0], 2 * LEAVES[0])
        assert not peers.broker.uploads.whole

    lived(story, initial="mean", start_nodes=3)
