"""The course's exercise, whole but small: every way to train with two workers, the table and the plots."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROJECT = Path(__file__).parents[2]
COURSE = PROJECT / "docs" / "examples" / "course"
SECONDS = 110.0


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder as MNIST is published, of ten blurred patterns of 12x12 pixels: 1,000 images."""
    generator = np.random.default_rng(0)
    patterns = generator.integers(0, 200, (10, 12, 12))
    labels = generator.integers(0, 10, 1_000).astype(np.uint8)
    pixels = np.clip(patterns[labels] + generator.normal(0, 60, (1_000, 12, 12)), 0, 255).astype(np.uint8)
    folder = tmp_path / "images"
    folder.mkdir()
    for name, array in (("images-idx3", pixels), ("labels-idx1", labels)):
        head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
        (folder / f"t10k-{name}-ubyte").write_bytes(head + array.tobytes())
    return folder


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(COURSE / "run.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS)


@pytest.mark.nightly
def test_every_way_to_train_learns_and_the_table_and_the_plots_are_written(tmp_path: Path, images: Path) -> None:
    out = tmp_path / "out"
    done = run("--data", images, "--workers", "2", "--shards", "2", "--epochs", "4", "--output", out)
    assert done.returncode == 0, done.stderr
    results = json.loads((out / "results.json").read_text())["results"]
    assert [result["way"] for result in results] == [
        "synchronous, collective",
        "synchronous, naive",
        "synchronous, ring",
        "asynchronous, 2 brokers",
    ]
    assert all(result["accuracy"] > 0.75 for result in results), results
    text = (out / "results.txt").read_text()
    assert all(result["way"] in text for result in results) and text in done.stdout
    assert {path.name for path in out.iterdir()} == {
        "results.json",
        "results.txt",
        "seconds.png",
        "accuracy.png",
    }


@pytest.mark.parametrize("content", [None, "empty"])
def test_what_to_do_about_missing_data_is_said(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "mnist"
    if content is not None:
        folder.mkdir()
    done = run("--data", folder, "--output", tmp_path / "out")
    assert done.returncode == 1
    assert str(folder) in done.stderr and "Traceback" not in done.stderr
