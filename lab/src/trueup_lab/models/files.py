"""Files of trained models: one network, one or many seeds, and a record of the training."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from trueup.atomic import write_atomically
from trueup_lab.models.architectures import find_architecture
from trueup_lab.models.resnet20 import GROUPS, Shortcut
from trueup_lab.models.weights import load_weights

FORMAT = 1


@dataclass(frozen=True)
class Record:
    """Description of the models of a file, which differ only in their seed.

    `shortcut` and `groups` apply to ResNet-20.
    """

    set: str
    norm: str
    channels: int
    classes: int = 10
    shortcut: Shortcut = "projection"
    groups: int = GROUPS
    accuracy: Mapping[int, float] = field(default_factory=dict)
    """Share of clean test images that each stored model classifies correctly, by seed."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Recipe, precision, device and versions."""
    architecture: str = "resnet20"

    @property
    def name(self) -> str:
        """Name of the network.

        >>> Record("cifar10", "bn", channels=3).name
        'resnet20-bn-cifar10'
        """
        return f"{self.architecture}-{self.norm}-{self.set}"

    def build(self) -> nn.Module:
        """Return the untrained network."""
        return find_architecture(self.architecture).build(self)


def save_models(path: str | os.PathLike[str], weights: Mapping[int, Mapping[str, Tensor]], record: Record) -> None:
    """Write the models' weights, by seed, and their record to a safetensors file."""
    tensors = {
        f"{seed}/{key}": tensor.detach().cpu().contiguous()
        for seed, one in weights.items()
        for key, tensor in shipped(one).items()
    }
    metadata = {"trueup": json.dumps({"format": FORMAT, "kind": "models"} | asdict(record))}
    write_atomically(Path(path), save(tensors, metadata=metadata))


def read_record(path: str | os.PathLike[str]) -> Record:
    """Read the record of a file that `save_models` wrote."""
    with safe_open(os.fspath(path), framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
    facts = json.loads(metadata.get("trueup", "{}"))
    if facts.get("kind") != "models":
        raise ValueError(
            f"{os.fspath(path)} holds no models of trueup; for a published network, try models.load_public"
        )
    if facts["format"] != FORMAT:
        raise ValueError(
            f"{os.fspath(path)} is in format {facts['format']}, this version reads {FORMAT}; update trueup-lab"
        )
    accuracy = {int(seed): value for seed, value in facts["accuracy"].items()}
    rest = {key: value for key, value in facts.items() if key not in ("format", "kind", "accuracy")}
    return Record(**rest, accuracy=accuracy)


def read_models(path: str | os.PathLike[str]) -> dict[int, nn.Module]:
    """Read the models of a file that `save_models` wrote, by seed, in float32 and evaluation mode."""
    record = read_record(path)
    by_seed: dict[int, dict[str, Tensor]] = {}
    with safe_open(os.fspath(path), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            seed, _, key = name.partition("/")
            by_seed.setdefault(int(seed), {})[key] = file.get_tensor(name)
    return {seed: load_weights(record.build(), by_seed[seed]).eval() for seed in sorted(by_seed)}


def shipped(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights as they are stored: float16, but float32 for vectors (norms, statistics, biases).

    A running variance may lie outside float16's range, and vectors are only about 1 % of the file.
    """
    return {key: (value.half() if value.dim() > 1 else value.float()) for key, value in weights.items()}
