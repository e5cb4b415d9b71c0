"""When a standby takes over and when not, and how its hub and the nodes know the one that counts."""

from __future__ import annotations

import json
from copy import deepcopy
from math import nan
from types import SimpleNamespace

from tests.protocol.standbys import FIRST, MODEL, SECOND, SETTINGS
from zmqtrain.broker.standby import StandbyService
from zmqtrain.core.settings import RunSettings
from zmqtrain.protocol.effects import Connect, Deliver, Disconnect, Reduce, Replicate, Send
from zmqtrain.protocol.fencing import LIFE, Stamp
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.members import MemberState
from zmqtrain.protocol.messages import (
    Aggregate,
    Books,
    Fetch,
    Goodbye,
    Heartbeat,
    Hello,
    Promote,
    Publish,
    Refused,
    Replica,
    Snapshot,
    Welcome,
    model_to_wire,
    replace_fields,
)
from zmqtrain.protocol.peer import MOST_LEARNT, Peer, PeerState
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.protocol.standby import STANDBY, TAKES_OVER, Follower, Patience, PrimaryLease, TakeoverPolicy


def follower(books=None, holds=5):
    """A standby in step at a version, with two nodes."""
    one = Follower("s#1", "s", SECOND)
    one.start(0.0)
    one.receive(Welcome("run-1", holds, SETTINGS.to_dict()), 0.0)
    one.receive(Replica(1, holds, (8,), 1), 0.0)
    assert [type(effect) for effect in one.received(1)] == [Deliver, Send]
    one.receive(books or told("a", "b"), 0.0)
    return one


def told(*crew, in_step=True, number=1, tenure=1, **incarnations):
    """Books that name a crew: of these nodes, each with its incarnation (0, if none is given)."""
    crew = dict.fromkeys(crew, 0) | incarnations
    said = {"crew": crew, "owners": {}, "in_step": in_step, "number": number, "tenure_number": tenure}
    return Books(json.dumps(said))


def turned(succession, *peers, version=5, now=2.0, incarnation=0, without=0):
    for peer in peers:
        hello = Hello(peer, run="run-1", version=version, incarnation=incarnation, without=without)
        succession.turned_to(peer, hello, now)


def test_a_standby_takes_over_when_the_first_is_gone_and_half_of_the_nodes_say_so():
    one = follower()
    succession = TakeoverPolicy(one, 1.0)
    turned(succession, "a", "b")
    assert not succession.is_due(9.0)  # the first is there
    one.gone(1.0)
    assert not succession.is_due(2.5)  # and nobody has said so since
    turned(succession, "a")
    assert not succession.is_due(1.9) and succession.is_due(2.5)
    assert not succession.is_due(9.0)  # the word of a node grows old


def test_a_standby_that_was_not_in_step_or_knows_less_than_a_node_says_so_and_does_not_take_over():
    behind = follower(told("a", in_step=False))
    behind.gone(1.0)
    succession = TakeoverPolicy(behind, 1.0)
    turned(succession, "a")
    assert not succession.is_due(3.0) and "not in step" in succession.obstacle(3.0)
    ignorant = follower()
    ignorant.gone(1.0)
    succession = TakeoverPolicy(ignorant, 1.0)
    turned(succession, "a", version=6), turned(succession, "b")
    assert not succession.is_due(3.0) and "a node has seen version 6" in succession.obstacle(3.0)
    assert "never heard" in TakeoverPolicy(Follower("s#1", "s", SECOND), 1.0).obstacle(3.0)


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


def lease_of(*crew):
    """A hub whose standby has read this crew at 5.0, and is lost."""
    lease = PrimaryLease()
    lease.joined(SECOND)
    lease.read(lease.tell(crew, 5.0))
    lease.lost()
    return lease


def holds(lease, nodes, joined=0.0):
    """Whether these nodes are enough: on a copy."""
    again = deepcopy(lease)
    for peer in nodes:
        again.let_go_on(peer, again.without, joined)
    return again.holds


def test_a_first_goes_on_without_its_standby_only_if_more_than_half_of_its_crew_let_it():
    assert PrimaryLease().holds and not PrimaryLease().without, "it never had one"
    lease = lease_of(*"abcd")
    assert [holds(lease, nodes) for nodes in ("ab", "abc", "abxyz", "wxyz")] == [False, True, False, False]
    lease.let_go_on("a", 0, 0.0), lease.let_go_on("b", 7, 0.0)
    assert not holds(lease, "c"), "what was said of another lease is not of this one"
    lease.dismissed("")
    assert lease.holds and (lease.standby, lease.without) == ("", 0)


