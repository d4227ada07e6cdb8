"""Checkpoint files: tensors and JSON facts in one safetensors file, written atomically."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from trueup.atomic import write_atomically


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write `tensors`, and `facts` as JSON, to the safetensors file at `path`."""
    on_cpu = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    write_atomically(path, save(on_cpu, metadata={"trueup": json.dumps(facts)}))


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and facts that `save_checkpoint` wrote."""
    with safe_open(str(path), framework="pt") as file:
        facts = (file.metadata() or {}).get("trueup")
        if facts is None:
            raise ValueError(
                f"{path} is a safetensors file but no checkpoint of trueup; give a file that trueup train wrote"
            )
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(facts)  # noqa: SIM118
