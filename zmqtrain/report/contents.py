"""The report of one run, or of several beside each other: `write_report`.

Each picture has a table of its numbers, so that nothing is said by a picture alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zmqtrain.cli.display import NOTHING, format_bytes, format_count, format_number, format_seconds, plural
from zmqtrain.core.errors import ConfigError
from zmqtrain.monitor.run_tables import Run
from zmqtrain.report.elements import Cell, figure, page, plain, table
from zmqtrain.report.elements import paragraph as said
from zmqtrain.report.figures import draw_lateness, draw_losses, draw_presence, draw_rates, load_matplotlib
from zmqtrain.report.summary import NodeFigures, Summary, common_loss, software

MOST_ROWS = 40
MOST_EVENTS, MOST_FAULTS, MOST_NODES = 500, 200, 256


def write_report(runs: Sequence[Run], path: Path, title: str = "", notes: Sequence[str] = ()) -> None:
    """Write the report of these runs, one file that needs nothing else; an older one is replaced when this is whole.

    title: "" for the names of the runs.  notes: sentences for its head.
    Raises ConfigError where matplotlib is not installed, or the file cannot be written.
    """
    load_matplotlib()
    text = make_report(runs, title, notes)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file (-o FILE)") from error


def make_report(runs: Sequence[Run], title: str = "", notes: Sequence[str] = ()) -> str:
    """Return the report as HTML; see `write_report`."""
    summaries = [Summary(run, label) for run, label in zip(runs, _labels(runs), strict=True)]
    title = title or f"Report of {' and '.join(one.label for one in summaries)}"
    sections = (
        ("At a glance", "glance", _glance(summaries)),
        ("Loss", "loss", _losses(summaries)),
        ("Who took part when", "presence", _each(summaries, _presence)),
        ("Speed and bytes", "speed", _speed(summaries)),
        ("Staleness and lateness of deltas", "staleness", _lateness(summaries)),
        ("Nodes", "nodes", _each(summaries, _nodes)),
        ("Faults, and what they cost", "faults", _each(summaries, _faults)),
        ("Events", "events", _each(summaries, _events)),
        ("Settings", "settings", _settings(summaries)),
        ("Versions of packages", "versions", _versions(summaries)),
        ("Records", "records", _records(summaries)),
    )
    return page(title, [*_sentences(summaries), *notes], sections)


def _labels(runs: Sequence[Run]) -> list[str]:
    """The names of runs, all different."""
    labels = [plain(run.label or run.id, 64) or "a run" for run in runs]
    return [one if labels.count(one) == 1 else f"{one} ({number})" for number, one in enumerate(labels, 1)]


def _each(summaries: Sequence[Summary], make: Callable[[Summary, str], list[str]]) -> list[str]:
    """The parts of each run, one run after the other."""
    several = len(summaries) > 1
    return [part for one in summaries for part in make(one, f"{one.label}: " if several else "")]


def _when(one: Summary) -> str:
    began = next((life.began for life in one.run.lives if not life.node and math.isfinite(life.began)), math.nan)
    with contextlib.suppress(OverflowError, ValueError, OSError):
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(began)) if math.isfinite(began) else ""
    return ""


# ---------------------------------------------------------------------- at a glance


def _sentences(summaries: Sequence[Summary]) -> list[str]:
    sentences = []
    for one in summaries:
        when, program = _when(one), str(one.run.settings.get("program") or "a model")
        what = f"{plural(len(one.nodes), 'node')} trained {program} for {_time(one.seconds)}"
        loss = f", to a held-out loss of {format_number(one.loss, 4)}" if math.isfinite(one.loss) else ""
        faults = f"; {plural(len(one.faults), 'fault')}" if one.faults else ""
        label = f"{one.label}: " if len(summaries) > 1 else ""
        sentences.append(f"{label}{what}{loss}{faults}{f'. It began on {when}' if when else ''}.")
    if (text := _speed_up_sentence(summaries)) != "":
        sentences.append(text)
    return sentences


def _speed_up_sentence(summaries: Sequence[Summary]) -> str:
    loss = common_loss(summaries)
    if len(summaries) < 2 or math.isnan(loss):
        return ""
    times = [one.reached(loss)[0] for one in summaries]
    slowest = max(range(len(times)), key=lambda index: times[index])
    fastest = min(range(len(times)), key=lambda index: times[index])
    if not times[fastest] > 0 or slowest == fastest:
        return ""
    factor = times[slowest] / times[fastest]
    return (
        f"All runs have reached a held-out loss of {format_number(loss, 4)}: {summaries[fastest].label} first, after "
        f"{_time(times[fastest])}, {factor:.2f} times as soon as {summaries[slowest].label}."
    )


def _glance(summaries: Sequence[Summary]) -> list[str]:
    loss = common_loss(summaries)
    reached = [one.reached(loss) for one in summaries]
    columns = ["figure", *(one.label for one in summaries)]
    best = min((one.loss for one in summaries if math.isfinite(one.loss)), default=math.nan)

    def row(title: str, form: Callable[[Summary], str]) -> list[str | Cell]:
        return [title, *(form(one) for one in summaries)]

    rows: list[Sequence[str | Cell]] = [
        ["held-out loss at the end", *(Cell(format_number(one.loss, 4), one.loss == best) for one in summaries)],
        row("trained for", lambda one: _time(one.seconds)),
        row("nodes", lambda one: str(len(one.nodes))),
        row("samples in the shared parameters", lambda one: format_count(one.samples)),
        row("samples that the nodes computed", lambda one: format_count(one.computed)),
        row("samples per second", lambda one: format_count(_ratio(one.samples, one.seconds))),
        row("versions", lambda one: _whole(one.releases["version"].max() if one.releases.rows else math.nan)),
        row("deltas", lambda one: _whole(one.deltas.rows)),
        row("bytes, nodes to hub", lambda one: format_bytes(one.bytes_up)),
        row("bytes, hub to nodes", lambda one: format_bytes(one.bytes_down)),
        row(
            "bytes a sample, both ways",
            lambda one: format_number(_ratio(one.bytes_up + one.bytes_down, one.samples), 1),
        ),
        row("throughput, times the slowest node's", lambda one: _times(one.throughput_over_slowest())),
        row("learning, times one node's (by the noise scale)", lambda one: _times(one.learning_speed_up())),
        row("faults", lambda one: str(len(one.faults))),
    ]
    if math.isfinite(loss) and len(summaries) > 1:
        seconds, samples, sent = zip(*reached, strict=True)
        base = min(range(len(summaries)), key=lambda index: (len(summaries[index].nodes), -seconds[index]))
        soonest = min(seconds)
        called = format_number(loss, 4)
        rows[1:1] = [
            [f"seconds to loss {called}", *(Cell(format_number(at, 1), at == soonest) for at in seconds)],
            [f"samples to loss {called}", *map(format_count, samples)],
            [f"bytes to loss {called}", *map(format_bytes, sent)],
            [f"speed-up over {summaries[base].label}", *(_times(_ratio(seconds[base], at)) for at in seconds)],
        ]
    parts = [table("The runs beside each other." if len(summaries) > 1 else "The run.", columns, rows)]
    parts.append(
        said(
            "Time begins when the first node trains. Losses are smoothed: each is that of a line through nine scores. "
            "Throughput over the slowest node is what the others add in samples; learning over one node is what the "
            "noise scale of the deltas predicts of that for the loss, at equal speed.",
            "said",
        )
    )
    return parts


# ---------------------------------------------------------------------- pictures with their numbers


def _losses(summaries: Sequence[Summary]) -> list[str]:
    if not any(one.evaluations.rows or one.steps.rows or one.members.rows for one in summaries):
        return []
    caption = "Held-out loss of the shared parameters: dots are scores, lines are smoothed."
    if len(summaries) == 1:
        caption += " Thin: each node's training loss."
    numbers = "".join(_loss_numbers(one) for one in summaries if one.evaluations.rows)
    return [figure(draw_losses(summaries), caption, numbers)]


def _loss_numbers(one: Summary) -> str:
    evaluations, sent = one.evaluations, one.bytes_at(one.eval_seconds)
    rows = [
        [
            format_number(float(one.eval_seconds[at]), 1),
            _whole(evaluations["version"][at]),
            format_count(float(evaluations["samples"][at])),
            format_bytes(float(sent[at])),
            format_number(float(evaluations["loss"][at]), 4),
            format_number(float(one.losses[at]), 4),
        ]
        for at in _spread(evaluations.rows)
    ]
    columns = ("seconds", "version", "samples", "bytes", "loss", "smoothed")
    return table(f"{one.label}: held-out loss{_thinned(evaluations.rows)}.", columns, rows)


def _presence(one: Summary, label: str) -> list[str]:
    if not one.nodes:
        return []
    rows = [
        [bar.node, _clock(bar.begin), _clock(bar.end), bar.how or "the end of the records"] for bar in one.presences
    ]
    more = f" {len(one.nodes) - 64} more are in the table." if len(one.nodes) > 64 else ""
    caption = f"{label}when each node was here; marks are faults.{more}"
    columns = ("node", "from", "until", "ended by")
    numbers = table(f"{label}when each node was here.", columns, rows[:MOST_EVENTS], ("ended by",))
    return [figure(draw_presence(one), caption, numbers)]


def _speed(summaries: Sequence[Summary]) -> list[str]:
    if not any(one.status.rows for one in summaries):
        return []
    numbers = ""
    for one in summaries:
        at, rates = one.rates()
        sent_at, sent = one.traffic()
        traffic = np.interp(at, sent_at, sent) if sent_at.size else np.full(at.size, math.nan)
        rows = [
            [format_number(float(at[i]), 1), format_count(float(rates[i])), format_bytes(float(traffic[i]))]
            for i in _spread(at.size)
        ]
        columns = ("seconds", "samples per second", "bytes so far")
        numbers += table(f"{one.label}: speed and bytes{_thinned(at.size)}.", columns, rows)
    caption = "Samples per second of all nodes together, and what they have sent and received."
    return [figure(draw_rates(summaries), caption, numbers)]


def _lateness(summaries: Sequence[Summary]) -> list[str]:
    known = [one for one in summaries if one.deltas.rows]
    if not known:
        return []
    rows = []
    for one in known:
        stale, late = one.deltas["staleness"], one.deltas["late"]
        times, per = late[np.isfinite(late)] * 1000, one.releases["deltas"]
        rows.append(
            [
                one.label,
                _whole(one.deltas.rows),
                format_number(float(per.mean()), 2),
                format_number(float(stale.mean()), 2),
                _whole(np.percentile(stale, 95)),
                _whole(stale.max()),
                *(
                    format_number(float(np.percentile(times, part)), 0) if times.size else NOTHING
                    for part in (50, 95, 100)
                ),
            ]
        )
    columns = ("run", "deltas", "in a version", *(f"behind, {part}" for part in ("mean", "95 %", "most")))
    columns = (*columns, *(f"late, {part} (ms)" for part in ("half", "95 %", "most")))
    caption = "Deltas that were released: in how many versions, how many versions behind, how late in their rounds."
    return [
        figure(draw_lateness(known), "How many versions behind deltas were, and how late they came."),
        table(caption, columns, rows),
    ]


# ---------------------------------------------------------------------- tables


def _nodes(one: Summary, label: str) -> list[str]:
    if not one.nodes:
        return []
    total = one.computed
    forms: tuple[tuple[str, Callable[[NodeFigures], str]], ...] = (
        ("device", lambda node: node.device or NOTHING),
        ("here", lambda node: _time(node.present)),
        ("steps", lambda node: _whole(node.steps)),
        ("samples", lambda node: format_count(node.samples)),
        ("share", lambda node: _percent(_ratio(node.samples, total))),
        ("samples/s", lambda node: format_count(node.samples_per_second)),
        ("training loss", lambda node: format_number(node.loss, 4)),
        ("deltas", lambda node: _whole(node.deltas)),
        ("refused", lambda node: _whole(node.refused)),
        ("dropped", lambda node: _whole(node.dropped)),
        ("stale", lambda node: format_number(node.staleness, 2)),
        ("late, ms", lambda node: format_number(1000 * node.late, 0)),
        ("age, steps", lambda node: format_number(node.age_steps, 1)),
        ("sent", lambda node: format_bytes(node.bytes_sent)),
        ("received", lambda node: format_bytes(node.bytes_received)),
    )
    shown = one.nodes[:MOST_NODES]
    forms = tuple((name, form) for name, form in forms if any(form(node) != NOTHING for node in shown))
    rows = [[node.name, *(form(node) for _, form in forms)] for node in shown]
    more = f"; the first {MOST_NODES} of {len(one.nodes)}" if len(one.nodes) > MOST_NODES else ""
    caption = (
        f"{label}nodes{more}. dropped: deltas without weight, too stale or left out by the norm gate; stale: versions "
        "behind, and late: after the first delta of the round, means; age: steps from an offer to its aggregate."
    )
    return [table(caption, ("node", *(name for name, _ in forms)), rows, ("device",))]


def _faults(one: Summary, label: str) -> list[str]:
    if not one.faults:
        return [said(f"{label}no fault is recorded.")]
    lost = sum(fault.samples for fault in one.faults if math.isfinite(fault.samples))
    rows = [
        [
            _clock(fault.seconds),
            fault.node,
            fault.what,
            "never back" if fault.away == math.inf else _time(fault.away),
            format_count(fault.samples),
            fault.text,
        ]
        for fault in one.faults[:MOST_FAULTS]
    ]
    columns = ("at", "node", "what", "back after", "samples lost", "why")
    more = f" The first {MOST_FAULTS} of {len(one.faults)} are shown." if len(one.faults) > MOST_FAULTS else ""
    caption = (
        f"{label}{plural(len(one.faults), 'fault')}, at a cost of about {format_count(lost)} samples. samples lost: "
        "those that a node would have trained on while it was away, at its own pace, or that were in dropped deltas."
        + more
    )
    return [table(caption, columns, rows, ("node", "what", "why"))]


def _events(one: Summary, label: str) -> list[str]:
    if not one.events.rows:
        return []
    shown = _spread(one.events.rows, MOST_EVENTS)
    names = ("node", "what", "text")
    rows = [
        [_clock(float(one.events["seconds"][at]) - one.began), *(str(one.events[name][at]) for name in names)]
        for at in shown
    ]
    caption = f"{label}what happened{_thinned(one.events.rows, MOST_EVENTS)}."
    return [table(caption, ("at", "node", "what", "why"), rows, ("node", "what", "why"))]


def _settings(summaries: Sequence[Summary]) -> list[str]:
    known = [one for one in summaries if one.run.settings]
    if not known:
        return []
    names = sorted({name for one in known for name in one.run.settings})
    rows = [[str(name), *(_value(one.run.settings.get(name)) for one in known)] for name in names]
    plans = [part for one in known for part in _plans(one)]
    differs = [place for place, row in enumerate(rows) if len(set(row[1:])) > 1]
    caption = "Settings of the broker." + (" Those that differ are marked." if differs else "")
    labels = [one.label if len(summaries) > 1 else "value" for one in known]
    return [table(caption, ("setting", *labels), rows, labels, differs), *plans]


def _plans(one: Summary) -> list[str]:
    plans = one.run.plans
    if not plans.rows:
        return []
    names = ("every", "delay", "codec", "broadcast_codec", "outer", "text")
    rows = [
        [_clock(float(plans["seconds"][at]) - one.began), *(str(plans[name][at]) for name in names)]
        for at in _spread(plans.rows)
    ]
    columns = ("at", "k", "d", "codec", "broadcast codec", "outer optimizer", "why")
    caption = f"{one.label}: what the hub planned{_thinned(plans.rows)}."
    return [table(caption, columns, rows, ("codec", "broadcast codec", "outer optimizer", "why"))]


def _versions(summaries: Sequence[Summary]) -> list[str]:
    parts = []
    for one in summaries:
        processes = software(one.run)
        if not processes:
            continue
        groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
        for process, versions in processes.items():
            groups.setdefault(tuple(sorted(versions.items())), []).append(process)
        columns = [_listed(names) for names in groups.values()]
        packages = list(dict.fromkeys(name for versions in processes.values() for name in versions))
        rows = [[name, *(dict(versions).get(name, NOTHING) for versions in groups)] for name in packages]
        differs = [place for place, row in enumerate(rows) if len(set(row[1:])) > 1]
        caption = f"{one.label}: versions of packages." + (" Those that differ are marked." if differs else "")
        parts.append(table(caption, ["package", *columns], rows, columns, differs))
    return parts


def _records(summaries: Sequence[Summary]) -> list[str]:
    rows = []
    for one in summaries:
        for life in one.run.lives:
            ended = "in order" if life.end else "cut off, or still written to"
            rows.append([life.path.name, one.label, life.node or "the broker", life.run or NOTHING, ended])
    damaged = sum(one.run.damaged for one in summaries)
    parts = [
        table(
            "The files that this report was made of.",
            ("file", "run", "of", "id", "ends"),
            rows[:MOST_EVENTS],
            ("run", "of", "id", "ends"),
        )
    ]
    if damaged:
        parts.append(said(f"{damaged:,} lines hold no record of a run, as if torn, and were left out."))
    return parts


# ---------------------------------------------------------------------- figures for people


def _spread(rows: int, most: int = MOST_ROWS) -> list[int]:
    """The rows of a table that are shown: at most so many, evenly, the first and the last among them."""
    if rows <= most:
        return list(range(rows))
    return [int(at) for at in np.unique(np.linspace(0, rows - 1, most).round())]


def _thinned(rows: int, most: int = MOST_ROWS) -> str:
    return f"; {most} of {rows:,} rows, evenly" if rows > most else ""


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _ratio(value: float, by: float) -> float:
    return value / by if by else math.nan


def _whole(value: Any) -> str:
    return f"{int(value):,}" if math.isfinite(value) else NOTHING


def _times(value: float) -> str:
    return f"{value:.2f} ×" if math.isfinite(value) else NOTHING


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %" if math.isfinite(value) else NOTHING


def _time(seconds: float) -> str:
    """A duration for people: seconds with a unit, or minutes and hours with colons."""
    return f"{seconds:.1f} s" if abs(seconds) < 60 else format_seconds(seconds)


def _clock(seconds: float) -> str:
    """A time of the run: negative ones are before training began."""
    return f"{seconds:.1f} s" if abs(seconds) < 600 else format_seconds(seconds)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
