"""The classes of a drawn scene."""

from __future__ import annotations

CLASSES = ("sky", "building", "vegetation", "pavement", "road", "lane mark", "car", "person")
SKY, BUILDING, VEGETATION, PAVEMENT, ROAD, MARK, CAR, PERSON = range(len(CLASSES))

COLOURS: tuple[tuple[int, int, int], ...] = (
    (135, 190, 235),
    (166, 124, 100),
    (86, 148, 80),
    (214, 170, 196),
    (96, 96, 110),
    (250, 250, 250),
    (30, 70, 190),
    (225, 60, 60),
)
"""One colour per class, for pictures of masks."""
