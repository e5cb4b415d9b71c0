"""A program is whatever has its members; what lacks one is told which."""

from __future__ import annotations

import subprocess
import sys
from math import inf, isnan, nan
from pathlib import Path

import numpy as np
import pytest

from zmqtrain.train.program import MEMBERS, Program, missing_members, score_of


class Line:
    """The smallest program: plain attributes, no base class."""

    name = "line"
    samples_per_batch = 1
    sample_word = "points"
    units_per_epoch = None

    def init(self, seed): ...

    def loss(self, params, batch): ...

    def optimizer(self): ...

    def batches(self, unit): ...

    def evaluate(self, params): ...


class Headless(Line):
    """A program that cannot be evaluated, and whose samples have no name."""

    def __getattribute__(self, name):
        if name in ("evaluate", "sample_word"):
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_a_class_with_the_members_is_a_program_without_inheriting():
    assert isinstance(Line(), Program)
    assert missing_members(Line()) == ()


def test_what_lacks_members_is_told_which():
    assert missing_members(Headless()) == ("sample_word", "evaluate")
    assert missing_members(object()) == MEMBERS


def test_the_list_of_members_is_that_of_the_protocol():
    declared = [name for name in vars(Program) if not name.startswith("_")]
    assert list(MEMBERS) == declared
    assert all(vars(Program)[name].__doc__ for name in declared)


class Scored(Line):
    """A program with the optional score: the parameters themselves."""

    def score(self, params):
        return params


def test_a_program_need_offer_no_score_and_may_have_none():
    assert missing_members(Scored()) == missing_members(Line()) == ()
    assert isnan(score_of(Line(), 3.0)) and isnan(score_of(Scored(), None))


@pytest.mark.parametrize("score", [2.5, np.float32(2.5), np.array(2.5)])
def test_a_score_is_a_float_whatever_scalar_it_comes_as(score):
    assert score_of(Scored(), score) == 2.5 and type(score_of(Scored(), score)) is float


@pytest.mark.parametrize("score", [nan, inf, -inf, np.float32(nan)])
def test_the_score_of_diverged_parameters_loses_every_comparison(score):
    assert score_of(Scored(), score) == inf


def test_the_protocol_can_be_imported_without_jax():
    code = "import sys, zmqtrain.train.program; print('jax' in sys.modules, 'optax' in sys.modules)"
    root = Path(__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert found.stdout.strip() == "False False"
