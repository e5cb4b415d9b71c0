"""Join a run from a loop with parameters spread over the GPUs of this PC (FSDP): plain JAX, five marked lines.

Start a broker, then this script on every PC. The PCs may have different numbers of devices:

    zmqtrain-broker
    python fsdp_loop.py tcp://hub:5555 --keys ~/lab.key_secret

The step is an ordinary `jax.sharding` program: XLA speaks between the devices of the PC, zmqtrain between the PCs. Each
device offers its own part of every leaf and takes its own part back; nothing is gathered on one of them.
Without a GPU, have four devices made of the processor: XLA_FLAGS=--xla_force_host_platform_device_count=4
"""

import argparse
import platform

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import zmqtrain as zt  # zmqtrain 1/5

ARMS, HIDDEN, BATCH, NOISE = 3, 128, 1024, 0.05

mesh = Mesh(np.array(jax.devices()), ("data",))
everywhere = NamedSharding(mesh, PartitionSpec())
rows = NamedSharding(mesh, PartitionSpec("data"))


def home(leaf):
    """Return where a leaf lives: its rows are shared among the devices if they can be, else each has all of it."""
    return rows if leaf.ndim and leaf.shape[0] % mesh.size == 0 else everywhere


def draw_batch(generator, count):
    """Return `count` points on three arms of a spiral, float32[count, 2], and the arm of each, int32[count]."""
    arms = generator.integers(0, ARMS, count).astype(np.int32)
    radii = np.sqrt(generator.random(count))
    angles = 2 * np.pi * (arms / ARMS + radii)
    points = radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    return (points + NOISE * generator.normal(size=points.shape)).astype(np.float32), arms


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


optimizer = optax.adam(5e-3)


def make_train_step(params, opt_state):
    """Return the jitted step: the state stays where it is, the batch is shared among the devices."""
    homes = jax.tree.map(lambda leaf: leaf.sharding, (params, opt_state))

    def train_step(params, opt_state, points, arms):
        loss, gradient = jax.value_and_grad(mean_loss)(params, points, arms)
        updates, opt_state = optimizer.update(gradient, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(train_step, in_shardings=(*homes, rows, rows), out_shardings=(*homes, everywhere))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hub", nargs="?", help="the broker's address, as tcp://hub:5555")
    parser.add_argument("--steps", type=int, default=3000, help="of this process (default %(default)s)")
    parser.add_argument("--name", default=platform.node(), help="what to call this process (default: %(default)s)")
    parser.add_argument("--keys", help="this PC's key file (NAME.key_secret); not given: it is looked for")
    options = parser.parse_args()

    params = fresh_params(jax.random.key(0))
    params = jax.device_put(params, jax.tree.map(home, params))
    opt_state = optimizer.init(params)
    opt_state = jax.device_put(opt_state, jax.tree.map(home, opt_state))
    train_step = make_train_step(params, opt_state)
    generator = np.random.default_rng()  # not seeded: every PC draws data of its own
    node = zt.connect(options.hub, options.name, keys=options.keys)  # zmqtrain 2/5
    sync = zt.DelayedSync(node, params)  # zmqtrain 3/5
    for step in range(1, options.steps + 1):
        params, opt_state, loss = train_step(params, opt_state, *draw_batch(generator, BATCH))
        params = sync.step(params, score=loss, samples=BATCH)  # zmqtrain 4/5
        if step % 500 == 0:
            print(f"{options.name}: step {step}, loss {loss:.4f}", flush=True)
    params = sync.finish(params)  # zmqtrain 5/5

    points, arms = draw_batch(np.random.default_rng(0), 2000)
    accuracy = 100 * np.mean(np.argmax(predict(params, points), axis=-1) == arms)
    print(f"{options.name}: accuracy {accuracy:.1f} % after {options.steps} steps of its own")


if __name__ == "__main__":
    main()
