"""The shape of the code: two distributions, imports that point one way, a small surface that explains itself."""

from __future__ import annotations

import ast
import importlib
import inspect
import pydoc
import re
import subprocess
import sys
import tomllib
import zlib
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

import trueup

ROOT = Path(__file__).parents[1]
LIBRARY, LAB = ROOT / "src" / "trueup", ROOT / "lab" / "src" / "trueup_lab"

# From the bottom up; a module imports from below, or from its own layer. Verbs are the files that begin with an
# underscore; "" is the package's own __init__.py.
LAYERS = [
    {"atomic", "functional", "plurals"},
    {"rules"},
    {"kernels"},
    {"targets"},
    {"graph"},
    {"verbs", "decide", "monitor", "report"},
    {"", "cli", "__main__"},
]
LAB_LAYERS = [
    {"devices", "durations", "locks", "page_blocks", "processes", "tables", "tensor_files"},
    {"data", "models"},
    {"training", "evaluation"},
    {"experiments", "performance", "figures", "demo"},
    {"cli"},
    {"", "__main__"},
]
NEEDED = {"torch", "numpy", "safetensors"}
EXPORTERS = {"prometheus_client", "opentelemetry", "pyarrow"}
ONLY_IN = {
    "numba": {"kernels"},
    "triton": {"kernels"},
    "typer": {"cli"},
    "rich": {"cli"},
    "PIL": {"report"},
    **{name: {"monitor"} for name in EXPORTERS},
}
LAB_ONLY_IN = {"matplotlib": {"figures"}, "sklearn": {"data"}, "typer": {"cli"}, "rich": {"cli"}}


def room(package: Path, dotted: str) -> str:
    """The part of a package to which a module belongs, from its dotted name after the package's."""
    name = dotted.split(".")[0]
    if name.startswith("_") and name != "__main__":
        return "verbs"
    return name if (package / name).is_dir() or (package / f"{name}.py").is_file() else ""


def modules(package: Path):
    """Each file of a package, and the room that it is in."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        yield path, room(package, ".".join(parts)) if parts != ("__init__",) else ""


def dotted_name(package: Path, path: Path) -> str:
    """Name under which a file of a package is imported."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path):
    """Dotted names of all that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def crossings(package: Path):
    """Pairs (importer, imported) of rooms of one package, each with the file and the name."""
    for path, importer in modules(package):
        for name in imports(path):
            top, _, rest = name.partition(".")
            if top == package.name:
                yield importer, room(package, rest), f"{path.relative_to(package)} imports {name}"


@pytest.mark.parametrize(("package", "layers"), [(LIBRARY, LAYERS), (LAB, LAB_LAYERS)], ids=["library", "lab"])
def test_imports_point_one_way(package, layers):
    level = {name: number for number, names in enumerate(layers) for name in names}
    assert {importer for _, importer in modules(package)} == set(level), "give a new room its place in the layers"
    upwards = [what for importer, imported, what in crossings(package) if level[importer] < level[imported]]
    assert upwards == []


def runtime_imports(node: ast.AST):
    """Dotted names that a file imports when it runs, also inside functions: not those for the type checker only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from runtime_imports(child)


@pytest.mark.parametrize("package", [LIBRARY, LAB], ids=["library", "lab"])
def test_no_modules_import_each_other(package):
    files = {dotted_name(package, path): path for path, _ in modules(package)}

    def module_of(name: str) -> str:
        """The module itself, or the one that holds the imported name."""
        return name if name in files else name.rpartition(".")[0]

    graph = {
        name: {module_of(found) for found in runtime_imports(ast.parse(path.read_text()))} & set(files)
        for name, path in files.items()
    }
    assert sum(map(len, graph.values())) > len(files), "too few imports were found"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"these modules import each other: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("package", [LIBRARY, LAB], ids=["library", "lab"])
def test_no_module_hides_behind_another_thing_of_its_name(package):
    """`trueup.graph.trace` cannot be both a module and the function that it holds."""
    names = [dotted_name(package, path) for path, _ in modules(package) if path.stem != "__main__"]
    hidden = {}
    for name in names:
        parent, _, stem = name.rpartition(".")
        found = getattr(importlib.import_module(parent), stem, None) if parent else None
        if found is not None and getattr(found, "__name__", None) != name:
            hidden[name] = found
    assert hidden == {}
    assert [name for name in names if name.rpartition(".")[2] in sys.stdlib_module_names] == []


