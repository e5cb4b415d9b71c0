"""The protocol of a program that a run can train: parameters, loss, optimizer, numbered data and a score.

Rule 1: a program knows one machine; it never learns how many nodes there are, nor which of them it is.
Rule 2: a data unit is named by its number alone: unit 17 always holds the same batches.
Rule 3: every batch of a program has one shape, so that the step is compiled once.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import jax
    import optax


Params = Any
"""A pytree of float32 jax arrays: what is trained, and what the nodes average."""

Batch = Any
"""A pytree of numpy arrays: the data of one local step. Nobody writes into it again once it has been handed out."""


@runtime_checkable
class Program(Protocol):
    """One model, its data and its optimizer: all that a node needs in order to train alone.

    A class need not inherit from this one; it is enough that it has these members. Attributes may be plain ones.

    A program may have one member more, `score(params) -> float | jax.Array | None`: the mean loss over a small, fixed
    part of the training data that no unit holds (None: it has too little data to set any aside). By it nodes are
    compared while a run goes on; never by `evaluate`, or the validation split would choose what it is to judge. It is
    called often: compiled once, and about as cheap as a few steps. Read it with `score_of`.

    And another, `stage_optimizer() -> (optax.GradientTransformation, float)`, for pipelines, whose stages each hold a
    part of the leaves: the optimizer without a clip by the norm of all gradients, and that norm (0: none). Without it
    `optimizer()` is taken, which must not look at several leaves at once then.

    And another, `data_digests: str`: of its training data, "/", of those that are held out. By it the hub names nodes
    that train on other data, and has every node evaluate on the same held-out data.
    """

    @property
    def name(self) -> str:
        """The name that the run's settings, the reports and the errors call it by."""

    @property
    def samples_per_batch(self) -> int:
        """How many samples one batch holds: the weight of one local step in the run's counts."""

    @property
    def sample_word(self) -> str:
        """What a sample is, in the plural: "images", "tokens"."""

    @property
    def units_per_epoch(self) -> int | None:
        """How many data units pass over the training data once; None if the data is drawn without end."""

    def init(self, seed: int) -> Params:
        """Return fresh parameters: a pytree of float32 jax arrays, the same for the same seed on the same machine."""

    def loss(self, params: Params, batch: Batch) -> jax.Array:
        """Return the mean loss over one batch: a float32 scalar; pure, so that it can be jitted and differentiated."""

    def optimizer(self) -> optax.GradientTransformation:
        """Return the inner optimizer. Its rate may depend on its own count of steps, never on the run's length:
        nodes come and go, and nobody knows how many steps one of them will make."""

    def batches(self, unit: int) -> Iterator[Batch]:
        """Return the batches of the data unit of that number (0, 1, 2, ... without end), always the same ones.

        A data unit is the piece of work that a broker deals to one node: a few batches, each of the one fixed shape.
        Where the data is finite, units e * units_per_epoch to (e + 1) * units_per_epoch - 1 are epoch e, in which no
        sample comes twice. Raise ConfigError if the number is negative.
        """

    def evaluate(self, params: Params) -> dict[str, float]:
        """Return scores on data that no unit holds: "loss" (lower is better) at least, "accuracy" in percent if any.

        It is compiled once, takes a time that the size of the data does not stretch without bound, and gives the same
        figures for the same parameters.
        """


MEMBERS = (
    "name", "samples_per_batch", "sample_word", "units_per_epoch", "init", "loss", "optimizer", "batches", "evaluate",
)  # fmt: skip


def missing_members(candidate: object) -> tuple[str, ...]:
    """Return the names of the members of `Program` that `candidate` lacks, in the order above; () if it is a program.

    `isinstance(candidate, Program)` says whether; this says what, for an error that a user can act upon.
    """
    return tuple(member for member in MEMBERS if not hasattr(candidate, member))


def data_of(program: Program) -> str:
    """Return the digests of a program's data, "" if it says none."""
    return str(getattr(program, "data_digests", ""))


def score_of(program: Program, params: Params) -> float:
    """Return the program's score of these parameters (lower is better): NaN if it offers none, inf if it diverged.

    So NaN always means "nothing to compare by", and parameters that give NaN or infinity lose every comparison.
    """
    score = getattr(program, "score", None)
    value = None if score is None else score(params)
    if value is None:
        return nan
    return float(value) if isfinite(value) else inf
