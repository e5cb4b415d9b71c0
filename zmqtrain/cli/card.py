"""Refuse a plan that cannot fit a node's card, before anything of it is there, and say what would.

Rule: what a step takes is measured (`train.footprint`), what an exchange takes is counted (`runtime.memory`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from zmqtrain.cli.node_settings import NodeConfig
from zmqtrain.cli.plan import CARD_BYTES_OF_OTHERS
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import RunSettings
from zmqtrain.core.specs import parse_bytes
from zmqtrain.planning.costs import Place, estimate

if TYPE_CHECKING:
    from zmqtrain.train.program import Program


logger = logging.getLogger(__name__)


def check_card(program: Program, settings: RunSettings, config: NodeConfig) -> None:
    """Raise ConfigError, with what would fit, if a node of this run cannot fit the device that trains.

    What it has is what the user says (`card_memory`, less what is not jax's to use) or else what the device says; where
    neither says anything, as on a processor, nothing is measured.
    """
    from zmqtrain.train.footprint import card_bytes, measure_footprint, trains_on_processor  # imports jax
    from zmqtrain.train.minibatch import FixedMinibatch, minibatch_from_spec
    from zmqtrain.train.parallel import DataParallel

    limit = _limit(config.card_memory) if config.card_memory else card_bytes()
    if limit is None:
        return
    minibatch = minibatch_from_spec(settings.minibatch)
    sharding = program.everywhere if isinstance(program, DataParallel) else None
    footprint = measure_footprint(program, minibatch, settings.seed, sharding)
    codec_on: Place = "device" if config.codec_on == "device" else "host"
    if config.codec_on == "auto" and config.anchor == "device" and not trains_on_processor():  # as `Node` decides it
        codec_on = "device"
    in_lockstep = 1 if config.lockstep is None else 2  # gradients in buckets, as large as a sum of them
    plan = estimate(
        footprint.model,
        footprint.opt_state_bytes,
        settings,
        config.anchor,
        max(in_lockstep, minibatch.batches if isinstance(minibatch, FixedMinibatch) else minibatch.partitions),
        codec_on=codec_on,
        activation_bytes=footprint.activation_bytes,
    )
    advice = plan.advice(limit)
    if not plan.fits(limit):
        lines = ", ".join(f"{line.what} {line.device_bytes / 1e9:.2f}" for line in plan.lines if line.device_bytes)
        raise ConfigError(
            f"this run {advice}. In GB: {lines}. The anchor is this node's affair (--anchor host); fragments, the "
            "minibatch and the program's arguments are said where the broker is started"
        )
    logger.info("the card: %s", advice)


def _limit(card_memory: str) -> int:
    return max(0, parse_bytes(card_memory, "card_memory") - CARD_BYTES_OF_OTHERS)
