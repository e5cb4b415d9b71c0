"""Scalars for TensorBoard: its own reader lists them."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from zmqtrain.core.errors import ConfigError
from zmqtrain.monitor import tensorboard
from zmqtrain.monitor.tensorboard import RunScalars, ScalarThread, ScalarWriter, folder_name
from zmqtrain.protocol.messages import Roster, fields_of


def roster(version: int, step: int, loss: float = 2.5) -> Roster:
    figures = {"samples_per_second": 100.0, "age_steps": 3.0, "bytes_sent": 10 * step, "bytes_received": 20 * step}
    members = tuple(
        {"peer": f"{name}#{number}", "name": name, "state": "live", "step": step, "loss": loss, **figures}
        for number, name in enumerate(("pc1", "<b>\x1b[31m"))
    )
    hub = {"refused": 1, "bytes_in": 100, "noise": 4.0, "rho": 0.2}
    return Roster(
        version, members, "", 64 * version, 3 * version, 0, 0, 1.0 * version, {"loss": loss}, version, hub=hub
    )


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    reader = EventAccumulator(str(folder)).Reload()
    return {tag: [(one.step, one.value) for one in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_tensorboards_own_reader_lists_the_scalars(tmp_path: Path) -> None:
    writer = ScalarWriter(tmp_path / "new" / "folder")
    for report in (roster(1, 8), roster(1, 8), roster(2, 16, 2.25)):
        writer.write(fields_of(report))
    writer.close()
    found = scalars(tmp_path / "new" / "folder")
    assert found["held-out/loss"] == [(1, 2.5), (2, 2.25)]
    assert found["nodes/pc1/loss"] == [(8, 2.5), (16, 2.25)]
    assert found["nodes/pc1/bytes_sent"] == [(8, 80.0), (16, 160.0)]
    assert found["run/samples_per_second"] == [(1, 200.0), (2, 200.0)]
    assert found["hub/noise_scale"][0] == (1, 4.0)
    assert len(found) == 1 + 6 + 4 + 2 * 5 and all(tag.isprintable() for tag in found)


def test_a_node_writes_its_own_scalars_and_the_evaluations(tmp_path: Path) -> None:
    writer = ScalarWriter(tmp_path)
    writer.node = "pc1"
    writer.write(fields_of(roster(1, 8)))
    writer.close()
    assert {tag.rpartition("/")[0] for tag in scalars(tmp_path)} == {"held-out", "nodes/pc1"}


def test_a_thread_writes_the_last_report_before_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "LOOK_SECONDS", 60.0)

    class Source:
        roster = roster(3, 24)

    thread = ScalarThread(ScalarWriter(tmp_path), Source())
    thread.close()
    thread.close()
    assert scalars(tmp_path)["nodes/pc1/loss"] == [(24, 2.5)]


def test_a_writer_that_fails_ends_the_scalars_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    class Source:
        roster = roster(3, 24)

    writer = ScalarWriter(tmp_path)
    monkeypatch.setattr(writer, "write", fail)
    ScalarThread(writer, Source()).close()
    assert str(tmp_path) in caplog.text
    writer.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "zmqtrain-tensorboard"]


def test_without_its_library_or_a_folder_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--tensorboard"):
        ScalarWriter(tmp_path / "file")
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"\[tensorboard\]"):
        ScalarWriter(tmp_path)
    with pytest.raises(ConfigError, match=r"\[tensorboard\]"):
        RunScalars(tmp_path)


def test_each_run_that_a_page_shows_has_a_folder_of_its_own(tmp_path: Path) -> None:
    scalars_of_runs = RunScalars(tmp_path)
    for run, step in (("run-1", 8), ("run-1", 16), ("run-2", 8)):
        scalars_of_runs.write(run, fields_of(roster(step // 8, step)), 1000.0)
    scalars_of_runs.close()
    scalars_of_runs.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-1", "run-2"]
    assert scalars(tmp_path / "run-1")["nodes/pc1/loss"] == [(8, 2.5), (16, 2.5)]
    assert scalars(tmp_path / "run-2")["nodes/pc1/loss"] == [(8, 2.5)]


@pytest.mark.parametrize("run", ["", ".", "..", "../../up", "/etc", "a/../b", "\x1b[31m", "x" * 100_000, "\0"])
def test_no_name_of_a_run_leads_out_of_the_folder(run: str, tmp_path: Path) -> None:
    folder = tmp_path / folder_name(run)
    assert folder.parent == tmp_path and folder.name not in ("", ".", "..") and len(folder.name) < 256
    folder.mkdir()


def test_scalars_that_cannot_be_written_end_and_the_page_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = RunScalars(tmp_path / "scalars")
    (tmp_path / "scalars" / "run-1").touch()
    for step in (8, 16):
        runs.write("run-1", fields_of(roster(1, step)))
    runs.close()
    assert len([one for one in caplog.records if "end here" in one.getMessage()]) == 1
