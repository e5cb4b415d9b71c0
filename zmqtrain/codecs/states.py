"""Write what codecs keep from one encode to the next as plain arrays, and fill it in again.

Rule: the form of a state is its codec's: it is filled into one that `init` has made, and what does not fit is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.codecs.codec import State
from zmqtrain.core.errors import CodecError


def pack_states(states: Sequence[State]) -> list[NDArray[Any]]:
    """Return a copy of every array in the states of a payload's slabs, on the host, in a fixed order."""
    return [np.array(array) for state in states for array in _arrays(state)]


def fill_states(like: Sequence[State], arrays: Sequence[NDArray[Any]]) -> list[State]:
    """Return states of the form of `like` with the arrays that `pack_states` gave. Raises CodecError if they differ."""
    coming = iter(arrays)
    filled = [_filled(state, coming) for state in like]
    if next(coming, None) is not None:
        raise CodecError("the state of a codec has more arrays than this one keeps")
    return filled


def _arrays(state: State) -> Iterator[Any]:
    if isinstance(state, tuple | list):
        for part in state:
            yield from _arrays(part)
    else:
        yield state


def _filled(like: State, coming: Iterator[NDArray[Any]]) -> State:
    if isinstance(like, tuple | list):
        parts = [_filled(part, coming) for part in like]
        return type(like)(parts)
    array = next(coming, None)
    dtype = getattr(like, "dtype", None) or np.asarray(like).dtype
    if array is None or array.shape != np.shape(like) or array.dtype != dtype:
        raise CodecError(f"the state of a codec is not one of {np.shape(like)} {dtype}")
    return array.copy()
