"""A line of a chart: bounded, evenly thinned, with its ends; and what a browser is told of it adds up to the line."""

from __future__ import annotations

import itertools
import math

from hypothesis import example, given
from hypothesis import strategies as st

from zmqtrain.page.lines import Line

POINTS = st.lists(st.tuples(st.floats(0.01, 100), st.floats(-1e6, 1e6)), min_size=1, max_size=300)


def fill(line: Line, points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    at, given_points = 0.0, []
    for step, value in points:
        at += step
        line.add(at, value)
        given_points.append((round(at, 2), float(f"{value:.6g}")))
    return given_points


@given(POINTS, st.integers(4, 32))
@example([(1.0, 0.0)] * 6, 4)  # evenly apart
def test_a_line_is_bounded_and_keeps_its_first_and_its_newest_point(
    points: list[tuple[float, float]], most: int
) -> None:
    line = Line(most)
    said = fill(line, points)
    times, values = line.points()
    assert len(times) == len(values) == len(line) <= most + 1
    assert (times[0], values[0]) == said[0]
    assert (times[-1], values[-1]) == said[-1]
    assert times == sorted(times)
    least, largest = min(value for _, value in said), max(value for _, value in said)
    assert all(least - 1e-3 * abs(least) <= value <= largest + 1e-3 * abs(largest) for value in values)


@given(POINTS, st.integers(4, 16), st.integers(1, 20))
def test_the_changes_add_up_to_the_line(points: list[tuple[float, float]], most: int, often: int) -> None:
    line, at = Line(most), 0.0
    times: list[float] = []
    values: list[float] = []
    for number, (step, value) in enumerate(points):
        at += step
        line.add(at, value)
        if number % often == 0 or number == len(points) - 1:
            change = line.take_change()
            assert change is not None
            first, (new_times, new_values) = change
            times[first:], values[first:] = new_times, new_values
            assert (times, values) == line.points()
    assert line.take_change() is None


def test_what_is_not_finite_or_not_later_is_left_out() -> None:
    line = Line()
    for time, value in (
        (1.0, 2.0),
        (2.0, math.nan),
        (3.0, math.inf),
        (0.5, 1.0),
        (1.0, 9.0),
        (math.nan, 1.0),
        (2.0, 3.0),
    ):
        line.add(time, value)
    assert line.points() == ([1.0, 2.0], [2.0, 3.0])


def test_ten_hours_of_points_a_second_stay_few_and_evenly_spaced() -> None:
    line = Line()
    for second in range(36_000):
        line.add(float(second), 1.0 / (1 + second))
    times, _ = line.points()
    assert 200 <= len(times) <= 513
    gaps = [after - before for before, after in itertools.pairwise(times[1:-2])]
    assert max(gaps) < 4 * min(gaps)
