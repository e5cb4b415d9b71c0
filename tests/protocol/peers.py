"""A node's machine in the states that tests begin with, and what its hub says to it."""

from __future__ import annotations

from dataclasses import replace
from math import nan

from tests.fixed import FIXED_RUN
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import LeafSpec
from zmqtrain.protocol.effects import Deliver, Send, Serve
from zmqtrain.protocol.groups import LATE_SECONDS
from zmqtrain.protocol.messages import Aggregate, Fetch, Publish, Roster, Snapshot, Welcome, model_to_wire
from zmqtrain.protocol.peer import HUB, Peer, PeerState

__all__ = [
    "MODEL",
    "WIRE",
    "SETTINGS",
    "POPULATION",
    "ROSTER",
    "welcome",
    "aggregate",
    "snapshot",
    "publish",
    "welcomed",
    "syncing",
    "live",
    "founding",
    "apart",
    "closed",
    "IN_STATE",
    "attend",
]

MODEL = (LeafSpec("w", (3, 4), "float32"), LeafSpec("b", (4,), "float32"))
WIRE = model_to_wire(MODEL)
SETTINGS = RunSettings(**FIXED_RUN | {"every": 3, "delay": 2})
POPULATION = replace(SETTINGS, initial="own", start_nodes=2)
ROSTER = Roster(0, (), "", 0, 0, 0, 0, 0.0, {}, -1)


def welcome(version=0, run="run-1", model=WIRE, landed=(), accepted=(), settings=SETTINGS):
    return Welcome(run, version, settings.to_dict(), model, landed, accepted)


def aggregate(version, landed=(), transfer=None):
    transfer = version if transfer is None else transfer
    return Aggregate(transfer, version, "float32", (0,), (1,), (64,), landed, 2)


def snapshot(version, landed=(), transfer=1000, sizes=(64,)):
    return Snapshot(transfer, version, sizes, landed)


def publish(sequence):
    return Publish(100 + sequence, sequence, 0, 0, "ternary:block=128", (64,), 8, 8, nan)


def welcomed():
    peer = Peer("a#1", "a")
    peer.start(0.0)
    peer.receive(welcome(), 0.0)
    return peer


def syncing():
    peer = welcomed()
    assert peer.join(MODEL, 0.0) == [Send(Fetch(-1, WIRE))]
    return peer


def live(version=0, in_flight=()):
    """A node that holds a version whole and has publishes on their way."""
    peer = syncing()
    peer.receive(snapshot(version), 0.0)
    assert [type(e) for e in peer.received(1000)] == [Deliver] and peer.version == version
    for sequence in in_flight:
        peer.publish(publish(sequence))
    return peer


def founding():
    peer = Peer("a#1", "a")
    peer.start(0.0)
    peer.receive(welcome(-1, model=()), 0.0)
    peer.join(MODEL, 0.0)
    assert peer.receive(Fetch(), 0.0) == [Serve(HUB, -1)]
    return peer


def apart(score=0.5):
    """One of a population whose run is not founded."""
    peer = Peer("a#1", "a")
    peer.start(0.0)
    peer.receive(welcome(-1, model=(), settings=POPULATION), 0.0)
    assert peer.join(MODEL, 0.0, score) == [Send(Fetch(-1, WIRE, score))]
    return peer


def closed():
    peer = live()
    peer.leave("")
    return peer


IN_STATE = {
    PeerState.CONNECTING: lambda: Peer("a#1", "a"),
    PeerState.WELCOMED: welcomed,
    PeerState.SYNCING: syncing,
    PeerState.FOUNDING: founding,
    PeerState.APART: apart,
    PeerState.LIVE: live,
    PeerState.CLOSED: closed,
}


def attend(peer, until, since=0.0):
    """Let time pass at a peer that attends to it."""
    for tick in range(1, round((until - since) / LATE_SECONDS) + 1):
        peer.tick(since + tick * LATE_SECONDS)
