"""Trained models that come with the package: one file per model in this folder."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from trueup_lab.models.files import Record, read_models, read_record

FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """Return the names that `load` accepts."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.safetensors")))


def load(name: str) -> nn.Module:
    """Load the trained model called `name`, such as `resnet20-bn-cifar10`, in float32 and evaluation mode.

    It takes uint8 images normalised by `trueup_lab.data.images.NORMALISATION[set]`.
    """
    (model,) = read_models(_path(name)).values()
    return model


def record(name: str) -> Record:
    """Return how the model called `name` was trained, and its accuracy."""
    return read_record(_path(name))


def _path(name: str) -> Path:
    path = FOLDER / f"{name}.safetensors"
    if name not in names():
        known = ", ".join(names()) or "none; this installation came without its models"
        raise ValueError(f"no model called {name!r} comes with trueup; known: {known}")
    return path
