"""Our corruptions beside the outputs of the original generators."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trueup_lab.data import cifar10
from trueup_lab.data.corruptions import affine, corrupt, corruption_names, severities, strokes
from trueup_lab.data.corruptions.constants import CIFAR10_C, MNIST_C, MNIST_C_PUBLISHED
from trueup_lab.data.corruptions.families import FAMILIES
from trueup_lab.data.corruptions.frost_textures import textures
from trueup_lab.data.corruptions.motion import motion_blur
from trueup_lab.data.corruptions.rng import ImageRng
from trueup_lab.data.fidelity import WITHOUT_CHANCE, change, within
from trueup_lab.data.images import IMAGENET
from trueup_lab.models.public import load_public

pytestmark = pytest.mark.data

CASES = [
    (family, name, severity)
    for family in ("cifar10-c", "mnist-c")
    for name in corruption_names(family)
    for severity in (severities(family, name) if family == "cifar10-c" else (None,))
]
EXACT = [case for case in CASES if case[1] in WITHOUT_CHANCE[case[0]]]
RANDOM = [case for case in CASES if case not in EXACT]


@pytest.mark.parametrize(("family", "name", "severity"), EXACT)
def test_a_corruption_without_chance_agrees_pixel_by_pixel(golden, family, name, severity):
    theirs = golden(family)
    ours = corrupt(theirs.clean, name, severity, family=family)
    assert within(ours, theirs(name, severity)) >= 0.995


@pytest.mark.parametrize(("family", "name", "severity"), RANDOM)
def test_a_random_corruption_agrees_in_distribution(golden, family, name, severity):
    """The original's 24 images are one more draw of what we make of them with 12 seeds."""
    theirs = golden(family)
    draws = np.array(
        [
            change(
                theirs.clean,
                corrupt(theirs.clean, name, severity, family=family, indices=theirs.indices, seed=seed),
            )
            for seed in range(12)
        ]
    )
    their = np.array(change(theirs.clean, theirs(name, severity)))
    # 4.5 spreads, and a floor: motion blur is rounded here, as ImageMagick does, and cut there
    allowed = 4.5 * draws.std(0, ddof=1) * (1 + 1 / 12) ** 0.5 + np.array([0.55, 0.3, 0.02])
    assert (np.abs(draws.mean(0) - their) <= allowed).all(), (draws.mean(0), their, allowed)


class Scripted(ImageRng):
    """ImageRng whose choices are given: what an image could have drawn."""

    def __init__(self, images: int, **choices: int) -> None:
        super().__init__(0, "scripted", 0, range(images), "cpu")
        self.choices = choices

    def choice(self, draw, options):
        return torch.full((len(self),), self.choices[f"draw{draw}"])


@pytest.mark.parametrize(
    ("name", "options"),
    [("shear", 2), ("rotate", 2), ("translate", 4)],
)
def test_each_digit_was_moved_one_of_the_possible_ways(golden, name, options):
    theirs = golden("mnist-c")
    (constant,) = MNIST_C[name][MNIST_C_PUBLISHED[name] - 1]
    moved = [
        FAMILIES["mnist-c"].to_bytes(getattr(affine, name)(theirs.clean, Scripted(24, draw0=k), constant).float())
        for k in range(options)
    ]
    apart = torch.stack([(m.int() - theirs(name, None).int()).abs().amax((1, 2, 3)) for m in moved])
    assert (apart.amin(0) <= 2).all()
    assert len(set(apart.argmin(0).tolist())) == options  # and all ways occur


@pytest.mark.parametrize(("name", "table"), [("dotted_line", strokes._dotted), ("zigzag", strokes._zigzags)])
def test_each_stroke_is_one_of_the_possible_ones(golden, name, table):
    theirs = golden("mnist-c")
    for clean, drawn in zip(theirs.clean, theirs(name, None), strict=True):
        ours = FAMILIES["mnist-c"].to_bytes(clean + table(torch.device("cpu")).unsqueeze(1))
        assert int((ours.int() - drawn.int()).abs().amax((1, 2, 3)).min()) <= 1


@pytest.mark.parametrize(
    ("family", "severity"), [("mnist-c", None), *(("cifar10-c", severity) for severity in range(1, 6))]
)
def test_each_motion_blur_is_one_of_some_angle(golden, family, severity):
    theirs = golden(family)
    constants = MNIST_C["motion_blur"][0] if severity is None else CIFAR10_C["motion_blur"][severity - 1]
    angles = torch.arange(-45, 45, 0.25, dtype=torch.float64)
    blurred = theirs("motion_blur", severity)
    for k in range(0, 24, 4):
        ours = motion_blur(theirs.clean[k : k + 1].expand(len(angles), -1, -1, -1), angles, *constants)
        near = ((ours - blurred[k]).abs() <= 2).double().mean((1, 2, 3))
        assert near.max() >= 0.995


@pytest.mark.parametrize("severity", [1, 5])
def test_each_frost_is_a_crop_of_a_texture(golden, severity):
    """The ice in an image, where nothing is saturated, is found in one of the five textures, to rounding."""
    theirs = golden("cifar10-c")
    image, ice = CIFAR10_C["frost"][severity - 1]
    for clean, frozen in zip(theirs.clean[:6], theirs("frost", severity)[:6], strict=True):
        places = (frozen.amax(0) < 255).nonzero()
        some = places[torch.linspace(0, len(places) - 1, 40).long()]
        rows, cols = some.T
        wanted = (frozen[:, rows, cols] - image * clean[:, rows, cols]) / ice
        best = float("inf")
        for texture in textures(0.2, torch.device("cpu")):
            height, width = texture.shape[-2] - 31, texture.shape[-1] - 31
            top = torch.arange(height).view(-1, 1, 1) + rows
            left = torch.arange(width).view(1, -1, 1) + cols
            apart = (texture[:, top, left] - wanted.view(3, 1, 1, -1)).abs().mean((0, 3))
            best = min(best, float(apart.min()))
        assert best <= 1.2 / ice  # cut to whole levels, half a level on average, over `ice`


def test_the_public_resnet_is_as_accurate_on_ours_as_on_theirs(golden, data_path):
    data_path("cifar-10-batches-py")
    model = load_public(data_path("weights", "resnet20_cifar10_bn_public.safetensors"))
    theirs = golden("cifar10-c")
    labels = cifar10.load("test").labels[theirs.indices]

    def surprise(x):
        with torch.inference_mode():
            return float(F.cross_entropy(model(IMAGENET(x)), labels))

    for name in sorted({name for family, name, _ in RANDOM if family == "cifar10-c"}):
        ours = torch.tensor(
            [
                [
                    surprise(corrupt(theirs.clean, name, severity, family="cifar10-c", seed=seed))
                    for severity in (1, 3, 5)
                ]
                for seed in range(4)
            ]
        ).mean(1)
        their = np.mean([surprise(theirs(name, severity)) for severity in (1, 3, 5)])
        assert abs(float(ours.mean()) - their) <= 4.5 * float(ours.std()) * 1.25**0.5 + 0.15, name
