"""A clock for what waits: it is moved, no time passes."""


class VirtualClock:
    """A clock that only `sleep` moves, or a test that sets `now`."""

    def __init__(self, now=100.0):
        self.now = now

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
