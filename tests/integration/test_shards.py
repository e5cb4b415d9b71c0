"""Runs of several brokers over real sockets: one address to join, brokers and founders that die, and wrong use."""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from runs import BrokerProcess, Trainer, batches, broker, loss, parameters
from safetensors.numpy import load_file

from zmqtrain.broker.checkpoint import merge_parts
from zmqtrain.broker.serve import BrokerThread
from zmqtrain.broker.standby import ShardPlace, StandbyPlace
from zmqtrain.core.errors import ConfigError, HubUnreachable, JoinRefused
from zmqtrain.core.settings import RunSettings
from zmqtrain.monitor.recorder import NodeRecorder
from zmqtrain.node.connect import connect
from zmqtrain.node.node import Node
from zmqtrain.protocol.limits import MOST_REFUSED

QUICK = {"every": 2, "delay": 1, "heartbeat_seconds": 0.1, "lost_seconds": 0.5, "shards": 2}
CALM = QUICK | {"lost_seconds": 10.0}
"""Where nobody is to be lost who stands still for a moment; of who is killed the connection is gone at once."""


def place_of(first, shard, shards, **facts):
    return ShardPlace(shard=shard, shards=shards, first=first, wait_seconds=20.0, **facts)


def other(first, shard, shards, bind="tcp://127.0.0.1:0", **options):
    """Another broker than the first, in a thread."""
    return BrokerThread(bind, None, place=place_of(first, shard, shards), **options)


@contextlib.contextmanager
def run_of(settings, folder=None):
    """All brokers of a run, each a thread; gives the brokers, the first first."""
    with contextlib.ExitStack() as stack:
        brokers = [stack.enter_context(broker(settings, checkpoint=folder and folder / "0"))]
        for shard in range(1, settings.shards):
            kept = {"checkpoint": folder and folder / str(shard)}
            brokers.append(stack.enter_context(other(brokers[0].address, shard, settings.shards, **kept)))
        yield brokers


def wide(seed=0):
    """The tiny model, and a leaf of eight blocks beside it: a shard border lies in its midst."""
    return parameters(seed) | {"wide": jnp.zeros((8, 4096)) + seed}


def shared(trainer):
    return trainer.sync is not None and trainer.sync.statistics().aggregates_applied > 4


def version_at(trainer, shard):
    return trainer.node._lines[shard].statistics().version


def all_applied(trainer, shard):
    """Wait until all is applied that has come from a broker which is gone."""
    line = trainer.node._lines[shard]
    jobs_are_done(line)  # all that has come is in the inbox: of much, more is decoded each time that some is applied
    trainer.wait_until(lambda: not line.inbox._arrived)
    jobs_are_done(line)
    trainer.wait_until(lambda: line.peek() is None)
    steps = trainer.steps
    trainer.wait_until(lambda: trainer.steps > steps)  # what was taken last is applied


def jobs_are_done(line):
    """Wait until the codec thread has done what it was given."""
    done = threading.Event()
    line.in_codec(done.set)
    assert done.wait(60.0)


class Places:
    """What the first says of where the broker of shard 1 is, each time that it changes: a broker's `watch`."""

    def __init__(self):
        self.changed, self.said = threading.Condition(), [""]

    def __call__(self, roster):
        with self.changed:
            if roster.shards[1] != self.said[-1]:
                self.said.append(roster.shards[1])
                self.changed.notify_all()

    def wait_until_free(self, times):
        """Wait until a broker has come and gone for so many times."""
        with self.changed:
            free = self.changed.wait_for(lambda: not self.said[-1] and self.said.count("") > times, 60.0)
        assert free, self.said


def test_nodes_of_two_shards_learn_one_model_and_a_late_one_joins_by_the_one_address(tmp_path):
    settings = RunSettings(every=4, delay=2, units=60, shards=2, fragments=2, lost_seconds=10.0)
    with run_of(settings, tmp_path) as (first, second):
        joined = threading.Event()

        def wait_for_the_late_one(trainer):
            if trainer.steps >= 40:
                joined.wait(60.0)

        early = {"params": wide(), "on_step": wait_for_the_late_one}
        trainers = [Trainer(first.address, name, **early) for name in ("pc-1", "pc-2")]
        for trainer in trainers:
            trainer.wait_until(lambda t=trainer: t.steps >= 40)
        trainers.append(Trainer(first.address, "pc-3", params=wide(1), on_step=lambda _: joined.set()))
        params = [trainer.join() for trainer in trainers]
        for one in (first, second):
            one._thread.join(60.0)
            assert not one.running, "the end of the run is theirs too"
    for one in params[1:]:
        for name in one:
            np.testing.assert_allclose(one[name], params[0][name], atol=1e-6)
    held_out = next(batches(10**6))
    assert loss(params[0], held_out) < loss(parameters(), held_out) / 2
    assert not np.any(trainers[2].began_with["wide"])  # the run's, of both brokers; its own were ones
    for one in (first, second):
        assert one.broker.statistics().contributions > 3 and one.broker.statistics().refused == 0
    merge_parts([tmp_path / "1", tmp_path / "0"], tmp_path / "model.safetensors")
    model = load_file(tmp_path / "model.safetensors")
    for name in params[0]:
        np.testing.assert_allclose(model[name], params[0][name], atol=1e-6)


