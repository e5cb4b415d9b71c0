"""The laws of credits, of the hub's queue per peer, and of the token bucket (no clock, no sockets)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from tests.grids import examples
from zmqtrain.core.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from zmqtrain.core.types import Buffer, PeerId
from zmqtrain.transport.pacing import Credits, Outbox

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


# ---- Credits


def test_grants_fill_the_window_and_no_more() -> None:
    credits = Credits(window_bytes=10)
    credits.ask(A, 1, [4, 4, 4])
    assert credits.grants() == [(A, 1, 2)]
    assert (credits.in_flight_bytes, credits.waiting) == (8, 1)
    assert credits.grants() == []
    credits.arrived(A, 1)
    assert credits.grants() == [(A, 1, 1)]


def test_equals_take_turns_chunk_by_chunk() -> None:
    credits = Credits(window_bytes=1)
    for peer in (A, B, C):
        credits.ask(peer, 1, [1, 1])
    order = []
    while grants := credits.grants():
        [(peer, transfer, count)] = grants
        order += [peer] * count
        credits.arrived(peer, transfer)
    assert order == [A, B, C, A, B, C]


def test_a_lower_priority_number_goes_first_even_if_it_asked_last() -> None:
    credits = Credits(window_bytes=2)
    credits.ask(A, 1, [1, 1, 1], priority=1)
    assert credits.grants() == [(A, 1, 2)]
    credits.ask(B, 1, [1], priority=0)
    credits.arrived(A, 1)
    assert credits.grants() == [(B, 1, 1)]
    credits.arrived(B, 1)
    assert credits.grants() == [(A, 1, 1)]


def test_a_chunk_larger_than_the_window_goes_alone() -> None:
    credits = Credits(window_bytes=10)
    credits.ask(A, 1, [3])
    credits.ask(B, 1, [25])
    credits.ask(C, 1, [3])
    assert credits.grants() == [(A, 1, 1)]
    assert credits.grants() == []
    credits.arrived(A, 1)
    assert credits.grants() == [(B, 1, 1)]
    credits.arrived(B, 1)
    assert credits.grants() == [(C, 1, 1)]


def test_what_is_small_does_not_overtake_what_does_not_fit() -> None:
    credits = Credits(window_bytes=10)
    credits.ask(A, 1, [6])
    credits.ask(B, 1, [6])
    credits.ask(C, 1, [1])
    assert credits.grants() == [(A, 1, 1)]
    credits.arrived(A, 1)
    assert credits.grants() == [(B, 1, 1), (C, 1, 1)]


def test_a_chunk_that_was_not_granted_is_the_peers_error() -> None:
    credits = Credits(window_bytes=1)
    credits.ask(A, 1, [1, 1])
    with pytest.raises(RemoteProtocolError) as caught:
        credits.arrived(A, 1)
    assert caught.value.peer == A
    credits.grants()
    credits.arrived(A, 1)
    with pytest.raises(RemoteProtocolError):
        credits.arrived(A, 1)
    with pytest.raises(RemoteProtocolError):
        credits.arrived(B, 1)


@pytest.mark.parametrize("sizes", [[], [0], [1, -1]])
def test_a_request_for_chunks_of_nothing_is_the_peers_error(sizes: list[int]) -> None:
    credits = Credits(1 << 20)
    with pytest.raises(RemoteProtocolError):
        credits.ask(A, 1, sizes)
    assert (credits.waiting, credits.grants()) == (0, [])


def test_a_transfer_is_asked_for_once_and_its_number_is_free_again_when_it_is_finished() -> None:
    credits = Credits(1 << 20)
    credits.ask(A, 1, [1])
    with pytest.raises(RemoteProtocolError):
        credits.ask(A, 1, [1])
    credits.grants()
    credits.arrived(A, 1)
    credits.ask(A, 1, [1])


def test_forgetting_a_lost_peer_frees_what_it_held() -> None:
    credits = Credits(window_bytes=4)
    credits.ask(A, 1, [4, 4])
    credits.ask(A, 2, [4], priority=1)
    credits.ask(B, 1, [4])
    credits.grants()
    assert credits.holders == {A: 4}
    credits.forget(A)
    assert (credits.in_flight_bytes, credits.waiting, credits.holders) == (0, 1, {})
    assert credits.grants() == [(B, 1, 1)]
    credits.forget(A)


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError):
        Credits(window_bytes=0)


class CreditsMachine(RuleBasedStateMachine):
    """Peers that ask, send what they were granted, give up and vanish, in any order."""

    WINDOW = 10
    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.credits = Credits(self.WINDOW)
        self.waiting: dict[tuple[PeerId, int], deque[int]] = {}
        self.granted: dict[tuple[PeerId, int], deque[int]] = {}
        self.transfer = 0

    @rule(
        target=live,
        peer=st.sampled_from([A, B, C]),
        sizes=st.lists(st.integers(1, 15), min_size=1, max_size=5),
        priority=st.integers(0, 1),
    )
    def ask(self, peer: PeerId, sizes: list[int], priority: int) -> tuple[PeerId, int]:
        self.transfer += 1
        self.credits.ask(peer, self.transfer, sizes, priority)
        self.waiting[peer, self.transfer] = deque(sizes)
        self.granted[peer, self.transfer] = deque()
        return peer, self.transfer

    @rule()
    def grant(self) -> None:
        for peer, transfer, count in self.credits.grants():
            for _ in range(count):
                self.granted[peer, transfer].append(self.waiting[peer, transfer].popleft())

    @rule(key=live)
    def arrive(self, key: tuple[PeerId, int]) -> None:
        if self.granted.get(key):
            self.granted[key].popleft()
            self.credits.arrived(*key)
        else:
            with pytest.raises(RemoteProtocolError):
                self.credits.arrived(*key)

    @rule(target=live, peer=st.sampled_from([A, B, C]))
    def forget(self, peer: PeerId) -> object:
        self.credits.forget(peer)
        for key in [key for key in self.waiting if key[0] == peer]:
            del self.waiting[key], self.granted[key]
        return multiple()

    @invariant()
    def the_books_agree_and_the_window_holds(self) -> None:
        sizes = [size for granted in self.granted.values() for size in granted]
        assert self.credits.in_flight_bytes == sum(sizes)
        assert self.credits.in_flight_bytes <= self.WINDOW or len(sizes) == 1
        assert self.credits.waiting == sum(map(len, self.waiting.values()))
        assert sum(self.credits.holders.values()) == sum(sizes)
        assert all(self.credits.holders.values())

    def teardown(self) -> None:
        """All that is asked for is granted in the end, if what is granted arrives."""
        self.grant()
        while self.credits.in_flight_bytes:
            for key in [key for key, granted in self.granted.items() if granted]:
                self.arrive(key)
            self.grant()
        assert self.credits.waiting == 0
        assert not any(self.waiting.values())


TestCredits = CreditsMachine.TestCase
TestCredits.settings = settings(max_examples=examples(60), stateful_step_count=30)


@given(counts=st.lists(st.integers(1, 12), min_size=2, max_size=6), size=st.integers(1, 12))
def test_nobody_starves_among_equals_of_equal_chunks(counts: list[int], size: int) -> None:
    credits = Credits(window_bytes=12)
    peers = {PeerId(f"pc-{index}"): count for index, count in enumerate(counts)}
    for peer, count in peers.items():
        credits.ask(peer, 1, [size] * count)
    got = dict.fromkeys(peers, 0)
    while grants := credits.grants():
        for peer, transfer, count in grants:
            got[peer] += count
            for _ in range(count):
                credits.arrived(peer, transfer)
        for one in peers:
            for other in peers:
                assert got[one] == peers[one] or got[other] <= got[one] + 1
    assert got == peers


# ---- Outbox


def chunks(*sizes: int) -> list[list[bytes]]:
    return [[b"h", bytes(size - 1)] for size in sizes]


def send(outbox: Outbox) -> Sequence[Buffer] | None:
    """Send the next chunk, if there is one."""
    if (chunk := outbox.next_chunk) is not None:
        outbox.sent()
    return chunk


def test_an_outbox_sends_one_window_until_it_is_acknowledged() -> None:
    outbox = Outbox(window_bytes=10, limit_bytes=100)
    assert outbox.push(7, chunks(4, 4, 4), droppable=False)
    assert send(outbox) and send(outbox)
    assert outbox.next_chunk is None
    assert outbox.in_flight_bytes == 8
    outbox.acknowledged(7)
    assert send(outbox)
    assert outbox.next_chunk is None
    outbox.acknowledged(7, chunks=2)
    assert outbox.idle and outbox.held_bytes == 0


def test_an_outbox_hands_out_the_very_buffers_it_was_given() -> None:
    shared = bytearray(100)
    one, other = Outbox(100, 1000), Outbox(100, 1000)
    for outbox in (one, other):
        outbox.push(1, [[b"head", shared]], droppable=True)
    first, second = one.next_chunk, other.next_chunk
    assert first is not None and first[1] is shared
    assert second is not None and second[1] is shared


def test_what_does_not_fit_is_refused_whole() -> None:
    outbox = Outbox(window_bytes=5, limit_bytes=10)
    assert outbox.push(1, chunks(4, 4), droppable=False)
    assert not outbox.push(2, chunks(2, 1), droppable=False)
    assert outbox.held_bytes == 8
    assert outbox.push(2, chunks(2), droppable=False)


def test_a_chunk_larger_than_the_outbox_window_goes_alone() -> None:
    outbox = Outbox(window_bytes=5, limit_bytes=100)
    outbox.push(1, chunks(3, 20, 3), droppable=False)
    assert send(outbox)
    assert outbox.next_chunk is None
    outbox.acknowledged(1)
    assert send(outbox)
    assert outbox.next_chunk is None


def test_a_chunk_that_could_not_be_sent_is_the_next_again() -> None:
    outbox = Outbox(window_bytes=10, limit_bytes=100)
    first, second = chunks(4), chunks(5)
    outbox.push(1, first, droppable=True)
    outbox.push(2, second, droppable=True)
    assert outbox.next_chunk is first[0] and outbox.next_chunk is first[0]
    assert outbox.in_flight_bytes == 0
    assert send(outbox) is first[0]
    assert outbox.next_chunk is second[0] and send(outbox) is second[0]


def test_only_droppable_transfers_of_which_nothing_was_sent_are_dropped() -> None:
    outbox = Outbox(window_bytes=4, limit_bytes=100)
    outbox.push(1, chunks(4, 4), droppable=True)
    outbox.push(2, chunks(4), droppable=False)
    outbox.push(3, chunks(4), droppable=True)
    outbox.push(4, chunks(4), droppable=True)
    send(outbox)
    assert outbox.drop_droppable() == [3, 4]
    assert outbox.held_bytes == 12
    for transfer in (1, 1, 2):
        outbox.acknowledged(transfer)
        send(outbox)
    assert outbox.idle


def test_an_acknowledgement_of_what_was_not_sent_is_the_peers_error() -> None:
    outbox = Outbox(100, 1000)
    outbox.push(1, chunks(4, 4), droppable=False)
    send(outbox)
    for transfer, count in ((1, 2), (1, 0), (1, -1), (2, 1)):
        with pytest.raises(RemoteProtocolError):
            outbox.acknowledged(transfer, count)
    outbox.acknowledged(1)


def test_a_transfer_that_is_empty_or_already_there_is_our_error() -> None:
    outbox = Outbox(100, 1000)
    outbox.push(1, chunks(4), droppable=False)
    for transfer, content in ((1, chunks(4)), (2, [])):
        with pytest.raises(LocalProtocolError):
            outbox.push(transfer, content, droppable=False)


@given(
    transfers=st.lists(st.lists(st.integers(1, 15), min_size=1, max_size=4), max_size=6),
    acts=st.lists(st.sampled_from(["send", "acknowledge"]), max_size=40),
)
def test_all_that_was_pushed_is_sent_once_and_in_order(transfers: list[list[int]], acts: list[str]) -> None:
    outbox = Outbox(window_bytes=10, limit_bytes=1000)
    wanted = []
    for number, sizes in enumerate(transfers):
        content = chunks(*sizes)
        assert outbox.push(number, content, droppable=False)
        wanted += [(number, chunk) for chunk in content]
    owners = {id(chunk): number for number, chunk in wanted}
    sent, unacknowledged = [], deque[tuple[int, int]]()

    def act(name: str) -> None:
        if name == "acknowledge" and unacknowledged:
            outbox.acknowledged(unacknowledged.popleft()[0])
        elif name == "send" and (chunk := send(outbox)) is not None:
            sent.append(chunk)
            unacknowledged.append((owners[id(chunk)], sum(map(len, chunk))))
        assert outbox.in_flight_bytes == sum(size for _, size in unacknowledged)
        assert outbox.in_flight_bytes <= 10 or len(unacknowledged) == 1

    for name in acts:
        act(name)
    while not outbox.idle:
        act("send")
        act("acknowledge")
    assert [id(chunk) for chunk in sent] == [id(chunk) for _, chunk in wanted]
