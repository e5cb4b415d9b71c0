"""Decide which publishes a hub takes, and which of those that it has taken make the next version (pure).

Rule 1: a publish is judged by its head, before anything of it is held; what is in it is the aggregator's affair.
Rule 2: one that is under way, accepted or landed is no second one, and is not refused: it would be offered again.
Rule 3: what is released is stated in an order that follows from who took part, where floats depend on it.
Rule 4: a node of which no delta has come is not awaited and is not one of N, but at the beginning of a hub, and in
lockstep.  Rule 5: a refusal is told to who sent it; who sends again and again what no sound node does is quarantined.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from zmqtrain.core.types import PeerId, count_values, is_barrier
from zmqtrain.protocol.book import HubBook
from zmqtrain.protocol.effects import Accumulate, Contribution, HubEffect, Rebase, Reduce, SendTo, TakeBack
from zmqtrain.protocol.members import MOST_WAITING, Member, MemberState, counted, training
from zmqtrain.protocol.messages import Preempt, Publish, Quarantine, Refused
from zmqtrain.protocol.words import words

GRACE_SECONDS = 5.0
"""Nodes that came before the first release are awaited for so long after it, though no delta of theirs has come."""
MAX_SAMPLES = 1 << 40
"""What one publish may stand for: the sum over a run must fit in a head's 64 bits."""
MOST_WAITING_BYTES = 64 << 20
"""What one node may have on its way or waiting for a round, in bytes; more only if the model is so large: one publish
of the whole of it for each that may be on its way, and one."""


RESTART = ("restart", "this node is to begin again from the shared parameters: what it had pending is dropped")
DIVERGED = frozenset({"norm", "enormous", "non-finite"})
"""Who is quarantined for these diverges, and what it contributed just before may have been a part of that."""


def is_double(book: HubBook, member: Member, publish: Publish) -> bool:
    """Tell whether this very publish is under way, accepted or landed."""
    return (
        any(isinstance(one, Publish) and one.sequence == publish.sequence for one in member.open.values())
        or any(peer == member.peer and one.sequence == publish.sequence for peer, one in book.rounds.pending)
        or any(sequence == publish.sequence for sequence, _ in book.records.landed(member.peer))
    )


def fault_of(book: HubBook, member: Member, publish: Publish) -> tuple[str, str] | None:
    """Return the code and the sentence with which a publish is refused; None if it may come."""
    settings = book.settings
    if publish.sequence <= book.records.heard(member.peer) or publish.transfer in member.open:
        return "duplicate", f"sequence {publish.sequence} was heard before"
    if member.quarantined:
        return "quarantine", "this node is quarantined: nothing of it is taken now"
    if is_of_before(book, member, publish):
        return RESTART
    if not 0 <= publish.fragment < book.fragments:
        return "fragment", f"fragment {publish.fragment} of a run with {book.fragments}"
    if not (publish.codec == "float32" if publish.dense else book.timetable.takes(publish.codec)):
        taken = book.timetable.at(book.version).codec
        return "codec", f"coded as {words(publish.codec)!r}; this run takes {taken!r}"
    if publish.base_version > book.version:
        return "version", f"based on version {publish.base_version}; the run is at {book.version}"
    staleness = book.version - publish.base_version
    if _too_stale(book, staleness) and settings.stale == "return" and not publish.dense:
        text = f"based on version {publish.base_version}, {staleness} behind; this run takes what is at most "
        return "stale", f"{text}{settings.max_staleness} behind"
    if not (0 <= publish.samples <= MAX_SAMPLES and 0 <= publish.steps <= MAX_SAMPLES):
        return "samples", f"stands for {publish.samples} samples in {publish.steps} steps"
    waiting = [one for peer, one in book.rounds.pending if peer == member.peer]
    waiting += [one for one in member.open.values() if isinstance(one, Publish)]
    in_flight = book.timetable.at(book.version).offers_in_flight * (book.fragments if settings.carries_all else 1)
    most_bytes = max(MOST_WAITING_BYTES, (1 + in_flight) * 4 * count_values(book.model))
    waiting_bytes = sum(sum(one.sizes) for one in (*waiting, publish))
    if len(waiting) >= max(MOST_WAITING, in_flight) or waiting_bytes > most_bytes:
        text = f"{len(waiting)} publishes of this node have not landed; no node that keeps to the settings has so "
        return "waiting", f"{text}many, or such large ones"
    return None


def is_of_before(book: HubBook, member: Member, publish: Publish) -> bool:
    """Return whether a publish was computed before its node began again, or on parameters that are taken back.

    A node that has asked for the snapshot to begin again from may publish until that has come.
    """
    base, begins_at = publish.base_version, member.begins_at
    return member.restarts or (begins_at is not None and base < begins_at) or book.is_taken_back(base)


def refuse(book: HubBook, member: Member, publish: Publish, reason: str, text: str) -> SendTo:
    """Say that a publish is refused, and count it. reason, text: as in Refused."""
    member.refused += 1
    book.refused += 1
    return SendTo(member.peer, Refused(reason, text, publish.sequence))


