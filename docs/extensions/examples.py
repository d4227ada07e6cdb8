"""`example`: a script of the repository with what it prints. It is run while the site is built."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]


class Example(SphinxDirective):
    """Show a script and its output; without its package, only the script."""

    required_arguments = 1
    option_spec = {"arguments": directives.unchanged}  # noqa: RUF012  # docutils declares it so

    def run(self) -> list[nodes.Node]:
        """Return the script and its output as two blocks."""
        path = ROOT / self.arguments[0]
        arguments = shlex.split(self.options.get("arguments", ""))
        text = path.read_text(encoding="utf-8")
        self.env.note_dependency(str(path))
        script = nodes.literal_block(text, text, language="python")
        command = " ".join(["python", self.arguments[0], *arguments])
        done = subprocess.run(
            [sys.executable, str(path), *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode and "Error: No module named" in done.stderr:
            missing = done.stderr.rpartition("'")[0].rpartition("'")[2]
            return [script, nodes.paragraph(text=f"(Not run when this page was made: it needs {missing}.)")]
        if done.returncode:
            logging.getLogger(__name__).warning(
                "%s failed: %s", command, done.stderr[-2000:], location=self.get_location()
            )
        if not done.stdout:
            return [script]
        output = f"$ {command}\n{done.stdout}"
        return [script, nodes.literal_block(output, output, language="console")]


def setup(app: Any) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("example", Example)
    return {"parallel_read_safe": True}
