"""`split`: a loss function cut into stages, each with its own parameters and data (pure: nothing is computed here).

1. The loss is traced (`trace`), and cut at positions (`cuts`). Stage s computes the activations between cuts s - 1 and
   s; what is alive at a cut is the carry.
2. A `lax.scan` with a cut inside becomes one scan for each part, over its own rows of the stacked inputs.
3. What needs no activation each stage computes for itself (`local_values`); so it finds out which parameters it holds
   and which leaves of the batch it reads. A leaf that two stages hold is tied: their gradients are added.
4. A parameter that the loss does not use is held by the first stage, so that it is saved with the others.
Source: GPipe (Huang et al. 2019); stages as backward slices of a traced program, as in JaxPP and Alpa.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from zmqtrain.core.errors import ConfigError
from zmqtrain.pipeline.cuts import Cut, Positions, ScanForm
from zmqtrain.pipeline.local_values import OVERLAP, LocalValues, Rows, all_rows, equations_of, free_rows
from zmqtrain.pipeline.stage import CarriedValue, HeldLeaf, Stage, check_form
from zmqtrain.pipeline.trace import Atom, Loss, TracedLoss, form_of, make_jaxpr, new_var, trace_loss, variables


@dataclass(frozen=True)
class TiedRows:
    """Rows of a leaf that several stages hold: each adds the gradients of all of them, in the order of the stages."""

    path: str
    leaf: int
    rows: Rows
    stages: tuple[int, ...]
    nbytes: int


class Split(Sequence[Stage]):
    """The stages of a loss, in their order; `print` shows them.

    cuts: between them.  micro_batches: into how many parts a batch is cut.  uncut: paths of the leaves of a batch that
    every micro-batch gets whole.  batch: the form of a whole batch.
    ranks: of each stage, the rank that computes it; None: stage r is at rank r.
    """

    ranks: tuple[int, ...] | None = None

    def __init__(self, traced: TracedLoss, stages: Sequence[Stage], cuts: Sequence[Cut], batches: MicroBatches) -> None:
        self.traced, self.stages, self.cuts, self.batches = traced, tuple(stages), tuple(cuts), batches
        self.tied = tuple(_tied_rows(self.stages))

    @overload
    def __getitem__(self, index: int) -> Stage: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Stage]: ...
    def __getitem__(self, index: int | slice) -> Stage | Sequence[Stage]:
        return self.stages[index]

    def __len__(self) -> int:
        return len(self.stages)

    @property
    def micro_batches(self) -> int:
        """Into how many parts a batch is cut."""
        return self.batches.count

    def at_ranks(self, ranks: Sequence[int]) -> Split:
        """Return the same stages, each computed by the rank that is named in its place."""
        placed = copy.copy(self)
        placed.ranks = tuple(ranks)
        return placed

    def own(self, params: Any) -> list[Any]:
        """Return the own parameters of each stage out of a whole tree."""
        return [stage.own(params) for stage in self.stages]

    def gather(self, own: Sequence[Any]) -> Any:
        """Return the whole tree out of what each stage holds; of tied rows, those of the first that holds them."""
        parts: dict[int, list[tuple[Rows, Any]]] = {}
        for stage, tree in zip(self.stages, own, strict=True):
            for leaf, value in zip(stage.held, jax.tree.leaves(tree), strict=True):
                parts.setdefault(leaf.number, []).append((_rows_of(leaf), value))
        leaves, structure = jax.tree.flatten(self.traced.params)
        return jax.tree.unflatten(structure, [_joined(parts[number]) for number in range(len(leaves))])

    def add_tied(self, gradients: Mapping[int, Any]) -> dict[int, Any]:
        """Return the gradients of stages, with those of tied rows added, in the order of the stages.

        gradients: by stage; of some stages only, those that hold leaves together must all be there.
        """
        parts = {number: self.tied_parts(number, tree) for number, tree in gradients.items()}
        return {number: self.with_tied(number, tree, parts) for number, tree in gradients.items()}

    def tied_parts(self, stage: int, gradients: Any) -> dict[int, Any]:
        """Return what a stage's gradients have for the rows that it holds with others, by their number in `tied`."""
        leaves, found = jax.tree.leaves(gradients), dict[int, Any]()
        for number, place, rows in self._tied_places(stage):
            found[number] = leaves[place] if rows is None else leaves[place][rows]
        return found

    def with_tied(self, stage: int, gradients: Any, parts: Mapping[int, Mapping[int, Any]]) -> Any:
        """Return a stage's gradients with those of tied rows added, in the order of the stages.

        parts: by stage, the `tied_parts` of all that hold rows with this one, its own too.
        """
        leaves, structure = jax.tree.flatten(gradients)
        for number, place, rows in self._tied_places(stage):
            first, *others = (parts[other][number] for other in self.tied[number].stages)
            total = sum(others, jnp.asarray(first))
            leaves[place] = total if rows is None else leaves[place].at[rows].set(total)
        return jax.tree.unflatten(structure, leaves)

    def counted_rows(self, stage: int) -> tuple[tuple[int, int] | None, ...]:
        """Return, of each leaf that a stage holds, the rows that no stage before it holds, from, to; None: all.

        Raises ConfigError if they are in several pieces.
        """
        counted: list[tuple[int, int] | None] = [None] * len(self[stage].held)
        for place, leaf in enumerate(self[stage].held):
            own, taken = _rows_of(leaf), list[Rows]()
            for earlier in self.stages[:stage]:
                taken += [_rows_of(other) for other in earlier.held if other.number == leaf.number]
            start, free = own.start, free_rows(own, taken)
            if len(free) > 1:
                raise ConfigError(OVERLAP.format(leaf.whole.path))
            if free != [own]:
                counted[place] = (free[0].start - start, free[0].stop - start) if free else (0, 0)
        return tuple(counted)

    def tied_with(self, stage: int) -> tuple[int, ...]:
        """Return the other stages that hold rows with this one, in their order."""
        together = {other for tied in self.tied if stage in tied.stages for other in tied.stages}
        return tuple(sorted(together - {stage}))

    def _tied_places(self, stage: int) -> Iterator[tuple[int, int, slice | None]]:
        """The tied rows of a stage: their number in `tied`, and where they are in its leaves."""
        places = {leaf.number: place for place, leaf in enumerate(self[stage].held)}
        for number, tied in enumerate(self.tied):
            if stage in tied.stages:
                place = places[tied.leaf]
                yield number, place, _within(tied.rows, self[stage].held[place])

    def parts(self, batch: Any) -> list[Any]:
        """Return the micro-batches of a batch. Raises ModelMismatch if the loss was cut for another form."""
        return self.batches.parts(batch)

    def __str__(self) -> str:
        rows = [("stage", "parameters", "tied", "receives", "sends", "holds")]
        for stage in self.stages:
            tied = sum(one.nbytes for one in self.tied if stage.number in one.stages)
            carries = [sum(value.nbytes for value in carry) for carry in (stage.carry_in, stage.carry_out)]
            sent = "the loss" if stage.is_last else _in_words(carries[1])
            names = _summary([leaf.name for leaf in stage.held])
            rows.append(
                (
                    str(stage.number),
                    _in_words(stage.parameter_bytes),
                    _in_words(tied),
                    _in_words(carries[0]),
                    sent,
                    names,
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Split of {len(self)} stages, {self.micro_batches} micro-batches>"


@dataclass(frozen=True)
class MicroBatches:
    """How a batch is cut: its leaves along their first axis, into `count` parts; scalars and `uncut` leaves go whole.

    A scalar random key is folded with the number of the micro-batch, so that each has its own; of one, it is the key
    itself.  batch: the form of a whole batch, of `jax.ShapeDtypeStruct`.  Raises ConfigError if it cannot be cut so.
    """

    batch: Any
    count: int
    uncut: frozenset[str]

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"a batch is cut into 1 micro-batch or more, not {self.count}")
        specs = _paths(self.batch)
        if unknown := sorted(self.uncut - specs.keys()):
            raise ConfigError(f"uncut names {', '.join(unknown)}; the leaves of a batch are {', '.join(specs)}")
        rows = {path: leaf.shape[0] for path, leaf in specs.items() if leaf.shape and path not in self.uncut}
        if self.count > 1 and len(set(rows.values())) > 1:
            raise ConfigError(
                "a batch is cut along the first axis, which is not the same in all of its leaves: "
                + ", ".join(f"{path} has {size}" for path, size in rows.items())
                + "; name those that every micro-batch needs whole (uncut=[...]), and let a random key be a scalar "
                "(jax.random.key)"
            )
        for path, size in rows.items():
            if size % self.count:
                raise ConfigError(
                    f"{path} has {size} rows, which {self.count} micro-batches do not divide: make the batch a "
                    f"multiple of {self.count}, or micro_batches one of {', '.join(map(str, _divisors(size)))}"
                )

    def parts(self, batch: Any) -> list[Any]:
        """Return the parts of a batch, in their order. Raises ModelMismatch if the batch has another form."""
        check_form(batch, self.batch, "leaf of the batch", "leaves of the batch")
        return [self._taken(batch, number) for number in range(self.count)]

    def form(self) -> Any:
        """Return the form of a micro-batch."""
        return jax.eval_shape(lambda batch: self._taken(batch, 0), self.batch)

    def _taken(self, batch: Any, number: int) -> Any:
        if self.count == 1:
            return batch
        return jax.tree_util.tree_map_with_path(lambda path, leaf: self._part(_path(path), leaf, number), batch)

    def _part(self, path: str, leaf: Any, number: int) -> Any:
        if path in self.uncut:
            return leaf
        if not jnp.shape(leaf):
            return jax.random.fold_in(leaf, number) if _is_key(leaf) else leaf
        size = leaf.shape[0] // self.count
        return leaf[number * size : (number + 1) * size]


def split(
    loss_fn: Loss,
    params: Any,
    batch: Any,
    cuts: int | Sequence[int] | None = None,
    *,
    micro_batches: int = 1,
    uncut: Collection[str] = (),
) -> Split:
    """Cut a loss function into stages. Nothing is computed: arrays and their shapes (`jax.eval_shape`) will both do.

    loss_fn(params, batch) -> a scalar, as for jax.grad.  params, batch: pytrees; `batch` is one whole batch.
    cuts: None: at every mark (`zt.stage_end`); a number: so many, at marks if there are any, else where few bytes
    travel and the work is even; positions: exactly there (`zmqtrain.pipeline.split.positions_of` lists them).
    micro_batches: into how many parts a batch is cut, along the first axis of its leaves; the loss is then the mean of
    theirs.  uncut: paths of leaves of the batch that every micro-batch gets whole, such as "mask".
    Raises ConfigError if a cut cannot be made, or if the batch cannot be divided so.
    """
    batches = MicroBatches(jax.eval_shape(lambda tree: tree, batch), micro_batches, frozenset(uncut))
    positions = positions_of(loss_fn, params, batches.form())
    if cuts is None:
        positions.check_marks()
        chosen: Sequence[int] = positions.marks
    elif isinstance(cuts, int):
        chosen = positions.choose(cuts)
    else:
        chosen = tuple(cuts)
    positions.check(chosen)
    every = positions.cuts()
    return Split(
        positions.traced, list(_stages(positions, chosen)), [every[position - 1] for position in chosen], batches
    )


def positions_of(loss_fn: Loss, params: Any, micro_batch: Any) -> Positions:
    """Return the positions at which a loss can be cut, with what each costs. Raises ConfigError as `split`."""
    return Positions(trace_loss(loss_fn, params, micro_batch))


# ---------------------------------------------------------------------- the stages


@dataclass(frozen=True, eq=False)
class _CutLoss:
    """The equations of the activations, with the scans opened that a cut lies in.

    bounds: of each cut, how many equations are before it.  rows: variables that stand for rows of a value that each
    stage computes for itself.
    """

    equations: list[JaxprEqn]
    bounds: list[int]
    rows: Mapping[Var, tuple[Atom, Rows]]


def _stages(positions: Positions, chosen: Sequence[int]) -> Iterable[Stage]:
    traced, opened = positions.traced, _opened(positions, chosen)
    ends = [0, *opened.bounds, len(opened.equations)]
    carries = [*_carries(opened, traced.loss), [traced.loss]]
    computed = {value for equation in opened.equations for value in equation.outvars}
    locals_, bodies = [], []
    for start, end in itertools.pairwise(ends):
        local = LocalValues(traced)
        bodies.append([_with_local(one, local, opened, computed) for one in opened.equations[start:end]])
        locals_.append(local)
    used = [local.held for local in locals_]
    for leaf in traced.parameters:
        if not _covers(leaf, [held[leaf] for held in used if leaf in held]):
            locals_[0].need([leaf])
    moving = _on_parameters(traced, opened)
    before: list[Var] = []
    for number, (local, body, after) in enumerate(zip(locals_, bodies, carries, strict=True)):
        inner, leaves, data = _stage_jaxpr(traced, local, body, before, after)
        taken, given = (tuple(_carried(value, moving) for value in values) for values in (before, after))
        yield Stage(number, len(bodies), inner, leaves, data, taken, given, traced.params)
        before = after


def _opened(positions: Positions, chosen: Sequence[int]) -> _CutLoss:
    cut = _CutLoss([], [], {})
    rows: dict[Var, tuple[Atom, Rows]] = {}
    traced = positions.traced
    used = {value for equation in traced.equations for value in variables(equation.invars)}
    for equation, form, start, end in zip(
        positions.computed, positions.forms, positions.starts, positions.starts[1:], strict=False
    ):
        if int(start) in chosen:
            cut.bounds.append(len(cut.equations))
        inside = [position - int(start) for position in chosen if start < position < end]
        if form is None or not inside:
            cut.equations.append(equation)
            continue
        before, pieces, after = _scan_pieces(form, [0, *inside, form.length], traced, rows, used)
        cut.equations.extend(before)
        for number, piece in enumerate(pieces):
            if number:
                cut.bounds.append(len(cut.equations))
            cut.equations.append(piece)
        cut.equations.extend(after)
    return _CutLoss(cut.equations, cut.bounds, rows)


def _scan_pieces(
    form: ScanForm,
    ends: Sequence[int],
    traced: TracedLoss,
    rows_of: dict[Var, tuple[Atom, Rows]],
    used: Collection[Var],
) -> tuple[list[JaxprEqn], list[JaxprEqn], list[JaxprEqn]]:
    """Return the equations before the parts of a scan, one equation for each part, and those after.

    ends: the iterations at which parts begin and end.  rows_of: gets a variable for rows that a stage computes itself.
    """
    before: list[JaxprEqn] = []
    pieces: list[JaxprEqn] = []
    collected: list[list[tuple[Rows, Var]]] = [[] for _ in form.collected]
    known: dict[tuple[int, Rows], Atom] = {}

    def part_of(value: Atom, rows: Rows) -> Atom:
        if (id(value), rows) not in known:
            equations, (part,) = equations_of(lambda whole: lax.slice_in_dim(whole, *rows), [value])
            if traced.is_activation(value):
                before.extend(equations)
            else:
                part = new_var(part.aval)
                rows_of[part] = (value, rows)
            known[id(value), rows] = part
        return known[id(value), rows]

    carry = form.initial
    for first, last in itertools.pairwise(ends):
        rows = form.rows(first, last)
        stacked = [part_of(value, rows) for value in form.stacked]
        following = form.final if last == form.length else [new_var(value.aval) for value in form.final]
        given = [
            new_var(form_of(value).update(shape=(rows.size, *form_of(value).shape[1:]))) for value in form.collected
        ]
        for parts, value in zip(collected, given, strict=True):
            parts.append((rows, value))
        pieces.append(
            form.equation.replace(
                invars=[*form.constants, *carry, *stacked],
                outvars=[*following, *given],
                params={**form.equation.params, "length": rows.size},
            )
        )
        carry = list(following)
    after: list[JaxprEqn] = []
    for whole, parts in zip(form.collected, collected, strict=True):
        if whole in used:
            in_order = [value for _, value in sorted(parts, key=lambda part: part[0])]
            (equation,), _ = equations_of(lambda *each: lax.concatenate(each, 0), in_order)
            after.append(equation.replace(outvars=[whole]))
    return before, pieces, after


def _carries(cut: _CutLoss, loss: Var) -> list[list[Var]]:
    """Return, for each cut, the activations that are alive there, in the order in which they were computed."""
    last_use: dict[Var, int] = {loss: len(cut.equations)}
    for number, equation in enumerate(cut.equations):
        for value in variables(equation.invars):
            last_use[value] = max(last_use.get(value, 0), number)
    return [
        [value for equation in cut.equations[:bound] for value in equation.outvars if last_use.get(value, -1) >= bound]
        for bound in cut.bounds
    ]


def _with_local(equation: JaxprEqn, local: LocalValues, cut: _CutLoss, computed: Collection[Var]) -> JaxprEqn:
    """Return an equation of a stage, with what the stage computes for itself in the place of rows."""
    inputs: list[Atom] = []
    for atom in equation.invars:
        if isinstance(atom, Var) and atom in cut.rows:
            inputs.append(local.need_rows(*cut.rows[atom]))
            continue
        if isinstance(atom, Var) and atom not in computed:
            local.need([atom])
        inputs.append(atom)
    local_equation: JaxprEqn = equation.replace(invars=inputs)
    return local_equation


def _covers(leaf: Var, held: Sequence[Rows]) -> bool:
    """Whether these rows, together, are all of a leaf."""
    reached = 0
    for rows in sorted(held):
        reached = max(reached, rows.stop) if rows.start <= reached else reached
    return bool(held) and reached >= all_rows(leaf).stop


def _stage_jaxpr(
    traced: TracedLoss, local: LocalValues, body: Sequence[JaxprEqn], before: Sequence[Var], after: Sequence[Var]
) -> tuple[ClosedJaxpr, tuple[HeldLeaf, ...], tuple[int, ...]]:
    """Return a stage's function, the leaves that it holds, and the numbers of the leaves of a batch that it reads."""
    held, (inputs, equations) = local.held, local.build()
    numbers = {leaf: number for number, leaf in enumerate(traced.parameters)}
    leaves = tuple(
        HeldLeaf(numbers[leaf], traced.parameter_specs[numbers[leaf]], None if rows == all_rows(leaf) else rows)
        for leaf, rows in held.items()
    )
    data = tuple(number for number, leaf in enumerate(traced.data) if leaf in local.data)
    names = dict(zip(inputs, (leaf.name for leaf in leaves), strict=True))
    names |= {traced.data[number]: traced.data_specs[number].path for number in data}
    names |= {value: f"carry[{index}]" for index, value in enumerate(before)}
    return make_jaxpr(traced, names, after, [*equations, *body], list(local.constants)), leaves, data


def _carried(value: Var, on_parameters: Collection[Var]) -> CarriedValue:
    form = form_of(value)
    if not _is_key(form):
        return CarriedValue(form.shape, form.dtype, value in on_parameters)
    implementations = []

    def data_of(key: jax.Array) -> jax.Array:
        implementations.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    data = jax.eval_shape(data_of, form)
    return CarriedValue(data.shape, data.dtype, False, implementations[0])


def _on_parameters(traced: TracedLoss, cut: _CutLoss) -> set[Var]:
    """Return the values through which a gradient flows to parameters, those of opened scans among them."""
    found = {*traced.on_parameters, traced.loss}
    found.update(part for part, (value, _) in cut.rows.items() if value in found)
    for equation in cut.equations:
        if found.intersection(variables(equation.invars)):
            found.update(value for value in equation.outvars if jnp.issubdtype(form_of(value).dtype, jnp.inexact))
    return found


def _tied_rows(stages: Sequence[Stage]) -> Iterable[TiedRows]:
    holders: dict[int, list[tuple[int, HeldLeaf]]] = {}
    for stage in stages:
        for leaf in stage.held:
            holders.setdefault(leaf.number, []).append((stage.number, leaf))
    for number, held in sorted(holders.items()):
        spec = held[0][1].whole
        row_bytes = spec.values // (spec.shape[0] if spec.shape else 1) * jnp.dtype(spec.dtype).itemsize
        ends = sorted({end for _, leaf in held for end in _rows_of(leaf)})
        for start, stop in itertools.pairwise(ends):
            by = tuple(stage for stage, leaf in held if _rows_of(leaf).overlap(Rows(start, stop)))
            if len(by) > 1:
                yield TiedRows(spec.path, number, Rows(start, stop), by, (stop - start) * row_bytes)


def _rows_of(leaf: HeldLeaf) -> Rows:
    return leaf.rows or Rows(0, leaf.whole.shape[0] if leaf.whole.shape else 1)


def _within(rows: Rows, leaf: HeldLeaf) -> slice | None:
    """Where rows of a whole leaf are in what is held of it; None: they are all of that."""
    own = _rows_of(leaf)
    return None if own == rows else slice(rows.start - own.start, rows.stop - own.start)


def _joined(parts: Sequence[tuple[Rows, Any]]) -> Any:
    """Return a whole leaf out of its parts, each row from the first part that has it."""
    reached, found = 0, list[Any]()
    for rows, value in sorted(parts, key=lambda part: part[0]):
        if rows.start == 0 and not found and rows.stop == max(stop for (_, stop), _ in parts):
            return value
        if rows.stop > reached:
            found.append(value[reached - rows.start :])
            reached = rows.stop
    return jnp.concatenate(found)


def _paths(tree: Any) -> dict[str, Any]:
    return {_path(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "value"


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0][:12]


def _in_words(size: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} B" if size else "-"


def _summary(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
