"""Check the built packages, and try the wheels in an empty environment.

python benchmarks/try_packages.py dist
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOREIGN = ("tests", "results", "benchmarks", "docs", "examples", ".github")  # belong into no package
THREE_LINES = """
import sys, torch, trueup
torch.manual_seed(0)
layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()]
model = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 4)).eval()
clean_loader = torch.randn(60, 3, 16, 16).split(20)

targets = trueup.calibrate(model, clean_loader)
robust = trueup.correct(model, targets)
logits = robust(torch.randn(2, 3, 16, 16))

assert logits.shape == (2, 4) and logits.isfinite().all()
assert sys.prefix in trueup.__file__
print(trueup.__version__, targets, sep="\\n")
"""


def main() -> None:
    """Check all packages of a folder, then install them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--contents-only", action="store_true", help="install nothing")
    asked = parser.parse_args()
    packages = {name: _only(asked.folder, name) for name in ("trueup-*.whl", "trueup_lab-*.whl")}
    for wheel in packages.values():
        with zipfile.ZipFile(wheel) as package:
            check_wheel(package.namelist())
    for name in ("trueup-*.tar.gz", "trueup_lab-*.tar.gz"):
        with tarfile.open(_only(asked.folder, name)) as source:
            check_sdist(source.getnames())
    if not asked.contents_only:
        try_wheels(*packages.values())


def check_wheel(names: list[str]) -> None:
    """Fail unless a wheel holds one typed package with its licence, and nothing else."""
    package = next(name for name in names if name.endswith("/py.typed")).partition("/")[0]
    strangers = [name for name in names if not name.startswith((f"{package}/", f"{package}-"))]
    if strangers or not any(name.endswith("licenses/LICENSE") for name in names):
        raise SystemExit(f"the wheel of {package} lacks its licence, or holds {strangers}")


def check_sdist(names: list[str]) -> None:
    """Fail if a source distribution holds what belongs to the repository only, or lacks its licence."""
    inside = {name.partition("/")[2] for name in names}
    strangers = sorted(name for name in inside if name.partition("/")[0] in FOREIGN)
    if strangers or not {"LICENSE", "README.md", "PKG-INFO", "pyproject.toml"} <= inside:
        raise SystemExit(f"a source distribution lacks its licence or readme, or holds {strangers[:5]}")


def try_wheels(library: Path, lab: Path) -> None:
    """Install the library alone and run the three lines, then the lab and its commands."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        install += ["--constraint", ROOT / "constraints.txt", "--find-links", library.parent]
        _run(*install, library)
        _run(python, "-I", "-c", THREE_LINES, folder=folder)
        _run(*install, lab)
        _run(python, "-I", "-m", "trueup_lab", "--help", folder=folder)


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"expected one {pattern} in {folder}, found {len(found)}; run make dist")
    return found[0].resolve()


def _run(*command: object, folder: str | None = None) -> None:
    subprocess.run([str(part) for part in command], cwd=folder, check=True)


if __name__ == "__main__":
    main()
