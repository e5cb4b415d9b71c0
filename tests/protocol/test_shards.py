"""The first of several brokers, and the others, as machines: who has which shard, and how a run is founded there."""

from __future__ import annotations

import pytest

from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import LeafSpec
from zmqtrain.protocol.effects import Broadcast, Expect, Found, Reduce, SendTo, Serve
from zmqtrain.protocol.groups import LATE_SECONDS
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.members import RUN_OVER, Claim, MemberState, ShardRegistry, name_missing
from zmqtrain.protocol.messages import (
    Fetch,
    Goodbye,
    Hello,
    Publish,
    Refused,
    Roster,
    Snapshot,
    Welcome,
    WorkRequest,
    WorkUnit,
    model_to_wire,
)
from zmqtrain.protocol.peer import Peer, PeerState
from zmqtrain.protocol.rounds import release_rule_from_spec

WIRE = model_to_wire((LeafSpec("w", (3, 4096), "float32"),))
FIRST = "tcp://first:5555"


def hub_of(shard=0, release="immediately", **settings):
    run = RunSettings(release=release, **{"shards": 3, "initial": "founder", "codec": "float32"} | settings)
    return Hub(run, release_rule_from_spec(release), "run-1", shard=shard, first=FIRST if shard else "")


def register(hub, peer="m1#1", shard=1, address="tcp://one:5556"):
    return hub.receive(peer, Hello(peer, "broker", shard=shard, address=address), 0.0)


def refusals(effects):
    return [
        (e.message.reason, e.message.text) for e in effects if isinstance(e, SendTo) and isinstance(e.message, Refused)
    ]


def told(effects, kind):
    return [e.message for e in effects if isinstance(e, SendTo | Broadcast) and isinstance(e.message, kind)]


def join(hub, peer, founding=0):
    hub.receive(peer, Hello(peer), 0.0)
    return hub.receive(peer, Fetch(-1, WIRE, founding=founding), 0.0)


def give(hub, peer, transfer=1):
    assert hub.receive(peer, Snapshot(transfer, 0, (64,)), 0.0) == [Expect(peer, Snapshot(transfer, 0, (64,)))]
    return hub.received(peer, transfer, 0.0)


def live_shard(*peers, **settings):
    hub = hub_of(1, **settings)
    join(hub, peers[0], founding=1)
    give(hub, peers[0])
    for peer in peers[1:]:
        join(hub, peer)
    return hub


def contribute(hub, peer, sequence, base=0):
    publish = Publish(sequence + 10, sequence, base, 0, "float32", (64,), 8, 2, 0.5)
    hub.receive(peer, publish, 0.0)
    return hub.received(peer, publish.transfer, 0.0)


# ---------------------------------------------------------------------- who has which shard


def test_nodes_are_told_where_the_shards_are_as_they_come_and_go():
    hub = hub_of()
    assert told(hub.receive("a#1", Hello("a"), 0.0), Welcome)[0].shards == ("", "", "")
    (roster,) = told(register(hub), Roster)
    assert roster.shards == ("", "tcp://one:5556", "") and roster.members[0]["name"] == "a" and hub.nodes == 1
    register(hub, "m2#1", 2, "tcp://two:5556")
    assert told(hub.receive("b#1", Hello("b"), 0.0), Welcome)[0].shards == ("", "tcp://one:5556", "tcp://two:5556")
    (roster,) = told(hub.receive("m1#1", Goodbye(), 1.0), Roster)
    assert roster.shards == ("", "", "tcp://two:5556")
    effects = [effect for tick in range(1, 20) for effect in hub.tick(tick * LATE_SECONDS)]  # the other is silent
    assert told(effects, Roster)[-1].shards == ("", "", "")


def test_of_one_shard_nothing_is_said():
    hub = hub_of(shards=1)
    assert told(hub.receive("a#1", Hello("a"), 0.0), Welcome)[0].shards == () and hub.roster(0.0).shards == ()
    assert "whole model" in refusals(register(hub))[0][1] and "m1#1" not in hub.members


@pytest.mark.parametrize("shard", [-1, 0, 3])
def test_a_shard_that_there_is_not_is_refused(shard):
    hub = hub_of()
    ((reason, text),) = refusals(register(hub, shard=shard))
    assert reason == "shard" and "the others have 1 to 2" in text and not hub.members


@pytest.mark.parametrize("address", ["", "somewhere", "tcp://*:5556", "tcp://one:0", "tcp://one:5556 ", "ipc://one"])
def test_a_shard_at_what_is_no_address_is_refused(address):
    hub = hub_of()
    ((reason, text),) = refusals(register(hub, address=address))
    assert reason == "shard" and "--address tcp://HOST:PORT" in text and not hub.members
    assert not refusals(register(hub, address="tcp://[fe80::1%eth0]:5556"))


