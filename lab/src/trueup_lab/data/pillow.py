"""Pillow, which is optional: asked for in one place, with the way to get it."""

from __future__ import annotations

from types import ModuleType


def pillow(what: str) -> ModuleType:
    """The module `PIL.Image`; where it is missing, an error that says what needs it and how to install it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"{what} needs Pillow: pip install 'trueup[images]'") from error
    return Image
