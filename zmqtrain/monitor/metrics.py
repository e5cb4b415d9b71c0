"""The newest report of a run as metrics of Prometheus, in its text format.

Rule 1: METRICS is the list of all metrics: docs and the Grafana dashboard are held to it by a test.
Rule 2: names and units by Prometheus's conventions: `_total` for what only grows, seconds, bytes, ratios from 0 to 1.
Rule 3: what is not known has no sample. While the broker is not heard, `zmqtrain_hub_up` is 0 and stands alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.installed import how_to_install
from zmqtrain.protocol.messages import MAX_NAME, Roster, fields_of, printable

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

Report = Mapping[str, Any]
"""A report of the broker: the fields of a Roster, or a line of `zmqtrain status --json`."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of what `RunMetrics.text` returns."""


class Metric(NamedTuple):
    """One metric. of: what it is of, which says its labels: "run" and "hub" have none, "node" has the node's name.

    key: of the report, of its `hub`, or of one of its `members`.
    """

    name: str
    kind: Literal["counter", "gauge"]
    of: Literal["run", "hub", "node"]
    key: str
    help: str


METRICS = (
    Metric("zmqtrain_version", "gauge", "run", "version", "Version of the shared parameters; -1 before the first."),
    Metric("zmqtrain_run_seconds", "gauge", "run", "seconds", "How long the run has lasted."),
    Metric("zmqtrain_samples_total", "counter", "run", "samples", "Samples that the shared parameters stand for."),
    Metric("zmqtrain_deltas_total", "counter", "run", "contributions", "Deltas in the shared parameters."),
    Metric("zmqtrain_units_done_total", "counter", "run", "units_done", "Data units that are done."),
    Metric("zmqtrain_units", "gauge", "run", "units_total", "Data units of the run; 0: it has no end."),
    Metric("zmqtrain_every_steps", "gauge", "run", "every", "k: steps between two offers of a node."),
    Metric("zmqtrain_delay_steps", "gauge", "run", "delay", "d: steps from an offer until its aggregate is applied."),
    Metric("zmqtrain_held_out_version", "gauge", "run", "score_version", "Version that was scored last."),
    Metric("zmqtrain_noise_scale", "gauge", "hub", "noise", "Noise scale of the deltas, in units of one node's delta."),
    Metric("zmqtrain_delta_correlation_ratio", "gauge", "hub", "rho", "Correlation of two nodes' deltas."),
    Metric("zmqtrain_next_node_gain_ratio", "gauge", "hub", "gain_next", "Speed that one more node would add."),
    Metric("zmqtrain_last_node_gain_ratio", "gauge", "hub", "gain_last", "Speed that the last node adds."),
    Metric("zmqtrain_deltas_refused_total", "counter", "hub", "refused", "Deltas that the hub has refused."),
    Metric("zmqtrain_hub_received_bytes_total", "counter", "hub", "bytes_in", "Bytes that the hub has received."),
    Metric("zmqtrain_hub_sent_bytes_total", "counter", "hub", "bytes_out", "Bytes that the hub has sent."),
    Metric("zmqtrain_hub_port_bytes_per_second", "gauge", "hub", "port_rate", "Rate of the hub's port, one way."),
    Metric("zmqtrain_hub_cpu_seconds_total", "counter", "hub", "cpu_seconds", "CPU time of the broker."),
    Metric("zmqtrain_hub_resident_memory_bytes", "gauge", "hub", "memory_bytes", "Memory of the broker."),
    Metric("zmqtrain_hub_saved_version", "gauge", "hub", "saved_version", "Version of the newest checkpoint."),
    Metric("zmqtrain_hub_turned_away", "gauge", "hub", "turned_away", "Connections refused in the last minute."),
    Metric("zmqtrain_hub_waits_for_room", "gauge", "hub", "waits_for_room", "1 while the disk is full."),
    Metric("zmqtrain_hub_unsaved", "gauge", "hub", "unsaved", "1 while the last checkpoint could not be written."),
    Metric("zmqtrain_node_steps_total", "counter", "node", "step", "Steps of a node."),
    Metric("zmqtrain_node_samples_total", "counter", "node", "samples", "Samples that a node has trained on."),
    Metric("zmqtrain_node_samples_per_second", "gauge", "node", "samples_per_second", "How fast a node trains."),
    Metric("zmqtrain_node_loss", "gauge", "node", "loss", "Training loss of a node's last batches."),
    Metric("zmqtrain_node_age_steps", "gauge", "node", "age_steps", "Steps from an offer to its aggregate."),
    Metric("zmqtrain_node_staleness_versions", "gauge", "node", "staleness", "Versions its last delta was behind."),
    Metric("zmqtrain_node_deltas_total", "counter", "node", "contributions", "A node's deltas that were released."),
    Metric("zmqtrain_node_deltas_refused_total", "counter", "node", "refused", "A node's deltas that were refused."),
    Metric("zmqtrain_node_offers_put_off_total", "counter", "node", "put_off", "Offers put off: too much in flight."),
    Metric("zmqtrain_node_sent_bytes_total", "counter", "node", "bytes_sent", "Bytes that a node has sent."),
    Metric("zmqtrain_node_received_bytes_total", "counter", "node", "bytes_received", "Bytes that it has received."),
    Metric("zmqtrain_node_link_bytes_per_second", "gauge", "node", "link_rate", "Rate of a node's port, one way."),
    Metric("zmqtrain_node_silent_seconds", "gauge", "node", "silent", "How long a node was not heard."),
)
"""The metrics that are one figure of a report each; `RunMetrics` adds those of OTHERS."""

