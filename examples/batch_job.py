"""Answer a folder of images (or a .npy file of inputs) in a batch job, and watch them.

    python examples/batch_job.py my_models:load model.trueup.safetensors images/ --out runs/2026-11-18

`my_models:load` is a function that returns (model, preprocess). The folder of the run gets `answers.csv` (one line per
image: its name, the answer, and how unusual it is), `rows.csv` (what the monitor saw, for other tools) and
`snapshot.json`. The drift test goes on from one run to the next in `monitor.json` beside the runs. The exit status is 3
if inputs have drifted, so that a scheduler can tell someone.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import torch

import trueup
from trueup.cli.loading import load_model
from trueup.report.images import read_images

DRIFTED = 3


def main(arguments: list[str] | None = None) -> int:
    """Run the job; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="package.module:function that returns (model, preprocess)")
    parser.add_argument("targets", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of this run")
    parser.add_argument("--batch", type=int, default=32)
    asked = parser.parse_args(arguments)

    model, preprocess = load_model(asked.model)
    robust = trueup.correct(model, trueup.Targets.load(asked.targets), report=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    state = asked.out.parent / "monitor.json"
    if state.exists():
        try:
            monitor = trueup.Monitor.load(state, robust, rows=asked.out / "rows.csv")
        except ValueError as error:  # such as after a new calibration
            parser.error(str(error))
        monitor.reset()  # a new window; the drift test goes on
    else:
        monitor = trueup.Monitor(robust, rows=asked.out / "rows.csv")
    with monitor, (asked.out / "answers.csv").open("w", encoding="utf-8", newline="") as file, torch.inference_mode():
        writer = csv.writer(file)
        writer.writerow(["image", "answer", "p"])
        found = read_images(asked.images, preprocess, batch=asked.batch)
        names = iter(found.names)
        for images in found:
            scores, report = robust(images)
            monitor.update(report)
            answers, unusual = scores.argmax(dim=1).tolist(), report["p"].tolist()
            writer.writerows((next(names), answer, f"{p:.4g}") for answer, p in zip(answers, unusual, strict=True))
    seen = monitor.snapshot()
    seen.save(asked.out / "snapshot.json")
    monitor.save(state)
    print(seen)
    return DRIFTED if seen.drifted else 0


if __name__ == "__main__":
    sys.exit(main())
