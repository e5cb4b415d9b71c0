"""docs/strategies.md is held to the rules: all are described, with the defaults that they have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zmqtrain.core.errors import ConfigError
from zmqtrain.core.settings import AUTO, FITTED, RunSettings
from zmqtrain.planning.rules import check_rules
from zmqtrain.protocol.rounds import release_rule_from_spec
from zmqtrain.strategies.aggregate import aggregation_from_spec
from zmqtrain.strategies.outer import outer_from_spec
from zmqtrain.strategies.weights import preemption_from_spec, selection_from_spec, staleness_from_spec
from zmqtrain.train.minibatch import minibatch_from_spec

PAGE = (Path(__file__).parents[1] / "docs" / "strategies.md").read_text()
DEFAULTS = {name: AUTO if value == FITTED.get(name) else value for name, value in RunSettings().to_dict().items()}
READERS = {
    "release": release_rule_from_spec,
    "aggregate": aggregation_from_spec,
    "selection": selection_from_spec,
    "staleness": staleness_from_spec,
    "outer": outer_from_spec,
    "preemption": preemption_from_spec,
    "minibatch": minibatch_from_spec,
}
ENTRY = re.compile(r"^\*\*(\w+)\*\*([^\n]*)\n((?:- .*\n(?:  .*\n)*)+)", re.MULTILINE)


def section(setting: str) -> str:
    """Return the section of the page whose title begins with that setting."""
    (text,) = re.findall(rf"^## {setting}\b[^\n]*\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


def family(setting: str) -> list[str]:
    """Return the specs that a setting takes, with all their defaults, as its refusal lists them."""
    with pytest.raises(ConfigError) as refused:
        READERS[setting]("?")
    return str(refused.value).partition("choose one of ")[2].split(", ")


@pytest.mark.parametrize("setting", [name for name in READERS if name != "preemption"])
def test_every_rule_is_described_with_its_true_defaults(setting):
    entries = [(name, re.findall(r"`:([^`]+)`", head)) for name, head, _ in ENTRY.findall(section(setting))]
    described = [name + "".join(f":{written}" for written in arguments) for name, arguments in entries]
    assert set(described) >= set(family(setting))
    assert len(described) == len({name for name, _ in entries})


def test_preemption_is_described_with_its_true_defaults():
    (written,) = re.findall(r"^\*\*preemption\*\* `([^`]+)`, or `none`", PAGE, re.MULTILINE)
    assert [written, "none"] == family("preemption")


@pytest.mark.parametrize(("setting", "lone"), [("aggregate", {"mean", "weighted"}), ("selection", {"all", "better"})])
def test_what_compares_the_deltas_of_a_round_is_refused_where_a_round_has_one(setting, lone):
    for spec in family(setting):
        settings = RunSettings.from_dict({"release": "immediately", setting: spec})
        if spec.partition(":")[0] in lone:
            check_rules(settings)
        else:
            with pytest.raises(ConfigError, match=f"compares those of a round: say .*, or leave --{setting} out"):
                check_rules(settings)


@pytest.mark.parametrize(
    ("title", "setting"),
    [(name, name) for name in READERS if name != "preemption"] + [("initial", "initial"), ("local_updates",) * 2],
)
def test_the_default_of_each_section_is_that_of_the_settings(title, setting):
    (written,) = re.findall(r"^Default: `([^`]+)`", section(title), re.MULTILINE)
    assert written == DEFAULTS[setting]


def test_the_specs_in_the_table_of_choices_are_taken():
    (table,) = re.findall(r"^\| your case \| say \|\n(.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    for line in table.splitlines()[1:]:
        flags = dict(re.findall(r"--([\w-]+) (\S+?)(?=[` ])", line))
        check_rules(RunSettings.from_dict({name.replace("-", "_"): _value(name, text) for name, text in flags.items()}))
    assert table.count("`--") >= 6


def _value(name: str, text: str) -> object:
    return int(text) if name == "start-nodes" else text
