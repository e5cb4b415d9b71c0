"""The optimizer of a stage: its state, which may lie on the host or in a file, and its update.

    device   the state lies with the parameters, and one compiled update makes all of them
    host     in the PC's memory, where its processor makes the update: a card holds parameters and gradients alone
    FOLDER   in a file there that has no name, so that it goes with the process; what is in memory is one group's

Where the state is elsewhere, an update goes through the leaves in groups of a few megabytes: each is fetched, updated
and put back (`moving_bytes`). A stage's optimizer looks at one leaf at a time (`coupling`), so groups give the same
update as the whole; but each group begins with the same random key, where an optimizer has one.
Source: Ren et al. 2021 (ZeRO-Offload), Rajbhandari et al. 2021 (ZeRO-Infinity).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from zmqtrain.core.errors import CheckpointError, ConfigError

Result = TypeVar("Result")
OptimizerOn = Literal["device", "host"] | str | Path
"""Where the state lies: "device", "host", or a folder, which has a separator in its name (or is a Path)."""

GROUP_BYTES = 4 << 20
"""Leaves are updated together until their parameters have so many bytes; a larger one by itself."""


class StageOptimizer:
    """The state of an optimizer for some parameters.

    own: the parameters.  on: see above.  in_place: an update makes the next parameters in the memory of those before.
    predicts: an update gives, besides, what the parameters will be after one more like it.
    Raises ConfigError for a word that is no place; CheckpointError, here and in an update, if the folder cannot be
    written.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        own: Any,
        *,
        on: OptimizerOn = "device",
        in_place: bool = False,
        predicts: bool = False,
    ) -> None:
        self._optimizer, self._in_place, self._predicts = optimizer, in_place, predicts
        self._tree: Any = jax.tree.structure(own)
        leaves = jax.tree.leaves(own)
        place = place_of(on)
        self._groups = [range(len(leaves))] if place == "device" else list(groups_of(leaves))
        self._processor = None if place == "device" else jax.local_devices(backend="cpu")[0]
        self._file = _StateFile(place) if isinstance(place, Path) else None
        self._updates: dict[int, _Update] = {}
        self._compiled: dict[str, Any] = {}
        """The updates of groups, and what they share, by the computation in words."""
        self._states: list[Any] = []
        """Of each group: its state, or where it is in the file."""
        self.restart(own)

    def restart(self, own: Any, steps: int = 0) -> None:
        """Begin with a fresh state for these parameters. steps: what schedules, of the rate for instance, count."""
        self._states = []
        if self._file is not None:
            self._file.clear()
        leaves = jax.tree.leaves(own)
        for group in self._groups:
            parameters = self._part(group, self._here(leaves[one] for one in group))
            with jax.default_device(self._processor):
                state = self._optimizer.init(parameters)
            self._states.append(self._kept(counted(state, steps) if steps else state))
        if self._file is not None:
            self._file.reserve()

    def update(self, own: Any, gradients: Any) -> tuple[Any, Any]:
        """Return the next parameters, and those after one more such update (None unless this predicts). The gradients
        are used up, and so are the parameters if this is in place."""
        leaves, slopes = jax.tree.leaves(own), jax.tree.leaves(gradients)
        new, expected = list(leaves), list(leaves)
        for number, group in enumerate(self._groups):
            before = self._part(group, self._here(leaves[one] for one in group))
            slope = self._part(group, self._here(slopes[one] for one in group))
            self._let_go(slopes[one] for one in group)
            state = self._states[number] if self._file is None else self._file.read(self._states[number])
            made = computed(self._updated(number, before, slope, state)(before, slope, state))
            self._states[number] = self._kept(made[2], self._states[number])
            for whole, part in ((new, made[0]), (expected, made[1])):
                for one, leaf in zip(group, jax.tree.leaves(part), strict=part is not None):
                    whole[one] = self._back(leaf, leaves[one])
            if self._in_place:
                self._let_go(leaves[one] for one in group)
            del before, slope, state, made  # before the next group's come
        make = self._tree.unflatten
        return make(new), make(expected) if self._predicts else None

    def compile(self, shapes: Any) -> None:
        """Compile the updates now. shapes: of the parameters."""
        leaves = jax.tree.leaves(shapes)
        for number, group in enumerate(self._groups):
            part = self._part(group, (leaves[one] for one in group))
            forms = part, part, jax.eval_shape(self._optimizer.init, part)
            if self._processor is not None and self._processor != jax.devices()[0]:
                forms = jax.tree.map(partial(_form_at, self._processor), forms)
            self._updated(number, *forms).compile(*forms)

    @property
    def states(self) -> Iterator[Any]:
        """The state of each group."""
        return iter(self._states) if self._file is None else map(self._file.read, self._states)

    def close(self) -> None:
        """Let go of the state, and of its file."""
        self._states = []
        if self._file is not None:
            self._file.close()

    def _part(self, group: Iterable[int], leaves: Iterable[Any]) -> Any:
        """Return the tree with the leaves of a group alone."""
        part: list[Any] = [None] * self._tree.num_leaves
        for one, leaf in zip(group, leaves, strict=True):
            part[one] = leaf
        return self._tree.unflatten(part)

    def _here(self, leaves: Iterable[Any]) -> Iterator[Any]:
        """Move leaves to where the update is computed."""
        place = self._processor
        return (leaf if place is None or leaf.devices() == {place} else jax.device_put(leaf, place) for leaf in leaves)

    def _back(self, leaf: Any, before: Any) -> Any:
        """Move a leaf to where the one before it is; one that was on no particular device is on none."""
        if self._processor is None or before.is_deleted() or before.devices() == {self._processor}:
            return leaf  # where that one was donated, it was here
        return jax.device_put(leaf, before.sharding) if before.committed else jnp.asarray(np.asarray(leaf))

    def _let_go(self, leaves: Iterable[Any]) -> None:
        """Free leaves of a card, of which the processor has a copy; others are donated."""
        for leaf in leaves:
            if self._processor is not None and not leaf.is_deleted() and leaf.devices() != {self._processor}:
                leaf.delete()

    def _kept(self, state: Any, before: Any = None) -> Any:
        return state if self._file is None else self._file.write(state, before)

    def _updated(self, number: int, own: Any, gradients: Any, state: Any) -> _Update:
        """Return the update of a group. Two groups with the same computation share one compiled function: layers of a
        transformer are such groups."""
        if number not in self._updates:
            optimizer, predicts = self._optimizer, self._predicts

            def updated(own: Any, gradients: Any, state: Any) -> tuple[Any, Any, Any]:
                updates, state = optimizer.update(gradients, state, own)
                new = optax.apply_updates(own, updates)
                expected = jax.tree.map(lambda one, before: one + (one - before), new, own) if predicts else None
                return new, expected, state

            closed, shapes = jax.make_jaxpr(updated, return_shape=True)(own, gradients, state)
            leaves = [len(jax.tree.leaves(tree)) for tree in (own, gradients, state)]
            donated = (self._in_place, predicts or not self._in_place, True)
            places = [one for part, is_donated in enumerate(donated) if is_donated
                      for one in range(sum(leaves[:part]), sum(leaves[: part + 1]))]  # fmt: skip
            form = f"of group {number}" if _has_consts(closed) else f"{closed.jaxpr} {places}"
            if form not in self._compiled:
                self._compiled[form] = jax.jit(jaxpr_as_fun(closed), donate_argnums=places)
            self._updates[number] = _Update(self._compiled[form], jax.tree.structure(shapes))
        return self._updates[number]


