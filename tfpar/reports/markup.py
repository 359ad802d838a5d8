"""HTML elements from text, every one escaped: names of layers, settings and paths may contain anything."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence

_STYLE = """
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid; padding-bottom: .2rem; }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1rem; }
table { border-collapse: collapse; margin: .8rem 0; display: block; overflow-x: auto; }
table { font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .2rem; }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #8886; }
td.number, th.number { text-align: right; }
th[scope=row] { font-weight: 400; }
td, th, dd { overflow-wrap: anywhere; }
code, pre { font-family: ui-monospace, monospace; font-size: .9rem; }
pre { overflow-x: auto; }
figure { margin: 1rem 0; }
img { max-width: 100%; height: auto; background: #fff; }
figcaption, .note { font-size: .9rem; }
@media print {
  body { max-width: none; font-size: 10pt; padding: 0; }
  nav { display: none; }
  table { display: table; }
  figure, tr, li { break-inside: avoid; }
  h2 { break-after: avoid; }
}
"""
# No script, no request: also where a text should ever become an element.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class Markup(str):
    """HTML that is used as it is; a plain string is a text, which is escaped."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Return a text as HTML.

    Args:
        value: A text, or `Markup`, which is returned unchanged.

    Example:
        >>> text("<script>")
        '&lt;script&gt;'
    """
    return value if isinstance(value, Markup) else Markup(html.escape(_printable(str(value))))


def _printable(value: str) -> str:
    """Replace what no HTML file may contain: control characters, and halves of surrogate pairs."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in value)


def element(name: str, *parts: object, **attributes: object) -> Markup:
    """Return an element with its content.

    Args:
        name: The name of the element.
        parts: Its content: texts, or `Markup`.
        attributes: Its attributes; `class_` is `class`, `aria_label` is `aria-label`.

    Example:
        >>> element("p", "2 < 3", class_="note")
        '<p class="note">2 &lt; 3</p>'
    """
    shown = "".join(f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{shown}>{''.join(map(text, parts))}</{name}>")


def joined(parts: Iterable[object]) -> Markup:
    """Return several parts, one after another."""
    return Markup("\n".join(map(text, parts)))


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[object]], numbers: bool = True) -> Markup:
    """Return a table whose first column names the rows; empty without rows.

    Args:
        caption: Its title.
        heads: The names of its columns.
        rows: A cell for each column; texts or `Markup`.
        numbers: Whether the columns after the first are numbers.

    Example:
        >>> table("Memory", ["device", "MB"], [])
        ''
    """
    kind = {"class_": "number"} if numbers else {}
    lines = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell, **kind) for cell in row[1:]))
        for row in rows
    ]
    if not lines:
        return Markup("")
    first, *others = heads
    head = element(
        "tr", element("th", first, scope="col"), *(element("th", name, scope="col", **kind) for name in others)
    )
    body = element("tbody", Markup("\n"), joined(lines), Markup("\n"))
    return element("table", element("caption", caption), element("thead", head), body)


def picture(png: bytes, alternative: str, caption: str = "") -> Markup:
    """Return a picture with its bytes in the page.

    Args:
        png: A PNG image.
        alternative: What it shows, for those who do not see it.
        caption: The text below; empty for none.
    """
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    image = Markup(f'<img alt="{text(alternative)}" src="{source}">')
    return element("figure", image, *([element("figcaption", caption)] if caption else []))


def section(name: str, title: str, *parts: object) -> tuple[str, str, Markup]:
    """Return a section of a page: its id, its title, its HTML."""
    return name, title, element("section", element("h2", title), Markup("\n"), joined(parts), id=name)


def page(title: str, head: Iterable[object], sections: Iterable[tuple[str, str, Markup]]) -> str:
    """Return a whole page, without scripts, and without anything to load.

    Args:
        title: Its title.
        head: What comes before the list of its sections.
        sections: Those of `section`.
    """
    sections = list(sections)
    links = joined(element("li", element("a", name, href=f"#{link}")) for link, name, _ in sections)
    body = joined(
        [
            element("h1", title),
            *head,
            element("nav", element("ul", links), aria_label="Sections"),
            element("main", joined(part for *_, part in sections)),
        ]
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="referrer" content="no-referrer">
<title>{text(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""
