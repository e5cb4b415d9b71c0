"""The commands as they are typed: real processes on 127.0.0.1, from the greeting to the exit code."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.grids import nightly
from tests.terminals import pseudo_terminal
from zmqtrain.checkpoint.model_files import read_model
from zmqtrain.node.connect import connect
from zmqtrain.transport.key_folder import KeyFolder

SMALL = "data={text},width=8,layers=1,heads=1,context=8,batch=2,batches_per_unit=4"
BOUND_SECONDS = 100.0
NOBODY_LOST = ("--lost-seconds", "60")
"""A process that stands still for a while is waited for: nobody trains on alone."""
TORN = "ignore:Error reading persistent compilation cache"
"""See tests/conftest.py: what another process is just writing."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_bytes(b"a few words, again and again; " * 1000)
    return path


@contextlib.contextmanager
def started(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive its test, whatever happens there."""
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def command(*argv: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "zmqtrain.cli", *argv)


class Broker:
    """`zmqtrain-broker` as a process that has said where its nodes connect to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process, self.said, self.address = process, "", ""
        for line in process.stdout:
            self.said += line
            if found := re.search(r"(?:zmqtrain-node |connect\(\")(tcp://[^\s\"]+)", line):
                self.address = found[1]
                return
        raise AssertionError(self.said)

    def wait(self) -> int:
        """Wait for its end, keeping what it says."""
        self.said += self.process.communicate(timeout=BOUND_SECONDS)[0]
        return self.process.returncode

    def end(self, by: int = signal.SIGTERM) -> int:
        """Tell it to end, and wait for it."""
        self.process.send_signal(by)
        return self.wait()


@contextlib.contextmanager
def broker(*options: str) -> Iterator[Broker]:
    kept = () if "--checkpoint" in options else ("--no-checkpoint",)
    with started(*command("broker", "--bind", "tcp://127.0.0.1:0", *kept, *options)) as process:
        yield Broker(process)


def run(*argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*argv), capture_output=True, text=True, timeout=BOUND_SECONDS, cwd=cwd)


def run_local(*options: str) -> subprocess.CompletedProcess[str]:
    return run("local", "--no-checkpoint", *options)


def paragraph(result: subprocess.CompletedProcess[str], code: int = 2) -> str:
    assert result.returncode == code, result
    assert "Traceback" not in result.stderr, result.stderr
    log_and_last = result.stderr.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in log_and_last[:-1]), result.stderr
    return log_and_last[-1]


def test_a_node_trains_the_brokers_program_to_its_end_and_says_what_came_of_it(text: Path, tmp_path: Path) -> None:
    program = ("--program", "text", "--program-arguments", SMALL.format(text="elsewhere"))
    checkpoint = ("--checkpoint", str(tmp_path / "kept"))
    options = (*program, *checkpoint, "--units", "4", "--every", "4", "--delay", "2", *NOBODY_LOST)
    with broker(*options) as hub:
        status = run("status", hub.address, "--json")
        assert (status.returncode, json.loads(status.stdout)["units_total"]) == (0, 4)
        node = run("node", hub.address, "--name", "pc-1", "--data", str(text))
        assert node.returncode == 0, node
        assert re.search(r"steps +16\b", node.stdout) and re.search(r"held-out +loss \d", node.stdout)
        assert "\x1b" not in node.stdout
        assert re.search(
            r"^run-\w+ is over: this node ended with its last parameters, of version \d+", node.stdout, re.M
        )
        assert hub.wait() == 0, hub.said
    assert f"the model: {tmp_path / 'kept' / 'model.safetensors'}" in hub.said
    assert (tmp_path / "kept" / "model.safetensors").exists()
    again = run("broker", "--bind", "tcp://127.0.0.1:0", *options)
    assert again.returncode == 0 and "has come to its end: all its 4 data units are done" in again.stdout, again
    assert "with the same options, more --units and --checkpoint" in again.stdout


