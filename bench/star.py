"""Build a star of one hub and N nodes on this machine, each port a link of a given rate, in network namespaces.

    zt..-hub eth0 ═══ hub ┐
    zt..-n0  eth0 ═══ n0  ├ bridge, in zt..-switch           each ═══ is shaped in both directions, at its sending end
    zt..-n1  eth0 ═══ n1  ┘

Rule 1: nothing outside the star's own namespaces is changed, and nothing in it can be reached from outside.
Rule 2: what was built is taken down on every way out; what a killed run leaves carries its process in its name, and
`clean` finds it.
Rule 3: a link is a serial line with a short queue: tbf with a burst of 1 ms (at least 16 KB, at most 128 KB), segments
no larger than that burst, and a tail-drop queue of 512 KB (4 ms at 1 Gb/s) at each end, as in a small switch.
Rule 4: TCP's congestion control is said, checked, and stands in every row: reno, which every Linux lets a namespace
choose, and which cubic, the default of most PCs, follows at a LAN's round trips (RFC 9438, section 4.3).
Source: Linux tc-tbf(8), ip-netns(8), veth(4).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from report import BusyMeter, format_rate, parse_rate, print_table, write_json

__all__ = ["Host", "PortCounters", "Star", "measure_ceiling", "plain_tcp_cpu", "remove_stale", "main"]

Host = int | Literal["hub"]
"""A node by its number, from 0, or "hub"."""
Flow = tuple[Host, Host]
"""Who sends, and who receives."""
Listener = tuple[subprocess.Popen[Any], str]
"""A process that listens, and its port."""

QUEUE_BYTES = 512 << 10
MIN_BURST_BYTES, MAX_BURST_BYTES = 16 << 10, 128 << 10
BURST_SECONDS = 1e-3
MAX_SEGMENT_BYTES = 64 << 10
CONGESTION_CONTROL = "reno"
CLOSE_SECONDS = 2.0
NEEDED_RIGHTS = "root (CAP_NET_ADMIN and CAP_SYS_ADMIN)"
NAME = re.compile(r"zt(\d+)\.(\d+)\.\d+-(?:hub|switch|n\d+)")
RAW_TCP = str(Path(__file__).with_name("raw_tcp.py"))

_serials = itertools.count()


@dataclass(frozen=True, slots=True)
class PortCounters:
    """What has passed one host's port since it was made, in bytes with all headers but the physical layer's.

    sent_bytes, received_bytes: as the host sees them (a large segment's headers count once: up to 4 % less than on the
    wire).
    dropped_sending, dropped_receiving: packets lost because the queue was full, in the host and in the switch.
    """

    sent_bytes: int
    received_bytes: int
    dropped_sending: int
    dropped_receiving: int


class Star:
    """A hub and `nodes` nodes on one switch; use it in a with-block.

    bits_per_second: the rate of every port, in each direction; `set_rate` changes one.  queue_bytes: the room for
    waiting packets at each end of a link.  congestion_control: TCP's, on all hosts, one that the machine lets a
    namespace choose.  Raises RuntimeError if this machine does not let us make network namespaces, or choose it.
    """

    def __init__(
        self,
        nodes: int,
        bits_per_second: float,
        queue_bytes: int = QUEUE_BYTES,
        congestion_control: str = CONGESTION_CONTROL,
    ) -> None:
        if not 1 <= nodes <= 250:
            raise ValueError(f"a star has 1 to 250 nodes, not {nodes}")
        self.nodes, self.bits_per_second, self.queue_bytes = nodes, bits_per_second, queue_bytes
        self.congestion_control = congestion_control
        pid = os.getpid()
        self.name = f"zt{pid}.{_start_ticks(pid)}.{next(_serials)}"
        self.hosts: tuple[Host, ...] = ("hub", *range(nodes))
        self._rates: dict[Host, float] = {}
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Star:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def hub_address(self) -> str:
        """The hub's IPv4 address in the star."""
        return "10.99.0.1"

    def node_address(self, node: int) -> str:
        """Return a node's IPv4 address in the star."""
        self._checked(node)
        return f"10.99.1.{node + 1}"

    def namespace(self, host: Host | Literal["switch"]) -> str:
        """Return the name of a host's network namespace."""
        return f"{self.name}-{host if host == 'switch' else _port(self._checked(host))}"

    def rate(self, host: Host) -> float:
        """Return the present rate of a host's port, in bits per second."""
        return self._rates[host]

    def popen(self, host: Host, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on a host; `options` are those of subprocess.Popen.

        The process is the program itself (`ip netns exec` replaces itself by it); it is ended when the star is closed.
        """
        process = subprocess.Popen(["ip", "netns", "exec", self.namespace(host), *argv], **options)
        self._processes.append(process)
        return process

    def set_link(self, host: Host, up: bool) -> None:
        """Plug a host's cable in or out: without it both ends lose the carrier, and what is on the way is lost."""
        _ip("-n", self.namespace("switch"), "link", "set", _port(self._checked(host)), "up" if up else "down")

    def set_rate(self, host: Host, bits_per_second: float) -> None:
        """Give a host's port another rate, in both directions; what waits in its queues is kept."""
        burst = int(min(max(bits_per_second / 8 * BURST_SECONDS, MIN_BURST_BYTES), MAX_BURST_BYTES))
        segment = min(burst, MAX_SEGMENT_BYTES)
        for namespace, device in ((self.namespace(host), "eth0"), (self.namespace("switch"), _port(host))):
            _ip("-n", namespace, "link", "set", device, "gso_max_size", str(segment))
            shape = ["tbf", "rate", f"{bits_per_second:.0f}bit", "burst", str(burst), "limit", str(self.queue_bytes)]
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "handle", "1:", *shape)
        self._rates[host] = bits_per_second

    def counters(self, host: Host) -> PortCounters:
        """Return what has passed a host's port since the star was built."""
        sent = _queue_statistics(self.namespace(host), "eth0")
        link = json.loads(_ip("-n", self.namespace(host), "-j", "-s", "link", "show", "eth0"))[0]["stats64"]
        received = _queue_statistics(self.namespace("switch"), _port(host))
        return PortCounters(link["tx"]["bytes"], link["rx"]["bytes"], sent["drops"], received["drops"])

    def close(self) -> None:
        """End the programs that were started here and remove the namespaces; closing twice does nothing."""
        for process in self._processes:
            process.terminate()  # does nothing to one that has ended
        for process in self._processes:
            try:
                process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        _remove(name for name in _namespaces() if name.startswith(f"{self.name}-"))

    def _build(self) -> None:
        switch = self.namespace("switch")
        _make_namespace(switch, self.congestion_control)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge", "forward_delay", "0", "stp_state", "0")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host in self.hosts:
            namespace, port = self.namespace(host), _port(host)
            _make_namespace(namespace, self.congestion_control)
            _ip("link", "add", "eth0", "netns", namespace, "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", namespace, "address", "add", f"{self._address(host)}/16", "dev", "eth0")
            self.set_rate(host, self.bits_per_second)
            _ip("-n", namespace, "link", "set", "eth0", "up")

    def _address(self, host: Host) -> str:
        return self.hub_address if host == "hub" else self.node_address(host)

    def _checked(self, host: Host) -> Host:
        if host not in self.hosts:
            raise ValueError(f"the hosts of this star are hub and 0 to {self.nodes - 1}, not {host!r}")
        return host


