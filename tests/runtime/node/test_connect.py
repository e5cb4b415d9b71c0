"""What a node that cannot be opened leaves behind: nothing, and no folder locked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zmqtrain.errors import ConfigError
from zmqtrain.runtime.checkpoints.folder import CheckpointFolder
from zmqtrain.runtime.node import connect as connect_module
from zmqtrain.runtime.node.connect import connect


def test_a_node_of_another_run_that_cannot_be_made_anew_leaves_its_folder_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    class Node:
        """The first finds that its hub has another run; there is no second."""

        def __init__(self, *facts: Any, keep: tuple[CheckpointFolder, str, object], **more: Any) -> None:
            made.append("node")
            if len(made) == 2:
                raise ConfigError("no second node")
            self._folder = keep[0]

        def wait_hub_of_checkpoint(self, timeout_seconds: float, new_run: bool) -> bool:
            return False

        def close(self) -> None:
            if made[-1] == "node" and len(made) == 1:
                self._folder.close()

    monkeypatch.setattr(connect_module, "Node", Node)
    monkeypatch.setattr(connect_module, "read_saved", lambda folder: SimpleNamespace(peer="pc#1", incarnation=1))
    with pytest.raises(ConfigError, match="no second node"):
        connect("tcp://127.0.0.1:1", "pc", checkpoint=tmp_path)
    again = CheckpointFolder(tmp_path, 3)
    again.lock()
    again.close()
