"""A node's checkpoints: when they are due, and that neither a full disk nor a busy codec stops training."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from tests.fixed import fixed_run
from zmqtrain.checkpoint import background_writer
from zmqtrain.checkpoint.files import read_arrays, write_arrays
from zmqtrain.checkpoint.folder import CheckpointFolder
from zmqtrain.core.errors import CheckpointError, ConfigError
from zmqtrain.core.types import LeafSpec
from zmqtrain.node.checkpoint import CheckpointOptions, NodeCheckpoint, read_saved
from zmqtrain.node.codec import Inbox
from zmqtrain.node.offers import Offers, Restarts
from zmqtrain.node.units import UnitQueue
from zmqtrain.protocol.peer import Peer

MODEL = (LeafSpec("w", (3,), "float32"),)


class Kept:
    """The checkpoints of a node whose codec thread does its jobs at once, or not at all."""

    def __init__(self, folder, every):
        self.busy, self.clock = False, time
        self.peer = Peer("a#1", "a", incarnation=5)
        self.peer.settings, self.peer.run = fixed_run(), "run-1"
        self.offers, self.inbox, self.restarts = Offers(), Inbox(), Restarts()
        self.offers.version = 0
        self.units = UnitQueue("a#1", self, threading.Condition())
        self.codec = SimpleNamespace(kept=self.coded, joined_coder=SimpleNamespace(model=MODEL))
        self.keeper = NodeCheckpoint(CheckpointOptions(CheckpointFolder(folder), every), self)

    @property
    def version(self):
        return self.offers.version

    @version.setter
    def version(self, version):
        self.offers.version = version

    def coded(self, facts):
        return {"coder": {"unacked": []}}, {"codec": np.zeros(2)}

    def in_codec(self, job, values=0):
        if not self.busy:
            job()
        return not self.busy

    def save(self):
        self.keeper.save({"step": 8 * self.version}, {"params/w": np.full(3, self.version, np.float32)}, wait=True)


@pytest.fixture
def kept(tmp_path):
    made = Kept(tmp_path, "2")
    yield made
    made.keeper.close()


def test_what_is_saved_is_what_a_node_goes_on_from(kept):
    for version in (0, 2, 4):
        kept.version = version
        assert kept.keeper.is_due() == (version > 0)
        kept.save()
    saved = read_saved(kept.keeper.folder)
    assert (saved.peer, saved.run, saved.version, saved.incarnation) == ("a#1", "run-1", 4, 5)
    assert saved.model[0].path == "w" and read_saved(kept.keeper.folder, 2).version == 2
    kept.keeper._taken = saved
    facts, arrays = kept.keeper.take()
    assert facts == {"step": 32} and arrays["params/w"][0] == 4 and kept.keeper.take() is None


def test_nothing_is_due_before_the_run_has_parameters(kept):
    kept.version = -1
    assert not kept.keeper.is_due()


def test_a_node_that_ends_unlocks_its_folder_only_when_its_slow_write_has_ended(kept, monkeypatch):
    written, unlocked = threading.Event(), threading.Event()
    monkeypatch.setattr(CheckpointFolder, "save", lambda *_: written.wait(60.0))
    monkeypatch.setattr(kept.keeper.folder, "close", unlocked.set)
    kept.version = 2
    kept.keeper.save({}, {})
    closing = threading.Thread(target=kept.keeper.close)
    closing.start()
    assert not unlocked.wait(0.05)
    written.set()
    closing.join()
    assert unlocked.is_set()


@pytest.mark.parametrize("place", ["facts", "in_codec"])
def test_a_node_that_is_interrupted_while_it_saves_ends_and_unlocks_its_folder(kept, place, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    kept.version = 2
    monkeypatch.setattr(kept.keeper if place == "facts" else kept, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        kept.save()
    assert not kept.keeper._writer.busy, "or close would never return"
    kept.keeper.close()


@pytest.mark.parametrize("trouble", ["full", "busy"])
def test_what_cannot_be_saved_is_a_warning_and_is_tried_again(kept, trouble, monkeypatch, caplog):
    monkeypatch.setattr(background_writer, "AGAIN_SECONDS", 0.0)

    def full(*_):
        raise CheckpointError("No space left on device")

    kept.version, kept.busy = 2, trouble == "busy"
    with monkeypatch.context() as patched:
        if trouble == "full":
            patched.setattr(CheckpointFolder, "save", full)
        kept.save()
    assert "Training goes on; it is tried again" in caplog.text and kept.keeper.is_due()
    kept.busy = False
    kept.save()
    assert kept.keeper.folder.good_versions() == (2,) and not kept.keeper.is_due()


def test_what_is_not_of_one_moment_is_not_saved_and_tried_again(kept, monkeypatch, caplog):
    monkeypatch.setattr(background_writer, "AGAIN_SECONDS", 0.0)
    kept.version = 2
    with monkeypatch.context() as patched:
        patched.setattr(kept.codec, "kept", lambda facts: None)
        kept.save()
    assert "begins again from the shared parameters just now" in caplog.text
    assert kept.keeper.folder.good_versions() == () and kept.keeper.is_due()
    kept.save()
    assert kept.keeper.folder.good_versions() == (2,)


@pytest.mark.parametrize("place", ["codec", "writer"])
def test_a_failure_that_nobody_thought_of_holds_nobody_who_waits_for_a_checkpoint(kept, place, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("not foreseen")

    kept.version = 2
    with monkeypatch.context() as patched:
        if place == "codec":
            patched.setattr(kept.codec, "kept", broken)
            with pytest.raises(RuntimeError):  # in the codec thread, which tells the node
                kept.save()
        else:
            patched.setattr(CheckpointFolder, "save", broken)
            kept.save()
            assert "not foreseen" in caplog.text
    kept.save()
    assert kept.keeper.folder.good_versions() == (2,)


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("node", {"version": 2**80}),
        ("node", {"version": -9}),
        ("node", {"version": float("inf")}),
        ("node", {"incarnation": 2**63}),
        ("node", {"settings": None}),
        ("node", {"settings": []}),
        ("node", {"model": 7}),
        ("node", {"model": [["w", [-3], "float32"]]}),
        ("", {"node": None}),
    ],
)
def test_a_forged_checkpoint_is_refused_in_one_sentence(kept, place, change):
    kept.save()
    path = kept.keeper.folder.folder / "checkpoint-000000000000.safetensors"
    facts, arrays = read_arrays(path)
    (facts[place] if place else facts).update(change)
    write_arrays(path, arrays, {"state": json.dumps(facts)})
    with pytest.raises((CheckpointError, ConfigError)):
        read_saved(kept.keeper.folder)


def test_shared_parameters_that_are_not_finite_are_refused(kept):
    kept.keeper.save({}, {"anchor/w": np.full(3, np.nan, np.float32)}, wait=True)
    with pytest.raises(CheckpointError, match="w are not finite"):
        read_saved(kept.keeper.folder)
