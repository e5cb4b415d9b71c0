"""What the arguments of the built-in programs may be, as far as no data is needed to say it.

Rule: nothing here reaches jax: the broker, where these arguments are typed, checks them too.
"""

from __future__ import annotations

from zmqtrain.core.errors import ConfigError
from zmqtrain.programs.arguments import MOST_SEED, PLACE, require_at_least, require_choice, require_trainable

BYTES = 256
OPTIMIZERS = ("adamw", "muon")
MOST_RATE = 10**9


def check_text(
    *,
    width: int,
    layers: int,
    heads: int,
    context: int,
    batch: int,
    batches_per_unit: int,
    inner_optimizer: str,
    rate: float,
    warmup: int,
    weight_decay: float,
    clip: float,
    tied: bool,
    seed: int,
    **others: object,
) -> None:
    """Raise ConfigError, naming its place, for an argument of the text program that cannot be."""
    sizes = {"width": width, "layers": layers, "heads": heads, "context": context, "batch": batch}
    for name, value in (sizes | {"batches_per_unit": batches_per_unit}).items():
        require_at_least(name, value, 1)
    for name, rate_value in {"rate": rate, "warmup": warmup, "weight_decay": weight_decay}.items():
        require_at_least(name, rate_value, 0, MOST_RATE)
    require_at_least("seed", seed, 0, MOST_SEED)
    require_at_least("layers", layers, 1, 9999)
    values = layers * (12 * width + 2) * width + (2 - tied) * BYTES * width + width
    require_trainable(values, f"width={width} and layers={layers}")
    require_at_least("clip", clip, 1e-6)
    require_choice("inner_optimizer", inner_optimizer, OPTIMIZERS)
    if width % (2 * heads):
        raise ConfigError(
            f"{PLACE}.width must be a multiple of twice the heads (2 x {heads}, for the rotary positions), got {width}"
        )


def check_image(
    *, width: int, batch: int, batches_per_unit: int, rate: float, weight_decay: float, seed: int, **others: object
) -> None:
    """Raise ConfigError, naming its place, for an argument of the image program that cannot be."""
    for name, value in {"width": width, "batch": batch, "batches_per_unit": batches_per_unit}.items():
        require_at_least(name, value, 1)
    for name, rate_value in {"rate": rate, "weight_decay": weight_decay}.items():
        require_at_least(name, rate_value, 0, MOST_RATE)
    require_at_least("seed", seed, 0, MOST_SEED)
