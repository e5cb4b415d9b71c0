"""Arrays, numbers and trees of them as flat vectors and texts, and back to the kind that the caller gave."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.collectives.wire import MAX_TEXT_BYTES
from zmqtrain.core.errors import ConfigError, FramingError
from zmqtrain.core.types import Array, children, like
from zmqtrain.protocol.framing import pack_value, unpack_value

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
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
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
        return LeafShape(self.values.dtype, self.values.shape)


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


_PARSES = 100
"""A text is parsed so often at most."""
_DEEPEST = 64
_LONGEST_TEXT = MAX_TEXT_BYTES // 2
"""What describes a call with these arrays is longer, and must fit in a message too."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree of arrays, taken apart.

    leaves: in order; where the tree was only described (`read_tree`), their values are not there yet (empty).
    shapes: their dtypes and shapes.  text: what describes it to other ranks.
    structure: the tree with None for None and an int for each leaf: its place in `leaves`.
    is_value: it stands for a Python value: a list of one array, the packed bytes.
    """

    leaves: tuple[Leaf, ...]
    shapes: tuple[LeafShape, ...]
    text: str
    structure: Any
    is_value: bool = False

    @property
    def is_leaf(self) -> bool:
        """True if it is one array, and no container."""
        return isinstance(self.structure, int)

    @property
    def nbytes(self) -> int:
        return sum(shape.nbytes for shape in self.shapes)

    def sizes(self) -> dict[np.dtype[Any], int]:
        """Return the dtypes of the leaves, in the order in which they are met, and how many values are of each."""
        sizes: dict[np.dtype[Any], int] = {}
        for shape in self.shapes:
            sizes[shape.dtype] = sizes.get(shape.dtype, 0) + shape.size
        return sizes

    def empty(self) -> list[NDArray[Any]]:
        """Return one flat array for each dtype, with room for the leaves of that dtype; not filled."""
        return [np.empty(size, dtype) for dtype, size in self.sizes().items()]

    def pack(self) -> list[NDArray[Any]]:
        """Return the values: one flat array of the tree's own for each dtype."""
        packed = self.empty()
        for part, leaf in zip(self._parts(packed), self.leaves, strict=True):
            np.copyto(part, leaf.values.reshape(-1))
        return packed

    def flat(self) -> list[NDArray[Any]]:
        """Return the values as `pack` does, to be read only: of a single array, the caller's own memory."""
        return [self.leaves[0].values.reshape(-1)] if self.is_leaf else self.pack()

    def unpack(self, packed: Sequence[NDArray[Any]]) -> Any:
        """Return a tree like this one with these values; its arrays lie in `packed` where their kind allows."""
        made = [
            leaf.rebuild(part.reshape(shape.shape))
            for leaf, part, shape in zip(self.leaves, self._parts(packed), self.shapes, strict=True)
        ]
        return _replace_leaves(self.structure, made.__getitem__)

    def _parts(self, packed: Sequence[NDArray[Any]]) -> Iterator[NDArray[Any]]:
        at = {dtype: (flat, 0) for dtype, flat in zip(self.sizes(), packed, strict=True)}
        for shape in self.shapes:
            flat, start = at[shape.dtype]
            at[shape.dtype] = flat, start + shape.size
            yield flat[start : start + shape.size]

    def join(self) -> memoryview:
        """Return all values as bytes, dtype by dtype; of a single array, its own memory."""
        packed = self.flat()
        if len(packed) == 1:
            return as_bytes(packed[0])
        return memoryview(b"".join(as_bytes(flat) for flat in packed))

    def split(self, joined: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """Return what `unpack` takes of the bytes that `join` made, in the same memory."""
        packed, start = [], 0
        for dtype, size in self.sizes().items():
            end = start + size * dtype.itemsize
            packed.append(joined[start:end].view(dtype))
            start = end
        return packed

    def rebuild(self, joined: NDArray[np.uint8]) -> Any:
        """Return the tree, or the Python value, of the bytes that `join` made. Raise FramingError for no value."""
        made = self.unpack(self.split(joined))
        return unpack_value(made[0]) if self.is_value else made


def take(x: Any) -> Tree:
    """Take a caller's tree of arrays apart, or pack a Python value. Raise ConfigError for what is neither."""
    if not is_value(x):
        return take_tree(x)
    values = np.frombuffer(pack_value(x), np.uint8)
    return _tree_of_value(values, LeafShape(values.dtype, values.shape), f"value[{values.size}]")


def take_tree(tree: Any) -> Tree:
    """Take a caller's tree apart. Raise ConfigError for what is neither an array nor a container of them."""
    leaves: list[Leaf] = []
    structure, described = _take(tree, leaves, 0)
    text = described if isinstance(structure, int) else repr(described)
    if len(text) > _LONGEST_TEXT // 4 and (length := len(text.encode())) > _LONGEST_TEXT:
        raise ConfigError(
            f"what describes these {len(leaves)} arrays is {length} bytes long, more than {_LONGEST_TEXT}: join some"
        )
    return Tree(tuple(leaves), tuple(leaf.shape for leaf in leaves), text, structure)


def is_value(x: Any, depth: int = 0) -> bool:
    """Tell whether this is a Python value without arrays: None, bool, int, float, str, bytes, list, tuple, dict.

    Raise ConfigError for one that is too deep.
    """
    if depth > _DEEPEST:
        raise ConfigError(f"a value that is more than {_DEEPEST} deep does not travel")
    inside = children(x)
    if inside is None:
        plain = x is None or isinstance(x, bool | int | float | str | bytes)
        return plain and not isinstance(x, np.generic)  # which is a float, or a str, of Python's at times
    return all(is_value(child, depth + 1) for _, child in inside)


def _tree_of_value(values: NDArray[np.uint8], shape: LeafShape, text: str) -> Tree:
    return Tree((Leaf(values, _itself),), (shape,), text, [0], is_value=True)


def _take(node: Any, leaves: list[Leaf], depth: int) -> tuple[Any, Any]:
    """Return the structure and the description of a node; add its leaves to `leaves`."""
    if depth > _DEEPEST:
        raise ConfigError(f"a tree of arrays that is more than {_DEEPEST} deep")
    if node is None:
        return None, None
    inside = children(node)
    if inside is None:
        leaves.append(take_leaf(node))
        return len(leaves) - 1, str(leaves[-1].shape)
    ordered = _sorted(inside) if isinstance(node, dict) else inside
    taken = {name: _take(child, leaves, depth + 1) for name, child in ordered}
    structure = like(node, [taken[name][0] for name, _ in inside])
    if isinstance(node, dict):
        return structure, {name: described for name, (_, described) in taken.items()}
    told = [described for _, described in taken.values()]
    return structure, told if isinstance(node, list) else tuple(told)


def _sorted(inside: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return a dict's children by key, whatever the order in which it was filled."""
    if not all(isinstance(key, str) for key, _ in inside) and not all(isinstance(key, int) for key, _ in inside):
        raise ConfigError("the keys of a dict of arrays are all strings, or all whole numbers")
    return sorted(inside, key=itemgetter(0))


def _replace_leaves(node: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return a tree like this one with leaf(x) for each leaf x; None stays None."""
    inside = children(node)
    if node is None or inside is None:
        return None if node is None else leaf(node)
    return like(node, [_replace_leaves(child, leaf) for _, child in inside])


_NOTHING = np.empty(0, np.uint8)
_VALUE = re.compile(r"value(\[\d{1,18}\])")


def read_tree(text: str) -> Tree:
    """Read what describes another rank's tree: its leaves will be numpy arrays and scalars, its NamedTuples tuples.

    Raise FramingError for what describes no tree.
    """
    if (found := _VALUE.fullmatch(text)) is not None:
        return _tree_of_value(_NOTHING, read_leaf(f"uint8{found[1]}"), text)
    shapes: list[LeafShape] = []

    def read(node: Any) -> int:
        if not isinstance(node, str):
            raise FramingError(f"a tree of arrays with {type(node).__name__} in it")
        shapes.append(read_leaf(node))
        return len(shapes) - 1

    structure = _replace_leaves(_literal(text) if text[:1] in "[({N" else text, read)
    leaf = Leaf(_NOTHING, _scalar)
    return Tree((leaf,) * len(shapes), tuple(shapes), text, structure)


def _evaluated(text: str) -> Any:
    """As ast.literal_eval. That may fail where another thread parses at the same time (SystemError: "AST constructor
    recursion depth mismatch", CPython issue 106905): then it is done again."""
    for _ in range(_PARSES - 1):
        with contextlib.suppress(SystemError):
            return ast.literal_eval(text)
    return ast.literal_eval(text)


def _literal(text: str) -> Any:
    depth = deepest = 0
    for character in text:
        depth += (character in "[({") - (character in "])}")
        deepest = max(deepest, depth)
    try:
        if deepest > 2 * _DEEPEST:
            raise ValueError("too deep")
        return _evaluated(text)
    except (ValueError, TypeError, OverflowError, SyntaxError, MemoryError, RecursionError) as error:
        raise FramingError(f"{text[:80]!r} describes no tree of arrays") from error
