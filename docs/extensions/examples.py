"""`gallery`: every script in examples/, and what it prints. Scripts run while the site is built."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
# Scripts that run by themselves, on few images, with the package that each needs.
RUN = {
    "hugging_face": ("transformers", ["--images", "56"]),
    "lightning_predict": ("lightning", []),
    "timm_classification": ("timm", ["--model", "test_resnet", "--images", "56", "--size", "32"]),
    "torchvision_classification": ("torchvision", ["--model", "squeezenet1_1", "--images", "56"]),
    "torchvision_detection": ("torchvision", ["--images", "8"]),
    "torchvision_segmentation": ("torchvision", ["--images", "8"]),
    "two_inputs": ("torch", []),
}


class Gallery(SphinxDirective):
    """A section per script: its title from its docstring, the script, and its output."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        return [self._section(path) for path in sorted((ROOT / "examples").glob("*.py"))]

    def _section(self, path: Path) -> nodes.Node:
        text = path.read_text(encoding="utf-8")
        self.env.note_dependency(str(path))
        title = (ast.get_docstring(ast.parse(text)) or path.stem).partition("\n")[0].rstrip(".")
        section = nodes.section(ids=[nodes.make_id(path.stem)], names=[path.stem])
        section += nodes.title(text=title)
        self.state.document.note_implicit_target(section, section)
        section += nodes.paragraph("", "", nodes.literal(text=f"examples/{path.name}"))
        section += nodes.literal_block(text, text, language="python")
        if path.stem in RUN:
            section += self._output(path, *RUN[path.stem])
        return section

    def _output(self, path: Path, package: str, arguments: list[str]) -> nodes.Node:
        if _python("-c", f"import {package}").returncode:
            return nodes.paragraph(text=f"(Not run when this page was made, for want of {package}.)")
        done = _python(str(path), *arguments)
        if done.returncode:
            logging.getLogger(__name__).warning("%s failed: %s", path.name, done.stderr[-2000:])
        output = f"$ python examples/{' '.join([path.name, *arguments])}\n{done.stdout}"
        return nodes.literal_block(output, output, language="console")


def setup(app: Any) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("gallery", Gallery)
    return {"parallel_read_safe": True}


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
