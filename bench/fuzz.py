"""Fuzz what reads what others wrote: heads, payloads, the hub, a node's machine, collectives, checkpoints, keys.

    python bench/fuzz.py --frames 10M                 all targets, guided by coverage where atheris is installed
    python bench/fuzz.py --minutes 5                  the nightly form
    python bench/fuzz.py --target broker --seed 7 --frames 100k
    python bench/fuzz.py --target broker --run FILE   one input again, as a crash says

Rule 1: an input is mutated from honest ones by mutations that know what a message is (fuzz_inputs); frames are counted.
Rule 2: a crash is written to a file, with the line that reproduces it, and is smaller than it was: records that it does
not need are taken out.  Rule 3: each target has a process of its own, or as many as --jobs says; without atheris
(`pip install -e ".[fuzz]"`), or with --plain, the same mutations are drawn from a seed, without guidance.
Source: libFuzzer and atheris, custom mutators.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from report import print_table, write_json

__all__ = ["Counted", "fuzz_plainly", "has_atheris", "minimise", "read_count", "main"]

UNITS = {"": 1, "k": 10**3, "m": 10**6}
LONGEST_INPUT = 1 << 17
RECENT = 512
"""Inputs of late that others are mutated from, besides the honest ones."""


def read_count(text: str) -> int:
    """Return a count that people write: 500, 100k, 10M. Raises ValueError."""
    lower = text.strip().lower()
    unit = lower[-1:] if lower[-1:] in ("k", "m") else ""
    return int(float(lower[: len(lower) - len(unit)]) * UNITS[unit])


def has_atheris() -> bool:
    """Return whether atheris can be imported here."""
    from importlib.util import find_spec

    return find_spec("atheris") is not None


class Counted:
    """One target, told input by input until it has had enough. frames, seconds: 0: no limit.

    crash: the first input that is a bug, and how it failed.
    """

    def __init__(self, name: str, frames: int, seconds: float) -> None:
        from fuzz_targets import TARGETS

        self.name, self.target = name, TARGETS[name]
        self.most_frames, self.most_seconds = frames, seconds
        self.inputs = self.frames = 0
        self.crash: tuple[bytes, str] | None = None
        self.began = time.monotonic()

    @property
    def enough(self) -> bool:
        """Whether it has had all that it was to have, or has found a bug."""
        late = 0 < self.most_seconds <= time.monotonic() - self.began
        return self.crash is not None or late or 0 < self.most_frames <= self.frames

    def take(self, data: bytes) -> None:
        """Run one input; keep it if it is a bug."""
        self.inputs += 1
        try:
            self.frames += self.target.run(data)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self.crash = data, "".join(traceback.format_exception(error))

    def row(self) -> dict[str, Any]:
        """Return what has been done."""
        seconds = time.monotonic() - self.began
        return {
            "target": self.name,
            "inputs": self.inputs,
            "frames": self.frames,
            "seconds": seconds,
            "frames_per_second": self.frames / seconds,
            "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
            "crash": self.crash is not None,
        }


def fuzz_plainly(counted: Counted, seed: int) -> None:
    """Mutate honest inputs, and what came of them, as the seed says, until it is enough."""
    random, honest = Random(seed), counted.target.corpus()
    for data in honest:
        counted.take(data)
    recent: list[bytes] = []
    while not counted.enough:
        source = random.choice(recent) if recent and random.random() < 0.3 else random.choice(honest)
        data = counted.target.mutate(source, random, honest)[:LONGEST_INPUT]
        counted.take(data)
        if len(recent) < RECENT:
            recent.append(data)
        elif random.random() < 0.05:
            recent[random.randrange(RECENT)] = data


def fuzz_guided(counted: Counted, seed: int, folder: Path, crashes: Path) -> None:
    """Let libFuzzer choose what is mutated, by what new code it reaches. Does not return: the process ends.

    folder: for its corpus.  crashes: where it leaves an input that ends the interpreter itself.
    """
    import atheris

    honest = counted.target.corpus()
    for number, data in enumerate(honest):
        (folder / f"honest-{number}").write_bytes(data)
        counted.take(data)

    def mutate(data: bytes, most: int, chosen: int) -> bytes:
        random = Random(chosen)
        if random.random() < 0.1:
            return bytes(atheris.Mutate(data, most))
        return counted.target.mutate(bytes(data), random, honest)[:most]

    def take(data: bytes) -> None:
        counted.take(bytes(data))
        if counted.enough:
            sys.stdout.flush()
            _report(counted)
            os._exit(0)

    arguments = [sys.argv[0], f"-seed={1 + seed}", f"-max_len={LONGEST_INPUT}", "-len_control=0", "-verbosity=0"]
    atheris.Setup(
        [*arguments, "-rss_limit_mb=0", "-timeout=120", f"-artifact_prefix={crashes}/", str(folder)],
        take,
        custom_mutator=mutate,
    )
    atheris.Fuzz()


def minimise(data: bytes, fails: Callable[[bytes], str]) -> bytes:
    """Return an input that fails in the same way with as few records as single removals come to.

    fails: says how an input fails, "" if it does not.
    """
    from fuzz_inputs import pack_session, read_session

    how = fails(data)
    seed, records = read_session(data)
    if not how or fails(pack_session(seed, records)) != how:
        return data
    at = 0
    while at < len(records):
        fewer = [*records[:at], *records[at + 1 :]]
        if fails(pack_session(seed, fewer)) == how:
            records = fewer
        else:
            at += 1
    return pack_session(seed, records)


def main() -> None:
    """Fuzz what the command line asks for; fail if anything was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", nargs="+", default=[], help="which (default all)")
    parser.add_argument("--frames", type=read_count, default=0, help="so many, of all targets together: 100k, 10M")
    parser.add_argument("--minutes", type=float, default=0.0, help="so long, all targets together (default 1)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default %(default)s)")
    parser.add_argument("--plain", action="store_true", help="without guidance by coverage")
    parser.add_argument("--run", metavar="FILE", help="run one input of the one target")
    parser.add_argument("--crashes", metavar="FOLDER", default="crashes", help="where crashes go (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        from fuzz_targets import TARGETS

        frames = TARGETS[options.target[0]].run(Path(options.run).read_bytes())
        print(f"{options.run}: {frames} frames, nothing wrong")
    elif options.child:
        _be_child(options)
    else:
        _fuzz_all(options)


def _be_child(options: argparse.Namespace) -> None:
    name = options.target[0]
    guided = not options.plain and has_atheris()
    if guided:
        import atheris

        # what is compiled to machine code cannot be told apart branch by branch
        with atheris.instrument_imports(include=["zmqtrain"], exclude=["zmqtrain.codecs.fast"]):
            import fuzz_targets  # noqa: F401 - and all that it imports
    counted = Counted(name, options.frames, 60 * options.minutes)
    if not guided:
        fuzz_plainly(counted, options.seed)
        _report(counted)
        return
    with tempfile.TemporaryDirectory() as folder:
        fuzz_guided(counted, options.seed, Path(folder), Path(options.crashes).resolve())


def _report(counted: Counted) -> None:
    row = counted.row()
    if counted.crash is not None:
        data, text = counted.crash
        small = minimise(data, lambda one: _how(counted, one))
        row |= {"input": small.hex(), "text": text}
    print(json.dumps(row), flush=True)


def _how(counted: Counted, data: bytes) -> str:
    """Say where and with what an input fails, "" if it does not."""
    try:
        counted.target.run(data)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {last.filename}:{last.lineno}"
    return ""


def _fuzz_all(options: argparse.Namespace) -> None:
    from fuzz_targets import TARGETS

    names = options.target or list(TARGETS)
    Path(options.crashes).mkdir(parents=True, exist_ok=True)
    whole = sum(TARGETS[name].share for name in names)
    minutes = options.minutes or (0.0 if options.frames else 1.0)
    waiting, running, rows = list(names), list[tuple[str, subprocess.Popen[str]]](), list[dict[str, Any]]()
    while waiting or running:
        while waiting and len(running) < options.jobs:
            name = waiting.pop(0)
            share = TARGETS[name].share / whole
            running.append((name, _start(options, name, round(options.frames * share), minutes * share * options.jobs)))
        name, process = running.pop(0)
        said, _ = process.communicate()
        rows.append(_read_row(name, said, process.returncode, Path(options.crashes), options.seed))
        print(f"{name}: {rows[-1]['frames']} frames", flush=True)
    print_table([{key: row[key] for key in rows[0]} for row in rows], "guided" if _guided(options) else "plain")
    if options.json:
        write_json(options.json, rows)
    if any(row["crash"] for row in rows):
        raise SystemExit(1)


def _guided(options: argparse.Namespace) -> bool:
    return not options.plain and has_atheris()


def _start(options: argparse.Namespace, name: str, frames: int, minutes: float) -> subprocess.Popen[str]:
    arguments = ["--child", "--target", name, "--frames", str(frames), "--minutes", str(minutes)]
    arguments += ["--seed", str(options.seed), "--crashes", options.crashes, *(["--plain"] if options.plain else [])]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    return subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, env=environment)


def _read_row(name: str, said: str, code: int, folder: Path, seed: int) -> dict[str, Any]:
    lines = [line for line in said.splitlines() if line.startswith("{")]
    if not lines:  # a crash of the interpreter itself; where it was guided, libFuzzer has left the input
        print(
            f"{name}: the process ended with {code}; look in {folder}, or the same again: --target {name} --seed {seed}"
        )
        keys = ("inputs", "frames", "seconds", "frames_per_second", "rss_mb")
        return {"target": name, **dict.fromkeys(keys, 0), "crash": True}
    row: dict[str, Any] = json.loads(lines[-1])
    if row["crash"]:
        data = bytes.fromhex(row.pop("input"))
        path = folder / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
        path.write_bytes(data)
        print(f"{row.pop('text')}\nthe same again: python bench/fuzz.py --target {name} --run {path}", flush=True)
    return row


if __name__ == "__main__":
    main()
