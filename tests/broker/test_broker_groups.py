"""Groups of processes at a living broker: what is relayed and reduced for them, and who loses its place."""

from __future__ import annotations

import numpy as np
import pytest

from tests.broker.wires import lived
from zmqtrain.protocol.groups import RELAY_MESSAGES
from zmqtrain.protocol.messages import GroupLost, ReduceChunk, ReducedChunk, Refused, Relay


def test_a_message_is_relayed_and_chunks_are_reduced_with_what_came_behind_them():
    async def story(peers):
        await peers.meet("p", "q")
        peers.wire.say("p", Relay(1, 5), b"12", b"345")
        for peer in "pq":
            peers.wire.say(peer, ReduceChunk(1, "sum", "int32", 4), np.ones(1, np.int32).tobytes())
        await peers.until(lambda: len(peers.wire.bulk) == 3)

    broker = lived(story)
    assert broker.channel.bulk == [("q", Relay(0, 5)), ("p", ReducedChunk(1, 4)), ("q", ReducedChunk(1, 4))]


@pytest.mark.parametrize(
    "junk",
    [
        [(Relay(1, 6), b"12", b"345")],
        [(Relay(1, 1), b"x")] * (RELAY_MESSAGES + 1),
        [(Relay(2, 1), b"x")],
        [(ReduceChunk(1, "sum", "int32", 4), b"123")],
        [(ReduceChunk(1, "xor", "int32", 4), b"1234")],
        [(ReduceChunk(1, "sum", "int32", 3), b"123")],
        [(GroupLost(7, "nobody"),)],
    ],
)
def test_a_process_that_says_what_cannot_be_loses_its_place_and_the_others_go_on(junk):
    async def story(peers):
        await peers.meet("p", "q")
        await peers.meet("r", "s")
        for message, *behind in junk:
            peers.wire.say("p", message, *behind)
        await peers.until(lambda: peers.told("p", Refused) and peers.told("q", GroupLost))
        peers.wire.say("r", Relay(1, 1), b"x")
        await peers.until(lambda: ("s", Relay(0, 1)) in peers.wire.bulk)

    broker = lived(story)
    assert set(broker.hub.members) == {"q", "r", "s"}
    (lost,) = [message for who, message in broker.channel.sent if who == "q" and isinstance(message, GroupLost)]
    assert lost.rank == 0 and "sent away" in lost.why
    assert not [one for one in broker.channel.sent if one[0] in "rs" and isinstance(one[1], GroupLost | Refused)]