def strict(shards, fragments, **settings):
    run = RunSettings(
        mode="strict", release="all", every=4, delay=2, fragments=fragments, start_nodes=3, units=12, shards=shards,
        initial="founder", lost_seconds=10.0, **settings,
    )  # fmt: skip
    with run_of(run) as (first, *_):
        trainers = [Trainer(first.address, name, params=wide()) for name in ("pc-1", "pc-2", "pc-3")]
        return [trainer.join() for trainer in trainers]


@pytest.mark.parametrize("codec", ["float32", "ternary"])
def test_strict_runs_of_one_and_of_several_shards_end_with_the_same_bits(codec):
    one, two = (strict(shards, 1, codec=codec, broadcast_codec=codec) for shards in (1, 2))
    for mine, theirs in zip(one, two, strict=True):
        for name in mine:
            assert mine[name].tobytes() == theirs[name].tobytes(), name


@pytest.mark.parametrize("release", ["all", "bounded:staleness=1"])
def test_under_rules_that_wait_a_run_of_several_shards_comes_to_its_end(release):
    settings = RunSettings(
        every=4, delay=2, units=13, shards=3, release=release, start_nodes=3, initial="founder", lost_seconds=10.0
    )
    with run_of(settings) as (first, *_):
        trainers = [Trainer(first.address, name, params=wide()) for name in ("pc-1", "pc-2", "pc-3")]
        params = [trainer.join() for trainer in trainers]
    for one in params[1:]:
        for name in one:
            np.testing.assert_allclose(one[name], params[0][name], atol=1e-6)


def test_a_shard_that_is_killed_costs_its_shard_and_federates_again(tmp_path, caplog):
    caplog.set_level(logging.INFO, "zmqtrain")
    with broker(RunSettings(**CALM)) as first, contextlib.ExitStack() as stack:
        place = place_of(first.address, 1, 2)
        second = stack.enter_context(BrokerProcess(None, tmp_path, place=place))
        trainers = [Trainer(first.address, name, params=wide()) for name in ("pc-1", "pc-2")]
        for trainer in trainers:
            trainer.wait_until(lambda t=trainer: shared(t) and version_at(t, 1) > 5)
        second.kill()
        trainers[0].wait_until(lambda: 1 in trainers[0].node.state().unreachable)
        all_applied(trainers[0], 1)
        seen = [version_at(trainers[0], shard) for shard in (0, 1)]
        trainers[0].wait_until(lambda: version_at(trainers[0], 0) > seen[0] + 10)  # the other shard goes on
        assert version_at(trainers[0], 1) == seen[1]
        stack.enter_context(BrokerProcess(None, tmp_path, second.port, place))
        for trainer in trainers:
            trainer.wait_until(
                lambda t=trainer: not t.node.state().unreachable and version_at(t, 1) > seen[1] + 10 and t.steps > 200
            )
        late = Trainer(first.address, "pc-3", params=wide(1))
        late.wait_until(lambda: shared(late))
        for trainer in (*trainers, late):
            trainer.stop.set()
        params = [trainer.join() for trainer in (*trainers, late)]
    held_out = next(batches(10**6))
    assert all(loss(one, held_out) < loss(parameters(), held_out) / 2 for one in params)
    assert "Training goes on alone" in caplog.text and "federates again" in caplog.text


