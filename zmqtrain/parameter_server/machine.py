"""State machine of one shard's key server: messages of clients go in, effects come out. No socket, clock or array.

1. It sees heads only; effects name a payload by (worker, request). Effects are carried out in order.
2. A worker's clock at a key moves when one of its pushes is complete, or was rejected in transfer (then it abstains),
   so that nobody waits for a push that will not come.
3. No clock moves until `workers` clients have enrolled. From then on live workers count; a later one counts from its
   first push of a key; a lost one counts no more.
4. An invalid request is refused with a sentence, and costs its sender that request only.
5. Adding or removing a client costs what it has asked for, however many keys there are.
6. The first client sets the serving rules; a later client's ("" or 0: not set) must agree with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import Any

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import with_present_names
from zmqtrain.core.types import PeerId
from zmqtrain.parameter_server.directory import ITEM_BYTES, PIECE_BYTES
from zmqtrain.parameter_server.store import Consistency, consistency_from_spec, is_cut, optimizer_from_spec


@dataclass(frozen=True, slots=True)
class Receive:
    """Let the payload of this request come; then say `received` or `broken`."""

    worker: PeerId
    request: int


@dataclass(frozen=True, slots=True)
class Install:
    """The payload of this request is the first values of a key."""

    worker: PeerId
    request: int
    key: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Apply:
    """Make one step of a key by the mean of these payloads, added in this order."""

    key: str
    payloads: tuple[tuple[PeerId, int], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Send a worker the values of a key, after all earlier effects."""

    worker: PeerId
    request: int
    key: str


@dataclass(frozen=True, slots=True)
class Confirm:
    """Tell a worker that this request is done."""

    worker: PeerId
    request: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell a worker that this request is not done, and why. reason: a short code; text: a sentence for people."""

    worker: PeerId
    request: int
    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Step by this optimizer from now on, with fresh state. reset: without the keys that were there."""

    optimizer: str
    reset: bool


Effect = Receive | Install | Apply | Answer | Confirm | Refuse | Begin


class Kind(Enum):
    """What a request asks for; the values are for sentences."""

    INITIALISE = "init"
    PUSH = "push"
    PULL = "pull"


@dataclass(slots=True)
class Request:
    """One open request. clock: the clock at which it may proceed; pull: values are wanted.

    turn: the order of opening: of requests that wait for the same clock the first goes first.
    """

    worker: PeerId
    number: int
    kind: Kind
    key: str
    pull: bool = False
    clock: int | None = None
    dtype: str = ""
    values: tuple[int, int] = (0, 0)
    turn: int = field(default=0, init=False)

    def __lt__(self, other: Request) -> bool:
        return (self.clock or 0, self.turn) < (other.clock or 0, other.turn)


@dataclass(slots=True)
class Worker:
    """A client that has enrolled. reads: it never pushes.  counts: for every key, from the beginning.

    open: its requests by number.  pushed: the keys that it has pushed to.
    """

    reads: bool
    counts: bool
    open: dict[int, Request] = field(default_factory=dict)
    pushed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Key:
    """One key's piece.

    clock: the lowest clock of the workers that count.  clocks: by worker, complete pushes; asked: announced pushes.
    pushed: whether it was ever pushed to.  round: the pushes gathered for the next step.
    far: requests that wait for the key's clock; own: by worker, pulls that wait for its own pushes; both are heaps.
    """

    name: str
    dtype: str
    start: int
    values: int
    clock: int = 0
    pushed: bool = False
    clocks: dict[PeerId, int] = field(default_factory=dict, init=False)
    asked: dict[PeerId, int] = field(default_factory=dict, init=False)
    round: set[tuple[PeerId, int]] = field(default_factory=set, init=False)
    far: list[Request] = field(default_factory=list, init=False)
    own: dict[PeerId, list[Request]] = field(default_factory=dict, init=False)

    @property
    def size(self) -> int:
        """The bytes of its values."""
        return self.values * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Rules:
    """How a server serves, set by its first client. "" and 0: not set; the present value or the default holds.

    store: the name of the keys that all brokers hold together; the first broker chooses it.  broker: the index of this
    one among `shards`.  workers: clocks begin to move when so many have enrolled.
    """

    store: str = ""
    shard: int = 0
    shards: int = 1
    consistency: str = ""
    optimizer: str = ""
    workers: int = 0


DEFAULT_RULES = Rules(consistency="async", optimizer=optimizer_from_spec("sgd").name, workers=1)


LONGEST_SPEC = 400


