"""Draws the page of a running hub from its rosters: one a second, as every observer is sent them.

Rule 1: no clock and no socket: a roster says how long its run has lasted.
Rule 2: what a roster claims is its sender's: any figure and any text in it can be shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from typing import Any

from zmqtrain.cli.display import (
    NOTHING,
    format_bytes,
    format_count,
    format_number,
    format_rate,
    format_scores,
    format_seconds,
    plural,
    roster_gain,
)
from zmqtrain.core.settings import RunSettings
from zmqtrain.page.picture import Picture, Row, Tile
from zmqtrain.page.words import say_exchange, say_program, say_release
from zmqtrain.protocol.members import RUN_OVER
from zmqtrain.protocol.messages import MAX_NAME, MAX_SENTENCE, Roster, fields_of, printable

WINDOW_SECONDS = 10.0
"""Rates are measured over so long."""
REMEMBERED_EVENTS = 256
LEAVING = {"left": "left", "lost": "lost"}
COLUMNS = (
    ("steps/s", f"steps a second, over {WINDOW_SECONDS:.0f} s"),
    ("samples/s", "samples a second, as the node reports"),
    ("loss", "of its last batch"),
    ("of samples", "its share of all samples that nodes of this table have trained on"),
    ("up", "what it sends now, as a share of its port where the rate of that is known"),
    ("down", "what it receives now"),
    ("age", "steps from an offer to the aggregate that answers it"),
    ("stale", "versions that its last delta was behind"),
    (
        "refused",
        "its deltas that the hub has refused, and offers that it has put off because the last was not answered",
    ),
    ("heard", "how long ago the hub has heard of it"),
)
OF_NOW = ("steps/s", "samples/s", "up", "down", "heard")
"""Columns that a node that is gone has no figures for."""


def figure(facts: Mapping[str, Any], name: str) -> float:
    """Return a figure that a report has; NaN for one that it has not, or that is none."""
    value = facts.get(name, nan)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else nan


def _text(facts: Mapping[str, Any], name: str, most: int = MAX_SENTENCE) -> str:
    return printable(str(facts.get(name, "")), most)


def percent(part: float) -> str:
    """Return .123 as "12 %"; a dash where it is not known."""
    if not isfinite(part):
        return NOTHING
    return "<1 %" if 0 < part < 0.01 else f"{100 * part:.0f} %"


class Rate:
    """How fast a count grows, over the last WINDOW_SECONDS; NaN until that is known, or after it fell."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def take(self, seconds: float, count: float) -> float:
        """Add a count and return the rate."""
        seen = self._seen
        if seen and (count < seen[-1][1] or seconds < seen[-1][0]):  # a process that began again
            seen.clear()
        if isfinite(count) and (not seen or seconds > seen[-1][0]):
            seen.append((seconds, count))
        while len(seen) > 2 and seconds - seen[1][0] >= WINDOW_SECONDS:
            seen.popleft()
        if len(seen) < 2:
            return nan
        return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


class HubTable:
    """The rows of the table of the hub, from its reports: what it does now is over WINDOW_SECONDS."""

    def __init__(self) -> None:
        names = ("bytes_in", "bytes_out", "cpu_seconds", "version", "contributions")
        self._rates = {name: Rate() for name in names}

    def take(self, roster: Roster, seconds: float) -> list[tuple[str, str]]:
        """Take a report of this time and return the rows."""
        hub, rates = roster.hub, self._rates
        counts = {"version": float(roster.version), "contributions": float(roster.contributions)}
        speed = {name: rate.take(seconds, counts.get(name, figure(hub, name))) for name, rate in rates.items()}
        rate, saved = figure(hub, "port_rate"), figure(hub, "saved_version")
        late = [figure(member, "staleness") for member in roster.members]
        late = [one for one in late if isfinite(one)]
        rounds = NOTHING
        if speed["version"] > 0:
            each = speed["contributions"] / speed["version"]
            behind = f", {sum(late) / len(late):.1f} versions behind in the mean" if late else ""
            rounds = f"{speed['version']:.1f} a second, {plural(round(each, 1), 'delta')} each{behind}"
        figures = [
            ("port in", traffic(speed["bytes_in"], rate)),
            ("port out", traffic(speed["bytes_out"], rate)),
            ("processor", f"{percent(speed['cpu_seconds'])} of a core" if isfinite(speed["cpu_seconds"]) else NOTHING),
            ("memory", format_bytes(figure(hub, "memory_bytes"))),
            ("versions", rounds),
            ("deltas refused", format_count(figure(hub, "refused"))),
            ("checkpoint", f"version {saved:.0f}" if saved >= 0 else "none"),
            ("standby", _text(hub, "standby") or "none"),
        ]
        if plan := _text(hub, "plan"):
            figures.append(("chosen for", plan))
        if (share := figure(hub, "put_off")) > 0:
            figures.append(("offers put off", percent(share)))
        if outer := _text(hub, "outer"):
            figures.append(("outer optimizer", outer))
        if installed := _text(hub, "software"):
            figures.append(("nodes have", installed))
        if (turned_away := figure(hub, "turned_away")) > 0:
            figures.append(("turned away at its port", f"{format_count(turned_away)} in the last minute"))
        return figures


