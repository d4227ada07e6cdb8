"""Checkpoint files: tensors and JSON facts in one checksummed safetensors file, written atomically."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trueup_lab.tensor_files import read_facts, read_tensors, save_tensors


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write `tensors`, and `facts` as JSON, to the safetensors file at `path`."""
    save_tensors(path, tensors, facts)


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and facts that `save_checkpoint` wrote."""
    tensors, metadata = read_tensors(path)
    facts = read_facts(path, metadata)
    if facts is None:
        raise ValueError(
            f"{path} is a safetensors file but not a checkpoint of trueup; give a file that trueup train wrote"
        )
    return tensors, facts


def damaged(path: Path, error: Exception) -> ValueError:
    """Return the error for a checkpoint whose parts do not fit."""
    return ValueError(f"{path} is a damaged checkpoint ({error}); delete it to train from the beginning")
