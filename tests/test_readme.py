"""tests/README.md lists laws and fault proofs: the files that it names are there, and none runs only at night."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_law_has_its_tests_in_every_run():
    named = re.findall(r"`([\w/]+\.py)`", (HERE / "README.md").read_text().partition("## Laws")[2])
    assert len(named) > 30
    for name in named:
        text = (HERE / name).read_text()
        assert text.count("\ndef test_") > text.count("\n@pytest.mark.nightly\ndef test_") or "def test_" not in text, (
            name
        )
