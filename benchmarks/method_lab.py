"""Which rule corrects single images best? Many rules, calibrated and scored on many models.

Chosen on clean images and four corruptions only (speckle noise, gaussian blur, spatter, saturate; for MNIST blur,
speckle and fade, none of them in MNIST-C); the fifteen others only with `--final`.

    PYTHONPATH=src python benchmarks/method_lab.py sweep --data ROOT --out DIR --device cuda --time-limit 240

writes sweep.csv (a row a set), summary.csv (a row a model and rule) and report.txt as it goes. What is not there is
skipped, and said. In the report: `agree`, the share of clean test predictions that stay; `regret`, how much less
probable the uncorrected model finds the new answers, in points; `held`, the same two on clean images kept out of the
calibration (for ImageNet, on the calibration's own). For rules with a gate: `x1`, `x5`, `x20`, the share of clean test
images whose exceedance is at most 1, 5, 20 % (calibrated if it is that); `found`, of the corrupted ones at most 5 %.
"""

from __future__ import annotations

import argparse
import copy
import csv
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trueup import functional
from trueup.correction import Correction
from trueup.data import cifar10, imagenet, mnist
from trueup.data.corruptions import corrupt, corruptions, severities
from trueup.data.corruptions.blur import gaussian_blur
from trueup.data.images import IMAGENET, NORMALISATION, Images, Normalisation
from trueup.models.files import read_models
from trueup.models.norms import FilterResponseNorm
from trueup.models.public import load_public

CHOOSE = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
EPS = 1e-3  # of a channel's training variance: the least that counts as a channel's variance


# ---------------------------------------------------------------- sites


@dataclass
class Context:
    """What the sites of one forward pass share."""

    fitting: bool = False
    rules: dict[str, Any] = field(default_factory=dict)  # kind of site -> rule
    memory: dict[str, Any] = field(default_factory=dict)  # what a rule carries from site to site, an image a row
    depth: int = 0  # sites met so far
    probing: bool = False  # a pass that only reads what the gate needs


class Enough(Exception):  # noqa: N818
    """The gate has what it needs: the rest of the probing pass is not run."""


class Site(nn.Module):
    """Per-channel statistics at one place, a rule made of them, and the affine map that the rule asks for."""

    kind = "norm"

    def __init__(self, name: str, context: Context) -> None:
        super().__init__()
        self.name, self.context = name, context
        self.fitted: dict[str, Any] = {}

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.dim() == 2:
            return x, torch.zeros_like(x)
        if x.is_cuda:
            var, mean = torch.var_mean(x, dim=(2, 3), correction=0)
            return mean, var
        flat = x.flatten(2)  # 20 times as fast as var_mean on the CPU
        mean = flat.mean(2)
        square = torch.linalg.vector_norm(flat, dim=2) ** 2 / flat.shape[2]
        return mean, (square - mean**2).clamp_min(0)

    def act(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor] | None:
        """(gain, offset), each (N, C): y -> (y - mean) * gain + offset; None to leave alone."""
        rule = self.context.rules.get(self.kind)
        if rule is None:
            return None
        self.context.depth += 1
        if self.context.fitting:
            self.fitted = rule.fit(mean, var, self)
        return rule.apply(mean, var, self.fitted, self.context)


class NormSite(Site):
    """A norm, with the rule between its standardisation and its affine part."""

    def __init__(self, norm: nn.Module, name: str, context: Context) -> None:
        super().__init__(name, context)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        rule = self.context.rules.get("norm")
        if rule is None:
            return self.norm(x)
        if isinstance(rule, Gated) and not rule.wants(self.context):
            return self.norm(x)
        if isinstance(rule, Bands):
            self.context.depth += 1
            if rule.covers(x, self.context):
                mean, var = self.moments(x)
                alpha, beta = self.standardiser(mean, var)
                alpha, beta = (t.expand(x.shape[:2])[..., None, None] for t in (alpha, beta))
                y = torch.addcmul(beta, x, alpha)
                if isinstance(rule, Gated) and rule.gates(self.context):
                    rule.look(y, self.context)
                if self.context.probing:
                    return torch.addcmul(self.norm.bias[:, None, None], y, self.norm.weight[:, None, None])
                if self.context.fitting:
                    self.fitted = rule.fit_map(y, rule.banded(x, self.context))
                y = y if rule.passive else rule.apply_map(y, self.fitted)
                return torch.addcmul(self.norm.bias[:, None, None], y, self.norm.weight[:, None, None])
            self.context.depth -= 1
        mean, var = self.moments(x)
        alpha, beta = self.standardiser(mean, var)
        if getattr(rule, "absolute", False):  # the mean absolute deviation, which local outliers move less
            var = (x - mean[..., None, None]).abs().mean((2, 3)) ** 2
        change = self.act(alpha * mean + beta, alpha**2 * var)
        w, b = self.norm.weight, self.norm.bias
        if change is None:
            gain, shift = alpha * w, beta * w + b
        else:
            g, offset = change
            gain, shift = w * alpha * g, w * (offset - alpha * mean * g) + b
        gain, shift = gain.expand(x.shape[:2]), shift.expand(x.shape[:2])
        return torch.addcmul(shift[..., None, None], x, gain[..., None, None])

    def standardiser(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        norm = self.norm
        if isinstance(norm, nn.BatchNorm2d):
            alpha = torch.rsqrt(norm.running_var + norm.eps)[None]
            return alpha, -norm.running_mean * alpha
        if isinstance(norm, nn.GroupNorm):
            shape = (len(mean), norm.num_groups, -1)
            m = mean.view(shape)
            centre = m.mean(-1, keepdim=True)
            total = (var.view(shape) + (m - centre) ** 2).mean(-1, keepdim=True)
            alpha = torch.rsqrt(total + norm.eps).expand(shape[0], shape[1], m.shape[2])
            return alpha.reshape(mean.shape), (-centre * alpha).reshape(mean.shape)
        if isinstance(norm, FilterResponseNorm):
            alpha = torch.rsqrt(mean**2 + var + abs(norm.eps))
            return alpha, torch.zeros_like(alpha)
        raise TypeError(type(norm).__name__)


class ActSite(Site):
    """An activation function, with a rule on what goes in (`pre`) and on what comes out (`post`, `layer`)."""

    def __init__(self, act: Callable[[Tensor], Tensor], name: str, context: Context) -> None:
        super().__init__(name, context)
        self.activation = act
        self.pre = Plain("pre", f"{name}.pre", context)
        self.post = Plain("post", f"{name}.post", context)
        self.layer = Shape(f"{name}.layer", context)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.post(self.activation(self.pre(x))))


class Plain(Site):
    """A place without a norm."""

    def __init__(self, kind: str, name: str, context: Context) -> None:
        super().__init__(name, context)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.context.rules.get(self.kind) is None:
            return x
        mean, var = self.moments(x)
        change = self.act(mean, var)
        if change is None:
            return x
        gain, offset = change
        y = x * gain[..., None, None] + (offset - mean * gain)[..., None, None]
        return torch.where(x == 0, x, y) if self.kind == "post" and self.context.rules["post"].sparse else y


