"""Synchronous training: all workers take every step together, by the gradient of all their images.

Each batch is cut among the workers, and the gradients of the parts are added up by an allreduce. The sum is the same
with one worker as with eight (but for rounding), and so is the model: only the time changes.
"""

from data import shuffled_batches


def fit(network, training, wanted, comm, *, algorithm, rate, batch, epochs, limit=None):
    """Train by allreduce; every worker ends with the same parameters.

    algorithm: "auto" is the library's choice of a collective; "naive" sends every worker's gradient to every other;
    "ring" passes parts around.  limit: at most so many steps.  Returns the steps.
    """
    step = 0
    for rows in shuffled_batches(len(training), batch, epochs, seed=1):
        if step == limit:
            break
        mine = rows[comm.rank :: comm.size]
        gradients = dict(network.backward(training[mine], wanted[mine], batch))
        total = comm.allreduce(gradients, op="sum", algorithm=algorithm)
        for name, gradient in total.items():
            network.parameters[name] -= rate * gradient
        step += 1
    return step
