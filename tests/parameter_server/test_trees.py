"""Trees of arrays as keys."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.parameter_server.directory import name_leaves, rebuild


class Layer(NamedTuple):
    weight: object
    bias: object


TREE = {"layers": [Layer(1.0, None), Layer(2.0, 3.0)], "head": (4.0, {"scale": 5.0})}
KEYS = {"layers/0/weight": 1.0, "layers/1/weight": 2.0, "layers/1/bias": 3.0, "head/0": 4.0, "head/1/scale": 5.0}


def test_arrays_are_named_by_the_way_to_them():
    assert name_leaves(TREE) == KEYS


def test_a_tree_is_rebuilt_with_other_values():
    doubled = rebuild(TREE, {key: 2 * value for key, value in KEYS.items()})
    assert doubled == {"layers": [Layer(2.0, None), Layer(4.0, 6.0)], "head": (8.0, {"scale": 10.0})}
    assert isinstance(doubled["layers"][0], Layer)


@pytest.mark.parametrize(("tree", "words"), [(1.0, "wanted here, not float"), ({"a/b": 1, "a": {"b": 2}}, "'a/b'")])
def test_what_gives_no_keys_is_refused(tree, words):
    with pytest.raises(ConfigError, match=words):
        name_leaves(tree)
