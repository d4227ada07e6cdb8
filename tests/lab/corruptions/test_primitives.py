"""The parts, beside the libraries the originals call: SciPy, and OpenCV and scikit-image where installed."""

from __future__ import annotations

import io

import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from trueup_lab.data.corruptions import blur, digital, edges, glass, linear, noise, spatter
from trueup_lab.data.corruptions.arithmetic import quantise
from trueup_lab.data.corruptions.digital import _boxes, pixelate
from trueup_lab.data.corruptions.jpeg import through_jpeg
from trueup_lab.data.corruptions.plasma import plasma_fractal
from trueup_lab.data.corruptions.rng import ImageRng
from trueup_lab.data.corruptions.warp import bilinear

CPU = torch.device("cpu")


def greys(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("border", ["nearest", "reflect"])
@pytest.mark.parametrize("sigma", [0.25, 0.7, 3.0, 20.0])  # the last one reaches over the image and back
def test_the_gaussian_matrix_is_scipys_filter(border, sigma):
    x = greys(28, 28).double()
    matrix = linear.gaussian(28, sigma, CPU, border=border, truncate=3.0)
    ours = linear.separable(x, matrix, matrix)
    theirs = scipy.ndimage.gaussian_filter(x.numpy(), sigma, mode=border, truncate=3.0)
    assert np.abs(ours.numpy() - theirs).max() < 0.05


@pytest.mark.parametrize("sigma", [1.0, 2.5])
def test_shifting_gives_the_very_numbers_of_the_matrix(sigma):
    x = greys(1, 3, 96, 71)
    matrices = linear.gaussian(96, sigma, CPU), linear.gaussian(71, sigma, CPU)
    assert torch.equal(linear.gaussian_blur(x, sigma), linear.separable(x, *matrices))
    z = ImageRng(0, "z", 1, [0], "cpu").normal(0, 96 * 71).view(1, 1, 96, 71)
    assert torch.equal(linear.gaussian_blur(z, sigma), linear.separable(z, *matrices))


@pytest.mark.parametrize("factor", [1.0, 1.01, 1.25, 2.5])
def test_the_zoom_matrix_is_scipys_zoom_of_the_middle(factor):
    x = greys(32, 32).double().numpy()
    kept = int(np.ceil(32 / factor))
    top = (32 - kept) // 2
    theirs = scipy.ndimage.zoom(x[top : top + kept, top : top + kept], factor, order=1)
    trim = (len(theirs) - 32) // 2
    matrix = linear.zoom(32, factor, CPU)
    ours = linear.separable(torch.from_numpy(x), matrix, matrix).numpy()
    assert np.abs(ours - theirs[trim : trim + 32, trim : trim + 32]).max() < 0.02


def test_the_ways_of_zoom_blur_agree(monkeypatch):
    x = greys(2, 3, 32, 27)
    dense = blur.zoom_blur(x, 1.26, 0.01)
    monkeypatch.setattr(blur, "_DENSE", 0)
    assert (blur.zoom_blur(x, 1.26, 0.01) - dense).abs().max() < 0.05


@pytest.mark.parametrize(("radius", "alias"), [(0.5, 0.6), (1, 0.2), (3, 0.1), (8, 0.5), (10, 0.5)])
def test_defocus_is_opencvs_filter_with_the_originals_kernel(radius, alias):
    cv2 = pytest.importorskip("cv2")
    reach, width = (8, 3) if radius <= 8 else (radius, 5)
    at = np.arange(-reach, reach + 1)
    disk = (at[:, None] ** 2 + at**2 <= radius**2).astype(np.float32)
    kernel = cv2.GaussianBlur(disk / disk.sum(), (width, width), sigmaX=alias)
    x = greys(1, 1, 64, 64)
    theirs = cv2.filter2D(x[0, 0].numpy().astype(np.float64), -1, kernel)
    assert np.abs(blur.defocus_blur(x, radius, alias)[0, 0].numpy() - theirs).max() < 0.5


@given(seed=st.integers(0, 10_000), sigma=st.sampled_from([0.7, 1.0, 2.0, 4.0]))
@settings(max_examples=25, deadline=None)
def test_edges_distances_and_drops_are_opencvs(seed, sigma):
    cv2 = pytest.importorskip("cv2")
    rng = np.random.default_rng(seed)
    layer = scipy.ndimage.gaussian_filter(rng.normal(0.65, 0.3, (48, 48)), sigma, mode="nearest")
    layer[layer < 0.68] = 0
    layer = (np.clip(layer, 0, 1) * 255).astype(np.uint8)
    ours = torch.from_numpy(layer.astype(np.int32))[None, None]
    edge = cv2.Canny(layer, 50, 150)
    assert np.array_equal(edges.opencv_canny(ours, 50, 150)[0, 0].numpy(), edge > 0)
    away = np.minimum(cv2.distanceTransform(255 - edge, cv2.DIST_L2, 5), 20)
    near = spatter.distance_to(torch.from_numpy(edge > 0)[None, None])[0, 0].numpy() / 2**16
    assert np.abs(np.minimum(near, 20) - away).max() < 1e-3
    relief = cv2.equalizeHist(cv2.blur(away.astype(np.float32), (3, 3)).astype(np.uint8))
    relief = cv2.filter2D(relief, cv2.CV_8U, np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]))
    relief = cv2.blur(relief, (3, 3))
    # Where a distance is rounded the other way, a level of the histogram moves, and all that is on it.
    apart = np.abs(spatter.drop_relief(ours)[0, 0].numpy() - relief.astype(int))
    assert (apart <= 2).mean() > 0.95
    assert apart.mean() < 0.5


