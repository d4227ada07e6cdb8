"""A layer norm and the rule of evidence after it in Triton, against torch and the specification in double precision.

Which case reaches which branch of the kernels: more blocks of tokens than are added up at a time (150 tokens with
blocks of 8), a last block that is not full (13, 150), channels that are no power of two (24, 40), more channels than a
program writes (200), a single token, bands or none.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup
from kernels.backends import devices
from trueup import kernels
from trueup.functional import evidence
from trueup.kernels import LayerNorm
from trueup.kernels.cuda import tokens as kernel
from trueup.kernels.cuda.tokens import realign_after_layer_norm

SHAPES = [
    ((2, 13, 24), False),
    ((2, 150, 40), False),
    ((1, 3, 200), False),
    ((2, 1, 16), False),
    ((2, 3, 5, 24), False),
    ((2, 8, 9, 24), True),
]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few tokens, as if there were many."""
    monkeypatch.setattr(kernel, "TILE", 8 * 64)
    kernel._plan.cache_clear()
    yield
    kernel._plan.cache_clear()


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm_of(channels: int, device: str, dtype: torch.dtype = torch.float32) -> LayerNorm:
    weight, bias = 0.5 + values(2, channels, seed=7).abs()
    return LayerNorm(weight.to(device, dtype), bias.to(device, dtype), 1e-3)


def in_steps(x: Tensor, norm: LayerNorm) -> Tensor:
    weight, bias = norm.weight.double().cpu(), norm.bias.double().cpu()
    return F.layer_norm(x.double().cpu(), weight.shape, weight, bias, norm.epsilon)


def reference_of(shape: tuple[int, ...], norm: LayerNorm, bands: bool) -> Tensor:
    clean = in_steps(values(30, *shape[1:], seed=3), norm).movedim(-1, 1)
    moments = evidence.moments(clean, bands=bands)[:, [0, 2, 3] if bands else [0, 1]].double()
    floor = (1e-3 * moments.mean(dim=0).abs()).clamp(min=1e-24)
    return evidence.reference_of(evidence.statistics(moments, floor), floor, strength=0.05, base=0.1)


def expected_of(x: Tensor, reference: Tensor, gate: Tensor | None, norm: LayerNorm) -> Tensor:
    gate = None if gate is None else gate.cpu()
    return evidence.realign(in_steps(x, norm).movedim(-1, 1), reference.cpu(), gate).movedim(1, -1)


@devices
@pytest.mark.parametrize(("shape", "bands"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_applies_a_layer_norm_and_the_rule(device, shape, bands, dtype, small_blocks):
    norm = norm_of(shape[-1], device, dtype)
    reference = reference_of(shape, norm, bands)
    x = (3 * values(*shape, seed=1) + 20 * values(*shape[:-1], 1, seed=2)).to(device, dtype)
    for gate in (None, torch.linspace(0.3, 1, shape[0], device=device)):
        found = realign_after_layer_norm(x, reference.to(device), gate, norm)
        unit = 8 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-4
        torch.testing.assert_close(
            found.double().cpu(), expected_of(x, reference, gate, norm), rtol=unit, atol=2 * unit
        )
        assert found.is_contiguous()
        assert found.dtype == dtype


@devices
@pytest.mark.parametrize(("shape", "bands"), SHAPES[:2] + SHAPES[-1:], ids=str)
def test_triton_gives_tokens_the_same_bits_alone_and_in_a_batch(device, shape, bands, small_blocks):
    norm, x = norm_of(shape[-1], device), 3 * values(*shape, seed=1).to(device)
    reference = reference_of(shape, norm, bands).to(device)
    together = realign_after_layer_norm(x, reference, None, norm)
    for k in range(shape[0]):
        assert realign_after_layer_norm(x[k : k + 1], reference, None, norm).equal(together[k : k + 1])


@devices
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, where the interpreter meets NaN
def test_triton_only_normalises_closed_images_and_channels_that_are_not_finite(device, small_blocks):
    norm, x = norm_of(24, device), 3 * values(3, 13, 24, seed=1).to(device)
    norm.weight[5] = torch.inf
    reference = reference_of((3, 13, 24), norm_of(24, device), False).to(device)
    found = realign_after_layer_norm(x, reference, torch.tensor([1.0, 0.0, 1.0], device=device), norm)
    only_normed = in_steps(x, norm)
    torch.testing.assert_close(found[1].double().cpu(), only_normed[1], rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(found[0, :, 5].double().cpu(), only_normed[0, :, 5], equal_nan=True)
    assert found[0, :, :5].isfinite().all()
    assert (found[0, :, :5].cpu() - only_normed[0, :, :5]).abs().max() > 1e-3


@devices
def test_triton_takes_tokens_that_are_not_aligned_and_none(device, small_blocks):
    norm, x = norm_of(24, device), 3 * values(2, 13, 24, seed=1).to(device)
    reference = reference_of((2, 13, 24), norm, False).to(device)
    odd = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    assert realign_after_layer_norm(odd, reference, None, norm).equal(
        realign_after_layer_norm(x, reference, None, norm)
    )
    assert realign_after_layer_norm(x[:0], reference, None, norm).shape == (0, 13, 24)


@devices
def test_triton_keeps_normalised_tokens_in_the_range_of_float16(device):
    norm, x = norm_of(16, device, torch.float16), values(2, 9, 16, seed=1).half().to(device)
    reference = reference_of((2, 9, 16), norm, False)
    reference[0, 0], reference[4, 0] = 1e6, 1.0
    found = realign_after_layer_norm(x, reference.to(device), None, norm)
    assert (found == torch.finfo(torch.float16).max).all()


class Block(nn.Module):
    """Layer norms of a value that is also used elsewhere, as before every layer of a transformer."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(3))
        self.layer = nn.Linear(24, 24)

    def forward(self, x):
        x = x + self.layer(self.norms[0](x))
        a = self.norms[1](x)
        return self.norms[2](x + self.layer(a) + a).mean(dim=1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_site_takes_over_its_layer_norm(device, monkeypatch):
    torch.manual_seed(0)
    model = Block().to(device).eval()
    images = [values(8, 520, 24, seed=seed).to(device) for seed in range(4)]  # enough tokens to be fused
    robust = trueup.correct(model, trueup.calibrate(model, images, decide=False), trueup.Evidence(budget=1, depth=1.0))
    given = []
    own = kernels.realign
    monkeypatch.setattr(kernels, "realign", lambda *a, norm=None, **k: given.append(norm) or own(*a, norm=norm, **k))
    with torch.no_grad():
        found = robust(images[0] + 2)
    assert given  # kernels may be compiled in a pass of their own
    assert all(isinstance(norm, LayerNorm) for norm in given)
    with torch.enable_grad():
        torch.testing.assert_close(robust(images[0] + 2), found, rtol=1e-5, atol=1e-5)
