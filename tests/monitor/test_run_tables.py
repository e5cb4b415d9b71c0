"""A run as columns: what its records say, whatever their files have been through."""

from __future__ import annotations

import json
import os
import re
import sys
from math import isnan, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import zmqtrain as zt
from zmqtrain.core.errors import ConfigError
from zmqtrain.monitor.record_files import LINE_BYTES, PART_BYTES, RecordFolder
from zmqtrain.monitor.records import Record, record, write_records


def delta(node: str = "pc1", sequence: int = 0, **more: Any) -> dict[str, Any]:
    facts = {"node": node, "peer": f"{node}#a", "sequence": sequence, "fragment": 0, "base_version": 0, "samples": 8}
    return {**facts, "score": 1.5, "staleness": 1, "too_stale": False, "left_out": False, **more}


def release(seconds: float, version: int, *deltas: dict[str, Any]) -> Record:
    facts = {"version": version, "live": 2, "nodes": 2, "samples": 8 * len(deltas), "fragments": [0], "dense": False}
    return record("release", seconds, **facts, contributions=list(deltas))


def head(run: str = "run-a", began: float = 1000.0) -> Record:
    return record("run", 0.0, run=run, version=-1, settings={"program": "text", "every": 8}, began=began)


BROKER = [
    head(),
    record("membership", 0.5, node="pc1", what="joined", peer="pc1#a", text="at version 0"),
    release(1.0, 1, delta("pc1"), delta("pc2", staleness=3, too_stale=True)),
    release(2.0, 2, delta("pc1", 1, score=None)),
    record("evaluation", 2.5, version=2, samples=24, loss=2.25, accuracy=0.5),
    record("run_end", 3.0, version=2, samples=24, contributions=3, refused=0),
]


def node(began: float = 1000.0, offered: float = 0.4, applied: float = 1.5) -> list[Record]:
    at = {"node": "pc1", "samples": 8, "draining": False}
    landing = {"version": 1, "landed": [0], "snapshot": False, "reset": False, "keep": False, "moments": False}
    return [
        record("node", 0.0, node="pc1", peer="pc1#a", run="run-a", version=-1, began=began),
        record("offer", offered, sequence=0, fragment=0, base_version=0, dense=False, step=8, **at),
        record("step", offered, node="pc1", step=8, loss=3.0, samples=8),
        record("application", applied, **landing, step=12, **at),
        record("offer", applied, sequence=1, fragment=0, base_version=1, dense=False, step=16, **at),
        record("withdrawal", applied, node="pc1", sequence=1, encoded=1, reason="stale"),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_records(tmp_path / "broker.jsonl", BROKER)
    write_records(tmp_path / "pc1.jsonl", node())
    return tmp_path


def test_records_are_columns(folder: Path) -> None:
    run = zt.records.load(folder)
    assert (run.id, run.settings["every"], run.nodes, run.damaged) == ("run-a", 8, ["pc1", "pc2"], 0)
    assert run.evaluations["loss"].tolist() == [2.25] and run.evaluations["accuracy"].tolist() == [0.5]
    assert run.releases["deltas"].tolist() == [2, 1]
    assert run.releases["staleness"].tolist() == [2.0, 1.0]
    assert run.deltas["node"].tolist() == ["pc1", "pc2", "pc1"]
    assert run.deltas["too_stale"].tolist() == [False, True, False]
    assert run.deltas["version"].dtype == np.int64 and isnan(run.deltas["score"][2])
    assert run.deltas.of_node("pc1")["sequence"].tolist() == [0, 1]
    assert run.events["what"].tolist() == ["began", "joined", "ended"]
    assert run.steps["loss"].tolist() == [3.0]
    assert run.seconds == 3.0


def test_an_offer_knows_when_it_was_applied_and_why_not(folder: Path) -> None:
    offers = zt.records.load(folder).offers
    assert offers["age_steps"][0] == 4 and isnan(offers["age_steps"][1])
    assert offers["applied_seconds"][0] == 1.5
    assert offers["withdrawn"].tolist() == ["", "stale"]


@pytest.mark.parametrize(("began", "seconds"), [(1000.2, 0.6), (1100.0, 1.0), (900.0, -0.1)])
def test_a_node_with_a_wrong_clock_offers_before_and_applies_after_the_release(
    tmp_path: Path, began: float, seconds: float
) -> None:
    write_records(tmp_path / "broker.jsonl", BROKER)
    write_records(tmp_path / "pc1.jsonl", node(began))
    offers = zt.records.load(tmp_path).offers
    assert offers["seconds"][0] == pytest.approx(seconds)
    assert offers["seconds"][0] <= 1.0 <= offers["applied_seconds"][0] + 1e-9


def test_the_lives_of_a_broker_stand_one_after_the_other(tmp_path: Path) -> None:
    write_records(tmp_path / "broker.jsonl.1", BROKER)
    write_records(tmp_path / "broker.jsonl", [head(began=1010.0) | {"version": 2}, release(1.0, 3, delta("pc1", 2))])
    for places in (tmp_path, tmp_path / "broker.jsonl"):
        assert zt.records.load(places).releases["seconds"].tolist() == [1.0, 2.0, 11.0]


# ---------------------------------------------------------------------- files that are not whole


@pytest.mark.parametrize("size", range(1, 400, 13))
def test_a_truncated_file_is_read_as_far_as_it_goes(tmp_path: Path, size: int) -> None:
    path = tmp_path / "broker.jsonl"
    write_records(path, BROKER)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - size])
    lines = whole[: len(whole) - size].count(b"\n")
    assert sum(1 for _ in RecordFolder(path).read()) == lines


