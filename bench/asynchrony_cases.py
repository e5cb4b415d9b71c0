"""Say which runs answer which question about asynchrony: the cases of each experiment, as plain records.

Rule 1: a case names its settings, nothing is derived from another case; so a line of results tells all about its run.
Rule 2: cases of one experiment that are compared have the same task, start and `group`; one of them is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Case", "EXPERIMENTS"]

TASKS = ("shakespeare", "mnist")
FOUR = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run, but for its seed.

    settings: of the run, where they are not the defaults.  every_node, some_nodes: fields of `SimNode`: of all nodes,
    and of the node of that number ("0").  steps: of one node; 0: the task's samples divided over the nodes.
    rate: a factor to the task's.  inner, batch: an inner optimizer and a batch other than the task's.  sync: how what
    arrives is applied, if otherwise than in the product.  initial: "mean": all nodes begin with the mean of their own
    parameters.
    max_seconds: the run ends then, not when its data ends.  group: the condition under which methods are compared.
    """

    experiment: str
    task: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""
    start: Literal["scratch", "warm"] = "scratch"
    nodes: int = FOUR
    steps: int = 0
    rate: float = 1.0
    schedule: Literal["cosine", "constant"] = "cosine"
    inner: str = ""
    batch: int = 0
    sync: str = ""
    initial: str = ""
    every_node: Mapping[str, Any] = field(default_factory=dict)
    some_nodes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    evaluate_seconds: float = 0.0
    max_seconds: float = 0.0

    def own_steps(self, task_steps: int) -> int:
        """Return the steps of one node; task_steps: of each of four, where the case names none."""
        return self.steps or task_steps * FOUR // self.nodes

    def node(self, number: int) -> dict[str, Any]:
        """Return the fields of the `SimNode` of that number."""
        return {**self.every_node, **self.some_nodes.get(str(number), {})}


# ---------------------------------------------------------------------- 1: the delay

GRID_K = (2, 8, 32, 128)
LONG_STEPS = {128: 2048}
"""Steps of each node, so that a run has sixteen rounds at least, where the task's samples would make four or eight."""
DELAY_RIVALS: dict[str, dict[str, Any]] = {
    "overwriting": {"sync": "overwrite"},
    "mixing 0.5": {"sync": "mix"},
    "averaging": {"settings": {"outer": "sgd:rate=1"}},
    "DiLoCo (0.7, 0.9)": {"settings": {"outer": "nesterov:rate=0.7,momentum=0.9"}},
    "damping 1/sqrt(1+s)": {"settings": {"staleness": "polynomial:power=0.5", "release": "immediately"}},
    "immediately": {"settings": {"release": "immediately"}},
    "compensation": {"settings": {"staleness": "compensation:strength=0.1", "release": "immediately"}},
}


