"""Run broker and nodes as the services of `zmqtrain units`, under a real systemd: kill, hang and stop them.

    sudo .venv/bin/python bench/under_systemd.py

Needs root on a Linux machine with systemd 250 or newer. Its own systemd is process 1 of namespaces (mounts,
processes, network, control groups) in which it sees the machine's files, and writes to memory: the machine's own
systemd, its units and its network are not touched, and nothing is left when the bench has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import print_table, write_json

PROJECT = Path(__file__).resolve().parents[1]
SYSTEMD = "/lib/systemd/systemd"
HUB = "tcp://127.0.0.1:5555"
TARGET = "zmqtrain-check.target"
NOT_HERE = [
    *(f"systemd-{name}" for name in ("remount-fs", "sysctl", "udevd", "udev-trigger", "modules-load", "logind")),
    *(f"systemd-{name}" for name in ("tmpfiles-setup-dev", "firstboot", "machine-id-commit", "boot-update")),
    *(f"systemd-{name}" for name in ("networkd", "resolved", "timesyncd")),
    *("kmod-static-nodes", "networking", "ldconfig"),
]
"""Services of a boot that would look at devices, or at what the namespaces share with the machine."""
INSIDE = """set -e
mount --make-rprivate /
mount -t tmpfs tmpfs {work}
for place in etc var root; do
    mkdir -p {work}/$place/upper {work}/$place/work
    cp -a {files}/$place/. {work}/$place/upper 2>/dev/null || true
    chmod 755 {work}/$place/upper  # for services that run as users of their own
    mount -t overlay overlay -o lowerdir=/$place,upperdir={work}/$place/upper,workdir={work}/$place/work /$place
done
mkdir {work}/dev
mount -t tmpfs -o mode=755 tmpfs {work}/dev
for node in null zero full random urandom tty; do
    touch {work}/dev/$node && mount --bind /dev/$node {work}/dev/$node
