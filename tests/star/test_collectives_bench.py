"""The bench of collectives on a small star: little data, for the rows alone; needs root, `ip` and `tc`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import collectives
import rivals
from collectives import Case, Group, main, measure
from rivals import LAUNCHED_TOGETHER, find_rivals
from star import Star


def run_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> list[dict[str, object]]:
    written = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["collectives.py", *arguments, "--json", str(written)])
    main()
    rows: list[dict[str, object]] = json.loads(written.read_text())["rows"]
    return rows


def test_a_row_of_each_algorithm_has_times_and_bytes_beside_its_formula(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    algorithms = ["naive", "ring", "hub"]
    small = ["--nodes", "2", "--megabytes", "0.2", "--repetitions", "1", "--no-rivals", "--algorithms", *algorithms]
    rows = run_bench(monkeypatch, tmp_path, *small)
    assert [(row["megabytes"], row["algorithm"]) for row in rows] == [
        (size, name) for size in (8e-6, 0.2) for name in algorithms
    ]
    for row in rows:
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("best_ms", "limit_ms", "cpu_s_per_gb"))
    assert all(row["all_sent_mb"] > row["all_formula_mb"] for row in rows)
    assert all(row["overhead"] < 0.05 for row in rows[3:])
    assert "10^6 bytes that each of 2 ranks has sent" in capsys.readouterr().out


@pytest.mark.nightly
def test_the_table_of_the_fastest_is_printed_as_auto_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collectives, "TABLE_BYTES", (8, 100_000))
    run_bench(monkeypatch, tmp_path, "--table", "--nodes", "2", "--repetitions", "1", "--algorithms", "naive", "ring")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("    ("))
    (row,) = eval(f"[{line}]", {"inf": math.inf})
    assert row[0] == 2 and row[1][-1][0] == math.inf
    assert {algorithm for _, algorithm in row[1]} <= {"naive", "ring"}


def test_a_rank_that_cannot_go_on_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"rank on [01] ended with"):
        measure(Group(library="zmqtrain", nodes=2), [Case(algorithm="no such one", values_bytes=8)])


def test_rivals_are_found_or_not_without_being_loaded() -> None:
    assert set(find_rivals()) == {"gloo", *LAUNCHED_TOGETHER}
    assert "torch" not in sys.modules and "mpi4py" not in sys.modules


def test_the_launchers_agent_runs_a_command_on_the_node_with_an_address_under_a_name_of_its_own() -> None:
    with Star(2, 1e9) as star:
        agent = [sys.executable, rivals.__file__, star.name, star.node_address(1)]
        command = ["hostname", "&&", "ip", "-brief", "-4", "address", "show", "eth0"]  # words of one line, as for ssh
        printed = subprocess.run([*agent, *command], capture_output=True, text=True, check=True).stdout.split()
    assert printed[0] == "n1" and f"{star.node_address(1)}/16" in printed
