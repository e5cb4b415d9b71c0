"""Have the learning rate follow the run and not this node: warm-up and decay by the samples of all nodes.

    zmqtrain-broker
    python schedule_loop.py tcp://hub:5555 --keys ~/lab.key_secret

An optax schedule counts the steps of the optimizer that it is in. At a PC that joins late, or comes back, that count
begins at 0: it would warm up again, and then train with a rate that the others have left behind long ago. So the
schedule here is a function of `sync.run_samples`, the samples of all nodes that are in the shared parameters, which a
newcomer knows from its first step on; N nodes pass through the schedule N times as fast as one. The optimizer takes its
rate as an argument (`optax.inject_hyperparams`). Model and data are those of custom_loop.py, beside this file.
"""

import argparse
import itertools
import platform

import jax
import numpy as np
import optax
from custom_loop import BATCH, batches_of, draw_batch, fresh_params, mean_loss, predict

import zmqtrain as zt

WARM_UP, END = 50_000, 3_000_000
schedule = optax.warmup_cosine_decay_schedule(5e-4, 5e-3, WARM_UP, END, end_value=5e-4)  # of samples, not of steps
optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=5e-4)


@jax.jit
def train_step(params, opt_state, rate, points, arms):
    """Return the parameters and the optimizer's state after one step at this rate, and the loss before it."""
    loss, gradient = jax.value_and_grad(mean_loss)(params, points, arms)
    opt_state.hyperparams["learning_rate"] = rate
    updates, opt_state = optimizer.update(gradient, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hub", help="the broker's address, as tcp://hub:5555")
    parser.add_argument("--steps", type=int, default=3000, help="of this process (default %(default)s)")
    parser.add_argument("--name", default=platform.node(), help="what to call this process (default: %(default)s)")
    parser.add_argument("--keys", help="this PC's key file (NAME.key_secret); not given: it is looked for")
    options = parser.parse_args()

    params = fresh_params(jax.random.key(0))
    opt_state = optimizer.init(params)
    node = zt.connect(options.hub, options.name, keys=options.keys)
    with zt.DelayedSync(node, params) as sync:
        params = sync.start
        for step, batch in enumerate(itertools.islice(node.batches(batches_of), options.steps)):
            rate = schedule(sync.run_samples)
            if step % 500 == 0:
                print(f"{options.name}: step {step}, the run's sample {sync.run_samples}, rate {rate:.5f}", flush=True)
            params, opt_state, loss = train_step(params, opt_state, rate, *batch)
            params = sync.step(params, score=loss, samples=BATCH)
        params = sync.finish(params)

    points, arms = draw_batch(np.random.default_rng(0), 2000)
    accuracy = 100 * np.mean(np.argmax(predict(params, points), axis=-1) == arms)
    print(f"{options.name}: accuracy {accuracy:.1f} % after {options.steps} steps of its own")


if __name__ == "__main__":
    main()
