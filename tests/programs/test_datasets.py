"""Files are read as they are, split the same way every time, and refused in words that help."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest

from zmqtrain.core.errors import DataError
from zmqtrain.programs import datasets
from zmqtrain.programs.datasets import load_digits, load_image_folder, load_text, read_idx


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "float32", "float64"])
@pytest.mark.parametrize("name", ["array", "array.gz"])
def test_an_idx_file_gives_back_the_array_of_any_type_gzipped_or_not(tmp_path, write_idx, dtype, name):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    found = read_idx(write_idx(tmp_path / name, array))
    assert found.dtype == array.dtype and found.dtype.isnative
    np.testing.assert_array_equal(found, array)


def test_a_gzipped_file_is_told_by_its_bytes_not_by_its_name(tmp_path, write_idx):
    packed = write_idx(tmp_path / "a.gz", np.arange(5, dtype=np.uint8))
    np.testing.assert_array_equal(read_idx(packed.rename(tmp_path / "a")), np.arange(5))


def test_a_missing_idx_file_says_what_to_check(tmp_path):
    with pytest.raises(DataError, match=r"absent cannot be read \(No such file.*on each"):
        read_idx(tmp_path / "absent")


@pytest.mark.parametrize(
    "content", [b"", b"\0\0", b"PNG!....", b"\0\0\x07\x01....", b"\0\0\x08\x00", b"\0\0\x08\x05...."]
)
def test_a_file_with_another_beginning_is_no_idx_file(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is no IDX file: it begins with .* where 00 00, a type .* are expected"):
        read_idx(path)


@pytest.mark.parametrize(("size", "found"), [(5, "only 4"), (3, "more")])
def test_an_idx_file_that_holds_more_or_less_than_it_announces_is_refused(tmp_path, size, found):
    path = tmp_path / "file"
    path.write_bytes(b"\0\0\x08\x01" + size.to_bytes(4, "big") + b"abcd")
    with pytest.raises(DataError, match=f"announces {size} values, {size} bytes, but holds {found}; copy it again"):
        read_idx(path)


def test_an_idx_file_cut_off_inside_its_head_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\0\0\x08\x03\0\0\0\x05\0\0")
    with pytest.raises(DataError, match="cut off inside its head, after 10 bytes"):
        read_idx(path)


def test_an_idx_file_that_announces_too_much_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\0\0\x08\x02" + b"\xff" * 8)
    with pytest.raises(DataError, match="announces 4,294,967,295 x 4,294,967,295 values"):
        read_idx(path)


@pytest.mark.parametrize("damage", ["truncated", "garbled", "not gzip"])
def test_a_damaged_gzip_file_is_refused(tmp_path, write_idx, damage):
    path = write_idx(tmp_path / "array.gz", np.random.default_rng(0).integers(0, 255, 2000).astype(np.uint8))
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        del content[1000:]
    elif damage == "garbled":
        content[-8:-4] = bytes(byte ^ 0xFF for byte in content[-8:-4])
    else:
        content[2:] = b"\x08 and then something else"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"array\.gz (is a damaged gzip file|cannot be read|announces)"):
        read_idx(path)


def test_a_lone_pair_is_split_nine_to_one_by_position(image_folder):
    images = load_image_folder(image_folder)
    assert [len(images.training_images), len(images.held_out_images)] == [99, 11]
    numbers = np.concatenate([images.training_images, images.held_out_images])[:, 0, 1]
    np.testing.assert_array_equal(numbers, np.arange(110))
    np.testing.assert_array_equal(images.held_out_labels, np.arange(99, 110) % 3)
    assert images.classes == 3


def test_ten_thousand_images_alone_hold_out_the_last_thousand(tmp_path, write_idx):
    write_idx(tmp_path / "t10k-images-idx3-ubyte", np.zeros((10_000, 1, 1), np.uint8))
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.repeat([0, 1], [9000, 1000]).astype(np.uint8))
    images = load_image_folder(tmp_path)
    assert [images.training_labels.sum(), images.held_out_labels.sum()] == [0, 1000]


def test_two_pairs_keep_their_own_split(image_folder, write_idx):
    write_idx(image_folder / "train-images.idx3-ubyte", np.ones((20, 9, 7), np.uint8))
    write_idx(image_folder / "train-labels.idx1-ubyte", np.full(20, 4, np.uint8))
    images = load_image_folder(image_folder)
    assert [len(images.training_images), len(images.held_out_images), images.classes] == [20, 110, 5]


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("t10k-labels-idx1-ubyte", np.zeros(109, np.uint8), "holds 110 images, but .* 109 labels: not a pair"),
        ("t10k-labels-idx1-ubyte", np.zeros((110, 1), np.uint8), r"uint8\[110 x 1\], which are no labels"),
        ("t10k-labels-idx1-ubyte", np.zeros(110, np.float32), r"float32\[110\], which are no labels"),
        ("t10k-images-idx3-ubyte", np.zeros((0, 9, 7), np.uint8), r"uint8\[0 x 9 x 7\], which are no images"),
    ],
)
def test_images_and_labels_that_do_not_fit_are_refused(image_folder, write_idx, name, array, message):
    write_idx(image_folder / name, array)
    with pytest.raises(DataError, match=message):
        load_image_folder(image_folder)


def test_images_without_labels_name_the_missing_file(image_folder):
    (image_folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte.* is missing"):
        load_image_folder(image_folder)


def test_pairs_of_different_sizes_are_refused(image_folder, write_idx):
    write_idx(image_folder / "train-images-idx3-ubyte", np.ones((20, 8, 8), np.uint8))
    write_idx(image_folder / "train-labels-idx1-ubyte", np.zeros(20, np.uint8))
    with pytest.raises(DataError, match="training images of 8 x 8 and held-out images of 9 x 7 pixels"):
        load_image_folder(image_folder)


def test_too_few_images_to_hold_any_out_are_refused(tmp_path, write_idx):
    write_idx(tmp_path / "t10k-images-idx3-ubyte", np.ones((9, 8, 8), np.uint8))
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.zeros(9, np.uint8))
    with pytest.raises(DataError, match="too few images to hold one out in 10"):
        load_image_folder(tmp_path)


def test_a_folder_that_is_none_or_holds_none_says_so(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_image_folder(tmp_path / "absent")
    with pytest.raises(DataError, match="holds no images: train-images-idx3-ubyte"):
        load_image_folder(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is a file, not a folder"):
        load_image_folder(tmp_path / "file")


def test_without_scikit_learn_the_digits_say_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"--program-arguments data=FOLDER .*pip install -e '\.\[datasets\]'"):
        load_digits()


def test_the_digits_are_scaled_to_bytes_and_split_at_1500():
    digits = load_digits()
    assert digits.training_images.shape == (1500, 8, 8) and digits.held_out_images.shape == (297, 8, 8)
    assert [digits.training_images.min(), digits.training_images.max(), digits.classes] == [0, 255, 10]


def test_a_text_holds_out_its_last_tenth(text_file):
    text = load_text(text_file)
    assert [len(text.training), len(text.held_out)] == [4500, 500]
    assert text.training.tobytes() + text.held_out.tobytes() == text_file.read_bytes()


def test_a_text_that_cannot_be_read_says_what_to_check(tmp_path):
    with pytest.raises(DataError, match=r"the text .*absent cannot be read \(No such file.*on each"):
        load_text(tmp_path / "absent")
    with pytest.raises(DataError, match=r"cannot be read \(Is a directory\)"):
        load_text(tmp_path)


def test_a_text_of_a_few_bytes_is_refused(tmp_path):
    (tmp_path / "short").write_bytes(b"123456789")
    with pytest.raises(DataError, match="holds 9 bytes: too few"):
        load_text(tmp_path / "short")


def test_the_standard_library_is_the_same_text_on_every_call():
    first, second = load_text(), load_text()
    assert first.training.tobytes() == second.training.tobytes()
    assert first.held_out.tobytes() == second.held_out.tobytes()
    assert 0.03 < len(first.held_out) / len(first.training) < 0.3
    assert len(first.training) + len(first.held_out) <= datasets.STANDARD_LIBRARY_BYTES


def make_library(folder: Path, names: list[str]) -> None:
    (folder / "json").mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(f"<{name}>".encode())


def test_the_standard_library_holds_out_whole_modules_whatever_else_lies_there(tmp_path, monkeypatch):
    names = [
        "ast.py",
        "bisect.py",
        "calendar.py",
        "copy.py",
        "csv.py",
        "dis.py",
        "json/decoder.py",
        "queue.py",
        "types.py",
    ]
    make_library(tmp_path, names)
    monkeypatch.setattr(datasets.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(datasets, "HELD_OUT_FRACTION", 3)
    before = load_text()
    modules = {part: set(getattr(before, part).tobytes()[1:-1].split(b"><")) for part in ("training", "held_out")}
    assert modules["training"] | modules["held_out"] == {name.encode() for name in names}
    assert not modules["training"] & modules["held_out"]
    make_library(tmp_path, ["mine.py", "os.py", "heapq.py"])
    after = load_text()
    assert b"<mine.py>" not in after.training.tobytes() + after.held_out.tobytes()
    assert modules["held_out"] <= set(after.held_out.tobytes()[1:-1].split(b"><"))
    assert modules["training"] <= set(after.training.tobytes()[1:-1].split(b"><"))


def test_an_installation_without_sources_says_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(DataError, match="--program-arguments data=FILE"):
        load_text()


def test_a_gzip_bomb_is_read_no_further_than_announced(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\x02" + bytes(5_000_000)))
    with pytest.raises(DataError, match="announces 2 values, 2 bytes, but holds more"):
        read_idx(path)
