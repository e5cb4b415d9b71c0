"""What a node that cannot be opened leaves behind: nothing, and no folder locked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zmqtrain.checkpoint.folder import CheckpointFolder
from zmqtrain.core.errors import ConfigError
from zmqtrain.node import connect as connect_module
from zmqtrain.node import node as node_module
from zmqtrain.node.connect import connect


def test_a_node_of_another_run_that_cannot_be_made_anew_leaves_its_folder_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    class Node:
        """The first finds that its hub has another run; there is no second."""

        def __init__(self, options: Any, dialer: Any, first: None) -> None:
            made.append("node")
            if len(made) == 2:
                raise ConfigError("no second node")
            self._folder = options.keep.folder

        def start(self) -> None:
            pass

        def wait_hub_of_checkpoint(self, timeout_seconds: float, new_run: bool) -> bool:
            return False

        def close(self) -> None:
            if made[-1] == "node" and len(made) == 1:
                self._folder.close()

    monkeypatch.setattr(node_module, "Node", Node)
    monkeypatch.setattr(connect_module, "read_saved", lambda folder: SimpleNamespace(peer="pc#1", incarnation=1))
    with pytest.raises(ConfigError, match="no second node"):
        connect("tcp://127.0.0.1:1", "pc", checkpoint=tmp_path)
    again = CheckpointFolder(tmp_path, 3)
    again.lock()
    again.close()


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("name", 5, 'name is written like "pc1", not 5'),
        ("keys", 5, 'keys is written like "lab.key_secret", a file'),
        ("server_key", 5, 'server_key is written like "hub.key", a file'),
        ("checkpoint", 5, 'checkpoint is written like "kept", a folder'),
        ("checkpoint_every", 64, 'checkpoint_every is written like "60s", or "64" for a count of versions, not 64'),
        ("link", 5, 'link is written like "1gbit", not 5'),
        ("share", "0.8", "share is written like 0.8, not '0.8'"),
        ("timeout_seconds", "5", "timeout_seconds is written like 10.0, not '5'"),
    ],
)
def test_an_option_of_another_kind_is_refused_by_its_name(option: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        connect("tcp://127.0.0.1:1", **{option: value})  # type: ignore[arg-type]
