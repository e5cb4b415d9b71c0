"""The example of large messages between processes, as a reader runs it, with arrays of 4 MB."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from zmqtrain.broker.serve import BrokerThread
from zmqtrain.core.settings import RunSettings

PROJECT = Path(__file__).parents[2]
SCRIPT = PROJECT / "docs" / "examples" / "ring_and_all_to_all.py"
SECONDS = 60.0


def start(*arguments: str, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", str(SCRIPT), "--megabytes", "4", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), **more}  # where zmqtrain is not installed
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def check(printed: str, size: int) -> None:
    assert re.search(r"^ring: [0-9.]+ s, [0-9]+ MB/s from each process$", printed, re.MULTILINE), printed
    assert re.search(r"^all to all: [0-9.]+ s, [0-9]+ MB/s from each process$", printed, re.MULTILINE), printed
    right = re.findall(rf"^rank (\d) of {size}: all checksums are right$", printed, re.MULTILINE)
    assert sorted(map(int, right)) == list(range(size)), printed


def test_it_starts_a_broker_and_four_processes_and_all_checksums_are_right() -> None:
    process = start()
    printed, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, printed
    check(printed, 4)


def test_processes_that_are_started_by_hand_do_the_same() -> None:
    with BrokerThread("tcp://127.0.0.1:0", RunSettings()) as broker:
        processes = [start(broker.address, "--size", "2") for _ in range(2)]
        printed = [process.communicate(timeout=SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    check("".join(printed), 2)


def test_tasks_of_a_job_step_take_their_ranks_from_the_launcher_and_two_steps_do_not_meet() -> None:
    with BrokerThread("tcp://127.0.0.1:0", RunSettings()) as broker:
        steps = {
            job: [
                start(
                    broker.address,
                    "--size",
                    "environment",
                    SLURM_PROCID=str(rank),
                    SLURM_STEP_NUM_TASKS="2",
                    SLURM_JOB_ID=job,
                    SLURM_STEP_ID="0",
                )
                for rank in (1, 0)
            ]
            for job in ("71", "72")
        }
        for processes in steps.values():
            printed = [process.communicate(timeout=SECONDS)[0] for process in processes]
            assert [process.returncode for process in processes] == [0, 0], printed
            assert ["rank 1 of 2" in printed[0], "rank 0 of 2" in printed[1]] == [True, True]
            check("".join(printed), 2)


def test_without_a_launcher_the_ranks_are_not_known() -> None:
    process = start("tcp://127.0.0.1:1", "--size", "environment", SLURM_PROCID="0", SLURM_NTASKS="4")
    printed, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1 and "SLURM_STEP_NUM_TASKS" in printed
