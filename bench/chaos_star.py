"""Be a run whose broker and nodes are on the hosts of a star, with wires that faults can befall for real.

Rule: whatever happens, processes and cables are gone when the block ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from zmqtrain.chaos.run import END_SECONDS, LEAVE_SECONDS, READY, Run, hub_folder, now_and_then, record_of
from zmqtrain.chaos.schedule import BROKER, FaultKind
from zmqtrain.chaos.services import Service

from star import Host, Star

__all__ = ["StarWire", "StarRun", "name_of_node"]

PORT = 5555
CABLE = str(Path(__file__).with_name("cable.py"))
ONE_THREAD = ("--xla_cpu_multi_thread_eigen=false", "intra_op_parallelism_threads=1")


def name_of_node(number: int) -> str:
    """Return the name of a node of the star in its run."""
    return f"pc-{number}"


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


class StarRun(Run):
    """One run on a star, from `with` to the end of the block.

    folder: of what it leaves behind.  broker, node: what their command lines say besides address, name and record.
    seed: of the bad cables.  out: gets a line for each thing that is done.
    """

    def __init__(
        self,
        star: Star,
        folder: Path,
        broker: Sequence[str],
        node: Callable[[int], Sequence[str]],
        seed: int = 0,
        out: TextIO | None = None,
    ) -> None:
        self.star = star
        folder.mkdir(parents=True, exist_ok=True)
        address = f"tcp://{star.hub_address}:{PORT}"
        kept = ["--checkpoint", str(hub_folder(folder)), "--record", str(record_of(folder, BROKER))]
        line = ["--bind", f"tcp://*:{PORT}", "--insecure", *kept, *broker]
        services = {BROKER: self._service(folder, "hub", BROKER, "zmqtrain.cli.broker", line, READY)}
        wires = {BROKER: StarWire(star, "hub", seed - 1)}
        for number in range(star.nodes):
            name = name_of_node(number)
            line = [address, "--name", name, "--record", str(record_of(folder, name)), *node(number)]
            services[name] = self._service(folder, number, name, "zmqtrain.cli.node", line)
            wires[name] = StarWire(star, number, seed + number)
        self._wires = wires
        super().__init__(folder, services, wires, out)

    def wait_back(self, name: str, since: float, seconds: float) -> bool:
        """Wait until a node has joined again since a moment of the wall clock; False if it takes longer."""

        def back() -> bool:
            said = self._said_by_broker()
            began = next((record["began"] for record in said if "began" in record), 0.0)
            joined = [
                r["seconds"] for r in said if r["kind"] == "membership" and (r["what"], r["node"]) == ("joined", name)
            ]
            return any(began + at > since for at in joined)

        return self.player.wait(seconds, now_and_then(back))

    def wait_restarted(self, name: str, lives: int, seconds: float) -> float:
        """Wait until one of them is at work in another life than its first so many; return since when, monotonic.

        Raises RuntimeError if that takes longer.
        """
        service = self.services[name]
        if not self.player.wait(seconds, lambda: len(service.lives) > lives and service.lives[-1].ready_at > 0):
            raise RuntimeError(f"the {name} is not back within {seconds:g} s: {' '.join(service.last_lines[-1:])}")
        return service.lives[-1].ready_at

    def wait_over(self, seconds: float = END_SECONDS) -> bool:
        """Keep everybody alive until the broker has ended by itself and its nodes too; False if that takes longer."""
        over = self.player.wait(seconds, lambda: self.services[BROKER].over)
        for name in self.nodes:  # a node that was started again too late finds nobody any more
            self.services[name].wanted = False
        self.player.wait(LEAVE_SECONDS, lambda: not any(self.services[name].alive for name in self.nodes))
        return over

    def close(self) -> None:
        """End every process, and take every cable out."""
        super().close()
        for wire in self._wires.values():
            with contextlib.suppress(RuntimeError):
                wire.close()

    def _service(
        self, folder: Path, host: Host, name: str, module: str, line: Sequence[str], ready: str = ""
    ) -> Service:
        package = str(Path(__file__).resolve().parents[1])  # of this checkout, installed or not
        environment = {
            **os.environ,
            "PYTHONPATH": package,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": " ".join((os.environ.get("XLA_FLAGS", ""), *ONE_THREAD)).strip(),
            "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        prefix = ["ip", "netns", "exec", self.star.namespace(host)]
        return Service(folder, name, module, line, prefix=prefix, environment=environment, ready=ready)