class Shape(Site):
    """The paper's: the order statistics of a whole layer."""

    kind = "layer"

    def forward(self, x: Tensor) -> Tensor:
        rule = self.context.rules.get("layer")
        if rule is None:
            return x
        if self.context.probing:
            return x
        if self.context.fitting:
            self.fitted = rule.fit_rows(x)
        y = rule.apply_rows(x, self.fitted)
        gate = getattr(self.context.rules.get("norm"), "g", None)
        return y if gate is None else torch.lerp(x, y, gate.view(-1, *[1] * (x.dim() - 1)))


class Head(Plain):
    """The classifier, with a rule on its input."""

    def __init__(self, fc: nn.Module, context: Context) -> None:
        super().__init__("head", "head", context)
        self.fc = fc

    def forward(self, x: Tensor) -> Tensor:
        if self.context.rules.get("head") is not None:
            change = self.act(x, torch.zeros_like(x))
            x = x if change is None else change[1]
        return self.fc(x)


class InputSite(Site):
    """The image itself, before the network."""

    kind = "input"

    def forward(self, x: Tensor) -> Tensor:
        rule = self.context.rules.get("input")
        if rule is None:
            return x
        if self.context.fitting:
            self.fitted = rule.fit_map(x)
        return x if rule.passive else rule.apply_map(x, self.fitted)


class Lab(nn.Module):
    """A model with sites everywhere; rules are set by `use`, and calibrated in one pass over one big batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.context = Context()
        self.model = copy.deepcopy(model).eval()
        for parent_name, parent in list(self.model.named_modules()):
            for name, child in list(parent.named_children()):
                path = f"{parent_name}.{name}".strip(".")
                if isinstance(child, nn.BatchNorm2d | nn.GroupNorm | FilterResponseNorm):
                    setattr(parent, name, NormSite(child, path, self.context))
            for name in ("act1", "act2", "act3", "relu"):
                if hasattr(parent, name) and not isinstance(parent, Site):
                    act = getattr(parent, name)
                    act = F.relu if act is F.relu or isinstance(act, nn.ReLU) else act
                    if name in parent._modules:
                        delattr(parent, name)
                    else:
                        parent.__dict__.pop(name, None)
                    setattr(parent, name, ActSite(act, f"{parent_name}.{name}".strip("."), self.context))
        self.model.fc = Head(self.model.fc, self.context)
        self.input = InputSite("input", self.context)

    def sites(self, kind: str) -> list[Site]:
        return [m for m in self.modules() if isinstance(m, Site) and m.kind == kind and not isinstance(m, ActSite)]

    def forward(self, x: Tensor) -> Tensor:
        self.context.memory, self.context.depth = {}, 0
        rule = self.context.rules.get("norm")
        if not isinstance(rule, Gated) or self.context.fitting:
            return self.model(self.input(x))
        rule.g, plain = None, None
        if rule.probes:
            self.context.probing = True
            try:
                plain = self.model(x)
            except Enough:
                pass
            finally:
                self.context.probing = False
            self.context.depth = 0
            gate = rule.g
            rule.g = None if rule.mode == "mix" else gate
        out = self.model(self.input(x))
        if plain is None:
            return out
        return ((1 - gate) * plain.softmax(1) + gate * out.softmax(1)).clamp_min(1e-30).log()

    @torch.inference_mode()
    def use(self, rules: dict[str, Any], clean: Tensor, *, sequential: bool = True) -> None:
        """Set the rules and calibrate them on `clean`, in one batch: a site's statistics are those it will meet."""
        self.context.rules = rules
        if not any(rule is not None for rule in rules.values()):
            return
        self.context.fitting = True
        for rule in rules.values():
            rule.passive = not sequential
        self(clean)
        for rule in rules.values():
            rule.passive = False
        self.context.fitting = False

    @torch.inference_mode()
    def logits(self, images: Tensor, normalise: Normalisation, batch: int) -> Tensor:
        return torch.cat([self(normalise(images[i : i + batch])) for i in range(0, len(images), batch)])


# ---------------------------------------------------------------- rules


