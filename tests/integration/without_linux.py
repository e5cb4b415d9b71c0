"""Hide from Python what only Linux has, import every module of zmqtrain again, and train a run of two nodes.

It stands in for a Mac: names that Python's documentation calls Linux's own (or that macOS lacks) are gone, /proc and
/sys are not there, and the platform is darwin. What libzmq and XLA do on a Mac it cannot say.
"""

from __future__ import annotations

import builtins
import importlib
import io
import os
import pkgutil
import platform
import re
import resource
import select
import selectors
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import zmqtrain

HERE = Path(__file__).parent
HIDDEN = {
    os: r"sched_(?!yield).*|memfd_create|eventfd.*|EFD_.*|MFD_.*|pidfd_open|PIDFD_.*|splice|SPLICE_.*|copy_file_range|"
    r"posix_fadvise|posix_fallocate|POSIX_FADV_.*|fdatasync|getrandom|GRND_.*|unshare|setns|CLONE_.*|timerfd.*|TFD_.*|pipe2|"
    r"[gs]etresuid|[gs]etresgid|(get|set|list|remove)xattr|XATTR_.*|O_DIRECT|O_TMPFILE|O_PATH|O_NOATIME|O_LARGEFILE|RWF_.*|"
    r"P_PIDFD|SCHED_.*",
    resource: r"prlimit|RUSAGE_THREAD|RLIMIT_(MSGQUEUE|NICE|RTPRIO|RTTIME|SIGPENDING|OFILE)",
    select: r"epoll|EPOLL.*|POLLRDHUP",
    signal: r"pidfd_send_signal|sigtimedwait|sigwaitinfo|SIGPWR|SIGPOLL|SIGSTKFLT|SIGCLD|SIGRTMIN|SIGRTMAX",
    socket: r"AF_(PACKET|NETLINK|VSOCK|CAN|ALG|TIPC|QIPCRTR|RDS|BLUETOOTH)|PACKET_.*|NETLINK_.*|"
    r"SO_(PEERCRED|BINDTODEVICE|MARK|DOMAIN|PROTOCOL|INCOMING_CPU|PASSCRED|PEERSEC|PRIORITY)|"
    r"TCP_(CORK|DEFER_ACCEPT|INFO|LINGER2|QUICKACK|SYNCNT|USER_TIMEOUT|WINDOW_CLAMP|CONGESTION|KEEPIDLE|ULP)|"
    r"MSG_(NOSIGNAL|MORE|ERRQUEUE|CONFIRM|CMSG_CLOEXEC)|SOCK_(CLOEXEC|NONBLOCK)|"
    r"IP_(RECVERR|TRANSPARENT|BIND_ADDRESS_NO_PORT)",
    time: r"CLOCK_(BOOTTIME|TAI|.*COARSE|REALTIME_.*)|pthread_getcpuclockid",
}
"""Module -> a pattern of its names that are taken away."""
FOLDERS = ("/proc/", "/sys/")


def import_all() -> list[str]:
    """Import every module of the package; return their names."""
    found = (module.name for module in pkgutil.walk_packages(zmqtrain.__path__, "zmqtrain."))
    names = [name for name in found if not name.endswith(".__main__")]  # which runs a command
    for name in names:
        importlib.import_module(name)
    return names


def hide() -> None:
    for module, pattern in HIDDEN.items():
        for name in [name for name in vars(module) if re.fullmatch(pattern, name)]:
            delattr(module, name)
    whole_open, whole_stat = io.open, os.stat

    def refuse(file: Any) -> None:
        if isinstance(file, str | os.PathLike) and os.fspath(file).startswith(FOLDERS):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(file))

    def opened(file: Any, *arguments: Any, **options: Any) -> Any:
        refuse(file)
        return whole_open(file, *arguments, **options)

    def looked_at(file: Any, **options: Any) -> Any:
        refuse(file)
        return whole_stat(file, **options)

    builtins.open = io.open = opened  # type: ignore[assignment]
    os.stat = looked_at  # type: ignore[assignment]
    selectors.DefaultSelector = selectors.PollSelector  # type: ignore[misc]
    del selectors.EpollSelector
    platform.system = lambda: "Darwin"
    sys.platform = "darwin"


def train(folder: Path) -> None:
    """Train the tiny model of the other tests with two nodes, and let the broker save it."""
    sys.path.insert(0, str(HERE))
    runs = importlib.import_module("runs")
    settings = importlib.import_module("zmqtrain.core.settings").RunSettings
    with runs.broker(settings(every=2, delay=1, units=12, start_nodes=2, initial="founder")) as hub:
        trainers = [runs.Trainer(hub.address, name) for name in ("pc-1", "pc-2")]
        models = [trainer.join() for trainer in trainers]
    held_out = next(runs.batches(10**6))
    assert all(runs.loss(model, held_out) < runs.loss(runs.parameters(), held_out) for model in models)
    file = folder / "model.safetensors"
    importlib.import_module("zmqtrain.models").save_model(file, models[0])
    assert file.is_file()


def look() -> None:
    """Ask the commands that look at the machine."""
    doctor = importlib.import_module("zmqtrain.cli.doctor")
    doctor._ask_devices = lambda: ((), "")  # which starts a Python that has everything
    machine = doctor.look_at_machine(Path())
    assert machine.cores >= 1 and machine.free_memory_bytes is None
    assert list(doctor.judge_machine(machine))
    assert doctor._interface_of("127.0.0.1") is None
    assert importlib.import_module("zmqtrain.cli.local").share_of_cores(0, 2) == set()


if __name__ == "__main__":
    before = import_all()  # which imports the packages of others, as they are on this system
    for name in [name for name in sys.modules if name == "zmqtrain" or name.startswith("zmqtrain.")]:
        del sys.modules[name]
    hide()
    zmqtrain = importlib.import_module("zmqtrain")
    assert import_all() == before
    with tempfile.TemporaryDirectory() as made:
        train(Path(made))
    look()
    print(f"{len(before)} modules")
