"""Lines of a chart that stay short however long a run is.

Rule: points next to each other are replaced by their mean, evenly along the line; the first and the newest point of a
line are always there, as they came.
"""

from __future__ import annotations

from itertools import islice
from math import isfinite

MOST_POINTS = 512
Points = tuple[list[float], list[float]]


class Line:
    """A line of at most `most` points and the newest one. Its times do not go back: an earlier one is left out."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self.most = max(4, most)
        self._times: list[float] = []
        self._values: list[float] = []
        self._weights: list[int] = []
        self._opened = 0.0  # when the last of the points began, which takes others in
        self._gap = 0.0
        self._newest: tuple[float, float] | None = None
        self._changed: int | None = None  # the first point that is another since `take_change`

    def __len__(self) -> int:
        return len(self._times) + (self._newest is not None)

    @property
    def end(self) -> float:
        """The time of the newest point; minus infinity without one."""
        return -float("inf") if self._newest is None else self._newest[0]

    def add(self, time: float, value: float) -> None:
        """Add a point; one that is not finite, or not later than the newest, is left out."""
        if not (isfinite(time) and isfinite(value)) or time <= self.end:
            return
        before, self._newest = self._newest, (time, value)
        if before is not None:
            self._keep(*before)
        self._touch(len(self._times) - 1)

    def _keep(self, time: float, value: float) -> None:
        """Take in what was the newest point: as a point of its own, or into the mean of the last one."""
        if len(self._times) < 2 or time - self._opened >= self._gap:
            self._times.append(time)
            self._values.append(value)
            self._weights.append(1)
            self._opened = time
        else:
            self._weights[-1] += 1
            self._times[-1] = time
            self._values[-1] += (value - self._values[-1]) / self._weights[-1]
        if len(self._times) > self.most:
            self.thin(self.most // 2)

    def thin(self, most: int) -> None:
        """Leave at most `most` points, the first and the newest among them."""
        most = max(4, most)
        if len(self._times) <= most:
            return
        self._gap = (self._times[-1] - self._times[0]) / (most - 2)  # besides the first point and the one after it
        times, values, weights = self._times, self._values, self._weights
        self._times, self._values, self._weights = times[:1], values[:1], weights[:1]
        self._opened = times[0]
        for time, value, weight in islice(zip(times, values, weights, strict=True), 1, None):
            if len(self._times) < 2 or time - self._opened >= self._gap:
                self._times.append(time)
                self._values.append(value)
                self._weights.append(weight)
                self._opened = time
            else:
                self._weights[-1] += weight
                self._times[-1] = time
                self._values[-1] += (value - self._values[-1]) * weight / self._weights[-1]
        self._touch(0)

    def _touch(self, index: int) -> None:
        index = max(0, index)
        self._changed = index if self._changed is None else min(self._changed, index)

    def points(self, first: int = 0) -> Points:
        """Return times and values from the point number `first` on, rounded for the wire."""
        times, values = self._times[first:], self._values[first:]
        if self._newest is not None:
            times, values = [*times, self._newest[0]], [*values, self._newest[1]]
        return [round(time, 2) for time in times], [float(f"{value:.6g}") for value in values]

    def take_change(self) -> tuple[int, Points] | None:
        """Return what has changed since the last call: all points from a number on; None if nothing has."""
        if (first := self._changed) is None:
            return None
        self._changed = None
        return first, self.points(first)
