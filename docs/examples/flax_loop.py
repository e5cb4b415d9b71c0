"""Join a run from a training loop with flax.nnx: an ordinary script and four marked lines.

    zmqtrain-broker --insecure
    python flax_loop.py tcp://hub:5555

What the nodes share is the `nnx.Param` part of the model's state; the optimizer, its moments and the random streams
stay each node's own. Without the four marked lines this trains alone (and then has no use for its argument `hub`).
"""

import argparse

import jax
import numpy as np
import optax
from flax import nnx

import zmqtrain as zt  # zmqtrain 1/4

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
    """One convolution, the largest answer in each of nine regions, one dense layer."""

    def __init__(self, rngs):
        self.convolution = nnx.Conv(1, 16, kernel_size=(5, 5), rngs=rngs)
        self.dense = nnx.Linear(3 * 3 * 16, SHAPES, rngs=rngs)

    def __call__(self, images):
        x = nnx.max_pool(nnx.relu(self.convolution(images)), (4, 4), (4, 4))
        return self.dense(x.reshape(x.shape[0], -1))


def mean_loss(model, images, kinds):
    """Return the mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(model(images), kinds).mean()


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
    parser.add_argument("--name", default="shapes", help="what to call this process")
    options = parser.parse_args()

    model = Classifier(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    generator = np.random.default_rng()  # not seeded: every PC draws data of its own
    sync = zt.DelayedSync(zt.connect(options.hub, options.name), nnx.state(model, nnx.Param))  # zmqtrain 2/4
    for step in range(1, options.steps + 1):
        loss = train_step(model, optimizer, *draw_batch(generator, BATCH))
        nnx.update(model, sync.step(nnx.state(model, nnx.Param), score=loss, samples=BATCH))  # zmqtrain 3/4
        if step % 500 == 0:
            print(f"{options.name}: step {step}, loss {loss:.4f}", flush=True)
    nnx.update(model, sync.finish(nnx.state(model, nnx.Param)))  # zmqtrain 4/4

    images, kinds = draw_batch(np.random.default_rng(0), 1000)
    accuracy = 100 * np.mean(np.argmax(model(jax.numpy.asarray(images)), axis=-1) == kinds)
    print(f"{options.name}: accuracy {accuracy:.1f} % after {options.steps} steps of its own")


if __name__ == "__main__":
    main()
