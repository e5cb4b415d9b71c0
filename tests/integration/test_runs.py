"""Whole runs over real sockets: what the issue calls exact, and what a user calls robust."""

import asyncio
import contextlib
import logging
import os
import socket
import threading
from pathlib import Path

import jax
import msgpack
import numpy as np
import pytest
import zmq
from runs import BrokerProcess, Trainer, batches, broker, loss, parameters

from zmqtrain.broker.serve import BrokerThread
from zmqtrain.codecs import fast
from zmqtrain.core.errors import ChannelFull, HubUnreachable, JoinRefused, ModelMismatch, NonFiniteDelta, PeerLost
from zmqtrain.core.installed import how_to_upgrade, package_version
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Counts, Lane, PeerId
from zmqtrain.node.connect import connect
from zmqtrain.protocol.framing import PROTOCOL_VERSION, encode_refusal
from zmqtrain.protocol.messages import Refused
from zmqtrain.session.unequal import NEWER, OLDER
from zmqtrain.train import anchor, pinned
from zmqtrain.transport.admission import Seats
from zmqtrain.transport.zmq_channels import DealerChannel, RouterChannel

PROJECT = Path(__file__).parents[2]


def finals(address, names, **options):
    trainers = [Trainer(address, name, **options) for name in names]
    return [trainer.join() for trainer in trainers], trainers


def test_three_nodes_learn_one_model_and_end_with_the_same_parameters():
    settings = RunSettings(every=4, delay=2, units=60, start_nodes=3, initial="founder", lost_seconds=10.0)
    with broker(settings) as hub:
        params, _ = finals(hub.address, ["pc-1", "pc-2", "pc-3"])
    for other in params[1:]:
        for name in other:
            np.testing.assert_allclose(other[name], params[0][name], atol=1e-6)
    held_out = next(batches(10**6))
    assert loss(params[0], held_out) < loss(parameters(), held_out) / 2
    statistics = hub.broker.statistics()
    assert statistics.contributions > 3 and statistics.refused == 0


def test_a_run_of_pinned_leaves_ends_with_the_bits_of_one_whose_segments_are_computed(monkeypatch):
    computed, read, reads = strict(7, 2, 8), pinned.Pinned.read, []

    def counting(segments, work):
        reads.append(read(segments, work))
        return reads[-1]

    monkeypatch.setattr(anchor, "LEAST_PINNED", 0)
    monkeypatch.setattr(pinned.Pinned, "read", counting)
    fast.use(True)
    try:
        in_place = strict(7, 2, 8)
    finally:
        fast.use(None)
    assert any(frames is not None for frames in reads)
    for one, other in zip(computed, in_place, strict=True):
        for name in one:
            assert one[name].tobytes() == other[name].tobytes()


def test_the_machine_code_of_the_codecs_is_made_by_all_before_anybody_trains(monkeypatch):
    events = []
    for who in ("zmqtrain.broker.deltas", "zmqtrain.node.node"):
        monkeypatch.setattr(f"{who}.compile_codecs", lambda layout, settings, who=who: events.append(who))
    with broker(RunSettings(every=4, delay=2, units=4, start_nodes=2, initial="founder", shards=1)) as hub:
        finals(hub.address, ["pc-1", "pc-2"], on_step=lambda trainer: events.append("step"))
    assert sorted(events[: events.index("step")]) == ["zmqtrain.broker.deltas", *["zmqtrain.node.node"] * 2]


def strict(seed, fragments, delay):
    settings = RunSettings(
        mode="strict", release="all", every=4, delay=delay, fragments=fragments, start_nodes=3, units=18, seed=seed,
        lost_seconds=10.0,  # who was lost for a moment would be dealt other units
    )  # fmt: skip
    with broker(settings) as hub:
        params, _ = finals(hub.address, ["pc-1", "pc-2", "pc-3"], params=parameters(seed))
    return params


