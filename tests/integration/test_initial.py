"""Nodes of different initial parameters over real sockets: the best founds, a population agrees, a mean is refused."""

import logging
import threading

import jax
import numpy as np
import optax
import pytest
from runs import batches, broker, loss, parameters

from zmqtrain.core.errors import JoinRefused
from zmqtrain.core.settings import RunSettings
from zmqtrain.node.connect import connect
from zmqtrain.train.loop import TrainingLoop, own_seed

HELD_OUT, VALIDATION = 10**6, 10**6 + 1
NAMES = ("pc-1", "pc-2", "pc-3")
ALL = {"start_nodes": 3, "lost_seconds": 60.0}
"""Three nodes, none of which is lost because a thread stands still for a while."""


class Program:
    """The tiny model as a program. init: what makes the initial parameters of a seed."""

    name, samples_per_batch, sample_word, units_per_epoch = "tiny", 16, "rows", None
    loss, batches = staticmethod(loss), staticmethod(batches)

    def __init__(self, init=parameters):
        self.init, self.seeds, self.scores = init, [], []
        self.score_of_batch = jax.jit(loss)

    def optimizer(self):
        return optax.adam(0.02)

    def score(self, params):
        self.scores.append(self.score_of_batch(params, next(batches(HELD_OUT))))
        return self.scores[-1]

    def evaluate(self, params):
        return {"loss": float(self.score_of_batch(params, next(batches(VALIDATION))))}


class Nodes:
    """Three nodes that train in threads of their own until the run's units are done."""

    def __init__(self, address, init=parameters, program=Program):
        self.programs, self.ends = {name: program(init) for name in NAMES}, {}
        self.threads = [self.start(address, name) for name in NAMES]

    def start(self, address, name):
        thread = threading.Thread(target=self.train, args=(address, name), daemon=True)
        thread.start()
        return thread

    def train(self, address, name):
        try:
            with connect(address, name=name) as node:
                program = self.programs[name]
                self.ends[name] = TrainingLoop(program, node).run(node.batches(program))
        except BaseException as error:
            self.ends[name] = error

    def join(self):
        for thread in self.threads:
            thread.join(60.0)
            assert not thread.is_alive()
        for end in self.ends.values():
            if isinstance(end, BaseException):
                raise end
        return [self.ends[name] for name in NAMES]


def founders(caplog):
    return [record.args[0] for record in caplog.records if " founded %s" in record.msg]


def assert_equal_ends(ends):
    for end in ends[1:]:
        for name, leaf in end.params.items():
            np.testing.assert_allclose(leaf, ends[0].params[name], atol=1e-5)


def test_the_best_of_three_seeds_founds_the_run_and_all_end_with_its_descendants(caplog):
    caplog.set_level(logging.INFO, "zmqtrain")
    settings = RunSettings(every=4, delay=2, units=24, initial="best", apart_steps=12, **ALL)
    with broker(settings) as hub:
        nodes = Nodes(hub.address)
        ends = nodes.join()
        assert hub.broker.statistics().refused == 0
    scores = {name: float(program.scores[0]) for name, program in nodes.programs.items()}
    assert len({own_seed(settings, name) for name in NAMES}) == 3 == len(set(scores.values()))
    assert founders(caplog) == [min(scores, key=scores.get)]
    assert_equal_ends(ends)
    assert ends[0].scores["loss"] < min(scores.values())


def test_strict_runs_that_begin_with_the_best_end_with_the_same_bits():
    beginning = {"initial": "best", "apart_steps": 8, "fresh_moments": False, **ALL}
    settings = RunSettings(mode="strict", release="all", every=4, delay=2, units=6, **beginning)
    bits = []
    for _ in range(2):
        with broker(settings) as hub:
            bits.append(
                [leaf.tobytes() for end in Nodes(hub.address).join() for leaf in map(np.asarray, end.params.values())]
            )
    assert bits[0] == bits[1]


