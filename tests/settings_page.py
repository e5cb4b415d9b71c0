"""Make docs/settings.md of the records that the commands read: python tests/settings_page.py > docs/settings.md"""

# ruff: noqa: E501
from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from zmqtrain.cli.broker import BrokerConfig
from zmqtrain.cli.local import LocalConfig
from zmqtrain.cli.node import NodeConfig
from zmqtrain.core.settings import AUTO, FITTED, RunSettings

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
HEAD = """# Settings and their defaults

Every setting is a flag (`--checkpoint-every 5min`) and a key of a TOML file (`checkpoint_every = "5min"`, given with `--config FILE`). The settings of a run are
given to the broker alone; nodes adopt them when they join. This page is made of the code (`tests/settings_page.py`), and a test holds it to that. What the rules
mean: [strategies.md](strategies.md); codecs: [codecs.md](codecs.md).
"""
FLAGS = {"from_file": "`from_file` (flag: `--from`)"}
PARTS = (
    ("Of a run: `zmqtrain-broker`, `zmqtrain local`", RunSettings, ()),
    ("Of the broker itself: `zmqtrain-broker`", BrokerConfig, (RunSettings,)),
    ("Of one node: `zmqtrain-node HUB`", NodeConfig, ()),
    ("Of a trial on one PC: `zmqtrain local`", LocalConfig, (BrokerConfig, RunSettings)),
)


def described(kind: type) -> dict[str, str]:
    """Return what the source says below each field of a record, in one line each."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        try:
            (made,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):
            continue
        assert isinstance(made, ast.ClassDef)
        for field, text in zip(made.body, made.body[1:], strict=False):
            named = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if named and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                assert isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts


def default_of(name: str, value: Any) -> str:
    """Return a default as a person writes it."""
    if value is MISSING:
        return "needed"
    if name in FITTED and value == FITTED[name]:
        return f"`{AUTO}`"
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"


def page() -> str:
    """Return docs/settings.md."""
    lines = [HEAD]
    for title, kind, without in PARTS:
        left_out = {field.name for other in without for field in fields(other)}
        texts = described(kind)
        lines.append(f"\n## {title}\n\n| setting | default | what it is |\n|---|---|---|\n")
        for field in fields(kind):
            if field.name in left_out:
                continue
            text = texts[field.name].replace("|", "\\|").replace("<", "\\<")
            name = FLAGS.get(field.name, f"`{field.name}`")
            lines.append(f"| {name} | {default_of(field.name, field.default)} | {text} |\n")
    return "".join(lines)


if __name__ == "__main__":
    print(page(), end="")