def measure_ceiling(star: Star, node: int = 0, seconds: float = 2.0) -> list[dict[str, Any]]:
    """Measure what plain TCP reaches between one node and the hub: round trips, each way, and both ways at once.

    Returns rows: what, megabytes_per_second (10^6 bytes of payload), ratio (to the port's rate), p50_milliseconds,
    p99_milliseconds, busy_share (of all cores; near 1 the machine is the limit, not the link), congestion_control.
    """
    up: tuple[Host, Host] = (node, "hub")
    down: tuple[Host, Host] = ("hub", node)
    rows = [_measure_ping(star, up)]
    for flows in ([up], [down], [up, down]):
        rows += _measure_flows(star, flows, seconds)
    return [row | {"congestion_control": star.congestion_control} for row in rows]


def plain_tcp_cpu(star: Star, seconds: float = 5.0) -> float:
    """Return the CPU seconds that plain TCP takes for 10^9 bytes, of sender and receiver together.

    All nodes send to the hub and receive from it at once, for so long: what any transport over TCP takes here at least.
    """
    nodes: list[Host] = list(range(star.nodes))
    up: list[Flow] = [(node, "hub") for node in nodes]
    flows = up + [("hub", node) for node in nodes]
    sent, received = _run_flows(star, flows, _listeners(star, flows, seconds))

    def seconds_per_byte(way: list[dict[str, float]]) -> float:
        return sum(one["cpu_seconds"] for one in way) / sum(one["bytes"] for one in way)

    return 1e9 * (seconds_per_byte(sent) + seconds_per_byte(received))


