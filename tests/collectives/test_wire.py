"""What is told between ranks comes back as it was; what is none of it is refused before anything is made of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.collectives import calls, matching
from zmqtrain.collectives.arrays import DTYPES, dtype_code, dtype_of_code, read_leaf, read_tree, take_tree
from zmqtrain.collectives.wire import HEAD_BYTES, MAX_TEXT_BYTES, Head, Kind, pack, unpack
from zmqtrain.core.errors import ConfigError, FramingError, LocalProtocolError
from zmqtrain.core.types import MAX_FRAME_BYTES

words = st.integers(0, 2**64 - 1)
heads = st.builds(
    Head,
    kind=st.sampled_from([int(kind) for kind in Kind]),
    number=words,
    size=words,
    place=st.integers(-(2**63), 2**63 - 1),
    digest=words,
    flag=st.integers(0, 255),
    text=st.text(max_size=50),
    context=st.integers(0, 2**32 - 1),
)


@settings(max_examples=examples(100))
@given(heads)
def test_a_head_comes_back_as_it_was(head: Head) -> None:
    assert unpack([pack(head, head.context)]) == (head, memoryview(b""))


@settings(max_examples=examples(200))
@given(st.lists(st.binary(max_size=80), min_size=1, max_size=3))
def test_any_bytes_are_a_message_or_are_refused(frames: list[bytes]) -> None:
    try:
        head, _ = unpack(frames)
    except FramingError:
        return
    assert head.kind in list(Kind)


def test_the_document_has_every_kind_with_its_number_and_the_limits() -> None:
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    section = text.partition("### What communicators say")[2].partition("\n### ")[0]
    told = {name: int(number) for number, name in re.findall(r"^\| (\d+) \| ([A-Z]+) \|", section, re.MULTILINE)}
    assert told == {kind.name: int(kind) for kind in Kind}
    assert f"a head of {HEAD_BYTES} bytes" in section
    limits = {
        "CONSUMED": calls.WINDOW_BYTES,
        "TAKEN": matching.WINDOW_BYTES,
        "RETURNED": matching.EAGER_WINDOW_BYTES,
    }
    for name, limit in limits.items():
        assert re.search(rf"\| {name} \|.* at most {limit >> 20} MiB", section)


def test_values_come_with_the_kinds_that_have_some_and_in_bounded_frames() -> None:
    values = unpack([pack(Head(Kind.PART, size=3), 0), b"abc"])[1]
    assert values is not None and bytes(values) == b"abc"
    with pytest.raises(FramingError, match="LEAVING message with 3 bytes"):
        unpack([pack(Head(Kind.LEAVING), 0), b"abc"])
    with pytest.raises(FramingError, match="bytes of values"):
        unpack([pack(Head(Kind.PART), 0), bytes(MAX_FRAME_BYTES + 1)])
    with pytest.raises(FramingError, match="utf-8"):
        unpack([pack(Head(Kind.CALLED), 0) + b"\xff"])
    with pytest.raises(FramingError, match="no message"):
        unpack([bytes(HEAD_BYTES + MAX_TEXT_BYTES + 1)])
    with pytest.raises(LocalProtocolError, match=r"bytes long, more than .*: join some"):
        pack(Head(Kind.EAGER, text="x" * (MAX_TEXT_BYTES + 1)), 0)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_has_a_code_and_a_name(name: str) -> None:
    dtype = dtype_of_code(DTYPES.index(name))
    assert dtype_code(dtype) == DTYPES.index(name) and read_leaf(f"{name}[2,3]").dtype == dtype


def test_what_does_not_travel_is_refused() -> None:
    for dtype in (object, "U3", "datetime64[s]", [("a", int)]):
        with pytest.raises(ConfigError, match="do not travel"):
            take_tree(np.empty(3, dtype))
    with pytest.raises(ConfigError, match="64 bits"):
        take_tree(1 << 70)
    with pytest.raises(ConfigError, match="keys of a dict"):
        take_tree({"a": 1, 2: 3})
    deep: Any = 1
    for _ in range(70):
        deep = [deep]
    with pytest.raises(ConfigError, match="64 deep"):
        take_tree(deep)
    with pytest.raises(ConfigError, match=r"bytes long, more than .*: join some"):
        take_tree([np.float32(1)] * 60_000)
    with pytest.raises(FramingError, match="no dtype"):
        dtype_of_code(99)


leaves = st.one_of(
    st.sampled_from(["float32", "int8", "complex128", ">f8"]).flatmap(
        lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(
            lambda shape: np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape).astype(dtype)
        )
    ),
    st.none(),
    st.integers(-9, 9),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("ab'\"\\{", max_size=3), inner, max_size=3),
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one is other is None or (np.shape(one) == np.shape(other) and np.array_equal(one, other))


@settings(max_examples=examples(150))
@given(trees)
def test_a_tree_comes_back_from_its_description_and_its_bytes(tree: Any) -> None:
    taken = take_tree(tree)
    assert same(taken.unpack(taken.pack()), tree)
    read = read_tree(taken.text)
    assert (read.shapes, read.nbytes) == (taken.shapes, len(taken.join()))
    assert same(read.unpack(read.split(np.frombuffer(bytes(taken.join()), np.uint8))), tree)


@settings(max_examples=examples(200))
@given(st.one_of(st.text(max_size=40), st.text("[](){}'\"float32:,0None", max_size=40)))
@example("{[]: 0}")
@example("[" + 400 * "9" + "+1j]")
def test_any_text_describes_a_tree_or_is_refused(text: str) -> None:
    try:
        read_tree(text)
    except FramingError:
        return


def test_the_order_in_which_a_dict_was_filled_does_not_matter() -> None:
    assert take_tree({"b": 1, "a": 2.0}).text == take_tree({"a": 2.0, "b": 1}).text