def test_a_shard_that_comes_back_at_another_address_is_found_there(tmp_path, caplog):
    caplog.set_level(logging.INFO, "zmqtrain")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(broker(RunSettings(**CALM)))
        place = place_of(first.address, 1, 2)
        second = stack.enter_context(BrokerProcess(None, tmp_path, place=place))
        trainer = Trainer(first.address, "pc-1", params=wide())
        trainer.wait_until(lambda: shared(trainer))
        second.kill()
        trainer.wait_until(lambda: trainer.node.state().unreachable == (1,))
        trainer.wait_until(
            lambda: (roster := trainer.node.roster) is not None and roster.shards == ("", "")
        )  # the first has forgotten it too
        back = stack.enter_context(BrokerProcess(None, tmp_path, place=place))
        assert back.address != second.address
        trainer.wait_until(lambda: not trainer.node.state().unreachable)
        seen = version_at(trainer, 1)
        trainer.wait_until(lambda: version_at(trainer, 1) > seen + 3)
        trainer.stop.set()
        trainer.join()
    assert f"looks for the hub, which was at {second.address}, at {back.address}" in caplog.text


def in_step(trainer, shard):
    line = trainer.node._lines[shard]
    return line.roster is not None and line.roster.hub["standby"] != ""


def goes_on(trainer, shard, address):
    """Wait until a node exchanges a shard with the broker at an address that has taken it over."""
    line = trainer.node._lines[shard]
    trainer.wait_until(lambda: (line.address, line.peer.term) == (address, 1))
    seen = version_at(trainer, shard)
    trainer.wait_until(lambda: version_at(trainer, shard) > seen + 5)


@pytest.mark.parametrize("shard", [0, 1])
def test_of_several_brokers_each_may_have_a_standby_which_takes_its_place_when_it_is_killed(shard):
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(BrokerProcess(RunSettings(**CALM), None))
        second = stack.enter_context(BrokerProcess(None, None, place=place_of(first.address, 1, 2)))
        follows = StandbyPlace(first=(first, second)[shard].address, takeover_seconds=0.5)
        standby = stack.enter_context(BrokerProcess(None, None, standby=follows))
        trainers = [Trainer(first.address, name, params=wide()) for name in ("pc-1", "pc-2")]
        for trainer in trainers:
            trainer.wait_until(lambda t=trainer: shared(t) and in_step(t, shard) and version_at(t, 1 - shard) > 5)
        (first, second)[shard].kill()
        for trainer in trainers:
            goes_on(trainer, shard, standby.address)
        address = (standby, first)[shard].address
        trainers[0].wait_until(
            lambda: (
                (roster := trainers[0].node.roster) is not None
                and roster.shards == ("", (second, standby)[shard].address)
            )
        )
        late = Trainer(address, "pc-3", params=wide(1))
        late.wait_until(lambda: shared(late))
        for trainer in (*trainers, late):
            trainer.stop.set()
        params = [trainer.join() for trainer in (*trainers, late)]
        assert standby.interrupt() == 0
    held_out = next(batches(10**6))
    assert all(loss(one, held_out) < loss(parameters(), held_out) / 2 for one in params)


def test_nodes_wait_for_the_shards_that_are_missing_and_say_which(caplog):
    caplog.set_level(logging.INFO, "zmqtrain")
    seen = threading.Event()
    with broker(RunSettings(**CALM), watch=lambda roster: seen.set() if roster.members else None) as first:
        trainer = Trainer(first.address, "pc-1", params=wide())
        assert seen.wait(60.0)
        with connect(first.address, "look", observer=True) as look:
            assert look.shards == ("", "")
        trainer.wait_until(lambda: trainer.node is not None)
        assert trainer.steps == 0 and trainer.node.waiting_for == "the broker of shard 1 of 2"
        with other(first.address, 1, 2):
            trainer.wait_until(lambda: shared(trainer))
            trainer.stop.set()
            trainer.join()


def test_a_founder_that_dies_half_way_is_succeeded_by_the_next(monkeypatch):
    gave, died = threading.Event(), threading.Event()
    lend = Node.lend

    def die(node, leaves, optimizer_state=()):  # all others have its parameters; the first has not
        if node.name != "pc-1":
            return lend(node, leaves, optimizer_state)
        gave.set()
        died.wait(30.0)
        raise JoinRefused("it dies here")

    monkeypatch.setattr(Node, "lend", die)
    with run_of(RunSettings(**CALM)) as (first, _):
        doomed = Trainer(first.address, "pc-1", params=wide(1))
        assert gave.wait(30.0)
        heir = Trainer(first.address, "pc-2", params=wide(2))
        died.set()
        with pytest.raises(JoinRefused, match="it dies here"):
            doomed.join()
        heir.wait_until(lambda: shared(heir))
        late = Trainer(first.address, "pc-3", params=wide(3))
        late.wait_until(lambda: shared(late))
        for trainer in (heir, late):
            trainer.stop.set()
        params = [trainer.join() for trainer in (heir, late)]
    for one in params:  # the loss has no gradient there: all of it is the founder's still
        np.testing.assert_allclose(one["wide"], 2.0, atol=1e-5)