def test_the_command_line_is_imported_by_nothing():
    assert [what for importer, imported, what in crossings(LIBRARY) if imported == "cli" != importer] == [
        "__main__.py imports trueup.cli.main"
    ]


def test_the_library_does_not_know_the_lab():
    knows = [path for path, _ in modules(LIBRARY) if any(name.split(".")[0] == "trueup_lab" for name in imports(path))]
    assert knows == []


@pytest.mark.parametrize(("package", "places"), [(LIBRARY, ONLY_IN), (LAB, LAB_ONLY_IN)], ids=["library", "lab"])
def test_optional_packages_stay_where_they_belong(package, places):
    found = {(name.split(".")[0], place) for path, place in modules(package) for name in imports(path)}
    assert {(name, place) for name, place in found if place not in places.get(name, {place})} == set()
    for name, rooms in places.items():
        assert rooms & {place for other, place in found if other == name}, f"nothing imports {name}"


def test_the_library_imports_only_what_it_depends_on():
    found = {
        name.split(".")[0]
        for path, place in modules(LIBRARY)
        if place not in ("cli", "kernels")
        for name in imports(path)
    }
    assert found - set(sys.stdlib_module_names) - {"trueup"} - EXPORTERS - {"PIL"} <= NEEDED
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {requirement.split(">")[0] for requirement in wanted} == NEEDED


