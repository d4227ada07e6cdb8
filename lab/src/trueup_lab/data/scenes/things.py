"""Things that stand in a street: each function draws its chances at once, and returns how to paint the thing later."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from trueup_lab.data.scenes.canvas import Canvas, Colour, Point, hsv, shade
from trueup_lab.data.scenes.classes import BUILDING, CAR, PERSON, VEGETATION
from trueup_lab.data.scenes.ground import Layout

Draw = Callable[[], None]

NEAREST = 2.5  # metres: walls are cut off here
PAINTS = ((0.0, 0.75, 175), (0.6, 0.6, 150), (0.58, 0.25, 200), (0, 0, 225), (0, 0, 60), (0.13, 0.6, 205), (0, 0, 150))


def house(
    canvas: Canvas,
    layout: Layout,
    chance: np.random.Generator,
    side: int,
    wall: float,
    extent: tuple[float, float],
    tall: float,
) -> Draw:
    """A house along the road, with rows of windows."""
    hue = float(chance.choice([0.02, 0.05, 0.09, 0.12, 0.55])) + chance.uniform(-0.02, 0.02)
    colour = hsv(hue, chance.uniform(0.08, 0.5), chance.uniform(130, 225))
    glass = hsv(0.58, chance.uniform(0.2, 0.4), chance.uniform(70, 120))
    roof = hsv(chance.uniform(0.0, 0.08), 0.4, 110)
    storey, bay, wide = chance.uniform(2.8, 3.4), chance.uniform(2.2, 3.4), chance.uniform(0.4, 0.6)
    lit = 1 + 0.18 * side * layout.sun
    project, (near, far) = layout.camera.project, extent

    def wall_of(ahead: tuple[float, float], up: tuple[float, float]) -> list[Point]:
        (first, last), (low, high) = ahead, up
        return [project(wall, h, z) for z, h in ((first, low), (first, high), (last, high), (last, low))]

    def draw() -> None:
        begin = max(near, NEAREST)
        if near > NEAREST:  # the end that faces the camera
            back = wall + side * 12
            end = [project(x, h, near) for x, h in ((wall, 0), (wall, tall), (back, tall), (back, 0))]
            canvas.polygon(end, shade(colour, 0.8 * (2 - lit)), BUILDING, near)
        edges = np.geomspace(begin, far, 9).tolist()  # strips, each with its own depth
        for first, last in pairwise(edges):
            canvas.polygon(wall_of((first, last), (0, tall)), shade(colour, lit), BUILDING, (first + last) / 2)
        for level in range(int(tall // storey)):
            low = level * storey + 0.9
            for place in range(int((far - near) // bay)):
                at = near + (place + 0.5 - wide / 2) * bay + 0.3
                if begin < at < 60:
                    light = lit * (0.85 + 0.06 * ((place * 7 + level * 3) % 5))
                    canvas.detail(wall_of((at, at + wide * bay), (low, low + 1.5)), shade(glass, light))
        canvas.detail(wall_of((begin, far), (tall - 0.35, tall)), shade(roof, lit))

    return draw


def tree(canvas: Canvas, layout: Layout, chance: np.random.Generator, right: float, ahead: float) -> Draw:
    """A trunk, and a crown of round leaves."""
    tall = chance.uniform(3.5, 9)
    green = hsv(chance.uniform(0.24, 0.36), chance.uniform(0.4, 0.65), chance.uniform(85, 140))
    bark = hsv(0.08, 0.4, chance.uniform(60, 95))
    blobs = chance.normal(0, 1, (16, 3)).tolist()

    def draw() -> None:
        (x, ground), (_, top) = (layout.camera.project(right, up, ahead) for up in (0, tall))
        thick, crown = 0.16 * (ground - top) / tall, 0.62 * (ground - top)
        middle = top + 0.5 * crown
        trunk = [(x - thick, ground), (x - thick, middle), (x + thick, middle), (x + thick, ground)]
        canvas.polygon(trunk, bark, VEGETATION, ahead)
        for dx, dy, light in blobs:
            size = 0.24 * crown * (1 + 0.2 * np.tanh(light))
            bright = 0.95 + 0.12 * np.tanh(layout.sun * dx - dy) + 0.04 * np.tanh(light)
            centre = (x + 0.2 * crown * dx, middle + 0.17 * crown * dy)
            canvas.ellipse(centre, (size, size), shade(green, bright), VEGETATION, ahead)

    return draw


def car(
    canvas: Canvas, layout: Layout, chance: np.random.Generator, right: float, ahead: float, *, oncoming: bool
) -> Draw:
    """A car as two boxes, with wheels, windows, lamps and a shadow."""
    colour = shade(hsv(*PAINTS[int(chance.integers(len(PAINTS)))]), chance.uniform(0.85, 1.1))
    half, tall, length = chance.uniform(1.7, 1.95) / 2, chance.uniform(1.4, 1.75), chance.uniform(3.6, 4.6)
    project, body = layout.camera.project, 0.58 * tall
    visible = right + (-half if right > 0 else half)  # the side that the camera sees

    def across(depth: float, low: float, high: float, inset: float, upper: float) -> list[Point]:
        corners = ((-half + inset, low), (-half + upper, high), (half - upper, high), (half - inset, low))
        return [project(right + dx, h, depth) for dx, h in corners]

    def along(first: float, last: float, low: float, high: float) -> list[Point]:
        return [project(visible, h, z) for z, h in ((first, low), (first, high), (last, high), (last, low))]

    def draw() -> None:
        floor = ((-half - 0.15, -0.1), (half + 0.15, -0.1), (half + 0.15, length), (-half - 0.15, length))
        canvas.detail([project(right + dx, 0, ahead + dz) for dx, dz in floor], (48, 48, 52))
        canvas.polygon(along(ahead, ahead + length, 0.22, body), shade(colour, 0.72), CAR, ahead)
        canvas.polygon(along(ahead + 0.25, ahead + 0.8 * length, body, tall), shade(colour, 0.6), CAR, ahead)
        for wheel in (ahead + 0.7, ahead + length - 0.8):
            rim = layout.camera.focal * 0.32 / wheel
            canvas.ellipse(
                project(visible, 0.32, wheel), (0.3 + rim * abs(visible) / wheel, rim), (30, 30, 32), CAR, ahead
            )
        for dx in (0.12 - half, half - 0.12):
            tyre = ((dx - 0.11, 0), (dx - 0.11, 0.3), (dx + 0.11, 0.3), (dx + 0.11, 0))
            canvas.polygon([project(right + x, h, ahead) for x, h in tyre], (28, 28, 30), CAR, ahead)
        canvas.polygon(across(ahead, 0.2, body, 0, 0.04), colour, CAR, ahead)
        canvas.polygon(across(ahead + 0.25, body, tall, 0.05, 0.25), shade(colour, 0.9), CAR, ahead)
        canvas.detail(across(ahead + 0.25, body + 0.06, tall - 0.1, 0.18, 0.3), (52, 64, 78))
        canvas.detail(across(ahead, 0.2, 0.34, 0.05, 0.05), shade(colour, 0.5))
        lamp: Colour = (250, 246, 215) if oncoming else (205, 40, 35)
        for side in (-1, 1):
            outer, inner = side * (half - 0.08), side * (half - 0.42)
            corners = ((outer, 0.62), (outer, 0.85), (inner, 0.85), (inner, 0.62))
            canvas.detail([project(right + dx, h * body, ahead) for dx, h in corners], lamp)
        plate = ((-0.25, 0.38), (-0.25, 0.5), (0.25, 0.5), (0.25, 0.38))
        canvas.detail([project(right + dx, h, ahead) for dx, h in plate], (225, 225, 215))

    return draw


def person(canvas: Canvas, layout: Layout, chance: np.random.Generator, right: float, ahead: float) -> Draw:
    """A person who walks or stands."""
    tall, step = chance.uniform(1.55, 1.9), chance.uniform(0.05, 0.28)
    coat = hsv(chance.random(), chance.uniform(0.3, 0.85), chance.uniform(70, 200))
    trousers = hsv(float(chance.choice([0.6, 0.62, 0.08])), chance.uniform(0.1, 0.5), chance.uniform(40, 100))
    skin = hsv(0.06, chance.uniform(0.3, 0.55), chance.uniform(120, 230))
    torso = ((-0.2, 0.46), (-0.26, 0.8), (-0.12, 0.85), (0.12, 0.85), (0.26, 0.8), (0.2, 0.46))

    def draw() -> None:
        def part(points: tuple[tuple[float, float], ...], colour: Colour) -> None:
            outline = [layout.camera.project(right + dx, h * tall, ahead) for dx, h in points]
            canvas.polygon(outline, colour, PERSON, ahead)

        for s in (-1, 1):
            part(((s * step - 0.08, 0), (s * 0.08 - 0.1, 0.5), (s * 0.08 + 0.1, 0.5), (s * step + 0.08, 0)), trousers)
        part(torso, coat)
        for s in (-1, 1):
            part(((s * 0.22, 0.8), (s * 0.34, 0.5), (s * 0.25, 0.48), (s * 0.16, 0.7)), shade(coat, 0.85))
        size = layout.camera.focal * 0.13 / ahead
        canvas.ellipse(layout.camera.project(right, 0.92 * tall, ahead), (0.85 * size, size), skin, PERSON, ahead)

    return draw
