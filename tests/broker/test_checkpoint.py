"""A broker's journal gives its releases back, and a model alone is named by its leaves."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from safetensors.numpy import load_file

from zmqtrain.averaging.aggregator import Released
from zmqtrain.broker.checkpoint import RunFolder, model_arrays
from zmqtrain.checkpoint.model_files import ModelFacts, write_model
from zmqtrain.core.errors import CheckpointError


def arrays_of(version):
    return {
        "parameters/w": np.full((2, 3), version, np.float32),
        "parameters/scalar": np.array(version, np.float32),
        "parameters/none": np.zeros((0, 4), np.float32),
        "published/w": np.full((3, 2), version, np.float32).T,
    }


def save(folder, *versions):
    for version in versions:
        folder.save(version, {"version": version}, arrays_of(version))


def record_of(version):
    frames = ((b"one" * version, bytearray(b"two")), (memoryview(b"three"),))
    return Released(version, "float32", (0, 2), frames), (("a#1", version), ("b#2", 7)), 16


def journal(folder, *versions):
    folder.begin_journal(versions[0] - 1)
    for version in versions:
        folder.release(record_of(version), {})


@pytest.fixture
def folder(tmp_path):
    made = RunFolder(tmp_path / "run")
    yield made
    made.close()


def test_a_new_folder_has_nothing(folder):
    assert folder.load() is None and list(folder.replay(-1)) == []


def test_the_journal_brings_back_what_was_released_after(folder):
    save(folder, 1)
    journal(folder, 2, 3, 4)
    records = list(folder.replay(1))
    assert [released.version for released, _, _ in records] == [2, 3, 4]
    released, landed, samples = records[-1]
    assert (released.codec, released.fragments, landed, samples) == ("float32", (0, 2), (("a#1", 4), ("b#2", 7)), 16)
    assert [[bytes(frame) for frame in frames] for frames in released.frames] == [[b"one" * 4, b"two"], [b"three"]]
    assert [released.version for released, _, _ in folder.replay(3)] == [4]


def test_the_replay_goes_from_one_journal_to_the_next(folder):
    save(folder, 1)
    journal(folder, 2, 3)
    save(folder, 3)
    journal(folder, 4, 5)
    (folder.folder / "checkpoint-000000000003.safetensors").write_bytes(b"torn")
    assert [released.version for released, _, _ in folder.replay(folder.load()[0]["version"])] == [2, 3, 4, 5]
    assert folder.skipped == 3


@pytest.mark.parametrize("how", ["head", "body", "bits"])
def test_a_journal_is_replayed_up_to_a_torn_record(folder, caplog, how):
    save(folder, 1)
    journal(folder, 2, 3)
    path = folder.folder / "journal-000000000001.log"
    data = path.read_bytes()
    cut = {"head": data[: len(data) - len(data) // 2 + 3], "body": data[:-1], "bits": data[:-1] + b"\xff"}[how]
    path.write_bytes(cut)
    assert [released.version for released, _, _ in folder.replay(1)] == [2]
    assert "ends in a torn record" in caplog.text


def test_a_gap_between_journals_ends_the_replay(folder):
    save(folder, 1)
    journal(folder, 2), journal(folder, 4, 5)
    assert [released.version for released, _, _ in folder.replay(1)] == [2]


def test_without_a_journal_nothing_is_written(folder):
    folder.release(record_of(2), {})
    assert not folder.folder.exists()


def test_the_model_alone_is_written_by_leaf(tmp_path):
    write_model(tmp_path / "deep" / "model.safetensors", model_arrays(arrays_of(3)), ModelFacts())
    model = load_file(tmp_path / "deep" / "model.safetensors")
    assert model.keys() == {"w", "scalar", "none"}
    np.testing.assert_array_equal(model["w"], np.full((2, 3), 3, np.float32))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", msgpack.packb([2, "float32"]), msgpack.packb([2, 3, [0], [[b""]], [], 8])]
)
def test_a_record_that_is_whole_and_no_release_is_said_and_not_lived(folder, body):
    journal(folder, 2)
    folder.journal.append(body)
    with pytest.raises(CheckpointError, match="holds what is no release, after version 2: remove it"):
        list(folder.replay(1))
