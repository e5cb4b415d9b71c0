"""The display of a run: its roster as a live table in a terminal, or as one plain line every few seconds.

Rule 1: what is shown comes from a Roster alone, so that broker, node, local and status show the same.
Rule 2: where the output is no terminal, no control code is written.  Rule 3: units are a person's: 1.2 MB, 3.4 k/s.
Rule 4: names and figures of a roster are its sender's: any text and any number in it can be shown.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from rich import console as rich_console
from rich.console import Console, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from zmqtrain.core.errors import ConfigError
from zmqtrain.protocol.fencing import Verdict
from zmqtrain.protocol.members import name_missing
from zmqtrain.protocol.messages import Roster, printable

LAYOUT = "\n\t"


def visible(text: str) -> str:
    """Return a text in which each character that cannot be printed is "?"; line feeds and tabs stay."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in LAYOUT else "?" for one in text)


def say(text: str) -> None:
    """Print a text on standard output: on a terminal each line is filled to its width, so that its edge breaks no word.

    A line that begins with a space is to be typed, or copied, and stays as it is.
    """
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    print("\n".join(_filled(line, columns) for line in visible(text).split("\n")), flush=True)


def _filled(line: str, columns: int) -> str:
    if len(line) <= columns or not columns or line.startswith(" "):
        return line
    return textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)


class Terminal(Console):
    """A rich console on which a text is a text: no markup is read in it, and `visible` is applied to it.

    stream: standard output if not given.
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        super().__init__(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=False)

    def render_str(self, text: str, **options: Any) -> Text:
        options |= {"markup": False, "emoji": False, "highlight": False}
        return super().render_str(visible(text), **options)


class VisibleFormatter(logging.Formatter):
    """A log line to which `visible` is applied."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class StderrHandler(logging.Handler):
    """Writes to what sys.stderr is now: a live table replaces it, so that a line appears above the table.

    A line that cannot be written (the disk is full, the reader has gone) is dropped.
    """

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)


REDRAW_SECONDS = 0.5
PLAIN_SECONDS = 5.0
NOTHING = "–"
MOST_COUNT = 1 << 63
MOST_DIGITS = 1e12
"""Numbers from here on are written with an exponent, or a unit."""
NAME_LENGTH, SHORT_NAME = 24, 13
WIDE = 110
"""From so many columns on a table has a column for devices."""
MAKERS = ("NVIDIA ", "GeForce ")
"""What is left out of a device's name in a table."""
ORDINALS = ("no", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
DROPPED = tuple(verdict.value for verdict in Verdict if verdict is not Verdict.NOW)
"""What the hub counts of the messages that it has dropped."""

Member = Mapping[str, int | float | str | bool]

# ---------------------------------------------------------------------- figures for people


def _scaled(value: float, step: float, units: tuple[str, ...]) -> str:
    if not math.isfinite(value):
        return NOTHING
    unit = units[0]
    for larger in units[1:]:
        if abs(value) < step * 0.9995:
            break
        value, unit = value / step, larger
    if abs(value) >= MOST_DIGITS:
        return f"{value:.1e} {unit}".rstrip()
    digits = 0 if unit == units[0] and float(value).is_integer() else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}".rstrip()


def format_bytes(count: float) -> str:
    """Return 1234567 as "1.2 MB" (powers of 1000, as links are measured)."""
    return _scaled(count, 1000.0, ("B", "kB", "MB", "GB", "TB"))


def format_count(count: float) -> str:
    """Return 3400 as "3.4 k"."""
    return _scaled(count, 1000.0, ("", "k", "M", "G", "T"))


def plural(count: float, one: str, several: str = "") -> str:
    """Return a count with its noun: "1 node", "3 nodes", "4.5 steps"."""
    figure = f"{count:.4g}" if isinstance(count, float) else f"{count}"
    return f"{figure} {one if count == 1 else several or one + 's'}"


def _counted(count: float, one: str, several: str = "") -> str:
    """Return 3400 deltas as "3.4 k deltas"."""
    return f"{format_count(count)} {one if count == 1 else several or one + 's'}"


def format_rate(bytes_per_second: float) -> str:
    """Return 119.5e6 as "956 Mb/s"."""
    text = _scaled(8 * bytes_per_second, 1000.0, ("b", "kb", "Mb", "Gb", "Tb"))
    return text if text == NOTHING else text + "/s"


