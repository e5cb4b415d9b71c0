"""Know who has which shard of the model, where several masters share one run: kept by the first, which all know.

Rule 1: the first (shard 0) has the settings, the data units and the roster; the others register with it, and nodes are
told where they are.  Rule 2: a shard has one master: another that comes is refused while that one lives, but for one at
the very same address, which only its successor can have.  Rule 3: who has gone has no address here; the nodes that know
it go on trying.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from zmqtrain.core.types import PeerId

RUN_OVER = "the run is over"
"""The reason of the first's Goodbye that ends the other masters too; after any other they wait for it."""

ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.%\w]+\]|[^\s:/\[\]*]+):[1-9]\d{0,4}", re.ASCII)
"""What nodes connect to: every one of them is told it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a master says of itself when it registers: its shard, and the address at which nodes reach it."""

    shard: int
    address: str


def name_missing(masters: Sequence[str]) -> str:
    """Return which shards have no master now, in words for people; "" if none is missing."""
    missing = [str(shard) for shard, address in enumerate(masters) if shard and not address]
    if not missing:
        return ""
    which = f"shard {missing[0]}" if len(missing) == 1 else f"shards {', '.join(missing[:-1])} and {missing[-1]}"
    return f"the {'master' if len(missing) == 1 else 'masters'} of {which} of {len(masters)}"


class Masters:
    """The masters of one run, as its first knows them. count: how many there are with the first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._claims: dict[int, tuple[PeerId, str]] = {}

    def claim(self, peer: PeerId, claim: Claim) -> tuple[str, PeerId | None]:
        """Register a master; return (why it is refused, "" if it is not; whom it succeeds, None for nobody)."""
        shard, last = claim.shard, self.count - 1
        if self.count == 1:
            return "this broker has the whole model; start it with --shard 0/M to divide that among M masters", None
        if not 1 <= shard <= last:
            return f"shard {shard}/{self.count}: the first has shard 0, the others have 1 to {last}", None
        if not ADDRESS.fullmatch(claim.address):
            return f"{claim.address!r} is no address at which nodes reach it: --address tcp://HOST:PORT", None
        holder, address = self._claims.get(shard, (peer, claim.address))
        if holder != peer and address != claim.address:
            text = (
                f"shard {shard}/{self.count} has a master already, at {address}: stop that one first, or take another "
                "shard (one that has just died is forgotten within seconds)"
            )
            return text, None
        self.forget(peer)  # what it had before, if it was another
        self._claims[shard] = (peer, claim.address)
        return "", holder if holder != peer else None

    def forget(self, peer: PeerId) -> None:
        """Take note that a master has gone."""
        self._claims = {shard: one for shard, one in self._claims.items() if one[0] != peer}

    @property
    def addresses(self) -> tuple[str, ...]:
        """By shard where its master is, "" where none is; of the first, which who asks has reached, "" too.

        () where there is one master.
        """
        if self.count == 1:
            return ()
        return tuple(self._claims.get(shard, ("", ""))[1] for shard in range(self.count))
