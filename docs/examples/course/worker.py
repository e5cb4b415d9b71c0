"""One worker of the exercise, as `run.py` starts it: join the others, train, and print what came of it as JSON."""

import argparse
import json
import sys
import time
from functools import partial

import asynchronous
import synchronous
from data import load
from network import Network

import zmqtrain as zt

HIDDEN = 30


def main():
    """Train by the arguments; rank 0 prints {"seconds", "accuracy", "steps"}."""
    options = parse()
    training, wanted, test, labels = load(options.data, centred=not options.naive)
    network = Network((training.shape[1], HIDDEN, wanted.shape[1]))
    common = {"batch": options.batch, "epochs": options.epochs, "limit": options.limit}
    with zt.Communicator.create(options.hub, options.workers, options.rank, keys=options.keys) as comm:
        if options.method == "async":
            share = 1.0 if options.naive else 1 / comm.size
            fit = partial(asynchronous.fit, worker=comm.rank, workers=comm.size, share=share, **common)
            with connect(options) as server:
                network.parameters = server.init_all(network.parameters)
                steps, seconds = timed(comm, lambda: fit(network, training, wanted, server))
                network.parameters = server.pull_all(network.parameters)
        else:
            fit = partial(synchronous.fit, algorithm=options.method, rate=options.rate, **common)
            steps, seconds = timed(comm, lambda: fit(network, training, wanted, comm))
        if comm.rank == 0:
            accuracy = network.accuracy(test, labels)
            print(json.dumps({"seconds": seconds, "accuracy": accuracy, "steps": steps}), flush=True)


def timed(comm, train):
    """Train when all are ready; return (steps, seconds until the last one is done)."""
    comm.barrier()
    began = time.perf_counter()
    steps = train()
    comm.barrier()
    return steps, time.perf_counter() - began


def connect(options):
    """Return the way to the brokers, which take a plain step of gradient descent with every gradient as it comes."""
    return zt.ParameterClient.connect(
        options.shards or options.hub,
        name=f"worker {options.rank}",
        keys=options.keys,
        consistency="async",
        optimizer=f"sgd:rate={options.rate}",
    )


def parse():
    """Return the arguments."""
    parser = argparse.ArgumentParser(description="One worker of the exercise: run.py starts as many as are wanted.")
    parser.add_argument("method", choices=["auto", "naive", "ring", "async"], help="an allreduce, or async")
    parser.add_argument("--hub", required=True, help="where the workers meet")
    parser.add_argument("--workers", type=int, required=True, help="how many there are")
    parser.add_argument("--rank", type=int, required=True, help="which one this is, from 0")
    parser.add_argument("--shards", nargs="*", default=[], help="the brokers' addresses (async); without: the hub")
    parser.add_argument("--keys", help="this PC's key file (NAME.key_secret), where the brokers have keys")
    parser.add_argument("--data", default="", help="a folder in the format of MNIST; without, scikit-learn's digits")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--limit", type=int, default=None, help="end after so many steps of a worker")
    parser.add_argument("--naive", action="store_true", help="full share, pixels as they are: see it fail (async)")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except zt.ZmqTrainError as error:
        sys.exit(f"worker: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
