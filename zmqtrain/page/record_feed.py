"""Draws the page of a recorded run from the records of its broker and its nodes, finished or still written.

Rule 1: each file is one life of one process, with a clock of its own. It is set by the time of day at which the file
was begun, and moved so that no version is applied at a node before the broker has released it.
Rule 2: a record with values of another kind is counted and left out.
Rule 3: what a node's own record says goes before what the broker's reports say of it; of a node without a record of its
own, the reports give the figures and the line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan, nan
from typing import Any

from zmqtrain.cli.display import NOTHING, format_count, format_number, format_scores, format_seconds, plural
from zmqtrain.monitor.records import Record
from zmqtrain.monitor.tensorboard import RunScalars
from zmqtrain.page.gantt import PipelineTasks
from zmqtrain.page.picture import Curve, Picture, Row, Tile
from zmqtrain.page.roster_feed import (
    HubTable,
    Rate,
    chips_of,
    figure,
    hub_events,
    percent,
    say_gain,
    speed_tile,
    traffic,
)
from zmqtrain.page.words import say_exchange, say_program, say_release
from zmqtrain.protocol.messages import MAX_NAME, MAX_SENTENCE, Roster, message_of, printable

RECENT = 64
"""Means are over so many of the newest steps or releases."""
MOST_VERSIONS = 1 << 17
"""When so many versions were released is remembered, to set clocks by."""
REPORTED = -1
"""Number of a node's line from the broker's reports, where the lives of its own records have their own."""
COLUMNS = (
    ("steps/s", f"over its newest {RECENT} steps"),
    ("samples", "that it has trained on"),
    ("loss", "of its newest step"),
    ("of samples", "its share of the samples in the shared parameters"),
    ("up", "what it sent, in the last report of the broker, as a share of its port where the rate of that is known"),
    ("down", "what it received, in the last report of the broker"),
    ("deltas", "of it in the shared parameters"),
    ("age", "steps from an offer to the aggregate that answers it, mean of the newest"),
    ("stale", "versions that its deltas were behind, mean of the newest"),
    ("refused", "its offers that were refused"),
    ("last record", "when, in seconds of the run"),
)


@dataclass
class _Life:
    """One file. began: the time of day; shift: of its clock; behind: the least shift that its versions allow."""

    number: int
    node: str = ""
    began: float = nan
    behind: float = -float("inf")
    offered: dict[int, int] = field(default_factory=dict)  # by sequence: the step
    curve: Curve | None = None


@dataclass
class _Node:
    """What the records say of one node."""

    row: Row
    steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT))
    per_second: float = nan
    samples: int = 0
    landed_samples: int = 0
    deltas: int = 0
    refused: int = 0
    loss: float = nan
    ages: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    staleness: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    last: float = 0.0
    life: _Life | None = None
    software: str = ""
    sent: Rate = field(default_factory=Rate)
    received: Rate = field(default_factory=Rate)
    traffic: tuple[str, str] = (NOTHING, NOTHING)
    reported: tuple[float, Curve | None] = (nan, None)  # when a report named it last, and its line from reports
    chips: Sequence[str] = ()


class RecordFeed:
    """Takes the records of the newest run into a picture; files of earlier runs are left out.

    scalars: are given each report that the records hold.
    """

    def __init__(self, picture: Picture, scalars: RunScalars | None = None) -> None:
        self.picture, self.odd, self._scalars = picture, 0, scalars
        self._foreign: set[object] = set()  # files of other runs
        self._forget_run()

    def _forget_run(self) -> None:
        self._lives: dict[object, _Life] = {}
        self._nodes: dict[str, _Node] = {}
        self._first_began = nan
        self._run = ""
        self._settings: Mapping[str, Any] = {}
        self._schedule: dict[str, Any] = {}
        self._released: dict[int, float] = {}
        self._versions = deque[tuple[float, int, float]](maxlen=RECENT)  # seconds, deltas, mean staleness
        self._version, self._samples, self._live = -1, 0, 0
        self._scores: dict[str, float] = {}
        self._end = 0.0
        self._ended = False
        self._hub, self._hub_rows = HubTable(), list[tuple[str, str]]()
        self._reported: Roster | None = None
        self._gain = ""
        self._tasks = PipelineTasks()
        self._kinds: dict[str, Callable[[_Life, float, Record], None]] = {
            "run": self._began, "node": self._joined, "membership": self._membership, "plan": self._planned,
            "founding": self._founded, "release": self._release, "evaluation": self._evaluated,
            "run_end": self._run_ended, "step": self._stepped, "offer": self._offered,
            "application": self._applied, "withdrawal": self._withdrawn, "node_end": self._node_ended,
            "schedule": self._scheduled, "status": self._stands, "task": self._task_done,
            "pipeline_end": self._pipeline_ended,
        }  # fmt: skip

    def take(self, file: object, record: Record) -> None:
        """Take one record. file: tells the files apart; hold the picture's lock."""
        if file in self._foreign:
            return
        life = self._lives.get(file)
        if life is None:
            if self._is_of_another_run(record):
                self._foreign.add(file)
                return
            life = self._lives[file] = _Life(len(self._lives))
        take = self._kinds.get(record["kind"])
        if take is None:
            return
        try:
            seconds = float(record["seconds"])
            take(life, seconds, record)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            self.odd += 1
            return
        self._end = max(self._end, seconds + self._shift(life))

    def _is_of_another_run(self, first: Record) -> bool:
        """Whether a file with this first record is of an older run; if it is of a newer one, that is shown now."""
        run, began = first.get("run"), first.get("began", nan)
        if not isinstance(run, str) or not self._run or run == self._run:
            return False
        if not isinstance(began, int | float) or not began > self._first_began:
            return True
        self._foreign |= self._lives.keys()
        self.picture.clear()
        self._forget_run()
        return False

    # ------------------------------------------------------------------ the clock

    def _begin(self, life: _Life, record: Record) -> None:
        run, began = record.get("run"), record.get("began")
        if isinstance(run, str) and not self._run:
            self._run = run
        if isinstance(began, int | float):
            life.began = float(began)
            if isnan(self._first_began) or (record["kind"] == "run" and life.began < self._first_began):
                self._first_began = life.began

    def _shift(self, life: _Life) -> float:
        by_day = life.began - self._first_began
        return max(0.0 if isnan(by_day) else by_day, life.behind)

    # ------------------------------------------------------------------ the broker's records

    def _began(self, life: _Life, seconds: float, record: Record) -> None:
        self._begin(life, record)
        self._first_began = min(life.began, self._first_began) if isfinite(life.began) else self._first_began
        settings = record.get("settings")
        if isinstance(settings, dict):
            self._settings = settings
        version = int(record.get("version", -1))
        what = f"resumed at version {version}" if version >= 0 else "a new run"
        self.picture.add_event(seconds + self._shift(life), "broker began", "", what)

    def _membership(self, life: _Life, seconds: float, record: Record) -> None:
        name, what, text = _text(record, "node"), _text(record, "what"), _text(record, "text")
        node, at = self._node(name), seconds + self._shift(life)
        if what in ("left", "lost", "killed"):
            node.row.state = "left" if what == "left" else "lost"
            node.row.text = f"{what} at {format_seconds(at)}: {text}".rstrip(": ")
        elif what in ("joined", "again"):
            node.row.state, node.row.text = "live", ""
        elif what == "quarantined":
            node.row.state, node.row.text = "quarantined", text
        elif what == "acquitted":
            node.row.state, node.row.text = "live", ""
        self.picture.add_event(at, what, name, text, node.row.key)

    def _founded(self, life: _Life, seconds: float, record: Record) -> None:
        names = ", ".join(printable(str(name), MAX_NAME) for name in record["nodes"])
        self.picture.add_event(seconds + self._shift(life), "founded", "", f"the run begins with parameters of {names}")

    def _planned(self, life: _Life, seconds: float, record: Record) -> None:
        self._schedule = {**self._schedule, **record}
        text = f"k = {record['every']}, d = {record['delay']}, {record.get('codec', '')}: {record.get('text', '')}"
        self.picture.add_event(seconds + self._shift(life), "plan", "", text)

    def _release(self, life: _Life, seconds: float, record: Record) -> None:
        version, deltas, at = int(record["version"]), record["contributions"], seconds + self._shift(life)
        if len(self._released) < MOST_VERSIONS:
            self._released[version] = at
        if version <= self._version:  # a broker that was started again says it once more
            return
        late = 0.0
        for delta in deltas:
            node = self._node(_text(delta, "node"))
            node.deltas += 1
            node.landed_samples += int(delta["samples"])
            node.staleness.append(float(delta["staleness"]))
            late += float(delta["staleness"])
        self._version, self._live = version, int(record.get("nodes", 0))
        self._samples += int(record["samples"])
        self._versions.append((at, len(deltas), late / len(deltas) if deltas else 0.0))
        if (curve := self.picture.curve("samples", "", "samples")) is not None:
            curve.line.add(at, self._samples)
        if 0 < len(deltas) < self._live:
            text = f"version {version}, of {plural(len(deltas), 'delta')} of {plural(self._live, 'node')}"
            self.picture.add_event(at, "released", "", text)

    def _evaluated(self, life: _Life, seconds: float, record: Record) -> None:
        known = ("kind", "seconds", "version", "samples")
        self._scores = {
            printable(name, MAX_NAME): float(value)
            for name, value in record.items()
            if name not in known and isinstance(value, int | float)
        }
        if (curve := self.picture.curve("evaluation", "", "shared parameters, held-out")) is not None:
            curve.line.add(seconds + self._shift(life), self._scores.get("loss", nan))

    def _run_ended(self, life: _Life, seconds: float, record: Record) -> None:
        self._ended = True
        self.picture.add_event(
            seconds + self._shift(life), "ended", "", f"the broker ended at version {record['version']}"
        )

    def _stands(self, life: _Life, seconds: float, record: Record) -> None:
        facts = {**record, "seconds": record.get("run_seconds", seconds)}
        for name in ("members", "events"):
            facts[name] = [_known(one) for one in record.get(name, ())]
        for name in ("hub", "scores", "served"):
            facts[name] = _known(record.get(name, {}))
        roster, at = message_of(facts, Roster), seconds + self._shift(life)
        self.picture.report = record
        if self._scalars is not None:
            self._scalars.write(self._run, facts, life.began + seconds - float(facts["seconds"]))
        for what, text in hub_events(self._reported.hub if self._reported is not None else {}, roster.hub):
            self.picture.add_event(at, what, "", text)
        self._reported, self._hub_rows, self._gain = roster, self._hub.take(roster, seconds), say_gain(roster)
        for member in roster.members:
            self._report_member(life, seconds, member)

    def _task_done(self, life: _Life, seconds: float, record: Record) -> None:
        self._tasks.take(record)
        self._end = max(self._end, float(record["end"]) + self._shift(life))

    def _pipeline_ended(self, life: _Life, seconds: float, record: Record) -> None:
        number, computed = int(record["pipeline"]) + 1, percent(float(record["efficiency"]))
        text = f"pipeline {number}: its PCs computed {computed} of the time"
        self.picture.add_event(seconds + self._shift(life), "pipeline ended", "", text)

    def _report_member(self, life: _Life, seconds: float, member: Mapping[str, Any]) -> None:
        node = self._node(_text(member, "name"))
        rate, at = figure(member, "link_rate"), seconds + self._shift(life)
        sent = node.sent.take(seconds, figure(member, "bytes_sent"))
        received = node.received.take(seconds, figure(member, "bytes_received"))
        node.traffic, node.chips = (traffic(sent, rate), traffic(received, rate)), chips_of(member)
        if node.row.state == "waiting" and member.get("state") == "live":
            node.row.state = "live"
        if node.life is not None:
            return
        curve = self.picture.curve("node", node.row.key, node.row.name, REPORTED)
        node.reported = at, curve
        step, samples, loss = (figure(member, name) for name in ("step", "samples", "loss"))
        age, refused = figure(member, "age_steps"), figure(member, "refused")
        if isfinite(step):
            node.steps.append((seconds, int(step)))
        node.samples = int(samples) if isfinite(samples) else node.samples
        node.refused = int(refused) if isfinite(refused) else node.refused
        if isfinite(age):
            node.ages.append(int(age))
        if isfinite(loss):
            node.loss = loss
        if curve is not None:
            curve.shift = self._shift(life)
            curve.line.add(seconds, loss)

    def _begin_own(self, node: _Node, life: _Life) -> None:
        """Take a node's own record, and leave out what reports have said of it."""
        if node.life is None:
            node.steps.clear()
            node.ages.clear()
            node.samples = node.refused = 0
            self.picture.remove_curve("node", node.row.key, REPORTED)
        node.life = life
        life.curve = self.picture.curve("node", node.row.key, node.row.name, life.number)

    # ------------------------------------------------------------------ the nodes' records

    def _node(self, name: str) -> _Node:
        if (node := self._nodes.get(name)) is None:
            row = Row(str(len(self._nodes)), name or "?")
            node = self._nodes[name] = _Node(row)
            self.picture.rows[row.key] = row
        return node

    def _joined(self, life: _Life, seconds: float, record: Record) -> None:
        self._begin(life, record)
        life.node = _text(record, "node")
        node = self._node(life.node)
        self._begin_own(node, life)
        if node.row.state == "waiting":
            node.row.state = "live"
        if not self._settings:
            self._schedule.setdefault("program", record.get("program"))
        if installed := record.get("zmqtrain"):
            node.software = f"zmqtrain {printable(str(installed), MAX_NAME)}"

    def _stepped(self, life: _Life, seconds: float, record: Record) -> None:
        if life.curve is None:
            life.node = life.node or _text(record, "node")
            self._begin_own(self._node(life.node), life)
            if life.curve is None:
                return
        node = self._nodes[life.node]
        node.steps.append((seconds, int(record["step"])))
        node.samples, node.life, node.last = int(record.get("samples", node.samples)), life, seconds
        loss = record["loss"]
        if loss is not None:
            node.loss = float(loss)
            life.curve.line.add(seconds, node.loss)

    def _offered(self, life: _Life, seconds: float, record: Record) -> None:
        life.offered[int(record["sequence"])] = int(record["step"])

    def _applied(self, life: _Life, seconds: float, record: Record) -> None:
        if (released := self._released.get(int(record["version"]))) is not None:
            life.behind = max(life.behind, released - seconds)
        for sequence in record["landed"]:
            if (offered := life.offered.pop(int(sequence), None)) is not None:
                self._node(life.node).ages.append(int(record["step"]) - offered)

    def _withdrawn(self, life: _Life, seconds: float, record: Record) -> None:
        life.offered.pop(int(record["sequence"]), None)
        node = self._node(life.node)
        node.refused += 1
        if node.refused == 1 or node.refused % RECENT == 0:
            text = f"offer {record['sequence']}: {_text(record, 'reason')}; {plural(node.refused, 'offer')} so far"
            self.picture.add_event(seconds + self._shift(life), "refused", life.node, text, node.row.key)

    def _scheduled(self, life: _Life, seconds: float, record: Record) -> None:
        self._schedule |= {name: record[name] for name in ("every", "delay", "codec", "broadcast_codec")}

    def _node_ended(self, life: _Life, seconds: float, record: Record) -> None:
        node = self._node(life.node or _text(record, "node"))
        if not node.row.is_gone:
            node.row.state, node.row.text = "left", f"ended after {plural(int(record['steps']), 'step')}"

    # ------------------------------------------------------------------ what is shown

    def show(self, reading: float | None, damaged: int) -> None:
        """Make tiles, tables and sentences of what was taken; hold the picture's lock.

        reading: the part of the files that is read, None: all.  damaged: lines that hold no record.
        """
        picture, heading = self.picture, self.picture.heading
        heading.run = self._run
        alone = self._tasks.is_known and not (self._nodes or self._run)
        heading.title = "pipelines" if alone else say_program(self._settings or self._schedule)
        state = "ended" if self._ended else "recorded"
        notes = [f"reading the records: {percent(reading)}"] if reading is not None else []
        heading.state = "reading" if reading is not None else state
        if damaged + self.odd:
            notes.append(f"{plural(damaged + self.odd, 'line')} of the files could not be read, and were left out")
        if self._foreign:
            notes.append(f"{plural(len(self._foreign), 'file')} of other runs were left out")
        heading.note = "; ".join(notes)
        for life in self._lives.values():
            if life.curve is not None:
                life.curve.shift = self._shift(life)
        picture.columns = COLUMNS
        self._fill_rows()
        picture.tiles = self._tiles()[: 1 if alone else None]
        schedule = self._plan
        every, delay, codec = schedule.get("every"), schedule.get("delay"), printable(str(schedule.get("codec", "")))
        release = schedule.get("release")
        if isinstance(every, int) and isinstance(delay, int) and delay >= 0:
            picture.sentences = [say_exchange(every, delay, codec, printable(str(schedule.get("broadcast_codec", ""))))]
        else:
            picture.sentences = []
        if isinstance(release, str):
            picture.sentences = [*picture.sentences, say_release(release, self._live)]
        if self._gain:
            picture.sentences = [*picture.sentences, self._gain]
        picture.hub = self._hub_figures()
        if self._tasks.changed:
            picture.set_pipelines(self._tasks.charts())

    def _fill_rows(self) -> None:
        total = sum(node.landed_samples for node in self._nodes.values())
        versions = [node.software for node in self._nodes.values() if node.software]
        usual = max(set(versions), key=versions.count, default="")
        for node in self._nodes.values():
            times = node.steps
            node.per_second = nan
            if len(times) > 1 and times[-1][0] > times[0][0]:
                node.per_second = (times[-1][1] - times[0][1]) / (times[-1][0] - times[0][0])
            at = node.reported[0] if node.life is None else node.last + self._shift(node.life)
            last = format_seconds(at) if isfinite(at) else NOTHING
            node.row.cells = [
                format_number(node.per_second, 1),
                format_count(node.samples or node.landed_samples),
                format_number(node.loss),
                percent(node.landed_samples / total) if total else NOTHING,
                *node.traffic,
                format_count(node.deltas),
                _mean(node.ages),
                _mean(node.staleness),
                format_count(node.refused),
                last,
            ]
            other = [f"has {node.software}"] if node.software not in ("", usual) else []
            node.row.chips = node.chips or other

    def _tiles(self) -> list[Tile]:
        gone = sum(node.row.state == "lost" for node in self._nodes.values())
        version = f"version {self._version:,}" if self._version >= 0 else "no version is recorded"
        speeds = [
            node.per_second * node.samples / node.steps[-1][1]
            for node in self._nodes.values()
            if node.steps and node.steps[-1][1] and isfinite(node.per_second) and node.samples
        ]
        loss = self._scores.get("loss", nan)
        others = {name: value for name, value in self._scores.items() if name != "loss"}
        lost = plural(gone, "lost", "lost") if gone else "none was lost"
        tiles = [
            Tile("recorded", format_seconds(self._end), version, "from the broker's first record to the last one"),
            Tile("nodes", f"{len(self._nodes)}", lost, "that the records name", "warning" if gone else ""),
            Tile("held-out loss", format_number(loss, 4), format_scores(others), "of the shared parameters, the last"),
            speed_tile(speeds),
            Tile("samples", format_count(self._samples), "in the shared parameters"),
        ]
        plan = self._plan
        if isinstance(every := plan.get("every"), int) and every > 0:
            tiles.append(Tile("k / d", f"{every} / {plan.get('delay')}", printable(str(plan.get("codec", "")))))
        return tiles

    @property
    def _plan(self) -> dict[str, Any]:
        """The settings of the run with the plan that holds now."""
        return {**self._settings, **self._schedule}

    def _hub_figures(self) -> list[tuple[str, str]]:
        if not self._versions:
            return self._hub_rows or [
                ("broker", "no release is recorded: the broker's record (--record) is not here, or has none")
            ]
        seconds = self._versions[-1][0] - self._versions[0][0]
        each = sum(deltas for _, deltas, _ in self._versions) / len(self._versions)
        late = sum(late for _, _, late in self._versions) / len(self._versions)
        told = {"versions", "outer optimizer"}
        figures = [
            *(row for row in self._hub_rows if row[0] not in told),
            ("versions", format_count(self._version + 1)),
            ("deltas a version", f"{each:.1f}, of {plural(self._live, 'node')}"),
            ("behind", f"{late:.1f} versions in the mean"),
            (
                "outer optimizer",
                printable(str({**self._settings, **self._schedule}.get("outer", NOTHING)), MAX_SENTENCE),
            ),
        ]
        if seconds > 0:
            figures.append(("versions a second", f"{(len(self._versions) - 1) / seconds:.2f}"))
        return figures


def _known(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that are known: JSON has null for the others."""
    return {name: value for name, value in facts.items() if value is not None}


def _mean(values: deque[int] | deque[float]) -> str:
    return f"{sum(values) / len(values):.1f}" if values else NOTHING


def _text(record: Mapping[str, Any], name: str) -> str:
    return printable(str(record.get(name, "")), MAX_SENTENCE)
