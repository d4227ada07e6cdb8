"""Changes to pages when they are read, so that the same text serves the repository's viewer, doctest and the site.

- A page that includes a file of the repository's root has its text, with links as they are meant there.
- Links to files of the repository lead to the repository's viewer.
- The blank line that ends the output of an example, for doctest, is not shown.
- A line of the navigation that ends in `?` counts only if the page exists.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = re.compile(r"^(`{3,})pycon\n(.*?)\n+\1$", re.DOTALL | re.MULTILINE)
INCLUDED = re.compile(r"^```\{include\} \.\./(\S+)\n```$", re.MULTILINE)
LINK = re.compile(r"\]\((\.\./[^)\s]+)\)")
MAYBE = re.compile(r"^([\w-]+)\?\n", re.MULTILINE)
PICTURES = {".png", ".svg"}  # these are copied into the site


def setup(app: Any) -> dict[str, bool]:
    """Change each page when it is read."""
    app.connect("source-read", _change)
    return {"parallel_read_safe": True}


def _change(app: Any, page: str, source: list[str]) -> None:
    folder = Path(app.env.doc2path(page)).parent
    text = INCLUDED.sub(lambda name: _included(app, name[1]), source[0])
    text = LINK.sub(lambda link: f"]({_address(app, page, folder, link[1])})", text)
    text = EXAMPLE.sub(r"\1pycon\n\2\n\1", text)
    source[0] = MAYBE.sub(lambda name: f"{name[1]}\n" if (folder / f"{name[1]}.md").exists() else "", text)


def _included(app: Any, name: str) -> str:
    """Text of a file in the repository's root, with relative links as from a page."""
    app.env.note_dependency(str(ROOT / name))
    return re.sub(r"\]\((?!\w+:|#)", "](../", (ROOT / name).read_text(encoding="utf-8"))


def _address(app: Any, page: str, folder: Path, link: str) -> str:
    path = (folder / link.partition("#")[0]).resolve()
    if path.suffix in PICTURES:
        return link
    if path.parent == folder.resolve() and path.suffix == ".md":
        return path.name + link[len(link.partition("#")[0]) :]
    if not path.exists():
        from sphinx.util import logging

        logging.getLogger(__name__).warning("%s links to %s, which does not exist", page, link)
    kind = "tree" if path.is_dir() else "blob"
    options = app.config.html_theme_options
    return f"{options['source_repository']}/{kind}/{options['source_branch']}/{path.relative_to(ROOT).as_posix()}"
