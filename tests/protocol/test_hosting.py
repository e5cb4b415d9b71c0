"""Who serves the shards beside the first broker: the machine alone, and the first hub with it, without sockets."""

from __future__ import annotations

import pytest

from zmqtrain.core.errors import RemoteProtocolError
from zmqtrain.core.settings import AUTO_SHARDS, RunSettings
from zmqtrain.core.types import LeafSpec
from zmqtrain.protocol.effects import (
    AskPorts,
    Broadcast,
    Divide,
    FollowShard,
    SendTo,
    ServeShard,
    TakeShard,
    TryPort,
)
from zmqtrain.protocol.groups import LATE_SECONDS
from zmqtrain.protocol.hosting import (
    ANSWER_SECONDS,
    HOST_SECONDS,
    LEAST_VALUES,
    RETURN_SECONDS,
    Hosting,
    division,
)
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.members import Claim, Member, MemberState, ShardRegistry
from zmqtrain.protocol.messages import Fetch, Goodbye, Hello, Host, Refused, Roster, Welcome, model_to_wire
from zmqtrain.protocol.rounds import release_rule_from_spec

ONE, TWO = "tcp://one:5556", "tcp://two:5557"


def nodes_of(*peers):
    return [Member(peer, peer, MemberState.WELCOMED, 0.0, 0.0) for peer in peers]


def hosting_of(shards=3, start_nodes=2, not_before=0.0):
    registry = ShardRegistry(shards)
    return registry, Hosting(registry, start_nodes, not_before)


def register(registry, shard=1, address=ONE, peer="broker#1"):
    assert registry.claim(peer, Claim(shard, address)) == ("", None)


def asks(*pairs):
    return [SendTo(peer, Host(shard)) for peer, shard in pairs]


def served(shards=3, start_nodes=2):
    """Return a registry and a machine whose nodes a and b serve shards 1 and 2, both of which are followed."""
    registry, hosting = hosting_of(shards, start_nodes)
    hosting.look(nodes_of("a", "b"), 0.0)
    register(registry)
    register(registry, 2, TWO, "broker#2")
    assert hosting.look(nodes_of("a", "b"), 1.0) == [FollowShard(1, ONE), FollowShard(2, TWO)]
    return registry, hosting


# ---------------------------------------------------------------------- rule 1: whom it asks


def test_nobody_is_asked_before_the_nodes_are_here_with_which_the_run_begins():
    _, hosting = hosting_of()
    assert hosting.look((), 0.0) == [] and hosting.look(nodes_of("a"), 1.0) == []
    assert hosting.look(nodes_of("a", "b"), 2.0) == asks(("a", 1), ("b", 2))


def test_each_shard_is_asked_of_another_node_in_the_order_in_which_they_came_and_once():
    _, hosting = hosting_of(start_nodes=1)
    assert hosting.look(nodes_of("c", "a", "b"), 0.0) == asks(("c", 1), ("a", 2))
    assert hosting.look(nodes_of("c", "a", "b"), HOST_SECONDS - 1.0) == []


def test_a_shard_that_has_a_broker_already_is_asked_of_nobody():
    registry, hosting = hosting_of()
    register(registry, 1)
    assert hosting.look(nodes_of("a", "b"), 0.0) == [FollowShard(1, ONE), *asks(("a", 2))]


def test_a_run_of_one_broker_asks_nobody():
    _, hosting = hosting_of(shards=1, start_nodes=1)
    assert hosting.look(nodes_of("a", "b"), 0.0) == [] and hosting.look(nodes_of("a"), 2 * HOST_SECONDS) == []


# ---------------------------------------------------------------------- rule 2: who does not serve


def test_a_node_that_declines_is_asked_no_more_and_the_next_is_asked():
    _, hosting = hosting_of(start_nodes=1)
    nodes = nodes_of("a", "b", "c")
    hosting.look(nodes, 0.0)
    assert hosting.declines("a", Host(1)) == []
    assert hosting.look(nodes, 1.0) == asks(("c", 1))
    assert hosting.declines("b", Host(2)) == []
    assert hosting.look(nodes, 2.0) == [ServeShard(2)], "a has declined the other one, and is not asked again"


def test_a_node_that_has_left_before_it_served_is_replaced_by_the_next():
    _, hosting = hosting_of()
    hosting.look(nodes_of("a", "b", "c"), 0.0)
    assert hosting.look(nodes_of("b", "c"), 1.0) == asks(("c", 1))


def test_when_all_have_left_before_they_served_the_next_that_come_are_asked():
    _, hosting = hosting_of()
    hosting.look(nodes_of("a", "b"), 0.0)
    assert hosting.look((), 1.0) == []
    assert hosting.look(nodes_of("c", "d"), 2.0) == asks(("c", 1), ("d", 2))


