"""Check the numbers in the prose of pages.

    python benchmarks/page_numbers.py     # lists sentences that a page lacks, and numbers that nothing accounts for

A number of a result stands on a page in one of four ways: inside a block that a script writes (`<!-- NAME -->`); in a
sentence of benchmarks/page_claims.py; between `<!-- history -->` and `<!-- /history -->` (measured once, no file has it
any more); or between `<!-- given -->` and `<!-- /given -->` (an aim, a setting or a bound, not a measurement).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from page_claims import claims
from page_tables import DOCS, ROOT

_BLOCK = re.compile(r"<!-- (?!/)([^>]*?)(?:: start)? -->\n.*?<!-- (?:/\1|\1: end) -->", re.DOTALL)
_INLINE = re.compile(r"<!-- (given|history) -->.*?<!-- /\1 -->", re.DOTALL)
_VERSION = re.compile(r"\b(?:[Vv]ersion|torch|default of|Python)\s+\d+\.\d+")
_CODE = re.compile(r"^(`{3,4})[^\n]*\n.*?^\1$|^    [^\n]*$|`[^`\n]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(
    r"(?<![\w.^])[-+]?\d[\d,]*\.\d+(?!\w)|(?<![\w.^])\d[\d,]*(?= (?:%|points?\b|times\b|MB|ms|images/s))"
)


def missing(text: str, sentences: Sequence[str]) -> list[str]:
    """Return the sentences that a page does not have, apart from line breaks."""
    plain = _plain(text)
    return [sentence for sentence in sentences if _plain(sentence) not in plain]


def unaccounted(text: str, sentences: Sequence[str]) -> list[str]:
    r"""Return the numbers of a page that have no source, with their lines.

    >>> unaccounted("a gain of 1.5 points\n<!-- given -->\nan aim of 2.5\n<!-- /given -->\n", [])
    ['line 1: 1.5']
    >>> unaccounted("a gain of\n1.5 points", ["gain of 1.5"])
    []
    """
    for pattern in (_BLOCK, _INLINE):
        text = pattern.sub(_blank, text)
    for sentence in sentences:
        words = r"\s+".join(re.escape(word) for word in sentence.split())
        text = re.sub(words, _blank, text)
    for pattern in (_CODE, _VERSION):
        text = pattern.sub(_blank, text)
    return [f"line {text[: m.start()].count(chr(10)) + 1}: {m[0]}" for m in _NUMBER.finditer(text)]


def _plain(text: str) -> str:
    return " ".join(text.split())


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def faults() -> list[str]:
    """Return all faults of the checked pages."""
    wrong = []
    pages = {DOCS / f"{page}.md": sentences for page, sentences in claims().items()} | {ROOT / "README.md": []}
    for path, sentences in pages.items():
        text = path.read_text(encoding="utf-8")
        wrong += [f"{path.name} lacks: {sentence}" for sentence in missing(text, sentences)]
        wrong += [f"{path.name}, {number}: nothing accounts for it" for number in unaccounted(text, sentences)]
    return wrong


if __name__ == "__main__":
    found = faults()
    print("\n".join(found) or "All numbers are accounted for.")
    sys.exit(1 if found else 0)
