"""Blocks of a page that are written from files: the text between `<!-- NAME -->` and `<!-- /NAME -->`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def fill(text: str, blocks: Mapping[str, str], page: str = "the page") -> str:
    r"""Return the text with each block replaced. Raises ValueError unless the text has every block once.

    >>> fill("a\n<!-- n -->\nold\n<!-- /n -->\n", {"n": "new\n"})
    'a\n<!-- n -->\nnew\n<!-- /n -->\n'
    """
    for name, block in blocks.items():
        marked = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)"
        text, count = re.subn(marked, lambda m, b=block: m[1] + b + m[2], text, flags=re.DOTALL)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"{page} has {count} blocks <!-- {name} -->, expected one")
    return text


def rewrite(path: Path, blocks: Mapping[str, str]) -> None:
    """Replace the blocks of the page at `path`."""
    text = fill(path.read_text(encoding="utf-8"), blocks, str(path))
    path.write_text(text, encoding="utf-8", newline="\n")
