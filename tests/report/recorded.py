"""Records of made-up runs, as a broker and nodes write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from zmqtrain.monitor.records import Record, record, write_records

SETTINGS = {"program": "text", "every": 8, "delay": 2, "codec": "int8", "release": "quorum"}
VERSIONS = {"python": "3.11.2", "jax": "0.7.0"}
BATCH = 32


def broker(
    nodes: list[str], seconds: int = 60, run: str = "run-a", speed: float = 1.0, began: float = 1.7e9, **more: Any
) -> list[Record]:
    """Each second a version of a delta of each node, and a report; each third second an evaluation."""
    rng = np.random.default_rng(3)
    facts = {"zmqtrain": "0.2.0", "began": began, "versions": VERSIONS}
    made = [record("run", 0.0, run=run, version=-1, settings={**SETTINGS, **more}, **facts)]
    made += [
        record("membership", 0.5, node=name, what="joined", peer=f"{name}#a", text="at version 0") for name in nodes
    ]
    made.append(
        record(
            "plan",
            1.0,
            every=8,
            delay=2,
            from_version=4,
            codec="int8",
            broadcast_codec="int8",
            outer="sgd",
            text="a link",
        )
    )
    for version in range(1, seconds):
        samples = BATCH * len(nodes)
        deltas = [
            {"node": name, "peer": f"{name}#a", "sequence": version, "fragment": 0, "base_version": version - 1,
             "samples": BATCH, "score": 3.0, "staleness": int(rng.integers(0, 3)), "too_stale": False,
             "left_out": False, "late": float(rng.exponential(0.02))}
            for name in nodes
        ]  # fmt: skip
        made.append(
            record(
                "release",
                version,
                version=version,
                live=len(nodes),
                nodes=len(nodes),
                samples=samples,
                fragments=[0],
                dense=False,
                contributions=deltas,
            )
        )
        members = [
            {"peer": f"{name}#{number}", "name": name, "state": "live", "step": 8 * version, "contributions": version,
             "samples": 8 * BATCH * version, "samples_per_second": 8.0 * BATCH * (1 + 0.5 * number), "refused": 0,
             "loss": 4.0 / (1 + 0.1 * version), "age_steps": 3.0, "staleness": 1, "bytes_sent": 1000 * version,
             "bytes_received": 3000 * version}
            for number, name in enumerate(nodes)
        ]  # fmt: skip
        made.append(
            record(
                "status",
                version + 0.1,
                version=version,
                members=members,
                samples=samples * version,
                contributions=len(nodes) * version,
                hub={"noise": 9.0, "rho": 0.1},
            )
        )
        if version % 3 == 0:
            loss = 4.0 / (1 + 0.05 * speed * version) + 0.01 * float(rng.normal())
            made.append(record("evaluation", version + 0.2, version=version, samples=samples * version, loss=loss))
    figures = {
        "version": seconds - 1,
        "samples": BATCH * len(nodes) * (seconds - 1),
        "bytes_up": 60_000,
        "bytes_down": 180_000,
    }
    return [*made, record("run_end", float(seconds), **figures)]


def node(name: str, seconds: int = 60, run: str = "run-a", began: float = 1.7e9 + 0.3) -> list[Record]:
    """Four steps a second; an offer each second, which is applied half a second later."""
    facts = {"zmqtrain": "0.2.0", "began": began, "versions": {**VERSIONS, "jax": "0.7.1"}}
    made = [record("node", 0.0, node=name, peer=f"{name}#a", run=run, version=-1, **facts)]
    for step in range(1, 4 * seconds):
        at, place = 0.25 * step, {"node": name, "step": step, "samples": BATCH * step, "draining": False}
        made.append(record("step", at, node=name, step=step, loss=4.0 / (1 + 0.02 * step), samples=BATCH * step))
        if step % 4 == 0:
            made.append(
                record("offer", at, sequence=step // 4, fragment=0, base_version=step // 4 - 1, dense=False, **place)
            )
        elif step % 4 == 2 and step > 4:
            made.append(
                record(
                    "application",
                    at,
                    version=step // 4,
                    landed=[step // 4],
                    snapshot=False,
                    reset=False,
                    keep=False,
                    moments=False,
                    **place,
                )
            )
    return [
        *made,
        record(
            "node_end",
            float(seconds),
            node=name,
            steps=4 * seconds - 1,
            samples=BATCH * (4 * seconds - 1),
            bytes_up=5,
            bytes_down=6,
        ),
    ]


def write_run(folder: Path, nodes: list[str], with_nodes: bool = True, **options: Any) -> Path:
    """Write the records of a run into a new folder, and return it."""
    folder.mkdir(parents=True)
    write_records(folder / "broker.jsonl", broker(nodes, **options))
    for number, name in enumerate(nodes if with_nodes else []):
        write_records(
            folder / f"node-{number}.jsonl", node(name, options.get("seconds", 60), options.get("run", "run-a"))
        )
    return folder
