"""docs/extending.md is held to the code: its files exist, every message has its handler and its tests, every codec,
release rule and allreduce algorithm is named in its page."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest

from zmqtrain.codecs.base import CODECS, TRANSFORMS, WRAPPERS
from zmqtrain.collectives.algorithms import ALLREDUCE
from zmqtrain.collectives.costs import COSTS
from zmqtrain.protocol.members import ALLOWED
from zmqtrain.protocol.messages import KEY_REQUESTS, MESSAGES, Hello
from zmqtrain.protocol.rounds import RELEASE_RULES

PROJECT = Path(__file__).parents[1]
PACKAGE = PROJECT / "zmqtrain"
PAGE = (PROJECT / "docs" / "extending.md").read_text()
ROWS = {
    name: (re.findall(r"`([^`]+)`", handlers), re.findall(r"`([^`]+)`", tests))
    for name, handlers, tests in re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", PAGE, re.MULTILINE)
}
NAMES = [kind.__name__ for kind in MESSAGES]


def words_of(path: Path) -> set[str]:
    """Return the names that a source file uses."""
    tree = ast.parse(path.read_text())
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }


def keys_of(file: str, attribute: str) -> list[str]:
    """Return the names that are keys of the dict which a class assigns to `self.attribute`."""
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Attribute) and target.attr == attribute and isinstance(node.value, ast.Dict):
            return [key.id for key in node.value.keys if isinstance(key, ast.Name)]
    raise AssertionError(f"{file} assigns no dict to self.{attribute}")


def test_every_file_on_the_page_exists() -> None:
    files = set(re.findall(r"`([\w/]+\.(?:py|md))(?: --\w+)?`", PAGE))
    assert len(files) > 20
    assert [file for file in files if not (PROJECT / file).exists() and not (PACKAGE / file).exists()] == []


def test_every_message_has_one_row() -> None:
    assert list(ROWS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_message_is_named_by_its_handlers_and_by_its_tests(name: str) -> None:
    handlers, tests = ROWS[name]
    assert handlers and tests
    assert all(name in words_of(PACKAGE / file) for file in handlers)
    assert all(name in words_of(PROJECT / file) for file in tests)


def test_the_hub_has_exactly_one_handler_for_each_message_that_a_state_allows() -> None:
    handled = Counter(keys_of("protocol/hub.py", "_handlers") + keys_of("protocol/groups.py", "handlers"))
    assert set(handled.values()) == {1}
    assert set(handled) == {kind.__name__ for kind in ALLOWED} - {Hello.__name__, *(r.__name__ for r in KEY_REQUESTS)}


@pytest.mark.parametrize(
    ("page", "registry"),
    [
        ("codecs.md", [*CODECS, *TRANSFORMS, *WRAPPERS]),
        ("strategies.md", list(RELEASE_RULES.factories)),
        ("collectives.md", list(ALLREDUCE)),
    ],
)
def test_every_member_of_a_registry_has_its_entry_in_its_page(page: str, registry: Collection[str]) -> None:
    titles = re.findall(r"^\*\*([^*]+)\*\*", (PROJECT / "docs" / page).read_text(), re.MULTILINE)
    assert set(registry) <= {name for title in titles for name in title.split(", ")}


def test_every_allreduce_has_its_cost() -> None:
    assert set(COSTS) == set(ALLREDUCE)
