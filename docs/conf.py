"""Settings of the documentation site: `make docs` builds it into site/."""

from __future__ import annotations

import sys
from pathlib import Path

import trueup

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "trueup"
author = "the trueup authors"
copyright = "the trueup authors, MIT licence"  # noqa: A001  # the name that Sphinx reads
release = version = trueup.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "commands", "docstrings", "examples", "pages", "public_names"]
exclude_patterns = ["extensions"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
highlight_language = "none"  # a block says if it is code
default_role = "py:obj"  # `name` in a docstring is a link where the name is documented, and code elsewhere
python_maximum_signature_line_length = 90

html_theme = "furo"
html_title = "trueup"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {
    "source_repository": "https://github.com/trueup-ml/trueup",
    "source_branch": "main",
    "source_directory": "docs/",
}
