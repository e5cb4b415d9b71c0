"""Keep a key server's values where a crash cannot reach them: one file beside the checkpoints of the broker's run.

Rule 1: copies are made in the codec thread, which owns the store; they are written beside it.  Rule 2: without a folder
every method does nothing.  Rule 3: there is no journal: what was pushed since the file was written is lost with a
broker that is killed, and its clients, who are told so, begin again from there.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zmqtrain.checkpoint.files import read_arrays, write_arrays
from zmqtrain.core.errors import CheckpointError, ConfigError
from zmqtrain.parameter_server.directory import Directory
from zmqtrain.parameter_server.machine import KeyServer
from zmqtrain.parameter_server.optimizers import optimizer_from_spec
from zmqtrain.parameter_server.store import Store

logger = logging.getLogger(__name__)

FILE = "keys.safetensors"


class ParameterKeeper:
    """The file of a key server.

    failed: called, in any thread, with an error that nobody thought of, or of a file that cannot be written while that
    is waited for; else that is a warning.
    """

    def __init__(self, folder: Path | None, failed: Callable[[BaseException], None]) -> None:
        self._path = folder / FILE if folder is not None else None
        self._failed = failed
        self._writer: threading.Thread | None = None
        self.unwritten = False
        """Whether what was to be saved last is not in the file; whoever tries again takes it back."""

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
        """Copy the store, and write the copy in the background; wait: until it is written.

        state: of machine and directory, after the same jobs.  While the last one is still being written, this one is
        `unwritten`.
        """
        if self._path is None:
            return
        if self._writer is not None:
            if not wait and self._writer.is_alive():
                self.unwritten = True
                return
            self._writer.join()
        path, arrays = self._path, store.arrays()
        versions = {key: entry.version for key, entry in store.entries.items()}
        text = json.dumps(state | {"versions": versions}, sort_keys=True)

        def write() -> None:
            try:
                write_arrays(path, arrays, {"state": text})
            except CheckpointError as error:
                if wait:
                    return self._failed(error)
                logger.warning("the keys were not written: %s. They are tried again", error)
                self.unwritten = True
            except Exception as error:
                self._failed(error)

        self._writer = threading.Thread(target=write, name="zmqtrain-keys")
        self._writer.start()
        if wait:
            self._writer.join()
