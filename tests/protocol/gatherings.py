"""Processes that ask the hub for a group, and what they may ask it then."""

from __future__ import annotations

from zmqtrain.protocol.members import Member, MemberState
from zmqtrain.protocol.messages import JoinGroup, ReduceChunk, replace_fields

__all__ = ["REDUCE_CHUNK", "ASKED", "process", "join"]

REDUCE_CHUNK = ReduceChunk(7, "sum", "float32", 100)
ASKED = JoinGroup("default", 3, address="tcp://10.0.0.1:5000", token="0a")


def process(peer):
    return Member(peer, peer.partition("#")[0], MemberState.PROCESS, 0.0, 0.0)


def join(groups, peer, now=0.0, **changes):
    return groups.join(process(peer), replace_fields(ASKED, address=f"tcp://{peer[0]}:5000", **changes), now)
