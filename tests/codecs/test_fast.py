"""The law of machine code: the same bytes with numba and without, and nothing asked of those who have none."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings

from tests.grids import examples
from zmqtrain.codecs import fast
from zmqtrain.codecs.base import codec_from_spec
from zmqtrain.codecs.codec import chain
from zmqtrain.codecs.levels import int2, sign, ternary
from zmqtrain.codecs.payload import check_payload, encode_payload
from zmqtrain.codecs.plain import float32
from zmqtrain.codecs.quantize import int4, int4_stochastic, int8, int8_stochastic
from zmqtrain.codecs.sparsify import topk
from zmqtrain.core.errors import NonFiniteDelta

from slabs import raw, slabs

CODECS = [int8(), int8(7), int8_stochastic(), int8_stochastic(7), int4(), int4(5), int4_stochastic(5)]
CODECS += [ternary(), ternary(7), ternary(300), ternary(4096), sign(), int2()]
CODECS += [chain(topk(0.01), int8()), chain(topk(0.25), float32()), chain(topk(0.1), sign()), sign(5)]

LARGEST = np.finfo(np.float32).max

every_codec = pytest.mark.parametrize("codec", [pytest.param(codec, id=codec.name) for codec in CODECS])


@pytest.fixture(autouse=True)
def back_to_the_start():
    yield
    fast.use(None)


def all_of(codec, x, with_numba):
    """Everything a codec makes of x: its buffers, x decoded, and x decoded onto x."""
    fast.use(with_numba)
    buffers, _ = codec.encode(x, codec.init(x.size))
    total = np.array(x)
    with np.errstate(over="ignore"):
        codec.decode_into(raw(buffers), total, True)
    return raw([*buffers, codec.decode(raw(buffers), x.size), total])


@every_codec
@settings(max_examples=examples(100))
@given(x=slabs(range(1, 1001)))
@example(x=np.full(257, LARGEST, np.float32))
@example(x=np.full(8192, -LARGEST, np.float32))
@example(x=np.array([2.0**-100] + 128 * [1e-40], np.float32))
@example(x=np.array([LARGEST, 1.0, -1e-38, -0.0, 0.5], np.float32))
def test_the_bytes_and_the_values_are_the_same_with_numba_and_without(codec, x):
    assert all_of(codec, x, True) == all_of(codec, x, False)


@every_codec
def test_large_strided_and_unaligned_slabs_are_the_same_too(codec):
    x = np.random.default_rng(0).standard_normal(150_003).astype(np.float32)
    odd = np.frombuffer(b"-" + x.tobytes(), np.float32, offset=1)
    for view in (x, x[::2], odd):
        assert all_of(codec, view, True) == all_of(codec, view, False)
    fast.use(True)
    buffers, _ = codec.encode(x, codec.init(x.size))
    wide = np.zeros(2 * x.size, np.float32)
    codec.decode_into(buffers, wide[::2], True)
    assert raw([wide[::2]]) == raw([codec.decode(buffers, x.size)]) and not wide[1::2].any()


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_slab_that_is_not_finite_is_refused_wherever_it_is(codec, bad):
    fast.use(True)
    for position in (0, 299, 300, 601):
        x = np.ones(602, np.float32)
        x[position] = bad
        with pytest.raises(NonFiniteDelta, match="602 values"):
            codec.encode(x, codec.init(602))


def test_many_threads_use_the_machine_code_at_once():
    slab = np.random.default_rng(6).standard_normal((8, 65_536)).astype(np.float32)
    work = [(codec, row) for codec in (int8(), int4(), ternary(), chain(topk(), int8())) for row in slab]
    alone = [all_of(codec, row, True) for codec, row in work]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda item: all_of(*item, True), work)) == alone


def test_once_it_is_loaded_slabs_of_all_sizes_use_it_unless_one_chooses():
    assert fast.kernels(fast.LARGE_SLAB) is not None
    assert fast.kernels(1) is not None
    fast.use(False)
    assert fast.kernels(fast.LARGE_SLAB) is None
    fast.use(True)
    assert fast.kernels(1) is not None


def run(program):
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


PROGRAM = """
import hashlib, sys
import numpy as np
import zmqtrain
from zmqtrain.codecs.quantize import int8
def digest(count):
    x = np.arange(count, dtype=np.float32)
    buffers = int8().encode(x, ())[0]
    return hashlib.sha256(b"".join(map(bytes, (*buffers, int8().decode(buffers, count))))).hexdigest()
digest(1000)
assert "numba" not in sys.modules
print(digest(65536), "numba" in sys.modules)
"""

BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] == 'numba':
            raise ModuleNotFoundError(f'{name} is not installed here', name=name)
sys.meta_path.insert(0, Blocker())
"""


def test_numba_is_imported_at_the_first_large_slab_and_where_there_is_none_the_bytes_are_the_same():
    having, imported = run(PROGRAM).split()
    lacking, found = run(BLOCKER + PROGRAM).split()
    assert (imported, found) == ("True", "False")
    assert having == lacking


def test_who_asks_for_numba_where_there_is_none_is_told():
    refused = (
        "from zmqtrain.codecs import fast\ntry:\n    fast.use(True)\nexcept ImportError as error:\n    print(error)"
    )
    assert "numba is not installed" in run(BLOCKER + refused)


@pytest.mark.parametrize("spec", ["ternary", "topk:density=0.05+sign"])
def test_loops_that_numba_cannot_compile_are_left_to_numpy(spec, monkeypatch, caplog):
    def refuse(of):
        raise numba.core.errors.TypingError("not on this machine")

    codecs, counts = (codec_from_spec(spec),), (70_000,)
    values = [np.random.default_rng(0).standard_normal(70_000).astype(np.float32)]
    expected = encode_payload(codecs, values)
    for name in ("ternary_loops", "topk_signs_loops"):
        monkeypatch.setattr(fast, name, lambda: fast._compiled(refuse))
    assert encode_payload(codecs, values) == expected
    check_payload(codecs, expected, counts)
    assert "codecs run in numpy" in caplog.text
