"""Asynchronous training: brokers hold the parameters, and no worker waits for another.

The arrays are dealt to the brokers. A worker sends each gradient to the array's broker as soon as it has computed it,
the last layer first; the broker takes a step with it and answers with the new values at once. Between a worker's
look at the parameters and the step with its gradient the others have taken theirs, about one each: its gradient is of
parameters that are `workers - 1` steps old. So:

- Each gradient counts 1/workers (`share`). All workers together then move the parameters as far as one synchronous step
  would, and the oldest gradient is one such step old. With a full share, all of the workers step in the same
  direction, one after the other, before any of them sees what came of it: too far by a factor of `workers`.
  (Zhang et al. 2016, Staleness-aware Async-SGD, divides each gradient's rate by its own staleness.)
- Pixels are centred (`data.load`). Pixels that are never negative give the cost one direction that is much steeper
  than all others, and it is in the steepest direction that late steps go too far.
"""

from data import shuffled_batches


def fit(network, training, wanted, server, *, worker, workers, share, batch, epochs, limit=None):
    """Train on every `workers`-th batch; this worker ends with the parameters that it was answered last.

    server: a parameter client.  share: what one gradient counts.  limit: at most so many steps.  Returns the steps.
    """
    step = 0
    for number, rows in enumerate(shuffled_batches(len(training), batch, epochs, seed=1)):
        if number % workers != worker:
            continue
        if step == limit:
            break
        answers = {
            name: server.ipush_pull(name, share * gradient)
            for name, gradient in network.backward(training[rows], wanted[rows], batch)
        }
        for name, answer in answers.items():
            network.parameters[name] = answer.wait()
        step += 1
    return step
