"""What the page shows of a run: figures in words, rows of tables, lines and events, as one JSON object a tick.

Rule 1: all texts are made here, bounded and printable; the browser shows them as text and computes nothing from them.
Rule 2: every tick has one object with what has changed since the last one, the same for all browsers; a browser that
has missed a tick is given all (`whole`).  Rule 3: what is kept is bounded, however long the run is.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from zmqtrain.page.lines import MOST_POINTS, Line
from zmqtrain.protocol.messages import MAX_NAME, MAX_SENTENCE, printable

MOST_EVENTS, MOST_ROWS, MOST_LINES = 2000, 256, 1024
ROUTINE, MOST_ROUTINE = ("released", "checkpoint"), 500
"""Events of which there is one a second: above so many, every second one is left out, never the first or the newest.
They push no other event out."""
ALL_POINTS = 8192
"""All nodes' lines together have about so many points: a browser draws them each second."""
FEWEST_POINTS = 64

Tone = Literal["", "good", "warning", "bad"]
LineKind = Literal["node", "evaluation", "samples"]
"""A node's training loss; the shared parameters' held-out loss; the samples of the run. All against seconds."""


@dataclass(frozen=True)
class Tile:
    """One large figure. hint: what it means, for who asks."""

    name: str
    figure: str
    below: str = ""
    hint: str = ""
    tone: Tone = ""


@dataclass
class Row:
    """A node in the table. key: of its colour and its lines; cells: as the columns; chips: what is not as usual.

    state: "live", "waiting", "quarantined", "lost" or "left"; text: why it is not live, or what it waits for.
    """

    key: str
    name: str
    state: str = "waiting"
    text: str = ""
    cells: Sequence[str] = ()
    chips: Sequence[str] = ()

    @property
    def is_gone(self) -> bool:
        return self.state in ("lost", "left")

    def as_plain(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "name": printable(self.name, MAX_NAME),
            "state": self.state,
            "text": printable(self.text, MAX_SENTENCE),
            "cells": [printable(cell) for cell in self.cells],
            "chips": [printable(chip) for chip in self.chips],
        }


@dataclass
class Curve:
    """A line, whose it is, and by how many seconds its clock is behind the run's."""

    kind: LineKind
    key: str
    name: str
    line: Line
    shift: float = 0.0

    def facts(self) -> dict[str, Any]:
        name = printable(self.name, MAX_NAME)
        return {"kind": self.kind, "key": self.key, "name": name, "shift": round(self.shift, 2)}


@dataclass
class Heading:
    """What is looked at. state: "live", "lost" (the broker is not there now), "reading", "recorded" or "ended"."""

    title: str = ""
    run: str = ""
    source: str = ""
    state: str = "reading"
    note: str = ""


