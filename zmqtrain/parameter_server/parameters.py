"""The broker's key server: its machine, its directory, its store and its checkpoint file.

1. The broker's loop moves the machine; the codec thread alone touches the store. Jobs keep the order of effects.
2. Payloads travel as all others do: announced, granted, acknowledged. One that a peer has no room for yet waits here as
   a head, which costs no memory.
3. An invalid request costs its sender that request; it never stops the broker.
4. The checkpoint is one file beside those of the broker's run: copied in the codec thread, written beside it. There is
   no journal: pushes since the last write are lost with a broker that is killed, and its clients are told so.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from zmqtrain.checkpoint.background_writer import BackgroundWriter
from zmqtrain.checkpoint.files import read_arrays, write_arrays
from zmqtrain.core.errors import (
    CheckpointError,
    CodecError,
    ConfigError,
    FramingError,
    NonFiniteDelta,
    RemoteProtocolError,
    ZmqTrainError,
)
from zmqtrain.core.types import Buffer, PeerId
from zmqtrain.parameter_server.directory import Directory, Placed, Placement
from zmqtrain.parameter_server.machine import (
    Answer,
    Apply,
    Begin,
    Confirm,
    Effect,
    Install,
    KeyServer,
    Receive,
    Refuse,
    Rules,
)
from zmqtrain.parameter_server.store import Store, optimizer_from_spec
from zmqtrain.protocol import messages
from zmqtrain.protocol.messages import KeyRequest, Refused, Roster, Scalar, model_from_wire, replace_fields
from zmqtrain.session.downlink import Downlink
from zmqtrain.session.environment import CodecExecutor, EffectQueue, Resume, Suspension, clock, spawn

logger = logging.getLogger(__name__)

T = TypeVar("T")

FILE = "keys.safetensors"


class ParameterKeeper:
    """The file of a key server, in the folder of its broker's checkpoints."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / FILE if folder is not None else None
        self.writer = BackgroundWriter("keys", "the parameter server", clock)

    def resume(self, machine: KeyServer) -> tuple[Directory, Store] | None:
        """Restore a fresh machine from the file; return its directory and store, None if there is no file.

        Raises CheckpointError if the file cannot be read.
        """
        if self._path is None or not self._path.exists():
            return None
        try:
            state, arrays = read_arrays(self._path)
            versions = {str(key): int(version) for key, version in state["versions"].items()}
            machine.restore(state["machine"], versions)
            directory, store = Directory(machine.rules.shards), Store(optimizer_from_spec(machine.rules.optimizer))
            directory.restore(state["directory"])
            store.restore(versions, arrays)
        except (ZmqTrainError, LookupError, ArithmeticError, TypeError, ValueError, AttributeError) as error:
            text = f"the keys in {self._path} cannot be read: {error!r}. Move that file away to begin without them"
            raise CheckpointError(text) from error
        logger.info("resuming a parameter server of %d keys, from %s", len(versions), self._path)
        return directory, store

    def save(self, state: dict[str, Any], store: Store, wait: bool = False) -> None:
        """Copy the store, and write the copy in the background.

        state: of machine and directory, after the same jobs.  While the last copy is still being written, nothing is
        copied, and the writer is to save again at once.  wait: write it here; raises CheckpointError.
        """
        if self._path is None:
            return
        if self.writer.busy and not wait:
            self.writer.retry_at = 0.0
            return
        self.writer.wait()
        path, arrays = self._path, store.arrays()
        versions = {key: entry.version for key, entry in store.entries.items()}
        text = json.dumps(state | {"versions": versions}, sort_keys=True)
        if wait:
            return write_arrays(path, arrays, {"state": text})
        self.writer.begin()
        self.writer.start(sum(versions.values()), lambda: write_arrays(path, arrays, {"state": text}))


AWAITED_SECONDS = 1.0
MOST_NAMED = 8
JOBS_AT_ONCE = 64
"""The codec thread's mailbox is the run's too, and bounded: however many requests there are, others wait here."""
MEMORY_SHARE = 0.5
"""Of this machine's memory, what keys may take, with all that belongs to them."""

Payload = messages.Initialise | messages.Push


