"""What waits at the hub to be passed on: in order, for as long as there is no room, and nothing else waits with it."""

from __future__ import annotations

from zmqtrain.collectives.reducer import Relays
from zmqtrain.protocol.framing import decode_message, encode_message
from zmqtrain.protocol.messages import Relay


class Room:
    """A Traffic that has room for some peers."""

    def __init__(self):
        self.room, self.sent = {"a": 0, "b": 99}, []

    def bulk_head(self, peer, message):
        return encode_message(message)

    def forward(self, peer, frames):
        if not self.room[peer]:
            return False
        self.room[peer] -= 1
        self.sent.append((peer, decode_message(frames[0]).rank, *frames[1:]))
        return True


def test_who_does_not_read_holds_up_what_is_for_him_and_nothing_else():
    room, gone = Room(), []
    relays = Relays(room)
    for number in range(3):
        for peer in "ab":
            relays.forward(peer, Relay(number, 1), [b"x"], lambda peer=peer, number=number: gone.append((peer, number)))
    assert room.sent == [("b", number, b"x") for number in range(3)] and gone == [("b", 0), ("b", 1), ("b", 2)]
    room.room["a"] = 1
    relays.pump("b")
    relays.pump("nobody")
    assert len(room.sent) == 3
    relays.pump_all()
    assert room.sent[3:] == [("a", 0, b"x")]
    room.room["a"] = 9
    relays.forward("a", Relay(3, 1), [b"y"])
    assert room.sent[4:] == [("a", 1, b"x"), ("a", 2, b"x"), ("a", 3, b"y")]


def test_what_is_for_who_is_gone_is_dropped():
    room, gone = Room(), []
    relays = Relays(room)
    relays.forward("a", Relay(0, 1), [b"x"], lambda: gone.append("a"))
    relays.forget("a")
    relays.forget("b")
    room.room["a"] = 9
    relays.pump_all()
    assert room.sent == [] and gone == []
