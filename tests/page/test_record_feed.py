"""The page of records: one clock for all files, the newest run, and only what can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from zmqtrain.core.settings import RunSettings
from zmqtrain.monitor.tensorboard import RunScalars
from zmqtrain.page.picture import Picture
from zmqtrain.page.record_feed import COLUMNS, RecordFeed
from zmqtrain.page.sources import FolderSource

HEAD = {"run": "run-1", "version": -1, "began": 1000.0, "settings": RunSettings(program="text", every=4).to_dict()}
DELTA = {"node": "pc1", "peer": "pc1#a", "sequence": 0, "fragment": 0, "base_version": 0, "samples": 64, "staleness": 1}


def record(kind: str, seconds: float, **facts: Any) -> dict[str, Any]:
    return {"kind": kind, "seconds": seconds, **facts}


BROKER = [
    record("run", 0.0, **HEAD),
    record("membership", 1.0, node="pc1", peer="pc1#a", what="joined", text="at version 0"),
    record("release", 2.0, version=1, nodes=2, samples=64, contributions=[DELTA]),
    record("evaluation", 3.0, version=1, samples=64, loss=2.5),
    record("release", 4.0, version=2, nodes=1, samples=64, contributions=[DELTA]),
    record("membership", 5.0, node="pc1", peer="pc1#a", what="lost", text="its connection is gone"),
    record("run_end", 6.0, version=2),
]
NODE = [
    record("node", 0.0, node="pc1", peer="pc1#a", run="run-1", version=-1, began=900.0, zmqtrain="0.2.0"),
    record("step", 0.5, node="pc1", step=1, loss=3.0, samples=16),
    record("offer", 0.6, node="pc1", sequence=0, fragment=0, base_version=0, step=1),
    record("step", 1.0, node="pc1", step=2, loss=None, samples=32),
    record("application", 1.5, node="pc1", version=1, landed=[0], step=4),
    record("step", 1.6, node="pc1", step=3, loss=2.0, samples=48),
]


def shown(*files: list[dict[str, Any]]) -> tuple[Picture, RecordFeed]:
    picture = Picture()
    feed = RecordFeed(picture)
    for number, records in enumerate(files):
        for one in records:
            feed.take(number, one)
    feed.show(None, 0)
    return picture, feed


def cell(picture: Picture, title: str) -> str:
    (row,) = picture.rows.values()
    return row.cells[[name for name, _ in COLUMNS].index(title)]


def test_a_run_is_drawn_from_the_records_of_its_broker_and_a_node() -> None:
    picture, feed = shown(BROKER, NODE)
    assert feed.odd == 0
    sent = json.loads(picture.whole())
    assert sent["lines"]["evaluation  0"]["values"] == [2.5]
    assert sent["lines"]["samples  0"]["values"] == [64, 128]
    assert sent["lines"]["node 0 1"]["values"] == [3.0, 2.0]
    assert [one["what"] for one in sent["events"]] == ["broker began", "joined", "released", "lost", "ended"]
    assert (sent["rows"][0]["state"], sent["heading"]["state"]) == ("lost", "ended")
    assert "its connection is gone" in sent["rows"][0]["text"]
    assert (cell(picture, "age"), cell(picture, "deltas"), cell(picture, "samples")) == ("3.0", "2", "48")


def test_no_version_is_applied_before_its_release_however_wrong_the_time_of_day_is() -> None:
    picture, _ = shown(BROKER, NODE)  # by the time of day the node began 100 s before the broker
    shift = json.loads(picture.whole())["lines"]["node 0 1"]["shift"]
    assert shift == 0.5  # what was released at 2.0 is applied at 1.5 of the node's clock


def test_the_newest_run_is_shown() -> None:
    newer = [record("run", 0.0, **HEAD | {"run": "run-2", "began": 5000.0})]
    for files in ((BROKER, newer), (newer, BROKER)):
        picture, _ = shown(*files)
        assert picture.heading.run == "run-2"
        assert "other runs" in picture.heading.note
        assert picture.rows == {}


def test_records_of_other_shapes_are_counted_and_left_out() -> None:
    odd = [
        record("release", 3.0, version="two", contributions=5),
        record("step", 3.0, node="pc1", step=None, loss="low"),
        record("membership", "soon", node=["x"], what={}),
        record("application", 3.0, node="pc1", version=1, landed=[[]], step=1),
        record("evaluation", None),
        record("of a newer version", 3.0),
    ]
    picture, feed = shown([*BROKER[:3], *odd], NODE)
    assert feed.odd == 5
    assert "5 lines" in picture.heading.note
    assert json.loads(picture.whole())["rows"][0]["name"] == "pc1"


def status(seconds: float, step: int, loss: float | None, **hub: Any) -> dict[str, Any]:
    """A report of the broker as its record holds it: two nodes, of which "pc2" writes no record."""
    rates = {"bytes_sent": 1000 * step, "bytes_received": 500 * step, "link_rate": 4000.0}
    figures = {"step": step, "samples": 16 * step, "loss": loss, "age_steps": 5.0, "refused": 2, **rates}
    members = [{"peer": f"{name}#a", "name": name, "state": "live", **figures} for name in ("pc1", "pc2")]
    counts = {"samples": 64 * step, "contributions": step, "units_done": 0, "units_total": 0}
    facts = {"version": step, "members": members, "evaluator": "", **counts, "scores": {}, "score_version": -1}
    figures = {"bytes_in": 3000 * step, "memory_bytes": 5e7, "cpu_seconds": 0.1 * step, "noise": None, **hub}
    return record("status", seconds, run_seconds=seconds, every=4, delay=2, hub=figures, **facts)


REPORTS = [
    status(2.0, 1, 3.0, saved_version=-1),
    status(3.0, 2, None, saved_version=2, gain_next=0.11, gain_last=0.3, rho=0.5),
    status(4.0, 3, 2.0, saved_version=2, standby="tcp://hub2:5555", other_figure=None),
]


def test_the_reports_of_the_broker_say_what_its_other_records_do_not() -> None:
    picture, feed = shown([*BROKER[:2], *REPORTS], NODE)
    assert feed.odd == 0
    sent = json.loads(picture.whole())
    hub = dict(sent["hub"])
    assert (hub["port in"], hub["memory"], hub["processor"]) == ("24.0 kb/s", "50.0 MB", "10 % of a core")
    assert (hub["checkpoint"], hub["standby"]) == ("version 2", "tcp://hub2:5555")
    assert [one["what"] for one in sent["events"]] == ["broker began", "joined", "checkpoint", "standby"]
    titles = [name for name, _ in COLUMNS]
    own, reported = (dict(zip(titles, row["cells"], strict=True)) for row in sent["rows"])
    assert own["up"] == reported["up"] == "8.0 kb/s · 25 %"
    assert (own["samples"], own["age"], own["refused"]) == ("48", "3.0", "0")
    assert (reported["samples"], reported["last record"], reported["age"]) == ("48", "0:04", "5.0")
    assert (reported["steps/s"], reported["refused"]) == ("1.0", "2")


def test_a_node_without_a_record_of_its_own_has_the_line_of_the_reports() -> None:
    sent = json.loads(shown([*BROKER[:2], *REPORTS])[0].whole())
    assert sent["lines"]["node 0 -1"]["values"] == sent["lines"]["node 1 -1"]["values"] == [3.0, 2.0]
    for files in (([*BROKER[:2], *REPORTS], NODE), ([*BROKER[:2], *REPORTS[:1]], NODE, REPORTS[1:])):
        lines = json.loads(shown(*files)[0].whole())["lines"]
        assert "node 0 -1" not in lines and lines["node 0 1"]["values"] == [3.0, 2.0]
        assert lines["node 1 -1"]["values"] == [3.0, 2.0]


def test_what_another_pc_would_add_is_said_of_records_too() -> None:
    picture, _ = shown([*BROKER[:2], *REPORTS[:2]])
    assert "third PC would add about 11 %" in picture.sentences[-1]


def test_a_report_of_another_shape_is_counted_and_left_out() -> None:
    odd = [{**REPORTS[0], "members": [{"name": ["x"]}]}, {**REPORTS[0], "hub": 3}, {**REPORTS[0], "version": "two"}]
    picture, feed = shown([*BROKER[:2], *odd, {"kind": "status", "seconds": 1.0}])
    assert feed.odd == 4
    assert picture.hub[0][0] == "broker"


def test_the_reports_of_records_are_scalars_of_tensorboard(tmp_path: Path) -> None:
    lines = [json.dumps(one) for one in [*BROKER[:2], *REPORTS]]
    (tmp_path / "broker.jsonl").write_text("\n".join(lines) + "\n")
    source = FolderSource(tmp_path, RunScalars(tmp_path / "scalars"))
    _read(source)
    source.close()
    reader = EventAccumulator(str(tmp_path / "scalars" / "run-1")).Reload()
    losses = reader.Scalars("nodes/pc2/loss")
    assert [(one.step, one.value) for one in losses] == [(1, 3.0), (3, 2.0)]
    assert losses[0].wall_time == 1002.0  # as the record says, not the time at which it is read


def _read(source: FolderSource) -> dict[str, Any]:
    source._read()
    return json.loads(source.picture.whole())


def test_files_are_read_as_far_as_they_go_and_on_when_they_grow(tmp_path: Path) -> None:
    lines = [json.dumps(one).encode() + b"\n" for one in BROKER]
    torn = tmp_path / "broker.jsonl"
    torn.write_bytes(b"".join(lines[:3]) + b"\x00\xff not a record\n" + lines[3] + lines[4][:20])
    source = FolderSource(tmp_path)
    first = _read(source)
    assert first["lines"]["samples  0"]["values"] == [64]
    assert "1 line" in first["heading"]["note"]
    with torn.open("ab") as file:
        file.write(lines[4][20:] + lines[5])
    second = _read(source)
    assert second["lines"]["samples  0"]["values"] == [64, 128]
    torn.write_bytes(lines[0])  # truncated
    assert _read(source)["lines"]["samples  0"]["values"] == [64, 128]


def test_nothing_outside_the_folder_is_read(tmp_path: Path) -> None:
    inside, outside = tmp_path / "records", tmp_path / "secret.jsonl"
    inside.mkdir()
    outside.write_text("".join(json.dumps(one) + "\n" for one in BROKER))
    (inside / "link.jsonl").symlink_to(outside)
    (inside / "up.jsonl").symlink_to("../secret.jsonl")
    sent = _read(FolderSource(inside))
    assert sent["heading"]["run"] == "" and sent["rows"] == []
    assert "--record" in sent["heading"]["note"]
