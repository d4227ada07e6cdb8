"""Every backend against the exact rule, within the stated bound, and against the histogram method worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import oracle
from kernels.backends import INTERPRETED, backends, eps
from trueup import functional
from trueup.kernels import cpu, curve_of, plain

transports = backends("transport_rows")
TINY = 1e-42  # a denormal
SMALLEST = torch.finfo(torch.float32).smallest_normal  # what is smaller may be flushed to zero, or kept as zeros are


def random(seed=0):
    return torch.Generator().manual_seed(seed)


def heavy(shape):
    return torch.randn(shape, generator=random()) / torch.rand(shape, generator=random(1)).clamp(min=1e-4)


def few(values, n):
    return torch.tensor(values)[torch.randint(len(values), (2, n), generator=random())]


# What a row may look like, and why it is here.
ROWS = {
    "ordinary": torch.randn(3, 500, generator=random()),
    "longer than a block": torch.randn(1, 9001, generator=random()),
    "heavy tails": heavy((2, 400)),
    "log-normal": (torch.randn(2, 400, generator=random()) * 3).exp(),
    "constant": torch.full((2, 64), 1.7),
    "two values": few([0.5, 2.0], 300),
    "two values in one bin": few([1.0, 1.0001], 300),
    "many ties": torch.randn(2, 400, generator=random()).mul(4).round() / 4,
    "tiny": torch.randn(2, 300, generator=random()) * 1e-30,
    "huge": torch.randn(2, 300, generator=random()).clamp(-3, 3) * 1e36,
    "a sum beyond float32": (1 + torch.rand(2, 300, generator=random())) * 1e37,
    "denormal": torch.randn(2, 300, generator=random()) * TINY,
    "every scale at once": torch.logspace(-44, 37, 300)[None] * torch.tensor([1.0, -1.0]).repeat(150),
    "all zeros": torch.zeros(2, 50),
    "zeros of both signs": torch.tensor([[0.0, -0.0, 1.0, -1.0]]),
    "all negative": -torch.rand(2, 300, generator=random()),
    "one element": torch.tensor([[0.3], [-2.0], [0.0]]),
    "two elements": torch.tensor([[0.3, 4.0]]),
    "powers of two": 2.0 ** torch.arange(-20, 12)[None],  # the edges of bins
}
# Targets at scales of their own: a row's bins depend on them.
TARGETS = {
    "relu": (torch.randn(257, generator=random(2)).relu().sort().values, functional.levels(257)),
    "signed": (torch.randn(257, generator=random(3)).sort().values, None),
    "one value": (torch.tensor([0.7]), None),
    "two ends": (torch.tensor([-1.0, 3.0]), None),
    "heavy": ((torch.randn(129, generator=random(4)) * 4).exp().sort().values, functional.levels(129)),
    "small": (torch.linspace(0, 1e-20, 17), None),
    "zero": (torch.zeros(5), None),
}
# The interpreter is slow: there, every row to one target, and rows of every scale to every target.
PAIRS = [
    (rows, target)
    for rows in ROWS
    for target in TARGETS
    if not INTERPRETED or target == "relu" or rows in ("ordinary", "every scale at once")
]
STEPS = [(0.8, True, True), (0.25, False, False), (1.0, False, True), (1.0, True, False)]


def apply(backend, rows, target, step, keep, sparse, relu):
    return backend(rows.contiguous(), curve_of(*target), step, keep=keep, sparse=sparse, relu=relu)


def wanted(rows, target, step, keep, sparse, relu):
    """For each row: the exact rule, how far from it is allowed, and the histogram method; and the size of rounding."""
    a = (rows.float().relu() if relu else rows.float()).double().numpy()
    curve = curve_of(*target).numpy()
    n = a.shape[1]
    order = functional.order_statistics(target[0].double(), n, levels=target[1]).numpy()
    largest = np.float32(max(abs(order[0]), abs(order[-1])))
    for row in a:
        exact = oracle.exact_row(row, order, step=step, keep=keep, sparse=sparse)
        reach = oracle.bound(row, order, largest, step=step, keep=keep)
        binned = oracle.histogram_row(row, curve, step=step, keep=keep, sparse=sparse)
        rounding = np.abs(row) + np.abs(order).max() + 4 * np.abs(row).mean() * keep
        yield exact, reach, binned, rounding


@transports
@pytest.mark.parametrize("relu", [False, True], ids=["as it is", "relu"])
@pytest.mark.parametrize(("rows", "target"), PAIRS, ids=str)
def test_every_backend_is_within_the_bound_of_the_exact_rule(backend, rows, target, relu):
    rows, target = ROWS[rows][:1] if INTERPRETED else ROWS[rows], TARGETS[target]
    for step, keep, sparse in STEPS[:2] if INTERPRETED else STEPS:
        got = apply(backend, rows, target, step, keep, sparse, relu).double().numpy()
        for out, (exact, reach, binned, rounding) in zip(
            got, wanted(rows, target, step, keep, sparse, relu), strict=True
        ):
            slack = 4 * eps(torch.float32) * rounding + SMALLEST
            assert ((np.abs(out - exact) <= reach + slack) | (sparse & (np.abs(out) < SMALLEST))).all()
            assert ((np.abs(out - binned) <= slack) | (sparse & (np.abs(out) < SMALLEST))).all()


@transports
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("relu", [False, True], ids=["as it is", "relu"])
@pytest.mark.parametrize("name", ["ordinary", "heavy tails", "constant", "many ties", "all zeros", "one element"])
def test_half_precision_is_that_of_the_widened_values(backend, dtype, relu, name):
    rows, target = ROWS[name][:1].to(dtype), TARGETS["relu"]
    for step, keep, sparse in STEPS:
        got = apply(backend, rows, target, step, keep, sparse, relu)
        assert got.dtype == dtype
        for out, (exact, reach, _, rounding) in zip(got, wanted(rows, target, step, keep, sparse, relu), strict=True):
            slack = eps(dtype) * rounding
            assert (np.abs(out.double().numpy() - exact) <= reach + slack).all()


@transports
def test_sixteen_bits_are_told_apart_where_it_counts(backend):
    """From an eighth of the target's largest value up, there are at least as many bins as bfloat16 has values."""
    values = torch.arange(0.5, 4, 1 / 64).bfloat16().unique()
    rows = values[torch.randperm(len(values), generator=random())][None]
    target = (torch.linspace(0, 4, len(values)), None)
    got = apply(backend, rows, target, 1.0, False, False, False)
    wanted = functional.correct(rows, target[0], 1.0, location="match", sparse=False)
    torch.testing.assert_close(got, wanted, atol=0, rtol=eps(torch.bfloat16))


