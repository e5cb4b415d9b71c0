"""The file of a key server: what is written comes back whole, or is said to be torn."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from zmqtrain.checkpoint.files import write_arrays
from zmqtrain.core.errors import CheckpointError
from zmqtrain.core.types import LeafSpec
from zmqtrain.parameter_server import parameters
from zmqtrain.parameter_server.directory import Directory
from zmqtrain.parameter_server.machine import KeyServer, Rules
from zmqtrain.parameter_server.parameters import ParameterKeeper
from zmqtrain.parameter_server.store import Store, cut_frames, optimizer_from_spec

VALUES = np.linspace(-1, 1, 100)


def served():
    """A server with one key, to which one gradient was pushed: its machine, directory and store."""
    machine, directory, store = KeyServer("m", 1 << 30), Directory(1), Store(optimizer_from_spec("adam"))
    machine.enrol("a#1", Rules(consistency="bounded:s=1", optimizer="adam", workers=2), False)
    directory.declare("a#1", 1, [LeafSpec("w", (10, 10), "float64")])
    machine.initialise("a#1", 2, "w", "float64", 0, 100, (800,))
    machine.received("a#1", 2)
    directory.founded("a#1", ["w"])
    store.install("w", "float64", cut_frames(VALUES))
    store.apply("w", [cut_frames(VALUES)])
    return machine, directory, store


def save(folder, machine, directory, store):
    state = {"machine": machine.state(), "directory": directory.state()}
    ParameterKeeper(folder).save(state, store, wait=True)


def test_a_server_comes_back_as_it_was(tmp_path):
    machine, directory, store = served()
    save(tmp_path, machine, directory, store)
    fresh = KeyServer("other", 1 << 30)
    again, values = ParameterKeeper(tmp_path).resume(fresh)
    assert (fresh.rules, fresh.state()) == (machine.rules, machine.state())
    (placed,) = again.declare("b#1", 1, [LeafSpec("w", (10, 10), "float64")])
    assert [one.leaf.path for one in placed.given] == ["w"]
    assert values.entries["w"].version == 1
    for ours, theirs in zip(store.arrays().values(), values.arrays().values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    values.apply("w", [cut_frames(VALUES)])  # it may be written


def test_the_file_of_a_server_of_version_0_1_is_read_with_its_names_for_a_shard(tmp_path):
    machine, directory, store = served()
    rules = machine.state()["rules"]
    rules["master"], rules["masters"] = rules.pop("shard"), rules.pop("shards")
    state = {"machine": machine.state() | {"rules": rules}, "directory": directory.state()}
    ParameterKeeper(tmp_path).save(state, store, wait=True)
    fresh = KeyServer("other", 1 << 30)
    assert ParameterKeeper(tmp_path).resume(fresh) is not None
    assert (fresh.rules, fresh.state()) == (machine.rules, machine.state())


def test_without_a_folder_nothing_is_kept():
    machine, directory, store = served()
    save(None, machine, directory, store)
    assert ParameterKeeper(None).resume(machine) is None


def test_an_empty_folder_is_no_server(tmp_path):
    assert ParameterKeeper(tmp_path).resume(KeyServer("m", 1 << 30)) is None


@pytest.mark.parametrize("at", [0, 0.5, 1])
def test_a_torn_file_is_said_to_be_one(tmp_path, at):
    save(tmp_path, *served())
    path = tmp_path / "keys.safetensors"
    data = bytearray(path.read_bytes())
    data[min(int(at * len(data)), len(data) - 1)] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"keys\.safetensors cannot be read.*Move that file away"):
        ParameterKeeper(tmp_path).resume(KeyServer("m", 1 << 30))


def test_a_disk_that_is_full_is_told(tmp_path, caplog):
    machine, directory, store = served()
    (tmp_path / "folder").write_bytes(b"a file, and no folder")
    keeper = ParameterKeeper(tmp_path / "folder")
    state = {"machine": machine.state(), "directory": directory.state()}
    with pytest.raises(CheckpointError):
        keeper.save(state, store, wait=True)
    keeper.save(state, store)
    assert keeper.writer.wait(60) and keeper.writer.unsaved and "keys were written" in caplog.text


def test_what_changes_while_a_file_is_written_is_said_to_be_unwritten_and_is_in_the_next_one(tmp_path, monkeypatch):
    machine, directory, store = served()
    state = {"machine": machine.state(), "directory": directory.state()}
    keeper, writing = ParameterKeeper(tmp_path), threading.Event()

    def slowly(*arguments):
        assert writing.wait(60)
        write_arrays(*arguments)

    monkeypatch.setattr(parameters, "write_arrays", slowly)
    keeper.save(state, store)
    store.apply("w", [cut_frames(VALUES)])
    keeper.save(state, store)
    assert keeper.writer.retry_at == 0
    writing.set()
    keeper.save(state, store, wait=True)
    assert ParameterKeeper(tmp_path).resume(KeyServer("m", 1 << 30))[1].entries["w"].version == 2
