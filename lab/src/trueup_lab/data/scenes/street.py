"""A street scene drawn from random numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trueup_lab.data.scenes.canvas import Array, Camera, Canvas
from trueup_lab.data.scenes.ground import Layout, paint_ground
from trueup_lab.data.scenes.things import Draw, car, house, person, tree

HEIGHT, WIDTH = 128, 224


class Scene(NamedTuple):
    """A picture with the class and the distance of each pixel."""

    image: NDArray[np.uint8]  # (height, width, 3)
    mask: NDArray[np.uint8]  # (height, width), numbers of CLASSES
    depth: Array  # (height, width) metres


def draw_street(number: int, *, seed: int = 0) -> Scene:
    """Draw the scene with this number, seen from a car. The same number and seed give the same scene."""
    chance = np.random.default_rng([seed, number])
    canvas, layout = Canvas(HEIGHT, WIDTH), _layout(chance)
    paint_ground(canvas, layout, chance)
    things = [
        *_houses(canvas, layout, chance),
        *_trees(canvas, layout, chance),
        *_cars(canvas, layout, chance),
        *_people(canvas, layout, chance),
    ]
    for _, draw in sorted(things, key=lambda thing: -thing[0]):  # the farthest first
        draw()
    picture, mask, depth = canvas.finished()
    # The light of the day, and a little of the camera's noise.
    warmth, light = chance.uniform(-0.04, 0.06), chance.uniform(0.93, 1.05)
    picture = picture * np.array([light * (1 + warmth), light, light * (1 - warmth)], np.float32)
    picture += chance.normal(0, 1.5, picture.shape).astype(np.float32)
    return Scene(np.clip(picture.round(), 0, 255).astype(np.uint8), mask, depth)


def _layout(chance: np.random.Generator) -> Layout:
    camera = Camera(
        focal=0.75 * WIDTH * chance.uniform(0.95, 1.1),
        height=chance.uniform(1.4, 1.9),
        middle=WIDTH * chance.uniform(0.42, 0.58),
        horizon=HEIGHT * chance.uniform(0.42, 0.5),
    )
    lanes, lane = int(chance.choice([1, 1, 2])), chance.uniform(3.0, 3.6)
    return Layout(
        camera=camera,
        lanes=lanes,
        lane=lane,
        middle=-lane * (lanes - 0.5 - int(chance.integers(0, lanes))),  # the camera is in one of the lanes
        pavement=(chance.uniform(2.0, 4.0), chance.uniform(2.0, 4.0)),
        sun=chance.uniform(-1, 1),
    )


# Things that stand on the ground: each is a depth to sort by, and a function that draws it.


def _houses(canvas: Canvas, layout: Layout, chance: np.random.Generator) -> list[tuple[float, Draw]]:
    """Rows of houses on both sides, with gaps."""
    made: list[tuple[float, Draw]] = []
    for side in (-1, 1):
        wall = layout.edge(side) + side * (layout.pavement[side > 0] + chance.uniform(1, 4))
        if chance.random() < 0.15:
            continue
        ahead = chance.uniform(2.5, 14)
        while ahead < 110:
            length, tall = chance.uniform(7, 16), chance.uniform(5, 17)
            made.append(
                (ahead + 0.5 * length, house(canvas, layout, chance, side, wall, (ahead, ahead + length), tall))
            )
            ahead += length + int(chance.choice([0, 0, 0, 1])) * chance.uniform(2, 14)
    return made


def _trees(canvas: Canvas, layout: Layout, chance: np.random.Generator) -> list[tuple[float, Draw]]:
    """Trees beside the road."""
    made: list[tuple[float, Draw]] = []
    for side in (-1, 1):
        for _ in range(int(chance.integers(0, 7))):
            ahead = chance.uniform(6, 70)
            right = layout.edge(side) + side * chance.uniform(0.8, max(layout.pavement) + 1)
            made.append((ahead, tree(canvas, layout, chance, right, ahead)))
    return made


def _cars(canvas: Canvas, layout: Layout, chance: np.random.Generator) -> list[tuple[float, Draw]]:
    """Cars in the lanes, oncoming on the left and driving ahead on the right."""
    made: list[tuple[float, Draw]] = []
    for lane in range(-layout.lanes, layout.lanes):
        ahead = chance.uniform(6, 18)
        while ahead < 70:
            if chance.random() < 0.6:
                right = layout.middle + (lane + 0.5) * layout.lane + chance.uniform(-0.3, 0.3)
                made.append((ahead, car(canvas, layout, chance, right, ahead, oncoming=lane < 0)))
            ahead += chance.uniform(7, 20)
    return made


def _people(canvas: Canvas, layout: Layout, chance: np.random.Generator) -> list[tuple[float, Draw]]:
    """People on the pavements, and some who cross the road."""
    made: list[tuple[float, Draw]] = []
    for _ in range(int(chance.integers(1, 7))):
        ahead, side = chance.uniform(6, 32), int(chance.choice([-1, 1]))
        right = layout.edge(side) + side * chance.uniform(0.4, layout.pavement[side > 0] - 0.3)
        if chance.random() < 0.2:
            right = chance.uniform(layout.edge(-1), layout.edge(1))
        made.append((ahead, person(canvas, layout, chance, right, ahead)))
    return made
