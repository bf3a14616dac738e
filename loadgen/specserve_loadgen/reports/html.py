"""A document as one HTML file: no script, no asset, nothing fetched; light and dark by the reader's
setting; every plot has its numbers in a table below."""

from __future__ import annotations

from html import escape
from importlib.resources import files

from specserve_loadgen.reports.document import Document, Figure, Section, Table

STYLE = (files("specserve_loadgen") / "data" / "report.css").read_text(encoding="utf-8")


def render_html(document: Document) -> str:
    title = escape(document.title)
    lead = "".join(f"<li>{escape(line)}</li>" for line in document.lead)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in document.notes)
    sections = "".join(_section(section) for section in document.sections)
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in document.facts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{title}</h1><ul class="lead">{lead}</ul>{notes}{sections}'
        f"<h2>How this was measured</h2><dl>{facts}</dl></main></body></html>\n"
    )


def _section(section: Section) -> str:
    figures = "".join(_figure(figure) for figure in section.figures)
    tables = "".join(_table(table) for table in section.tables if table.rows)
    text = "".join(f"<p>{escape(part)}</p>" for part in section.text.split("\n") if part)
    inner = f'{text}<div class="figures">{figures}</div>{tables}'
    return f"<section><h2>{escape(section.title)}</h2>{inner}</section>"


def _figure(figure: Figure) -> str:
    numbers = ""
    if figure.table is not None and figure.table.rows:
        numbers = f"<details><summary>the numbers</summary>{_table(figure.table)}</details>"
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>"
    return f"<figure>{caption}{figure.svg}{numbers}</figure>"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table.head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    inner = f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    return f'<div class="scroll"><table>{inner}</table></div>'
