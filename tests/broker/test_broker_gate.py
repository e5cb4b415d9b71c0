"""A living broker and a node that diverges: who it is counted as, and what it had contributed is taken back."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from tests.broker.wires import LEAVES, lived
from zmqtrain.broker.deltas import PendingUploads
from zmqtrain.protocol.messages import Aggregate, Hello, Preempt, Quarantine, Refused, Report, Welcome, replace_fields
from zmqtrain.protocol.schedules import OfferFigures


def test_who_comes_in_with_one_key_is_one_voter():
    async def story(peers):
        keys = {"x1#1": "lab", "x2#1": "lab", "a#1": ""}
        peers.broker.core.access.key_name = lambda peer: keys[peer]
        for peer in keys:
            peers.wire.say(peer, Hello(peer))
        await peers.until(lambda: peers.told("a#1", Welcome))
        assert [peers.broker.hub.voter_of(peer) for peer in keys] == ["key lab", "key lab", "a#1"]

    lived(story)


def test_what_a_node_contributed_before_it_was_found_to_diverge_is_taken_back():
    async def story(peers):
        hub = peers.broker.hub
        nodes = ("a#1", "b#1", "bad#1")
        await peers.join(*nodes)

        async def publish(peer, sequence, value):
            before = hub.version + hub.refused
            peers.publish(peer, sequence, 100 + sequence, value, dense=False)
            await peers.until(lambda: hub.version + hub.refused > before)

        await publish("bad#1", 0, 100.0)  # nobody is there yet to compare it with
        for sequence in range(2):
            for peer in ("a#1", "b#1"):
                await publish(peer, sequence, 1.0)
        for sequence in range(1, 4):
            await publish("bad#1", sequence, 100.0)
        await peers.until(lambda: all(peers.told(peer, Preempt) for peer in nodes))
        await peers.until(lambda: peers.broker.aggregator.version == hub.version)
        assert [one.reason for one in peers.told("bad#1", Quarantine)] == ["norm"]
        np.testing.assert_allclose(peers.broker.aggregator.published[0], LEAVES[0], atol=1e-4)
        assert peers.broker.hub.members["a#1"].restarts
        peers.publish("a#1", 9, 109, 1.0, dense=False)
        await peers.until(lambda: any(one.reason == "restart" for one in peers.told("a#1", Refused)))
        last = [message for _, message in peers.wire.bulk if isinstance(message, Aggregate)][-1]
        assert (last.codec, last.landed) == ("float32", ())

    lived(story, codec="float32", broadcast_codec="float32", start_nodes=3, initial="founder", norm_gate="10")


def test_a_node_that_leaves_while_the_gate_forgets_the_last_of_the_others_is_forgotten_too():
    class Forgotten(dict):
        """Those to forget; while the loop adds one, the codec thread comes to the job that it had before."""

        def get(self, peer, default):
            for job in jobs[:]:
                jobs.remove(job)
                job()
            return super().get(peer, default)

    jobs, gone = [], []
    gate = SimpleNamespace(forget=lambda peer, probation: gone.append((peer, probation)))
    codec, aggregator = SimpleNamespace(do=jobs.append), SimpleNamespace(gate=gate)
    uploads = PendingUploads(SimpleNamespace(hub=None, codec=codec, aggregator=aggregator))
    uploads._forgotten = Forgotten()
    for peer in ("a#1", "b#1"):
        uploads.forget_norms(peer)
    assert gone == [("a#1", False)] and len(jobs) == 1
    uploads.forget_norms("c#1", probation=True)
    jobs.pop()()
    assert not jobs and sorted(gone) == [("a#1", False), ("b#1", False), ("c#1", True)]


def test_a_node_of_other_data_is_named_once(caplog):
    async def story(peers):
        await peers.join("a#1", "b#1")
        report = Report(1, 8, 1.0, 0.5, 0.0, 0, 0, 0, data="aa/11")
        for _ in range(3):
            peers.wire.say("a#1", report)
            peers.wire.say("b#1", replace_fields(report, data="ab/12"))
        await peers.until(lambda: peers.broker.hub.members["b#1"].held_out == "12" and peers.wire.heard.empty())

    lived(story, start_nodes=2, initial="founder")
    named = [line for line in caplog.messages if "has other data than the run's first node" in line]
    assert len(named) == 1 and named[0].startswith("b has other data") and "ab/12, not aa/11" in named[0]


def test_nodes_of_the_same_batches_one_without_units_and_an_evaluation_far_worse_are_said_once(caplog):
    async def story(peers):
        await peers.join("a#1", "b#1")
        peers.broker.hub.version = 9
        report = Report(1, 8, 1.0, 0.5, 0.0, 0, 0, 0, first_step="0a", first_unit=3)
        for version, loss in enumerate((2.31, 489.0, 500.0), 1):
            peers.wire.say("a#1", replace_fields(report, scores={"loss": loss}, score_version=version))
            peers.wire.say("b#1", replace_fields(report, first_unit=-1))
        await peers.until(lambda: peers.broker.hub.scores == {"loss": 500.0} and peers.wire.heard.empty())

    lived(story, start_nodes=2, initial="founder", units=100)
    said = [line for line in caplog.messages if "first step" in line or "no data units" in line or "the best" in line]
    assert len(said) == 3
    assert any(line.startswith("b and a made the same first step") and "node.batches" in line for line in said)
    assert any(line.startswith("b takes no data units: --units 100") for line in said)
    assert any("held-out loss 489 at version 2, 212 times the best (2.31 at version 1)" in line for line in said)


def test_a_configured_k_that_is_too_small_is_said_once_while_it_is(caplog):
    async def story(peers):
        await peers.join("a#1", "b#1")
        planned = peers.broker.hub.replanning
        figures = OfferFigures(0.274, 0.3, 14.0, peers.broker.hub.settings)
        report = Report(1, 8, 1.0, 0.5, 0.0, 0, 0, 0)
        for put_off, fits in ((0.274, (6, 14)), (0.3, (6, 14)), (0.0, (6, 14)), (0.5, (5, 15))):
            now = figures._replace(put_off=put_off)
            planned.offers.crowded, planned.offers._windows, planned.fits = now, (now, now), fits
            peers.wire.say("a#1", report)
            await peers.until(lambda: peers.wire.heard.empty())

    lived(story, start_nodes=2, initial="founder", every=4, delay=14)
    said = [line for line in caplog.messages if "put off" in line]
    assert [line.partition("%")[0] for line in said] == ["27 ", "50 "]
    assert "--every 6 would fit" in said[0] and "--every 5 and --delay 15 would fit" in said[1]