def test_a_node_that_came_to_its_hub_after_the_standby_read_of_the_crew_may_have_given_that_its_word():
    assert not holds(lease_of("a"), "a", joined=3.1) and holds(lease_of("a"), "a", joined=3.0)
    left = lease_of("a")
    left.said_goodbye("a", 3.1)
    assert not left.holds
    unread = PrimaryLease()
    unread.joined(SECOND)
    unread.tell("a", 5.0)
    unread.lost()
    assert not holds(unread, "a")


def test_only_a_node_of_the_crew_counts_as_one_that_has_left():
    lease = lease_of(*"abcd")
    lease.said_goodbye("process", 0.0), lease.said_goodbye("x", 0.0)
    assert not holds(lease, "ab")
    lease.said_goodbye("d", 0.0)
    assert holds(lease, "ab") and not holds(lease, "a")


def test_a_node_that_left_and_came_again_while_the_standby_followed_is_of_the_crew_again():
    lease = PrimaryLease()
    lease.joined(SECOND)
    lease.tell("ab", 4.0), lease.said_goodbye("b", 0.0)
    lease.read(lease.tell("ab", 5.0))
    lease.lost()
    assert not holds(lease, "a") and holds(lease, "ab")


def test_a_first_needs_more_than_half_of_every_crew_that_its_standby_may_have_been_told_last():
    lease = PrimaryLease()
    lease.joined(SECOND)
    lease.read(lease.tell("ab", 5.0))
    second = lease.tell("abcdef", 6.0)
    lease.lost()
    assert not holds(lease, "cdef"), "the standby may have read the first books alone, and needs one of a and b"
    assert not holds(lease, "ab") and holds(lease, "abcd")
    lease.read(second)
    assert not holds(lease, "cdef"), "what it reads from now on says nothing of what it has read"
    lease.joined(SECOND)
    lease.tell("ab", 5.0)
    lease.read(lease.tell("abcdef", 6.0))
    lease.lost()
    assert holds(lease, "cdef")


def test_a_first_that_was_started_again_waits_for_a_standby_as_it_does_not_know_by_whom_that_goes():
    lease, again, older = lease_of(*"abcd"), PrimaryLease(), PrimaryLease()
    again.restore(json.loads(json.dumps(lease.state())))
    older.restore({"standby": SECOND, "crew": 3})  # of a release that counted
    for one in (again, older):
        assert one.standby == SECOND and not holds(one, "abcd")
        assert one.without > lease.without + 1000, "nodes let it go on without what came in step since, too"
        one.joined(SECOND)
        one.read(one.tell("a", 5.0))
        one.lost()
        assert not one.holds and holds(one, "a")
    alone = PrimaryLease()
    alone.restore({"standby": "", "crew": 0})
    assert alone.holds
    lease.dismissed(TAKES_OVER)
    assert lease.ended and not holds(lease, "abcd")


def test_a_hub_tells_its_standby_the_crew_and_hears_in_its_heartbeats_which_books_it_has_read():
    hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")
    hub.receive("a#1", Hello("a", incarnation=7), -2.0)
    hub.receive("s#1", Hello("s", "standby", address=SECOND), 0.0)
    one = follower()
    (books,) = (effect.message for effect in hub.in_step(0.0) if getattr(effect, "peer", "") == "s#1")
    one.receive(books, 0.5)
    assert one.electorate == {"a#1": 7} and one.in_step and one.lease == 1
    (beat, *_) = (effect.message for effect in one.tick(2.0) if isinstance(effect, Send))
    hub.receive("b#1", Hello("b"), 2.0)
    hub.receive("s#1", beat, 2.0)
    assert beat.heard == one.read == json.loads(books.text)["number"]
    hub.gone("s#1", "cut", 2.0)
    hub.receive("b#1", Heartbeat(2.5, 1), 2.5)
    assert not hub.lease.holds, "b is not of the electorate that the standby goes by: a alone"
    hub.receive("a#1", Heartbeat(2.5, 1), 2.5)
    assert hub.lease.holds