def test_a_shard_has_one_shard_and_who_comes_second_is_told_where_it_is():
    with run_of(RunSettings(**CALM)) as (first, second):
        with pytest.raises(JoinRefused, match=rf"shard 1/2 has a broker already, at {second.address}: stop that one"):
            other(first.address, 1, 2)
        with connect(first.address, "look", observer=True) as look:
            assert look.shards == ("", second.address)
    assert first.failure is None and second.failure is None


def test_what_is_no_place_among_the_shards_is_refused_with_what_to_say_instead():
    with run_of(RunSettings(**CALM)) as (first, second):
        with pytest.raises(JoinRefused, match=r"shard 2/2: the first has shard 0, the others have 1 to 1"):
            other(first.address, 2, 2)
        with pytest.raises(JoinRefused, match=rf"has shard 1: register with the first, at {first.address}"):
            other(second.address, 1, 2)
        with pytest.raises(ConfigError, match=rf"has shard 1 of 2 .* join at the first broker, {first.address}"):
            connect(second.address, "pc-1")
    with broker(RunSettings()) as alone, pytest.raises(JoinRefused, match="this broker has the whole model"):
        other(alone.address, 1, 2)


def test_a_node_of_several_shards_is_not_recorded_and_keeps_no_share_of_its_link_free(tmp_path):
    with run_of(RunSettings(**QUICK)) as (first, _):
        recorder = NodeRecorder(tmp_path / "record", {})
        with pytest.raises(ConfigError, match="leave --record out"):
            connect(first.address, "pc-1", events=recorder)
        recorder.close()
        with pytest.raises(ConfigError, match="leave --link and --share out here"):
            connect(first.address, "pc-1", share=0.5)


def test_a_place_of_another_number_of_shards_is_refused():
    with (
        broker(RunSettings(**QUICK | {"shards": 3})) as first,
        pytest.raises(ConfigError, match="--shard 1/3, not /2"),
    ):
        other(first.address, 1, 2)


def test_a_first_that_does_not_answer_is_an_error_that_says_what_to_start():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    place = ShardPlace(shard=1, shards=4, first=address, wait_seconds=0.2)
    with pytest.raises(HubUnreachable, match="zmqtrain-broker --shard 0/4"):
        BrokerThread("tcp://127.0.0.1:0", None, place=place)


def test_a_model_of_fewer_blocks_than_all_shards_have_fragments_is_refused_at_the_node():
    with run_of(RunSettings(**QUICK | {"fragments": 2})) as (first, _):
        trainer = Trainer(first.address, "pc-1")  # two leaves of a block each
        with pytest.raises(ConfigError, match="fragments must be 1 to 1, and shards at most 2"):
            trainer.join()


def test_a_checkpoint_of_another_shard_is_not_resumed(tmp_path):
    with run_of(RunSettings(**QUICK), tmp_path) as (first, _):
        trainer = Trainer(first.address, "pc-1", params=wide())
        trainer.wait_until(lambda: shared(trainer))
        trainer.stop.set()
        trainer.join()
    copy = shutil.copytree(tmp_path / "0", tmp_path / "copy")  # the first has its own in use
    places = Places()
    with broker(RunSettings(**QUICK), checkpoint=tmp_path / "0", watch=places) as first:
        with pytest.raises(ConfigError, match="is of shard 0, this broker has shard 1"):
            other(first.address, 1, 2, checkpoint=copy)
        places.wait_until_free(1)
        with other(first.address, 1, 2, checkpoint=tmp_path / "1") as second:
            assert second.broker.hub.run == first.broker.hub.run and second.broker.hub.version > 0
    with (
        broker(RunSettings(**QUICK)) as first,
        pytest.raises(ConfigError, match=r"is of run-\w+, the first broker runs run-"),
    ):
        other(first.address, 1, 2, checkpoint=tmp_path / "1")


