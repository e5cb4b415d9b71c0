"""`zmqtrain-node` in a run of pipelines: this PC is one of several that are one node (`--pipeline` at the broker)."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from zmqtrain.cli.display import Display
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import AUTO_PIPELINE, RunSettings
from zmqtrain.core.specs import parse_bytes
from zmqtrain.monitor.recorder import NodeRecorder, process_facts
from zmqtrain.node.codec import CodecOn
from zmqtrain.node.connect import connect
from zmqtrain.pipeline.of_program import fewest_pcs, micro_batches_of, optimizer_of
from zmqtrain.pipeline.pipeline_node import PipelineNode
from zmqtrain.pipeline.placement import MEMORY_SHARE, usable_memory
from zmqtrain.pipeline.stage_optimizer import counts
from zmqtrain.train.step import card_bytes
from zmqtrain.transport.key_folder import Access

if TYPE_CHECKING:
    from zmqtrain.train.program import Program

logger = logging.getLogger(__name__)

GROUP = "pipeline"
WAIT_SECONDS = 600.0
"""A PC of a pipeline is waited for so long: it may compile."""


class Signals(Protocol):
    """What ends this process early. asked: a signal came; leaves: another thread ends the process now.  display: where
    the run is shown.  goodbyes: called before the process ends at once."""

    asked: bool
    leaves: bool
    display: Display | None
    goodbyes: list[Callable[[], object]]

    def watch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches until a signal interrupts the wait for one."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The flags of a node that a PC of a pipeline follows; see `NodeConfig`."""

    hub: str
    name: str
    data: str
    codec_on: CodecOn
    link: str
    share: float
    card_memory: str
    optimizer_on: str
    wait_seconds: float
    record: Path | None


@dataclass(frozen=True)
class PipelineResult:
    """What training in a pipeline ended with. lost: PCs of this pipeline."""

    node: PipelineNode
    seconds: float
    steps: int
    loss: float
    lost: int


def settings_of_run(options: PipelineOptions, access: Access) -> RunSettings:
    """Return the settings of the run, as a broker tells those that look on. Raises ConfigError if its pipelines are not
    the broker's, and what `connect` does."""
    with connect(options.hub, "looks", keys=access, observer=True, timeout_seconds=options.wait_seconds) as node:
        settings = node.settings
    if not settings.pipeline:
        raise ConfigError(
            "the pipelines of this run are a script's (zt.PipelineNode), not its broker's (--pipeline): start the "
            "script here, too"
        )
    return settings


def train_in_pipeline(
    options: PipelineOptions,
    settings: RunSettings,
    program: Program,
    access: Access,
    signals: Signals,
    paced: Callable[[Iterable[Any]], Iterator[Any]],
) -> PipelineResult:
    """Train on this PC as one of a pipeline until the run is over, or a signal comes. paced: see `--pace-seconds`."""
    began, steps, loss = time.monotonic(), 0, math.nan
    recorders: list[NodeRecorder] = []
    node = None
    try:
        node = _join(options, settings, program, access, recorders)
        signals.goodbyes.insert(0, node.close)
        title = f"{node.name}: training {program.name} at {options.hub}, in a pipeline of {node.comm.size}"
        with Display(node, title) as signals.display:
            for batch in paced(signals.watch(node.batches(program))):
                if signals.asked:
                    node.leave()
                loss, steps = node.step(batch), steps + 1
                if node.ended:
                    break
            if not signals.asked:  # else it has left, or was interrupted while it waited for data
                node.finish()
    except BaseException:
        if signals.leaves:  # another thread ends this process: what fails here fails for that
            threading.Event().wait()
        raise
    finally:
        if node is not None:
            node.close()
        for one in recorders:
            one.close()
    return PipelineResult(node, time.monotonic() - began, steps, loss, sum(map(len, node.recoveries)))


def _join(
    options: PipelineOptions, settings: RunSettings, program: Program, access: Access, recorders: list[NodeRecorder]
) -> PipelineNode:
    """Meet the other PCs of a pipeline, and join the run with them. recorders: gets that of the present connection."""
    optimizer, clip_norm = optimizer_of(program)
    memory = int(MEMORY_SHARE * parse_bytes(options.card_memory, "card_memory")) if options.card_memory else None
    pcs = settings.pipeline
    if pcs == AUTO_PIPELINE:
        in_memory = optimizer if counts(options.optimizer_on, card_bytes() is not None) else None
        pcs = fewest_pcs(program, in_memory, memory or usable_memory())
    batch = next(iter(program.batches(0)))

    def of_connection() -> dict[str, Any]:
        """The arguments of each connection: this PC joins again when its pipeline has lost a PC."""
        given: dict[str, Any] = {
            "codec_on": options.codec_on, "link": options.link, "share": options.share,
            "timeout_seconds": options.wait_seconds,
        }  # fmt: skip
        if options.record is not None:
            for one in recorders:
                one.close()
            recorders[:] = [NodeRecorder(options.record, {**process_facts(), "data": options.data})]
            given["events"] = recorders[0]
        return given

    logger.info("this run trains with pipelines of %d PCs: this one waits for as many as are missing", pcs)
    return PipelineNode.join(
        options.hub, pcs, program.loss, program.init, optimizer, batch,
        micro_batches=micro_batches_of(batch, pcs), key=settings.seed, memory_bytes=memory, group=GROUP,
        name=options.name or None, keys=access, timeout_seconds=max(WAIT_SECONDS, options.wait_seconds), patient=True,
        node_options=of_connection, clip_norm=clip_norm, optimizer_on=options.optimizer_on,
    )  # fmt: skip
