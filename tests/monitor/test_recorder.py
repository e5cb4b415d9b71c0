"""Recorders: a line an event, at the step at which it happened, on disk at once, and never the end of a run."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from tests.clocks import VirtualClock
from tests.fixed import fixed_run
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import Update
from zmqtrain.monitor.ledger import lives_of
from zmqtrain.monitor.recorder import BrokerRecorder, NodeRecorder, process_facts
from zmqtrain.monitor.records import read_records
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.messages import Roster


class Loss:
    """A loss that must not be asked for yet."""

    ready = False

    def __float__(self):
        assert self.ready, "nobody waits for a loss"
        return 0.5


@pytest.fixture
def clock():
    return VirtualClock(10.0)


@pytest.fixture
def node(tmp_path, clock):
    with NodeRecorder(tmp_path / "pc-1.jsonl", {"data": "x"}, clock) as recorder:
        recorder.joining("pc-1#ab", "run-1", fixed_run(program="text"), False, -1)
        yield recorder


def kinds(recorder):
    return [record["kind"] for record in read_records(recorder.path)]


def update(version, landed=(), anchor=None):
    return Update(version, {}, {}, landed, anchor)


def test_a_node_says_first_who_it_is(node, clock):
    assert read_records(node.path) == [
        {
            "kind": "node", "seconds": 0.0, "node": "pc-1", "peer": "pc-1#ab", "run": "run-1", "version": -1,
            "program": "text", "program_arguments": "", "founded": False, "data": "x",
        }
    ]  # fmt: skip


def test_a_node_that_joins_after_it_has_left_another_run_is_not_draining(node):
    node.closed()
    node.joining("pc-1#cd", "run-2", fixed_run(program="text"), True, 7)
    node.applied(update(3))
    assert kinds(node) == ["node", "node"], "an event of a step is written when that is over"
    assert read_records(node.path)[1]["version"] == 7


def test_what_happens_in_a_step_is_written_with_its_number_when_the_step_is_over(node, clock):
    node.applied(update(3, (0,)))
    clock.now += 1.5
    node.offered(1, 0, 3, False)
    assert kinds(node) == ["node"]
    node.stepped(4, 64, 0.5)
    _, applied, offered = read_records(node.path)
    assert (applied["step"], applied["samples"], applied["draining"]) == (4, 64, False)
    assert (applied["version"], applied["landed"], applied["snapshot"]) == (3, [0], False)
    assert (offered["step"], offered["sequence"], offered["base_version"], offered["seconds"]) == (4, 1, 3, 1.5)


def test_what_happens_after_the_last_step_is_marked_and_written_at_once_from_the_first_drain_on(node):
    node.stepped(4, 64, 0.5)
    node.applied(update(4))
    assert "application" not in kinds(node)  # a step may still follow
    node.offered(1, 0, 4, True)
    assert kinds(node)[-2:] == ["application", "offer"]
    node.applied(update(5, (1,)))
    late = read_records(node.path)[-3:]
    assert all(record["draining"] and record["step"] == 4 for record in late)


def test_what_is_still_held_is_written_when_the_node_closes(node):
    node.stepped(1, 16, 0.5)
    node.applied(update(9, anchor=[]))
    node.closed()
    last = read_records(node.path)[-1]
    assert (last["version"], last["snapshot"], last["draining"]) == (9, True, True)


def test_a_loss_is_written_a_step_late_and_never_waited_for(node):
    loss = Loss()
    node.stepped(1, 16, loss)
    assert "step" not in kinds(node)
    loss.ready = True
    node.stepped(2, 32, None)
    node.closed()
    first, second = (one for one in read_records(node.path) if one["kind"] == "step")
    assert (first["step"], first["loss"], first["samples"]) == (1, 0.5, 16)
    assert (second["step"], second["loss"]) == (2, None)


def test_a_loss_whose_buffer_is_gone_is_not_known(node):
    loss = jnp.zeros(())
    node.stepped(1, 16, loss)
    loss.delete()
    node.closed()
    assert [one["loss"] for one in read_records(node.path) if one["kind"] == "step"] == [None]


def test_a_withdrawal_tells_after_which_encoding_it_came(node):
    node.encoded(0)
    node.encoded(1)
    node.withdrawn(0, "stale")
    node.encoded(2)
    last = read_records(node.path)[-1]
    assert (last["kind"], last["sequence"], last["encoded"], last["reason"]) == ("withdrawal", 0, 1, "stale")


def test_a_node_that_ends_tells_the_crc_of_its_parameters(node):
    node.ended({"steps": 3}, [])
    assert read_records(node.path)[-1] == {"kind": "node_end", "seconds": 0.0, "node": "pc-1", "steps": 3, "crc": 0}


def test_a_broker_records_from_its_beginning_to_its_end(tmp_path, clock):
    with BrokerRecorder(tmp_path / "broker.jsonl", clock=clock) as broker:
        broker.began("run-1", fixed_run(), -1)
        broker.founded("pc-1#ab")
        broker.member("pc-1#ab", "joined", "at version 0")
        contribution = Contribution("pc-1#ab", 0, 0, 16, float("nan"), 0, 0)
        broker.released(Reduce(1, (0,), (contribution,), 1, False), 1, "float32", ((b"x",),))
        broker.evaluated(1, 16, {"loss": 2.0})
        broker.ended({"version": 1}, [])
        found = read_records(broker.path)
    assert [one["kind"] for one in found] == ["run", "founding", "membership", "release", "evaluation", "run_end"]
    assert RunSettings.from_dict(found[0]["settings"]) == fixed_run()
    assert found[1]["peers"] == ["pc-1#ab"] and found[3]["contributions"][0]["score"] is None
    assert found[-1]["crc"] is None  # nobody's parameters are here


def test_a_score_may_have_the_name_of_a_key_of_its_record(tmp_path, clock, node):
    with BrokerRecorder(tmp_path / "broker.jsonl", clock=clock) as broker:
        broker.evaluated(1, 16, {"loss": 2.0, "version": 3.0, "samples": 500.0})
        last = read_records(broker.path)[-1]
    assert last == {"kind": "evaluation", "seconds": 0.0, "version": 3.0, "samples": 500.0, "loss": 2.0}
    node.ended({"steps": 3, "node": 4.0}, [])
    assert read_records(node.path)[-1]["node"] == 4.0


def test_a_mean_of_several_is_recorded_with_all_of_them(tmp_path, clock):
    with BrokerRecorder(tmp_path / "broker.jsonl", clock=clock) as broker:
        broker.averaged(["pc-1#ab", "pc-2#cd"])
        broker.founded("pc-1#ab")
        assert read_records(broker.path)[0]["nodes"] == ["pc-1", "pc-2"]


class Disk:
    """A file on a disk that takes so many bytes, and no more until it is given room."""

    def __init__(self, file, room):
        self.file, self.room = file, room
        self.close = file.close

    def write(self, data):
        if not self.room:
            raise OSError(28, "No space left on device")
        written = self.file.write(bytes(data[: self.room]))
        self.room -= written
        return written


def test_what_a_full_disk_does_not_take_is_written_when_it_does(node, caplog):
    disk = node._file = Disk(node._file, 20)  # full in the middle of a line
    node.began(1)
    node.began(2)
    node.stepped(1, 16, 0.5)
    assert caplog.text.count("No space left") == 1
    disk.room = 1 << 20
    node.began(3)
    assert [one["unit"] for one in read_records(node.path) if one["kind"] == "unit"] == [1, 2, 3]


def test_a_disk_that_stays_full_ends_the_record_and_nothing_else(node, monkeypatch, caplog):
    node._file = Disk(node._file, 0)
    monkeypatch.setattr("zmqtrain.monitor.recorder.HELD_BYTES", 100)
    for unit in range(9):
        node.began(unit)
    assert caplog.text.count("ends here") == 1
    node.close()


def test_a_disk_that_says_only_at_the_end_that_it_is_full_ends_nothing_else(node, caplog):
    def late():
        file.close()
        raise OSError(122, "Disk quota exceeded")

    file, node._file = node._file, Disk(node._file, 1 << 20)
    node._file.close = late
    node.close()
    assert "is not complete: Disk quota exceeded" in caplog.text


def test_a_record_never_takes_the_place_of_another(tmp_path, clock):
    path = tmp_path / "pc-1.jsonl"
    for life in range(12):
        with NodeRecorder(path, {"life": life}, clock) as recorder:
            recorder.joining("pc-1#ab", "run-1", fixed_run(program="text"), False, -1)
    assert [life[0]["life"] for life in lives_of(path)] == list(range(12))
    with BrokerRecorder(tmp_path / "broker.jsonl", clock=clock):
        pass  # it said nothing: there is nothing to keep
    with BrokerRecorder(tmp_path / "broker.jsonl", clock=clock):
        pass
    assert not list(tmp_path.glob("broker.jsonl.*")) and lives_of(tmp_path / "broker.jsonl") == []


def test_after_the_file_is_closed_nothing_is_written(node):
    node.close()
    node.close()
    node.began(1)
    assert kinds(node) == ["node"]


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match="--record"):
        BrokerRecorder(tmp_path / "no" / "where.jsonl")


def test_a_broker_writes_its_reports_ever_less_often_and_the_last_one_always(tmp_path, clock):
    with BrokerRecorder(tmp_path / "broker.jsonl", process_facts(), clock) as recorder:
        for version in range(20_000):
            clock.now += 1.0
            recorder.stands(Roster(version, ({"name": "pc-1", "loss": float("nan")},), "", 1, 1, 0, 0, 0.5, {}, -1))
        recorder.ended({"version": 19_999}, [])
    *reports, end = read_records(recorder.path)
    assert end["kind"] == "run_end" and {one["kind"] for one in reports} == {"status"}
    assert [one["version"] for one in reports[:3]] == [0, 1, 2] and reports[-1]["version"] == 19_999
    assert 1500 < len(reports) < 3000
    first = reports[0]
    assert (first["seconds"], first["run_seconds"], first["members"]) == (1.0, 0.5, [{"name": "pc-1", "loss": None}])


def test_a_process_says_its_versions():
    facts = process_facts()
    assert {"python", "system", "numpy", "pyzmq"} <= facts["versions"].keys() and facts["began"] > 1e9
