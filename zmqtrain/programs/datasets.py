"""The data of the built-in programs, read from files that exist already: nothing is ever downloaded.

Rule 1: what is read is the same on every call, and split into training and held-out data the same way on every node.
Rule 2: a file is believed only as far as its size bears out; what is wrong, what was expected and what to type next are
in the one paragraph of the error.  Rule 3: numpy only; what jax makes of the arrays is the programs' matter.
"""

from __future__ import annotations

import gzip
import sys
import sysconfig
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from zmqtrain.core.errors import DataError
from zmqtrain.core.installed import how_to_install

IDX_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MAX_IDX_BYTES = 1 << 32
GZIP_MAGIC = b"\x1f\x8b"
HELD_OUT_FRACTION = 10
"""One part in so many is held out, wherever the data does not bring a split of its own."""

DIGITS_HELD_OUT = 297
DIGITS_LARGEST = 16.0
STANDARD_LIBRARY_PACKAGES = (
    "asyncio", "collections", "ctypes", "email", "html", "http", "importlib", "json", "logging", "multiprocessing",
    "sqlite3", "unittest", "urllib",
)  # fmt: skip
STANDARD_LIBRARY_BYTES = 8_000_000


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled images: images uint8[n, height, width], labels int32[n] in 0..classes-1, and where they came from."""

    training_images: npt.NDArray[np.uint8]
    training_labels: npt.NDArray[np.int32]
    held_out_images: npt.NDArray[np.uint8]
    held_out_labels: npt.NDArray[np.int32]
    classes: int
    source: str


@dataclass(frozen=True, eq=False)
class Text:
    """A text as bytes: training uint8[n], held_out uint8[m], and where it came from."""

    training: npt.NDArray[np.uint8]
    held_out: npt.NDArray[np.uint8]
    source: str


def read_idx(path: str | Path) -> npt.NDArray[Any]:
    """Return the array of an IDX file, gzipped or not (told by its first bytes), in the machine's own byte order.

    Raise DataError if it cannot be opened, is no IDX file, or holds fewer or more bytes than its head announces.
    Source: the format's description on the page of the MNIST database (LeCun, Cortes, Burges).
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            packed = file.read(2) == GZIP_MAGIC
        with gzip.open(path) if packed else path.open("rb") as file:
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in IDX_DTYPES or not 1 <= head[3] <= 4:
                raise DataError(
                    f"{path} is no IDX file: it begins with {head.hex(' ') or 'nothing'}, where 00 00, a type "
                    f"(08 for bytes) and 1 to 4 dimensions are expected; give the file as it was published"
                )
            dtype, dimensions = np.dtype(IDX_DTYPES[head[2]]), head[3]
            sizes = file.read(4 * dimensions)
            if len(sizes) < 4 * dimensions:
                raise DataError(f"{path} is cut off inside its head, after {4 + len(sizes)} bytes; copy it again")
            shape = tuple(int(size) for size in np.frombuffer(sizes, ">u4"))
            expected = prod(shape) * dtype.itemsize
            if expected > MAX_IDX_BYTES:
                raise DataError(
                    f"{path} announces {_by(shape)} values, {expected:,} bytes: more than {MAX_IDX_BYTES:,}"
                )
            content = file.read(expected + 1)
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path} is a damaged gzip file ({error}); copy it again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); {_LIES_ON_EVERY_NODE}") from error
    if len(content) != expected:
        found = f"only {len(content):,}" if len(content) < expected else "more"
        raise DataError(f"{path} announces {_by(shape)} values, {expected:,} bytes, but holds {found}; copy it again")
    return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def load_image_folder(path: str | Path) -> Images:
    """Read a folder of IDX pairs under the names of MNIST (train-images-idx3-ubyte and so on, with or without .gz).

    With both pairs, "train" is trained on and "t10k" held out. With one pair only, its first nine tenths are trained on
    and the rest is held out: of the 10,000 images of t10k alone, the first 9,000 and the last 1,000.
    Raise DataError if a file is missing or wrong, or if images and labels do not fit each other.
    """
    folder = Path(path)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise DataError(f"the image folder {folder} {what}; {_LIES_ON_EVERY_NODE}")
    pairs = {part: _read_pair(folder, part) for part in ("train", "t10k") if _find(folder, part, "images", 3)}
    if not pairs:
        raise DataError(
            f"{folder} holds no images: train-images-idx3-ubyte and t10k-images-idx3-ubyte with their labels (or one "
            f"of the two pairs), gzipped or not, are expected, as in MNIST; name the folder that holds them"
        )
    if len(pairs) == 2:
        training, held_out = pairs["train"], pairs["t10k"]
    else:
        ((images, labels),) = pairs.values()
        count = len(images) - len(images) // HELD_OUT_FRACTION
        training, held_out = (images[:count], labels[:count]), (images[count:], labels[count:])
    return _check_images(training, held_out, str(folder))


