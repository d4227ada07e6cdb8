"""A corrected model leaves this process: in ordinary operators, which need no trueup where they run."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
import torch

import trueup
from architectures import images, make
from trueup_lab.models import load, names

WEIGHED = trueup.Evidence(budget=1, strength=0.1, base=0)  # the kind that calibration chooses, less the weights
GATED = trueup.Evidence(budget=0.01, strength=0.05, least=0.2)
CAREFUL = replace(GATED, least=0)
PAPER = trueup.Correction(lambda1=1, lambda2=0.2, location="match", method="sort")
RULES = {"weighed": WEIGHED, "gated": GATED, "careful": CAREFUL, "paper": PAPER}

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the exporter's own
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*dynamic_axes:UserWarning"),
]


def corrected(model, rule):
    return trueup.correct(model, trueup.calibrate(model, images(48).split(16), decide=False), rule)


def unusual(count=5, size=32):
    """Images as in calibration, then images unlike them, in one batch: the gate differs between them."""
    return torch.cat([images(count, size, seed=5), images(count, size, seed=6) * 0.3 - 1])


def written(module, path, example, **shapes):
    torch.onnx.export(module, (example,), path, dynamo=True, external_data=False, verbose=False, **shapes)
    return onnxruntime.InferenceSession(path)


def answers(session, x):
    (name,) = (value.name for value in session.get_inputs())
    return torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def assert_same(found, wanted, atol=1e-4):
    torch.testing.assert_close(found, wanted, atol=atol, rtol=1e-4)
    assert found.argmax(1).equal(wanted.argmax(1))


def ours(program):
    return [str(node.target) for node in program.graph.nodes if "trueup" in str(node.target)]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_onnx_gives_the_same_answers_at_any_batch_and_size(rule, tmp_path):
    robust = corrected(make("compact"), rule)
    free = {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    session = written(robust, tmp_path / "free.onnx", unusual(2), dynamic_shapes=(free,))
    with torch.inference_mode():
        assert (robust(unusual()) - robust.model(unusual())).abs().max() > 0.01  # something is corrected
        for x in (unusual(1), unusual(3, 24), unusual(4, 40)):
            assert_same(answers(session, x), robust(x))
        x[1, 0, 3, 3], x[3, 1, 2, 2] = torch.nan, torch.inf
        found, wanted = answers(session, x), robust(x)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4, equal_nan=True)
        assert found.isfinite().all(dim=1).sum() >= len(x) - 2  # their neighbours are answered


# Channels that come last, tokens, maps without bands, residual sums, ReLU6: what the compact network has not.
@pytest.mark.parametrize(("name", "rule"), [("convnext", GATED), ("vit", WEIGHED), ("mobilenet", WEIGHED)])
def test_onnx_gives_the_same_answers_on_other_architectures(name, rule, tmp_path):
    robust = corrected(make(name), rule)
    session = written(robust, tmp_path / "fixed.onnx", unusual())
    with torch.inference_mode():
        assert_same(answers(session, unusual()), robust(unusual()))


@pytest.mark.parametrize("which", [True, "all"])
def test_onnx_reports_what_eager_mode_reports_and_a_monitor_takes_it(which, tmp_path):
    model = make("compact")
    targets = trueup.calibrate(model, images(48).split(16), decide=False)
    robust = trueup.correct(model, targets, GATED, report=which)
    names = ["logits", "p", "gate", "evidence"]
    free = ({0: torch.export.Dim("batch")},)
    session = written(robust, tmp_path / "robust.onnx", unusual(), dynamic_shapes=free, output_names=names)
    assert [output.name for output in session.get_outputs()] == names
    here = trueup.Monitor(robust, unusual=0.05, clock=lambda: 0.0)
    there = trueup.Monitor(targets, report=which, unusual=0.05, clock=lambda: 0.0)
    with torch.inference_mode():
        for x in (unusual(1), unusual(4)):
            logits, report = robust(x)
            found = dict(zip(names, session.run(None, {session.get_inputs()[0].name: x.numpy()}), strict=True))
            assert_same(torch.from_numpy(found.pop("logits")), logits)
            for name, value in found.items():
                np.testing.assert_allclose(value, report[name].numpy(), rtol=1e-4, atol=1e-4)
            here.update(report)
            there.update(found)
    assert there.snapshot().histogram == here.snapshot().histogram
    assert there.snapshot().evidence == pytest.approx(here.snapshot().evidence, rel=1e-4)


def test_a_process_without_trueup_runs_what_was_exported(tmp_path):
    robust, x = corrected(make("compact"), GATED), unusual()
    written(robust, tmp_path / "robust.onnx", x)
    torch.export.save(torch.export.export(robust, (x,)), tmp_path / "robust.pt2")
    np.save(tmp_path / "x.npy", x.numpy())
    code = (
        "import sys; sys.modules |= dict.fromkeys(['trueup', 'numba', 'triton']); import numpy, torch, onnxruntime;"
        "x = numpy.load('x.npy');"
        "numpy.save('torch.npy', torch.export.load('robust.pt2').module()(torch.from_numpy(x)).detach().numpy());"
        "session = onnxruntime.InferenceSession('robust.onnx');"
        "numpy.save('onnx.npy', session.run(None, {session.get_inputs()[0].name: x})[0])"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    with torch.inference_mode():
        for name in ("torch", "onnx"):
            assert_same(torch.from_numpy(np.load(tmp_path / f"{name}.npy")), robust(x))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_an_exported_program_holds_no_operator_of_ours(rule, strict):
    robust = corrected(make("compact"), rule)
    program = torch.export.export(robust, (unusual(),), strict=strict)
    assert ours(program) == []
    assert "searchsorted" not in str(program.graph)
    if isinstance(rule, trueup.Evidence):
        assert not any("float64" in str(node.meta.get("val")) for node in program.graph.nodes if node.users)


@pytest.mark.parametrize("report", [False, "all"])
@pytest.mark.parametrize("rule", [WEIGHED, GATED, PAPER], ids=["weighed", "gated", "paper"])
def test_an_exported_program_casts_nothing_to_the_precision_that_it_has(rule, report):
    """Each such cast leaves two nodes in the graph: it took a tenth of the time of exporting."""
    model = make("compact")
    targets = trueup.calibrate(model, images(48).split(16), decide=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "correct: this rule corrects")
        robust = trueup.correct(model, targets, rule, report=report)
    casts = [
        node
        for node in torch.export.export(robust, (unusual(),)).graph.nodes
        if str(node.target).startswith(("aten.to.", "aten._to_copy")) and isinstance(node.args[0], torch.fx.Node)
    ]
    assert [node for node in casts if node.meta["val"].dtype == node.args[0].meta["val"].dtype] == []


def test_what_is_compiled_on_a_cpu_holds_no_operator_of_ours():
    robust, seen = corrected(make("compact"), GATED), []

    def keep(graph, _):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    with torch.inference_mode():
        found = torch.compile(robust, fullgraph=True, backend=keep)(unusual())
        assert_same(found, robust(unusual()))
    assert seen
    assert [name for name in seen if "trueup" in name] == []


def test_a_traced_module_runs_without_trueup(tmp_path):
    robust, x = corrected(make("resnet"), GATED), unusual()
    with torch.inference_mode():
        traced = torch.jit.trace(robust, x)
        assert "aten::avg_pool2d" not in str(traced.inlined_graph)  # took half of the time
        traced.save(tmp_path / "robust.pt")
        np.save(tmp_path / "x.npy", x.numpy())
        code = (
            "import sys; sys.modules |= dict.fromkeys(['trueup', 'numba']); import numpy, torch;"
            "found = torch.jit.load('robust.pt')(torch.from_numpy(numpy.load('x.npy')));"
            "numpy.save('found.npy', found.detach().numpy())"
        )
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, check=True)
        assert_same(torch.from_numpy(np.load(tmp_path / "found.npy")), robust(x))


@pytest.mark.parametrize("which", [True, "all"])
def test_a_traced_module_reports_without_a_warning_of_the_tracer(which, tmp_path):
    model = make("resnet")
    targets = trueup.calibrate(model, images(48).split(16), decide=False)
    robust = trueup.correct(model, targets, GATED, report=which)
    with torch.inference_mode():
        with warnings.catch_warnings():
            warnings.simplefilter("error", torch.jit.TracerWarning)
            torch.jit.trace(robust, unusual(), strict=False).save(tmp_path / "robust.pt")
        for x in (unusual(), unusual(2)):
            (output, found), (wanted, report) = torch.jit.load(tmp_path / "robust.pt")(x), robust(x)
            assert_same(output, wanted)
            assert found.keys() == report.keys()
            torch.testing.assert_close(found["p"], report["p"], rtol=0, atol=1e-5)
            torch.testing.assert_close(found["evidence"], report["evidence"], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found["gate"], report["gate"], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", names())
def test_every_trained_network_goes_to_onnx(name, rule, tmp_path):
    model = load(name)
    channels = next(p for p in model.parameters() if p.dim() == 4).shape[1]
    size = 28 if "mnist" in name else 8 if "digits" in name else 32
    clean = images(48, size)[:, :channels]
    robust = trueup.correct(model, trueup.calibrate(model, clean.split(16), decide=False), rule)
    x = unusual(5, size)[:, :channels]
    session = written(robust, tmp_path / "robust.onnx", x, dynamic_shapes=({0: torch.export.Dim("batch")},))
    with torch.inference_mode():
        found, wanted = answers(session, x[:3]), robust(x[:3])
    if isinstance(rule, trueup.Evidence):
        # A gate that ranks among two dozen images is steep, and multiplies the rounding of the convolutions before it.
        assert_same(found, wanted, 1e-4 if rule is WEIGHED else 5e-3)
    else:  # discontinuous at zero: how far single logits differ, and close answers with them, depends on the processor
        assert (found - wanted).abs().mean() < 0.1
