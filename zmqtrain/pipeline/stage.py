"""One stage of a loss that was cut: the leaves it holds, what it takes and gives, and its forward and backward passes.

Rule 1: a stage is a function (own parameters, own data, carry) -> carry; of the last one the result is the loss.
Rule 2: a backward pass computes the forward pass again from the stage's input. So one carry is all that is kept of a
micro-batch between the two, and no parameters of an earlier step are.
Rule 3: only floating values that depend on parameters have a cotangent; integers, masks and keys travel forward only.
A random key travels as its data, uint32.
Rule 4: the gradients of micro-batches are added inside the backward pass, in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from zmqtrain.core.errors import ModelMismatch
from zmqtrain.core.types import LeafSpec
from zmqtrain.pipeline.local_values import Rows
from zmqtrain.train.leaves import describe_tree

Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True)
class HeldLeaf:
    """A leaf of the parameters that a stage holds, or some rows of it.

    number: of the leaf, in the whole tree.  whole: the leaf.  rows: those that are held, of its first axis; None: all.
    """

    number: int
    whole: LeafSpec
    rows: Rows | None

    @property
    def name(self) -> str:
        """Its path in the tree, and its rows if they are not all: "layers/w[4:8]"."""
        return self.whole.path if self.rows is None else f"{self.whole.path}[{self.rows.start}:{self.rows.stop}]"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is held."""
        return self.whole.shape if self.rows is None else (self.rows.size, *self.whole.shape[1:])

    def taken_from(self, leaf: Any) -> Any:
        """Return the part of a whole leaf that is held."""
        return leaf if self.rows is None else leaf[self.rows.start : self.rows.stop]


@dataclass(frozen=True)
class CarriedValue:
    """A value that travels from one stage to the next.

    shape, dtype: on the wire.  has_cotangent: its gradient travels back.  key: the implementation of a random key that
    travels as its data; None for any other value.
    """

    shape: tuple[int, ...]
    dtype: Any
    has_cotangent: bool
    key: Any = None

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return prod(self.shape) * int(jnp.dtype(self.dtype).itemsize)

    def unpacked(self, value: Any) -> Any:
        """Return a value off the wire as the stage computes with it."""
        return value if self.key is None else jax.random.wrap_key_data(value, impl=self.key)

    def packed(self, value: Any) -> Any:
        """Return a value of the stage as it travels."""
        return value if self.key is None else jax.random.key_data(value)


