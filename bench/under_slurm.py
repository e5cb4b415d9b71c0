"""Run the examples of docs/examples/slurm on a real Slurm: requeue a node, end a run, and collectives by one srun.

    sudo apt-get install slurm-wlm munge
    sudo .venv/bin/python bench/under_slurm.py

Needs root. The cluster is this machine alone: munged, slurmctld and slurmd of the bench's own, on ports and in a folder
of their own, which end with it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import print_table, write_json

PROJECT = Path(__file__).resolve().parents[1]
SLURM = PROJECT / "docs" / "examples" / "slurm"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
PATHS = "/usr/sbin:/usr/bin:/sbin:/bin"
CONFIGURATION = """ClusterName=check
SlurmctldHost={host}
SlurmctldPort={first}
SlurmdPort={second}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=30
NodeName={host} CPUs=16 RealMemory=64000 State=UNKNOWN
PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=gpu Nodes=ALL MaxTime=INFINITE State=UP
"""
SECONDS = 300.0


class Cluster:
    """A Slurm of one machine. folder: of its own, short enough for the names of sockets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        host, ports = socket.gethostname().partition(".")[0], free_ports(2)
        for name in ("state", "spool", "home", "munge"):
            (folder / name).mkdir(mode=0o700)
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(host=host, folder=folder, first=ports[0], second=ports[1])
        )
        (folder / "munge/key").write_bytes(os.urandom(128))
        (folder / "munge/key").chmod(0o600)
        here = f"{Path(sys.executable).parent}:{PATHS}"
        self.environment = {
            "PATH": here, "SLURM_CONF": str(folder / "slurm.conf"), "HOME": str(folder / "home"),
            "PYTHONPATH": str(PROJECT), "JAX_PLATFORMS": "cpu", "USER": "root", "LANG": "C.UTF-8",
        }  # fmt: skip
        self._daemons: list[subprocess.Popen[bytes]] = []
        munge = [
            "munged",
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            f"--key-file={folder}/munge/key",
        ]
        munge += [f"--{name}={folder}/munge/{name}" for name in ("log-file", "pid-file", "seed-file")]
        self._start(*munge)
        wait("munged", (folder / "munge.socket").exists)
        self._start("slurmctld", "-D", "-i")
        self._start("slurmd", "-D", "-N", host)
        wait("slurmd", lambda: "idle" in self("sinfo", "--noheader", "--format=%T"))

    def _start(self, *command: str) -> None:
        log = (self.folder / f"{command[0]}.out").open("wb")
        self._daemons.append(
            subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        )

    def __call__(self, *command: str, **more: str) -> str:
        """Run a command of the cluster's user; return what it prints."""
        result = subprocess.run(command, env=self.environment | more, capture_output=True, text=True)
        return result.stdout if result.returncode == 0 else f"{result.stdout}{result.stderr}"

    def states(self, job: str) -> dict[str, str]:
        """Return the state of each element of an array that has not left the queue, with its reason."""
        lines = self("squeue", "--noheader", "--array", f"--jobs={job}", "--format=%i %T %r").splitlines()
        return {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in lines if " " in line}

    def close(self) -> None:
        """End all jobs, and then the daemons."""
        self("scancel", "--user=root")
        wait("the end of all jobs", lambda: not self("squeue", "--noheader"), 60.0)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def wait(what: str, condition: Callable[[], bool], seconds: float = SECONDS) -> float:
    """Wait until it is so; return how many seconds that took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise SystemExit(f"{what}: not within {seconds:g} s")
        time.sleep(0.2)
    return round(time.monotonic() - began, 1)


class Check:
    """What was done on the cluster, and what came of it, as rows."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.rows = cluster, list[dict[str, Any]]()

    def row(self, what: str, came: str, seconds: float) -> None:
        self.rows.append({"what was done": what, "what came of it": came, "seconds": seconds})
        print(f"{what}: {came} ({seconds} s)", flush=True)

    def run_of_three_nodes(self, units: int) -> None:
        """Submit the example; requeue one element, cancel and requeue another; wait for the run's end and its model."""
        cluster, run = self.cluster, self.cluster.folder / "run1"
        options = ["--array=0-2", "--gres=none", "--mem=1G", "--cpus-per-task=1"]
        said = cluster("bash", str(SLURM / "submit.sh"), str(run), *options, ZMQTRAIN_UNITS=str(units))
        found = re.search(r"broker is job (\d+), its nodes are job (\d+)", said)
        if found is None:
            raise SystemExit(said)
        broker, nodes = found.groups()

        def running() -> bool:
            states = cluster.states(nodes)
            return len(states) == 3 and all(state.startswith("RUNNING") for state in states.values())

        self.row("submit.sh run1 --array=0-2", f"jobs {broker} and {nodes}; 3 elements run", wait("nodes", running))
        hub = f"tcp://127.0.0.1:{20000 + int(broker) % 10000}"

        def there(name: str) -> bool:
            status = [sys.executable, "-m", "zmqtrain.cli", "status", hub, "--check", "--node", name]
            return subprocess.run(status, env=cluster.environment, capture_output=True).returncode == 0

        seconds = wait("the nodes in the run", lambda: all(there(f"node-{number}") for number in range(3)))
        self.row("zmqtrain status --check --node node-0 (-1, -2)", "all three take part", seconds)

        def steps(name: str) -> int:
            status = [sys.executable, "-m", "zmqtrain.cli", "status", hub, "--json"]
            members = json.loads(cluster(*status) or "{}").get("members", [])
            return max((int(member.get("step", 0)) for member in members if member["name"] == name), default=0)

        wait("their first steps", lambda: min(steps("node-1"), steps("node-2")) > 20)

        def leaves(number: int, *command: str) -> None:
            log = run / f"zmqtrain-node-{number}.log"
            cluster(*command)
            seconds = wait("the node's goodbye", lambda: "this node left" in log.read_text())
            drained = next(line for line in log.read_text().splitlines() if "this node left" in line)
            self.row(" ".join(command), drained.partition(",")[0], seconds)

        def comes_back(number: int) -> None:
            element = f"{nodes}_{number}"
            seconds = wait("it is queued again", lambda: "PENDING" in cluster.states(nodes).get(element, ""))
            self.row("squeue", f"{element} {cluster.states(nodes)[element]}", seconds)
            seconds = wait("it is back", lambda: there(f"node-{number}"))
            self.row(f"zmqtrain status --check --node node-{number}", "it takes part again", seconds)

        leaves(1, "scontrol", "requeue", f"{nodes}_1")
        comes_back(1)
        leaves(2, "scancel", f"{nodes}_2")
        wait("its end", lambda: "JobState=CANCELLED" in cluster("scontrol", "show", "job", f"{nodes}_2"))
        if said := cluster("scontrol", "requeue", f"{nodes}_2"):
            raise SystemExit(said)
        comes_back(2)
        model = run / "broker/model.safetensors"
        seconds = wait("the end of the run", lambda: not (cluster.states(nodes) or cluster.states(broker)), 600.0)
        ended = [line for line in (run / "zmqtrain-broker.log").read_text().splitlines() if "ended at version" in line]
        self.row("the run of --units ends", f"{ended[-1]}; {model.name}, {model.stat().st_size} bytes", seconds)

    def leaves_before_its_time_is_over(self) -> None:
        """A node whose time limit comes leaves by the script's own signal, and is queued again by the script."""
        cluster, run = self.cluster, self.cluster.folder / "run2"
        options = ["--array=0-0", "--gres=none", "--mem=1G", "--cpus-per-task=1", "--time=1", "--signal=INT@30"]
        said = cluster("bash", str(SLURM / "submit.sh"), str(run), *options, ZMQTRAIN_UNITS="0")
        found = re.search(r"broker is job (\d+), its nodes are job (\d+)", said)
        assert found is not None, said
        broker, nodes = found.groups()
        log = run / "zmqtrain-node-0.log"
        seconds = wait("the signal", lambda: log.exists() and "this node left" in log.read_text())
        state = wait("its next turn", lambda: "PENDING" in cluster.states(nodes).get(f"{nodes}_0", ""))
        came = f"it left in order; {nodes}_0 {cluster.states(nodes)[f'{nodes}_0']}"
        self.row("--time=1 --signal=INT@30", came, seconds + state)
        cluster("scancel", nodes)
        hub = f"tcp://127.0.0.1:{20000 + int(broker) % 10000}"
        came = cluster(sys.executable, "-m", "zmqtrain.cli", "stop", hub).splitlines()[-1]
        seconds = wait("the end", lambda: not cluster.states(broker))
        self.row("zmqtrain stop", came, seconds)

    def collectives(self) -> None:
        """Four tasks of one srun meet at a broker, and take their ranks from Slurm."""
        cluster = self.cluster
        port = free_ports(1)[0]
        command = [
            sys.executable,
            "-m",
            "zmqtrain.cli",
            "broker",
            "--insecure",
            "--bind",
            f"tcp://*:{port}",
            "--no-checkpoint",
        ]
        broker = subprocess.Popen(
            command, env=cluster.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            example = PROJECT / "docs/examples/ring_and_all_to_all.py"
            began = time.monotonic()
            hub = f"tcp://127.0.0.1:{port}"
            tasks = ["srun", "--mem=2G", "-n", "4", sys.executable, str(example), hub]
            said = cluster(*tasks, "--size", "environment", "--megabytes", "8")
            right = re.findall(r"rank (\d) of 4: all checksums are right", said)
            if sorted(right) != list("0123"):
                raise SystemExit(said)
            came = f"ranks {', '.join(sorted(right))}: all checksums are right"
            self.row("srun -n 4 ring_and_all_to_all.py --size environment", came, round(time.monotonic() - began, 1))
        finally:
            broker.terminate()
            broker.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=400, help="of the run (default %(default)s)")
    parser.add_argument("--json", help="write the rows to this file, too")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with this
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATHS) is None]
    if os.geteuid() != 0 or missing:
        parser.error(f"this needs root, and Slurm and munge (missing: {', '.join(missing) or 'none'})")
    with tempfile.TemporaryDirectory(prefix="zs-") as folder:
        cluster = Cluster(Path(folder))
        check = Check(cluster)
        try:
            check.collectives()
            check.run_of_three_nodes(options.units)
            check.leaves_before_its_time_is_over()
        except SystemExit:
            for log in sorted(Path(folder).glob("*.log")) + sorted(Path(folder).glob("run*/*.log")):
                print(f"== {log}\n{log.read_text()[-3000:]}", file=sys.stderr)
            raise
        finally:
            cluster.close()
    print_table(check.rows, "the examples of Slurm")
    if options.json:
        write_json(options.json, check.rows)


if __name__ == "__main__":
    main()
