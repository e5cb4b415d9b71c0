"""Take from what a peer wrote only what may stand in a log, a table or an answer.

Rule: what others wrote is bounded, and none of it moves a terminal's cursor or begins a line of its own.
"""

from __future__ import annotations

MAX_WORDS = 200
"""Characters of a sentence that a peer gives."""
MAX_SENTENCE = 1000
"""Characters of a refusal, which may quote what was refused."""
MAX_NAME = 64
"""Characters of a name, likewise."""


def words(text: str, most: int = MAX_WORDS) -> str:
    """Return at most `most` characters of a text; what cannot be printed is "?"."""
    short = text[:most]
    return short if short.isprintable() else "".join(one if one.isprintable() else "?" for one in short)
