"""ImageNet-C beside `imagecorruptions-imaug`, which runs without ImageMagick.

It departs from the original in `elastic_transform` (no affine part, other constants), `frost` (textures
enlarged by 1.1, all six), and in taking the corner, not the middle, of what `snow` and `zoom_blur` zoom.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trueup_lab.data.corruptions import corrupt
from trueup_lab.data.fidelity import WITHOUT_CHANCE, change, within

oracle = pytest.importorskip("imagecorruptions")
pytestmark = [pytest.mark.data, pytest.mark.filterwarnings("ignore")]

EXACT = sorted(WITHOUT_CHANCE["imagenet-c"] - {"zoom_blur"})  # of which the oracle takes the corner, not the middle
RANDOM = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "speckle_noise",
    "glass_blur",
    "motion_blur",
    "fog",
    "snow",
    "spatter",
)


@pytest.fixture(scope="module")
def pictures(data_path):
    image = pytest.importorskip("PIL.Image")
    files = sorted(data_path("imagenet_val_1k", "val").glob("*/*"))[:400:100]
    crops = []
    for file in files:
        with image.open(file) as opened:
            left, top = (opened.width - 224) // 2, (opened.height - 224) // 2
            crops.append(np.asarray(opened.convert("RGB").crop((left, top, left + 224, top + 224))))
    return torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).contiguous()


def theirs(pictures, name, severity):
    made = [oracle.corrupt(p.permute(1, 2, 0).numpy(), corruption_name=name, severity=severity) for p in pictures]
    return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("severity", range(1, 6))
@pytest.mark.parametrize("name", EXACT)
def test_a_corruption_without_chance_agrees_pixel_by_pixel(pictures, name, severity):
    ours = corrupt(pictures, name, severity, family="imagenet-c")
    assert within(ours, theirs(pictures, name, severity)) >= 0.995


@pytest.mark.parametrize("severity", [1, 3, 5])
@pytest.mark.parametrize("name", RANDOM)
def test_a_random_corruption_agrees_in_distribution(pictures, name, severity):
    np.random.seed(severity)  # noqa: NPY002 the oracle draws from NumPy's global state
    draws = np.array(
        [change(pictures, corrupt(pictures, name, severity, family="imagenet-c", seed=seed)) for seed in range(5)]
    )
    wanted = np.array([change(pictures, theirs(pictures, name, severity)) for _ in range(2)]).mean(0)
    allowed = 6 * draws.std(0, ddof=1) * (1 / 2 + 1 / 5) ** 0.5 + np.array([0.6, 0.5, 0.03])
    assert (np.abs(draws.mean(0) - wanted) <= allowed).all(), (draws.mean(0), wanted, allowed)
