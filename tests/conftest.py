"""What holds for all tests: Ctrl-C arrives, and what opens sockets is not run beside itself.

With several workers (`-n`), the tests of the folders in SERIAL are one after another in one worker, while the others
run what computes only.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

SERIAL = ("integration", "star")
HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    # who was started in the background has SIGINT ignored, and so have its children: tests that interrupt would hang
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "xdist_group(name): of tests that one worker runs, one after another")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(HERE).parts[0] in SERIAL:
            item.add_marker(pytest.mark.xdist_group("sockets"))
