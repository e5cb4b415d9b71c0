"""The parts of a model that several brokers write, and the one file that they make."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from tests.fixed import fixed_run
from zmqtrain.averaging.aggregator import Aggregator
from zmqtrain.averaging.coder import encode_snapshot
from zmqtrain.broker.checkpoint import export_part, merge_parts, part_file
from zmqtrain.checkpoint.files import write_arrays
from zmqtrain.checkpoint.model_files import ModelFacts, read_model
from zmqtrain.codecs.fragment import Layout
from zmqtrain.core.errors import CheckpointError
from zmqtrain.core.types import LeafSpec

MODEL = (LeafSpec("w", (3, 5000), "float32"), LeafSpec("scalar", (), "float32"), LeafSpec("none", (0, 4), "float32"))
LEAVES = [np.arange(15000, dtype=np.float32).reshape(3, 5000), np.float32(7).reshape(()), np.zeros((0, 4), np.float32)]


def aggregator_of(shard, shards, model=MODEL, leaves=LEAVES, **settings):
    made = Aggregator(fixed_run(shards=shards, **settings), shard)
    made.plan(model)
    made.found(encode_snapshot(made.layout, made.layout.split(leaves)))
    return made


def export(folder, shard, shards=3, run="run-1", **facts):
    made = aggregator_of(shard, shards, **facts)
    folder.mkdir(parents=True, exist_ok=True)
    facts = ModelFacts(run=run, version=5, newest=5, program="text", leaves=made.layout.spec)
    return export_part(folder, made.arrays(), made.layout, facts)


@pytest.fixture
def folders(tmp_path):
    folders = [tmp_path / f"broker-{shard}" for shard in range(3)]
    for shard, folder in enumerate(folders):
        assert export(folder, shard) == folder / part_file(shard, 3)
    return folders


def test_all_parts_in_any_order_are_the_model(folders, tmp_path):
    first, second, third = folders
    values = merge_parts([third, first / part_file(0, 3), second], tmp_path / "model.safetensors")
    model = load_file(tmp_path / "model.safetensors")
    assert model.keys() == {"w", "scalar", "none"} and values == 15001
    for leaf, array in zip(MODEL, LEAVES, strict=True):
        assert model[leaf.path].shape == leaf.shape
        np.testing.assert_array_equal(model[leaf.path], array)
    facts = read_model(tmp_path / "model.safetensors")[1]
    assert (facts.run, facts.version, facts.program, facts.leaves) == ("run-1", 5, "text", MODEL)


def test_parts_that_version_0_1_has_written_are_joined(folders, tmp_path):
    for shard, folder in enumerate(folders):
        path = folder / part_file(shard, 3)
        with safe_open(path, framework="np") as file:
            metadata = file.metadata()
        part = json.loads(metadata["part"])
        part["masters"] = part.pop("shards")
        write_arrays(path, load_file(path), metadata | {"part": json.dumps(part)})
    assert merge_parts(folders, tmp_path / "model.safetensors") == 15001


def test_the_folder_of_all_shards_is_enough_and_the_versions_are_said(tmp_path, caplog):
    for shard in range(3):
        export(tmp_path / f"shard-{shard}", shard)
    with caplog.at_level("INFO"):
        assert merge_parts([tmp_path], tmp_path / "model.safetensors") == 15001
    assert "of the versions 5 (shard 0), 5 (shard 1), 5 (shard 2)" in caplog.text


def test_one_shard_writes_the_whole_model_as_it_is(tmp_path):
    path = export(tmp_path, 0, shards=1)
    assert path.name == "model.safetensors" and load_file(path)["w"].shape == (3, 5000)


def refused(words, places, out):
    with pytest.raises(CheckpointError, match=words):
        merge_parts(places, out / "model.safetensors")
    assert not (out / "model.safetensors").exists()


def test_parts_that_are_not_one_model_are_refused_with_which_and_why(folders, tmp_path):
    first, second, third = folders
    refused("of the 3 shards of run-1 these are missing: 1, 2; name the --checkpoint folders", [first], tmp_path)
    refused("are both of shard 1", [second, second / part_file(1, 3), first, third], tmp_path)
    refused("not of the same run: run-1 and run-2", [first, second, export(tmp_path / "a", 2, run="run-2")], tmp_path)
    refused("not of the same number of brokers: 3 and 4", [first, export(tmp_path / "b", 1, shards=4)], tmp_path)
    other = {"model": (LeafSpec("w", (5, 3000), "float32"),), "leaves": [LEAVES[0].reshape(5, 3000)]}
    refused("not of the same model", [first, second, export(tmp_path / "c", 2, **other)], tmp_path)
    refused("no part of a model in .*nowhere: a broker writes it .* when it ends", [tmp_path / "nowhere"], tmp_path)
    refused("no parts are given", [], tmp_path)


def test_files_that_are_no_parts_are_refused(folders, tmp_path):
    whole = export(tmp_path / "whole", 0, shards=1)
    refused("is no part of a model", [whole], tmp_path)
    torn = folders[0] / part_file(0, 3)
    torn.write_bytes(torn.read_bytes()[:100])
    refused("cannot be read", folders, tmp_path)
    export(folders[1], 2)
    refused("several parts in .*: name the files", [folders[1]], tmp_path)


def test_a_shard_saves_and_resumes_what_it_has_and_no_more():
    made = aggregator_of(1, 3, outer="nesterov:rate=0.8,momentum=0.5", fragments=1)
    arrays = made.arrays()
    of_leaves = [array for name, array in arrays.items() if "/" in name]
    assert all(array.size in (0, 4096) for array in of_leaves), "a shard of three has a block here"
    again = Aggregator(made.settings, 1)
    again.plan(MODEL)
    again.restore(4, arrays)
    assert again.version == 4 and all(map(np.array_equal, again.published, made.published))
    with pytest.raises(CheckpointError, match="no parameters of w"):
        other = Aggregator(made.settings, 0)
        other.plan(MODEL)
        other.restore(4, {name: array[:-1] for name, array in arrays.items() if array.ndim == 1})


def test_the_shards_of_a_model_are_laid_one_behind_the_other():
    starts = [Layout(MODEL, 1, (shard, 3)).part(0) for shard in range(3)]
    assert [part.stop for part in starts[:-1]] == [part.start for part in starts[1:]] and starts[-1].stop == 15000


DEEP = "[" * 10**5 + "]" * 10**5


@pytest.mark.parametrize(
    "change",
    [
        {"shards": 10**9},
        {"shards": 0},
        {"shard": -1},
        {"version": float("inf")},
        {"version": -5},
        {"leaves": [["w", [2**40, 2**40], 0, 5000]]},
        {"leaves": [["w", [2**70], 0, 2**70]]},
        {"leaves": [["w", [-3, -5000], 0, 5]]},
        {"leaves": [["w", [3, 5000], 10, 5]]},
        {"leaves": [["w", None, 0, 5]]},
        {"leaves": 7},
        {"run": None, "leaves": None},
    ],
)
def test_a_part_that_says_what_cannot_be_is_refused_in_one_sentence_and_at_once(folders, tmp_path, change):
    path = folders[0] / part_file(0, 3)
    with safe_open(path, framework="np") as file:
        facts, arrays = json.loads(file.metadata()["part"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    write_arrays(path, arrays, {"format": "zmqtrain part 1", "part": json.dumps(facts | change)})
    with pytest.raises(CheckpointError) as raised:
        merge_parts(folders, tmp_path / "model.safetensors")
    assert len(str(raised.value)) < 1000


def test_parts_that_are_nested_deeply_or_miss_thousands_of_others_are_refused_in_one_sentence(folders, tmp_path):
    path = folders[0] / part_file(0, 3)
    for text in (DEEP, json.dumps({"run": "r", "version": 1, "shard": 0, "shards": 9999, "leaves": []})):
        write_arrays(path, {"w": np.zeros(1, np.float32)}, {"format": "zmqtrain part 1", "part": text})
        with pytest.raises(CheckpointError) as raised:
            merge_parts([path], tmp_path / "model.safetensors")
        assert len(str(raised.value)) < 1000