@pytest.mark.parametrize(("fragments", "delay"), [(1, 2), (1, 0), (2, 8)])
def test_two_strict_runs_with_the_same_seeds_end_with_the_same_bits(fragments, delay):
    first, second = strict(7, fragments, delay), strict(7, fragments, delay)
    for one, other in zip(first, second, strict=True):
        for name in one:
            assert one[name].tobytes() == other[name].tobytes()
    assert any(a["w"].tobytes() != b["w"].tobytes() for a, b in zip(first, strict(8, fragments, delay), strict=True))


def test_a_node_alone_trains_from_the_first_step_and_others_join_and_leave_at_any_time():
    with broker(RunSettings(every=4, delay=2)) as hub:
        first = Trainer(hub.address, "pc-1")
        first.wait_until(lambda: first.sync is not None and first.sync.statistics().aggregates_applied > 3)
        second = Trainer(hub.address, "pc-2")
        second.wait_until(lambda: second.sync is not None and second.sync.statistics().aggregates_applied > 3)
        held_out = next(batches(10**6))
        assert loss(second.began_with, held_out) < loss(first.began_with, held_out)  # it began where the run was
        second.stop.set()
        second.join()
        before = first.sync.statistics().aggregates_applied
        first.wait_until(lambda: first.sync.statistics().aggregates_applied > before + 3)
        first.stop.set()
        first.join()


def test_a_broker_that_is_killed_and_restarted_from_its_checkpoint_goes_on_with_the_run(tmp_path, caplog):
    caplog.set_level(logging.INFO, "zmqtrain")
    settings = RunSettings(every=2, delay=1, heartbeat_seconds=0.1, lost_seconds=0.5)
    with BrokerProcess(settings, tmp_path) as first:
        trainers = [Trainer(first.address, name) for name in ("pc-1", "pc-2")]
        for trainer in trainers:
            trainer.wait_until(lambda t=trainer: t.sync is not None and t.sync.statistics().version > 10)
        first.kill()
        seen = max(trainer.sync.statistics().version for trainer in trainers)
        steps = [trainer.steps for trainer in trainers]
        for trainer, before in zip(trainers, steps, strict=True):
            trainer.wait_until(lambda t=trainer, s=before: t.steps > s + 50)  # nobody stops
        with BrokerProcess(settings, tmp_path, first.port) as second:
            for trainer in trainers:
                trainer.wait_until(lambda t=trainer: t.sync.statistics().version > seen + 10)
            for trainer in trainers:
                trainer.stop.set()
            params = [trainer.join() for trainer in trainers]
            assert second.interrupt() == 0
    held_out = next(batches(10**6))
    assert all(loss(one, held_out) < loss(parameters(), held_out) / 2 for one in params)
    assert "Training goes on alone" in caplog.text and "federates again" in caplog.text
    assert (tmp_path / "model.safetensors").exists()


def said_of_hub(trainer, name):
    """What the hub last said of itself to a node, None if it has said nothing yet."""
    return None if trainer.node.roster is None else trainer.node.roster.hub.get(name)


def test_a_broker_that_is_started_again_on_a_full_disk_serves_its_run_and_releases_when_there_is_room(tmp_path):
    settings = RunSettings(every=4, delay=2, codec="int8", broadcast_codec="int8", heartbeat_seconds=0.1)
    with BrokerProcess(settings, tmp_path) as first:
        trainer = Trainer(first.address, "pc-1")
        trainer.wait_until(lambda: trainer.sync is not None and trainer.sync.statistics().version >= 3)
        first.kill()
        version = trainer.sync.statistics().version
        with BrokerProcess(settings, tmp_path, first.port, file_bytes=0) as second:
            trainer.wait_until(lambda: said_of_hub(trainer, "waits_for_room") is True)
            second.free_disk()
            trainer.wait_until(lambda: trainer.sync.statistics().version > version + 3)
            trainer.wait_until(lambda: said_of_hub(trainer, "waits_for_room") is False)
            trainer.stop.set()
            trainer.join()
            assert second.interrupt() == 0
    assert list(tmp_path.glob("checkpoint-*.safetensors"))


