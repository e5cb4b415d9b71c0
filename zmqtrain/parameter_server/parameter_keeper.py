"""Keep a key server's values where a crash cannot reach them: one file beside the checkpoints of the broker's run.

Rule 1: copies are made in the codec thread, which owns the store; they are written beside it.  Rule 2: without a folder
every method does nothing.  Rule 3: there is no journal: what was pushed since the file was written is lost with a
broker that is killed, and its clients, who are told so, begin again from there.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from zmqtrain.checkpoint.background_writer import CLOSE_SECONDS, BackgroundWriter
from zmqtrain.checkpoint.files import read_arrays, write_arrays
from zmqtrain.core.errors import CheckpointError, ConfigError
from zmqtrain.parameter_server.directory import Directory
from zmqtrain.parameter_server.machine import KeyServer
from zmqtrain.parameter_server.optimizers import optimizer_from_spec
from zmqtrain.parameter_server.store import Store

logger = logging.getLogger(__name__)

FILE = "keys.safetensors"


class ParameterKeeper:
    """The file of a key server, in the folder of its broker's checkpoints."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / FILE if folder is not None else None
        self.writer = BackgroundWriter("keys", "the parameter server")

    def resume(self, machine: KeyServer) -> tuple[Directory, Store] | None:
        """Bring a fresh machine to where that of the file was; return its directory and store. None: there is none.

        Raises CheckpointError if the file cannot be read.
        """
        if self._path is None or not self._path.exists():
            return None
        try:
            state, arrays = read_arrays(self._path)
            versions = {str(key): int(version) for key, version in state["versions"].items()}
            machine.restore(state["machine"], versions)
            directory, store = Directory(machine.rules.masters), Store(optimizer_from_spec(machine.rules.optimizer))
            directory.restore(state["directory"])
            store.restore(versions, arrays)
        except (
            CheckpointError,
            ConfigError,
            LookupError,
            ArithmeticError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:
            text = f"the keys in {self._path} cannot be read: {error!r}. Move that file away to begin without them"
            raise CheckpointError(text) from error
        logger.info("resuming a parameter server of %d keys, from %s", len(versions), self._path)
        return directory, store

    def save(self, state: dict[str, Any], store: Store, wait: bool = False) -> None:
        """Copy the store, and write the copy in the background.

        state: of machine and directory, after the same jobs.  While the last copy is still being written, nothing is
        copied, and the writer is to save again at once.  wait: write it here; raises CheckpointError.
        """
        if self._path is None:
            return
        if self.writer.busy and not wait:
            self.writer.retry_at = 0.0
            return
        if not self.writer.wait():
            raise CheckpointError(f"{self._path} is still being written after {CLOSE_SECONDS:g} s: not the last keys")
        path, arrays = self._path, store.arrays()
        versions = {key: entry.version for key, entry in store.entries.items()}
        text = json.dumps(state | {"versions": versions}, sort_keys=True)
        if wait:
            return write_arrays(path, arrays, {"state": text})
        self.writer.begin()
        self.writer.start(sum(versions.values()), lambda: write_arrays(path, arrays, {"state": text}))
