"""The checksum is zlib's, whichever library counts it."""

from __future__ import annotations

import importlib
import sys
import zlib

import numpy as np
import pytest

from zmqtrain.core import checksum


@pytest.fixture(params=["zlib-ng", "zlib"])
def crc32(request, monkeypatch):
    if request.param == "zlib":
        monkeypatch.setitem(sys.modules, "zlib_ng.zlib_ng", None)
    counted = importlib.reload(checksum).crc32
    assert counted.__module__ == {"zlib-ng": "zlib_ng.zlib_ng", "zlib": "zlib"}[request.param]
    yield counted
    monkeypatch.undo()
    importlib.reload(checksum)
    assert counted is (zlib.crc32 if request.param == "zlib" else checksum.crc32)


@pytest.mark.parametrize("size", [0, 1, 7, 64, 1000, 65_537, 1 << 20])
def test_it_is_that_of_zlib_and_goes_on_from_another(crc32, size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert crc32(data) == zlib.crc32(data)
    assert crc32(memoryview(data)[size // 3 :], crc32(data[: size // 3].tobytes())) == zlib.crc32(data)