def test_a_population_trains_on_until_all_descend_from_the_best_and_ends_with_equal_parameters(caplog):
    caplog.set_level(logging.INFO, "zmqtrain")
    beginning = {"initial": "own", "apart_steps": 8, "preemption": "score:patience=2,margin=0", "fresh_moments": False}
    settings = RunSettings(every=4, delay=2, units=24, **beginning, **ALL)
    with broker(settings) as hub:
        nodes = Nodes(hub.address)
        ends = nodes.join()
        assert hub.broker.statistics().contributions > 0
    preempted = {record.args[0] for record in caplog.records if "is preempted" in record.msg}
    assert len(founders(caplog)) == 1 and preempted  # a node whose lent parameters were declined is not waited for
    assert_equal_ends(ends)
    assert ends[0].scores["loss"] < min(float(program.scores[0]) for program in nodes.programs.values())


def test_elastic_nodes_keep_their_own_parameters_and_are_drained_to_equal_ones():
    settings = RunSettings(every=4, delay=2, units=24, initial="own", elastic=0.5, **ALL)
    with broker(settings) as hub:
        assert_equal_ends(Nodes(hub.address).join())


def test_unrelated_parameters_are_not_averaged_and_the_broker_goes_on_with_those_that_are(caplog):
    with broker(RunSettings(every=4, delay=2, units=6, initial="mean", **ALL)) as hub:
        unrelated = Nodes(hub.address)
        with pytest.raises(JoinRefused, match="unrelated"):
            unrelated.join()
        assert all(isinstance(end, JoinRefused) for end in unrelated.ends.values())
        assert "cannot be averaged" in caplog.text
        nearly = {seed: jax.tree.map(lambda leaf, s=seed: leaf * (1 + s), parameters()) for seed in (0.0, 0.1)}
        assert_equal_ends(Nodes(hub.address, lambda seed: nearly[0.1 if seed % 2 else 0.0]).join())


class Valleys(Program):
    """Two valleys, and halfway between them a ridge that is worse by a half."""

    def score(self, params):
        self.scores.append(1.5 - min(0.5, abs(float(params["b"][0]))))
        return self.scores[-1]


def test_a_mean_that_its_nodes_find_worse_than_their_own_is_never_version_0_and_the_broker_goes_on(caplog):
    caplog.set_level(logging.INFO, "zmqtrain")
    sides = {side: {**parameters(), "b": np.full(8, side, np.float32)} for side in (-0.5, 0.5)}
    with broker(RunSettings(every=4, delay=2, units=6, initial="mean", **ALL)) as hub:
        settings = hub.broker.settings
        seeds = [own_seed(settings, name) for name in NAMES]
        apart = Nodes(hub.address, lambda seed: sides[-0.5 if seed == seeds[0] else 0.5], Valleys)
        with pytest.raises(JoinRefused, match=r"3 of the 3 nodes .* different valleys"):
            apart.join()
        assert all(isinstance(end, JoinRefused) for end in apart.ends.values()) and founders(caplog) == []
        together = Nodes(hub.address, lambda seed: sides[0.5], Valleys)
        assert_equal_ends(together.join())
        assert [len(program.scores) for program in together.programs.values()] == [3, 3, 3]  # own, the mean, version 0


class Leaving(Program):
    """It fails as it scores the mean."""

    def score(self, params):
        if self.scores:
            raise ArithmeticError("no score")
        return super().score(params)


def test_a_node_that_leaves_while_it_scores_the_mean_is_not_awaited_and_the_mean_is_still_there():
    kinds = iter((Leaving, Program, Program))
    with broker(RunSettings(every=4, delay=2, units=6, initial="mean", **ALL)) as hub:
        nodes = Nodes(hub.address, lambda seed: parameters(), lambda init: next(kinds)(init))
        nodes.threads[0].join(60.0)
        assert isinstance(nodes.ends["pc-1"], ArithmeticError)
        nodes.programs["pc-1"] = Program(lambda seed: parameters())
        nodes.threads[0] = nodes.start(hub.address, "pc-1")  # the run begins with three
        assert_equal_ends(nodes.join())
