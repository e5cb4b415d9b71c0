"""Hold the rules by which a parameter server serves: its first client says them, the others take them.

Rule: what a client leaves open ("" or 0) is as it is there; what it says and is not so is refused, both named.
"""

from __future__ import annotations

from dataclasses import dataclass

from zmqtrain.core.errors import ConfigError
from zmqtrain.parameter_server.consistency import consistency_from_spec
from zmqtrain.parameter_server.optimizers import optimizer_from_spec


@dataclass(frozen=True, slots=True)
class Rules:
    """How a server serves, as its first client says it. "" and 0: as it is there already, or the default.

    store: names the keys that the masters hold together; the first gives it, the others are told.  master: which of
    `masters` this one is.
    workers: clocks begin to move when so many have enrolled.
    """

    store: str = ""
    master: int = 0
    masters: int = 1
    consistency: str = ""
    optimizer: str = ""
    workers: int = 0


DEFAULT_RULES = Rules(consistency="async", optimizer=optimizer_from_spec("sgd").name, workers=1)


LONGEST_SPEC = 400


def canonical(rules: Rules) -> Rules:
    """Return rules with canonical specs. Raises ConfigError for what is none."""
    if not (1 <= rules.masters <= 1024 and 0 <= rules.master < rules.masters and 0 <= rules.workers <= 1 << 16):
        raise ConfigError(
            f"master {rules.master} of {rules.masters}, for {rules.workers} workers: there is no such one"
        )
    if max(map(len, (rules.store, rules.consistency, rules.optimizer))) > LONGEST_SPEC:
        raise ConfigError(f"the name of a store, a consistency and an optimizer have {LONGEST_SPEC} characters at most")
    return Rules(
        rules.store,
        rules.master,
        rules.masters,
        consistency_from_spec(rules.consistency).name if rules.consistency else "",
        optimizer_from_spec(rules.optimizer).name if rules.optimizer else "",
        rules.workers,
    )


def check_equal(there: Rules, wanted: Rules, set_by: str) -> None:
    """Raise ConfigError, naming both, if a client wants other rules than those there; set_by: who said these."""
    for what in ("masters", "master", "store", "consistency", "optimizer", "workers"):
        ours, theirs = getattr(there, what), getattr(wanted, what)
        if (theirs not in ("", 0) or what == "master") and ours != theirs:
            text = f"{what} is {ours!r} on the server, as {set_by} said first; this client says {theirs!r}"
            if what in ("master", "masters", "store"):
                text += ": name the same masters in the same order in all clients"
            raise ConfigError(text)