def test_nodes_that_join_and_never_publish_have_no_word_between_a_hub_and_its_standby():
    hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")
    for name in ("a", "silent", "still"):
        hub.receive(f"{name}#1", Hello(name), -2.0)
        member = hub.members[f"{name}#1"]
        member.state, member.counted = MemberState.LIVE, name == "a"
    hub.receive("s#1", Hello("s", "standby", address=SECOND), 0.0)
    one = follower()
    (books,) = (effect.message for effect in hub.in_step(0.0) if getattr(effect, "peer", "") == "s#1")
    one.receive(books, 0.5)
    assert [*one.electorate] == ["a#1"]
    (beat, *_) = (effect.message for effect in one.tick(2.0) if isinstance(effect, Send))
    hub.receive("s#1", beat, 2.0)
    hub.gone("s#1", "cut", 2.0)
    assert not hub.lease.holds
    hub.receive("a#1", Heartbeat(2.5, 1), 2.5)
    assert hub.lease.holds, "two silent nodes of three keep nobody from going on"


def test_a_node_that_lets_its_hub_go_on_says_so_at_once_and_to_the_standby():
    peer = Peer("a#1", "a", addresses=[FIRST])
    peer.start(0.0)
    peer.receive(Welcome("run-1", 3, SETTINGS.to_dict(), standby=SECOND), 0.0)
    hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")
    (send,) = peer.receive(replace_fields(hub.roster(0.0), hub={"without": 4}), 0.5)
    assert send == Send(Heartbeat(0.5, 4))
    assert peer.receive(replace_fields(hub.roster(0.0), hub={"without": 4}), 0.6) == [], "once"
    assert peer.receive(replace_fields(hub.roster(0.0), hub={"without": "9"}), 0.6) == [], "no number"
    peer.gone(1.0)
    (send,) = peer.tick(1.0)
    assert send.message.without == 4
    looks_on = Peer("o#1", "o", role="observer")
    assert looks_on.receive(replace_fields(hub.roster(0.0), hub={"without": 4}), 0.5) == []


def test_a_standby_does_not_count_the_word_of_nodes_that_let_the_first_go_on_without_it():
    one = follower(told("a", "b", "c", tenure=3))
    one.gone(1.0)
    succession = TakeoverPolicy(one, 1.0)
    turned(succession, "a"), turned(succession, "b", "c", without=3)
    assert not succession.is_due(3.0) and "let the first broker go on without it" in succession.obstacle(3.0)
    of_four = follower(told("a", "b", "c", "d", tenure=3))
    of_four.gone(1.0)
    one_word = TakeoverPolicy(of_four, 1.0)
    turned(one_word, "a"), turned(one_word, "b", "c", without=3)
    assert not one_word.is_due(3.0), "the first may go on with b, c and a fourth that has left"
    turned(one_word, "b")
    assert one_word.is_due(3.0)
    turned(succession, "b", "c", without=2)
    assert succession.is_due(3.0), "what they let it do without an earlier standby says nothing of this one"


def test_of_a_node_that_was_started_anew_since_the_crew_was_told_the_standby_does_not_count_the_word():
    one = follower(told(a=100, b=100))
    one.gone(1.0)
    succession = TakeoverPolicy(one, 1.0)
    turned(succession, "a", incarnation=100 + LIFE)
    assert not succession.is_due(3.0)
    turned(succession, "a", incarnation=105)
    assert succession.is_due(3.0)


def test_a_standby_that_was_told_of_no_node_takes_over_only_when_it_is_told_to():
    one = follower(told())
    one.gone(1.0)
    succession = TakeoverPolicy(one, 1.0)
    turned(succession, "a", "b")
    assert not succession.is_due(3.0), "the first may go on with whoever comes"


def said_to(succession, *said, peer="p#1", is_operator=True):
    """What a standby answers to these."""
    answers = [succession.receive(peer, stamp, message, is_operator, 2.0) for stamp, message in said]
    return [answer and answer[0].reason for answer in answers]


