"""Recipe of a generated file: generator version, seed and constants."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from trueup_lab.data import marks
from trueup_lab.data.corruptions import GENERATOR
from trueup_lab.data.corruptions.families import FAMILIES


@dataclass(frozen=True)
class GenerationRecipe:
    """Everything that determines generated images, besides the clean ones."""

    generator: int
    seed: int
    constants: list[list[float]]

    @property
    def mark(self) -> bytes:
        """Mark of the files of this recipe."""
        return marks.mark(hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest())


def recipe_of(family: str, name: str, seed: int, severity: int | None = None) -> GenerationRecipe:
    """Return the recipe of a corruption, or of one severity of it. The name of labels is empty."""
    levels = FAMILIES[family].levels.get(name, ())
    if name in FAMILIES[family].published:
        severity = FAMILIES[family].published[name]
    if severity is not None:
        levels = levels[severity - 1 :][:1]
    return GenerationRecipe(GENERATOR, seed, [[float(c) for c in level] for level in levels])
