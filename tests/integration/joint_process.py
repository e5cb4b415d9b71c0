"""One process of a joint node, as test_joint.py starts it: `python joint_process.py FACTS`, the facts as JSON.

It takes part in one run after the other, with a random walk whose bits do not depend on where the parameters lie, and
leaves what each of its devices holds of the anchor and of the parameters in a file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zmqtrain as zt

SHAPES = {"w": (128, 96), "v": (40, 8), "b": (8,), "s": ()}
DTYPES = {"w": np.float32, "v": jax.numpy.bfloat16, "b": np.float32, "s": np.float32}
SPECS = {"w": P("host", "card"), "v": P(None, "card"), "b": P(), "s": P()}
"""w: a part on each device; v: each host has all of it, in parts; b, s: each device has all."""


def first_values() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(DTYPES[name]) for name, shape in SHAPES.items()}


def batches(unit: int) -> Iterator[dict[str, np.ndarray]]:
    random = np.random.default_rng(unit)
    for _ in range(4):
        yield {name: (0.01 * random.normal(size=shape)).astype(DTYPES[name]) for name, shape in SHAPES.items()}


@jax.jit
def walk(params: Any, batch: Any) -> Any:
    """A step of which every device computes the very bits that one alone would: no sum goes over devices."""
    return jax.tree.map(jax.numpy.add, params, batch)


def shards_of(params: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Return the bytes of what each device here holds, by "leaf[from:to,...]"."""
    held = {}
    for name, leaf in params.items():
        for shard in leaf.addressable_shards:
            where = ",".join(
                f"{a}:{b}" for a, b, _ in (i.indices(n) for i, n in zip(shard.index, leaf.shape, strict=True))
            )
            held[f"{name}[{where}]#{shard.device.id}"] = np.frombuffer(np.asarray(shard.data).tobytes(), np.uint8)
    return held


def take_part(address: str, anchor: str, homes: dict[str, NamedSharding]) -> dict[str, np.ndarray]:
    params = {
        name: jax.make_array_from_callback(whole.shape, homes[name], lambda index, whole=whole: whole[index])
        for name, whole in first_values().items()
    }

    def parts(unit: int) -> Iterator[dict[str, jax.Array]]:
        for batch in batches(unit):
            yield {
                name: jax.make_array_from_callback(whole.shape, homes[name], lambda index, whole=whole: whole[index])
                for name, whole in batch.items()
            }

    with zt.connect_as_one(address, "pc-2") as node:
        sync = zt.DelayedSync(node, params, anchor=anchor)
        params = sync.start
        for batch in node.batches(parts):
            params = sync.step(walk(params, batch))
            print(f"step {sync.steps}", flush=True)
        params = sync.finish(params)
        assert {name: leaf.sharding for name, leaf in params.items()} == homes
        return shards_of(params) | {f"anchor.{key}": held for key, held in shards_of(sync.params).items()}


def main() -> None:
    facts = json.loads(sys.argv[1])
    jax.distributed.initialize(facts["coordinator"], facts["count"], facts["index"])
    mesh = Mesh(np.array(jax.devices()).reshape(facts["count"], -1), ("host", "card"))
    homes = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    for number, (address, anchor) in enumerate(facts["runs"]):
        held = take_part(address, anchor, homes)
        with open(f"{facts['folder']}/run{number}-process{facts['index']}.npz", "wb") as file:
            np.savez(file, **held)


if __name__ == "__main__":
    main()
