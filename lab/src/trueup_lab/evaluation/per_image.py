"""Counts per image behind the rows of a results file, for comparisons that are paired over images.

A file `results/camvid-c.csv` has them in the folder `results/camvid-c.images`, one file per row.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from trueup.atomic import write_atomically
from trueup_lab.evaluation.rows import EvaluationRow


def write_counts(out: str | os.PathLike[str], row: EvaluationRow, counts: Mapping[str, Tensor]) -> None:
    """Write the counts of a row of the results file `out`."""
    tensors = {name: tensor.contiguous() for name, tensor in counts.items()}
    write_atomically(_path(out, row), save(tensors, metadata={"row": repr(row.key)}))


def read_counts(out: str | os.PathLike[str], row: EvaluationRow) -> dict[str, Tensor]:
    """Read the counts of a row of the results file `out`."""
    path = _path(out, row)
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing: the counts per image of {row.method} on {row.corruption} {row.severity}. Keep the "
            f"folder beside {Path(out).name}, or remove the row and measure it again"
        )
    found: dict[str, Tensor] = load(path.read_bytes())
    return found


def _path(out: str | os.PathLike[str], row: EvaluationRow) -> Path:
    digest = hashlib.blake2b(repr(row.key).encode(), digest_size=8).hexdigest()
    return Path(out).with_suffix(".images") / f"{digest}.safetensors"
