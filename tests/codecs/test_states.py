"""What a codec keeps is written and filled in again; what is another's is refused."""

from __future__ import annotations

import numpy as np
import pytest

from zmqtrain.codecs.base import codec_from_spec
from zmqtrain.codecs.codec import fill_states, pack_states
from zmqtrain.codecs.payload import encode_payload, initial_states
from zmqtrain.core.errors import CodecError

CODECS = ["lowrank:rank=2", "randomk:density=0.1+int8", "feedback+topk:density=0.1+int4", "momentum+int8", "ternary"]


@pytest.mark.parametrize("spec", CODECS)
def test_a_codec_goes_on_to_the_same_bytes(spec):
    codecs, counts, random = [codec_from_spec(spec)] * 2, [700, 90], np.random.default_rng(1)
    rounds = [[random.normal(size=count).astype(np.float32) for count in counts] for _ in range(4)]
    states = initial_states(codecs, counts)
    for segments in rounds[:2]:
        encode_payload(codecs, segments, states)
    again = fill_states(initial_states(codecs, counts), pack_states(states))
    for segments in rounds[2:]:
        ours, theirs = encode_payload(codecs, segments, states), encode_payload(codecs, segments, again)
        assert [bytes(frame) for frame in ours] == [bytes(frame) for frame in theirs]


def test_what_does_not_fit_is_refused():
    codec = codec_from_spec("feedback+int8")
    packed = pack_states(initial_states([codec], [100]))
    for like, arrays in (([200], packed), ([100, 100], packed), ([100], [*packed, *packed])):
        with pytest.raises(CodecError, match="the state of a codec"):
            fill_states(initial_states([codec] * len(like), like), arrays)