class Backward(NamedTuple):
    """What a backward pass gives. gradients: the sum with those that came in, in the form of the own parameters.
    cotangents: for the stage before, one for each carried value that has one.  loss: of the last stage; else None."""

    gradients: Any
    cotangents: Arrays
    loss: jax.Array | None


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage. Its own parameters are a tree like the whole one, with only what it holds: dicts lack the other leaves,
    other containers have None in their place.

    number: from 0; stages: how many there are.  jaxpr: (held leaves, own data, carry) -> carry or loss.  held: its
    parameters.  data: the numbers of the leaves of a batch that it reads.  carry_in, carry_out: what it takes from the
    stage before and gives to the next; the first takes nothing, and the last gives the loss.  params: the whole tree,
    of `jax.ShapeDtypeStruct`.
    """

    number: int
    stages: int
    jaxpr: ClosedJaxpr
    held: tuple[HeldLeaf, ...]
    data: tuple[int, ...]
    carry_in: tuple[CarriedValue, ...]
    carry_out: tuple[CarriedValue, ...]
    params: Any

    @property
    def is_last(self) -> bool:
        """Whether its result is the loss."""
        return self.number == self.stages - 1

    @property
    def cotangents_in(self) -> tuple[CarriedValue, ...]:
        """The values of `carry_out` whose gradients the next stage sends back."""
        return tuple(value for value in self.carry_out if value.has_cotangent and not self.is_last)

    @property
    def cotangents_out(self) -> tuple[CarriedValue, ...]:
        """The values of `carry_in` whose gradients go back to the stage before."""
        return tuple(value for value in self.carry_in if value.has_cotangent)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters that it holds."""
        return sum(int(jnp.dtype(leaf.dtype).itemsize) * int(leaf.size) for leaf in jax.tree.leaves(self.own_shapes))

    @cached_property
    def own_shapes(self) -> Any:
        """The tree of its own parameters, of `jax.ShapeDtypeStruct`."""
        return jax.eval_shape(self._taken, self.params)

    def own(self, params: Any) -> Any:
        """Return its own parameters out of the whole tree. Raises ModelMismatch if that is another model's."""
        check_form(params, self.params, "parameter", "parameters")
        return self._taken(params)

    def init(self, init_fn: Callable[..., Any], *arguments: Any) -> Any:
        """Return its own parameters of `init_fn(*arguments)`, a whole tree that is never made: the function is compiled
        for the own leaves only. It must be a function of jax; give it a key, or a seed that it makes one from."""
        own: Any = jax.jit(lambda *values: self.own(init_fn(*values)))(*arguments)
        return own

    def data_of(self, micro_batch: Any) -> tuple[Any, ...]:
        """Return the leaves of a micro-batch that it reads."""
        leaves = jax.tree.leaves(micro_batch)
        return tuple(leaves[number] for number in self.data)

    def forward(self, own: Any, data: Sequence[Any], carry: Sequence[Any] = ()) -> Arrays:
        """Return the carry for the next stage; of the last stage (loss,). Compiled at its first call."""
        result: Arrays = self._forward(own, tuple(data), tuple(carry))
        return result

    def backward(
        self, own: Any, data: Sequence[Any], carry: Sequence[Any], gradients: Any, cotangents: Sequence[Any] = ()
    ) -> Backward:
        """Compute the forward pass again, and its gradients. Compiled at its first call.

        own, data, carry: as of the forward pass.  gradients: the sum of the micro-batches before, which is consumed
        (`zero_gradients` for the first).  cotangents: from the next stage; the last stage takes none.
        """
        outputs, total, to_send = self._backward(own, tuple(data), tuple(carry), gradients, tuple(cotangents))
        return Backward(total, to_send, outputs[0] if self.is_last else None)

    def zero_gradients(self) -> Any:
        """Return gradients of zero, in the form of the own parameters."""
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.own_shapes)

    def __str__(self) -> str:
        return f"stage {self.number} of {self.stages}: {', '.join(leaf.name for leaf in self.held) or 'no parameters'}"

    # ------------------------------------------------------------------ compiled

    def compiled_forward(self) -> jax.stages.Compiled:
        """Return its forward pass, compiled, without computing it; it takes arguments as `forward` does."""
        data, carry, _ = self._shapes()
        compiled: jax.stages.Compiled = self._forward.lower(self.own_shapes, data, carry).compile()
        return compiled

    def compiled_backward(self) -> jax.stages.Compiled:
        """Return its backward pass, compiled, without computing it. It takes arguments as `backward` does, and gives
        (loss) of the last stage, else (), the gradients, and the cotangents."""
        data, carry, cotangents = self._shapes()
        lowered = self._backward.lower(self.own_shapes, data, carry, self.own_shapes, cotangents)
        compiled: jax.stages.Compiled = lowered.compile()
        return compiled

    def _shapes(self) -> tuple[Arrays, Arrays, Arrays]:
        """Return the shapes of its data, of its carry and of the cotangents of its result."""
        inputs = self.jaxpr.in_avals[len(self.held) :]
        data, carry, cotangents = (
            tuple(jax.eval_shape(partial(jnp.zeros, form.shape, form.dtype)) for form in forms)
            for forms in (inputs[: len(self.data)], self.carry_in, self.cotangents_in)
        )
        return data, carry, cotangents

    @cached_property
    def _forward(self) -> Any:
        return jax.jit(self._computed)

    @cached_property
    def _backward(self) -> Any:
        return jax.jit(self._differentiated, donate_argnums=3)

    def _computed(self, own: Any, data: Arrays, carry: Sequence[Any]) -> Arrays:
        arrived = [spec.unpacked(value) for spec, value in zip(self.carry_in, carry, strict=True)]
        results = jaxpr_as_fun(self.jaxpr)(*jax.tree.leaves(own), *data, *arrived)
        return tuple(spec.packed(value) for spec, value in zip(self.carry_out, results, strict=True))

    def _differentiated(self, own: Any, data: Arrays, carry: Arrays, gradients: Any, cotangents: Arrays) -> Any:
        def outputs(own: Any, moving: Arrays) -> Arrays:
            following = iter(moving)
            arrived = [
                next(following) if spec.has_cotangent else value
                for spec, value in zip(self.carry_in, carry, strict=True)
            ]
            results = self._computed(own, data, arrived)
            return tuple(value for spec, value in zip(self.carry_out, results, strict=True) if spec.has_cotangent)

        moving = tuple(value for spec, value in zip(self.carry_in, carry, strict=True) if spec.has_cotangent)
        results, pull_back = jax.vjp(outputs, own, moving)
        from_next = (jnp.ones_like(results[0]),) if self.is_last else cotangents
        added, to_send = pull_back(from_next)
        return results if self.is_last else (), jax.tree.map(jnp.add, gradients, added), to_send

    def _taken(self, params: Any) -> Any:
        leaves, tree = jax.tree.flatten(params)
        return pruned(tree, {leaf.number: leaf.taken_from(leaves[leaf.number]) for leaf in self.held})


def pruned(tree: Any, kept: dict[int, Any]) -> Any:
    """Return the tree of this structure with only some of its leaves: dicts and lists without any are left out.

    tree: the structure (`jax.tree.structure`).  kept: number of a leaf: its value.
    """

    def prune(node: Any) -> Any:
        if type(node) is dict:
            inner = {key: pruned_child for key, child in node.items() if (pruned_child := prune(child)) is not None}
            return inner or None
        if type(node) in (list, tuple):
            children = [prune(child) for child in node]
            return None if all(child is None for child in children) else type(node)(children)
        rest = jax.tree.map(kept.get, node)
        return rest if jax.tree.leaves(rest) else None

    return prune(jax.tree.unflatten(tree, range(tree.num_leaves)))


def check_form(tree: Any, expected: Any, word: str, words: str) -> None:
    """Raise ModelMismatch if a tree has another structure than expected, or a leaf of another shape or dtype."""
    found = jax.eval_shape(lambda values: values, tree)
    structure: Any = jax.tree.structure(found)
    if structure != jax.tree.structure(expected):
        raise ModelMismatch(
            f"this tree has the {words} {_names(found)}, and the loss was cut for {_names(expected)}: cut it again"
        )
    for spec, wanted in zip(describe_tree(found), describe_tree(expected), strict=True):
        if spec.form != wanted.form:
            raise ModelMismatch(
                f"the {word} {spec.path} is {spec.form}, and the loss was cut for {wanted.form}: give it that form, or "
                "cut the loss again",
                spec.path,
            )


def _names(tree: Any) -> str:
    return ", ".join(spec.path for spec in describe_tree(tree)) or "(none)"
