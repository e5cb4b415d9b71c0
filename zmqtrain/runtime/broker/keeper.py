"""Keep a broker's run: resume it, save it while it goes on, lose nothing that a node has heard of.

Rule 1: called by the broker's codec thread, which owns the arrays; only the writing of a checkpoint has a thread of its
own, on copies, so that a slow disk delays no aggregate.  Rule 2: without a folder every method does nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zmqtrain.errors import ConfigError
from zmqtrain.protocol.effects import Reduce
from zmqtrain.protocol.hub import Hub
from zmqtrain.runtime.broker.checkpoint import CheckpointFolder, describe_difference
from zmqtrain.runtime.broker.parts import export_part
from zmqtrain.runtime.equation.aggregator import Aggregator, Released

__all__ = ["FREE_SETTINGS", "Keeper"]

logger = logging.getLogger(__name__)

FREE_SETTINGS = ("units", "evaluate_seconds", "heartbeat_seconds", "lost_seconds", "start_nodes")
"""Settings that may change when a run is resumed."""


class Keeper:
    """The checkpoints and the journal of a living broker.

    folder: None keeps nothing.  failed: called, in any thread, with the error of a checkpoint that was not written.
    """

    def __init__(self, folder: Path | None, failed: Callable[[BaseException], None]) -> None:
        self._folder = CheckpointFolder(folder) if folder is not None else None
        self._failed = failed
        self._writer: threading.Thread | None = None

    def resume(self, hub: Hub, aggregator: Aggregator) -> None:
        """Bring a fresh hub and aggregator to where the folder's run was, if there is one.

        Raises ConfigError if the run had other settings, CheckpointError if nothing in the folder can be read.
        """
        loaded = self._folder.load() if self._folder is not None else None
        if self._folder is None or loaded is None:
            return
        state, arrays = loaded
        if state.get("shard", 0) != hub.shard:
            raise ConfigError(
                f"the checkpoint in {self._folder.folder} is of shard {state.get('shard', 0)}, this broker has shard "
                f"{hub.shard}: every master needs a --checkpoint folder of its own"
            )
        if hub.shard and state["run"] != hub.run:
            if state["version"] <= 0 and not any(self._folder.replay(0)):
                logger.warning("%s was founded, and never begun: its checkpoint is of no use any more", state["run"])
                return
            raise ConfigError(
                f"the checkpoint in {self._folder.folder} is of {state['run']}, the first master runs {hub.run}: start "
                "that with its own checkpoint of this run, or give another --checkpoint folder"
            )
        # in strict mode the data lie in as many lanes as nodes began the run
        free = [name for name in FREE_SETTINGS if not (hub.settings.mode == "strict" and name == "start_nodes")]
        difference = describe_difference(state.get("settings", {}), hub.settings.to_dict(), free)
        if difference:
            raise ConfigError(
                f"the checkpoint in {self._folder.folder} was written under other settings: {difference}. "
                "Give the same settings to resume that run, or another --checkpoint folder to begin a new one."
            )
        hub.restore(state)
        aggregator.plan(hub.model)
        aggregator.restore(hub.version, arrays)
        saved = hub.version
        for released, landed, samples in self._folder.replay(saved):
            aggregator.replay(released)
            hub.replay(released.version, landed, samples)
        self._folder.save(hub.version, hub.state(), aggregator.arrays())
        self._folder.begin_journal(hub.version)
        logger.info(
            "resuming %s at version %d (%d of them from the journal), %d samples",
            hub.run,
            hub.version,
            hub.version - saved,
            hub.samples,
        )

    def released(self, released: Released, reduce: Reduce) -> None:
        """Write a release to the journal; call it before anybody hears of the release. Raises CheckpointError."""
        if self._folder is not None:
            self._folder.append((released, reduce.landed, reduce.samples))

    def save(self, state: dict[str, Any], aggregator: Aggregator, wait: bool = False) -> None:
        """Copy the run as it stands, begin a new journal, and write the copy in the background.

        state: of the hub, at the aggregator's version.  wait: until it is written.
        Nothing happens while the last one is still being written.
        Raises CheckpointError if the journal cannot be begun.
        """
        if self._folder is None or (self._writer is not None and self._writer.is_alive()):
            return
        folder, version, arrays = self._folder, aggregator.version, aggregator.arrays()
        folder.begin_journal(version)

        def write() -> None:
            try:
                folder.save(version, state, arrays)
            except Exception as error:
                self._failed(error)

        self._writer = threading.Thread(target=write, name="zmqtrain-checkpoint")
        self._writer.start()
        if wait:
            self._writer.join()

    def close(self, state: dict[str, Any], aggregator: Aggregator) -> None:
        """Write the last checkpoint and the model alone, and wait for both. Raises CheckpointError.

        A hub that is ahead of its arrays (its codec thread failed) is not written: the journal holds what counts.
        """
        if self._folder is None:
            return
        if self._writer is not None:
            self._writer.join()
        try:
            if aggregator.version != state["version"]:
                text = "no last checkpoint: version %d failed; started again, the broker goes on from version %d"
                logger.warning(text, state["version"], aggregator.version)
            elif aggregator.version >= 0:
                arrays = aggregator.arrays()
                path = self._folder.save(aggregator.version, state, arrays)
                layout, version = aggregator.layout, aggregator.version
                model = export_part(self._folder.folder, arrays, layout, state["run"], version)
                logger.info("saved %s, and the model alone as %s", path, model)
        finally:
            self._folder.close()