def test_a_shard_of_another_run_is_refused_and_tries_again():
    hub, settings = hub_of(), RunSettings(shards=3).to_dict()
    peer = Peer("m#1", "broker 1/3", role=Claim(1, "tcp://one:5556"))
    peer.start(0.0)
    peer.receive(Welcome("run-0", 4, settings, shards=("", "", "")), 0.0)
    peer.receive(Goodbye(), 0.0)
    (send,) = [effect for effect in peer.tick(2.0) if isinstance(effect.message, Hello)]
    (refusal,) = hub.receive("m#1", send.message, 2.0)
    assert "now runs run-1, this one has a shard of run-0" in refusal.message.text and not hub.members
    (lost,) = peer.receive(refusal.message, 2.0)
    assert lost.reason == "run" and peer.state is PeerState.CONNECTING
    assert peer.tick(6.0) == [] and [type(effect.message) for effect in peer.tick(7.0)] == [Hello]
    assert not refusals(hub.receive("m#1", Hello("m", "broker", "run-1", shard=1, address="tcp://one:5556"), 0.0))


def test_a_shard_has_one_shard_but_one_at_the_same_address_succeeds():
    hub = hub_of()
    register(hub)
    ((_, text),) = refusals(register(hub, "m9#1", address="tcp://nine:5556"))
    assert "has a broker already, at tcp://one:5556" in text and "m9#1" not in hub.members
    effects = register(hub, "m1#2")
    assert not refusals(effects) and "m1#1" not in hub.members and hub.members["m1#2"].state is MemberState.SHARD
    assert hub.shards.addresses == ("", "tcp://one:5556", "")
    assert not refusals(register(hub, "m1#2")), "a broker that says Hello again"


def test_another_shard_sends_on_who_registers_with_it_and_says_which_it_is():
    hub = hub_of(1)
    assert f"register with the first, at {FIRST}" in refusals(register(hub))[0][1]
    (welcome,) = told(hub.receive("a#1", Hello("a"), 0.0), Welcome)
    assert (welcome.shard, welcome.shards) == (1, (FIRST,))


def test_the_missing_are_named():
    assert name_missing(()) == "" and name_missing(("", "x", "y")) == ""
    assert name_missing(("", "", "y")) == "the broker of shard 1 of 3"
    assert name_missing(("", "", "y", "", "")) == "the brokers of shards 1, 3 and 4 of 5"
    assert ShardRegistry(2).claim("m#1", Claim(1, "tcp://x:1")) == ("", None)


# ---------------------------------------------------------------------- how a run begins


def test_the_first_numbers_its_questions_and_one_shard_does_not():
    hub = hub_of()
    (fetch,) = told(join(hub, "a#1"), Fetch)
    assert fetch.founding == 1
    join(hub, "b#1")
    (fetch,) = told(hub.receive("a#1", Goodbye(), 0.0), Fetch)
    assert fetch.founding == 2
    assert told(join(hub_of(shards=1), "a#1"), Fetch) == [Fetch()]


def test_another_shard_asks_only_who_brings_the_firsts_number():
    hub = hub_of(1)
    assert join(hub, "late#1") == [] and hub.members["late#1"].state is MemberState.WAITING
    effects = join(hub, "a#1", founding=1)
    assert told(effects, Fetch)[-1].founding == 1 and hub.members["a#1"].state is MemberState.FOUNDING
    effects = give(hub, "a#1")
    assert isinstance(effects[0], Found) and effects[1:] == [Serve("a#1", 0)] and hub.version == 0
    assert [e.peer for e in join(hub, "b#1") if isinstance(e, Serve)] == ["b#1"]


@pytest.mark.parametrize("given", [False, True])
def test_a_higher_number_founds_anew_and_sends_the_former_founder_away(given):
    hub = hub_of(1)
    join(hub, "a#1", founding=1)
    if given:
        give(hub, "a#1")
    effects = join(hub, "b#1", founding=2)
    assert refusals(effects)[0][0] == "founding" and "a#1" not in hub.members and hub.version == -1
    give(hub, "b#1")
    assert hub.version == 0 and hub.members["b#1"].state is MemberState.LIVE
    assert [e.peer for e in join(hub, "a#2", founding=1) if isinstance(e, Serve)] == ["a#2"], "an old number is none"


def test_a_founder_whose_line_is_made_anew_while_it_founds_is_asked_again():
    hub = hub_of(1)
    join(hub, "a#1", founding=1)
    effects = join(hub, "a#1", founding=1)
    assert [fetch.founding for fetch in told(effects, Fetch)] == [1] and not refusals(effects)
    assert hub.members["a#1"].state is MemberState.FOUNDING
    give(hub, "a#1")
    assert [e.peer for e in join(hub, "a#1", founding=1) if isinstance(e, Serve)] == ["a#1"], "it has given already"


