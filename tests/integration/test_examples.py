"""The examples of the documentation, as a reader runs them: two in one run, a third that comes later, and one alone."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.grids import nightly
from zmqtrain.broker.serve import BrokerThread
from zmqtrain.core.settings import RunSettings

PROJECT = Path(__file__).parents[2]
EXAMPLES = PROJECT / "docs" / "examples"
NAMES = ("custom_loop.py", "flax_loop.py")
FSDP = "fsdp_loop.py"
FOUR_DEVICES = "--xla_force_host_platform_device_count=4"
MARK = re.compile(r"  # zmqtrain (?:(\d)/(\d)|data)$")
HERE = "tcp://127.0.0.1:0"
SECONDS = 100.0
STRICTLY = ("-W", "error", "-W", "ignore:Error reading persistent compilation cache")
"""Two copies compile the same things, and one may read what the other is just writing: see tests/conftest.py."""
GUESSING = 50.0
"""No example's first parameters, nor one step from them, answer more than half of the questions."""


def two_nodes() -> RunSettings:
    """Strictly: however unevenly a busy machine runs the two, they learn the same as on an idle one."""
    return RunSettings(
        program="",
        every=4,
        delay=2,
        start_nodes=2,
        mode="strict",
        release="all",
        lost_seconds=60.0,
        evaluate_seconds=0.0,
    )


@contextmanager
def started(*arguments: str | Path, flags: str = "") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, *STRICTLY, *map(str, arguments)]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "XLA_FLAGS": flags}  # where zmqtrain is not installed
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def outcome(process: subprocess.Popen[str]) -> str:
    """Return what a script printed when it has ended well."""
    printed, complaints = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, complaints
    return printed


def accuracy(printed: str) -> float:
    found = re.search(r"accuracy ([0-9.]+) %", printed)
    assert found is not None, printed
    return float(found[1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [NAMES[0], *nightly(*NAMES[1:])])
def test_two_copies_train_one_model_and_a_later_joiner_adopts_it(name: str) -> None:
    with BrokerThread(HERE, two_nodes()) as broker:

        def copy(called: str, steps: int) -> tuple[str | Path, ...]:
            return EXAMPLES / name, broker.address, "--steps", str(steps), "--name", called

        with started(*copy("first", 200)) as first, started(*copy("second", 200)) as second:
            trained = [accuracy(outcome(process)) for process in (first, second)]
        statistics = broker.broker.statistics()
        assert statistics.version > 0
        assert statistics.contributions >= 2
        assert min(trained) > GUESSING
        with started(*copy("third", 1)) as third:
            assert accuracy(outcome(third)) > GUESSING


@pytest.mark.parametrize("name", [NAMES[0], *nightly(*NAMES[1:], FSDP)])
def test_joining_costs_five_lines_and_without_them_an_ordinary_script_is_left(name: str, tmp_path: Path) -> None:
    lines = (EXAMPLES / name).read_text().splitlines()
    marks = [(int(mark[1]), int(mark[2])) for line in lines if (mark := MARK.search(line)) and mark[1]]
    assert marks == [(number, 5) for number in (1, 2, 3, 4, 5)]
    plain = "\n".join(line for line in lines if not MARK.search(line)) + "\n"
    code = plain.split('"""', 2)[2]
    assert not re.search(r"\bzt\b|zmqtrain|\bsync\b", code)
    script = tmp_path / name
    script.write_text(plain)
    with started(script, "--steps", "2", "--name", "alone") as process:
        assert accuracy(outcome(process)) < 100


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_pc_with_four_devices_and_one_with_one_train_one_model() -> None:
    with BrokerThread(HERE, two_nodes()) as broker:
        four = (EXAMPLES / FSDP, broker.address, "--steps", "200", "--name", "four")
        one = (EXAMPLES / "custom_loop.py", broker.address, "--steps", "200", "--name", "one")
        with started(*four, flags=FOUR_DEVICES) as first, started(*one) as second:
            trained = [accuracy(outcome(process)) for process in (first, second)]
        assert max(trained) > GUESSING
        assert broker.broker.statistics().contributions >= 2


@pytest.mark.timeout(300)
def test_the_rate_of_a_newcomer_is_that_of_the_run_and_not_of_its_own_first_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("schedule_loop")
    settings = RunSettings(program="", every=4, delay=2, evaluate_seconds=0.0)

    def begun_at(name: str, steps: int, address: str) -> tuple[int, float]:
        monkeypatch.setattr(sys, "argv", ["schedule_loop.py", address, "--steps", str(steps), "--name", name])
        example.main()
        found = re.search(rf"{name}: step 0, the run's sample (\d+), rate ([0-9.]+)", capsys.readouterr().out)
        assert found is not None
        return int(found[1]), float(found[2])

    try:
        with BrokerThread(HERE, settings) as broker:
            assert begun_at("first", 60, broker.address) == (0, 0.0005)
            assert begun_at("late", 1, broker.address) == (60 * example.BATCH, 0.005)
    finally:
        for name in ("schedule_loop", "custom_loop"):
            sys.modules.pop(name, None)
