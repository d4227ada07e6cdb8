"""Measure how fast source models train, by norm, number of models trained at once, and variant of the engine.

    python benchmarks/training_speed.py --norm bn --models 8 --variant default --variant default,combo

A variant is a compile mode and options, joined by commas: `none`, `default` or `max-autotune-no-cudagraphs`, then any
of `combo`, `autotune`, `nchw`, `eager` (no CUDA graphs), `float32`, `streams=N`. Images are random, in the number and
size of CIFAR-10's: the time does not depend on their content. Rows are appended to a CSV file.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from trueup_lab.data.images import NORMALISATION, Images
from trueup_lab.devices import device_name
from trueup_lab.models import ResNet20
from trueup_lab.tables import append_rows, number, start_table
from trueup_lab.training.engine import Engine, default_engine
from trueup_lab.training.fleet import Fleet
from trueup_lab.training.recipes import RECIPES

NUMBER_OF_IMAGES = 50_000


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """Milliseconds per model and step, and seconds before the first step."""

    norm: str
    models: int
    variant: str
    batch: int
    ms_a_model_and_step: float = number(".3f")
    setup_s: float = number(".1f")
    device: str
    torch: str


def engine_of(variant: str, device: str | None) -> Engine:
    """Return the engine that `variant` describes."""
    mode, *options = variant.split(",")
    engine = replace(default_engine(device), compile=mode)  # type: ignore[arg-type]
    for option in options:
        name, _, value = option.partition("=")
        change = {
            "combo": {"combo": True},
            "autotune": {"autotune": True},
            "nchw": {"channels_last": False},
            "eager": {"graphs": False},
            "float32": {"precision": "float32"},
            "streams": {"streams": int(value or 0)},
        }.get(name)
        if change is None:
            raise SystemExit(
                f"unknown option {name!r} in {variant!r}; known: combo, autotune, nchw, eager, float32, streams=N"
            )
        engine = replace(engine, **change)
    return engine


def measure(norm: str, models: int, engine: Engine, *, batch: int, steps: int, images: int) -> tuple[float, float]:
    """Return milliseconds per model and step, best of three rounds of `steps`, and seconds before the first step."""
    generator = torch.Generator().manual_seed(0)
    data = Images(
        torch.randint(0, 256, (images, 3, 32, 32), dtype=torch.uint8, generator=generator),
        torch.randint(0, 10, (images,), generator=generator),
    )
    recipe = replace(RECIPES["cifar10"], batch=batch)
    began = time.perf_counter()
    fleet = Fleet(
        lambda: ResNet20(norm),  # type: ignore[arg-type]
        range(models),
        data,
        NORMALISATION["cifar10"],
        recipe,
        engine,
    )
    fleet.train_epoch(0, steps=2)
    setup = time.perf_counter() - began
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        fleet.train_epoch(0, steps=steps)
        best = min(best, time.perf_counter() - began)
    return 1000 * best / (steps * models), setup


def main() -> None:
    """Measure every combination, print it and append it to the CSV file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--norm", action="append", help="bn, gn, frn or frn-relu; repeatable")
    parser.add_argument("--models", type=int, action="append", help="number of models trained at once; repeatable")
    parser.add_argument("--variant", action="append", help="see above; repeatable")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200, help="steps per round")
    parser.add_argument("--images", type=int, default=NUMBER_OF_IMAGES)
    parser.add_argument("--device", default=None)
    parser.add_argument("--out", type=Path, default=Path("results/training_speed.csv"))
    chosen = parser.parse_args()
    start_table(chosen.out, SpeedRow)
    for variant in chosen.variant or ["default"]:
        for norm in chosen.norm or ["bn", "gn", "frn"]:
            for models in chosen.models or [8]:
                engine = engine_of(variant, chosen.device)
                torch._dynamo.reset()
                try:
                    ms, setup = measure(
                        norm, models, engine, batch=chosen.batch, steps=chosen.steps, images=chosen.images
                    )
                except Exception as error:  # one variant that fails must not cost the measurements of the others
                    print(f"{norm:8} {models:3} models  {variant}: {type(error).__name__}: {error}", flush=True)
                    continue
                print(f"{norm:8} {models:3} models  {variant:40} {ms:7.3f} ms  (setup: {setup:.0f} s)", flush=True)
                row = SpeedRow(
                    norm=norm,
                    models=models,
                    variant=variant,
                    batch=chosen.batch,
                    ms_a_model_and_step=ms,
                    setup_s=setup,
                    device=device_name(engine.device),
                    torch=torch.__version__,
                )
                append_rows(chosen.out, [row])


if __name__ == "__main__":
    main()
