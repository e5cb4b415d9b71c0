"""A disk that is full costs a broker checkpoints and time, and nothing that a node has heard of."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.fixed import fixed_run
from zmqtrain.averaging import aggregator as aggregator_module
from zmqtrain.averaging.aggregator import Aggregator, Released
from zmqtrain.averaging.coder import encode_snapshot
from zmqtrain.broker import checkpoint as keeper_module
from zmqtrain.broker.checkpoint import Keeper, RunFolder, RunFolders, new_run
from zmqtrain.checkpoint import background_writer, files
from zmqtrain.checkpoint.folder import Every, is_locked
from zmqtrain.checkpoint.model_files import read_model
from zmqtrain.core.errors import CheckpointError, ZmqTrainError
from zmqtrain.core.types import LeafSpec
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.rounds import release_rule_from_spec

SETTINGS = fixed_run(release="immediately", codec="float32", broadcast_codec="float32", outer="sgd:rate=1")
MODEL = (LeafSpec("w", (10,), "float32"),)


class Run:
    """A hub and an aggregator of one model, and a keeper over them."""

    def __init__(self, folder, every=None, made_late=False):
        self.hub = Hub(SETTINGS, release_rule_from_spec(SETTINGS.release), "run-1")
        self.aggregator = Aggregator(SETTINGS)
        self.keeper = Keeper(folder, every, made_late=made_late)
        self.resumed = self.keeper.resume(self.hub, self.aggregator)

    def found(self, moments=()):
        self.hub.initialization.resume(MODEL)
        self.hub.version = 0
        self.aggregator.plan(MODEL)
        self.aggregator.found(encode_snapshot(self.aggregator.layout, [np.zeros(10, np.float32)]))
        self.keeper.save(self.hub.state(), self.aggregator, wait=True, moments=moments)

    def release(self):
        self.hub.version += 1
        one = Contribution("a#1", self.hub.version, 0, 8, 0.5, self.hub.version - 1, 0)
        self.aggregator._sums[0] += 1
        self.aggregator.encoded.lies_in_memory(0)
        reduce = Reduce(self.hub.version, (0,), (one,), 1, False)
        self.keeper.released(self.aggregator.release(reduce), reduce, self.hub.units.ledger.state())


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(keeper_module, "AGAIN_SECONDS", 0.01)
    made = Run(tmp_path)
    made.found()
    yield made
    made.keeper.close(made.hub.state(), made.aggregator)


def full(*_):
    raise CheckpointError("No space left on device")


def test_a_release_for_which_the_journal_has_no_room_waits_until_there_is_some(run, tmp_path, monkeypatch, caplog):
    tries, write = threading.Semaphore(0), RunFolder.release

    def counted(*arguments):
        tries.release()
        full()

    monkeypatch.setattr(RunFolder, "release", counted)
    told = threading.Thread(target=run.release)
    told.start()
    for _ in range(3):
        assert tries.acquire(timeout=60)
    assert told.is_alive(), "nobody hears of what is not in the journal"
    assert run.keeper.waits_for_room
    assert caplog.text.count("Nothing is released until there is room") == 1
    monkeypatch.setattr(RunFolder, "release", write)
    told.join(60)
    assert "releases go on, from version 1" in caplog.text and not run.keeper.waits_for_room
    assert [released.version for released, _, _ in RunFolder(tmp_path).replay(0)] == [1]


def test_a_broker_that_ends_does_not_wait_for_room(run, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "release", full)
        run.keeper.end()
        with pytest.raises(CheckpointError, match="No space left"):
            run.release()


def test_the_founders_optimizer_state_is_in_every_checkpoint_of_version_0_and_in_no_later_one(tmp_path):
    run = Run(tmp_path)
    run.found(moments=[b"a state", b"of two frames"])
    run.keeper.save(run.hub.state(), run.aggregator)  # a tick that finds version 0 due: the broker had waited for long
    assert run.keeper.writer.wait()
    for killed in (False, True, True, False):  # before anybody trains, and again
        if killed:
            run.keeper._folder.close()
        else:
            run.keeper.close(run.hub.state(), run.aggregator)
        run = Run(tmp_path)
        assert run.resumed == (b"a state", b"of two frames")
    run.release()
    assert not run.keeper._moments  # nor is it held any longer
    run.keeper.close(run.hub.state(), run.aggregator)
    again = Run(tmp_path)
    assert again.hub.version == 1 and again.resumed == ()
    again.keeper.close(again.hub.state(), again.aggregator)
    assert set(load_file(tmp_path / "model.safetensors")) == {"w"}


def test_units_that_were_done_by_the_last_release_are_not_dealt_again_by_a_broker_that_was_killed(tmp_path):
    run = Run(tmp_path)
    run.found()
    ledger = run.hub.units.ledger
    ledger.deal("a#1", 4)
    ledger.done("a#1", [0, 2])
    run.release()
    run.keeper._folder.close()  # killed: there is no checkpoint but that of version 0
    again = Run(tmp_path)
    assert (again.hub.version, again.hub.units.ledger.done_count) == (1, 2)
    assert again.hub.units.ledger.deal("b#1", 3) == (1, 3, 4)
    again.keeper.close(again.hub.state(), again.aggregator)


def test_a_checkpoint_for_which_there_is_no_room_is_a_warning_and_is_tried_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(keeper_module, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(background_writer, "AGAIN_SECONDS", 0.0)
    run = Run(tmp_path, Every(versions=3))
    run.found()
    for _ in range(3):
        run.release()
        due = run.keeper.is_due(run.hub.version)
        assert due == (run.hub.version == 3)
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save", full)
        run.keeper.save(run.hub.state(), run.aggregator)
        assert run.keeper.writer.wait()
        assert "The run goes on; it is tried again" in caplog.text
    run.release()
    assert run.keeper.is_due(4), "sooner than the next would be"
    run.keeper.save(run.hub.state(), run.aggregator)
    assert run.keeper.writer.wait()
    assert RunFolder(tmp_path).good_versions() == (0, 4)
    run.keeper.close(run.hub.state(), run.aggregator)


def test_the_journal_makes_good_for_a_torn_checkpoint_and_what_is_lost_is_said_where_it_does_not(tmp_path, caplog):
    run = Run(tmp_path, Every(versions=2))
    run.found()
    for _ in range(5):
        run.release()
        if run.keeper.is_due(run.hub.version):
            run.keeper.save(run.hub.state(), run.aggregator)
            assert run.keeper.writer.wait()
    run.keeper._folder.close()  # killed
    newest = tmp_path / "checkpoint-000000000004.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    again = Run(tmp_path)
    assert again.hub.version == again.aggregator.version == 5 and "has lost" not in caplog.text
    np.testing.assert_array_equal(again.aggregator.published[0], run.aggregator.published[0])
    again.keeper._folder.close()
    for path in (*tmp_path.glob("journal-*"), *tmp_path.glob("checkpoint-*5.safetensors")):
        path.write_bytes(b"torn")
    third = Run(tmp_path)
    assert third.hub.version == 2
    assert "run-1 has lost what was released after version 2: the checkpoint of version 5 is torn" in caplog.text
    third.keeper._folder.close()


def test_a_broker_that_is_started_on_a_full_disk_goes_on_from_what_is_there_and_saves_when_there_is_room(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(keeper_module, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(background_writer, "AGAIN_SECONDS", 0.0)
    run = Run(tmp_path, Every(seconds=1e6))
    run.found()
    for _ in range(3):
        run.release()
    run.keeper._folder.close()  # killed
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patched:
        for name in ("open", "pwrite", "write", "ftruncate"):
            patched.setattr(os, name, refusing(getattr(os, name)))
        patched.setattr(files, "save_file", refusing(files.save_file))
        again = Run(tmp_path, Every(seconds=1e6))
        assert again.hub.version == again.aggregator.version == 3
        assert again.keeper.writer.unsaved and again.keeper.waits_for_room
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        releasing = threading.Thread(target=again.release)
        releasing.start()
        releasing.join(0.05)
        assert releasing.is_alive(), "what is not in a journal is not released"
        assert again.keeper.is_due(3), "it is tried again, without a newer version"
        again.keeper.save(again.hub.state(), again.aggregator)
        assert again.keeper.writer.unsaved
    releasing.join(60)
    assert not again.keeper.waits_for_room and [one.version for one, _, _ in RunFolder(tmp_path).replay(3)] == [4]
    assert again.keeper.is_due(4)
    again.keeper.save(again.hub.state(), again.aggregator)
    assert again.keeper.writer.wait()
    assert not again.keeper.writer.unsaved and "written again, from version 4" in caplog.text
    again.keeper._folder.close()
    third = Run(tmp_path)
    assert third.hub.version == 4
    third.keeper._folder.close()


def refusing(function):
    """The same on a full disk: what would make a file, or a longer one, fails."""

    is_open = function is os.open

    def refuse(first, *arguments, **options):
        if is_open and not (arguments[0] & os.O_CREAT and "journal" in str(first)):
            return function(first, *arguments, **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    return refuse


def test_a_checkpoint_that_failed_is_tried_again_without_a_newer_version(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(keeper_module, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(background_writer, "AGAIN_SECONDS", 0.0)
    run = Run(tmp_path, Every(versions=1))
    run.found()
    run.release()
    assert run.keeper.is_due(1) and not run.keeper.is_due(1)
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save", full)
        run.keeper.save(run.hub.state(), run.aggregator)
        assert run.keeper.writer.wait()
    assert run.keeper.writer.unsaved and run.keeper.is_due(1)
    run.keeper.save(run.hub.state(), run.aggregator)
    assert run.keeper.writer.wait()
    assert RunFolder(tmp_path).good_versions() == (0, 1) and not run.keeper.writer.unsaved and not run.keeper.is_due(1)
    run.keeper.close(run.hub.state(), run.aggregator)


def test_a_checkpoint_that_is_due_while_the_last_one_is_written_is_written_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(keeper_module, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(background_writer, "AGAIN_SECONDS", 0.0)
    writing, go_on, save = threading.Event(), threading.Event(), RunFolder.save
    run = Run(tmp_path, Every(versions=1))
    run.found()

    def slowly(*arguments):
        writing.set()
        assert go_on.wait(60)
        return save(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save", slowly)
        for version in (1, 2):
            run.release()
            assert run.keeper.is_due(version)
            run.keeper.save(run.hub.state(), run.aggregator)
            assert writing.wait(60)
        go_on.set()
        assert run.keeper.writer.wait()
    assert run.keeper.is_due(2)
    run.keeper.save(run.hub.state(), run.aggregator)
    assert run.keeper.writer.wait()
    assert RunFolder(tmp_path).good_versions() == (0, 1, 2)
    run.keeper.close(run.hub.state(), run.aggregator)


def test_a_broker_that_ends_waits_for_a_slow_write_and_keeps_its_folder_until_then(tmp_path, monkeypatch):
    go_on, save = threading.Event(), RunFolder.save
    run = Run(tmp_path, Every(versions=1))
    run.found()

    def slowly(*arguments):
        assert go_on.wait(60)
        return save(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save", slowly)
        run.release()
        run.keeper.save(run.hub.state(), run.aggregator)
        run.release()
        closing = threading.Thread(target=run.keeper.close, args=(run.hub.state(), run.aggregator))
        closing.start()
        closing.join(0.2)
        assert closing.is_alive() and is_locked(tmp_path), "the write in progress drops files of another broker"
        go_on.set()
        closing.join(60)
    assert not is_locked(tmp_path) and RunFolder(tmp_path).good_versions() == (0, 1, 2)
    assert (tmp_path / "model.safetensors").exists()


def test_half_a_checkpoint_takes_no_room(tmp_path, monkeypatch):
    def half(arrays, path, metadata):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    run = Run(tmp_path)
    run.found()
    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="No space left"):
        patched.setattr(files, "save_file", half)
        run.keeper._folder.save(7, {}, {})
    assert not list(tmp_path.glob("*.part"))
    run.keeper.close(run.hub.state(), run.aggregator)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"settings": None}, "holds no broker's checkpoints"),
        ({"version": 2**80}, "cannot be read"),
        ({"version": -7}, "cannot be read"),
        ({"version": 1e9}, "holds no broker's checkpoints"),
        ({"samples": 2**80}, "cannot be read"),
        ({"records": [1, 2]}, "cannot be read"),
        ({"model": [["w", [2**60, 2**60], "float32"]]}, "model|cannot be read|leaf"),
        ({"ledger": {"done": "deep"}}, "cannot be read"),
        ({"quarantines": {"a": 1}}, "cannot be read"),
        ({"run": None, "settings": []}, "holds no broker's checkpoints"),
        ({"parameters/w": np.full(10, np.nan, np.float32)}, "not finite"),
        ({"published/w": np.full(10, np.inf, np.float32)}, "not finite"),
        ({"published/w": np.zeros((2, 5), np.float32)}, "has no published"),
        ({"shares": np.zeros((2, 2), np.float32)}, "lacks what"),
    ],
)
def test_a_forged_checkpoint_is_refused_in_one_sentence(tmp_path, change, why):
    run = Run(tmp_path)
    run.found()
    run.keeper._folder.close()
    path = tmp_path / "checkpoint-000000000000.safetensors"
    state, arrays = files.read_arrays(path)
    for name, value in change.items():
        (arrays if name in arrays else state)[name] = value
    files.write_arrays(path, arrays, {"state": json.dumps(state)})
    with pytest.raises(ZmqTrainError, match=why):
        Run(tmp_path)


def test_a_checkpoint_whose_state_is_nested_deeply_is_refused_in_one_sentence(tmp_path):
    files.write_arrays(
        tmp_path / "checkpoint-000000000000.safetensors", {"w": np.zeros(1)}, {"state": "[" * 10**5 + "]" * 10**5}
    )
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        Run(tmp_path)


def test_a_journal_of_another_models_releases_is_refused_in_one_sentence(tmp_path):
    run = Run(tmp_path)
    run.found()
    for fragments, frames in (((7,), ((b"x",),)), ((0,), ((b"x", b"y"),)), ((0,), ())):
        run.keeper._folder.begin_journal(0)
        run.keeper._folder.release((Released(1, "float32", fragments, frames), (), 0), {})
        run.keeper._folder.close()
        with pytest.raises(CheckpointError, match=r"remove .* to go on from the checkpoint"):
            Run(tmp_path)


def of_losses(folder, losses, evaluates_last=True):
    """Release a version a loss, each evaluated two versions late but for the last; end, and start again."""
    run = Run(folder)
    run.found()
    seen = dict(enumerate(losses, 1))
    for version in seen:
        run.release()
        at = version - 2
        if at > 0 and run.keeper.is_best(at, seen[at]):
            run.keeper.keep_best(at, {"loss": seen[at]}, 10 * at, run.aggregator)
    if evaluates_last and run.keeper.is_best(version, losses[-1]):
        run.keeper.keep_best(version, {"loss": losses[-1]}, 10 * version, run.aggregator)
    run.keeper.close(run.hub.state(), run.aggregator)
    return {path.name: load_file(path)["w"][0] for path in folder.glob("model*.safetensors")}


def test_the_model_is_the_best_version_where_the_last_one_scores_worse_and_the_log_says_which(tmp_path, caplog):
    files = of_losses(tmp_path, [0.5, 0.2, 0.14, 0.3, 206.0])
    assert files == {"model.safetensors": 3.0, "model-last.safetensors": 5.0}
    assert "model.safetensors holds version 3 (loss 0.14)" in caplog.text and "5 (loss 206)" in caplog.text
    assert Run(tmp_path).hub.version == 5, "the run itself goes on from the last"
    best = read_model(tmp_path / "model.safetensors")[1]
    assert (best.run, best.version, best.newest, best.samples, best.leaves) == ("run-1", 3, 5, 30, MODEL)
    assert (best.evaluation, best.evaluation_version) == ({"loss": 0.14}, 3)


def test_the_best_version_is_still_the_best_when_the_run_is_resumed_and_ends_again(tmp_path):
    of_losses(tmp_path, [0.5, 0.2, 0.14, 0.3, 206.0])
    for _ in range(2):  # started, and ended at once
        run = Run(tmp_path)
        run.keeper.close(run.hub.state(), run.aggregator)
        facts = {path.name: read_model(path)[1] for path in tmp_path.glob("model*.safetensors")}
        assert {facts[name].version for name in facts} == {3, 5} and len(facts) == 2
    run = Run(tmp_path)
    run.release()
    assert not run.keeper.is_best(6, 0.2) and run.keeper.is_best(6, 0.1)
    assert run.keeper.keep_best(6, {"loss": 0.1}, 60, run.aggregator)
    run.keeper.close(run.hub.state(), run.aggregator)
    assert [path.name for path in tmp_path.glob("model*.safetensors")] == ["model.safetensors"]
    assert load_file(tmp_path / "model.safetensors")["w"][0] == 6.0
    run = Run(tmp_path)
    run.keeper.forget_best()  # it is founded again
    run.release()
    run.keeper.close(run.hub.state(), run.aggregator)
    assert load_file(tmp_path / "model.safetensors")["w"][0] == 7.0


def test_of_several_brokers_a_version_is_the_best_once_the_parts_of_all_are_here(tmp_path):
    keeper = Keeper(tmp_path)
    first, second = {"w": np.zeros(2, np.float32)}, {"w": np.ones(2, np.float32)}
    layout, held = SimpleNamespace(shard=(0, 2)), {1: [first["w"]]}
    aggregator = SimpleNamespace(
        layout=layout,
        published_at=held.get,
        leaves=lambda flats: {"w": flats[0]},
        moment_of=lambda version: 10.0 * version,
    )
    keeper.keep_part(1, 1, 2, second)  # nobody has said that it is the best
    keeper.keep_best(1, {"loss": 0.5}, 8, aggregator)
    assert keeper._best is None
    keeper.keep_part(0, 1, 2, second)  # of another version
    assert keeper._best is None
    keeper.keep_part(1, 1, 2, second)
    assert keeper._best.version == 1 and keeper._best.parts == {0: first, 1: second}
    assert not keeper.lacks_parts
    keeper.keep_best(1, {"loss": 0.4}, 8, aggregator)
    assert keeper._best.loss == 0.5, "until all parts of the better one are here"
    asked = []
    keeper.ask_for_parts(lambda take, shards, moment: asked.append((list(shards), moment)))
    assert keeper.lacks_parts and asked == [([1], 10.0)]
    keeper.forget_best()
    keeper.keep_part(1, 1, 2, second)
    assert keeper._best is None and not keeper.lacks_parts


def test_a_part_that_nobody_has_any_more_is_not_asked_for_without_end(tmp_path, caplog):
    keeper = Keeper(tmp_path)
    aggregator = SimpleNamespace(
        layout=SimpleNamespace(shard=(0, 2)),
        published_at=lambda version: [np.zeros(2, np.float32)],
        leaves=lambda flats: {"w": flats[0]},
        moment_of=lambda version: 10.0 * version,
    )
    assert keeper.is_best(1, 0.5) and keeper.keep_best(1, {"loss": 0.5}, 8, aggregator)
    keeper.keep_part(1, 1, 2, {"w": np.ones(2, np.float32)})
    assert keeper.is_best(2, 0.4) and keeper.keep_best(2, {"loss": 0.4}, 8, aggregator)
    assert not keeper.is_best(3, 0.45)
    for _ in range(keeper_module.MOST_ASKED + 1):
        assert keeper.lacks_parts
        keeper.ask_for_parts(lambda take, shards, moment: None)
    assert not keeper.lacks_parts and keeper._best.version == 1
    assert "not all brokers gave their parts" in caplog.text
    assert keeper.is_best(4, 0.45) and not keeper.is_best(5, 0.5)


def test_a_version_that_is_worse_than_one_still_to_be_kept_is_not_the_best(tmp_path, caplog):
    keeper, nothing = Keeper(tmp_path), SimpleNamespace(published_at={}.get)
    assert keeper.is_best(1, 0.5) and keeper.is_best(2, 0.4) and not keeper.is_best(3, 0.45)
    assert not keeper.keep_best(2, {"loss": 0.4}, 8, nothing)
    assert "too old to be kept" in caplog.text
    assert keeper.is_best(4, 0.45), "the better one is lost"


def test_one_that_was_lost_lets_no_worse_one_displace_what_is_still_to_be_kept(tmp_path):
    keeper, known = Keeper(tmp_path), {}
    aggregator = SimpleNamespace(
        layout=SimpleNamespace(shard=(0, 1)),
        published_at=known.get,
        leaves=lambda flats: {"w": flats[0]},
        moment_of=lambda version: 10.0 * version,
    )
    assert keeper.is_best(1, 0.5) and keeper.is_best(2, 0.4)  # both wait for the codec's thread
    assert not keeper.keep_best(1, {"loss": 0.5}, 8, aggregator)
    known.update({2: [np.zeros(2, np.float32)], 3: [np.ones(2, np.float32)]})
    assert keeper.is_best(3, 0.45)
    assert keeper.keep_best(2, {"loss": 0.4}, 8, aggregator)
    assert not keeper.keep_best(3, {"loss": 0.45}, 8, aggregator) and keeper._best.version == 2


def test_where_the_last_version_is_not_whole_the_best_is_written_alone(tmp_path):
    of_losses(tmp_path, [0.5, 0.2, 0.14, 0.3, 206.0])
    run = Run(tmp_path)
    assert run.keeper.is_best(5, 0.1) and run.keeper.keep_best(5, {"loss": 0.1}, 8, run.aggregator)
    run.release()
    run.keeper.close(run.hub.state(), run.aggregator)
    before = load_file(tmp_path / "model.safetensors")["w"][0]
    run.keeper.choose(tmp_path / "model.safetensors", whole=False)
    assert load_file(tmp_path / "model.safetensors")["w"][0] == before
    assert load_file(tmp_path / "model-best.safetensors")["w"][0] == 5.0
    run.keeper.forget_best()
    run.keeper.choose(tmp_path / "model.safetensors", whole=False)
    assert load_file(tmp_path / "model-best.safetensors")["w"][0] == 5.0, "nothing took its place"


def test_without_room_for_the_best_version_the_model_is_still_the_last_one(tmp_path, monkeypatch):
    def no_room(path, arrays, metadata):
        if path.name == "model-best.safetensors":
            raise CheckpointError("no space left")
        write_arrays(path, arrays, metadata)

    write_arrays = files.write_arrays
    monkeypatch.setattr("zmqtrain.checkpoint.model_files.write_arrays", no_room)
    with pytest.raises(CheckpointError, match="no space left"):
        of_losses(tmp_path, [0.5, 0.2, 0.14, 0.3, 206.0])
    assert load_file(tmp_path / "model.safetensors")["w"][0] == 5.0


def test_the_model_says_of_which_run_it_is_and_how_it_scores(tmp_path):
    run = Run(tmp_path)
    run.found()
    run.release()
    run.hub.scores, run.hub.score_version, run.hub.samples = {"loss": 0.5, "accuracy": 0.9}, 1, 8
    run.keeper.close(run.hub.state(), run.aggregator)
    facts = read_model(tmp_path / "model.safetensors")[1]
    assert (facts.run, facts.version, facts.newest, facts.samples, facts.leaves) == ("run-1", 1, 1, 8, MODEL)
    assert (facts.evaluation, facts.evaluation_version) == ({"loss": 0.5, "accuracy": 0.9}, 1)


def test_the_model_is_the_last_version_where_that_is_the_best_or_not_evaluated(tmp_path, caplog):
    caplog.set_level("INFO")
    assert of_losses(tmp_path / "better", [0.5, 0.2, 0.1]) == {"model.safetensors": 3.0}
    files = of_losses(tmp_path / "unknown", [0.5, 0.2, 0.1, 0.1], evaluates_last=False)
    assert files == {"model.safetensors": 4.0, "model-best.safetensors": 2.0}
    assert "holds the last version, 4 (not evaluated)" in caplog.text


def test_a_version_that_was_evaluated_too_late_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(aggregator_module, "RECORD_EXCHANGES", 1)
    assert of_losses(tmp_path, [0.1, 0.2, 0.3, 0.4, 0.5]) == {"model.safetensors": 5.0}


def test_a_folder_that_is_the_runs_own_is_made_when_the_run_has_begun_and_not_before(tmp_path):
    idle = Run(tmp_path / "idle", made_late=True)
    idle.keeper.close(idle.hub.state(), idle.aggregator)
    assert not list(tmp_path.iterdir()), "nobody joined: nothing is left behind"
    run = Run(tmp_path / "run-1", made_late=True)
    run.found()
    with pytest.raises(CheckpointError, match="is in use by the process"):
        Run(tmp_path / "run-1", made_late=True)
    run.release()
    run.keeper.close(run.hub.state(), run.aggregator)
    again = Run(tmp_path / "run-1", made_late=True)
    assert again.hub.version == 1, "one that is there is gone on from"
    again.keeper.close(again.hub.state(), again.aggregator)


def test_the_newest_run_whose_broker_was_killed_is_found_and_no_other(tmp_path):
    folders = RunFolders(tmp_path / "runs")
    assert folders.cut_short() is None
    ended, killed, lives = (Run(folders.folder(f"run-{name}"), made_late=True) for name in ("ended", "killed", "lives"))
    for run in (ended, killed, lives):
        run.found()
    ended.keeper.close(ended.hub.state(), ended.aggregator)
    killed.keeper._folder.close()
    assert folders.cut_short() == folders.folder("run-killed")
    again = Run(folders.folder("run-killed"))
    assert folders.cut_short() is None, "it is gone on with"
    for run in (again, lives):
        run.keeper.close(run.hub.state(), run.aggregator)


def test_every_run_has_a_folder_of_its_own():
    folders, run = RunFolders(), new_run()
    assert run != new_run() and folders.folder(run) == Path("zmqtrain-runs") / run
    assert folders.folder("run-1", 2, 4) == Path("zmqtrain-runs/run-1/shard-2")
    assert folders.folder("run-1", term=1) == Path("zmqtrain-runs/run-1-term-1"), "not that of the first, if both live"


def test_the_best_version_is_on_the_disk_before_the_models_file_is_overwritten(tmp_path, monkeypatch):
    def killed(*_):
        raise CheckpointError("killed")

    monkeypatch.setattr(keeper_module, "export_part", killed)
    with pytest.raises(CheckpointError, match="killed"):
        of_losses(tmp_path, [0.5, 0.2, 0.14, 0.3, 206.0])
    assert load_file(tmp_path / "model-best.safetensors")["w"][0] == 3.0
