"""The examples run as they are. Those whose package is not installed are skipped, with the reason."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = {
    "timm_classification": ("timm", ["--model", "test_resnet", "--images", "56", "--size", "32"], "[4, 1000]"),
    "torchvision_classification": (
        "torchvision",
        ["--model", "resnet18", "--images", "52", "--size", "32"],
        "[4, 1000]",
    ),
    "torchvision_detection": ("torchvision", ["--images", "8"], "["),
    "torchvision_segmentation": ("torchvision", ["--images", "52", "--size", "32"], "[2, 21, 32, 32]"),
    "hugging_face": ("transformers", ["--images", "56"], "[4, 10]"),
    "lightning_predict": ("lightning", [], "[64]"),
    "two_inputs": ("torch", [], "[4, 10]"),
}
ELSEWHERE = ("own_method", "batch_job", "serve_fastapi")  # run by tests/lab and tests/monitor
# timm's models need nothing of torchvision, which does not import beside every build of torch.
RUN_WITH_TIMM = """
import runpy, sys
sys.path.insert(0, "benchmarks")
from zoo_models.of_timm import import_timm
import_timm()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_every_example_is_run():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*EXAMPLES, *ELSEWHERE}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name):
    package, arguments, printed = EXAMPLES[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; pip install 'trueup-lab[examples]'")
    command = [sys.executable, *(["-c", RUN_WITH_TIMM] if package == "timm" else []), f"examples/{name}.py", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    assert printed in found.stdout.splitlines()[-1]
    assert "Targets(" in found.stdout
