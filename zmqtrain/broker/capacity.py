"""Refuse a model that this machine cannot hold, before anything is laid out for it.

Rule: what a founder claims costs the hub nothing until it is plausible: to lay out a model that no memory holds would
take seconds of the broker's loop, and to wait for its parameters all the memory there is.
"""

from __future__ import annotations

import os

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import ModelSpec, count_values

MODELS_HELD = 5
"""What a hub holds of a model at least, in float32: the parameters, what is published, a round's sum, an outer
optimizer's state, and a snapshot on its way."""


def check_capacity(model: ModelSpec, memory_bytes: int | None = None) -> None:
    """Raise ConfigError if a hub of this model needs more memory than there is.

    memory_bytes: None for this machine's.
    """
    if memory_bytes is None:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    values = count_values(model)
    if 4 * MODELS_HELD * values > memory_bytes:
        raise ConfigError(
            f"a model of {values:,} values needs {4 * MODELS_HELD * values / 2**30:.0f} GiB at its hub, which has "
            f"{memory_bytes / 2**30:.0f}: divide it among masters, each on a machine of its own"
        )
