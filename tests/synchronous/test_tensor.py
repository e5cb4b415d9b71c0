"""Layers over several processes compute what the whole layer does, forward and backward, on all of them."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zmqtrain.collectives.communicator import Communicator
from zmqtrain.core.errors import ConfigError
from zmqtrain.synchronous.tensor import TensorParallel
from zmqtrain.transport.memory_ports import memory_ports

SECONDS = 100.0
IN, HIDDEN, OUT = 6, 24, 5


def on_all(size, main):
    """Run main(TensorParallel, rank) on `size` processes that are threads; return the results by rank."""
    ports, results = memory_ports(size), [None] * size

    def process(rank):
        try:
            with Communicator(ports[rank]) as comm:
                results[rank] = main(TensorParallel(comm))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=process, args=[rank], daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def whole_params():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"w1": (IN, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, OUT), "b2": (OUT,)}
    return {name: 0.5 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


AXES = {"w1": 1, "b1": 0, "w2": 0, "b2": None}
"""By leaf, the axis along which it is cut; None: each process has all of it."""


def whole_loss(params, x, wanted):
    hidden = jax.nn.gelu(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] + params["b2"] - wanted) ** 2)


def parts_loss(parts):
    def loss(params, x, wanted):
        hidden = jax.nn.gelu(parts.column(x, params["w1"], params["b1"]))
        return jnp.mean((parts.row(hidden, params["w2"], params["b2"]) - wanted) ** 2)

    return loss


def own_params(parts):
    return {n: leaf if AXES[n] is None else parts.share(leaf, AXES[n]) for n, leaf in whole_params().items()}


def points(*batch):
    random = np.random.default_rng(1)
    return random.normal(size=(*batch, IN)).astype(np.float32), random.normal(size=(*batch, OUT)).astype(np.float32)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", [(8,), (2, 7)])
def test_two_layers_in_parts_have_the_loss_and_the_gradients_of_the_whole(size, batch):
    x, wanted = map(jnp.asarray, points(*batch))
    loss, (gradient, x_gradient) = jax.value_and_grad(whole_loss, argnums=(0, 1))(whole_params(), x, wanted)

    def main(parts):
        own, (of_params, of_x) = jax.value_and_grad(parts_loss(parts), argnums=(0, 1))(own_params(parts), x, wanted)
        expected = {n: leaf if AXES[n] is None else parts.share(leaf, AXES[n]) for n, leaf in gradient.items()}
        np.testing.assert_allclose(own, loss, rtol=1e-5)
        for name, leaf in of_params.items():
            np.testing.assert_allclose(leaf, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(of_x, x_gradient, rtol=1e-4, atol=1e-6)
        return np.asarray(own).tobytes() + np.asarray(of_x).tobytes()

    assert len(set(on_all(size, main))) == 1  # the same bits on all processes


def test_layers_above_one_another_and_beside_one_another_are_the_whole_too():
    """As in a transformer: three columns of one input, and another pair of layers behind them."""
    x, wanted = map(jnp.asarray, points(4))
    keys = jax.random.split(jax.random.key(3), 5)
    whole = [
        0.4 * jax.random.normal(key, shape)
        for key, shape in zip(keys, [(IN, HIDDEN)] * 3 + [(HIDDEN, IN), (IN, OUT)], strict=True)
    ]

    def mixed(q, k, v):
        return jnp.tanh(q) * k + v

    def whole_mixed(ws):
        x2 = x + mixed(x @ ws[0], x @ ws[1], x @ ws[2]) @ ws[3]
        return jnp.mean((x2 @ ws[4] - wanted) ** 2)

    expected = jax.grad(whole_mixed)(whole)

    def main(parts):
        def loss(ws):
            x2 = x + parts.row(mixed(*(parts.column(x, w) for w in ws[:3])), ws[3])
            return jnp.mean((x2 @ ws[4] - wanted) ** 2)

        own = [*(parts.share(w, 1) for w in whole[:3]), parts.share(whole[3], 0), whole[4]]
        for axis, ours, theirs in zip([1, 1, 1, 0, None], jax.grad(loss)(own), expected, strict=True):
            theirs = theirs if axis is None else parts.share(theirs, axis)
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)

    on_all(2, main)


def test_steps_with_an_optimizer_of_ones_own_keep_to_the_whole():
    x, wanted = map(jnp.asarray, points(16))
    params = whole_params()
    for _ in range(10):
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(whole_loss)(params, x, wanted))

    def main(parts):
        own = own_params(parts)
        step = jax.jit(lambda own, gradient: jax.tree.map(lambda p, g: p - 0.1 * g, own, gradient))
        for _ in range(10):
            own = step(own, jax.grad(parts_loss(parts))(own, x, wanted))
        for name, leaf in own.items():
            expected = params[name] if AXES[name] is None else parts.share(params[name], AXES[name])
            np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-5)

    on_all(3, main)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_inside_of_jit_it_says_what_to_do(wrap):
    x, wanted = map(jnp.asarray, points(4))

    def main(parts):
        with pytest.raises(ConfigError, match=r"outside"):
            jax.grad(wrap(parts_loss(parts)))(own_params(parts), x, wanted)

    on_all(1, main)


def test_a_width_that_cannot_be_cut_and_weights_that_were_not_cut_are_refused():
    def main(parts):
        with pytest.raises(ConfigError, match=r"5 does not divide into 2"):
            parts.share(jnp.zeros((4, 5)), -1)
        with pytest.raises(ConfigError, match=r"share"):
            parts.row(jnp.zeros((3, HIDDEN // 2)), jnp.zeros((HIDDEN, OUT)))

    on_all(2, main)
