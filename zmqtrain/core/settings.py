"""The settings of a run: one frozen record, kept by the broker and adopted by every node in `Welcome`.

Rule 1: checked once, here, never from the environment.  Rule 2: a spec string is checked by the family it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.specs import split_argument
from zmqtrain.core.types import LOCAL_UNITS, ModelSpec, count_values, parts_of

AUTO = "auto"
"""What a spec says that the hub fits to what it measures."""
AUTO_EVERY, AUTO_DELAY, AUTO_FRAGMENTS = 0, -1, 0
"""What `every`, `delay` and `fragments` are where people write "auto"."""
AUTO_PIPELINE, AUTO_SHARDS = -1, 0
"""What `pipeline` and `shards` are where people write "auto"."""
UNDIVIDED_NODES = 4
"""The port of one broker is enough for so many nodes."""
FITTED: dict[str, Any] = {
    "every": AUTO_EVERY,
    "delay": AUTO_DELAY,
    "codec": AUTO,
    "broadcast_codec": AUTO,
    "fragments": AUTO_FRAGMENTS,
    "outer": AUTO,
}
"""The settings that may be auto, and what they are then."""
FIXED: dict[str, Any] = {
    "every": 8,
    "delay": 4,
    "codec": "ternary",
    "broadcast_codec": "ternary",
    "fragments": 1,
    "outer": "nesterov:rate=0.8,momentum=0.5",
}
"""What takes the place of auto in strict mode, whose bits may not depend on measured times."""
FIRST: dict[str, Any] = {
    "every": 2,
    "delay": 2,
    "codec": "ternary:block=128",
    "broadcast_codec": "ternary:block=128",
    "outer": "sgd:rate=1",
}
"""What takes the place of auto until enough is measured; specs in their full form. A first k that is too small for the
link does no harm, because offers are then put off until the one before has landed."""
PIECES = ((1 << 17, 1), (1 << 20, 2), (1 << 26, 4))
"""(values of the model, fragments): up to so many values, auto cuts the model into so many fragments; more: eight."""
MOST_PIECES = 8


_MOST_STEPS = 10**9
_MOST_SECONDS = 10**9
_RANGES: dict[str, tuple[float, int]] = {
    "fragments": (AUTO_FRAGMENTS, 1 << 16),
    "shards": (AUTO_SHARDS, 9999),
    "pipeline": (AUTO_PIPELINE, 512),
    "start_nodes": (1, 1 << 16),
    "units": (0, LOCAL_UNITS - 1),
    "evaluate_seconds": (0, _MOST_SECONDS),
    "seed": (0, (1 << 63) - 1),
    "heartbeat_seconds": (0.01, _MOST_SECONDS),
    "lost_seconds": (0, _MOST_SECONDS),
    "max_staleness": (0, _MOST_STEPS),
    "apart_steps": (1, _MOST_STEPS),
}
"""By setting the least and the most that it can be."""
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def read_steps(name: str, value: Any) -> Any:
    """Return what a person wrote for the setting `name`: "auto" of a numeric setting as a number, all else as is."""
    numbers = FITTED | {"pipeline": AUTO_PIPELINE, "shards": AUTO_SHARDS}
    return numbers.get(name, value) if value == AUTO else value


def _checked(name: str, value: Any, wanted: type) -> Any:
    """Return a setting's value in its kind. Raises ConfigError for one of another kind."""
    value = read_steps(name, value)
    if wanted is float and type(value) is int:
        value = float(value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise ConfigError(f"setting {name} must be {_KINDS[wanted]}, got {value!r}")
    return value


def require(name: str, value: float, least: float, most: int = _MOST_STEPS) -> None:
    """Raise ConfigError unless least <= value <= most."""
    if not value >= least:  # NaN neither
        raise ConfigError(f"{name} must be at least {least:g}, got {value}")
    if value > most:
        raise ConfigError(f"{name} must be at most {most:,}, got {value}")


def pieces_of(values: int) -> int:
    """Return into how many fragments auto cuts a model of so many values: the aggregate of the first comes down while
    the others go up, and each fragment costs its heads."""
    return next((pieces for most, pieces in PIECES if values <= most), MOST_PIECES)


RENAMED = {"masters": "shards"}
"""By setting of version 0.1 its present name."""


def with_present_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint, record or file of version 0.1 may have saved, under its present names."""
    return {RENAMED.get(name, name): value for name, value in saved.items()}


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What all nodes of one run agree on, because only the broker is asked. Raises ConfigError if out of range."""

    program: str = ""
    """What the nodes train: "text", "image", or an installed one; empty: the first node's own model founds the run."""
    program_arguments: str = ""
    """Arguments of the program, as "width=128,layers=2"."""
    every: int = AUTO_EVERY
    """k: a node offers a delta every so many steps; 0 (auto): as often as is best for the loss on these links and
    machines, as measured."""
    delay: int = AUTO_DELAY
    """d: the aggregate is applied at the first step boundary that is at least so many steps after its offer; -1 (auto):
    when it has come, as measured."""
    codec: str = AUTO
    """How a node's delta is coded: a spec such as ternary:block=128, topk:density=0.01+int4 or
    "ternary;<1024=bf16" (docs/codecs.md); auto: as the link and the machines allow, as measured.
    "ternary:block=128,fragments=8" sets fragments too."""
    broadcast_codec: str = AUTO
    """How the aggregate is coded, with the hub's own feedback: as for codec; auto: the same as codec."""
    fragments: int = AUTO_FRAGMENTS
    """Each exchange carries one of so many parts of the model, in turn; 0 (auto): each exchange carries the whole model
    in a few parts, and the aggregate of the first comes down while the others go up."""
    shards: int = AUTO_SHARDS
    """The model is divided among so many brokers: each has a share of it, equal in bytes, and an exchange goes to all
    of them. 0 (auto): one; and one on each node's PC where more than four nodes begin together (start_nodes), all
    deltas count (aggregate mean, selection all), and the model is large enough. The hub decides when they have come.
    These PCs are trusted as the hub is; 1: the hub alone."""
    pipeline: int = 0
    """Each node is a pipeline of so many PCs, for a model that one cannot hold; "auto": of as few as hold it; 0: each
    PC has the whole model."""
    release: str = "quorum"
    """When an aggregate is due: "all", "quorum" (half of the live nodes, and a grace that follows from how late the
    others come), "immediately", "count:contributions=3", "time:seconds=0.2", "bounded:staleness=4" (the fastest node
    waits when it is more than so many exchanges ahead of the slowest; 0: for all, each time)."""
    aggregate: str = "mean"
    """What becomes of a round's deltas: "mean", "weighted" (by samples), "trimmed:share=0.25", "median", "majority" (of
    signs), "clipped:factor=2" (norms, to so many times the median norm)."""
    selection: str = "all"
    """Which deltas count, by their nodes' scores: "all", "best:count=2", "better" (than the shared model),
    "healthy:factor=1.1" (scores up to so many times the median), "score:temperature=1" (weights)."""
    staleness: str = "constant"
    """What a delta weighs that comes late: "constant", "polynomial:power=0.5", "compensation:strength=0.1"."""
    max_staleness: int = 0
    """A delta that is based on an aggregate more than so many versions old is too stale; 0: none is."""
    stale: Literal["return", "drop"] = "return"
    """What becomes of a delta that is too stale: it returns to what its node has pending, or it is dropped."""
    norm_gate: str = "auto"
    """A delta with a norm so many times that of the deltas before it is refused, as 10; "none": none is. auto: 10,
    but none in strict mode, and where nodes keep parameters of their own for ever (elastic)."""
    outer: str = AUTO
    """The outer optimizer, applied at the hub to the mean of the deltas; sgd:rate=1 is plain averaging; auto: that for
    a small k, nesterov:rate=0.8,momentum=0.5 for a large one."""
    elastic: float = 1.0
    """The share of what is pending that a node offers: under 1, nodes keep parameters of their own around the shared
    ones (elastic averaging)."""
    initial: Literal["founder", "best", "mean", "own"] = "best"
    """Whose parameters the run begins with: the first node's (founder); the best-scored of start_nodes nodes that have
    trained apart for a while (with one, the first node's); the mean of all; or each node keeps its own, exchanging by
    score until all descend from one."""
    apart_steps: int = 64
    """How many steps nodes train apart before they are compared (initial best and own)."""
    preemption: str = "score:patience=2,margin=0"
    """While each node keeps its own parameters (initial own): one whose score was worse than the best's by this share
    so many times in a row adopts the best's parameters."""
    fresh_moments: bool = True
    """Who adopts another node's initial parameters begins a fresh optimizer state; false: it takes over that node's."""
    local_updates: Literal["fixed", "dynamic"] = "dynamic"
    """dynamic: a slower node makes fewer steps between its offers, so that all offer at about the same time (not in
    strict mode). fixed: every node makes k."""
    minibatch: str = "fixed:batches=1"
    """What one step is made of: "fixed:batches=4" (gradients of so many batches, averaged), or
    "timed:seconds=0.3,partitions=8" (of as many parts of batches as there is time for)."""
    mode: Literal["default", "strict"] = "default"
    """strict: aggregates are applied at exactly k+d steps, waiting if need be; same seeds, same bits."""
    seed: int = 0
    """Seeds the founder's initial parameters and the order of the data."""
    units: int = 0
    """The run ends when so many data units are done; 0: it goes on until somebody ends it."""
    start_nodes: int = 1
    """Training begins when so many nodes have joined; others may come and go at any time after."""
    evaluate_seconds: float = 5.0
    """One node scores the shared model on held-out data about this often; 0: never."""
    heartbeat_seconds: float = 0.5
    """How often the two sides tell each other that they live."""
    lost_seconds: float = 2.5
    """A node or a hub silent for so long is taken for lost."""

    def __post_init__(self) -> None:
        for field in fields(RunSettings):
            object.__setattr__(self, field.name, _checked(field.name, getattr(self, field.name), type(field.default)))
        codec, fragments = split_argument(self.codec, "fragments")
        if fragments is not None:
            if self.fragments not in (AUTO_FRAGMENTS, fragments):
                raise ConfigError(
                    f"codec {self.codec!r} says fragments={fragments}, the setting fragments says {self.fragments}: "
                    "leave one of them out"
                )
            object.__setattr__(self, "codec", codec)
            object.__setattr__(self, "fragments", fragments)
        if self.mode == "strict":
            for name, auto in FITTED.items():
                if getattr(self, name) == auto:
                    object.__setattr__(self, name, FIXED[name])

        if self.shards == AUTO_SHARDS and not self.may_be_divided:
            object.__setattr__(self, "shards", 1)
        steps_of = (("every", AUTO_EVERY, 1), ("delay", AUTO_DELAY, 0), ("fragments", AUTO_FRAGMENTS, 1))
        for name, auto, fewest in steps_of:
            steps = getattr(self, name)
            if steps != auto and steps < fewest:
                raise ConfigError(f'{name} must be "auto" or at least {fewest}, got {steps}')
            if steps > _MOST_STEPS:
                raise ConfigError(f"{name} must be at most {_MOST_STEPS:,}, got {steps}")
        for name, (least, most) in _RANGES.items():
            require(name, getattr(self, name), least, most)
        if not 0 < self.elastic <= 1:
            raise ConfigError(f"elastic is a share, in 0 < elastic <= 1, got {self.elastic:g}")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.lost_seconds < 2 * self.heartbeat_seconds:
            raise ConfigError(
                f"lost_seconds ({self.lost_seconds:g}) must be at least twice heartbeat_seconds "
                f"({self.heartbeat_seconds:g}): a single late heartbeat is no loss"
            )
        if self.mode == "strict" and self.release != "all":
            raise ConfigError(
                f'mode "strict" needs release "all" (bit-identical runs wait for every node), got {self.release!r}; '
                "say --release all"
            )
        if self.mode == "strict" and self._is_timed:
            raise ConfigError(
                'mode "strict" makes the same bits again, and what depends on the speed of nodes does not: say '
                "--minibatch fixed:batches=1, or as many as you like"
            )
        if self.initial == "own" and self.elastic == 1 and self.preemption == "none":
            raise ConfigError(
                'initial "own" with preemption "none" never brings the nodes together: say --preemption score, or '
                "--elastic 0.5 for nodes that keep parameters of their own for ever"
            )
        if self.shards > 1 and self.initial not in ("founder", "best"):
            raise ConfigError(
                f'initial "{self.initial}" mixes or exchanges whole models, and of {self.shards} brokers none has one: '
                "say --initial best (all begin with the best node's parameters) or founder (the first one's), or "
                "--shards 1"
            )
        if self.pipeline and (
            self.shards > 1 or self.mode == "strict" or self.elastic < 1 or self.trains_apart
            or self.initial in ("mean", "own")
        ):  # fmt: skip
            raise ConfigError(
                "pipelines train with one broker, in the default mode, without --elastic, and begin with the first "
                "one's parameters: leave out --shards, --mode and --elastic, and say --initial founder"
            )
        if self.mode == "strict" and self.initial == "own":
            raise ConfigError(
                'mode "strict" makes the same bits again, and whose parameters nodes of their own come to share '
                "depends on when they tell their scores, or on who comes first: say --initial best"
            )
        if self.mode == "strict" and self.units % self.start_nodes:
            raise ConfigError(
                f'mode "strict" needs the same number of data units for each node: units ({self.units}) must be a '
                f"multiple of start_nodes ({self.start_nodes})"
            )

    @property
    def _is_timed(self) -> bool:
        return self.minibatch.partition(":")[0] == "timed"

    @property
    def follows_speed(self) -> bool:
        """Whether a node's k follows from its speed: not in strict mode, nor where every node's steps are timed."""
        return self.local_updates == "dynamic" and self.mode == "default" and not self._is_timed

    @property
    def waits(self) -> bool:
        """Whether nodes wait, d steps after an offer, until it has landed."""
        return self.mode == "strict" or self.release.partition(":")[0] == "bounded"

    @property
    def may_be_divided(self) -> bool:
        """Whether auto may mean several brokers."""
        begins = self.initial == "founder" or (self.initial == "best" and self.fresh_moments)
        plain = self.mode == "default" and self.elastic == 1 and not self.pipeline
        plain &= self.aggregate == "mean" and self.selection == "all"  # else nodes are not trusted with more
        return self.start_nodes > UNDIVIDED_NODES and begins and plain

    @property
    def trains_apart(self) -> bool:
        """Whether nodes begin apart and are compared: a run that begins with one node has nobody to compare it with."""
        return (self.initial == "best" and self.start_nodes > 1) or (self.initial == "own" and self.elastic == 1)

    @property
    def offers_in_flight(self) -> int:
        """How many offers of one node and fragment may be in flight: as many as `delay` asks for (of a fitted run: one,
        until `scheduled` says k and d); one more where an exchange carries all, so that a late aggregate puts off no
        offer."""
        if self.every == AUTO_EVERY or self.delay == AUTO_DELAY:
            return 1
        return max(1, -(-self.delay // self.every)) + self.carries_all

    @property
    def is_planned(self) -> bool:
        """Whether something (auto) follows from what is measured: the broker announces it, again and again."""
        return any(getattr(self, name) == auto for name, auto in FITTED.items() if name != "fragments")

    @property
    def carries_all(self) -> bool:
        """Whether an exchange carries all fragments of the model, one after the other, not one of them in turn."""
        return self.fragments == AUTO_FRAGMENTS

    def fragments_of(self, model: ModelSpec) -> int:
        """Return into how many fragments a model, or each broker's shard of it, is cut.

        auto: one where a round takes fragments as they come (every release rule but quorum).  Of a model that is cut
        for pipelines each part is one.
        """
        if parts := parts_of(model):
            return len(set(parts))
        if not self.carries_all:
            return self.fragments
        values = -(-count_values(model) // max(1, self.shards))
        return pieces_of(values) if self.release.partition(":")[0] == "quorum" else 1

    def scheduled(self, **chosen: Any) -> RunSettings:
        """Return the settings with these in the place of auto; "" and configured values stay. Raises ConfigError."""
        fitted = {name: value for name, value in chosen.items() if value != "" and getattr(self, name) == FITTED[name]}
        return replace(self, **fitted)

    @property
    def at_first(self) -> RunSettings:
        """The settings that hold until something is measured: in numbers and specs, but for the fragments."""
        return self.scheduled(**FIRST)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, for the wire and the checkpoint."""
        return {field.name: getattr(self, field.name) for field in fields(RunSettings)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunSettings:
        """Read what `to_dict` wrote; raise ConfigError for a name this version does not know or a wrong type."""
        settings, known = with_present_names(values), {field.name for field in fields(RunSettings)}
        for name in settings:
            if name not in known:
                raise ConfigError(f"unknown setting {name!r}: the broker runs another version of zmqtrain")
        return cls(**settings)


_CHOICES = {name: get_args(kind) for name, kind in get_type_hints(RunSettings).items() if get_origin(kind) is Literal}
"""By setting the texts that it can be, where these are few."""
