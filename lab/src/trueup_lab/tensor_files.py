"""Safetensors files with facts as JSON and a checksum of everything, checked in every part when they are read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from trueup.atomic import write_atomically
from trueup.targets.file import checksum

FACTS, CHECKSUM = "trueup", "checksum"


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors, and facts as JSON, whole or not at all."""
    on_cpu = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    metadata = {FACTS: json.dumps(facts)}
    write_atomically(Path(path), save(on_cpu, metadata=metadata | {CHECKSUM: checksum(on_cpu, metadata)}))


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors and all metadata of a safetensors file.

    A damaged file raises ValueError with its name, and so does one that does not match its checksum. Files without a
    checksum, of earlier versions or other programs, pass if their floating-point numbers are finite.
    """
    path = os.fspath(path)
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, RuntimeError, AttributeError, TypeError, KeyError) as error:
        pickled = path.endswith((".pt", ".pth", ".bin", ".ckpt"))
        way = "; write a checkpoint of torch.save as one with safetensors.torch.save_file" if pickled else ""
        raise ValueError(f"{path} is not a safetensors file, or is damaged or cut short ({error}){way}") from error
    if CHECKSUM in metadata and metadata[CHECKSUM] != checksum(tensors, metadata):
        raise ValueError(f"{path} is damaged: its contents do not match its checksum; get or make it again")
    for name, tensor in tensors.items():
        if tensor.is_complex() or (tensor.is_floating_point() and not tensor.float().isfinite().all()):
            raise ValueError(f"{path} is damaged: {name} holds NaN, infinity or complex numbers; get or make it again")
    return tensors, metadata


def read_facts(path: str | os.PathLike[str], metadata: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the facts in a file's metadata; None if it has none."""
    if FACTS not in metadata:
        return None
    try:
        facts = json.loads(metadata[FACTS])
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{os.fspath(path)} is damaged: its facts are not JSON ({error}); get or make it again"
        ) from error
    if not isinstance(facts, dict):
        raise ValueError(f"{os.fspath(path)} is damaged: its facts are {type(facts).__name__}; get or make it again")
    return facts
