"""A document for a terminal: its sentences and tables, without plots."""

from __future__ import annotations

import textwrap

from specserve_loadgen.render import table
from specserve_loadgen.reports.document import Document, Section


def render_text(document: Document) -> str:
    parts = [document.title, *(_wrapped(line) for line in document.lead)]
    parts += [text for section in document.sections if (text := _section(section))]
    parts += [_wrapped(f"note: {note}") for note in document.notes]
    return "\n\n".join(parts)


def _section(section: Section) -> str:
    tables = [table([one.head, *one.rows]) for one in section.tables if one.rows]
    for figure in section.figures:
        if figure.table is not None and figure.table.rows:
            tables += [f"{figure.caption}:", table([figure.table.head, *figure.table.rows])]
    return "\n".join([section.title, *tables]) if tables else ""


def _wrapped(line: str) -> str:
    return textwrap.fill(line, 100, subsequent_indent="  ")
