"""Docstrings of this project as reStructuredText: indented lines are code, `name: meaning` is a list of arguments.

The help of commands becomes Markdown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

ARGUMENT = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)")


def setup(app: Any) -> dict[str, bool]:
    """Convert each docstring before Sphinx reads it."""
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True}


def help_as_markdown(text: str) -> str:
    """Help of a command or an option: options become code, since plain text would turn `--` into a dash."""
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    return re.sub(r"--[a-z][\w-]*", r"`\g<0>`", re.sub(r"[<|]", r"\\\g<0>", "\n\n".join(paragraphs)))


def _process(_app: Any, _what: str, _name: str, _thing: Any, _options: Any, lines: list[str]) -> None:
    lines[:] = list(converted(lines))


def converted(lines: list[str]) -> Iterator[str]:
    """Yield the lines of a docstring with directives for code and bullets for arguments."""
    before, mode = "", ""
    for number, line in enumerate(lines):
        after = lines[number + 1] if number + 1 < len(lines) else ""
        if not line.strip():
            mode = mode if after.startswith("  ") and mode == "code" else ""
        elif line.startswith("    ") and not before.strip() and mode == "":
            mode = "code"
            yield ".. code-block:: python"
            yield ""
        elif match := _argument(line, after, mode):
            if mode != "argument" and before.strip():
                yield ""
            mode = "argument"
            line = f"* **{match[1]}**: {line[match.end() :]}"
        elif mode == "argument":
            line = f"  {line.strip()}"
        elif not line.startswith("  "):
            mode = ""
        yield line
        before = line


def _argument(line: str, after: str, mode: str) -> re.Match[str] | None:
    """Match a line that explains an argument: others follow or precede it, or its text is continued."""
    match = ARGUMENT.match(line)
    if match is None or not (mode == "argument" or after.startswith("    ") or ARGUMENT.match(after)):
        return None
    return match
