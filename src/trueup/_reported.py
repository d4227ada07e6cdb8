"""The module that `correct(..., report=True)` places at the end of the forward pass: how unusual each image is."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from trueup import kernels
from trueup._placed import AtSite, GateReader
from trueup.functional import evidence
from trueup.functional import gate as gate_functions
from trueup.functional.gate import Gate
from trueup.graph import Reading, Site
from trueup.kernels import portable
from trueup.rules import Evidence, Rule
from trueup.targets import NormTarget, Targets

Reported = bool | Literal["all"]

MIN_REPORT_IMAGES = 8  # a report needs this many sampled images: half describe clean images, half rank new ones


class ImageReport(AtSite):
    """Report how unusual each image of a batch is, from the moments that the readers measured.

    It returns a dictionary of float32 tensors:

    - "p" `(batch,)`: share of held-out clean images, plus this one, that look at least as unusual at the model's first
      norm. Nothing is corrected before that, so p means the same whatever the rule does;
    - "gate" `(batch,)`: share of the correction that the image got, 0 to 1;
    - "evidence" `(batch, norms)`: squared distance from clean at each norm of `norms`, in clean standard deviations;
      about 1 if clean.
    """

    def __init__(self, targets: Targets, norms: tuple[str, ...], rule: Rule) -> None:
        super().__init__()
        found = [targets.norms.get(name) or targets.gate[name] for name in norms]
        gate = _fit_gate(found[0], targets.sampled)
        self.norms, self.clean_images = norms, len(gate.held)
        self.calibration = _digest(norms[0], found[0], targets.sampled)
        self.ungated = float(rule.changes) if isinstance(rule, Evidence) else 1.0
        tensors: dict[str, Tensor] = {**gate._asdict(), "floor": _five_rows(found[0].floor)}
        # Norms with the same number of statistics are concatenated: their indices, and their channels.
        usual = [target.usual() for target in found]
        rows = [len(floor) for _, floor in usual]
        self.rows = sorted(set(rows))
        self.groups = [[k for k, own in enumerate(rows) if own == count] for count in self.rows]
        self.channels = [[usual[k][1].shape[1] for k in group] for group in self.groups]
        for number, group in enumerate(self.groups):
            side_by_side = (torch.cat([usual[k][part] for k in group], dim=-1).float() for part in (0, 1))
            tensors |= dict(zip((f"usual{number}", f"usual_floor{number}"), side_by_side, strict=True))
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self._store_constants(portable.gate_constants(gate, [self.get_buffer("floor")]))

    def forward(self, *values: Tensor) -> dict[str, Tensor]:
        moments, gate = values[: len(self.norms)], values[len(self.norms) :]
        p = self._p_values(moments[0])
        return {
            "p": p,
            "gate": gate[0] if gate else torch.full_like(p, self.ungated),
            "evidence": self._evidence(moments),
        }

    def _p_values(self, moments: Tensor) -> Tensor:
        """p-value per image, from the gate's kernel: a gate that opens from p = 1 to p = b has the value log p / log b.

        p is 0 for an image that is not finite, else at least 1 / (held-out images + 1).
        """
        smallest = 0.5 / (self.clean_images + 1)
        gate = Gate(*(getattr(self, name) for name in Gate._fields))
        numbers = (smallest, 1 / smallest, 0.0)
        opened = kernels.gate_values([moments], [self.get_buffer("floor")], gate, *numbers, constants=self._constants)
        return torch.where(opened < 1, torch.exp(opened * math.log(smallest)), 0.0)

    def _evidence(self, moments: Sequence[Tensor]) -> Tensor:
        """Mean evidence over channels and statistics at each norm `(batch, norms)`."""
        found: dict[int, Tensor] = {}
        for number, (rows, group, channels) in enumerate(zip(self.rows, self.groups, self.channels, strict=True)):
            usual, floor = self.get_buffer(f"usual{number}"), self.get_buffer(f"usual_floor{number}")
            together = torch.cat([moments[k] for k in group], dim=2)  # float32, or float64 if the model is
            together = together if together.dtype == torch.float32 else together.float()
            if rows == 3:  # the mean, and the variances of both bands
                together = torch.cat([together[:, :1], together[:, 2:4]], dim=1)
            z2 = evidence.z_squared(evidence.statistics(together[:, :rows], floor), usual).mean(dim=1)
            found |= {k: part.mean(dim=1) for k, part in zip(group, torch.split(z2, channels, dim=1), strict=True)}
        return torch.stack([found[k] for k in range(len(moments))], dim=1)

    def extra_repr(self) -> str:
        return f"{', '.join(self.norms)}; {self.clean_images} held-out images"


def reading_of(
    targets: Targets, rule: Rule, report: Reported, sites: Sequence[Site], corrected: Collection[str]
) -> Reading | None:
    """Return what `report=` reads: nothing, the first norm, or every norm."""
    if report is False:
        return None
    names = [site.name for site in sites]
    norms = reading_norms(targets, [name for name in names if name in targets.norms], report)
    if early := [name for name in names[: names.index(norms[0])] if name in corrected]:
        warnings.warn(
            f"correct: this rule corrects {early[0]!r} before the first norm, {norms[0]!r}, at which report= reads how "
            "unusual an image is: its p-values are not exact, and the false-alarm bound of trueup.Monitor does not "
            "hold; leave such sites out with select=",
            stacklevel=5,
        )

    def reader(site: Site) -> nn.Module:
        # A site that the gate reads too must be read as the gate does.
        return GateReader(site, bands=(targets.gate.get(site.name) or targets.norms[site.name]).bands)

    return Reading(norms, reader, ImageReport(targets, norms, rule))


def reading_norms(targets: Targets, known: Sequence[str], report: Reported) -> tuple[str, ...]:
    """Names of the norms that a report reads. The targets must hold them."""
    if report is not True and report != "all":
        raise ValueError(f"report={report!r}: expected False, True or 'all'")
    images = len(targets.norms[known[0]].sample) if known else 0
    if images < MIN_REPORT_IMAGES:
        held = f"only {images} images" if known else "no norm of this model"
        raise ValueError(
            f"these targets hold {held}, so they cannot tell an unusual image, and nothing can report how unusual "
            f"images are; calibrate a model with norms on {MIN_REPORT_IMAGES} images or more"
        )
    return tuple(known if report == "all" else known[:1])


def _fit_gate(target: NormTarget, hashes: Tensor) -> Gate:
    """A gate that reads one norm, fitted to its sampled images, which have these `hashes`."""
    clean = gate_functions.features(_five_rows(target.clean_moments()), _five_rows(target.floor))
    if target.bands:
        # The high band's mean absolute value is kept for the gate's own norms only. A constant feature is ignored.
        clean[:, -clean.shape[1] // 4 :] = 0
    return gate_functions.fit(clean, hashes[: len(clean)])


def _digest(name: str, target: NormTarget, hashes: Tensor) -> str:
    """Digest of what p-values depend on: the norm that is read, and its sampled images, which have these `hashes`.

    It is that of the stored numbers and not of the fitted gate, whose last bits may be others on another machine.
    """
    found = hashlib.sha256(f"{name} {tuple(target.sample.shape)}".encode())
    for tensor in (target.sample, hashes[: len(target.sample)]):
        found.update(tensor.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _five_rows(moments: Tensor) -> Tensor:
    """Add a fifth row to moments with bands `(..., 4, channels)`, as kernels take them; return others unchanged."""
    rows = moments.shape[-2]
    return torch.cat([moments, moments[..., 3:4, :]], dim=-2) if rows == 4 else moments
