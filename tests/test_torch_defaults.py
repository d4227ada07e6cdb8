"""torch's default dtype and default device are for the user's own tensors: no verb may depend on them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import trueup
from test_decision import pictures, trained  # noqa: F401  # a fixture

RULES = (None, trueup.Evidence(), trueup.Evidence(budget=1, base=0), trueup.Correction())


@pytest.fixture(params=["double", "elsewhere"])
def other_defaults(request):
    """Set another default dtype, or a default device on which no result could be read."""
    if request.param == "double":
        torch.set_default_dtype(torch.float64)
    else:
        torch.set_default_device("meta")
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def results(model, path, clean: Tensor, shifted: Tensor) -> tuple[trueup.Targets, list[Tensor]]:
    """What every verb returns for a model, with and without gradients."""
    targets = trueup.calibrate(model, clean.split(60))
    targets.save(path)
    targets = trueup.Targets.load(path) + trueup.calibrate(model, shifted.split(60), decide=False)
    found = []
    for rule in RULES:
        robust = trueup.correct(model, targets, rule)
        found.append(robust(shifted).detach())
        with torch.inference_mode():
            found.append(robust(shifted))
    output, report = trueup.correct(model, targets, report=True)(shifted)
    monitor = trueup.Monitor(targets, unusual=0.1)
    monitor.update(report)
    assert monitor.snapshot().images == len(shifted)
    shift = trueup.measure(model, targets, shifted)
    return targets, [*found, output.detach(), *report.values(), shift.distance, shift.evidence, shift.image_rank]


@pytest.fixture(scope="module")
def usual(trained, tmp_path_factory):  # noqa: F811
    clean = pictures(120, 2)[0]
    return clean, 0.5 * clean + 1, results(trained, tmp_path_factory.mktemp("usual") / "t", clean, 0.5 * clean + 1)


def test_results_do_not_depend_on_torchs_defaults(trained, usual, other_defaults, tmp_path):  # noqa: F811
    clean, shifted, (targets, values) = usual
    found, others = results(trained, tmp_path / "t", clean, shifted)
    assert found == targets
    for value, other in zip(values, others, strict=True):
        assert value.dtype == other.dtype
        assert torch.equal(value, other)
