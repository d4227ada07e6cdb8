"""Every implementation of `transport_rows` and `quantile_rows` that can run here, and where Triton kernels can run."""

from __future__ import annotations

import os

import pytest
import torch

from trueup.kernels import cpu, cuda, plain

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def on_gpu(function):
    def call(*arguments, **options):
        return function(*(a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments), **options).cpu()

    return call


def backends(name):
    """Parametrize a test with the function of this name in every backend."""
    functions = {backend.__name__.split(".")[-1]: getattr(backend, name) for backend in (plain, cpu, cuda)}
    return pytest.mark.parametrize(
        "backend",
        [
            pytest.param(functions["plain"], id="plain"),
            pytest.param(functions["cpu"], id="numba"),
            *([pytest.param(functions["cuda"], id="triton")] if INTERPRETED else []),
            pytest.param(on_gpu(functions["plain"]), id="plain-cuda", marks=pytest.mark.gpu),
            pytest.param(on_gpu(functions["cuda"]), id="triton-cuda", marks=pytest.mark.gpu),
        ],
    )


# Where a test can call a Triton kernel itself. `test_interpreter` selects these by the word "triton".
devices = pytest.mark.parametrize(
    "device",
    [
        *([pytest.param("cpu", id="triton")] if INTERPRETED else []),
        pytest.param("cuda", id="triton-cuda", marks=pytest.mark.gpu),
    ],
)


def eps(dtype):
    return torch.finfo(dtype).eps
