"""docs/features.md: each command, flag and name of it exists, and so does each test."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import zmqtrain as zt
from zmqtrain.cli import COMMANDS
from zmqtrain.cli.broker import BrokerConfig
from zmqtrain.cli.local import LocalConfig
from zmqtrain.cli.node import NodeConfig

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "features.md").read_text()
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `([\w/]+\.py)` \|$", PAGE, re.MULTILINE)
FLAGS = {field.name for kind in (BrokerConfig, NodeConfig, LocalConfig) for field in fields(kind)}
FLAGS = {"from" if name == "from_file" else name for name in FLAGS}


def exists(name: str) -> bool:
    """Whether a command, a flag, a name of the API or a module is there."""
    command, _, rest = name.partition(" ")
    if command.startswith("--"):
        return command.removeprefix("--").replace("-", "_") in FLAGS
    if command in ("zmqtrain-broker", "zmqtrain-node"):
        return not rest or exists(rest)
    if command == "zmqtrain":
        return rest in COMMANDS or rest == "--version"
    if command.startswith("zt."):
        return hasattr(zt, command.removeprefix("zt."))
    return (TESTS.parent / "zmqtrain" / (command.replace(".", "/") + ".py")).exists()


def test_the_page_has_the_features() -> None:
    assert len(ROWS) > 40


@pytest.mark.parametrize(("feature", "names", "test"), ROWS, ids=[row[0] for row in ROWS])
def test_a_feature_has_its_names_and_its_test(feature: str, names: str, test: str) -> None:
    assert [name for name in re.findall(r"`([^`]+)`", names) if not exists(name)] == []
    assert "def test_" in (TESTS / test).read_text()
