"""A lab for tests: PCs that are folders of one machine, each with a home of its own, on the loopback.

What a person types on a PC runs there as typed, but for this: tcp://hub:5555 is the loopback and a free port; `scp` and
`ssh` copy and run between the folders; `pip install` puts a package of pure Python into a PC's own place; a PC's host
name is its own; and nodes train no faster than `PACE_SECONDS` a step, so that several share a core.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from threading import Condition
from types import TracebackType

from channels import kept_address

PROJECT = Path(__file__).parents[1]
BOUND_SECONDS = 120.0
PACE_SECONDS = "0.05"
KEYS = {"^C": signal.SIGINT, "^\\": signal.SIGQUIT}
ENDS = (0, -signal.SIGQUIT)
"""The exit codes of a program that has ended well, or by the key ^\\."""
LONG = re.compile(r"bin/zmqtrain-broker|bin/zmqtrain-node|\.venv/bin/python \w[\w/]*\.py|bin/zmqtrain status --watch")
"""Beginnings of commands that go on while others are typed, also on their PC, which has several terminals; the next one
of the same program is typed there when the one before it has ended."""
READY = {"bin/zmqtrain-broker": re.compile(r"^run-\w+.*: training", re.MULTILINE)}
"""Beginnings of commands -> what they show when they are ready: nobody types on before."""

PYTHON = """echo $$ > "$LAB/pids/$$"
case "$*" in "-m pip "*) shift 2; exec {python} "$LAB/pip.py" "$@" ;; esac
exec {python} -W ignore "$@"
"""
COMMAND = 'echo $$ > "$LAB/pids/$$"\nexec {python} -m zmqtrain.cli "$@"\n'
BROKER = """echo $$ > "$LAB/pids/$$"
case "$*" in *--bind*) ;; *) set -- "$@" --bind "tcp://*:$LAB_PORT" ;; esac
exec {python} -m zmqtrain.cli broker "$@"
"""
NODE = """echo $$ > "$LAB/pids/$$"
exec {python} -m zmqtrain.cli node "$@" --pace-seconds {pace}
"""
SSH = """pc=$1
shift
cd "$LAB/$pc" && HOME="$LAB/$pc" PYTHONPATH="$LAB/$pc/.site:{project}" exec sh -c "$*"
"""
SCP = """options=""
place() { case "$1" in *:*) echo "$LAB/${1%%:*}/${1#*:}" ;; *) echo "$1" ;; esac; }
for last; do :; done
for one; do
    case "$one" in
        -*) options="-r" ;;
        "$last") ;;
        *) cp $options "$(place "$one")" "$(place "$last")" || exit 1 ;;
    esac
