"""Runtimes beyond ONNX Runtime give the answers of eager mode. Each is skipped where its package is missing."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import trueup
from architectures import images, make

RULES = {
    "no gate": trueup.Evidence(budget=1, strength=0.1, base=0),
    "gated": trueup.Evidence(),
    "closed": trueup.Evidence(least=0),
}

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the exporters' own
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install {package}")


def corrected(rule, name="compact", **options):
    model = make(name)
    return trueup.correct(model, trueup.calibrate(model, images(48).split(16), decide=False), RULES[rule], **options)


def unusual(count=4):
    return torch.cat([images(count, seed=5), images(count, seed=6) * 0.3 - 1])


def assert_same(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert found.argmax(1).equal(wanted.argmax(1))


@needs("openvino")
@pytest.mark.parametrize("rule", RULES)
def test_openvino_reads_the_onnx_file(rule, tmp_path):
    import openvino

    robust, x = corrected(rule), unusual()
    path = str(tmp_path / "robust.onnx")
    free = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(robust, (x,), path, dynamo=True, external_data=False, verbose=False, dynamic_shapes=free)
    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = openvino.compile_model(openvino.convert_model(path), "CPU", hints)
    with torch.inference_mode():
        for batch in (x, x[3:6]):
            assert_same(torch.from_numpy(compiled(batch.numpy())[0].copy()), robust(batch))


@pytest.mark.slow
@needs("executorch")
@pytest.mark.parametrize("rule", RULES)
def test_executorch_runs_it_with_xnnpack(rule, tmp_path):
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    robust, x = corrected(rule), unusual()
    with torch.inference_mode():
        program = torch.export.export(robust, (x,))
        lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
        (tmp_path / "robust.pte").write_bytes(lowered.buffer)
        method = Runtime.get().load_program(str(tmp_path / "robust.pte")).load_method("forward")
        assert_same(method.execute([x])[0].clone(), robust(x))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_a_process_without_trueup_runs_an_aotinductor_package(tmp_path):
    robust, x = corrected("gated", report=True), unusual()
    with torch.inference_mode():
        program = torch.export.export(robust, (x,), dynamic_shapes=({0: torch.export.Dim("batch", max=64)},))
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "robust.pt2"))
        output, report = robust(x)
    np.save(tmp_path / "x.npy", x.numpy())
    code = (
        "import sys; sys.modules |= dict.fromkeys(['trueup', 'numba', 'triton']); import numpy, torch;"
        "run = torch._inductor.aoti_load_package('robust.pt2');"
        "output, report = run(torch.from_numpy(numpy.load('x.npy')));"
        "numpy.savez('found.npz', output=output.numpy(), **{k: v.numpy() for k, v in report.items()})"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, check=True)
    found = np.load(tmp_path / "found.npz")
    assert_same(torch.from_numpy(found["output"]), output)
    for name, wanted in report.items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-4)
