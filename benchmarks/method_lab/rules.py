"""The rules on trial and their rivals: each is fitted on clean images, and then changes what passes a site."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from context import Context, Enough
from torch import Tensor, nn

from trueup import functional
from trueup.correction import Correction

EPS = 1e-3  # of a channel's training variance: the least that counts as a channel's variance


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

    def fit(self, mean: Tensor, var: Tensor, site: nn.Module) -> dict[str, Any]:
        if isinstance(getattr(site, "norm", None), nn.BatchNorm2d):
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

    def fit(self, mean: Tensor, var: Tensor, _site: nn.Module) -> dict[str, Any]:
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
