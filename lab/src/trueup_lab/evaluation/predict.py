"""Predictions of a network on a stream of images, and their summaries: one class per image, or one per pixel."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from trueup_lab.data.images import Normalisation
from trueup_lab.evaluation.methods import Network
from trueup_lab.evaluation.metrics import BINS, accuracy, calibration_error, mean_iou


class Predictions:
    """Predictions for `count` images so far, and the time they took.

    They stay on the device, in the order of the test set rather than of the stream, so that no result depends on how
    images are batched. Subclasses decide what to store of a prediction.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self.seconds = 0.0

    def note(self, positions: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Store the predictions for the images at `positions`."""
        raise NotImplementedError

    def columns(self, part: slice) -> dict[str, Any]:
        """Summarise the predictions for a part of the images, as columns of a row."""
        raise NotImplementedError

    def per_image(self, part: slice) -> dict[str, Tensor]:
        """Counts per image for comparisons paired over images; empty if the columns suffice."""
        del part
        return {}

    def add(
        self,
        network: Network,
        images: Tensor,
        labels: Tensor,
        positions: Tensor,
        *,
        normalisation: Normalisation,
        batch: int,
        gradients: bool = False,
    ) -> None:
        """Classify the uint8 `images`, `batch` at a time. `positions` are their places in the test set."""
        _synchronise(images.device)
        began = time.perf_counter()
        for part in range(0, len(images), batch):
            these = slice(part, part + batch)
            with torch.inference_mode(not gradients):
                self.note(positions[these], network(normalisation(images[these])), labels[these])
        _synchronise(images.device)
        self.seconds += time.perf_counter() - began


class Classified(Predictions):
    """One class per image: confidence and correctness."""

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__(count, device)
        self.confidence = torch.zeros(count, device=device)
        self.correct = torch.zeros(count, dtype=torch.bool, device=device)

    def note(self, positions: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Store confidence and correctness. `logits` `(batch, classes)`, `labels` `(batch,)`."""
        confidence, said = logits.softmax(dim=1).max(dim=1)
        self.confidence[positions] = confidence.float()
        self.correct[positions] = said == labels

    def columns(self, part: slice) -> dict[str, Any]:
        """Accuracy and calibration error over images."""
        confidence, correct = self.confidence[part], self.correct[part]
        return {
            "accuracy": round(accuracy(correct), 4),
            "calibration_error": round(calibration_error(confidence, correct), 4),
        }


class Segmented(Predictions):
    """One class per pixel: counts per image and class. Pixels with a label of `classes` or above do not count."""

    def __init__(self, count: int, device: torch.device, classes: int) -> None:
        super().__init__(count, device)
        self.classes = classes
        shape = (count, classes)
        self.intersection, self.said, self.truth = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in "123")
        self.gap = torch.zeros(count, BINS, dtype=torch.float64, device=device)

    def note(self, positions: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Count pixels. `logits` `(batch, outputs, height, width)`, `labels` `(batch, height, width)`.

        A model may have more outputs than there are classes (void): they are wrong everywhere.
        """
        if logits.dim() != 4 or logits.shape[2:] != labels.shape[1:]:
            raise ValueError(
                f"the network returns {tuple(logits.shape)} for labels {tuple(labels.shape)}; expected one score per "
                f"class and pixel, ({len(labels)}, classes, {', '.join(map(str, labels.shape[1:]))})"
            )
        confidence, said = logits.softmax(dim=1).max(dim=1)
        known, image = labels < self.classes, torch.arange(len(labels), device=labels.device)[:, None, None]
        wide = self.classes + 1
        cell = (image * wide + labels.clamp(max=self.classes)) * wide + said.clamp(max=self.classes)
        # (batch, truth, predicted); the last of each holds everything that is no class
        table = torch.bincount(cell.flatten(), minlength=len(labels) * wide * wide).view(-1, wide, wide)[:, :-1]
        self.intersection[positions] = table[:, :, :-1].diagonal(dim1=1, dim2=2)
        self.said[positions], self.truth[positions] = table[:, :, :-1].sum(dim=1), table.sum(dim=2)
        bin_ = (confidence * BINS).ceil().long().sub(1).clamp(0, BINS - 1) + image * BINS
        gap = ((said == labels).double() - confidence.double()) * known
        sums = torch.zeros(len(labels) * BINS, dtype=torch.float64, device=labels.device)
        self.gap[positions] = sums.index_add_(0, bin_.flatten(), gap.flatten()).view(-1, BINS)

    def columns(self, part: slice) -> dict[str, Any]:
        """Mean IoU, IoU per class, pixel accuracy and calibration error over pixels."""
        intersection, said, truth = (t[part].sum(dim=0) for t in (self.intersection, self.said, self.truth))
        pixels = int(truth.sum())
        if pixels == 0:
            raise ValueError("no pixel of this test set has a class; its masks are missing or all void")
        union = said + truth - intersection
        each = [
            100 * int(i) / int(u) if u else None for i, u in zip(intersection.tolist(), union.tolist(), strict=True)
        ]
        return {
            "accuracy": round(100 * int(intersection.sum()) / pixels, 4),
            "calibration_error": round(100 * float(self.gap[part].sum(dim=0).abs().sum()) / pixels, 4),
            "mean_iou": round(100 * float(mean_iou(intersection, union)), 4),
            "iou": "/".join("" if value is None else f"{value:.2f}" for value in each),
        }

    def per_image(self, part: slice) -> dict[str, Tensor]:
        """Pixels of each image and class in the intersection and in the union, `(images, classes)` int32."""
        intersection, said, truth = (t[part].cpu() for t in (self.intersection, self.said, self.truth))
        union = said + truth - intersection
        return {"intersection": intersection.to(torch.int32), "union": union.to(torch.int32)}


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
