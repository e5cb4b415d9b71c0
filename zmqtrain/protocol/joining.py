"""Decide who comes in: whether a Hello is welcome, and what it is told (pure).

Rule 1: a Hello that no sound peer says is a RemoteProtocolError.  Rule 2: one that is sound and not welcome gets a
sentence that says what to do; nothing has changed by it.  Rule 3: a Hello that was had is no second one.
"""

from __future__ import annotations

from zmqtrain.errors import RemoteProtocolError
from zmqtrain.protocol.book import HubBook
from zmqtrain.protocol.fencing import MAX_INCARNATION, SUPERSEDED
from zmqtrain.protocol.fragment_rounds import FragmentRounds
from zmqtrain.protocol.masters import ADDRESS, Claim
from zmqtrain.protocol.members import MOST_CHECKPOINTS, MOST_WAITING
from zmqtrain.protocol.messages import Hello, Refused, Welcome, model_to_wire
from zmqtrain.protocol.rounds import AfterAll
from zmqtrain.protocol.words import MAX_NAME, MAX_WORDS, words
from zmqtrain.types import PeerId

__all__ = ["MOST_MEMBERS", "check_hello", "refusal_of", "settle_exchange", "claim_shard", "welcome"]

MOST_MEMBERS = 512
"""Peers at one hub, of any kind: the Roster, which describes all nodes, stays readable (one head)."""
MAX_LINK = 1e12
"""Bytes per second that a node may say its port has: what is made of these must stay a number."""
LEAST_LINK, LEAST_SHARE = 1.0, 1e-6
"""And at least, of what it gives of it: what follows from it is no rate else."""


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
    if hello.term > book.term and hello.run == book.run:
        return Refused("term", f"this broker knows of {book.term} takeovers, not {hello.term}")
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


def settle_exchange(book: HubBook, sender: PeerId, hello: Hello) -> str:
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
    book.rounds = FragmentRounds(AfterAll() if book.exchange else book.rule, book.settings.fragments)
    return ""


def claim_shard(book: HubBook, sender: PeerId, hello: Hello) -> tuple[str, PeerId | None]:
    """Register the master of a shard; see `Masters.claim`."""
    if book.shard:
        return f"this broker has shard {book.shard}: register with the first, at {book.first}", None
    return book.masters.claim(sender, Claim(hello.shard, hello.address[:MAX_WORDS]))


def welcome(book: HubBook, peer: PeerId) -> Welcome:
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
