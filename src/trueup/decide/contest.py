"""Try settings on clean images, and those within the limits also on perturbed copies of the images."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trueup._answers import Agreement, Answer, most_likely, relative_changes
from trueup._correct import build
from trueup.decide.perturb import PERTURBATIONS
from trueup.decide.pictures import Scales, perturb_all, together
from trueup.decide.progress import Progress
from trueup.graph import Inputs, Select, Trace, device_of
from trueup.rules import Evidence
from trueup.targets import Targets, Trial
from trueup.targets.decision import LEFT_ALONE

LEVEL_WEIGHTS = (0.2, 0.4, 0.4)  # an image's value weighs its clean, mildly and strongly perturbed copies like this
PERTURBATIONS_PER_IMAGE = 3  # each image gets this many of the perturbations at each level; images take turns


class Contest:
    """The uncorrected model and every candidate setting, tried on this rank's images.

    Clean images come first: a setting that breaks a limit there cannot be chosen, and is not tried any further.
    """

    def __init__(
        self,
        traced: Trace,
        targets: Targets,
        batches: list[tuple[Tensor, Inputs]],
        held_out: Tensor,
        own: list[Tensor],
        scales: Scales,
        levels: tuple[float, float],
        candidates: list[Evidence],
        answer: Answer,
        agree: Agreement,
        select: Select | None,
        progress: Progress,
    ) -> None:
        self._batches, self._own, self._scales, self._levels = batches, own, scales, levels
        self._held_out = held_out  # mask of the images to which the gate was not fitted
        self._answer, self._agree, self._progress, self._device = answer, agree, progress, device_of(traced.model)
        on_device = replace(targets, norms={name: norm.to(self._device) for name, norm in targets.norms.items()})
        self._rules: list[Evidence] = [LEFT_ALONE, *candidates]
        self._networks: list[nn.Module] = [traced.model]
        self._networks += [build(traced, on_device, rule, select) for rule in candidates if batches]
        self._images = sum(len(numbers) for numbers, _ in batches)
        self._kept = torch.zeros(len(self._rules), 1 + len(levels), self._images, dtype=torch.float64, device="cpu")
        self._moved = torch.zeros(len(self._rules), dtype=torch.float64, device="cpu")

    def try_clean_images(self) -> None:
        """Count the answers that each setting keeps on clean images, and measure how far it moves scores."""
        for (numbers, batch), clean_answers in zip(self._batches, self._own, strict=True):
            outputs = self._try(batch.to(self._device), clean_answers, numbers, 0, 1.0)
            uncorrected = next(outputs)
            for k, output in enumerate(outputs, start=1):
                changes = relative_changes(uncorrected, output, len(numbers), self._answer)
                # The tensor that moves most counts, so that a large one beside the scores cannot hide how they move.
                self._moved[k] += changes.amax(dim=0).clamp(max=1).sum() if len(changes) else 0.0

    def keep(self, which: Sequence[bool]) -> None:
        """Drop all settings except some. The first is the uncorrected model."""
        if not self._batches:
            return
        self._rules = list(itertools.compress(self._rules, which))
        self._networks = list(itertools.compress(self._networks, which))
        rows = [k for k, kept in enumerate(which) if kept]
        self._kept, self._moved = self._kept[rows], self._moved[rows]

    def try_perturbed_images(self) -> None:
        """Count the answers that each setting keeps on perturbed copies."""
        share = 1 / PERTURBATIONS_PER_IMAGE
        for (numbers, batch), clean_answers in zip(self._batches, self._own, strict=True):
            copies = perturbed_copies(batch.to(self._device), numbers, self._scales, self._levels)
            for level, inputs, rows in packed(copies, len(numbers)):
                wanted = clean_answers[rows.to(clean_answers.device)]
                for _ in self._try(inputs, wanted, numbers[rows], level, share):
                    pass

    def trials(self) -> tuple[Trial, ...]:
        """The trials so far; empty without images."""
        if not self._batches:
            return ()
        values = (self._kept.new_tensor(LEVEL_WEIGHTS)[:, None] * self._kept).sum(dim=1)
        gains = values - values[0]
        return tuple(
            Trial(
                rule,
                images=self._images,
                changed=self._changed(rule, 1 - self._kept[k, 0]),
                kept=tuple(self._kept[k, 1:].sum(dim=1).tolist()),
                gain=float(gains[k].sum()),
                gain_square=float(gains[k].square().sum()),
                moved=float(self._moved[k]),
            )
            for k, rule in enumerate(self._rules)
        )

    def _changed(self, rule: Evidence, lost: Tensor) -> float:
        """Clean answers that a rule changes. With a gate, as many as if all images were like those held out from it."""
        if rule.gated and self._held_out.any():
            return float(lost[self._held_out].mean() * len(lost))
        return float(lost.sum())

    def _try(self, inputs: Inputs, clean_answers: Tensor, numbers: Tensor, level: int, weight: float) -> Iterator[Any]:
        """Yield the output of each setting, and count its answers that equal the model's own on clean images."""
        for k, network in enumerate(self._networks):
            answers, output = answer_of(network, inputs, self._answer)
            self._kept[k, level].index_add_(0, numbers, weight * self._agree(answers, clean_answers).cpu())
            self._progress.add(len(inputs))
            yield output


