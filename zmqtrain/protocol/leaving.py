"""Decide who is taken for lost, and what follows when a peer goes: by a goodbye, by silence, or sent away (pure).

Rule 1: whoever goes is waited for no longer: its data units are dealt anew, a run that it would have founded is founded
by another, its group ends, and a round that only it held up is released.
Rule 2: what has come of a node that goes is in the run; only in lockstep, where all end with the same, it is dropped.
Rule 3: processes of a group are missed sooner than nodes.  All are given the time for which this hub did not listen:
what they said then waits to be heard; and so may what one said whose connection is gone.
"""

from __future__ import annotations

from collections.abc import Collection

from zmqtrain.core.types import count_values
from zmqtrain.protocol.book import HubBook
from zmqtrain.protocol.effects import Broadcast, Disconnect, HubEffect, SendTo
from zmqtrain.protocol.groups import SILENCE_SECONDS
from zmqtrain.protocol.members import Member, MemberState
from zmqtrain.protocol.messages import Refused
from zmqtrain.protocol.publishing import release, restart
from zmqtrain.protocol.quarantine import OVER

LAST_WORDS_SECONDS = 0.1
"""For so long a peer whose connection is gone is heard: it may have said goodbye."""

FOUNDER_SECONDS, FOUNDER_BYTES_PER_SECOND = 30.0, 2.5e5
"""A node that was asked for its parameters, while others wait for them, announces them within this time, and sends them
at this rate at least; else the next is asked."""

OVERDUE_SECONDS = 0.1
"""A node whose heartbeat is late by so much is sent something, to learn whether its connection is gone."""


STOP_SECONDS = 45.0
"""So long after an operator has ended the run nodes have time to send what is pending; then they are sent away."""

STOPPED = "an operator has ended the run (zmqtrain stop)"
"""Why a node is sent away then, or not let in."""


def stop(book: HubBook, now: float) -> list[HubEffect]:
    """End the run: have the nodes that train drain and leave, and send all others away. Once; later it does nothing."""
    if book.stopped_at is not None:
        return []
    book.stopped_at = now
    effects = book.dealing.stop()
    effects += _send_nodes_away(book, now, frozenset(MemberState) - {MemberState.LIVE})
    return effects + release(book, now) + book.dealing.end_when_drained(book.version)


def _send_nodes_away(book: HubBook, now: float, states: Collection[MemberState]) -> list[HubEffect]:
    """Tell the nodes in these states that the run was ended, and lose them."""
    effects: list[HubEffect] = []
    for member in list(book.members.values()):
        if member.is_node and member.state in states and member.peer in book.members:
            effects.append(SendTo(member.peer, Refused("stopped", STOPPED)))
            effects += lose(book, member, STOPPED, now)
    return effects


def look_over(book: HubBook, late: float, now: float) -> list[HubEffect]:
    """Lose who has been silent for too long or cannot be reached, ask who is overdue, and end quarantines.

    late: for so many seconds nobody listened here.
    """
    effects: list[HubEffect] = []
    if book.stopped_at is not None and now - book.stopped_at >= STOP_SECONDS:
        effects += _send_nodes_away(book, now, frozenset(MemberState))
    overdue = book.settings.heartbeat_seconds + OVERDUE_SECONDS
    for member in list(book.members.values()):
        if member.peer not in book.members:  # sent away because of one that was lost before it
            continue
        process = member.state is MemberState.PROCESS
        if late:
            member.last_seen = min(now, member.last_seen + late)
        if late and member.unreachable_since is not None:
            member.unreachable_since = min(now, member.unreachable_since + late)
        silent = now - member.last_seen
        if silent > (SILENCE_SECONDS if process else book.settings.lost_seconds):
            effects += lose(book, member, f"silent for {silent:.1f} s", now)
        elif member.unreachable_since is not None:
            if now - member.unreachable_since >= LAST_WORDS_SECONDS:
                effects += lose(book, member, "its connection is gone", now)
        elif _keeps_others_waiting(book, member, late, now):
            text = "it was asked for its parameters, others wait for them, and they have not come in time"
            effects.append(SendTo(member.peer, Refused("unknown", text)))
            effects += lose(book, member, text, now)
        elif member.is_node and now - max(member.last_seen, member.asked_at) > overdue:
            member.asked_at = now  # if its connection is gone, sending says so
            effects.append(SendTo(member.peer, book.roster(now)))
        over = member.quarantined and not book.quarantines.rest(member.peer, now)
        member.quarantined = book.quarantines.rest(member.peer, now) > 0
        if over and member.state is MemberState.LIVE and book.settings.masters == 1:
            # what it has made of the shared parameters meanwhile is what it was out for, many times over
            effects.append(restart(member, OVER))
    return effects


def _keeps_others_waiting(book: HubBook, member: Member, late: float, now: float) -> bool:
    """Return whether a node that was asked for its parameters holds up others who wait, for longer than a sound one.

    At the first of several masters it announces them when it has brought the others theirs.
    """
    if member.state not in (MemberState.FOUNDING, MemberState.LENDING) or book.shard:
        member.founds_since = None
        return False
    member.founds_since = now if member.founds_since is None else min(now, member.founds_since + late)
    size = sum(sum(one.sizes) for one in member.open.values())
    if book.settings.masters > 1:
        size += 4 * count_values(book.model)
    in_time = now - member.founds_since <= FOUNDER_SECONDS + size / FOUNDER_BYTES_PER_SECOND
    waiting = (MemberState.WAITING, MemberState.APART)
    return not in_time and any(other.state in waiting for other in book.members.values())


def lose(book: HubBook, member: Member, text: str, now: float, reason: str = "lost") -> list[HubEffect]:
    """Take note that a peer is gone. text: why, for people; reason: "goodbye" if it has said so."""
    del book.members[member.peer]
    book.fence.close(member.peer)
    book.news = True
    if member.state is MemberState.OBSERVER:
        return [Disconnect(member.peer, "observer", text)]
    if member.state is MemberState.STANDBY:
        book.tenure.lost()
        return [Disconnect(member.peer, "standby", text), Broadcast(book.roster(now))]
    if member.state is MemberState.PROCESS:
        gone = book.groups.gone(member.peer, text, left=reason == "goodbye")
        return [Disconnect(member.peer, "process", text), *gone]
    if member.state is MemberState.MASTER:
        book.masters.forget(member.peer)
        return [Disconnect(member.peer, "master", text), Broadcast(book.roster(now))]
    if reason == "goodbye":
        book.tenure.said_goodbye(member.peer, member.joined)
    effects: list[HubEffect] = [Disconnect(member.peer, reason, text)]
    effects += book.dealing.lost(member.peer, unbacked=not book.backs(member))
    effects += book.founding.left(member)
    if book.exchange:  # who left before the end is no part of what the others end with
        book.rounds.forget(member.peer)
    return effects + release(book, now) + book.dealing.end_when_drained(book.version)
