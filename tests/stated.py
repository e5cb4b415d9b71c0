"""A base of exchanges whose state is plain attributes, which a test sets."""

from math import nan

from zmqtrain.core.types import ExchangeState, StepSchedule


class Stated:
    """An exchange of one broker, and a population of which it is one. pace: gives that of this node and of all."""

    unreachable = ()
    founded = True
    wanted = is_evaluator = stopped = False

    def in_flight(self):
        return ()

    def pace(self):
        return nan, ()

    def state(self):
        stands = self.founded, self.wanted, self.is_evaluator, self.stopped
        return ExchangeState(tuple(self.in_flight()), self.unreachable, *stands)

    def schedule(self, paced=False):
        return StepSchedule(self.settings.every, self.settings.delay, *self.pace())

    @property
    def population(self):
        return self