class Parameters:
    """The key server of one broker.

    downlink, codec: of the broker.  name: unique among brokers.  keeper: saves it every `keep_seconds`.
    Raises CheckpointError.
    """

    def __init__(
        self, downlink: Downlink, codec: CodecExecutor, name: str, keeper: ParameterKeeper, keep_seconds: float
    ) -> None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.machine = KeyServer(name, int(MEMORY_SHARE * memory))
        kept = keeper.resume(self.machine)
        self.directory, self.store = kept or (Directory(1), Store(optimizer_from_spec(self.machine.rules.optimizer)))
        self._downlink, self._codec, self._keeper, self._keep_seconds = downlink, codec, keeper, keep_seconds
        self._jobs: deque[tuple[Callable[[], object], Resume | None]] = deque()
        self._submitted = 0
        self._kept_at, self._changed = time.monotonic(), False
        self._announced: dict[tuple[PeerId, int], Payload] = {}
        self._whole: dict[tuple[PeerId, int], Sequence[Buffer]] = {}  # checked, and not yet used
        self._incoming: dict[PeerId, deque[Payload]] = {}  # what waits for room
        self._outgoing: dict[PeerId, deque[Answer]] = {}
        self._awaited: dict[PeerId, messages.Awaited] = {}  # as they were told
        self._looked_at = 0.0
        self._carry_out = EffectQueue[Effect | Placed](self._carry_out_one).carry_out

    # ------------------------------------------------------------------ received messages

    def take(self, peer: PeerId, request: KeyRequest) -> None:
        """Handle a request. Raises RemoteProtocolError or FramingError for one that no client of ours sends."""
        machine = self.machine
        match request:
            case messages.Enrol():
                self._enrol(peer, request)
            case messages.Declare(number, declared):
                self._declare(peer, number, declared)
            case messages.Founded(names):
                self._changed = True
                self._carry_out(self.directory.founded(peer, names))
            case messages.Pull(number, key):
                self._carry_out(machine.pull(peer, number, key))
            case messages.Initialise(number, key, dtype, start, values, sizes):
                self._announce(peer, request, machine.initialise(peer, number, key, dtype, start, values, sizes))
            case messages.Push(number, key, dtype, pull, sizes):
                self._announce(peer, request, machine.push(peer, number, key, dtype, sizes, pull))

    def _enrol(self, peer: PeerId, enrol: messages.Enrol) -> None:
        if self.machine.serves(peer):
            raise RemoteProtocolError(peer, "enrolled", "a second Enrol")
        rules = Rules(enrol.store, enrol.shard, enrol.shards, enrol.consistency, enrol.optimizer, enrol.workers)
        try:
            effects = self.machine.enrol(peer, rules, enrol.reads)
        except ConfigError as error:
            self._downlink.send(peer, Refused("rules", str(error)))
            return
        self._carry_out(effects)
        said = self.machine.rules
        self._downlink.send(peer, messages.Enrolled(said.store, said.consistency, said.optimizer, said.workers))

    def _declare(self, peer: PeerId, number: int, declared: tuple[messages.WireKey, ...]) -> None:
        if self.machine.rules.shard or not self.machine.serves(peer):
            text = "keys are declared at the first broker, by who has enrolled there"
            self._downlink.send(peer, Refused("enrol", text, number))
            return
        try:
            placed = self.directory.declare(peer, number, model_from_wire(declared))
        except ConfigError as error:
            self._downlink.send(peer, Refused("key", str(error), number))
        else:
            self._carry_out(placed)

    def _announce(self, peer: PeerId, payload: Payload, effects: list[Effect]) -> None:
        if not any(isinstance(effect, Refuse) for effect in effects):
            self._announced[peer, payload.transfer] = payload
        self._carry_out(effects)

    def whole(self, peer: PeerId, payload: Payload, frames: Sequence[Buffer]) -> None:
        """Take a payload that is here whole: it is looked at, and then used."""
        spawn(self._use(peer, payload, frames))

    async def _use(self, peer: PeerId, payload: Payload, frames: Sequence[Buffer]) -> None:
        name, fault = (peer, payload.transfer), None
        try:
            await self._in_codec(self.store.check, payload.dtype, frames)
        except CodecError as error:
            fault = error
        if self._announced.get(name) is not payload:
            return  # of a client that has left
        del self._announced[name]
        if fault is not None:
            reason = "non-finite" if isinstance(fault, NonFiniteDelta) else "corrupt"
            self._carry_out(self.machine.broken(*name, reason, str(fault)))
        else:
            effects = self.machine.received(*name)
            if not any(isinstance(effect, Refuse) for effect in effects):
                self._whole[name] = frames
            self._carry_out(effects)
        self.go_on(peer)

    def tick(self, now: float) -> None:
        """Save changes when it is time, and tell waiting clients whom they wait for."""
        changed = self._changed or now >= self._keeper.writer.retry_at
        if changed and now - self._kept_at >= self._keep_seconds:
            self._kept_at, self._changed, self._keeper.writer.retry_at = now, False, inf
            self._do(self._keeper.save, self._state(), self.store)
        if now - self._looked_at < AWAITED_SECONDS:
            return
        self._looked_at, missing = now, self.machine.missing
        awaited = {
            peer: messages.Awaited(tuple(_name(one) for one in others[:MOST_NAMED]), missing)
            for peer, others in self.machine.awaited().items()
        }
        for peer in {*awaited, *self._awaited}:
            said = awaited.get(peer, messages.Awaited((), 0))
            if self.machine.serves(peer) and self._awaited.get(peer) != said:
                self._downlink.send(peer, said)
        self._awaited = awaited

    def describe(self, roster: Roster) -> Roster:
        """Return a roster with what is served here."""
        machine = self.machine
        if not machine.keys:
            return roster
        served: dict[str, Scalar] = {"keys": len(machine.keys), "bytes": machine.value_bytes}
        return replace_fields(roster, served=served | {"pushes": machine.pushes, "clients": machine.clients})

    def _state(self) -> dict[str, Any]:
        return {"machine": self.machine.state(), "directory": self.directory.state()}

    def close(self) -> None:
        """Save, and wait until it is written; call it when the codec thread has ended."""
        for work, _ in self._jobs:
            with contextlib.suppress(CodecError):
                work()
        if self.machine.keys:
            self._keeper.save(self._state(), self.store, wait=True)

    def lost(self, peer: PeerId) -> None:
        """Forget a client; no error if it is none."""
        if not self.machine.serves(peer):
            return
        self._incoming.pop(peer, None)
        self._outgoing.pop(peer, None)
        self._announced = {name: payload for name, payload in self._announced.items() if name[0] != peer}
        self._carry_out([*self.machine.lost(peer), *self.directory.lost(peer)])

    def go_on(self, peer: PeerId) -> None:
        """Resume transfers that waited for room, after a client has sent or taken something."""
        incoming, outgoing = self._incoming.get(peer), self._outgoing.get(peer)
        while incoming and self.machine.serves(peer) and self._downlink.uploads.has_room(peer, sum(incoming[0].sizes)):
            self._expect(peer, incoming.popleft())
        asked = 0
        while outgoing and self.machine.serves(peer):
            if (key := self.machine.keys.get(outgoing[0].key)) is None:  # gone: this peer has left, and come again
                outgoing.popleft()
                continue
            asked += key.size
            if not self._downlink.has_room_to(peer, asked):
                break
            spawn(self._answer(outgoing.popleft()))

    # ------------------------------------------------------------------ carrying out effects

    def _carry_out_one(self, effect: Effect | Placed) -> None:
        self._changed |= isinstance(effect, Install | Apply | Begin)
        match effect:
            case Receive(worker, request):
                if (payload := self._announced.get((worker, request))) is not None:
                    self._incoming.setdefault(worker, deque()).append(payload)
                    self.go_on(worker)
            case Install(worker, request, key, dtype):
                self._do(self.store.install, key, dtype, self._whole.pop((worker, request)))
            case Apply(key, payloads):
                self._do(self.store.apply, key, [self._whole.pop(name) for name in payloads])
            case Answer():
                spawn(self._answer(effect))
            case Confirm(worker, request):
                self._downlink.send(worker, messages.Done(request))
            case Refuse(worker, request, reason, text):
                logger.debug("refused what %s asked: %s", worker, text)
                self._downlink.send(worker, Refused(reason, text, request))
            case Begin(optimizer, reset):
                self._begin(optimizer, reset)
            case Placed(worker, request, found, given):
                self._downlink.send(worker, messages.Placed(request, _to_wire(found), _to_wire(given)))

    def _begin(self, optimizer: str, reset: bool) -> None:
        rules = self.machine.rules
        text = "serving keys as broker %d of %d: %s, %s, workers: %d"
        logger.info(text, rules.shard, rules.shards, rules.consistency, optimizer, rules.workers)
        if reset:
            self.directory = Directory(rules.shards)
            self._whole.clear()
        self._do(self.store.begin, optimizer_from_spec(optimizer), reset)

    def _expect(self, peer: PeerId, payload: Payload) -> None:
        try:
            self._downlink.uploads.expect(peer, payload)
        except FramingError as error:
            self._announced.pop((peer, payload.transfer), None)
            self._carry_out(self.machine.broken(peer, payload.transfer, "size", str(error)))

    def _in_codec(self, work: Callable[..., T], *facts: Any) -> Suspension[T]:
        """Return what waits for `work(*facts)` in the codec thread, in order with `_do`."""
        return Suspension(lambda resume: self._submit(partial(work, *facts), resume))

    def _do(self, work: Callable[..., object], *facts: Any) -> None:
        """Do `work(*facts)` in the codec thread; nobody waits for it."""
        self._submit(partial(work, *facts), None)

    def _submit(self, work: Callable[[], object], resume: Resume | None) -> None:
        self._jobs.append((work, resume))
        self._submit_some()

    def _submit_some(self) -> None:
        while self._jobs and self._submitted < JOBS_AT_ONCE:
            self._submitted += 1
            work, resume = self._jobs.popleft()
            self._codec.submit(work, partial(self._finish, resume))

    def _finish(self, resume: Resume | None, result: object) -> None:
        self._submitted -= 1
        self._submit_some()
        if resume is not None:
            resume(result)

    async def _answer(self, answer: Answer) -> None:
        version, frames = await self._in_codec(self.store.read, answer.key)
        peer = answer.worker
        if not self.machine.serves(peer):
            return
        if self._downlink.has_room_to(peer, sum(len(frame) for frame in frames)):
            self._downlink.send_values(peer, answer.request, version, frames)
        else:  # it is read again when there is room: no fewer gradients are in it then
            self._outgoing.setdefault(peer, deque()).append(answer)


def _to_wire(placements: Sequence[Placement]) -> tuple[messages.WirePlace, ...]:
    return tuple(
        (one.leaf.path, one.leaf.shape, one.leaf.dtype, tuple(tuple(piece) for piece in one.pieces))  # type: ignore[misc]
        for one in placements
    )


def _name(peer: PeerId) -> str:
    return peer.rpartition("#")[0] or peer
