"""Say on which machine a number was measured, how busy the machine was, and print and write the rows of a bench.

Rule 1: every bench prints its table and writes its JSON through this file, so that all results read alike.
Rule 2: nothing here imports jax, numpy or zmq: a version comes from the installed package's metadata.
Rule 3: a row is a flat mapping from column to value, with the unit in the column's name; None is an empty cell.
Source: Linux proc(5), /proc/stat and /proc/PID/stat.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = [
    "Row",
    "parse_rate",
    "parse_seeds",
    "format_rate",
    "describe_machine",
    "BusyMeter",
    "process_cpu_seconds",
    "print_table",
    "write_json",
    "read_lines",
    "append_line",
]

Row = Mapping[str, Any]
"""One line of a bench: column to value."""

RATE_UNITS = {"": 1.0, "bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
PACKAGES = ("pyzmq", "jax", "jaxlib", "numpy", "msgpack", "optax")


def parse_seeds(text: str) -> list[int]:
    """Return the seeds that a text names: how many, from 0 ("3"), or a list ("3,5", or "4," for one)."""
    if "," in text:
        return [int(seed) for seed in text.split(",") if seed]
    return list(range(int(text)))


def parse_rate(text: str | float) -> float:
    """Return a link's rate in bits per second: "1gbit", "100mbit", "2.5 Gbit/s", "1e9" or a number.

    Raises ValueError if the text is no rate, or not above zero.
    """
    written = str(text).strip().lower().removesuffix("/s")
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?) ?([kmg]?bit|)", written)
    try:
        rate = float(match[1]) * RATE_UNITS[match[2]] if match else 0.0
    except ValueError:
        rate = 0.0
    if not rate > 0.0:
        raise ValueError(f"a rate is written like 1gbit, 100mbit or 1e9 (bits per second), not {text!r}")
    return rate


def format_rate(bits_per_second: float) -> str:
    """Return a rate as `parse_rate` reads it, in the largest unit that leaves at least 1."""
    for unit in ("gbit", "mbit", "kbit"):
        if bits_per_second >= RATE_UNITS[unit]:
            return f"{bits_per_second / RATE_UNITS[unit]:g}{unit}"
    return f"{bits_per_second:g}bit"


def describe_machine() -> dict[str, Any]:
    """Return what a reader needs to judge the numbers: processor, cores, memory, kernel, Python, and package versions.

    A package that is not installed is None.
    """
    return {
        "cpu": _first_field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{package: _version_of(package) for package in PACKAGES},
    }


class BusyMeter:
    """Measure, over a with-block, the share of all the machine's cores that was busy, whoever used them.

    busy_share: 0 to 1; 1 says that every core was busy, and that what was measured meanwhile may be the machine's limit
    and not the network's.  busy_cores: the same as a number of cores.  seconds: how long the block took.
    All three are 0 until the block has ended; its resolution is one tick (10 ms).
    """

    def __init__(self) -> None:
        self.busy_share = 0.0
        self.busy_cores = 0.0
        self.seconds = 0.0

    def __enter__(self) -> BusyMeter:
        self._started = time.perf_counter()
        self._busy, self._total = _read_cpu_ticks()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        busy, total = _read_cpu_ticks()
        self.seconds = time.perf_counter() - self._started
        self.busy_share = (busy - self._busy) / max(1, total - self._total)
        self.busy_cores = self.busy_share * (os.cpu_count() or 1)


def process_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used, in user and kernel mode, with all its threads.

    Raises ProcessLookupError if there is no such process.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {pid}") from None
    fields = text.rpartition(")")[2].split()  # the name, in brackets, may hold spaces; the field after it is number 3
    user_ticks, kernel_ticks = int(fields[14 - 3]), int(fields[15 - 3])
    return (user_ticks + kernel_ticks) / os.sysconf("SC_CLK_TCK")


def print_table(rows: Sequence[Row], title: str = "") -> None:
    """Print rows as a table on standard output; the columns are those of all rows, in the order of first appearance."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(title=title or None, title_justify="left")
    for column in columns:
        is_number = all(isinstance(row.get(column), int | float | None) for row in rows)
        table.add_column(column, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*(_format_cell(row.get(column)) for column in columns))
    console = Console(markup=False)
    if not console.is_terminal:  # a file is as wide as the table
        console = Console(width=200, markup=False)
    console.print(table)


def write_json(path: str | Path, rows: Sequence[Row]) -> None:
    """Write `{"machine": ..., "rows": [...]}` to `path`."""
    document = {"machine": describe_machine(), "rows": [dict(row) for row in rows]}
    Path(path).write_text(json.dumps(document, indent=2) + "\n")


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def read_lines(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return what the lines of JSON of all files that exist say; a line that was cut off is passed over."""
    lines = []
    for file in files:
        for text in file.read_text().splitlines() if file.is_file() else ():
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                continue
    return lines


def append_line(file: Path, line: Mapping[str, Any]) -> None:
    """Write a line of JSON at the end of a file, after one that was cut off too; make the file if it is not there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab+") as opened:
        if size := opened.tell():
            opened.seek(size - 1)
        torn = size and opened.read(1) != b"\n"
        opened.write(b"\n" * bool(torn) + json.dumps(line).encode() + b"\n")


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _first_field(path: Path, name: str) -> str | None:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _read_cpu_ticks() -> tuple[int, int]:
    """Return (busy, total) ticks since boot, summed over all cores; waiting for a disk is not busy, steal is."""
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    busy = user + nice + system + irq + softirq + steal
    return busy, busy + idle + iowait
