"""One level of a tree of containers, taken apart and put together."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import pytest

from zmqtrain.core.types import children, like


class Layer(NamedTuple):
    weight: object
    bias: object


class Nothing(NamedTuple):
    pass


@pytest.mark.parametrize(
    "node, names",
    [
        ({"b": 1, "a": 2}, ["b", "a"]),
        ({}, []),
        ([1, 2], [0, 1]),
        ([], []),
        ((1, 2), [0, 1]),
        ((), []),
        (Layer(1, 2), ["weight", "bias"]),
        (Nothing(), []),
    ],
)
def test_what_was_taken_apart_is_put_together(node, names):
    inside = children(node)
    assert [name for name, _ in inside] == names
    again = like(node, [child for _, child in inside])
    assert again == node and type(again) is type(node)


def test_other_values_go_in_the_places_of_the_children():
    assert like({"b": 1, "a": 2}, [3, 4]) == {"b": 3, "a": 4}
    assert like(Layer(1, 2), [3, 4]) == Layer(3, 4)
    with pytest.raises(ValueError):
        like({"a": 1}, [1, 2])


def test_a_kind_of_dict_or_list_comes_back_plain():
    class Rows(list):
        pass

    assert type(like(OrderedDict(a=1), [2])) is dict and type(like(Rows([1]), [2])) is list


@pytest.mark.parametrize("leaf", [None, 1.0, "text", b"bytes", {1, 2}, range(3)])
def test_anything_else_is_no_container(leaf):
    assert children(leaf) is None
