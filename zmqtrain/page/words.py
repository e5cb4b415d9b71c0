"""Sentences of the page: how the nodes exchange, and when the hub releases a version."""

from __future__ import annotations

from collections.abc import Mapping

from zmqtrain.cli.display import plural
from zmqtrain.core.errors import ConfigError
from zmqtrain.protocol.messages import printable
from zmqtrain.protocol.rounds import (
    AfterAll,
    AfterCount,
    AfterQuorum,
    AfterTime,
    BoundedStaleness,
    Immediately,
    release_rule_from_spec,
)


def say_exchange(every: int, delay: int, codec: str, broadcast_codec: str = "") -> str:
    """Return k, d and the codecs as a sentence; "" while k is not known."""
    if every < 1:
        return ""
    applied = "at once" if not delay else f"{plural(delay, 'step')} later (d = {delay})"
    down = f", aggregates with {printable(broadcast_codec)}" if broadcast_codec not in ("", codec) else ""
    coded = f" Deltas are compressed with {printable(codec)}{down}." if codec else ""
    often = "step" if every == 1 else f"{every} steps"
    return f"A node offers a delta every {often} (k = {every}) and applies the answer {applied}.{coded}"


def say_release(spec: str, live: int) -> str:
    """Return a release rule as a sentence. spec: as in the settings; live: how many nodes there are now.

    An unknown rule (of a newer version's record) is named as it is.
    """
    try:
        rule = release_rule_from_spec(spec)
    except ConfigError:
        return f"A version is released by the rule {printable(spec)}."
    match rule:
        case AfterAll():
            when = "when every live node has contributed a delta"
        case AfterQuorum():
            of_now = f", now {rule.quorum(live)} of {live}," if live else ""
            count = f"{rule.count} nodes" if rule.count else "half of the live nodes"
            grace = " and a short grace for the others is over" if rule.share else ""
            patience = f"; {rule.patience:g} s after its first delta at the latest"
            when = f"when {count}{of_now} have contributed{grace}{patience}"
        case Immediately():
            when = "for each delta, at once"
        case AfterCount():
            when = f"when {plural(rule.contributions, 'delta')} have come, from any nodes"
        case AfterTime():
            when = f"every {rule.seconds:g} s, with the deltas that have come by then"
        case BoundedStaleness(staleness=0):
            when = "when every live node has contributed a delta"
        case BoundedStaleness():
            when = f"for each delta, but no node gets more than {plural(rule.staleness, 'delta')} ahead of the slowest"
        case _:
            when = f"by the rule {printable(spec)}"
    return f"A version is released {when}."


def say_program(settings: Mapping[str, object]) -> str:
    """Return what is trained, as "text (width=64)"."""
    program = printable(str(settings.get("program") or "")) or "custom loops"
    arguments = printable(str(settings.get("program_arguments") or ""))
    return f"{program} ({arguments})" if arguments else program
