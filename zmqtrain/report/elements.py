"""Elements of a page as text: everything that comes from a record is escaped here, and nowhere else.

Rule: a text of a record is shown as text. Characters that do not print (ANSI codes, marks that turn the direction of
what follows) are "?"; what is longer than MOST_TEXT is cut; names stand in <bdi>, so that letters that are written from
right to left turn nothing around them.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zmqtrain.core.installed import package_version

MOST_TEXT, MOST_NAME = 400, 64

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; color: #1c2733; background: #fff;
  margin: 0 auto; max-width: 1100px; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
p { margin: .4rem 0; max-width: 75ch; } .said { color: #52606d; } nav a { margin-right: 1rem; white-space: nowrap; }
a { color: #0b6e99; }
figure { margin: .6rem 0 1rem; break-inside: avoid; overflow-x: auto; }
figure svg { width: 100%; min-width: 560px; height: auto; } figcaption { color: #52606d; font-size: .92rem; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .4rem 0; min-width: 24rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: #52606d; padding-bottom: .3rem; font-size: .92rem; }
th, td { padding: .22rem .7rem .22rem 0; text-align: right; vertical-align: top; border-bottom: 1px solid #dfe5ea; }
th { font-weight: 600; } thead th { border-bottom: 2px solid #9aa7b2; vertical-align: bottom; }
td, th { white-space: nowrap; }
td.text, th.text { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 5rem; max-width: 34rem; }
tr.differs td, tr.differs th { background: #fdf3d8; } .best { font-weight: 600; }
details { margin: .3rem 0; } summary { cursor: pointer; color: #0b6e99; }
@media print { body { max-width: none; padding: 0; font-size: 10pt; } nav, details:not([open]) { display: none; }
  h2 { break-after: avoid; } tr { break-inside: avoid; } .wide, figure { overflow: visible; }
  figure svg { min-width: 0; } table { font-size: 8pt; min-width: 0; } td, th { padding-right: .4rem; } }
"""


class Cell(NamedTuple):
    """A cell of a table that is a text. best: shown in bold."""

    text: str
    best: bool = False


def plain(text: str, most: int = MOST_TEXT) -> str:
    """Return a text with "?" for each character that does not print, cut to `most` characters."""
    short = "".join(one if one.isprintable() else "?" for one in text[:most])
    return short if len(text) <= most else short + "…"


def escape(text: str, most: int = MOST_TEXT) -> str:
    return html.escape(plain(text, most), quote=True)


def name(text: str) -> str:
    """Return a name, or another text of a record, as HTML."""
    return f"<bdi>{escape(text, MOST_NAME)}</bdi>"


def words(text: str) -> str:
    """Return a text of a record as HTML."""
    return f"<bdi>{escape(text)}</bdi>"


def begun(sentence: str) -> str:
    """Return a sentence with a capital at its beginning."""
    return sentence[:1].upper() + sentence[1:]


def paragraph(text: str, kind: str = "") -> str:
    return f"<p{f' class={kind}' if kind else ''}>{escape(text, 4 * MOST_TEXT)}</p>"


def figure(svg: str, caption: str, numbers: str = "") -> str:
    """Return a picture with its caption and, folded, its numbers as a table."""
    folded = f"<details><summary>the numbers of this picture</summary>{numbers}</details>" if numbers else ""
    return f"<figure>{svg}<figcaption>{escape(begun(caption))}</figcaption></figure>{folded}"


def table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Cell]],
    left: Sequence[str] = (),
    differs: Iterable[int] = (),
) -> str:
    """Return a table whose first column heads its rows.

    rows: texts of records, or of our own; all are escaped.  left: the columns of words, besides the first, flush left.
    differs: the rows to point out.
    """
    marked, words_in = set(differs), {columns[0], *left}
    kinds = [' class="text"' if column in words_in else "" for column in columns]
    head = "".join(f'<th scope="col"{kind}>{escape(one)}</th>' for one, kind in zip(columns, kinds, strict=True))
    body = []
    for number, row in enumerate(rows):
        cells = [one if isinstance(one, Cell) else Cell(one) for one in row]
        inner = [f"<span class=best>{words(one.text)}</span>" if one.best else words(one.text) for one in cells]
        parts = [f'<th scope="row" class="text">{inner[0]}</th>']
        parts += [f"<td{kind}>{one}</td>" for one, kind in zip(inner[1:], kinds[1:], strict=True)]
        body.append(f"<tr{' class=differs' if number in marked else ''}>{''.join(parts)}</tr>")
    said = f"<caption>{escape(begun(caption))}</caption>"
    return f'<div class="wide"><table>{said}<thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def section(title: str, anchor: str, *parts: str) -> str:
    return f'<section aria-labelledby="{anchor}"><h2 id="{anchor}">{escape(title)}</h2>{"".join(parts)}</section>'


def page(title: str, said: Sequence[str], sections: Sequence[tuple[str, str, Sequence[str]]]) -> str:
    """Return a whole page. said: sentences below the title.  sections: (title, anchor, parts) of each.

    The page has no script, and its policy allows none; nothing is loaded from anywhere.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    links = " ".join(f'<a href="#{anchor}">{escape(name)}</a>' for name, anchor, parts in sections if parts)
    body = "".join(section(name, anchor, *parts) for name, anchor, parts in sections if parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="generator" content="zmqtrain {package_version()}"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><header><h1>{escape(title, MOST_NAME * 4)}</h1>"
        f'{"".join(paragraph(one) for one in said)}</header><nav aria-label="Sections">{links}</nav>'
        f"<main>{body}</main></body></html>\n"
    )