def test_a_broker_of_another_run_is_not_believed_and_training_goes_on(tmp_path, caplog):
    settings = RunSettings(every=2, delay=1, heartbeat_seconds=0.1, lost_seconds=0.5)
    with BrokerProcess(settings, None) as first:
        trainer = Trainer(first.address, "pc-1")
        trainer.wait_until(lambda: trainer.sync is not None and trainer.sync.statistics().version > 2)
        version = trainer.sync.statistics().version
        first.kill()
        with BrokerThread(first.address, settings):
            trainer.wait_until(lambda: "this node belongs to" in caplog.text)
            assert caplog.text.count("pc-1 belongs to run-") == 1 and "it trains on alone" in caplog.text
            steps = trainer.steps
            trainer.wait_until(lambda: trainer.steps > steps + 20)
            assert trainer.sync.statistics().version >= version
            trainer.stop.set()
            trainer.join()


def test_a_node_whose_lane_of_payloads_comes_after_what_it_is_sent_there_keeps_its_place(monkeypatch, caplog):
    held, sent, connect_now, awaits = [], RouterChannel.send, zmq.Socket.connect, Seats.awaits

    def connect_bulk_later(socket, address):
        if socket.routing_id.startswith(b"Bpc-2"):
            held.append((asyncio.get_running_loop(), socket, address))
        else:
            connect_now(socket, address)

    def send(channel, peer, lane, frames):
        try:
            sent(channel, peer, lane, frames)
        except (ChannelFull, PeerLost):
            while held and lane is Lane.BULK:
                loop, socket, address = held.pop()
                loop.call_soon_threadsafe(connect_now, socket, address)
            raise

    caplog.set_level(logging.INFO, "zmqtrain")
    with broker(RunSettings(every=2, delay=1)) as hub:
        first = Trainer(hub.address, "pc-1")
        first.wait_until(lambda: first.steps > 4)
        monkeypatch.setattr(zmq.Socket, "connect", connect_bulk_later)
        monkeypatch.setattr(RouterChannel, "send", send)
        monkeypatch.setattr(Seats, "awaits", lambda seats, peer, lane, _, now: awaits(seats, peer, lane, 60.0, now))
        late = Trainer(hub.address, "pc-2")
        late.wait_until(lambda: late.sync is not None and late.sync.statistics().aggregates_applied > 3)
        for trainer in (first, late):
            trainer.stop.set()
            trainer.join()
    assert "its connection is gone" not in caplog.text


def test_another_model_is_refused_with_the_leaf_and_both_shapes():
    with broker(RunSettings()) as hub:
        first = Trainer(hub.address, "pc-1")
        first.wait_until(lambda: first.steps > 1)
        other = Trainer(hub.address, "pc-2", params={**parameters(), "w": jax.numpy.zeros((40, 9))})
        with pytest.raises(ModelMismatch, match=r"w is float32\[40,8\] in the run and float32\[40,9\]"):
            other.join()
        steps = first.steps
        first.wait_until(lambda: first.steps > steps + 10)
        first.stop.set()
        first.join()


def test_a_node_that_diverges_is_named_and_the_others_go_on():
    with broker(RunSettings(every=2, delay=1)) as hub:
        good = Trainer(hub.address, "pc-good")
        good.wait_until(lambda: good.steps > 4)

        def diverge(trainer):
            if trainer.steps > 5:  # until one is taken
                bad_delta = [np.full(8, np.nan, np.float32), np.zeros(320, np.float32)]
                trainer.sync.exchange.offer(0, bad_delta, Counts(1, 1))

        bad = Trainer(hub.address, "pc-bad", on_step=diverge)
        with pytest.raises(NonFiniteDelta, match="pc-bad: the delta of b holds 8 values that are not finite"):
            bad.join()
        steps = good.steps
        good.wait_until(lambda: good.steps > steps + 20)
        good.stop.set()
        assert all(np.isfinite(leaf).all() for leaf in good.join().values())


def test_a_hub_that_does_not_answer_is_an_error_that_says_what_to_type():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(HubUnreachable, match=rf"zmqtrain-broker --bind tcp://\*:{port}"):
        connect(f"tcp://127.0.0.1:{port}", timeout_seconds=0.3)