def canonical(rules: Rules) -> Rules:
    """Return rules with canonical specs. Raises ConfigError for what is none."""
    if not (1 <= rules.shards <= 1024 and 0 <= rules.shard < rules.shards and 0 <= rules.workers <= 1 << 16):
        raise ConfigError(f"shard {rules.shard} of {rules.shards}, for {rules.workers} workers: there is no such one")
    if max(map(len, (rules.store, rules.consistency, rules.optimizer))) > LONGEST_SPEC:
        raise ConfigError(f"the name of a store, a consistency and an optimizer have {LONGEST_SPEC} characters at most")
    return Rules(
        rules.store,
        rules.shard,
        rules.shards,
        consistency_from_spec(rules.consistency).name if rules.consistency else "",
        optimizer_from_spec(rules.optimizer).name if rules.optimizer else "",
        rules.workers,
    )


def check_equal(there: Rules, wanted: Rules, set_by: str) -> None:
    """Raise ConfigError, naming both, if a client's rules differ from the present ones, which `set_by` has set."""
    for what in ("shards", "shard", "store", "consistency", "optimizer", "workers"):
        ours, theirs = getattr(there, what), getattr(wanted, what)
        if (theirs not in ("", 0) or what == "shard") and ours != theirs:
            text = f"{what} is {ours!r} on the server, as {set_by} said first; this client says {theirs!r}"
            if what in ("shard", "shards", "store"):
                text += ": name the same brokers in the same order in all clients"
            raise ConfigError(text)


MOST_REQUESTS = 1 << 16
"""So many requests of one worker may be open: each is held in memory."""
KEY_BYTES, MAX_NAME = 4096, 500
"""What a key takes of memory besides values, at most; and the characters of its name."""


