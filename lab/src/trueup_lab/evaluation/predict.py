"""Predictions of a network on a stream of images: confidence and correctness per image."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from trueup_lab.data.images import Normalisation
from trueup_lab.evaluation.methods import Network


class Predictions:
    """Predictions for `count` images so far, and the time they took.

    They stay on the device, in the order of the test set rather than of the stream, so that no result depends on how
    images are batched.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.confidence = torch.zeros(count, device=device)
        self.correct = torch.zeros(count, dtype=torch.bool, device=device)
        self.seconds = 0.0

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
                logits = network(normalisation(images[these]))
                confidence, said = logits.softmax(dim=1).max(dim=1)
                self.confidence[positions[these]] = confidence.float()
                self.correct[positions[these]] = said == labels[these]
        _synchronise(images.device)
        self.seconds += time.perf_counter() - began


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