def test_garbage_on_the_port_disturbs_nobody():
    with broker(RunSettings(every=2, delay=1)) as hub:
        trainer = Trainer(hub.address, "pc-1")
        trainer.wait_until(lambda: trainer.steps > 2)
        host, port = hub.address.removeprefix("tcp://").split(":")
        sockets = []
        for garbage in (os.urandom(1000), b"GET / HTTP/1.1\r\n\r\n", b"\xff\x00\x00\x00", b""):
            one = socket.create_connection((host, int(port)))
            one.sendall(garbage)
            sockets.append(one)
        applied = trainer.sync.statistics().aggregates_applied
        trainer.wait_until(lambda: trainer.sync.statistics().aggregates_applied > applied + 10)
        for one in sockets:
            one.close()
        trainer.stop.set()
        trainer.join()


def other_version(kind: str, fields: dict) -> list[bytes]:
    return [msgpack.packb([PROTOCOL_VERSION + 1, kind, fields])]


def test_a_node_of_another_protocol_version_is_told_so_and_the_others_go_on():
    async def hello(address: str) -> Refused:
        channel = DealerChannel(address, peer=PeerId("old#1"))
        await channel.send(Lane.CONTROL, other_version("Hello", {"name": "old"}))
        _, frames = await asyncio.wait_for(channel.receive(), 10)
        await channel.close()
        version, *stamp, kind, fields = msgpack.unpackb(frames[0])
        assert (version, stamp, kind) == (PROTOCOL_VERSION + 1, [0, 0], "Refused"), "that version reads it"
        return Refused(**fields)

    with broker(RunSettings(every=2, delay=1)) as hub:
        trainer = Trainer(hub.address, "pc-1")
        trainer.wait_until(lambda: trainer.steps > 2)
        refused = asyncio.run(hello(hub.address))
        assert refused.reason == NEWER
        assert f"zmqtrain {package_version()} (protocol version {PROTOCOL_VERSION})" in refused.text
        assert str(PROJECT) not in refused.text, "where the hub's files are is nobody's business"
        steps = trainer.steps
        trainer.wait_until(lambda: trainer.steps > steps + 10)
        trainer.stop.set()
        trainer.join()


ANSWERS = {
    "a newer hub that this node cannot read": (other_version("Welcome", {}), OLDER),
    "a newer hub": ([encode_refusal(Refused(OLDER, "the hub has zmqtrain 9.1"), PROTOCOL_VERSION)], OLDER),
    "an older hub": ([msgpack.packb([PROTOCOL_VERSION - 1, "Refused", {}])], NEWER),
}


@pytest.mark.parametrize("which", ANSWERS)
def test_a_broker_of_another_protocol_version_is_an_error_that_says_what_to_type(which):
    said, reason = ANSWERS[which]

    async def answer(address: list[str], ready: threading.Event, told: threading.Event) -> None:
        """Answer whatever comes, on whichever connection: who was not answered at once makes new ones."""
        channel = RouterChannel("tcp://127.0.0.1:0")

        async def answer_all() -> None:
            while True:
                peer, _, _ = await channel.receive()
                with contextlib.suppress(PeerLost):
                    channel.send(peer, Lane.CONTROL, said)

        answering = asyncio.create_task(answer_all())
        address.append(channel.address)
        ready.set()
        await asyncio.to_thread(told.wait)
        answering.cancel()
        await channel.close()

    address, ready, told = [], threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(answer(address, ready, told)))
    thread.start()
    ready.wait()
    try:
        with pytest.raises(JoinRefused) as caught:
            connect(address[0], timeout_seconds=60.0)
        assert caught.value.reason == reason
        assert f"this pc's zmqtrain {package_version()}" in str(caught.value).lower().replace(
            "this pc has", "this pc's"
        )
        assert (how_to_upgrade() in str(caught.value)) is (reason == OLDER)
    finally:
        told.set()
        thread.join()
