"""An image's corruption depends on its index, the seed, the corruption, the severity, and nothing else."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
import torch

import trueup_lab.data.corruptions as package
from trueup_lab.data.corruptions import corrupt, corruption_names, severities
from trueup_lab.data.corruptions.families import FAMILIES
from trueup_lab.data.corruptions.rng import ImageRng

SMALL = [(family, name) for family in ("mnist-c", "cifar10-c") for name in corruption_names(family)]


def images(family: str, count: int) -> torch.Tensor:
    """Smooth images with noise: all grey levels, edges and flat parts."""
    benchmark = FAMILIES[family]
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, benchmark.channels, 7, 7, generator=generator) * 300 - 20
    smooth = torch.nn.functional.interpolate(coarse, benchmark.size, mode="bicubic")
    noise = torch.randn(smooth.shape, generator=generator) * 8
    return (smooth + noise).clamp(0, 255).to(torch.uint8)


def needs_textures(name: str, data_path) -> None:
    if name == "frost":
        data_path("frost")


def hardest(family: str, name: str) -> int | None:
    return max(severities(family, name), default=None)


@pytest.mark.parametrize(("family", "name"), SMALL)
def test_an_image_is_the_same_in_any_batch_and_order(family, name, data_path, monkeypatch):
    needs_textures(name, data_path)
    x = images(family, 7)
    severity = hardest(family, name)
    whole = corrupt(x, name, severity, family=family)
    order = torch.tensor([4, 0, 6, 2])
    assert torch.equal(corrupt(x[order], name, severity, family=family, indices=order), whole[order])
    alone = corrupt(x[5:6], name, severity, family=family, indices=[5])
    assert torch.equal(alone[0], whole[5])
    monkeypatch.setattr(package, "_CHUNK_CPU", 2 * x[0].numel())  # and however the batch is cut
    assert torch.equal(corrupt(x, name, severity, family=family), whole)


@pytest.mark.parametrize("name", corruption_names("imagenet-c"))
def test_at_224_an_image_is_the_same_alone(name, data_path):
    needs_textures(name, data_path)
    x = images("imagenet-c", 3)
    for severity in (1, 5):
        whole = corrupt(x, name, severity, family="imagenet-c")
        assert whole.shape == x.shape
        assert whole.dtype == torch.uint8
        assert torch.equal(corrupt(x[2:], name, severity, family="imagenet-c", indices=[2])[0], whole[2])


@pytest.mark.parametrize(("family", "name"), SMALL)
def test_chance_follows_the_seed_and_the_index(family, name, data_path):
    needs_textures(name, data_path)
    x = images(family, 1).expand(6, -1, -1, -1)
    severity = hardest(family, name)
    first = corrupt(x, name, severity, family=family)
    other = corrupt(x, name, severity, family=family, seed=1)
    if torch.equal(first[0], first[1]):  # no chance in it
        assert torch.equal(first, other)
    else:
        assert len({bytes(image.numpy().tobytes()) for image in first}) > 1
        assert not torch.equal(first, other)


def digest() -> str:
    """Digest of a few images of every corruption that needs no textures."""
    parts = []
    for family, names in (("mnist-c", corruption_names("mnist-c")), ("cifar10-c", corruption_names("cifar10-c"))):
        x = images(family, 300)  # enough for torch to share the work among threads
        parts += [corrupt(x, n, hardest(family, n), family=family) for n in names if n != "frost"]
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in parts)).hexdigest()


def test_another_process_with_more_threads_makes_the_same():
    folder = os.path.dirname(__file__)
    code = f"import sys; sys.path.insert(0, {folder!r}); import test_same_every_time as t; print(t.digest())"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "OMP_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "3")
    }
    assert len(found) == 1


def test_the_state_of_torch_is_neither_used_nor_changed():
    x = images("cifar10-c", 2)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = corrupt(x, "snow", 3, family="cifar10-c")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(corrupt(x, "snow", 3, family="cifar10-c"), first)


@pytest.mark.parametrize("name", ["zoom_blur", "pixelate", "gaussian_blur"])
def test_lower_precision_that_the_user_allows_is_not_used(name, monkeypatch):
    """On a CPU with bfloat16 units or a GPU with TF32 the products would be cut short."""
    x = images("cifar10-c", 3)
    exact = corrupt(x, name, 5, family="cifar10-c")
    precision = torch.backends.mkldnn.matmul
    seen = []
    recipe = FAMILIES["cifar10-c"].recipes[name]

    def spying(*arguments):
        seen.append(precision.fp32_precision)
        return recipe(*arguments)

    monkeypatch.setitem(FAMILIES["cifar10-c"].recipes, name, spying)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(corrupt(x, name, 5, family="cifar10-c"), exact)
        assert seen == ["ieee"]
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_images_given_are_left_alone():
    for family, name in SMALL:
        if name == "frost":
            continue
        x = images(family, 2)
        kept = x.clone()
        made = corrupt(x, name, hardest(family, name), family=family)
        assert torch.equal(x, kept)
        assert made.data_ptr() != x.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["mnist-c", "cifar10-c", "imagenet-c"])
def test_a_gpu_makes_the_same_to_a_grey_level(family):
    x = images(family, 4)
    for name in corruption_names(family):
        if name == "frost":
            continue
        cpu = corrupt(x, name, hardest(family, name), family=family)
        gpu = corrupt(x.cuda(), name, hardest(family, name), family=family).cpu()
        assert ((cpu.int() - gpu.int()).abs() <= 1).double().mean() > 0.999, name


def test_bits_are_fair_and_draws_independent():
    draws = ImageRng(0, "test", 1, range(64), "cpu")
    bits = draws.bits(0, 4096)
    for k in range(32):
        assert abs(((bits >> k) & 1).double().mean().item() - 0.5) < 5 * 0.5 / bits.numel() ** 0.5
    u = torch.stack([draws.uniform(0, 4096), draws.uniform(1, 4096)]).double()
    assert abs(u.mean().item() - 0.5) < 5 / (12 * u.numel()) ** 0.5
    flat = u.flatten(1)
    pairs = {
        "draws": torch.corrcoef(flat)[0, 1],
        "images": torch.corrcoef(torch.stack([u[0, :-1].flatten(), u[0, 1:].flatten()]))[0, 1],
        "positions": torch.corrcoef(torch.stack([flat[0, :-1], flat[0, 1:]]))[0, 1],
    }
    assert all(abs(value) < 5 / flat.shape[1] ** 0.5 for value in pairs.values()), pairs


def test_normals_are_normal_far_into_the_tails():
    z = ImageRng(0, "test", 1, range(256), "cpu").normal(0, 1 << 13).double().flatten()
    count = z.numel()
    for bound in (-4.5, -3.0, -1.0, 0.0, 0.3, 2.0, 4.0, 4.8):
        wanted = torch.special.ndtr(torch.tensor(bound, dtype=torch.float64)).item()
        deviation = (wanted * (1 - wanted) / count) ** 0.5
        assert abs((z <= bound).double().mean().item() - wanted) < 5 * deviation
