"""Find a codec by its name: the one list of the family.

Rule: a codec's `name` is its spec in canonical form, and equal names give the same codec object.
"""

from __future__ import annotations

from collections.abc import Callable

from zmqtrain.codecs.codec import Codec
from zmqtrain.codecs.plain import bf16, float32
from zmqtrain.codecs.quantize import int8
from zmqtrain.codecs.ternary import ternary
from zmqtrain.errors import ConfigError
from zmqtrain.specs import Number, format_spec, parse_spec

__all__ = ["FAMILIES", "LARGEST_BLOCK", "Codec", "codec_from_spec"]

LARGEST_BLOCK = 4096

FAMILIES: dict[str, dict[str, Number]] = {
    "float32": {},
    "bf16": {},
    "int8": {"block": 256},
    "ternary": {"block": 128},
}
"""Each member of the family and the defaults of its arguments."""

_MEMBERS: dict[str, Callable[..., Codec]] = {"float32": float32, "bf16": bf16, "int8": int8, "ternary": ternary}
_made: dict[str, Codec] = {}


def codec_from_spec(text: str) -> Codec:
    """Return the codec of a spec such as "ternary:block=128"; what is left out takes its default.

    Raises ConfigError: an unknown name or argument, or a block that is not in 1..4096; the message lists the choices.
    """
    name, arguments = parse_spec(text, FAMILIES)
    block = arguments.get("block", 1)
    if not 1 <= block <= LARGEST_BLOCK:
        raise ConfigError(f"{text!r}: block={block} is not in 1..{LARGEST_BLOCK}")
    canonical = format_spec(name, arguments)
    if canonical not in _made:
        _made.setdefault(canonical, _MEMBERS[name](**arguments))
    return _made[canonical]
