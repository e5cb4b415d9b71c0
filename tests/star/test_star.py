"""The star of network namespaces that the benches measure on; needs root, `ip` and `tc`, and fails without them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from star import RAW_TCP, Host, Star, measure_ceiling, remove_stale

NAMESPACES = Path("/run/netns")
COUNT = 3_000_000


@pytest.fixture
def star() -> Iterator[Star]:
    """Two nodes on ports of 200 Mb/s."""
    with Star(nodes=2, bits_per_second=200e6) as star:
        yield star


def run(star: Star, host: Host, *arguments: str) -> subprocess.Popen[str]:
    return star.popen(
        host, [sys.executable, RAW_TCP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def transfer(star: Star, source: Host, sink: Host) -> int:
    """Send COUNT bytes from one host to another and return how many came, or 0 if no connection could be made."""
    receiver = run(star, sink, "receive", "--seconds", "30")
    assert receiver.stdout is not None
    port = receiver.stdout.readline().strip()
    address = star.hub_address if sink == "hub" else star.node_address(sink)
    sender = run(star, source, "send", address, port, "--limit-bytes", str(COUNT))
    sender.communicate()
    if sender.returncode:
        receiver.kill()
        receiver.communicate()
        return 0
    output, _ = receiver.communicate()
    return int(json.loads(output)["bytes"])


def namespaces_of(star: Star) -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"{star.name}-*")]


def carrier(star: Star, host: Host) -> str:
    show = star.popen(host, ["cat", "/sys/class/net/eth0/carrier"], stdout=subprocess.PIPE, text=True)
    return str(show.communicate()[0]).strip()


def test_bytes_pass_between_every_two_hosts(star: Star) -> None:
    for source, sink in itertools.permutations(star.hosts, 2):
        assert transfer(star, source, sink) == COUNT, f"{source} to {sink}"


def test_the_counters_of_both_ports_see_what_was_sent(star: Star) -> None:
    assert transfer(star, 0, "hub") == COUNT
    assert star.counters(0).sent_bytes >= COUNT
    assert star.counters("hub").received_bytes >= COUNT
    assert star.counters(1).sent_bytes < COUNT


@pytest.mark.nightly
def test_a_port_carries_no_more_than_its_rate(star: Star) -> None:
    star.set_rate(0, 50e6)
    rows = measure_ceiling(star, node=0, seconds=2.0)
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    assert len(ratios) == 4
    assert all(0 < ratio < 1.1 for ratio in ratios), ratios


def test_a_link_can_be_cut_and_restored(star: Star) -> None:
    star.set_link(0, up=False)
    assert carrier(star, 0) == "0"
    assert transfer(star, 0, "hub") == 0
    assert transfer(star, 1, "hub") == COUNT
    star.set_link(0, up=True)
    assert carrier(star, 0) == "1"
    assert transfer(star, 0, "hub") == COUNT


def test_a_program_of_the_star_is_the_process_itself_and_ends_with_it() -> None:
    with Star(nodes=1, bits_per_second=1e9) as star:
        process = star.popen(
            0,
            [sys.executable, "-c", "import os; print(os.getpid(), flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            assert int(process.stdout.readline()) == process.pid
            star.close()
            assert process.returncode is not None


def test_everything_is_removed_at_exit_and_after_an_exception() -> None:
    with Star(nodes=2, bits_per_second=1e9) as star:
        assert len(namespaces_of(star)) == 4
    assert namespaces_of(star) == []
    with pytest.raises(KeyboardInterrupt), Star(nodes=1, bits_per_second=1e9) as star:
        raise KeyboardInterrupt
    assert namespaces_of(star) == []


def test_a_killed_run_leaves_namespaces_that_clean_removes_and_a_living_one_keeps_its_own(star: Star) -> None:
    program = "import os; from star import Star; Star(1, 1e9).__enter__(); os._exit(9)"
    folder = str(Path(RAW_TCP).parent)
    with subprocess.Popen([sys.executable, "-c", program], cwd=folder) as killed:
        assert killed.wait() == 9
    assert {f"zt{killed.pid}"} <= {path.name.partition(".")[0] for path in NAMESPACES.iterdir()}
    removed = [name for name in remove_stale() if name.startswith(f"zt{killed.pid}.")]
    assert len(removed) == 3
    assert len(namespaces_of(star)) == 4


def test_an_unknown_host_is_refused_by_name(star: Star) -> None:
    with pytest.raises(ValueError, match="hub and 0 to 1, not 2"):
        star.node_address(2)


def test_without_root_the_error_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeError, match="needs root"):
        Star(nodes=1, bits_per_second=1e9).__enter__()


def test_the_congestion_control_is_the_one_asked_for_on_every_host(star: Star) -> None:
    for host in star.hosts:
        setting = "/proc/sys/net/ipv4/tcp_congestion_control"
        show = star.popen(host, ["cat", setting], stdout=subprocess.PIPE, text=True)
        assert show.communicate()[0].strip() == star.congestion_control


def test_a_congestion_control_that_cannot_be_had_is_refused_and_nothing_is_left() -> None:
    star = Star(nodes=1, bits_per_second=1e9, congestion_control="no-such-thing")
    with pytest.raises(RuntimeError, match=r"may not choose the congestion control 'no-such-thing'; it may: .*reno"):
        star.__enter__()
    assert namespaces_of(star) == []
