"""The doctor and a living broker: a link is measured both ways, within the hub's bounds, and no run is disturbed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from runs import Trainer, broker

from zmqtrain.cli import doctor, main
from zmqtrain.cli.doctor import Machine
from zmqtrain.core.errors import HubUnreachable
from zmqtrain.core.settings import RunSettings
from zmqtrain.planning import probe
from zmqtrain.planning.probe import measure_link
from zmqtrain.protocol import limits
from zmqtrain.transport.zmq_keys import CurveKeys

SETTINGS = RunSettings(every=2, delay=2, units=6, codec="int8")
MACHINE = Machine(
    cores=4,
    load=0.1,
    free_memory_bytes=8 * 10**9,
    free_disk_bytes=10**11,
    devices=({"platform": "gpu", "kind": "a card", "memory_bytes": None},),
    devices_error="",
    has_nvidia_driver=False,
    versions={"zmqtrain": "0"},
)


def test_a_broker_without_a_run_is_measured_both_ways():
    with broker(SETTINGS) as hub:
        figures = measure_link(hub.address)
    assert figures.settings.every == 2 and figures.version == -1 and figures.nodes == 0
    assert figures.software.startswith("zmqtrain ") and not figures.refused
    assert figures.up > 0 and figures.down > 0
    assert 0 < figures.idle.p50 <= figures.idle.p99 and figures.loaded.count > 0
    assert abs(figures.clock_ahead_seconds) <= figures.clock_error_seconds + 0.05  # one clock


def test_who_asks_too_much_is_refused_and_still_has_its_pings_and_the_time(monkeypatch):
    monkeypatch.setattr(limits, "PROBE_BYTES", limits.PROBE_FRAME_BYTES)  # for one probe, however long they take
    monkeypatch.setattr(limits, "PROBE_SECONDS", 3600.0)
    with broker(SETTINGS) as hub:
        figures = measure_link(hub.address)
        assert "too many probes" in figures.refused and figures.down is None
        assert figures.idle.count == probe.PINGS and figures.clock_ahead_seconds is not None


def test_a_run_goes_on_as_if_nobody_had_looked():
    with broker(replace(SETTINGS, units=0)) as hub:
        one = Trainer(hub.address, "one")
        one.wait_until(lambda: one.steps > 4)
        figures = measure_link(hub.address)
        assert figures.nodes == 1 and figures.version >= 0
        one.stop.set()
        one.join()
        assert one.statistics().aggregates_applied > 0


def test_the_command_prints_every_finding_or_one_json_object(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "look_at_machine", lambda folder: MACHINE)
    with broker(SETTINGS) as hub:
        main(["doctor", hub.address])
        out = capsys.readouterr().out
        main(["doctor", hub.address, "--json"])
    for words in ("is reached from 127.0.0.1", "toward the hub", "from the hub", "ping", "a card", "int8"):
        assert words in out
    document = json.loads(capsys.readouterr().out)
    assert document["link"]["up"] > 0 and document["way"]["own"] == "127.0.0.1"
    assert {finding["what"] for finding in document["findings"]} >= {"hub", "run", "up", "down", "cards"}


def test_a_broker_with_keys_answers_only_who_gives_its_own(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "look_at_machine", lambda folder: MACHINE)
    keys = CurveKeys.generate()
    with KeyedBroker(keys) as address:
        assert measure_link(address, keys.public).up > 0
        with pytest.raises(HubUnreachable, match="has not answered for"):
            measure_link(address, wait_seconds=0.2)
        assert main(["doctor", address, "--wait-seconds", "6"]) == 1  # so long the obstacle may take to be known
    assert "--keys FILE" in " ".join(capsys.readouterr().out.split())


class KeyedBroker:
    """A broker with keys, in a thread."""

    def __init__(self, keys):
        self.keys = keys

    def __enter__(self):
        import asyncio
        import threading

        from zmqtrain.broker.broker import Broker
        from zmqtrain.transport.zmq_channels import RouterChannel

        ready = threading.Event()

        async def live():
            self.loop = asyncio.get_running_loop()
            channel = RouterChannel("tcp://127.0.0.1:0", keys=self.keys)
            self.broker = Broker(channel, SETTINGS)
            ready.set()
            await self.broker.run()

        self.thread = threading.Thread(target=lambda: asyncio.run(live()))
        self.thread.start()
        assert ready.wait(30)
        return self.broker.channel.address

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.broker.stop)
        self.thread.join(30)
