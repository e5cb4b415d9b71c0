"""What a crash leaves behind is enough to go on, what is torn is not believed, and a folder is one process's."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from random import Random

import numpy as np
import pytest

from zmqtrain.broker import checkpoint as of_broker
from zmqtrain.broker.checkpoint import RunFolder, read_journal
from zmqtrain.checkpoint import files
from zmqtrain.checkpoint.files import describe_difference, read_arrays, write_arrays
from zmqtrain.core.errors import CheckpointError


def arrays_of(version):
    return {
        "w": np.full((2, 3), version, np.float32),
        "scalar": np.array(version, np.float32),
        "none": np.zeros((0, 4), np.float32),
        "turned": np.full((3, 2), version, np.float32).T,
        "bytes": np.full(5, version % 256, np.uint8),
        "count": np.array(version, np.int64),
    }


def save(folder, *versions):
    for version in versions:
        folder.save(version, {"version": version, "samples": 8 * version}, arrays_of(version))


def keep_journal(folder, *versions):
    folder.begin_journal(versions[0] - 1)
    for version in versions:
        folder.journal.append(b"record %d" % version)


def records(folder):
    return [record for path in sorted(folder.folder.glob("journal-*.log")) for record in read_journal(path)]


def names(path):
    return sorted(entry.name for entry in path.iterdir())


@pytest.fixture
def folder(tmp_path):
    made = RunFolder(tmp_path / "run")
    yield made
    made.close()


def test_the_newest_checkpoint_is_taken(folder):
    save(folder, 1, 5, 12)
    state, arrays = folder.load()
    assert state == {"version": 12, "samples": 96}
    assert arrays.keys() == arrays_of(12).keys()
    for name, array in arrays_of(12).items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype and arrays[name].shape == array.shape
    assert folder.load_version(5)[0]["version"] == 5
    assert folder.good_versions() == (1, 5, 12) and folder.skipped == -1


def test_one_that_is_torn_at_whatever_length_is_skipped_with_a_warning_that_says_where_the_run_goes_back_to(
    folder, caplog
):
    save(folder, 1, 2)
    path = folder.folder / "checkpoint-000000000002.safetensors"
    data = path.read_bytes()
    for length in {0, 1, 7, 8, 9, *range(10, len(data), 37), len(data) - 1}:
        path.write_bytes(data[:length])
        caplog.clear()
        state, arrays = folder.load()
        assert state["version"] == 1 and arrays["w"][0, 0] == 1 and folder.skipped == 2
        assert "skipping the checkpoint checkpoint-000000000002" in caplog.text
        assert "goes back to version 1" in caplog.text
        assert "nothing is left here" in caplog.text, "a node has no journal"
    folder.begin_journal(1)
    folder.load()
    assert "only a journal can tell" in caplog.text
    assert folder.good_versions() == (1,)


def test_any_flipped_bit_is_seen(tmp_path):
    path, random = tmp_path / "one.safetensors", Random(7)
    write_arrays(path, arrays_of(3), {"state": '{"version": 3}'})
    data = path.read_bytes()
    before = read_arrays(path)
    for position in random.sample(range(8 * len(data)), 600):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        path.write_bytes(flipped)
        try:
            state, arrays = read_arrays(path)
        except CheckpointError:
            continue
        assert state == before[0], f"bit {position}"  # a blank of the head, or the like
        assert all(arrays[name].tobytes() == array.tobytes() for name, array in before[1].items())
        assert all(arrays[name].shape == array.shape for name, array in before[1].items())
        assert all(arrays[name].dtype == array.dtype for name, array in before[1].items())


def test_when_none_can_be_read_no_run_is_begun_over_it(folder):
    save(folder, 1)
    (folder.folder / "checkpoint-000000000001.safetensors").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        folder.load()


def test_a_disk_that_is_full_leaves_the_old_one(folder, monkeypatch):
    save(folder, 1)

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(CheckpointError, match="No space left on device; is the disk full"):
        save(folder, 2)
    assert folder.load()[0]["version"] == 1
    assert "checkpoint-000000000002.safetensors" not in names(folder.folder)


def test_a_folder_that_cannot_be_written_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").write_text("")
    blocked = RunFolder(tmp_path / "file")
    for attempt in (lambda: save(blocked, 1), lambda: blocked.begin_journal(1), blocked.lock):
        with pytest.raises(CheckpointError, match="cannot write"):
            attempt()
    (tmp_path / "run" / "checkpoint-000000000001.safetensors.part").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="cannot write"):
        save(RunFolder(tmp_path / "run"), 1)


def test_only_the_newest_stay_and_the_journals_that_they_need(folder):
    for version in range(1, 7):
        save(folder, version)
        keep_journal(folder, version + 1)
    assert names(folder.folder) == [f"checkpoint-{v:012d}.safetensors" for v in (4, 5, 6)] + [
        f"journal-{v:012d}.log" for v in (4, 5, 6)
    ]


def test_what_could_not_be_read_neither_counts_nor_comes_back(tmp_path, caplog):
    folder = RunFolder(tmp_path, keep=1)
    save(folder, 9)
    keep_journal(folder, 10, 11)
    (tmp_path / "checkpoint-000000000009.safetensors").write_bytes(b"torn")
    with caplog.at_level(logging.WARNING):
        save(folder, 5)  # an older one was read, and the run goes on from there
    assert folder.load()[0]["version"] == 5
    assert "checkpoint-000000000009.safetensors aside" in caplog.text
    keep_journal(folder, 6, 7)
    assert records(folder) == [b"record 6", b"record 7"], "10 and 11 are of another past"
    folder.close()


def test_what_is_newer_than_where_a_run_begins_again_is_dropped(folder):
    save(folder, 4, 8, 12)
    keep_journal(folder, 9, 10), keep_journal(folder, 13)
    folder.forget_after(8)
    assert folder.good_versions() == (4, 8) and records(folder) == []


def test_what_others_put_in_the_folder_is_left_alone(folder):
    folder.folder.mkdir()
    foreign = [
        "notes.txt",
        "checkpoint-1.safetensors",
        "checkpoint-000000000009.safetensors.old",
        "x.part",
        "journal-a.log",
    ]
    for name in foreign:
        (folder.folder / name).write_text("mine")
    folder.lock()
    save(folder, 1, 2, 3, 4)
    assert folder.load()[0]["version"] == 4
    assert all((folder.folder / name).read_text() == "mine" for name in foreign)


def test_what_a_crash_left_half_written_is_cleared_when_the_folder_is_taken(folder):
    save(folder, 1)
    for name in ("checkpoint-000000000002.safetensors.part", "model.safetensors.part", "model-0-of-2.safetensors.part"):
        (folder.folder / name).write_bytes(b"half")
    folder.lock()
    assert names(folder.folder) == ["checkpoint-000000000001.safetensors", "lock"]


def test_a_second_process_is_told_who_has_the_folder(folder):
    folder.lock()
    program = (
        "import sys; from pathlib import Path\n"
        "from zmqtrain.core.errors import CheckpointError\n"
        "from zmqtrain.broker.checkpoint import RunFolder\n"
        "try: RunFolder(Path(sys.argv[1])).lock()\n"
        "except CheckpointError as error: print(error)\n"
        "else: print('taken')\n"
    )

    def other():
        argv = [sys.executable, "-c", program, str(folder.folder)]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    assert f"is in use by the process {os.getpid()}: two must not save to one folder" in other()
    folder.close()
    assert other().strip() == "taken"


def test_a_record_for_which_there_was_no_room_is_taken_back_and_can_be_tried_again(folder, monkeypatch):
    keep_journal(folder, 1)
    real, calls = os.write, []

    def nearly_full(file, data):
        calls.append(len(data))
        if len(calls) == 1:
            return real(file, bytes(data[:5]))  # a piece of it fits
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(files.os, "write", nearly_full)
        with pytest.raises(CheckpointError, match=r"cannot write the journal .*No space left"):
            folder.journal.append(b"record 2")
    assert records(folder) == [b"record 1"]
    folder.journal.append(b"record 2")
    assert records(folder) == [b"record 1", b"record 2"]


def test_a_journal_that_cannot_be_begun_leaves_the_one_before_as_it_was(folder, monkeypatch):
    keep_journal(folder, 1)
    with monkeypatch.context() as full:
        full.setattr(of_broker, "sync_folder", lambda path: os.close(os.open(path / "none", os.O_RDONLY)))
        with pytest.raises(CheckpointError, match="cannot write to"):
            folder.begin_journal(5)
    folder.journal.append(b"record 2")
    assert records(folder) == [b"record 1", b"record 2"]


def test_a_difference_of_settings_is_named_with_both_values():
    saved, wanted = {"every": 8, "codec": "int8", "units": 5}, {"every": 4, "codec": "int8", "units": 9, "seed": 1}
    assert describe_difference(saved, wanted, ("units",)) == "every (8 there, 4 here), seed (None there, 1 here)"
    assert describe_difference(wanted, wanted, ()) == ""


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_that_is_no_file_is_refused_and_what_it_names_is_left_alone(tmp_path, kind):
    (tmp_path / "precious").write_text("all my work")
    if kind == "link":
        (tmp_path / "lock").symlink_to(tmp_path / "precious")
    else:
        os.mkfifo(tmp_path / "lock")
    with pytest.raises(CheckpointError, match=r"lock is .* remove it"):
        RunFolder(tmp_path).lock()
    assert (tmp_path / "precious").read_text() == "all my work"
