"""README and the tutorial, followed as a person does: each command is typed, each block of Python is run."""

from __future__ import annotations

import re
import signal
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.lab import ENDS, Lab, Program
from tests.pages import Command, Shown, Source, read_page

PROJECT = Path(__file__).parents[2]
OFTEN = ("README",)
"""Beginnings of the pages that are followed each time; --nightly adds the others."""
PAGES = ("README.md", *sorted(f"docs/tutorial/{path.name}" for path in (PROJECT / "docs" / "tutorial").glob("*.md")))
NOT_RUN = {
    "git clone": "the tree that is tested is the clone",
    "bin/demo": "it takes four minutes; tests/cli/test_demo.py runs its parts",
    "bin/test": "it is what runs this test",
    "sudo": "a firewall is the machine's own",
    ".venv/bin/python -m pip install -e": "it needs a network and a card",
    ".venv/bin/python docs/examples/": "tests/integration/test_examples.py runs them",
    **({} if find_spec("equinox") else {".venv/bin/python equinox_loop.py": "equinox is not installed here"}),
}
"""Beginnings of commands that are not run here -> the reason."""
SMALLER = (
    (
        r"--program text\b",
        "--program text --program-arguments width=8,layers=1,heads=1,context=8,batch=2,batches_per_unit=1",
    ),
    (
        r'load_program\("text"\)',
        'load_program("text", dict(width=8, layers=1, heads=1, context=8, batch=2, batches_per_unit=1))',
    ),
    (r"--units 300\b", "--units 40"),
    (r"--units 60\b", "--units 20"),
    (r"--units (1000|500)\b", "--units 200"),
)
"""Parts of commands and of Python, and what takes their place, so that they take seconds."""
CURL = """exec {python} - "$@" <<'EOF'
import gzip, sys
import numpy as np

name = sys.argv[-1].rpartition("/")[2]
generator = np.random.default_rng(0)
labels = generator.integers(0, 10, 640).astype(np.uint8)
images = generator.integers(0, 160, (640, 8, 8)).astype(np.uint8)
images[np.arange(640), labels // 2, labels % 2 * 4] += 95
content = images if "images" in name else labels
sizes = np.array(content.shape, ">u4").tobytes()
with gzip.open(name, "wb") as file:
    file.write(bytes([0, 0, 8, content.ndim]) + sizes + content.tobytes())
EOF
"""
"""In place of curl: small files in the format of MNIST, in which a spot that is a little brighter is a digit."""
GIVEN = {
    "README.md": """
import jax
import jax.numpy as jnp
import numpy as np

params, opt_state = {"weights": jnp.zeros(8)}, ()


def batches_of(unit):
    yield np.full((4, 8), unit, np.float32)


@jax.jit
def train_step(params, opt_state, batch):
    loss, gradient = jax.value_and_grad(lambda p: jnp.mean((batch / 1000 @ p["weights"] - 1) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient), opt_state, loss


"""
}
"""By page, what its reader has and its Python does not say: a training loop."""
PYTHON = "exec .venv/bin/python"
MAY_FAIL = {
    "bin/zmqtrain doctor": (0, 1),
    "bin/zmqtrain plan": (0, 1),
    "bin/zmqtrain status --watch": (0, 128 + signal.SIGINT),
    "bin/zmqtrain-node tcp://hub:5555 --keys ~/pc2.key_secret": (78,),
}
"""Beginnings of commands -> their exit codes: what doctor says of this machine may be bad, and a plan may not fit;
Ctrl-C ends tee, too; a node whose key is revoked says that it cannot come in again."""


def in_seconds(text: str) -> str:
    """Return a command, or Python, in its small form."""
    for part, smaller in SMALLER:
        text = re.sub(part, smaller, text)
    return text


