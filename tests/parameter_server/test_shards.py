"""Keys over brokers: every value once, the same on all clients, and nearly the same bytes everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grids import examples
from zmqtrain.core.errors import ConfigError
from zmqtrain.parameter_server.directory import ITEM_BYTES, PIECE_BYTES, SPLIT_BYTES, Piece, ShardMap

batches = st.lists(
    st.dictionaries(
        st.text(min_size=1, max_size=3),
        st.tuples(st.integers(1, 3000), st.sampled_from(sorted(ITEM_BYTES))),
        max_size=6,
    ),
    max_size=8,
)


@settings(max_examples=examples(40))
@given(batches, st.integers(1, 9), st.integers(8, 2000))
def test_every_value_of_a_key_lies_on_one_shard_in_order(keys, count, split_bytes):
    shards = ShardMap(count, split_bytes)
    for batch in keys:
        new = {key for key in batch if key not in shards.pieces}
        for key, pieces in shards.place(batch).items():
            if key in new:
                values, _ = batch[key]
                assert [piece.start for piece in pieces] == [
                    sum(piece.values for piece in pieces[:before]) for before in range(len(pieces))
                ]
                assert sum(piece.values for piece in pieces) == values and all(piece.values for piece in pieces)
                assert [piece.shard for piece in pieces] == sorted(piece.shard for piece in pieces)


@settings(max_examples=examples(40))
@given(batches, st.integers(1, 9), st.integers(8, 2000))
def test_no_two_shards_differ_by_more_than_the_bound_at_any_time(keys, count, split_bytes):
    shards = ShardMap(count, split_bytes)
    held = [0] * count
    for batch in keys:
        new = {key: batch[key][1] for key in batch if key not in shards.pieces}
        placed = shards.place(batch)
        for key, dtype in new.items():
            for piece in placed[key]:
                held[piece.shard] += piece.values * ITEM_BYTES[dtype]
        assert shards.loads == held
        assert max(held) - min(held) <= split_bytes


@settings(max_examples=examples(40))
@given(batches, st.integers(1, 9), st.randoms())
def test_the_map_does_not_depend_on_how_a_client_orders_its_keys(keys, shards, random):
    ours, theirs = ShardMap(shards, 100), ShardMap(shards, 100)
    for batch in keys:
        names = list(batch)
        random.shuffle(names)
        assert ours.place(batch) == theirs.place({key: batch[key] for key in names})


def test_a_key_stays_where_it_is():
    shards = ShardMap(2)
    placed = shards.place({"w": (10, "float32")})
    assert shards.place({"w": (10**9, "float64"), "b": (1, "float32")})["w"] == placed["w"] == shards.pieces["w"]


def test_of_a_large_key_each_shard_has_a_part_and_a_small_one_lies_on_one():
    shards = ShardMap(4)
    values = SPLIT_BYTES // 4
    assert shards.place({"small": (values, "float32")})["small"] == (Piece(0, 0, values),)
    assert [piece.values for piece in shards.place({"large": (values + 3, "float32")})["large"]] == [
        values // 4,
        values // 4 + 1,
        values // 4 + 1,
        values // 4 + 1,
    ]


def test_what_a_shard_has_of_a_key_is_cut_so_that_the_first_comes_back_while_the_last_goes_up():
    values = 3 * PIECE_BYTES // 4
    pieces = ShardMap(2).place({"w": (values, "float32")})["w"]
    assert [piece.shard for piece in pieces] == [0, 0, 1, 1]
    assert sum(piece.values for piece in pieces) == values
    assert max(piece.values for piece in pieces) * 4 == PIECE_BYTES
    assert pieces[1].name("w", values) == f"w[{pieces[1].start}:{pieces[2].start}]"
    (whole,) = ShardMap(2).place({"b": (10, "float32")})["b"]
    assert whole.name("b", 10) == "b"


def test_a_restored_map_goes_on_as_the_first():
    ours, theirs = ShardMap(3, 100), ShardMap(3, 100)
    for key, pieces in ours.place({"a": (1000, "float32"), "b": (7, "float64")}).items():
        theirs.add(key, {"a": "float32", "b": "float64"}[key], pieces)
    assert ours.place({"c": (5, "float32")}) == theirs.place({"c": (5, "float32")})


@pytest.mark.parametrize("key", [(0, "float32"), (3, "int8")])
def test_what_cannot_be_a_key_is_refused(key):
    with pytest.raises(ConfigError, match="one at least"):
        ShardMap(2).place({"w": key})


@pytest.mark.parametrize("arguments", [(0,), (2, 4)])
def test_a_map_needs_a_shard_and_a_value(arguments):
    with pytest.raises(ConfigError):
        ShardMap(*arguments)