def answer_of(network: nn.Module, inputs: Inputs, answer: Answer) -> tuple[Tensor, Any]:
    """A network's answers and its whole output."""
    with torch.inference_mode():
        output = inputs.run(network)
        answers = answer(output)
    if answer is most_likely and len(answers) != len(inputs):
        raise ValueError(
            f"the first scores in the model's output have {len(answers)} rows for {len(inputs)} images; say what its "
            "answer is with answer=lambda output: ..., a tensor (batch, ...) to be compared"
        )
    is_tensor = isinstance(answers, Tensor)
    if not is_tensor or answers.dim() == 0 or len(answers) != len(inputs) or answers.is_floating_point():
        what = f"{answers.dtype} of shape {tuple(answers.shape)}" if is_tensor else type(answers).__name__
        raise TypeError(
            f"answer= returned {what} for {len(inputs)} images; expected a tensor (batch, ...) of classes or other "
            "whole numbers, which are compared for equality"
        )
    return answers, output


def perturbed_copies(
    batch: Inputs, numbers: Tensor, scales: Scales, levels: tuple[float, ...]
) -> Iterator[tuple[int, Inputs, Tensor]]:
    """Yield perturbed copies of a batch: number of the level, from 1 on; inputs; rows of the batch."""
    names = list(PERTURBATIONS)
    for number, level in enumerate(levels, start=1):
        for k, name in enumerate(names):
            rows = torch.nonzero((numbers + k) % len(names) < PERTURBATIONS_PER_IMAGE).flatten()
            if len(rows):
                yield number, perturb_all(batch.take(rows), name, scales, numbers=numbers[rows], level=level), rows


def packed(copies: Iterable[tuple[int, Inputs, Tensor]], size: int) -> Iterator[tuple[int, Inputs, Tensor]]:
    """Join what `perturbed_copies` yields to batches of this size: small ones take more time per image."""
    for level, some in itertools.groupby(copies, key=operator.itemgetter(0)):
        waiting: list[tuple[Inputs, Tensor]] = []
        for _, inputs, rows in some:
            inputs, rows = together([*(i for i, _ in waiting), inputs]), torch.cat([*(r for _, r in waiting), rows])
            for start in range(0, len(rows) - size + 1, size):
                yield level, inputs.part(start, start + size), rows[start : start + size]
            rest = len(rows) % size
            waiting = [(inputs.part(len(rows) - rest, len(rows)), rows[-rest:])] if rest else []
        for inputs, rows in waiting:
            yield level, inputs, rows
