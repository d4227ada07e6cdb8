"""Files of trained models: one network, one or many seeds, and a record of the training."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trueup.atomic import write_atomically
from trueup_lab.data.images import NORMALISATION
from trueup_lab.models.architectures import check_variant, find_architecture
from trueup_lab.models.resnet20 import GROUPS, Shortcut
from trueup_lab.models.weights import load_weights
from trueup_lab.tensor_files import read_facts, read_tensors, save_tensors

FORMAT = 1
SUMS = "SHA256SUMS"


class ForeignFileError(ValueError):
    """A safetensors file that trueup did not write."""


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
    """Write the models' weights, by seed, and their record to a checksummed safetensors file."""
    tensors = {f"{seed}/{key}": tensor for seed, one in weights.items() for key, tensor in shipped(one).items()}
    _list_sum(path, None)  # before the file is replaced: a crash in between leaves it unlisted, not contradicted
    save_tensors(path, tensors, {"format": FORMAT, "kind": "models"} | asdict(record))
    _list_sum(path, hashlib.sha256(Path(path).read_bytes()).hexdigest())


def read_record(path: str | os.PathLike[str]) -> Record:
    """Read the record of a file that `save_models` wrote."""
    check_sum(path)
    return _record(path, read_tensors(path)[1])


def read_models(path: str | os.PathLike[str]) -> dict[int, nn.Module]:
    """Read the models of a file that `save_models` wrote, by seed, in float32 and evaluation mode."""
    check_sum(path)
    tensors, metadata = read_tensors(path)
    record = _record(path, metadata)
    by_seed: dict[int, dict[str, Tensor]] = {}
    try:
        for name, tensor in tensors.items():
            seed, _, key = name.partition("/")
            wanted = torch.float16 if tensor.dim() > 1 else torch.float32
            if tensor.dtype != wanted:
                raise ValueError(f"{name} is {tensor.dtype}, expected {wanted}")
            by_seed.setdefault(int(seed), {})[key] = tensor
        if not by_seed:
            raise ValueError("it holds no models")
        return {seed: load_weights(record.build(), by_seed[seed]).eval() for seed in sorted(by_seed)}
    except (ValueError, RuntimeError, TypeError) as error:
        what = " ".join(str(error).split())
        raise ValueError(f"{os.fspath(path)} is a damaged model file: {what}; get or make it again") from error


def check_sum(path: str | os.PathLike[str]) -> None:
    """Raise ValueError if a list SHA256SUMS lies beside a file and has another checksum for it.

    `sha256sum -c SHA256SUMS` checks the same. Files of earlier versions have no checksum of their own.
    """
    path = Path(path)
    listed = _sums(path)
    if not path.is_file() or path.name not in listed:
        return
    if hashlib.sha256(path.read_bytes()).hexdigest() != listed[path.name]:
        raise ValueError(f"{path} is damaged: it does not match {SUMS} beside it; get it again")


def _sums(path: Path) -> dict[str, str]:
    """Return the checksums listed beside a file, by name."""
    sums = path.with_name(SUMS)
    lines = sums.read_text(encoding="utf-8").splitlines() if sums.is_file() else []
    return {name.lstrip("*"): digest for digest, name in (line.split() for line in lines if len(line.split()) == 2)}


def _list_sum(path: str | os.PathLike[str], digest: str | None) -> None:
    """Change a file's entry in the list beside it, if there is a list; None removes the entry."""
    path = Path(path)
    if not path.with_name(SUMS).is_file():
        return
    rest = {name: value for name, value in _sums(path).items() if name != path.name}
    listed = rest if digest is None else rest | {path.name: digest}
    text = "".join(f"{value}  {name}\n" for name, value in sorted(listed.items()))
    write_atomically(path.with_name(SUMS), text.encode())


def _record(path: str | os.PathLike[str], metadata: Mapping[str, str]) -> Record:
    facts = read_facts(path, metadata)
    if facts is None or facts.get("kind") != "models":
        raise ForeignFileError(
            f"{os.fspath(path)} holds no models of trueup; for a published network, try models.load_public"
        )
    if facts.get("format") != FORMAT:
        raise ValueError(
            f"{os.fspath(path)} is in format {facts.get('format')}, this version reads {FORMAT}; update trueup-lab"
        )
    try:
        accuracy = {int(seed): float(value) for seed, value in facts["accuracy"].items()}
        rest = {key: value for key, value in facts.items() if key not in ("format", "kind", "accuracy")}
        record = Record(**rest, accuracy=accuracy)
        check_variant(record.architecture, record.norm)
        if record.set not in NORMALISATION:
            raise ValueError(f"unknown set {record.set!r}")
        if not all(isinstance(count, int) and 0 < count < 10_000 for count in (record.channels, record.classes)):
            raise ValueError(f"{record.channels} channels and {record.classes} classes")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{os.fspath(path)} is a damaged model file: {what}; get or make it again") from error
    return record


def shipped(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights as they are stored: float16, but float32 for vectors (norms, statistics, biases).

    A running variance may lie outside float16's range, and vectors are only about 1 % of the file.
    """
    return {key: (value.half() if value.dim() > 1 else value.float()) for key, value in weights.items()}
