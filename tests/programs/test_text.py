"""The byte transformer sees no future byte, draws the same data for the same unit, and learns."""

from __future__ import annotations

from functools import partial
from math import isnan, log

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zmqtrain.core.errors import ConfigError, DataError
from zmqtrain.programs.text import TextProgram, next_byte_logits
from zmqtrain.train.program import score_of

TINY = {
    "width": 16,
    "layers": 1,
    "heads": 2,
    "context": 16,
    "batch": 4,
    "batches_per_unit": 3,
    "rate": 1e-2,
    "warmup": 5,
}


def train(program, steps, times=1):
    """Train for so many steps from init(0), so many times; return the parameters and the losses of each time."""
    optimizer = program.optimizer()

    @jax.jit
    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(program.loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def run():
        params, losses = program.init(0), []
        state = jax.jit(optimizer.init)(params)
        for unit in range(steps // 3):
            for batch in program.batches(unit):
                params, state, loss = step(params, state, batch)
                losses.append(float(loss))
        return params, losses

    return [run() for _ in range(times)]


logits_of = partial(jax.jit(next_byte_logits, static_argnames="heads"), heads=2)


def same(first, second):
    return jax.tree.structure(first) == jax.tree.structure(second) and all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )


@pytest.fixture(scope="module")
def program(text_file):
    return TextProgram(data=str(text_file), **TINY)


@pytest.fixture(scope="module")
def trained(program):
    """Two trainings of the program, of 60 steps each: the parameters and the losses."""
    return train(program, 60, times=2)


def test_parameters_are_float32_and_the_same_for_the_same_seed(program):
    params = program.init(3)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    assert same(params, program.init(3)) and not same(params, program.init(4))


def test_an_untied_output_is_one_more_matrix(text_file, program):
    untied = TextProgram(data=str(text_file), **TINY, tied=False)
    assert set(untied.init(0)) - set(program.init(0)) == {"output"}
    assert untied.init(0)["output"].shape == (16, 256)


def test_the_default_model_has_about_a_hundred_thousand_parameters():
    sizes = jax.eval_shape(TextProgram().init, 0)
    assert 100_000 < sum(leaf.size for leaf in jax.tree.leaves(sizes)) < 200_000


def test_a_unit_holds_the_same_batches_whoever_asks(text_file, program):
    other = TextProgram(data=str(text_file), **TINY)
    assert same(list(program.batches(7)), list(other.batches(7)))
    assert not same(list(program.batches(7)), list(program.batches(8)))
    assert not same(list(program.batches(7)), list(TextProgram(data=str(text_file), **TINY, seed=1).batches(7)))


def test_every_batch_has_one_shape_and_comes_from_the_training_text(text_file, program):
    training = text_file.read_bytes()[:4430]  # the last 70 are the score's
    for unit in (0, 1, 10**9):
        batches = list(program.batches(unit))
        assert [(batch["text"].shape, batch["text"].dtype.name) for batch in batches] == [((4, 17), "uint8")] * 3
        assert all(window.tobytes() in training for batch in batches for window in batch["text"])


def test_a_shortest_text_is_drawn_from_in_full(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(170)))
    program = TextProgram(data=str(tmp_path / "text"), **TINY | {"context": 16, "batch": 64, "batches_per_unit": 64})
    windows = np.concatenate([batch["text"] for batch in program.batches(0)])
    assert set(windows[:, 0]) == set(range(153 - 16))


def test_a_negative_unit_is_refused_at_once(program):
    with pytest.raises(ConfigError, match="numbered from 0, got -1"):
        program.batches(-1)


def test_no_logit_depends_on_a_later_byte(program):
    params = program.init(0)
    text = next(program.batches(0))["text"][:, :16]
    before = logits_of(params, text)
    later = text.copy()  # a buffer that jax may still be reading is never written
    later[:, 9:] = 0
    after = logits_of(params, later)
    np.testing.assert_allclose(before[:, :9], after[:, :9], atol=1e-6)
    assert float(jnp.abs(before[:, 9:] - after[:, 9:]).max()) > 1e-2


def test_the_order_of_the_bytes_before_matters(program):
    params = program.init(0)
    text = np.array([[1, 2, 3, 4], [2, 1, 3, 4]], np.uint8)
    logits = logits_of(params, text)
    assert float(jnp.abs(logits[0, -1] - logits[1, -1]).max()) > 1e-4


def test_each_window_of_a_batch_is_read_on_its_own(program):
    params, text = program.init(0), next(program.batches(0))["text"][:, :16]
    together = logits_of(params, text)
    assert together.shape == (4, 16, 256)
    for window, logits in zip(text, together, strict=True):
        np.testing.assert_allclose(logits_of(params, window[None])[0], logits, atol=1e-5)


