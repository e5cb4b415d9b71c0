"""Decide who comes in: whether a Hello is welcome, what it is told, and what follows from it for the others (pure).

Rule 1: a Hello that no sound peer says is a RemoteProtocolError.  Rule 2: one that is sound and not welcome gets a
sentence that says what to do; nothing has changed by it.  Rule 3: a Hello that was had is no second one.
Rule 4: who says Hello again is the same peer on a new connection: what it has done counts on, and what was on its way
on the old one is lost.  Rule 5: a standby, or a master of a shard, takes the place of the one at its address.
"""

from __future__ import annotations

from zmqtrain.core.errors import RemoteProtocolError
from zmqtrain.core.types import PeerId
from zmqtrain.protocol.book import HubBook
from zmqtrain.protocol.effects import Broadcast, Disconnect, HubEffect, Replicate, SendTo
from zmqtrain.protocol.fencing import MAX_INCARNATION, SUPERSEDED, Stamp, Verdict
from zmqtrain.protocol.fragment_rounds import FragmentRounds
from zmqtrain.protocol.leaving import STOPPED, lose
from zmqtrain.protocol.masters import ADDRESS, Claim
from zmqtrain.protocol.members import MOST_CHECKPOINTS, MOST_WAITING, Member, MemberState
from zmqtrain.protocol.messages import Hello, Quarantine, Refused, Welcome, model_to_wire
from zmqtrain.protocol.publishing import release
from zmqtrain.protocol.rounds import AfterAll
from zmqtrain.protocol.words import MAX_NAME, MAX_WORDS, words

MOST_MEMBERS = 512
"""Peers at one hub, of any kind: the Roster, which describes all nodes, stays readable (one head)."""
MAX_LINK = 1e12
"""Bytes per second that a node may say its port has: what is made of these must stay a number."""
LEAST_LINK, LEAST_SHARE = 1.0, 1e-6
"""And at least, of what it gives of it: what follows from it is no rate else."""
CLOCK = (
    "the clock of this PC is more than a day ahead of the broker's: set the one that is wrong (timedatectl), and start "
    "this node again"
)
STATE_OF_ROLE = {
    "observer": MemberState.OBSERVER,
    "master": MemberState.MASTER,
    "process": MemberState.PROCESS,
    "standby": MemberState.STANDBY,
}
"""Who is none of these is a node: welcomed."""


def check_hello(sender: PeerId, hello: Hello) -> None:
    """Raise RemoteProtocolError for a Hello that no sound peer says."""
    fits = LEAST_SHARE <= hello.share <= 1 and 0 <= hello.link <= MAX_LINK
    if not fits or 0 < hello.link < LEAST_LINK / hello.share:
        raise RemoteProtocolError(sender, "joining", f"a Hello with a link of {hello.link}, share {hello.share}")
    if len(hello.exchange) > MAX_WORDS:
        raise RemoteProtocolError(sender, "joining", "a Hello with an exchange of that length")
    if not 0 <= hello.incarnation < MAX_INCARNATION:
        raise RemoteProtocolError(sender, "joining", f"a Hello with the incarnation {hello.incarnation}")
    if len(hello.in_flight) > MOST_WAITING or len(hello.checkpoints) > MOST_CHECKPOINTS:
        raise RemoteProtocolError(sender, "joining", "a Hello that names too many deltas or checkpoints")


def refusal_of(book: HubBook, sender: PeerId, hello: Hello) -> Refused | None:
    """Return why this hub does not take a peer of this Hello, for whatever role it gives; None if it does."""
    if hello.incarnation < book.records.incarnation(sender):
        return Refused("superseded", SUPERSEDED)
    if hello.incarnation > book.latest_incarnation:
        return Refused("clock", CLOCK)
    if hello.term > book.term and hello.run == book.run:
        return Refused("term", f"this broker knows of {book.term} takeovers, not {hello.term}")
    if hello.role == "node" and book.stopped_at is not None:
        return Refused("stopped", STOPPED)
    if len(book.members) >= MOST_MEMBERS and sender not in book.members:
        # "unknown": it says Hello again, and there may be room then
        return Refused("unknown", f"this broker has {MOST_MEMBERS} peers: try again later")
    if hello.role == "standby" and (why := _obstacle_to_standby(book, sender, hello)):
        return Refused("occupied", why)
    if hello.role == "master" and hello.run not in ("", book.run) and not book.shard:
        text = (
            f"the first master now runs {book.run}, this one has a shard of {hello.run}. Restart the first "
            "with the checkpoint of that run, or start this one again to join the new run"
        )
        return Refused("run", text)
    return None


