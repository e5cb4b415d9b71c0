"""Hubs of a small model in the states that tests begin with, what peers say there, and what comes of it."""

from __future__ import annotations

from math import nan

from tests.fixed import FIXED_RUN
from tests.protocol.said import ONE_EACH
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import LeafSpec
from zmqtrain.protocol.effects import Contribution, Expect, SendTo
from zmqtrain.protocol.groups import LATE_SECONDS
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.members import MemberState
from zmqtrain.protocol.messages import Fetch, Hello, JoinGroup, Publish, Snapshot, model_to_wire, replace_fields
from zmqtrain.protocol.rounds import release_rule_from_spec

__all__ = [
    "MODEL",
    "OTHER",
    "WIRE",
    "FOUNDING",
    "SAMPLES",
    "hub_of",
    "publish",
    "contribution",
    "join",
    "found",
    "contribute",
    "live_hub",
    "attend",
    "of",
    "sent",
    "in_state",
]

MODEL = (LeafSpec("w", (3, 4), "float32"), LeafSpec("b", (4,), "float32"))
OTHER = (LeafSpec("w", (3, 4), "float32"), LeafSpec("b", (5,), "float32"))
WIRE = model_to_wire(MODEL)
FOUNDING = Snapshot(1, 0, (64,))
SAMPLES = ONE_EACH | {
    Fetch: Fetch(-1, WIRE),
    Snapshot: FOUNDING,
    JoinGroup: JoinGroup("default", 2, address="tcp://a:1", token="0a"),
}


def hub_of(release="immediately", **settings):
    given = {"release": release, "codec": "ternary:block=128", "initial": "founder"}
    settings = RunSettings(**FIXED_RUN | given | settings)
    return Hub(settings, release_rule_from_spec(release), "run-1")


def publish(sequence, transfer=None, **changes):
    transfer = 100 + sequence if transfer is None else transfer
    return replace_fields(Publish(transfer, sequence, 0, 0, "ternary:block=128", (64,), 8, 8, nan), **changes)


def contribution(peer, sequence, staleness=0):
    return Contribution(peer, sequence, 0, 8, nan, 0, staleness)


def join(hub, peer, model=MODEL, now=0.0):
    hub.receive(peer, Hello(peer), now)
    return hub.receive(peer, Fetch(-1, model_to_wire(model)), now)


def found(hub, peer="a", now=0.0):
    join(hub, peer, now=now)
    hub.receive(peer, FOUNDING, now)
    return hub.received(peer, FOUNDING.transfer, now)


def contribute(hub, peer, sequence, now=0.0, **changes):
    message = publish(sequence, **changes)
    assert hub.receive(peer, message, now) == [Expect(peer, message)]
    return hub.received(peer, message.transfer, now)


def live_hub(*peers, release="immediately", **settings):
    hub = hub_of(release, **settings)
    found(hub, peers[0])
    for peer in peers[1:]:
        join(hub, peer)
    return hub


def attend(hub, until, since=0.0):
    """Let time pass at a hub that attends to it; return what came of it."""
    ticks = round((until - since) / LATE_SECONDS)
    return [effect for tick in range(1, ticks + 1) for effect in hub.tick(since + tick * LATE_SECONDS)]


def of(kind, effects):
    return [effect for effect in effects if isinstance(effect, kind)]


def sent(effects, kind):
    return [(e.peer, e.message) for e in effects if isinstance(e, SendTo) and isinstance(e.message, kind)]


def in_state(state):
    """A hub at which "x" is in that state (and "b" is live, where that can be)."""
    if state is MemberState.FOUNDING:
        hub = hub_of()
        join(hub, "x")
    elif state is MemberState.WAITING:
        hub = hub_of(start_nodes=3)
        found(hub, "b")
        join(hub, "x")
    elif state is MemberState.LIVE:
        hub = live_hub("b", "x")
    elif state in (MemberState.APART, MemberState.LENDING):
        hub = hub_of(initial="own", start_nodes=2 if state is MemberState.APART else 1)
        join(hub, "x")
    elif state is MemberState.SHARD:
        hub = live_hub("b", shards=2)
        hub.receive("x", Hello("x", "broker", shard=1, address="tcp://x:1"), 0.0)
    else:
        hub = live_hub("b")
        roles = {MemberState.OBSERVER: "observer", MemberState.PROCESS: "process", MemberState.STANDBY: "standby"}
        hub.receive("x", Hello("x", roles.get(state, "node"), address="tcp://x:1"), 0.0)
    assert hub.members["x"].state is state
    return hub
