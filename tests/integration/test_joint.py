"""A node of two processes (`jax.distributed`, two devices each) beside an ordinary node, over sockets."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest

import zmqtrain as zt
from tests.integration.joint_process import DTYPES, SHAPES, batches, first_values, walk
from tests.integration.runs import broker

PROJECT = Path(__file__).parents[2]
PROCESS = Path(__file__).with_name("joint_process.py")
SECONDS = 100.0


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def processes(runs, folder: Path, count: int = 2):
    """Start the processes of one node, which take part in these runs, one after the other."""
    facts = {"coordinator": f"127.0.0.1:{free_port()}", "count": count, "runs": runs, "folder": str(folder)}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "XLA_FLAGS": flags}
    with ExitStack() as stack:
        started = []
        for index in range(count):
            command = [sys.executable, str(PROCESS), json.dumps(facts | {"index": index})]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        yield started


def settings(fragments: int, **others) -> zt.RunSettings:
    strict = {"mode": "strict", "release": "all", "every": 2, "delay": 2, "start_nodes": 2, "units": 6}
    return zt.RunSettings(**strict, fragments=fragments, initial="founder", lost_seconds=60.0, **others)


class Walker(threading.Thread):
    """An ordinary node that takes steps of the same random walk."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__(daemon=True)
        self.address, self.named = address, name
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with zt.connect(self.address, self.named) as node:
                sync = zt.DelayedSync(node, {n: jax.numpy.asarray(leaf) for n, leaf in first_values().items()})
                params = sync.start
                for batch in node.batches(batches):
                    params = sync.step(walk(params, batch))
                params = sync.finish(params)
            self.ended = {name: np.asarray(leaf) for name, leaf in params.items()}
            self.anchor = {name: np.asarray(leaf) for name, leaf in sync.params.items()}
        except BaseException as error:
            self.failure = error

    def joined(self) -> Walker:
        self.join(SECONDS)
        assert not self.is_alive()
        if self.failure is not None:
            raise self.failure
        return self


def assert_holds(held, walker: Walker) -> int:
    """Every shard that the file has is that part of what this node ended with; return how many there are."""
    for key in held:
        anchor, name, where = re.fullmatch(r"(anchor\.)?(\w+)\[(.*)\]#\d+", key).groups()
        index = tuple(slice(*map(int, one.split(":"))) for one in where.split(",") if one)
        whole = (walker.anchor if anchor else walker.ended)[name]
        assert whole.dtype == DTYPES[name] and whole.shape == SHAPES[name]
        assert held[key].tobytes() == whole[index].tobytes(), key
    return len(held.files)


@pytest.mark.timeout(300)
def test_the_processes_of_one_node_hold_the_bits_that_an_ordinary_node_would(tmp_path: Path) -> None:
    cases = [(3, "device"), (1, "host")]
    with ExitStack() as stack:
        hubs = [stack.enter_context(broker(settings(fragments))) for fragments, _ in cases]
        runs = [(hub.address, anchor) for hub, (_, anchor) in zip(hubs, cases, strict=True)]
        started = stack.enter_context(processes(runs, tmp_path))
        beside = [Walker(hub.address, "pc-1") for hub in hubs]
        for process in started:
            _, complaints = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, complaints
        beside = [walker.joined() for walker in beside]
    for number, ((fragments, _), walker) in enumerate(zip(cases, beside, strict=True)):
        with broker(settings(fragments)) as hub:
            alike = [Walker(hub.address, name) for name in ("pc-1", "pc-2")]
            first, second = (node.joined() for node in alike)
        for name, leaf in first.anchor.items():
            assert leaf.tobytes() == walker.anchor[name].tobytes() == second.anchor[name].tobytes()
            assert first.ended[name].tobytes() == walker.ended[name].tobytes()
        for index in range(2):
            with np.load(tmp_path / f"run{number}-process{index}.npz") as held:
                assert assert_holds(held, second) == 2 * 2 * len(SHAPES)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_example_of_two_hosts_trains_one_model_with_an_ordinary_script() -> None:
    strict = {"program": "", "mode": "strict", "release": "all", "every": 4, "delay": 2, "start_nodes": 2}
    coordinator = f"127.0.0.1:{free_port()}"
    hosts = ["--coordinator", coordinator, "--hosts", "2", "--steps", "100", "--name", "cluster"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    with ExitStack() as stack:
        run = zt.RunSettings(**strict, initial="founder", lost_seconds=60.0, evaluate_seconds=0.0)
        hub = stack.enter_context(broker(run))

        def started(script: str, *arguments: str) -> subprocess.Popen[str]:
            command = [sys.executable, str(PROJECT / "docs" / "examples" / script), *arguments]
            process = stack.enter_context(subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
            ))  # fmt: skip
            stack.callback(process.kill)
            return process

        programs = [
            started("multi_host_node.py", hub.address, *hosts, "--host", "0"),
            started("multi_host_node.py", *hosts, "--host", "1"),
            started("custom_loop.py", hub.address, "--steps", "100", "--name", "pc-1"),
        ]
        ends = []
        for program in programs:
            printed, complaints = program.communicate(timeout=2 * SECONDS)
            assert program.returncode == 0, complaints
            (end,) = re.findall(r"accuracy ([0-9.]+) %.*", printed)
            ends.append(float(end))
        assert hub.broker.statistics().version > 0
    assert ends[0] == ends[1] > 50, "both hosts hold one model; a first one answers half of the questions at most"
    assert ends[2] > 50