OTHERS = (
    ("zmqtrain_hub_up", "1 while the broker is heard."),
    ("zmqtrain_run", "Always 1; its labels say what the run does."),
    ("zmqtrain_nodes", "Nodes that are here, by state."),
    ("zmqtrain_held_out", "Score of the shared parameters on held-out data, by name."),
    ("zmqtrain_hub_dropped_messages_total", "Messages of the protocol that were dropped, by reason."),
)
RUN_LABELS = ("codec", "broadcast_codec", "outer")
DROPPED = ("former", "double", "gap")


class RunMetrics:
    """The metrics of one run, from its newest report. Raises ConfigError where prometheus-client is not installed."""

    def __init__(self) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise ConfigError(
                f"metrics need prometheus-client, which is not installed. Type:  {how_to_install('page')}"
            ) from error
        self._report: Report | None = None
        self._client = prometheus_client
        self._registry = prometheus_client.CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(self))

    def update(self, report: Report | Roster | None) -> None:
        """Take the newest report; None: the broker is not heard."""
        self._report = fields_of(report) if isinstance(report, Roster) else report

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format, as UTF-8 (CONTENT_TYPE)."""
        return self._client.generate_latest(self._registry)

    def text_of(self, report: Report | Roster | None) -> bytes:
        """Take a report and return all metrics; see `update` and `text`."""
        self.update(report)
        return self.text()

    def families(self) -> Iterable[Family]:
        """Return the families of metrics of the newest report."""
        from prometheus_client.core import GaugeMetricFamily

        report = self._report
        up = GaugeMetricFamily(*OTHERS[0])
        up.add_metric([], 0.0 if report is None else 1.0)
        yield up
        if report is not None:
            yield from self._of_run(report)
            names = node_labels(report)
            for metric in METRICS:
                yield _family(metric, report, names)

    def _of_run(self, report: Report) -> Iterable[Family]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        hub, members = _map(report, "hub"), report.get("members", ())
        run = GaugeMetricFamily(*OTHERS[1], labels=RUN_LABELS)
        run.add_metric([printable(str(hub.get(label, ""))) for label in RUN_LABELS], 1.0)
        yield run
        nodes = GaugeMetricFamily(*OTHERS[2], labels=["state"])
        states = [printable(str(member.get("state", "")), MAX_NAME) for member in members]
        for state in sorted(set(states)):
            nodes.add_metric([state], states.count(state))
        yield nodes
        scores = GaugeMetricFamily(*OTHERS[3], labels=["score"])
        for name, value in _map(report, "scores").items():
            if (figure := figure_of(value)) is not None:
                scores.add_metric([printable(str(name), MAX_NAME)], figure)
        yield scores
        dropped = CounterMetricFamily(*OTHERS[4], labels=["reason"])
        for reason in DROPPED:
            if (figure := figure_of(hub.get(reason))) is not None:
                dropped.add_metric([reason], figure)
        yield dropped


class _Collector:
    """Gives a registry the families of a run's metrics when it is asked."""

    def __init__(self, metrics: RunMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Family]:
        return self._metrics.families()


def node_labels(report: Report) -> Sequence[str]:
    """Return what to call each member of a report, all different: its name, with the hub's number behind it where
    several have one name (nodes of one PC)."""
    members = report.get("members", ())
    names = [printable(str(member.get("name", "")), MAX_NAME) for member in members]
    numbers = [printable(str(member.get("peer", "")), MAX_NAME).rpartition("#")[2] for member in members]
    labels = [
        f"{name}#{number}" if names.count(name) > 1 else name for name, number in zip(names, numbers, strict=True)
    ]
    return [label if labels.count(label) == 1 else f"{label} ({place})" for place, label in enumerate(labels)]


def _family(metric: Metric, report: Report, names: Sequence[str]) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labelled = ["node"] if metric.of == "node" else []
    family: CounterMetricFamily | GaugeMetricFamily
    if metric.kind == "counter":
        family = CounterMetricFamily(metric.name, metric.help, labels=labelled)
    else:
        family = GaugeMetricFamily(metric.name, metric.help, labels=labelled)
    if metric.of == "node":
        rows = [([name], member) for name, member in zip(names, report.get("members", ()), strict=True)]
    else:
        rows = [([], report if metric.of == "run" else _map(report, "hub"))]
    for labels, figures in rows:
        if (figure := figure_of(figures.get(metric.key))) is not None:
            family.add_metric(labels, figure)
    return family


def _map(report: Report, name: str) -> Mapping[str, Any]:
    value = report.get(name)
    return value if isinstance(value, Mapping) else {}


def figure_of(value: Any) -> float | None:
    """Return a figure of a report; None for one that is not known, or is none."""
    if not isinstance(value, int | float):
        return None
    try:
        figure = float(value)
    except OverflowError:
        return None
    return None if math.isnan(figure) else figure