def local_mean(x: Tensor, size: int) -> Tensor:
    if x.is_cuda or size != 3:
        return F.avg_pool2d(x, size, 1, size // 2, count_include_pad=False)
    rows = x.clone()  # several times as fast as avg_pool2d on the CPU
    rows[..., 1:] += x[..., :-1]
    rows[..., :-1] += x[..., 1:]
    y = rows.clone()
    y[..., 1:, :] += rows[..., :-1, :]
    y[..., :-1, :] += rows[..., 1:, :]
    across, down = x.new_full((x.shape[-1],), 1 / 3), x.new_full((x.shape[-2], 1), 1 / 3)
    across[[0, -1]] = down[[0, -1]] = 0.5
    return y.mul_(across * down)


def log_deviation(var: Tensor, floor: Tensor) -> Tensor:
    return 0.5 * (var + floor).log()


@dataclass
class Mix:
    """Batch norm's mixing: `prior` images of training's statistics and one image's own."""

    prior: float
    passive: bool = False
    sparse: bool = False

    def fit(self, mean: Tensor, var: Tensor, site: Site) -> dict[str, Any]:
        if isinstance(site, NormSite) and isinstance(site.norm, nn.BatchNorm2d):
            return {"m": torch.zeros_like(mean[:1]), "v": torch.ones_like(mean[:1])}
        m = mean.mean(0, keepdim=True)
        return {"m": m, "v": (var + (mean - m) ** 2).mean(0, keepdim=True)}

    def apply(self, mean: Tensor, var: Tensor, p: dict[str, Any], _: Context) -> tuple[Tensor, Tensor] | None:
        if self.passive:
            return None
        own = 1 / (1 + self.prior)
        centre = p["m"] + own * (mean - p["m"])
        gain = torch.sqrt(p["v"] / (p["v"] * (1 - own) + var * own))
        return gain, p["m"] + (mean - centre) * gain


@dataclass
class Evidence:
    """Move each channel's mean and log-deviation towards training's, in proportion to the evidence of a shift.

    kappa: evidence (z squared) at which half the way is gone
    pool: share of the layer's evidence in the channel's (0: channel only, 1: layer only)
    carry: share of the evidence that earlier layers found
    weight: 'ratio' e/(e+kappa), 'james' max(0, 1 - kappa/e), 'logistic', 'square' e^2/(e^2+kappa^2)
    unit: how evidence is scaled on clean images: 'spread' (z), 'robust' (z of the 98% quantile), 'layer' (mean
        evidence of a layer's clean images 1), 'budget' (kappa is the energy of clean variation that may be lost)
    parts: 'both', 'mean', 'scale'
    joint: mean and scale share their evidence
    """

    kappa: float = 16.0
    pool: float = 0.0
    carry: float = 0.0
    weight: str = "ratio"
    unit: str = "spread"
    parts: str = "both"
    joint: bool = False
    strength: float = 1.0
    layer_kappa: float = 0.0
    cov: str = ""
    shrink: float = 0.02
    temper: float = 1.0
    absolute: bool = False  # deviations in the mean, not in the root of the mean square
    last: int = 1000  # sites deeper than this are left alone
    sparse: bool = False
    passive: bool = False

    def fit(self, mean: Tensor, var: Tensor, _site: Site) -> dict[str, Any]:
        floor = EPS * var.mean(0, keepdim=True) + 1e-12
        scale = log_deviation(var, floor)
        p: dict[str, Any] = {"floor": floor}
        for key, values in (("m", mean), ("s", scale)):
            centre = values.mean(0, keepdim=True)
            spread = values.std(0, keepdim=True, correction=0)
            if self.unit == "robust":
                d = (values - centre).abs()
                q = quantile(d, 0.98) / 2.326
                spread = torch.maximum(spread, q)
            spread = spread + 1e-4 * spread.mean() + 1e-12
            p[key] = (centre, spread)
            e = ((values - centre) / spread) ** 2
            p["k" + key] = self._kappa(e, getattr(self, "rest", 0.0) or None)
        if self.cov:
            z = torch.cat([(mean - p["m"][0]) / p["m"][1], (scale - p["s"][0]) / p["s"][1]], dim=1)
            r = z.T.double() @ z.double() / len(z)
            values, vectors = torch.linalg.eigh(r)
            values = ((1 - self.shrink) * values + self.shrink).float()
            p["values"], p["vectors"] = values[None].clamp_min(1e-3), vectors.float()
            if self.cov == "pca":
                x = z @ p["vectors"]
                p["components"] = self._kappa(x**2 / p["values"])
            if self.cov == "mahalanobis":
                e = self._mahalanobis(z, p)
                p["unit"] = e.mean()
        return p

    def _mahalanobis(self, z: Tensor, p: dict[str, Any]) -> Tensor:
        return ((z @ p["vectors"]) ** 2 / p["values"]).mean(1, keepdim=True)

    def _wiener(self, z: Tensor, p: dict[str, Any]) -> Tensor:
        """The posterior mean of the shift, its variance unknown: averaged over a grid, with prior odds kappa."""
        x, values = z @ p["vectors"], p["values"]
        grid = torch.tensor([0.0, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 512], device=z.device)
        total = values + grid[:, None]  # (T, D)
        fit = -0.5 * (total.log().sum(1) + (x**2) @ (1 / total).T)  # (N, T)
        fit = fit * self.temper
        prior = torch.full_like(grid, 1.0).log()
        prior[0] += self.kappa
        post = torch.softmax(fit + prior, dim=1)
        w = post @ (grid[:, None] / total)  # (N, D)
        return (x * w) @ p["vectors"].T

    def _kappa(self, e: Tensor, budget: float | None = None) -> Any:
        """The clean evidence of a site to the kappa it needs."""
        budget = self.kappa if budget is None else budget
        pooled = self._pooled(e)
        if self.unit == "layer":  # quantile of layer evidence: 99 of 100 clean images lie below
            return torch.quantile(pooled.mean(1), 0.95) * self.kappa
        if self.unit == "exceed":
            return quantile(pooled, 0.99) * self.kappa
        if self.unit == "budget":
            # w(e) e summed over clean images, relative to the clean variance: the same at every channel
            lo = torch.full_like(pooled[:1], -6.0)
            hi = torch.full_like(lo, 14.0)
            for _ in range(30):
                mid = (lo + hi) / 2
                w = self._weight(pooled, mid.exp())
                lost = (w**2 * e).mean(0, keepdim=True) / e.mean(0, keepdim=True).clamp_min(1e-12)
                lo, hi = torch.where(lost > budget, mid, lo), torch.where(lost > budget, hi, mid)
            return hi.exp()
        return self.kappa

    def _pooled(self, e: Tensor) -> Tensor:
        if self.pool == 0:
            return e
        return (1 - self.pool) * e + self.pool * e.mean(1, keepdim=True)

    def _weight(self, e: Tensor, kappa: Any) -> Tensor:
        g = getattr(self, "g", None)  # an image's gate, (N, 1)
        if g is None:
            return self._plain_weight(e, kappa)
        return self._plain_weight(e * g, kappa) if self.mode == "kappa" else g * self._plain_weight(e, kappa)

    def _plain_weight(self, e: Tensor, kappa: Any) -> Tensor:
        if self.weight == "ratio":
            return e / (e + kappa)
        if self.weight == "james":
            return (1 - kappa / e.clamp_min(1e-9)).clamp_min(0)
        if self.weight == "square":
            return e**2 / (e**2 + kappa**2)
        if self.weight == "fourth":
            return e**4 / (e**4 + kappa**4)
        if self.weight == "soft":  # soft threshold at sqrt(kappa) spreads
            return (1 - (kappa / e.clamp_min(1e-9)) ** 0.5).clamp_min(0)
        raise ValueError(self.weight)

    def apply(self, mean: Tensor, var: Tensor, p: dict[str, Any], context: Context) -> tuple[Tensor, Tensor] | None:
        if self.passive or context.depth > self.last:
            return None
        scale = log_deviation(var, p["floor"])
        (mm, mv), (sm, sv) = p["m"], p["s"]
        zm, zs = (mean - mm) / mv, (scale - sm) / sv
        if self.cov == "wiener":
            d = self._wiener(torch.cat([zm, zs], dim=1), p)
            dm, ds = d.chunk(2, dim=1)
            return (-ds * sv * self.strength).exp(), mean - dm * mv * self.strength
        if self.cov == "pca":
            x = torch.cat([zm, zs], dim=1) @ p["vectors"]
            w = self._weight(x**2 / p["values"], p["components"])
            dm, ds = ((w * x) @ p["vectors"].T).chunk(2, dim=1)
            return (-ds * sv).exp(), mean - dm * mv
        em, es = zm**2, zs**2
        if self.cov == "mahalanobis":
            e = self._mahalanobis(torch.cat([zm, zs], dim=1), p) / p["unit"]
            em = em * (1 - self.pool) + self.pool * e
            es = es * (1 - self.pool) + self.pool * e
            wm, ws = self._weight(em, p["km"]), self._weight(es, p["ks"])
            return (ws * (sm - scale)).exp(), mean + wm * (mm - mean)
        if self.joint:
            em = es = (em + es) / 2
        em, es = self._pooled(em), self._pooled(es)
        if self.carry > 0:
            own = ((zm**2).mean(1, keepdim=True) + (zs**2).mean(1, keepdim=True)) / 2
            seen = context.memory.get("evidence")
            seen = own if seen is None else torch.maximum(seen, own)
            context.memory["evidence"] = seen
            em, es = em + self.carry * seen, es + self.carry * seen
        wm, ws = self._weight(em, p["km"]), self._weight(es, p["ks"])
        if self.layer_kappa > 0:
            own = ((zm**2).mean(1, keepdim=True) + (zs**2).mean(1, keepdim=True)) / 2
            gate = own / (own + self.layer_kappa)
            wm, ws = wm * gate, ws * gate
        dm, ds = wm * (mm - mean), ws * (sm - scale)
        if self.parts == "mean":
            ds = torch.zeros_like(ds)
        if self.parts == "scale":
            dm = torch.zeros_like(dm)
        s = self.strength
        return (s * ds).exp(), mean + s * dm


@dataclass
class Bands(Evidence):
    """The same, with the deviation of each band of spatial frequencies on its own."""

    sizes: tuple[int, ...] = (3,)
    first: int = 1000  # sites that have bands; the others are as in Evidence
    least: int = 8  # side of the map below which there are none
    rest: float = 0.0  # strength at the sites without bands, where it is another
    clip: float = 0.0  # pixels beyond what this share of clean images holds are brought back to it
    shape: float = 0.0  # how far the sparsity of the high band goes back to training's, by a power

    def covers(self, x: Tensor, context: Context) -> bool:
        return bool(self.clip) or self.banded(x, context)

    def banded(self, x: Tensor, context: Context) -> bool:
        return context.depth <= self.first and min(x.shape[2:]) >= self.least

    def split(self, y: Tensor, banded: bool) -> list[Tensor]:
        parts, rest = [], y
        for size in self.sizes if banded else ():
            low = local_mean(rest, size)
            parts.append(rest - low)
            rest = low
        return [*parts, rest]

    def power(self, y: Tensor) -> tuple[Tensor, Tensor]:
        flat = y.flatten(2)
        mean = flat.mean(2)
        if self.absolute:
            return mean, (flat - mean[..., None]).abs().mean(2) ** 2
        return mean, (torch.linalg.vector_norm(flat, dim=2) ** 2 / flat.shape[2] - mean**2).clamp_min(0)

    def fit_map(self, y: Tensor, banded: bool = True) -> dict[str, Any]:
        p: dict[str, Any] = {"bands": [], "banded": banded}
        if self.clip:
            p["low"] = quantile(y.amin((2, 3)), 1 - self.clip)[..., None, None]
            p["high"] = quantile(y.amax((2, 3)), self.clip)[..., None, None]
            y = torch.minimum(torch.maximum(y, p["low"]), p["high"])
        p["m"] = self.shrink_fit(y.mean((2, 3)))
        for part in self.split(y, banded):
            _, var = self.power(part)
            floor = EPS * var.mean(0, keepdim=True) + 1e-12
            p["bands"].append((floor, self.shrink_fit(log_deviation(var, floor))))
        if self.shape and banded:
            high = self.split(y, banded)[0]
            p["sparsity"] = self.shrink_fit(self.sparsity(high))
        return p

    def sparsity(self, high: Tensor) -> Tensor:
        flat = high.flatten(2)
        return (flat.abs().mean(2) / (torch.linalg.vector_norm(flat, dim=2) / flat.shape[2] ** 0.5 + 1e-6) + 1e-3).log()

    def core(self, high: Tensor, p: dict[str, Any]) -> Tensor:
        rms = torch.linalg.vector_norm(high.flatten(2), dim=2) / (high[0, 0].numel() ** 0.5) + 1e-6
        power = 1 - self.shape * self.shift(self.sparsity(high), p["sparsity"]) / 0.32
        power = power.clamp(0.7, 2.0)[..., None, None]
        bent = high.sign() * (high.abs() / rms[..., None, None] + 1e-6) ** power
        again = torch.linalg.vector_norm(bent.flatten(2), dim=2) / (high[0, 0].numel() ** 0.5) + 1e-6
        return bent * (rms / again)[..., None, None]

    def shrink_fit(self, values: Tensor) -> tuple[Tensor, Tensor, Any]:
        centre, spread = values.mean(0, keepdim=True), values.std(0, keepdim=True, correction=0)
        spread = spread + 1e-4 * spread.mean() + 1e-12
        return centre, spread, self._kappa(((values - centre) / spread) ** 2)

    def shift(self, values: Tensor, fitted: tuple[Tensor, Tensor, Any]) -> Tensor:
        centre, spread, kappa = fitted
        d = values - centre
        return -self._weight(self._pooled((d / spread) ** 2), kappa) * d

    def apply_map(self, y: Tensor, p: dict[str, Any]) -> Tensor:
        if self.clip:
            y = torch.minimum(torch.maximum(y, p["low"]), p["high"])
        mean = y.mean((2, 3))
        out = None
        parts = self.split(y, p["banded"])
        if self.shape and p["banded"]:
            parts[0] = self.core(parts[0], p)
        for part, (floor, fitted) in zip(parts, p["bands"], strict=True):
            centre, var = self.power(part)
            gain = self.shift(log_deviation(var, floor), fitted).exp()
            bias = -centre * gain
            if out is None:
                out = torch.addcmul(
                    (bias + mean + self.shift(mean, p["m"]))[..., None, None], part, gain[..., None, None]
                )
            else:
                out.addcmul_(part, gain[..., None, None]).add_(bias[..., None, None])
        return out


@dataclass
class Gated(Bands):
    """The same, as far as the first layers find the whole image unusual: an image inside clean's range is left alone.

    At the sites `gate_sites` four statistics a channel (mean, log-deviation of the low and of the high band, sparsity
    of the high band) become normal scores by their quantiles on clean images, and together one squared Mahalanobis
    distance. Its share of exceedance on clean images, p, opens the gate: g = 0 for p >= closed, 1 for p <= opened,
    linear in log p between. Statistics are fitted on one half of the calibration images, p on the other.
    mode: 'kappa' evidence times g, 'weight' weights times g, 'mix' probabilities of both passes mixed by g
    """

    gate_sites: tuple[int, ...] = (6, 7)
    closed: float = 0.2
    opened: float = 0.01
    mode: str = "kappa"
    start: int = 1  # sites before this one are left alone
    ridge: float = 0.03
    robust: bool = False  # log(1 + z^2) of each principal component in place of z^2
    g: Any = None
    seen: list[Tensor] = field(default_factory=list)  # exceedances of the images met since calibration

    def at_resnet50(self) -> None:
        """The end of its first stage, and what few calibration images allow."""
        self.gate_sites, self.ridge, self.start = (10,), 0.3, 1 if self.start == 1 else 10

    @property
    def probes(self) -> bool:
        return self.mode == "mix" or self.start < max(self.gate_sites)

    def wants(self, context: Context) -> bool:
        """Whether the site now met has anything to do; counts it if not."""
        depth = context.depth + 1
        if context.fitting or depth in self.gate_sites or (not context.probing and depth >= self.start):
            return True
        context.depth = depth
        return False

    def covers(self, x: Tensor, context: Context) -> bool:
        return context.depth in self.gate_sites or super().covers(x, context)

    def gates(self, context: Context) -> bool:
        return context.depth in self.gate_sites and (context.fitting or context.probing or not self.probes)

    def look(self, y: Tensor, context: Context) -> None:
        low, high = y, None
        if min(y.shape[2:]) >= 3:
            high, low = self.split(y, True)
        mean, var = self.power(low)
        features = [mean, 0.5 * (var + 1e-6).log()]
        if high is not None:
            features += [0.5 * (self.power(high)[1] + 1e-6).log(), self.sparsity(high)]
        seen = context.memory.setdefault("gate", [])
        seen.append(torch.cat(features, dim=1))
        if context.depth < max(self.gate_sites):
            return
        x = torch.cat(seen, dim=1)
        if context.fitting:
            self.fit_gate(x)
            return
        self.g = self.openness(self.score(x))
        if context.probing and self.mode != "mix":
            raise Enough

    def fit_gate(self, x: Tensor) -> None:
        fit, rank = x[::2], x[1::2]
        n = len(fit)
        top = torch.special.ndtri(torch.tensor(1 - 0.5 / n)).item()
        self.levels = torch.linspace(-top, top, 65, device=x.device)
        at = torch.special.ndtr(self.levels) * n - 0.5
        ordered = fit.sort(0).values
        i = at.floor().clamp(0, n - 2).long()
        f = (at - i).clamp(0, 1)[:, None]
        knots = ordered[i] * (1 - f) + ordered[i + 1] * f
        rise = 1e-5 * fit.std(0) + 1e-9
        knots = knots + rise * torch.arange(len(knots), device=x.device)[:, None]
        self.knots = knots.T.contiguous()  # (D, K)
        middle = self.knots[:, 32]
        k = (torch.special.ndtr(self.levels) > 0.98).float().argmax().item()
        self.tails = ((self.knots[:, k] - middle) / self.levels[k], (middle - self.knots[:, -1 - k]) / self.levels[k])
        z = self.normal(fit)
        self.gate_mean = z.mean(0)
        z = (z - self.gate_mean).double()
        cov = z.T @ z / n
        cov = (1 - self.ridge) * cov + self.ridge * torch.diag(cov.diag())
        values, vectors = torch.linalg.eigh(cov)
        self.whiten = (vectors / values.clamp_min(1e-6).sqrt()).float()
        self.reference = self.score(rank).sort().values

    def normal(self, x: Tensor) -> Tensor:
        """Normal scores by the knots, linear beyond them."""
        t = x.T.contiguous()
        i = torch.searchsorted(self.knots, t).clamp(1, self.knots.shape[1] - 1)
        a, b = self.knots.gather(1, i - 1), self.knots.gather(1, i)
        step = self.levels[1] - self.levels[0]
        z = self.levels[i - 1] + step * ((t - a) / (b - a)).clamp(0, 1)
        up, down = self.tails
        above, below = (t - self.knots[:, -1:]).clamp_min(0), (self.knots[:, :1] - t).clamp_min(0)
        return (z + above / up[:, None] - below / down[:, None]).T

    def score(self, x: Tensor) -> Tensor:
        z = (self.normal(x) - self.gate_mean) @ self.whiten
        return (z**2).log1p().mean(1) if self.robust else (z**2).mean(1)

    def exceedance(self, score: Tensor) -> Tensor:
        n = len(self.reference)
        return (n - torch.searchsorted(self.reference, score.contiguous()) + 1).float() / (n + 1)

    def openness(self, score: Tensor) -> Tensor:
        p = self.exceedance(score)
        self.seen.append(p)
        span = torch.tensor(self.closed / self.opened).log()
        g = ((self.closed / p).log() / span).clamp(0, 1)
        return g[:, None]


def quantile(values: Tensor, level: float) -> Tensor:
    """Of each column, (1, C); torch.quantile refuses large inputs."""
    ordered = values.sort(0).values
    return ordered[round(level * (len(values) - 1))][None]


@dataclass
class Paper:
    """The paper's correction after every activation."""

    step: float
    location: str = "keep"
    kappa: float = 0.0  # weight each order statistic's update by its evidence
    passive: bool = False

    def fit_rows(self, x: Tensor) -> dict[str, Any]:
        rows = x.flatten(1).sort(1).values
        target = rows.mean(0)
        p = {"target": target}
        if self.kappa > 0:
            c = rows - rows.mean(1, keepdim=True) if self.location == "keep" else rows
            p["centre"], p["spread"] = c.mean(0), c.std(0) + 1e-6
        return p

    def apply_rows(self, x: Tensor, p: dict[str, Any]) -> Tensor:
        if self.passive:
            return x
        if self.kappa == 0:
            c = Correction(lambda1=self.step, lambda2=0.0, location=self.location)  # type: ignore[arg-type]
            return functional.correct(x, p["target"], c)
        rows = x.flatten(1)
        ordered, order = rows.sort(1)
        c = ordered - ordered.mean(1, keepdim=True) if self.location == "keep" else ordered
        z = (c - p["centre"]) / p["spread"]
        w = z**2 / (z**2 + self.kappa)
        new = ordered + self.step * w * (p["centre"] - c)
        y = torch.empty_like(rows).scatter_(1, order, new)
        return torch.where(rows == 0, rows, y).view(x.shape)


# ---------------------------------------------------------------- data


@dataclass
class Task:
    """One family's images: for calibration, for choosing clean, and the corrupted sets."""

    name: str
    normalise: Normalisation
    calibration: Tensor  # uint8
    held: Tensor  # uint8, clean training images kept out of the calibration
    sets: dict[tuple[str, int], Images]


def task(
    name: str,
    root: Path,
    *,
    device: str,
    calibrate: int,
    held: int,
    images: int,
    clean: int,
    levels: Iterable[int],
    names: Iterable[str] | None = None,
    cache: Path | None = None,
) -> Task:
    if name == "cifar10":
        train = partial_cifar(root)
        test = cifar10.load("test", root)
        family, normalise = "cifar10-c", NORMALISATION["cifar10"]
    elif name == "mnist":
        train, test = mnist.load("train", root), mnist.load("test", root)
        family, normalise = "mnist-c", NORMALISATION["mnist"]
    else:
        folder = imagenet.ImageFolder(root / "imagenet_val_1k" / "val")
        every = cached(cache, "imagenet", lambda: read_folder(folder))
        even = torch.arange(0, len(every), 2)
        odd = even + 1
        train = Images(every.images[even], every.labels[even])
        test = Images(every.images[odd], every.labels[odd])
        family, normalise = "imagenet-c", IMAGENET
        calibrate, held = min(calibrate, len(train)), 0
    sets = {("clean", 0): test.first(clean).to(device)}
    some = test.first(images).to(device)
    for corruption in names if names is not None else (CHOOSE if family != "mnist-c" else ()):
        for level in (severities(family, corruption) or (None,)) if family == "mnist-c" else levels:
            if family == "mnist-c" and level is not None and level not in levels:
                continue
            key = f"{name}-{corruption}-{level}-{len(some)}"
            made = cached(
                cache,
                key,
                lambda c=corruption, s=level: Images(
                    corrupt(some.images, c, s, family=family, root=root).cpu(), some.labels.cpu()
                ),
            )
            sets[(corruption, level or 0)] = made.to(device)
    return Task(
        name,
        normalise,
        train.images[:calibrate].to(device),
        train.images[calibrate : calibrate + held].to(device),
        sets,
    )


def read_folder(folder: imagenet.ImageFolder) -> Images:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(16) as pool:
        items = list(pool.map(folder.__getitem__, range(len(folder))))
    return Images(torch.stack([x for x, _ in items]), torch.tensor([label for _, label in items]))


def partial_cifar(root: Path) -> Images:
    parts = [
        cifar10._read_batch(root / cifar10.FOLDER / f"data_batch_{i}")
        for i in range(1, 6)
        if (root / cifar10.FOLDER / f"data_batch_{i}").exists()
    ]
    return Images(torch.cat([p.images for p in parts]), torch.cat([p.labels for p in parts]))


def cached(folder: Path | None, key: str, make: Callable[[], Images]) -> Images:
    if folder is None:
        return make()
    path = folder / f"{key}.pt"
    if path.exists():
        return Images(*torch.load(path))
    made = make()
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tuple(made), path)
    return made


