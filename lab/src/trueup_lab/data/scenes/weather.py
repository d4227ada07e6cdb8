"""Weather and light over a drawn scene. Masks stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from trueup_lab.data.scenes.canvas import Array
from trueup_lab.data.scenes.street import Scene

Weather = Literal["fog", "dusk", "rain", "noise"]
WEATHERS: tuple[Weather, ...] = get_args(Weather)


def apply_weather(scene: Scene, weather: Weather, severity: int, *, number: int = 0) -> NDArray[np.uint8]:
    """Return the picture (height, width, 3) in this weather, at severity 1 to 5. `number` decides all chances."""
    if weather not in _MAKE:
        raise ValueError(f"unknown weather {weather!r}; known: {', '.join(_MAKE)}")
    if severity not in (1, 2, 3, 4, 5):
        raise ValueError(f"severity={severity!r}: expected 1 to 5")
    chance = np.random.default_rng([severity, number, WEATHERS.index(weather)])
    picture = _MAKE[weather](scene, severity, chance)
    return np.clip(picture.round(), 0, 255).astype(np.uint8)


def _fog(scene: Scene, severity: int, chance: np.random.Generator) -> Array:
    """Koschmieder's law: an object's light fades with distance, and the fog's own light takes its place."""
    sight = (120, 70, 42, 26, 16)[severity - 1]  # metres at which a twentieth of the contrast is left
    grey, through = np.float32(chance.uniform(205, 230)), _through(scene, sight)
    return _wide(scene) * through + grey * (1 - through)


def _dusk(scene: Scene, severity: int, chance: np.random.Generator) -> Array:
    """Less light, bluish, and the camera's noise that comes with it."""
    light = (0.6, 0.45, 0.33, 0.24, 0.17)[severity - 1]
    tint = np.array([0.9, 0.95, 1.15], np.float32)
    dark = 255 * np.power(_wide(scene) / 255, 1.2, dtype=np.float32) * np.float32(light) * tint
    return dark + chance.normal(0, 2 + severity, dark.shape).astype(np.float32)


def _rain(scene: Scene, severity: int, chance: np.random.Generator) -> Array:
    """Streaks, a veil that grows with distance, and less contrast."""
    height, width = scene.mask.shape
    through = _through(scene, (300, 200, 140, 100, 75)[severity - 1])
    picture = _wide(scene) * through + 165 * (1 - through)
    length, slant = 6 + 2 * severity, chance.uniform(-0.35, 0.35)
    drops = np.zeros((height, width), np.float32)
    count = int(height * width * 0.004 * severity)
    rows, columns = chance.integers(-length, height, count), chance.integers(0, width, count)
    bright = chance.uniform(25, 70, count)
    for k in range(length):
        r, c = rows + k, (columns + np.round(k * slant)).astype(int) % width
        inside = (r >= 0) & (r < height)
        np.maximum.at(drops, (r[inside], c[inside]), bright[inside])
    wet: Array = picture + drops[..., None]
    return wet


def _noise(scene: Scene, severity: int, chance: np.random.Generator) -> Array:
    """The noise of a camera at high gain."""
    spread = (8, 14, 20, 28, 38)[severity - 1]
    return _wide(scene) + chance.normal(0, spread, scene.image.shape).astype(np.float32)


def _through(scene: Scene, sight: float) -> Array:
    """Share of an object's light that comes through (height, width, 1): a twentieth at the distance `sight`."""
    share: Array = np.exp(scene.depth * np.float32(-3.0 / sight))[..., None]
    return share


def _wide(scene: Scene) -> Array:
    return scene.image.astype(np.float32)


_MAKE: dict[str, Callable[[Scene, int, np.random.Generator], Array]] = {
    "fog": _fog,
    "dusk": _dusk,
    "rain": _rain,
    "noise": _noise,
}
