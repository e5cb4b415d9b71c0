"""Laws of every codec in jitted JAX that cost little to compile: one value, a thousand rounds, and what is refused."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.grids import nightly
from zmqtrain.codecs.base import CODECS, TRANSFORMS, WRAPPERS, codec_from_spec
from zmqtrain.codecs.wrappers import error_feedback
from zmqtrain.core.errors import CodecError

from slabs import raw

SPECS = [*CODECS, *(f"{transform}+int8" for transform in TRANSFORMS), *(f"{wrapper}+int8" for wrapper in WRAPPERS)]
SPECS += ["ternary:fragments=4"]
"""Every member of the family, by its defaults."""
MANY_ROUNDS = ["ternary", "lowrank:rank=1", "topk:density=0.05+int4"]
MORE_ROUNDS = ["bf16", "int8", "int2", "sign", "randomk:density=0.1+int8s", "blocktopk+bf16", "dct:block=16+int8"]
MANY_ROUNDS += nightly(*MORE_ROUNDS)
LONE = [0.0, -0.0, 1.5, -3.0, 2.0**-100, -1.999 * 2.0**-101, 1e-45, np.finfo(np.float32).max]
"""Values that are all of a slab."""

every_codec = pytest.mark.parametrize("spec", SPECS)


def test_one_value_alone_is_coded_alike_whatever_it_is_and_what_is_not_finite_harms_nothing():
    codecs = [codec_from_spec(spec) for spec in SPECS]

    def all_of_them(x):
        coded = [codec.encode(x, codec.init(1)) for codec in codecs]
        return [
            (buffers, state, codec.decode(buffers, 1)) for codec, (buffers, state) in zip(codecs, coded, strict=True)
        ]

    rows = np.array([*LONE, np.nan, np.inf, -np.inf], np.float32)[:, None]
    theirs = jax.jit(jax.vmap(all_of_them))(rows)
    for row in range(len(LONE)):
        for codec, result in zip(codecs, theirs, strict=True):
            buffers, state = codec.encode(rows[row], codec.init(1))
            codec.check(raw(buffers), 1)
            ours = jax.tree.leaves((buffers, state, codec.decode(buffers, 1)))
            assert raw(ours) == raw(leaf[row] for leaf in jax.tree.leaves(result)), codec.name


@pytest.mark.parametrize("spec", MANY_ROUNDS)
def test_a_thousand_rounds_send_and_keep_what_numpy_does_and_lose_nothing(spec):
    codec, size = error_feedback(codec_from_spec(spec)), 259
    came = np.random.default_rng(7).standard_normal((1000, size)).astype(np.float32)

    def turn(state, x):
        buffers, state = codec.encode(x, state)
        return state, codec.decode(buffers, size)

    kept, sent = jax.jit(lambda state, came: jax.lax.scan(turn, state, came))(codec.init(size), came)
    state = codec.init(size)
    for number, x in enumerate(came):
        buffers, state = codec.encode(x, state)
        assert raw([codec.decode(buffers, size)]) == raw([sent[number]])
    assert raw(jax.tree.leaves(state)) == raw(jax.tree.leaves(kept))
    total = np.asarray(sent).sum(0, np.float64) + kept[0]
    np.testing.assert_allclose(total, came.sum(0, np.float64), atol=1000 * 64 * 2.0**-24)
    assert np.abs(kept[0]).max() < 60


@every_codec
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32"])
def test_another_dtype_is_refused_by_its_name(spec, dtype):
    codec = codec_from_spec(spec)
    for wrong in (np.ones(5, dtype), jnp.asarray(np.ones(5, dtype))):
        with pytest.raises(CodecError, match=rf"encodes float32\[n\] with n >= 1, not {re.escape(dtype)}\[5\]"):
            codec.encode(wrong, codec.init(5))


@every_codec
def test_buffers_of_wrong_number_shape_or_dtype_are_refused_when_they_are_traced(spec):
    codec = codec_from_spec(spec)
    good = [jax.ShapeDtypeStruct((count,), dtype) for dtype, count in codec.layout(300)]
    lies = [good[:-1], [*good, good[0]], []]
    for position, buffer in enumerate(good):
        (count,) = buffer.shape
        for shape, dtype in (((count + 1,), buffer.dtype), ((count, 1), buffer.dtype), ((count,), np.float16)):
            lies.append([*good[:position], jax.ShapeDtypeStruct(shape, dtype), *good[position + 1 :]])

    def decode(buffers):
        return codec.decode(buffers, 300)

    assert jax.eval_shape(decode, good) == jax.ShapeDtypeStruct((300,), np.float32)
    for lie in lies:
        with pytest.raises(CodecError):
            jax.eval_shape(decode, lie)