def test_two_nodes_are_one_pipeline_by_a_flag_of_the_broker_alone(text: Path, tmp_path: Path) -> None:
    program = (
        "--program",
        "text",
        "--program-arguments",
        SMALL.format(text="elsewhere").replace("layers=1", "layers=2"),
    )
    checkpoint = ("--checkpoint", str(tmp_path / "kept"))
    options = (*program, *checkpoint, "--pipeline", "2", "--units", "4", "--every", "4", "--delay", "2", *NOBODY_LOST)
    with broker(*options) as hub:
        lines = [command("node", hub.address, "--name", name, "--data", str(text)) for name in ("pc-1", "pc-2")]
        refused = run("node", hub.address, "--checkpoint", str(tmp_path / "own"))
        assert "a node takes no --checkpoint" in paragraph(refused, 78)
        with started(*lines[0]) as first, started(*lines[1]) as second:
            said = [one.communicate(timeout=BOUND_SECONDS)[0] for one in (first, second)]
            assert [first.returncode, second.returncode] == [0, 0], said
        assert hub.wait() == 0, hub.said
    for one in said:
        assert re.search(r"steps +16\b", one) and "Traceback" not in one, one
        assert re.search(r"^run-\w+ is over: this node ended with its last parameters, of version \d+", one, re.M)
    arrays, facts = read_model(tmp_path / "kept" / "model.safetensors")
    assert "embedding" in arrays and not any("part0" in name for name in arrays)
    assert facts.samples == 16 * 2


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGHUP])
def test_a_broker_that_is_told_to_end_says_goodbye_and_ends_with_0(by: int) -> None:
    with broker("--program", "text") as hub:
        assert hub.end(by) == 0
        assert "ended: no node has begun to train, so there is no model" in hub.said


def test_a_node_that_is_interrupted_sends_what_it_has_and_ends_with_0(text: Path) -> None:
    with (
        broker("--program", "text", "--program-arguments", SMALL.format(text=text)) as hub,
        started(*command("node", hub.address, "--name", "pc-1")) as node,
        started(*command("status", hub.address, "--watch", "--json")) as watch,
    ):
        assert watch.stdout is not None
        for line in watch.stdout:
            if line.startswith("{") and json.loads(line)["version"] >= 2:
                break
        watch.send_signal(signal.SIGINT)
        watch.communicate(timeout=BOUND_SECONDS)
        assert watch.returncode == 0
        node.send_signal(signal.SIGINT)
        said = node.communicate(timeout=BOUND_SECONDS)[0]
        assert node.returncode == 0, said
    assert "stopping: what is computed is sent first" in said and "held-out" in said
    assert "the model is the broker's, not what this node held. To take it out:\n" in said
    assert f"zmqtrain export {hub.address}" in said


def test_local_runs_a_federation_to_its_end_and_says_where_its_model_is(text: Path, tmp_path: Path) -> None:
    options = ("--nodes", "2", "--start-nodes", "2", "--units", "6", "--every", "4", "--delay", "2")
    result = run("local", *options, "--program-arguments", SMALL.format(text=text), cwd=tmp_path)
    assert result.returncode == 0, result
    assert re.search(r"^held-out loss \d", result.stdout, re.MULTILINE)
    assert "6/6 units" in result.stdout
    kept = re.match(r"the run and its model are saved in (zmqtrain-runs/(run-\w{8}))$", result.stdout.splitlines()[0])
    assert kept, result.stdout
    again = f"zmqtrain local with the same options, more --units and --checkpoint {kept[1]}"
    assert again in result.stdout
    arrays, facts = read_model(tmp_path / kept[1] / "broker" / "model.safetensors")
    assert (facts.run, facts.program) == (kept[2], "text") and facts.evaluation.keys() >= {"loss"}
    assert [leaf.path for leaf in facts.leaves] and arrays.keys() == {leaf.path for leaf in facts.leaves}
    assert f"the model: {kept[1]}/broker/model.safetensors" in result.stdout


def test_stop_ends_a_run_and_its_nodes_and_the_model_is_there(text: Path, tmp_path: Path) -> None:
    kept = ("--checkpoint", str(tmp_path / "kept"))
    program = ("--program", "text", "--program-arguments", SMALL.format(text=text))
    with (
        broker(*program, *kept, *NOBODY_LOST) as hub,
        started(*command("node", hub.address, "--name", "pc-1")) as node,
        started(*command("status", hub.address, "--watch", "--json")) as watch,
    ):
        assert watch.stdout is not None and "the run has no end (--units 0)" in hub.said.splitlines()[0]
        for line in watch.stdout:
            if line.startswith("{") and json.loads(line)["version"] >= 1:
                break
        watch.send_signal(signal.SIGINT)
        ended = run("stop", hub.address)
        assert ended.returncode == 0, ended
        assert re.search(r"^(run-\w{8}) has ended; its broker saves it", ended.stdout, re.MULTILINE)
        said = node.communicate(timeout=BOUND_SECONDS)[0]
        assert node.returncode == 0 and "held-out" in said, said
        assert hub.wait() == 0, hub.said
    assert "an operator, stop, ends the run: one node sends what it has computed, and ends" in hub.said
    arrays, facts = read_model(tmp_path / "kept" / "model.safetensors")
    assert arrays and facts.version >= 1


