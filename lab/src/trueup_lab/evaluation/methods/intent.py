"""InTEnt: predictions at six mixing ratios of batch norm, weighted by their certainty."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trueup import Targets
from trueup_lab.evaluation.methods.entropy import entropy
from trueup_lab.evaluation.methods.norms import MixedNorm, with_norms
from trueup_lab.evaluation.methods.protocol import Needs, Network

RATIOS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Shares of the image's own statistics: from the model as trained to instance norm."""


@dataclass(frozen=True)
class Intent:
    """The mean of the six predictions, with weights softmax(1 - entropy), in nats (Dong et al., 2024)."""

    kind = "intent"
    needs = Needs(batch_norm=True)

    @property
    def name(self) -> str:
        """`intent`."""
        return self.kind

    def prepare(self, model: nn.Module, _targets: Targets | None) -> Network:
        """Return a function that runs one clone per mixing ratio."""
        networks = [with_norms(model, lambda norm, ratio=ratio: MixedNorm(norm, ratio)) for ratio in RATIOS]  # type: ignore[misc]

        def network(x: Tensor) -> Tensor:
            logits = torch.stack([mixed(x) for mixed in networks])  # (ratios, batch, classes, ...)
            certainty = torch.stack([1 - entropy(each) for each in logits])
            weighted = logits.log_softmax(dim=2) + certainty.log_softmax(dim=0).unsqueeze(2)
            return weighted.logsumexp(dim=0)  # logarithm of the weighted mean of probabilities

        return network
