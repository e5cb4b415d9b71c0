"""Say how large what a payload holds is, without unpacking it: as its codecs' scales tell, slab by slab.

Rule 1: two payloads of the same codecs can be compared, and one of float32 is never taken for larger than it is; the
measure of a coded one may be a few times its norm.  Rule 2: where a codec has no such measure (`Codec.energy`), its
slabs are decoded one by one, into memory that stays in a core's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np

from zmqtrain.codecs.codec import Codec, Scratch
from zmqtrain.codecs.payload import Slab, open_slabs
from zmqtrain.core.types import Buffer

_scratch = Scratch()


def payload_norm(codecs: Sequence[Codec], frames: Sequence[Buffer], counts: Sequence[int]) -> float:
    """Return what stands for the L2 norm of a payload that `check_payload` has passed; inf where float32 has no square.

    codecs, counts: of each segment.  Cost: of scales alone a twentieth of a decode; else that of a decode.
    """
    with np.errstate(over="ignore"):
        return sqrt(sum(_energy(slab, sections) for slab, sections in open_slabs(codecs, frames, counts)))


def _energy(slab: Slab, sections: Sequence[Buffer]) -> float:
    if slab.codec.energy is not None:
        return slab.codec.energy(sections, slab.values)
    values = _scratch.take("values", slab.values, np.float32)
    slab.codec.decode_into(sections, values, False)
    return float(np.dot(values, values))
