"""What the measurements of trained models have in common: corruptions, the options of commands, rows appended."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping
from pathlib import Path

import torch

from trueup_lab.cli.train import parse_seeds

CHOSEN_ON = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
"""The corruptions that constants are chosen by, and that no table averages over."""


def options(document: str | None, out: str) -> argparse.ArgumentParser:
    """A parser of the options that all of them take."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="files of models, or names of those that come with trueup")
    parser.add_argument("--data", type=Path, help="the data root")
    parser.add_argument("--seeds", type=parse_seeds, help="of a file with many models, as in 0-9 or 0,3")
    parser.add_argument("--calibrate", type=int, help="clean images for targets; all if not given")
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--targets", type=Path, default=Path("runs/targets"), help="where calibrations are kept")
    parser.add_argument("--out", type=Path, default=Path(out))
    return parser


def append(path: Path, row: Mapping[str, object]) -> None:
    """Add a row to a CSV, which is made if it is not there, and has these columns if it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="") as file:
        file.seek(0)
        columns = next(csv.reader(file), None)
        if columns not in (None, list(row)):
            raise SystemExit(f"{path} has other columns, of another version: {', '.join(columns or ())}")
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if columns is None:
            writer.writeheader()
        writer.writerow(row)
