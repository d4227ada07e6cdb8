"""Fingerprints: telling whether targets belong to a model, and naming what differs where they do not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Rounding to bfloat16 moves a projection by about 0.001 of the norm; another training run, by as much as the norm.
TOLERANCE = 0.01
SMALL = 1 << 16  # values; of larger tensors, the copies in double precision are made one at a time


@dataclass(frozen=True)
class Print:
    """What is remembered of one parameter or buffer: its shape, its norm, and one fixed projection of its values."""

    shape: tuple[int, ...]
    norm: float
    projection: float

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
        state = {name: t for name, t in model.state_dict().items() if t.is_floating_point()}
        return cls(dict(zip(state, _prints(list(state.values())), strict=True)))

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


def _prints(tensors: list[Tensor]) -> list[Print]:
    """Small tensors of one length together, and all numbers fetched at once: a model has hundreds, maybe on a GPU."""
    alike: dict[tuple[object, ...], list[int]] = {}
    longest: dict[torch.device, int] = {}
    for number, tensor in enumerate(tensors):
        alone = number if tensor.numel() > SMALL else -1
        alike.setdefault((tensor.numel(), tensor.dtype, tensor.device, alone), []).append(number)
        longest[tensor.device] = max(tensor.numel(), longest.get(tensor.device, 0))
    directions = {device: torch.arange(n, dtype=torch.float64, device=device).cos() for device, n in longest.items()}
    found: dict[torch.device, list[Tensor]] = {device: [] for device in longest}
    for group in alike.values():
        values = torch.stack([tensors[number].detach().reshape(-1) for number in group]).double()
        norms = torch.linalg.vector_norm(values, dim=1)
        projections = values @ directions[values.device][: values.shape[1]]
        found[values.device].append(torch.stack([norms, projections], dim=1))
    fetched = {device: iter(torch.cat(some).tolist()) for device, some in found.items()}
    pairs = {number: next(fetched[tensors[number].device]) for group in alike.values() for number in group}
    return [Print(tuple(tensor.shape), *pairs[number]) for number, tensor in enumerate(tensors)]