def test_a_standby_obeys_promote_only_after_hello_on_a_connection_of_now_and_only_an_operator():
    hello, promote = (Stamp(7, 1), Hello("p", "observer", incarnation=7)), (Stamp(7, 2), Promote())
    stranger = TakeoverPolicy(follower(), 1.0)
    assert said_to(stranger, hello, promote, is_operator=False) == ["standby", "keys"]
    assert said_to(stranger, promote) == ["unknown"], "without a Hello"
    assert said_to(stranger, (Stamp(), Hello("p", "observer")), (Stamp(), Promote())) == ["standby", "unknown"]
    assert said_to(stranger, hello, (Stamp(6, 2), Promote()), (Stamp(7, 1), Promote())) == ["standby", None, None]
    assert not stranger.promoted and not stranger.is_due(9.0)
    assert said_to(stranger, hello, promote) == ["standby", None]
    assert stranger.promoted and stranger.is_due(2.0)


def test_a_standby_remembers_few_operators_and_answers_others_that_it_is_one():
    succession = TakeoverPolicy(follower(), 1.0)
    for number in range(40):
        said_to(succession, (Stamp(7, 1), Hello("p", "observer", incarnation=7)), peer=f"p#{number}")
    assert said_to(succession, (Stamp(7, 2), Promote()), peer="p#0") == ["unknown"]
    assert said_to(succession, (Stamp(7, 2), Heartbeat()), (Stamp(7, 3), Goodbye())) == ["unknown", None]
    assert said_to(succession, (Stamp(7, 2), Promote()), peer="p#39") == [None] and succession.promoted


def test_a_hub_takes_one_standby_and_says_why_not_another():
    hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")
    assert Replicate("s#1") in hub.receive("s#1", Hello("s", "standby", address=SECOND), 0.0)
    (refused,) = hub.receive("t#1", Hello("t", "standby", address="tcp://third:1"), 0.0)
    assert refused.message.reason == "occupied" and SECOND in refused.message.text
    (refused,) = hub.receive("u#1", Hello("u", "standby", address="nowhere"), 0.0)
    assert refused.message.reason == "occupied"
    several = Hub(RunSettings(shards=2, initial="founder"), release_rule_from_spec("immediately"), "run-1")
    assert Replicate("s#1") in several.receive("s#1", Hello("s", "standby", address=SECOND), 0.0), "each may have one"


def test_who_was_not_there_when_the_first_was_lost_has_no_vote_for_the_standby():
    one = follower(told("a", "b", "c"))
    one.gone(1.0)
    succession = TakeoverPolicy(one, 1.0)
    turned(succession, "a", *(f"stranger {number}" for number in range(3000)))
    assert not succession.is_due(3.0) and len(succession._votes) == 1024
    turned(succession, "a", "b")
    assert succession.is_due(3.0)


def test_a_standby_that_comes_again_or_another_in_its_place_holds_up_nobody_until_it_is_in_step_again():
    hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")
    hub.receive("s#1", Hello("s", "standby", address=SECOND), 0.0)
    hub.in_step(0.0)
    assert hub.lease.follows
    hub.receive("s#1", Hello("s", "standby", address=SECOND), 1.0)
    assert not hub.lease.follows and hub.lease.holds
    hub.in_step(0.0)
    effects = hub.receive("t#1", Hello("t", "standby", address=SECOND), 2.0)
    assert any(isinstance(effect, Disconnect) and effect.peer == "s#1" for effect in effects)
    assert hub.standby.peer == "t#1" and list(hub.members) == ["t#1"] and not hub.lease.follows


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


def core(hub, reconnect=lambda peer, text: None):
    access = SimpleNamespace(connects=False)
    return SimpleNamespace(hub=hub, reconnect=reconnect, carry_out=lambda effects: None, access=access)


def test_a_run_that_goes_back_waits_for_its_standby_to_hold_the_new_course_of_it():
    hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")
    replicas, told = StandbyService(core(hub)), []
    hub.receive("s#1", Hello("s", "standby", address=SECOND), 0.0)
    replicas.holds(9, 0.0)
    assert hub.lease.follows
    replicas.go_back(4)
    replicas.announce(5, lambda: told.append(5), 1.0)
    assert not told
    replicas.holds(5, 1.1)
    assert told == [5]


