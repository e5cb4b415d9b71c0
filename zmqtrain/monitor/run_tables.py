"""A run as columns: its records, of the broker and of nodes, in tables of numpy arrays on one clock.

    run = zmqtrain.records.load("records")                       # a folder, or the files that --record wrote
    plot(run.evaluations["seconds"], run.evaluations["loss"])

Rule 1: what a record does not say is NaN in a column of floats, -1 in one of whole numbers, "" in one of texts.
Rule 2: a record whose values have other types than its kind has is left out and counted, as a torn line is.
Rule 3: `seconds` are those of the run since its broker's first record began.  Each file has a clock of its own: it is
set by the time of day at which it began, then moved as little as needed for each delta to be released after it was
offered, and each aggregate to be applied after it was released.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import ConfigError
from zmqtrain.monitor.record_files import RecordFile, RecordFolder
from zmqtrain.monitor.records import Record

Column = NDArray[Any]

MOST_SCORES = 64
"""So many different scores, or figures of the hub, have a column."""
FLOAT, WHOLE, FLAG, TEXT = "d", "q", "b", "text"


class Table(Mapping[str, Column]):
    """Columns of one length, by name: numpy arrays that are the caller's own."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = dict(columns)

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """How many columns there are."""
        return len(self._columns)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(next(iter(self._columns.values()), ()))

    def where(self, chosen: NDArray[np.bool_]) -> Table:
        """Return the rows for which `chosen`, of one boolean a row, is true."""
        return Table({name: column[chosen] for name, column in self._columns.items()})

    def of_node(self, name: str) -> Table:
        """Return the rows of one node."""
        return self.where(self["node"] == name)

    def to_pandas(self) -> Any:
        """Return a DataFrame of the columns. Raises ConfigError where pandas is not installed."""
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise ConfigError("a DataFrame needs pandas: type pip install pandas; the columns are numpy's") from error
        return DataFrame(self._columns)

    def __repr__(self) -> str:
        return f"<{self.rows} rows of {', '.join(self._columns)}>"


class _Texts:
    """Texts that occur often, each held once."""

    def __init__(self) -> None:
        self.known: list[str] = []
        self._codes: dict[str, int] = {}

    def code(self, text: str) -> int:
        if (code := self._codes.get(text)) is None:
            if not isinstance(text, str):
                raise TypeError(f"{text!r} is no text")
            code = self._codes[text] = len(self.known)
            self.known.append(text)
        return code


class _Columns:
    """Columns that grow by a row. kinds: by name, one of FLOAT, WHOLE, FLAG, TEXT; "life" is there always."""

    def __init__(self, **kinds: str) -> None:
        self.kinds = {"life": WHOLE, "seconds": FLOAT, **kinds}
        self._values = [array("q" if kind == TEXT else kind) for kind in self.kinds.values()]
        self._texts = {name: _Texts() for name, kind in self.kinds.items() if kind == TEXT}
        self._coders = [self._texts.get(name) for name in self.kinds]

    def __len__(self) -> int:
        return len(self._values[-1])

    def add(self, *row: Any) -> None:
        """Add a row. Raises TypeError, ValueError or OverflowError, and adds nothing, if a value has another type."""
        self.extend(*([value] for value in row))

    def extend(self, *columns: list[Any]) -> None:
        """Add rows, given by column; see `add`."""
        before = len(self)
        try:
            for values, coder, column in zip(self._values, self._coders, columns, strict=True):
                values.extend(column if coder is None else map(coder.code, column))
        except BaseException:
            for values in self._values:
                del values[before:]
            raise

    def column(self, name: str) -> Column:
        index = list(self.kinds).index(name)
        values: Column = np.array(self._values[index], copy=True)
        if (texts := self._texts.get(name)) is not None:
            known: Column = np.empty(len(texts.known), object)
            known[:] = texts.known
            values = known[values]
        return values.astype(bool) if self.kinds[name] == FLAG else values

    def texts(self, name: str) -> Sequence[str]:
        """Return the different texts of a column, in the order of their first rows."""
        return self._texts[name].known


