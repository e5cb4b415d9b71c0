"""Take whatever a caller calls an array, and give back its like: numpy, jax (by the array API), scalars of Python.

    leaf = dtype "[" [ int *( "," int ) ] "]"       float32[784,30]; float32[] has one value

Rule 1: on the way everything is a contiguous numpy array of a dtype in DTYPES; jax is never imported.
Rule 2: what describes an array is read with suspicion: it may come from another process (FramingError).
Source: the array API standard, 2023.12 (`__array_namespace__`, `asarray(..., device=)`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.core.errors import ConfigError, FramingError
from zmqtrain.core.types import Array

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *("bfloat16", "float8_e4m3fn", "float8_e5m2"),
)
"""By code, as in a PART message. The last three need the package ml_dtypes, which comes with jax."""

HUB_DTYPES = tuple(name for name in DTYPES if not name.startswith("float8"))
"""Those that a hub reduces."""

_LEAF = re.compile(r"([a-z][a-z0-9_]*)\[((?:\d{1,18}(?:,\d{1,18})*)?)\]")
_MOST_BYTES = 1 << 48
_MOST_DIMENSIONS = 64  # numpy's own limit


@lru_cache(maxsize=len(DTYPES))
def dtype_of_name(name: str) -> np.dtype[Any]:
    """Return the dtype of a name in DTYPES. Raise FramingError for any other, ConfigError if a package is missing."""
    if name not in DTYPES:
        raise FramingError(f"no array here is of dtype {name!r}")
    try:
        return np.dtype(name)
    except TypeError:  # not one of numpy's own
        try:
            import ml_dtypes
        except ImportError as error:
            raise ConfigError(f"arrays of {name} need the package ml_dtypes: pip install ml_dtypes") from error
        made: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return made


@lru_cache(maxsize=64)
def dtype_code(dtype: np.dtype[Any]) -> int:
    """Return the code of a dtype; raise ConfigError for one that does not travel."""
    if dtype.name not in DTYPES:
        raise ConfigError(f"arrays of {dtype} do not travel: cast to one of {', '.join(DTYPES)}")
    return DTYPES.index(dtype.name)


def dtype_of_code(code: int) -> np.dtype[Any]:
    """Return the dtype of a code; raise FramingError if there is none."""
    if not 0 <= code < len(DTYPES):
        raise FramingError(f"no dtype has the code {code}")
    return dtype_of_name(DTYPES[code])


@dataclass(frozen=True, slots=True)
class LeafShape:
    """The dtype and shape of one array."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many values."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{DTYPES[dtype_code(self.dtype)]}[{','.join(map(str, self.shape))}]"


@lru_cache(maxsize=4096)
def read_leaf(text: str) -> LeafShape:
    """Read what `str` of a LeafShape wrote; raise FramingError for anything else, and for sizes nobody has."""
    if (found := _LEAF.fullmatch(text)) is None:
        raise FramingError(f"{text[:80]!r} describes no array")
    shape = tuple(int(part) for part in found[2].split(",")) if found[2] else ()
    leaf = LeafShape(dtype_of_name(found[1]), shape)
    if len(shape) > _MOST_DIMENSIONS or leaf.nbytes > _MOST_BYTES:
        raise FramingError(f"nobody has an array of {text[:80]}")
    return leaf


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a caller's.

    values: numpy, contiguous, in the machine's byte order; the caller's own memory where that is so already.
    rebuild(values): values of any shape as an array of the caller's kind, on the same device.
    """

    values: NDArray[Any]
    rebuild: Callable[[NDArray[Any]], Any]

    @property
    def shape(self) -> LeafShape:
        """Its dtype and shape."""
        return LeafShape(self.values.dtype, self.values.shape)


def is_leaf(value: object) -> bool:
    """Tell whether this is an array or a number, and no tree of them."""
    return isinstance(value, np.ndarray | np.generic | bool | int | float | complex) or _namespace(value) is not None


def _namespace(value: Any) -> Any:
    method = getattr(value, "__array_namespace__", None)
    return None if method is None or isinstance(value, type) else method()


def take_leaf(value: Array) -> Leaf:
    """Return a caller's array or number as a Leaf.

    A number becomes an array of one value (int64, float64...), and its like a number. Raise ConfigError for what is no
    array, or one of a dtype that does not travel.
    """
    rebuild: Callable[[NDArray[Any]], Any]
    if isinstance(value, np.ma.MaskedArray):
        raise ConfigError("a mask does not travel: give x.filled(0), say, and the mask as an array of its own")
    if isinstance(value, np.ndarray):
        rebuild = _itself
    elif isinstance(value, np.generic):
        rebuild = _scalar
    elif isinstance(value, bool | int | float | complex):
        rebuild = _number
    elif (namespace := _namespace(value)) is not None:
        device = value.device

        def rebuild(values: NDArray[Any]) -> Any:
            return namespace.asarray(values, device=device)
    else:
        hint = "; a str travels by send, broadcast and gather, with no array beside it"
        raise ConfigError(
            f"{type(value).__name__} is no array: give a numpy or jax array, a number, or a dict, list or tuple of them"
            f"{hint if isinstance(value, str | bytes) else ''}"
        )
    values = np.asarray(value)
    if rebuild is _number and values.dtype == object:
        raise ConfigError(f"{value!r} does not fit in 64 bits")
    dtype_code(values.dtype)
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    return Leaf(values if values.flags.c_contiguous else np.ascontiguousarray(values), rebuild)


def _itself(values: NDArray[Any]) -> Any:
    return values


def _scalar(values: NDArray[Any]) -> Any:
    return values[()] if values.ndim == 0 else values


def _number(values: NDArray[Any]) -> Any:
    return values.item() if values.ndim == 0 else values


def as_bytes(values: NDArray[Any]) -> memoryview:
    """Return the memory of a contiguous array as bytes, without a copy."""
    return values.reshape(-1).view(np.uint8).data
