"""`choose`: the strongest form of a rule that leaves nearly all of a model's answers on clean images as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from trueup._correct import correct
from trueup._loading import images_of
from trueup.rules import Evidence
from trueup.graph import Options, device_of
from trueup._ranks import gathered
from trueup.targets import Targets

DOSES = (0.04, 0.06, 0.09, 0.12, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0)


def most_likely(output: Any) -> Tensor:
    """The class that a model's output `(batch, classes, ...)` says is most likely `(batch, ...)`."""
    if not isinstance(output, Tensor) or output.dim() < 2 or output.shape[1] < 2:
        what = f"of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        raise ValueError(
            f"choose: the model's output is {what}, not scores (batch, classes, ...); say what its answer is with "
            "answer=lambda output: ..., a tensor (batch, ...) to be compared"
        )
    return output.argmax(dim=1)


def choose(
    model: nn.Module,
    targets: Targets,
    loader: Iterable[Any],
    changed: float = 0.005,
    rule: Evidence | None = None,
    *,
    answer: Callable[[Any], Tensor] = most_likely,
    **options: Unpack[Options],
) -> Evidence:
    """The strongest form of a rule that changes a model's answer on no more than a share of clean images.

    The forms are `rule`, or else `Evidence()`, with its strength and base times one of `DOSES`, or times 0, which
    changes nothing. `loader` yields batches of clean images as for `calibrate`; labels are not asked for. Each image
    goes through the model once for each form. `options` are those of `correct`.

    If new images are drawn as these were, the share of them whose answer changes is expected to be `changed` at most,
    whatever the model is like: conformal risk control (Angelopoulos et al., 2024). That takes images that neither the
    model was trained on, which is surer of those, nor the targets were made of; and 1 / `changed` - 1 of them at least.
    Where `torch.distributed` is initialised, call it on every rank: all choose by all ranks' images.

    Where a model answers for each pixel, an image counts as changed by the share of its pixels. For outputs that are
    not scores of classes in dimension 1, say by `answer` what is to be compared, for equality: a tensor `(batch, ...)`.
    """
    rule = Evidence() if rule is None else rule
    if not isinstance(rule, Evidence):
        raise TypeError(f"choose: want an Evidence, whose strength can be chosen, got {rule!r}")
    if isinstance(changed, bool) or not isinstance(changed, int | float) or not 0 < changed <= 1:
        raise ValueError(f"choose(changed={changed!r}): want a share of clean images, more than 0, at most 1")
    batches = images_of(loader, device_of(model))
    forms = [replace(rule, strength=dose * rule.strength, base=dose * rule.base) for dose in (0.0, *DOSES)]
    networks = [correct(model, targets, form, **options) for form in forms]
    lost = gathered(_lost(networks, batches, answer))
    if not (known := [part for part in lost if part is not None]):
        raise ValueError("choose: the loader is empty; want batches of clean images")
    differs = torch.cat(known, dim=1)
    images, wanted = differs.shape[1], math.ceil(1 / changed - 1e-9) - 1
    if images < wanted:
        raise ValueError(
            f"choose(changed={changed}): {images} images are too few to promise that of a rule that changes anything; "
            f"give {wanted} or more"
        )
    return forms[doses_within(differs, changed)]


def _lost(networks: list[nn.Module], batches: Iterable[Tensor], answer: Callable[[Any], Tensor]) -> Tensor | None:
    """How much of each image's answer differs from that of the first network `(others, images)`; None without any."""
    parts = []
    for number, images in enumerate(batches):
        if not images.isfinite().all():
            raise ValueError(f"batch {number} of the loader holds NaN or infinity; clean data must be finite")
        with torch.inference_mode():
            own = answer(networks[0](images.clone())).reshape(len(images), -1)
            differs = ((answer(other(images.clone())).reshape(own.shape) != own) for other in networks[1:])
            parts.append(torch.stack([part.double().mean(dim=1) for part in differs]).cpu())
    return torch.cat(parts, dim=1) if parts else None


def doses_within(lost: Tensor, share: float) -> int:
    """How many doses may be taken, of ascending ones, so that of a new image no more than a `share` is lost.

    `lost` `(doses, images)`, 0 to 1, is what each image loses by each dose. An image counts by the most that it loses
    up to a dose, so that more of it never counts less, and one that loses all is added, for the new one. The
    expectation is over these images and the new one, all drawn alike.

    >>> doses_within(torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), 0.5)
    3
    >>> doses_within(torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), 0.3)
    1
    """
    risk = (lost.cummax(dim=0).values.sum(dim=1) + 1) / (lost.shape[1] + 1)
    return int((risk <= share).sum())
