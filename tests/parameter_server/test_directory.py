"""Where keys lie, and who brings their first values: exactly one client, whatever happens to it."""

from __future__ import annotations

import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import LeafSpec
from zmqtrain.parameter_server import directory as directories
from zmqtrain.parameter_server.directory import ASKS, Directory

W, B = LeafSpec("w", (3, 4), "float32"), LeafSpec("b", (4,), "float64")
WHERE = LeafSpec("w", (), ASKS)


def told(effects):
    return [
        (one.worker, one.request, [p.leaf.path for p in one.found], [p.leaf.path for p in one.given]) for one in effects
    ]


def test_the_first_brings_the_values_and_the_others_wait_for_them():
    directory = Directory(2)
    assert told(directory.declare("a", 1, [W, B])) == [("a", 1, ["w", "b"], [])]
    assert directory.declare("b", 5, [W, B]) == directory.declare("c", 6, [WHERE]) == []
    assert told(directory.founded("a", ["w", "b"])) == [("b", 5, [], ["w", "b"]), ("c", 6, [], ["w"])]
    assert told(directory.declare("d", 7, [B, W])) == [("d", 7, [], ["b", "w"])]


def test_a_client_is_told_at_once_of_the_keys_that_are_there():
    directory = Directory(1)
    directory.declare("a", 1, [W])
    assert told(directory.declare("b", 2, [W, B])) == [("b", 2, ["b"], [])]
    assert told(directory.founded("a", ["w", "b"])) == [("b", 2, [], ["w"])]  # b is not a's to found
    assert told(directory.declare("c", 3, [W, B])) == [("c", 3, [], ["w"])]


def test_who_is_lost_is_succeeded_by_the_next_that_has_values():
    directory = Directory(1)
    directory.declare("a", 1, [W])
    directory.declare("r", 2, [WHERE])
    directory.declare("b", 3, [W])
    assert told(directory.lost("a")) == [("b", 3, ["w"], [])]
    assert directory.founded("a", ["w"]) == []
    assert told(directory.founded("b", ["w"])) == [("r", 2, [], ["w"])]


def test_with_nobody_left_the_next_that_declares_the_key_brings_its_values():
    directory = Directory(1)
    directory.declare("a", 1, [W])
    directory.declare("r", 2, [WHERE])
    assert directory.lost("a") == []
    assert told(directory.declare("b", 3, [W])) == [("b", 3, ["w"], [])]
    assert told(directory.founded("b", ["w"])) == [("r", 2, [], ["w"])]


def test_who_is_lost_waits_no_more():
    directory = Directory(1)
    directory.declare("a", 1, [W])
    directory.declare("b", 2, [W])
    assert directory.lost("b") == directory.lost("a") == directory.founded("b", ["w"]) == []


def test_all_clients_hear_of_the_same_places():
    directory = Directory(3)
    (first,) = directory.declare("a", 1, [LeafSpec("x", (1_000_000,), "float32")])
    directory.founded("a", ["x"])
    (second,) = directory.declare("b", 1, [LeafSpec("x", (1_000_000,), "float32")])
    assert first.found == second.given and len(first.found[0].pieces) == 3


@pytest.mark.parametrize(
    ("leaves", "words"),
    [
        ([LeafSpec("w", (12,), "float32")], "w float32.3,4. is on the server; this client's is w float32.12."),
        ([LeafSpec("w", (3, 4), "float64")], "is on the server"),
        ([LeafSpec("v", (), ASKS)], "no key 'v'"),
        ([LeafSpec("v", (0,), "float32")], "one value at least"),
        ([LeafSpec("v", (-1, -1), "float32")], "one value at least"),
        ([LeafSpec("v", (3,), "int8")], "float32 or float64"),
        ([LeafSpec("v" * 1000, (3,), "float32")], "a text of 1 to 400"),
        ([LeafSpec("", (3,), "float32")], "a text of 1 to 400"),
        ([LeafSpec("v", (1,) * 40, "float32")], "has 40 dimensions"),
        ([LeafSpec("v", (1 << 50,), "float32")], "cannot be"),
        ([B, B], "twice"),
        ([LeafSpec("w[0:12]", (4,), "float32")], "a piece of a key"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(leaves, words):
    directory = Directory(1)
    directory.declare("a", 1, [W])
    with pytest.raises(ConfigError, match=words):
        directory.declare("b", 2, [LeafSpec("new", (1,), "float32"), *leaves])
    assert len(directory) == 1


def test_a_restored_directory_knows_the_keys_that_have_values():
    ours, theirs = Directory(2), Directory(2)
    ours.declare("a", 1, [W, B])
    ours.founded("a", ["w"])
    theirs.restore(ours.state())
    assert told(theirs.declare("b", 2, [W, B])) == [("b", 2, ["b"], ["w"])]
    assert theirs.map.pieces["w"] == ours.map.pieces["w"]


def test_one_client_waits_for_so_many_keys_and_no_more(monkeypatch):
    monkeypatch.setattr(directories, "MOST_WAITS", 3)
    directory = Directory(1)
    directory.declare("a", 1, [W, B])
    for request in range(3):
        directory.declare("b", request, [W])
    with pytest.raises(ConfigError, match="at most"):
        directory.declare("b", 3, [WHERE])
    assert directory.declare("c", 1, [W]) == []
    assert told(directory.lost("a")) == [("b", 0, ["w"], [])]  # who brings a key waits for it no more
    assert directory.declare("c", 2, [B]) != directory.declare("b", 4, [B]) == []
    directory.founded("b", ["w"])
    directory.founded("c", ["b"])
    assert told(directory.declare("b", 5, [W, B])) == [("b", 5, [], ["w", "b"])]


def test_keys_in_more_pieces_than_one_answer_can_tell_are_refused_before_they_are_cut():
    directory = Directory(2)
    huge = [LeafSpec(f"k{number}", (1 << 39,), "float32") for number in range(1000)]
    with pytest.raises(ConfigError, match="in 524290000 pieces; of one declaration 65536 may be"):
        directory.declare("a", 1, huge)
    assert len(directory) == 0
