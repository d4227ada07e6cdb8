"""Which backend runs: a Triton that does not work must not fail a request, and an empty batch is no special case.

There need be no GPU: tensors say that they are on one.
"""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
from torch import Tensor

from trueup import functional, kernels
from trueup.functional import evidence
from trueup.functional.gate import features, fit
from trueup.kernels import BatchNorm, LayerNorm, backend, curve_of, dispatch, operators

TARGET = torch.linspace(0, 3, 33)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """All tensors say that they are on a GPU, for which a backend is chosen anew."""
    monkeypatch.setattr(Tensor, "is_cuda", True)
    for module in (dispatch, operators):
        monkeypatch.setattr(module, "current_device", lambda _: contextlib.nullcontext())
    monkeypatch.setitem(backend.INSTALLED, "cuda", True)
    backend.backend_for.cache_clear()
    backend.fastest.cache_clear()
    yield
    backend.backend_for.cache_clear()
    backend.fastest.cache_clear()


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference(clean: Tensor) -> Tensor:
    found = evidence.statistics(evidence.moments(clean), floor := torch.full((2, clean.shape[1]), 1e-3))
    return evidence.reference_of(found.double(), floor, strength=0.1)


def cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "trueup.kernels.cuda", None)


def cannot_launch(monkeypatch):
    def launch():
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr("trueup.kernels.cuda.launch_nothing", launch)


MAPS, TOKENS = values(3, 16, 6, 6, seed=1) + 0.5, values(3, 600, 16, seed=2) + 0.5
NORM = BatchNorm(torch.zeros(16), torch.ones(16), torch.full((16,), 2.0), torch.ones(16), 1e-5)
LAYER_NORM = LayerNorm(torch.ones(16), torch.zeros(16), 1e-5)
USUAL, USUAL_TOKENS = reference(values(40, 16, 6, 6)), reference(values(40, 16, 600))
LAST = MAPS.contiguous(memory_format=torch.channels_last)
RULE = {"step": 0.7, "location": "keep", "sparse": True}
REQUESTS = {
    "maps": (
        lambda: kernels.realign(MAPS, USUAL, residual=MAPS.clone(), relu=True),
        lambda: (evidence.realign(MAPS, USUAL) + MAPS).relu(),
    ),
    "maps after a norm": (lambda: kernels.realign(MAPS, USUAL, norm=NORM), lambda: evidence.realign(NORM(MAPS), USUAL)),
    "tokens after a norm": (
        lambda: kernels.realign(TOKENS, USUAL_TOKENS, norm=LAYER_NORM, channels=-1),
        lambda: evidence.realign(LAYER_NORM(TOKENS).movedim(-1, 1), USUAL_TOKENS).movedim(1, -1),
    ),
    "histogram after a norm": (
        lambda: kernels.correct(LAST, curve_of(TARGET), **RULE, norm=NORM, relu=True),
        lambda: functional.correct(NORM(MAPS).relu(), TARGET, **RULE),
    ),
}


@pytest.mark.parametrize("broken", [cannot_be_imported, cannot_launch])
@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_with_a_triton_that_does_not_work_a_gpu_answers_in_torchs_own_operators(
    request_, broken, mode, on_a_gpu, monkeypatch
):
    broken(monkeypatch)
    found, wanted = REQUESTS[request_]
    with mode(), pytest.warns(UserWarning, match="triton does not work here"):
        answer = found()
    torch.testing.assert_close(answer, wanted(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("broken", [cannot_be_imported, cannot_launch])
def test_with_a_triton_that_does_not_work_the_gate_opens_and_a_pass_runs_once(broken, on_a_gpu, monkeypatch):
    broken(monkeypatch)
    clean, floor = evidence.moments(values(60, 4, 8, 8)), torch.full((2, 4), 1e-3).double()
    gate, passes = fit(features(clean, floor)), []
    with torch.inference_mode():
        opened = kernels.gate_values([3 * clean], [floor], gate, 0.1, 20.0, 0.0)
        with pytest.warns(UserWarning, match="triton does not work here"):
            kernels.compile_together(lambda: passes.append(1), clean, lambda: True)
    wanted = functional.gate.gate_values(gate.p_values(features(3 * clean, floor)), 0.1, 20.0)
    torch.testing.assert_close(opened, wanted.float())
    assert passes == [1]


def test_an_empty_batch_of_tokens_is_answered_on_a_gpu(on_a_gpu, monkeypatch):
    cannot_be_imported(monkeypatch)
    with torch.inference_mode(), pytest.warns(UserWarning, match="triton does not work here"):
        found = kernels.realign(TOKENS[:0], USUAL_TOKENS, norm=LAYER_NORM, channels=-1)
    assert found.shape == (0, 600, 16)
