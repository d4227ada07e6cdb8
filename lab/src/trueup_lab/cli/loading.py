"""Models of the laboratory for commands of the library: by file, or by the name of a bundled model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trueup.cli.loading import NamedModel

if TYPE_CHECKING:
    from torch import Tensor

SIZES = {  # height and width
    "digits": (28, 28),
    "mnist": (28, 28),
    "cifar10": (32, 32),
    "imagenet": (224, 224),
    "scenes": (128, 224),
    "camvid": (360, 480),
}


def load_by_name(name: str) -> NamedModel:
    """The first model of a file, or a bundled model, with the preprocessing of its training set."""
    import numpy as np
    import torch

    from trueup_lab.evaluation import read_subjects

    subject = read_subjects(name)[0]
    high, wide = SIZES[subject.set]
    mode = "L" if len(subject.normalisation.mean) == 1 else "RGB"

    def preprocess(image: Any) -> Tensor:
        """Cut out the middle of the picture, at the size of the training images, and normalise it."""
        image = image.convert(mode)
        scale = max(wide / image.width, high / image.height) * (256 / 224 if subject.set == "imagenet" else 1)
        width, height = max(wide, round(image.width * scale)), max(high, round(image.height * scale))
        image = image.resize((width, height)) if image.size != (width, height) else image
        left, top = (width - wide) // 2, (height - high) // 2
        pixels = np.asarray(image.crop((left, top, left + wide, top + high)))
        tensor = torch.tensor(pixels).reshape(high, wide, -1).permute(2, 0, 1)
        return subject.normalisation(tensor[None])[0]

    return NamedModel(subject.model.eval(), preprocess)