class KeyServer:
    """The machine of one broker.

    name: unique among brokers; a store that begins here is named after it.  limit_bytes: the memory allowed for its
    keys, with the optimizer's state and the gathered gradients; held_bytes: the memory in use, value_bytes: for the
    values alone.  rules: those in force.  pushes: the number of complete pushes.
    """

    def __init__(self, name: str, limit_bytes: int) -> None:
        self.name, self.limit_bytes, self.held_bytes, self.pushes = name, limit_bytes, 0, 0
        self.value_bytes = 0
        self.rules = DEFAULT_RULES
        self.consistency: Consistency = consistency_from_spec(DEFAULT_RULES.consistency)
        self.keys: dict[str, Key] = {}
        self._gathered: set[tuple[PeerId, int]] = set()  # the payloads that wait for the step of their key
        self._moving: set[str] = set()  # the keys at which a live worker has a clock, or a step is being gathered
        self._slots = 0
        self._stores = self._turns = 0
        self._set_by = ""
        self._workers: dict[PeerId, Worker] = {}
        self._complete = False

    @property
    def clients(self) -> int:
        """How many clients have enrolled, those that only read too."""
        return len(self._workers)

    def serves(self, worker: PeerId) -> bool:
        """Return whether a client has enrolled."""
        return worker in self._workers

    # ------------------------------------------------------------------ who is here

    def enrol(self, worker: PeerId, rules: Rules, reads: bool) -> list[Effect]:
        """Take a client. Raises ConfigError if it wants other rules than those there, which the message names, or an
        optimizer that keeps more than there is memory for.

        If no other client is here, its rules become the server's; rules that it does not set stay as they are.
        """
        wanted = canonical(rules)
        effects: list[Effect] = []
        others = [peer for peer in self._workers if peer != worker]
        if others:
            check_equal(self.rules, wanted, self._set_by)
        else:
            effects = self._begin(worker, wanted)
        self._workers[worker] = Worker(reads, counts=not reads and not self._complete)
        if not self._complete:
            self._complete = sum(one.counts for one in self._workers.values()) >= self.rules.workers
            if self._complete:
                effects += self._settle_all(self._moving)
        return effects

    def _begin(self, worker: PeerId, wanted: Rules) -> list[Effect]:
        before = self.rules
        store = wanted.store if wanted.shard else before.store
        place = (wanted.shard, wanted.shards)
        reset = not store or (before.store, before.shard, before.shards) != (store, *place)
        consistency = wanted.consistency or before.consistency
        optimizer = wanted.optimizer or before.optimizer
        slots = len(optimizer_from_spec(optimizer).slots)
        if reset:
            self.keys, self._moving, self.held_bytes, self.value_bytes = {}, set(), 0, 0
            self._gathered.clear()
            if not wanted.shard:
                self._stores += 1
                store = f"{self.name}-{self._stores}"
        elif slots != self._slots:
            self._check_room(optimizer, slots)
        # what those who have left had pushed counts, though not all of them did
        effects: list[Effect] = [step for name in sorted(self._moving) for step in self._step(self.keys[name])]
        self._moving.clear()
        self.rules = Rules(store, *place, consistency, optimizer, wanted.workers or before.workers)
        self.consistency = consistency_from_spec(consistency)
        if slots != self._slots:
            self._slots, self.held_bytes = slots, self._sum_costs(slots)
        self._complete, self._set_by = False, worker.rpartition("#")[0] or worker
        return [*effects, Begin(optimizer, reset)] if reset or optimizer != before.optimizer else effects

    def lost(self, worker: PeerId) -> list[Effect]:
        """Forget a client: its complete pushes count, and nobody waits for it."""
        gone = self._workers.pop(worker, None)
        if gone is None:
            return []
        for name in gone.pushed:
            key = self.keys[name]
            key.clocks.pop(worker, None)
            key.asked.pop(worker, None)
            key.own.pop(worker, None)
            key.far = [one for one in key.far if one.worker != worker]
            heapify(key.far)
        effects = self._settle_all(self._moving if gone.counts else gone.pushed)
        self._moving -= {name for name in gone.pushed if not (self.keys[name].clocks or self.keys[name].round)}
        return effects

    def awaited(self) -> dict[PeerId, tuple[PeerId, ...]]:
        """Return the workers that wait, each with those it waits for; with none: for workers not yet enrolled."""
        behind: dict[str, set[PeerId]] = {}
        found: dict[PeerId, tuple[PeerId, ...]] = {}
        for peer, worker in self._workers.items():
            names = {asked.key for asked in worker.open.values() if not self._is_near(asked)}
            for name in names - behind.keys():
                clock = self.keys[name].clock
                behind[name] = {other for other, theirs in self._counted(self.keys[name]) if theirs == clock}
            if names:
                found[peer] = tuple(sorted(set[PeerId]().union(*(behind[name] for name in names)) - {peer}))
        return found

    @property
    def missing(self) -> int:
        """How many workers must still enrol before clocks move."""
        return 0 if self._complete else self.rules.workers - sum(one.counts for one in self._workers.values())

    # ------------------------------------------------------------------ requests

    def initialise(
        self, worker: PeerId, request: int, key: str, dtype: str, start: int, values: int, sizes: tuple[int, ...]
    ) -> list[Effect]:
        """A client brings the first values of a key's piece."""
        known = self.keys.get(key)
        if (why := self._why_not(worker, request)) is not None:
            return [Refuse(worker, request, *why)]
        if len(key) > MAX_NAME:
            return [Refuse(worker, request, "key", f"the name of a key has {len(key)} characters; {MAX_NAME} may be")]
        if dtype not in ITEM_BYTES or start < 0 or values < 1 or not is_cut(values * ITEM_BYTES[dtype], sizes):
            return [Refuse(worker, request, "size", f"{values} values of {dtype!r} in {len(sizes)} frames are no key")]
        if (size := values * ITEM_BYTES[dtype]) > PIECE_BYTES:
            return [Refuse(worker, request, "size", f"a piece of a key has {PIECE_BYTES} bytes at most, not {size}")]
        if known is not None and known.pushed:
            return [Refuse(worker, request, "key", f"the key {key!r} is there already, and trained")]
        asked = Request(worker, request, Kind.INITIALISE, key, dtype=dtype, values=(start, values))
        if (text := self._why_no_room(asked)) is not None:
            return [Refuse(worker, request, "memory", text)]
        self._open(asked)
        return [Receive(worker, request)]

    def push(
        self, worker: PeerId, request: int, key: str, dtype: str, sizes: tuple[int, ...], pull: bool
    ) -> list[Effect]:
        """A worker has a gradient for a key, and with `pull` wants the values that hold it."""
        if (why := self._why_not(worker, request, key)) is not None:
            return [Refuse(worker, request, *why)]
        entry = self.keys[key]
        if self._workers[worker].reads:
            return [Refuse(worker, request, "reads", f"this client only reads: it cannot push {key!r}")]
        if dtype != entry.dtype or not is_cut(entry.size, sizes):
            text = f"{sum(sizes)} bytes of {dtype} came for {key!r}, of which {entry.size} of {entry.dtype} are here"
            return [Refuse(worker, request, "size", text)]
        clock = entry.asked.get(worker, entry.clock)
        entry.asked[worker] = clock + 1
        entry.clocks.setdefault(worker, clock)
        entry.pushed = True
        self._workers[worker].pushed.add(key)
        self._moving.add(key)
        asked = Request(worker, request, Kind.PUSH, key, pull, clock)
        self._open(asked)
        if not self._is_near(asked):
            heappush(entry.far, asked)
            return []
        return [Receive(worker, request)]

    def pull(self, worker: PeerId, request: int, key: str) -> list[Effect]:
        """A client wants the values of a key, with all its own pushes, and as fresh as the consistency demands."""
        if (why := self._why_not(worker, request, key)) is not None:
            return [Refuse(worker, request, *why)]
        asked = Request(worker, request, Kind.PULL, key, True, self.keys[key].asked.get(worker))
        self._open(asked)
        return self._answer_or_wait(asked)

    # ------------------------------------------------------------------ payloads

    def received(self, worker: PeerId, request: int) -> list[Effect]:
        """The payload of a request is here whole, and sound."""
        asked = self._take(worker, request)
        if asked is None:
            return []
        if asked.kind is Kind.INITIALISE:
            known = self.keys.get(asked.key)
            if known is not None and known.pushed:
                return [Refuse(worker, request, "key", f"the key {asked.key!r} is there already, and trained")]
            if (text := self._why_no_room(asked)) is not None:  # of those that were announced at once, not all may fit
                return [Refuse(worker, request, "memory", text)]
            self.held_bytes += self._more_bytes(asked)
            key = self.keys[asked.key] = Key(asked.key, asked.dtype, *asked.values)
            self.value_bytes += key.size - (0 if known is None else known.size)
            return [Install(worker, request, asked.key, asked.dtype), Confirm(worker, request)]
        key = self.keys[asked.key]
        if key.round and self.held_bytes + key.size > self.limit_bytes:
            text = f"{len(key.round)} gradients wait for this step, and this broker has no memory for one more"
            return self._abstain(asked, "memory", text)
        self.pushes += 1
        effects: list[Effect] = []
        if self.consistency.averages:
            self.held_bytes += key.size if key.round else 0  # the first is in what the key takes
            key.round.add((worker, request))
            self._gathered.add((worker, request))
        else:
            effects.append(Apply(asked.key, ((worker, request),)))
        key.clocks[worker] += 1
        if not asked.pull:
            effects.append(Confirm(worker, request))
            return effects + self._settle(key, worker)
        asked.kind, asked.clock = Kind.PULL, (asked.clock or 0) + 1
        self._open(asked)
        effects += self._settle(key, worker)
        return effects + self._answer_or_wait(asked)

    def broken(self, worker: PeerId, request: int, reason: str, text: str) -> list[Effect]:
        """The payload of a request is invalid: a push abstains."""
        asked = self._take(worker, request)
        return [] if asked is None else self._abstain(asked, reason, text)

    def _abstain(self, asked: Request, reason: str, text: str) -> list[Effect]:
        text = f"{asked.kind.value} of {asked.key!r}: {text}"
        effects: list[Effect] = [Refuse(asked.worker, asked.number, reason, text)]
        if asked.kind is Kind.PUSH:
            key = self.keys[asked.key]
            key.clocks[asked.worker] += 1
            effects += self._settle(key, asked.worker)
        return effects

    # ------------------------------------------------------------------ life after a restart

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides the values: the rules, and the pieces of keys that lie here."""
        return {
            "rules": asdict(self.rules),
            "keys": [[key.name, key.dtype, key.start, key.values] for key in self.keys.values()],
        }

    def restore(self, state: Mapping[str, Any], versions: Mapping[str, int]) -> None:
        """Take over what `state` gave, without a client. versions: of the values.

        Raises ConfigError, KeyError, TypeError or ValueError for what `state` did not give.
        """
        rules = with_present_names(state["rules"])
        if "master" in rules:  # of version 0.1
            rules["shard"] = rules.pop("master")
        self.rules = canonical(Rules(**rules))
        self.consistency = consistency_from_spec(self.rules.consistency)
        self._slots = len(optimizer_from_spec(self.rules.optimizer).slots)
        for name, dtype, start, values in state["keys"]:
            self.keys[name] = Key(str(name), str(dtype), int(start), int(values), pushed=versions[name] > 0)
        self.held_bytes = self._sum_costs(self._slots)
        self.value_bytes = sum(key.size for key in self.keys.values())

    # ------------------------------------------------------------------ clocks

    def _counted(self, key: Key) -> Iterator[tuple[PeerId, int]]:
        for peer, worker in self._workers.items():
            if peer in key.clocks or worker.counts:
                yield peer, key.clocks.get(peer, key.clock)

    def _settle(self, key: Key, worker: PeerId | None = None) -> list[Effect]:
        """Advance a key's clock; resume the requests that waited for it, and those of `worker`: its own has moved.

        The cost does not depend on the number of other requests that wait."""
        effects: list[Effect] = []
        slowest = min((clock for _, clock in self._counted(key)), default=key.clock)
        if self._complete and slowest > key.clock:
            effects += self._step(key)
            key.clock = slowest
            while key.far and self._is_near(key.far[0]):
                asked = heappop(key.far)
                push = asked.kind is Kind.PUSH
                effects += [Receive(asked.worker, asked.number)] if push else self._answer_or_wait(asked)
        while worker in key.own and self._is_whole(key.own[worker][0]):
            effects += self._answer_or_wait(heappop(key.own[worker]))
            if not key.own[worker]:
                del key.own[worker]
        return effects

    def _step(self, key: Key) -> list[Effect]:
        if not key.round:
            return []
        gathered, key.round = key.round, set()
        self._gathered -= gathered
        self.held_bytes -= key.size * (len(gathered) - 1)
        return [Apply(key.name, tuple(sorted(gathered)))]

    def _settle_all(self, names: Iterable[str]) -> list[Effect]:
        return [effect for name in sorted(names) for effect in self._settle(self.keys[name])]

    def _is_near(self, asked: Request) -> bool:
        return asked.clock is None or self.consistency.may_proceed(asked.clock - self.keys[asked.key].clock)

    def _is_whole(self, asked: Request) -> bool:
        """Return whether all that its worker pushed before a pull is here."""
        return asked.clock is None or self.keys[asked.key].clocks.get(asked.worker, asked.clock) >= asked.clock

    def _answer_or_wait(self, asked: Request) -> list[Effect]:
        key = self.keys[asked.key]
        if not self._is_near(asked):
            heappush(key.far, asked)
        elif not self._is_whole(asked):
            heappush(key.own.setdefault(asked.worker, []), asked)
        else:
            self._take(asked.worker, asked.number)
            return [Answer(asked.worker, asked.number, asked.key)]
        return []

    # ------------------------------------------------------------------ bounds

    def _why_not(self, worker: PeerId, request: int, key: str | None = None) -> tuple[str, str] | None:
        if worker not in self._workers:
            return "enrol", "this client has not enrolled here"
        open_requests = self._workers[worker].open
        if request in open_requests or len(open_requests) >= MOST_REQUESTS:
            return "requests", f"request {request} is open already, or one of more than {MOST_REQUESTS}: wait for some"
        if (worker, request) in self._gathered:
            return "requests", f"the gradient of request {request} waits for its step: a new request has a new number"
        if key is not None and key not in self.keys:
            return "key", (
                f"this broker has nothing of the key {key!r}: init it first (a broker that was restarted has none)"
            )
        return None

    def _why_no_room(self, asked: Request) -> str | None:
        more = self._more_bytes(asked)
        if self.held_bytes + more <= self.limit_bytes:
            return None
        return (
            f"the key {asked.key!r} and what the optimizer keeps of it take {more >> 20} MiB; of the "
            f"{self.limit_bytes >> 20} that this broker gives, {self.held_bytes >> 20} are taken: use more brokers"
        )

    def _check_room(self, optimizer: str, slots: int) -> None:
        if (needed := self._sum_costs(slots)) > self.limit_bytes:
            raise ConfigError(
                f"with {optimizer} the keys that are here take {needed >> 20} MiB, and this broker gives "
                f"{self.limit_bytes >> 20}: name an optimizer that keeps less, or restart the brokers"
            )

    def _sum_costs(self, slots: int) -> int:
        return sum(self._cost(key.size, slots) for key in self.keys.values())

    def _more_bytes(self, asked: Request) -> int:
        known = self.keys.get(asked.key)
        before = self._cost(known.size, self._slots) if known is not None else 0
        return self._cost(asked.values[1] * ITEM_BYTES[asked.dtype], self._slots) - before

    @staticmethod
    def _cost(size: int, slots: int) -> int:
        """Return the memory that a piece takes: values, their frames, a gradient, and the optimizer's state."""
        return KEY_BYTES + size * (3 + slots)

    def _open(self, asked: Request) -> None:
        self._turns += 1
        asked.turn = self._turns
        self._workers[asked.worker].open[asked.number] = asked

    def _take(self, worker: PeerId, request: int) -> Request | None:
        return self._workers[worker].open.pop(request, None) if worker in self._workers else None