@given(seed=st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_canny_edges_are_scikit_images(seed):
    feature = pytest.importorskip("skimage.feature")
    rng = np.random.default_rng(seed)
    x = scipy.ndimage.gaussian_filter(rng.normal(0, 1, (28, 28)), 2)
    x = (255 * (x - x.min()) / np.ptp(x)).astype(np.uint8)
    theirs = feature.canny(x / 255.0)
    ours = edges.canny_edges(torch.from_numpy(x)[None, None])[0, 0].numpy() > 0
    assert (ours == theirs).mean() > 0.995


def test_every_pixel_of_a_region_that_touches_a_seed_is_reached():
    """A spiral is the longest possible path."""
    region = torch.zeros(1, 33, 33, dtype=torch.bool)
    row = col = 0
    region[0, 0, 0] = True
    for turn, length in enumerate([32, 32, 32, *(n for n in range(30, 2, -2) for _ in "ab")]):
        for _ in range(length):
            row += (0, 1, 0, -1)[turn % 4]
            col += (1, 0, -1, 0)[turn % 4]
            region[0, row, col] = True
    seeds = torch.zeros_like(region)
    seeds[0, 0, 0] = True
    assert torch.equal(edges.connected(seeds, region), region)


def test_sampling_between_pixels_is_scipys():
    x = greys(1, 1, 20, 20)
    generator = torch.Generator().manual_seed(1)
    rows, cols = (torch.rand(1, 20, 20, generator=generator) * 30 - 5 for _ in range(2))
    for ours, theirs in (("reflect", "reflect"), ("mirror", "mirror")):
        wanted = scipy.ndimage.map_coordinates(
            x[0, 0].double().numpy(), np.stack([rows[0].numpy(), cols[0].numpy()]), order=1, mode=theirs
        )
        assert np.abs(bilinear(x, rows, cols, ours)[0, 0].numpy() - wanted).max() < 0.02


@pytest.mark.parametrize("scale", [0.95, 0.9, 0.85, 0.75, 0.65, 0.6, 0.5, 0.4, 0.3, 0.25])
@pytest.mark.parametrize("size", [32, 224])
def test_boxes_are_pillows(size, scale):
    x = greys(size, size)
    small = int(size * scale)
    theirs = Image.fromarray(x.numpy()).resize((small,) * 2, Image.Resampling.BOX)
    theirs = np.asarray(theirs.resize((size,) * 2, Image.Resampling.BOX))
    matrix, back = _boxes(size, small, CPU)
    rows = (x.float() @ matrix.T).add(0.5).floor()
    ours = (matrix @ rows).add(0.5).floor()[back][:, back]
    assert np.abs(ours.numpy() - theirs).max() <= 1
    assert (ours.numpy() == theirs).mean() > 0.99
    assert np.array_equal(pixelate(x.expand(1, 3, -1, -1), scale)[0, 0].numpy(), ours if size == 32 else theirs)


@pytest.mark.parametrize("quality", [1, 7, 25, 49, 50, 80, 100])
@pytest.mark.parametrize(
    "shape",
    [
        (64, 48),  # whole blocks of 16
        (40, 56),  # whole blocks of 8
        (45, 61),  # odd: half a chroma pixel beyond the edge
        (50, 38),  # even, blocks not filled
    ],
)
def test_jpeg_is_pillows_to_the_byte(quality, shape):
    noise = greys(2, 3, *shape)
    smooth = torch.nn.functional.interpolate(greys(2, 3, 5, 5).float(), shape, mode="bicubic").clamp(0, 255)
    x = torch.cat((noise, smooth.to(torch.uint8), torch.zeros_like(noise), torch.full_like(noise, 255)))
    for ours, clean in zip(through_jpeg(x, quality), x, strict=True):
        file = io.BytesIO()
        Image.fromarray(clean.permute(1, 2, 0).numpy().copy()).save(file, "JPEG", quality=quality)
        assert np.array_equal(ours.permute(1, 2, 0).numpy(), np.asarray(Image.open(file)))


@pytest.mark.parametrize("shape", [(224, 224), (151, 97)])
def test_large_images_get_the_same_bytes_with_and_without_pillow(monkeypatch, shape):
    x = greys(3, 3, *shape)
    for function, level in ((digital.jpeg_compression, 10), (digital.pixelate, 0.3)):
        assert digital._by_pillow(x)
        with_pillow = function(x, level)
        monkeypatch.setattr(digital, "_by_pillow", lambda _: False)
        assert (function(x, level) == with_pillow).double().mean() > 0.999
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("law", "level", "law_of"),
    [
        (noise._shot, 12.0, lambda x: scipy.stats.poisson(x / 255 * 12)),
        (noise._shot, 500.0, lambda x: scipy.stats.poisson(x / 255 * 500)),
    ],
)
def test_shot_noise_has_poissons_law(law, level, law_of):
    table = law(level, 1.0)
    assert torch.allclose(table.sum(1), torch.ones(256, dtype=torch.float64))
    for value in (0, 1, 100, 254):
        counts = np.arange(0, int(level) + 1)
        chance = law_of(value).pmf(counts)
        chance[-1] += law_of(value).sf(level)
        becomes = np.floor(np.minimum(counts / level, 1) * 255 + 1e-9).astype(int)
        assert np.allclose(np.bincount(becomes, chance, 256), table[value].numpy(), atol=1e-9)


