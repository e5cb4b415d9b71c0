"""A node without sockets and without jax: the reference, in numpy, of what `DelayedSync` keeps on the device."""

from __future__ import annotations

import zlib
from collections import deque

import numpy as np

from zmqtrain.averaging.coder import DeltaCoder, cut, encode_snapshot
from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.codecs.payload import decode_payload
from zmqtrain.core.types import Offer
from zmqtrain.node.codec import Inbox
from zmqtrain.protocol.effects import Deliver, Disconnect, Send, Serve, Withdraw
from zmqtrain.protocol.messages import Aggregate, Publish, Snapshot
from zmqtrain.protocol.peer import Peer, PeerState

__all__ = ["TOLERANCE", "crc", "Line", "CONTROL", "BULK", "NumpyNode"]

TOLERANCE = 2e-4
"""Of sums of a few hundred float32 values of the size of 1."""


def crc(flats):
    return zlib.crc32(b"".join(flat.tobytes() for flat in flats))


class Line:
    """Two lanes each way between one node and the hub: order is kept within a lane."""

    def __init__(self):
        self.up, self.down = (deque(), deque()), (deque(), deque())

    def clear(self):
        for lane in (*self.up, *self.down):
            lane.clear()


CONTROL, BULK = 0, 1


class NumpyNode:
    """Peer, DeltaCoder and Inbox, and in numpy what `DelayedSync` keeps: params, anchor, rebase (design, section 3)."""

    def __init__(self, world, number):
        self.world, self.id = world, f"node-{number}"
        self.random = np.random.default_rng(1000 + number)
        self.line = Line()
        self.peer = Peer(self.id, self.id)
        self.peer.founding = 1  # said to another broker than the first: whoever comes first founds
        self.coder = DeltaCoder(world.model, world.settings, shard=world.shard)
        self.inbox = Inbox()
        self.layout = self.coder.layout
        self.jobs = deque()  # of the codec thread
        leaves = [self.random.standard_normal(leaf.shape).astype(np.float32) for leaf in world.model]
        self.params = self.layout.split(leaves)
        self.anchor = None
        self.version, self.sequence, self.transfer = -1, 0, 0
        self.applied, self.offered, self.outgoing = [], set(), {}
        self.corrupt_next, self.too_large, self.codecs = False, 0, None
        self.coded_in = {}  # by sequence: how often pending had been dropped when it was coded
        self.zero()
        self.carry_out(self.peer.join(world.model, world.now) + self.peer.start(world.now))

    def zero(self):
        self.computed = [np.zeros(flat.size) for flat in self.params]
        self.own_landed = [np.zeros(flat.size) for flat in self.params]

    # -- the training thread

    def train(self):
        if self.begin():
            for flat, computed in zip(self.params, self.computed, strict=True):
                before = flat.astype(np.float64)
                flat += self.random.standard_normal(flat.size).astype(np.float32) * np.float32(0.05)
                computed += flat - before

    def begin(self):
        if self.anchor is None and self.peer.following.confirmed:
            self.anchor, self.version = [flat.copy() for flat in self.params], 0
        return self.anchor is not None

    def offer(self, fragment, dense=False):
        live = self.peer.state is PeerState.LIVE and self.world.now >= self.peer.quarantined_until
        settings = self.peer.timetable.at(self.version) if self.peer.timetable is not None else self.world.settings
        most = settings.offers_in_flight * (self.world.fragments if settings.carries_all else 1)
        if self.begin() and live and len(self.offered) < most:
            if (codecs := (settings.codec, settings.broadcast_codec)) != self.codecs:
                self.codecs = codecs
                self.jobs.append(lambda: self.coder.adopt(*codecs))
            segments = cut(self.params[fragment] - self.anchor[fragment], self.layout.counts(fragment))
            offer = Offer(self.sequence, fragment, segments, 8, 2, (), tuple(self.applied), dense)
            self.sequence += 1
            self.applied.clear()
            self.offered.add(offer.sequence)
            self.jobs.append(lambda version=self.version: self.publish(offer, version))
            return offer.sequence
        return None

    def poll(self):
        self.begin()
        update = self.inbox.take()
        if update is None:
            return
        self.jobs.append(lambda: self.inbox.decode(self.coder))
        own = {f: np.concatenate(parts) for f, parts in update.own.items()}
        if self.anchor is None:
            assert update.anchor is not None and not own
            self.anchor = self.layout.split(self.leaves_of(update))
            self.params = [flat.copy() for flat in self.anchor]
        elif update.reset:  # what was computed before is of no use any more
            self.anchor = self.layout.split(self.leaves_of(update))
            self.params = [flat.copy() for flat in self.anchor]
            self.zero()
            own = {}
        elif update.anchor is not None:
            new = self.layout.split(self.leaves_of(update))
            pending = [p - a for p, a in zip(self.params, self.anchor, strict=True)]
            for f, u in own.items():
                pending[f] -= u
            self.params, self.anchor = [n + p for n, p in zip(new, pending, strict=True)], new
        else:
            for f, parts in update.aggregate.items():
                step = np.concatenate(parts)
                self.anchor[f] += step
                self.params[f] += step - own[f] if f in own else step
            for f in own.keys() - update.aggregate.keys():
                self.params[f] -= own[f]
        for f, u in own.items():
            self.own_landed[f] += u
        self.version = update.version
        self.applied += update.landed
        assert set(update.landed) <= self.offered, "an own publish landed twice, or after it was withdrawn"
        self.offered.difference_update(update.landed)
        assert crc(self.anchor) == self.world.crcs[update.version], (
            f"the anchor of {self.id} at version {update.version}"
        )
        for sequence in update.landed:
            assert self.world.landed_at[self.id, sequence] <= update.version, "told to have landed before it has"
        self.check_pending()

    def is_own(self, sequence):
        """Whether what was offered so holds some of what was computed since pending was dropped last."""
        return self.coded_in[sequence] == self.coder.restarts

    def leaves_of(self, update):
        leaves = [np.zeros(0, np.float32) for _ in self.world.model]
        for part in update.anchor:
            leaves[part.leaf] = part.values
        return leaves

    def check_pending(self):
        if self.anchor is not None:
            for p, a, c, o in zip(self.params, self.anchor, self.computed, self.own_landed, strict=True):
                np.testing.assert_allclose(p - a.astype(np.float64), c - o, rtol=0, atol=TOLERANCE)

    # -- the codec thread and the network thread

    def publish(self, offer, base):
        encoded = self.coder.encode(offer)
        self.coded_in[offer.sequence] = self.coder.restarts
        if encoded.codec == "float32":
            self.check_on_the_way(offer)
        if self.peer.state is not PeerState.LIVE:
            return self.withdraw(offer.sequence)
        self.transfer += 1
        frames = [bytearray(frame) for frame in encoded.frames]
        if self.corrupt_next:
            frames[0][-1] ^= 1
            self.corrupt_next = False
        self.outgoing[self.transfer] = frames
        sizes = tuple(len(frame) for frame in frames)
        self.carry_out(
            self.peer.publish(
                Publish(
                    self.transfer, offer.sequence, base, offer.fragment, encoded.codec, sizes, 8, 2, 0.5, offer.dense
                )
            )
        )

    def check_on_the_way(self, offer):
        """What is on its way is no more than what was pending when the offer was made."""
        counts = self.layout.counts(offer.fragment)
        us = [u for u in self.coder.unacked.values() if u.fragment == offer.fragment]
        codecs = [coding_from_spec(u.codec).of_fragment(self.layout, offer.fragment) for u in us]
        decoded = [decode_payload(of, u.frames, counts) for of, u in zip(codecs, us, strict=True)]
        total = sum(one.astype(np.float64) for one in decoded)
        np.testing.assert_allclose(total, np.concatenate(offer.segments), rtol=0, atol=TOLERANCE)

    def found(self):
        frames = encode_snapshot(self.layout, self.params)
        self.transfer += 1
        self.outgoing[self.transfer] = frames
        self.send(Snapshot(self.transfer, 0, tuple(len(frame) for frame in frames)))

    def withdraw(self, sequence):
        self.jobs.append(lambda: self.coder.withdraw(sequence))
        self.offered.discard(sequence)

    def run_jobs(self, count):
        while self.jobs and count:
            self.jobs.popleft()()
            count -= 1

    def send(self, message):
        self.line.up[CONTROL].append(message)

    def receive(self, lane):
        if not self.line.down[lane]:
            return
        message = self.line.down[lane].popleft()
        now = self.world.now
        if isinstance(message, tuple) and message[0] == "frames":
            self.peer.saw(now)
            self.carry_out(self.peer.received(message[1]), message[2])
        elif isinstance(message, tuple):
            if message[1] in self.outgoing:
                self.line.up[BULK].append((message[1], self.outgoing.pop(message[1])))
        else:
            self.carry_out(self.peer.receive(message, now))

    def carry_out(self, effects, frames=()):
        for effect in effects:
            match effect:
                case Send(message):
                    self.send(message)
                case Serve():
                    self.jobs.append(self.found)
                case Deliver() if self.slow and isinstance(effect.announcement, Aggregate):
                    self.slow = False
                    self.jobs.append(lambda effect=effect: self.inbox.skip(effect))
                    self.carry_out(self.peer.resync())
                case Deliver():
                    self.jobs.append(lambda effect=effect, frames=frames: self.inbox.arrive(self.coder, effect, frames))
                case Withdraw(sequence):
                    self.withdraw(sequence)
                case Disconnect():
                    assert self.peer.state is not PeerState.CLOSED, effect.text
                    self.line.clear()
                    self.outgoing.clear()

    slow = False
