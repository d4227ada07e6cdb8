"""`write_report`: one HTML file on how images differ from clean ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trueup.atomic import write_atomically
from trueup.graph import Activation
from trueup.report.findings import Findings, find
from trueup.report.page import page_of
from trueup.rules import Rule
from trueup.targets import Targets


def write_report(
    path: str | PathLike[str],
    model: nn.Module,
    targets: Targets,
    images: Tensor | Iterable[Any],
    *,
    against: Tensor | Iterable[Any] | None = None,
    names: tuple[str, str] = ("these images", "the other images"),
    classes: Sequence[str] | None = None,
    rule: Rule | None = None,
    most_unusual: int = 12,
    batch: int = 32,
    title: str | None = None,
    activations: tuple[Activation, ...] = (),
    leaves: tuple[type[nn.Module], ...] = (),
) -> Findings:
    """Write an HTML file that shows how images differ from clean ones, and what the correction does to them.

        from trueup.report import write_report
        write_report("report.html", model, targets, images)

    It needs no network and no other file. Returns the numbers behind it.

    images: a tensor `(images, ...)` as the model takes it, or batches, as a loader gives them; those that
        `trueup.report.images.read_images` returns are shown with the names of their files.
    against: a second set to compare with, such as last week's images.
    names: what the sets are called in the report.
    classes: name of each class, in the order of the model's scores.
    rule: as for `trueup.correct`; by default the one that calibration chose.
    most_unusual: number of images that are shown as thumbnails.
    batch: images per forward pass, if `images` is a tensor.
    title: heading of the report; by default the model and the names of the sets.
    activations, leaves: as they were given to `calibrate`.
    """
    found = find(
        model,
        targets,
        images,
        against=against,
        names=names,
        rule=rule,
        most_unusual=most_unusual,
        batch=batch,
        activations=activations,
        leaves=leaves,
    )
    write_atomically(Path(path), page_of(found, title=title, classes=classes).encode())
    return found
