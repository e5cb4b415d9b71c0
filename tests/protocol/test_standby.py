"""When a standby takes over and when not, and how its hub and the nodes know the one that counts."""

from __future__ import annotations

import json
from math import nan

from tests.protocol.standbys import FIRST, MODEL, SECOND, SETTINGS
from zmqtrain.protocol.effects import Connect, Deliver, Disconnect, Reduce, Replicate, Send
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.messages import (
    Aggregate,
    Fetch,
    Goodbye,
    Hello,
    Publish,
    Refused,
    Snapshot,
    Welcome,
    model_to_wire,
)
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.protocol.search import MOST_LEARNT
from zmqtrain.protocol.standby import STANDBY, TAKES_OVER, Follower, Succession, Tenure
from zmqtrain.protocol.standby_messages import Books, Replica
from zmqtrain.runtime.broker.replicas import Replicas
from zmqtrain.settings import RunSettings


def follower(books=None, holds=5):
    """A standby in step at a version, with two nodes."""
    one = Follower("s#1", "s", SECOND)
    one.start(0.0)
    one.receive(Welcome("run-1", holds, SETTINGS.to_dict()), 0.0)
    one.receive(Replica(1, holds, (8,), 1), 0.0)
    assert [type(effect) for effect in one.received(1)] == [Deliver, Send]
    one.receive(Books(json.dumps(books or {"nodes": ["a", "b"], "in_step": True})), 0.0)
    return one


def turned(succession, *peers, version=5, now=2.0):
    for peer in peers:
        succession.turned_to(peer, Hello(peer, run="run-1", version=version), now)


def test_a_standby_takes_over_when_the_first_is_gone_and_half_of_the_nodes_say_so():
    one = follower()
    succession = Succession(one, 1.0)
    turned(succession, "a", "b")
    assert not succession.is_due(9.0)  # the first is there
    one.gone(1.0)
    assert not succession.is_due(2.5)  # and nobody has said so since
    turned(succession, "a")
    assert not succession.is_due(1.9) and succession.is_due(2.5)
    assert not succession.is_due(9.0)  # the word of a node grows old


def test_a_standby_that_was_not_in_step_or_knows_less_than_a_node_says_so_and_does_not_take_over():
    behind = follower({"nodes": ["a"], "in_step": False})
    behind.gone(1.0)
    succession = Succession(behind, 1.0)
    turned(succession, "a")
    assert not succession.is_due(3.0) and "not in step" in succession.obstacle(3.0)
    ignorant = follower()
    ignorant.gone(1.0)
    succession = Succession(ignorant, 1.0)
    turned(succession, "a", version=6), turned(succession, "b")
    assert not succession.is_due(3.0) and "a node has seen version 6" in succession.obstacle(3.0)
    assert "never heard" in Succession(Follower("s#1", "s", SECOND), 1.0).obstacle(3.0)


def test_a_standby_that_is_welcomed_again_is_in_step_only_once_the_first_says_so():
    one = follower()
    one.gone(1.0)
    assert one.lost_at == 1.0 and one.in_step
    one.tick(1.0)
    one.receive(Welcome("run-1", 9, SETTINGS.to_dict()), 1.5)
    assert one.lost_at is None and not one.in_step
    effects = one.receive(Aggregate(2, 9, "x", (0,), (1,), (8,), (), 1), 1.6)
    assert one.state is PeerState.CONNECTING and effects[0].reason == "gap"


def test_a_standby_ends_with_the_run_and_reads_no_nonsense():
    one = follower()
    one.receive(Books("no JSON"), 1.0)
    assert one.state is PeerState.CONNECTING and not one.in_step
    one.receive(Goodbye("the run is over"), 1.0)
    assert one.over


def test_a_first_goes_on_without_its_standby_only_with_more_than_half_of_its_nodes():
    tenure = Tenure()
    assert tenure.holds(0)  # it never had one
    tenure.joined(SECOND)
    tenure.lost(["a", "b", "c", "d"])
    assert [tenure.holds(nodes) for nodes in (2, 3)] == [False, True]
    tenure.said_goodbye()
    assert tenure.holds(2)
    again = Tenure()
    again.restore(tenure.state(9))
    assert (again.standby, again.holds(1), again.holds(2)) == (SECOND, False, True)
    tenure.dismissed("")
    assert tenure.holds(0) and tenure.standby == ""
    again.dismissed(TAKES_OVER)
    assert again.ended and not again.holds(9)


def test_a_hub_takes_one_standby_and_says_why_not_another():
    hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")
    assert Replicate("s#1") in hub.receive("s#1", Hello("s", "standby", address=SECOND), 0.0)
    (refused,) = hub.receive("t#1", Hello("t", "standby", address="tcp://third:1"), 0.0)
    assert refused.message.reason == "occupied" and SECOND in refused.message.text
    (refused,) = hub.receive("u#1", Hello("u", "standby", address="nowhere"), 0.0)
    assert refused.message.reason == "occupied"
    several = Hub(RunSettings(masters=2, initial="founder"), release_rule_from_spec("immediately"), "run-1")
    (refused,) = several.receive("s#1", Hello("s", "standby", address=SECOND), 0.0)
    assert "several masters" in refused.message.text


