"""A newcomer is brought to the run's parameters by a real broker and a real link, over channels in memory."""

from __future__ import annotations

import asyncio
import logging
from math import nan
from types import SimpleNamespace

import numpy as np
import pytest

from tests.fixed import fixed_run
from zmqtrain.averaging.coder import DENSE, DeltaCoder, decode_snapshot, encode_snapshot
from zmqtrain.averaging.snapshot import digest_of
from zmqtrain.broker import snapshots
from zmqtrain.broker.broker import Broker
from zmqtrain.codecs import payload
from zmqtrain.codecs.codec import SLAB_VALUES
from zmqtrain.core.errors import ZmqTrainError
from zmqtrain.core.types import Lane, LeafSpec, Offer, PeerId
from zmqtrain.protocol.framing import decode_message
from zmqtrain.protocol.messages import Aggregate, Chunk, Report, Snapshot
from zmqtrain.protocol.peer import Peer
from zmqtrain.session.hub_session import HubSession
from zmqtrain.transport.memory import MemoryHub
from zmqtrain.transport.pacing import Gate

FRAMES = 12
VALUES = FRAMES * SLAB_VALUES
MODEL = (LeafSpec("w", (VALUES,), "float32"),)
START = np.arange(VALUES, dtype=np.float32)
SETTINGS = fixed_run(
    every=2, delay=1, codec=DENSE, broadcast_codec=DENSE, release="immediately", outer="sgd:rate=1",
    initial="founder", heartbeat_seconds=0.02, lost_seconds=5.0, norm_gate="none",
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_frames(monkeypatch):
    """A snapshot of a few megabytes in many frames."""
    monkeypatch.setattr(payload, "MAX_FRAME_BYTES", 300_000)
    payload.plan_payload.cache_clear()
    yield
    payload.plan_payload.cache_clear()


HEARD = Gate()
"""Opened when the broker or a node has done all that follows from a message."""


class Heard:
    """The broker's channel, which says when a message has been dealt with."""

    def __init__(self, channel):
        self.channel = channel

    async def receive(self):
        HEARD.open()
        return await self.channel.receive()

    def __getattr__(self, name):
        return getattr(self.channel, name)


class Way(Heard):
    """A node's channel, on which the test does something when chunks of snapshots come."""

    def __init__(self, channel, on_chunk):
        super().__init__(channel)
        self.on_chunk, self.chunks = on_chunk, 0
        self._snapshots = set()

    async def receive(self):
        lane, frames = await super().receive()
        message = decode_message(frames[0])
        if isinstance(message, Snapshot):
            self._snapshots.add(message.transfer)
        if isinstance(message, Chunk) and message.transfer in self._snapshots:
            self.chunks += 1
            frames = [frames[0], self.on_chunk(self.chunks, frames[1])]
        return lane, frames


class Node:
    """A node without a training thread: its parameters are what it has been sent."""

    def __init__(self, hub, name, on_chunk=lambda number, frame: frame):
        self.peer = Peer(PeerId(f"{name}#1"), name)
        self.way = Way(hub.connect(self.peer.peer), on_chunk)
        self.link = HubSession(SimpleNamespace(dial=lambda *_: self.way), self.peer, hub.address, self)
        self.coder = DeltaCoder(MODEL, SETTINGS)
        self.delivered, self.failure, self.params = [], None, None
        self.task = asyncio.create_task(self.link._main())
        self._sequence = 0

    def on_delivered(self, deliver, frames):
        announcement = deliver.announcement
        self.delivered.append(announcement)
        if isinstance(announcement, Snapshot):
            assert announcement.digest == digest_of(frames)
            (self.params,) = decode_snapshot(self.coder.layout, frames)
        elif isinstance(announcement, Aggregate) and self.params is not None:
            (step,) = self.coder.decode_aggregate(announcement, (), frames).aggregate[0]
            self.params = self.params + step

    def on_failed(self, error):
        self.failure = error
        HEARD.open()

    def on_founding(self):
        frames = encode_snapshot(self.coder.layout, [START])
        self.params = START
        self.link.send_founding(frames, (), digest_of(frames))

    def on_withdrawn(self, sequence, reason, text):
        pass

    messages = ()

    def on_changed(self):
        pass

    on_work = on_quarantined = on_changed

    def make_report(self):
        return Report(1, 8, 1.0, 0.5, 0.0, 0, 0, 0)

    def join(self):
        self.link.carry_out(self.peer.join(MODEL, 0.0))

    def publish(self, value):
        delta = np.zeros(VALUES, np.float32)
        delta[:7] = value
        offer = Offer(self._sequence, 0, [delta], 8, 2, (), (), False)
        self._sequence += 1
        self.link.publish(offer, self.peer.version, self.coder.encode(offer), nan)

    async def leave(self):
        self.link.leave("")
        await self.task


async def until(condition):
    while not condition():
        await HEARD.wait()


def lived(story):
    """Let a broker, a founder and what the story tells happen in one loop; return the broker."""

    async def live():
        hub = MemoryHub(queue_messages=4)
        broker = Broker(Heard(hub), SETTINGS)
        running = asyncio.create_task(broker.run())
        founder = Node(hub, "founder")
        try:
            await until(lambda: founder.peer.settings is not None)
            founder.join()
            await until(lambda: founder.link.live)
            await asyncio.wait_for(story(hub, broker, founder), 60.0)
            await founder.leave()
        finally:
            founder.task.cancel()
            broker.stop()
            await running
        return broker

    return asyncio.run(live())


async def newcomer(hub, on_chunk=lambda number, frame: frame):
    node = Node(hub, "newcomer", on_chunk)
    await until(lambda: node.peer.settings is not None)
    node.join()
    return node


@pytest.mark.parametrize("cut_at", [(1,), (3, 9), (FRAMES,)])
def test_a_snapshot_that_a_lost_connection_cuts_short_goes_on_where_it_was(cut_at):
    async def story(hub, broker, founder):
        def cut(number, frame):
            if number in cut_at:
                hub.cut(node.peer.peer)
                mending.append(asyncio.create_task(mend()))
            return frame

        async def mend():
            await until(lambda: node.peer.peer not in broker.hub.members)
            hub.restore(node.peer.peer)

        mending = []

        node = Node(hub, "newcomer", cut)
        await until(lambda: node.peer.settings is not None)
        node.join()
        await until(lambda: len(node.way._snapshots) >= 1)
        founder.publish(1.0)  # the run goes on meanwhile
        await until(lambda: node.peer.version == 1 or node.failure)
        assert node.failure is None
        np.testing.assert_array_equal(node.params, broker.aggregator.published[0])
        assert node.way.chunks == FRAMES and all([one.done() for one in mending])
        assert any(one.first for one in node.delivered if isinstance(one, Snapshot)) or cut_at == (FRAMES,)
        await node.leave()

    lived(story)


def test_frames_that_were_spoiled_on_their_way_are_fetched_again(caplog):
    async def story(hub, broker, founder):
        def spoil(number, frame):
            return bytes([frame[0] ^ 1]) + bytes(frame[1:]) if number == 4 else frame

        node = await newcomer(hub, spoil)
        await until(lambda: node.params is not None or node.failure)
        assert node.failure is None and node.way.chunks == 2 * FRAMES
        np.testing.assert_array_equal(node.params, START)
        await node.leave()

    with caplog.at_level(logging.WARNING):
        lived(story)
    assert "fetches the run's parameters again: the bytes received are not those sent" in caplog.text


def test_a_node_whose_every_snapshot_is_spoiled_says_where_to_look():
    async def story(hub, broker, founder):
        node = await newcomer(hub, lambda number, frame: bytes(len(frame)))
        await node.task
        assert isinstance(node.failure, ZmqTrainError) and "check both" in str(node.failure)
        assert node.params is None

    lived(story)


def test_all_who_come_share_one_snapshot_and_take_the_aggregates_since():
    async def story(hub, broker, founder):
        made, copy = [], broker.aggregator.copy
        broker.aggregator.copy = lambda room: made.append(broker.aggregator.version) or copy(room)
        first = await newcomer(hub)
        await until(lambda: first.params is not None)
        others = [Node(hub, f"pc-{number}") for number in range(2)]
        for number, node in enumerate(others):
            await until(lambda node=node: node.peer.settings is not None)
            node.join()
            await until(lambda node=node: node.params is not None)
            assert node.delivered[0].version == 0
            assert made == [0], number
        founder.publish(1.0)
        await until(lambda: all(node.peer.version == 1 for node in (first, *others)))
        for node in (first, *others):
            np.testing.assert_array_equal(node.params, broker.aggregator.published[0])
            await node.leave()
        assert broker.snapshots.cache.bytes > 0

    assert lived(story).statistics().snapshots_served == 3


def test_what_nobody_fetches_any_more_is_let_go(monkeypatch):
    async def story(hub, broker, founder):
        node = await newcomer(hub)
        await until(lambda: node.params is not None)
        monkeypatch.setattr(snapshots, "KEPT_SECONDS", 0.0)
        await until(lambda: broker.snapshots.cache.bytes == 0)
        await node.leave()

    lived(story)


def test_parameters_that_were_spoiled_on_their_way_up_found_no_run():
    async def story(hub, broker, founder):
        frames = encode_snapshot(founder.coder.layout, [START])
        with pytest.raises(ZmqTrainError, match="its digest is another"):
            broker.aggregator.check_snapshot(Snapshot(1, 0, tuple(map(len, frames)), digest="00"), frames)

    lived(story)
    assert Lane.BULK
