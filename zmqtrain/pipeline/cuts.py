"""Where a traced loss can be cut, what each cut costs, and the choice of a few good ones.

The activations of a loss are computed by units: one for each equation, and one for each iteration of a `lax.scan`. A
cut has a position: so many units are before it. Every position can be cut; what is alive there travels (the carry).

The choice: of the positions with the fewest bytes, those that divide the work evenly. The work of a unit is its share
of the floating-point operations and of the parameters, in equal parts, because a stage must fit a PC's time and memory.
If the cheapest positions divide it much worse than all positions would, dearer ones are taken too.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt
from jax.extend.core import JaxprEqn, Var
from jax.extend.core import primitives as jax_primitives

from zmqtrain.core.errors import ConfigError
from zmqtrain.pipeline.local_values import LocalValues, Rows, all_rows, row_bytes
from zmqtrain.pipeline.marks import has_mark
from zmqtrain.pipeline.trace import Atom, TracedLoss, form_of, place_of, product_flops, size_of, variables

UNEVENNESS = 1.5
"""The largest stage may be so many times as large as the best positions of all would make it."""

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cut:
    """A place where a loss can be cut.

    position: so many units are before it.  carry_bytes: what travels there, of one micro-batch, in one direction.
    tied_bytes: parameters that are used on both sides, so that two stages hold them and add their gradients.
    marked: `zt.stage_end` stands there.  after: the line of the program that the cut follows.
    """

    position: int
    carry_bytes: int
    tied_bytes: int
    marked: bool
    after: str


@dataclass(frozen=True)
class ScanForm:
    """The operands of a `lax.scan`, by their role, and its results."""

    equation: JaxprEqn

    @property
    def length(self) -> int:
        """How many iterations it has."""
        return int(self.equation.params["length"])

    @property
    def constants(self) -> list[Atom]:
        """What every iteration reads."""
        return self.equation.invars[: self._constants]

    @property
    def initial(self) -> list[Atom]:
        """The carry of the first iteration."""
        return self.equation.invars[self._constants : self._constants + self._carries]

    @property
    def stacked(self) -> list[Atom]:
        """Of which each iteration reads one row."""
        return self.equation.invars[self._constants + self._carries :]

    @property
    def final(self) -> list[Var]:
        """The carry of the last iteration."""
        return self.equation.outvars[: self._carries]

    @property
    def collected(self) -> list[Var]:
        """To which each iteration gives one row."""
        return self.equation.outvars[self._carries :]

    def rows(self, first: int, last: int) -> Rows:
        """Return the rows that iterations `first` to `last` - 1 read."""
        if self.equation.params["reverse"]:
            return Rows(self.length - last, self.length - first)
        return Rows(first, last)

    @property
    def _constants(self) -> int:
        return int(self.equation.params["num_consts"])

    @property
    def _carries(self) -> int:
        return int(self.equation.params["num_carry"])


def scan_form(equation: JaxprEqn) -> ScanForm | None:
    """Return the form of an equation that is a scan of at least two iterations; None for any other."""
    is_scan = equation.primitive is jax_primitives.scan_p and equation.params["length"] > 1
    return ScanForm(equation) if is_scan else None


class Positions:
    """The units of a traced loss, and what a cut at each position costs.

    computed: the equations that give activations.  starts: the first unit of each; its last entry is the number of
    units.  Arrays of costs are int64[units + 1], by position; those of units, float64[units].
    """

    def __init__(self, traced: TracedLoss) -> None:
        self.traced = traced
        self.computed = [one for one in traced.equations if traced.is_computed(one)]
        self.forms = [scan_form(one) for one in self.computed]
        sizes = [form.length if form else 1 for form in self.forms]
        self.starts: Integers = np.cumsum([0, *sizes])

    @property
    def units(self) -> int:
        """How many units there are; cuts have the positions 1 to units - 1."""
        return int(self.starts[-1])

    @cached_property
    def carry_bytes(self) -> Integers:
        """Bytes of the activations that are alive at each position."""
        alive = np.zeros(self.units + 2, np.int64)  # of differences
        first_after, last_use = {}, {}
        for number, (equation, form) in enumerate(zip(self.computed, self.forms, strict=True)):
            start, end = int(self.starts[number]), int(self.starts[number + 1])
            first_after.update(dict.fromkeys(equation.outvars, end))
            whole = form.constants if form else equation.invars
            last_use.update(dict.fromkeys(variables(whole), end - 1))
            if form:
                for value in variables([*form.initial, *form.stacked]):
                    last_use[value] = max(last_use.get(value, 0), start)
        for value, first in first_after.items():
            if self.traced.is_activation(value) and last_use.get(value, -1) >= first:
                alive[first] += size_of(value)
                alive[last_use[value] + 1] -= size_of(value)
        totals: Integers = np.cumsum(alive)[: self.units + 1]
        for start, form in zip(self.starts, self.forms, strict=False):
            if form:
                used = [value for value in form.collected if value in last_use]
                for done in range(1, form.length):
                    totals[start + done] += self._inside(form, used, done)
        return totals

    def _inside(self, form: ScanForm, collected: Sequence[Var], done: int) -> int:
        """Bytes that a scan itself has in hand after `done` iterations: carry, rows to read, rows collected."""
        to_read = {value for value in variables(form.stacked) if self.traced.is_activation(value)}
        left = sum(size_of(value) // form.length * (form.length - done) for value in to_read)
        return left + sum(map(size_of, form.final)) + sum(size_of(value) // form.length * done for value in collected)

    @cached_property
    def tied_bytes(self) -> Integers:
        """Bytes of the parameters that are used on both sides of each position."""
        found = np.zeros(self.units + 2, np.int64)
        for leaf, uses in self._uses.items():
            before = _hulls([rows for _, rows in uses])
            after = _hulls([rows for _, rows in reversed(uses)])[::-1]
            for index in range(len(uses) - 1):
                shared = before[index].overlap(after[index + 1]) * row_bytes(leaf)
                found[uses[index][0] + 1] += shared
                found[uses[index + 1][0] + 1] -= shared
        totals: Integers = np.cumsum(found)[: self.units + 1]
        return totals

    @cached_property
    def _uses(self) -> dict[Var, list[tuple[int, Rows]]]:
        """Parameter: the units that use it, in their order, and which rows."""
        found: dict[Var, list[tuple[int, Rows]]] = {}
        behind = _Sources(self.traced)
        for start, equation, form in zip(self.starts, self.computed, self.forms, strict=False):
            for offset, values in _unit_values(equation, form):
                held: dict[Var, Rows] = {}
                local = LocalValues(self.traced)
                for value, rows in values:
                    if rows is None:
                        held.update({leaf: all_rows(leaf) for leaf in behind.leaves(value)})
                    elif not self.traced.is_activation(value):
                        local.need_rows(value, rows)
                for leaf, rows in local.held.items():
                    held[leaf] = held[leaf].hull(rows) if leaf in held else rows
                for leaf, rows in held.items():
                    found.setdefault(leaf, []).append((int(start) + offset, rows))
        return found

    @cached_property
    def work(self) -> Floats:
        """The share of each unit in the work of the whole loss; they sum to 1."""
        flops, held = np.zeros(self.units), np.zeros(self.units)
        for start, equation, form in zip(self.starts, self.computed, self.forms, strict=False):
            length = form.length if form else 1
            values = sum(prod(form_of(out).shape) for out in equation.outvars)
            flops[start : start + length] = (product_flops(equation) + values) / length
        for leaf, uses in self._uses.items():
            seen = _hulls([rows for _, rows in uses])
            for index, (unit, rows) in enumerate(uses):
                known = seen[index - 1].overlap(rows) if index else 0
                held[unit] += (rows.size - known) * row_bytes(leaf)
        parts = [part / part.sum() for part in (flops, held) if part.sum()]
        shares: Floats = np.mean(parts, axis=0)
        return shares

    @cached_property
    def marks(self) -> tuple[int, ...]:
        """The positions of the marks, in their order; two marks at one position are one."""
        numbers = {id(one): number for number, one in enumerate(self.traced.equations)}
        found = set()
        computed_numbers = [numbers[id(one)] for one in self.computed]
        for mark in self.traced.marks:
            found.add(int(self.starts[np.searchsorted(computed_numbers, mark)]))
        for start, equation, form in zip(self.starts, self.computed, self.forms, strict=False):
            if form and has_mark(equation):
                ends = range(int(start) + 1, int(start) + form.length + 1)
                found.update(end for end in ends if end < self.units)
        return tuple(sorted(found))

    def cuts(self) -> tuple[Cut, ...]:
        """Return every cut that can be made, by position."""
        marks, carry, tied = set(self.marks), self.carry_bytes, self.tied_bytes
        places = list(self._places())
        return tuple(
            Cut(position, int(carry[position]), int(tied[position]), position in marks, places[position - 1])
            for position in range(1, self.units)
        )

    def _places(self) -> Iterator[str]:
        """Yield the line from which each unit comes."""
        for equation, form in zip(self.computed, self.forms, strict=True):
            place = place_of(equation)
            if form is None:
                yield place
            else:
                yield from (f"iteration {done} of {form.length} of {place}" for done in range(1, form.length + 1))

    # ------------------------------------------------------------------ the choice

    def choose(self, count: int) -> tuple[int, ...]:
        """Return `count` positions: marks if there are any, else positions where few bytes are alive.

        Raises ConfigError if there are fewer marks, or fewer positions.
        """
        if count < 0:
            raise ConfigError(f"a loss is cut 0 times or more often, not {count} times")
        if self.marks:
            self.check_marks()
            if len(self.marks) < count:
                raise ConfigError(
                    f"{count} cuts are wanted and the loss has {len(self.marks)} marks (zt.stage_end): add marks, or "
                    "take all away, so that cuts are found where few bytes travel"
                )
            return self._most_even(np.array(self.marks), count)[0]
        if count > self.units - 1:
            raise ConfigError(
                f"{count} cuts are wanted and the loss can be cut in {self.units - 1} places: use fewer PCs"
            )
        if count == 0:
            return ()
        cost = (self.carry_bytes + self.tied_bytes)[1 : self.units]
        every, levels = np.arange(1, self.units), np.unique(cost)
        limit = UNEVENNESS * self._least_largest(count)

        def is_even(level: int) -> bool:
            allowed = every[cost <= levels[level]]
            return bool(len(allowed) >= count and self._most_even(allowed, count)[1] <= limit)

        cheapest = bisect_left(range(len(levels) - 1), True, key=is_even)
        return self._most_even(every[cost <= levels[cheapest]], count)[0]

    def candidates(self, count: int, most: int) -> tuple[int, ...]:
        """Return up to `most` positions, of which `count` are to be chosen: the marks if there are any, else positions
        no dearer than the dearest that `choose` takes, with some work between them.

        Raises ConfigError as `choose`.
        """
        chosen = self.choose(count)
        if not chosen:
            return ()
        allowed = np.array(self.marks)
        if not self.marks:
            cost, every = self.carry_bytes + self.tied_bytes, np.arange(1, self.units)
            cheap = every[cost[1 : self.units] <= cost[list(chosen)].max()]
            allowed = self._apart(cheap, 1 / (2 * most), chosen)
        return self._most_even(allowed, min(most, len(allowed)))[0]

    def _apart(self, positions: Integers, least_work: float, kept: Sequence[int]) -> Integers:
        """Return those of the positions that have so much work before them, back to the one before, and so much behind
        them; and those that are to be kept."""
        done = np.concatenate([[0.0], np.cumsum(self.work)])
        found, since = list[int](), 0.0
        for position in positions:
            if position in kept or since + least_work <= done[position] <= 1 - least_work:
                found.append(int(position))
                since = done[position]
        return np.array(found)

    def check_marks(self) -> None:
        """Raise ConfigError if there is no mark, or one that leaves a stage without work."""
        if not self.marks:
            raise ConfigError(
                "the loss has no marks: put h = zt.stage_end(h) where a stage may end, or say how many cuts are to be "
                "found, as zt.split(loss_fn, params, batch, cuts=3)"
            )
        for position, side in ((0, "before"), (self.units, "after")):
            if position in self.marks:
                raise ConfigError(
                    f"nothing that depends on both the parameters and the batch is computed {side} the "
                    f"{'first' if position == 0 else 'last'} mark (zt.stage_end): that stage would be empty. Take the "
                    "mark away"
                )

    def check(self, positions: Sequence[int]) -> None:
        """Raise ConfigError if these are no positions that ascend."""
        if any(not 1 <= position < self.units for position in positions):
            raise ConfigError(f"cuts have positions from 1 to {self.units - 1} in this loss, got {list(positions)}")
        if any(first >= second for first, second in itertools.pairwise(positions)):
            raise ConfigError(f"the positions of cuts must ascend, got {list(positions)}")

    def _least_largest(self, count: int) -> float:
        """Return the work of the largest stage where `count` cuts, at any positions, make it smallest."""
        done = np.concatenate([[0.0], np.cumsum(self.work)])
        too_small, enough = 0.0, 1.0
        for _ in range(40):
            limit, at = (too_small + enough) / 2, 0
            for _ in range(count + 1):
                at = max(at, int(np.searchsorted(done, done[at] + limit, "right")) - 1)
            too_small, enough = (too_small, limit) if at == self.units else (limit, enough)
        return enough

    def _most_even(self, allowed: Integers, count: int) -> tuple[tuple[int, ...], float]:
        """Return the `count` of these positions with the least sum of squared work, and the largest stage's work."""
        done = np.concatenate([[0.0], np.cumsum(self.work)])
        ends = np.concatenate([done[allowed], [done[-1]]])
        least, chosen = ends**2, list[Integers]()
        for _ in range(count):
            step = np.where(allowed[:, None] < np.append(allowed, self.units)[None, :], 0.0, np.inf)
            total = least[:-1, None] + (ends[None, :] - ends[:-1, None]) ** 2 + step
            chosen.append(total.argmin(axis=0))
            least = total.min(axis=0)
        at, found = len(allowed), list[int]()
        for choice in reversed(chosen):
            at = int(choice[at])
            found.append(int(allowed[at]))
        positions = tuple(reversed(found))
        largest = float(np.diff([0.0, *done[list(positions)], done[-1]]).max())
        return positions, largest


