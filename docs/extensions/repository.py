"""Links from a page to a file of the repository: they lead to the file in the repository's viewer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\((\.\./[^)\s]+)\)")
PICTURES = {".png", ".svg"}  # these are copied into the site


def setup(app: Any) -> dict[str, bool]:
    """Rewrite links when a page is read."""
    app.connect("source-read", _rewrite)
    return {"parallel_read_safe": True}


def _rewrite(app: Any, page: str, source: list[str]) -> None:
    folder = Path(app.env.doc2path(page)).parent
    source[0] = LINK.sub(lambda link: f"]({_address(app, page, folder, link[1])})", source[0])


def _address(app: Any, page: str, folder: Path, link: str) -> str:
    path = (folder / link.partition("#")[0]).resolve()
    if path.suffix in PICTURES:
        return link
    if not path.exists():
        from sphinx.util import logging

        logging.getLogger(__name__).warning("%s links to %s, which does not exist", page, link)
    kind = "tree" if path.is_dir() else "blob"
    options = app.config.html_theme_options
    return f"{options['source_repository']}/{kind}/{options['source_branch']}/{path.relative_to(ROOT).as_posix()}"
