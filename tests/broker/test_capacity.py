"""Which models a hub takes on."""

from __future__ import annotations

import pytest

from zmqtrain.broker.deltas import MODELS_HELD, check_capacity
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.types import LeafSpec

MODEL = (LeafSpec("w", (1000, 10), "float32"), LeafSpec("b", (24,), "float32"))


def test_a_model_that_fits_is_taken_and_one_value_more_is_refused_with_both_sizes():
    check_capacity(MODEL, 4 * MODELS_HELD * 10_024)
    check_capacity(MODEL)
    with pytest.raises(ConfigError, match="a model of 10,024 values needs 0 GiB at its hub, which has 0: divide it"):
        check_capacity(MODEL, 4 * MODELS_HELD * 10_024 - 1)
    with pytest.raises(ConfigError, match="a model of 1,099,511,627,776 values needs 20480 GiB at its hub, which has"):
        check_capacity((LeafSpec("w", (1 << 40,), "float32"),))
