"""Rules of all tests: Ctrl-C arrives, tests with sockets run one after another, and nothing is compiled twice.

With several workers (`-n`), each folder of SERIAL has one worker, which runs its tests one after another, and so have
the files of PROGRAMS; the other workers compute, each file in one worker, because its tests share what they have made.
Tests and the programs that they start keep compiled code of jax in one folder while the tests last, and that of Python
beside its source: most of a short run is compiling.

A test marked `nightly` runs a whole bench, or a page of the tutorial: only --nightly selects it (.ci/nightly).
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

SERIAL = ("integration", "star")
PROGRAMS = {f"test_{name}.py" for name in ("commands", "doctor", "examples", "export", "mistakes", "pages", "stop")}
"""Files of integration that start whole programs, which compute more than they wait: they have their own worker."""
HERE = Path(__file__).parent
COMPILED = "JAX_COMPILATION_CACHE_DIR"
COMPILED_HERE = pytest.StashKey[str]()

# how long an example takes on a machine that others use says nothing of what it tests
settings.register_profile("zmqtrain", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("zmqtrain")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run whole benches and every page of the tutorial, too")


def pytest_configure(config: pytest.Config) -> None:
    # a process that was started in the background ignores SIGINT and SIGQUIT, and so do its children: tests that send
    # these would hang
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    if COMPILED not in os.environ:  # a worker has that of who started it
        config.stash[COMPILED_HERE] = os.environ[COMPILED] = tempfile.mkdtemp(prefix="zmqtrain-compiled-")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # one process may read what another one is writing; it compiles for itself then
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache")
    config.addinivalue_line("markers", "nightly: a whole bench or page, which only --nightly selects")
    config.addinivalue_line("markers", "xdist_group(name): of tests that one worker runs, one after another")


def pytest_collection_finish() -> None:
    # some tests look whether all is let go; what was imported for all tests is not to be looked through each time
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    if (folder := config.stash.get(COMPILED_HERE, None)) is not None:
        del os.environ[COMPILED]
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """A command that has set up its log leaves nothing of it to the tests that come after."""
    logger = logging.getLogger("zmqtrain")
    before = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.level, logger.propagate, logger.handlers = before
    logger.manager._clear_cache()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--nightly"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("nightly")])
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    for item in items:
        place = item.path.relative_to(HERE)
        folder = "programs" if place.name in PROGRAMS else place.parts[0]
        item.add_marker(pytest.mark.xdist_group(folder if place.parts[0] in SERIAL else str(place)))
