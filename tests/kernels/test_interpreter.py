"""All tests of Triton kernels in Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.backends import INTERPRETED

HERE = Path(__file__).parent


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
@pytest.mark.parametrize("files", ["test_cuda_maps", "not test_cuda_maps"])  # on a core each
def test_triton_kernels_meet_the_specification_in_the_interpreter(files):
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            *("-k", f"triton and {files} and not test_interpreter", "-m", "not gpu", str(HERE)),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert "passed" in (last := run.stdout.splitlines()[-1]), last
    assert "skipped" not in last
