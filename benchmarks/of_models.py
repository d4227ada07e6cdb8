"""Command-line options that the benchmarks of trained models share."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from trueup_lab.cli.train import parse_seeds


def options(document: str | None, out: str) -> argparse.ArgumentParser:
    """Return a parser of the shared options."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="model files, or names of bundled models")
    parser.add_argument("--data", type=Path, help="the data root")
    parser.add_argument("--seeds", type=parse_seeds, help="seeds in a file of several models, such as 0-9 or 0,3")
    parser.add_argument("--calibrate", type=int, help="number of clean images for calibration (default: all)")
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--targets", type=Path, default=Path("runs/targets"), help="folder for calibrations")
    parser.add_argument("--out", type=Path, default=Path(out))
    return parser
