"""docs/codecs.md is held to the family: every member is described, with its true defaults."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path

import numpy as np
import pytest

from zmqtrain.codecs.base import CODECS, TRANSFORMS, WRAPPERS, codec_from_spec, coding_from_spec
from zmqtrain.core.specs import parse_spec

from codec_methods import METHODS
from codec_table import markdown, read_runs, summarise

PAGE = (Path(__file__).parents[1] / "docs" / "codecs.md").read_text()
FAMILY = {**CODECS, **TRANSFORMS, **WRAPPERS}


def described() -> dict[str, str]:
    """Per member: its default arguments as the page writes them."""
    entries = {}
    for title, body in re.findall(r"^\*\*([^*]+)\*\*([^\n]*\n(?:- .*\n(?:  .*\n)*)+)", PAGE, re.MULTILINE):
        head = body.partition("\n- ")[0]
        arguments = re.findall(r"`:([^`]+)`", head)
        for position, name in enumerate(title.split(", ")):
            given = arguments[position] if position < len(arguments) else ""
            entries[name] = given
    return entries


def test_every_member_of_the_family_is_described():
    assert set(FAMILY) <= set(described())


@pytest.mark.parametrize("name", FAMILY)
def test_the_defaults_on_the_page_are_those_of_the_code(name):
    written = described()[name]
    parameters = signature(FAMILY[name]).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in parameters if parameter.name != "codec"}
    text = f"{name}:{written}" if written else name
    assert parse_spec(text, {name: defaults})[1] == defaults
    assert written.count("=") == len(defaults)


def figures(pattern: str) -> dict[str, str]:
    """Per codec: the figure that the pattern finds in its lines, as it is written; of several codecs each its own."""
    found = {}
    for title, body in re.findall(r"^\*\*([^*]+)\*\*([^\n]*\n(?:- .*\n(?:  .*\n)*)+)", PAGE, re.MULTILINE):
        if match := re.search(pattern, body):
            found |= dict(zip(title.split(", "), match[1].split(", "), strict=True))
    return found


BITS, ERRORS = figures(r"; ([\d.]+) bits\."), figures(r"relative error ((?:, |\.\d+)+)")


@pytest.mark.parametrize("name", sorted({*BITS, *ERRORS}))
def test_the_bits_and_the_errors_on_the_page_are_those_of_gaussian_values(name):
    codec, wrong, size = codec_from_spec(name), 0.0, 0
    slabs = np.random.default_rng(0).standard_normal((16, 65_536), np.float32)
    for x in slabs:
        buffers, _ = codec.encode(x, codec.init(x.size))
        wrong += float(np.linalg.norm(x - codec.decode(buffers, x.size)) ** 2)
        size += sum(buffer.nbytes for buffer in buffers)
    bits, error = 8 * size / slabs.size, wrong**0.5 / np.linalg.norm(slabs)
    for written, measured in ((BITS.get(name), bits), (ERRORS.get(name), error)):
        if written is not None:
            assert abs(float(written) - measured) <= 0.6 * 10.0 ** -len(written.partition(".")[2])


def test_every_codec_of_values_has_its_bits_and_its_error_on_the_page():
    assert {*BITS} == {*CODECS} - {"int8s", "int4s", "lowrank"}
    assert {*ERRORS} == {*CODECS} - {"float32", "bf16", "lowrank"}


def test_the_grammar_names_the_whole_family():
    for rule, family in (("codec", CODECS), ("transform", TRANSFORMS), ("wrapper", WRAPPERS)):
        (line,) = re.findall(rf'^{rule} += ("[^;\n]*)', PAGE, re.MULTILINE)
        assert re.findall(r'"([^"]+)"', line) == list(family)


def test_the_specs_in_the_commands_are_taken():
    specs = re.findall(r'-codec (?:"([^"]+)"|(\S+))', PAGE)
    assert len(specs) >= 3
    for quoted, bare in specs:
        coding_from_spec(quoted or bare)


def test_the_example_in_python_runs():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {"x": np.arange(1000, dtype=np.float32)}
    exec(example, names)
    assert np.count_nonzero(names["y"]) == 10


def test_every_row_of_the_tables_is_a_method_of_the_bench():
    (tables,) = re.findall(r"^### The tables\n(.*)", PAGE, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| ([^|]+?) \| (?:[\d.,]+x|no bytes) \|", tables, re.MULTILINE)
    assert len(rows) > 30
    names = {re.sub(r", rate [\d.]+$", "", row.replace("\\", "")) for row in rows}  # it tells rows of one name apart
    assert names <= {method.name for method in METHODS}


def test_the_tables_are_those_of_the_lines():
    lines = sorted((Path(__file__).parents[1] / "docs" / "examples" / "codecs").glob("*.jsonl"))
    tables = markdown(summarise(read_runs(lines)))
    assert PAGE.count("|---|--:|--:|--:|--:|\n") == len(tables) > 0
    for table in tables:
        assert table + "\n" in PAGE