def remove_stale() -> list[str]:
    """Remove the namespaces of runs whose process is gone; return their names.

    A process is known by its number and the moment of its start, so that a number used again is not mistaken for it.
    """
    stale = []
    for name in _namespaces():
        if (match := NAME.fullmatch(name)) and _start_ticks(int(match[1])) != int(match[2]):
            stale.append(name)
    _remove(stale)
    return stale


def main() -> None:
    """Build a star and print its ceilings, or remove what a killed run has left behind."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "action",
        nargs="?",
        choices=["measure", "clean"],
        default="measure",
        help="measure the links (default), or clean up what a killed run left",
    )
    parser.add_argument("--nodes", type=int, default=4, help="how many nodes (default %(default)s)")
    parser.add_argument("--rate", type=parse_rate, default="1gbit", help="of each port, each way (default %(default)s)")
    parser.add_argument("--congestion-control", default=CONGESTION_CONTROL, help="TCP's (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the rows and the machine's description here")
    options = parser.parse_args()
    try:
        if options.action == "clean":
            print(f"removed {len(remove_stale())} stale namespaces")
            return
        with Star(options.nodes, options.rate, congestion_control=options.congestion_control) as star:
            rows = measure_ceiling(star, seconds=options.seconds)
    except RuntimeError as error:
        raise SystemExit(f"star: {error}") from error
    title = f"plain TCP between the hub and one of {options.nodes} nodes, every port {format_rate(options.rate)}"
    print_table(rows, title)
    if options.json:
        write_json(options.json, rows)


def _measure_ping(star: Star, way: tuple[Host, Host]) -> dict[str, Any]:
    source, sink = way
    listener, port = _start_listener(star, sink, "echo")
    with BusyMeter() as meter:
        trips = _result(_start_raw(star, source, "ping", star._address(sink), port))
        _result(listener)
    return {"what": f"ping 64 B, {_port(source)} to {_port(sink)}, idle"} | _row(None, None, trips, meter)


def _measure_flows(star: Star, flows: list[Flow], seconds: float) -> list[dict[str, Any]]:
    """Run one sender per (source, sink) at the same time; return a row for each."""
    listeners = _listeners(star, flows, seconds)
    with BusyMeter() as meter:
        _, results = _run_flows(star, flows, listeners)
    rows = []
    for (source, sink), result in zip(flows, results, strict=True):
        what = f"{_port(source)} to {_port(sink)}" + (", both ways at once" if len(flows) > 1 else "")
        bytes_per_second = result["bytes"] / result["seconds"]
        ratio = 8 * bytes_per_second / min(star.rate(source), star.rate(sink))
        rows.append({"what": what} | _row(bytes_per_second / 1e6, ratio, {}, meter))
    return rows


def _listeners(star: Star, flows: list[Flow], seconds: float) -> list[Listener]:
    """Start a receiver for each flow, which counts for so many seconds."""
    counting = ["receive", "--seconds", str(seconds), "--warmup-seconds", str(seconds / 4)]
    return [_start_listener(star, sink, *counting) for _, sink in flows]


def _run_flows(
    star: Star, flows: list[Flow], listeners: list[Listener]
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Run one sender per flow at the same time; return what the senders and the receivers measured."""
    senders = [
        _start_raw(star, source, "send", star._address(sink), port)
        for (source, sink), (_, port) in zip(flows, listeners, strict=True)
    ]
    received = [_result(receiver) for receiver, _ in listeners]
    return [_result(sender) for sender in senders], received