@dataclass
class Picture:
    """The page of one run; hold `lock` to read or change it."""

    heading: Heading = field(default_factory=Heading)
    tiles: Sequence[Tile] = ()
    sentences: Sequence[str] = ()
    columns: Sequence[tuple[str, str]] = ()
    """Of the table of nodes: title and meaning."""
    rows: dict[str, Row] = field(default_factory=dict)
    hub: Sequence[tuple[str, str]] = ()
    report: Mapping[str, Any] | None = None
    """The newest report of the broker, for its metrics; None while it is not heard."""

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.tick = 0
        self._curves: dict[str, Curve] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)
        self._routine: list[dict[str, Any]] = []
        self._count = self._told = 0
        self._cleared = False
        self._pipelines: Sequence[Mapping[str, Any]] = ()
        self._pipelines_told = True

    # ------------------------------------------------------------------ changes

    def clear(self) -> None:
        """Begin again with another run."""
        self._curves.clear()
        self._events.clear()
        self._routine.clear()
        self.rows.clear()
        self._pipelines = ()
        self._cleared = True

    def curve(self, kind: LineKind, key: str, name: str, number: int = 0) -> Curve | None:
        """Return a curve, made if it is new; None if there are too many. number: of the life of a node."""
        identity = f"{kind} {key} {number}"
        if (curve := self._curves.get(identity)) is None and len(self._curves) < MOST_LINES:
            curve = self._curves[identity] = Curve(kind, key, name, Line(MOST_POINTS))
            self._share_points()
        return curve

    def remove_curve(self, kind: LineKind, key: str, number: int = 0) -> None:
        """Remove a curve, if there is one: all browsers are given the whole again."""
        if self._curves.pop(f"{kind} {key} {number}", None) is not None:
            self._cleared = True

    def _share_points(self) -> None:
        of_nodes = [curve.line for curve in self._curves.values() if curve.kind == "node"]
        most = min(MOST_POINTS, max(FEWEST_POINTS, ALL_POINTS // max(1, len(of_nodes))))
        for line in of_nodes:
            if line.most != most:
                line.most = most
                line.thin(most)

    def add_event(self, seconds: float, what: str, node: str, text: str, key: str = "") -> None:
        """key: of the node's row, for its colour."""
        self._count += 1
        event = {
            "number": self._count, "seconds": round(seconds, 2), "what": printable(what, MAX_NAME),
            "node": printable(node, MAX_NAME), "key": key, "text": printable(text, MAX_SENTENCE),
        }  # fmt: skip
        if what not in ROUTINE:
            self._events.append(event)
            return
        self._routine.append(event)
        if len(self._routine) > MOST_ROUTINE:
            del self._routine[1::2]  # an odd number: the newest one stays

    def _events_after(self, number: int) -> list[dict[str, Any]]:
        found = [event for event in (*self._events, *self._routine) if event["number"] > number]
        return sorted(found, key=lambda event: int(event["number"]))

    def set_pipelines(self, charts: Sequence[Mapping[str, Any]]) -> None:
        """Show these charts of pipelines (see `gantt`); they are sent when they change."""
        self._pipelines, self._pipelines_told = charts, False

    def make_room(self) -> None:
        """Leave out rows of nodes that are gone, those that went first, where there are too many."""
        gone = [key for key, row in self.rows.items() if row.is_gone]
        for key in islice(gone, max(0, len(self.rows) - MOST_ROWS)):
            del self.rows[key]

    # ------------------------------------------------------------------ as JSON

    def take_change(self) -> bytes:
        """Begin the next tick; return what has changed in the last one, or all if another run has begun."""
        with self.lock:
            self.tick += 1
            changes = {identity: curve.line.take_change() for identity, curve in self._curves.items()}
            new = self._events_after(self._told)
            self._told = self._count
            if self._cleared:
                self._cleared = False
                return self.whole()
            lines: dict[str, dict[str, Any]] = {}
            for identity, change in changes.items():
                curve = self._curves[identity]
                lines[identity] = {"shift": round(curve.shift, 2)}
                if change is not None:
                    first, (times, values) = change
                    lines[identity] = {**curve.facts(), "first": first, "times": times, "values": values}
            pipelines = {} if self._pipelines_told else {"pipelines": self._pipelines}
            self._pipelines_told = True
            return _to_json({**self._now(), "lines": lines, "events": new, **pipelines})

    def whole(self) -> bytes:
        """Return all that there is, for a browser that has nothing."""
        with self.lock:
            lines = {}
            for identity, curve in self._curves.items():
                times, values = curve.line.points()
                lines[identity] = {**curve.facts(), "first": 0, "times": times, "values": values}
            whole = {**self._now(), "lines": lines, "events": self._events_after(0), "pipelines": self._pipelines}
            return _to_json({**whole, "whole": True})

    def _now(self) -> dict[str, Any]:
        heading = {name: printable(text, MAX_SENTENCE) for name, text in vars(self.heading).items()}
        return {
            "tick": self.tick,
            "heading": heading,
            "tiles": [{name: printable(text) for name, text in vars(tile).items()} for tile in self.tiles],
            "sentences": [printable(text, MAX_SENTENCE) for text in self.sentences],
            "columns": list(self.columns),
            "rows": [row.as_plain() for row in self.rows.values()],
            "hub": [[printable(name), printable(text, MAX_SENTENCE)] for name, text in self.hub],
        }


def _to_json(value: dict[str, Any]) -> bytes:
    """Return JSON in ASCII, of one line."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