# ---------------------------------------------------------------- scoring


class Bench:
    """One model and its task: scores rules, remembers what the uncorrected model says."""

    def __init__(self, model: nn.Module, task: Task, name: str, batch: int = 500) -> None:
        self.name, self.task, self.batch = name, task, batch
        device = task.calibration.device
        self.lab = Lab(model).to(device)
        self.normalise = task.normalise
        self.keys = list(task.sets)
        held = task.held if len(task.held) else task.calibration  # ImageNet has none to spare
        self.images = torch.cat([s.images for s in task.sets.values()] + [held])
        self.labels = [s.labels for s in task.sets.values()]
        self.lab.use({}, task.calibration[:1])
        self.odds = self.lab.logits(self.images, self.normalise, batch).softmax(1)
        self.plain = self.odds.argmax(1)

    def regret(self, said: Tensor, part: slice) -> float:
        """How much less probable, in percent, the model as it was finds the new answers than its own."""
        odds = self.odds[part]
        chosen = odds.gather(1, said[part, None])[:, 0]
        return 100 * (odds.amax(1) - chosen).mean().item()

    def score(self, rules: dict[str, Any], *, sequential: bool = True) -> dict[str, Any]:
        start = time.time()
        if rules:
            self.lab.use(rules, self.normalise(self.task.calibration), sequential=sequential)
            said = self.lab.logits(self.images, self.normalise, self.batch).argmax(1)
        else:
            said = self.plain
        result: dict[str, Any] = {"sets": {}}
        gate = rules.get("norm")
        if isinstance(gate, Gated):  # how many clean test images lie beyond each level, and of the corrupted
            p, count = torch.cat(gate.seen), len(self.labels[0])
            for level in (1, 5, 20):
                result[f"x{level}"] = 100 * (p[:count] <= level / 100).float().mean().item()
            result["found"] = 100 * (p[count : sum(map(len, self.labels))] <= 0.05).float().mean().item()
        at = 0
        for key, labels in zip(self.keys, self.labels, strict=True):
            part = said[at : at + len(labels)]
            result["sets"][key] = 100 * (part == labels).float().mean().item()
            if key == ("clean", 0):
                result["agree"] = 100 * (part == self.plain[at : at + len(labels)]).float().mean().item()
                result["regret"] = self.regret(said, slice(at, at + len(labels)))
            at += len(labels)
        result["held"] = 100 * (said[at:] == self.plain[at:]).float().mean().item()
        result["held_regret"] = self.regret(said, slice(at, None))
        shifted = {k: v for k, v in result["sets"].items() if k[0] != "clean"}
        result["clean"] = result["sets"][("clean", 0)]
        result["mean"] = sum(shifted.values()) / max(1, len(shifted))
        for level in sorted({k[1] for k in shifted}):
            these = [v for k, v in shifted.items() if k[1] == level]
            result[f"s{level}"] = sum(these) / len(these)
        for c in dict.fromkeys(k[0] for k in shifted):
            these = [v for k, v in shifted.items() if k[0] == c]
            result[c] = sum(these) / len(these)
        result["seconds"] = time.time() - start
        return result


