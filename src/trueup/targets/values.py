"""`Targets`: statistics of a model's activations on clean images, as a value that merges and compares."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from trueup.functional.gate import Gate, fit
from trueup.plurals import counted
from trueup.rules import Evidence
from trueup.targets import card, file
from trueup.targets.activation import ActivationTarget
from trueup.targets.decision import Decision
from trueup.targets.fingerprint import Fingerprint
from trueup.targets.norm import NormTarget
from trueup.targets.sites import Kind, Sites


@dataclass(frozen=True, eq=False)
class Targets:
    """Statistics of a model's activations on clean images, made by `trueup.calibrate`.

        targets = trueup.calibrate(model, monday) + trueup.calibrate(model, tuesday)
        targets.save("model.trueup.safetensors")
        robust = trueup.correct(model, trueup.Targets.load("model.trueup.safetensors"))

    `activations` and `norms` hold one target per site, by the site's name, in the order of the forward pass. `gate`
    holds more images for the few norms by which `Evidence` recognises an unusual image. `decision` is the setting that
    was chosen for the model, with the trials behind it; print the targets to read it. Adding two targets pools their
    trials and chooses again. Two are equal if their contents are.
    """

    SAMPLE: ClassVar[int] = 512  # images whose statistics are kept per site: enough to rank one in a hundred
    GATE_SAMPLE: ClassVar[int] = 4096  # images kept for the gate: half of them rank new images, to one in a thousand

    SMALL_ABOVE: ClassVar[int] = 20_000_000  # bytes of a file that keeps all of these images

    activations: Mapping[str, ActivationTarget]
    norms: Mapping[str, NormTarget]
    gate: Mapping[str, NormTarget]
    # Hashes of the images whose statistics are kept singly, ascending. Each target keeps the first few of them.
    sampled: Tensor  # (<= GATE_SAMPLE,) int64
    fingerprint: Fingerprint
    decision: Decision | None = None
    # All sites of the model, as calibration found them. Files of earlier versions hold none.
    sites: Sites = field(default_factory=Sites)

    def __repr__(self) -> str:
        parts = (len(self.activations), "activation"), (len(self.norms), "norm"), (self.images, "image")
        return f"Targets({', '.join(counted(*part) for part in parts)})"

    def __str__(self) -> str:
        decision = (
            "No setting was chosen (decide=False, or a file of an earlier version)."
            if self.decision is None
            else self.decision
        )
        return "\n".join(part for part in (repr(self), self.sites.note, str(decision)) if part)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Targets):
            return NotImplemented
        mine, theirs = file.contents(self), file.contents(other)
        return mine[1] == theirs[1] and mine[0].keys() == theirs[0].keys() and all(map(_same, *_paired(mine, theirs)))

    __hash__ = None  # type: ignore[assignment]  # equality compares tensors

    @property
    def rule(self) -> Evidence | None:
        """The rule that calibration chose; None with `decide=False`."""
        return None if self.decision is None else self.decision.rule

    def of_kind(self, kind: Kind) -> Mapping[str, ActivationTarget] | Mapping[str, NormTarget]:
        """Targets of the sites of one kind."""
        return self.norms if kind == "norm" else self.activations

    @property
    def images(self) -> int:
        """Number of images seen."""
        return next((target.images for group in (self.activations, self.norms) for target in group.values()), 0)

    def __add__(self, other: Targets) -> Targets:
        """Merge the targets of two sets of images."""
        if not isinstance(other, Targets):
            return NotImplemented
        if difference := self.fingerprint.difference(other.fingerprint):
            raise ValueError(f"these targets belong to two different models and cannot be added: {difference}")
        for mine, theirs in ((self.activations, other.activations), (self.norms, other.norms)):
            if list(mine) != list(theirs):
                name = next((name for name in [*mine, *theirs] if name not in mine or name not in theirs), None)
                raise ValueError(
                    f"these targets cannot be added: only one has a target of the site {name!r}"
                    if name is not None
                    else "these targets cannot be added: their sites come in another order"
                )
        if any(len(t.sample) < min(t.images, self.SAMPLE) for part in (self, other) for t in part.norms.values()):
            warnings.warn(
                "these targets come from a small file, which keeps fewer single images, so their sum describes the "
                "spread over images less precisely; save targets that will be added with targets.save(path, "
                "small=False)",
                stacklevel=2,
            )
        sampled, order = torch.cat([self.sampled, other.sampled]).sort(stable=True)
        # Images of another size may make the gate read other norms.
        shared = [name for name in self.gate if name in other.gate]
        many, few = (_Kept(len(self.sampled), order[:most]) for most in (self.GATE_SAMPLE, self.SAMPLE))
        norms = {name: _merge(name, t, other.norms[name], few) for name, t in self.norms.items()}
        tuned = {name for part in (self, other) for name, norm in part.norms.items() if norm.weights is not None}
        return Targets(
            activations={name: _merge(name, t, other.activations[name], few) for name, t in self.activations.items()},
            norms=norms,
            gate={name: _merge(name, self.gate[name], other.gate[name], many) for name in shared},
            sampled=sampled[: self.GATE_SAMPLE if shared else self.SAMPLE],
            fingerprint=self.fingerprint,
            decision=_merged_decision(
                self.decision,
                other.decision,
                gated=bool(shared),
                tuned=all(norms[name].weights is not None for name in tuned),
            ),
            sites=self.sites.merged(other.sites),
        )

    @functools.cached_property
    def fitted_gate(self) -> Gate:
        """The gate, fitted to the features of the norms in `gate`, in their order."""
        clean = torch.cat([site.clean_features() for site in self.gate.values()], dim=1)
        return fit(clean, self.sampled[: len(clean)])

    def held_out(self, hashes: Tensor) -> Tensor:
        """Mask of the images, given by their `hashes` `(images,)`, to which the gate was not fitted."""
        kept = min((len(norm.sample) for norm in self.gate.values()), default=0)
        return ~torch.isin(hashes, torch.unique_consecutive(self.sampled[:kept])[::2])  # `fit` takes every other image

    def save(self, path: str | PathLike[str], *, small: bool | None = None) -> None:
        """Write one safetensors file. It contains only numbers and text; loading it runs no code.

        A `small` file keeps fewer sampled images, with one byte per number: a sixth of the size. The rule that
        calibration chose corrects the model as before, to the last bit; any other rule, and `measure`, know less
        precisely how single images vary (docs/targets.md). By default, files of more than 20 MB are small. Use
        `small=False` for targets that will be added to others.
        """
        tensors, metadata = file.contents(self)
        if small or (small is None and file.size(tensors) > self.SMALL_ABOVE):
            tensors, metadata = file.contents(self, reduced=True)
        file.write(path, tensors, metadata)

    def model_card(self, file: str = card.FILE_NAME) -> str:
        """Markdown section for a model card: how to use the targets, what was chosen, and what it keeps and changes.

        `file` is the name of the targets file beside the model.
        """
        return card.section(self, file)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Targets:
        """Read a file that `save` wrote. Raises ValueError if it is damaged, foreign, or of a newer format."""
        return cls(**file.read(path))


_Target = TypeVar("_Target", ActivationTarget, NormTarget)


@dataclass(frozen=True)
class _Kept:
    """Sampled images that survive a merge: `order` counts the first part's `first` images, then the second part's."""

    first: int
    order: Tensor

    def rows(self, a: Tensor, b: Tensor) -> Tensor:
        """Rows of these images. A target may hold only the first sampled images, so `a` and `b` may be shorter."""
        if not len(b):
            return a
        with torch.autocast("cpu", enabled=False):  # autocast cannot concatenate float16 on a CPU
            both = torch.cat([a, b])
        of_first = self.order < self.first
        kept = torch.where(of_first, self.order < len(a), self.order - self.first < len(b))
        known = int(kept.cumprod(dim=0).sum())  # targets keep the first of the sampled images, without gaps
        return both[torch.where(of_first, self.order, self.order - self.first + len(a))[:known]]


def _merge(name: str, a: _Target, b: _Target, kept: _Kept) -> _Target:
    try:
        total = a + b
    except ValueError as error:
        raise ValueError(f"site {name!r}: {error}") from error
    other = b.sample[:, : total.sample.shape[1]]
    return replace(total, sample=kept.rows(total.sample, other))


def _merged_decision(a: Decision | None, b: Decision | None, *, gated: bool, tuned: bool) -> Decision | None:
    """Merge two decisions; drop gated rules if the sum has no gate, and tuned ones if weights were lost."""
    both = a + b if a is not None and b is not None else a or b
    if both is None:
        return None
    trials = (t for t in both.trials if (gated or not t.rule.gated) and (tuned or not t.rule.tuned))
    return replace(both, trials=tuple(trials))


def _paired(a: tuple[Mapping[str, Tensor], object], b: tuple[Mapping[str, Tensor], object]) -> tuple[list[Tensor], ...]:
    return list(a[0].values()), [b[0][name] for name in a[0]]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)
