"""Send one bucket of gradients while the next one is computed: the engine orders computing and sending.

Start a broker, where the processes meet, and then this script on every PC (or as often as you like on one):

    zmqtrain-broker
    python overlap.py tcp://hub:5555 --size 2 --keys ~/lab.key_secret

Each process trains the same network on data of its own, by the mean of all gradients. The backward pass gives the
gradients layer by layer, the last one first; each is a bucket, which is reduced over all processes while the layers
before it are computed, and a layer of the next forward pass begins as soon as its own weights are there. Nobody wrote
that order down: it follows from what each operation reads and changes. Each process writes overlap-RANK.json, to be
opened at ui.perfetto.dev: the track "network 0" shows what was sent meanwhile.
"""

import argparse
import sys
import zlib
from pathlib import Path

import numpy as np

import zmqtrain as zt

LAYERS, WIDTH, BATCH, RATE = 6, 256, 1024, 0.2


def batches(rank, count):
    """Give (inputs, wanted), float32[BATCH, WIDTH] each: one function for all processes, other points for each."""
    teacher = np.random.default_rng(0).normal(0, WIDTH**-0.5, (WIDTH, WIDTH))
    generator = np.random.default_rng(rank + 1)
    for _ in range(count):
        inputs = generator.normal(size=(BATCH, WIDTH))
        yield inputs.astype(np.float32), np.tanh(inputs @ teacher).astype(np.float32)


class Training:
    """The variables of a network of tanh layers, and the operations that one step pushes."""

    def __init__(self, engine, comm):
        self.engine, self.comm = engine, comm
        generator = np.random.default_rng(7)
        self.weights = [
            engine.variable(generator.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32), f"weights {layer}")
            for layer in range(LAYERS)
        ]
        self.gradients = [engine.variable(name=f"gradient {layer}") for layer in range(LAYERS)]
        self.activations = [engine.variable(name=f"activations {layer}") for layer in range(LAYERS + 1)]
        self.error = engine.variable(name="error")
        self.loss = engine.variable(name="loss")
        self.wire = engine.variable(name="wire")

    def push_step(self, inputs, wanted):
        """Push one step: forward, and for each layer backward, allreduce and update. It returns at once."""
        engine = self.engine
        engine.push(lambda: inputs, mutate=[self.activations[0]], name="inputs")
        for layer in range(LAYERS):
            before, after = self.activations[layer : layer + 2]
            engine.push(
                lambda layer=layer: self.forward(layer),
                read=[before, self.weights[layer]],
                mutate=[after],
                name=f"forward {layer}",
            )
        engine.push(
            lambda: self.compare(wanted), read=[self.activations[-1]], mutate=[self.error, self.loss], name="loss"
        )
        for bucket, layer in enumerate(reversed(range(LAYERS))):
            gradient, weights = self.gradients[layer], self.weights[layer]
            engine.push(
                lambda layer=layer: self.backward(layer),
                read=[*self.activations[layer : layer + 2], weights],
                mutate=[gradient, self.error],
                name=f"compute bucket {bucket}",
            )
            engine.push_request(
                lambda gradient=gradient: self.comm.iallreduce(gradient.value, op="mean"),
                mutate=[gradient, self.wire],  # the wire: all processes reduce the buckets in the same order
                name=f"allreduce bucket {bucket}",
            )
            engine.push(
                lambda weights=weights, gradient=gradient: weights.value - np.float32(RATE) * gradient.value,
                read=[gradient],
                mutate=[weights],
                name=f"update bucket {bucket}",
            )

    def forward(self, layer):
        """Return what a layer gives."""
        return np.tanh(self.activations[layer].value @ self.weights[layer].value)

    def compare(self, wanted):
        """Set the loss, and return the error of the outputs."""
        difference = self.activations[-1].value - wanted
        self.loss.value = float((difference**2).mean())
        return difference / BATCH

    def backward(self, layer):
        """Return a layer's gradient, and set the error of the layer before it."""
        before, after = (each.value for each in self.activations[layer : layer + 2])
        error = self.error.value * (1 - after**2)
        self.error.value = error @ self.weights[layer].value.T
        return before.T @ error


def main():
    """Train, and write the trace."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("hub", help="the broker's address, for example tcp://hub:5555")
    parser.add_argument("--size", type=int, default=2, help="how many processes there are")
    parser.add_argument(
        "--rank", type=int, default=None, help="which one this is, from 0; without: in order of arrival"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--keys", help="this PC's key file (NAME.key_secret), where the broker has keys")
    parser.add_argument("--trace", type=Path, default=Path(), help="the folder that the trace is written to")
    options = parser.parse_args()
    with zt.Communicator.create(options.hub, options.size, options.rank, keys=options.keys) as comm:
        with zt.Engine(2, name=f"rank {comm.rank}", trace=True) as engine:
            training = Training(engine, comm)
            losses = []
            for inputs, wanted in batches(comm.rank, options.steps):
                training.push_step(inputs, wanted)
                losses.append(engine.wait(training.loss))
            engine.wait_all()
            engine.write_trace(options.trace / f"overlap-{comm.rank}.json")
            checksum = zlib.crc32(b"".join(each.value.tobytes() for each in training.weights))
        print(f"rank {comm.rank}: loss {losses[0]:.4f}, in the end {losses[-1]:.4f}; weights {checksum:08x}")


if __name__ == "__main__":
    try:
        main()
    except zt.ZmqTrainError as error:
        sys.exit(f"overlap: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
