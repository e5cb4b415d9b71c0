"""Every role's session is fenced: no message of an older connection is taken, at either side."""

from __future__ import annotations

import time

import pytest

from tests.fixed import fixed_run
from zmqtrain.core.types import Lane, PeerId
from zmqtrain.protocol.effects import Disconnect, Send, SendTo
from zmqtrain.protocol.fencing import Stamp
from zmqtrain.protocol.framing import encode_message
from zmqtrain.protocol.groups import SILENCE_SECONDS
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.members import Claim
from zmqtrain.protocol.messages import GroupLost, Heartbeat, Hello, Refused, Relay, Relayed, Values, Welcome
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.protocol.standby import Follower
from zmqtrain.session.hub_session import HubSession, NullListener, ProcessPeer

ID = PeerId("one#1")
ROLES = {
    "node": lambda: Peer(ID, "one", incarnation=7),
    "observer": lambda: Peer(ID, "one", role="observer", incarnation=7),
    "shard's broker": lambda: Peer(ID, "one", role=Claim(1, "tcp://b:1"), incarnation=1),
    "standby": lambda: Follower(ID, "one", "tcp://10.0.0.2:5555", 7),
    "group member": lambda: ProcessPeer(ID, "one"),
    "parameter-server client": lambda: ProcessPeer(ID, "one", comes_again=True),
    "probe": lambda: ProcessPeer(ID, "one", "observer"),
}
OPEN = (PeerState.WELCOMED, PeerState.CONNECTING)


def hello_of(effects):
    (hello,) = [one.message for one in effects if isinstance(one, Send) and isinstance(one.message, Hello)]
    return hello


def meet(hub, peer, hello, now):
    welcome = next(one.message for one in hub.receive(ID, hello, now) if isinstance(one, SendTo))
    assert isinstance(welcome, Welcome) and peer.stamp() == Stamp(hello.incarnation, 1)
    assert peer.judge(hub.stamp(ID), welcome, now) is None
    peer.receive(welcome, now)


def told(hub, peer, message, now):
    """Return whether the peer takes what the hub says now."""
    return peer.judge(hub.stamp(ID), message, now) is None


@pytest.mark.parametrize("role", ROLES)
def test_a_message_of_an_older_connection_is_refused_at_both_sides(role):
    peer, settings = ROLES[role](), fixed_run(shards=2 if "shard" in role else 1)
    hub = Hub(settings, release_rule_from_spec("immediately"), "run-1")
    meet(hub, peer, hello_of(peer.start(0.0)), 0.0)
    old = peer.incarnation
    late = hub.stamp(ID)
    assert old > 0 and told(hub, peer, Heartbeat(), 0.0) is False, "a message before it was left out"
    assert peer.state is PeerState.CONNECTING
    meet(hub, peer, hello_of(peer.tick(9.0)), 9.0)
    assert peer.incarnation == old + 1 and peer.state in OPEN
    assert peer.judge(late, Heartbeat(), 9.0) == [] and peer.dropped["former"] == 1
    assert hub.judge(ID, Stamp(old, 2), Heartbeat(), 9.0) is not None
    assert hub.judge(ID, peer.stamp(), Heartbeat(), 9.0) is None
    assert told(hub, peer, Heartbeat(), 9.0)


@pytest.mark.parametrize("role", ROLES)
def test_a_restarted_hub_knows_none_of_the_old_connections(role):
    peer, settings = ROLES[role](), fixed_run(shards=2 if "shard" in role else 1)
    before, after = (Hub(settings, release_rule_from_spec("immediately"), "run-1") for _ in range(2))
    meet(before, peer, hello_of(peer.start(0.0)), 0.0)
    (answer,) = after.screen(ID, peer.stamp(), Heartbeat, 10)
    assert answer.message.reason == "unknown"
    assert peer.judge(answer.stamp, answer.message, 1.0) is None
    effects = peer.receive(answer.message, 1.0)
    assert any(isinstance(one, Disconnect) for one in effects)
    meet(after, peer, hello_of(peer.tick(9.0)), 9.0)
    assert peer.judge(before.stamp(ID), Heartbeat(), 9.0) == []


class Role(NullListener):
    messages = (Relay, Relayed, GroupLost, Values)

    def __init__(self):
        self.taken, self.ended = [], []

    def on_message(self, message, frames):
        self.taken.append(message)
        return True

    def on_ended(self, reason, text, error):
        self.ended.append(reason)


def session_of(comes_again):
    role = Role()
    peer = ProcessPeer(ID, "one", comes_again=comes_again)
    session = HubSession(None, peer, "tcp://hub:1", role)
    session.carry_out(peer.start(0.0))
    hear(session, Welcome("run-1", -1, fixed_run().to_dict()), Stamp(2, 1))
    return session, role


def hear(session, message, stamp, lane=Lane.CONTROL, *frames):
    session._take(lane, [encode_message(message, stamp), *frames])


def test_a_role_gets_no_message_of_another_connection_and_each_message_once():
    session, role = session_of(comes_again=True)
    hear(session, Relayed(1, 1), Stamp(2, 2))
    hear(session, Relayed(1, 1), Stamp(2, 2))
    hear(session, Relayed(2, 1), Stamp(1, 3))
    hear(session, Relay(3, 1), Stamp(1), Lane.BULK, b"x")
    hear(session, Relay(4, 1), Stamp(2), Lane.BULK, b"x")
    hear(session, GroupLost(5, "silent"), Stamp(2))  # of a hub that has just ended the connection
    hear(session, GroupLost(6, "silent"), Stamp(1))
    assert role.taken == [Relayed(1, 1), Relay(4, 1), GroupLost(5, "silent")]
    assert session.peer.dropped == {"double": 1, "former": 3}


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (lambda session: hear(session, Refused("unknown", "say Hello first"), Stamp(2)), "unknown"),
        (lambda session: hear(session, Relayed(1, 1), Stamp(2, 9)), "gap"),
        (lambda session: session.carry_out(session.peer.distrust("noise", 1.0)), "garbage"),
        (
            lambda session: [session.carry_out(session.peer.tick(time.monotonic() + one / 4)) for one in range(40)],
            "lost",
        ),
    ],
)
def test_a_session_that_does_not_come_again_ends_with_its_connection(happens, reason):
    session, role = session_of(comes_again=False)
    session.carry_out(session.peer.gone(0.0))  # the socket reconnects by itself
    assert session.peer.state is PeerState.WELCOMED
    happens(session)
    assert role.ended == [reason] and session.peer.state is PeerState.CLOSED
    assert session.peer.tick(1e9 + 2 * SILENCE_SECONDS) == []


def test_a_process_beats_and_loses_its_hub_by_its_own_times_and_not_by_those_of_the_run():
    """A hub takes a silent process for lost after SILENCE_SECONDS, however rarely the nodes of its run beat."""
    settings = fixed_run(heartbeat_seconds=10.0, lost_seconds=60.0)
    hub, peer = Hub(settings, release_rule_from_spec("immediately"), "run-1"), ProcessPeer(ID, "one", silence=5.0)
    meet(hub, peer, hello_of(peer.start(0.0)), 0.0)
    times = [step / 20 for step in range(1, 98)]
    beats = [now for now in times for one in peer.tick(now) if isinstance(one, Send)]
    assert len(beats) >= times[-1] / SILENCE_SECONDS * 8 and peer.state is PeerState.WELCOMED
    (lost,) = [one for now in (4.95, 5.0, 5.05, 5.1) for one in peer.tick(now) if isinstance(one, Disconnect)]
    assert lost.reason == "lost"
