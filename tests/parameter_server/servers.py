"""One broker's machine with its clients, for the tests of what it answers them."""

from __future__ import annotations

from collections import Counter

from zmqtrain.parameter_server.machine import Confirm, Install, KeyServer, Receive, Rules

__all__ = ["SIZES", "Server", "kinds", "initialise"]

SIZES = (400,)


class Server:
    """A machine, and what a living half does for it at once: payloads that are let in are whole at the next word."""

    def __init__(self, consistency="async", workers=(), expected=0, **rules):
        self.machine = KeyServer("m", 1 << 30)
        self.numbers = Counter()
        for worker in workers:
            wanted = Rules(consistency=consistency, workers=expected or len(workers), **rules)
            self.machine.enrol(worker, wanted, False)

    def number(self, worker):
        self.numbers[worker] += 1
        return self.numbers[worker]

    def key(self, *keys, worker="a"):
        for key in keys:
            number = self.number(worker)
            assert self.machine.initialise(worker, number, key, "float32", 0, 100, SIZES) == [Receive(worker, number)]
            assert self.machine.received(worker, number) == [
                Install(worker, number, key, "float32"),
                Confirm(worker, number),
            ]
        return self

    def push(self, worker, key="w", pull=False):
        """Push, and let the payload come if it may; return the effects after that, or [] if it may not."""
        number = self.number(worker)
        effects = self.machine.push(worker, number, key, "float32", SIZES, pull)
        return self.machine.received(worker, number) if effects == [Receive(worker, number)] else effects

    def pull(self, worker, key="w"):
        return self.machine.pull(worker, self.number(worker), key)


def kinds(effects):
    return [type(effect).__name__ for effect in effects]


def initialise(server, *what, worker="a"):
    return server.machine.initialise(worker, server.number(worker), *what)
