"""`choose`: the strongest setting of a rule that changes few of a model's answers on clean images.

The setting that `calibrate` chooses by default is decided in `trueup.decide`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trueup._answers import Answer, agreement, most_likely
from trueup._batches import check_finite, inputs_of
from trueup._checks import check_model, check_targets
from trueup._correct import build
from trueup._distributed import gathered
from trueup.graph import Inputs, Site, check_select, trace
from trueup.rules import Evidence
from trueup.rules.limits import MAX_CHANGED_OF_CHOOSE, check_max_changed, images_needed
from trueup.targets import Targets

DOSES = (0.04, 0.06, 0.09, 0.12, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0)


def choose(
    model: nn.Module,
    targets: Targets,
    loader: Iterable[Any],
    max_changed: float = MAX_CHANGED_OF_CHOOSE,
    rule: Evidence | None = None,
    *,
    transform: Callable[[Any], Any] | None = None,
    answer: Callable[[Any], Tensor] | None = None,
    select: Callable[[Site], bool] | None = None,
    activations: tuple[type[nn.Module] | Callable[..., Tensor], ...] = (),
    leaves: tuple[type[nn.Module], ...] = (),
) -> Evidence:
    """Find the strongest setting that changes at most `max_changed` of the model's answers on clean images.

        rule = trueup.choose(model, targets, unseen_clean_loader, max_changed=0.01)
        robust = trueup.correct(model, targets, rule)

    The settings are `rule` (or `Evidence()`) with strength and base multiplied by one of `DOSES`, or by 0, which
    changes nothing. No labels are needed. Each image goes through the model once per setting.

    If new images are drawn like these, the expected share of changed answers among them is at most `max_changed`, for
    any model: conformal risk control (Angelopoulos et al., 2024). The images must be new both to the model (a model is
    surer of its training images) and to the targets, and at least 1 / `max_changed` - 1 in number. The default of
    `max_changed` is stricter than in `calibrate`, because this bound is guaranteed for new images. Under
    `torch.distributed`, call it on every rank: all ranks use the images of every rank.

    If the model answers per pixel, an image counts by its share of changed pixels: images are exchangeable, pixels are
    not. The answer is the most likely class; for outputs that are not class scores in dimension 1, `answer` returns
    what is compared for equality: a tensor `(batch, ...)`. `loader` and `transform` are as for `calibrate`, `select`,
    `activations` and `leaves` as for `correct`.
    """
    rule = Evidence() if rule is None else rule
    if not isinstance(rule, Evidence):
        raise TypeError(f"choose(rule={rule!r}): expected an Evidence, whose strength can be chosen")
    check_max_changed("choose", max_changed)
    check_select(select)
    check_targets("choose", targets)
    traced = trace(model, activations=activations, leaves=leaves, own_buffers=True, known=targets.sites)
    batches = inputs_of(loader, model, transform=transform)
    check_model(targets, traced.model)
    settings = [replace(rule, strength=dose * rule.strength, base=dose * rule.base) for dose in (0.0, *DOSES)]
    networks = [build(traced, targets, setting, select) for setting in settings]
    lost = gathered(_changed(networks, batches, most_likely if answer is None else answer))
    if not (known := [part for part in lost if part is not None]):
        raise ValueError("choose: the loader is empty; give batches of clean images")
    differs = torch.cat(known, dim=1)
    images, wanted = differs.shape[1], images_needed(max_changed)
    if images < wanted:
        raise ValueError(
            f"choose(max_changed={max_changed}): {images} images are too few to bound the changed answers of any "
            f"setting; give {wanted} or more"
        )
    return settings[doses_within(differs, max_changed)]


def _changed(networks: Sequence[nn.Module], batches: Iterable[Inputs], answer: Answer) -> Tensor | None:
    """Share of each image's answer that differs from the first network's `(others, images)`; None without images."""
    parts = []
    for number, inputs in enumerate(batches):
        check_finite(inputs, number)
        with torch.inference_mode():
            own, *others = (answer(inputs.run(network)) for network in networks)
            parts.append(1 - torch.stack([agreement(other, own) for other in others]).cpu())
    return torch.cat(parts, dim=1) if parts else None


def doses_within(lost: Tensor, share: float) -> int:
    """Number of safe doses, counted from the smallest: there a new image is expected to lose at most `share`.

    `lost` `(doses, images)`, 0 to 1, is the share of its answer that each image loses at each dose, in ascending order.
    An image counts by the largest loss up to a dose, so that the risk never falls. One image that loses everything is
    added for the new one. The expectation is over these images and the new one, all drawn alike.

    >>> doses_within(torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), 0.5)
    3
    >>> doses_within(torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), 0.3)
    1
    """
    risk = (lost.cummax(dim=0).values.sum(dim=1) + 1) / (lost.shape[1] + 1)
    return int((risk <= share).sum())
