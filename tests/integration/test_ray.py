"""The example of a Ray cluster, on this machine: a node's actor is killed, and the run goes on to its model."""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import zmqtrain as zt

PROJECT = Path(__file__).parents[2]
EXAMPLE = PROJECT / "docs" / "examples" / "ray_cluster.py"
UNITS = 40


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def folder_of_ray() -> Iterator[str]:
    """A folder for what Ray writes; its name is short, because Ray has sockets in it."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_killed_actor_is_started_again_and_the_run_ends_with_its_model(tmp_path: Path, folder_of_ray: str) -> None:
    model = tmp_path / "model.safetensors"
    options = {"--nodes": 2, "--units": UNITS, "--port": free_port(), "--folder": tmp_path / "run", "--model": model}
    command = [sys.executable, str(EXAMPLE), "--kill", *(str(word) for pair in options.items() for word in pair)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(PROJECT),
        "HOME": folder_of_ray,  # where Ray keeps its token
        "RAY_TMPDIR": folder_of_ray,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    run = subprocess.run(command, capture_output=True, text=True, timeout=350, cwd=tmp_path, env=environment)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert "killed node-0" in run.stdout
    accuracies = [float(found) for found in re.findall(r"accuracy ([0-9.]+)", run.stdout)]
    assert accuracies and min(accuracies) > 50
    program = zt.load_program("image")
    params = zt.load_model(model, like=program.init(0))
    assert program.evaluate(params)["accuracy"] > 50


def test_the_example_uses_public_names_alone() -> None:
    tree = ast.parse(EXAMPLE.read_text())
    imported = [one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names]
    taken = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [name for name in [*imported, *taken] if name.partition(".")[0] == "zmqtrain"] == ["zmqtrain"]
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "zt")
    assert {node.attr for node in nodes} <= set(zt.__all__)