class _Sources:
    """The leaves of the parameters behind values that are no activations."""

    def __init__(self, traced: TracedLoss) -> None:
        self._of: dict[Var, frozenset[Var]] = {leaf: frozenset([leaf]) for leaf in traced.parameters}
        for equation in traced.equations:
            if not traced.is_computed(equation):
                behind = [self._of.get(value, frozenset()) for value in variables(equation.invars)]
                self._of.update(dict.fromkeys(equation.outvars, frozenset().union(*behind)))

    def leaves(self, value: Atom) -> frozenset[Var]:
        """Return the leaves that a value depends on; none for an activation, for that travels."""
        return self._of.get(value, frozenset()) if isinstance(value, Var) else frozenset()


def _unit_values(equation: JaxprEqn, form: ScanForm | None) -> Iterator[tuple[int, list[tuple[Atom, Rows | None]]]]:
    """Yield, for each unit of an equation, the values that it reads, and which rows of each (None: all)."""
    if form is None:
        yield 0, [(value, None) for value in equation.invars]
        return
    for done in range(form.length):
        whole = [*form.constants, *(form.initial if done == 0 else ())]
        rows = form.rows(done, done + 1)
        yield done, [*((value, None) for value in whole), *((value, rows) for value in form.stacked)]


def _hulls(rows: Sequence[Rows]) -> list[Rows]:
    """Return, at each place, the hull of the rows up to there."""
    found = list(rows[:1])
    for one in rows[1:]:
        found.append(found[-1].hull(one))
    return found
