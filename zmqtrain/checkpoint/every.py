"""Say how often a checkpoint is due: after so much time, or after so many versions.

Rule: pure; who saves brings its own clock and its own versions.
"""

from __future__ import annotations

from dataclasses import dataclass

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.quantities import parse_duration

LEAST_SECONDS = 0.1
STRICT_VERSIONS = 64
"""Of the default in strict mode, whose nodes and broker save at the same versions."""
USUAL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Every:
    """How often to save: every so many seconds, or, if that is not 0, every so many versions.

    together: at the versions that are a multiple of that, as all others of the run do (strict mode).
    """

    seconds: float = USUAL_SECONDS
    versions: int = 0
    together: bool = False

    def is_due(self, version: int, saved_version: int, since_seconds: float) -> bool:
        """Return whether a checkpoint is due at `version`.

        saved_version: of the last one; since_seconds: since that was begun.
        """
        if self.together:
            return version != saved_version and version % self.versions == 0
        if self.versions:
            return version - saved_version >= self.versions
        return since_seconds >= self.seconds


def every_from_text(text: str, strict: bool = False) -> Every:
    """Return what was typed: "60s" or "5min", or "64" for a count of versions; "" is 60 s, in strict mode 64 versions.

    Raises ConfigError, also for a time in strict mode, and for less than 0.1 s.
    """
    if not text:
        return Every(versions=STRICT_VERSIONS, together=True) if strict else Every()
    if text.isdecimal():
        if int(text) < 1:
            raise ConfigError(f"checkpoint_every must be at least 1 version, or 0.1s, got {text!r}")
        return Every(versions=int(text), together=strict)
    seconds = parse_duration(text, "checkpoint_every, where it is no count of versions such as 64,")
    if seconds < LEAST_SECONDS:
        raise ConfigError(f"checkpoint_every must be at least {LEAST_SECONDS:g}s, or 1 version, got {text!r}")
    if strict:
        raise ConfigError(
            f"checkpoint_every = {text!r}: in strict mode the broker and all nodes save at the same versions, and a "
            f"time falls on others everywhere: give their number, the same for all, as {STRICT_VERSIONS}"
        )
    return Every(seconds=seconds)
