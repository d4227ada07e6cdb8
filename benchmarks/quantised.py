"""Quantise a corrected model: agreement with the float model's answers, and accuracy.

    python benchmarks/quantised.py --data ROOT            # ResNet-20 of the zoo on CIFAR-10: results/quantised.csv

The model and the corrected model are each quantised by torchao: weights only (int8), weights and activations with
scales per call (dynamic int8), and PT2E with the X86 quantizer (static int8, calibrated on 256 training images). The
correction is chosen by `trueup.calibrate` on 1,000 training images. `agreement` is the share of images on which a
quantised network answers as its own float version; `with_model` the share on which it answers as the float model does
on the clean image. `order` says what came first. Needs torchao.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

import trueup
from trueup_lab.data import cifar10
from trueup_lab.data.corruptions import corrupt
from trueup_lab.data.images import NORMALISATION
from trueup_lab.models import load
from trueup_lab.tables import number, write_table

CORRUPTIONS = ("gaussian_noise", "defocus_blur", "fog", "contrast", "pixelate")
SEVERITIES = (3, 5)


@dataclass(frozen=True)
class QuantisedRow:
    """One network, quantised in one way, on one set of images."""

    model: str
    rule: str
    quantisation: str
    order: str
    corruption: str
    severity: int
    images: int
    accuracy: float = number(".4f")
    agreement: float = number(".4f")
    with_model: float = number(".4f")


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="data root that holds cifar-10-batches-py")
    parser.add_argument("--model", default="resnet20-bn-cifar10")
    parser.add_argument("--images", type=int, default=500, help="test images per set")
    parser.add_argument("--out", default="results/quantised.csv")
    options = parser.parse_args()
    normalise = NORMALISATION["cifar10"]
    train, test = cifar10.load("train", options.data).first(1000), cifar10.load("test", options.data)
    test = test.first(options.images)
    clean = normalise(train.images)
    model = load(options.model)
    targets = trueup.calibrate(model, clean.split(100))
    print(targets)
    networks = _networks(model, targets, clean[:256])
    sets = {("clean", 0): test.images}
    for name in CORRUPTIONS:
        for severity in SEVERITIES:
            sets[name, severity] = corrupt(test.images, name, severity, family="cifar10-c", root=options.data)
    wanted = _answers(model, normalise(test.images))
    rows = []
    for (name, severity), images in sets.items():
        x = normalise(images)
        answers = {key: _answers(network, x) for key, network in networks.items()}
        for (what, quantisation, order), found in answers.items():
            own = answers[what, "none", ""]
            shares = ((found == other).double().mean().item() for other in (test.labels, own, wanted))
            rule = str(targets.rule) if what == "corrected" else ""
            rows.append(QuantisedRow(options.model, rule, quantisation, order, name, severity, len(x), *shares))
        print(
            name, severity, {"/".join(key): f"{(a == test.labels).double().mean():.3f}" for key, a in answers.items()}
        )
        write_table(options.out, QuantisedRow, rows)


def _networks(model: nn.Module, targets: trueup.Targets, examples: Tensor) -> dict[tuple[str, str, str], nn.Module]:
    """Every network by what it is, how it is quantised, and what came first."""
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "none": lambda module: module,
        "weights int8": lambda module: _by_torchao(module, Int8WeightOnlyConfig(version=2)),
        "dynamic int8": lambda module: _by_torchao(module, Int8DynamicActivationInt8WeightConfig(version=2)),
        "static int8": lambda module: _by_pt2e(module, examples),
    }
    found: dict[tuple[str, str, str], nn.Module] = {}
    for name, quantise in ways.items():
        found["model", name, ""] = quantise(model)
        found["corrected", name, "" if name == "none" else "correct first"] = quantise(trueup.correct(model, targets))
    for name in ("weights int8", "dynamic int8"):
        found["corrected", name, "quantise first"] = trueup.correct(found["model", name, ""], targets)
    return found


def _by_torchao(module: nn.Module, config: object) -> nn.Module:
    quantised = copy.deepcopy(module)
    quantize_(quantised, config)
    return quantised


def _by_pt2e(module: nn.Module, examples: Tensor) -> nn.Module:
    """Static int8: every convolution, sum and linear layer that the quantizer knows; the correction stays float."""
    batch = torch.export.Dim("batch", min=2, max=4096)
    graph = torch.export.export(module, (examples[:2],), dynamic_shapes=({0: batch},)).module()
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(graph, quantizer)
    with torch.no_grad():
        for batch_of_examples in examples.split(64):
            prepared(batch_of_examples)
    return convert_pt2e(prepared)


def _answers(network: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([network(part).argmax(dim=1) for part in x.split(125)])


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