def test_a_node_that_has_served_nothing_for_host_seconds_is_asked_no_more():
    _, hosting = hosting_of()
    nodes = nodes_of("a", "b", "c")
    hosting.look(nodes, 0.0)
    assert hosting.look(nodes, HOST_SECONDS - 0.1) == []
    assert hosting.look(nodes, HOST_SECONDS) == [*asks(("c", 1)), ServeShard(2)]
    assert hosting.look(nodes, 2 * HOST_SECONDS) == [ServeShard(1)]


def test_a_node_that_serves_in_time_is_not_given_up_later():
    registry, hosting = hosting_of(shards=2)
    hosting.look(nodes_of("a", "b"), 0.0)
    register(registry)
    assert hosting.look(nodes_of("a", "b"), HOST_SECONDS - 1.0) == [FollowShard(1, ONE)]
    assert hosting.look(nodes_of("a", "b"), 9 * HOST_SECONDS) == []


def test_what_no_node_is_left_for_is_served_by_the_hubs_machine_once():
    _, hosting = hosting_of(shards=4)
    assert hosting.look(nodes_of("a", "b"), 0.0) == [*asks(("a", 1), ("b", 2)), ServeShard(3)]
    assert hosting.look(nodes_of("a", "b", "c"), 1.0) == [], "a node that comes later is not asked for it"


def test_no_more_nodes_are_remembered_than_are_here():
    _, hosting = hosting_of(shards=2, start_nodes=1)
    for number in range(20):
        hosting.declines(f"a-{number}", Host(1))
        hosting.look(nodes_of("b", f"a-{number}"), 0.0)
    assert hosting._declined == {"a-19"}


def test_a_node_that_comes_later_is_asked_for_what_another_has_declined():
    _, hosting = hosting_of(shards=2, start_nodes=1)
    assert hosting.look(nodes_of("a"), 0.0) == asks(("a", 1))
    hosting.declines("a", Host(1))
    assert hosting.look(nodes_of("a", "b"), 1.0) == asks(("b", 1))


# ---------------------------------------------------------------------- rule 3: what it follows, and takes over


def test_a_shard_that_is_served_is_followed_once():
    registry, hosting = hosting_of(shards=2)
    register(registry)
    assert hosting.look((), 0.0) == [FollowShard(1, ONE)], "however few nodes are here"
    assert hosting.look((), 1.0) == [] and hosting.look(nodes_of("a", "b"), 2.0) == []


def test_a_broker_that_is_lost_before_the_run_begins_has_left_nothing_and_another_node_is_asked():
    registry, hosting = hosting_of(shards=2)
    hosting.look(nodes_of("a", "b"), 0.0)
    register(registry)
    assert hosting.look(nodes_of("a", "b"), 1.0) == [FollowShard(1, ONE)]
    registry.forget("broker#1")
    assert hosting.declines("a", Host(1, "it was killed")) == []
    assert hosting.look(nodes_of("a", "b"), 2.0) == asks(("b", 1))
    register(registry, 1, TWO, "broker#2")
    assert hosting.look(nodes_of("a", "b"), 3.0) == [FollowShard(1, TWO)]


def test_a_broker_that_is_lost_once_the_run_has_begun_is_left_to_its_standby():
    registry, hosting = served()
    registry.forget("broker#1")
    assert hosting.look(nodes_of("a", "b"), 2.0, begun=True) == []


def test_a_shard_that_is_served_is_followed_again_after_what_followed_it_has_ended():
    _, hosting = served()
    hosting.ended(1)
    assert hosting.look(nodes_of("a", "b"), 2.0) == [FollowShard(1, ONE)]
    assert hosting.look(nodes_of("a", "b"), 3.0) == []


def test_what_this_machine_has_taken_over_is_not_followed():
    registry, hosting = served()
    registry.forget("broker#1")
    assert hosting.look(nodes_of("b"), 2.0, True) == [], "it takes a while until that has registered"
    register(registry, 1, "tcp://hub:9999", "broker#3")
    assert hosting.look(nodes_of("b"), 3.0, True) == []


def test_what_this_machine_serves_is_served_again_after_it_has_ended_even_if_fewer_nodes_are_here():
    registry, hosting = hosting_of(shards=4)
    hosting.look(nodes_of("a", "b"), 0.0)
    hosting.ended(3)
    assert hosting.look(nodes_of("a"), 1.0) == [], "not all have been served yet: the run has not begun"
    assert hosting.look(nodes_of("a", "b"), 2.0) == [ServeShard(3)]
    register(registry)
    register(registry, 2, TWO, "broker#2")
    hosting.look(nodes_of("a", "b"), 3.0)
    hosting.ended(3)
    assert hosting.look(nodes_of("a"), 4.0) == [ServeShard(3)]


