"""docs/codecs.md is held to the family: every member is described in its four lines, with its true defaults."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path

import numpy as np
import pytest

from zmqtrain.codecs.base import CODECS, STAGES, WRAPPERS, codec_from_spec, coding_from_spec
from zmqtrain.errors import ConfigError
from zmqtrain.specs import parse_spec

PAGE = (Path(__file__).parents[1] / "docs" / "codecs.md").read_text()
FAMILY = {**CODECS, **STAGES, **WRAPPERS}


def described() -> dict[str, tuple[str, list[str]]]:
    """Per member: its default arguments as the page writes them, and the first words of its four lines."""
    entries = {}
    for title, body in re.findall(r"^\*\*([^*]+)\*\*([^\n]*\n(?:- .*\n(?:  .*\n)*)+)", PAGE, re.MULTILINE):
        head, *lines = body.split("\n- ")
        arguments = re.findall(r"`:([^`]+)`", head)
        for position, name in enumerate(title.split(", ")):
            given = arguments[position] if position < len(arguments) else ""
            entries[name] = given, [line.partition(":")[0] for line in lines]
    return entries


def test_every_member_of_the_family_is_described_in_four_lines():
    entries = described()
    assert set(FAMILY) <= set(entries)
    assert all(lines == ["What", "When", "Cost", "Source"] for _, lines in entries.values())


@pytest.mark.parametrize("name", FAMILY)
def test_the_defaults_on_the_page_are_those_of_the_code(name):
    written, _ = described()[name]
    parameters = signature(FAMILY[name]).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in parameters if parameter.name != "codec"}
    text = f"{name}:{written}" if written else name
    assert parse_spec(text, {name: defaults})[1] == defaults
    assert written.count("=") == len(defaults)


def test_the_grammar_names_the_whole_family():
    for rule, family in (("codec", CODECS), ("stage", STAGES), ("wrapper", WRAPPERS)):
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


def test_the_refusal_on_the_page_is_what_is_said():
    (refusal,) = re.findall(r"`('topk:densty.*)`", PAGE)
    with pytest.raises(ConfigError, match=re.escape(refusal)):
        codec_from_spec("topk:densty=0.1+int4")
