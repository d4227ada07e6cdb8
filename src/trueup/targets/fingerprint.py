"""Fingerprints of models, which show that targets belong to a model, or what differs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from trueup.plurals import counted

# Rounding to bfloat16 moves a projection by about 0.001 of the norm, another training run by about the norm itself.
TOLERANCE = 0.01
ROUGH = 0.1  # for weights that are kept in eight bits or fewer
LARGEST = 65504.0  # the largest float16; larger values, such as the infinity of an attention mask, are clipped to it
SMALL = 1 << 16  # values; larger tensors are copied to double precision one at a time


@dataclass(frozen=True)
class TensorPrint:
    """Summary of one parameter or buffer: its shape, its norm, and one fixed projection of its values.

    An infinite norm stands for any values: those of a buffer that the forward pass itself changes.
    """

    shape: tuple[int, ...]
    norm: float
    projection: float
    rough: bool = False  # read from a quantised tensor; not written to files

    def __post_init__(self) -> None:
        counts = all(type(side) is int and side >= 0 for side in self.shape)
        numbers = all(type(value) in (int, float) for value in (self.norm, self.projection))
        if not counts or not numbers or not self.norm >= 0 or not math.isfinite(self.projection):
            raise ValueError(f"a fingerprint's numbers are {self.shape}, {self.norm!r} and {self.projection!r}")

    def matches(self, other: TensorPrint) -> bool:
        """Whether the values are equal up to rounding to another precision."""
        tolerance = ROUGH if self.rough or other.rough else TOLERANCE
        size = max(self.norm, other.norm)
        close = size == math.inf or abs(self.projection - other.projection) <= tolerance * size
        return self.shape == other.shape and close


@dataclass(frozen=True)
class Fingerprint:
    """Summary of a model's parameters and buffers, a few numbers each.

    Casting the model to half precision, moving it, or compiling it keeps the fingerprint; training changes it once a
    parameter has moved by more than about a hundredth of its norm.
    """

    tensors: Mapping[str, TensorPrint]

    def __repr__(self) -> str:
        return f"Fingerprint({counted(len(self.tensors), 'tensor')})"

    @classmethod
    def of(cls, model: nn.Module) -> Fingerprint:
        """Take the fingerprint of a model."""
        # A module's extra state need not be a tensor.
        state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
        rough = {name for name, t in state.items() if _is_quantised(t)}
        values = {name: t.dequantize() if name in rough else t for name, t in state.items()}
        values = {name: t for name, t in values.items() if t.is_floating_point()}
        found = zip(values, _prints(list(values.values())), strict=True)
        return cls({name: replace(each, rough=True) if name in rough else each for name, each in found})

    def without_values_that_change(self, model: nn.Module) -> Fingerprint:
        """Fingerprint that accepts any values in the buffers that `model` has changed since it was taken.

        Some models count their calls or keep a running average of their features, even in evaluation mode.
        """
        held = {n: b for n, b in model.named_buffers() if n in self.tensors and not _is_quantised(b)}
        now = zip(held, _prints([buffer.detach() for buffer in held.values()]), strict=True)
        other = {name: replace(found, norm=math.inf) for name, found in now if found != self.tensors[name]}
        return Fingerprint({**self.tensors, **other})

    def difference(self, other: Fingerprint) -> str:
        """Describe the first difference from `other` in words; empty if there is none."""
        for name in [*self.tensors, *other.tensors]:
            mine, theirs = self.tensors.get(name), other.tensors.get(name)
            if mine is None or theirs is None:
                return f"only one of them has the parameter {name!r}"
            if mine.shape != theirs.shape:
                return f"the parameter {name!r} has shape {mine.shape} in one and {theirs.shape} in the other"
            if not mine.matches(theirs):
                return f"the parameter {name!r} has other values (L2 norms {mine.norm:.4g} and {theirs.norm:.4g})"
        return ""

    def to_json(self) -> str:
        """Text for a file's header."""
        return json.dumps({name: [p.shape, p.norm, p.projection] for name, p in self.tensors.items()})

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """Read what `to_json` wrote."""
        return cls({name: TensorPrint(tuple(s), n, p) for name, (s, n, p) in json.loads(text).items()})


def is_quantised(model: nn.Module) -> bool:
    """Whether some of a model's weights or operators are quantised, by torchao or by torch itself."""
    if "quantize_per_" in str(getattr(model, "code", "")):  # a graph, as PT2E makes them
        return True
    if any(type(module).__module__.startswith(("torch.ao.nn.", "torchao.")) for module in model.modules()):
        return True
    return any(_is_quantised(t) for t in model.state_dict().values() if isinstance(t, Tensor))


def _is_quantised(tensor: Tensor) -> bool:
    return tensor.is_quantized or (
        type(tensor) not in (Tensor, nn.Parameter)
        and "dequantize" in dir(type(tensor))
        and type(tensor).dequantize is not Tensor.dequantize
    )


def _prints(tensors: list[Tensor]) -> list[TensorPrint]:
    """Summaries of all tensors.

    Small ones of equal length go together and all results are fetched at once, since a model on a GPU has hundreds.
    """
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
        values = values.nan_to_num(nan=0.0).clamp(-LARGEST, LARGEST)
        norms = torch.linalg.vector_norm(values, dim=1)
        projections = values @ directions[values.device][: values.shape[1]]
        found[values.device].append(torch.stack([norms, projections], dim=1))
    fetched = {device: iter(torch.cat(some).tolist()) for device, some in found.items()}
    pairs = {number: next(fetched[tensors[number].device]) for group in alike.values() for number in group}
    return [TensorPrint(tuple(tensor.shape), *pairs[number]) for number, tensor in enumerate(tensors)]