# ---------------------------------------------------------------- sweep


def proxies(images: Images, level: int) -> dict[str, Images]:
    """For MNIST, corruptions that MNIST-C does not have: blur, speckle, and contrast lost towards grey."""
    x = images.images.float()
    step = {1: 0, 2: 0, 3: 1, 4: 1, 5: 2}[level]
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(level)).to(x.device)
    made = {
        "gaussian_blur": gaussian_blur(images.images, (0.6, 1.0, 1.6)[step]).float(),
        "speckle_noise": x + noise * (0.3, 0.6, 0.9)[step] * (x + 40),
        "fade": 127.5 + (x - 127.5) * (0.8, 0.5, 0.3)[step],
    }
    return {k: Images(v.round().clamp(0, 255).to(torch.uint8), images.labels) for k, v in made.items()}


def evidence(*args: Any, **options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"norm": Evidence(*args, **options)}


def bands(*args: Any, **options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"norm": Bands(*args, **{"unit": "budget", "first": 7, **options})}


def gated(budget: float, closed: float = 0.4, opened: float = 0.02, paper: float = 0.0, **options: Any) -> Any:
    """Evidence with bands at every site, behind the gate."""

    def make() -> dict[str, Any]:
        bands = {"unit": "budget", "shape": 1.0, **options}
        rules: dict[str, Any] = {"norm": Gated(budget, closed=closed, opened=opened, **bands)}
        return rules | ({"layer": Paper(paper)} if paper else {})

    return make