def test_chaos_breaks_a_run_and_its_ledger_says_exactly_once(text: Path) -> None:
    result = run(
        *("chaos", "--nodes", "2", "--minutes", "0.06", "--mean-seconds", "0.5", "--faults", "drop", "unplug"),
        "--node-checkpoints",
        *("--pace-seconds", "0.05", "--program-arguments", SMALL.format(text=text)),
    )
    assert result.returncode == 0, result
    assert re.search(r"^ledger +exactly once *$", result.stdout, re.MULTILINE) and "kill broker" in result.stdout


@pytest.mark.parametrize("exchange", ["allreduce:ring", *nightly("server:async")])
def test_local_trains_in_lockstep_where_it_is_told_so(text: Path, exchange: str) -> None:
    result = run_local(
        *("--nodes", "2", "--units", "6", "--program-arguments", SMALL.format(text=text)),
        *("--exchange", exchange),
    )
    assert result.returncode == 0, result
    assert "6/6 units" in result.stdout + result.stderr and "held-out loss" in result.stdout


def test_local_runs_several_shards_whose_parts_are_merged(text: Path, tmp_path: Path) -> None:
    options = ("--shards", "2", "--nodes", "2", "--units", "6", "--every", "4", "--delay", "2")
    kept = ("--checkpoint", str(tmp_path / "kept"))
    result = run("local", *options, *kept, "--program-arguments", SMALL.format(text=text))
    assert result.returncode == 0, result
    assert "6/6 units" in result.stdout
    out = tmp_path / "model.safetensors"
    first, second = (str(tmp_path / "kept" / f"shard-{shard}") for shard in range(2))
    assert "these are missing: 1" in paragraph(run("merge", first, "--out", str(out)))
    merged = run("merge", first, second, "--out", str(out))
    assert merged.returncode == 0 and re.search(r"[\d,]+ values of 2 parts", merged.stdout), merged
    assert out.exists()


@pytest.mark.nightly
def test_two_shards_as_commands_train_with_a_node_that_knows_one_address(text: Path, tmp_path: Path) -> None:
    program = ("--program", "text", "--program-arguments", SMALL.format(text=text), "--units", "4")
    (mine,) = KeyFolder(tmp_path / "keys").new(["mine"])
    keys = ("--keys", str(tmp_path / "keys"))
    with broker(*program, *keys, "--shard", "0/2") as first:
        other = command("broker", "--bind", "tcp://127.0.0.1:0", "--shard", "1/2", "--first", first.address, *keys)
        other = (*other, "--no-checkpoint")
        with started(*other) as second:
            assert second.stdout is not None
            said = re.match(r"run-\w+: shard 1/2, which nodes reach at (tcp://127.0.0.1:\d+)", second.stdout.readline())
            status = run("status", first.address, "--keys", str(mine))
            assert said and f"shard 1 is at {said[1]}\n" in status.stdout
            node = run("node", first.address, "--keys", str(mine))
            assert node.returncode == 0, node
            assert first.wait() == 0, first.said
            said = second.communicate(timeout=BOUND_SECONDS)[0]
            assert second.returncode == 0 and "ended at version" in said, said


def test_the_nodes_of_local_do_not_outlive_it_even_if_it_is_killed(text: Path) -> None:
    with started(sys.executable, "-c", KEEPER, SMALL.format(text=text)) as keeper:
        assert keeper.stdout is not None
        node = os.pidfd_open(int(keeper.stdout.readline()))
    try:
        assert select.select([node], [], [], BOUND_SECONDS)[0], "the node is still there"
    finally:
        os.close(node)


KEEPER = """
import sys
from zmqtrain.cli.local import Federation
from zmqtrain.core.settings import RunSettings
with Federation(RunSettings(program="text", program_arguments=sys.argv[1]), 1) as federation:
    print(*federation.process_ids, flush=True)
    sys.stdin.read()
"""


def test_local_says_why_no_node_could_train() -> None:
    said = paragraph(run_local("--nodes", "1", "--program-arguments", "data=/no/such/text"))
    assert "no node could train" in said and "/no/such/text" in said


def test_two_brokers_at_one_address_is_refused_with_another_port() -> None:
    with broker() as hub:
        said = paragraph(run("broker", "--bind", hub.address, "--no-checkpoint"))
    assert "already listens" in said and "--bind tcp://127.0.0.1:" in said


