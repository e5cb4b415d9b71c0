"""Effects are carried out in the order in which they were wished."""

from __future__ import annotations

import pytest

from zmqtrain.session.effect_queue import EffectQueue


def test_what_an_effect_brings_about_comes_after_all_that_was_wished_before():
    done = []

    def carry_out_one(effect):
        if effect == "a":
            queue.carry_out(["a1", "a2"])
        done.append(effect)

    queue = EffectQueue(carry_out_one)
    queue.carry_out(["a", "b"])
    assert done == ["a", "b", "a1", "a2"]


def test_an_effect_that_fails_is_raised_and_does_not_keep_what_comes_next():
    done = []

    def carry_out_one(effect):
        if effect == "broken":
            raise ValueError(effect)
        done.append(effect)

    queue = EffectQueue(carry_out_one)
    with pytest.raises(ValueError, match="broken"):
        queue.carry_out(["broken", "a"])
    queue.carry_out(["b"])
    assert done == ["a", "b"]
