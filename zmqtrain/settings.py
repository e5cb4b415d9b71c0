"""Hold the settings of a run: one frozen record, kept by the broker and adopted by every node in `Welcome`.

Rule 1: checked once, here, never from the environment.  Rule 2: a spec string is checked by the family it names.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from zmqtrain.errors import ConfigError
from zmqtrain.specs import split_argument

__all__ = ["RunSettings"]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What all nodes of one run agree on, because only the broker is asked. Raises ConfigError if out of range."""

    program: str = ""
    """What the nodes train: "text", "image", or an installed one; empty: the first node's own model founds the run."""
    program_arguments: str = ""
    """Arguments of the program, as "width=128,layers=2"."""
    every: int = 8
    """k: a node offers a delta every so many steps."""
    delay: int = 4
    """d: the aggregate is applied at the first step boundary that is at least so many steps after its offer."""
    codec: str = "ternary"
    """How a node's delta is coded on its way up: a spec such as ternary:block=128, topk:density=0.01+int4 or
    "ternary;<1024=bf16" (docs/codecs.md). "ternary:block=128,fragments=8" sets fragments too."""
    broadcast_codec: str = "ternary"
    """How the aggregate is coded on its way down, with the hub's own feedback: as for codec."""
    fragments: int = 1
    """Each exchange carries one of so many parts of the model, in turn."""
    release: str = "quorum"
    """When an aggregate is due: "all", "quorum:count=0,grace=0.5" (0: half of the live nodes), "immediately"."""
    outer: str = "nesterov:rate=0.8,momentum=0.5"
    """The outer optimizer, applied at the hub to the mean of the deltas; sgd:rate=1 is plain averaging."""
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
    lost_seconds: float = 3.0
    """A node or a hub silent for so long is taken for lost."""

    def __post_init__(self) -> None:
        codec, fragments = split_argument(self.codec, "fragments")
        if fragments is not None:
            if self.fragments not in (1, fragments):
                raise ConfigError(
                    f"codec {self.codec!r} says fragments={fragments}, the setting fragments says {self.fragments}: "
                    "leave one of them out"
                )
            object.__setattr__(self, "codec", codec)
            object.__setattr__(self, "fragments", fragments)

        def at_least(name: str, least: float) -> None:
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least:g}, got {getattr(self, name)}")

        for name in ("every", "fragments", "start_nodes"):
            at_least(name, 1)
        for name in ("delay", "units", "evaluate_seconds", "seed"):
            at_least(name, 0)
        at_least("heartbeat_seconds", 0.01)
        if self.lost_seconds < 2 * self.heartbeat_seconds:
            raise ConfigError(
                f"lost_seconds ({self.lost_seconds:g}) must be at least twice heartbeat_seconds "
                f"({self.heartbeat_seconds:g}): a single late heartbeat is no loss"
            )
        if self.mode not in ("default", "strict"):
            raise ConfigError(f'mode must be "default" or "strict", got {self.mode!r}')
        if self.mode == "strict" and self.release != "all":
            raise ConfigError(
                f'mode "strict" needs release "all" (bit-identical runs wait for every node), got {self.release!r}; '
                "say --release all"
            )
        if self.mode == "strict" and self.units % self.start_nodes:
            raise ConfigError(
                f'mode "strict" needs the same number of data units for each node: units ({self.units}) must be a '
                f"multiple of start_nodes ({self.start_nodes})"
            )

    @property
    def offers_in_flight(self) -> int:
        """How many offers of one node may be on their way: just as many as `delay` asks for."""
        return max(1, -(-self.delay // self.every))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, for the wire and the checkpoint."""
        return {field.name: getattr(self, field.name) for field in fields(RunSettings)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunSettings:
        """Read what `to_dict` wrote; raise ConfigError for a name this version does not know or a wrong type."""
        known = {field.name: field for field in fields(RunSettings)}
        checked: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"unknown setting {name!r}: the broker runs another version of zmqtrain")
            wanted = type(known[name].default)
            if wanted is float and type(value) is int:
                value = float(value)
            if type(value) is not wanted:
                raise ConfigError(f"setting {name} must be of type {wanted.__name__}, got {value!r}")
            checked[name] = value
        return cls(**checked)
