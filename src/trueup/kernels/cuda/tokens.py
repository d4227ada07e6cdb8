"""A layer norm and the rule of evidence after it, for contiguous `(batch, ..., channels)`.

The norm needs the mean over all channels of a token, the rule the mean over all tokens of a channel. So there are two
kernels. The first normalises a block of tokens and writes them. Without bands it also stores each channel's mean and
squared deviations over the block; the second kernel adds these up and rewrites the tokens in place. Compared with
torch's layer norm and `maps.realign`, this takes as many launches, one reading less, and less time on the host. With
bands, `maps.realign` follows.

The division of the work depends on the shape of one image only, so an image gets the same bits in every batch.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trueup.kernels.cuda.coefficients import coefficients, load_reference
from trueup.kernels.cuda.compile_ahead import KernelSpec, skip_uncompiled, specs_of
from trueup.kernels.cuda.elementwise import clamp_to_float16
from trueup.kernels.cuda.launch import Launch, aligned, ready
from trueup.kernels.cuda.maps import gate_or_one, realign
from trueup.kernels.fused_norms import LayerNorm
from trueup.kernels.recent import realign_again

TILE = 8192  # values that a program normalises
WRITTEN_TOKENS, WRITTEN_CHANNELS = 64, 128  # tokens and channels that a program writes
SUMS = 16  # blocks of tokens whose sums are added up at a time

_SIZES = ["units", "n", "blocks"]


def realign_after_layer_norm(x: Tensor, reference: Tensor, gate: Tensor | None, norm: LayerNorm) -> Tensor | None:
    """As `maps.realign` of norm(x), for contiguous `x` whose channels lie last; None if this pass skips the rule.

    The norm's output is rounded to the dtype of `x`, as by torch.
    """
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    weight, bias, epsilon = norm
    bands = reference.shape[1] == 3
    plan = _plan(x.shape, bands, (x.dtype, weight.dtype, bias.dtype, reference.dtype), x.device)
    later = bool(plan.missing) and skip_uncompiled(plan.missing)
    if later:
        if bands:
            realign(x, reference, gate, channels=-1)  # so that its kernels are compiled with this one
        return None
    sums = out if bands else torch.empty(plan.sums, dtype=torch.float32, device=x.device)
    plan.normalise((aligned(x), aligned(weight), aligned(bias), out, sums), epsilon, *plan.sizes)
    if bands:
        again = realign_again(out, reference, gate, None, False, None, None, -1)
        return realign(out, reference, gate, channels=-1) if again is None else again
    gated, gates = gate_or_one(gate, x.device)
    plan.write((out, sums, ready(reference), gates), gated, *plan.sizes)
    return out


class _Plan(NamedTuple):
    """Division of the work among programs, and the kernels that do it."""

    sizes: tuple[int, int, int]  # units of channels, tokens of an image, blocks of them that one program normalises
    sums: int  # numbers that `normalise` stores
    normalise: Launch
    write: Launch
    missing: list[KernelSpec]  # kernels that may not be compiled yet


@functools.lru_cache(maxsize=1024)
def _plan(shape: torch.Size, bands: bool, dtypes: tuple[torch.dtype, ...], device: torch.device) -> _Plan:
    """Return the plan for everything that Triton may specialise a kernel on; it keeps the compiled kernels."""
    batch, channels = shape[0], shape[-1]
    n = shape.numel() // (batch * channels)
    width = max(16, triton.next_power_of_2(channels))
    tokens = max(1, TILE // width)
    blocks, parts = -(-n // tokens), -(-n // WRITTEN_TOKENS)
    tiles = -(-channels // WRITTEN_CHANNELS)
    # No fusion of multiplications and additions, as in the kernels of maps.
    options = {"num_warps": 8, "enable_fp_fusion": False}
    # Channels are passed as a multiple of the unit that a thread loads at once, so that Triton knows their alignment.
    unit = math.gcd(channels, 16 // dtypes[0].itemsize)
    normalise = Launch(normalise_tokens, (batch * blocks, 1, 1), (unit, tokens, width, not bands), **options)
    constants = (unit, tokens, WRITTEN_TOKENS, WRITTEN_CHANNELS, SUMS)
    write = Launch(write_tokens, (batch * parts * tiles, 1, 1), constants, **options)
    dtype, weight, bias, reference = dtypes
    wide, any_sizes = torch.float32, (2, 2, 2)  # kernels are not specialised on them
    needed: dict[Launch, tuple[Any, ...]] = {
        normalise: (dtype, weight, bias, dtype, dtype if bands else wide, 1e-5, *any_sizes)
    }
    if not bands:
        needed[write] = (dtype, wide, reference, wide, 0, *any_sizes)
    missing = specs_of(needed, device)
    return _Plan((channels // unit, n, blocks), batch * blocks * 2 * channels, normalise, write, missing)


@triton.jit(do_not_specialize=_SIZES)
def normalise_tokens(
    x, weight, bias, out, sums, epsilon, units, n, blocks,
    UNIT: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, MEASURE: tl.constexpr,
):  # fmt: skip
    """Write a block of normalised tokens, and to `MEASURE` each channel's mean and squared deviations over them."""
    channels = units * UNIT
    image = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) - image.to(tl.int32) * blocks
    token, channel = block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    inside, exists = channel < channels, token < n
    at, mask = token[:, None] * channels + channel[None, :], exists[:, None] & inside[None, :]
    begin = image * n * channels
    value = tl.load(x + begin + at, mask=mask, other=0.0).to(tl.float32)
    away = tl.where(inside[None, :], value - (tl.sum(value, axis=1) / channels)[:, None], 0.0)
    deviation = tl.sqrt_rn(tl.sum(away * away, axis=1) / channels + epsilon)
    scale = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    normed = (away / deviation[:, None] * scale[None, :] + shift[None, :]).to(out.dtype.element_ty)
    tl.store(out + begin + at, normed, mask=mask)
    if MEASURE:  # the rounded values, as a second kernel would read them
        rounded = tl.where(mask, normed.to(tl.float32), 0.0)
        mean = tl.sum(rounded, axis=0) / tl.minimum(TOKENS, n - block * TOKENS)
        rest = tl.where(mask, rounded - mean[None, :], 0.0)
        sums += tl.program_id(0).to(tl.int64) * 2 * channels + channel
        tl.store(sums, mean, mask=inside)
        tl.store(sums + channels, tl.sum(rest * rest, axis=0), mask=inside)


