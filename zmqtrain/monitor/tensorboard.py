"""Scalars of a run for TensorBoard, written from the broker's reports.

Rule 1: nobody who trains or serves waits: at a broker and at a node a thread of its own looks at the newest report once
a second, and others are skipped.  The page, which does neither, writes each report when it is read.
Rule 2: the step of a node's scalars is its own number of steps, that of the run's scalars the version.
Rule 3: a disk that takes no more costs the rest of the scalars and a line in the log, never the run.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.installed import how_to_install
from zmqtrain.monitor.metrics import Report, figure_of, node_labels
from zmqtrain.protocol.messages import MAX_NAME, Roster, fields_of, printable

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
RUN_SCALARS = {
    "run/samples": "samples",
    "run/deltas": "contributions",
    "run/every": "every",
    "run/delay": "delay",
    "run/seconds": "seconds",
}
"""Scalar of the run: its name in a report."""
HUB_SCALARS = {
    "hub/deltas_refused": "refused",
    "hub/bytes_received": "bytes_in",
    "hub/bytes_sent": "bytes_out",
    "hub/noise_scale": "noise",
    "hub/delta_correlation": "rho",
    "hub/next_node_gain": "gain_next",
}
"""Scalar of the hub: its name in the `hub` of a report."""
NODE_SCALARS = {
    "loss": "loss",
    "samples_per_second": "samples_per_second",
    "age_steps": "age_steps",
    "staleness": "staleness",
    "bytes_sent": "bytes_sent",
    "bytes_received": "bytes_received",
}
"""Scalar of each node, as nodes/NAME/loss: its name in a member of a report."""


class ReportSource(Protocol):
    """Who has the newest report of a run."""

    @property
    def roster(self) -> Roster | None:
        """The newest report, None while there is none."""


def _check(folder: Path) -> Any:
    """Make the folder if it is not there; return tensorboardX's writer. Raises ConfigError if one of them cannot be."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            f"--tensorboard needs tensorboardX, which is not installed. Type:  {how_to_install('tensorboard')}"
        ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write in {folder} (--tensorboard): {error.strerror}") from error
    return SummaryWriter


class ScalarWriter:
    """Writes reports as scalars into a folder that TensorBoard reads.

    folder: made if it is not there.  node: the scalars of this node and the evaluations alone are written; "": all.
    began: the time of day at which the run's seconds begin; None: as the first report says, which is of now.
    Raises ConfigError where tensorboardX is not installed, or nothing can be written in the folder.
    """

    def __init__(self, folder: Path, began: float | None = None) -> None:
        writer = _check(folder)
        try:
            self._writer: Any = writer(str(folder), flush_secs=5)
        except OSError as error:
            raise ConfigError(f"cannot write in {folder} (--tensorboard): {error.strerror}") from error
        self.folder, self.node = folder, ""
        self._steps: dict[str, int] = {}  # by node, the step that was written last
        self._version = self._score_version = -1
        self._began = began

    def write(self, report: Report) -> None:
        """Write what is new in a report; a report that was written before adds nothing."""
        seconds = float(report["seconds"])
        self._began = time.time() - seconds if self._began is None else self._began
        wall = self._began + seconds
        version, scored = int(report.get("version", -1)), int(report.get("score_version", -1))
        if scored not in (-1, self._score_version):
            self._score_version = scored
            self._add({f"held-out/{name}": name for name in report["scores"]}, report["scores"], scored, wall)
        if version != self._version and not self.node:
            self._version = version
            self._add(RUN_SCALARS, report, version, wall)
            self._add(HUB_SCALARS, report.get("hub", {}), version, wall)
            rates = [figure_of(member.get("samples_per_second")) for member in report["members"]]
            total = {"rate": sum(rate for rate in rates if rate is not None)}
            self._add({"run/samples_per_second": "rate"}, total, version, wall)
        for name, member in zip(node_labels(report), report["members"], strict=True):
            step = int(member.get("step", -1))
            if step != self._steps.get(name, -1) and self.node in ("", member.get("name"), member.get("peer")):
                self._steps[name] = step
                self._add({f"nodes/{name}/{tag}": key for tag, key in NODE_SCALARS.items()}, member, step, wall)

    def _add(self, tags: Mapping[str, str], figures: Mapping[str, Any], step: int, wall: float) -> None:
        for tag, key in tags.items():
            if (figure := figure_of(figures.get(key))) is not None and math.isfinite(figure):
                self._writer.add_scalar(printable(tag, 2 * MAX_NAME), figure, step, wall)

    def close(self) -> None:
        """Write what is held, and close the file."""
        self._writer.close()


class ScalarThread:
    """Gives `writer` the reports of `source` until `close`; then the last one, and closes it."""

    def __init__(self, writer: ScalarWriter, source: ReportSource) -> None:
        self._writer, self._source = writer, source
        self._written: Roster | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zmqtrain-tensorboard", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ended.wait(LOOK_SECONDS):
                self._look()
            self._look()
            self._writer.close()
        except Exception as error:  # a writer that fails must not end a run
            _say_ended(self._writer.folder, error)

    def _look(self) -> None:
        roster = self._source.roster
        if roster is not None and roster is not self._written:
            self._written = roster
            self._writer.write(fields_of(roster))

    def close(self) -> None:
        """End; safe to call twice."""
        self._ended.set()
        self._thread.join(5.0)


class RunScalars:
    """The scalars of whichever runs a page shows: those of each run in a folder of its own, named by the run's id.

    Raises ConfigError as ScalarWriter does, before there is a run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run = ""
        self._writer: ScalarWriter | None = None
        self._ended = False
        _check(folder)

    def write(self, run: str, report: Report, began: float = math.nan) -> None:
        """Write what is new in a report of a run. began: the time of day at which its seconds begin, if that is known.

        Where that fails, the scalars end.
        """
        if self._ended:
            return
        try:
            if self._writer is None or run != self._run:
                self._close()
                self._run = run
                self._writer = ScalarWriter(self.folder / folder_name(run), began if math.isfinite(began) else None)
            self._writer.write(report)
        except Exception as error:  # a page without scalars is still a page
            self._ended = True
            _say_ended(self.folder, error)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def close(self) -> None:
        """Write what is held, and close the file; safe to call twice."""
        try:
            self._close()
        except Exception as error:
            _say_ended(self.folder, error)


def folder_name(run: str) -> str:
    """Return the name of a folder inside another one, whatever a run calls itself."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", printable(run, MAX_NAME)).lstrip(".") or "run"


def _say_ended(folder: Path, error: Exception) -> None:
    logger.error("the scalars in %s (--tensorboard) end here: %s", folder, error)