def test_of_a_node_that_leaves_its_own_shard_is_taken_over_and_no_other():
    _, hosting = served()
    assert hosting.declines("b", Host(2, leaves=True)) == [TakeShard(2)]
    assert hosting.declines("c", Host(1, leaves=True)) == [], "it serves none"
    assert hosting.declines("b", Host(1, leaves=True)) == [], "another serves that one"
    assert hosting.declines("a", Host(1, leaves=True)) == [TakeShard(1)]


def test_a_node_that_serves_nothing_and_says_so_costs_the_broker_that_does_nothing():
    registry, hosting = hosting_of(shards=2)
    hosting.look(nodes_of("a", "b"), 0.0)
    assert hosting.look(nodes_of("a", "b"), HOST_SECONDS) == asks(("b", 1)), "that of a is late"
    register(registry)
    assert hosting.look(nodes_of("a", "b"), HOST_SECONDS + 1.0) == [FollowShard(1, ONE)]
    assert hosting.declines("b", Host(1, "shard 1 has a broker already")) == []


def test_of_a_node_that_leaves_before_it_serves_nothing_is_taken_over():
    _, hosting = hosting_of(shards=2)
    hosting.look(nodes_of("a", "b"), 0.0)
    assert hosting.declines("a", Host(1)) == []


def test_a_node_whose_shard_was_taken_over_is_not_asked_for_it_again():
    registry, hosting = served(start_nodes=1)
    hosting.declines("a", Host(1))
    registry.forget("broker#1")
    hosting.ended(1)
    assert hosting.look(nodes_of("a", "b", "c"), 2.0) == asks(("c", 1))


# ---------------------------------------------------------------------- rule 4: a run that goes on


def test_in_a_run_that_goes_on_brokers_that_come_back_are_followed_and_nobody_is_asked():
    registry, hosting = hosting_of(not_before=RETURN_SECONDS)
    nodes = nodes_of("a", "b")
    assert hosting.look(nodes, 0.0) == []
    register(registry, 2, TWO, "broker#2")
    assert hosting.look(nodes, 1.0) == [FollowShard(2, TWO)]
    register(registry)
    assert hosting.look(nodes, 2.0) == [FollowShard(1, ONE)]
    assert hosting.look(nodes, RETURN_SECONDS) == []


def test_in_a_run_that_goes_on_a_shard_that_does_not_come_back_is_asked_of_nodes_then():
    registry, hosting = hosting_of(not_before=RETURN_SECONDS)
    register(registry)
    assert hosting.look(nodes_of("a", "b"), RETURN_SECONDS - 0.1) == [FollowShard(1, ONE)]
    assert hosting.look(nodes_of("a", "b"), RETURN_SECONDS) == asks(("a", 2))


def test_a_node_whose_broker_came_back_by_itself_is_taken_over_from_when_it_leaves():
    registry, hosting = hosting_of(not_before=RETURN_SECONDS)
    register(registry)
    hosting.look(nodes_of("a", "b"), 0.0)
    assert hosting.declines("a", Host(2, leaves=True)) == []
    assert hosting.declines("a", Host(1, leaves=True)) == [TakeShard(1)]


def test_in_a_run_that_has_begun_no_node_is_asked_as_none_has_the_shards_parameters():
    _, hosting = hosting_of(not_before=RETURN_SECONDS)
    assert hosting.look(nodes_of("a", "b"), RETURN_SECONDS, begun=True) == [ServeShard(1), ServeShard(2)]


# ---------------------------------------------------------------------- into how many shards


@pytest.mark.parametrize(
    ("nodes", "values", "shards"),
    [(8, 9 * LEAST_VALUES, 9), (8, 9 * LEAST_VALUES - 1, 5), (8, 5 * LEAST_VALUES - 1, 1), (5, 1, 1), (20, 10**8, 21)],
)
def test_a_model_is_divided_among_the_hub_and_its_nodes_unless_shards_would_be_small(nodes, values, shards):
    model = (LeafSpec("w", (values,), "float32"),)
    assert division(nodes, model) == shards
    assert division(nodes, model, fragments=10**6) == 1 and division(10**6, model) == 1


