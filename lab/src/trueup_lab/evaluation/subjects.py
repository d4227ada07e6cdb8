"""Subjects: trained models under test, with their normalisation and their names."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from trueup_lab import models
from trueup_lab.data.images import EFFICIENTNET_LITE, ESPNET_CAMVID, IMAGENET, NORMALISATION, Normalisation
from trueup_lab.data.sets import SETS
from trueup_lab.evaluation.methods import Method, has_batch_norm
from trueup_lab.models.files import ForeignFileError


@dataclass(frozen=True, eq=False)
class Subject:
    """One trained model."""

    name: str
    seed: int
    set: str  # training set
    norm: str
    normalisation: Normalisation
    checkpoint: str  # first digits of the SHA-256 of its file
    model: nn.Module

    @property
    def key(self) -> str:
        """A name for use in file names.

        >>> Subject("a", 3, "mnist", "bn", NORMALISATION["mnist"], "0123abcd", nn.ReLU()).key
        'a-3-0123abcd'
        """
        return f"{self.name}-{self.seed}-{self.checkpoint}"

    @property
    def dense(self) -> bool:
        """Whether the model gives every pixel a class."""
        return self.set in SETS and bool(SETS[self.set].dense)

    def takes(self, method: Method) -> bool:
        """Return whether a method can be applied to this model.

        Views shift and mirror the image, so that answers per pixel would not lie on top of each other.
        """
        if self.dense and method.needs.views:
            return False
        return has_batch_norm(self.model) or not method.needs.batch_norm


def read_subjects(where: str | os.PathLike[str], seeds: Sequence[int] | None = None) -> list[Subject]:
    """Return the models of a file (trueup's own format or a published checkpoint), or a bundled model by name.

    `seeds` selects models from a file that has several.
    """
    path = Path(where)
    if not path.is_file():
        if str(where) not in models.names():
            known = ", ".join(models.names())
            raise ValueError(f"{where} is neither a file nor a model that comes with trueup; known models: {known}")
        path = models.zoo.FOLDER / f"{where}.safetensors"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    try:
        record = models.read_record(path)
    except ForeignFileError:
        model = models.load_public(path)
        trained_on, normalisation = _published(model)
        norm = "bn" if has_batch_norm(model) else "other"
        return [Subject(path.stem, 0, trained_on, norm, normalisation, digest, model)]
    by_seed = models.read_models(path)
    if missing := [seed for seed in seeds or () if seed not in by_seed]:
        raise ValueError(f"{path} has no seed {missing[0]}; it has {', '.join(map(str, by_seed))}")
    return [
        Subject(record.name, seed, record.set, record.norm, NORMALISATION[record.set], digest, model)
        for seed, model in by_seed.items()
        if seeds is None or seed in seeds
    ]


def _published(model: nn.Module) -> tuple[str, Normalisation]:
    """Return the training set and the normalisation of a published network."""
    if isinstance(model, models.ESPNet):
        return "camvid", ESPNET_CAMVID
    if isinstance(model, models.EfficientNetLite):
        return "imagenet", EFFICIENTNET_LITE
    return "cifar10" if isinstance(model, models.ResNet20) else "imagenet", IMAGENET
