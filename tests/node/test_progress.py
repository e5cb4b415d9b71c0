"""What a node says of itself: its pace is that of its steps, however seldom they end."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from tests.clocks import VirtualClock
from zmqtrain.node.progress import Progress

SAMPLES = 32


@pytest.fixture
def clock():
    return VirtualClock()


def paces_of(clock, step_seconds, seconds):
    """What a node of such steps says once a second."""
    mine, said, steps = Progress(clock), [], 0
    for second in range(1, seconds + 1):
        while (steps + 1) * step_seconds <= second:
            steps += 1
            clock.now = 100.0 + steps * step_seconds
            mine.samples = SAMPLES * steps
        clock.now = 100.0 + second
        said.append(mine.report(0, 0, "").samples_per_second)
    return mine, said


@pytest.mark.parametrize("step_seconds", [0.25, 0.4, 0.75, 1.5, 4.0])
def test_the_pace_is_that_of_whole_steps_also_where_they_are_longer_than_the_time_between_reports(clock, step_seconds):
    _, said = paces_of(clock, step_seconds, 40)
    assert said[12:] == pytest.approx([SAMPLES / step_seconds] * 28)


def test_the_pace_of_a_node_whose_step_does_not_end_falls(clock):
    mine, said = paces_of(clock, 0.5, 10)
    clock.sleep(100.0)
    assert mine.report(0, 0, "").samples_per_second == pytest.approx(SAMPLES / 100.0) and said[-1] == 2 * SAMPLES


def test_who_has_made_no_step_has_no_pace(clock):
    assert Progress(clock).report(0, 0, "").samples_per_second == 0.0


def test_a_loss_whose_buffer_was_donated_is_never_read_and_the_last_known_one_is_reported(clock):
    mine, first, donated = Progress(clock), jnp.float32(0.5), jnp.float32(0.25)
    for loss in (first, donated):
        mine.loss = loss.block_until_ready()
    assert mine.report(0, 0, "").loss == 0.5
    donated.delete()
    assert mine.report(0, 0, "").loss == 0.5
    clock.sleep(1.0)
    mine.loss = jnp.float32(0.125)
    assert mine.report(0, 0, "").loss == 0.5
    mine.loss = 0.0625
    assert mine.report(0, 0, "").loss == 0.0625