@pytest.mark.parametrize(
    ("settings", "shards"),
    [
        ({}, AUTO_SHARDS),
        ({"initial": "founder"}, AUTO_SHARDS),
        ({"shards": 3}, 3),
        ({"start_nodes": 4}, 1),
        ({"initial": "mean"}, 1),
        ({"fresh_moments": False}, 1),
        ({"mode": "strict", "release": "all"}, 1),
        ({"elastic": 0.5}, 1),
        ({"pipeline": 2, "initial": "founder"}, 1),
    ],
)
def test_auto_is_one_broker_at_once_where_a_run_cannot_be_divided(settings, shards):
    assert RunSettings(**{"start_nodes": 5, "shards": "auto"} | settings).shards == shards


LARGE = (LeafSpec("w", (6, LEAST_VALUES), "float32"),)


def waiting(hosts=True, whole=False, **settings):
    """Return a hub at which five nodes ask for parameters."""
    hub = hub_of(hosts, **{"shards": "auto", "start_nodes": 5} | settings)
    for number in range(5):
        assert told(hub.tick(0.1), Fetch) == [], "nobody is asked before it is decided"
        peer = f"n{number}#1"
        hub.receive(peer, Hello(peer, whole=whole and number == 3), 0.0)
        assert told(hub.receive(peer, Fetch(-1, model_to_wire(LARGE), score=-float(number)), 0.0), Fetch) == []
    return hub


def undecided(hosts=True, whole=False, ports=None, **settings):
    """Return a hub at which five nodes ask for parameters and have tried ports; and its effects when it has decided.

    ports: what a node answers that was asked to try a port, by its number; else its own, which the hub reaches.
    """
    hub = waiting(hosts, whole, **settings)
    effects = hub.tick(0.2)
    for effect in effects:
        for peer in effect.peers if isinstance(effect, AskPorts) else ():
            answer = (ports or {}).get(int(peer[1]), Host(0, port=40000))
            for tried in hub.receive(peer, answer, 0.3):
                assert tried == TryPort(peer, answer.port)
                hub.hosting.trials.tried(peer, reached=answer.port != CLOSED)
    return hub, effects if hub.settings.shards else hub.tick(0.4)


CLOSED = 1


def told(effects, kind):
    return [(e.peer, e.message) for e in effects if isinstance(e, SendTo) and isinstance(e.message, kind)]


@pytest.mark.parametrize(("initial", "founder"), [("founder", "n0#1"), ("best", "n4#1")])
def test_once_all_have_come_the_hub_says_how_many_shards_there_are_and_then_asks_for_parameters(initial, founder):
    hub, effects = undecided(initial=initial)
    assert hub.settings.shards == 6 and effects[0] == Divide(6)
    (roster,) = [e.message for e in effects if isinstance(e, Broadcast) and isinstance(e.message, Roster)]
    assert roster.shards == ("",) * 6
    assert told(effects, Fetch) == [(founder, Fetch(founding=1))]
    assert len(told(effects, Host)) == 5, "each serves one"
    (peer, welcome), *_ = told(hub.receive("late#1", Hello("late"), 0.3), Welcome)
    assert RunSettings.from_dict(welcome.settings).shards == 6 and peer == "late#1"


def divisions(effects):
    return [effect for effect in effects if isinstance(effect, Divide)]


def test_before_a_model_is_divided_the_nodes_are_asked_once_whether_they_reach_another_port():
    hub = waiting()
    assert hub.tick(0.2) == [AskPorts(tuple(f"n{number}#1" for number in range(5)))]
    assert hub.tick(0.3) == [] and hub.settings.shards == AUTO_SHARDS
    assert hub.receive("n0#1", Host(0, port=40000), 0.4) == [TryPort("n0#1", 40000)]
    assert hub.receive("n0#1", Host(0, port=40001), 0.4) == [], "one port of a node is tried, and once"
    assert divisions(hub.tick(0.5)) == []


def test_a_model_is_not_divided_if_a_node_does_not_reach_the_hubs_machine():
    _, effects = undecided(ports={3: Host(0, "tcp://hub:40000: timed out")})
    (divide,) = divisions(effects)
    assert divide == Divide(1, "n3#1 does not reach another port of this machine: tcp://hub:40000: timed out")
    assert told(effects, Fetch) == [("n0#1", Fetch())], "and the run begins at once"


def test_a_model_is_not_divided_if_a_node_does_not_say_what_it_reaches():
    hub = waiting()
    hub.tick(0.2)
    for number in range(4):
        hub.receive(f"n{number}#1", Host(0, port=40000), 0.3)
        hub.hosting.trials.tried(f"n{number}#1", reached=True)
    for number in range(5):
        hub.saw(f"n{number}#1", ANSWER_SECONDS)
    assert divisions(hub.tick(0.2 + ANSWER_SECONDS - 0.1)) == []
    ((_, why),) = [(d.shards, d.why) for d in divisions(hub.tick(0.2 + ANSWER_SECONDS))]
    assert why.startswith("n4#1 does not say")


