"""Which settings of a run are spec strings, and what reads each.

Rule 1: one list, for the broker, the commands and the simulator.  Rule 2: no jax here: the broker imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from zmqtrain.codecs.base import coding_from_spec
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import AUTO, FITTED, RunSettings
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.strategies.aggregate import aggregation_from_spec
from zmqtrain.strategies.norms import norm_gate_from_text
from zmqtrain.strategies.outer import outer_from_spec
from zmqtrain.strategies.weights import preemption_from_spec, selection_from_spec, staleness_from_spec
from zmqtrain.train.minibatch import minibatch_from_spec


def _preemption(text: str) -> str:
    preemption = preemption_from_spec(text)
    return preemption.name if preemption is not None else "none"


def _norm_gate(text: str) -> str:
    gate = norm_gate_from_text(text)
    return gate if isinstance(gate, str) else f"{gate:g}"


CANONICAL: Mapping[str, Callable[[str], str]] = {
    "codec": lambda text: coding_from_spec(text).name,
    "broadcast_codec": lambda text: coding_from_spec(text).name,
    "release": lambda text: release_rule_from_spec(text).name,
    "aggregate": lambda text: aggregation_from_spec(text).name,
    "selection": lambda text: selection_from_spec(text).name,
    "staleness": lambda text: staleness_from_spec(text).name,
    "norm_gate": _norm_gate,
    "outer": lambda text: outer_from_spec(text).name,
    "preemption": _preemption,
    "minibatch": lambda text: minibatch_from_spec(text).name,
}
"""By setting: what writes a spec out in full, auto aside. Each raises ConfigError for one that names nothing."""

_OF_ONE = {"aggregate": ("mean", "weighted"), "selection": ("all", "better")}
"""What makes sense of a round of one delta; all other rules compare those of a round."""


def canonical(settings: RunSettings) -> RunSettings:
    """Return the settings with every spec string in its full form.

    Raises ConfigError, naming the setting, for one that names nothing.
    """
    return replace(settings, **check_rules(settings))  # type: ignore[arg-type]


def check_rules(settings: RunSettings) -> dict[str, str]:
    """Return the full form of every spec string, by setting. Raises ConfigError, as `canonical` does, and for
    rules that have nothing to do in each other's company."""
    written = {}
    for name, write in CANONICAL.items():
        try:
            text = getattr(settings, name)
            written[name] = AUTO if text == AUTO and FITTED.get(name) == AUTO else write(text)
        except ConfigError as error:
            raise ConfigError(f"{name} = {error}") from error
    if written["release"] == "immediately":
        for name, names in _OF_ONE.items():
            if written[name].partition(":")[0] not in names:
                raise ConfigError(
                    f'release "immediately" makes rounds of one delta, and {name} {written[name]!r} compares those of '
                    f"a round: say --release quorum:count=3 (of four nodes), or leave --{name} out"
                )
    return written
