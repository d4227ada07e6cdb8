"""Figures. The only package that imports matplotlib."""

from trueup_lab.figures.demo import draw_demo
from trueup_lab.figures.paper_figures import draw
from trueup_lab.figures.performance import draw_scaling

__all__ = ["draw", "draw_demo", "draw_scaling"]
