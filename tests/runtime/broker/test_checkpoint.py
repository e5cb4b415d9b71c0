"""What a crash leaves behind is enough to go on, and what is torn is not believed."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from safetensors.numpy import load_file

from zmqtrain.errors import CheckpointError
from zmqtrain.runtime.broker import checkpoint
from zmqtrain.runtime.broker.checkpoint import CheckpointFolder, describe_difference, export_model
from zmqtrain.runtime.equation.aggregator import Released


def arrays_of(version):
    return {
        "parameters/w": np.full((2, 3), version, np.float32),
        "parameters/scalar": np.array(version, np.float32),
        "parameters/none": np.zeros((0, 4), np.float32),
        "published/w": np.full((3, 2), version, np.float32).T,
    }


def save(folder, *versions):
    for version in versions:
        folder.save(version, {"version": version, "samples": 8 * version}, arrays_of(version))


def record_of(version):
    frames = ((b"one" * version, bytearray(b"two")), (memoryview(b"three"),))
    return Released(version, "float32", (0, 2), frames), (("a#1", version), ("b#2", 7)), 16


def journal(folder, *versions):
    folder.begin_journal(versions[0] - 1)
    for version in versions:
        folder.append(record_of(version))
    folder.close()


def names(path):
    return sorted(entry.name for entry in path.iterdir())


@pytest.fixture
def folder(tmp_path):
    made = CheckpointFolder(tmp_path / "run")
    yield made
    made.close()


def test_a_new_folder_has_nothing(folder):
    assert folder.load() is None and list(folder.replay(-1)) == []


def test_the_newest_checkpoint_is_taken(folder):
    save(folder, 1, 5, 12)
    state, arrays = folder.load()
    assert state == {"version": 12, "samples": 96}
    assert arrays.keys() == arrays_of(12).keys()
    for name, array in arrays_of(12).items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == np.float32 and arrays[name].shape == array.shape


def damage(path, how):
    data = path.read_bytes()
    if how == "torn":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "array":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif how == "state":
        path.write_bytes(data.replace(b"samples", b"sbmples"))
    else:
        path.write_bytes(b"garbage" * 100)


@pytest.mark.parametrize("how", ["torn", "empty", "array", "state", "garbage"])
def test_one_that_cannot_be_read_is_skipped_with_a_warning(folder, caplog, how):
    save(folder, 1, 2)
    damage(folder.folder / "checkpoint-000000000002.safetensors", how)
    state, arrays = folder.load()
    assert state["version"] == 1 and arrays["parameters/w"][0, 0] == 1
    assert "skipping the checkpoint" in caplog.text and "000000000002" in caplog.text


def test_when_none_can_be_read_no_run_is_begun_over_it(folder):
    save(folder, 1)
    damage(folder.folder / "checkpoint-000000000001.safetensors", "torn")
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        folder.load()


def test_a_crash_while_writing_leaves_the_old_one(folder, monkeypatch):
    save(folder, 1)

    def crash(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "replace", crash)
    with pytest.raises(CheckpointError, match="No space left on device; is the disk full"):
        save(folder, 2)
    assert folder.load()[0]["version"] == 1
    assert "checkpoint-000000000002.safetensors" not in names(folder.folder)


def test_a_folder_that_cannot_be_written_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").write_text("")
    blocked = CheckpointFolder(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot write"):
        save(blocked, 1)
    with pytest.raises(CheckpointError, match="cannot write"):
        blocked.begin_journal(1)
    (tmp_path / "run" / "checkpoint-000000000001.safetensors.part").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="cannot write"):
        save(CheckpointFolder(tmp_path / "run"), 1)


def test_only_the_newest_stay_and_the_journals_that_they_need(folder):
    for version in range(1, 7):
        save(folder, version)
        journal(folder, version + 1)
    assert names(folder.folder) == [f"checkpoint-{v:012d}.safetensors" for v in (4, 5, 6)] + [
        f"journal-{v:012d}.log" for v in (4, 5, 6)
    ]


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
    damage(folder.folder / "checkpoint-000000000003.safetensors", "torn")
    assert [released.version for released, _, _ in folder.replay(folder.load()[0]["version"])] == [2, 3, 4, 5]


@pytest.mark.parametrize("how", ["head", "body", "bits"])
def test_a_journal_is_replayed_up_to_a_torn_record(folder, caplog, how):
    save(folder, 1)
    journal(folder, 2, 3)
    path = folder.folder / "journal-000000000001.log"
    data = path.read_bytes()
    cut = {"head": data[: len(data) - len(data) // 2 + 3], "body": data[:-1], "bits": data[:-1] + b"\xff"}[how]
    path.write_bytes(cut)
    assert [released.version for released, _, _ in folder.replay(1)] == [2]


def test_a_gap_between_journals_ends_the_replay(folder):
    save(folder, 1)
    journal(folder, 2), journal(folder, 4, 5)
    assert [released.version for released, _, _ in folder.replay(1)] == [2]


def test_without_a_journal_nothing_is_appended(folder):
    folder.append(record_of(2))
    assert not folder.folder.exists()


def test_what_could_not_be_read_neither_counts_nor_comes_back(tmp_path, caplog):
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 9)
    journal(folder, 10, 11)
    damage(tmp_path / "checkpoint-000000000009.safetensors", "torn")
    with caplog.at_level(logging.WARNING):
        save(folder, 5)  # an older one was read, and the run goes on from there
    assert folder.load()[0]["version"] == 5
    assert "checkpoint-000000000009.safetensors aside" in caplog.text
    journal(folder, 6, 7, 8, 9)
    assert [released.version for released, _, _ in folder.replay(5)] == [6, 7, 8, 9], "10 and 11 are of another past"


def test_the_model_alone_is_exported_by_leaf(tmp_path):
    export_model(tmp_path / "deep" / "model.safetensors", arrays_of(3))
    model = load_file(tmp_path / "deep" / "model.safetensors")
    assert model.keys() == {"w", "scalar", "none"}
    np.testing.assert_array_equal(model["w"], np.full((2, 3), 3, np.float32))
    assert names(tmp_path / "deep") == ["model.safetensors"]


def test_a_difference_of_settings_is_named_with_both_values():
    saved, wanted = {"every": 8, "codec": "int8", "units": 5}, {"every": 4, "codec": "int8", "units": 9, "seed": 1}
    assert describe_difference(saved, wanted, ("units",)) == "every (8 there, 4 here), seed (None there, 1 here)"
    assert describe_difference(wanted, wanted, ()) == ""
