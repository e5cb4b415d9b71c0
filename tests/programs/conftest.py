"""Small synthetic data for the programs: IDX files and a text that a tiny model can learn within seconds."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

CODES = {"uint8": 0x08, "int8": 0x09, "int16": 0x0B, "int32": 0x0C, "float32": 0x0D, "float64": 0x0E}


def idx_bytes(array: np.ndarray) -> bytes:
    """Return the bytes of an IDX file that holds `array`."""
    head = bytes([0, 0, CODES[array.dtype.name], array.ndim])
    return head + np.asarray(array.shape, ">u4").tobytes() + array.astype(array.dtype.newbyteorder(">")).tobytes()


@pytest.fixture(scope="session")
def write_idx() -> Callable[[Path, np.ndarray], Path]:
    """Return a function that writes an array as an IDX file, gzipped if the name ends so."""

    def write(path: Path, array: np.ndarray) -> Path:
        content = idx_bytes(array)
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return path

    return write


def striped_images(count: int, height: int = 9, width: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """Three classes that differ in the bright row; pixel (0, 0) and (0, 1) hold the image's number."""
    labels = (np.arange(count) % 3).astype(np.uint8)
    images = np.random.default_rng(0).integers(0, 40, (count, height, width), dtype=np.uint8)
    images[np.arange(count), 2 + 2 * labels] += 200
    images[:, 0, 0], images[:, 0, 1] = np.arange(count) // 256, np.arange(count) % 256
    return images, labels


@pytest.fixture(scope="session")
def same_images(tmp_path_factory: pytest.TempPathFactory, write_idx: Callable[[Path, np.ndarray], Path]) -> Path:
    """Return a folder with the t10k pair only: 110 images, so 99 to train on and 11 held out; no test changes it."""
    folder = tmp_path_factory.mktemp("images")
    images, labels = striped_images(110)
    write_idx(folder / "t10k-images-idx3-ubyte.gz", images)
    write_idx(folder / "t10k-labels-idx1-ubyte", labels)
    return folder


@pytest.fixture
def image_folder(tmp_path: Path, same_images: Path) -> Path:
    """Return a folder with those images that the test may change."""
    for file in same_images.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of 5,000 bytes in which each byte follows from the one before; no test changes it."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes((b"the quick brown fox jumps over the lazy dog. " * 112)[:5000])
    return path
