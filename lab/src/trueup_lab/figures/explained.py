"""Pictures that explain the method, as SVG for the documentation.

python -m trueup_lab.figures.explained docs/pictures --results results
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import trueup
from trueup.functional import evidence, paper
from trueup_lab import models
from trueup_lab.data import digits
from trueup_lab.data.corruptions import REPORTED_ON, corrupt
from trueup_lab.data.images import NORMALISATION
from trueup_lab.figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, pyplot, quiet
from trueup_lab.performance import read_timings
from trueup_lab.performance.architectures import TIMED_NETWORKS
from trueup_lab.tables import read_dicts

MODEL = "resnet20-bn-digits"
NOISE, FOG = ("impulse_noise", 5), ("fog", 5)
CALIBRATED = 400  # digits
SHOWN = {  # models of the bench, and their looks
    "mobilenet_v2_imagenet_bn": ("MobileNetV2, ImageNet", ORANGE, "D"),
    "efficientnet_lite0_imagenet_bn": ("EfficientNet-Lite0, ImageNet", PURPLE, "s"),
    "resnet50_v1_imagenet_bn": ("ResNet-50, ImageNet", GREEN, "^"),
    "resnet20_cifar10_bn_public": ("ResNet-20, CIFAR-10", BLUE, "o"),
}
WAYS = {  # ways of running a network, as the cases of `trueup bench` end
    ", batch 64, bfloat16": ("64 images, bfloat16", BLUE, "o"),
    ", batch 64, TF32": ("64 images, TF32", ORANGE, "D"),
    ", batch 1": ("one image", PURPLE, "s"),
    ", batch 1, CUDA graph": ("one image, CUDA graph", GREEN, "^"),
}


def draw_transport(path: Path) -> None:
    """Draw the paper's rule on one layer: sorted activations of a foggy image move towards the target's."""
    clean, foggy = (maps.relu() for maps in _maps(FOG))
    target = paper.barycenter(clean)
    rows = paper.as_rows(foggy)
    moved = paper.correct(rows, target, step=0.5, location="match")
    shares = torch.linspace(0, 1, rows.shape[1])
    with _svg():
        figure, axes = pyplot().subplots(figsize=(6.4, 3.2), layout="constrained")
        for values, look in (
            (target, {"color": GREY, "label": "clean images (the target)", "linewidth": 2.5}),
            (rows[0].sort().values, {"color": ORANGE, "label": "image in fog"}),
            (moved[0].sort().values, {"color": BLUE, "label": "corrected, half of the way"}),
        ):
            axes.plot(shares, values, **look)
        for share in (0.8, 0.9, 0.96):
            k = int(share * (len(target) - 1))
            begin, end = rows[0].sort().values[k], moved[0].sort().values[k]
            axes.annotate("", (share, end), (share, begin), arrowprops={"arrowstyle": "->", "color": "#444444"})
        axes.set(xlabel="rank of an activation within its image, 0 to 1", ylabel="activation", xlim=(0.4, 1.005))
        axes.legend(frameon=False)
        quiet(axes)
        _save(figure, path)


def draw_channel(path: Path) -> None:
    """Draw one channel of a noisy digit being moved back: its map, and its statistics among those of clean images."""
    clean, noisy = _maps(NOISE)
    known, floor = _statistics(clean)
    reference = evidence.reference_of(known, floor, strength=0.1)
    realigned = evidence.realign(noisy, reference)
    found, after = _statistics(noisy, floor)[0][0], _statistics(realigned, floor)[0][0]
    channel = int(((found[2] - known[:, 2].mean(0)) / known[:, 2].std(0)).abs().argmax())
    with _svg():
        figure = pyplot().figure(figsize=(7.2, 2.9), layout="constrained")
        grid = figure.add_gridspec(1, 4, width_ratios=(1, 1, 1, 2.1))
        maps = {"clean": clean[0], "noisy": noisy[0], "corrected": realigned[0]}
        low, high = (float(torch.stack([m[channel] for m in maps.values()]).quantile(q)) for q in (0.01, 0.99))
        for number, (title, picture) in enumerate(maps.items()):
            axes = figure.add_subplot(grid[number])
            axes.imshow(picture[channel].numpy(), cmap="gray", vmin=low, vmax=high)
            axes.set(title=title, xticks=[], yticks=[])
        axes = figure.add_subplot(grid[3])
        axes.scatter(known[:, 0, channel], known[:, 2, channel], s=6, color=GREY, alpha=0.5, label="clean images")
        axes.scatter(found[0, channel], found[2, channel], color=ORANGE, zorder=3, label="noisy image")
        axes.scatter(after[0, channel], after[2, channel], color=BLUE, zorder=3, label="corrected")
        end, begin = (tuple(values[[0, 2], channel].tolist()) for values in (after, found))
        axes.annotate("", end, begin, arrowprops={"arrowstyle": "->", "color": "#444444", "shrinkA": 4, "shrinkB": 4})
        axes.set(xlabel="mean of the channel", ylabel="log deviation of fine detail")
        axes.legend(frameon=False, fontsize=8, loc="best")
        quiet(axes, grid="both")
        _save(figure, path)


def bench_gains(results: Path) -> dict[str, dict[str, float]]:
    """The default's gain by corruption and model, mean over severities and models of a name, least gain first."""
    gains: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read_dicts(results / "bench.csv"):
        if row["method"] == "default" and row["model"] in SHOWN and row["corruption"] in REPORTED_ON:
            gains[row["corruption"]][row["model"]].append(float(row["gain"]))
    means = {name: {model: round(fmean(found), 3) for model, found in by.items()} for name, by in gains.items()}
    return dict(sorted(means.items(), key=lambda item: (fmean(item[1].values()), item[0])))