@pytest.mark.parametrize("answer", [Host(0, port=CLOSED), Host(0, port=0), Host(0, port=65536), Host(0, port=-1)])
def test_a_node_that_the_hub_does_not_reach_or_that_serves_nothing_is_asked_to_serve_none(answer):
    hub, effects = undecided(ports={1: answer})
    assert divisions(effects) == [Divide(5)]
    asked = [peer for peer, host in told([*effects, *hub.tick(0.5)], Host) if host.shard]
    assert asked == ["n0#1", "n2#1", "n3#1", "n4#1"]


def test_a_model_is_not_divided_if_the_hub_reaches_no_node():
    _, effects = undecided(ports=dict.fromkeys(range(5), Host(0, port=CLOSED)))
    ((shards, why),) = [(divide.shards, divide.why) for divide in divisions(effects)]
    assert shards == 1 and "reaches no other ports" in why


def test_a_model_is_not_divided_if_the_hub_has_a_standby():
    hub = waiting()
    hub.receive("s#1", Hello("spare", "standby", address="tcp://spare:5555"), 0.1)
    effects = hub.tick(0.2)
    ((shards, why),) = [(divide.shards, divide.why) for divide in divisions(effects)]
    assert shards == 1 and why.startswith("spare is its standby")
    assert not any(isinstance(effect, AskPorts) for effect in effects), "no port is tried for that"


def test_a_node_that_leaves_takes_what_it_said_of_ports_with_it_and_its_words_are_printable():
    hub, effects = undecided(ports={3: Host(0, "red \x1b[31m text\n")})
    assert "\x1b" not in divisions(effects)[0].why and "\n" not in divisions(effects)[0].why
    hub = waiting()
    hub.tick(0.2)
    hub.receive("n3#1", Host(0, "timed out"), 0.3)
    hub.receive("n3#1", Goodbye(), 0.3)
    hub.receive("n5#1", Hello("n5#1"), 0.4)
    hub.receive("n5#1", Fetch(-1, model_to_wire(LARGE)), 0.4)
    for number in (0, 1, 2, 4):
        hub.receive(f"n{number}#1", Host(0, port=40000), 0.5)
        hub.hosting.trials.tried(f"n{number}#1", reached=True)
    assert hub.tick(0.6) == [AskPorts(("n5#1",))]


def test_nodes_that_come_and_go_do_not_put_the_decision_off():
    hub = waiting()
    hub.tick(0.2)
    for number in range(5):
        hub.receive(f"n{number}#1", Host(0, port=40000), 0.3)
    for number in range(1, 5):
        hub.hosting.trials.tried(f"n{number}#1", reached=True)
    decided = []
    for second in range(1, 25):
        peer, before = f"late{second}#1", f"late{second - 2}#1"
        hub.receive(peer, Hello(peer), float(second))
        hub.receive(peer, Fetch(-1, model_to_wire(LARGE)), float(second))
        if before in hub.members:
            hub.receive(before, Goodbye(), float(second))
        for number in range(5):
            hub.saw(f"n{number}#1", float(second))
        decided += divisions(hub.tick(float(second)))
    assert len(decided) == 1


def test_a_node_that_leaves_while_ports_are_tried_is_waited_for_no_more():
    hub = waiting()
    hub.tick(0.2)
    for number in range(1, 5):
        hub.receive(f"n{number}#1", Host(0, port=40000), 0.3)
        hub.hosting.trials.tried(f"n{number}#1", reached=True)
    hub.receive("n0#1", Goodbye(), 0.4)
    assert divisions(hub.tick(0.5)) == [], "the run begins with five"
    hub.receive("n5#1", Hello("n5#1"), 0.6)
    hub.receive("n5#1", Fetch(-1, model_to_wire(LARGE)), 0.6)
    assert hub.tick(0.7) == [AskPorts(("n5#1",))]
    hub.receive("n5#1", Host(0, port=40000), 0.8)
    hub.hosting.trials.tried("n5#1", reached=True)
    assert divisions(hub.tick(0.9)) == [Divide(6)]


@pytest.mark.parametrize("cause", [{"hosts": False}, {"whole": True}])
def test_a_model_stays_whole_without_hosts_and_where_a_node_needs_it_whole(cause):
    hub, effects = undecided(**cause)
    assert hub.settings.shards == 1 and effects[0] == Divide(1)
    assert told(effects, Fetch) == [("n0#1", Fetch())] and told(effects, Host) == []