class _Figures:
    """Columns of floats whose names come with the rows."""

    def __init__(self) -> None:
        self._rows: list[dict[str, float]] = []
        self._names: dict[str, None] = {}

    def add(self, figures: Mapping[str, float]) -> None:
        for name in figures:
            if len(self._names) < MOST_SCORES:
                self._names.setdefault(name)
        self._rows.append({name: figures[name] for name in figures if name in self._names})

    def columns(self) -> dict[str, Column]:
        return {name: np.array([row.get(name, math.nan) for row in self._rows], np.float64) for name in self._names}


@dataclass
class Life:
    """One file of records: what one process has said in one of its lives.

    node: its name, "" for a broker's.  run: its id, "" where nothing says so (of a simulation).  began: the time of day
    in seconds, NaN if not known.  facts: its first record, with the settings of the run, or the versions of packages.
    end: its last record, {} if it was cut off.  shift: add it to this file's seconds for those of the run.
    newest_event: the number of the last event that a report had.
    """

    path: Path
    node: str = ""
    run: str = ""
    began: float = math.nan
    facts: Record = field(default_factory=dict)
    end: Record = field(default_factory=dict)
    shift: float = 0.0
    newest_event: int = -1


class Run:
    """The records of one run as tables; see the properties for their columns. It grows by `add`.

    label: what to call it.  lives: one a file, in the order in which they were read.  node_ends: by node, the last
    record of its newest life that ended in order.
    """

    def __init__(self, label: str = "") -> None:
        self.label = label
        self.lives: list[Life] = []
        self.node_ends: dict[str, Record] = {}
        self._left_out = 0
        self._clocked = (0, 0, 0)
        self._of_file: dict[RecordFile, int] = {}
        self._releases = _Columns(
            version=WHOLE, nodes=WHOLE, live=WHOLE, deltas=WHOLE, samples=WHOLE, dense=FLAG, staleness=FLOAT, late=FLOAT
        )
        self._deltas = _Columns(
            version=WHOLE, node=TEXT, sequence=WHOLE, fragment=WHOLE, base_version=WHOLE, samples=WHOLE, score=FLOAT,
            staleness=WHOLE, late=FLOAT, too_stale=FLAG, left_out=FLAG,
        )  # fmt: skip
        self._evaluations, self._scores = _Columns(version=WHOLE, samples=WHOLE), _Figures()
        self._events = _Columns(kind=TEXT, node=TEXT, what=TEXT, text=TEXT)
        self._plans = _Columns(
            from_version=WHOLE, every=WHOLE, delay=WHOLE, codec=TEXT, broadcast_codec=TEXT, outer=TEXT, text=TEXT
        )
        self._steps = _Columns(node=TEXT, step=WHOLE, samples=WHOLE, loss=FLOAT)
        self._offers = _Columns(node=TEXT, sequence=WHOLE, fragment=WHOLE, base_version=WHOLE, step=WHOLE, dense=FLAG)
        self._landings = _Columns(node=TEXT, sequence=WHOLE, version=WHOLE, step=WHOLE)
        self._withdrawals = _Columns(node=TEXT, sequence=WHOLE, reason=TEXT)
        self._status, self._hub = _Columns(version=WHOLE, samples=WHOLE, contributions=WHOLE, nodes=WHOLE), _Figures()
        self._members = _Columns(
            node=TEXT, state=TEXT, device=TEXT, **dict.fromkeys(_COUNTS, WHOLE), **dict.fromkeys(_RATES, FLOAT)
        )  # fmt: skip
        self._kinds = {
            "run": self._began, "node": self._joined, "membership": self._membership, "founding": self._founding,
            "plan": self._planned, "release": self._released, "evaluation": self._evaluated, "run_end": self._ended,
            "step": self._stepped, "offer": self._offered, "application": self._applied, "status": self._stands,
            "withdrawal": self._withdrawn, "node_end": self._ended,
        }  # fmt: skip

    # ------------------------------------------------------------------ reading

    def add(self, file: RecordFile, one: Record) -> None:
        """Take one record of a file; one of a kind that is in no table changes nothing."""
        if (life := self._of_file.get(file)) is None:
            life = self._of_file[file] = len(self.lives)
            self.lives.append(Life(file.path))
        if (take := self._kinds.get(one["kind"])) is None:
            return
        try:
            take(life, _number(one, "seconds"), one)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
            self._left_out += 1

    def _began(self, life: int, seconds: float, one: Record) -> None:
        here = self.lives[life]
        here.run, here.facts, here.began = _text(one, "run"), one, _number(one, "began")
        version = _whole(one, "version")
        self._events.add(life, seconds, "run", "", "began" if version < 0 else "resumed", _at_version(version))

    def _joined(self, life: int, seconds: float, one: Record) -> None:
        here = self.lives[life]
        here.run, here.node, here.began = _text(one, "run"), _text(one, "node"), _number(one, "began")
        here.facts = one

    def _membership(self, life: int, seconds: float, one: Record) -> None:
        self._events.add(life, seconds, "membership", _text(one, "node"), _text(one, "what"), _text(one, "text"))

    def _founding(self, life: int, seconds: float, one: Record) -> None:
        names = ", ".join(one["nodes"])
        self._events.add(life, seconds, "founding", names, "founded", "the run begins with its parameters")

    def _happened(self, life: int, seconds: float, one: Record) -> None:
        """Take the events of a report that are new, and are in no record of their own."""
        here, ago = self.lives[life], _number(one, "run_seconds" if "run_seconds" in one else "seconds")
        for event in one.get("events", ()):
            number, what = _whole(event, "number"), _text(event, "what")
            if number <= here.newest_event:
                continue
            here.newest_event = number
            if not here.facts or what not in _RECORDED:
                at = seconds - max(0.0, ago - _number(event, "seconds"))
                self._events.add(life, at, "status", _text(event, "node"), what, _text(event, "text"))

    def _planned(self, life: int, seconds: float, one: Record) -> None:
        names = ("codec", "broadcast_codec", "outer", "text")
        steps = (_whole(one, name) for name in ("from_version", "every", "delay"))
        texts = [_text(one, name) for name in names]
        self._plans.add(life, seconds, *steps, *texts)
        what = f"k {_whole(one, 'every')}, d {_whole(one, 'delay')}, {texts[0]}"
        self._events.add(life, seconds, "plan", "", what, texts[3])

    def _released(self, life: int, seconds: float, one: Record) -> None:
        version, deltas = _whole(one, "version"), one["contributions"]
        count = len(deltas)
        wholes = [[delta[name] for delta in deltas] for name in _WHOLES]
        scores, late = ([_or_nan(delta.get(name)) for delta in deltas] for name in ("score", "late"))
        flags = ([bool(delta.get(name)) for delta in deltas] for name in ("too_stale", "left_out"))
        *others, staleness = wholes
        mean = [sum(values) / count if count else math.nan for values in (staleness, late)]
        counts = [_whole(one, name) for name in ("nodes", "live")]
        samples, dense = _whole(one, "samples"), bool(one.get("dense"))
        self._deltas.extend(
            [life] * count, [seconds] * count, [version] * count, [delta["node"] for delta in deltas], *others, scores,
            staleness, late, *flags,
        )  # fmt: skip
        self._releases.add(life, seconds, version, *counts, count, samples, dense, *mean)

    def _evaluated(self, life: int, seconds: float, one: Record) -> None:
        scores = {name: float(value) for name, value in one.items() if name not in _NO_SCORES and _is_number(value)}
        self._evaluations.add(life, seconds, _whole(one, "version"), _whole(one, "samples"))
        self._scores.add({"loss": math.nan, **scores})

    def _ended(self, life: int, seconds: float, one: Record) -> None:
        self.lives[life].end = one
        if one["kind"] == "node_end":
            self.node_ends[_text(one, "node")] = one
        else:
            self._events.add(life, seconds, "run", "", "ended", _at_version(_whole(one, "version")))

    def _stepped(self, life: int, seconds: float, one: Record) -> None:
        self._steps.add(
            life, seconds, _text(one, "node"), _whole(one, "step"), _whole(one, "samples"), _number(one, "loss")
        )

    def _offered(self, life: int, seconds: float, one: Record) -> None:
        numbers = (_whole(one, name) for name in ("sequence", "fragment", "base_version", "step"))
        self._offers.add(life, seconds, _text(one, "node"), *numbers, bool(one.get("dense")))

    def _applied(self, life: int, seconds: float, one: Record) -> None:
        node, version, step = _text(one, "node"), _whole(one, "version"), _whole(one, "step")
        for sequence in one["landed"]:
            self._landings.add(life, seconds, node, sequence, version, step)

    def _withdrawn(self, life: int, seconds: float, one: Record) -> None:
        self._withdrawals.add(life, seconds, _text(one, "node"), _whole(one, "sequence"), _text(one, "reason"))

    def _stands(self, life: int, seconds: float, one: Record) -> None:
        rows = [
            (
                life, seconds, *(_text(member, name) for name in ("name", "state", "device")),
                *(_whole(member, name) for name in _COUNTS), *(_number(member, name) for name in _RATES),
            )
            for member in one["members"]
        ]  # fmt: skip
        hub = one.get("hub")
        figures = hub.items() if isinstance(hub, dict) else ()
        counts = (_whole(one, name) for name in ("version", "samples", "contributions"))
        self._status.add(life, seconds, *counts, len(rows))
        self._hub.add({name: float(value) for name, value in figures if _is_number(value)})
        for row in rows:
            self._members.add(*row)
        self._happened(life, seconds, one)

    # ------------------------------------------------------------------ tables

    @property
    def damaged(self) -> int:
        """How many lines hold no record, and how many records have values of other types than their kind has."""
        return self._left_out + sum(file.damaged for file in self._of_file)

    @property
    def id(self) -> str:
        """The id of the run; "" where no record says so."""
        return next((life.run for life in self.lives if life.run), "")

    @property
    def broker(self) -> Life | None:
        """The newest life of the run's broker; None if only nodes' records are here."""
        return next((life for life in reversed(self.lives) if not life.node and life.facts), None)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run, as its broker began with them; {} if its record is not here."""
        settings = {} if self.broker is None else self.broker.facts.get("settings", {})
        return settings if isinstance(settings, dict) else {}

    @property
    def nodes(self) -> list[str]:
        """The names of all nodes that any record names, sorted."""
        tables = (self._deltas, self._events, self._steps, self._members)
        named = {life.node for life in self.lives} | {name for table in tables for name in table.texts("node")}
        return sorted(named - {""})

    @property
    def seconds(self) -> float:
        """When the last record was written, in seconds of the run; 0 without any."""
        tables = (self._releases, self._evaluations, self._events, self._steps, self._status)
        ends = [self._table(table)["seconds"].max() for table in tables if len(table)]
        return float(max(ends, default=0.0))

    @property
    def evaluations(self) -> Table:
        """A row for each time that the shared parameters were scored on held-out data.

        seconds; version; samples: in the model by then; loss and each other score, as the program reports them.
        """
        return Table({"loss": np.empty(0), **self._scores.columns(), **self._table(self._evaluations)})

    @property
    def releases(self) -> Table:
        """A row for each version.

        seconds; version; nodes: live ones; live: that the mean is over; deltas: in it; samples: that they stand for;
        dense: whether it was sent uncompressed; staleness: the mean of its deltas', in versions; late: the mean time in
        seconds that its deltas came after its first.
        """
        return self._table(self._releases)

    @property
    def deltas(self) -> Table:
        """A row for each delta that the hub has released, in the order of accumulation.

        seconds and version: of the release; node; sequence; fragment; base_version: the version that it was computed
        on; samples; score; staleness: versions that its base is behind; late: seconds after the first of its round;
        too_stale: it was dropped; left_out: by the norm gate.
        """
        return self._table(self._deltas)

    @property
    def steps(self) -> Table:
        """A row for each step that a node has recorded: seconds; node; step; samples: in all its steps, so far; loss:
        of the step's batch."""
        return self._table(self._steps)

    @property
    def offers(self) -> Table:
        """A row for each delta that a node has offered.

        seconds; node; sequence; fragment; base_version; step; dense; applied_seconds, age_steps: when, and how many
        steps later, it was applied at the node (NaN: it was not); withdrawn: why it was not, "" where it was.
        """
        offers = self._table(self._offers, with_life=True)
        landed = self._table(self._landings, with_life=True)
        where = dict(zip(zip(landed["life"], landed["sequence"], strict=True), range(landed.rows), strict=True))
        keys = list(zip(offers["life"], offers["sequence"], strict=True))
        rows = np.array([where.get(key, -1) for key in keys], np.int64)
        applied, age = np.full(len(keys), math.nan), np.full(len(keys), math.nan)
        known = rows >= 0
        applied[known] = landed["seconds"][rows[known]]
        age[known] = (landed["step"][rows[known]] - offers["step"][known]).astype(np.float64)
        withdrawn = self._table(self._withdrawals, with_life=True)
        why = dict(zip(zip(withdrawn["life"], withdrawn["sequence"], strict=True), withdrawn["reason"], strict=True))
        reasons = np.empty(len(keys), object)
        reasons[:] = [why.get(key, "") for key in keys]
        columns = {name: column for name, column in offers.items() if name != "life"}
        return Table({**columns, "applied_seconds": applied, "age_steps": age, "withdrawn": reasons})

    @property
    def events(self) -> Table:
        """A row for each event, in the order of their times: seconds; kind: "membership", "run", "plan", "founding" or
        "status"; node: "" for the hub's; what: "joined", "lost", "quarantined", ...; text: why, in words."""
        events = self._table(self._events)
        order = np.argsort(events["seconds"], kind="stable")
        return Table({name: column[order] for name, column in events.items()})

    @property
    def plans(self) -> Table:
        """A row for each plan that was announced: seconds; from_version; every: k; delay: d; codec; broadcast_codec;
        outer; text: what it follows from."""
        return self._table(self._plans)

    @property
    def status(self) -> Table:
        """A row for each report of the broker: seconds; version; samples; contributions; nodes; and each figure that it
        gave of itself, such as noise, rho, gain_next, refused."""
        return Table({**self._hub.columns(), **self._table(self._status)})

    @property
    def members(self) -> Table:
        """A row for each node in each report of the broker.

        seconds; node; state; device: that it trains on; step; samples; contributions; refused: deltas that the hub did
        not take; samples_per_second; loss: of its last batches; age_steps: from an offer to its aggregate; staleness:
        versions that its last delta was behind; bytes_sent, bytes_received: so far; link_rate: of its port, in bytes
        per second.
        """
        return self._table(self._members)

    def _table(self, columns: _Columns, with_life: bool = False) -> Table:
        self._set_clocks()
        shifts = np.array([life.shift for life in self.lives] or [0.0])
        life = columns.column("life")
        values = {name: columns.column(name) for name in columns.kinds if name != "life"}
        values["seconds"] = values["seconds"] + shifts[life]
        return Table({"life": life, **values} if with_life else values)

    # ------------------------------------------------------------------ one clock

    def _set_clocks(self) -> None:
        """Set each life's shift; see rule 3 of this module."""
        known = (len(self.lives), len(self._releases), len(self._landings))
        if known == self._clocked:
            return
        self._clocked = known
        brokers = [life.began for life in self.lives if not life.node and not math.isnan(life.began)]
        first = min(brokers or [life.began for life in self.lives if not math.isnan(life.began)], default=math.nan)
        for life in self.lives:
            life.shift = 0.0 if math.isnan(life.began) or math.isnan(first) else life.began - first
        if len(self.lives) > 1 and len(self._releases) and len(self._landings):
            self._correct_clocks()

    def _correct_clocks(self) -> None:
        lives, shifts = self._releases.column("life"), np.array([life.shift for life in self.lives])
        released = dict(
            zip(self._releases.column("version"), self._releases.column("seconds") + shifts[lives], strict=True)
        )
        offered = dict(
            zip(
                zip(self._offers.column("life"), self._offers.column("sequence"), strict=True),
                self._offers.column("seconds"),
                strict=True,
            )
        )
        names = ("life", "version", "seconds", "sequence")
        least: dict[int, float] = {}
        most: dict[int, float] = {}
        for life, version, seconds, sequence in zip(*map(self._landings.column, names), strict=True):
            if (at := released.get(version)) is None or not self.lives[life].node:
                continue
            least[life] = max(least.get(life, -math.inf), at - seconds)
            if (before := offered.get((life, sequence))) is not None:
                most[life] = min(most.get(life, math.inf), at - before)
        for number, bound in least.items():
            life = self.lives[number]
            life.shift = max(bound, min(life.shift, most.get(number, math.inf)))