def test_only_graph_knows_torch_fx():
    def knows(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr == "fx"

    users = {
        place
        for path, place in modules(LIBRARY)
        if any(name.startswith("torch.fx") for name in imports(path))
        or any(map(knows, ast.walk(ast.parse(path.read_text()))))
    }
    assert users == {"graph"}


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_importing_trueup_needs_torch_numpy_and_safetensors_only():
    optional = ["typer", "rich", "numba", "matplotlib", "sklearn", "PIL", "scipy", "trueup_lab", *EXPORTERS]
    found = run(
        f"import sys; sys.modules |= dict.fromkeys({optional}); import torch, numpy, safetensors.torch;"
        "before = set(sys.modules); import trueup; [getattr(trueup, name) for name in trueup.__all__];"
        "new = {name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names);"
        "print(sorted(name for name in new if not name.startswith('_')))"
    )
    assert found.stdout.strip() == "['trueup']", found.stderr


def test_importing_trueup_imports_nothing_slow_that_torch_does_not_import_itself():
    """Where these packages are installed, they wait until they are used: a server or a command starts without them."""
    slow = ["numba", "triton", "matplotlib", "onnx", "onnxruntime", "torch._dynamo", "torch._inductor", *EXPORTERS]
    found = run(
        "import sys, torch; before = set(sys.modules); import trueup; [getattr(trueup, n) for n in trueup.__all__];"
        f"print([s for s in {slow} if any(f'{{n}}.'.startswith(f'{{s}}.') for n in set(sys.modules) - before)])"
    )
    assert found.stdout.strip() == "[]", found.stderr


def test_names_are_imported_when_they_are_used():
    found = run(
        "import sys, trueup; before = 'torch' in sys.modules; from trueup import Targets;"
        "print(before, 'torch' in sys.modules, trueup.Targets is Targets, hasattr(trueup, 'nothing'))"
    )
    assert found.stdout.split() == ["False", "True", "True", "False"], found.stderr


def test_every_room_but_the_command_line_is_reached_by_a_dot():
    rooms = sorted(path.parent.name for path in LIBRARY.glob("*/__init__.py"))
    found = run(f"import trueup; print(*(name for name in {rooms} if not hasattr(trueup, name)))")
    assert found.stdout.split() == ["cli"], found.stderr


@pytest.mark.parametrize(
    ("missing", "call", "message"),
    [
        ("typer", "import trueup.cli", "needs typer: pip install 'trueup[cli]'"),
        ("matplotlib", "from trueup_lab.figures.style import pyplot; pyplot()", "pip install 'trueup-lab[figures]'"),
        ("sklearn", "from trueup_lab.data import digits; digits.load('test')", "pip install 'trueup-lab[demo]'"),
        (
            "prometheus_client.core",
            "import trueup; trueup.monitor.PrometheusCollector(lambda: None)",
            "pip install 'trueup[prometheus]'",
        ),
        (
            "opentelemetry.metrics",
            "import trueup; trueup.monitor.observe(None, lambda: None)",
            "pip install 'trueup[opentelemetry]'",
        ),
        (
            "pyarrow",
            "from trueup.monitor.rows import open_rows; open_rows('x.parquet', [])",
            "pip install 'trueup[parquet]'",
        ),
    ],
)
def test_a_missing_extra_says_how_to_get_it(missing, call, message, monkeypatch):
    for name in [missing, *sys.modules]:
        if f"{name}.".startswith("trueup.cli."):
            monkeypatch.delitem(sys.modules, name)
        elif f"{name}.".startswith(f"{missing}."):
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises((ImportError, SystemExit), match=re.escape(message)):
        exec(call, {})


def test_extras_that_messages_name_exist():
    for project, extras in (
        (ROOT, {"cli", "fast", "opentelemetry", "parquet", "prometheus", "report"}),
        (ROOT / "lab", {"figures", "demo"}),
    ):
        known = tomllib.loads((project / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert extras <= set(known)


def test_the_library_is_small_and_holds_code_only():
    """A wheel is these files, compressed."""
    files = [path for path in LIBRARY.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.suffix for path in files} == {".py", ".typed"}
    assert sum(len(zlib.compress(path.read_bytes())) for path in files) < 1 << 18
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert build == {"packages": ["src/trueup"]}


def test_the_public_names_are_exactly_these():
    public = {
        name
        for name in dir(trueup)
        if not name.startswith("_") and not (isinstance(getattr(trueup, name), ModuleType) and name != "functional")
    }
    assert set(trueup.__all__) == public
    assert trueup.__all__ == sorted(trueup.__all__, key=lambda name: (name.islower(), name))
    verbs, rules = {"calibrate", "choose", "correct", "measure", "sites"}, {"Correction", "Evidence"}
    assert public == verbs | rules | {"Corrected", "Monitor", "Shift", "Site", "Targets", "TraceError", "functional"}


@pytest.mark.parametrize("name", ["functional", "functional.evidence", "functional.gate", "functional.paper"])
def test_every_function_of_the_specification_is_exported_and_described(name):
    module = importlib.import_module(f"trueup.{name}")
    own = {
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    }
    assert own <= set(module.__all__)
    assert all(getattr(module, key).__doc__ for key in module.__all__)


@pytest.mark.parametrize("name", ["calibrate", "choose", "correct", "measure", "sites"])
def test_help_shows_every_option_by_name(name):
    shown = pydoc.plain(pydoc.render_doc(getattr(trueup, name)))
    for option in ("select", "activations", "leaves"):
        assert f"{option}: " in shown.split('"""')[0]
        assert inspect.signature(getattr(trueup, name)).parameters[option].kind is inspect.Parameter.KEYWORD_ONLY
    assert "kwargs" not in shown


@pytest.mark.parametrize("name", ["", *trueup.__all__])
def test_every_public_name_begins_with_an_example(name):
    lines = inspect.getdoc(getattr(trueup, name) if name else trueup).splitlines()
    # A block of code is indented after an empty line; the description of an argument follows its name.
    code = [
        line for before, line in pairwise(lines[:8]) if line.startswith(">>> ") or (not before and line[:4] == "    ")
    ]
    assert code, "\n".join(lines[:8])


def opens_text(node: ast.Call) -> bool:
    """Whether a call opens a text file without saying its encoding."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name not in ("open", "read_text", "write_text") or any(word.arg == "encoding" for word in node.keywords):
        return False
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    foreign = isinstance(owner, ast.Name) and owner.id in ("os", "Image", "gzip", "tarfile", "packed", "benchmark")
    texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    binary = any("b" in text for text in texts)
    return not foreign and not binary and (name != "open" or owner is None or bool(texts) or not node.args)


def test_every_text_file_is_opened_with_an_encoding():
    """Without one, Windows takes that of the country."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for part in ("src", "lab/src", "benchmarks", "examples")
        for path in sorted((ROOT / part).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and opens_text(node)
    ]
    assert found == []


def test_no_relative_path_is_stored_or_compared_in_the_systems_own_spelling():
    """`str(path.relative_to(folder))` has backslashes on Windows; `as_posix()` is the same everywhere."""
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted(LAB.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "relative_to(" in line and not any(word in line for word in ("as_posix()", ".parts"))
    ]
    assert found == []