def draw_bench_gains(path: Path, results: Path) -> None:
    """Draw the default's gain per corruption, one dot per model. The file's description has the numbers."""
    gains = bench_gains(results)
    with _svg():
        figure, axes = pyplot().subplots(figsize=(7.0, 0.3 * len(gains) + 1.1), layout="constrained")
        for model, (label, colour, marker) in SHOWN.items():
            points = [(by[model], y) for y, by in enumerate(gains.values()) if model in by]
            if points:
                axes.scatter(*zip(*points, strict=True), color=colour, marker=marker, s=26, label=label, alpha=0.9)
        axes.axvline(0, color="#999999", linewidth=0.8)
        axes.set(xlabel="points gained over the uncorrected model", ylim=(-0.6, len(gains) - 0.4))
        axes.set_yticks(range(len(gains)), [name.replace("_", " ") for name in gains])
        axes.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
        quiet(axes, grid="x")
        _save(figure, path, description=json.dumps(gains))


def bench_costs(results: Path) -> dict[str, dict[str, float]]:
    """Time of the corrected network over the model's on a GPU, by architecture and by how it runs."""
    rows = read_timings(results / "performance_h200.csv")
    found = {row.case: round(row.ratio, 3) for row in rows if row.what == "evidence, no gate"}
    names = [architecture.name for architecture in TIMED_NETWORKS]
    costs = {name: {way: found[name + way] for way in WAYS if name + way in found} for name in names}
    return {name: by for name, by in costs.items() if by}


def draw_bench_costs(path: Path, results: Path) -> None:
    """Draw the cost of a correction per architecture. The file's description has the numbers."""
    costs = bench_costs(results)
    with _svg():
        figure, axes = pyplot().subplots(figsize=(7.0, 0.3 * len(costs) + 1.1), layout="constrained")
        for way, (label, colour, marker) in WAYS.items():
            points = [(by[way], y) for y, by in enumerate(costs.values()) if way in by]
            if points:
                axes.scatter(*zip(*points, strict=True), color=colour, marker=marker, s=26, label=label, alpha=0.9)
        axes.axvline(1, color="#999999", linewidth=0.8)
        axes.set(xlabel="time with trueup / time of the model", ylim=(len(costs) - 0.4, -0.6))
        axes.set_yticks(range(len(costs)), list(costs))
        axes.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
        quiet(axes, grid="x")
        _save(figure, path, description=json.dumps(costs))


