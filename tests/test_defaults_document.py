"""Every default in a table of settings is the code's."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from tests import settings_page
from zmqtrain.checkpoint.folder import USUAL_SECONDS
from zmqtrain.cli.broker import BrokerConfig
from zmqtrain.cli.local import LocalConfig
from zmqtrain.cli.node import NodeConfig
from zmqtrain.cli.operate import StatusConfig
from zmqtrain.core.settings import RunSettings
from zmqtrain.planning.plans import Wish, make_plan

ROOT = Path(__file__).parents[1]
PATHS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in PATHS}
TABLE = re.compile(r"^\| setting \| default \|[^\n]*\n\|[-|: ]+\n((?:\|[^\n]*\n)+)", re.MULTILINE)


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
