"""The matching machine, played without a network: in any interleaving no message is lost, doubled or overtaken."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.collectives.arrays import take_tree
from zmqtrain.collectives.matching import ANY_SOURCE, ANY_TAG, Finding, Matching, Receiving, Sending
from zmqtrain.collectives.wire import Head, Kind
from zmqtrain.core.errors import FramingError, PeerLost

from orders import Names

RANKS = 2
BYTES = (0, 8, 32_000, 70_000, 5_000_000)


class Net:
    """Machines of all ranks, and the ordered queues between them."""

    def __init__(self) -> None:
        self.machines = [Matching(rank, Names()) for rank in range(RANKS)]
        self.queues: dict[tuple[int, int], deque[Any]] = {(a, b): deque() for a in range(RANKS) for b in range(RANKS)}

    def collect(self) -> None:
        for rank, machine in enumerate(self.machines):
            for to, head, values in machine.outgoing:
                self.queues[rank, to].append((head, values))
            machine.outgoing.clear()

    def deliver(self, source: int, to: int) -> bool:
        self.collect()
        if not self.queues[source, to]:
            return False
        head, values = self.queues[source, to].popleft()
        self.machines[to].hear(source, head, memoryview(bytes(values)))
        return True

    def deliver_all(self) -> None:
        while any([self.deliver(*pair) for pair in self.queues]):
            pass

    def send(self, source: int, to: int, tag: int, x: Any) -> Sending:
        tree, sending = take_tree(x), Sending(to, tag)
        self.machines[source].send(sending, tree.text, tree.join())
        return sending

    def receive(self, rank: int, source: int, tag: int) -> Receiving:
        receiving = Receiving(source, tag)
        self.machines[rank].receive(receiving)
        return receiving


def number_of(receiving: Receiving) -> tuple[int, int]:
    assert receiving.envelope is not None
    return receiving.envelope.source, receiving.envelope.number


def could_match(receiving: Receiving, source: int, tag: int) -> bool:
    return receiving.peer in (ANY_SOURCE, source) and receiving.tag in (ANY_TAG, tag)


ways = st.sampled_from([(0, 1), (0, 1), (1, 0), (1, 1)])
receivers, sources = st.sampled_from([1, 1, 0]), st.sampled_from([ANY_SOURCE, 0, 1])
tags = st.integers(0, 1)
wanted = st.tuples(receivers, sources, st.sampled_from([ANY_TAG, 0, 1]))
moves = st.one_of(
    st.tuples(st.just("send"), ways, tags, st.sampled_from(BYTES)),
    st.tuples(st.just("receive"), wanted),
    st.tuples(st.just("deliver"), ways, st.integers(1, 4)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("take"), wanted),
)


@settings(max_examples=examples(100))
@given(st.lists(moves, min_size=12, max_size=60))
def test_messages_are_matched_in_order_and_come_whole(program: list[Any]) -> None:
    net, steps = Net(), dict[int, int]()  # when a receive was matched, by its place
    sent: list[tuple[int, int, int, int, Sending]] = []  # source, to, tag, bytes
    posted: list[tuple[int, Receiving]] = []

    def look() -> None:
        new = [n for n, (_, one) in enumerate(posted) if one.envelope is not None and n not in steps]
        steps.update(dict.fromkeys(new, len(steps)))

    for what, *arguments in program:
        if what == "send":
            (source, to), tag, size = arguments
            x = np.full(size // 8, len(sent), np.int64)
            sent.append((source, to, tag, size, net.send(source, to, tag, x)))
        elif what == "receive":
            posted.append((arguments[0][0], net.receive(*arguments[0])))
        elif what == "deliver":
            for _ in range(arguments[1]):
                net.deliver(*arguments[0])
                look()
        elif what == "cancel" and arguments[0] < len(posted):
            rank, receiving = posted[arguments[0]]
            net.machines[rank].cancel(receiving)
        elif what == "take":
            rank, source, tag = arguments[0]
            finding = Finding(source, tag, take=True)
            net.machines[rank].probe(finding, wait=False)
            assert finding.ended
            if finding.envelope is not None:
                receiving = Receiving(source, tag)
                net.machines[rank].receive(receiving, finding.envelope)
                posted.append((rank, receiving))
        look()
    while any(net.deliver(*pair) for pair in net.queues):
        look()

    of_number = {(source, to, sending.number): index for index, (source, to, _, _, sending) in enumerate(sent)}
    matched: dict[int, int] = {}  # message -> receive
    for place, (rank, receiving) in enumerate(posted):
        if receiving.envelope is None:
            continue
        assert receiving.ended and not receiving.cancelled and receiving.error is None
        source, number = number_of(receiving)
        message = of_number[source, rank, number]
        assert message not in matched
        matched[message] = place
        assert could_match(receiving, source, sent[message][2])
        tree = receiving.envelope.tree
        assert receiving.joined is not None
        x = tree.unpack(tree.split(receiving.joined))
        assert x.nbytes == sent[message][3] and (x == message).all()
    for message, (source, to, tag, size, sending) in enumerate(sent):
        if message in matched:
            assert sending.ended
            for earlier, (other, its_to, its_tag, _, _) in enumerate(sent[:message]):
                receiving = posted[matched[message]][1]
                if (other, its_to) == (source, to) and could_match(receiving, other, its_tag):
                    assert earlier in matched and steps[matched[earlier]] < steps[matched[message]], "overtaken"
            for before, (rank, receiving) in enumerate(posted[: matched[message]]):
                if rank == to and not receiving.cancelled and could_match(receiving, source, tag):
                    assert steps[before] < steps[matched[message]], "a later receive was served first"
        else:
            assert sending.ended == (sending.number not in net.machines[source]._sending)
            assert not any(
                rank == to
                and receiving.envelope is None
                and not receiving.cancelled
                and could_match(receiving, source, tag)
                for rank, receiving in posted
            ), "a message and its receive did not meet"
        assert size < 64 << 10 or sending.ended == (message in matched)


def test_a_large_message_has_bounded_memory_on_its_way() -> None:
    net = Net()
    sending = net.send(0, 1, 0, np.ones(10_000_000))
    net.deliver_all()
    assert net.machines[1].unexpected_bytes == 0 and not sending.ended
    net.receive(1, 0, 0)
    net.collect()
    net.deliver(1, 0)
    net.collect()
    assert sum(len(bytes(values)) for _, values in net.queues[0, 1]) == 4 << 20
    net.deliver_all()
    assert sending.ended


def test_a_lost_rank_ends_what_needs_it_and_leaves_what_has_come() -> None:
    net = Net()
    net.send(0, 1, 0, 5)
    net.send(0, 1, 0, np.ones(100_000))
    net.deliver_all()
    waiting, of_other = net.receive(1, 0, 7), net.receive(1, 1, 0)
    error = PeerLost("pc-0", "gone", 0)
    net.machines[1].lose(0, error, alone=False)
    assert waiting.error is error and not of_other.ended
    assert net.receive(1, 0, 0).error is None
    assert net.receive(1, 0, 0).error is error
    to_it = Sending(0, 0)
    net.machines[1].send(to_it, "int64[]", memoryview(bytes(8)))
    assert to_it.error is error


@pytest.mark.parametrize(
    ("head", "values"),
    [
        (Head(Kind.EAGER, number=1, size=9, text="int64[]"), bytes(9)),
        (Head(Kind.EAGER, number=1, size=8, text="int64[]"), bytes(7)),
        (Head(Kind.EAGER, number=1, size=8, place=-3, text="int64[]"), bytes(8)),
        (Head(Kind.EAGER, number=1, size=8, text="object[1]"), bytes(8)),
        (Head(Kind.OFFER, number=1, size=8, text="__import__('os')"), None),
        (Head(Kind.OFFER, number=1, size=1 << 60, text="int8[1152921504606846976]"), None),
        (Head(Kind.OFFER, number=1, size=0, text="[" * 2000), None),
        (Head(Kind.OFFER, number=1, size=0, text="{[]: 0}"), None),
        (Head(Kind.OFFER, number=1, size=0, text="[" + 400 * "9" + "+1j]"), None),
        (Head(Kind.PIECE, number=5), bytes(8)),
        (Head(Kind.TAKE, number=5), None),
        (Head(Kind.TAKEN, number=5), None),
    ],
)
def test_what_no_rank_of_ours_says_is_refused(head: Head, values: bytes | None) -> None:
    with pytest.raises(FramingError):
        Net().machines[0].hear(1, head, memoryview(values or b""))