@transports
def test_float16_does_not_overflow(backend):
    rows = torch.tensor([[6e4, 1.0, 0.0]], dtype=torch.float16)
    got = apply(backend, rows, (torch.tensor([0.0, 1e5, 2e5]), None), 1.0, False, False, False)
    assert got.isfinite().all()


@transports
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("relu", [False, True])
def test_a_row_that_is_not_finite_comes_back_as_it_was(backend, poison, relu):
    rows = torch.randn(3, 50, generator=random())
    clean = apply(backend, rows, TARGETS["relu"], 0.8, True, True, relu)
    rows[1, 7] = poison
    got = apply(backend, rows, TARGETS["relu"], 0.8, True, True, relu)
    assert got[[0, 2]].equal(clean[[0, 2]])
    a = rows.relu() if relu else rows
    if a[1].isfinite().all():  # the relu of minus infinity is zero, as good as any
        assert not got[1].equal(a[1])
    else:
        torch.testing.assert_close(got[1], a[1], equal_nan=True, atol=0, rtol=0)


@transports
def test_a_row_does_not_depend_on_its_batch_to_the_last_bit(backend):
    for n in (3, 700, 20_000 if not INTERPRETED else 5000):
        rows = torch.randn(5, n, generator=random()) * 2
        for relu in (False, True):
            together = apply(backend, rows, TARGETS["heavy"], 0.8, True, True, relu)
            alone = torch.cat([apply(backend, row[None], TARGETS["heavy"], 0.8, True, True, relu) for row in rows])
            assert together.equal(alone)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(1, 300_001), (2, 200_000), (7, 30_000), (64, 10)])
def test_the_number_of_threads_does_not_matter_to_the_last_bit(shape, threads):
    rows = torch.randn(shape, generator=random())
    results = []
    for count in (1, 2, 3, 5):
        threads(count)
        results.append(cpu.transport_rows(rows, curve_of(*TARGETS["relu"]), 0.8, keep=True, sparse=True, relu=False))
    assert all(result.equal(results[0]) for result in results)


@pytest.mark.parametrize("shape", [(2, 20_000), (1, 200_000)])
def test_numba_is_the_plain_path_but_for_rounding(shape):
    rows, curve = torch.randn(shape, generator=random()), curve_of(*TARGETS["relu"])
    for relu in (False, True):
        ours, theirs = (m.transport_rows(rows, curve, 0.8, keep=True, sparse=True, relu=relu) for m in (cpu, plain))
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


numbers = st.floats(-100, 100, width=32) | st.integers(-4, 4).map(float)
some_rows = st.lists(numbers, min_size=1, max_size=40).map(lambda row: torch.tensor([row]))
some_steps = st.floats(0.01, 1)
relaxed = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@transports
@relaxed
@given(rows=some_rows, step=some_steps, relu=st.booleans(), name=st.sampled_from(["relu", "signed", "heavy"]))
def test_order_is_kept_and_equal_values_stay_equal(backend, rows, step, relu, name):
    got = apply(backend, rows, TARGETS[name], step, False, False, relu)[0]
    a = (rows.relu() if relu else rows)[0]
    ordered = got[a.argsort(stable=True)]
    assert (ordered.diff() >= -2 * eps(torch.float32) * (got.abs().max() + a.abs().max())).all()
    for value in a.unique():
        assert got[a == value].unique().numel() == 1


@transports
@relaxed
@given(rows=some_rows, step=some_steps, relu=st.booleans(), seed=st.integers(0, 99))
def test_where_a_value_lies_does_not_matter(backend, rows, step, relu, seed):
    order = torch.randperm(rows.shape[1], generator=random(seed))
    got = apply(backend, rows, TARGETS["relu"], step, True, True, relu)
    shuffled = apply(backend, rows[:, order], TARGETS["relu"], step, True, True, relu)
    torch.testing.assert_close(shuffled, got[:, order], atol=2e-5, rtol=1e-6)  # a mean is summed in another order


@transports
@relaxed
@given(rows=some_rows, step=some_steps, relu=st.booleans())
def test_zeros_stay_when_sparse(backend, rows, step, relu):
    rows = torch.cat([rows, torch.tensor([[0.0, -0.0]])], dim=1)
    got = apply(backend, rows, TARGETS["signed"], step, True, True, relu)
    a = rows.relu() if relu else rows
    assert (got[a == 0] == 0).all()
