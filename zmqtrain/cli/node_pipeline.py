"""`zmqtrain-node` in a run of pipelines: this PC is one of several that are one node (`--pipeline` at the broker)."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any

import jax
import optax

from zmqtrain.cli.display import Display, Terminal, figures_table, format_count, format_number, format_seconds, say
from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import AUTO_PIPELINE, RunSettings
from zmqtrain.core.specs import parse_bytes
from zmqtrain.monitor.recorder import NodeRecorder, process_facts
from zmqtrain.node.connect import connect
from zmqtrain.pipeline.pipeline_node import PipelineNode
from zmqtrain.pipeline.placement import MEMORY_SHARE, usable_memory
from zmqtrain.transport.key_folder import Access
from zmqtrain.transport.service_manager import ServiceManager

if TYPE_CHECKING:
    from zmqtrain.cli.node import Interruption, NodeConfig
    from zmqtrain.train.program import Program

logger = logging.getLogger(__name__)

GROUP = "pipeline"
WAIT_SECONDS = 600.0
"""A PC of a pipeline is waited for so long: it may compile."""
MOST_AUTO = 64
"""Of more PCs than this no pipeline is made by itself."""
MARGIN = 1.25
"""A stage needs more than its share of parameters, gradients and optimizer state: carries, and what passes compute."""


def settings_of_run(config: NodeConfig, access: Access) -> RunSettings:
    """Return the settings of the run, as a broker tells those that look on. Raises what `connect` does."""
    with connect(config.hub, "looks", keys=access, observer=True, timeout_seconds=config.wait_seconds) as node:
        return node.settings


def check_flags(config: NodeConfig) -> None:
    """Raise ConfigError for a flag that a PC of a pipeline cannot follow."""
    unfit = {
        "--exchange": config.exchange != "hub",
        "--checkpoint": config.checkpoint is not None,
        "--devices all": config.devices == "all",
        "--anchor host": config.anchor == "host",
        "--induce": bool(config.induce),
        "--tensorboard": config.tensorboard is not None,
    }
    if flags := [flag for flag, given in unfit.items() if given]:
        raise ConfigError(
            f"this run trains with pipelines (--pipeline at its broker), and there a node takes no {', '.join(flags)}"
        )


def optimizer_of(program: Program) -> tuple[optax.GradientTransformation, float]:
    """Return a program's optimizer for stages, and the norm to which all gradients together are clipped (0: none)."""
    of_stage: Any = getattr(program, "stage_optimizer", None)
    return (program.optimizer(), 0.0) if of_stage is None else of_stage()


def fewest_pcs(program: Program, optimizer: optax.GradientTransformation, memory_bytes: int) -> int:
    """Return of how few PCs like this one a pipeline can hold a program's model. Raises ConfigError if it takes more
    than MOST_AUTO."""
    params = jax.eval_shape(program.init, 0)
    state = jax.eval_shape(optimizer.init, params)
    held = sum(int(leaf.size) * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, params, state)))
    fewest: int = max(1, math.ceil(MARGIN * held / memory_bytes))
    if fewest > MOST_AUTO:
        raise ConfigError(
            f"parameters, gradients and optimizer state take {held / 1e9:.1f} GB, and a stage may use "
            f"{memory_bytes / 1e9:.2f} GB here: that is a pipeline of {fewest} PCs, and `auto` makes none of more than "
            f"{MOST_AUTO}"
        )
    return fewest


def micro_batches_of(rows: int, pcs: int) -> int:
    """Return into how many micro-batches a batch is cut: the fewest that are four for each PC, or as many as can be."""
    divisors = [count for count in range(1, rows + 1) if rows % count == 0]
    return next((count for count in divisors if count >= 4 * pcs), rows)


def train_in_pipeline(config: NodeConfig, access: Access, interruption: Interruption, manager: ServiceManager) -> int:
    """Train on this PC as one of a pipeline until the run is over, or a signal comes; return the exit code."""
    from zmqtrain.cli.node import load_run_program, model_line, paced

    check_flags(config)
    settings = settings_of_run(config, access)
    if not settings.pipeline:
        raise ConfigError(
            "the pipelines of this run are a script's (zt.PipelineNode), not its broker's (--pipeline): start the "
            "script here, too"
        )
    program = load_run_program(settings, config.data, config.hub)
    manager.ready(f"a PC of a pipeline at {config.hub}")
    began, steps, loss = time.monotonic(), 0, math.nan
    recorders: list[NodeRecorder] = []
    node = None
    try:
        node = _join(config, settings, program, access, recorders)
        interruption.goodbyes.insert(0, node.close)
        title = f"{node.name}: training {program.name} at {config.hub}, in a pipeline of {node.comm.size}"
        with Display(node, title) as interruption.display:
            for batch in paced(interruption.watch(node.batches(program)), config.pace_seconds):
                if interruption.asked:
                    node.leave()
                loss, steps = node.step(batch), steps + 1
                if node.ended:
                    break
            if not interruption.asked:  # else it has left, or was interrupted while it waited for data
                node.finish()
    except BaseException:
        if interruption.leaves:  # another thread ends this process: what fails here fails for that
            threading.Event().wait()
        raise
    finally:
        if node is not None:
            node.close()
        for one in recorders:
            one.close()
    rows = [
        ("trained for", format_seconds(time.monotonic() - began)),
        ("steps", f"{steps:,}"),
        (program.sample_word, format_count(steps * program.samples_per_batch)),
        ("last loss", format_number(loss)),
        ("lost PCs", f"{sum(map(len, node.recoveries))}"),
    ]
    Terminal().print(figures_table(dict(rows)))
    say(model_line(node.run, node.last_version, node.ended_with_run, config.hub, config.keys))
    return 0


def _join(
    config: NodeConfig, settings: RunSettings, program: Program, access: Access, recorders: list[NodeRecorder]
) -> PipelineNode:
    """Meet the other PCs of a pipeline, and join the run with them. recorders: gets that of the present connection."""
    optimizer, clip_norm = optimizer_of(program)
    memory = int(MEMORY_SHARE * parse_bytes(config.card_memory, "card_memory")) if config.card_memory else None
    pcs = settings.pipeline
    if pcs == AUTO_PIPELINE:
        pcs = fewest_pcs(program, optimizer, memory or usable_memory())
    batch = next(iter(program.batches(0)))
    rows = next(int(leaf.shape[0]) for leaf in jax.tree.leaves(batch) if leaf.shape)

    def options() -> dict[str, Any]:
        """The arguments of each connection: this PC joins again when its pipeline has lost a PC."""
        given: dict[str, Any] = {
            "codec_on": config.codec_on, "link": config.link, "share": config.share,
            "timeout_seconds": config.wait_seconds,
        }  # fmt: skip
        if config.record is not None:
            for one in recorders:
                one.close()
            recorders[:] = [NodeRecorder(config.record, {**process_facts(), "data": config.data})]
            given["events"] = recorders[0]
        return given

    logger.info("this run trains with pipelines of %d PCs: this one waits for as many as are missing", pcs)
    return PipelineNode.join(
        config.hub, pcs, program.loss, program.init, optimizer, batch,
        micro_batches=micro_batches_of(rows, pcs), key=settings.seed, memory_bytes=memory, group=GROUP,
        name=config.name or None, keys=access, timeout_seconds=max(WAIT_SECONDS, config.wait_seconds), patient=True,
        node_options=options, clip_norm=clip_norm,
    )  # fmt: skip
