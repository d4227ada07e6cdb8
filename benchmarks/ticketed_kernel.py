"""Would one kernel beat three? The histogram method as a kernel whose programs wait for each other, for few rows.

    python benchmarks/ticketed_kernel.py     # checks it against the library's, to the last bit, and times both

It is not part of the library: whether it is faster on a GPU has not been measured.

Three kernels that depend on each other take a few microseconds each, however little there is to do. Here, programs
draw tickets. The first tickets are to count a part of a row, the others to wait until all of that row is counted, make
the row's table and map a part. A program that waits does so for tickets that were drawn before its own, by programs
that are running and wait for nothing: whatever order a GPU starts them in, and however many at once, it ends.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trueup import functional
from trueup.kernels import curve_of
from trueup.kernels import triton as library
from trueup.kernels.bins import BINS
from trueup.kernels.triton_histogram import (
    BLOCK,
    SEGMENT,
    WARPS,
    bin_of_zero,
    count,
    map_values,
    mean_of,
    memory_of,
    offset_exponent,
    remember,
    tabulate,
)
from trueup.kernels.triton_launch import Launch, has_ptx, processors
from trueup.performance.timing import captured, side_by_side

PARTS = 32  # at most: every program that maps adds up their counts


def correct_rows(
    x: Tensor,
    curve: Tensor,
    step: float,
    *,
    keep: bool,
    sparse: bool,
    relu: bool,
    parts: int | None = None,
    shared: bool | None = None,
    drawn: Tensor | None = None,
) -> Tensor:
    """As `triton.correct_rows`, to the last bit.

    `drawn` is `(2 + rows,)` int32 zeros, and zeros again afterwards, so that a CUDA graph need not write them each
    time; nothing else that runs at the same time may be given the same ones. None makes them.
    """
    rows, n = x.shape
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    if n == 1 and keep:  # a single value is its own mean
        return x.relu() if relu else x.clone()
    m = curve.shape[1]
    aligned = x.data_ptr() % 16 == 0 and curve.data_ptr() % 16 == 0
    plan = _plan(rows, n, m, x.dtype, x.device, relu, keep, sparse, aligned, parts, shared)
    sums = x.new_empty(rows * plan.segments, dtype=torch.float32)
    counts = x.new_empty(rows * plan.parts * plan.bins, dtype=torch.int32)
    table = sums if plan.shared else x.new_empty(2 * rows * plan.parts * plan.bins, dtype=torch.float32)
    if not plan.shared:
        counts.zero_()
    if drawn is None:
        drawn = x.new_zeros(2 + rows, dtype=torch.int32)
    plan.launch(x, curve, out, sums, counts, table, drawn, n, m, plan.segments, plan.each, plan.parts, rows, step)
    return out


class _Plan(NamedTuple):
    parts: int
    each: int
    segments: int
    bins: int
    shared: bool
    launch: Launch


@functools.lru_cache(maxsize=1024)
def _plan(
    rows: int,
    n: int,
    m: int,
    _dtype: torch.dtype,
    device: torch.device,
    relu: bool,
    keep: bool,
    sparse: bool,
    _aligned: bool,
    parts: int | None,
    shared: bool | None,
) -> _Plan:
    """The plan for all that Triton may specialise a kernel on, so that what it compiles can be kept there."""
    if shared is None:
        shared = has_ptx(device)
    segments = -(-n // SEGMENT)
    each = -(-segments // min(parts or -(-2 * processors(device) // rows), segments, PARTS))
    parts = -(-segments // each)
    bins = BINS if relu else 2 * BINS
    most = 1 << (segments - 1).bit_length()
    constants = (relu, bins, BLOCK, SEGMENT, shared, keep, sparse, most, 4, -(-(m - 2).bit_length() // 2))
    return _Plan(
        parts, each, segments, bins, shared, Launch(_ticketed, (2 * parts * rows, 1, 1), constants, num_warps=WARPS)
    )


@triton.jit
def _ticketed(
    x, curve, out, sums, counts, table, drawn, n, m, segments, each, parts, rows, step,
    RELU: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr, SHARED: tl.constexpr,
    KEEP: tl.constexpr, SPARSE: tl.constexpr, SEGMENTS: tl.constexpr, WAYS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    # Tickets that were drawn, parts that were mapped, and those of each row that were counted.
    ticket = tl.atomic_add(drawn, 1, sem="relaxed", scope="gpu")
    half = parts * rows
    work = ticket % half
    part = work % parts
    row = (work // parts).to(tl.int64)
    x += row * n
    sums += row * segments
    counts += row * parts * BINS
    counted_parts = drawn + 2 + row
    first = part * each
    last = tl.minimum(first + each, segments)
    offset = offset_exponent(curve, m)
    memory = memory_of(BINS, SHARED)
    every = tl.arange(0, BINS)
    if ticket < half:
        mine = counts + part * BINS
        counted = count(x, sums, mine, memory, offset, n, first, last, RELU, BINS, BLOCK, SEGMENT, SHARED)
        if SHARED:
            tl.store(mine + every, counted)
        tl.debug_barrier()  # every thread's part is written before one of them says so
        tl.atomic_add(counted_parts, 1, sem="release", scope="gpu")
    else:
        done = tl.atomic_add(counted_parts, 0, sem="acquire", scope="gpu")
        while done < parts:
            done = tl.atomic_add(counted_parts, 0, sem="acquire", scope="gpu")
        tl.debug_barrier()
        counted = tl.zeros([BINS], tl.int32)
        for other in tl.range(parts, loop_unroll_factor=8):  # so that loads do not wait for each other
            counted += tl.load(counts + other * BINS + every, volatile=True)
        counted += tl.where(every == bin_of_zero(RELU), n - segments * SEGMENT, 0)
        mean = mean_of(sums, segments, SEGMENTS)
        shift = tabulate(every, counted, 0, mean, curve, n, m, step, KEEP, SPARSE, RELU, BINS, WAYS, SEARCH)
        table += ticket.to(tl.int64) * BINS
        remember(shift, table, memory, BINS, SHARED)
        map_values(x, out + row * n, table, memory, offset, n, first, last, RELU, BINS, BLOCK, SEGMENT, SHARED)
        if tl.atomic_add(drawn + 1, 1, sem="acq_rel", scope="gpu") == half - 1:  # nobody else is left
            tl.store(drawn, 0)
            tl.store(drawn + 1, 0)
            for other in range(rows):
                tl.store(drawn + 2 + other, 0)


SHAPES = ((1, 802_816), (1, 200_704), (1, 100_352), (1, 25_088), (4, 200_704))  # rows of ResNet-50 at batch 1, and 4


def main() -> None:
    """Check, time, print."""
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here; TRITON_INTERPRET=1 with `check` in Python runs the kernel without one")
    print(f"microseconds, in a CUDA graph, on {torch.cuda.get_device_name()}")
    print(f"{'rows x values':>14}  three kernels  ticketed")
    for rows, n in SHAPES:
        check(rows, n, torch.bfloat16, "cuda")
        times = _times(rows, n)
        print(f"{rows:4} x {n:7}  {1e6 * times['three']:13.1f}  {1e6 * times['ticketed']:8.1f}", flush=True)


def _times(rows: int, n: int) -> dict[str, float]:
    x, curve, options = _example(rows, n, torch.bfloat16, "cuda")
    drawn = torch.zeros(2 + rows, dtype=torch.int32, device="cuda")
    works = {
        "three": captured(lambda: library.correct_rows(x, curve, 0.7, **options)),
        "ticketed": captured(lambda: correct_rows(x, curve, 0.7, drawn=drawn, **options)),
    }
    return side_by_side(works, torch.device("cuda"))


def check(rows: int, n: int, dtype: torch.dtype, device: str) -> None:
    """Whether it is the library's, to the last bit, and leaves its counters as it found them."""
    x, curve, options = _example(rows, n, dtype, device)
    wanted = library.correct_rows(x, curve, 0.7, parts=1, **options)
    drawn = torch.zeros(2 + rows, dtype=torch.int32, device=device)
    for counters in (None, drawn, drawn):
        if not correct_rows(x, curve, 0.7, drawn=counters, **options).equal(wanted):
            raise SystemExit(f"{rows} x {n}: not what the library's kernels make of it")
    if drawn.any():
        raise SystemExit(f"{rows} x {n}: counters are left at {drawn.tolist()}")


def _example(rows: int, n: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, dict[str, bool]]:
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(n)).to(device, dtype)
    curve = curve_of(functional.levels(1025) * 3, functional.levels(1025)).to(device)
    return x, curve, {"keep": True, "sparse": True, "relu": True}


if __name__ == "__main__":
    main()
