"""The shape of the code: imports point one way, heavy packages stay where they belong, the surface is small."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trueup

SOURCE = Path(trueup.__file__).parent

# From the bottom up. A module imports from its own layer's modules only within one package, and else from below.
# `models`, `data` and `training` stand apart from the core: they meet it in the demonstration and in evaluation.
LAYERS = {
    "activations": 0,
    "normalisations": 0,
    "ranks": 0,
    "atomic": 0,
    "batches": 0,
    "correction": 0,
    "evidence": 0,
    "channels": 1,
    "functional": 1,
    "gate": 1,
    "kernels": 2,
    "fingerprint": 2,
    "targets": 3,
    "graph": 4,
    "probe": 5,
    "tally": 5,
    "_sites": 6,
    "_calibrate": 6,
    "_correct": 6,
    "_measure": 6,
    "_choose": 7,
    "": 8,  # trueup/__init__.py
    "demo": 9,
    "evaluation": 9,
    "performance": 10,
    "experiments": 11,
    "figures": 12,
    "cli": 13,
    "__main__": 14,
}
APART = {"atomic": 0, "data": 1, "models": 1, "training": 2} | {k: v for k, v in LAYERS.items() if v >= 9}
OPTIONAL = {
    "matplotlib": {"figures"},
    "numba": {"kernels"},
    "triton": {"kernels"},
    "sklearn": {"data"},
    "PIL": {"data"},
    "typer": {"cli"},
    "rich": {"cli"},
}


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        yield path, (parts[0] if parts else "")


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            if node.module == "trueup":
                yield from (f"trueup.{alias.name}" for alias in node.names)
            else:
                yield node.module


def allowed(importer: str, imported: str) -> bool:
    """Whether one top-level module of the package may import another."""
    if importer == imported:
        return True
    known = {**LAYERS, **APART}
    for order in (LAYERS, APART):
        if importer in order and imported in order:
            return order[importer] > order[imported]
    assert importer in known, f"{importer}: give it a place in LAYERS or APART"
    return False


@pytest.mark.parametrize(
    ("path", "module"), list(modules()), ids=lambda value: str(value) if isinstance(value, str) else value.name
)
def test_imports_point_one_way(path, module):
    for name in imports(path):
        if name.split(".")[0] != "trueup":
            continue
        parts = name.split(".")[1:]
        imported = parts[0] if parts and ((SOURCE / parts[0]).is_dir() or (SOURCE / f"{parts[0]}.py").is_file()) else ""
        assert allowed(module, imported), f"{module or 'trueup'} must not import {name}"


@pytest.mark.parametrize(
    ("path", "module"), list(modules()), ids=lambda value: str(value) if isinstance(value, str) else value.name
)
def test_optional_packages_stay_where_they_belong(path, module):
    for name in imports(path):
        package = name.split(".")[0]
        assert module in OPTIONAL.get(package, {module}), f"{module} must not import {package}"


def test_only_graph_knows_torch_fx():
    def knows(node: ast.AST) -> bool:
        if isinstance(node, ast.ImportFrom):
            return (node.module or "").startswith("torch.fx") or (
                node.module == "torch" and any(alias.name == "fx" for alias in node.names)
            )
        if isinstance(node, ast.Import):
            return any(alias.name.startswith("torch.fx") for alias in node.names)
        return isinstance(node, ast.Attribute) and node.attr == "fx"

    users = {module for path, module in modules() if any(map(knows, ast.walk(ast.parse(path.read_text()))))}
    assert users == {"graph"}


def test_importing_trueup_needs_torch_numpy_and_safetensors_only():
    code = (
        "import sys, torch, numpy, safetensors.torch; before = set(sys.modules); import trueup;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names);"
        "new = {n for n in new if n not in ('trueup', 'torch', 'numpy', 'safetensors') and not n.startswith('_')};"
        "print(sorted(new))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_public_names_are_those_of_the_design():
    assert set(trueup.__all__) >= {"calibrate", "correct", "measure", "sites", "Targets", "Correction", "functional"}
    assert all(hasattr(trueup, name) for name in trueup.__all__)


@pytest.mark.parametrize(
    ("missing", "call", "message"),
    [
        ("typer", "import trueup.cli", "needs typer: pip install 'trueup[cli]'"),
        ("matplotlib", "from trueup_lab.figures.style import pyplot; pyplot()", "pip install 'trueup-lab[figures]'"),
        ("sklearn", "from trueup_lab.data import digits; digits.load('test')", "pip install 'trueup-lab[demo]'"),
    ],
)
def test_a_missing_extra_says_how_to_get_it(missing, call, message):
    code = f"import sys; sys.modules[{missing!r}] = None; {call}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert message in run.stderr
