"""Experiments: every table and figure of the paper as data, the paper's numbers, the runs and the report."""

from trueup_lab.experiments.aggregate import MeasuredCell, cells, differences
from trueup_lab.experiments.published import Cell, paper
from trueup_lab.experiments.runs import lacking, rows_file, run_experiment
from trueup_lab.experiments.specs import EXPERIMENTS, Column, Experiment, experiment

__all__ = [
    "EXPERIMENTS",
    "Cell",
    "Column",
    "Experiment",
    "MeasuredCell",
    "cells",
    "differences",
    "experiment",
    "lacking",
    "paper",
    "rows_file",
    "run_experiment",
]