_WHOLES = ("sequence", "fragment", "base_version", "samples", "staleness")
_RECORDED = ("joined", "left", "lost", "again", "quarantined", "acquitted", "taken back", "plan")
_NO_SCORES = ("kind", "seconds", "version", "samples")
_COUNTS = ("step", "samples", "contributions", "refused")
_RATES = (
    "samples_per_second", "loss", "age_steps", "staleness", "bytes_sent", "bytes_received", "link_rate",
)  # fmt: skip


def _or_nan(value: Any) -> Any:
    return math.nan if value is None else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(one: Record, name: str) -> float:
    value = one.get(name)
    if value is not None and not _is_number(value):
        raise TypeError(f"{name} is no number")
    return math.nan if value is None else float(value)


def _whole(one: Record, name: str) -> int:
    value = one.get(name, -1)
    if type(value) is not int:
        raise TypeError(f"{name} is no whole number")
    return value


def _text(one: Record, name: str) -> str:
    value = one.get(name, "")
    if not isinstance(value, str):
        raise TypeError(f"{name} is no text")
    return value


def _at_version(version: int) -> str:
    return f"at version {version}" if version >= 0 else ""


# ---------------------------------------------------------------------- loading


def load_all(places: str | Path | Iterable[str | Path]) -> list[Run]:
    """Return the runs that these folders and files of records hold, in the order in which they are named.

    Records belong to one run if they have its id; those without an id (of a simulation) if they are in one file.
    Torn, truncated and still-written files are read as far as they go. Raises ConfigError for a place that is not
    there, or holds no record.
    """
    named = [places] if isinstance(places, str | Path) else list(places)
    runs: dict[str, Run] = {}
    for place in map(Path, named):
        found = 0
        ids: dict[RecordFile, str] = {}
        for file, one in RecordFolder(place).read():
            if file not in ids:
                run = one.get("run") if one["kind"] in ("run", "node") else None
                ids[file] = run if isinstance(run, str) and run else str(file.path)
                runs.setdefault(ids[file], Run(_label(place, file)))
            runs[ids[file]].add(file, one)
            found += 1
        if not found:
            raise ConfigError(
                f"{place} holds no record of a run: name a folder of records, or the files that --record wrote"
            )
    return list(runs.values())


def load(places: str | Path | Iterable[str | Path]) -> Run:
    """Return one run as tables of numpy arrays.

    places: a folder of records, or files: those that --record of the broker and of nodes, or `zmqtrain sim --json`, has
    written.
    Raises ConfigError as `load_all` does, and for records of several runs.
    """
    runs = load_all(places)
    if len(runs) > 1:
        names = ", ".join(run.id or run.label for run in runs)
        raise ConfigError(f"these are records of {len(runs)} runs ({names}): name the files of one, or use load_all")
    return runs[0]


def _label(place: Path, file: RecordFile) -> str:
    return place.resolve().name if place.is_dir() else file.path.name.partition(".")[0]
