"""The still part of a scene: sky, hills, grass, pavement, road and lane marks, painted pixel by pixel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from PIL import Image

from trueup_lab.data.scenes.canvas import FARTHEST, FINER, Array, Camera, Canvas, hsv
from trueup_lab.data.scenes.classes import MARK, PAVEMENT, ROAD, SKY, VEGETATION


class Layout(NamedTuple):
    """A street, in metres relative to the camera."""

    camera: Camera
    lanes: int  # each way
    lane: float  # width of a lane
    middle: float  # of the road, right of the camera
    pavement: tuple[float, float]  # widths on the left and on the right
    sun: float  # -1 (from the left) to 1 (from the right)

    def edge(self, side: int) -> float:
        """The left (-1) or right (1) edge of the road."""
        return self.middle + side * self.lanes * self.lane


def paint_ground(canvas: Canvas, layout: Layout, chance: np.random.Generator) -> None:
    """Fill the whole canvas."""
    height, width = canvas.height * FINER, canvas.width * FINER
    focal, up, middle, horizon = layout.camera
    rows = (np.arange(height, dtype=np.float32) / FINER)[:, None]
    columns = (np.arange(width, dtype=np.float32) / FINER)[None]
    below = np.broadcast_to(rows > horizon, (height, width))
    ahead = np.where(rows > horizon, focal * up / np.maximum(rows - horizon, 1e-3), FARTHEST).clip(max=FARTHEST)
    across = (columns - middle) * ahead / focal - layout.middle  # metres from the middle of the road

    # Sky: a gradient, and clouds of smooth noise.
    top = _colour(0.58, chance.uniform(0.35, 0.6), chance.uniform(200, 245))
    low = _colour(0.56, chance.uniform(0.08, 0.2), chance.uniform(230, 250))
    mix = np.broadcast_to(np.clip(rows / horizon, 0, 1) ** 0.8, (height, width))[..., None].astype(np.float32)
    picture, kind = top + mix * (low - top), np.full((height, width), SKY, np.uint8)
    clouds = np.clip((_field(chance, height, width, 5) - chance.uniform(0.4, 1.2)) * 0.5, 0, 0.75)
    picture += clouds[..., None] * (np.array([252, 250, 248], np.float32) - picture)

    # Hills on the horizon.
    ridge = np.interp(np.linspace(0, 8, width), np.arange(9), chance.normal(0.4, 0.6, 9)).clip(0)
    hills = (rows > horizon - 2 - 9 * ridge[None] * chance.uniform(0.3, 1.0)) & ~below
    grain = _field(chance, height, width, 1) * 5 + _field(chance, height, width, 3) * 4
    green = _colour(chance.uniform(0.27, 0.36), 0.35, chance.uniform(120, 150))
    picture[hills], kind[hills] = green + 2 * grain[hills, None], VEGETATION
    depth = np.where(hills, np.float32(150), np.broadcast_to(ahead, (height, width)))

    # Grass, pavement with tiles, road with a kerb.
    half = layout.lanes * layout.lane
    grass = _colour(chance.uniform(0.24, 0.3), 0.5, chance.uniform(125, 165))
    picture[below], kind[below] = grass + 2 * grain[below, None], VEGETATION
    walk = below & (across > -half - layout.pavement[0]) & (across < half + layout.pavement[1])
    stone = _colour(chance.uniform(0.03, 0.12), 0.1, chance.uniform(165, 200))
    tiles = 9 * ((np.floor(across * 1.2) + np.floor(np.minimum(ahead, 60) * 0.8)) % 2)
    tiles = np.where(ahead < 25, tiles, np.float32(4.5))
    picture[walk], kind[walk] = stone + (grain - tiles)[walk, None], PAVEMENT
    road = below & (np.abs(across) < half)
    asphalt = np.float32(chance.uniform(82, 112)) + np.array([0, 0, chance.uniform(0, 8)], np.float32)
    picture[road], kind[road] = asphalt + 1.5 * grain[road, None], ROAD
    kerb = walk & ~road & (np.abs(across) < half + 0.18)
    picture[kerb] = 140 + grain[kerb, None]

    marks = road & (ahead < 70) & _marks(layout, chance, across, ahead)
    picture[marks], kind[marks] = np.array([236, 236, 228], np.float32) + grain[marks, None], MARK
    cell = (slice(FINER // 2, None, FINER),) * 2
    canvas.paint(picture, np.ascontiguousarray(kind[cell]), np.ascontiguousarray(depth[cell]))


def _marks(layout: Layout, chance: np.random.Generator, across: Array, ahead: Array) -> np.ndarray:
    """Mask of the lane marks: middle line, dashes between lanes, lines at the edges, a crossing."""
    half = layout.lanes * layout.lane
    dashes = ((ahead + chance.uniform(0, 8)) % 8) < 4
    marks = (np.abs(across) < 0.09) & (dashes | (chance.random() < 0.4))
    for lane in range(1, layout.lanes):
        marks |= (np.abs(np.abs(across) - lane * layout.lane) < 0.09) & dashes
    if chance.random() < 0.6:
        marks |= np.abs(np.abs(across) - half + 0.3) < 0.07
    if chance.random() < 0.25:
        begin = chance.uniform(7, 16)
        marks |= (ahead > begin) & (ahead < begin + 3) & ((across + half) % 1.1 < 0.55)
    return marks


def _field(chance: np.random.Generator, height: int, width: int, octave: int) -> Array:
    """Smooth noise of unit spread (height, width); each octave is twice as coarse."""
    small = chance.normal(0, 1, (max(2, height >> octave), max(2, width >> octave))).astype(np.float32)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)


def _colour(hue: float, saturation: float, value: float) -> Array:
    return np.array(hsv(hue, saturation, value), np.float32)