def digest(*arrays: npt.NDArray[Any]) -> str:
    """Return a digest of arrays, of their values, shapes and types: 16 hexadecimal digits."""
    hashed = blake2b(digest_size=8)
    for array in map(np.ascontiguousarray, arrays):
        hashed.update(f"{array.dtype.str}{array.shape}".encode())
        hashed.update(array.tobytes())
    return hashed.hexdigest()


def load_digits() -> Images:
    """Return the 1,797 handwritten digits of scikit-learn, 8x8, scaled to 0..255; the last 297 are held out.

    Raise DataError if scikit-learn is not installed.
    """
    try:
        digits = import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise DataError(
            "the digits come with scikit-learn, which is not installed here. Train on images of your own "
            "(--program-arguments data=FOLDER at the broker, a folder in the format of MNIST), or type:  "
            f"{how_to_install('datasets')}"
        ) from error
    images = np.rint(digits.images * (255 / DIGITS_LARGEST)).astype(np.uint8)
    labels = digits.target.astype(np.int32)
    count = len(images) - DIGITS_HELD_OUT
    return _check_images((images[:count], labels[:count]), (images[count:], labels[count:]), "scikit-learn's digits")


def load_text(path: str | Path | None = None) -> Text:
    """Return a text as bytes: one file, or (None) the source code of this machine's Python standard library.

    Of a file, the last tenth is held out. Of the standard library, whole modules are: those whose names have a CRC-32
    divisible by ten, so that nodes with different versions of Python hold out the same modules.
    Raise DataError if there is nothing to read.
    """
    if path is None:
        return _load_standard_library(Path(sysconfig.get_path("stdlib")))
    content = np.frombuffer(_read_bytes(Path(path)), np.uint8)
    count = len(content) - len(content) // HELD_OUT_FRACTION
    if count == len(content):
        raise DataError(f"{path} holds {len(content)} bytes: too few for a text to train on; name a longer one")
    return Text(content[:count], content[count:], str(path))


_LIES_ON_EVERY_NODE = (
    "check the path: the run's settings give the same one to every node, so the data must lie there on each"
)


def _load_standard_library(folder: Path) -> Text:
    names = sorted(
        file.relative_to(folder).as_posix()
        for directory in (folder, *(folder / package for package in STANDARD_LIBRARY_PACKAGES))
        for file in directory.glob("*.py")
        if directory != folder or file.stem in sys.stdlib_module_names
    )
    training: list[bytes] = []
    held_out: list[bytes] = []
    total = 0
    for name in names:
        content = _read_bytes(folder / name)
        if (total := total + len(content)) > STANDARD_LIBRARY_BYTES:
            break
        (training if zlib.crc32(name.encode()) % HELD_OUT_FRACTION else held_out).append(content)
    if not training or not held_out:
        raise DataError(
            f"{folder} holds no source of Python's standard library (some installations leave it out); train on a text "
            f"of your own: --program-arguments data=FILE"
        )
    source = "the source of Python's standard library"
    return Text(np.frombuffer(b"".join(training), np.uint8), np.frombuffer(b"".join(held_out), np.uint8), source)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"the text {path} cannot be read ({error.strerror or error}); {_LIES_ON_EVERY_NODE}") from error


def _find(folder: Path, part: str, what: str, dimensions: int) -> Path | None:
    names = (f"{part}-{what}{dot}idx{dimensions}-ubyte{end}" for dot in "-." for end in ("", ".gz"))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read_pair(folder: Path, part: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    image_path, label_path = _find(folder, part, "images", 3), _find(folder, part, "labels", 1)
    if image_path is None or label_path is None:
        raise DataError(f"{folder} holds images without labels: {part}-labels-idx1-ubyte[.gz] is missing beside them")
    images, labels = read_idx(image_path), read_idx(label_path)
    _expect(image_path, images, 3, "images")
    _expect(label_path, labels, 1, "labels")
    if len(images) != len(labels):
        raise DataError(
            f"{image_path} holds {len(images):,} images, but {label_path} {len(labels):,} labels: not a pair"
        )
    return images, labels.astype(np.int32)


def _expect(path: Path, array: npt.NDArray[Any], dimensions: int, what: str) -> None:
    if array.dtype != np.uint8 or array.ndim != dimensions or array.size == 0:
        raise DataError(
            f"{path} holds {array.dtype}[{_by(array.shape)}], which are no {what}: bytes in {dimensions} dimension"
            f"{'s' * (dimensions > 1)}, not empty, are expected"
        )


def _check_images(
    training: tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]],
    held_out: tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]],
    source: str,
) -> Images:
    if not len(training[0]) or not len(held_out[0]):
        raise DataError(f"{source} holds too few images to hold one out in {HELD_OUT_FRACTION}; name a larger set")
    if training[0].shape[1:] != held_out[0].shape[1:]:
        raise DataError(
            f"{source} holds training images of {_by(training[0].shape[1:])} and held-out images of "
            f"{_by(held_out[0].shape[1:])} pixels: they must be of one size"
        )
    classes = 1 + max(int(training[1].max()), int(held_out[1].max()))
    return Images(*training, *held_out, classes, source)


def _by(shape: Iterable[int]) -> str:
    return " x ".join(f"{size:,}" for size in shape)
