"""What a round's contributions weigh."""

from __future__ import annotations

import numpy as np
import pytest

from zmqtrain.errors import LocalProtocolError
from zmqtrain.strategies.aggregate import mean_over_live


def test_any_grouping_of_the_same_deltas_into_rounds_moves_the_parameters_alike():
    deltas = np.random.default_rng(0).standard_normal((4, 1000)).astype(np.float32)
    at_once = mean_over_live(deltas.sum(axis=0), live=4)
    in_two = mean_over_live(deltas[:1].sum(axis=0), live=4) + mean_over_live(deltas[1:].sum(axis=0), live=4)
    np.testing.assert_allclose(at_once, in_two, rtol=1e-5, atol=1e-6)


def test_the_mean_may_be_made_in_place():
    total = np.arange(6, dtype=np.float32)
    assert mean_over_live(total, 2, out=total) is total
    assert total.dtype == np.float32
    np.testing.assert_array_equal(total, np.arange(6) / 2)


@pytest.mark.parametrize("live", [0, -1])
def test_a_mean_over_nobody_is_refused(live):
    with pytest.raises(LocalProtocolError, match="live nodes"):
        mean_over_live(np.ones(3, np.float32), live)
