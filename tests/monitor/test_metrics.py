"""Metrics of a run: the official parser reads them, and the Grafana dashboard and the docs have their names."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from zmqtrain.core.errors import ConfigError
from zmqtrain.monitor.metrics import METRICS, OTHERS, Metric, RunMetrics
from zmqtrain.protocol.messages import Roster

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = DOCS / "examples" / "grafana.json"
NAMES = {metric.name for metric in METRICS} | {name for name, _ in OTHERS}
HOSTILE = ('<script>alert("1")</script>', "a\\b\n#{}", "\x1b[31mred\u202e", "x" * (1 << 20), "\ud800", "_", "")


def member(name: str = "pc1", number: int = 1, **figures: Any) -> dict[str, Any]:
    return {"peer": f"{name}#{number}", "name": name, "state": "live", "step": 40, "bytes_sent": 1000, **figures}


def roster(*members: dict[str, Any], **hub: Any) -> Roster:
    return Roster(7, members, "", 640, 21, 0, 0, 12.5, {"loss": 2.5}, 6, 8, 2, hub=hub)


def samples(metrics: RunMetrics) -> dict[tuple[str, str], float]:
    """Value of each sample, by its name and its first label."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {(one.name, next(iter(one.labels.values()), "")): one.value for family in families for one in family.samples}


def test_a_report_is_metrics_that_the_official_parser_reads() -> None:
    metrics = RunMetrics()
    metrics.update(roster(member(), member("pc2", 2, loss=math.nan), refused=3, noise=math.inf, waits_for_room=True))
    found = samples(metrics)
    assert found["zmqtrain_node_steps_total", "pc1"] == 40
    assert found["zmqtrain_node_sent_bytes_total", "pc2"] == 1000
    assert found["zmqtrain_held_out", "loss"] == 2.5 and found["zmqtrain_nodes", "live"] == 2
    assert found["zmqtrain_deltas_refused_total", ""] == 3 and found["zmqtrain_hub_waits_for_room", ""] == 1
    assert found["zmqtrain_noise_scale", ""] == math.inf
    assert ("zmqtrain_node_loss", "pc2") not in found


def test_a_broker_that_is_not_heard_is_down_and_has_no_other_metric() -> None:
    metrics = RunMetrics()
    metrics.update(roster(member()))
    metrics.update(None)
    assert samples(metrics) == {("zmqtrain_hub_up", ""): 0.0}


def test_every_metric_of_the_list_has_a_sample_when_its_figure_is_known() -> None:
    figures = {metric.key: 1 for metric in METRICS if metric.of == "node"}
    hub = {metric.key: 1 for metric in METRICS if metric.of == "hub"}
    metrics = RunMetrics()
    metrics.update(roster(member(**figures), **hub, former=2))
    assert {name for name, _ in samples(metrics)} == NAMES


def test_hostile_names_are_labels_and_all_different() -> None:
    metrics = RunMetrics()
    metrics.update(roster(*(member(name, number) for number, name in enumerate([*HOSTILE, "pc1", "pc1", "pc1#8"]))))
    labels = [label for name, label in samples(metrics) if name == "zmqtrain_node_steps_total"]
    assert len(labels) == len(HOSTILE) + 3
    assert all(label.isprintable() and len(label) < 100 for label in labels)
    assert {"pc1#7", "pc1#8"} <= {label.partition(" ")[0] for label in labels}


@pytest.mark.parametrize(
    "report", [{"members": [{"step": "x", "loss": [1]}], "hub": 3, "scores": {"loss": 10**400}}, {}]
)
def test_figures_of_other_types_have_no_sample(report: dict[str, Any]) -> None:
    metrics = RunMetrics()
    metrics.update(report)
    assert {name for name, _ in samples(metrics)} <= {"zmqtrain_hub_up", "zmqtrain_run", "zmqtrain_nodes"}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: Metric) -> None:
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert re.fullmatch(r"zmqtrain(_[a-z]+)+", metric.name)


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    board = json.loads(DASHBOARD.read_text())
    asked = [
        name
        for panel in board["panels"]
        for one in panel["targets"]
        for name in re.findall(r"zmqtrain_\w+", one["expr"])
    ]
    assert len(set(asked)) > 20
    assert set(asked) <= NAMES
    labels = {
        label
        for panel in board["panels"]
        for one in panel["targets"]
        for label in re.findall(r"{{(\w+)}}", one["legendFormat"])
    }
    assert labels == {"node"}
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_the_page_of_records_lists_every_metric() -> None:
    assert set(re.findall(r"^\| `(zmqtrain_\w+)`", (DOCS / "records.md").read_text(), re.MULTILINE)) == NAMES


def test_without_its_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"\[page\]"):
        RunMetrics()
