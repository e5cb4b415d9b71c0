"""The codecs' laws hold for what users compile: in this folder XLA optimizes as it does without the flags of tests."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp

from tests.conftest import AS_BY_DEFAULT, QUICKLY


def instructions_of(compiled: jax.stages.Compiled) -> list[str]:
    """The instructions without what they say of their source."""
    return re.findall(r"^ .* = (.*?)(?:, metadata=.*)?$", compiled.as_text(), re.MULTILINE)


def test_what_is_compiled_here_is_what_users_compile():
    assert not jax.config.read("jax_disable_most_optimizations")
    made = jax.jit(lambda x: 3 * jnp.sin(2 * x + 1).reshape(4, -1).sum(0) + jnp.cumsum(x[:16])).lower(jnp.arange(64.0))
    here, by_default, quickly = map(instructions_of, map(made.compile, (None, AS_BY_DEFAULT, QUICKLY)))
    assert here == by_default != quickly