Config = tuple[str, Callable[[], dict[str, Any]], bool]  # name, rules, calibrated layer by layer


def configs() -> list[list[Config]]:
    """Tiers of rules, the most informative first. A rule's first number is its strength."""
    rivals: list[Config] = [("uncorrected", dict, False)]
    rivals += [(f"bn-mix N={n}", lambda n=n: {"norm": Mix(n)}, False) for n in (4, 8, 16, 32)]
    rivals += [(f"paper keep {c}", lambda c=c: {"layer": Paper(c)}, False) for c in (0.25, 0.8)]
    rivals += [("paper match 0.5", lambda: {"layer": Paper(0.5, "match")}, False)]
    gate: list[Config] = [
        (f"gate {c}-{o} bands {b}", gated(b, c, o), False)
        for c, o, budgets in ((0.4, 0.02, (0.02, 0.04, 0.08)), (0.2, 0.01, (0.04, 0.08)), (0.1, 0.005, (0.04,)))
        for b in budgets
    ]
    gate += [("gate 0.4-0.02 bands 0.04, probabilities mixed", gated(0.04, mode="mix"), False)]
    gate += [("gate 0.4-0.02 bands 0.08, probabilities mixed", gated(0.08, mode="mix"), False)]
    gate += [("gate 0.4-0.02 bands 0.08, no probe", gated(0.08, start=7), False)]
    gate += [("gate 0.4-0.02 bands 0.04 + paper 0.25", gated(0.04, paper=0.25), False)]
    gate_more: list[Config] = [("gate 0.4-0.1 bands 0.04", gated(0.04, 0.4, 0.1), False)]
    gate_more += [("gate 1.0-0.05 bands 0.04", gated(0.04, 1.0, 0.05), False)]
    gate_more += [("gate 0.4-0.02 bands 0.04 robust", gated(0.04, robust=True), False)]
    gate_more += [("gate 0.02 hard bands 0.04", gated(0.04, 0.0201, 0.02), False)]
    gate_more += [("gate 0.4-0.02 bands 0.04, weights times g", gated(0.04, mode="weight"), False)]
    gate_more += [("gate 0.4-0.02 bands 0.04, no probe", gated(0.04, start=7), False)]
    gate_more += [
        (f"gate 0.4-0.02 bands 0.04 at site {n}", gated(0.04, gate_sites=sites), False)
        for n, sites in (("1", (1,)), ("6", (6,)), ("7", (7,)), ("8-10", (8, 9, 10)), ("1,7", (1, 7)))
    ]
    gate_more += [("gate 0.4-0.02 bands 0.04 first7", gated(0.04, first=7), False)]
    gate_more += [("gate 0.4-0.02 bands 0.04 pool.5", gated(0.04, pool=0.5), False)]
    gate_more += [("gate 0.4-0.02 bands 0.06 square", gated(0.06, weight="square"), False)]
    gate_more += [("gate 0.4-0.02 bands 0.04 shape2", gated(0.04, shape=2.0), False)]
    gate_more += [("gate 0.4-0.02 bands 0.04 + paper 0.5", gated(0.04, paper=0.5), False)]
    gate_more += [("gate 0.4-0.02 bands 0.16", gated(0.16), False)]
    core: list[Config] = [(f"channel k={k}", evidence(k), False) for k in (16, 32, 64)]
    core += [(f"layer k={k}", evidence(k, pool=1.0), False) for k in (8, 16)]
    core += [(f"budget {b}", evidence(b, unit="budget"), False) for b in (0.005, 0.01, 0.02, 0.04)]
    core += [(f"bands {b} first7", bands(b), False) for b in (0.005, 0.01, 0.02, 0.04)]
    core += [(f"bands {b} first7 shape", bands(b, shape=1.0), False) for b in (0.005, 0.01, 0.02, 0.04)]
    core += [(f"bands {b} all shape", bands(b, first=1000, shape=1.0), False) for b in (0.01, 0.02)]
    more: list[Config] = [
        (f"budget {b} pool1", evidence(b, unit="budget", pool=1.0), False) for b in (0.01, 0.02, 0.04)
    ]
    more += [(f"budget {b} pool.5", evidence(b, unit="budget", pool=0.5), False) for b in (0.01, 0.02)]
    more += [(f"bands {b} first7 pool.5 shape", bands(b, pool=0.5, shape=1.0), False) for b in (0.01, 0.02)]
    more += [(f"bands {b} first1 shape", bands(b, first=1, shape=1.0), False) for b in (0.01, 0.02)]
    more += [(f"bands {b} first3 shape", bands(b, first=3, shape=1.0), False) for b in (0.01, 0.02)]
    more += [(f"bands {b} first7 shape sequential", bands(b, shape=1.0), True) for b in (0.005, 0.01, 0.02)]
    more += [(f"budget {b} sequential", evidence(b, unit="budget"), True) for b in (0.005, 0.01, 0.02)]
    more += [(f"bands {b} side16 shape", bands(b, first=1000, least=16, shape=1.0), False) for b in (0.01, 0.02)]
    more += [(f"bands {b} first7 shape square", bands(b, shape=1.0, weight="square"), False) for b in (0.02, 0.04)]
    more += [
        (f"bands {b} first7 shape square pool.5", bands(b, shape=1.0, weight="square", pool=0.5), False)
        for b in (0.01, 0.02, 0.04)
    ]
    more += [("bands 0.05 first7 shape, rest 0.01", bands(0.05, shape=1.0, rest=0.01), False)]
    more += [("bands 0.01 first7 shape, rest 0.03", bands(0.01, shape=1.0, rest=0.03), False)]
    more += [("bands 0.02 first7 shape clip", bands(0.02, shape=1.0, clip=0.98), False)]
    more += [("bands 0.02 first7 shape absolute", bands(0.02, shape=1.0, absolute=True), False)]
    more += [("budget 0.02 absolute", evidence(0.02, unit="budget", absolute=True), False)]
    more += [("budget 0.02 last14", evidence(0.02, unit="budget", last=14), False)]
    more += [("bands 0.02 first7 shape2", bands(0.02, shape=2.0), False)]
    more += [("bands 0.02 first7 3,5 shape", bands(0.02, sizes=(3, 5), shape=1.0), False)]
    more += [("bands 0.02 first7 5 shape", bands(0.02, sizes=(5,), shape=1.0), False)]
    more += [(f"bands k={k} first7 shape", bands(k, unit="spread", shape=1.0), False) for k in (16, 32, 64)]
    more += [
        ("channel k=16 robust", evidence(16, unit="robust"), False),
        ("exceed 2", evidence(2, unit="exceed"), False),
    ]
    more += [(f"{w} {k}", evidence(k, weight=w), False) for w, k in (("james", 4), ("soft", 4), ("square", 12))]
    more += [("joint k=24", evidence(24, joint=True), False), ("carry k=24", evidence(24, carry=0.5), False)]
    more += [(f"{p} only k=16", evidence(16, parts=p), False) for p in ("mean", "scale")]

    def both(*, kappa: float = 0.0, step: float = 0.8, budget: float = 0.02) -> Callable[[], dict[str, Any]]:
        return lambda: {
            "norm": Bands(budget, unit="budget", first=7, shape=1.0),
            "layer": Paper(step, kappa=kappa),
        }

    combined: list[Config] = [("bands 0.02 first7 shape + paper by evidence k=16", both(kappa=16), False)]
    combined += [("bands 0.01 first7 shape + paper by evidence k=16", both(kappa=16, budget=0.01), False)]
    combined += [("bands 0.02 first7 shape + paper by evidence k=16, sequential", both(kappa=16), True)]
    combined += [("bands 0.02 first7 shape + paper 0.25", both(step=0.25), False)]
    combined += [("bands 0.02 first7 shape + paper 0.25, sequential", both(step=0.25), True)]
    more = combined + more
    last: list[Config] = [("paper by evidence k=16", lambda: {"layer": Paper(1.0, kappa=16)}, False)]
    last += [("paper match by evidence k=16", lambda: {"layer": Paper(1.0, "match", kappa=16)}, False)]
    for kind in ("pre", "post"):
        last += [(f"{kind} k={k}", lambda k=k, kind=kind: {kind: Evidence(k)}, False) for k in (16, 48)]
        last += [
            (f"{kind} budget {b}", lambda b=b, kind=kind: {kind: Evidence(b, unit="budget")}, False)
            for b in (0.01, 0.02)
        ]
    last += [
        (
            f"bands {b} first7 shape + head",
            lambda b=b: {
                "norm": Bands(b, unit="budget", first=7, shape=1.0),
                "head": Evidence(b, unit="budget", parts="mean"),
            },
            False,
        )
        for b in (0.01, 0.02)
    ]
    last += [
        (
            f"bands {b} first7 shape + input",
            lambda b=b: {
                "norm": Bands(b, unit="budget", first=7, shape=1.0),
                "input": Bands(b, unit="budget", shape=1.0),
            },
            False,
        )
        for b in (0.01, 0.02)
    ]
    last += [("pca budget 0.02", evidence(0.02, unit="budget", cov="pca"), False)]
    last += [("wiener", evidence(0.0, cov="wiener"), False)]
    last += [(f"mahalanobis k={k}", evidence(k, cov="mahalanobis", pool=1.0, shrink=0.2), False) for k in (8, 16)]
    return [rivals, gate, core[-6:], gate_more, core[:-6] + more, last]


