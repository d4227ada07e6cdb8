"""Experiments: every table and figure of the paper as data, the paper's numbers, running them, reporting on them."""

from trueup_lab.experiments.paper import Cell, paper
from trueup_lab.experiments.run import lacking, rows_file, run
from trueup_lab.experiments.specs import EXPERIMENTS, Column, Experiment, experiment
from trueup_lab.experiments.tables import Measured, cells, differences

__all__ = [
    "EXPERIMENTS",
    "Cell",
    "Column",
    "Experiment",
    "Measured",
    "cells",
    "differences",
    "experiment",
    "lacking",
    "paper",
    "rows_file",
    "run",
]
