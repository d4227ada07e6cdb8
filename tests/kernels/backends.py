"""Every implementation of `correct_rows` that can run here, behind one signature."""

from __future__ import annotations

import os

import pytest
import torch

from trueup.kernels import plain

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _plain(rows, curve, step, **options):
    return plain.correct_rows(rows, curve, step, **options)


def _numba(rows, curve, step, **options):
    from trueup.kernels import cpu

    return cpu.correct_rows(rows, curve, step, **options)


def _triton(rows, curve, step, **options):
    from trueup.kernels import triton

    return triton.correct_rows(rows, curve, step, **options)


def _on_gpu(function):
    return lambda rows, curve, step, **options: function(rows.cuda(), curve.cuda(), step, **options).cpu()


BACKENDS = [
    pytest.param(_plain, id="plain"),
    pytest.param(_numba, id="numba"),
    *([pytest.param(_triton, id="triton")] if INTERPRETED else []),
    pytest.param(_on_gpu(_plain), id="plain-cuda", marks=pytest.mark.gpu),
    pytest.param(_on_gpu(_triton), id="triton-cuda", marks=pytest.mark.gpu),
]
backends = pytest.mark.parametrize("backend", BACKENDS)


def eps(dtype):
    return torch.finfo(dtype).eps
