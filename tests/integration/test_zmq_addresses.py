"""Addresses and names at the real channel: what can be bound or connected to, and what is said of the rest."""

from __future__ import annotations

import pytest
from channels import HERE, A, meet, run

from zmqtrain.core.errors import AddressInUse, ConfigError
from zmqtrain.core.types import PeerId
from zmqtrain.transport.address import is_loopback
from zmqtrain.transport.zmq_channels import DealerChannel, RouterChannel


def test_a_port_that_is_taken_is_named_with_what_to_type() -> None:
    async def main() -> None:
        hub = RouterChannel(HERE)
        with pytest.raises(AddressInUse, match=r"--bind tcp://127\.0\.0\.1:") as caught:
            RouterChannel(hub.address)
        assert caught.value.address == hub.address
        await hub.close()

    run(main)


@pytest.mark.parametrize(
    "address",
    ["", "hub", "hub:5555", "tcp://hub", "tcp://*:99999", "tcp://a b:1", "udp://*:1", "tcp://300.1.1.1:1", "tcp://:1"],
)
def test_an_address_that_cannot_be_bound_is_refused(address: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError):
            RouterChannel(address)

    run(main)


@pytest.mark.parametrize("address", ["", "hub:5555", "tcp://hub", "tcp://hub:99999", "tcp://*:5555", "tcp://hub:0"])
def test_an_address_that_cannot_be_connected_to_is_refused_with_an_example(address: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=r"tcp://192\.168\.1\.10:5555"):
            DealerChannel(address, peer=A)

    run(main)


@pytest.mark.parametrize("name", ["", "a\nb", "é" * 101])
def test_a_name_that_the_hub_would_ignore_is_refused(name: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError):
            DealerChannel("tcp://127.0.0.1:1", peer=PeerId(name))

    run(main)


def test_the_wildcard_is_shown_as_an_address_that_this_machine_can_connect_to() -> None:
    async def main() -> None:
        hub = RouterChannel("tcp://*:0")
        assert hub.address.startswith("tcp://127.0.0.1:")
        node = DealerChannel(hub.address, peer=A)
        await meet(hub, node)
        await node.close()
        await hub.close()

    run(main)


@pytest.mark.parametrize(
    ("address", "answer"),
    [
        ("tcp://127.0.0.1:5555", True),
        ("tcp://127.3.2.1:*", True),
        ("tcp://localhost:5555", True),
        ("tcp://[::1]:5555", True),
        ("tcp://*:5555", False),
        ("tcp://0.0.0.0:5555", False),
        ("tcp://192.168.1.10:5555", False),
        ("tcp://hub:5555", False),
    ],
)
def test_a_loopback_address_is_known_as_one(address: str, answer: bool) -> None:
    assert is_loopback(address) is answer
