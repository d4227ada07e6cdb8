"""The three benchmarks: the corruptions of each, their functions and their constants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from trueup_lab.data.corruptions.affine import rotate, scale, shear, translate
from trueup_lab.data.corruptions.arithmetic import rounded, truncated
from trueup_lab.data.corruptions.blur import defocus_blur, zoom_blur
from trueup_lab.data.corruptions.color import brightness, contrast, saturate
from trueup_lab.data.corruptions.constants import CIFAR10_C, IMAGENET_C, MNIST_C, MNIST_C_PUBLISHED, Levels
from trueup_lab.data.corruptions.digital import jpeg_compression, pixelate
from trueup_lab.data.corruptions.edges import canny_edges
from trueup_lab.data.corruptions.elastic import elastic_transform
from trueup_lab.data.corruptions.glass import copying_glass_blur, swapping_glass_blur
from trueup_lab.data.corruptions.linear import gaussian_blur
from trueup_lab.data.corruptions.motion import motion_blur
from trueup_lab.data.corruptions.noise import gaussian_noise, impulse_noise, shot_noise, speckle_noise
from trueup_lab.data.corruptions.plasma import canvas_size
from trueup_lab.data.corruptions.rng import ImageRng
from trueup_lab.data.corruptions.spatter import mud, water
from trueup_lab.data.corruptions.strokes import dotted_line, stripe, zigzag
from trueup_lab.data.corruptions.weather import fog, frost, snow

CorruptionFunction = Callable[..., Tensor]
"""(images, rng, *constants) -> uint8 images, or floats from 0 to 255 that the family turns into bytes."""


@dataclass(frozen=True)
class Family:
    """A benchmark: its corruptions (`recipes`), their constants (`levels`), and the images that it takes.

    Its images are `size` x `size` pixels; where `smallest` is given, any size with a short side of at least
    `smallest` is accepted. `published` holds the severity of corruptions that are published at one severity only;
    `scratch` gives the number of values that a corruption needs per image of some height and width, where that can
    exceed the image's own; `textured` names the corruptions that read textures from the data root.
    """

    name: str
    channels: int
    size: int
    levels: Mapping[str, Levels]
    recipes: Mapping[str, CorruptionFunction]
    to_bytes: Callable[[Tensor], Tensor]
    published: Mapping[str, int] = field(default_factory=dict)
    scratch: Mapping[str, Callable[[int, int], int]] = field(default_factory=dict)
    textured: frozenset[str] = frozenset()
    smallest: int | None = None

    def accepts(self, height: int, width: int) -> bool:
        """Whether images of this size can be corrupted."""
        if self.smallest is None:
            return (height, width) == (self.size, self.size)
        return min(height, width) >= self.smallest


def _fixed(function: Callable[..., Tensor]) -> CorruptionFunction:
    """Make a recipe of a function without random numbers."""
    return lambda x, _, *constants: function(x, *constants)


def _motion(x: Tensor, rng: ImageRng, radius: int, sigma: float) -> Tensor:
    return motion_blur(x, rng.fraction(0)[:, 0] * 90 - 45, radius, sigma)


def _spatter(x: Tensor, rng: ImageRng, *constants: float) -> Tensor:
    *shape, muddy = constants
    return mud(x, rng, *shape) if muddy else water(x, rng, *shape)


def _noise(function: Callable[[Tensor, ImageRng, float, float], Tensor], cut: float) -> CorruptionFunction:
    return lambda x, rng, level: function(x, rng, level, cut)


def _colour(size: int, ice: float) -> dict[str, CorruptionFunction]:
    """Return CIFAR-10-C's and ImageNet-C's recipes, with constants for images `size` wide and frost scaled by `ice`."""
    return {
        "brightness": _fixed(brightness),
        "contrast": _fixed(contrast),
        "defocus_blur": _fixed(defocus_blur),
        "elastic_transform": lambda x, rng, *constants: elastic_transform(x, rng, *constants, side=size),
        "fog": fog,
        "frost": lambda x, rng, *constants, root: frost(x, rng, *constants, scale=ice, root=root),
        "gaussian_blur": _fixed(gaussian_blur),
        "gaussian_noise": _noise(gaussian_noise, 1.0),
        "glass_blur": copying_glass_blur,
        "impulse_noise": _noise(impulse_noise, 1.0),
        "jpeg_compression": _fixed(jpeg_compression),
        "motion_blur": _motion,
        "pixelate": _fixed(pixelate),
        "saturate": _fixed(saturate),
        "shot_noise": _noise(shot_noise, 1.0),
        "snow": snow,
        "spatter": _spatter,
        "speckle_noise": _noise(speckle_noise, 1.0),
        "zoom_blur": _fixed(zoom_blur),
    }


_GREY: dict[str, CorruptionFunction] = {
    "identity": _fixed(Tensor.clone),
    "shot_noise": _noise(shot_noise, 0.5),
    "impulse_noise": _noise(impulse_noise, 0.5),
    "glass_blur": swapping_glass_blur,
    "motion_blur": _motion,
    "shear": shear,
    "scale": scale,
    "rotate": rotate,
    "brightness": _fixed(lambda x, added: x + 255 * added),  # the V of HSV is a grey pixel's own value
    "translate": translate,
    "stripe": _fixed(stripe),
    "fog": lambda x, rng, *constants: fog(x, rng, *constants, canvas=256),
    "spatter": mud,
    "dotted_line": dotted_line,
    "zigzag": zigzag,
    "canny_edges": _fixed(canny_edges),
}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "mnist-c",
            channels=1,
            size=28,
            levels=MNIST_C,
            recipes=_GREY,
            to_bytes=rounded,
            published=MNIST_C_PUBLISHED,
            scratch={"fog": lambda *_: 256 * 256},
        ),
        Family(
            "cifar10-c",
            channels=3,
            size=32,
            levels=CIFAR10_C,
            recipes=_colour(size=32, ice=0.2),
            to_bytes=truncated,
            textured=frozenset({"frost"}),
        ),
        Family(
            "imagenet-c",
            channels=3,
            size=224,
            levels=IMAGENET_C,
            recipes=_colour(size=224, ice=1.0),
            to_bytes=truncated,
            scratch={"fog": lambda height, width: canvas_size(height, width) ** 2},
            smallest=32,
            textured=frozenset({"frost"}),
        ),
    )
}
