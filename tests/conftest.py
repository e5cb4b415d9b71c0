"""Rules of all tests: Ctrl-C arrives, tests in real time run one after another, and nothing is compiled twice.

With several workers (`-n`), the tests of one group run one after another in one worker. The groups of WAITING wait more
than they compute, so they begin first and at the same time. Every other file is a group, because its tests share what
they have compiled; the slowest of these files begin first, so that no worker ends long after the others.
Tests and the programs that they start keep compiled code of jax in one folder while the tests last, and that of Python
beside its source: most of a short run is compiling. Therefore XLA optimizes nothing for them. It compiles as for users
in the files of AS_USERS, whose law is that compiled code and numpy give the same bits, and in a run with --nightly.

A test marked `nightly` is a whole bench, a page of the tutorial, or one more case of a grid whose branches other cases
take: only --nightly selects it (.ci/nightly). tests/README.md lists the laws and fault proofs, which are in every run.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.grids import AT_NIGHT, examples

PROGRAMS = tuple(
    f"integration/test_{name}.py"
    for name in ("commands", "devices", "examples", "pages", "mistakes", "export", "stop", "doctor", "ray")
)
"""Files of integration that start whole programs, which compute more than they wait: each is a group of its own."""
WAITING = {
    "star": ("star/*",),
    "sockets": tuple(
        f"integration/test_{name}.py"
        for name in ("access", "close", "communicator", "link", "mesh*", "parameter_server*", "proxy", "ring*", "zmq_*")
    ),
    "integration": ("integration/*",),
}
"""By group, patterns of its files; a file belongs to the first group that names it."""
SLOW = (
    *PROGRAMS,
    "test_laws.py",
    "train/test_gradients.py",
    "codecs/*",
    "sim/*",
    "bench/*",
    "programs/*",
    "collectives/*",
    "protocol/test_hub_stateful.py",
    "averaging/*",
    "train/*",
)
"""The files that begin first once the groups of WAITING have begun."""
AS_USERS = (
    "codecs/*",
    "averaging/test_coder.py",
    "averaging/test_vectors.py",
    "train/test_anchor.py",
    "train/test_blocks.py",
    "integration/test_device_codec.py",
    "*/on_four_devices.py",
)
"""The files whose law is that compiled code and numpy, or a PC's devices, give the same bits: XLA optimizes there."""
HERE = Path(__file__).parent
COMPILED = "JAX_COMPILATION_CACHE_DIR"
COMPILED_HERE = pytest.StashKey[str]()
OPTIMIZE_NOTHING = "JAX_DISABLE_MOST_OPTIMIZATIONS"
QUICKLY = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
"""With these, and without optimizations, a small model is compiled in a fifth of the processor's time."""
AS_BY_DEFAULT = {"xla_cpu_use_fusion_emitters": True, "xla_cpu_parallel_codegen_split_count": 32}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run whole benches, pages and grids, too")


def pytest_configure(config: pytest.Config) -> None:
    # a process that was started in the background, or by nohup, ignores SIGINT, SIGQUIT or SIGHUP, and so do its
    # children: tests that send these would hang
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGQUIT: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    for number, handler in handlers.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    if config.getoption("--nightly"):
        os.environ[AT_NIGHT] = "1"
    # how long an example takes on a machine that others use says nothing of what it tests
    settings.register_profile(
        "zmqtrain", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=examples(100)
    )
    settings.load_profile("zmqtrain")
    if COMPILED not in os.environ:  # a worker has that of who started it
        config.stash[COMPILED_HERE] = os.environ[COMPILED] = tempfile.mkdtemp(prefix="zmqtrain-compiled-")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        if AT_NIGHT not in os.environ:  # jax and XLA read these when they are first used, here and in programs
            os.environ[OPTIMIZE_NOTHING] = "1"
            flags = [f"--{name}={str(value).lower()}" for name, value in QUICKLY.items()]
            os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *flags])
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # one process may read what another one is writing; it compiles for itself then
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache")
    config.addinivalue_line("markers", "nightly: a whole bench, page or grid, which only --nightly selects")


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
    order = {path: _order(path.relative_to(HERE)) for path in {item.path for item in items}}
    items.sort(key=lambda item: order[item.path])  # a stable order: within a file the tests stay as written


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each group to one worker, in the order of the tests (xdist 3.8 does not know groups under pytest 9.2)."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(Path(nodeid.partition("::")[0]).relative_to(HERE.name))

    config.option.loadscopereorder = False
    return ByGroup(config, log)


def _group(place: Path) -> str:
    """Return the group of a file; most files are groups of their own."""
    if any(map(place.match, PROGRAMS)):
        return str(place)
    return next((name for name, patterns in WAITING.items() if any(map(place.match, patterns))), str(place))


def _order(place: Path) -> int:
    """Return a number that is smaller for files that begin earlier."""
    if (group := _group(place)) in WAITING:
        return list(WAITING).index(group)
    slow = (number for number, pattern in enumerate(SLOW) if place.match(pattern))
    return len(WAITING) + next(slow, len(SLOW))


@pytest.fixture(scope="module", autouse=True)
def compile_as_users_do(request: pytest.FixtureRequest) -> Iterator[None]:
    """In the files of AS_USERS, XLA compiles as it does for users, and what it has compiled is used only there.

    Elsewhere a test must have the code of the programs that it starts: with other code they end with other bits.
    """
    if not any(map(request.path.relative_to(HERE).match, AS_USERS)):
        yield
        return
    import jax
    from jax._src import compiler

    before, options_of_jax = jax.config.read("jax_disable_most_optimizations"), compiler.get_compile_options

    def options_by_default(*arguments: Any, **more: Any) -> Any:
        options = options_of_jax(*arguments, **more)
        options.env_option_overrides = [*AS_BY_DEFAULT.items(), *options.env_option_overrides]
        return options

    with pytest.MonkeyPatch.context() as patch:
        if before:
            patch.setattr(compiler, "get_compile_options", options_by_default)
        jax.config.update("jax_disable_most_optimizations", False)
        jax.clear_caches()
        yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()


@pytest.fixture(scope="module")
def compile_quickly() -> Iterator[None]:
    """For tests that compile many small functions which run once: XLA optimizes nothing, at night neither."""
    with optimizing_nothing():
        yield


@pytest.fixture
def compile_this_quickly() -> Iterator[None]:
    """For a test in a file of AS_USERS whose bits are of one compiled function, whichever it is."""
    with optimizing_nothing():
        yield


@contextlib.contextmanager
def optimizing_nothing() -> Iterator[None]:
    """What is compiled meanwhile is not optimized by XLA."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
