"""README and the pages: README is short, and every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
README = PROJECT / "README.md"
PAGES = (README, *sorted((PROJECT / "docs").rglob("*.md")))
GLOSSARY = PROJECT / "docs" / "glossary.md"
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
WIDTH = 140


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = HEADING.findall(page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).replace(" ", "-") for heading in headings}


def test_readme_has_at_most_120_lines_of_a_sensible_width() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > WIDTH and not line.startswith("|")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_every_link_of_a_page_leads_to_a_file_and_its_heading(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text()):
        place, _, anchor = link.partition("#")
        if "://" in place:
            continue
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


def test_the_glossary_has_the_words_of_a_run_in_alphabetical_order() -> None:
    words = re.findall(r"^\| ([^|(]+?) (?:\([^|]*\) )?\|", GLOSSARY.read_text(), re.MULTILINE)[1:]
    assert words == sorted(words, key=str.lower)
    assert {"age", "anchor", "delta", "drain", "fragment", "quorum", "unit", "version"} <= set(words)
    named = set(re.findall(r"(?<!\*)\*([a-z ]+)\*(?!\*)", GLOSSARY.read_text())) - {"italics"}
    assert [name for name in named if name not in words and name.removesuffix("s") not in words] == []