@pytest.mark.parametrize(
    ("function", "level"),
    [
        (noise.gaussian_noise, 0.1),
        (noise.speckle_noise, 0.2),
        (noise.shot_noise, 5.0),
        (noise.impulse_noise, 0.3),
    ],
)
def test_noise_is_drawn_with_the_probabilities_of_its_table(function, level):
    law = getattr(noise, "_" + function.__name__.split("_")[0])
    for value in (3, 128, 250):
        x = torch.full((64, 1, 64, 64), value, dtype=torch.uint8)
        made = function(x, ImageRng(0, "n", 1, range(64), "cpu"), level, 1.0)
        found = torch.bincount(made.flatten().long(), minlength=256).double()
        wanted = law(level, 1.0)[value] * x.numel()
        seen = wanted > 5
        chi = ((found - wanted)[seen] ** 2 / wanted[seen]).sum().item()
        assert scipy.stats.chi2.sf(chi, max(1, int(seen.sum()) - 1)) > 1e-5
        assert found[wanted == 0].sum() == 0


def sequential_glass(pixels, targets, walked, swaps):
    """The originals' walk, a pixel at a time."""
    pixels = pixels.copy()
    for k in range(len(pixels) - 1, -1, -1):
        if walked[k]:
            other = targets[k]
            if swaps:
                pixels[k], pixels[other] = pixels[other], pixels[k]
            else:
                pixels[k] = pixels[other]
    return pixels


@pytest.mark.parametrize("reach", [1, 2, 3, 4])
def test_glass_copies_as_a_walk_over_the_pixels_does(reach):
    draws = ImageRng(0, "glass", 1, range(3), "cpu")
    size = 40
    targets = glass._targets(draws.bits(0, size * size), reach, size, size)
    walked = glass._walked(reach, size, size, CPU).numpy()
    taken = glass._taken_from(draws, reach, 0, torch.Size((size, size)))
    for image in range(3):
        wanted = sequential_glass(np.arange(size * size), targets[image].numpy(), walked, swaps=False)
        assert np.array_equal(taken[image].numpy(), wanted)
    assert {int(d) for d in (targets[0][walked] // size - torch.arange(size * size)[walked] // size).unique()} <= set(
        range(-reach - 1, reach + 1)
    )


@pytest.mark.parametrize("reach", [1, 2, 4])
def test_glass_swaps_as_a_walk_over_the_pixels_does(reach, monkeypatch):
    monkeypatch.setattr(glass, "gaussian_blur", lambda x, _: x.clone())
    draws = ImageRng(0, "glass", 1, range(3), "cpu")
    x = greys(3, 1, 28, 28)
    bits = draws.bits(0, 784)
    targets = glass._targets(bits, reach, 28, 28)
    targets = torch.where((bits >> 15) & 1 == 1, targets, torch.arange(784)).numpy()
    walked = glass._walked(reach, 28, 28, CPU).numpy()
    made = glass.swapping_glass_blur(x, draws, 1.0, reach, 1).flatten(1).numpy()
    for image in range(3):
        wanted = sequential_glass(x[image].flatten().numpy(), targets[image], walked, swaps=True)
        assert np.array_equal(made[image], wanted)


def test_plasma_has_the_originals_distribution():
    corruptions = pytest.importorskip("imagecorruptions.corruptions")
    np.random.seed(0)  # noqa: NPY002 the original draws from NumPy's global state
    theirs = np.stack([corruptions.plasma_fractal(32, 1.75) for _ in range(300)])
    ours = plasma_fractal(ImageRng(0, "fog", 1, range(300), "cpu"), 0, 32, 1.75).numpy()
    for statistic in (
        np.mean,
        np.std,
        lambda m: np.abs(np.diff(m, axis=0)).mean(),
        lambda m: m[:4, :4].mean(),
    ):
        a, b = (np.array([statistic(m) for m in maps]) for maps in (ours, theirs))
        assert scipy.stats.ks_2samp(a, b).pvalue > 1e-4


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40).filter(lambda w: sum(w) > 0))
def test_rounded_weights_add_up_to_one(weights):
    w = torch.tensor(weights, dtype=torch.float64)
    rounded = quantise(w / w.sum())
    assert rounded.sum() == 1
    assert torch.equal(rounded * 65536, (rounded * 65536).round())
