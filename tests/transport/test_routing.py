"""Whose connection it is, as its routing id says."""

from __future__ import annotations

import pytest

from zmqtrain.core.types import Lane, PeerId
from zmqtrain.transport.admission import first_life, is_former, next_life, routing_id_of, sender_of

PEER = PeerId("pc-1#é1")


@pytest.mark.parametrize("lane", Lane)
@pytest.mark.parametrize("life", [b"", b"one\0with zero bytes\0", bytes(range(1, 9))])
def test_a_routing_id_says_lane_peer_and_life(lane: Lane, life: bytes) -> None:
    assert sender_of(routing_id_of(lane, PEER, life)) == (PEER, lane, life)


@pytest.mark.parametrize("strange", [b"", b"C", b"\0C1234", b"Xpc-1", b"C\xff\xfe", b"B\0life", b"C" + 300 * b"a"])
def test_a_strangers_routing_id_is_nobodys(strange: bytes) -> None:
    assert sender_of(strange) is None


def test_a_life_tells_which_of_its_channel_came_before_it_and_nothing_of_other_channels() -> None:
    one, other = first_life(), first_life()
    later = one
    for _ in range(300):
        assert is_former(later, next_life(later)) is True
        later = next_life(later)
    assert len(later) == len(one) and is_former(later, one) is False
    assert one != other and is_former(one, other) is None and is_former(b"1", b"2") is None
