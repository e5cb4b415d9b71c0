"""Say how far a worker may run ahead of the others, and what becomes of what it pushes meanwhile.

Rule 1: a worker's clock at a key is how many gradients it has pushed for that key; the key's clock is the lowest of all
live workers'.  Rule 2: who is `ahead` of it by more than the consistency allows waits, with its next push and with a
pull; so a pull at clock c sees all that every worker pushed before its clock c - staleness, and one's own pushes.
Source: bulk synchronous: Valiant 1990; bounded (stale synchronous): Ho et al. 2013, More Effective Distributed ML via a
Stale Synchronous Parallel Parameter Server; asynchronous: Dean et al. 2012, Downpour SGD.
"""

from __future__ import annotations

from typing import NamedTuple

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.specs import Number, format_spec, parse_spec

FAMILIES: dict[str, dict[str, Number]] = {"bsp": {}, "async": {}, "bounded": {"s": 3}}
"""Each member of the family and the defaults of its arguments."""


class Consistency(NamedTuple):
    """How workers keep together.

    name: the canonical spec.  staleness: by how many clocks a worker may be ahead; None: by any number.
    averages: one step is made of the mean of all workers' gradients, when all are there; if not, one of each gradient
    as it comes.
    """

    name: str
    staleness: int | None
    averages: bool

    def may_proceed(self, ahead: int) -> bool:
        """Return whether a worker whose clock is by so much ahead of the key's goes on at once."""
        return self.staleness is None or ahead <= self.staleness


def consistency_from_spec(text: str) -> Consistency:
    """Return the consistency of a spec: "bsp", "async", or "bounded:s=3".

    Raises ConfigError: an unknown name or argument, or an s below 0.
    """
    name, arguments = parse_spec(text, FAMILIES)
    canonical = format_spec(name, arguments)
    if name == "bsp":
        return Consistency(canonical, 0, True)
    if name == "async":
        return Consistency(canonical, None, False)
    staleness = int(arguments["s"])
    if staleness < 0:
        raise ConfigError(f"{text!r}: s is by how many clocks a worker may be ahead, 0 or more; got {staleness}")
    return Consistency(canonical, staleness, False)
