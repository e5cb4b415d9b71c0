"""Say what is learned, by which methods and at which rates, where real runs are compared with synchronous training.

Rule: a method has a learning rate of its own, the best of `RATES`, as `learning.py --tune` found it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from zmqtrain import Program, RunSettings, load_program
from zmqtrain.core.settings import FIXED

__all__ = ["Task", "Method", "Mode", "METHODS", "RATES", "BEST_RATE", "default_tasks", "quick"]

Mode = Literal["default", "strict"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned. steps: of one node, a multiple of batches_per_unit; step_milliseconds: the least time of one."""

    name: str
    program: str
    arguments: Mapping[str, str | int]
    batches_per_unit: int
    steps: int
    step_milliseconds: float
    source: str

    def make(self, rate: float, seed: int) -> Program:
        """Return the program with a learning rate and a seed for the order of the data."""
        return load_program(self.program, self._arguments(rate, seed))

    def complete(self, settings: RunSettings, rate: float, seed: int, nodes: int, mode: Mode) -> RunSettings:
        """Return the settings of a run of `nodes` nodes on this task."""
        written = ",".join(f"{name}={value}" for name, value in self._arguments(rate, seed).items())
        return replace(
            settings,
            mode=mode,
            release="all" if mode == "strict" else settings.release,
            program=self.program,
            program_arguments=written,
            seed=seed,
            units=nodes * self.steps // self.batches_per_unit,
            start_nodes=nodes,
            evaluate_seconds=0.0,
            lost_seconds=60.0,  # who is lost for a moment would train on other data
            initial="founder",
            shards=1,
            local_updates="fixed",
        )

    def _arguments(self, rate: float, seed: int) -> dict[str, str | int | float]:
        return {**self.arguments, "batches_per_unit": self.batches_per_unit, "rate": rate, "seed": seed}


@dataclass(frozen=True, kw_only=True)
class Method:
    """How it is learned. settings: of a run, None where there is none; together: whose batches make one step's."""

    name: str
    settings: RunSettings | None = None
    together: bool = False


METHODS = (
    Method(name="one node"),
    Method(name="synchronous", together=True),
    Method(name="k=2 ternary", settings=RunSettings(**FIXED | {"every": 2, "delay": 1, "outer": "sgd:rate=1"})),
    Method(name="k=8 ternary", settings=RunSettings(**FIXED | {"outer": "sgd:rate=1"})),
)

RATES: dict[tuple[str, str], tuple[float, ...]] = {
    ("text", "one node"): (1e-3, 2e-3, 4e-3, 8e-3),
    ("text", "synchronous"): (1e-3, 2e-3, 4e-3, 8e-3, 16e-3),
    ("text", "k=2 ternary"): (4e-3, 8e-3, 16e-3),
    ("text", "k=8 ternary"): (2e-3, 4e-3, 8e-3),
    ("images", "one node"): (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    ("images", "synchronous"): (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3),
    ("images", "k=2 ternary"): (2e-3, 4e-3, 8e-3),
    ("images", "k=8 ternary"): (2e-3, 4e-3, 8e-3),
}
"""The rates that `--tune` tries."""

BEST_RATE: dict[tuple[str, str], float] = {
    ("text", "one node"): 2e-3,
    ("text", "synchronous"): 2e-3,
    ("text", "k=2 ternary"): 4e-3,
    ("text", "k=8 ternary"): 4e-3,
    ("images", "one node"): 4e-3,
    ("images", "synchronous"): 8e-3,
    ("images", "k=2 ternary"): 4e-3,
    ("images", "k=8 ternary"): 4e-3,
}
"""The one of them that gave the least loss: on the text with seed 0 (runs in strict mode); on the images in the mean of
three seeds where two rates were close, for there one seed varies more than two rates differ."""


def default_tasks(text: str, images: str) -> tuple[Task, ...]:
    """Return a byte-level transformer of 115,000 parameters on `text`, 128 bytes a step and node, and a convolutional
    network of 55,000 on `images`, 16 a step and node.
    """
    return (
        Task(
            name="text",
            program="text",
            arguments={"data": text, "batch": 2, "context": 64},
            batches_per_unit=8,
            steps=1536,
            step_milliseconds=25.0,
            source="the source of Python's standard library" if text == "stdlib" else Path(text).name,
        ),
        Task(
            name="images",
            program="image",
            arguments={"data": images, "width": 16, "batch": 16},
            batches_per_unit=4,
            steps=560,
            step_milliseconds=25.0,
            source="scikit-learn's digits" if images == "digits" else Path(images).name,
        ),
    )


def quick(task: Task) -> Task:
    """Return the task at toy size."""
    small = {"text": {"width": 16, "layers": 1, "heads": 2, "context": 16}, "images": {"width": 2, "batch": 4}}
    return replace(task, arguments={**task.arguments, **small[task.name]}, steps=32)
