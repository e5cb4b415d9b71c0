"""Every default that a page names is the code's: tables of settings, and the numbers that sentences give."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from tests import settings_page
from zmqtrain.broker.checkpoint import FREE_SETTINGS
from zmqtrain.checkpoint.folder import STRICT_VERSIONS, USUAL_SECONDS
from zmqtrain.cli.broker import BrokerConfig
from zmqtrain.cli.local import LocalConfig
from zmqtrain.cli.node import NodeConfig
from zmqtrain.cli.operate import StatusConfig
from zmqtrain.core.settings import FIRST, FIXED, RunSettings
from zmqtrain.planning.planning import Wish, make_plan
from zmqtrain.transport.pacing import ConnectionLimits

ROOT = Path(__file__).parents[1]
PATHS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in PATHS}
TABLE = re.compile(r"^\| setting \| default \|[^\n]*\n\|[-|: ]+\n((?:\|[^\n]*\n)+)", re.MULTILINE)
LIMITS = ConnectionLimits()
FACTS = {
    r"begins with k = (\d+), d = \d+": FIRST["every"],
    r"begins with k = \d+, d = (\d+)": FIRST["delay"],
    r"fixed numbers there \(k = (\d+), d = \d+, ternary": FIXED["every"],
    r"fixed numbers there \(k = \d+, d = (\d+), ternary": FIXED["delay"],
    r"Until something is known, k and d are (\d+)": FIRST["every"],
    r"k = (\d+), d = \d+, `?ternary`?(?: both ways)?, one fragment": FIXED["every"],
    r"k = \d+, d = (\d+), `?ternary`?(?: both ways)?, one fragment": FIXED["delay"],
    r"`(\d+)s`, the default": int(USUAL_SECONDS),
    r"multiples of `--checkpoint-every` \((\d+)\)": STRICT_VERSIONS,
    r"`--checkpoint-keep` says how many stay \((\d+)\)": BrokerConfig().checkpoint_keep,
    r"at a hub's port: (\d+) in all": LIMITS.total,
    r"(\d+)\s+from one address, \d+ over which no message has come": LIMITS.per_address,
    r"(\d+) over which no message has come": LIMITS.half_open,
    r"over which no message has come, (\d+) of these from one address": LIMITS.half_open_per_address,
    r"a handshake may last (\d+) s": int(LIMITS.handshake_seconds),
    r"best-scored of `start-nodes` nodes after (\d+) steps apart": RunSettings().apart_steps,
}
"""By a pattern: the number that the code has. What a page says in these words is held to it, wherever that is."""


def shown(default: str) -> list[str]:
    """Return the defaults of a table's cell, one for each setting of its row."""
    return [one.strip().strip("`") for one in default.split(",")]


def test_the_page_of_settings_is_made_of_the_code() -> None:
    assert settings_page.PAGE.read_text() == settings_page.page(), "python tests/settings_page.py > docs/settings.md"


def test_every_setting_has_a_description() -> None:
    for kind in (RunSettings, BrokerConfig, NodeConfig, LocalConfig, StatusConfig):
        assert set(settings_page.described(kind)) >= {field.name for field in fields(kind)}


def test_the_defaults_in_every_table_of_settings_are_those_of_the_code() -> None:
    for name, text in PAGES.items():
        if name == "docs/settings.md":  # that is the code's own
            continue
        for table in TABLE.findall(text):
            for row in table.splitlines():
                names, default = (cell.strip() for cell in row.strip("|").split("|")[:2])
                settings = [one.strip().strip("`").replace("-", "_") for one in names.split(",")]
                said = shown(default) if len(settings) > 1 else [default.strip("`")]
                said = said * len(settings) if len(said) == 1 else said
                assert len(said) == len(settings), f"{name}: {row}"
                for setting, one in zip(settings, said, strict=True):
                    assert one in _ways(setting), f"{name}: {setting} is {_ways(setting)}, not {one}"


def _ways(setting: str) -> set[str]:
    """Return how the default of a setting may be written: as any of the commands has it, in a person's words."""
    more = {
        "checkpoint_every": {f"{USUAL_SECONDS:g}s"},
        "link": {"as measured"},
        "checkpoint": {"a folder of the run's name"},
    }
    ways = more.get(setting, set())
    for kind in (RunSettings, BrokerConfig, NodeConfig, LocalConfig):
        for field in fields(kind):
            if field.name == setting:
                ways |= {settings_page.default_of(setting, field.default).strip("`")}
                ways |= {f"{field.default:g}"} if isinstance(field.default, float) else set()
    return ways


def test_the_numbers_that_sentences_give_are_those_of_the_code() -> None:
    found = 0
    for name, text in PAGES.items():
        if name in ("docs/changelog.md", "docs/results.md"):  # what was, and what was measured
            continue
        for pattern, value in FACTS.items():
            for match in re.finditer(pattern, text):
                found += 1
                assert int(match[1]) == value, f"{name} says {match[0]!r}, the code has {value}"
    assert found >= len(FACTS) // 2


def test_what_may_change_at_a_restart_is_what_the_pages_say() -> None:
    for name, text in PAGES.items():
        for said in re.findall(r"settings that may change when a run is resumed are ([^;.]*)", text):
            assert tuple(re.findall(r"`(\w+)`", said)) == FREE_SETTINGS, name


@pytest.mark.parametrize("step_ms", [50, 180])
def test_codecs_md_advises_what_the_plan_advises(step_ms: int) -> None:
    page = PAGES["docs/codecs.md"]
    (head, table) = re.search(r"^(\| model \|[^\n]*)\n\|[-|: ]+\n((?:\|[^\n]*\n)+)", page, re.MULTILINE).groups()  # type: ignore[union-attr]
    column = [cell.strip() for cell in head.strip("|").split("|")].index(f"a step of {step_ms} ms")
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    assert len(rows) >= 4
    for row in rows:
        millions = int(row[0].removesuffix("M"))
        plan = make_plan(Wish(parameters=millions * 10**6, nodes=4, step_seconds=step_ms / 1000))
        said = f"`{plan.codec}`, k = {plan.schedule.every}, d = {plan.schedule.delay}: {plan.speedup:.1f}"
        assert row[column] == said