def format_seconds(seconds: float) -> str:
    """Return 75 as "1:15", 3700 as "1:01:40"."""
    if not math.isfinite(seconds):
        return NOTHING
    if seconds >= MOST_DIGITS:
        return f"{seconds:.1e} s"
    whole = max(0, int(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_number(value: float, digits: int = 3) -> str:
    """Return a loss or an age; a dash where it is not known."""
    if not math.isfinite(value):
        return NOTHING
    return f"{value:.{digits}f}" if abs(value) < MOST_DIGITS else f"{value:.{digits}e}"


def format_scores(scores: Mapping[str, float]) -> str:
    """Return held-out scores as "loss 2.3110, accuracy 98.1 %". An accuracy is in percent, as `Program.evaluate` has
    it; one of at most 1 is shown as it came, as it may be a fraction. The loss stands first, also after a restart."""
    ordered = sorted(scores.items(), key=lambda item: item[0] != "loss")
    return ", ".join(f"{name.replace('_', ' ')} {_score(name, value)}" for name, value in ordered)


def _score(name: str, value: float) -> str:
    is_percent = name.endswith("accuracy") and 1 < value <= 100
    return f"{value:.1f} %" if is_percent else format_number(value, 4)


def _figure(member: Member, name: str) -> float:
    value = member.get(name, math.nan)
    return float(value) if isinstance(value, int | float) else math.nan


def _figures(roster: Roster, name: str) -> list[float]:
    """This figure of all members that have it."""
    return [value for member in roster.members if math.isfinite(value := _figure(member, name))]


def _count(facts: Member, name: str) -> int:
    """A count, 0 if there is none, or if it is not a number."""
    value = facts.get(name, 0)
    return int(max(0, min(value, MOST_COUNT))) if isinstance(value, int | float) and math.isfinite(value) else 0


def _word(facts: Member, name: str) -> str:
    """A text of one line, "" if there is none."""
    return printable(str(facts.get(name, "")))


# ---------------------------------------------------------------------- a roster


def roster_headline(roster: Roster, separator: str = " · ") -> str:
    """Return how the run stands, without its members; separator: before the held-out scores (a line's end, say)."""
    hub, served = roster.hub, roster.served
    dropped = sum(_count(hub, kind) for kind in DROPPED)
    quarantined = sum(member.get("state") == "quarantined" for member in roster.members)
    refused, turned_away, missing = _count(hub, "refused"), _count(hub, "turned_away"), name_missing(roster.shards)
    way = ""
    if roster.exchange:
        way = f"exchange {printable(roster.exchange.partition(',')[0])}"
    elif roster.every:
        codec = hub.get("codec", "")
        way = f"k {roster.every}, d {roster.delay}" + (f", {printable(str(codec))}" if codec else "")
    pushes, clients = (
        _counted(_count(served, "pushes"), "push", "pushes"),
        _counted(_count(served, "clients"), "client"),
    )
    keys = f"{_counted(_count(served, 'keys'), 'key')}, {format_bytes(_count(served, 'bytes'))}"
    parts = (
        format_seconds(roster.seconds),
        _version(roster),
        plural(len(roster.members), "node"),
        # past the broker, samples are counted in the end
        _counted(roster.samples, "sample") if roster.samples or not roster.exchange else "",
        "an operator ends the run: nodes send what they have computed" if hub.get("ending") else "",
        way,
        f"{roster.units_done}/{roster.units_total} units{_progress(roster)}" if roster.units_total else "",
        f"{_counted(dropped, 'stale or double message')} dropped" if dropped else "",
        f"{quarantined} quarantined" if quarantined else "",
        f"{_counted(refused, 'delta')} refused" if refused else "",
        f"{format_count(turned_away)} turned away at its port in the last minute" if turned_away else "",
        put_off(roster),
        full_disk(roster),
        f"term {term}" if (term := _count(hub, "term")) else "",
        f"standby {standby}" if (standby := _word(hub, "standby")) else "",
        f"without {missing}" if missing else "",
        f"serves {keys}: {pushes}, {clients} now" if served else "",
    )
    scores = f"{separator}held-out {format_scores(roster.scores)}" if roster.scores else ""
    gain = roster_gain(roster)
    return " · ".join(filter(None, parts)) + scores + _worse(roster) + (f"{separator}{gain}" if gain else "")


def put_off(roster: Roster) -> str:
    """Say that offers are put off, and which k and d would fit where they are configured; "" if they are not."""
    share = _figure(roster.hub, "put_off")
    if not 0 < share <= 1:
        return ""
    fitting = [f"--{name} {count}" for name in ("every", "delay") if (count := _count(roster.hub, f"fitting_{name}"))]
    remedy = f": {' and '.join(fitting)} would fit, or auto" if fitting else ""
    return f"{_percent(share)} of the offers put off, because those before had not landed{remedy}"


def full_disk(roster: Roster) -> str:
    """Say that the broker's disk is full, and what waits for it; "" if it is not."""
    if roster.hub.get("waits_for_room"):
        return "the broker's disk is full: nothing is released until there is room"
    if roster.hub.get("unsaved"):
        return "the broker's disk is full: no checkpoint is written until there is room"
    return ""


def _worse(roster: Roster) -> str:
    """Say that the last evaluation is far worse than the best; "" where it is not."""
    best, loss = _figure(roster.hub, "best_loss"), roster.scores.get("loss", math.nan)
    if not (math.isfinite(best) and best > 0 and loss >= best):
        return ""
    version = _count(roster.hub, "best_version")
    times = format_count(loss / best) if math.isfinite(loss / best) else "many"
    return f" ({times} times the best, {format_number(best, 4)} at version {version}: is the learning rate too high?)"


def roster_gain(roster: Roster) -> str:
    """Say how much sooner one more PC would reach a loss, and the last one does; "" where nodes share no deltas."""
    count, what = len(roster.members), "PC"
    if "pipelines" in roster.hub:
        count, what = _count(roster.hub, "pipelines"), "pipeline"
    if roster.version < 0 or roster.exchange or not count or (count < 2 and "gain_next" not in roster.hub):
        return ""
    more, last = _figure(roster.hub, "gain_next"), _figure(roster.hub, "gain_last")
    if not 0 <= more <= 1:
        return f"what another {what} would add is not known yet"
    another = _ordinal(count + 1)
    article = "an" if another.startswith(("e", "8")) or another in ("11th", "18th") else "a"
    text = f"{article} {another} {what} would add {_percent(more, 'about ')}"
    text += f"; the {_ordinal(count)} adds {_percent(last)}" if 0 <= last <= 1 else ""
    rho = _figure(roster.hub, "rho")
    return text + (f" (correlation of deltas {rho:.2f})" if 0 <= rho <= 1 else "")


def _ordinal(number: int) -> str:
    if number < len(ORDINALS):
        return ORDINALS[number]
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _percent(part: float, about: str = "") -> str:
    return f"{about}{100 * part:.0f} %" if part >= 0.01 else "less than 1 %"


def _progress(roster: Roster) -> str:
    """How much of the data is done, and how long the rest takes: at the nodes' speed of now, else at that so far."""
    done, total = roster.units_done, roster.units_total
    if not 0 < done <= total:
        return ""
    part = done / total
    percent = f" ({int(100 * part)} %"
    speed = sum(_figures(roster, "samples_per_second"))
    a_unit = roster.samples / done / speed if roster.samples and speed > 0 else roster.seconds / done
    left = a_unit * (total - done)
    return percent + (f", about {format_seconds(left)} left)" if done < total else ")")


def _version(roster: Roster) -> str:
    """The version; before the first, whether anybody is there (nodes may be starting, awaited, or training apart)."""
    if roster.version >= 0:
        return f"version {roster.version}"
    return "nothing is shared yet" if roster.members else "waiting for the first node"


def roster_line(roster: Roster) -> str:
    """Return the run and the sums over its members in one plain line."""
    if not roster.members:
        return visible(roster_headline(roster))
    losses, rates = _figures(roster, "loss"), _figures(roster, "samples_per_second")
    sent, received = sum(_figures(roster, "bytes_sent")), sum(_figures(roster, "bytes_received"))
    line = f"{roster_headline(roster)} · {format_count(sum(rates))}/s"
    if losses:
        line += f" · loss {format_number(sum(losses) / len(losses))}"
    line += f" · up {format_bytes(sent)}, down {format_bytes(received)}"
    said = [f"{name} {text}" for name, text in _remarks(roster) if text]
    return visible(line + (f" · {'; '.join(said)}" if said else ""))


def _remarks(roster: Roster, with_state: bool = False) -> list[tuple[str, str]]:
    """Return of each member its name, and what it waits for and what of its training is not as the run needs it.

    with_state: and how it stands with the hub, if it is not live.
    """
    names = _names(roster)
    called = {_word(member, "peer"): name for name, member in zip(names, roster.members, strict=True)}
    remarks = []
    for name, member in zip(names, roster.members, strict=True):
        said = [f"waits for {_word(member, 'waiting')}"] if member.get("waiting") else []
        if with_state and not said and member.get("state") != "live":
            said.append(_word(member, "state"))
        if other := _word(member, "same_batches_as"):
            said.append(f"trains on the same batches as {called.get(other, _cut(other, NAME_LENGTH))}")
        if member.get("takes_no_units"):
            said.append("takes no data units")
        if pipeline := _word(member, "pipeline"):
            said.append(f"pipeline {pipeline}, parts {_word(member, 'parts')}")
        remarks.append((name, "; ".join(said)))
    return remarks


def roster_legend(roster: Roster) -> str:
    """Say what the columns of `roster_table` are, and the letters of the headline."""
    parts = ["age: steps from an offer to its aggregate", "stale: versions that the last delta was behind"]
    parts.append("up, down: bytes sent and received")
    if any("link_rate" in member for member in roster.members):
        parts.append("link: rate of its port")
    if len(roster.members) > 1 and roster.evaluator:
        parts.append("*: scores the shared model")
    if roster.every and not roster.exchange:
        parts.append("k: steps between two offers; d: steps until their aggregate is applied")
    return "; ".join(parts)


class RosterTable:
    """A row for each member. age: steps from offer to application; stale: versions its last delta was behind.

    link: the rate of its port, as it said or as it was measured; the column is there once one is known.  device: on
    what it trains, without the maker's name; where the terminal is narrower than WIDE, it stands below the rows.

    Long names are cut short, so that on 80 columns no figure is.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def __rich_console__(self, console: rich_console.Console, options: rich_console.ConsoleOptions) -> RenderResult:
        roster, wide = self._roster, options.max_width >= WIDE
        measured = any("link_rate" in member for member in roster.members)
        no_room = measured and not wide  # for what is said of a node besides figures, and for a long name
        remarks, devices = _remarks(roster, with_state=True), [_device(member) for member in roster.members]
        columns = [column for column in COLUMNS if measured or column[0] != "link"]
        table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
        table.add_column("node", no_wrap=True, overflow="ellipsis")
        if with_device := wide and any(devices):
            table.add_column("device", no_wrap=True)
        for title, _, _ in columns:
            table.add_column(title, justify="right", no_wrap=True)
        if not no_room:
            table.add_column("", overflow="fold")
        names = _names(roster, SHORT_NAME if no_room else NAME_LENGTH)
        for name, device, (_, remark), member in zip(names, devices, remarks, roster.members, strict=True):
            evaluates = member.get("peer") == roster.evaluator and len(roster.members) > 1
            table.add_row(
                name + (" *" if evaluates else ""),
                *([device or NOTHING] if with_device else []),
                *(form(_figure(member, field)) for _, field, form in columns),
                *([] if no_room else [remark]),
            )
        yield table
        if no_room:
            yield from (Text(f"{name}: {remark}") for name, remark in remarks if remark)
        if not wide and any(devices):
            by_device: dict[str, list[str]] = {}
            for name, device in zip(_names(roster), devices, strict=True):
                by_device.setdefault(device, []).append(name)
            said = (f"{device}: {', '.join(names)}" for device, names in by_device.items() if device)
            yield Text("  ".join(said))


def _device(member: Member) -> str:
    """On what a member trains, without the maker's name, cut short."""
    device = _word(member, "device")
    for maker in MAKERS:
        device = device.replace(maker, "")
    return _cut(device, NAME_LENGTH)


def _names(roster: Roster, most: int = NAME_LENGTH) -> list[str]:
    """The members' names, cut short; those that several have (nodes of one PC) with the hub's numbers behind them."""
    names = [_word(member, "name") for member in roster.members]
    numbers = ["#" + _word(member, "peer").rpartition("#")[2] for member in roster.members]
    return [
        _cut(name, most - len(number)) + number if names.count(name) > 1 else _cut(name, most)
        for name, number in zip(names, numbers, strict=True)
    ]


def _cut(name: str, length: int) -> str:
    return name if len(name) <= length else name[: max(0, length - 1)] + "…"


def _whole(value: float) -> str:
    """A whole number; as a count (3.4 T) where that would fill the screen."""
    return format_number(value, 0) if abs(value) < MOST_DIGITS else format_count(value)


COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("step", "step", _whole),
    ("samples/s", "samples_per_second", format_count),
    ("loss", "loss", format_number),
    ("age", "age_steps", _whole),
    ("stale", "staleness", _whole),
    ("up", "bytes_sent", format_bytes),
    ("down", "bytes_received", format_bytes),
    ("link", "link_rate", format_rate),
)
"""Of the figures in a table of members: its title, its name in a member, and how it is written."""


def table_of(columns: Sequence[str], rows: Iterable[Sequence[str]], left: str | None = None, **options: Any) -> Table:
    """Return a table with all columns flush right but the one named `left`. options: of rich's Table."""
    table = Table(**{"title_justify": "left", "box": None, "pad_edge": False} | options)
    for column in columns:
        table.add_column(column, justify="left" if column == left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def figures_table(rows: Mapping[str, str], title: str | None = None) -> Table:
    return table_of(("", ""), rows.items(), left="", show_header=False, title=title)


# ---------------------------------------------------------------------- alive


class RosterSource(Protocol):
    """Who knows how a run stands."""

    @property
    def roster(self) -> Roster | None:
        """The newest roster, None while there is none."""


class Display:
    """Shows the roster of `source`, again and again, until the block ends; then once more, to stay.

    source: read in the display's thread.  title: what the run is.
    stream: standard output by default; a terminal gets a live table, anything else a line every `plain_seconds`.
    """

    def __init__(
        self,
        source: RosterSource,
        title: str,
        *,
        stream: IO[str] | None = None,
        plain_seconds: float = PLAIN_SECONDS,
    ) -> None:
        self.source, self.title, self.plain_seconds = source, title, plain_seconds
        self.console = Terminal(stream)
        self._said: deque[str] = deque()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zmqtrain-display", daemon=True)
        self._live: Live | None = None

    def note(self) -> str:
        """Return what makes the last report old, "" if nothing does; shown above it, and in place of the plain line."""
        return ""

    def say(self, text: str) -> None:
        """Print a line above the table soon; may be called in any thread, and in a signal handler."""
        self._said.append(text)

    def __enter__(self) -> Display:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        if self.console.is_terminal:
            self._live = Live(self._render(), console=self.console, auto_refresh=False)
            self._live.start()
        self._thread.start()

    def close(self) -> None:
        """Show the last state once more and end; nothing if it was never started, or is closed already."""
        if self._thread.ident is None or self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(2.0)
        self._say_all()
        if self._live is not None:
            self._live.update(self._render(), refresh=True)
            self._live.stop()
        else:
            self._print_line()

    def _run(self) -> None:
        waited, idle = 0.0, False
        while not self._ended.wait(REDRAW_SECONDS):
            self._say_all()
            waited += REDRAW_SECONDS
            if self._live is not None:
                self._live.update(self._render(), refresh=True)
            elif waited >= self.plain_seconds and (self.note() or self.source.roster is not None):
                waited, idle = 0.0, self._print_line(idle)

    def _print_line(self, idle: bool = False) -> bool:
        """Print the note, or else the roster; return whether nobody is there. idle: that was so, and is no news."""
        if note := self.note():
            self._print(note)
        elif (roster := self.source.roster) is not None:
            if roster.members or not idle:
                self._print(roster_line(roster))
            return not roster.members
        return False

    def _say_all(self) -> None:
        while self._said:
            self._print(self._said.popleft())

    def _print(self, text: str) -> None:
        if self._live is not None:
            self.console.print(text)
        else:
            print(visible(text), file=self.console.file, flush=True)

    def _render(self) -> RenderableType:
        roster = self.source.roster
        title: RenderableType = Text(visible(self.title), style="bold")
        if note := self.note():
            title = Group(title, Text(visible(note), style="yellow"), Text("the hub's last report:", style="dim"))
        if roster is None:
            return Group(title, Text("waiting for the first report", style="dim"))
        return Group(title, roster_headline(roster, "\n"), RosterTable(roster))


def log_to_stderr(verbose: bool, log_file: Path | None = None) -> None:
    """Have zmqtrain's log written to stderr (and to `log_file`); verbose: with details.

    Raises ConfigError for a file that cannot be written.
    """
    logger = logging.getLogger("zmqtrain")
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    logger.propagate = False
    handlers: list[logging.Handler] = [StderrHandler()]
    if log_file is not None:
        try:
            handlers.append(logging.FileHandler(log_file, encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot write the log file {log_file}: {error.strerror}; name another one") from error
    for handler in handlers:
        handler.setFormatter(VisibleFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.handlers = handlers