def test_lines_that_hold_no_record_are_counted_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "broker.jsonl"
    write_records(path, BROKER)
    first, *rest = path.read_bytes().splitlines(keepends=True)
    torn = [b"\0" * 512, b'{"kind": "rel', b"[" * 100_000, b"\xff\xfe", b"7", b'{"kind": 3}', b""]
    path.write_bytes(first + b"\n".join(torn) + b"\n" + b"".join(rest))
    run = zt.records.load(path)
    assert run.damaged == len(torn) - 1
    assert run.releases["version"].tolist() == [1, 2]


@pytest.mark.parametrize(
    "bad",
    [
        release(4.0, 3, delta(staleness="late")),
        release(4.0, 3, delta(node=7)),
        release(4.0, 3, delta(sequence=1 << 70)),
        release(4.0, 3, delta(), {"node": "pc1"}),
        {"kind": "release", "seconds": 4.0, "version": 3, "samples": 1, "contributions": 5},
        {"kind": "evaluation", "seconds": 4.0, "version": "x", "samples": 1},
        {"kind": "membership", "seconds": 4.0, "node": None, "what": "lost"},
        {"kind": "status", "seconds": 4.0, "members": 3},
        {"kind": "run", "seconds": 4.0, "run": ["a"], "version": 1},
    ],
    ids=str,
)
def test_a_record_of_other_types_is_left_out_whole(tmp_path: Path, bad: Record) -> None:
    write_records(tmp_path / "broker.jsonl", [*BROKER, bad])
    run = zt.records.load(tmp_path)
    assert run.damaged == 1
    assert run.deltas.rows == 3 and run.releases.rows == 2 and run.evaluations.rows == 1


def test_a_file_is_read_on_while_it_is_written_and_when_it_gets_another_name(tmp_path: Path) -> None:
    path = tmp_path / "broker.jsonl"
    write_records(path, BROKER[:2])
    folder = RecordFolder(tmp_path)
    assert [one["kind"] for _, one in folder.read()] == ["run", "membership"]
    line = json.dumps(BROKER[2])
    with path.open("a") as file:
        file.write(line[:20])
        file.flush()
        assert [*folder.read()] == []
        file.write(line[20:] + "\n")
        file.flush()
        assert [one["version"] for _, one in folder.read()] == [1]
        path.rename(tmp_path / "broker.jsonl.1")
        write_records(path, [head()])
        file.write(json.dumps(BROKER[3]) + "\n")
    read = [(file.path.name, one["kind"]) for file, one in folder.read()]
    assert sorted(read) == [("broker.jsonl", "run"), ("broker.jsonl.1", "release")]


