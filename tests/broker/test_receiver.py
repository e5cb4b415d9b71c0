"""What a message that nobody thought of leaves behind at a broker: nothing."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from zmqtrain.broker import deltas as receiver_room
from zmqtrain.broker.deltas import Receiver
from zmqtrain.core.types import Lane, PeerId
from zmqtrain.protocol.framing import encode_message
from zmqtrain.protocol.messages import Heartbeat


def test_the_frames_behind_a_head_are_forgotten_also_where_taking_it_raises() -> None:
    def receive(peer: PeerId, message: object, now: float) -> None:
        assert core.behind == [b"behind"]
        raise RuntimeError("nobody thought of this")

    hub = SimpleNamespace(screen=lambda *facts: None, judge=lambda *facts: None)
    downlink = SimpleNamespace(uploads=SimpleNamespace(pay=lambda size: None))
    core: Any = SimpleNamespace(
        channel=None, hub=hub, downlink=downlink, behind=(), messages={}, receive=receive, now=lambda: 0.0
    )
    rest: Any = SimpleNamespace()
    receiver = Receiver(core, rest, rest)
    with pytest.raises(RuntimeError):
        receiver._take(PeerId("a#1"), Lane.BULK, [encode_message(Heartbeat()), b"behind"])
    assert core.behind == ()


def test_the_time_of_the_garbage_collector_is_no_peers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(receiver_room, "clock", SimpleNamespace(thread_time=lambda: now[0]))
    collecting = receiver_room._Collecting()
    for phase, at in (("start", 1.0), ("stop", 4.0)):
        now[0] = at
        collecting.note(phase, {})
    assert collecting.seconds == 3.0
    elsewhere = threading.Thread(target=lambda: [collecting.note(phase, {}) for phase in ("start", "stop")])
    now[0] = 9.0
    elsewhere.start()
    elsewhere.join()
    assert collecting.seconds == 3.0, "in another thread it took nothing of this one's"
