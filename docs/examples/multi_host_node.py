"""Make several hosts with a fast network one node of a run: plain JAX over all of them, five marked lines.

A small cluster, or two PCs with a cable of their own, trains as one strong node beside ordinary PCs. Start a broker,
then this script on every host of the cluster, with the number of hosts, and which one it is:

    hub$     zmqtrain-broker --initial founder
    host-a$  python multi_host_node.py tcp://hub:5555 --coordinator host-a:6666 --hosts 2 --host 0
    host-b$  python multi_host_node.py --coordinator host-a:6666 --hosts 2 --host 1

Under Slurm, Open MPI or on a cloud's TPUs, JAX finds the three by itself: leave them out. XLA speaks between the
devices of all hosts, zmqtrain between this node and the others. Only host 0 needs the key and a way to the hub.
SIGTERM, which a scheduler sends before it takes a host away, ends the node in order: what it has learnt is sent first.
Without a GPU, try it with two terminals of one PC; each process is a host then, with one device.
"""

import argparse
import platform

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import zmqtrain as zt  # zmqtrain 1/5

ARMS, HIDDEN, BATCH, NOISE = 3, 128, 1024, 0.05


def draw_batch(generator, count):
    """Return `count` points on three arms of a spiral, float32[count, 2], and the arm of each, int32[count]."""
    arms = generator.integers(0, ARMS, count).astype(np.int32)
    radii = np.sqrt(generator.random(count))
    angles = 2 * np.pi * (arms / ARMS + radii)
    points = radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    return (points + NOISE * generator.normal(size=points.shape)).astype(np.float32), arms


def fresh_params(key):
    """Return three dense layers, 2 -> 128 -> 128 -> 3: the same on every host, because the key is."""
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


def train_step(params, opt_state, points, arms):
    loss, gradient = jax.value_and_grad(mean_loss)(params, points, arms)
    updates, opt_state = optimizer.update(gradient, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hub", nargs="?", help="the broker's address, as tcp://hub:5555; host 0 needs it")
    parser.add_argument("--coordinator", help="where host 0 can be reached by the others, as host-a:6666")
    parser.add_argument("--hosts", type=int, help="how many hosts there are")
    parser.add_argument("--host", type=int, help="which of them this is, from 0")
    parser.add_argument("--steps", type=int, default=3000, help="of this node (default %(default)s)")
    parser.add_argument("--name", default=platform.node(), help="what to call this node (default: %(default)s)")
    parser.add_argument("--keys", help="the node's key file (NAME.key_secret) on host 0; not given: it is looked for")
    options = parser.parse_args()

    jax.distributed.initialize(options.coordinator, options.hosts, options.host)
    mesh = Mesh(np.array(jax.devices()), ("data",))  # the devices of all hosts
    everywhere, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    def home(leaf):
        """Return where a leaf lives: its rows are shared among all devices if they can be, else each has all of it."""
        return rows if leaf.ndim and leaf.shape[0] % mesh.size == 0 else everywhere

    key = jax.random.key(0)
    shapes = jax.eval_shape(fresh_params, key)
    homes = [jax.tree.map(home, shape) for shape in (shapes, jax.eval_shape(optimizer.init, shapes))]
    params = jax.jit(fresh_params, out_shardings=homes[0])(key)  # each device makes its own part
    opt_state = jax.jit(optimizer.init, out_shardings=homes[1])(params)
    step_everywhere = jax.jit(train_step, in_shardings=(*homes, rows, rows), out_shardings=(*homes, everywhere))
    generator = np.random.default_rng()  # not seeded: every host draws its own part of a batch
    own = BATCH // jax.process_count()

    node = zt.connect_as_one(options.hub, options.name, keys=options.keys)  # zmqtrain 2/5
    sync = zt.DelayedSync(node, params)  # zmqtrain 3/5
    for step in range(1, options.steps + 1):
        batch = [jax.make_array_from_process_local_data(rows, part) for part in draw_batch(generator, own)]
        params, opt_state, loss = step_everywhere(params, opt_state, *batch)
        params = sync.step(params, score=loss, samples=BATCH)  # zmqtrain 4/5
        if step % 500 == 0 and jax.process_index() == 0:
            print(f"{options.name}: step {step}, loss {loss:.4f}", flush=True)
        if multihost_utils.reached_preemption_sync_point(step):  # SIGTERM at one host: all leave after the same step
            break
    params = sync.finish(params)  # zmqtrain 5/5

    points, arms = draw_batch(np.random.default_rng(0), 2000)
    logits = jax.jit(predict, out_shardings=everywhere)(params, points)
    accuracy = 100 * np.mean(np.argmax(logits, axis=-1) == arms)
    print(f"{options.name}: accuracy {accuracy:.1f} % after {step} steps of its own")


if __name__ == "__main__":
    main()
