"""Join a run from a training loop of your own: plain JAX and optax, and five marked lines.

Start a broker and then this script on every PC, as often as you like:

    zmqtrain-broker
    python custom_loop.py tcp://hub:5555 --keys ~/lab.key_secret

The first one founds the run with its parameters; each later one takes the run's parameters at its first step. Without
the marked lines this is an ordinary script that trains alone (and then has no use for its arguments `hub` and `keys`).

The line marked "data" has the broker deal the data in numbered units, each to one node, so that no two PCs train on the
same batches; with `zmqtrain-broker --units 2000` the run then ends by itself. A loop that draws its data otherwise must
see to that: flax_loop.py shuffles by the node's name. With one seed on all PCs, four PCs learn no faster than one.
"""

import argparse
import itertools
import platform

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zmqtrain as zt  # zmqtrain 1/5

ARMS, HIDDEN, BATCH, NOISE = 3, 128, 1024, 0.05
BATCHES_OF_A_UNIT = 32


def draw_batch(generator, count):
    """Return `count` points on three arms of a spiral, float32[count, 2], and the arm of each, int32[count]."""
    arms = generator.integers(0, ARMS, count).astype(np.int32)
    radii = np.sqrt(generator.random(count))
    angles = 2 * np.pi * (arms / ARMS + radii)
    points = radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    return (points + NOISE * generator.normal(size=points.shape)).astype(np.float32), arms


def batches_of(unit):
    """Give the batches of the data unit of this number: always the same ones, and other ones for each number."""
    generator = np.random.default_rng((2, unit))
    for _ in range(BATCHES_OF_A_UNIT):
        yield draw_batch(generator, BATCH)


def fresh_params(key):
    """Return three dense layers, 2 -> 128 -> 128 -> 3."""
    sizes = (2, HIDDEN, HIDDEN, ARMS)
    return [
        {"weights": jax.random.normal(k, (fan_in, fan_out)) * (2 / fan_in) ** 0.5, "bias": jnp.zeros(fan_out)}
        for k, fan_in, fan_out in zip(jax.random.split(key, 3), sizes[:-1], sizes[1:], strict=True)
    ]


def predict(params, points):
    """Return the logits of the arms, float32[count, 3]."""
    x = points
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["weights"] + layer["bias"])
    return x @ params[-1]["weights"] + params[-1]["bias"]


def mean_loss(params, points, arms):
    """Return the mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, points), arms).mean()


def held_out_loss(params):
    """Return the loss on points that no step trains on: where nodes begin apart, parameters are compared by it."""
    return float(mean_loss(params, *draw_batch(np.random.default_rng(1), 512)))


optimizer = optax.adam(5e-3)


@jax.jit
def train_step(params, opt_state, points, arms):
    """Return the parameters and the optimizer's state after one step, and the loss before it."""
    loss, gradient = jax.value_and_grad(mean_loss)(params, points, arms)
    updates, opt_state = optimizer.update(gradient, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hub", nargs="?", help="the broker's address, as tcp://hub:5555")
    parser.add_argument("--steps", type=int, default=3000, help="of this process (default %(default)s)")
    parser.add_argument("--name", default=platform.node(), help="what to call this process (default: %(default)s)")
    parser.add_argument("--keys", help="this PC's key file (NAME.key_secret); not given: it is looked for")
    options = parser.parse_args()

    params = fresh_params(jax.random.key(0))
    opt_state = optimizer.init(params)
    batches = itertools.chain.from_iterable(map(batches_of, itertools.count()))
    node = zt.connect(options.hub, options.name, keys=options.keys)  # zmqtrain 2/5
    batches = node.batches(batches_of)  # zmqtrain data
    sync = zt.DelayedSync(node, params, judge=held_out_loss)  # zmqtrain 3/5
    for step, batch in enumerate(itertools.islice(batches, options.steps), 1):
        params, opt_state, loss = train_step(params, opt_state, *batch)
        params = sync.step(params, score=loss, samples=BATCH)  # zmqtrain 4/5
        if step % 500 == 0:
            print(f"{options.name}: step {step}, loss {loss:.4f}", flush=True)
    params = sync.finish(params)  # zmqtrain 5/5

    points, arms = draw_batch(np.random.default_rng(0), 2000)
    accuracy = 100 * np.mean(np.argmax(predict(params, points), axis=-1) == arms)
    print(f"{options.name}: accuracy {accuracy:.1f} % after {options.steps} steps of its own")


if __name__ == "__main__":
    main()
