"""Fingerprints: telling whether targets belong to a model, and naming what differs where they do not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Rounding to bfloat16 moves a projection by about 0.001 of the norm; another training run, by as much as the norm.
TOLERANCE = 0.01


@dataclass(frozen=True)
class Print:
    """What is remembered of one parameter or buffer: its shape, its norm, and one fixed projection of its values."""

    shape: tuple[int, ...]
    norm: float
    projection: float

    @classmethod
    def of(cls, tensor: Tensor) -> Print:
        """Take the print of a tensor."""
        values = tensor.detach().double().flatten()
        direction = torch.arange(len(values), dtype=torch.float64, device=values.device).cos()
        return cls(tuple(tensor.shape), float(values.norm()), float(values @ direction))

    def matches(self, other: Print) -> bool:
        """The same values, but for rounding to another precision."""
        close = abs(self.projection - other.projection) <= TOLERANCE * max(self.norm, other.norm)
        return self.shape == other.shape and close


@dataclass(frozen=True)
class Fingerprint:
    """The parameters and buffers of a model, remembered by a few numbers each.

    Casting the model to half precision, moving it, or calling it through `torch.compile` does not change whose
    targets fit; training it does, once a parameter has moved by more than about a hundredth of its norm.
    """

    tensors: Mapping[str, Print]

    @classmethod
    def of(cls, model: nn.Module) -> Fingerprint:
        """Take the fingerprint of a model."""
        state = model.state_dict()
        return cls({name: Print.of(t) for name, t in state.items() if t.is_floating_point()})

    def difference(self, other: Fingerprint) -> str:
        """Names the first thing in which `other` differs, in words; empty where nothing does."""
        for name in [*self.tensors, *other.tensors]:
            mine, theirs = self.tensors.get(name), other.tensors.get(name)
            if mine is None or theirs is None:
                return f"only one of them has the parameter {name!r}"
            if mine.shape != theirs.shape:
                return f"the parameter {name!r} has shape {mine.shape} in one and {theirs.shape} in the other"
            if not mine.matches(theirs):
                return f"the parameter {name!r} has other values (norms {mine.norm:.4g} and {theirs.norm:.4g})"
        return ""

    def to_json(self) -> str:
        """As text, for a file's header."""
        return json.dumps({name: [p.shape, p.norm, p.projection] for name, p in self.tensors.items()})

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """What `to_json` wrote."""
        return cls({name: Print(tuple(s), n, p) for name, (s, n, p) in json.loads(text).items()})