def test_what_was_pending_before_a_run_is_founded_anew_is_in_no_round():
    hub = live_shard("a#1", "b#1", release="all")
    assert not any(isinstance(e, Reduce) for e in contribute(hub, "a#1", 0))
    join(hub, "c#1", founding=2)
    assert not any(isinstance(e, Reduce) for e in hub.tick(0.1)) and hub.version == -1
    give(hub, "c#1")
    assert not any(isinstance(e, Reduce) for e in hub.tick(0.2)) and hub.version == 0
    (reduce,) = [e for e in contribute(hub, "c#1", 0) if isinstance(e, Reduce)]
    assert [one.peer for one in reduce.contributions] == ["c#1"]


def test_what_is_trained_is_not_founded_anew():
    hub = live_shard("a#1")
    assert any(isinstance(e, Reduce) for e in contribute(hub, "a#1", 0))
    ((reason, text),) = refusals(join(hub, "b#1", founding=2))
    assert reason == "founding" and "trained already, up to version 1" in text
    assert hub.members["a#1"].state is MemberState.LIVE and hub.version == 1


def test_a_restarted_shard_knows_its_founding():
    hub, again = live_shard("a#1"), hub_of(1)
    again.restore(hub.state())
    assert hub.state()["shard"] == 1
    assert [e.peer for e in join(again, "b#1", founding=1) if isinstance(e, Serve)] == ["b#1"]


def test_in_strict_mode_no_round_closes_before_all_are_there():
    hub = live_shard("a#1", release="all", mode="strict", start_nodes=2, units=4)
    assert not any(isinstance(e, Reduce) for e in contribute(hub, "a#1", 0))
    join(hub, "b#1")
    (reduce,) = [e for e in contribute(hub, "b#1", 0) if isinstance(e, Reduce)]
    assert [one.peer for one in reduce.contributions] == ["a#1", "b#1"]


@pytest.mark.parametrize("journal", [False, True])
def test_in_strict_mode_a_restarted_shard_that_had_begun_goes_on_with_fewer(journal):
    strict = {"release": "all", "mode": "strict", "start_nodes": 2, "units": 4}
    hub, again = live_shard("a#1", **strict), hub_of(1, **strict)
    before = hub.state()
    join(hub, "b#1")
    contribute(hub, "a#1", 0)
    contribute(hub, "b#1", 0)
    again.restore(before if journal else hub.state())
    if journal:
        again.replay(1, (("a#1", 0), ("b#1", 0)), 16)
    join(again, "a#1")
    (reduce,) = [e for e in contribute(again, "a#1", 1, base=1) if isinstance(e, Reduce)]
    assert reduce.version == 2


# ---------------------------------------------------------------------- data units, and the end


def test_who_waits_for_data_is_not_waited_for_until_it_publishes_again():
    hub = live_shard("a#1", "b#1", release="all")
    assert not any(isinstance(e, Reduce) for e in contribute(hub, "a#1", 0))
    effects = hub.receive("b#1", WorkRequest((), 1, True), 0.0)
    assert any(isinstance(e, Reduce) for e in effects) and not told(effects, WorkUnit)
    contribute(hub, "b#1", 0)
    assert "b#1" in hub.live


def test_the_end_of_a_shard_is_said_when_all_have_drained():
    hub = live_shard("a#1", "b#1")
    assert not told(hub.receive("a#1", WorkRequest((), 0, True), 0.0), WorkUnit)
    (reduce,) = [e for e in contribute(hub, "b#1", 0) if isinstance(e, Reduce)]
    assert reduce.live == 2, "who drains last weighs no more"
    ends = told(hub.receive("b#1", WorkRequest((), 0, True), 0.0), WorkUnit)
    assert [(end.finished, end.end_version) for end in ends] == [(True, 1), (True, 1)]


def test_a_shard_ends_with_the_run_and_waits_after_any_other_goodbye():
    settings = RunSettings(shards=3).to_dict()
    for reason, state in ((RUN_OVER, PeerState.CLOSED), ("the broker was stopped", PeerState.CONNECTING)):
        peer = Peer("m#1", "broker 1/3", role=Claim(1, "tcp://one:1"))
        (send,) = peer.start(0.0)
        assert (send.message.role, send.message.shard, send.message.address) == ("broker", 1, "tcp://one:1")
        peer.receive(Welcome("run-1", 4, settings, shards=("", "", "")), 0.0)
        peer.receive(Goodbye(reason), 0.0)
        assert peer.state is state and peer.over == (reason == RUN_OVER)


def test_a_node_says_the_firsts_number_to_the_others_and_not_to_the_first():
    settings = RunSettings(shards=3).to_dict()
    for shard, said in ((0, 0), (2, 4)):
        peer = Peer("a#1", "a")
        peer.founding = 4
        peer.start(0.0)
        peer.receive(Welcome("run-1", -1, settings, shard=shard, shards=("", "x", "y")), 0.0)
        (send,) = peer.join((LeafSpec("w", (4,), "float32"),), 0.0)
        assert send.message.founding == said
    peer.receive(Fetch(founding=9), 0.0)
    assert peer.founding == 9
    peer.receive(Roster(0, (), "", 0, 0, 0, 0, 0.0, {}, -1, shards=("", "x", "")), 0.0)
    assert peer.shards == ("", "x", "")
