"""A report is one file that opens anywhere: whole, escaped, and with a table for each picture."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from recorded import broker, node, write_run

import zmqtrain as zt
from zmqtrain.cli.report import main
from zmqtrain.core.errors import ConfigError
from zmqtrain.monitor.records import record, write_records
from zmqtrain.report.contents import make_report, write_report

HOSTILE = (
    '<script>alert("1")</script>',
    '"><img src=x onerror=alert(1)>',
    "</title></style><b>",
    "\x1b[31mred\x07",
    "\u202eevil\u2066",
    "$\\frac{1}{0}$",
    "_hidden",
    "x" * (1 << 20),
    "{x:g}",
    "\u05d0\u05d1\u05d2",
    "&amp;",
)


class Reader(HTMLParser):
    """Collects the elements of a page, and checks that each one that is opened is closed."""

    EMPTY = ("meta", "br", "img", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.EMPTY:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a run with hostile names, whose broker has lost a node."""
    folder = tmp_path_factory.mktemp("report") / "hostile"
    folder.mkdir()
    lost = [record("membership", 9.0, node=name, what=name[:50], peer="x#a", text=name) for name in HOSTILE]
    lost += [record("membership", 10.0, node=name, what="lost", peer="x#a", text=name) for name in HOSTILE[:3]]
    records = broker(list(HOSTILE), seconds=20, program='<i>"', data="\u202e")
    write_records(folder / "broker.jsonl", [*records, *lost])
    for number, name in enumerate(HOSTILE[:3]):
        write_records(folder / f"<b>{number}.jsonl", node(name, seconds=20))
    return make_report([zt.records.load(folder)])


def test_a_report_needs_nothing_else_and_has_no_script(page: str) -> None:
    reader = Reader(page)
    names = {tag for tag, _ in reader.tags}
    assert not names & {"script", "img", "link", "iframe", "object", "embed", "b", "i", "base", "form"}
    for tag, attributes in reader.tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("href", "src", "xlink:href", "action", "data"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    assert not re.search(r"@import|url\((?!#)", page)
    policy = next(one["content"] for tag, one in reader.tags if tag == "meta" and "http-equiv" in one)
    assert policy is not None and policy.startswith("default-src 'none'")


def test_hostile_names_are_shown_as_text(page: str) -> None:
    assert all(one.isprintable() or one == "\n" for one in page)
    shown = " ".join(Reader(page).texts)
    for name in ('<script>alert("1")</script>', "?[31mred?", "?evil?", "$\\frac{1}{0}$", "&amp;", "{x:g}"):
        assert name in shown
    assert len(page) < 1 << 21


def test_each_picture_has_its_numbers_in_a_table_that_a_reader_finds(page: str) -> None:
    reader = Reader(page)
    assert reader.count("svg") == reader.count("figure") == reader.count("figcaption") >= 4
    assert reader.count("table") == reader.count("caption") >= 8
    heads = [one.get("scope") for tag, one in reader.tags if tag == "th"]
    assert set(heads) == {"col", "row"}
    assert all(one.get("aria-hidden") == "true" for tag, one in reader.tags if tag == "svg")
    assert [one for tag, one in reader.tags if tag == "html"] == [{"lang": "en"}]
    anchors = {one["id"] for tag, one in reader.tags if tag == "h2"}
    assert {(one["href"] or "").removeprefix("#") for tag, one in reader.tags if tag == "a"} == anchors


def test_runs_stand_beside_each_other_and_what_differs_is_marked(tmp_path: Path) -> None:
    one = write_run(tmp_path / "alone", ["pc1"], run="a", every=1)
    two = write_run(tmp_path / "two", ["pc1", "pc2"], run="b", speed=3.0)
    text = make_report(zt.records.load_all([one, two]), "Compared", ["a note <of ours>"])
    shown = " ".join(Reader(text).texts)
    assert "speed-up over alone" in shown and "a note <of ours>" in shown
    (marked,) = re.findall(r"<tr class=differs><th[^>]*><bdi>every</bdi></th>(.*?)</tr>", text)
    assert re.findall(r"<bdi>(\d+)</bdi>", marked) == ["1", "8"]


@pytest.mark.parametrize(
    "kinds", [("run",), ("run", "release"), ("status",), ("evaluation",), ("step", "node"), ("run", "membership")]
)
def test_a_run_with_few_records_has_a_report(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    records = [one for one in [*broker(["pc1"], seconds=6), *node("pc1", 6)] if one["kind"] in kinds]
    write_records(tmp_path / "a.jsonl", records)
    Reader(make_report(zt.records.load_all(tmp_path)))


def test_the_command_writes_one_file_of_torn_records_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", ["pc1"], with_nodes=False, seconds=10)
    whole = (folder / "broker.jsonl").read_bytes()
    (folder / "broker.jsonl").write_bytes(whole[:2000] + b"\0\0\n" + whole[2000:-40])
    output = tmp_path / "out.html"
    output.write_text("older")
    assert main([str(folder), "-o", str(output)]) == 0
    Reader(output.read_text())
    said = capsys.readouterr().out
    assert str(output) in said and "lines of run" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "run"]


@pytest.mark.parametrize("arguments", [[], ["missing"], ["run", "-o", "."], ["run", "-o", "missing/report.html"]])
def test_a_wrong_command_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", ["pc1"], with_nodes=False, seconds=3)
    assert main(arguments) != 0
    assert "zmqtrain report: " in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = zt.records.load_all(write_run(tmp_path / "run", ["pc1"], with_nodes=False, seconds=3))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"\[plot\]"):
        write_report(runs, tmp_path / "report.html")
