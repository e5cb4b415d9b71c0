"""Say what a client of the parameter server and a master tell each other.

Rule 1: as in `messages`, which lists these too.  Rule 2: a client numbers its requests; the number of one that
announces a transfer is the transfer's.  What is refused is refused by that number (`Refused.sequence`).
"""

from __future__ import annotations

from dataclasses import dataclass

WireKey = tuple[str, tuple[int, ...], str]
"""A key as it travels: its name, shape and dtype."""

WirePlace = tuple[str, tuple[int, ...], str, tuple[tuple[int, int, int], ...]]
"""A key and its pieces: for each the master, its first value in the flat key, and how many."""


@dataclass(frozen=True, slots=True)
class Enrol:
    """Client to master: I use your keys by these rules. "" and 0: whatever they are here.

    store: as the first of the masters named it.  master: which of `masters` this client takes you for.
    workers: clocks begin to move when so many have enrolled.  reads: this client never pushes.
    """

    store: str
    master: int
    masters: int
    consistency: str
    optimizer: str
    workers: int
    reads: bool


@dataclass(frozen=True, slots=True)
class Enrolled:
    """Master to client: these are the rules."""

    store: str
    consistency: str
    optimizer: str
    workers: int


@dataclass(frozen=True, slots=True)
class Declare:
    """Client to the first master: I have values for these keys; where do they lie? With a dtype of "": only where."""

    request: int
    keys: tuple[WireKey, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """First master to client: where keys of that request lie, some now, others when their values are there.

    found: bring the values of these to all their masters, then say Founded.  given: the values of these are there.
    """

    request: int
    found: tuple[WirePlace, ...]
    given: tuple[WirePlace, ...]


@dataclass(frozen=True, slots=True)
class Founded:
    """Client to the first master: the values of these keys are with all their masters."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Initialise:
    """Client to master: the first values of your piece of a key wait for credit."""

    transfer: int
    key: str
    dtype: str
    start: int
    values: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Push:
    """Client to master: a gradient for your piece of a key waits for credit. pull: and I want the values then."""

    transfer: int
    key: str
    dtype: str
    pull: bool
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pull:
    """Client to master: I want the values of your piece of a key."""

    request: int
    key: str


@dataclass(frozen=True, slots=True)
class Values:
    """Master to client: the values that this request wants, after `version` steps."""

    transfer: int
    request: int
    version: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """Master to client: this request, which wants no values, is done."""

    request: int


@dataclass(frozen=True, slots=True)
class Awaited:
    """Master to client: your requests wait for these workers, and for so many that have not enrolled."""

    workers: tuple[str, ...]
    missing: int


KEY_REQUESTS = (Enrol, Declare, Founded, Initialise, Push, Pull)
"""What a client says to a master."""

KeyMessage = Enrol | Enrolled | Declare | Placed | Founded | Initialise | Push | Pull | Values | Done | Awaited
