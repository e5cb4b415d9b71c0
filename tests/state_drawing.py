"""Draw the states of a member and of a peer from the tables that are the machines, as Mermaid for docs/design.md.

PYTHONPATH=. python tests/state_drawing.py
"""

from __future__ import annotations

from collections import defaultdict

from zmqtrain.protocol.members import MEMBER_TRANSITIONS
from zmqtrain.protocol.peer import PEER_TRANSITIONS, Move, PeerState


def draw_peer() -> str:
    """Return the moves of a node's state. A cause that leads from every state to the same one is drawn once."""
    causes = defaultdict[tuple[str, str], list[str]](list)
    states = {state for state, _ in PEER_TRANSITIONS}
    for (state, cause), after in PEER_TRANSITIONS.items():
        name = cause.name.lower() if isinstance(cause, Move) else cause.__name__
        everywhere = isinstance(cause, Move) and all(
            PEER_TRANSITIONS.get((one, cause)) == after for one in states - {PeerState.CLOSED, PeerState.CONNECTING}
        )
        pair = ("ANY", after.name) if everywhere else (state.name, after.name)
        if name not in causes[pair]:
            causes[pair].append(name)
    return _diagram({pair: ", ".join(names) for pair, names in causes.items()})


def draw_member() -> str:
    """Return the moves between the states in which the hub holds a node."""
    return _diagram({(state.name, after.name): "" for state, moves in MEMBER_TRANSITIONS.items() for after in moves})


def _diagram(moves: dict[tuple[str, str], str]) -> str:
    lines = [f"    {before} --> {after}{f': {why}' if why else ''}" for (before, after), why in sorted(moves.items())]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```"])


if __name__ == "__main__":
    print(draw_peer(), draw_member(), sep="\n\n")