def test_a_node_that_needs_the_whole_model_and_comes_later_is_told_why_it_cannot_take_part():
    hub, _ = undecided()
    hub.receive("late#1", Hello("late", whole=True), 0.3)
    ((_, refused),) = told(hub.receive("late#1", Fetch(-1, model_to_wire(LARGE)), 0.3), Refused)
    assert refused.reason == "model" and "--shards 1" in refused.text


# ---------------------------------------------------------------------- rule 5: within reach


def test_a_broker_that_the_hubs_machine_does_not_reach_is_sent_away_and_the_next_node_is_asked():
    registry, hosting = hosting_of(shards=2)
    hosting.look(nodes_of("a", "b"), 0.0)
    register(registry)
    assert registry.addresses == ("", "") and registry.registered == ("", ONE)
    assert hosting.look(nodes_of("a", "b"), 1.0) == [FollowShard(1, ONE)]
    assert hosting.out_of_reach(1, TWO) is None, "that is said of another broker"
    assert hosting.out_of_reach(1, ONE) == "broker#1"
    registry.forget("broker#1")
    assert hosting.look(nodes_of("a", "b"), 2.0) == asks(("b", 1))
    register(registry, 1, TWO, "broker#2")
    assert hosting.look(nodes_of("a", "b"), 3.0) == [FollowShard(1, TWO)]
    hosting.reached(1, TWO)
    assert registry.addresses == ("", TWO)
    assert hosting.out_of_reach(1, TWO) is None, "its nodes reach it, though this machine does not now"


def test_a_broker_that_is_lost_before_the_run_begins_takes_its_reach_with_it():
    registry, hosting = hosting_of(shards=2)
    hosting.look(nodes_of("a", "b"), 0.0)
    register(registry)
    hosting.look(nodes_of("a", "b"), 1.0)
    hosting.reached(1, ONE)
    registry.forget("broker#1")
    hosting.look(nodes_of("a", "b"), 2.0)
    register(registry, 1, TWO, "broker#2")
    assert registry.addresses == ("", "")


def test_what_the_hubs_machine_serves_is_within_reach_and_so_is_all_of_a_run_that_goes_on():
    registry, hosting = hosting_of(shards=2, start_nodes=1)
    hosting.declines("a", Host(1))
    assert hosting.look(nodes_of("a"), 0.0) == [ServeShard(1)]
    register(registry)
    assert registry.addresses == ("", ONE)
    registry, _ = hosting_of(shards=2, not_before=RETURN_SECONDS)
    register(registry)
    assert registry.addresses == ("", ONE)


def test_a_broker_that_a_node_does_not_reach_is_sent_away_and_once_the_run_has_begun_taken_over():
    registry, hosting = served()
    assert hosting.unreached("c", Host(1, unreached=ONE), begun=True) == ([], None)
    assert hosting.unreached("c", Host(1, unreached=ONE), begun=True) == ([], None), "one node may be at fault itself"
    assert hosting.unreached("d", Host(1, unreached=ONE), begun=True) == ([TakeShard(1)], None)
    assert hosting.unreached("c", Host(1, unreached=ONE), begun=False) == ([], "broker#1")
    registry.forget("broker#1")
    assert hosting.look(nodes_of("a", "b", "c"), 2.0) == asks(("c", 1))


@pytest.mark.parametrize(
    "host", [Host(1, unreached=TWO), Host(3, unreached=ONE), Host(0, unreached=""), Host(9), Host(-1)]
)
def test_who_speaks_of_another_broker_than_there_is_changes_nothing(host):
    _, hosting = served()
    assert [hosting.unreached(peer, host, begun=True) for peer in "cd"] == [([], None)] * 2


def test_what_the_hubs_machine_serves_or_has_taken_over_is_left_there_whoever_does_not_reach_it():
    registry, hosting = hosting_of(shards=2, start_nodes=1)
    hosting.declines("a", Host(1))
    hosting.look(nodes_of("a"), 0.0)
    register(registry)
    assert hosting.unreached("a", Host(1, unreached=ONE), begun=False) == ([], None)


# ---------------------------------------------------------------------- rule 6: keys


KEYS = {"h" * 40: "hub", "a" * 40: "pc-a", "b" * 40: "pc-b"}


def keyed(*names):
    nodes = nodes_of(*names)
    for node in nodes:
        node.voter = f"key pc-{node.peer}"
    return nodes