def offended(book: HubBook, member: Member, reason: str, text: str, now: float) -> list[HubEffect]:
    """A delta of this node was refused for what is in it: quarantine who does that again and again."""
    seconds = book.quarantines.refused(member.peer, reason, now)
    if not seconds:
        return []
    live = {one.peer: book.voter_of(one.peer) for one in book.members.values() if one.state is MemberState.LIVE}
    told: list[HubEffect] = []
    if reason == "norm" and (out := book.quarantines.wrongly(live, now)):
        if not (why := _obstacle_to_widening(book, out)):
            return _acquit(book, out)
        told = [Rebase(out, why)]
    member.quarantined = True
    takes_back = reason in DIVERGED and book.settings.mode == "default" and book.settings.masters == 1
    back: list[HubEffect] = [TakeBack(member.peer)] if takes_back and not book.exchange else []
    return [*told, SendTo(member.peer, Quarantine(reason, text, seconds)), *back, *release(book, now)]


def _obstacle_to_widening(book: HubBook, out: Sequence[PeerId]) -> str:
    """Return why the gate is not to let deltas be larger, "" if it may: the first time, and again where the shared
    parameters have not become worse since the last."""
    version, loss = book.loss(out)
    if book.widened is None:
        book.widened = (book.version, loss)
        return ""
    widened_at, before = book.widened
    if isnan(loss) or isnan(before):
        return "it has done so once, and nobody says how the shared parameters score"
    if version <= widened_at:
        return f"it has done so at version {widened_at}, and no later one is evaluated yet"
    if is_barrier(before, loss):
        return f"since it has done so, at version {widened_at}, the loss has gone from {before:.4g} to {loss:.4g}"
    book.widened = (book.version, loss)
    return ""


def take_back(book: HubBook, version: int, text: str) -> list[HubEffect]:
    """Go back to what was published at this version, by a further one; all nodes begin again from that.

    What was computed since was computed on parameters that are taken back; it is dropped where it waits.  So that no
    node can hold a run up for good, the next one is not before as many versions as this one takes back.
    """
    if not 0 <= version < book.version or book.version < book.rests_until:
        return []
    effects: list[HubEffect] = []
    for peer, publish in book.rounds.pending:
        if (member := book.members.get(peer)) is not None:
            effects.append(refuse(book, member, publish, *RESTART))
    book.clear_rounds()
    fragments, taken = tuple(range(book.fragments)), book.version - version
    book.version += 1
    book.rests_until, book.taken_back = book.version + taken, (version, book.version)
    live = max(1, len(training(book.members)))
    effects.append(Reduce(book.version, fragments, (), live, dense=True, back_to=version))
    return effects + [restart(one, text) for one in book.members.values() if one.state is MemberState.LIVE]


def restart(member: Member, reason: str) -> SendTo:
    """Have a live node drop what it has pending, and take none of its deltas until it has fetched what is shared."""
    member.restarts = True
    return SendTo(member.peer, Preempt(reason))


def _acquit(book: HubBook, peers: Sequence[PeerId]) -> list[HubEffect]:
    """So many cannot all be wrong: the gate is. It takes their size, and they are let out."""
    effects: list[HubEffect] = [Rebase(tuple(peers))]
    for peer in peers:
        book.quarantines.acquit(peer)
        if book.members[peer].quarantined:  # and was told so
            book.members[peer].quarantined = False
            effects.append(SendTo(peer, Quarantine("over", "the norm gate of the broker was wrong", 0.0)))
    return effects


def release(book: HubBook, now: float) -> list[HubEffect]:
    """Make versions of the rounds that are due, and return what the aggregator is to do for them."""
    if book.version < 0:
        return []
    effects: list[HubEffect] = []
    _end_grace(book, now)
    if not book.complete:  # the first began with so many at once; here they come one after another
        book.complete = len(training(book.members)) >= book.settings.start_nodes
    while book.complete and (taken := book.rounds.take(book.awaited, now)):
        if book.rounds.rule.one_each:
            # a stated order: the sum of floats depends on it (strict mode is bit-identical)
            taken.sort(key=lambda one: one[0])
            effects += [Accumulate(peer, publish) for peer, publish in taken]
        senders = {peer for peer, _ in taken}
        everybody = max(len(counted(book.members) | senders), book.dealing.nodes_at_the_end)
        scheduled = book.timetable.at(book.version)
        reduce = Reduce(
            version=book.version + 1,
            fragments=tuple(sorted({publish.fragment for _, publish in taken})),
            contributions=tuple(_contribution(book, peer, publish) for peer, publish in taken),
            live=len(senders) if book.exchange else everybody,
            dense=any(publish.dense for _, publish in taken),
            plain=bool(book.exchange),
            codec=scheduled.broadcast_codec if book.settings.is_planned else "",
            outer=scheduled.outer if book.settings.is_planned else "",
        )
        book.version = reduce.version
        for peer, sequence in reduce.landed:
            book.records.land(peer, sequence, book.version)
        book.samples += reduce.samples
        book.contributions += len(taken)
        effects.append(reduce)
        if book.began_at is None:
            book.began_at = now
    return effects


def _end_grace(book: HubBook, now: float) -> None:
    """Await those no longer that came before the first release, and of which nothing has come for long since."""
    if book.began_at is None or now - book.began_at < GRACE_SECONDS or book.rounds.rule.one_each:
        return
    for member in book.members.values():
        member.counted = bool(member.contributions)


def _contribution(book: HubBook, peer: PeerId, publish: Publish) -> Contribution:
    staleness = book.version - publish.base_version
    return Contribution(
        peer=peer,
        sequence=publish.sequence,
        fragment=publish.fragment,
        samples=publish.samples,
        score=publish.score,
        base_version=publish.base_version,
        staleness=staleness,
        too_stale=_too_stale(book, staleness) and book.settings.stale == "drop" and not publish.dense,
    )


def _too_stale(book: HubBook, staleness: int) -> bool:
    return 0 < book.settings.max_staleness < staleness
