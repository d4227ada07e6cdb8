"""Figures of activations: maps, stacked histograms, densities."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueup_lab.experiments.activations import BeforeAfter, Dissimilar, Maps, Stationarity
from trueup_lab.figures.style import COLUMN, GREY, NAMES, ORANGE, pyplot, quiet, save, small


def draw_maps(maps: Mapping[str, Maps], path: Path) -> Path:
    """Draw three rows per test image, uncorrected, corrected (c) and difference, with one column per layer."""
    layers = len(next(iter(maps.values())).plain)
    with small():
        figure, grid = pyplot().subplots(
            3 * len(maps), layers + 1, figsize=(2 * COLUMN, 2.8 * len(maps)), layout="constrained"
        )
        for axes in grid.flat:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        for block, (name, one) in enumerate(maps.items()):
            rows = grid[3 * block : 3 * block + 3]
            rows[0][0].imshow(one.image[0], cmap="gray", vmin=0, vmax=1)
            rows[0][0].set_title(name, fontsize=7)
            rows[1][0].set_visible(False)
            rows[2][0].set_visible(False)
            for layer, (plain, corrected) in enumerate(zip(one.plain, one.corrected, strict=True), start=1):
                low, high = 0.0, float(max(plain.max(), corrected.max()))
                shown = [rows[k][layer].imshow(m, vmin=low, vmax=high) for k, m in enumerate((plain, corrected))]
                # One scale per layer over all blocks would hide the faint ones, so each has its own colour bar.
                figure.colorbar(shown[0], ax=[rows[0][layer], rows[1][layer]], shrink=0.9, aspect=30)
                change = corrected - plain
                limit = float(change.abs().max()) or 1.0
                image = rows[2][layer].imshow(change, cmap="PuOr", vmin=-limit, vmax=limit)
                figure.colorbar(image, ax=rows[2][layer], shrink=0.9, aspect=15)
                if block == 0:
                    rows[0][layer].set_title(f"layer {layer}")
            for row, text in zip(rows, ("uncorrected", "corrected (c)", "difference"), strict=True):
                row[1].set_ylabel(text)
        return save(figure, path)


def draw_before_and_after(data: BeforeAfter, path: Path) -> Path:
    """Draw histograms per channel (a) before and (b) after, zeros left out, with the target; and (c) the values."""
    with small():
        figure, (left, right, below) = pyplot().subplots(1, 3, figsize=(2 * COLUMN, 2.6), layout="constrained")
        high = float(torch.cat([data.before.flatten(), data.target]).quantile(0.997))  # the tail is in (c)
        edges = np.linspace(0, high, 41)
        for axes, values, title in ((left, data.before, "(a) before"), (right, data.after, "(b) after")):
            _stacked(axes, values, edges, without_zeros=True)
            outline, _ = np.histogram(data.target[data.target > 0], edges)
            axes.stairs(outline, edges, color="black", linewidth=1.2, label="target")
            axes.set(title=title, xlabel="activation", ylabel="activations per bin")
            axes.legend(frameon=False)
            quiet(axes)
        top = max(left.get_ylim()[1], right.get_ylim()[1])
        left.set_ylim(0, top)
        right.set_ylim(0, top)
        moved = data.before != 0
        below.axline((0, 0), slope=1, color=GREY, linewidth=0.8)
        below.scatter(data.before[moved], data.after[moved], s=1.5, color=ORANGE, linewidths=0, rasterized=True)
        below.set(title="(c) values", xlabel="before", ylabel="after")
        quiet(below)
        return save(figure, path)


def draw_stationarity(by_norm: Mapping[str, Stationarity], path: Path) -> Path:
    """Draw one panel per norm: the log-density of a sorted value around its target."""
    with small():
        figure, panels = pyplot().subplots(
            1, len(by_norm), figsize=(max(COLUMN, 2.4 * len(by_norm)), 2.6), squeeze=False, layout="constrained"
        )
        for (norm, one), axes in zip(by_norm.items(), panels[0], strict=True):
            reach = 3 * float(one.spread.max())
            deviation = torch.linspace(-reach, reach, 241, dtype=one.mean.dtype)
            few = torch.linspace(0, len(one.mean) - 1, 400).long()
            chosen = Stationarity(one.mean[few], one.spread[few])
            density = chosen.log_density(deviation).clamp(min=-12)
            shades = axes.pcolormesh(
                chosen.mean, deviation, density, cmap="viridis", shading="gouraud", rasterized=True
            )
            figure.colorbar(shades, ax=axes, label="log-density (-12 and below: darkest)")
            axes.set(title=NAMES[norm], xlabel="target value", ylabel="deviation from it")
        return save(figure, path)


def draw_dissimilar(data: Dissimilar, path: Path) -> Path:
    """Draw stacked histograms of the channels of both images."""
    with small():
        figure, panels = pyplot().subplots(1, 2, figsize=(2 * COLUMN, 2.6), sharey=True, layout="constrained")
        both = torch.cat(data.channels)
        edges = np.linspace(float(both.min()), float(both.max()), 61)
        titles = (f"test image {data.first}", f"test image {data.farthest}, the most dissimilar")
        for axes, values, title in zip(panels, data.channels, titles, strict=True):
            _stacked(axes, values, edges, without_zeros=False)
            axes.set(title=title, xlabel="value before the first ReLU")
            quiet(axes)
        panels[0].set_ylabel("values per bin")
        return save(figure, path)


def _stacked(axes: Any, channels: Tensor, edges: Any, *, without_zeros: bool) -> None:
    """Stack one histogram per channel. Neighbours differ in lightness, so that borders show without hue."""
    shades = pyplot().get_cmap("cividis")(np.linspace(0, 1, len(channels)))
    order = np.arange(len(channels)).reshape(2, -1).T.flatten() if len(channels) % 2 == 0 else np.arange(len(channels))
    values = [channel[channel != 0].numpy() if without_zeros else channel.numpy() for channel in channels]
    axes.hist(values, bins=edges, stacked=True, color=list(shades[order]), linewidth=0)
