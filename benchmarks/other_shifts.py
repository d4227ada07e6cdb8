"""Test the default under two dozen shifts on which nothing was ever chosen, and which are in no published benchmark.

    python benchmarks/other_shifts.py cifar10 vgg-bn-cifar10 vit-ln-cifar10 --data ROOT --images 1000
    python benchmarks/other_shifts.py imagenet weights/mobilenet_v2_imagenet_bn.safetensors --data ROOT --images 300

They are what happens to cameras, files and preprocessing rather than noise, blur and weather: colour casts, exposure,
banding, borders, a wrong order of channels, and changes of geometry, where nothing can be gained and something might be
lost. All were written down with their strengths before the first of them was measured. Rows are those of
benchmarks/bench.py. `shifts` is the mean over all of them; its standard error is over images, each counted by its mean
over shifts.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import CALIBRATED, BenchRow, Rows, forget, prepare, read, subjects
from trueup_lab.tables import append_rows, start_table

ALL = "shifts"
Shift = Callable[[Tensor], Tensor]  # images (batch, 3, height, width) in 0...1, to the same


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=["cifar10", "imagenet"])
    parser.add_argument("models", nargs="+", help="model files, or names of bundled models")
    parser.add_argument("--data", type=Path, required=True, help="the data root")
    parser.add_argument("--seeds", type=int, nargs="*", help="seeds in files of several models (default: all)")
    parser.add_argument("--method", action="append", help="only this method; repeatable (default: all of the bench)")
    parser.add_argument("--images", type=int, default=1000, help="images of each set")
    parser.add_argument("--calibrate", type=int, help="clean images for calibration")
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/other_shifts.csv"))
    asked = parser.parse_args()
    asked.rivals = False
    began = time.monotonic()
    data = read(asked.set, asked.data, asked.calibrate or CALIBRATED[asked.set])
    start_table(asked.out, BenchRow)
    for where in asked.models:
        for name, seed, model, normalise, methods in subjects(asked, where):
            entry = prepare(name, seed, model, normalise, methods, data, asked)
            print(f"{time.monotonic() - began:6.0f} s  {name} {seed}: {entry.rule}", flush=True)
            rows = Rows(asked, data, [entry])
            for shift in SHIFTS:
                rows.measure(shift, 0, shifted(data.test[: asked.images], shift, asked.batch))
            forget(asked.out, {(asked.set, name, seed, method.name) for method, _ in entry.methods})
            append_rows(asked.out, rows.take() + rows.means(ALL, list(SHIFTS)))
    print(f"{time.monotonic() - began:6.0f} s", flush=True)


def grey(x: Tensor) -> Tensor:
    """No colour."""
    return x.mean(dim=1, keepdim=True).expand_as(x)


def hue_turned(x: Tensor) -> Tensor:
    """Colours turned by 90 degrees around the axis of greys."""
    a, b = 1 / 3, 1 / math.sqrt(3)
    turn = x.new_tensor([[a, a - b, a + b], [a + b, a, a - b], [a - b, a + b, a]])
    return torch.einsum("ij,njhw->nihw", turn, x)


def low_light(x: Tensor) -> Tensor:
    """An eighth of the light, raised again, with the noise of single photons."""
    photons = 30.0
    return torch.poisson(x * photons, generator=_draw()) / photons


def banded(x: Tensor) -> Tensor:
    """Rows that are brighter or darker than they should be, as from a sensor that is read row by row."""
    return x + 0.15 * torch.randn(len(x), 1, x.shape[2], 1, generator=_draw())


def grating(x: Tensor) -> Tensor:
    """A diagonal wave over the picture, as from a screen."""
    rows, columns = _grid(x)
    return x + 0.2 * torch.sin(2 * math.pi * (rows + columns) * x.shape[2] / 8)


def vignette(x: Tensor) -> Tensor:
    """Dark corners."""
    rows, columns = _grid(x)
    return x * (1 - 1.6 * ((rows - 0.5).square() + (columns - 0.5).square()))


def half_in_shadow(x: Tensor) -> Tensor:
    """The right half has a third of the light."""
    return x * torch.where(_grid(x)[1] < 0.5, 1.0, 0.35)


def black_bars(x: Tensor) -> Tensor:
    """A fifth of the picture black, at the top and at the bottom."""
    rows = _grid(x)[0]
    return x * ((rows > 0.1) & (rows < 0.9))


def covered(x: Tensor) -> Tensor:
    """A grey square in the lower right corner, a third as wide as the picture."""
    rows, columns = _grid(x)
    return torch.where((rows > 2 / 3) & (columns > 2 / 3), 0.5, x)


def ghost(x: Tensor) -> Tensor:
    """Every point twice, as in a reflection."""
    return 0.65 * x + 0.35 * x.roll(x.shape[3] // 12, dims=3)


def coloured_edges(x: Tensor) -> Tensor:
    """Red and blue beside green, as from a bad lens."""
    step = max(1, x.shape[3] // 64)
    return torch.stack([x[:, 0].roll(step, 2), x[:, 1], x[:, 2].roll(-step, 2)], dim=1)


def sharpened(x: Tensor) -> Tensor:
    """Too much detail."""
    return x + 2 * (x - F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False))


def equalised(x: Tensor) -> Tensor:
    """Every channel with all brightnesses equally often."""
    ranks = x.flatten(2).argsort(dim=2).argsort(dim=2)
    return (ranks / ranks.shape[2]).view_as(x)


def halved(x: Tensor) -> Tensor:
    """Half the resolution, made smooth again."""
    small = F.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True)
    return F.interpolate(small, size=x.shape[2:], mode="bicubic")


def tilted(x: Tensor) -> Tensor:
    """Turned by 12 degrees; what was outside is black."""
    angle = math.radians(12)
    turn = x.new_tensor([[math.cos(angle), -math.sin(angle), 0], [math.sin(angle), math.cos(angle), 0]])
    where = F.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, where, align_corners=False)


def nearer(x: Tensor) -> Tensor:
    """The middle three quarters of the picture, enlarged."""
    cut = x.shape[2] // 8
    return F.interpolate(x[:, :, cut:-cut, cut:-cut], size=x.shape[2:], mode="bilinear")


SHIFTS: dict[str, Shift] = {
    "grey": grey,
    "warm": lambda x: x * x.new_tensor([1.25, 1.0, 0.6])[:, None, None],
    "cold": lambda x: x * x.new_tensor([0.6, 0.9, 1.25])[:, None, None],
    "hue_turned": hue_turned,
    "channels_swapped": lambda x: x.flip(1),
    "inverted": lambda x: 1 - x,
    "four_levels": lambda x: (x * 3).round() / 3,
    "overexposed": lambda x: 2 * x,
    "low_light": low_light,
    "banded": banded,
    "grating": grating,
    "vignette": vignette,
    "half_in_shadow": half_in_shadow,
    "black_bars": black_bars,
    "covered": covered,
    "ghost": ghost,
    "coloured_edges": coloured_edges,
    "sharpened": sharpened,
    "equalised": equalised,
    "halved": halved,
    "mirrored": lambda x: x.flip(3),
    "upside_down": lambda x: x.flip(2),
    "tilted": tilted,
    "nearer": nearer,
}


def shifted(images: Tensor, name: str, batch: int) -> Tensor:
    """Apply a shift to images `(n, 3, height, width)` uint8."""
    parts = [SHIFTS[name](part.float() / 255) for part in images.split(batch)]
    return torch.cat([(255 * part.clamp(0, 1)).round().byte() for part in parts])


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _grid(x: Tensor) -> tuple[Tensor, Tensor]:
    """Row `(height, 1)` and column `(1, width)` of each pixel's centre, 0 to 1."""
    height, width = x.shape[2:]
    return ((torch.arange(height) + 0.5) / height)[:, None], ((torch.arange(width) + 0.5) / width)[None]


if __name__ == "__main__":
    main()