def test_a_first_that_waits_for_its_nodes_takes_its_standby_back():
    hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")
    sent_away, told = [], []
    replicas = StandbyService(core(hub, lambda peer, text: sent_away.append(peer)))
    hub.lease.joined(SECOND)
    hub.lease.tell(["a", "b"], 0.0)
    hub.lease.lost()
    replicas.announce(1, lambda: told.append(1), 0.0)
    hub.receive("s#1", Hello("s", "standby", address=SECOND), 10.0)
    replicas.tick(15.0)  # it is being copied, which takes its time
    assert not sent_away and not told
    replicas.copied()
    replicas.holds(1, 20.0)
    replicas.tick(20.1)
    assert told == [1] and not sent_away
    replicas.announce(2, lambda: told.append(2), 20.5)
    replicas.tick(21.5)
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
        peer.search.know(f"tcp://pc{number}:1")
    peer.search.know(SECOND)
    assert peer.search.addresses == (FIRST, SECOND, *(f"tcp://pc{number}:1" for number in range(1, MOST_LEARNT + 1)))
    peer.start(0.0)
    tried = [peer.tick(3.0 * number)[0].address for number in range(1, len(peer.search.addresses) + 1)]
    assert tried == [*peer.search.addresses[1:], FIRST]


def versions_of_nodes_with(lag, seconds, beat=0.6):
    """How many versions nodes hear of, who make one `beat` seconds after the last, with a standby that confirms each
    `lag` seconds late; and how often that was sent away."""
    hub = Hub(SETTINGS, release_rule_from_spec("immediately"), "run-1")
    told, away, lags, sent, clock = [0.0], [], [], 0, [0.0]  # told: when nodes heard of each

    def send_away(peer, text):
        away.append(text)
        hub.gone(peer, text, clock[0])
        lags.clear()

    replicas = StandbyService(core(hub, send_away))
    while (now := clock[0]) < seconds:
        if hub.standby is None:
            hub.receive("s#1", Hello("s", "standby", address=SECOND), now)
            replicas.copied()
            lags.append((now + lag, sent))
        hub.saw("s#1", now)
        while lags and lags[0][0] <= now:
            replicas.holds(lags.pop(0)[1], now)
        if len(told) > sent and now - told[-1] >= beat:
            sent += 1
            lags.append((now + lag, sent))
            replicas.announce(sent, lambda: told.append(clock[0]), now)
        replicas.tick(now)
        clock[0] += 0.05
    return len(told) - 1, away


def test_a_standby_that_confirms_each_version_late_is_out_of_step_and_does_not_slow_the_run():
    alone, away = versions_of_nodes_with(lag=0.0, seconds=120)
    assert alone > 170 and not away
    slowed, away = versions_of_nodes_with(lag=1.8, seconds=120)
    assert slowed > 0.95 * alone and len(away) == 2 and "without it" in away[0]
    slightly, away = versions_of_nodes_with(lag=0.1, seconds=60)
    assert not away and slightly > 75


def test_the_longer_a_standby_was_in_step_the_sooner_it_is_in_step_again():
    patience = Patience()
    patience.in_step(0.0)
    assert patience.is_used_up(1.2, 0, 5.0) and not patience.is_used_up(1.2, 10**7, 5.0), "10 MB may take a second"
    assert [patience.out_of_step(now) for now in (5.0, 70.0, 200.0)] == [60.0, 120.0, 240.0]
    assert not patience.may_be_in_step(439.0) and patience.may_be_in_step(440.0)
    patience.in_step(440.0)
    assert patience.out_of_step(450.0) == 480.0
    patience.in_step(1000.0)
    assert patience.out_of_step(3000.0) == 60.0
    assert [patience.out_of_step(3000.0 + number) for number in range(6)][-1] == 960.0


def test_nodes_wait_at_once_for_a_fortieth_of_the_time_for_which_the_standby_is_out_of_step_then():
    patience = Patience()
    patience.in_step(0.0)
    assert patience.is_used_up(patience.out_of_step(5.0) / 40, 0, 70.0)


def test_nodes_wait_for_a_standby_for_a_small_share_of_the_time():
    patience, used = Patience(), 0
    for second in range(1, 1000):
        if patience.is_used_up(0.3, 0, float(second)):
            used = second
            break
        patience.waited(0.3, 0, float(second))
    assert 5 < used < 10, "0.2 s of each second are more than a twentieth"


def test_books_that_are_nested_deeply_are_not_believed():
    one = follower()
    assert isinstance(one.receive(Books("[" * 10**5), 1.0)[0], Disconnect)
