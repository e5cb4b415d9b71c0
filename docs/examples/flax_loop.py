"""Join a run from a training loop with flax.nnx: an ordinary script and five marked lines.

    zmqtrain-broker
    python flax_loop.py tcp://hub:5555 --keys ~/lab.key_secret

What the nodes share is the model's parameters and its batch statistics. BatchNorm computes with the mean and the
variance of each batch while it trains, and with running averages of them when it is evaluated. Those averages belong to
the parameters: the shared parameters are of all nodes, and with the averages of one node alone (or those that it began
with) the shared model scores worse than any node says, and a file of it is of no use. With flax.linen share
{"params": variables["params"], "batch_stats": variables["batch_stats"]}. The optimizer, its moments and the random
streams stay each node's own.

Each PC draws its data by a seed from its name, so that no two train on the same batches; custom_loop.py has the broker
deal the data instead. Without the marked lines this trains alone (and has no use for its arguments `hub` and `keys`).
"""

import argparse
import platform

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zmqtrain as zt  # zmqtrain 1/5

SIDE, SHAPES, BATCH, NOISE = 12, 4, 64, 0.4


def draw_batch(generator, count):
    """Return images of a horizontal bar, a vertical bar, a cross or a square, float32[count, 12, 12, 1], and which."""
    kinds = generator.integers(0, SHAPES, count).astype(np.int32)
    images = NOISE * generator.normal(size=(count, SIDE, SIDE, 1)).astype(np.float32)
    for image, kind, (top, left) in zip(images, kinds, generator.integers(0, SIDE - 5, (count, 2)), strict=True):
        shape = image[top : top + 5, left : left + 5]
        if kind in (0, 2):
            shape[2] += 1
        if kind in (1, 2):
            shape[:, 2] += 1
        if kind == 3:
            shape += 1
            shape[1:-1, 1:-1] -= 1
    return images, kinds


class Classifier(nnx.Module):
    """One convolution, normalised over the batch, the largest answer in each of nine regions, one dense layer."""

    def __init__(self, rngs):
        self.convolution = nnx.Conv(1, 16, kernel_size=(5, 5), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dense = nnx.Linear(3 * 3 * 16, SHAPES, rngs=rngs)

    def __call__(self, images):
        x = nnx.max_pool(nnx.relu(self.norm(self.convolution(images))), (4, 4), (4, 4))
        return self.dense(x.reshape(x.shape[0], -1))


def mean_loss(model, images, kinds):
    """Return the mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(model(images), kinds).mean()


def shared_part(model):
    """Return what the nodes share: float arrays, no more."""
    return {"params": nnx.state(model, nnx.Param), "batch_stats": nnx.state(model, nnx.BatchStat)}


def take_over(model, shared):
    """Put the shared part into the model."""
    nnx.update(model, shared["params"], shared["batch_stats"])
    model.norm.var[...] = jnp.maximum(model.norm.var[...], 0)  # which an outer optimizer with momentum may overshoot


@nnx.jit
def train_step(model, optimizer, images, kinds):
    """Take one step, in place; return the loss before it."""
    loss, gradient = nnx.value_and_grad(mean_loss)(model, images, kinds)
    optimizer.update(model, gradient)
    return loss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hub", nargs="?", help="the broker's address, as tcp://hub:5555")
    parser.add_argument("--steps", type=int, default=3000, help="of this process (default %(default)s)")
    parser.add_argument("--name", default=platform.node(), help="what to call this process (default: %(default)s)")
    parser.add_argument("--keys", help="this PC's key file (NAME.key_secret); not given: it is looked for")
    options = parser.parse_args()

    model = Classifier(nnx.Rngs(0))
    model.train()
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    generator = np.random.default_rng(list(options.name.encode()))  # each PC has a name, and so data, of its own
    node = zt.connect(options.hub, options.name, keys=options.keys)  # zmqtrain 2/5
    sync = zt.DelayedSync(node, shared_part(model))  # zmqtrain 3/5
    for step in range(1, options.steps + 1):
        loss = train_step(model, optimizer, *draw_batch(generator, BATCH))
        take_over(model, sync.step(shared_part(model), score=loss, samples=BATCH))  # zmqtrain 4/5
        if step % 500 == 0:
            print(f"{options.name}: step {step}, loss {loss:.4f}", flush=True)
    take_over(model, sync.finish(shared_part(model)))  # zmqtrain 5/5

    model.eval()
    images, kinds = draw_batch(np.random.default_rng(0), 1000)
    accuracy = 100 * np.mean(np.argmax(model(jax.numpy.asarray(images)), axis=-1) == kinds)
    print(f"{options.name}: accuracy {accuracy:.1f} % after {options.steps} steps of its own")


if __name__ == "__main__":
    main()