def draw_data_flow(path: Path) -> None:
    """Draw the data flow: once before deployment, and for each image in use."""
    boxes = [  # x, y, width, text, colour
        (10, 44, 132, ["clean images", "no labels"], GREY),
        (182, 44, 140, ["model", "one pass"], GREY),
        (362, 44, 168, ["targets", "where channels usually are"], GREEN),
        (570, 44, 160, ["decision", "which setting is safe"], GREEN),
        (10, 164, 132, ["one image", "noisy, dark, foggy"], ORANGE),
        (182, 164, 140, ["norm", "of the model"], GREY),
        (362, 164, 168, ["move back", "as far as evidence goes"], BLUE),
        (570, 164, 160, ["rest of the model", "next norm, ..., answer"], GREY),
    ]
    arrows = [
        (142, 70, 182, 70), (322, 70, 362, 70), (530, 70, 570, 70),
        (142, 190, 182, 190), (322, 190, 362, 190), (530, 190, 570, 190),
        (446, 96, 446, 164), (600, 96, 510, 164),
    ]  # fmt: skip
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 232" font-family="DejaVu Sans, Arial, sans-serif">',
        '<rect width="740" height="232" rx="8" fill="#ffffff"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">',
        '<path d="M0,0 L8,4 L0,8 z" fill="#444444"/></marker></defs>',
        '<text x="10" y="28" font-size="14" font-weight="bold" fill="#222222">once: trueup.calibrate</text>',
        '<text x="10" y="148" font-size="14" font-weight="bold" fill="#222222">each image: trueup.correct</text>',
    ]
    for x1, y1, x2, y2 in arrows:
        parts.append(
            f'<path d="M{x1},{y1} L{x2},{y2}" stroke="#444444" stroke-width="1.5" fill="none" marker-end="url(#tip)"/>'
        )
    for x, y, width, (first, second), colour in boxes:
        line = f'stroke="{colour}" stroke-width="2"'
        middle = f'x="{x + width / 2:g}" text-anchor="middle"'
        parts += [
            f'<rect x="{x}" y="{y}" width="{width}" height="52" rx="6" fill="none" {line}/>',
            f'<text {middle} y="{y + 22}" font-size="13" font-weight="bold" fill="#222222">{first}</text>',
            f'<text {middle} y="{y + 40}" font-size="11.5" fill="#444444">{second}</text>',
        ]
    path.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")


def _maps(corruption: tuple[str, int]) -> tuple[Tensor, Tensor]:
    """Maps of clean digits and of one corrupted digit, which is the first of them, after the first norm."""
    model = models.load(MODEL)
    name = next(site.name for site in trueup.sites(model) if site.kind == "norm")
    kept: list[Tensor] = []
    module = model.get_submodule(name.partition("#")[0])
    hook = module.register_forward_hook(lambda _module, _inputs, output: kept.append(output.detach().clone()))
    pixels = digits.load("test").first(CALIBRATED).images
    with torch.inference_mode():
        for some in (pixels, corrupt(pixels[:1], *corruption, family="mnist-c")):
            first = len(kept)
            model(NORMALISATION["digits"](some))
            del kept[first + 1 :]  # a module may be called again
    hook.remove()
    return kept[0].clone(), kept[1].clone()


def _statistics(maps: Tensor, floor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean, and log deviations of low and high band, per image and channel; and the floor under variances."""
    moments = evidence.moments(maps, bands=True)[:, [0, 2, 3]]
    if floor is None:
        floor = 1e-3 * moments.mean(dim=0)
    return evidence.statistics(moments, floor), floor


def _svg() -> Any:
    """Context that makes SVG files identical in every run, with text as text."""
    return pyplot().rc_context({"svg.hashsalt": "trueup", "svg.fonttype": "none", "font.size": 9})


def _save(figure: Any, path: Path, *, description: str | None = None) -> None:
    figure.savefig(path, metadata={"Date": None, "Description": description})
    pyplot().close(figure)


def main() -> None:
    """Draw all pictures into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the CSV files")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    draw_data_flow(asked.folder / "data-flow.svg")
    draw_transport(asked.folder / "transport.svg")
    draw_channel(asked.folder / "channel.svg")
    draw_bench_gains(asked.folder / "gains.svg", asked.results)
    draw_bench_costs(asked.folder / "costs.svg", asked.results)


if __name__ == "__main__":
    main()