@triton.jit(do_not_specialize=["gated", *_SIZES])
def write_tokens(
    out, sums, reference, gates, gated, units, n, blocks,
    UNIT: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Realign some channels of some tokens in place, from the statistics of all blocks of an image."""
    channels = units * UNIT
    tiles = tl.cdiv(channels, WIDTH)
    above = tl.program_id(0) // tiles
    parts = tl.cdiv(n, ROWS)
    image = (above // parts).to(tl.int64)
    channel = (tl.program_id(0) - above * tiles) * WIDTH + tl.arange(0, WIDTH)
    inside = channel < channels
    gate, known = tl.load(gates + image * gated), load_reference(reference, channel, channels, False)
    sums += image * blocks * 2 * channels + channel[None, :]
    mean, squares = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for first in range(0, blocks, SUMS):
        count, means, _ = _load_block_sums(sums, first, inside, channels, n, blocks, TOKENS, SUMS)
        mean += tl.sum(count * means, axis=0)
    mean /= n
    for first in range(0, blocks, SUMS):  # squared deviations from the mean of all, not from those of the blocks
        count, means, own = _load_block_sums(sums, first, inside, channels, n, blocks, TOKENS, SUMS)
        away = means - mean[None, :]
        squares += tl.sum(tl.where(count > 0, own + count * away * away, 0.0), axis=0)
    nothing = tl.zeros([WIDTH], tl.float32)
    start, gain, _, moves = coefficients(
        known, gate, mean, nothing, nothing, squares, nothing, nothing + 1.0, nothing - 0.0, n, False
    )
    token = (above - image.to(tl.int32) * parts) * ROWS + tl.arange(0, ROWS)
    mask = (token < n)[:, None] & inside[None, :]
    at = out + image * n * channels + token[:, None] * channels + channel[None, :]
    value = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    new = tl.where(moves[None, :], tl.fma(value, gain[None, :], start[None, :]), value)
    if out.dtype.element_ty == tl.float16:  # a reference may lie outside float16's range
        new = tl.where(moves[None, :], clamp_to_float16(new), new)
    tl.store(at, new.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _load_block_sums(sums, first, inside, channels, n, blocks, TOKENS: tl.constexpr, SUMS: tl.constexpr):
    """Number of tokens of some blocks, and the mean and squared deviations of each channel over them."""
    block = first + tl.arange(0, SUMS)
    exists = (block < blocks)[:, None] & inside[None, :]
    at = sums + (block * 2 * channels)[:, None]
    count = tl.where(block < blocks, tl.minimum(TOKENS, n - block * TOKENS), 0).to(tl.float32)[:, None]
    return count, tl.load(at, mask=exists, other=0.0), tl.load(at + channels, mask=exists, other=0.0)