done
"""
PIP = """from pathlib import Path
import os, shutil, sys, tomllib
command, *rest = sys.argv[1:]
folder = Path(rest[-1])
project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
assert command == "install", sys.argv
place = Path(os.environ["HOME"]) / ".site"
facts = place / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
facts.mkdir(parents=True, exist_ok=True)
(facts / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {project['name']}\\nVersion: {project['version']}\\n")
groups = project.get("entry-points", {})
(facts / "entry_points.txt").write_text(
    "".join(f"[{group}]\\n" + "".join(f"{k} = {v}\\n" for k, v in points.items()) for group, points in groups.items())
)
for module in folder.glob("*.py"):
    shutil.copy(module, place)
"""


class Program:
    """A command that was typed: what it has shown, and whether it has ended.

    changed: notified when it has shown a line, and when it has ended.  read: so many characters of what it has shown
    have been read.  allowed: the exit codes with which it may end.
    """

    def __init__(self, command: str, where: str, folder: Path, environment: dict[str, str], changed: Condition) -> None:
        self.command, self.where, self.shown, self.read, self.ended, self._changed = (
            command, where, "", 0, False, changed,
        )  # fmt: skip
        self.allowed = ENDS
        self.process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.shown += line
                self._changed.notify_all()
        self.process.wait()
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def press(self, key: str) -> None:
        """Press a key in its terminal: ^C or ^\\."""
        assert not self.ended, f"{key} in a terminal where nothing runs any more: {self}"
        os.killpg(self.process.pid, KEYS[key])

    def wait(self) -> int:
        """Wait for its end; return its exit code, negative for a signal."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.ended, BOUND_SECONDS), f"does not end: {self}"
        return self.process.returncode

    def wait_well(self) -> None:
        """Wait for its end, with an exit code with which it may end."""
        code = self.wait()
        assert code in self.allowed, f"ended with {code}: {self}"

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._reader.join(BOUND_SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __str__(self) -> str:
        return f"{self.where}$ {self.command}\n{self.shown}"


class Pc:
    """A PC: a folder with a home, and what is typed there.  name: also that of its folder in the lab's.

    place: the folder in which is typed, at first that of the clone.
    """

    def __init__(self, name: str, lab: Path, port: str, tree: str) -> None:
        self.name = name
        self.home = lab / name
        self.place = self.home / "zmqtrain"
        self.programs: list[Program] = []
        self.place.mkdir(parents=True)
        (self.place / "bin").symlink_to(lab / "bin")
        (self.place / ".venv").symlink_to(lab / "venv")
        (self.place / "docs").symlink_to(PROJECT / "docs")
        self.environment = {
            **os.environ,
            "HOME": str(self.home),
            "PATH": f"{lab / 'commands'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{self.home / '.site'}:{tree}",
            "LAB": str(lab),
            "LAB_PORT": port,
            "COLUMNS": "200",
            "PYTHONUNBUFFERED": "1",
        }
        self.environment.pop("XDG_CONFIG_HOME", None)
        (self.home / ".site").mkdir()
        names = f"import platform, socket\nsocket.gethostname = platform.node = lambda: {name!r}\n"
        (self.home / ".site" / "sitecustomize.py").write_text(names)

    @property
    def goes_on(self) -> Program:
        """The newest of its programs that go on while others are typed."""
        return next(program for program in reversed(self.programs) if LONG.match(program.command))

    def wait(self) -> None:
        """Wait until all that was typed here has ended, and well."""
        for program in self.programs:
            program.wait_well()


class Lab:
    """The PCs, by name, made when they are first named; at the end of the block nothing of them runs any more.

    interpreter: the Python of all PCs, which has zmqtrain installed; not given: this one, with the tree of the project.
    """

    def __init__(self, folder: Path, interpreter: Path | None = None) -> None:
        self.folder = folder
        self._tree = str(PROJECT) if interpreter is None else ""
        self.changed = Condition()
        self._pcs: dict[str, Pc] = {}
        self._end = contextlib.ExitStack()
        self.port = self._end.enter_context(kept_address()).rpartition(":")[2]
        (folder / "pids").mkdir()
        python = shlex.quote(str(interpreter or sys.executable))
        self.add_command("bin/zmqtrain", COMMAND.format(python=python))
        self.add_command("bin/zmqtrain-broker", BROKER.format(python=python))
        self.add_command("bin/zmqtrain-node", NODE.format(python=python, pace=PACE_SECONDS))
        self.add_command("venv/bin/python", PYTHON.format(python=python))
        self.add_command("commands/ssh", SSH.format(project=self._tree))
        self.add_command("commands/scp", SCP)
        (folder / "pip.py").write_text(PIP)

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for program in self.programs():
            program.kill()
        self._end.close()
        if kind is not None:  # the report of a test that failed has what was printed
            print(*self.programs(), sep="\n\n")

    def add_command(self, place: str, script: str) -> None:
        """Make a program of the lab, as the text of a shell script; those in commands/ are on the path of all PCs."""
        path = self.folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}")
        path.chmod(0o755)

    def pc(self, name: str) -> Pc:
        """Return the PC of that name."""
        if name not in self._pcs:
            self._pcs[name] = Pc(name, self.folder, self.port, self._tree)
        return self._pcs[name]

    def here(self, text: str) -> str:
        """Return a text of a page with the hub's address as it is here."""
        return text.replace("hub:5555", f"127.0.0.1:{self.port}").replace("127.0.0.1:5555", f"127.0.0.1:{self.port}")

    def type(self, name: str, text: str, allowed: tuple[int, ...] = ENDS) -> Program:
        """Type a command, or press a key, on a PC; return its program: ended, if it is not one of LONG.

        allowed: the exit codes with which it may end.
        """
        pc = self.pc(name)
        if text in KEYS:
            pc.goes_on.press(text)
            return pc.goes_on
        if text.startswith("cd "):
            pc.place = (pc.place / text.removeprefix("cd ").replace("~", str(pc.home))).resolve(strict=True)
            text = "cd ."
        if text.startswith("export "):
            pc.environment |= [text.removeprefix("export ").split("=", 1)]
        long = LONG.match(text)
        for former in pc.programs:
            if long and former.command.split()[0] == long[0].split()[0]:
                former.wait_well()
        program = Program(self.here(text), name, pc.place, pc.environment, self.changed)
        program.allowed = allowed
        pc.programs.append(program)
        if not long:
            program.wait_well()
        for start, shown in READY.items():
            if text.startswith(start):
                self.wait_shown([shown], [program])
                program.read = 0
        return program

    def wait_shown(self, patterns: Sequence[re.Pattern[str]], programs: Sequence[Program]) -> None:
        """Wait until these programs have shown all patterns, in any order, after what was read before; read so far.

        Fails when it has taken too long, or when none of the programs can show any more.
        """

        def missing() -> list[re.Pattern[str]]:
            return [one for one in patterns if not any(one.search(each.shown, each.read) for each in programs)]

        with self.changed:
            self.changed.wait_for(lambda: not missing() or all(one.ended for one in programs), BOUND_SECONDS)
            assert not missing(), f"not shown: {[one.pattern for one in missing()]}\n" + "\n".join(map(str, programs))
            for program in programs:
                found = [match.end() for one in patterns if (match := one.search(program.shown, program.read))]
                program.read = max(found, default=program.read)

    def wait(self) -> None:
        """Wait until everything has ended by itself, and well."""
        for pc in self._pcs.values():
            pc.wait()
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(process)) as its_end:
                assert select.select([its_end], [], [], BOUND_SECONDS)[0], f"does not end: process {process}"

    def programs(self) -> list[Program]:
        """All programs of all PCs."""
        return [program for pc in self._pcs.values() for program in pc.programs]

    def processes(self) -> list[int]:
        """The numbers of the processes of the PCs that live, also of those that `ssh` started in the background."""
        return [number for file in (self.folder / "pids").iterdir() if self._is_ours(number := int(file.name))]

    def _is_ours(self, process: int) -> bool:
        """Whether a process lives and is of this lab, and not another that has its number now."""
        try:
            return f"LAB={self.folder}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
