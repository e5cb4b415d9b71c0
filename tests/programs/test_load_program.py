"""Programs are found by name, ours and those that installed packages add."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zmqtrain.core.errors import ConfigError, DataError
from zmqtrain.programs import (
    check_program_arguments,
    load_program,
    program_arguments,
    program_names,
    program_source,
)
from zmqtrain.programs.arguments import read_source
from zmqtrain.train.program import Program

SOURCE = """
class Constant:
    name, samples_per_batch, sample_word, units_per_epoch = "constant", 1, "numbers", None
    def __init__(self, value): self.value = value
    def init(self, seed): ...
    def loss(self, params, batch): ...
    def optimizer(self): ...
    def batches(self, unit): ...
    def evaluate(self, params): ...

def constant(*, value: float = 2.0): return Constant(value)
def nothing(): return "nothing"
number = 3
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with programs of its own, the way pip leaves it behind."""
    (tmp_path / "other_programs.py").write_text(SOURCE)
    information = tmp_path / "other_programs-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other-programs\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[zmqtrain.programs]\nconstant = other_programs:constant\nnothing = other_programs:nothing\n"
        "number = other_programs:number\nabsent = other_programs:absent\ntext = other_programs:constant\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "other_programs", raising=False)


def test_the_built_in_programs_fulfil_the_protocol(image_folder, text_file):
    image = load_program("image", {"data": str(image_folder), "batch": 8})
    text = load_program("text", {"data": str(text_file), "context": "16"})
    assert isinstance(image, Program) and isinstance(text, Program)
    assert [image.name, image.sample_word, image.samples_per_batch] == ["image", "images", 8]
    assert [text.name, text.sample_word, text.samples_per_batch, text.units_per_epoch] == ["text", "tokens", 256, None]


def test_the_arguments_and_their_defaults_can_be_listed():
    assert program_arguments("image") == {
        "data": "digits", "width": 32, "batch": 32, "batches_per_unit": 4, "rate": 2e-3, "weight_decay": 1e-3,
        "seed": 0,
    }  # fmt: skip
    assert {"width", "layers", "heads", "context", "batch", "rate", "seed", "data", "warmup"} <= set(
        program_arguments("text")
    )


def test_an_unknown_program_is_refused_with_the_choices(installed):
    with pytest.raises(ConfigError, match=r"program = 'txet': .* text, image, absent, constant, nothing, number \(an"):
        load_program("txet")


def test_an_unknown_or_ill_typed_argument_is_refused_before_any_data_is_read():
    with pytest.raises(ConfigError, match=r"program_arguments\.widht: .*did you mean width\?"):
        load_program("text", {"widht": 3, "data": "/absent"})
    with pytest.raises(ConfigError, match=r"program_arguments\.layers must be a whole number, got 'two'"):
        load_program("text", {"layers": "two", "data": "/absent"})


def test_unreadable_data_is_a_data_error(tmp_path):
    for name in ("text", "image"):
        with pytest.raises(DataError, match="absent"):
            load_program(name, {"data": str(tmp_path / "absent")})


def test_an_installed_package_adds_a_program(installed):
    program = load_program("constant", {"value": "3"})
    assert isinstance(program, Program) and program.value == 3.0
    assert program_arguments("constant") == {"value": 2.0}


def test_an_installed_package_cannot_take_the_place_of_a_built_in_program(installed):
    assert program_names() == ("text", "image", "absent", "constant", "nothing", "number")
    assert "layers" in program_arguments("text")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", r"other_programs:nothing gave a str, which is no program: it has no name, samples_per_batch, .*"),
        ("number", "other_programs:number is a int, not a factory"),
        ("absent", "other_programs:absent of an installed package does not load: .*absent"),
    ],
)
def test_what_is_no_program_is_refused_by_name(installed, name, message):
    with pytest.raises(ConfigError, match=message):
        load_program(name)


def test_the_names_can_be_listed_without_importing_jax():
    code = (
        "import sys, zmqtrain.programs as p; print(p.program_names()[:2], 'jax' in sys.modules, 'optax' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert listed.stdout.split("\n")[0] == "('text', 'image') False False"


@pytest.mark.parametrize("name", ["text", "image"])
def test_the_source_of_a_built_in_program_says_what_its_factory_takes(name):
    source = program_source(name)
    assert source is not None and source.documentation
    assert {key: one.default for key, one in source.signature.parameters.items()} == program_arguments(name)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("text", {"widht": "8"}, r"no such argument \(did you mean width\?\)"),
        ("text", {"width": "wide"}, "must be a whole number"),
        ("text", {"width": "30", "heads": "4"}, "a multiple of twice the heads"),
        ("text", {"inner_optimizer": "sgd"}, "must be one of adamw, muon"),
        ("image", {"batch": "0"}, "batch must be at least 1"),
        ("constant", {"valeu": "1"}, "did you mean value"),
        ("constant", {"value": "much"}, "value must be a finite number"),
        ("nothing", {"value": "1"}, "it takes none"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_arguments_are_checked_without_importing_the_program(name, arguments, words):
    with pytest.raises(ConfigError, match=words):
        check_program_arguments(name, arguments)
    assert "other_programs" not in sys.modules


@pytest.mark.usefixtures("installed")
def test_what_cannot_be_known_without_an_import_passes():
    for name in ("number", "absent"):
        assert program_source(name) is None
        check_program_arguments(name, {"anything": "1"})
    check_program_arguments("text", {"width": "64", "data": "/no/such/file"})


MADE_IN_OTHER_WAYS = """
import dataclasses
from functools import cache

@dataclasses.dataclass
class Plain:
    width: int = 3
    where: str = dataclasses.field(default="here")
    found: int = dataclasses.field(init=False)

class Inherits(Plain): ...

@cache
def cached(width=3): ...

class Takes:
    def __init__(self, first, width: int = 3, *, rate=0.5 + 0.5, **more): ...
"""


def test_fields_and_initialisers_are_read_and_what_may_be_more_is_not_guessed(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "package" / "made.py").write_text(MADE_IN_OTHER_WAYS)
    monkeypatch.syspath_prepend(tmp_path)
    plain, takes = read_source("package.made:Plain"), read_source("package.made:Takes")
    assert plain is not None and str(plain.signature) == "(*, width: 'int' = 3, where: 'str' = 'here')"
    assert takes is not None and list(takes.signature.parameters) == ["first", "width", "rate", "more"]
    for unknown in (
        "package.made:Inherits",
        "package.made:cached",
        "package.made:absent",
        "no_package:x",
        "package.no:x",
    ):
        assert read_source(unknown) is None


def test_the_documented_arguments_are_those_that_the_programs_take():
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    for name in ("text", "image"):
        defaults = ", ".join(f"{key}={value}" for key, value in program_arguments(name).items())
        assert f"| `{name}` | `{defaults}` |" in page
