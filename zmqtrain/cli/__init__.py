"""The command line: `zmqtrain-broker`, `zmqtrain-node`, and the umbrella `zmqtrain` with all commands.

Rule 1: each command is a function that takes argv and returns an exit code; the umbrella only picks one.
Rule 2: a command's module is imported when it is run, so that none pays for another, and the broker needs no jax.
The import takes a second on a slow PC; Ctrl-C during it ends with exit code 0 and no traceback.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Sequence
from importlib import import_module

COMMANDS = {
    "broker": "start the broker of a run, on the hub",
    "node": "train on this PC as a node of a run",
    "local": "a broker and several nodes on this PC, to try out",
    "status": "show how a run stands",
    "page": "show a run in a browser",
    "programs": "the programs that nodes can train, and their arguments",
    "stop": "end a run: its nodes send what they have and end, its broker saves",
    "promote": "tell a standby to take over its run",
    "plan": "what a run can be set to, and what it then does: before it begins",
    "doctor": "whether this PC can train with a hub, and what to fix",
    "units": "the systemd units of a broker and of nodes, as services",
    "keys": "make, list and revoke the keys with which PCs come in",
    "report": "pictures and tables of a recorded run, or of several, in one file",
    "export": "take the model out of a run, or out of its folder",
    "merge": "make one model of the parts that several brokers wrote",
    "sim": "a run on modelled computers and wires, in virtual time",
    "chaos": "a broker and nodes on this PC, broken on purpose: what came of it",
    "demo": "several nodes against one alone on real text, with a plot",
}
"""The commands of the umbrella: each is `main` of the module of that name in this folder, or stands in PLACES."""

PLACES = {name: ("operate", f"{name}_main") for name in ("status", "stop", "promote", "keys")}
PLACES["merge"] = ("export", "merge_main")

USAGE = "usage: zmqtrain COMMAND [OPTIONS]      (zmqtrain COMMAND --help says more)\n\n"
VERSION = "zmqtrain --version prints the version, and that of the protocol."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code, 2 if there is no such command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--version"]:
        print(import_module("zmqtrain.cli.version").version_line())
        return 0
    listed = "\n".join(f"  {name:<8} {purpose}" for name, purpose in COMMANDS.items())
    code = no_command("zmqtrain", arguments, COMMANDS, f"{USAGE}{listed}\n\n{VERSION}")
    return _run(arguments[0], arguments[1:]) if code is None else code


def no_command(program: str, arguments: Sequence[str], commands: Collection[str], usage: str) -> int | None:
    """Return None if `arguments` begin with one of these commands; else print the usage or what is wrong, and return
    the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage)
        return 0 if arguments else 2
    if arguments[0] in commands:
        return None
    close = difflib.get_close_matches(arguments[0], commands, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(commands)}."
    print(f"{program}: there is no command {arguments[0]!r}; {hint}", file=sys.stderr)
    return 2


def broker_main() -> int:
    return _run("broker", None)


def node_main() -> int:
    return _run("node", None)


def _run(name: str, arguments: Sequence[str] | None) -> int:
    module, function = PLACES.get(name, (name, "main"))
    try:
        command = getattr(import_module(f"zmqtrain.cli.{module}"), function)
    except KeyboardInterrupt:
        return 0
    code: int = command(arguments)
    return code