def test_a_line_without_end_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "broker.jsonl"
    with path.open("wb") as file:
        file.seek(LINE_BYTES + 2 * PART_BYTES)
        file.write(b"\n" + json.dumps(BROKER[4]).encode() + b"\n")
    folder = RecordFolder(path)
    assert [one["kind"] for _, one in folder.read()] == ["evaluation"]
    assert folder.damaged == 1


def test_no_link_leads_out_of_a_folder_and_no_pipe_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    write_records(tmp_path / "other.jsonl", BROKER)
    (folder / "link.jsonl").symlink_to(tmp_path / "other.jsonl")
    os.mkfifo(folder / "pipe.jsonl")
    write_records(folder / "pc1.jsonl", node())
    assert {file.path.name for file, _ in RecordFolder(folder).read()} == {"pc1.jsonl"}


# ---------------------------------------------------------------------- several runs, and none


def test_records_of_two_runs_are_two_runs(tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl", BROKER)
    write_records(tmp_path / "b.jsonl", [head("run-b"), *BROKER[1:]])
    write_records(tmp_path / "sim.jsonl", BROKER[1:])
    assert [run.id for run in zt.records.load_all(tmp_path)] == ["run-a", "run-b", ""]
    with pytest.raises(ConfigError, match="run-b"):
        zt.records.load(tmp_path)


def test_a_place_without_records_is_an_error(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=str(place)):
            zt.records.load(place)


def test_the_reports_of_status_are_records_too(tmp_path: Path) -> None:
    member = {"peer": "pc1#1", "name": "pc1", "state": "live", "step": 5, "loss": None, "bytes_sent": 10}
    roster = {"version": 3, "members": [member], "samples": 40, "contributions": 2, "seconds": 7.5, "hub": {"noise": 2}}
    path = tmp_path / "status.jsonl"
    path.write_text(json.dumps(roster) + "\n")
    run = zt.records.load(path)
    assert run.status["noise"].tolist() == [2.0] and run.status["seconds"].tolist() == [7.5]
    assert run.members["bytes_sent"].tolist() == [10.0] and isnan(run.members["loss"][0])


def test_a_table_is_a_data_frame_where_pandas_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = zt.records.load(folder).releases
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    assert table.to_pandas()["version"].tolist() == [1, 2]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        table.to_pandas()


def test_a_run_without_rows_has_its_columns(tmp_path: Path) -> None:
    write_records(tmp_path / "broker.jsonl", BROKER[:1])
    run = zt.records.load(tmp_path)
    tables = (run.evaluations, run.releases, run.deltas, run.steps, run.offers, run.plans, run.status, run.members)
    assert [table.rows for table in tables] == [0] * 8
    assert "loss" in run.evaluations and "age_steps" in run.offers
    assert np.nanmax([*run.evaluations["loss"], nan, 0.0]) == 0.0


def test_the_page_of_records_names_the_columns_of_every_table(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "records.md").read_text()
    run = zt.records.load(folder)
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (seconds, [^|]+) \|$", page, re.MULTILINE)
    assert {name for name, _ in rows} == {
        "evaluations", "releases", "deltas", "status", "members", "events", "plans", "steps", "offers"
    }  # fmt: skip
    for name, columns in rows:
        named = {word for word in re.findall(r"\w+", columns) if word in getattr(run, name) or "," not in columns}
        missing = set(getattr(run, name)) - named - {"accuracy"}
        assert not missing, (name, missing)
