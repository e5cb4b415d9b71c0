"""What a run came to, from its records: curves, nodes, faults and what they cost. Pure.

Rule 1: time begins when the first node trains, so that runs can be compared; what came before has negative seconds.
Rule 2: what is not recorded is NaN, and never guessed: a table shows a dash.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zmqtrain.monitor.curves import Floats, first_at, smooth
from zmqtrain.monitor.run_tables import Run, Table
from zmqtrain.strategies.measures import speed_up

ENDS = ("left", "lost", "killed")
"""Events that end the presence of a node."""
BEGINS = ("joined", "again", "mended")
"""Events that begin it, or show that it is there."""
FAULTS = ("lost", "killed", "cut", "again", "quarantined", "taken back", "refused")
"""Events that cost something."""


@dataclass(frozen=True)
class Presence:
    """A node was here from `begin` to `end`, in seconds; it ended by `how`, "" if it was here at the end."""

    node: str
    begin: float
    end: float
    how: str = ""


@dataclass(frozen=True)
class Fault:
    """Something went wrong. away: seconds until the node was back (inf: it never was; NaN: it was not away).

    samples: that the node would have trained on meanwhile at its own pace, or that were in what was dropped; NaN: not
    known.
    """

    seconds: float
    node: str
    what: str
    text: str
    away: float = math.nan
    samples: float = math.nan


@dataclass(frozen=True)
class NodeFigures:
    """What one node did. present: seconds; the other figures as in `Run.members` and `Run.deltas`, of all its lives.

    staleness, late: means over its released deltas.  dropped: deltas that were too stale, or left out by the norm gate.
    """

    name: str
    present: float = math.nan
    steps: float = math.nan
    samples: float = math.nan
    samples_per_second: float = math.nan
    loss: float = math.nan
    deltas: int = 0
    refused: float = math.nan
    dropped: int = 0
    staleness: float = math.nan
    late: float = math.nan
    age_steps: float = math.nan
    bytes_sent: float = math.nan
    bytes_received: float = math.nan
    device: str = ""


class Summary:
    """The figures of one run. label: what to call it."""

    def __init__(self, run: Run, label: str = "") -> None:
        self.run, self.label = run, label or run.label
        self.events, self.members, self.status = run.events, run.members, run.status
        self.deltas, self.releases, self.steps, self.offers = run.deltas, run.releases, run.steps, run.offers
        self.began = self._training_began()
        self.seconds = max(0.0, run.seconds - self.began)
        evaluations = run.evaluations
        self.evaluations = self._dated(evaluations.where(np.isfinite(evaluations["loss"])))
        self.eval_seconds: Floats = np.maximum(0.0, self.evaluations["seconds"] - self.began)
        self.losses: Floats = smooth(self.eval_seconds, self.evaluations["loss"])
        self.presences = self._presences()
        self.nodes = [self._figures(name) for name in self._trainers()]
        self.faults = self._faults()

    def _training_began(self) -> float:
        """When the first node trained: the last report without steps, else the first step or delta."""
        members, status = self.members, self.status
        if (trained := members["seconds"][members["step"] > 0]).size:
            before = status["seconds"][status["seconds"] < trained[0]]
            return float(before[-1] if before.size else trained[0])
        firsts = [table["seconds"][0] for table in (self.steps, self.releases) if table.rows]
        return float(min(firsts, default=0.0))

    def _dated(self, evaluations: Table) -> Table:
        """Return evaluations with the time and the samples of the version that was scored, where its release is known:
        the report of a score comes later."""
        versions, scored = self.releases["version"], evaluations["version"]
        if not versions.size or (np.diff(versions) <= 0).any():  # released again by a broker that went back
            return evaluations
        at = np.minimum(np.searchsorted(versions, scored), versions.size - 1)
        known, samples = versions[at] == scored, np.cumsum(self.releases["samples"])
        dated = {"seconds": np.where(known, self.releases["seconds"][at], evaluations["seconds"])}
        if versions[0] == 1:
            dated["samples"] = np.where(known, samples[at], evaluations["samples"])
        return Table({**evaluations, **dated})

    def _trainers(self) -> list[str]:
        """The names of the nodes that trained, were here, or contributed."""
        here = self.events["node"][np.isin(self.events["what"].astype(str), (*BEGINS, *ENDS))]
        return sorted({*self.deltas["node"], *self.steps["node"], *self.members["node"], *here} - {""})

    # ------------------------------------------------------------------ the run

    @property
    def loss(self) -> float:
        """The held-out loss at the end, smoothed."""
        return float(self.losses[-1]) if self.losses.size else math.nan

    @property
    def samples(self) -> float:
        """The samples in the shared parameters at the end."""
        ends = [float(life.end["samples"]) for life in self.run.lives if _is_count(life.end.get("samples"), life.node)]
        seen = [float(table["samples"].max()) for table in (self.status, self.evaluations) if table.rows]
        return max([*ends, *seen, float(self.releases["samples"].sum())])

    @property
    def computed(self) -> float:
        """The samples that all nodes have computed, as far as is recorded."""
        known = [one.samples for one in self.nodes if math.isfinite(one.samples)]
        return sum(known) if known else math.nan

    @property
    def bytes_up(self) -> float:
        """Bytes from the nodes to the hub."""
        return self._traffic("bytes_up", "bytes_in", "bytes_sent")

    @property
    def bytes_down(self) -> float:
        """Bytes from the hub to the nodes."""
        return self._traffic("bytes_down", "bytes_out", "bytes_received")

    def _traffic(self, end: str, hub: str, node: str) -> float:
        ends = [float(life.end[end]) for life in self.run.lives if _is_count(life.end.get(end), life.node)]
        if ends:
            return sum(ends)
        if hub in self.status and np.isfinite(self.status[hub]).any():
            return float(np.nanmax(self.status[hub]))
        known = [value for one in self.nodes if math.isfinite(value := getattr(one, node))]
        return sum(known) if known else math.nan

    def bytes_at(self, seconds: Floats) -> Floats:
        """Return the bytes of all nodes, both ways, at times of the run since training began; NaN if not known."""
        at, total = self.traffic()
        if not at.size:
            return np.full(len(seconds), math.nan)
        return np.interp(seconds, at, total)

    def traffic(self) -> tuple[Floats, Floats]:
        """Return times since training began, and the bytes of all nodes, both ways, until then."""
        at = self.status["seconds"] - self.began
        if "bytes_in" in self.status:
            total = self.status["bytes_in"] + self.status["bytes_out"]
        else:
            sums = np.nan_to_num(self.members["bytes_sent"]) + np.nan_to_num(self.members["bytes_received"])
            order = np.searchsorted(self.status["seconds"], self.members["seconds"])
            total = np.bincount(order, sums, self.status.rows)[: self.status.rows] if self.status.rows else np.empty(0)
            total = np.maximum.accumulate(total) if total.size else total  # a node that leaves takes its figures along
        known = np.isfinite(total) if len(total) else np.empty(0, bool)
        return at[known], np.asarray(total, np.float64)[known]

    def rates(self) -> tuple[Floats, Floats]:
        """Return times since training began, and the samples per second of all nodes that were here then."""
        if not self.status.rows:
            return np.empty(0), np.empty(0)
        order = np.searchsorted(self.status["seconds"], self.members["seconds"])
        rates = np.bincount(order, np.nan_to_num(self.members["samples_per_second"]), self.status.rows)
        return self.status["seconds"] - self.began, np.asarray(rates[: self.status.rows], np.float64)

    @property
    def noise(self) -> float:
        """The newest noise scale of the deltas; NaN if not measured."""
        known = self.status["noise"] if "noise" in self.status else np.empty(0)
        known = known[np.isfinite(known)]
        return float(known[-1]) if known.size else math.nan

    def throughput_over_slowest(self) -> float:
        """Return how many times as many samples a second all nodes have made as the slowest one alone."""
        rates = [one.samples_per_second for one in self.nodes if one.samples_per_second > 0]
        return sum(rates) / min(rates) if rates else math.nan

    def learning_speed_up(self) -> float:
        """Return how many times as fast as one node these learn, by the noise scale: a prediction; NaN if unknown."""
        count = sum(one.deltas > 0 for one in self.nodes)
        return speed_up(count, self.noise) if count and not math.isnan(self.noise) else math.nan

    def reached(self, loss: float) -> tuple[float, float, float]:
        """Return the seconds, the samples and the bytes after which the smoothed held-out loss was at most `loss`."""
        at = first_at(self.eval_seconds, self.losses, loss)
        samples = first_at(self.evaluations["samples"], self.losses, loss)
        return at, samples, first_at(self.bytes_at(self.eval_seconds), self.losses, loss)

    # ------------------------------------------------------------------ the nodes

    def _figures(self, name: str) -> NodeFigures:
        rows, deltas, steps = self.members.of_node(name), self.deltas.of_node(name), self.steps.of_node(name)
        offers = self.offers.of_node(name)
        end = self.run.node_ends.get(name, {})
        kept = ~(deltas["too_stale"] | deltas["left_out"])
        ages = offers["age_steps"] if offers.rows else rows["age_steps"]
        return NodeFigures(
            name=name,
            present=sum(one.end - one.begin for one in self.presences if one.node == name),
            steps=_most(end.get("steps"), steps["step"], rows["step"]),
            samples=_most(end.get("samples"), steps["samples"], rows["samples"]),
            samples_per_second=_median(rows["samples_per_second"], steps),
            loss=_last_mean(steps["loss"] if steps.rows else rows["loss"]),
            deltas=int(kept.sum()),
            refused=_most(None, rows["refused"]),
            dropped=int((~kept).sum()),
            staleness=_mean(deltas["staleness"]),
            late=_mean(deltas["late"]),
            age_steps=_mean(ages),
            bytes_sent=_most(end.get("bytes_up"), rows["bytes_sent"]),
            bytes_received=_most(end.get("bytes_down"), rows["bytes_received"]),
            device=str(rows["device"][-1]) if rows.rows else "",
        )

    def _presences(self) -> list[Presence]:
        """When each node was here: by its events, or, where none are recorded, by its figures."""
        end, found = self.run.seconds - self.began, []
        for name in self._trainers():
            events = self.events.of_node(name)
            since: float | None = None
            for at, what in zip(events["seconds"] - self.began, events["what"], strict=True):
                if what in BEGINS and since is None:
                    since = float(at)
                elif what in ENDS and since is not None:
                    found.append(Presence(name, since, float(at), what))
                    since = None
            if since is not None:
                found.append(Presence(name, since, float(end)))
            elif not any(one.node == name for one in found):
                tables = (self.members.of_node(name), self.steps.of_node(name), self.deltas.of_node(name))
                times = np.concatenate([table["seconds"] for table in tables]) - self.began
                if times.size:
                    found.append(Presence(name, float(times.min()), float(times.max())))
        return found

    # ------------------------------------------------------------------ faults

    def _faults(self) -> list[Fault]:
        pace = {one.name: one.samples_per_second for one in self.nodes}
        found: list[Fault] = []
        rows = zip(*(self.events[name] for name in ("seconds", "node", "what", "text")), strict=True)
        events = [(float(at) - self.began, node, what, text) for at, node, what, text in rows]
        for number, (at, node, what, text) in enumerate(events):
            if what not in FAULTS:
                continue
            away = math.nan
            if what in ("lost", "killed", "cut"):
                back = (then for then, who, how, _ in events[number + 1 :] if who == node and how in BEGINS)
                away = next(back, math.inf) - at
            trained = min(at + away, self.run.seconds - self.began) - max(at, 0.0)  # what others trained meanwhile
            found.append(
                Fault(at, node, what, text, away, (0.0 if trained < 0 else trained) * pace.get(node, math.nan))
            )
        return [*found, *self._dropped()]

    def _dropped(self) -> list[Fault]:
        """Deltas that were released without weight, by node, as one fault each."""
        found = []
        for name, what in (("too_stale", "deltas too stale"), ("left_out", "deltas left out")):
            dropped = self.deltas.where(self.deltas[name])
            for node in sorted(set(dropped["node"])):
                rows = dropped.of_node(node)
                text = f"{rows.rows} deltas, the first in version {rows['version'][0]}"
                samples = float(rows["samples"].sum())
                found.append(Fault(float(rows["seconds"][0]) - self.began, node, what, text, samples=samples))
        return found


def common_loss(summaries: Sequence[Summary]) -> float:
    """Return the least loss that all of these runs have reached: the highest of those at their ends; NaN if one was
    never scored."""
    ends = [one.loss for one in summaries]
    return max(ends) if ends and not any(map(math.isnan, ends)) else math.nan


def software(run: Run) -> dict[str, dict[str, str]]:
    """Return the versions of packages, by the name of each process that says so in its record."""
    found: dict[str, dict[str, str]] = {}
    for life in run.lives:
        versions = life.facts.get("versions")
        if isinstance(versions, dict) or "zmqtrain" in life.facts:
            known = {"zmqtrain": life.facts.get("zmqtrain", ""), **(versions if isinstance(versions, dict) else {})}
            found[life.node or "the broker"] = {str(name): str(value) for name, value in known.items()}
    return found


def _is_count(value: Any, node: str) -> bool:
    """Whether a broker's last record has this figure."""
    return not node and isinstance(value, int | float) and not isinstance(value, bool)


def _most(said: Any, *columns: Any) -> float:
    known = [float(said)] if isinstance(said, int | float) else []
    for column in columns:
        values = np.asarray(column, np.float64)
        values = values[np.isfinite(values) & (values >= 0)]
        known += [float(values.max())] if values.size else []
    return max(known, default=math.nan)


def _mean(column: Any) -> float:
    values = np.asarray(column, np.float64)
    values = values[np.isfinite(values)]
    return float(values.mean()) if values.size else math.nan


def _last_mean(column: Any) -> float:
    """The mean of the last tenth of a column, of ten values at least."""
    values = np.asarray(column, np.float64)
    values = values[np.isfinite(values)]
    return _mean(values[-max(10, values.size // 10) :])


def _median(rates: Any, steps: Table) -> float:
    """The median pace: as reported, else from the first step to the last."""
    values = np.asarray(rates, np.float64)
    values = values[np.isfinite(values) & (values > 0)]
    if values.size:
        return float(np.median(values))
    if steps.rows < 2 or steps["samples"][-1] < 0:
        return math.nan
    seconds = float(steps["seconds"][-1] - steps["seconds"][0])
    return float(steps["samples"][-1] - steps["samples"][0]) / seconds if seconds > 0 else math.nan