class _Update(NamedTuple):
    """The update of a group. run: takes and gives leaves.  made: the form of what it gives."""

    run: Any
    made: Any

    def __call__(self, own: Any, gradients: Any, state: Any) -> Any:
        return self.made.unflatten(self.run(*jax.tree.leaves((own, gradients, state))))

    def compile(self, own: Any, gradients: Any, state: Any) -> None:
        """Compile it now, for these forms."""
        self.run.lower(*jax.tree.leaves((own, gradients, state))).compile()


class _InFile(NamedTuple):
    """A leaf of a state: where it begins in the file, and its form."""

    offset: int
    shape: tuple[int, ...]
    dtype: Any


class _StateFile:
    """A file of arrays in a folder; it has no name there, and takes no room after its process."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._end = folder, 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise CheckpointError(f"the optimizer's state cannot lie in {folder}: {error.strerror}") from error

    def write(self, state: Any, before: Any = None) -> Any:
        """Return the state with its arrays in the file, in the place of a state like it, or at the end. Scalars and
        random keys stay in memory."""
        with self._in_words():
            return jax.tree.map(self._write, state, *([] if before is None else [before]))

    def reserve(self) -> None:
        """Take the room that all of it needs."""
        with self._in_words():
            os.posix_fallocate(self._file.fileno(), 0, max(1, self._end))

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"the optimizer's state cannot be written to {self._folder}: {error.strerror or error}. It takes "
                f"{self._end / 1e9:.2f} GB there: free some, or name another folder"
            ) from error

    def _write(self, leaf: Any, place: Any = None) -> Any:
        if not leaf.ndim or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return leaf
        if is_new := place is None:
            place = _InFile(self._end, leaf.shape, leaf.dtype)
            self._end += leaf.nbytes
        values = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        if is_new and not values.any():
            os.ftruncate(self._file.fileno(), self._end)  # a hole reads as zeros, and takes no room
            return place
        written = 0
        while written < len(values):  # a call writes 2 GB at most, and holds no other thread up
            written += os.pwrite(self._file.fileno(), values.data[written:], place.offset + written)
        return place

    def read(self, state: Any) -> Any:
        """Return a state with the arrays that were written."""
        return jax.tree.map(self._read, state, is_leaf=lambda leaf: isinstance(leaf, _InFile))

    def _read(self, leaf: Any) -> Any:
        if not isinstance(leaf, _InFile):
            return leaf
        array = np.empty(leaf.shape, leaf.dtype)
        values, read = array.reshape(-1).view(np.uint8), 0
        while read < len(values):
            got = os.preadv(self._file.fileno(), [values.data[read:]], leaf.offset + read)
            if not got:
                raise CheckpointError(f"the file of the optimizer's state in {self._folder} has become shorter")
            read += got
        return jnp.array(array)

    def clear(self) -> None:
        """Begin with an empty file."""
        self._end = 0
        os.ftruncate(self._file.fileno(), 0)

    def close(self) -> None:
        """Give the room back."""
        self._file.close()


def _form_at(device: Any, leaf: Any) -> Any:
    form: Any = jax.ShapeDtypeStruct
    return form(leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(device))


def groups_of(leaves: Sequence[Any]) -> Iterator[range]:
    """Cut leaves into groups of GROUP_BYTES, or of one that is larger."""
    begin = size = 0
    for number, leaf in enumerate(leaves):
        size += _nbytes(leaf)
        if size >= GROUP_BYTES or number == len(leaves) - 1:
            yield range(begin, number + 1)
            begin, size = number + 1, 0


def place_of(on: OptimizerOn) -> Literal["device", "host"] | Path:
    """Return where a state lies. Raises ConfigError for a word that is no place."""
    if isinstance(on, str) and on not in ("device", "host") and os.sep not in on:
        raise ConfigError(
            f"the optimizer's state lies on the device, on the host or in a folder as /var/tmp, got {on!r}"
        )
    return "device" if on == "device" else "host" if on == "host" else Path(on).expanduser()


def counts(on: OptimizerOn, has_card: bool) -> bool:
    """Return whether a state counts in the memory that a stage may use: that of a card, or of a PC without one."""
    place = place_of(on)
    return place == "device" or (place == "host" and not has_card)


def moving_bytes(optimizer: optax.GradientTransformation, params: Any) -> int:
    """Return what an update takes at most besides parameters and gradients, where the state is elsewhere: the state of
    a group as it was and as it becomes, and the new parameters. params: of a stage, or their forms."""
    largest = max((_nbytes(leaf) for leaf in jax.tree.leaves(params)), default=0)
    state = jax.eval_shape(optimizer.init, params)
    of_params, of_state = (sum(map(_nbytes, jax.tree.leaves(tree))) for tree in (params, state))
    return int((GROUP_BYTES + largest) * (1 + 2 * of_state / max(1, of_params)))


def _has_consts(closed: ClosedJaxpr) -> bool:
    """Return whether a computation has arrays of its own, also within a part of it: its text does not show them."""
    parts = [part for equation in closed.jaxpr.eqns for part in jax.tree.leaves(list(equation.params.values()))]
    inner = [part if isinstance(part, ClosedJaxpr) else ClosedJaxpr(part, ())
             for part in parts if isinstance(part, ClosedJaxpr | Jaxpr)]  # fmt: skip
    return bool(closed.consts) or any(map(_has_consts, inner))


def counted(state: Any, steps: int) -> Any:
    """Return a fresh optimizer state in which the counts of schedules are `steps`. A count beside moments stays 0: it
    says how many gradients are in them (Kingma and Ba 2015, bias correction)."""

    def has_moments(node: Any) -> bool:
        names = getattr(node, "_fields", ())
        is_transform = "count" in names and "inner_state" not in names
        return is_transform and any(jnp.ndim(leaf) for leaf in jax.tree.leaves(node))

    def with_steps(node: Any) -> Any:
        is_count = not has_moments(node) and jnp.ndim(node) == 0 and jnp.issubdtype(jnp.result_type(node), jnp.integer)
        return jnp.asarray(steps, node.dtype) if is_count else node

    return jax.tree.map(with_steps, state, is_leaf=has_moments)


def computed(result: Result) -> Result:
    """Wait until all arrays of a result are computed."""
    for leaf in jax.tree.leaves(result):
        leaf.block_until_ready()
    return result


def _nbytes(leaf: Any) -> int:
    return int(leaf.size) * int(jnp.dtype(leaf.dtype).itemsize)
