"""Docstrings as the reference shows them: `a[4][b]` is an index there, not a link from Markdown to a page named `b`."""

import re
from typing import Any

from griffe import Extension, Object

CODE_OR_INDEX = re.compile(r"(`[^`]*`)|\]\[")


class PlainIndices(Extension):
    """Escapes what Markdown would take for a link, outside code."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Each docstring once."""
        if obj.docstring is not None:
            obj.docstring.value = "\n".join(map(escaped, obj.docstring.value.splitlines()))


def escaped(line: str) -> str:
    """A line of a docstring; indented ones are code already."""
    return line if line.startswith("    ") else CODE_OR_INDEX.sub(lambda found: found[1] or r"]\[", line)
