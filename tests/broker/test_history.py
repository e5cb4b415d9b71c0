"""A broker's folder as a book: what landed where, and that every checkpoint is the sum of what was released."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fixed import fixed_run
from zmqtrain.averaging.aggregator import Aggregator
from zmqtrain.averaging.coder import encode_snapshot
from zmqtrain.broker.checkpoint import Keeper, RunFolder, read_history
from zmqtrain.checkpoint.folder import Every
from zmqtrain.core.errors import CheckpointError
from zmqtrain.core.types import LeafSpec
from zmqtrain.protocol.effects import Contribution, Reduce
from zmqtrain.protocol.hub import Hub
from zmqtrain.protocol.rounds import release_rule_from_spec

SETTINGS = fixed_run(release="immediately", codec="ternary:block=8", broadcast_codec="ternary:block=8", fragments=2)
MODEL = (LeafSpec("w", (90, 60), "float32"), LeafSpec("b", (3000,), "float32"))


class Lives:
    """A run whose broker is killed now and then: each life resumes from the folder."""

    def __init__(self, folder):
        self.folder, self.random = folder, np.random.default_rng(3)
        self.begin()
        self.hub.initialization.resume(MODEL)
        self.hub.version = 0
        self.aggregator.plan(MODEL)
        layout = self.aggregator.layout
        first = [self.random.normal(size=sum(layout.counts(fragment))).astype(np.float32) for fragment in range(2)]
        self.aggregator.found(encode_snapshot(layout, first))
        self.save()

    def begin(self):
        self.hub = Hub(SETTINGS, release_rule_from_spec(SETTINGS.release), "run-1")
        self.aggregator = Aggregator(SETTINGS)
        self.keeper = Keeper(self.folder, Every(), keep=1000)
        self.keeper.resume(self.hub, self.aggregator)

    def release(self, count):
        for _ in range(count):
            self.hub.version += 1
            version, fragment = self.hub.version, self.hub.version % 2
            one = Contribution("a#1", version, fragment, 8, 0.5, version - 1, 0)
            sums = self.aggregator._sums[fragment]
            sums += self.random.normal(size=sums.shape).astype(np.float32)
            reduce = Reduce(version, (fragment,), (one,), 1, False)
            self.keeper.released(self.aggregator.release(reduce), reduce, {})

    def kill(self):
        self.keeper._folder.close()  # its lock dies with the process

    def save(self):
        self.keeper.save(self.hub.state(), self.aggregator, wait=True)

    def end(self):
        self.keeper.close(self.hub.state(), self.aggregator)


@pytest.fixture
def folder(tmp_path):
    lives = Lives(tmp_path)
    lives.release(3)
    lives.kill()
    lives.begin()
    lives.release(2)
    lives.save()
    lives.release(2)
    lives.end()
    return tmp_path


def test_a_book_tells_all_that_landed_and_its_sum_is_what_every_checkpoint_holds(folder):
    book = read_history(folder)
    assert (book.run, book.first, book.last, book.faults) == ("run-1", 0, 7, ())
    assert book.compared == (0, 3, 5, 7)
    assert book.landed == {version: ((("a#1", version),), 8) for version in range(1, 8)}


def test_a_checkpoint_that_is_not_the_sum_is_named(folder):
    kept = RunFolder(folder, keep=1000)
    state, arrays = kept.load_version(5)
    arrays["published/w"][4, 4] = np.nextafter(arrays["published/w"][4, 4], np.float32(9))
    kept.save(5, state, arrays)
    book = read_history(folder)
    assert book.faults == ("version 5: published/w is not the sum of what was released, bit for bit",)


def test_a_journal_that_ends_before_a_checkpoint_is_a_fault(folder):
    (folder / "journal-000000000005.log").unlink()
    (fault,) = read_history(folder).faults
    assert fault == "the checkpoint of version 7 is not reached: the journal ends at version 5"


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        read_history(tmp_path)
