"""Reduce, spread and exchange arrays among the processes of a group: all of them make the same calls in the same order.

Rule 1: every call is also there with an i before its name: it returns a Request at once, and several may be on their
way; the order in which they are made is what all ranks share, not the order in which they end.
Rule 2: arrays are numpy or jax, numbers, or trees of them (dict, list, tuple, NamedTuple, None); results are of the
same kind, on the same device, and the caller's own; what a root has given it gets back itself.
Rule 3: what differs between ranks is CollectiveMismatch on all of them; a lost rank is PeerLost on all; both end the
communicator, and `shrink` goes on. A caller's operation that fails is OperationError on all; the communicator goes on.
Rule 4: a result with values of all ranks is given out only if all made the same call. Of `broadcast` and `scatter` a
rank has the root's values once its own call is the same as the root's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zmqtrain.collectives import exchanges
from zmqtrain.collectives.allreduce import ALIASES, ALLREDUCE
from zmqtrain.collectives.arrays import HUB_DTYPES, Leaf, LeafShape, as_bytes
from zmqtrain.collectives.calls import Phases
from zmqtrain.collectives.choice import LARGEST_CHUNK_BYTES, choose_algorithm, choose_chunk_bytes
from zmqtrain.collectives.coded import check_coder, coded_allreduce
from zmqtrain.collectives.messenger import Messenger
from zmqtrain.collectives.reductions import OPERATIONS, Function, Reduction, find_reduction
from zmqtrain.collectives.requests import Request
from zmqtrain.collectives.rooted import BROADCAST, REDUCE
from zmqtrain.collectives.shares import ALLGATHER, REDUCE_SCATTER, share_bounds
from zmqtrain.collectives.steps import Steps
from zmqtrain.collectives.trees import Tree, is_value, read_tree, take_tree
from zmqtrain.collectives.wire import MAX_TEXT_BYTES
from zmqtrain.core.errors import CollectiveMismatch, ConfigError

Op = str | Function | Reduction
"""How two arrays become one: "sum", "mean", "max", "min", "prod", of bools and whole numbers "band", "bor", "bxor", in
lower or upper case; or an associative and commutative function. Python's and numpy's own (`sum`, `max`, `math.prod`,
`np.sum`, `np.bitwise_or`) are the named operations."""

_BYTES = np.dtype(np.uint8)
_COUNTS = np.dtype(np.int64)
_Part = tuple[int, NDArray[np.uint8]]  # how many items of a rank, and their bytes
_TOLD_BYTES = 512  # of what a root tells about its arrays, in the first message


class Communicator(Messenger):
    """A process's place among the others of its group.

    port: its way to them; the communicator closes it.  timeout_seconds: how long each wait waits where it is not told.
    A call of the blocking kind that runs out of time raises CollectiveTimeout, and goes on without its caller: the
    others can still end theirs.
    """

    # ------------------------------------------------------------------ all reduce

    def allreduce(
        self,
        x: Any,
        op: Op = "sum",
        *,
        algorithm: str = "auto",
        codec: Any = None,
        into: NDArray[Any] | None = None,
        timeout_seconds: float | None = None,
    ) -> Any:
        """Reduce the arrays of all ranks, and give all of them the result, bit-identical.

        algorithm: "naive", "ring", "tree", "halving" ("recursive_halving"), "parallel", "sequential", "hub" (by the
        broker); "auto" chooses by size. The order in which values are reduced is the algorithm's (its docstring).
        codec: what goes over the network is encoded (float32, "sum" or "mean" only; by the owners of shares, whatever
        the algorithm).  into: where the result of one numpy array is put, x itself for in place: saves a copy of large
        arrays.
        Raises ConfigError for what cannot be reduced so, OperationError where a function cannot be or has failed,
        CollectiveMismatch, PeerLost, CollectiveTimeout.
        """
        return self.iallreduce(x, op, algorithm=algorithm, codec=codec, into=into).wait(timeout_seconds)

    def iallreduce(
        self,
        x: Any,
        op: Op = "sum",
        *,
        algorithm: str = "auto",
        codec: Any = None,
        into: NDArray[Any] | None = None,
        timeout_seconds: float | None = None,
    ) -> Request:
        """Begin an `allreduce`; the request's result is its result. x may be written over at once, `into` not.

        timeout_seconds: how long the request's `wait` waits where it is not told.
        """
        tree = take_tree(x)
        reductions = [_reduction(op, dtype) for dtype in tree.sizes()]
        operation = reductions[0].name if reductions else "sum"
        if codec is not None:
            coder = check_coder(self._read_codec(codec), operation, tree)
            text = f"allreduce({tree.text}, op={operation}, codec={coder.name})"
        else:
            coder = None
            if algorithm == "auto":
                algorithm = choose_algorithm(self.size, tree.nbytes)
            algorithm = ALIASES.get(algorithm, algorithm)
            self._check_algorithm(algorithm, operation, tree)
            text = f"allreduce({tree.text}, op={operation}, algorithm={algorithm})"
        flats = tree.pack() if into is None else [_put(tree, into)]

        def phases() -> Phases:
            for flat, reduction in zip(flats, reductions, strict=True):
                if coder is not None:
                    yield coded_allreduce(self.rank, self.size, flat, coder, operation == "mean"), _BYTES
                else:
                    yield (
                        ALLREDUCE[algorithm](self.rank, self.size, flat, reduction, self._chunk(flat, algorithm)),
                        flat.dtype,
                    )
            yield from self._meet(tree.nbytes == 0)

        return self._call(
            text,
            phases(),
            lambda: tree.unpack(flats) if into is None else into,
            operation=operation,
            timeout_seconds=timeout_seconds,
        )

    def reduce(self, x: Any, op: Op = "sum", root: int = 0, *, timeout_seconds: float | None = None) -> Any:
        """Reduce the arrays of all ranks; the root gets the result, the others None."""
        return self.ireduce(x, op, root).wait(timeout_seconds)

    def ireduce(self, x: Any, op: Op = "sum", root: int = 0) -> Request:
        """Begin a `reduce`."""
        self._check_rank("root", root)
        tree = take_tree(x)
        reductions = [_reduction(op, dtype) for dtype in tree.sizes()]
        operation = reductions[0].name if reductions else "sum"
        flats, algorithm = tree.pack(), self._rooted(tree.nbytes)

        def phases() -> Phases:
            for flat, reduction in zip(flats, reductions, strict=True):
                chunk = self._chunk(flat, algorithm)
                yield REDUCE[algorithm](self.rank, self.size, flat, reduction, root, chunk), flat.dtype
            yield from self._meet(tree.nbytes == 0)

        text = f"reduce({tree.text}, op={operation}, root={root})"
        return self._call(text, phases(), lambda: tree.unpack(flats) if self.rank == root else None, confirm=True)

    def reduce_scatter(self, x: Any, op: Op = "sum", *, timeout_seconds: float | None = None) -> Any:
        """Reduce the arrays of all ranks, and give each rank its share of the result.

        x: one array. The share of rank r is flat: values n r // size to n (r + 1) // size of the flattened result, n in
        all; in the order of the ring (`ring_reduce_scatter`).
        """
        return self.ireduce_scatter(x, op).wait(timeout_seconds)

    def ireduce_scatter(self, x: Any, op: Op = "sum") -> Request:
        """Begin a `reduce_scatter`."""
        tree = take_tree(x)
        if not tree.is_leaf:
            raise ConfigError("reduce_scatter takes one array: join the leaves of a tree first, or allreduce it")
        reduction = _reduction(op, tree.shapes[0].dtype)
        (flat,) = tree.pack()
        bounds = share_bounds(flat.size, self.size)
        own = slice(bounds[self.rank], bounds[self.rank + 1])
        steps = REDUCE_SCATTER["ring"](self.rank, self.size, flat, reduction, self._chunk(flat, "ring"))
        text = f"reduce_scatter({tree.text}, op={reduction.name})"
        phases = chain([(steps, flat.dtype)], self._meet(flat.size < self.size))
        return self._call(text, phases, lambda: tree.leaves[0].rebuild(flat[own].copy()))

    # ------------------------------------------------------------------ spread and gather

    def allgather(self, x: Any, *, timeout_seconds: float | None = None) -> list[Any]:
        """Give all ranks a list of all ranks' arrays, by rank; all are of one shape and dtype."""
        gathered: list[Any] = self.iallgather(x).wait(timeout_seconds)
        return gathered

    def iallgather(self, x: Any) -> Request:
        """Begin an `allgather`."""
        tree = take_tree(x)
        joined, nbytes = np.empty(self.size * tree.nbytes, _BYTES), tree.nbytes
        joined[self.rank * nbytes : (self.rank + 1) * nbytes] = np.frombuffer(tree.join(), _BYTES)
        algorithm = "parallel" if nbytes <= 64 << 10 else "ring"
        bounds = [nbytes * rank for rank in range(self.size + 1)]
        steps = ALLGATHER[algorithm](self.rank, self.size, joined, self._chunk(joined, algorithm), bounds)
        return self._call(
            f"allgather({tree.text})",
            chain([(steps, _BYTES)], self._meet(nbytes == 0)),
            lambda: _unpack_all(tree, joined, self.size),
        )

    def broadcast(self, x: Any = None, root: int = 0, *, timeout_seconds: float | None = None) -> Any:
        """Give all ranks the root's array, tree of arrays, or Python value (see `isend`).

        x: elsewhere than on the root None, or an array of the same shape and dtype, whose kind (jax, its device) the
        result then has; with None it is numpy. If the root gives a Python value: None, or any Python value, which is
        not looked at. The root gets x itself.
        """
        return self.ibroadcast(x, root).wait(timeout_seconds)

    def ibroadcast(self, x: Any = None, root: int = 0) -> Request:
        """Begin a `broadcast`. On the root x is left alone until it is over."""
        self._check_rank("root", root)
        is_root = self.rank == root
        own = self._take(x) if x is not None or is_root else None
        text, got = f"broadcast(root={root})", list[tuple[Tree, NDArray[np.uint8]]]()

        def phases() -> Phases:
            told: list[str] = []
            yield from self._tell(own.text if is_root and own else "", root, told)
            tree = read_tree(told[0]) if own is None or (own.is_value and not is_root) else own
            self._check_told(text, tree if own is None else own, told[0], root)
            joined = np.frombuffer(tree.join(), _BYTES) if is_root else np.empty(tree.nbytes, _BYTES)
            got.append((tree, joined))
            algorithm = self._rooted(tree.nbytes)
            yield BROADCAST[algorithm](self.rank, self.size, joined, root, self._chunk(joined, algorithm)), _BYTES

        def make() -> Any:
            return x if is_root else self._rebuild(*got[0])

        return self._call(text, phases(), make, confirm=True)

    def scatter(self, xs: Sequence[Any] | None = None, root: int = 0, *, timeout_seconds: float | None = None) -> Any:
        """Give each rank its own of the root's arrays.

        xs: on the root one for each rank, all of one shape and dtype; not looked at elsewhere. The root gets its own
        itself.
        """
        return self.iscatter(xs, root).wait(timeout_seconds)

    def iscatter(self, xs: Sequence[Any] | None = None, root: int = 0) -> Request:
        """Begin a `scatter`. On the root xs are left alone until it is over."""
        self._check_rank("root", root)
        is_root = self.rank == root
        trees = self._one_for_each("scatter", xs) if is_root else []
        text, got = f"scatter(root={root})", list[tuple[Tree, NDArray[np.uint8]]]()

        def phases() -> Phases:
            told: list[str] = []
            yield from self._tell(trees[0].text if is_root else "", root, told)
            tree = trees[root] if is_root else read_tree(told[0])
            parts = [np.frombuffer(each.join(), _BYTES) for each in trees]
            joined = parts[root] if is_root else np.empty(tree.nbytes, _BYTES)
            got.append((tree, joined))
            chunk = choose_chunk_bytes("", self.size, tree.nbytes)
            yield exchanges.scatter(self.rank, self.size, parts, joined, root, chunk), _BYTES

        def make() -> Any:
            tree, joined = got[0]
            return xs[root] if is_root and xs is not None else tree.unpack(tree.split(joined))

        return self._call(text, phases(), make, confirm=True)

    def gather(self, x: Any, root: int = 0, *, timeout_seconds: float | None = None) -> list[Any] | None:
        """Give the root a list of all ranks' arrays or Python values (see `isend`), by rank, and the others None.

        Arrays are of one shape and dtype on all ranks (`gatherv`: of different lengths). Python values may differ as
        they like; arrays on one rank and a Python value on another are CollectiveMismatch on all.
        """
        gathered: list[Any] | None = self.igather(x, root).wait(timeout_seconds)
        return gathered

    def igather(self, x: Any, root: int = 0) -> Request:
        """Begin a `gather`. x is left alone until it is over."""
        self._check_rank("root", root)
        is_root = self.rank == root
        if is_value(x):
            return self._igather_values(x, root)
        tree = take_tree(x)
        part, nbytes = np.frombuffer(tree.join(), _BYTES), tree.nbytes
        joined = np.empty(self.size * nbytes if is_root else 0, _BYTES)
        parts = [joined[rank * nbytes : (rank + 1) * nbytes] for rank in range(self.size)] if is_root else []
        if is_root:
            parts[root][:] = part
        steps = exchanges.gather(self.rank, self.size, part, parts, root, self._chunk(part))
        return self._call(
            f"gather({tree.text}, root={root})",
            chain([(steps, _BYTES)], self._meet(nbytes == 0)),
            lambda: _unpack_all(tree, joined, self.size) if is_root else None,
            confirm=True,
        )

    def _igather_values(self, x: Any, root: int) -> Request:
        packed, parts = np.frombuffer(self._pack_value(x), _BYTES), list[_Part]()
        phases = self._gather_uneven((packed.size, packed), 1, root, parts)
        make = (lambda: [self._unpack_value(part) for _, part in parts]) if self.rank == root else _nothing
        return self._call(f"gather(value, root={root})", phases, make, confirm=True)

    def gatherv(self, x: Any, root: int = 0, *, timeout_seconds: float | None = None) -> list[Any] | None:
        """Give the root a list of all ranks' arrays, by rank, and the others None.

        The arrays may differ in length along their first axis; dtype and all other axes are the same on all ranks.
        """
        gathered: list[Any] | None = self.igatherv(x, root).wait(timeout_seconds)
        return gathered

    def igatherv(self, x: Any, root: int = 0) -> Request:
        """Begin a `gatherv`. x is left alone until it is over."""
        self._check_rank("root", root)
        rows, parts = _Rows.take("gatherv", x), list[_Part]()
        phases = self._gather_uneven((rows.count, rows.joined), rows.nbytes, root, parts)
        make = (lambda: [rows.rebuild(part) for part in parts]) if self.rank == root else _nothing
        return self._call(f"gatherv({rows.text}, root={root})", phases, make, confirm=True)

    def scatterv(self, xs: Sequence[Any] | None = None, root: int = 0, *, timeout_seconds: float | None = None) -> Any:
        """Give each rank its own of the root's arrays, which may differ in length along their first axis.

        xs: on the root one for each rank, of one dtype and equal in all other axes; not looked at elsewhere. The root
        gets its own itself, the others a numpy array.
        """
        return self.iscatterv(xs, root).wait(timeout_seconds)

    def iscatterv(self, xs: Sequence[Any] | None = None, root: int = 0) -> Request:
        """Begin a `scatterv`. On the root xs are left alone until it is over."""
        self._check_rank("root", root)
        is_root = self.rank == root
        each = self._rows_for_each("scatterv", xs) if is_root else []
        got = list[tuple[Tree, NDArray[np.uint8]]]()

        def phases() -> Phases:
            told: list[str] = []
            yield from self._tell(
                " ".join([each[0].text, *(str(one.count) for one in each)]) if is_root else "", root, told
            )
            kind, *counts = told[0].split(" ")
            if len(counts) != self.size:
                raise CollectiveMismatch(f"{self._group.name(root)} scatters {len(counts)} arrays to {self.size} ranks")
            tree = read_tree(kind.replace("*", counts[self.rank], 1))
            joined = each[root].joined if is_root else np.empty(tree.nbytes, _BYTES)
            got.append((tree, joined))
            parts = [one.joined for one in each]
            yield exchanges.scatter(self.rank, self.size, parts, joined, root, LARGEST_CHUNK_BYTES), _BYTES

        def make() -> Any:
            return xs[root] if is_root and xs is not None else self._rebuild(*got[0])

        return self._call(f"scatterv(root={root})", phases(), make, confirm=True)

    def all_to_all(self, xs: Sequence[Any], *, timeout_seconds: float | None = None) -> list[Any]:
        """Give each rank r this rank's xs[r]; return what all ranks have given this one, by rank.

        xs: one for each rank, all of one shape and dtype, on all ranks.
        """
        exchanged: list[Any] = self.iall_to_all(xs).wait(timeout_seconds)
        return exchanged

    def iall_to_all(self, xs: Sequence[Any]) -> Request:
        """Begin an `all_to_all`. xs are left alone until it is over."""
        trees = self._one_for_each("all_to_all", xs)
        tree, nbytes = trees[self.rank], trees[self.rank].nbytes
        joined = np.empty(self.size * nbytes, _BYTES)
        into = [joined[rank * nbytes : (rank + 1) * nbytes] for rank in range(self.size)]
        parts = [np.frombuffer(each.join(), _BYTES) for each in trees]
        into[self.rank][:] = parts[self.rank]
        steps = exchanges.all_to_all(self.rank, self.size, parts, into, self._chunk(joined))
        return self._call(
            f"all_to_all({tree.text})",
            chain([(steps, _BYTES)], self._meet(nbytes == 0)),
            lambda: _unpack_all(tree, joined, self.size),
        )

    def all_to_allv(self, xs: Sequence[Any], *, timeout_seconds: float | None = None) -> list[Any]:
        """Give each rank r this rank's xs[r]; return what all ranks have given this one, by rank.

        xs: one for each rank; they may differ in length along their first axis. dtype and all other axes are the same
        for all, on all ranks.
        """
        exchanged: list[Any] = self.iall_to_allv(xs).wait(timeout_seconds)
        return exchanged

    def iall_to_allv(self, xs: Sequence[Any]) -> Request:
        """Begin an `all_to_allv`. xs are left alone until it is over."""
        each = self._rows_for_each("all_to_allv", xs)
        own, parts = each[self.rank], list[_Part]()

        def phases() -> Phases:
            sent, came = (np.array([one.count for one in each], _COUNTS) for _ in range(2))
            cut = [slice(rank, rank + 1) for rank in range(self.size)]
            yield exchanges.all_to_all(self.rank, self.size, [sent[c] for c in cut], [came[c] for c in cut], 1), _COUNTS
            parts.extend(self._room(rank, int(came[rank]), own.nbytes) for rank in range(self.size))
            into = [joined for _, joined in parts]
            into[self.rank][:] = own.joined
            joined = [one.joined for one in each]
            yield exchanges.all_to_all(self.rank, self.size, joined, into, LARGEST_CHUNK_BYTES), _BYTES

        return self._call(f"all_to_allv({own.text})", phases(), lambda: [own.rebuild(part) for part in parts])

    def barrier(self, *, timeout_seconds: float | None = None) -> None:
        """Return once all ranks have called this."""
        self.ibarrier().wait(timeout_seconds)

    def ibarrier(self) -> Request:
        """Begin a `barrier`; the request is over once all ranks have begun it."""
        return self._call("barrier()", iter([(exchanges.barrier(self.rank, self.size), _BYTES)]), lambda: None)

    # ------------------------------------------------------------------ how

    def _call(
        self,
        text: str,
        phases: Phases,
        make: Callable[[], Any],
        *,
        confirm: bool = False,
        operation: str = "",
        timeout_seconds: float | None = None,
    ) -> Request:
        request, group = self._request(text, make, timeout_seconds), self._group
        return self._begin(request, lambda: group.begin(request, text, phases, confirm, operation))

    def _read_codec(self, codec: Any) -> Any:
        """Return the codec that this stands for; what knows codecs by their names reads a spec here."""
        return codec

    def _chunk(self, flat: NDArray[Any], algorithm: str = "") -> int:
        """Return how many values of an array go in one message."""
        return max(1, choose_chunk_bytes(algorithm, self.size, flat.nbytes) // flat.itemsize)

    def _rooted(self, nbytes: int) -> str:
        return "tree" if self.size <= 2 or nbytes <= 256 << 10 else "chain"

    def _gather_uneven(self, own: _Part, item_bytes: int, root: int, parts: list[_Part]) -> Phases:
        """Bring parts of any numbers of items to the root, where they are put in `parts`: first the numbers."""
        count = np.array([own[0]], _COUNTS)
        counts = np.repeat(count, self.size)
        cut = [counts[rank : rank + 1] for rank in range(self.size)]
        yield exchanges.gather(self.rank, self.size, count, cut, root, 1), _COUNTS
        if self.rank == root:
            parts.extend(self._room(rank, int(counts[rank]), item_bytes) for rank in range(self.size))
            parts[root][1][:] = own[1]
        into = [joined for _, joined in parts]
        yield exchanges.gather(self.rank, self.size, own[1], into, root, LARGEST_CHUNK_BYTES), _BYTES

    def _room(self, source: int, count: int, item_bytes: int) -> _Part:
        """Return room for so many items of a rank. Raise CollectiveMismatch for a number that cannot be."""
        try:
            if count >= 0:
                return count, np.empty(count * item_bytes, _BYTES)
        except (MemoryError, ValueError):  # numpy says ValueError beyond the address space
            pass
        raise CollectiveMismatch(
            f"{self._group.name(source)} sends {count} items of {item_bytes} bytes, for which "
            f"{self._group.name(self.rank)} has no memory"
        )

    def _meet(self, needed: bool) -> Phases:
        """A barrier, where needed: a result that holds values of all ranks shows that their calls were the same, and
        one without values needs messages that do."""
        if needed:
            yield exchanges.barrier(self.rank, self.size), _BYTES

    def _check_algorithm(self, algorithm: str, operation: str, tree: Tree) -> None:
        if algorithm not in ALLREDUCE:
            raise ConfigError(f"algorithm={algorithm!r}: choose one of auto, {', '.join([*ALLREDUCE, *ALIASES])}")
        if algorithm != "hub":
            return
        if not hasattr(self._endpoint.port, "reduce") or self._shrunk:
            raise ConfigError(
                'algorithm="hub": no hub reduces for this group (nor for one that shrink gave: it holds parts of calls '
                "that never ended)"
            )
        if operation not in OPERATIONS or any(shape.dtype.name not in HUB_DTYPES for shape in tree.shapes):
            raise ConfigError(
                f"the hub reduces {', '.join(OPERATIONS)}, of arrays of {', '.join(HUB_DTYPES)}, not {operation} of "
                f"{tree.text[:200]}: take another algorithm"
            )

    def _one_for_each(self, name: str, xs: Sequence[Any] | None) -> list[Tree]:
        if xs is None or len(xs) != self.size:
            count = "none" if xs is None else len(xs)
            raise ConfigError(f"{name} takes one array for each of {self.size} ranks, got {count}")
        trees = [take_tree(x) for x in xs]
        for rank, tree in enumerate(trees):
            if tree.text != trees[0].text:
                raise ConfigError(
                    f"{name} takes arrays of one shape and dtype: that for rank 0 is {trees[0].text[:200]}, that for "
                    f"rank {rank} {tree.text[:200]}"
                )
        return trees

    def _rows_for_each(self, name: str, xs: Sequence[Any] | None) -> list[_Rows]:
        if xs is None or len(xs) != self.size:
            count = "none" if xs is None else len(xs)
            raise ConfigError(f"{name} takes one array for each of {self.size} ranks, got {count}")
        each = [_Rows.take(name, x) for x in xs]
        for rank, rows in enumerate(each):
            if rows.text != each[0].text:
                raise ConfigError(
                    f"{name} takes arrays of one dtype that differ along the first axis only: that for rank 0 is "
                    f"{each[0].text}, that for rank {rank} {rows.text}"
                )
        return each

    def _tell(self, text: str, root: int, told: list[str]) -> Iterator[tuple[Steps, np.dtype[Any]]]:
        """Broadcast a text of the root's, which is put in `told`."""
        spoken = text.encode()
        first = np.zeros(_TOLD_BYTES, _BYTES)
        if self.rank == root:
            first[:8] = np.frombuffer(len(spoken).to_bytes(8, "little"), _BYTES)
            begin = np.frombuffer(spoken[: _TOLD_BYTES - 8], _BYTES)
            first[8 : 8 + begin.size] = begin
        yield BROADCAST["tree"](self.rank, self.size, first, root, _TOLD_BYTES), _BYTES
        length = int.from_bytes(first[:8].tobytes(), "little")
        if length > MAX_TEXT_BYTES:
            raise CollectiveMismatch(f"{self._group.name(root)} describes its arrays in {length} bytes")
        if length > _TOLD_BYTES - 8:
            rest = np.frombuffer(spoken, _BYTES) if self.rank == root else np.empty(length, _BYTES)
            yield BROADCAST["tree"](self.rank, self.size, rest, root, 1 << 20), _BYTES
            told.append(rest.tobytes().decode())
        else:
            told.append(first[8 : 8 + length].tobytes().decode())

    def _check_told(self, text: str, tree: Tree, told: str, root: int) -> None:
        if tree.text != told and not (tree.is_value and read_tree(told).is_value):
            raise CollectiveMismatch(
                f"{text}: {self._group.name(root)} has {told[:200]}, and {self._group.name(self.rank)} expects "
                f"{tree.text[:200]}"
            )


@dataclass(frozen=True, slots=True)
class _Rows:
    """An array whose first axis may have another length on another rank.

    leaf: the array.  text: what it has in common with the others: float32[*,784].  nbytes: of one row.
    """

    leaf: Leaf
    text: str
    nbytes: int

    @staticmethod
    def take(name: str, x: Any) -> _Rows:
        """Take a caller's array. Raise ConfigError for what has no first axis."""
        tree = take_tree(x)
        if not tree.is_leaf or not tree.shapes[0].shape:
            raise ConfigError(f"{name} takes an array with at least one axis, got {tree.text[:200]}")
        shape = tree.shapes[0]
        row = LeafShape(shape.dtype, shape.shape[1:])
        return _Rows(tree.leaves[0], f"{shape.dtype.name}[{','.join(['*', *map(str, row.shape)])}]", row.nbytes)

    @property
    def count(self) -> int:
        """How many rows this rank has."""
        return int(self.leaf.values.shape[0])

    @property
    def joined(self) -> NDArray[np.uint8]:
        """The bytes of all rows."""
        return np.frombuffer(as_bytes(self.leaf.values), _BYTES)

    def rebuild(self, part: _Part) -> Any:
        """Return the rows of any rank as an array of the caller's kind."""
        count, joined = part
        return self.leaf.rebuild(joined.view(self.leaf.values.dtype).reshape(count, *self.leaf.values.shape[1:]))


def _nothing() -> None:
    pass


def _reduction(op: Op, dtype: np.dtype[Any]) -> Reduction:
    return _reduction_by_name(op, dtype) if isinstance(op, str) else find_reduction(op, dtype)


@lru_cache(maxsize=64)
def _reduction_by_name(op: str, dtype: np.dtype[Any]) -> Reduction:
    return find_reduction(op, dtype)


def _put(tree: Tree, into: NDArray[Any]) -> NDArray[Any]:
    """Put a single array where its result will be; return that, flat."""
    usable = isinstance(into, np.ndarray) and into.flags.c_contiguous and into.flags.writeable
    if not tree.is_leaf or not usable or (into.dtype, into.shape) != (tree.shapes[0].dtype, tree.shapes[0].shape):
        raise ConfigError(f"into is a contiguous numpy array like x, which is {tree.text[:200]}")
    flat = into.reshape(-1)
    values = tree.leaves[0].values.reshape(-1)
    if flat.ctypes.data != values.ctypes.data:
        np.copyto(flat, values)
    return flat


def _unpack_all(tree: Tree, joined: NDArray[np.uint8], size: int) -> list[Any]:
    """Return one tree for each rank of the bytes that were gathered."""
    nbytes = tree.nbytes
    return [tree.unpack(tree.split(joined[rank * nbytes : (rank + 1) * nbytes])) for rank in range(size)]
