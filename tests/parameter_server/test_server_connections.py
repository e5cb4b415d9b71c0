"""A client's connection to one server, on a channel that the test holds: what it says, and how it ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tests.fixed import fixed_run
from zmqtrain.core.errors import ChannelClosed, ConfigError, JoinRefused, PeerLost
from zmqtrain.core.types import Lane
from zmqtrain.parameter_server.server_connections import ServerConnection
from zmqtrain.protocol.fencing import Stamp
from zmqtrain.protocol.framing import decode_head, encode_message, split
from zmqtrain.protocol.messages import (
    Awaited,
    Chunk,
    Credit,
    Done,
    Goodbye,
    Heartbeat,
    Hello,
    Placed,
    Pull,
    Push,
    Refused,
    Values,
    Welcome,
)
from zmqtrain.transport.pacing import Gate


class Wire:
    """A Channel: what the connection sends stays here, what it hears the test says."""

    refused = obstacle = ""

    def __init__(self):
        self.heard, self.sent, self.closed = asyncio.Queue(), [], False
        self._said, self._taken, self._number = Gate(), False, 0

    async def send(self, lane, frames):
        (stamp, message), *behind = decode_head(frames[0]), *frames[1:]
        self.connection = stamp.incarnation
        self.sent.append((lane, message, *behind))
        self._said.open()

    async def receive(self):
        if self._taken:
            self.heard.task_done()
        one, self._taken = await self.heard.get(), True
        return one

    def watch(self, told):
        pass

    async def changed(self):
        await asyncio.Event().wait()

    async def close(self, linger_seconds=1.0):
        self.closed = True

    def say(self, message, *frames, connection=None):
        lane = Lane.BULK if frames or isinstance(message, Values) else Lane.CONTROL
        self._number += lane is Lane.CONTROL
        stamp = Stamp(connection or self.connection, self._number if lane is Lane.CONTROL else 0)
        self.heard.put_nowait((lane, [encode_message(message, stamp), *frames]))

    async def told(self, kind, count=1):
        while len(found := [one for _, one, *_ in self.sent if isinstance(one, kind)]) < count:
            await self._said.wait()
        return found[-1]


class Owner:
    name = "a"

    def __init__(self):
        self.placed, self.failed = [], []
        self.on_placed, self.on_failed = self.placed.append, self.failed.append


def lived(story):
    """Tell a story of a line that is welcomed; return its wire, and what it was told of places and of its end."""

    async def live():
        wire, owner = Wire(), Owner()
        line = ServerConnection(owner, 1, "tcp://b:5555", SimpleNamespace(dial=lambda *_: wire))
        await wire.told(Hello)
        wire.say(Welcome("run", -1, fixed_run().to_dict()))
        await line.welcome
        try:
            await asyncio.wait_for(story(line, wire), 30.0)
        finally:
            await line.close()
        assert wire.closed
        return wire, owner.placed, owner.failed

    return asyncio.run(live())


def test_a_process_says_hello_and_then_beats():
    async def story(line, wire):
        assert (await wire.told(Hello)).role == "process"
        await wire.told(Heartbeat, 2)

    wire, _, (end,) = lived(story)
    assert isinstance(end, ChannelClosed) and wire.sent[-1][1] == Goodbye("")


def test_a_push_goes_as_it_is_granted_and_values_are_acknowledged():
    async def story(line, wire):
        frames = [b"abcd", b"ef"]
        answer = line.announce(lambda number, sizes: Push(number, "w", "float32", True, sizes), frames)
        assert line.waits
        push = await wire.told(Push)
        assert push.sizes == (4, 2)
        wire.say(Credit(push.transfer, 1))
        assert await wire.told(Chunk) == Chunk(push.transfer, 0)
        assert sum(isinstance(one, Chunk) for _, one, *_ in wire.sent) == 1
        wire.say(Credit(push.transfer, 5))
        assert await wire.told(Chunk, 2) == Chunk(push.transfer, 1)
        wire.say(Values(9, push.transfer, 7, (3, 1)))
        for head, frame in split(9, [b"xyz", b"!"], Stamp(wire.connection)):
            wire.heard.put_nowait((Lane.BULK, [head, frame]))
        assert await answer == (7, [b"xyz", b"!"]) and not line.waits
        assert [one for _, one, *_ in wire.sent if isinstance(one, Credit)] == [Credit(9, 1)] * 3

    lived(story)


def test_what_is_done_refused_placed_and_awaited_is_told():
    async def story(line, wire):
        done, wrong = line.ask(lambda number: Pull(number, "v")), line.ask(lambda number: Pull(number, "w"))
        wire.say(Done(1))
        wire.say(Refused("key", "no such key", 2))
        wire.say(Placed(3, (), ()))
        wire.say(Awaited(("b",), 1))
        assert await done == (0, ())
        with pytest.raises(ConfigError, match="tcp://b:5555: no such key"):
            await wrong
        await wire.heard.join()
        assert line.awaited.workers == ("b",)

    _, placed, _ = lived(story)
    assert placed == [Placed(3, (), ())]


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (Goodbye("the broker was stopped"), PeerLost, "broker 1 at tcp://b:5555 is lost: the broker said goodbye"),
        (Refused("unknown", "say Hello first"), PeerLost, "does not know this client any more"),
        (Refused("rules", "consistency is 'bsp'"), ConfigError, "consistency is 'bsp'"),
        (Refused("protocol", "a second Enrol"), JoinRefused, "a second Enrol"),
    ],
)
def test_the_end_of_a_line_is_the_error_of_all_that_is_asked_of_it(said, kind, words):
    async def story(line, wire):
        before = line.ask(lambda number: Pull(number, "w"))
        wire.say(said)
        for asked in (before, line.ask(lambda number: Pull(number, "w"))):
            with pytest.raises(kind, match=words):
                await asked

    wire, _, failed = lived(story)
    assert len(failed) == 1 and isinstance(failed[0], kind)
    assert any(isinstance(one, Goodbye) for _, one, *_ in wire.sent) == (kind is not PeerLost)


def test_a_client_that_has_lost_another_shard_leaves_this_one_so_that_nobody_waits_for_it():
    async def story(line, wire):
        line.fail(PeerLost("broker 2 at tcp://c:5555", "silent"))
        assert "broker 2" in (await wire.told(Goodbye)).reason

    lived(story)


def test_bytes_that_cannot_be_read_are_the_end_of_a_line():
    async def story(line, wire):
        asked = line.ask(lambda number: Pull(number, "w"))
        wire.heard.put_nowait((Lane.CONTROL, [b"garbage"]))
        with pytest.raises(PeerLost, match="cannot be read"):
            await asked

    lived(story)


def test_an_answer_of_another_connection_is_dropped():
    async def story(line, wire):
        asked = line.ask(lambda number: Pull(number, "w"))
        wire.say(Values(9, 1, 7, (3,)), connection=wire.connection - 1)
        wire.heard.put_nowait((Lane.BULK, [split(9, [b"old"], Stamp(wire.connection - 1))[0][0], b"old"]))
        wire.say(Values(9, 1, 8, (3,)))
        wire.heard.put_nowait((Lane.BULK, [split(9, [b"new"], Stamp(wire.connection))[0][0], b"new"]))
        assert await asked == (8, [b"new"]) and line.session.peer.dropped["former"] == 2

    lived(story)