@pytest.mark.nightly
def test_muon_steps_as_optax_does_by_default(text_file):
    program = TextProgram(data=str(text_file), **TINY, inner_optimizer="muon")
    params = program.init(0)
    gradients = jax.grad(program.loss)(params, next(program.batches(0)))
    default = optax.contrib.muon(1e-2 / 5, weight_decay=0.01, consistent_rms=0.2)  # the first of 5 steps of warm-up
    ours, theirs = (
        jax.jit(optimizer.update)(gradients, optimizer.init(params), params)[0]["layer00"]
        for optimizer in (program.optimizer(), optax.chain(optax.clip_by_global_norm(1.0), default))
    )
    matrices = [name for name, leaf in ours.items() if leaf.ndim == 2]
    assert len(matrices) == 4
    for name in matrices:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-5 * float(jnp.abs(theirs[name]).max()))


@pytest.mark.parametrize("inner_optimizer", ["adamw", "muon"])
def test_the_loss_falls(text_file, trained, inner_optimizer):
    program = TextProgram(data=str(text_file), **TINY, inner_optimizer=inner_optimizer)
    params, losses = trained[0] if inner_optimizer == "adamw" else train(program, 60)[0]
    assert losses[0] > 5 and np.mean(losses[-5:]) < 2
    assert program.evaluate(params)["loss"] < 2


def test_training_twice_gives_the_same_parameters(trained):
    first, second = trained
    assert same(first, second)


def test_the_evaluation_is_the_same_every_time_and_for_every_batch_size(text_file, program):
    params = program.init(0)
    scores = program.evaluate(params)
    assert scores == program.evaluate(jax.tree.map(np.asarray, params))
    assert scores == TextProgram(data=str(text_file), **TINY | {"batch": 9}).evaluate(params)
    assert set(scores) == {"loss", "bits_per_byte"}
    assert scores["bits_per_byte"] == pytest.approx(scores["loss"] / log(2))


def test_equal_logits_score_eight_bits_per_byte(program):
    nothing = jax.tree.map(jnp.zeros_like, program.init(0))
    assert program.evaluate(nothing)["bits_per_byte"] == pytest.approx(8, abs=1e-4)


def test_no_window_reaches_into_what_is_set_aside_for_the_score(tmp_path):
    content = np.repeat([0, 1, 2], [9216 - 144, 144, 1024]).astype(np.uint8)  # units, score, held out
    (tmp_path / "text").write_bytes(content.tobytes())
    program = TextProgram(data=str(tmp_path / "text"), **TINY | {"batch": 256, "batches_per_unit": 64})
    windows = np.concatenate([batch["text"] for batch in program.batches(0)])
    assert set(np.unique(windows)) == {0}
    nothing = jax.tree.map(jnp.zeros_like, program.init(0))
    params = nothing | {"embedding": nothing["embedding"].at[1, 0].set(9.0), "norm": nothing["norm"] + 1}
    assert score_of(program, params) < 1e-3 < program.evaluate(params)["loss"]  # after 1 comes 1


def test_the_score_is_the_same_every_time_and_falls_with_training(text_file, program, trained):
    fresh = program.init(0)
    assert program.score(fresh) == program.score(jax.tree.map(np.asarray, fresh))
    assert program.score(fresh) == TextProgram(data=str(text_file), **TINY | {"batch": 9}).score(fresh)
    assert score_of(program, trained[0][0]) < 0.8 * score_of(program, fresh)


def test_a_text_too_short_to_spare_a_few_windows_has_no_score(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(250)) * 16)  # 3,600 to train on: 56 are less than 4 windows of 16
    program = TextProgram(data=str(tmp_path / "text"), **TINY | {"batch": 256, "batches_per_unit": 256})
    assert program.score(program.init(0)) is None and isnan(score_of(program, program.init(0)))
    windows = np.concatenate([batch["text"] for batch in program.batches(0)])
    assert any(window.tobytes() == program._text.training[-17:].tobytes() for window in windows)


def test_the_rate_warms_up_over_the_optimizers_own_steps_and_then_stays(program):
    optimizer = program.optimizer()
    params = {"bias": jnp.zeros(4)}
    state, sizes, update = optimizer.init(params), [], jax.jit(optimizer.update)
    for _ in range(8):
        updates, state = update({"bias": jnp.full(4, 0.1)}, state, params)
        sizes.append(float(-updates["bias"][0]))
    np.testing.assert_allclose(sizes, 1e-2 * np.array([0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1]), rtol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": 0}, r"program_arguments\.layers must be at least 1, got 0"),
        ({"rate": -1.0}, r"program_arguments\.rate must be at least 0, got -1"),
        ({"seed": -1}, r"program_arguments\.seed must be at least 0"),
        ({"width": 18}, r"program_arguments\.width must be a multiple of twice the heads"),
        ({"inner_optimizer": "sgd"}, r"program_arguments\.inner_optimizer must be one of adamw, muon, got 'sgd'"),
    ],
)
def test_an_impossible_argument_is_refused_with_its_place(text_file, arguments, message):
    with pytest.raises(ConfigError, match=message):
        TextProgram(data=str(text_file), **TINY | arguments)


def test_a_text_shorter_than_the_context_is_refused(text_file):
    with pytest.raises(
        DataError, match="has 4,500 bytes to train on and 500 held out: context=500 needs more than 500"
    ):
        TextProgram(data=str(text_file), **TINY | {"context": 500})