def test_a_shard_serves_on_while_the_first_is_away_and_registers_again(tmp_path, caplog):
    caplog.set_level(logging.INFO, "zmqtrain")
    settings = RunSettings(**CALM)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(BrokerProcess(settings, tmp_path))
        stack.enter_context(other(first.address, 1, 2))
        trainer = Trainer(first.address, "pc-1", params=wide())
        trainer.wait_until(lambda: shared(trainer))
        first.kill()
        trainer.wait_until(lambda: trainer.node.state().unreachable)
        seen = version_at(trainer, 1)
        trainer.wait_until(lambda: version_at(trainer, 1) > seen + 10)
        stack.enter_context(BrokerProcess(settings, tmp_path, first.port))
        trainer.wait_until(lambda: not trainer.node.state().unreachable)
        late = Trainer(first.address, "pc-2", params=wide(1))
        late.wait_until(lambda: shared(late) and "is registered again with the first" in caplog.text)
        for one in (trainer, late):
            one.stop.set()
            one.join()
    assert "Its shard is served on" in caplog.text


def test_training_goes_on_without_a_break_when_one_of_the_shards_stops():
    with broker(RunSettings(**QUICK)) as first:
        with other(first.address, 1, 2):
            trainer = Trainer(first.address, "pc-1", params=wide())
            trainer.wait_until(lambda: shared(trainer))
        steps = trainer.steps
        trainer.wait_until(lambda: trainer.steps > steps + 20)
        trainer.stop.set()
        trainer.join()


def test_a_shard_that_comes_back_without_its_checkpoint_to_a_run_that_has_begun_is_refused():
    places = Places()
    with broker(RunSettings(**QUICK), watch=places) as first:
        with other(first.address, 1, 2):
            trainer = Trainer(first.address, "pc-1", params=wide())
            trainer.wait_until(lambda: shared(trainer))
        places.wait_until_free(1)
        with pytest.raises(ConfigError, match=r"has begun, and shard 1 .* start it with its checkpoint"):
            other(first.address, 1, 2)
        trainer.stop.set()
        trainer.join()


def test_a_registration_that_ends_frees_its_shard():
    places = Places()
    with broker(RunSettings(**CALM), watch=places) as first:
        for times in (1, 2):
            with other(first.address, 1, 2) as hub:
                assert hub.broker.hub.shard == 1
            places.wait_until_free(times)


def test_a_node_that_diverges_begins_again_from_the_shared_parameters_of_all_shards(caplog):
    caplog.set_level(logging.INFO, "zmqtrain")
    with run_of(RunSettings(**CALM)) as (first, _):
        good = Trainer(first.address, "pc-good", params=wide())
        good.wait_until(lambda: shared(good))
        poisoned = []

        def move(before, after):
            if bad.steps > 20 and not poisoned:
                poisoned.append(bad.steps)
                return {name: leaf * np.nan for name, leaf in after.items()}
            return after

        bad = Trainer(first.address, "pc-bad", params=wide(), move=move)
        bad.wait_until(lambda: poisoned and bad.steps > poisoned[0] + 100)
        assert all(line.restarts.resets > 0 for line in bad.node._lines)
        assert caplog.text.count("It begins again from the shared parameters") <= 2, "once a shard at most"
        for trainer in (good, bad):
            trainer.stop.set()
        ends = [trainer.join() for trainer in (good, bad)]
    for params in ends:
        assert all(np.isfinite(leaf).all() for leaf in params.values())
        assert loss(params, next(batches(10**6))) < loss(parameters(), next(batches(10**6))) / 2


def test_a_node_that_one_shard_quarantines_trains_on_from_the_shared_parameters(caplog, monkeypatch):
    monkeypatch.setattr("zmqtrain.protocol.limits.QUARANTINE_SECONDS", 1.0)
    caplog.set_level(logging.INFO, "zmqtrain")
    with run_of(RunSettings(**CALM)) as (first, other):
        good = Trainer(first.address, "pc-good", params=wide())
        bad = Trainer(first.address, "pc-bad", params=wide())
        for trainer in (good, bad):
            trainer.wait_until(lambda t=trainer: shared(t))
        line, hub = bad.node._lines[1], other.broker.hub

        def quarantine():
            (member,) = [one for one in hub.members.values() if one.name == "pc-bad"]
            for _ in range(MOST_REFUSED):
                other.broker.core.carry_out(hub._offended(member, "corrupt", "as if", other.broker.core.now()))

        other._loop.call_soon_threadsafe(quarantine)
        bad.wait_until(lambda: line.restarts.resets > 0)
        seen = line.statistics().version, bad.steps
        bad.wait_until(lambda: line.statistics().version > seen[0] + 5 and bad.steps > seen[1] + 50)
        assert all(one.restarts.resets > 0 for one in bad.node._lines)
        for trainer in (good, bad):
            trainer.stop.set()
        for trainer in (good, bad):
            trainer.join()
    assert "is quarantined for" in caplog.text
