"""A canvas that paints a picture, its mask of classes and its depths at once."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Point = tuple[float, float]
Colour = tuple[float, float, float]
Array = NDArray[np.float32]

FARTHEST = 400.0  # metres: the depth of the sky
FINER = 2  # the picture is painted this many times larger, so that edges come out smooth


class Camera(NamedTuple):
    """A camera that looks along the road. World coordinates are metres: right of it, above the ground, ahead."""

    focal: float  # pixels
    height: float  # metres above the ground
    middle: float  # column of the vanishing point
    horizon: float  # row of the vanishing point

    def project(self, right: float, up: float, ahead: float) -> Point:
        """Column and row of a point in the world."""
        return self.middle + self.focal * right / ahead, self.horizon + self.focal * (self.height - up) / ahead


class Canvas:
    """Picture, mask and depth of a scene in the making. Later paint covers earlier paint."""

    def __init__(self, height: int, width: int) -> None:
        self.height, self.width = height, width
        self._picture = Image.new("RGB", (width * FINER, height * FINER))
        self._mask = Image.new("L", (width, height))
        self._depth = Image.new("F", (width, height), FARTHEST)
        self._brush = ImageDraw.Draw(self._picture)
        self._marker = ImageDraw.Draw(self._mask)
        self._ruler = ImageDraw.Draw(self._depth)

    def polygon(self, points: Sequence[Point], colour: Colour, kind: int, depth: float) -> None:
        """Fill a polygon that lies at one depth."""
        self._brush.polygon([(FINER * x, FINER * y) for x, y in points], fill=_rgb(colour))
        self._marker.polygon(list(points), fill=kind)
        self._ruler.polygon(list(points), fill=depth)

    def ellipse(self, centre: Point, radius: Point, colour: Colour, kind: int, depth: float) -> None:
        """Fill an ellipse."""
        box = [centre[0] - radius[0], centre[1] - radius[1], centre[0] + radius[0], centre[1] + radius[1]]
        self._brush.ellipse([FINER * value for value in box], fill=_rgb(colour))
        self._marker.ellipse(box, fill=kind)
        self._ruler.ellipse(box, fill=depth)

    def detail(self, points: Sequence[Point], colour: Colour) -> None:
        """Fill a polygon on something that is there already: it changes neither class nor depth."""
        self._brush.polygon([(FINER * x, FINER * y) for x, y in points], fill=_rgb(colour))

    def paint(self, picture: Array, kind: NDArray[np.uint8], depth: Array) -> None:
        """Replace everything: `picture` (height, width, 3) at the finer size, 0 to 255."""
        self._picture.paste(Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8)))
        self._mask.paste(Image.fromarray(kind))
        self._depth.paste(Image.fromarray(depth))

    def finished(self) -> tuple[Array, NDArray[np.uint8], Array]:
        """Picture (height, width, 3) from 0 to 255, mask (height, width) and depth (height, width) in metres."""
        small = self._picture.resize((self.width, self.height), Image.Resampling.BOX)
        return np.asarray(small, dtype=np.float32), np.asarray(self._mask).copy(), np.asarray(self._depth).copy()


def shade(colour: Colour, light: float) -> Colour:
    """A colour in more or less light.

    >>> shade((100, 200, 50), 0.5)
    (50.0, 100.0, 25.0)
    """
    red, green, blue = colour
    return red * light, green * light, blue * light


def hsv(hue: float, saturation: float, value: float) -> Colour:
    """Colour from hue and saturation (0 to 1) and value (0 to 255).

    >>> hsv(0.0, 1.0, 200)
    (200.0, 0.0, 0.0)
    """
    red, green, blue = colorsys.hsv_to_rgb(float(hue) % 1, float(saturation), float(value))
    return float(red), float(green), float(blue)


def _rgb(colour: Colour) -> tuple[int, int, int]:
    red, green, blue = (int(min(255, max(0, value))) for value in colour)
    return red, green, blue