def use(lab: Lab, page: str, source: Source) -> None:
    """Save a block of Python or TOML on the hub, or run it there."""
    text = lab.here(in_seconds(source.text))
    path = lab.pc("hub").place / (source.file or "block.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    if source.file:
        path.write_text(text)
    elif source.language == "toml":
        tomllib.loads(text)
    else:
        path.write_text(GIVEN.get(page, "") + text)
        lab.type("hub", f"{PYTHON} block.py").wait_well()


def follow(page: str, folder: Path, interpreter: Path | None = None) -> list[Program]:
    """Do what a page says, in a lab of its own; all that it starts must end. Returns all that was typed.

    interpreter: a Python that has zmqtrain installed; not given: this one, with the tree of the project.
    """
    steps = read_page(PROJECT / page)
    with Lab(folder, interpreter) as lab:
        lab.add_command("commands/curl", CURL.format(python=sys.executable))
        last = None
        for name in {"hub", *re.findall(r"\bpc\d*\b", (PROJECT / page).read_text())}:
            lab.pc(name)
        for step in steps:
            if isinstance(step, Command):
                last = None
                if step.text.startswith("git clone"):  # its reader is not in the clone yet
                    lab.pc(step.pc).place = lab.pc(step.pc).home
                if not step.text.startswith(tuple(NOT_RUN)):
                    allowed = next((codes for start, codes in MAY_FAIL.items() if step.text.startswith(start)), ENDS)
                    last = lab.type(step.pc, in_seconds(step.text), allowed)
            elif isinstance(step, Shown):
                if last is not None or not step.by_last:
                    lab.wait_shown(step.patterns, [last] if step.by_last and last is not None else lab.programs())
            else:
                use(lab, page, step)
        lab.wait()
        return lab.programs()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "page" in metafunc.fixturenames:
        often = {page for page in PAGES if Path(page).name.startswith(OFTEN)}
        marks = {page: () if page in often else pytest.mark.nightly for page in PAGES}
        metafunc.parametrize("page", [pytest.param(page, marks=marks[page]) for page in PAGES])


@pytest.mark.timeout(600)
def test_a_page_can_be_followed(page: str, tmp_path: Path) -> None:
    programs = follow(page, tmp_path)
    if page.endswith("10-the-model.md"):
        broker, loaded = (next(one for one in programs if text in one.command) for text in ("broker", "block.py"))
        assert re.findall(r"held-out loss (\d+\.\d+)", broker.shown)[-1] == f"{loss_of(loaded.shown):.4f}"


def loss_of(shown: str) -> float:
    """The loss in what `evaluate` has returned, printed."""
    return float(shown.partition("'loss': ")[2].partition(",")[0])


def test_what_is_not_run_is_in_a_page() -> None:
    typed = [step.text for page in PAGES for step in read_page(PROJECT / page) if isinstance(step, Command)]
    assert [start for start in NOT_RUN if not any(text.startswith(start) for text in typed)] == []


GOOD = """
pc1$ echo "version 12 of pc1" > said
pc1$ scp said pc2:there
pc2$ cat ../there
version 7 of pc1
hub$ ssh pc2 'hostname_of() { cat there; }; hostname_of | tee again'
version … pc1
"""
BAD = {
    "a command that fails": "pc1$ false",
    "a line that is not shown": "pc1$ echo version 12 of pc2\nversion 12 of pc1",
    "a line that is shown once": "pc1$ echo once\nonce\n```\n\n```console\nonce",
    "a key where nothing runs": "pc1$ .venv/bin/python loop.py\nhub$ true\npc1$ ^C",
}


def test_a_page_that_is_right_is_followed_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"```console{GOOD}```\n")
    (tmp_path / "lab").mkdir()
    assert len(follow(str(tmp_path / "page.md"), tmp_path / "lab")) == 4
    assert (tmp_path / "lab" / "pc2" / "again").read_text() == "version 12 of pc1\n"


@pytest.mark.parametrize("what", BAD)
def test_a_page_that_is_wrong_fails(what: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(f"```console\n{BAD[what]}\n```\n")
    (tmp_path / "lab").mkdir()
    with pytest.raises(AssertionError):
        follow(str(tmp_path / "page.md"), tmp_path / "lab")


def test_a_block_that_nothing_runs_is_no_block_of_a_page(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("```sh\ntrue\n```\n")
    with pytest.raises(ValueError, match="nothing runs it"):
        read_page(tmp_path / "page.md")