def _row(speed: float | None, ratio: float | None, trips: dict[str, float], meter: BusyMeter) -> dict[str, Any]:
    return {
        "megabytes_per_second": speed,
        "ratio": ratio,
        "p50_milliseconds": trips.get("p50_milliseconds"),
        "p99_milliseconds": trips.get("p99_milliseconds"),
        "busy_share": meter.busy_share,
    }


def _start_raw(star: Star, host: Host, *arguments: str) -> subprocess.Popen[Any]:
    return star.popen(host, [sys.executable, RAW_TCP, *arguments], stdout=subprocess.PIPE, text=True)


def _start_listener(star: Star, host: Host, *arguments: str) -> Listener:
    """Start a raw_tcp command that listens; return it and its port, once it listens."""
    process = _start_raw(star, host, *arguments)
    assert process.stdout is not None
    if not (port := process.stdout.readline().strip()):
        raise RuntimeError(f"raw_tcp.py {' '.join(arguments)} ended with {process.wait()} before it listened")
    return process, port


def _result(process: subprocess.Popen[Any]) -> dict[str, float]:
    """Wait for a raw_tcp command and return what it measured."""
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


def _port(host: Host) -> str:
    return "hub" if host == "hub" else f"n{host}"


def _make_namespace(name: str, congestion_control: str) -> None:
    """Make a namespace that speaks IPv4 only (the neighbour discovery of IPv6 would be traffic of its own)."""
    if os.geteuid() != 0:
        raise RuntimeError(f"a star of network namespaces needs {NEEDED_RIGHTS}: run it with sudo")
    _ip("netns", "add", name)
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("netns", "exec", name, "sh", "-c", "cd /proc/sys/net; [ ! -d ipv6 ] || echo 1 >ipv6/conf/all/disable_ipv6")
    setting = "/proc/sys/net/ipv4/tcp_congestion_control"
    try:
        _ip("netns", "exec", name, "sh", "-c", f'echo "$1" >{setting}', "sh", congestion_control)
    except RuntimeError as error:
        allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().strip()
        raise RuntimeError(
            f"a namespace of this machine may not choose the congestion control {congestion_control!r}; "
            f"it may: {allowed}"
        ) from error


def _queue_statistics(namespace: str, device: str) -> dict[str, Any]:
    listed = json.loads(_run("tc", "-n", namespace, "-j", "-s", "qdisc", "show", "dev", device))
    statistics: dict[str, Any] = next(queue for queue in listed if queue["kind"] == "tbf")
    return statistics


def _namespaces() -> list[str]:
    """Return the names of all network namespaces that have one."""
    try:
        return sorted(os.listdir("/run/netns"))
    except FileNotFoundError:
        return []


def _remove(names: Iterable[str]) -> None:
    for name in names:
        _ip("netns", "delete", name)


def _start_ticks(pid: int) -> int | None:
    """Return when a process was started, in ticks since boot; None if there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[22 - 3])
    except (FileNotFoundError, ProcessLookupError):  # the latter of one that ends while it is read
        return None


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*argv: str) -> str:
    """Run a command and return its output; raise RuntimeError with its own words if it fails or is not installed."""
    try:
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise RuntimeError(f"a star of network namespaces needs `{argv[0]}`: install the package iproute2") from None
    except subprocess.CalledProcessError as error:
        raise RuntimeError(
            f"`{' '.join(argv)}` failed: {error.stderr.strip()}. "
            f"A star of network namespaces needs {NEEDED_RIGHTS}, and a kernel with veth, bridge and tbf"
        ) from error


if __name__ == "__main__":
    main()
