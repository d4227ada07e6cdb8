"""Entropy of predictions."""

from __future__ import annotations

from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy `(batch, ...)` of predictions with these `logits` `(batch, classes, ...)`, in nats.

    >>> import torch
    >>> entropy(torch.zeros(1, 4)).exp()
    tensor([4.])
    """
    log_p = logits.log_softmax(dim=1)
    return -(log_p.exp() * log_p).sum(dim=1)


def log_mean_probability(logits: Tensor) -> Tensor:
    """Return the logarithm of the mean of predictions, `(batch, classes)` from `(views, batch, classes)`."""
    return logits.log_softmax(dim=2).logsumexp(dim=0).log_softmax(dim=1)
