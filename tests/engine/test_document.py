"""The page about the engine: its example does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"


def test_the_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(example, {})
    printed = re.search(r"print\(.*\)  # (\d+)", example)
    assert printed is not None and capsys.readouterr().out.strip() == printed[1]
