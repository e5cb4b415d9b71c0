"""Nodes of the tiny model that keep checkpoints; as a program they can be killed: `python kept_node.py FACTS` (JSON).

Each is a thread, trains with AdamW, says a line for each step, and at its end the digest of what it has.  As a program
it has no end: from a step on, once all of them have a checkpoint, each stands still until it is killed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import optax
from runs import batches, loss, parameters

from zmqtrain.node.connect import connect
from zmqtrain.train.sync import DelayedSync

OPTIMIZER = optax.adamw(0.02)


@jax.jit
def adamw(params, state, x):
    value, gradient = jax.value_and_grad(loss)(params, x)
    updates, state = OPTIMIZER.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value


def train(
    address: str,
    folder: Path,
    name: str,
    every: str,
    say: Callable[..., None],
    stop: Callable[[DelayedSync], bool] = lambda sync: False,
    **options,
) -> None:
    """Train until the data end, or `stop` says so. say: told "began", "step" and "ended", each with steps, version."""
    params = parameters()
    with connect(address, name, checkpoint=folder / name, checkpoint_every=every, **options) as node:
        sync = DelayedSync(node, params, state=OPTIMIZER.init(params))
        params, state = sync.start, sync.state
        say("began", sync.steps, sync.version, node.peer_id)
        for batch in node.batches(batches):
            params, state, value = adamw(params, state, batch)
            params = sync.step(params, score=value, samples=16, state=state)
            say("step", sync.steps, sync.version)
            if stop(sync):
                break
        params = sync.finish(params)
        sync.save(params, state, wait=True)
        leaves = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((params, state)))
        say("ended", sync.steps, sync.version, zlib.crc32(leaves))


def train_all(address: str, folder: Path, names: list[str], every: str) -> list[tuple]:
    """Train with one node for each name, a thread each; return what they said, with their names, as it came."""
    said: list[tuple] = []
    threads = [
        threading.Thread(target=train, args=(address, folder, name, every, lambda *one, n=name: said.append((n, *one))))
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def write_line(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # whole lines, whichever thread writes


def have_saved(folder: Path, names: list[str]) -> bool:
    """Return whether all of these nodes have a checkpoint."""
    return all(any((folder / name).glob("checkpoint-*.safetensors")) for name in names)


def say_and_stand_still(folder: Path, names: list[str], at_step: int) -> Callable[..., None]:
    """Return what writes each line, and does not return from a step after which the nodes may be killed."""

    def say(what: str, number: int, *words: object) -> None:
        is_over = what == "step" and number >= at_step and have_saved(folder, names)
        write_line(what, number, *words)
        if is_over:
            threading.Event().wait()

    return say


if __name__ == "__main__":
    facts = json.loads(sys.argv[1])
    where, everybody = Path(facts["folder"]), facts["names"]
    speak = say_and_stand_still(where, everybody, facts["at_step"])
    for one in everybody:
        threading.Thread(target=train, args=(facts["address"], where, one, facts["every"], speak)).start()