def test_who_was_not_there_when_the_first_was_lost_has_no_vote_for_the_standby():
    one = follower({"nodes": ["a", "b", "c"], "in_step": True})
    one.gone(1.0)
    succession = Succession(one, 1.0)
    turned(succession, "a", *(f"stranger {number}" for number in range(3000)))
    assert not succession.is_due(3.0) and len(succession._votes) == 1024
    turned(succession, "a", "b")
    assert succession.is_due(3.0)


def test_a_standby_that_comes_again_or_another_in_its_place_holds_up_nobody_until_it_is_in_step_again():
    hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")
    hub.receive("s#1", Hello("s", "standby", address=SECOND), 0.0)
    hub.in_step()
    assert hub.tenure.follows
    hub.receive("s#1", Hello("s", "standby", address=SECOND), 1.0)
    assert not hub.tenure.follows and hub.may_announce
    hub.in_step()
    effects = hub.receive("t#1", Hello("t", "standby", address=SECOND), 2.0)
    assert any(isinstance(effect, Disconnect) and effect.peer == "s#1" for effect in effects)
    assert hub.standby.peer == "t#1" and list(hub.members) == ["t#1"] and not hub.tenure.follows


def test_a_standby_is_copied_after_the_releases_that_its_own_hello_brings_about():
    hub = Hub(SETTINGS, release_rule_from_spec("time:seconds=1"), "run-1")
    hub.receive("a#1", Hello("a"), 0.0)
    hub.receive("a#1", Fetch(-1, model_to_wire(MODEL)), 0.0)
    hub.receive("a#1", Snapshot(1, 0, (32,)), 0.0)
    hub.received("a#1", 1, 0.0)
    hub.receive("a#1", Publish(2, 0, 0, 0, SETTINGS.codec, (8,), 1, 1, nan), 0.0)
    hub.received("a#1", 2, 0.0)
    effects = hub.receive("s#1", Hello("s", "standby", address=SECOND), 5.0)
    kinds = [type(effect) for effect in effects]
    assert kinds[-1] is Replicate and Reduce in kinds


def test_a_run_that_goes_back_waits_for_its_standby_to_hold_the_new_course_of_it():
    hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")
    replicas, told = Replicas(hub, lambda peer, text: None, lambda effects: None), []
    hub.receive("s#1", Hello("s", "standby", address=SECOND), 0.0)
    replicas.holds(9, 0.0)
    assert hub.tenure.follows
    replicas.go_back(4)
    replicas.announce(5, lambda: told.append(5), 1.0)
    assert not told
    replicas.holds(5, 1.1)
    assert told == [5]


def test_a_first_that_waits_for_its_nodes_takes_its_standby_back():
    hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")
    sent_away, told = [], []
    replicas = Replicas(hub, lambda peer, text: sent_away.append(peer), lambda effects: None)
    hub.tenure.joined(SECOND)
    hub.tenure.lost(["a", "b"])
    replicas.announce(1, lambda: told.append(1), 0.0)
    hub.receive("s#1", Hello("s", "standby", address=SECOND), 10.0)
    replicas.tick(15.0)  # it is being copied, which takes its time
    assert not sent_away and not told
    replicas.copied()
    replicas.holds(1, 20.0)
    replicas.tick(20.1)
    assert told == [1] and not sent_away
    replicas.announce(2, lambda: told.append(2), 20.5)
    replicas.tick(22.0)
    assert not sent_away
    replicas.tick(23.0)
    assert sent_away == ["s#1"] and told == [1]


def test_a_node_believes_no_hub_of_a_lower_term_and_such_a_hub_says_so_itself():
    peer = Peer("a#1", "a", addresses=[FIRST])
    peer.start(0.0)
    peer.receive(Welcome("run-1", 3, SETTINGS.to_dict(), term=2), 0.0)
    peer.gone(1.0)
    (disconnect,) = peer.receive(Welcome("run-1", 9, SETTINGS.to_dict(), term=1), 1.0)
    assert disconnect.reason == "term" and peer.term == 2
    hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")
    (refused,) = hub.receive("a#1", Hello("a", run="run-1", version=3, term=2), 0.0)
    assert refused.message.reason == "term"


def test_a_node_looks_for_its_hub_and_for_the_standby_in_turn():
    peer = Peer("a#1", "a", addresses=[FIRST])
    peer.start(0.0)
    peer.receive(Welcome("run-1", -1, SETTINGS.to_dict(), standby=SECOND), 0.0)
    peer.gone(1.0)
    assert [type(effect) for effect in peer.tick(1.0)] == [Send]
    assert peer.tick(2.0)[0] == Connect(SECOND)
    assert peer.receive(Refused("standby", STANDBY), 2.1) == [] and peer.state is PeerState.CONNECTING
    assert peer.obstacle == STANDBY
    assert peer.tick(4.0)[0] == Connect(FIRST)


def test_a_node_that_is_given_several_addresses_tries_them_and_the_newest_standbys_in_turn():
    peer = Peer("a#1", "a", addresses=[FIRST, SECOND])
    for number in range(MOST_LEARNT + 1):
        peer.know(f"tcp://pc{number}:1")
    peer.know(SECOND)
    assert peer.addresses == (FIRST, SECOND, *(f"tcp://pc{number}:1" for number in range(1, MOST_LEARNT + 1)))
    peer.start(0.0)
    tried = [peer.tick(3.0 * number)[0].address for number in range(1, len(peer.addresses) + 1)]
    assert tried == [*peer.addresses[1:], FIRST]
