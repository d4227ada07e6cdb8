"""Pictures. The only package that imports matplotlib."""

from trueup.figures.demo import draw_demo
from trueup.figures.paper import draw
from trueup.figures.performance import draw_scaling

__all__ = ["draw", "draw_demo", "draw_scaling"]
