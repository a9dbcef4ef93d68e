"""A text that is made of several columns: `{title}\\n{body}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter

from shards.errors import UsageError


@dataclass(frozen=True, slots=True)
class Template:
    """What stands before each column, the column, and what stands after the last."""

    before: tuple[tuple[str, str], ...]
    after: str

    @property
    def columns(self) -> list[str]:
        """Each once, in order."""
        return list(dict.fromkeys(column for _, column in self.before))

    def fill(self, columns: Mapping[str, Sequence[str]]) -> list[str]:
        """A text for each row."""
        pieces = [text for text, _ in self.before]
        rows = zip(*(columns[name] for _, name in self.before), strict=True)
        return [self._text(pieces, row) for row in rows]

    def _text(self, pieces: Sequence[str], row: Sequence[str]) -> str:
        # A row that is a failure already may have None in it; nobody reads what becomes of it.
        return "".join([f"{piece}{value}" for piece, value in zip(pieces, row, strict=True)]) + self.after


def parse(text: str) -> Template:
    """`{name}` is a column, `{{` and `}}` are braces. Raises UsageError in one line."""
    try:
        pieces = list(Formatter().parse(text))
    except ValueError as error:
        raise UsageError(f"{text!r}: {error}; a brace of the text itself is written twice") from None
    before: list[tuple[str, str]] = []
    held = ""
    for literal, name, format_, conversion in pieces:
        held += literal
        if name is None:
            continue
        if not name or name.isdecimal() or format_ or conversion:
            raise UsageError(f"{text!r}: write a column as {{name}}, with nothing else between the braces")
        before.append((held, name))
        held = ""
    if not before:
        raise UsageError(f"{text!r}: no column; write one as {{name}}")
    return Template(tuple(before), held)