done
mkdir {work}/dev/pts {work}/dev/shm
mount -t tmpfs -o mode=1777 tmpfs {work}/dev/shm
mount --rbind {work}/dev /dev
mount -t tmpfs -o mode=755 tmpfs /run
mount -t proc proc /proc
mount --bind /proc/sys /proc/sys && mount -o remount,ro,bind /proc/sys
umount -R /sys/fs/cgroup 2>/dev/null || true
mount -t sysfs -o ro sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount --make-rshared /  # as systemd finds it where it is the first process of a machine
ip link set lo up
exec env -i container=zmqtrain PATH=/usr/sbin:/usr/bin:/sbin:/bin {systemd} --unit={target} --show-status=no
"""
SECONDS = 120.0


class Systemd:
    """A systemd in namespaces of its own. files: a folder with etc and var, which are laid over the machine's."""

    def __init__(self, files: Path, work: Path) -> None:
        script = INSIDE.format(files=files, work=work, systemd=SYSTEMD, target=TARGET)
        flags = ["--mount", "--pid", "--fork", "--uts", "--ipc", "--net", "--cgroup", "--kill-child"]
        self._group = control_groups() / f"zmqtrain-{os.getpid()}"
        self._group.mkdir()
        enter = ["sh", "-c", f'echo $$ > {self._group}/cgroup.procs; exec "$@"', "enter"]  # then this is the root
        self._process = subprocess.Popen([*enter, "unshare", *flags, "sh", "-c", script], stdin=subprocess.DEVNULL)
        self._first = ""

    def wait_until_booted(self) -> None:
        def booted() -> bool:
            if self._process.poll() is not None:
                raise SystemExit(f"systemd has ended with {self._process.returncode}")
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
            self._first = children[0] if children else ""
            return bool(self._first) and self("systemctl", "is-active", TARGET).stdout.strip() == "active"

        wait("systemd", booted)

    def __call__(self, *command: str, check: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command beside the services."""
        enter = ["nsenter", f"--target={self._first}", "--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup"]
        result = subprocess.run([*enter, *command], capture_output=True, text=True)
        if check and result.returncode != 0:
            raise SystemExit(f"{' '.join(command)}: {result.returncode}\n{result.stdout}{result.stderr}")
        return result

    def show(self, unit: str) -> dict[str, str]:
        """Return a unit's properties."""
        lines = self("systemctl", "show", unit).stdout.splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def journal(self, unit: str) -> str:
        return self("journalctl", "--no-pager", "-o", "cat", "-u", unit).stdout

    def close(self) -> None:
        """End all of it: what is in the namespaces ends with process 1."""
        self._process.kill()
        self._process.wait()
        wait(
            "the end of all services", lambda: not (self._group / "cgroup.events").read_text().startswith("populated 1")
        )
        for folder in sorted(self._group.rglob("*/"), reverse=True):
            folder.rmdir()
        self._group.rmdir()


def control_groups() -> Path:
    """Return where the machine has its control groups, of version 2."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(place)
    raise SystemExit("this machine has no control groups of version 2 (mount -t cgroup2)")


def wait(what: str, condition: Callable[[], bool]) -> float:
    """Wait until it is so; return how many seconds that took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > SECONDS:
            raise SystemExit(f"{what}: not within {SECONDS:g} s")
        time.sleep(0.1)
    return round(time.monotonic() - began, 1)


def write_files(folder: Path) -> None:
    """Make what is laid over the machine's files: the units as they are installed, and a boot of nothing else."""
    (folder / "var").mkdir()
    units = folder / "etc/systemd/system"
    command = [sys.executable, "-m", "zmqtrain.cli", "units", "--install", "--root", str(folder), "--hub", HUB]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(PROJECT)})
    settings = folder / "etc/zmqtrain/broker.toml"
    settings.write_text(settings.read_text() + 'program_arguments = "width=16,layers=1,context=32"\n')
    (folder / "etc/fstab").write_text("")
    for name in NOT_HERE:
        (units / f"{name}.service").symlink_to("/dev/null")
    (units / TARGET).write_text(
        "[Unit]\nDescription=A boot for the check\nRequires=sysinit.target\nAfter=sysinit.target\n"
    )
    for unit in ("zmqtrain-broker.service", "zmqtrain-node@.service"):
        drop_in = units / f"{unit}.d"
        drop_in.mkdir()
        path = f"Environment=PYTHONPATH={PROJECT} JAX_PLATFORMS=cpu\n"
        watchdog = "WatchdogSec=4\n" if "broker" in unit else ""
        (drop_in / "check.conf").write_text(f"[Service]\n{path}{watchdog}")