@dataclass
class _Known:
    """What is remembered of one node."""

    row: Row
    steps: Rate = field(default_factory=Rate)
    sent: Rate = field(default_factory=Rate)
    received: Rate = field(default_factory=Rate)
    samples: float = nan


class RosterFeed:
    """Takes the rosters of one hub into a picture."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self._run = ""
        self._forget_run()

    def _forget_run(self) -> None:
        self._nodes: dict[str, _Known] = {}  # by the name in rosters
        self._rows_made = 0
        self._events_seen: deque[tuple[float, float]] = deque(maxlen=REMEMBERED_EVENTS)
        self._offset, self._last_seconds = 0.0, -inf
        self._hub = HubTable()
        self._before: Roster | None = None
        self._absent = False

    def hub_gone(self, text: str) -> None:
        """The connection to the hub is lost. text: why, as far as it is known."""
        over = RUN_OVER in text
        with self.picture.lock:
            self.picture.report = None
            self.picture.heading.state = "ended" if over else "lost"
            self.picture.heading.note = (
                "the run is over; one that begins at this address is shown here"
                if over
                else f"the broker is away ({text}); the page looks for it"
            )
            if not self._absent:
                self._absent = True
                seconds = max(0.0, self._last_seconds + self._offset)
                self._add(seconds, "run ended" if over else "broker lost", "", text)

    def take(self, roster: Roster, run: str, settings: RunSettings) -> None:
        """Show a roster of this run."""
        with self.picture.lock:
            self.picture.report = fields_of(roster)
            if run != self._run:
                if self._run:
                    self.picture.clear()
                self._forget_run()
                self._run = run
            seconds = self._seconds(roster)
            if self._absent:
                self._absent = False
                self._nodes = {f"({name})": node for name, node in self._nodes.items()}  # all come under new names
                self._add(seconds, "broker found", "", "the broker answers again")
            self.picture.heading.state, self.picture.heading.note = "live", _warning(roster)
            if roster.hub.get("ending"):
                self.picture.heading.note = "an operator ends the run: nodes send what they have computed"
            self.picture.heading.run, self.picture.heading.title = printable(run), say_program(settings.to_dict())
            leaving = self._take_events(roster)
            self._take_members(roster, seconds, leaving)
            self._take_versions(roster, seconds)
            self._show(roster, settings, seconds)
            self._before = roster

    def _seconds(self, roster: Roster) -> float:
        """Return the time on the page's axis: it never goes back, also where a restarted hub knows less."""
        seconds = roster.seconds if isfinite(roster.seconds) else 0.0
        if seconds + 1.0 < self._last_seconds:
            self._offset += self._last_seconds - seconds
        self._last_seconds = max(seconds, self._last_seconds) if seconds + 1.0 >= self._last_seconds else seconds
        return seconds + self._offset

    # ------------------------------------------------------------------ events

    def _add(self, seconds: float, what: str, node: str, text: str) -> None:
        key = next((one.row.key for one in self._nodes.values() if one.row.name == node), "")
        self.picture.add_event(seconds, what, node, text, key)

    def _take_events(self, roster: Roster) -> dict[str, tuple[str, str]]:
        """Take what is new of the hub's events; return by node how and why it left."""
        leaving = {}
        for event in roster.events:
            what, node, text = _text(event, "what", MAX_NAME), _text(event, "node"), _text(event, "text")
            if what in LEAVING:
                leaving[node] = LEAVING[what], text
            mark = figure(event, "number"), figure(event, "seconds")
            if all(map(isfinite, mark)) and mark not in self._events_seen:
                self._events_seen.append(mark)
                self._add(mark[1] + self._offset, what, node, text)
        return leaving

    def _take_versions(self, roster: Roster, seconds: float) -> None:
        """Add what follows from two rosters: versions that were released, a checkpoint, a standby, a term."""
        before = self._before
        if before is None:
            return
        if 0 <= before.version < roster.version:
            count, deltas = roster.version - before.version, max(0, roster.contributions - before.contributions)
            which = f"version {roster.version}" if count == 1 else f"versions {before.version + 1} to {roster.version}"
            self._add(seconds, "released", "", f"{which}, of {plural(deltas, 'delta')}")
        for what, text in hub_events(before.hub, roster.hub):
            self._add(seconds, what, "", text)

    # ------------------------------------------------------------------ nodes

    def _take_members(self, roster: Roster, seconds: float, leaving: Mapping[str, tuple[str, str]]) -> None:
        here = set()
        for member in roster.members:
            called = _text(member, "peer") or _text(member, "name")
            here.add(called)
            if called not in self._nodes:
                self._nodes[called] = self._meet(_text(member, "name", MAX_NAME) or "?")
            self._take_member(self._nodes[called], member, seconds)
        for called, node in self._nodes.items():
            if called in here or node.row.is_gone:
                continue
            what, text = leaving.get(node.row.name) or leaving.get(called) or ("", "")
            if not what and called.startswith("("):  # the hub was away
                node.row.state, node.row.text = "waiting", "the broker has not heard of it since it is back"
                continue
            node.row.state, node.row.text = what or "lost", f"{what or 'gone'} at {format_seconds(seconds)}: {text}"
            node.row.chips = ()
            node.row.cells = [
                NOTHING if title in OF_NOW else cell for (title, _), cell in zip(COLUMNS, node.row.cells, strict=False)
            ]
        total = sum(one.samples for one in self._nodes.values() if isfinite(one.samples))
        for one in self._nodes.values():
            cells = list(one.row.cells)
            if len(cells) == len(COLUMNS):
                cells[3] = percent(one.samples / total) if total else NOTHING
                one.row.cells = cells
        self.picture.make_room()
        for called in [called for called, node in self._nodes.items() if node.row.key not in self.picture.rows]:
            del self._nodes[called]

    def _meet(self, name: str) -> _Known:
        """Return a node that has joined: one of that name that is not here, if there is one, else a new one."""
        for called, node in list(self._nodes.items()):
            if node.row.name == name and (node.row.is_gone or called.startswith("(")):
                del self._nodes[called]
                return node
        self._rows_made += 1
        row = Row(str(self._rows_made - 1), name)
        self.picture.rows[row.key] = row
        return _Known(row)

    def _take_member(self, node: _Known, member: Mapping[str, Any], seconds: float) -> None:
        row, state = node.row, _text(member, "state")
        waiting = _text(member, "waiting")
        row.state = state if state in ("live", "quarantined") else "waiting"
        row.text = f"waits for {waiting}" if waiting else "" if row.state == "live" else state
        loss, samples = figure(member, "loss"), figure(member, "samples")
        node.samples = samples if isfinite(samples) else node.samples
        rate = figure(member, "link_rate")
        sent = node.sent.take(seconds, figure(member, "bytes_sent"))
        received = node.received.take(seconds, figure(member, "bytes_received"))
        refused, put_off = figure(member, "refused"), figure(member, "put_off")
        both = f"{format_count(refused)} / {format_count(put_off)}" if isfinite(put_off) else format_count(refused)
        row.cells = [
            format_number(node.steps.take(seconds, figure(member, "step")), 1),
            format_count(figure(member, "samples_per_second")),
            format_number(loss),
            NOTHING,
            traffic(sent, rate),
            traffic(received, rate),
            format_number(figure(member, "age_steps"), 0),
            format_number(figure(member, "staleness"), 0),
            both,
            f"{format_number(figure(member, 'silent'), 1)} s",
        ]
        row.chips = chips_of(member)
        if (curve := self.picture.curve("node", row.key, row.name)) is not None:
            curve.line.add(seconds, loss)

    # ------------------------------------------------------------------ figures

    def _show(self, roster: Roster, settings: RunSettings, seconds: float) -> None:
        picture, hub = self.picture, roster.hub
        picture.columns = COLUMNS
        if (curve := picture.curve("samples", "", "samples")) is not None:
            curve.line.add(seconds, roster.samples)
        scored = roster.scores.get("loss", nan)
        fresh = self._before is None or roster.score_version != self._before.score_version
        if fresh and (curve := picture.curve("evaluation", "", "shared parameters, held-out")) is not None:
            curve.line.add(seconds, scored)
        codec, down = _text(hub, "codec"), _text(hub, "broadcast_codec")
        live = sum(member.get("state") == "live" for member in roster.members)
        picture.tiles = _tiles(roster, list(picture.rows.values()), codec)
        gain = say_gain(roster)
        if roster.exchange:
            texts = [f"All nodes make each step together, by {printable(roster.exchange.partition(',')[0])}."]
        else:
            exchange = say_exchange(roster.every, roster.delay, codec, down)
            texts = [exchange, say_release(settings.release, live), gain]
        picture.sentences = [text for text in texts if text]
        picture.hub = self._hub.take(roster, seconds)


