"""Models of the laboratory for commands of the library: by file, or by the name of a bundled model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trueup.cli.loading import NamedModel

if TYPE_CHECKING:
    from torch import Tensor

SIDES = {"digits": 28, "mnist": 28, "cifar10": 32, "imagenet": 224}


def load_by_name(name: str) -> NamedModel:
    """The first model of a file, or a bundled model, with the preprocessing of its training set."""
    import numpy as np
    import torch

    from trueup_lab.evaluation import read_subjects

    subject = read_subjects(name)[0]
    side = SIDES[subject.set]
    mode = "L" if len(subject.normalisation.mean) == 1 else "RGB"

    def preprocess(image: Any) -> Tensor:
        """Cut out the middle of the picture, at the size of the training images, and normalise it."""
        image = image.convert(mode)
        short = side * 256 // 224 if subject.set == "imagenet" else side
        scale = short / min(image.size)
        width, height = (max(side, round(length * scale)) for length in image.size)
        image = image.resize((width, height)) if image.size != (width, height) else image
        left, top = (width - side) // 2, (height - side) // 2
        pixels = np.asarray(image.crop((left, top, left + side, top + side)))
        tensor = torch.tensor(pixels).reshape(side, side, -1).permute(2, 0, 1)
        return subject.normalisation(tensor[None])[0]

    return NamedModel(subject.model.eval(), preprocess)