def join(book: HubBook, sender: PeerId, hello: Hello, now: float) -> list[HubEffect]:
    """Take one Hello: let its sender in, or say why not. Raises RemoteProtocolError as `check_hello` does."""
    check_hello(sender, hello)
    if hello.incarnation and hello.incarnation == book.records.incarnation(sender):
        book.fence.count(Verdict.DOUBLE)
        return []
    refused, succeeds = refusal_of(book, sender, hello), None
    if refused is not None and refused.reason == "superseded":
        book.fence.count(Verdict.FORMER)
    if refused is None and hello.role == "master":
        why, succeeds = _claim_shard(book, sender, hello)
        refused = Refused("shard", why) if why else None
    if refused is None and hello.role == "node" and (why := _settle_exchange(book, sender, hello)):
        refused = Refused("exchange", why)
    if refused is not None:
        return [SendTo(sender, refused, Stamp(hello.incarnation))]
    effects: list[HubEffect] = []
    if hello.role == "standby" and (other := book.standby) is not None:  # it, or one in its place, begins anew
        if other.peer == sender:
            book.tenure.lost()
            effects.append(Broadcast(book.roster(now)))
        else:
            effects += lose(book, other, "another took its place at its address", now)
    before = book.members.pop(sender, None)
    book.came += before is None
    book.records.greet(sender, hello.incarnation)
    book.records.recall(sender, hello.in_flight)
    book.fence.open(sender, hello.incarnation)
    if succeeds is not None and succeeds in book.members:
        effects += lose(book, book.members[succeeds], "another broker took its place at its address", now)
    member = book.members[sender] = _member(sender, hello, before, book.came, now)
    member.counted = before.counted if before is not None else book.counts_newcomers
    if before is not None:  # what was on its way on the old connection will not come any more
        effects.append(Disconnect(sender, "again", f"{member.name} connected again"))
        effects += book.groups.gone(sender, "it connected again")
    effects.append(SendTo(sender, _welcome(book, sender)))
    if (rest := book.quarantines.rest(sender, now)) > 0:
        member.quarantined = True
        effects.append(SendTo(sender, Quarantine("again", "it was quarantined before it connected again", rest)))
    if member.state is MemberState.OBSERVER:
        effects.append(SendTo(sender, book.roster(now)))
    if member.state is MemberState.MASTER:  # nodes may wait for it
        effects.append(Broadcast(book.roster(now)))
    # units may have been sent on the old connection: it will ask again; one that is no node any more will not
    left = before if before is not None and before.is_node and not member.is_node else None
    effects += book.dealing.lost(sender, unbacked=left is not None and not book.backs(left))
    if before is not None:
        effects += book.founding.left(before)
    effects += release(book, now)
    if member.state is MemberState.STANDBY:  # a copy of what is told here, with what this has released
        effects.append(Replicate(sender))
    return effects


def _member(peer: PeerId, hello: Hello, before: Member | None, number: int, now: float) -> Member:
    """Return what is held of a peer that comes in. before: what was held of it on the connection before this."""
    state = STATE_OF_ROLE.get(hello.role, MemberState.WELCOMED)
    name = words(hello.name, MAX_NAME)
    member = Member(peer, name, state, now, now, hello.version, hello.version < 0, number=number)
    member.link, member.share, member.checkpoints = hello.link, hello.share, hello.checkpoints
    if state is MemberState.STANDBY:
        member.address = hello.address
    if before is not None:
        member.number = before.number
        member.contributions, member.samples, member.report = before.contributions, before.samples, before.report
        member.dropped, member.steps, member.units = before.dropped, before.steps, before.units
        member.same_as = before.same_as
    return member


def _settle_exchange(book: HubBook, sender: PeerId, hello: Hello) -> str:
    """Let the first node decide how all exchange; return why another cannot take part, "" if it can."""
    if hello.exchange == book.exchange:
        return ""
    other = next((member for peer, member in book.members.items() if member.is_node and peer != sender), None)
    name = words(hello.name, MAX_NAME)
    if other is not None:
        return (
            f"{name} would train with {_exchange_words(hello.exchange)}, and {other.name}, which is in "
            f"this run, does so with {_exchange_words(book.exchange)}: start all nodes of a run with the same"
        )
    if book.rounds.pending:
        return (
            f"{name} would train with {_exchange_words(hello.exchange)}, and deltas of nodes that "
            f"trained with {_exchange_words(book.exchange)} have not landed yet: start it again in a few seconds"
        )
    book.exchange = hello.exchange
    # what nodes in lockstep publish, at the end, is the same of all: it must land once, whole
    book.rounds = FragmentRounds(AfterAll() if book.exchange else book.rule, together=book.settings.carries_all)
    return ""


def _claim_shard(book: HubBook, sender: PeerId, hello: Hello) -> tuple[str, PeerId | None]:
    """Register the master of a shard; see `Masters.claim`."""
    if book.shard:
        return f"this broker has shard {book.shard}: register with the first, at {book.first}", None
    return book.masters.claim(sender, Claim(hello.shard, hello.address[:MAX_WORDS]))


def _welcome(book: HubBook, peer: PeerId) -> Welcome:
    """Return what a peer is told that has come in."""
    return Welcome(
        run=book.run,
        version=book.version,
        settings=book.settings.to_dict(),
        model=model_to_wire(book.model) if book.version >= 0 else (),
        landed=book.records.landed(peer),
        accepted=tuple(publish.sequence for sender, publish in book.rounds.pending if sender == peer),
        schedules=book.timetable.since(book.version),
        shard=book.shard,
        masters=(book.first,) if book.shard else book.masters.addresses,
        heard=book.records.heard(peer),
        term=book.term,
        standby=book.tenure.standby,
        called=book.members[peer].called,
        samples=book.samples,
    )


def _obstacle_to_standby(book: HubBook, sender: PeerId, hello: Hello) -> str:
    """Return why this hub takes no standby, or not this one; "" if it does."""
    if book.settings.masters > 1:
        return "this run has several masters: a standby follows one broker that has the whole model"
    if book.exchange:
        return f"the nodes of this run exchange with {_exchange_words(book.exchange)}, past the broker"
    if not ADDRESS.fullmatch(hello.address):
        return f"{hello.address[:MAX_WORDS]!r} is no address at which nodes reach it: --address tcp://HOST:PORT"
    other = book.standby
    if other is not None and other.peer != sender and other.address != hello.address:
        return f"a standby follows this broker already, at {other.address}: one is enough"
    return ""


def _exchange_words(exchange: str) -> str:
    return f"--exchange {words(exchange)}" if exchange else "no --exchange"