def hub_events(before: Mapping[str, Any], hub: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return kind and text of what has happened at the hub between two reports: a checkpoint, a standby, a takeover."""
    events = []
    if figure(hub, "saved_version") > max(-1.0, figure(before, "saved_version")):
        events.append(("checkpoint", f"version {figure(hub, 'saved_version'):.0f} is saved"))
    if (standby := _text(hub, "standby")) and standby != before.get("standby"):
        events.append(("standby", f"the standby at {standby} is in step"))
    if figure(hub, "term") > figure(before, "term"):
        events.append(("takeover", f"another broker has taken over: term {figure(hub, 'term'):.0f}"))
    return events


def say_gain(roster: Roster) -> str:
    """Return what one more PC would add, as a sentence; "" where that says nothing."""
    gain = roster_gain(roster)
    return f"{gain[:1].upper()}{gain[1:]}." if gain else ""


def traffic(rate: float, port: float) -> str:
    """Return a rate of bytes, and which share of a port that is."""
    if not isfinite(rate):
        return NOTHING
    return f"{format_rate(rate)} · {percent(rate / port)}" if port > 0 else format_rate(rate)


def chips_of(member: Mapping[str, Any]) -> list[str]:
    """Return what differs at a node from the others, as its report says."""
    chips = []
    if other := _text(member, "software"):
        chips.append(f"has {other}")
    if member.get("other_data"):
        chips.append("other data")
    if other := _text(member, "same_batches_as", MAX_NAME):
        chips.append(f"same batches as {other}")
    if member.get("takes_no_units"):
        chips.append("takes no data units")
    return chips


def _warning(roster: Roster) -> str:
    if roster.hub.get("waits_for_room"):
        return "the broker's disk is full: nothing is released until there is room"
    if roster.hub.get("unsaved"):
        return "the broker's disk is full: no checkpoint is written until there is room"
    return ""


def _tiles(roster: Roster, rows: Iterable[Row], codec: str) -> list[Tile]:
    speeds = [value for member in roster.members if isfinite(value := figure(member, "samples_per_second"))]
    gone = sum(row.state == "lost" for row in rows)
    losses = [value for member in roster.members if isfinite(value := figure(member, "loss"))]
    version = f"version {roster.version:,}" if roster.version >= 0 else "nothing is shared yet"
    units = f" · {percent(roster.units_done / roster.units_total)} of the data" if roster.units_total > 0 else ""
    nodes = Tile(
        "nodes", f"{len(roster.members)}", plural(gone, "lost", "lost") if gone else "all here",
        "nodes that train now, and those that were lost", "warning" if gone else "",
    )  # fmt: skip
    held_out = roster.scores.get("loss", nan)
    others = {name: value for name, value in roster.scores.items() if name != "loss"}
    if isfinite(held_out):
        said = format_scores(others) or f"version {roster.score_version:,}"
        loss = Tile("held-out loss", format_number(held_out, 4), said, "of the shared parameters, as evaluated last")
    else:
        mean = sum(losses) / len(losses) if losses else nan
        loss = Tile("training loss", format_number(mean), "mean of the nodes", "of each node's last batch")
    tiles = [
        Tile("running for", format_seconds(roster.seconds), version + units),
        nodes,
        loss,
        speed_tile(speeds),
        Tile(
            "samples/s", format_count(sum(speeds)), f"{format_count(roster.samples)} in the model", "all nodes together"
        ),
    ]
    if roster.every and not roster.exchange:
        tiles.append(Tile("k / d", f"{roster.every} / {roster.delay}", codec, "steps between offers / until applied"))
    return tiles


def speed_tile(speeds: list[float]) -> Tile:
    """Return how many times as many samples a second all nodes compute as one of them does."""
    hint = "samples a second of all nodes over those of the fastest node alone, and over those of the slowest"
    fastest, slowest = max(speeds, default=0.0), min(speeds, default=0.0)
    if slowest <= 0:
        return Tile("speed-up", NOTHING, "over one node", hint)
    whole = sum(speeds)
    return Tile("speed-up", f"{whole / fastest:.2f}×", f"over one · {whole / slowest:.2f}× slowest", hint)
