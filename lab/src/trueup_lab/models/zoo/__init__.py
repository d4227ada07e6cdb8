"""Trained models that come with the package: one of each norm and set, a file each in this folder."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from trueup_lab.models.files import Record, read_models, read_record

FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """What `load` knows."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.safetensors")))


def load(name: str) -> nn.Module:
    """The trained model called `name`, such as `resnet20-bn-cifar10`, in float32 and `eval` mode.

    Its input is what `trueup_lab.data.images.NORMALISATION[set]` makes of uint8 images.
    """
    (model,) = read_models(_path(name)).values()
    return model


def record(name: str) -> Record:
    """How the model called `name` was trained, and how accurate it is."""
    return read_record(_path(name))


def _path(name: str) -> Path:
    path = FOLDER / f"{name}.safetensors"
    if name not in names():
        known = ", ".join(names()) or "none; this installation came without its models"
        raise ValueError(f"no model called {name!r} comes with trueup; known: {known}")
    return path
