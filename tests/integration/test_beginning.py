"""A run begins with the parameters of a file, on 127.0.0.1: its nodes take them, or say what does not fit."""

from __future__ import annotations

import numpy as np
import pytest
from runs import Trainer, broker, parameters

import zmqtrain as zt
from zmqtrain.broker.serve import BrokerThread
from zmqtrain.checkpoint.model_files import ModelFacts, read_beginning, read_model, write_model
from zmqtrain.core.errors import ConfigError, ModelMismatch
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.types import LeafSpec

SETTINGS = RunSettings(units=4, every=4, delay=2, lost_seconds=60.0)


@pytest.fixture
def file(tmp_path):
    zt.save_model(tmp_path / "begin.safetensors", parameters(seed=7))
    return tmp_path / "begin.safetensors"


@pytest.mark.parametrize("settings", [{}, {"start_nodes": 2}, {"mode": "strict", "release": "all", "start_nodes": 2}])
def test_all_nodes_begin_with_the_file_and_the_model_of_the_run_is_the_next_file(file, tmp_path, settings):
    given = RunSettings.from_dict(SETTINGS.to_dict() | settings)
    with broker(given, beginning=read_beginning(file), checkpoint=tmp_path / "run") as hub:
        trainers = [Trainer(hub.address, f"pc-{number}") for number in range(2 if settings else 1)]
        for trainer in trainers:
            trainer.join()
            for name, begun in parameters(seed=7).items():
                np.testing.assert_array_equal(trainer.began_with[name], begun)
    trained = zt.load_model(tmp_path / "run" / "model.safetensors", like=parameters())
    assert read_model(tmp_path / "run" / "model.safetensors")[1].version > 0
    assert any(np.abs(trained[name] - begun).max() > 0 for name, begun in parameters(seed=7).items())
    with pytest.raises(ConfigError, match=r"has run-\w+ at version \d+ already: leave --from out to go on with that"):
        BrokerThread("tcp://127.0.0.1:0", given, beginning=read_beginning(file), checkpoint=tmp_path / "run")


def test_a_node_whose_shapes_are_others_is_refused_with_the_leaf(file):
    with broker(SETTINGS, beginning=read_beginning(file)) as hub:
        trainer = Trainer(hub.address, "pc-1", params=parameters() | {"b": np.zeros(9, np.float32)})
        with pytest.raises(ModelMismatch, match=r"the leaf b is float32\[8\] in the run and float32\[9\] on this"):
            trainer.join()


def test_a_file_with_which_no_run_can_begin_is_refused_with_what_to_do(tmp_path):
    values = {"w": np.ones(2, np.float32)}
    write_model(tmp_path / "foreign", values, ModelFacts())
    write_model(tmp_path / "text", values, ModelFacts(program="text", leaves=(LeafSpec("w", (2,), "float32"),)))
    write_model(tmp_path / "nan", {"w": values["w"] * np.nan}, ModelFacts(leaves=(LeafSpec("w", (2,), "float32"),)))
    for name, words in {
        "foreign": "does not say in which order its leaves stand .* zmqtrain.save_model",
        "text": "holds parameters of the program 'text', and the run trains 'image': say --program text",
        "nan": "the leaf 'w' holds values that are not finite",
    }.items():
        with pytest.raises(ConfigError, match=words):
            read_beginning(tmp_path / name, "image")
