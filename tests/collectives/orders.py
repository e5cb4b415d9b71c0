"""The stated orders of the algorithms, written once more in the plainest way: what tests compare with."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from zmqtrain.collectives.algorithms import share_bounds
from zmqtrain.collectives.reductions import Reduction, Values

__all__ = ["evaluated", "fold", "pair", "reduced", "reduced_to"]


def evaluated(formula: str, size: int) -> float:
    """What a page's formula in N (or P, of a power of two) comes to: "2 N (N-1)", "2 floor(log2 N)"."""
    program = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", re.sub(r"log2 (\w)", r"log2(\1)", formula))
    value: float = eval(program, {"N": size, "P": size, "log2": math.log2, "floor": math.floor})
    return value


def fold(arrays: Sequence[Values], op: Reduction) -> Values:
    """((a op b) op c) op ..."""
    total = arrays[0].copy()
    for values in arrays[1:]:
        op.combine(total, values, total)
    return total


def pair(arrays: Sequence[Values], op: Reduction) -> Values:
    """(a op b) op (c op d) ..., halves of a power of two each, what is not there left out."""
    if len(arrays) == 1:
        return arrays[0].copy()
    half = 1 << ((len(arrays) - 1).bit_length() - 1)
    return fold([pair(arrays[:half], op), pair(arrays[half:], op)], op)


def reduced(algorithm: str, arrays: Sequence[Values], op: Reduction) -> Values:
    """What an allreduce of this name gives, in the order that it states."""
    size = len(arrays)
    if algorithm in ("naive", "sequential", "hub"):
        result = fold(arrays, op)
    elif algorithm == "tree":
        result = pair(arrays, op)
    elif algorithm == "halving":
        others = size - (1 << (size.bit_length() - 1))
        folded = [fold(arrays[2 * place : 2 * place + 2], op) for place in range(others)]
        result = pair([*folded, *arrays[2 * others :]], op)
    else:
        bounds = share_bounds(arrays[0].size, size)
        first = {"ring": 1, "parallel": 0}[algorithm]
        turned = [[arrays[(share + first + step) % size] for step in range(size)] for share in range(size)]
        cuts = [slice(bounds[share], bounds[share + 1]) for share in range(size)]
        result = np.concatenate(
            [fold([values[cut] for values in each], op) for each, cut in zip(turned, cuts, strict=True)]
        )
    op.finish(result, size)
    return result


def reduced_to(algorithm: str, arrays: Sequence[Values], op: Reduction, root: int) -> Values:
    """What a reduce of this name leaves at the root."""
    places = [*arrays[root:], *arrays[:root]]
    result = pair(places, op) if algorithm == "tree" else fold([*places[1:], places[0]], op)
    op.finish(result, len(arrays))
    return result


class Names:
    """What a machine of one rank asks its communicator."""

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def doing(self) -> str:
        return "this"