def subjects(folder: Path, root: Path, seeds: int) -> list[tuple[str, str, Callable[[], list[nn.Module]]]]:
    """(task, name, models) of what is there; says what is not."""
    found = []

    def add(set_name: str, name: str, path: Path, read: Callable[[Path], list[nn.Module]]) -> None:
        if path.exists():
            found.append((set_name, name, lambda: read(path)))
        else:
            print(f"skip {name}: no {path}", flush=True)

    def some(path: Path) -> list[nn.Module]:
        return list(read_models(path).values())[:seeds]

    add(
        "cifar10",
        "public-resnet20",
        root / "weights/resnet20_cifar10_bn_public.safetensors",
        lambda p: [load_public(p)],
    )
    for norm in ("bn", "gn", "frn"):
        add("cifar10", f"cifar10-{norm}", folder / f"resnet20-{norm}-cifar10.safetensors", some)
    add("imagenet", "public-resnet50", root / "weights/resnet50_v1_imagenet_bn.safetensors", lambda p: [load_public(p)])
    for norm in ("bn", "gn", "frn"):
        add("mnist", f"mnist-{norm}", folder / f"resnet20-{norm}-mnist.safetensors", some)
    return found


def sweep(args: argparse.Namespace) -> None:
    start = time.time()
    out, root = Path(args.out), Path(args.data)
    out.mkdir(parents=True, exist_ok=True)
    device = args.device
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    benches: list[Bench] = []
    tasks: dict[str, Task | None] = {}
    for set_name, name, read in subjects(Path(args.models), root, args.seeds):
        if args.only and not any(name.startswith(o) for o in args.only):
            continue
        if set_name not in tasks:
            try:
                tasks[set_name] = make_task(set_name, root, args)
                print(f"{time.time() - start:6.1f}s {set_name}: {len(tasks[set_name].sets)} sets", flush=True)
            except (OSError, RuntimeError, ImportError, ValueError) as error:
                print(f"skip {set_name}: {error}", flush=True)
                tasks[set_name] = None
        if tasks[set_name] is None:
            continue
        for number, model in enumerate(read()):
            view = copy.copy(tasks[set_name])
            if name == "public-resnet20":
                view.normalise = IMAGENET
            batch = args.batch if set_name != "imagenet" else min(args.batch, 250)
            benches.append(Bench(model.to(device), view, f"{name}/{number}", batch))
    print(f"{time.time() - start:6.1f}s {len(benches)} models", flush=True)
    rows: list[dict[str, Any]] = []
    with (out / "sweep.csv").open("w", newline="") as file, (out / "summary.csv").open("w", newline="") as short:
        long = csv.writer(file)
        long.writerow(("model", "rule", "set", "severity", "images", "accuracy"))
        brief = csv.DictWriter(
            short,
            (
                "model",
                "rule",
                "clean",
                "agree",
                "regret",
                "held",
                "held_regret",
                "mean",
                "s1",
                "s2",
                "s3",
                "s4",
                "s5",
                *CHOOSE,
                "fade",
                "x1",
                "x5",
                "x20",
                "found",
                "seconds",
            ),
            extrasaction="ignore",
        )
        brief.writeheader()
        for number, tier in enumerate(configs()):
            for name, make, sequential in tier:
                if args.rules and not any(r in name for r in args.rules):
                    continue
                for bench in benches:
                    heavy = bench.name.startswith("public-resnet50")
                    if time.time() - start > args.time_limit:
                        print("time is up", flush=True)
                        report(rows, out)
                        return
                    # beyond the third tier one seed of each will do, and the big model sees the first two only
                    if (number > 2 and not bench.name.endswith("/0")) or (heavy and number > 1 + args.heavy):
                        continue
                    if name.startswith("bn-mix") and "bn" not in bench.name and "public" not in bench.name:
                        continue
                    try:
                        rules = make()
                        if heavy and isinstance(rules.get("norm"), Gated):
                            rules["norm"].at_resnet50()
                        result = bench.score(rules, sequential=sequential)
                    except RuntimeError as error:
                        print(f"{bench.name} {name}: {str(error)[:200]}", flush=True)
                        continue
                    for (corruption, level), value in result["sets"].items():
                        count = len(bench.task.sets[corruption, level])
                        long.writerow((bench.name, name, corruption, level, count, f"{value:.3f}"))
                    row = {"model": bench.name, "rule": name, **{k: v for k, v in result.items() if k != "sets"}}
                    brief.writerow({k: f"{v:.3f}" if isinstance(v, float) else v for k, v in row.items()})
                    rows.append(row)
                file.flush()
                short.flush()
            print(f"{time.time() - start:6.1f}s tier {number} done", flush=True)
    report(rows, out)


