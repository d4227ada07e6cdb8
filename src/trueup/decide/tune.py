"""Learn a weight for the evidence of each channel, from clean images and perturbed copies of them.

A channel may stand out because of how a picture was taken, or because of what it shows, and the cost of a mistake
depends on all later layers. So the weights are learned: the corrected model should answer a perturbed image, and the
clean one, as the model itself answers the clean one. This takes a few dozen steps of gradient descent at calibration,
and none at test time. It needs no labels, and does not touch the model's own parameters.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trueup import kernels
from trueup._answers import Answer, comparable, divergence, most_likely, relative_changes
from trueup.decide.perturb import PERTURBATIONS
from trueup.decide.pictures import Scales, largest_image, perturb_all, together
from trueup.decide.sample import ImageSample
from trueup.graph import Inputs, Instrumented, Site, Trace, device_of
from trueup.rules import Evidence
from trueup.rules.evidence import NUISANCE_FLOOR
from trueup.targets import NormTarget, Targets

START = Evidence(budget=1.0, strength=0.01, base=0.0, nuisance=True, floor=NUISANCE_FLOOR)
"""Setting from which learning starts."""

STEPS = 30
RATE = 0.2  # Adam's rate for the logarithms of the weights; it falls to zero along a cosine
PERTURBATIONS_PER_STEP = 3  # at each level, a batch is divided into this many groups, with one perturbation each
IMAGES_PER_PERTURBATION = 8  # at most this many images per group; fewer if they are large
HALF_SCALE = 4096.0  # of the loss of float16 models, whose small derivatives would otherwise be rounded to zero
BATCH_BYTES = 1 << 24  # at most this many bytes of images per training pass, which keeps all activations of a batch


def tuned_weights(
    traced: Trace,
    targets: Targets,
    sample: ImageSample,
    scales: Scales,
    *,
    sites: Sequence[Site],
    answer: Answer,
    levels: Sequence[float],
    shares: Sequence[float],
    report: Callable[[int], None],
) -> dict[str, Tensor] | None:
    """Learned weights of the evidence at each of the `sites`, `(2 or 3, channels)` float32; None if it is not possible.

    It is not for lists of boxes, which cannot be compared number by number, nor, with a warning, for a model without
    derivatives.

    `shares` are those of clean images and of each level of perturbation in the mean that is minimised. `report` is
    called with the number of images that passed through the model, forth and back. Random numbers depend on the sample
    alone.
    """
    device = device_of(traced.model)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            placed = {site.name: _Weighed(site, targets.norms[site.name].to(device)) for site in sites}
            network = Instrumented(traced, lambda site: placed.get(site.name))
            modules = list(placed.values())
            learned = _learn(traced.model, network, modules, sample, scales, answer, levels, shares, report)
    except (RuntimeError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        memory = isinstance(error, torch.OutOfMemoryError)
        why = "the device has too little memory" if memory else "the model cannot be differentiated"
        warnings.warn(
            f"calibrate: no weights could be learned, because {why} ({reason}); only fixed settings are tried",
            stacklevel=6,
        )
        return None
    return {name: module.weights() for name, module in placed.items()} if learned else None


class _Weighed(nn.Module):
    """Applies `START` with weights that can be learned."""

    def __init__(self, site: Site, target: NormTarget) -> None:
        super().__init__()
        self.channel_dim = site.channel_dim
        self.reference = target.reference(START).float()
        self.shares = target.nuisance_shares(START).float()
        self.common = torch.zeros_like(self.shares[:, :1]).requires_grad_()  # of the whole norm: it learns sooner
        self.own = torch.zeros_like(self.shares).requires_grad_()

    def forward(self, a: Tensor) -> Tensor:
        centre, spread, kappa, *others = self.reference.unbind()
        reference = torch.stack([centre, spread, kappa * torch.exp(-self.common - self.own), *others])
        return kernels.realign(a, reference, channels=self.channel_dim)

    def weights(self) -> Tensor:
        """Weights as a target keeps them."""
        found = self.shares * torch.exp(self.common + self.own).detach()
        return found.clamp(1e-6, 1e6).cpu()


def _learn(
    model: nn.Module,
    network: nn.Module,
    placed: Sequence[_Weighed],
    sample: ImageSample,
    scales: Scales,
    answer: Answer,
    levels: Sequence[float],
    shares: Sequence[float],
    report: Callable[[int], None],
) -> bool:
    """Learn the weights in place. Return whether outputs could be compared."""
    device = device_of(model)
    draw = torch.Generator().manual_seed(0)
    learned = [part for module in placed for part in (module.common, module.own)]
    scale = HALF_SCALE if any(p.dtype == torch.float16 for p in model.parameters()) else 1.0
    optimiser = torch.optim.Adam(learned, lr=RATE, betas=(0.9, 0.95))
    for step in range(STEPS):
        optimiser.param_groups[0]["lr"] = RATE * (1 + math.cos(math.pi * step / STEPS)) / 2
        numbers, clean = sample.draw(PERTURBATIONS_PER_STEP * IMAGES_PER_PERTURBATION, draw)
        fits = max(PERTURBATIONS_PER_STEP, BATCH_BYTES // max(1, largest_image(clean)))
        numbers, clean = numbers[:fits], clean.part(0, fits).to(device, copy=True)
        with torch.no_grad():
            clean_answers = clean.run(model)
        if answer is not most_likely and not comparable(clean_answers, len(numbers)):
            return False
        optimiser.zero_grad()
        for level, share in zip((0.0, *levels), shares, strict=True):
            inputs = _perturbed(clean, numbers, scales, level, step, draw) if level else clean
            answers = inputs.run(network)
            if answer is most_likely:
                distance = divergence(clean_answers, answers)
            else:
                distance = relative_changes(clean_answers, answers, len(numbers), answer).mean(dim=0)
            loss = scale * share * distance.mean()
            found = torch.autograd.grad(loss, learned, allow_unused=True)
            for part, gradient in zip(learned, found, strict=True):
                if gradient is not None:
                    gradient = torch.nan_to_num(gradient / scale, posinf=0.0, neginf=0.0)
                    part.grad = gradient if part.grad is None else part.grad + gradient
            report(len(numbers))
        optimiser.step()
    return True


def _perturbed(
    clean: Inputs, numbers: Tensor, scales: Scales, level: float, step: int, draw: torch.Generator
) -> Inputs:
    """Perturbed copies of a batch, in its order: a random perturbation for each of a few groups of images."""
    names = list(PERTURBATIONS)
    parts = []
    for rows in torch.arange(len(numbers), device="cpu").tensor_split(PERTURBATIONS_PER_STEP):
        if len(rows):
            name = names[int(torch.randint(len(names), (), generator=draw, device="cpu"))]
            some = clean.part(int(rows[0]), int(rows[-1]) + 1)
            parts.append(perturb_all(some, name, scales, numbers=numbers[rows], level=level, seed=1 + step))
    return together(parts)
