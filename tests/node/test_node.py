"""A node's ears: what comes over its link, in which state, and what becomes of it (no thread of the network here)."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from tests.clocks import VirtualClock
from tests.fixed import fixed_run
from zmqtrain.averaging.coder import DeltaCoder, Encoded, encode_snapshot
from zmqtrain.averaging.snapshot import encode_optimizer_state
from zmqtrain.checkpoint.folder import CheckpointFolder
from zmqtrain.codecs.fragment import Layout
from zmqtrain.core.errors import (
    ChannelClosed,
    ConfigError,
    HubUnreachable,
    LocalProtocolError,
    RunStopped,
    ZmqTrainError,
)
from zmqtrain.core.types import Lane, LeafSpec, Offer
from zmqtrain.node.checkpoint import CheckpointOptions, NodeCheckpoint
from zmqtrain.node.node import Node, NodeOptions
from zmqtrain.protocol.framing import decode_message, encode_message, split
from zmqtrain.protocol.messages import (
    Aggregate,
    Fetch,
    Refused,
    Roster,
    Snapshot,
    Stop,
    Welcome,
    WorkRequest,
    WorkUnit,
    model_to_wire,
    replace_fields,
)
from zmqtrain.protocol.peer import PeerState
from zmqtrain.session.environment import RealEnvironment
from zmqtrain.session.hub_session import HubSession

MODEL = (LeafSpec("w", (10,), "float32"),)
LEAVES = [np.arange(10, dtype=np.float32)]


@pytest.fixture
def node(monkeypatch):
    """A node whose network is the test: `call` calls, what it sends stays in its link."""

    def start(link):
        link._wake, link._stop = asyncio.Event(), asyncio.Event()

    async def reconnect():
        pass

    monkeypatch.setattr(HubSession, "start", start)
    monkeypatch.setattr(HubSession, "call", lambda link, what: link._do(what))
    monkeypatch.setattr(HubSession, "_disconnect", lose(HubSession._disconnect))
    made = Node(NodeOptions(peer="pc#1", name="pc", addresses=["tcp://hub:5555"]), RealEnvironment())
    made.start()
    yield made
    made._executor.close()


def lose(disconnect):
    def without_a_loop(link, reason, text):
        link._reconnecting = object()  # as if the channel were being opened anew
        disconnect(link, reason, text)
        link._reconnecting = None

    return without_a_loop


def hear(node, *messages, lane=Lane.CONTROL):
    for message in messages:
        node.link._take(lane, [encode_message(message)])


def hear_frames(node, announcement, frames):
    hear(node, announcement, lane=Lane.BULK)
    for head, frame in split(announcement.transfer, frames):
        node.link._take(Lane.BULK, [head, frame])


def said(node, kind):
    return [message for head in node.link._sender.waiting_control if isinstance(message := decode_message(head), kind)]


def decoded(node):
    """Let the codec thread finish what it has been given."""
    node._executor.close(60.0)


def caught_up(node):
    """Wait until the codec thread has done what it has been given."""
    done = threading.Event()
    node._executor.submit(done.set)
    assert done.wait(60.0)


def welcome(version=-1, model=(), **settings):
    return Welcome("run-1", version, fixed_run(**settings).to_dict(), model_to_wire(model))


def live(node, version=0):
    """Join as the founder of the run; nothing is coded."""
    hear(node, welcome())
    node.link.carry_out(node.peer.join(MODEL, 0.0))
    node.link.listener = Deaf(node)
    hear(node, Fetch())
    node.link.listener = node
    hear(node, Snapshot(1, version, ()))
    assert node.state().unreachable == ()


def test_who_waits_for_a_snapshot_keeps_the_units_that_it_was_dealt(node):
    live(node)
    hear(node, WorkUnit((7, 8)), Aggregate(5, 3, "float32", (0,), (1,), (100,), (), 1))
    assert node.peer.state is PeerState.SYNCING  # the aggregates in between were dropped on their way
    assert node.units.take() == 7


def test_who_loses_the_broker_forgets_the_units_that_will_be_dealt_again(node):
    live(node)
    hear(node, WorkUnit((7, 8)))
    node.link.carry_out(node.peer.distrust("noise", 1.0))
    assert not node.units._units


def test_who_has_drained_says_so_again_when_the_broker_is_back(node):
    live(node)
    hear(node, WorkUnit((), finished=True))
    assert not node.everyone_drained(0)
    assert said(node, WorkRequest) == [WorkRequest((), 0, True)]
    node.link.carry_out(node.peer.distrust("noise", 1.0))
    assert not said(node, WorkRequest)
    hear(node, welcome(0, MODEL), Snapshot(2, 0, ()))
    assert said(node, WorkRequest) == [WorkRequest((), 0, True)]


def test_a_node_that_never_asked_for_units_is_dealt_none(node):
    live(node)
    assert not said(node, WorkRequest)


def test_parameters_that_a_lost_broker_asked_for_are_not_sent_to_the_next(node):
    hear(node, welcome())
    node.codec.coder, node._initial = DeltaCoder(MODEL, fixed_run()), (LEAVES, ())
    node.link.carry_out(node.peer.join(MODEL, 0.0))
    node.link._founding = False
    node.link.listener = Deaf(node)  # the codec thread takes its time
    hear(node, Fetch())
    node.link.carry_out(node.peer.distrust("noise", 1.0))
    node.link.send_founding([b"encoded"])
    assert not said(node, Snapshot)
    hear(node, welcome(), Fetch())
    node.link.send_founding([b"encoded"])
    node.link.send_founding([b"encoded again"])
    assert len(said(node, Snapshot)) == 1


class Deaf:
    messages = ()

    def __init__(self, node):
        self.on_changed = node.on_changed

    def on_founding(self):
        pass


def test_a_founder_that_is_late_to_begin_misses_no_aggregate(node):
    def joined_meanwhile(condition, timeout_seconds):
        hear(node, Fetch(), Snapshot(1, 0, ()))
        frames = encode_snapshot(node.layout, LEAVES)
        sizes = tuple(len(frame) for frame in frames)
        hear_frames(node, Aggregate(2, 1, "float32", (0,), (len(sizes),), sizes, (), 1), frames)
        decoded(node)
        return True

    hear(node, welcome())
    node.wait_welcome, settings = lambda: settings, node.settings
    node.wait = joined_meanwhile
    assert node.join(MODEL, LEAVES) is None
    assert node.statistics().version == 0
    assert node.poll().version == 1


def test_an_aggregate_that_came_spoiled_costs_a_snapshot_and_not_the_node(node, caplog):
    hear(node, welcome())
    node.begin_join(MODEL, LEAVES)
    hear(node, Fetch(), Snapshot(1, 0, ()))
    assert node.end_join() is None
    frames = [bytes(frame) for frame in encode_snapshot(node.layout, LEAVES)]
    sizes = tuple(len(frame) for frame in frames)
    spoiled = [*frames[:-1], frames[-1][:-1] + bytes([frames[-1][-1] ^ 1])]
    hear_frames(node, Aggregate(2, 1, "float32", (0,), (len(sizes),), sizes, (), 1), spoiled)
    decoded(node)
    assert said(node, Fetch)[-1].version == -1
    assert node.poll() is None and "pc fetches the run's parameters: an aggregate is not what was sent" in caplog.text


def test_a_failure_in_the_network_thread_is_told_to_the_training_thread(node):
    live(node)
    node.link.call(lambda: node.link.send(WorkRequest((object(),), 0, False)))
    with pytest.raises(ZmqTrainError, match="the session of pc failed"):
        node.poll()


def test_scores_may_be_scalars_of_any_kind(node):
    live(node)
    node.report_scores({"loss": np.float32(0.5)}, 0)
    assert node.make_report().scores == {"loss": 0.5}
    assert node.poll() is None


def test_a_node_that_cannot_open_its_channel_leaves_no_thread(monkeypatch):
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="nowhere"):
        Node(NodeOptions(peer="pc#1", name="pc", addresses=["nowhere"]), RealEnvironment()).start()
    assert set(threading.enumerate()) <= before


def test_a_delta_that_is_late_on_purpose_is_not_overtaken_by_the_next(node, monkeypatch):
    clock, timers, published = VirtualClock(), [], []
    monkeypatch.setattr(HubSession, "call", lambda link, what, after=0.0: timers.append((clock.now + after, what)))
    monkeypatch.setattr(HubSession, "publish", lambda link, offer, *_: published.append((clock.now, offer.sequence)))
    node.clock, node.message_delay = clock, iter([0.5, 0.125, 2.0]).__next__
    for sequence in range(3):
        node.publish(Offer(sequence, 0, (), 8, 2), 0, Encoded(0, "float32", ()), 1.0)
        clock.sleep(0.25)
    for clock.now, what in sorted(reversed(timers), key=lambda timer: timer[0]):  # of one time, the last comes first
        what()
    assert published == [(100.5, 0), (100.5, 1), (102.5, 2)]


# ---------------------------------------------------------------------- one of a population


def population(node):
    """Join a population whose run is not founded."""
    hear(node, welcome(initial="own", start_nodes=2))
    node.wait_welcome, settings = lambda: settings, node.settings
    node.wait = lambda condition, timeout_seconds: condition()
    assert node.join(MODEL, LEAVES, score=0.5) is None and not node.state().founded


def lent(leaves, transfer, version, reset, moments=()):
    frames = [*encode_snapshot(Layout(MODEL, 1), leaves), *moments]
    sizes = tuple(len(frame) for frame in frames)
    return Snapshot(transfer, version, sizes, (), len(moments), reset), frames


def test_one_of_a_population_trains_at_once_and_offers_nothing(node):
    population(node)
    assert said(node, Fetch)[-1].score == 0.5
    assert node.next_fragments() == () and node.waiting_for == ""
    node.compare(0.25)
    assert said(node, Fetch)[-1] == Fetch(-1, (), 0.25)


def test_the_training_thread_gives_what_the_hub_asks_for_while_it_trains_apart(node):
    population(node)
    assert not node.state().wanted
    hear(node, Fetch())
    assert node.state().wanted and not said(node, Snapshot)
    node.lend([2 * LEAVES[0]], [np.ones(5, np.float32)])
    decoded(node)
    (given,) = said(node, Snapshot)
    assert given.moments == 1 and len(given.sizes) == 2 and not node.state().wanted


def test_what_was_wanted_by_a_broker_that_is_lost_is_wanted_no_more(node):
    population(node)
    hear(node, Fetch())
    node.link.carry_out(node.peer.distrust("noise", 1.0))
    assert not node.state().wanted


def test_what_is_lent_comes_before_the_anchor_even_to_a_node_that_is_slow(node):
    population(node)
    for transfer, version, reset in [(1, -1, True), (2, -1, True), (3, -1, True), (4, 0, False)]:
        hear_frames(node, *lent([transfer * LEAVES[0]], transfer, version, reset, encode_optimizer_state(LEAVES)))
    assert node.state().founded and node.next_fragments() == ()  # the anchor is here, and not applied
    node._executor.submit(lambda: None)
    updates = []
    while len(updates) < 4:
        if (update := node.poll()) is not None:
            updates.append(update)
    decoded(node)
    assert [(u.version, u.reset, u.keep) for u in updates] == [(-1, True, False)] * 3 + [(0, False, True)]
    assert [float(u.anchor[0].values[1]) for u in updates] == [1, 2, 3, 4]
    np.testing.assert_array_equal(updates[0].optimizer_state[0], LEAVES[0])
    assert node.next_fragments() == (0,)


def test_who_is_lent_the_mean_has_not_joined_and_gives_its_own_parameters_again_to_a_broker_that_is_back(node):
    hear(node, welcome(initial="mean", start_nodes=2))
    node.begin_join(MODEL, LEAVES, score=0.5)
    hear(node, Fetch())
    hear_frames(node, *lent([2 * LEAVES[0]], 1, -1, True))
    caught_up(node)
    assert len(said(node, Snapshot)) == 1
    assert node.has_joined()
    mean = node.end_join()
    assert mean.version == -1 and float(mean.anchor[0].values[1]) == 2 and not node.has_joined()
    assert node.codec.coder.restarts == node.restarts.resets, "or it would never save a checkpoint again"
    node.link.carry_out(node.peer.vote(0.75))
    assert said(node, Fetch)[-1] == Fetch(-1, (), 0.75)
    node.link.carry_out(node.peer.distrust("noise", 1.0))
    hear(node, welcome(initial="mean", start_nodes=2))
    assert said(node, Fetch)[-1].score == 0.5
    hear(node, Fetch())
    decoded(node)
    (given,) = said(node, Snapshot)
    assert sum(given.sizes) == sum(map(len, encode_snapshot(node.layout, LEAVES)))


def test_the_score_of_one_mean_is_not_said_of_the_next(node):
    hear(node, welcome(initial="mean", start_nodes=2))
    node.begin_join(MODEL, LEAVES, score=0.5)
    for transfer, mean in ((1, 2.0), (2, 3.0)):
        hear(node, Fetch())
        hear_frames(node, *lent([mean * LEAVES[0]], transfer, -1, True))
        if transfer == 1:
            caught_up(node)
            assert node.end_join().version == -1
            node.link.carry_out(node.peer.distrust("noise", 1.0))
            hear(node, welcome(initial="mean", start_nodes=2))
    caught_up(node)
    asked = len(said(node, Fetch))
    assert float(node.vote(0.75).anchor[0].values[1]) == 3, "this one is to be scored first"
    assert len(said(node, Fetch)) == asked


def test_a_node_that_waits_for_a_broker_says_so_before_it_gives_up(node, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "zmqtrain")
    monkeypatch.setattr("zmqtrain.node.node.SAY_WAITING_SECONDS", 0.01)
    monkeypatch.setattr("zmqtrain.node.node.unknown_host", lambda addresses: "hub")
    with pytest.raises(HubUnreachable, match="knows no host named 'hub'"):
        node.wait_welcome(0.02)
    assert "knows no host named 'hub'" in caplog.text, "it may be known in time"
    monkeypatch.setattr("zmqtrain.node.node.unknown_host", lambda addresses: "")
    with pytest.raises(HubUnreachable, match=r"no broker answers at tcp://hub:5555 \(waited 0.02 s\)"):
        node.wait_welcome(0.02)
    assert "nobody answers yet at tcp://hub:5555; trying for" in caplog.text


@pytest.mark.parametrize("reason", ["key", "handshake", "broken"])
def test_a_node_that_its_hub_refuses_gives_up_long_before_its_time(node, monkeypatch, reason):
    monkeypatch.setattr("zmqtrain.node.node.REFUSED_SECONDS", 0.01)
    node.link._met = reason, "the hub does not authorise this PC's key"
    began = time.monotonic()
    with pytest.raises(HubUnreachable, match=r"cannot come in at tcp://hub:5555 \(tried for .*authorise") as caught:
        node.wait_welcome(600.0)
    assert caught.value.reason == reason and time.monotonic() - began < 300


def test_a_refusal_that_is_taken_back_in_time_costs_nothing(node):
    node.link._met = "key", "the hub does not authorise this PC's key"
    threading.Thread(target=lambda: hear(node, welcome())).start()
    assert node.wait_welcome(600.0) == node.settings


def test_a_refusal_wakes_who_waits(node):
    class Refusing:
        refused, obstacle = "key", "the hub does not authorise this PC's key"

        async def changed(self):
            raise ChannelClosed("over")

    woken = []
    node.link._channel, node.link.listener = Refusing(), SimpleNamespace(on_changed=lambda: woken.append(True))
    asyncio.run(node.link._follow_refusals())
    assert woken and node.link.refused == "key"


def test_no_checkpoint_is_taken_between_what_the_codec_dropped_and_the_training_thread_had_not_yet(node):
    node.codec.coder = DeltaCoder(MODEL, fixed_run())

    def facts():
        return {"node": {"resets": node.restarts.resets}, "offers": {"on_their_way": [[0, 0]]}}

    before = facts()
    assert node.codec.kept(before) is not None
    node.inbox.restart(node.codec.coder, 3)  # in the codec thread; what is on its way may land, and is nobody's own
    assert node.codec.kept(before) is None and node.codec.kept(facts()) is None
    assert node.poll().reset
    assert node.codec.kept(before) is None and node.codec.kept(facts()) is not None


def test_who_has_dropped_what_a_former_life_had_offered_does_not_drop_it_again_after_its_next_checkpoint(
    node, tmp_path
):
    node.checkpoint = NodeCheckpoint(CheckpointOptions(CheckpointFolder(tmp_path), "1000"), node)
    node.peer.resume("run-1", 3, fixed_run(), MODEL, (), next_sequence=5)
    node.offers.skip_to(5)
    node.codec.coder = DeltaCoder(MODEL, fixed_run())
    hear(node, replace_fields(welcome(4, MODEL), landed=((6, 4),), heard=6))
    node.link.carry_out(node.peer.join(MODEL, 0.0))
    frames = encode_snapshot(Layout(MODEL, 1), LEAVES)
    hear_frames(node, Snapshot(1, 4, tuple(len(frame) for frame in frames)), frames)
    decoded(node)
    assert node.next_fragments() == () and node.checkpoint.facts()["offers"]["sequence"] == 5
    assert node.poll().reset and node.next_fragments() == (0,)
    assert node.checkpoint.facts()["offers"]["sequence"] == 7


@pytest.mark.parametrize("steps", [7, 8])
def test_who_has_trained_alone_since_its_checkpoint_for_longer_than_its_offers_stand_for_drops_nothing(
    node, tmp_path, steps
):
    settings = {"every": 4, "fragments": 2}
    node.checkpoint = NodeCheckpoint(CheckpointOptions(CheckpointFolder(tmp_path), "1000"), node)
    node.peer.resume("run-1", 3, fixed_run(**settings), MODEL, (), next_sequence=5)
    for step in range(steps):
        node.report(step=step, samples=8, loss=1.0, age_steps=1.0, offers_refused=0)
    hear(node, replace_fields(welcome(4, MODEL, **settings), landed=((6, 4),), heard=6))
    assert node.peer.overtaken is (steps < 8)


def test_a_node_that_is_not_let_in_again_says_why_once(node, caplog):
    live(node)
    link = node.link
    link._say_obstacle()
    link._channel, link._loop = SimpleNamespace(), object()
    link.carry_out(node.peer.distrust("noise", 1.0))
    link._say_obstacle()
    assert "does not come in" not in caplog.text
    link._met = "key", "it does not authorise this PC's key"
    for _ in range(3):
        link._say_obstacle()
    assert caplog.text.count("does not come in again at tcp://hub:5555: it does not authorise this PC's key") == 1


def test_a_node_that_goes_on_alone_says_why_its_hub_does_not_answer_if_that_is_known(node, caplog):
    node.link._met = "key", "it does not authorise this PC's key"
    assert node.wait_hub_of_checkpoint(0.0, False)
    assert "nobody answers at tcp://hub:5555 (it does not authorise this PC's key): pc goes on from" in caplog.text


def test_a_node_that_has_had_no_hub_for_a_minute_says_where_it_looks_and_why(node, caplog):
    link = node.link
    link.peer.run = "run-1"
    for seconds in (0.0, 30.0, 60.0):
        link._say_absence(seconds)
    said = "pc has had no hub for 60 s, at tcp://hub:5555: nobody answers. Training goes on alone; trying again"
    assert [message for name, _, message in caplog.record_tuples if name == HubSession.__module__] == [said]


def test_a_second_model_of_one_node_is_refused_with_what_to_do(node):
    with pytest.raises(LocalProtocolError, match=r"joined the run already.*Give both models to one, as DelayedSync\("):
        for _ in range(2):
            hear(node, welcome(-1))
            node.begin_join(MODEL, LEAVES)


@pytest.mark.parametrize(("units", "takes", "said"), [(100, False, 1), (100, True, 0), (0, False, 0)])
def test_a_loop_that_takes_no_units_of_a_run_that_counts_them_is_warned_once(node, caplog, units, takes, said):
    hear(node, welcome(units=units))
    if takes:
        node.on_work(WorkUnit((7,)))
        next(node.batches(lambda unit: iter([unit])))
    for step in (1, 2):
        node.report(step=step, samples=8 * step, loss=0.5, age_steps=1.0, offers_refused=0)
    assert sum("takes no data units" in line and "--units 100" in line for line in caplog.messages) == said
    assert node.make_report().first_unit == (7 if takes else -1)


def test_a_report_never_says_a_first_step_without_the_unit_that_it_was_on(node):
    hear(node, welcome())
    node.on_work(WorkUnit((7,)))
    next(node.batches(lambda unit: iter([unit])))
    node.describe(first_step="0a")
    node.describe(device="cpu")
    report = node.make_report()
    assert (report.first_step, report.first_unit, report.device) == ("0a", 7, "cpu")


def test_a_newcomer_knows_the_samples_of_the_run_at_once_and_from_each_roster_on(node):
    hear(node, replace_fields(welcome(), samples=4096))
    assert node.statistics().run_samples == 4096
    hear(node, Roster(0, (), "", 5000, 0, 0, 0, 1.0, {}, -1))
    assert node.statistics().run_samples == 5000


def test_a_loop_that_takes_units_ends_with_them_when_the_run_is_ended_and_any_other_is_told(node, caplog):
    live(node)
    assert not node.state().stopped
    with caplog.at_level("INFO"):
        hear(node, Stop())
    assert "an operator has ended it" in caplog.text
    assert node.state().stopped, "nothing else would end this loop"
    assert node.units.take() is None and not node.state().stopped, "this one ends by itself"
    assert not node.everyone_drained(0)
    assert said(node, WorkRequest)[-1] == WorkRequest((), 0, True), "and drains as at the end of the data"
    hear(node, WorkUnit((), finished=True, end_version=0))
    node.offers.version = 0
    assert node.everyone_drained(0)


def test_a_node_that_is_sent_away_because_the_run_is_ended_says_so(node):
    live(node)
    hear(node, Refused("stopped", "an operator has ended the run (zmqtrain stop)"))
    with pytest.raises(RunStopped, match=r"pc ends: an operator has ended the run \(zmqtrain stop\)\. What it"):
        node.peek()


def test_a_host_whose_name_comes_to_be_known_is_waited_for(node, monkeypatch):
    monkeypatch.setattr("zmqtrain.node.node.SAY_WAITING_SECONDS", 0.01)
    threads = []

    def unknown(addresses):
        threads.append(threading.Thread(target=lambda: hear(node, welcome())))
        threads[-1].start()
        return "hub"

    monkeypatch.setattr("zmqtrain.node.node.unknown_host", unknown)
    assert node.wait_welcome(600.0) is not None
    for thread in threads:
        thread.join()
