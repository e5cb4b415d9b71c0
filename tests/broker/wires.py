"""A living broker on a channel that the test holds, and the peers that it hears there."""

from __future__ import annotations

import asyncio
from math import nan

import numpy as np

from tests.fixed import fixed_run
from tests.stories import WAIT, lived_through
from zmqtrain.averaging.coder import DENSE, DeltaCoder, encode_snapshot
from zmqtrain.broker.broker import Broker, BrokerOptions
from zmqtrain.broker.core import BrokerAccess
from zmqtrain.core.types import Lane, LeafSpec, Offer
from zmqtrain.protocol.framing import decode_message, encode_message, split
from zmqtrain.protocol.messages import Fetch, Group, Hello, JoinGroup, Publish, Snapshot, model_to_wire
from zmqtrain.transport.pacing import Gate, check_message

__all__ = ["MODEL", "LEAVES", "Wire", "Peers", "lived"]

MODEL = (LeafSpec("w", (10,), "float32"),)
LEAVES = [np.arange(10, dtype=np.float32)]


class Wire:
    """A HubChannel: what the broker sends stays here, what it hears the test says."""

    address = "tcp://127.0.0.1:1"

    def __init__(self):
        self.heard, self.sent, self.bulk, self.closed = asyncio.Queue(), [], [], False
        self.dismissed = []
        self.news = Gate()

    def send(self, peer, lane, frames):
        check_message(frames)
        (self.sent if lane is Lane.CONTROL else self.bulk).append((peer, decode_message(frames[0])))
        self.news.open()

    def asked(self, peer):
        """How often the broker has asked this peer for its parameters."""
        return sum(who == peer and isinstance(message, Fetch) for who, message in self.sent)

    async def receive(self):
        self.news.open()  # all that follows from what came before has been done
        return await self.heard.get()

    def dismiss(self, peer):
        self.dismissed.append(peer)

    async def close(self, linger_seconds=1.0):
        self.closed = True

    def say(self, peer, message, *frames):
        lane = Lane.BULK if frames else Lane.CONTROL
        self.heard.put_nowait((peer, lane, [encode_message(message), *frames]))


class Peers:
    """The nodes of a run, as the broker hears them."""

    def __init__(self, broker):
        self.broker, self.wire = broker, broker.channel
        self.layout = DeltaCoder(MODEL, broker.settings).layout

    async def meet(self, *peers):
        for peer in peers:
            self.wire.say(peer, Hello(peer, "process"))
            self.wire.say(peer, JoinGroup(peers[0], len(peers), address="tcp://10.0.0.1:1", token="0a"))
        await self.until(lambda: self.told(peers[-1], Group))

    def told(self, peer, kind):
        return [message for who, message in self.wire.sent if who == peer and isinstance(message, kind)]

    async def until(self, condition):
        while not condition():
            await self.wire.news.wait()

    async def join(self, *peers):
        for peer in peers:
            self.wire.say(peer, Hello(peer))
            self.wire.say(peer, Fetch(-1, model_to_wire(MODEL)))
        await self.until(lambda: self.wire.asked(peers[0]))
        self.transfer(peers[0], lambda sizes: Snapshot(1, 0, sizes), encode_snapshot(self.layout, LEAVES))
        await self.until(lambda: len(self.broker.hub.live) == len(peers))

    def transfer(self, peer, announce, frames):
        announcement = announce(tuple(len(frame) for frame in frames))
        self.wire.say(peer, announcement)
        for chunk, frame in split(announcement.transfer, frames):
            self.wire.heard.put_nowait((peer, Lane.BULK, [chunk, frame]))

    def publish(self, peer, sequence, transfer, value=1.0, samples=8, dense=True):
        offer = Offer(sequence, 0, [np.full(10, value, np.float32)], samples, 1, None, (), True)
        frames = DeltaCoder(MODEL, self.broker.settings).encode(offer).frames
        self.transfer(peer, lambda s: Publish(transfer, sequence, 0, 0, DENSE, s, samples, 1, nan, dense), frames)


class Operators(BrokerAccess):
    """BrokerAccess for a test. operator: every peer may end the run."""

    turned_away = 0

    def __init__(self, operator):
        self.operator = operator

    def is_operator(self, peer):
        return self.operator


def lived(story, folder=None, operator=False, **settings):
    """Run a broker while `story(peers)` happens; return the broker when it has ended."""
    settings = {"release": "immediately", "outer": "sgd:rate=1", "lost_seconds": 10 * WAIT, **settings}

    def make():
        return Broker(Wire(), fixed_run(**settings), BrokerOptions(checkpoint=folder), Operators(operator))

    return lived_through(make, lambda broker: story(Peers(broker)))
