"""What a network says to a stream of images: confidence and correctness, image by image."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from trueup_lab.data.images import Normalisation
from trueup_lab.evaluation.methods import Network


class Predictions:
    """What has been predicted so far of `count` images, and how long that took.

    Everything stays on the device, in the order of the test set and not of the stream, so that no result depends on
    how the images were cut into batches.
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
        """Show `network` the uint8 `images`, `batch` at a time; they stand at `positions` of the test set."""
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