def test_the_broker_of_a_node_is_told_the_keys_when_it_registers_and_when_they_change():
    registry, hosting = hosting_of(shards=3)
    hosting.keys = KEYS
    hosting.look(keyed("a", "b"), 0.0)
    register(registry)
    assert hosting.registered("broker#1", 1, "key pc-a", of_hub=False) == [SendTo("broker#1", Host(1, keys=KEYS))]
    assert hosting.authorise(dict(KEYS)) == [], "nothing has changed"
    fewer = {key: name for key, name in KEYS.items() if name != "pc-b"}
    assert hosting.authorise(fewer) == [SendTo("broker#1", Host(1, keys=fewer))]
    registry.forget("broker#1")
    assert hosting.authorise(KEYS) == [], "it is told when it registers again"
    register(registry, peer="hub#1")
    assert hosting.registered("hub#1", 1, "key hub", of_hub=True) == [] and hosting.authorise(fewer) == []


def test_a_broker_that_registers_before_the_keys_are_read_is_told_them_then():
    registry, hosting = hosting_of(shards=2)
    hosting.keys = None
    register(registry)
    assert hosting.registered("broker#1", 1, "key pc-a", of_hub=False) == []
    assert hosting.authorise(KEYS) == [SendTo("broker#1", Host(1, keys=KEYS))]


def test_a_key_registers_the_shard_that_its_node_was_asked_for_and_no_other():
    _, hosting = hosting_of(shards=3)
    hosting.keys = KEYS
    assert not hosting.expects(1, "key pc-a", 0.0), "nobody is asked yet"
    hosting.look(keyed("a", "b"), 0.0)
    assert hosting.expects(1, "key pc-a", 1.0) and hosting.expects(2, "key pc-b", 1.0)
    assert not hosting.expects(2, "key pc-a", 1.0) and not hosting.expects(3, "key pc-a", 1.0)
    hosting.declines("a", Host(1))
    hosting.look(keyed("a", "b", "c"), 2.0)
    assert not hosting.expects(1, "key pc-a", 2.0) and hosting.expects(1, "key pc-c", 2.0)
    hosting.registered("broker#1", 1, "key pc-c", of_hub=False)
    hosting.registered("hub#1", 1, "key hub", of_hub=True)
    assert not hosting.expects(1, "key pc-c", 3.0), "the hub has taken it over"


def test_a_broker_that_came_back_after_a_restart_of_the_hub_may_register_later_too():
    _, hosting = hosting_of(not_before=RETURN_SECONDS)
    hosting.registered("broker#1", 1, "key pc-a", of_hub=False)
    assert hosting.expects(1, "key pc-a", 2 * RETURN_SECONDS)
    assert not hosting.expects(1, "key pc-b", 2 * RETURN_SECONDS)


def test_in_a_run_that_goes_on_brokers_with_the_key_of_a_node_come_back_for_a_while():
    _, hosting = hosting_of(not_before=RETURN_SECONDS)
    assert hosting.expects(1, "key pc-a", RETURN_SECONDS - 1) and not hosting.expects(1, "key pc-a", RETURN_SECONDS)


@pytest.mark.parametrize("address", [f"{ONE}#{'k' * 40}", ONE])
def test_the_address_of_a_broker_carries_the_key_of_its_port(address):
    registry = ShardRegistry(2)
    assert registry.claim("m#1", Claim(1, address)) == ("", None) and registry.addresses == ("", address)


@pytest.mark.parametrize("key", ["k" * 39, "k" * 41, "k" * 39 + "\n", "k" * 39 + "ü", "k" * 39 + " "])
def test_an_address_with_what_is_no_key_is_refused(key):
    why, _ = ShardRegistry(2).claim("m#1", Claim(1, f"{ONE}#{key}"))
    assert "is no address" in why


# ---------------------------------------------------------------------- the first hub


def hub_of(hosts=True, **settings):
    run = RunSettings(release="immediately", **{"shards": 3, "initial": "founder", "start_nodes": 2} | settings)
    hub = Hub(run, release_rule_from_spec("immediately"), "run-1")
    hub.hosting = Hosting(hub.shards, run.start_nodes) if hosts else None
    return hub


def join(hub, *peers):
    for peer in peers:
        hub.receive(peer, Hello(peer), 0.0)


def begun(effects):
    """Return the effects of hosting, those for nodes as (peer, shard)."""
    own = (FollowShard, ServeShard, TakeShard)
    asked = [(e.peer, e.message.shard) for e in effects if isinstance(e, SendTo) and isinstance(e.message, Host)]
    return asked + [e for e in effects if isinstance(e, own)]


def test_the_first_asks_its_nodes_in_the_order_in_which_they_came_and_no_other_peer():
    hub = hub_of()
    hub.receive("z#1", Hello("z", "observer"), 0.0)
    join(hub, "b#1")
    assert begun(hub.tick(0.1)) == []
    join(hub, "a#1")
    assert begun(hub.tick(0.2)) == [("b#1", 1), ("a#1", 2)] and begun(hub.tick(0.3)) == []


