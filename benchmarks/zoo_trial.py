"""One trial of the library on a model of the zoo: a row of results/zoo.csv."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import trueup
from trueup.graph import Inputs, is_list_of_images, tensors_in
from zoo_models import ZooCase

COLUMNS = [
    *("source", "family", "model", "versions", "input", "parameters", "traced", "why"),
    *("activations", "norms", "folded", "left", "evidence", "correction", "finite", "state_dict"),
    *("own_difference", "evidence_difference", "correction_difference", "compiles", "exports", "seconds", "error"),
]
LARGEST = 500_000_000  # parameters
EVIDENCE = trueup.Evidence(budget=1.0, strength=0.05)


def measure(case: ZooCase, *, device: str = "cpu") -> dict[str, Any]:
    """Calibrate a model, correct it by both rules, and check the promises on the corrected modules."""
    row: dict[str, Any] = {"source": case.source, "family": case.family, "model": case.model, "error": ""}
    start = time.perf_counter()
    try:
        model, inputs = _built(case, device, row)
        own = output(model, inputs)
        row["own_difference"] = alone_and_together(model, inputs)
        before = {key: value.clone() for key, value in tensors_of(model).items()}
        targets = _calibrated(model, inputs)
        row |= {"traced": targets.sites.traced, "why": targets.sites.why}
        row |= {"activations": len(targets.activations), "norms": len(targets.norms)}
        row |= {"folded": sum(site.folded for site in targets.sites), "left": " ".join(targets.sites.left)}
        row["state_dict"], row["finite"] = True, True
        for name, rule in _rules(targets).items():
            if rule is None:
                row[name] = "no site"
                continue
            robust = trueup.correct(model, targets, rule)
            out = output(robust, inputs)
            row[name] = "runs" if distance(out, own) > 0 else "changes nothing"
            row["finite"] &= all(t.isfinite().all().item() for t in tensors_in(out)) or not all(
                t.isfinite().all().item() for t in tensors_in(own)
            )
            row[f"{name}_difference"] = alone_and_together(robust, inputs)
            same = tensors_of(robust)
            row["state_dict"] &= same.keys() == before.keys() and all(same[k].equal(before[k]) for k in before)
        row["state_dict"] &= all(value.equal(before[key]) for key, value in tensors_of(model).items())
    except Exception as error:
        row["error"] = in_short(error)
    row["seconds"] = round(time.perf_counter() - start, 1)
    return row


def portability(case: ZooCase, *, device: str = "cpu") -> dict[str, Any]:
    """Whether the corrected module compiles as one graph and exports where the model does."""
    row: dict[str, Any] = {"source": case.source, "family": case.family, "model": case.model}
    try:
        model, inputs = _built(case, device, {})
        targets = _calibrated(model, inputs)
        rule = next(rule for rule in _rules(targets).values() if rule is not None)
        robust = trueup.correct(model, targets, rule)
        row["compiles"] = compare(compiles, model, robust, inputs)
        row["exports"] = compare(exports, model, robust, inputs)
    except Exception as error:
        row["compiles"] = row["exports"] = f"no: {in_short(error)}"
    return row


def in_short(error: Exception) -> str:
    """Describe an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def _built(case: ZooCase, device: str, row: dict[str, Any]) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    model, inputs, row["input"] = case.make()
    row["parameters"] = sum(p.numel() for p in model.parameters())
    if row["parameters"] > LARGEST:
        raise MemoryError("too large to be tried")
    without_constants(model)
    model, inputs = model.eval().to(device), inputs.to(torch.device(device))
    settle(model, inputs)
    return model, inputs


def _calibrated(model: nn.Module, inputs: Inputs) -> trueup.Targets:
    batch = dict(inputs.kwargs) if inputs.kwargs else inputs.args
    return trueup.calibrate(model, [batch], decide=False, transform=lambda given: given)


def _rules(targets: trueup.Targets) -> dict[str, trueup.Evidence | trueup.Correction | None]:
    """Both rules; None for one without a site in the model."""
    return {
        "evidence": EVIDENCE if targets.norms else None,
        "correction": trueup.Correction() if targets.activations else None,
    }


def settle(model: nn.Module, inputs: Inputs) -> None:
    """Give batch norms the statistics of the inputs.

    With random weights, activations otherwise grow or vanish from layer to layer, until a detector finds nothing.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.train()
        norm.momentum = None  # the mean of all calls
    if norms:
        output(model, inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum


def without_constants(model: nn.Module) -> None:
    """Make constant parameters random: a gate that starts at zero would hide what is behind it."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel() > 1 and not parameter.std():
                parameter.add_(0.1 * torch.randn_like(parameter))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Tensors of a state_dict."""
    return {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}


def output(module: nn.Module, inputs: Inputs) -> Any:
    """Output on a copy of the inputs."""
    given = inputs.to(None, copy=True)
    with torch.no_grad():
        return module(*given.args, **given.kwargs)


def alone_and_together(module: nn.Module, inputs: Inputs) -> float:
    """Largest difference between the first image's answer alone and in a batch, in spreads of the outputs."""
    count = len(inputs)
    together, alone = (first_image(output(module, part), n) for part, n in ((inputs, count), (inputs.part(0, 1), 1)))
    return distance(together, alone)


def first_image(out: Any, count: int) -> list[Tensor]:
    """The first image's part of an output."""
    if isinstance(out, list) and len(out) == count and not is_list_of_images(out) and isinstance(out[0], dict):
        return list(tensors_in(out[0]))
    return [tensor[:1] for tensor in tensors_in(out) if tensor.dim() and tensor.shape[0] == count]


def distance(a: Any, b: Any) -> float:
    """Largest difference of two outputs, in spreads of the second; infinite if they have other shapes."""
    ours, theirs = ([t.double() for t in tensors_in(out)] for out in (a, b))
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return float("inf")
    pairs = [(x, y) for x, y in zip(ours, theirs, strict=True) if x.numel()]
    scaled = ((x - y).abs().max() / y.std(correction=0).clamp(min=1e-300) for x, y in pairs)
    return max((float(f"{float(value):.2g}") for value in scaled), default=0.0)


def compiles(module: nn.Module, inputs: Inputs) -> None:
    """Compile as one graph."""
    torch._dynamo.reset()
    output(torch.compile(module, fullgraph=True, backend="aot_eager"), inputs)  # type: ignore[arg-type]


def exports(module: nn.Module, inputs: Inputs) -> None:
    """Export the module."""
    torch.export.export(module, inputs.args, dict(inputs.kwargs))


def compare(does: Callable[[nn.Module, Inputs], None], model: nn.Module, robust: nn.Module, inputs: Inputs) -> str:
    """Whether something that works with the model works with the corrected one."""
    try:
        does(robust, inputs)
    except Exception as error:
        try:
            does(model, inputs)
        except Exception:
            return "neither"
        return f"no: {in_short(error)}"
    return "yes"


def versions() -> str:
    """Versions on which a row depends."""
    found = {"trueup": trueup.__version__, "torch": torch.__version__.split("+")[0]}
    for name in ("timm", "torchvision", "transformers"):
        try:
            found[name] = metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return json.dumps(found)
