"""Decide whether what welcomes a node is the hub of its run (pure).

Rule: a hub of another run, of an earlier term, or one that knows less than the node has seen is not believed: to follow
it would be to lose what was learnt. People are told which it is, and what to do.
"""

from __future__ import annotations

from zmqtrain.core.types import Version
from zmqtrain.protocol.messages import Welcome


def disbelief(
    welcome: Welcome, run: str, term: int, version: Version, may_begin_anew: bool = False
) -> tuple[str, str] | None:
    """Return why a hub is not believed, as a code ("run", "term", "version") and a sentence; None if it is.

    run: of the node, "" if it has none.  term, version: the highest that it knows.  may_begin_anew: with another run.
    """
    if run and welcome.run != run and not may_begin_anew:
        return "run", (
            f"the broker now runs {welcome.run}, this node belongs to {run}. Restart the broker with the checkpoint of "
            "the old run, or stop this node and start it again to join the new run (with --new-run where it has a "
            "checkpoint)"
        )
    if welcome.term < term:
        return "term", (
            f"the broker here is that of term {welcome.term} of {run}, and its standby has taken over: this node knows "
            f"one of term {term}. Stop this broker, or start it again as the standby of that one"
        )
    if welcome.version < version:
        return "version", (
            f"the broker is at version {welcome.version} of {run}, this node has seen {version}: it was restarted from "
            "an older state. Restart it with the newest checkpoint folder, or stop this node and start it again"
        )
    return None
