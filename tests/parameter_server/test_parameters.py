"""A broker's key server on a channel that the test holds: whatever a client says costs that client, and nobody else."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.fixed import fixed_run
from tests.stories import lived_through
from zmqtrain.broker.broker import Broker
from zmqtrain.core.types import Lane
from zmqtrain.parameter_server import machine
from zmqtrain.parameter_server.store import cut_frames, frame_sizes
from zmqtrain.protocol.framing import decode_message, encode_message, split
from zmqtrain.protocol.messages import (
    Chunk,
    Credit,
    Declare,
    Done,
    Enrol,
    Enrolled,
    Founded,
    Goodbye,
    Hello,
    Initialise,
    Placed,
    Pull,
    Push,
    Refused,
    Values,
)
from zmqtrain.transport.pacing import Gate

ENROL = Enrol("", 0, 1, "async", "sgd:rate=1", 1, False)
KEY = ("w", (100,), "float32")


class Wire:
    """A HubChannel: what the broker sends stays here, what it hears the test says."""

    address = "tcp://127.0.0.1:1"

    def __init__(self):
        self.heard, self.sent, self.said = asyncio.Queue(), [], Gate()

    def send(self, peer, lane, frames):
        self.sent.append((peer, decode_message(frames[0]), *frames[1:]))
        self.said.open()

    async def receive(self):
        return await self.heard.get()

    def dismiss(self, peer):
        raise AssertionError(f"{peer} is shown out")

    async def close(self, linger_seconds=1.0):
        pass


class Clients:
    """Clients of one broker, as it hears them."""

    def __init__(self, broker):
        self.broker, self.wire = broker, broker.channel

    def say(self, peer, *messages):
        for message in messages:
            self.wire.heard.put_nowait((peer, Lane.CONTROL, [encode_message(message)]))

    def send(self, peer, transfer, values):
        for chunk, frame in split(transfer, cut_frames(values)):
            self.wire.heard.put_nowait((peer, Lane.BULK, [chunk, bytes(frame)]))

    async def told(self, peer, kind, count=1):
        """Wait until a peer was sent so many messages of this kind; return the last."""
        while len(found := [one for who, one, *_ in self.wire.sent if who == peer and isinstance(one, kind)]) < count:
            await self.wire.said.wait()
        return found[-1]

    async def enrol(self, *peers, enrol=ENROL):
        for peer in peers:
            self.say(peer, Hello(peer, "process"), enrol)
            await self.told(peer, Enrolled)

    async def found(self, peer="a#1", values=None):
        values = np.zeros(100, np.float32) if values is None else values
        self.say(peer, Declare(1, (KEY,)))
        await self.told(peer, Placed)
        self.say(peer, Initialise(2, "w", "float32", 0, 100, (400,)))
        await self.told(peer, Credit)
        self.send(peer, 2, values)
        await self.told(peer, Done)
        self.say(peer, Founded(("w",)))

    async def found_large(self, peer):
        """Begin a key that is as large as a piece can be, nearly; return in how many frames."""
        large = np.zeros(1_000_000, np.float32)
        sizes = frame_sizes(large.nbytes)
        self.say(peer, Declare(1, (("w", large.shape, "float32"),)))
        await self.told(peer, Placed)
        self.say(peer, Initialise(2, "w", "float32", 0, large.size, sizes))
        for sent, (chunk, frame) in enumerate(split(2, cut_frames(large))):
            while sum(one.chunks for who, one, *_ in self.wire.sent if isinstance(one, Credit)) <= sent:
                await self.wire.said.wait()
            self.wire.heard.put_nowait((peer, Lane.BULK, [chunk, bytes(frame)]))
        await self.told(peer, Done)
        return len(sizes)

    async def values(self, peer, count=1):
        """Wait for the values that a peer is sent; return them."""
        announced = await self.told(peer, Values, count)
        chunk = [frame for who, one, *frame in self.wire.sent if who == peer and one == Chunk(announced.transfer, 0)]
        return np.frombuffer(chunk[0][0], np.float32)

    async def take(self, peer, messages):
        """Take what a peer is sent on BULK, so many messages, and acknowledge each."""
        seen = 0
        while messages > 0:
            news, seen = self.wire.sent[seen:], len(self.wire.sent)
            for who, one, *_ in news:
                if who == peer and isinstance(one, Values | Chunk):
                    self.say(peer, Credit(one.transfer, 1))
                    messages -= 1
            if messages > 0:
                await self.wire.said.wait()


def lived(story):
    """Run a broker while `story(clients)` happens; return the broker when it has ended, without an error."""
    return lived_through(lambda: Broker(Wire(), fixed_run()), lambda broker: story(Clients(broker)))


HOSTILE = {
    "an unknown key": Push(9, "v", "float32", True, (400,)),
    "a size that is too large": Push(9, "w", "float32", True, (404,)),
    "frames that are cut otherwise": Push(9, "w", "float32", True, (200, 200)),
    "another dtype": Push(9, "w", "float64", True, (800,)),
    "values without any": Initialise(9, "v", "float32", 0, 0, ()),
    "an endless key": Initialise(9, "v", "float32", 0, 1 << 50, (1 << 20,)),
    "a piece that is larger than one can be": Initialise(9, "v", "float32", 0, 1 << 21, frame_sizes(1 << 23)),
    "a pull of nothing": Pull(9, "v"),
    "a key that is there, of another shape": Declare(9, (("w", (3,), "float32"),)),
    "a key that cannot be": Declare(9, (("v", (0,), "float32"),)),
    "a key of another dtype": Declare(9, (("v", (1,), "float16"),)),
    "a key that nobody knows": Declare(9, (("v", (), ""),)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_cannot_be_is_refused_by_its_number_and_others_are_served(what):
    async def story(clients):
        await clients.enrol("a#1", "b#1")
        await clients.found()
        clients.say("b#1", HOSTILE[what])
        refused = await clients.told("b#1", Refused)
        assert refused.sequence == 9 and refused.reason in ("key", "size", "memory") and refused.text
        clients.say("b#1", Pull(10, "w"))
        await clients.values("b#1")

    lived(story)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e30])
def test_a_gradient_that_is_not_finite_is_refused_and_leaves_no_trace(wrong):
    async def story(clients):
        await clients.enrol("a#1", "b#1")
        await clients.found()
        clients.say("b#1", Push(3, "w", "float32", True, (400,)))
        await clients.told("b#1", Credit)
        clients.send("b#1", 3, np.full(100, wrong, np.float32))
        assert (await clients.told("b#1", Refused)).reason == "non-finite"
        clients.say("a#1", Pull(3, "w"))
        assert not (await clients.values("a#1")).any()

    broker = lived(story)
    assert not broker.parameters._whole and not broker.parameters._announced


@pytest.mark.parametrize("message", [Declare(1, (KEY,)), Founded(("w",)), Push(1, "w", "float32", True, (400,))])
def test_who_has_not_enrolled_gets_nothing(message):
    async def story(clients):
        await clients.enrol("a#1")
        await clients.found()
        clients.say("x#1", Hello("x#1", "process"), message, Pull(2, "w"))
        assert (await clients.told("x#1", Refused)).reason in ("enrol", "protocol")

    lived(story)


def test_who_enrols_twice_is_sent_away_with_all_that_was_on_its_way():
    async def story(clients):
        await clients.enrol("a#1", "b#1")
        await clients.found()
        clients.say("b#1", Push(3, "w", "float32", False, (400,)))
        await clients.told("b#1", Credit)
        clients.say("b#1", ENROL)
        assert (await clients.told("b#1", Refused)).reason == "protocol"
        clients.send("b#1", 3, np.ones(100, np.float32))
        clients.say("a#1", Pull(3, "w"))
        assert not (await clients.values("a#1")).any()

    broker = lived(story)
    assert not broker.parameters._whole and not broker.parameters._announced


def test_a_node_of_the_run_may_not_ask_for_keys():
    async def story(clients):
        clients.say("n#1", Hello("n#1"), Pull(1, "w"))
        assert (await clients.told("n#1", Refused)).reason == "protocol"

    lived(story)


def test_a_chunk_that_was_not_granted_costs_its_sender_its_place():
    async def story(clients):
        await clients.enrol("a#1", "b#1")
        await clients.found()
        clients.say("b#1", Push(3, "w", "float32", False, (400,)))
        await clients.told("b#1", Credit)
        clients.send("b#1", 3, np.ones(100, np.float32))
        await clients.told("b#1", Done)
        clients.say("b#1", Push(4, "w", "float32", False, (400,)))
        clients.send("b#1", 4, np.ones(90, np.float32))
        assert (await clients.told("b#1", Refused)).reason == "protocol"
        clients.say("a#1", Pull(3, "w"))
        assert (await clients.values("a#1"))[0] == -1

    lived(story)


def test_a_client_that_leaves_in_the_middle_of_a_push_leaves_no_trace():
    async def story(clients):
        await clients.enrol("a#1", "b#1")
        await clients.found()
        clients.say("b#1", Push(3, "w", "float32", True, (400,)))
        await clients.told("b#1", Credit)
        clients.say("b#1", Hello("b#1", "process"))  # the same peer again: what was on its way is not
        clients.send("b#1", 3, np.ones(100, np.float32))
        clients.say("a#1", Pull(3, "w"))
        assert not (await clients.values("a#1")).any()

    broker = lived(story)
    assert not broker.parameters._whole and not broker.parameters._announced


def test_a_client_that_never_takes_what_it_asks_for_holds_no_more_than_its_share():
    async def story(clients):
        await clients.enrol("a#1", "b#1")
        frames = await clients.found_large("a#1")
        clients.say("b#1", *[Pull(number, "w") for number in range(50)])
        await clients.told("b#1", Values)
        outbox = clients.broker.downlink._line("b#1").outbox
        clients.say("b#1", Pull(100, "nothing"))
        await clients.told("b#1", Refused)
        assert outbox.held_bytes <= outbox.limit_bytes == 64 << 20
        # once it takes what it has asked for, it gets it all
        await clients.take("b#1", 50 * (1 + frames))

    lived(story)


def test_who_comes_again_and_begins_anew_is_not_sent_what_it_asked_for_before():
    async def story(clients):
        await clients.enrol("b#1")
        frames = await clients.found_large("b#1")
        anew = Enrol("", 0, 2, "async", "sgd:rate=1", 1, False)
        pulls = [Pull(number, "w") for number in range(60)]
        clients.say("b#1", *pulls, Goodbye(""), Hello("b#1", "process"), anew)
        await clients.told("b#1", Enrolled, 2)
        await clients.take("b#1", 5 * (1 + frames))
        clients.say("b#1", Pull(100, "w"))
        assert (await clients.told("b#1", Refused)).reason == "key"

    lived(story)


def test_any_number_of_small_requests_at_once_is_answered_and_the_broker_lives():
    async def story(clients):
        await clients.enrol("a#1", "b#1")
        await clients.found()
        clients.say("b#1", *[Pull(number, "w") for number in range(10_000)])
        await clients.take("b#1", 20_000)

    lived(story)


def test_a_flood_of_requests_is_refused(monkeypatch):
    monkeypatch.setattr(machine, "MOST_REQUESTS", 100)

    async def story(clients):
        enrol = Enrol("", 0, 1, "bsp", "sgd:rate=1", 2, False)
        await clients.enrol("a#1", "b#1", enrol=enrol)
        await clients.found()
        clients.say("b#1", *[Push(number, "w", "float32", True, (400,)) for number in range(110)])
        assert (await clients.told("b#1", Refused)).reason == "requests"
        clients.say("a#1", Pull(3, "w"))
        await clients.values("a#1")

    lived(story)


def test_a_number_used_again_while_its_gradient_waits_is_refused_and_takes_no_gradient_with_it():
    bsp = Enrol("", 0, 1, "bsp", "sgd:rate=1", 2, False)

    async def story(clients):
        await clients.enrol("a#1", "b#1", enrol=bsp)
        await clients.found()
        gradient = np.ones(100, np.float32)
        clients.say("a#1", Push(7, "w", "float32", False, (400,)))
        await clients.told("a#1", Credit, 2)
        clients.send("a#1", 7, gradient)
        await clients.told("a#1", Done, 2)
        clients.say("a#1", Hello("a", "process"), bsp, Push(7, "w", "float32", False, (400,)))
        assert (await clients.told("a#1", Refused)).reason == "requests"
        clients.say("b#1", Push(2, "w", "float32", True, (400,)))
        await clients.told("b#1", Credit)
        clients.say("a#1", Goodbye())
        clients.send("b#1", 2, gradient)
        np.testing.assert_array_equal(await clients.values("b#1"), -gradient)

    lived(story)