def _delays(k: int) -> list[int]:
    return sorted({0, k // 4, k // 2, k, 2 * k})


def delay() -> list[Case]:
    """The loss against d for each k: the default, and at k = 32 what else is done about late aggregates.

    All runs of one k and number of nodes are of equal samples.
    """
    cases = []
    for task in TASKS:
        for start in ("scratch", "warm"):
            for nodes in (4, 8):
                for k in GRID_K:
                    for d in _delays(k):
                        common: dict[str, Any] = {
                            "experiment": "delay", "task": task, "start": start, "nodes": nodes, "group": f"k={k}",
                            "steps": LONG_STEPS.get(k, 0),
                        }  # fmt: skip
                        cases.append(Case(method="default", settings={"every": k, "delay": d}, **common))
                        if (start, nodes, k) != ("scratch", 4, 32) or d not in (0, k // 2, k):
                            continue
                        for method, rival in DELAY_RIVALS.items():
                            settings = {"every": k, "delay": d, **rival.get("settings", {})}
                            rest = {key: value for key, value in rival.items() if key != "settings"}
                            cases.append(Case(method=method, settings=settings, **rest, **common))
    return cases


# ---------------------------------------------------------------------- 2: uneven nodes

UNEVEN = {"0": {"slowness": 4.0}, "1": {"straggler": ((0.0, 0.0, 0.9), (0.5, 0.1, 0.1))}}
"""One node four times slower, one that in a tenth of its steps takes half a second longer (a step is 50 ms)."""
UNEVEN_RULES: dict[str, dict[str, Any]] = {
    "BSP": {"release": "bounded:staleness=0", "delay": 0},
    "default (quorum, dynamic k)": {"local_updates": "dynamic"},
    "quorum, fixed k": {},
    "immediately": {"release": "immediately"},
    "immediately, delayed Nesterov": {"release": "immediately", "outer": "delayed_nesterov"},
    "FMB, 2 messages": {"release": "count:contributions=2"},
    "timed, 0.4 s": {"release": "time:seconds=0.4"},
    "SSP, s=1": {"release": "bounded:staleness=1", "delay": 0},
    "SSP, s=4": {"release": "bounded:staleness=4", "delay": 0},
}


def stragglers() -> list[Case]:
    """The loss against virtual time with one slow node and one random straggler."""
    return [
        Case(
            experiment="stragglers",
            task=task,
            method=method,
            settings={"every": 8, "delay": 4, **settings},
            schedule="constant",
            some_nodes=UNEVEN,
            evaluate_seconds=seconds / 50,
            max_seconds=seconds,
        )
        for task, seconds in (("shakespeare", 100.0), ("mnist", 50.0))
        for method, settings in UNEVEN_RULES.items()
    ]


# ---------------------------------------------------------------------- 3: Async-Timed against Async-FMB


TIMED_CONDITIONS: dict[str, dict[str, Any]] = {
    "no delays": {"count": 3, "messages": 2.0, "minibatch": "timed:seconds=0.29,partitions=2", "faults": {}},
    "cedar, messages 0.05 s late": {
        "count": 2,
        "messages": 1.8,
        "minibatch": "timed:seconds=0.32,partitions=8",
        "faults": {"straggler": "cedar", "message_sigma": 0.05},
    },
}
"""Figure 3 and Figure 4 of the paper: how many messages the Async-FMB broker waits for, and how many an update of the
Async-Timed one has in the mean (the table counts them); the limit of an Async-Timed worker and into how many parts it
cuts a batch, and what is done to the nodes."""
TIMED_STEP = 0.25
TIMED_RATE = 100.0


def timed() -> list[Case]:
    """Async-Timed against Async-FMB with three workers: the settings of the JSAIT'21 commands, on this data.

    A batch of 64 takes a worker a quarter of a second, as one of 1,024 did there: nearly its limit of 0.29 s. Our hub
    divides by the live workers: an update of fewer messages is a smaller step.  "full steps": as there, where an update
    is a step at the whole rate, of however many messages (with Async-Timed: in the mean).
    """
    cases = []
    for group, of in TIMED_CONDITIONS.items():
        for steps, fmb, ours in (("", 1.0, 1.0), (", full steps", 3 / of["count"], 3 / of["messages"])):
            for method, rate, settings in (
                ("Async-FMB", fmb, {"minibatch": "fixed:batches=1", "release": f"count:contributions={of['count']}"}),
                (
                    "Async-Timed",
                    ours,
                    {"minibatch": of["minibatch"], "release": "time:seconds=0.2", "aggregate": "weighted"},
                ),
            ):
                cases.append(
                    Case(
                        experiment="timed",
                        task="mnist",
                        method=method,
                        group=group + steps,
                        nodes=3,
                        settings={"every": 1, "delay": 0, "outer": f"sgd:rate={rate:g}", **settings},
                        inner="sgd",
                        rate=TIMED_RATE,
                        batch=64,
                        schedule="constant",
                        every_node={"step_seconds": TIMED_STEP, **of["faults"]},
                        evaluate_seconds=4.0,
                        max_seconds=200.0,
                    )
                )
    return cases


# ---------------------------------------------------------------------- 4: how many nodes

JITTER = ((0.0, 0.02, 1.0),)
SERVER: dict[str, Any] = {
    "every": 1, "delay": 0, "release": "bounded:staleness=1000000", "codec": "float32", "broadcast_codec": "float32",
}  # fmt: skip
"""An asynchronous server: a worker sends each gradient, which is applied at once, and waits for the new parameters."""


def nodes() -> list[Case]:
    """The accuracy against the number of nodes, fully asynchronous: a naive server, and ours. Equal samples in all.

    The naive server takes each worker's step whole, as if it were alone (SGD at a rate of 0.5, which is good for one);
    ours takes the mean over the nodes, and the rate grows with their number, up to 8 times.
    """
    cases = []
    for count in (1, 2, 4, 5, 8, 16):
        naive = {**SERVER, "outer": f"sgd:rate={count}"}
        ours = {"every": 8, "delay": 4}
        for method, settings, inner, rate in (
            ("naive", naive, "sgd", 125.0),
            ("ours, immediately", {**ours, "release": "immediately"}, "", 0.25 * min(count, 8)),
            ("ours, default", ours, "", 0.25 * min(count, 8)),
        ):
            cases.append(
                Case(
                    experiment="nodes",
                    task="mnist",
                    method=method,
                    nodes=count,
                    settings=settings,
                    inner=inner,
                    rate=rate,
                    steps=NODES_STEPS // count,
                    schedule="constant",
                    every_node={"straggler": JITTER},
                )
            )
    return cases


NODES_STEPS = 8192
"""Steps of all nodes together, 16 images each."""


# ---------------------------------------------------------------------- 5: different initial parameters

APART = 64
INITIAL_STEPS = 1024
INITIALS: dict[str, dict[str, Any]] = {
    "founder": {},
    "best": {"initial": "best", "apart_steps": APART},
    "best, 32 steps apart": {"initial": "best", "apart_steps": 32},
    "best, 128 steps apart": {"initial": "best", "apart_steps": 128},
    "best, moments too": {"initial": "best", "apart_steps": APART, "fresh_moments": False},
    "own, preemption": {"initial": "own", "apart_steps": APART, "preemption": "score:patience=2,margin=0"},
    "own, preemption, moments too": {
        "initial": "own",
        "apart_steps": APART,
        "preemption": "score:patience=2,margin=0",
        "fresh_moments": False,
    },
    "own, elastic 0.5": {"initial": "own", "elastic": 0.5},
}
SPOILT: dict[str, dict[str, dict[str, Any]]] = {
    "equal quality": {},
    "one bad": {"0": {"initial_scale": 4.0}},
    "one diverged": {"0": {"initial": "diverged"}},
}


def initial() -> list[Case]:
    """Whose parameters a run begins with, when all initialisations are as good, one is bad, one is diverged.

    All runs end after the same time, that of so many steps: what nodes train apart is in it.
    """
    cases = []
    for task in TASKS:
        for group, some in SPOILT.items():
            common: dict[str, Any] = {
                "experiment": "initial", "task": task, "group": group, "some_nodes": some,
                "steps": INITIAL_STEPS, "max_seconds": INITIAL_STEPS * 0.05,
            }  # fmt: skip
            for method, settings in INITIALS.items():
                cases.append(Case(method=method, settings={"every": 8, "delay": 4, **settings}, **common))
            cases.append(Case(method="naive mean", settings={"every": 8, "delay": 4}, initial="mean", **common))
    return cases


# ---------------------------------------------------------------------- 6: whose deltas count

SELECTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "best 2": {"selection": "best:count=2"},
    "better": {"selection": "better"},
    "score-weighted": {"selection": "score"},
    "healthy 1.1": {"selection": "healthy:factor=1.1"},
    "trimmed mean": {"aggregate": "trimmed:share=0.25"},
    "median": {"aggregate": "median"},
    "sign majority": {"aggregate": "majority"},
    "clipped": {"aggregate": "clipped:factor=2"},
}


CORRUPT = {"shakespeare": "bytes", "mnist": "labels"}


def selection() -> list[Case]:
    """Whose deltas count, when all data are sound, and when one node's labels are shuffled."""
    cases = []
    for task in TASKS:
        for group, some in (("all healthy", {}), ("one corrupted", {"3": {"corrupt": CORRUPT[task]}})):
            for method, settings in SELECTIONS.items():
                cases.append(
                    Case(
                        experiment="selection",
                        task=task,
                        method=method,
                        group=group,
                        settings={"every": 8, "delay": 4, **settings},
                        some_nodes=some,
                    )
                )
        cases.append(
            Case(
                experiment="selection",
                task=task,
                method="the healthy alone",
                group="one corrupted",
                nodes=3,
                steps=1024,
                settings={"every": 8, "delay": 4},
            )
        )
    return cases


EXPERIMENTS: dict[str, Callable[[], Sequence[Case]]] = {
    "delay": delay,
    "stragglers": stragglers,
    "timed": timed,
    "nodes": nodes,
    "initial": initial,
    "selection": selection,
}
"""By name: what makes the cases of an experiment."""