def test_a_node_without_a_broker_says_what_to_start() -> None:
    with socket.socket() as held:  # a port that nobody else takes meanwhile
        held.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{held.getsockname()[1]}"
        said = paragraph(run("node", address, "--wait-seconds", "0.2"))
        assert said.startswith("zmqtrain-node: no broker answers at") and "zmqtrain-broker --bind" in said
        assert "no broker answers" in paragraph(run("status", address, "--wait-seconds", "0.2"))


def test_a_run_for_custom_loops_refuses_the_command_and_says_how_to_name_a_program() -> None:
    with broker() as hub:
        assert "zmqtrain-broker --program text" in paragraph(run("node", hub.address), 78)


def test_a_script_that_ends_without_closing_its_node_says_goodbye_all_the_same() -> None:
    script = "import sys, zmqtrain; node = zmqtrain.connect(sys.argv[1], 'pc-1')"
    with broker() as hub:
        argv = [sys.executable, "-W", "error", "-c", script, hub.address]
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=BOUND_SECONDS)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert run("status", hub.address).returncode == 0
        assert hub.end() == 0
    assert "pc-1 left: said goodbye" in hub.said and "connection is gone" not in hub.said


def test_a_node_that_is_interrupted_while_it_compiles_leaves_without_the_regular_end(text: Path) -> None:
    program = ("--program", "text", "--program-arguments", SMALL.format(text=text))
    with broker(*program) as hub:
        argv = [sys.executable, "-W", TORN, "-c", INTERRUPTED_COMPILE, hub.address]
        node = subprocess.run(argv, capture_output=True, text=True, timeout=BOUND_SECONDS)
        said = [line for line in node.stderr.splitlines() if " pc-1 trains on " not in line]
        assert (node.returncode, said) == (0, []), node
        assert "compiling" in node.stdout and "the regular end" not in node.stdout
        assert run("status", hub.address).returncode == 0
        assert hub.end() == 0
    assert "pc-1 left: said goodbye" in hub.said


INTERRUPTED_COMPILE = """
import atexit, os, signal, sys
from zmqtrain.cli import main
from zmqtrain.train.step import MinibatchStep

def compile(*arguments):
    print("compiling")
    os.kill(os.getpid(), signal.SIGINT)

MinibatchStep.compile = compile
atexit.register(print, "the regular end")
sys.exit(main(["node", sys.argv[1], "--name", "pc-1"]))
"""


def test_a_broker_on_a_terminal_serves_nodes_of_any_name_and_shows_it(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    names = ("x[/red]y", "[bold]b", "n" * 64)
    argv = command("broker", "--bind", "tcp://127.0.0.1:0", "--no-checkpoint")
    with pseudo_terminal() as terminal, subprocess.Popen(argv, stdout=terminal.child, stderr=terminal.child) as hub:
        try:
            said = terminal.wait_until(lambda shown: 'connect("tcp://' in shown)
            address = re.search(r'connect\("([^"]+)"', said)[1]
            with contextlib.ExitStack() as nodes:
                for name in names:
                    nodes.enter_context(connect(address, name))
                for row in ("x[/red]y ", "[bold]b ", "n" * 23 + "…"):
                    terminal.wait_until(lambda shown, row=row: row in shown)
                status = run("status", address)
                assert status.returncode == 0 and "x[/red]y " in status.stdout, status
            hub.send_signal(signal.SIGTERM)
            assert hub.wait(BOUND_SECONDS) == 0, terminal.end()
        finally:
            hub.kill()


@pytest.mark.parametrize("reader", ["head", "full"])
def test_a_broker_whose_output_nobody_can_take_serves_on(reader: str) -> None:
    with contextlib.ExitStack() as stack:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{one.getsockname()[1]}"
        argv = command(
            "broker", "--bind", address, "--no-checkpoint", "--lost-seconds", "0.5", "--heartbeat-seconds", "0.1"
        )
        if reader == "full":
            output = stack.enter_context(open("/dev/full", "w"))
            hub = stack.enter_context(subprocess.Popen(argv, stdout=output, stderr=output))
        else:
            hub = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            assert hub.stdout is not None
            hub.stdout.read(1)
            hub.stdout.close()
        stack.callback(hub.kill)
        with connect(address, "pc-1", timeout_seconds=BOUND_SECONDS) as node:
            assert node.settings.lost_seconds == 0.5
        with connect(address, "pc-2", timeout_seconds=BOUND_SECONDS):  # pc-1's end was logged by now
            assert hub.poll() is None
        hub.send_signal(signal.SIGTERM)
        assert hub.wait(BOUND_SECONDS) == 0