def test_the_first_follows_a_broker_that_registers_and_tells_nodes_where_it_is():
    hub = hub_of()
    join(hub, "a#1", "b#1")
    hub.tick(0.1)
    effects = hub.receive("m1#1", Hello("m1", "broker", shard=1, address=ONE), 0.2)
    (roster,) = [e.message for e in effects if isinstance(e, Broadcast) and isinstance(e.message, Roster)]
    assert roster.shards == ("", "", ""), "not before the hub's machine has reached it"
    assert begun(hub.tick(0.3)) == [FollowShard(1, ONE)] and begun(hub.tick(0.4)) == []
    hub.hosting.reached(1, TWO)
    assert hub.roster(0.5).shards == ("", "", ""), "another address is another broker's"
    hub.hosting.reached(1, ONE)
    assert hub.roster(0.5).shards == ("", ONE, "")
    hub.receive("m1#1", Goodbye(), 0.6)
    hub.receive("hub#1", Hello("m", "broker", shard=1, address=TWO), 0.7)
    assert hub.roster(0.8).shards == ("", TWO, ""), "who follows it comes in its place"


def test_the_first_asks_the_next_when_a_node_declines_leaves_or_is_lost():
    hub = hub_of()
    join(hub, "a#1", "b#1", "c#1", "d#1", "e#1", "f#1")
    assert begun(hub.tick(0.1)) == [("a#1", 1), ("b#1", 2)]
    assert hub.receive("a#1", Host(1, "it is not asked to serve any"), 0.2) == []
    assert begun(hub.tick(0.3)) == [("c#1", 1)]
    hub.receive("b#1", Goodbye(), 0.4)
    assert begun(hub.tick(0.5)) == [("d#1", 2)]
    asked = []
    for tick in range(2, 2 + round(hub.settings.lost_seconds / LATE_SECONDS) + 2):
        for peer in ("a#1", "d#1", "e#1", "f#1"):  # c is silent
            hub.saw(peer, tick * LATE_SECONDS)
        asked += begun(hub.tick(tick * LATE_SECONDS))
    assert "c#1" not in hub.members and asked == [("e#1", 1)]


def test_the_first_takes_over_what_a_node_serves_that_leaves():
    hub = hub_of()
    join(hub, "a#1", "b#1")
    hub.tick(0.1)
    for shard, address in ((1, ONE), (2, TWO)):
        hub.receive(f"m{shard}#1", Hello("m", "broker", shard=shard, address=address), 0.2)
    hub.tick(0.3)
    assert hub.receive("b#1", Host(2, "this node leaves", leaves=True), 0.4) == [TakeShard(2)]
    hub.receive("b#1", Goodbye(), 0.5)
    hub.receive("m2#1", Goodbye(), 0.6)
    hub.receive("hub#1", Hello("m", "broker", shard=2, address="tcp://hub:9999"), 0.7)
    assert begun(hub.tick(0.8)) == [], "what it serves itself is not followed"


def test_the_first_sends_a_broker_away_that_a_node_does_not_reach_and_asks_the_next_node():
    hub = hub_of(shards=2)
    join(hub, "a#1", "b#1", "c#1")
    assert begun(hub.tick(0.1)) == [("a#1", 1)]
    hub.receive("m1#1", Hello("m1", "broker", shard=1, address=ONE), 0.2)
    hub.tick(0.3)
    hub.hosting.reached(1, ONE)
    effects = hub.receive("c#1", Host(1, unreached=ONE), 0.4)
    assert told(effects, Refused)[0][0] == "m1#1" and "m1#1" not in hub.members
    assert hub.roster(0.5).shards == ("", "") and begun(hub.tick(0.6)) == [("b#1", 1)]


def test_a_hub_whose_brokers_are_started_by_hand_asks_nobody_and_takes_what_is_said():
    hub = hub_of(hosts=False)
    join(hub, "a#1", "b#1")
    hub.receive("m1#1", Hello("m", "broker", shard=1, address=ONE), 0.0)
    assert begun(hub.tick(0.1)) == [] and hub.receive("a#1", Host(1, "no"), 0.2) == []


def test_a_hub_that_has_the_whole_model_asks_nobody():
    hub = hub_of(shards=1)
    join(hub, "a#1", "b#1")
    assert begun(hub.tick(0.1)) == []


@pytest.mark.parametrize("role", ["observer", "broker", "process", "standby"])
def test_only_a_node_says_that_it_does_not_serve(role):
    hub = hub_of()
    hub.receive("p#1", Hello("p", role, shard=1, address=ONE), 0.0)
    with pytest.raises(RemoteProtocolError):
        hub.receive("p#1", Host(1, "no"), 0.1)