def make_task(name: str, root: Path, args: argparse.Namespace) -> Task:
    names = None
    if args.final:
        family = {"cifar10": "cifar10-c", "mnist": "mnist-c", "imagenet": "imagenet-c"}[name]
        names = [c for c in corruptions(family) if c not in CHOOSE or family == "mnist-c"]
    made = task(
        name,
        root,
        device=args.device,
        calibrate=args.calibrate,
        held=args.held,
        images=args.images,
        clean=args.clean,
        levels=args.levels,
        names=names,
        cache=Path(args.cache) if args.cache else None,
    )
    if name == "mnist" and not args.final:
        test = made.sets["clean", 0].first(args.images)
        for level in args.levels:
            made.sets |= {(k, level): v for k, v in proxies(test, level).items()}
    return made


def report(rows: list[dict[str, Any]], out: Path) -> None:
    """A table for each kind of model: means over seeds, differences from uncorrected."""
    lines = []
    plain = {r["model"]: r for r in rows if r["rule"] == "uncorrected"}
    for kind in dict.fromkeys(r["model"].split("/")[0] for r in rows):
        these = [r for r in rows if r["model"].startswith(f"{kind}/")]
        titles = "seeds  clean  d.clean  agree regret   held regret   mean  d.mean   sev5    x1    x5   x20 found"
        lines += [f"\n{kind}", f"{'rule':50s} {titles}"]
        for rule in dict.fromkeys(r["rule"] for r in these):
            some = [r for r in these if r["rule"] == rule]

            def mean(f: Callable[[dict[str, Any]], float], some: list[dict[str, Any]] = some) -> float:
                return sum(f(r) for r in some) / len(some)

            lines.append(
                f"{rule:50s} {len(some):5d} {mean(lambda r: r['clean']):6.2f} "
                f"{mean(lambda r: r['clean'] - plain[r['model']]['clean']):+7.2f} {mean(lambda r: r['agree']):7.2f} "
                f"{mean(lambda r: r['regret']):6.2f} {mean(lambda r: r['held']):6.2f} "
                f"{mean(lambda r: r['held_regret']):6.2f} {mean(lambda r: r['mean']):6.2f} "
                f"{mean(lambda r: r['mean'] - plain[r['model']]['mean']):+7.2f} {mean(lambda r: r.get('s5', 0)):6.2f}"
                + "".join(f" {mean(lambda r, k=k: r[k]):5.1f}" for k in ("x1", "x5", "x20", "found") if k in some[0])
            )
    text = "\n".join(lines)
    (out / "report.txt").write_text(text + "\n")
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["sweep"])
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--models", default="results/models")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--time-limit", type=float, default=240)
    parser.add_argument("--images", type=int, default=500, help="of each corrupted set")
    parser.add_argument("--clean", type=int, default=10000)
    parser.add_argument("--calibrate", type=int, default=4000)
    parser.add_argument("--held", type=int, default=2000)
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--heavy", type=int, default=0, help="further tiers for the big model")
    parser.add_argument("--only", nargs="*", help="models whose name starts so")
    parser.add_argument("--rules", nargs="*", help="rules whose name holds this")
    parser.add_argument("--cache", default="", help="folder for the corrupted images")
    parser.add_argument("--final", action="store_true", help="the fifteen corruptions that nothing is chosen on")
    sweep(parser.parse_args())


if __name__ == "__main__":
    main()
