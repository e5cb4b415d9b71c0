"""The documentation as a site: it is built without a warning, holds every page, and asks no other host for anything."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import zmqtrain as zt

PROJECT = Path(__file__).parents[1]
DOCS = PROJECT / "docs"
SITE = DOCS / "site"
CONFIG = SITE / "mkdocs.yml"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if SITE not in path.parents)
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
"""Elements and the attribute whose file a browser loads by itself; and `link`, but for a page's own address."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as docs/install.md says, into a folder of this test."""
    folder = tmp_path_factory.mktemp("site")
    building = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(CONFIG), "-d", str(folder)]
    done = subprocess.run(building, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


class Loads(HTMLParser):
    """What a browser loads for a page, and the ids that its links may lead to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.files: list[str] = []
        self.ids: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.add(given.get("id", ""))
        if tag in LOADED:
            self.files.append(given.get(LOADED[tag], ""))
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.files.append(given.get("href", ""))


def test_every_page_is_in_the_navigation(site: Path) -> None:
    named = re.findall(r"([\w/.-]+\.md)$", CONFIG.read_text().partition("\nnav:")[2], re.MULTILINE)
    assert len(named) == len(set(named))
    assert set(named) <= {"index.md", *PAGES}
    shown = (site / "index.html").read_text()
    assert [page for page in PAGES if f'href="{page.removesuffix("README.md").removesuffix(".md")}' not in shown] == []


def test_every_page_is_built_and_loads_nothing_from_another_host(site: Path) -> None:
    built = [(site / name.replace("README.md", "index.md")).with_suffix(".html") for name in ("index.md", *PAGES)]
    assert [page for page in built if not page.is_file()] == []
    for page in set(site.rglob("*.html")) - {site / "404.html"}:  # which a server shows for any address
        files = [file.partition("?")[0] for file in Loads(page.read_text()).files if file]
        missing = [file for file in files if not file.startswith("data:") and not (page.parent / file).is_file()]
        assert missing == [], page
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"url\(\s*['\"]?(?:https?:)?//", styles) == []


def test_the_reference_has_every_public_name(site: Path) -> None:
    ids = Loads((site / "reference" / "python.html").read_text()).ids
    assert [name for name in zt.__all__ if not name.startswith("__") and f"zmqtrain.{name}" not in ids] == []


def test_lists_and_the_tables_in_them_are_those_of_github(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert re.findall(r"<p>(?:(?!</p>).)*\n(?:- |\d+\. |\|).*", page.read_text()) == [], page
    assert re.search(r"<li>(?:(?!</li>).)*<table>", (site / "synchronous.html").read_text(), re.DOTALL)


@pytest.mark.parametrize("page", ["equation.md", "wire.md"])
def test_an_explanation_prints_what_it_shows(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert len(found) == (DOCS / page).read_text().count("```python\n") == 1
    for code, shown in found:
        exec(code, {})
        assert capsys.readouterr().out == shown


def test_what_coming_from_others_calls_ours_exists() -> None:
    text = (DOCS / "coming_from.md").read_text()
    settings = zt.RunSettings()
    flags = {flag.replace("-", "_") for flag in re.findall(r"`--([a-z-]+)", text)} - {"max_restarts"}
    elsewhere = {"exchange", "checkpoint", "standby"}
    assert [flag for flag in flags - elsewhere if not hasattr(settings, flag)] == []
    for name, spec in re.findall(r"`--(release|aggregate|outer|codec|minibatch) ([\w:=.,+]+)`", text):
        zt.RunSettings(**{name: spec})
    assert [name for name in re.findall(r"\bzt\.(\w+)", text) if not hasattr(zt, name)] == []
