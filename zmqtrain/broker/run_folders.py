"""Where a run is kept that was given no folder: one of its own, named by the run, in `zmqtrain-runs`.

Rule 1: a new run has a new name, so no run goes on from another's folder by surprise: to go on is to name the folder.
Rule 2: the folder is made when there is something to keep, so a broker that nobody joined leaves nothing behind.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from zmqtrain.broker.parts import MODEL_FILE
from zmqtrain.checkpoint.folder import is_locked

RUNS = Path("zmqtrain-runs")
"""In the folder in which the broker was started."""


def new_run() -> str:
    """Return the id of a new run."""
    return f"run-{secrets.token_hex(4)}"


@dataclass(frozen=True)
class RunFolders:
    """The folders of runs that were given none. root: where they are."""

    root: Path = RUNS

    def cut_short(self) -> Path | None:
        """Return the newest folder of a run whose broker was killed, and that no broker has now; None if there is none.

        A broker that ends in order writes the model after its last checkpoint.
        """
        found = []
        for folder in self.root.glob("run-*") if self.root.is_dir() else ():
            checkpoints = sorted(folder.glob("checkpoint-*.safetensors"))
            if checkpoints and not (folder / MODEL_FILE).exists() and not is_locked(folder):
                found.append((checkpoints[-1].stat().st_mtime, folder))
        return max(found)[1] if found else None

    def folder(self, run: str, shard: int = 0, masters: int = 1, term: int = 0) -> Path:
        """Return the folder of a run; that of one master's shard of it, or of a standby that took over, is its own.

        term: how many standbys have taken over.
        """
        path = self.root / (f"{run}-term-{term}" if term else run)
        return path if masters == 1 else path / f"shard-{shard}"