class Check:
    """What was done to the services, and what came of it, as rows."""

    def __init__(self, systemd: Systemd) -> None:
        self.systemd, self.rows = systemd, list[dict[str, Any]]()

    def row(self, what: str, came: str, seconds: float) -> None:
        self.rows.append({"what was done": what, "what came of it": came, "seconds": seconds})
        print(f"{what}: {came} ({seconds} s)", flush=True)

    def well(self, *more: str) -> bool:
        return self.systemd(*STATUS, *more).returncode == 0

    def start(self) -> None:
        began = time.monotonic()
        self.systemd("systemctl", "start", BROKER, check=True)
        unit = self.systemd.show(BROKER)
        self.row("systemctl start zmqtrain-broker", f"{unit['ActiveState']}: {unit['StatusText']}", since(began))
        made = "/var/lib/zmqtrain-broker/keys/nodes/lab.key_secret"
        self.systemd("install", "-m", "600", made, "/etc/zmqtrain/node.key_secret", check=True)
        began = time.monotonic()
        self.systemd("systemctl", "start", *NODES, check=True)
        units = [self.systemd.show(node) for node in NODES]
        self.row("systemctl start zmqtrain-node@0 @1", ", ".join(unit["StatusText"] for unit in units), since(began))
        wait("versions", lambda: "version" in self.systemd.show(BROKER)["StatusText"] and self.version() > 2)

    def version(self) -> int:
        found = re.search(r"version (\d+)", self.systemd.show(BROKER)["StatusText"])
        return int(found[1]) if found else -1

    def steps(self) -> int:
        """Return how many steps the slower node has made since it was started."""
        status = [*(word for word in STATUS if word != "--check"), "--json"]
        members = json.loads(self.systemd(*status, check=True).stdout)["members"]
        return min(int(member.get("step", 0)) for member in members)

    def kill(self, unit: str, signal: str, what: str, back: Callable[[], bool]) -> None:
        before = self.systemd.show(unit)
        self.systemd("systemctl", "kill", "--kill-who=main", f"--signal={signal}", unit, check=True)

        def started_again() -> bool:
            now = self.systemd.show(unit)
            return now["ActiveState"] == "active" and now["MainPID"] not in ("0", before["MainPID"]) and back()

        seconds = wait(what, started_again)
        now = self.systemd.show(unit)
        self.row(what, f"started again ({now['NRestarts']} so far): {now['StatusText']}", seconds)

    def stop(self, unit: str, what: str) -> None:
        began = time.monotonic()
        self.systemd("systemctl", "stop", unit, check=True)
        now = self.systemd.show(unit)
        said = [line for line in self.systemd.journal(unit).splitlines() if re.search(WORDS, line)]
        words = said[-1].partition(", and")[0] if said else ""
        came = f"{now['ActiveState']}, {now['Result']}, exit code {now['ExecMainStatus']}: {words}"
        self.row(what, came, since(began))
        if (now["Result"], now["ExecMainStatus"]) != ("success", "0"):
            raise SystemExit(self.systemd.journal(unit))


BROKER, NODES = "zmqtrain-broker", ("zmqtrain-node@0", "zmqtrain-node@1")
WORDS = r"this node left|the model:|is over"
STATUS = (sys.executable, "-m", "zmqtrain.cli", "status", HUB, "--keys", "/etc/zmqtrain/node.key_secret", "--check")


def since(began: float) -> float:
    return round(time.monotonic() - began, 1)


def run(systemd: Systemd) -> list[dict[str, Any]]:
    check = Check(systemd)
    check.start()
    host = systemd("uname", "--nodename").stdout.strip().partition(".")[0]
    names = [f"{host}-{number}" for number in (0, 1)]

    def all_there() -> bool:
        return all(check.well("--node", name) for name in names)

    version = check.version()
    check.kill(
        BROKER, "KILL", "the broker is killed; its nodes come back", lambda: all_there() and check.version() > version
    )
    check.kill(BROKER, "STOP", "the broker hangs (SIGSTOP), with a watchdog of 4 s", all_there)
    check.kill(NODES[1], "KILL", "a node is killed", all_there)
    wait("steps of both", lambda: check.steps() > 20)
    check.stop(NODES[0], "systemctl stop zmqtrain-node@0")
    check.stop(NODES[1], "systemctl stop zmqtrain-node@1")
    check.stop(BROKER, "systemctl stop zmqtrain-broker")
    model = systemd("ls", "-l", "/var/lib/zmqtrain-broker/run1/model.safetensors", check=True)
    check.row("the model", model.stdout.split()[-1], 0.0)
    exposure = systemd("systemd-analyze", "security", "--no-pager", BROKER, NODES[0])
    print(re.findall(r"Overall exposure.*", exposure.stdout))
    return check.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the rows to this file, too")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with this
    if os.geteuid() != 0 or not Path(SYSTEMD).exists():
        parser.error("this needs root, and systemd")
    with tempfile.TemporaryDirectory(prefix="zmqtrain-systemd-") as folder:
        files, work = Path(folder) / "files", Path(folder) / "work"
        files.mkdir()
        work.mkdir()
        write_files(files)
        systemd = Systemd(files, work)
        try:
            systemd.wait_until_booted()
            rows = run(systemd)
        except SystemExit:
            for unit in (BROKER, *NODES):
                print(f"== {unit}\n{systemd.journal(unit)}", file=sys.stderr)
            raise
        finally:
            systemd.close()
    print_table(rows, "services under systemd")
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
