"""Be one master's key server, without a socket, a clock or an array: what clients say goes in, effects come out.

Rule 1: heads only: what a payload holds is the store's affair, and effects name payloads by (worker, request).
Rule 2: effects are carried out in the order in which they come.  Rule 3: a worker's clock at a key moves when a push of
it is whole, or was refused on its way (then it abstains): nobody waits for what will not come.
Rule 4: until `workers` of them have enrolled no clock of a key moves; from then on live workers count, who comes later
from its first push of that key on; who is lost counts no more.
Rule 5: what cannot be is refused in a sentence, and costs its sender that request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from zmqtrain.parameter_server.consistency import Consistency, consistency_from_spec
from zmqtrain.parameter_server.effects import (
    Answer,
    Apply,
    Begin,
    Confirm,
    Effect,
    Install,
    Receive,
    Refuse,
)
from zmqtrain.parameter_server.optimizers import optimizer_from_spec
from zmqtrain.parameter_server.rules import DEFAULT_RULES, Rules, canonical, check_equal
from zmqtrain.parameter_server.shards import ITEM_BYTES
from zmqtrain.parameter_server.store import is_cut
from zmqtrain.types import PeerId

__all__ = ["MOST_REQUESTS", "KeyServer"]

MOST_REQUESTS = 1 << 16
"""So many requests of one worker may be open: each is held in memory."""
KEY_BYTES, MAX_NAME = 4096, 500
"""What a key takes of memory besides values, at most; and the characters of its name."""


class _Kind(Enum):
    INITIALISE = "init"
    PUSH = "push"
    PULL = "pull"


@dataclass(slots=True)
class _Request:
    """One request that is open. clock: what the worker's and the key's clock must allow; pull: values are wanted."""

    worker: PeerId
    number: int
    kind: _Kind
    key: str
    pull: bool = False
    clock: int | None = None
    dtype: str = ""
    values: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class _Worker:
    """A client that has enrolled. reads: it never pushes.  counts: for every key, from the beginning."""

    reads: bool
    counts: bool
    open: dict[int, _Request] = field(default_factory=dict)


@dataclass(slots=True)
class _Key:
    """One key's piece.

    clock: what every worker that counts has pushed.  clocks: of the workers, as far as their pushes are whole; asked:
    as they said.  pushed: it has been pushed to.  round: the pushes of the step that is being gathered.
    deferred, pulls: who waits.
    """

    name: str
    dtype: str
    start: int
    values: int
    clock: int = 0
    pushed: bool = False
    clocks: dict[PeerId, int] = field(default_factory=dict)
    asked: dict[PeerId, int] = field(default_factory=dict)
    round: dict[PeerId, int] = field(default_factory=dict)
    deferred: deque[_Request] = field(default_factory=deque)
    pulls: list[_Request] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.values * ITEM_BYTES[self.dtype]


class KeyServer:
    """The machine of one master.

    name: unlike any other master's; a store that begins here is named after it.  limit_bytes: what its keys, with the
    optimizer's state, may take of memory.  rules: as they are in force.  pushes: how many have come whole.
    """

    def __init__(self, name: str, limit_bytes: int) -> None:
        self.name, self.limit_bytes, self.held_bytes, self.pushes = name, limit_bytes, 0, 0
        self.rules = DEFAULT_RULES
        self.consistency: Consistency = consistency_from_spec(DEFAULT_RULES.consistency)
        self.keys: dict[str, _Key] = {}
        self._slots = 0
        self._stores = 0
        self._set_by = ""
        self._workers: dict[PeerId, _Worker] = {}
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
        """Take a client. Raises ConfigError if it wants other rules than those there, which the message names.

        With no other client here its rules are the server's from now on; what it leaves open stays as it was.
        """
        wanted = canonical(rules)
        effects: list[Effect] = []
        others = [peer for peer in self._workers if peer != worker]
        if others:
            check_equal(self.rules, wanted, self._set_by)
        else:
            effects = self._begin(worker, wanted)
        self._workers[worker] = _Worker(reads, counts=not reads and not self._complete)
        if not self._complete:
            self._complete = sum(one.counts for one in self._workers.values()) >= self.rules.workers
            if self._complete:
                effects += self._settle_all()
        return effects

    def _begin(self, worker: PeerId, wanted: Rules) -> list[Effect]:
        before, self._complete, self._set_by = self.rules, False, worker.rpartition("#")[0] or worker
        store = wanted.store if wanted.master else before.store
        place = (wanted.master, wanted.masters)
        if anew := not store or (before.store, before.master, before.masters) != (store, *place):
            self.keys, self.held_bytes = {}, 0
            if not wanted.master:
                self._stores += 1
                store = f"{self.name}-{self._stores}"
        # what those who have left had pushed counts, though not all of them did
        effects: list[Effect] = [step for key in self.keys.values() for step in self._step(key)]
        consistency = wanted.consistency or before.consistency
        optimizer = wanted.optimizer or before.optimizer
        self.rules = Rules(store, *place, consistency, optimizer, wanted.workers or before.workers)
        self.consistency = consistency_from_spec(consistency)
        self._slots = len(optimizer_from_spec(optimizer).slots)
        return [*effects, Begin(optimizer, anew)] if anew or optimizer != before.optimizer else effects

    def lost(self, worker: PeerId) -> list[Effect]:
        """Forget a client: what it had pushed whole counts, and nobody waits for it."""
        if self._workers.pop(worker, None) is None:
            return []
        for key in self.keys.values():
            key.clocks.pop(worker, None)
            key.asked.pop(worker, None)
            key.deferred = deque(one for one in key.deferred if one.worker != worker)
            key.pulls = [one for one in key.pulls if one.worker != worker]
        return self._settle_all()

    def awaited(self) -> dict[PeerId, tuple[PeerId, ...]]:
        """Return, for each worker that waits for others, for whom; for nobody: for those who have not enrolled."""
        found: dict[PeerId, set[PeerId]] = {}
        for key in self.keys.values():
            waiting = [asked for asked in (*key.deferred, *key.pulls) if not self._is_near(asked, key)]
            if waiting:
                behind = {peer for peer, clock in self._counted(key) if clock == key.clock}
                for asked in waiting:
                    found.setdefault(asked.worker, set()).update(behind - {asked.worker})
        return {worker: tuple(sorted(behind)) for worker, behind in found.items()}

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
        if known is not None and known.pushed:
            return [Refuse(worker, request, "key", f"the key {key!r} is there already, and trained")]
        asked = _Request(worker, request, _Kind.INITIALISE, key, dtype=dtype, values=(start, values))
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
        asked = _Request(worker, request, _Kind.PUSH, key, pull, clock)
        self._open(asked)
        if not self._may_proceed(asked):
            entry.deferred.append(asked)
            return []
        return [Receive(worker, request)]

    def pull(self, worker: PeerId, request: int, key: str) -> list[Effect]:
        """A client wants the values of a key: with all that it pushed before, and as fresh as the consistency says."""
        if (why := self._why_not(worker, request, key)) is not None:
            return [Refuse(worker, request, *why)]
        asked = _Request(worker, request, _Kind.PULL, key, True, self.keys[key].asked.get(worker))
        self._open(asked)
        return self._answer_or_wait(asked)

    # ------------------------------------------------------------------ payloads

    def received(self, worker: PeerId, request: int) -> list[Effect]:
        """The payload of a request is here whole, and sound."""
        asked = self._take(worker, request)
        if asked is None:
            return []
        if asked.kind is _Kind.INITIALISE:
            known = self.keys.get(asked.key)
            if known is not None and known.pushed:
                return [Refuse(worker, request, "key", f"the key {asked.key!r} is there already, and trained")]
            if (text := self._why_no_room(asked)) is not None:  # of those that were announced at once, not all may fit
                return [Refuse(worker, request, "memory", text)]
            self.held_bytes += self._more_bytes(asked)
            self.keys[asked.key] = _Key(asked.key, asked.dtype, *asked.values)
            return [Install(worker, request, asked.key, asked.dtype), Confirm(worker, request)]
        key = self.keys[asked.key]
        self.pushes += 1
        effects: list[Effect] = []
        if self.consistency.averages:
            key.round[worker] = request
        else:
            effects.append(Apply(asked.key, ((worker, request),)))
        key.clocks[worker] += 1
        if not asked.pull:
            effects.append(Confirm(worker, request))
            return effects + self._settle(key)
        asked.kind, asked.clock = _Kind.PULL, (asked.clock or 0) + 1
        self._open(asked)
        effects += self._settle(key)
        return effects + self._answer_or_wait(asked)

    def broken(self, worker: PeerId, request: int, reason: str, text: str) -> list[Effect]:
        """The payload of a request is not sound, or was never acceptable: a push of it abstains."""
        asked = self._take(worker, request)
        if asked is None:
            return []
        effects: list[Effect] = [Refuse(worker, request, reason, f"{asked.kind.value} of {asked.key!r}: {text}")]
        if asked.kind is _Kind.PUSH:
            key = self.keys[asked.key]
            key.clocks[worker] += 1
            effects += self._settle(key)
        return effects

    # ------------------------------------------------------------------ life after a restart

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold besides the values: the rules, and what lies here of which key."""
        return {
            "rules": asdict(self.rules),
            "keys": [[key.name, key.dtype, key.start, key.values] for key in self.keys.values()],
        }

    def restore(self, state: Mapping[str, Any], versions: Mapping[str, int]) -> None:
        """Take over what `state` gave, without a client. versions: of the values.

        Raises ConfigError, KeyError, TypeError or ValueError for what `state` did not give.
        """
        self.rules = canonical(Rules(**state["rules"]))
        self.consistency = consistency_from_spec(self.rules.consistency)
        self._slots = len(optimizer_from_spec(self.rules.optimizer).slots)
        for name, dtype, start, values in state["keys"]:
            self.keys[name] = _Key(str(name), str(dtype), int(start), int(values), pushed=versions[name] > 0)
            self.held_bytes += self._cost(self.keys[name].size)

    # ------------------------------------------------------------------ clocks

    def _counted(self, key: _Key) -> Iterator[tuple[PeerId, int]]:
        """Give the workers that a key's clock waits for, and their clocks."""
        for peer, worker in self._workers.items():
            if peer in key.clocks or worker.counts:
                yield peer, key.clocks.get(peer, key.clock)

    def _settle(self, key: _Key) -> list[Effect]:
        """Move a key's clock as far as it goes; let go on who waited for that, or for its own pushes."""
        effects: list[Effect] = []
        slowest = min((clock for _, clock in self._counted(key)), default=key.clock)
        if self._complete and slowest > key.clock:
            effects += self._step(key)
            key.clock = slowest
            deferred, key.deferred = key.deferred, deque()
            for asked in deferred:
                if self._may_proceed(asked):
                    effects.append(Receive(asked.worker, asked.number))
                else:
                    key.deferred.append(asked)
        pulls, key.pulls = key.pulls, []
        for asked in pulls:
            effects += self._answer_or_wait(asked)
        return effects

    def _step(self, key: _Key) -> list[Effect]:
        """Make one step of all that was gathered for it, in the order of names."""
        gathered, key.round = key.round, {}
        return [Apply(key.name, tuple(sorted(gathered.items())))] if gathered else []

    def _settle_all(self) -> list[Effect]:
        return [effect for key in self.keys.values() for effect in self._settle(key)]

    def _may_proceed(self, asked: _Request) -> bool:
        """Return whether a request goes on now: the consistency lets it, and its worker's pushes before it are here."""
        key = self.keys[asked.key]
        if asked.clock is None:
            return True
        own = asked.kind is _Kind.PUSH or key.clocks.get(asked.worker, asked.clock) >= asked.clock
        return own and self._is_near(asked, key)

    def _is_near(self, asked: _Request, key: _Key) -> bool:
        return asked.clock is None or self.consistency.may_proceed(asked.clock - key.clock)

    def _answer_or_wait(self, asked: _Request) -> list[Effect]:
        if not self._may_proceed(asked):
            self.keys[asked.key].pulls.append(asked)
            return []
        self._take(asked.worker, asked.number)
        return [Answer(asked.worker, asked.number, asked.key)]

    # ------------------------------------------------------------------ bounds

    def _why_not(self, worker: PeerId, request: int, key: str | None = None) -> tuple[str, str] | None:
        if worker not in self._workers:
            return "enrol", "this client has not enrolled here"
        open_requests = self._workers[worker].open
        if request in open_requests or len(open_requests) >= MOST_REQUESTS:
            return "requests", f"request {request} is open already, or one of more than {MOST_REQUESTS}: wait for some"
        if key is not None and key not in self.keys:
            return "key", (
                f"this master has nothing of the key {key!r}: init it first (a master that was started anew has none)"
            )
        return None

    def _why_no_room(self, asked: _Request) -> str | None:
        more = self._more_bytes(asked)
        if self.held_bytes + more <= self.limit_bytes:
            return None
        return (
            f"the key {asked.key!r} and what the optimizer keeps of it take {more >> 20} MiB; of the "
            f"{self.limit_bytes >> 20} that this master gives, {self.held_bytes >> 20} are taken: use more masters"
        )

    def _more_bytes(self, asked: _Request) -> int:
        """What a key that is begun takes, more than what is there of that name."""
        known = self.keys.get(asked.key)
        before = self._cost(known.size) if known is not None else 0
        return self._cost(asked.values[1] * ITEM_BYTES[asked.dtype]) - before

    def _cost(self, size: int) -> int:
        """What a piece takes of memory: values, what is sent of them, a gradient, and the optimizer's state."""
        return KEY_BYTES + size * (3 + self._slots)

    def _open(self, asked: _Request) -> None:
        self._workers[asked.worker].open[asked.number] = asked

    def _take(self, worker: PeerId, request: int) -> _Request | None:
        return self._workers[worker].open.pop(request, None) if worker in self._workers else None
