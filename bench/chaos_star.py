"""Run a broker and nodes on the hosts of a star as a service manager would, with wires that faults can befall.

Rule 1: what runs are the commands that people type, each restarted with its own line; nothing in them knows of faults.
Rule 2: a run has a folder: what everybody said (NAME.log), the records (NAME.jsonl) and the broker's checkpoints (hub).
Rule 3: whatever happens, processes and cables are gone when the block ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zmqtrain.chaos.player import Player
from zmqtrain.chaos.schedule import BROKER, FaultKind
from zmqtrain.chaos.services import Service
from zmqtrain.monitor.records import Record, read_records

from star import Host, Star

__all__ = ["StarWire", "StarRun", "name_of_node"]

PORT = 5555
READY_SECONDS = 120.0
END_SECONDS = 120.0
ASK_SECONDS = 0.25
CABLE = str(Path(__file__).with_name("cable.py"))


def name_of_node(number: int) -> str:
    """Return the name of a node of the star in its run."""
    return f"pc-{number}"


def _now_and_then(done: Callable[[], bool]) -> Callable[[], bool]:
    """Ask this at most every `ASK_SECONDS`: who is asked reads a whole file."""
    asked_at = 0.0

    def ask() -> bool:
        nonlocal asked_at
        if (now := time.monotonic()) - asked_at < ASK_SECONDS:
            return False
        asked_at = now
        return done()

    return ask


class StarWire:
    """A host's port on the star's switch, and what can befall it. seed: of what a bad cable hits."""

    def __init__(self, star: Star, host: Host, seed: int) -> None:
        self.star, self.host, self._seed = star, host, seed
        self._rate = star.rate(host)
        self._cable: subprocess.Popen[Any] | None = None
        self._prepared = False

    def unplug(self) -> None:
        """See Wire: the link is down at both ends."""
        self.star.set_link(self.host, up=False)

    def plug(self) -> None:
        """See Wire."""
        self.star.set_link(self.host, up=True)

    def drop(self) -> None:
        """See Wire: the kernel ends all TCP connections of this host."""
        self._run(self.star.namespace(self.host), "ss", "-K", "-t")

    def disturb(self, kind: FaultKind, share: float) -> None:
        """See Wire: another rate for "slow", else a bad cable between port and switch."""
        if kind == "slow":
            self.star.set_rate(self.host, self._rate * (1 - share))
        elif share:
            self._insert(kind, share)
        else:
            self.close()

    def close(self) -> None:
        """Take the bad cable out."""
        if self._cable is not None:
            self._cable.kill()
            self._cable.wait()
            self._cable = None
            switch, port = self.star.namespace("switch"), self._port
            self._run(None, "ip", "-n", switch, "link", "del", f"b{port}")
            self._run(None, "ip", "-n", switch, "link", "set", port, "master", "bridge")

    @property
    def _port(self) -> str:
        return "hub" if self.host == "hub" else f"n{self.host}"

    def _insert(self, kind: FaultKind, share: float) -> None:
        self.close()
        switch, port, ends = self.star.namespace("switch"), self._port, ("c", "b")
        inner, outer = (f"{end}{self._port}" for end in ends)
        if not self._prepared:
            self._run(self.star.namespace(self.host), sys.executable, CABLE, "--checksum", "eth0")
            self._prepared = True
        self._run(None, "ip", "-n", switch, "link", "add", outer, "type", "veth", "peer", "name", inner)
        self._run(switch, sys.executable, CABLE, "--checksum", outer, inner)
        for device in (outer, inner):
            self._run(None, "ip", "-n", switch, "link", "set", device, "up")
        self._run(None, "ip", "-n", switch, "link", "set", outer, "master", "bridge")
        self._run(None, "ip", "-n", switch, "link", "set", port, "nomaster")
        options = [f"--{kind}", f"{share:g}", "--seed", str(self._seed)]
        argv = ["ip", "netns", "exec", switch, sys.executable, CABLE, port, inner, *options]
        self._cable = subprocess.Popen(argv, stdout=subprocess.DEVNULL)

    def _run(self, namespace: str | None, *argv: str) -> None:
        prefix = ["ip", "netns", "exec", namespace] if namespace is not None else []
        done = subprocess.run([*prefix, *argv], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


class StarRun:
    """One run on a star, from `with` to the end of the block.

    folder: of what it leaves behind.  broker, node: what their command lines say besides address, name and record.
    seed: of the bad cables.  say: is told what is done.
    """

    def __init__(
        self,
        star: Star,
        folder: Path,
        broker: Sequence[str],
        node: Callable[[int], Sequence[str]],
        seed: int = 0,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.star, self.folder = star, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.hub = folder / "hub"
        self.nodes = tuple(name_of_node(number) for number in range(star.nodes))
        address = f"tcp://{star.hub_address}:{PORT}"
        kept = ["--checkpoint", str(self.hub), "--record", str(self.record(BROKER))]
        bound = ["--bind", f"tcp://*:{PORT}", "--insecure"]
        services = {BROKER: self._service("hub", BROKER, "zmqtrain.cli.broker", [*bound, *kept, *broker], "training")}
        for number, name in enumerate(self.nodes):
            line = [address, "--name", name, "--record", str(self.record(name)), *node(number)]
            services[name] = self._service(number, name, "zmqtrain.cli.node", line)
        self.wires = {name: StarWire(star, number, seed + number) for number, name in enumerate(self.nodes)}
        self.wires[BROKER] = StarWire(star, "hub", seed - 1)
        self.player = Player(services, self.wires, say)

    @property
    def services(self) -> dict[str, Service]:
        """By name: the broker and the nodes."""
        return dict(self.player.services)

    def record(self, name: str) -> Path:
        """Return where one of them writes its record."""
        return self.folder / f"{name}.jsonl"

    def __enter__(self) -> StarRun:
        try:
            broker = self.services[BROKER]
            broker.begin()
            if not broker.wait_ready(READY_SECONDS):
                raise RuntimeError(f"the broker does not begin: {'; '.join(broker.last_lines[-3:])}")
            for name in self.nodes:
                self.services[name].begin()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_training(self, nodes: int, seconds: float = READY_SECONDS) -> None:
        """Wait until so many nodes train together. Raises RuntimeError if they do not, saying what they say."""
        if not self.player.wait(seconds, _now_and_then(lambda: self._joined() >= nodes and self._released())):
            words = "; ".join(f"{name}: {' '.join(one.last_lines[-1:])}" for name, one in self.services.items())
            raise RuntimeError(f"the run has not begun within {seconds:g} s: {words}")

    def wait_back(self, name: str, since: float, seconds: float) -> bool:
        """Wait until a node has joined again since a moment of the wall clock; False if it takes longer."""

        def back() -> bool:
            said = self._broker_records()
            began = next((record["began"] for record in said if "began" in record), 0.0)
            return any(
                record["kind"] == "membership" and record["what"] == "joined" and record["node"] == name
                and began + record["seconds"] > since
                for record in said
            )  # fmt: skip

        return self.player.wait(seconds, _now_and_then(back))

    def wait_restarted(self, name: str, lives: int, seconds: float) -> float:
        """Wait until one of them is at work in another life than its first so many; return since when, monotonic.

        Raises RuntimeError if that takes longer.
        """
        service = self.services[name]
        if not self.player.wait(seconds, lambda: len(service.lives) > lives and service.lives[-1].ready_at > 0):
            raise RuntimeError(f"the {name} is not back within {seconds:g} s: {' '.join(service.last_lines[-1:])}")
        return service.lives[-1].ready_at

    def _broker_records(self) -> list[Record]:
        path = self.record(BROKER)
        return read_records(path) if path.exists() else []

    def _joined(self) -> int:
        return len({one["node"] for one in self._broker_records() if one["kind"] == "membership"})

    def _released(self) -> bool:
        return any(one["kind"] == "release" for one in self._broker_records())

    def wait_over(self, seconds: float = END_SECONDS) -> bool:
        """Keep everybody alive until the broker has ended by itself and its nodes too; False if that takes longer."""
        until = time.monotonic() + seconds
        over = self.player.wait(seconds, lambda: self.services[BROKER].over)
        for name in self.nodes:  # a node that was started again too late finds nobody any more
            self.services[name].wanted = False
        rest = max(0.0, until - time.monotonic())
        self.player.wait(min(rest, 10.0), lambda: not any(self.services[name].alive for name in self.nodes))
        return over

    def close(self) -> None:
        """End every process, and take every cable out."""
        for service in self.services.values():
            service.close()
        for wire in self.wires.values():
            with contextlib.suppress(RuntimeError):
                wire.close()

    def _service(self, host: Host, name: str, module: str, line: Sequence[str], ready: str = "") -> Service:
        package = str(Path(__file__).resolve().parents[1])  # of this checkout, installed or not
        environment = {
            **os.environ,
            "PYTHONPATH": package,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        clock = self.folder / f"{name}.clock"
        argv = [sys.executable, "-m", "zmqtrain.chaos.wall_clock", str(clock), module, *line]

        def start() -> subprocess.Popen[Any]:
            return self.star.popen(
                host,
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
            )

        return Service(name, start, self.folder / f"{name}.log", ready=ready, clock_file=clock)
