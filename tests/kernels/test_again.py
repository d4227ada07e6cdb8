"""A site's last call on a GPU, made again: only for calls of the same kind, and with the same bits."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch

from kernels.backends import INTERPRETED
from trueup import kernels
from trueup.kernels import BatchNorm, LayerNorm
from trueup.kernels.recent import SHAPES, realign_again, recent_of

maps = pytest.importorskip("trueup.kernels.cuda.maps")
launch = pytest.importorskip("trueup.kernels.cuda.launch")


def last(x):
    return x.contiguous(memory_format=torch.channels_last)


def norm(channels=8, device="cpu"):
    drawn = torch.Generator().manual_seed(1)
    tensors = (torch.rand(channels, generator=drawn).add(0.5).to(device) for _ in range(4))
    return BatchNorm(*tensors, 1e-5)


def reference(bands=3, channels=8, device="cpu"):
    drawn = torch.Generator().manual_seed(2)
    return torch.rand(5, bands, channels, generator=drawn).add(0.1).to(device)


class TestWhichCallsAreOfTheSameKind:
    """Without a GPU: what would be launched is recorded."""

    @pytest.fixture(autouse=True)
    def launches(self, monkeypatch):
        found = []

        def record(self, _tensors, *_numbers):
            self.function, self.metadata, self.run = "function", "metadata", lambda *given: found.append(given)

        monkeypatch.setattr(launch.Launch, "__call__", record)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: "stream", raising=False)
        maps._plan.cache_clear()
        yield found
        maps._plan.cache_clear()

    def remembered(self, *call, channels=1):
        maps.realign(*call, channels)
        return recent_of(call[1]).calls.get(call[0].shape)

    @pytest.mark.parametrize("size", [14, 112], ids=["whole", "in segments"])
    def test_it_gets_the_addresses_of_the_new_call(self, launches, size):
        x, known, weights = last(torch.randn(2, 8, size, size)), reference(), norm()
        again = self.remembered(x, known, None, x, True, 6.0, weights)
        new, beside = last(torch.randn(2, 8, size, size)), last(torch.randn(2, 8, size, size))
        out = again(new, known, None, beside, True, 6.0, weights, 1)
        assert (out.shape, out.stride()) == (new.shape, new.stride())
        given = launches[-1]
        assert given[3:6] == ("stream", "function", "metadata")
        assert given[9] == new.data_ptr()
        tensors = [known, beside, out, *weights[:4]]
        assert set(given) >= {tensor.data_ptr() for tensor in tensors}
        assert len(launches) == (1 if size == 14 else 2)

    def test_without_a_norm_a_sum_and_a_gate(self):
        x, known = torch.randn(1, 9, 8), reference(2)
        again = self.remembered(x, known, None, None, False, None, None, channels=-1)
        assert again(torch.randn(1, 9, 8), known, None, None, False, None, None, -1).shape == x.shape
        assert again(torch.randn(1, 9, 8), known, None, None, False, None, None, 2).shape == x.shape
        assert again(torch.randn(1, 9, 8), known, None, None, False, None, None, 1) is None
        assert again(torch.randn(1, 9, 8), known, None, None, False, None, norm(), -1) is None

    def test_other_calls_are_declined(self):
        x, known, weights, gate = last(torch.randn(2, 8, 14, 14)), reference(), norm(), torch.rand(2)
        call = {
            "x": x,
            "reference": known,
            "gate": gate,
            "residual": x,
            "relu": True,
            "ceiling": None,
            "norm": weights,
            "channels": 1,
        }
        again = self.remembered(*list(call.values())[:-1])
        assert again(**call) is not None
        unaligned = torch.randn(2 * 8 * 14 * 14 + 1)[1:].view(2, 14, 14, 8).movedim(-1, 1)
        moved = norm()
        others = {
            "x": [x[:1], x.double(), x.contiguous(), last(torch.randn(2, 8, 14, 15)), unaligned],
            "reference": [known.double()],
            "gate": [None, gate.double(), torch.rand(2, 2)[:, 0]],
            "residual": [None, x[:1], x.contiguous(), x.bfloat16(), unaligned],
            "relu": [False],
            "ceiling": [6.0],
            "norm": [None, moved, weights._replace(epsilon=1e-3)],
        }
        for name, values in others.items():
            for value in values:
                assert again(**{**call, name: value}) is None, (name, value)

    def test_a_norm_whose_tensors_moved_or_were_cast_is_another(self):
        x, known, weights = last(torch.randn(2, 8, 14, 14)), reference(), norm()
        again = self.remembered(x, known, None, None, True, None, weights)
        kept = weights.bias.data
        weights.bias.data = kept.view(torch.float16)[:8]  # at the same address, as after two casts
        assert again(x, known, None, None, True, None, weights, 1) is None
        weights.bias.data = kept
        assert again(x, known, None, None, True, None, weights, 1) is not None
        again = self.remembered(x, known, None, None, True, None, weights)
        weights.weight.data = weights.weight.data.half()
        assert again(x, known, None, None, True, None, weights, 1) is None

    def test_what_needed_a_copy_is_not_remembered(self):
        x = last(torch.randn(2, 8, 14, 14))
        strided = BatchNorm(*(torch.rand(16)[::2] for _ in range(4)), 1e-5)
        assert self.remembered(x, reference(), None, None, True, None, strided) is None
        assert self.remembered(x[..., ::2], reference(), None, None, True, None, norm()) is None
        assert self.remembered(x, reference(), None, x.contiguous(), True, None, norm()) is None
        assert self.remembered(x, reference(channels=16)[..., ::2], None, None, True, None, norm()) is None

    def test_batches_of_several_sizes_are_remembered_side_by_side(self):
        known, batches = reference(), [last(torch.randn(n, 8, 14, 14)) for n in range(1, 21)]
        first, second = (self.remembered(x, known, None, None, True, None, None) for x in batches[:2])
        assert realign_again(batches[0], known, None, None, True, None, None, 1).shape == batches[0].shape
        assert recent_of(known).calls == {batches[0].shape: first, batches[1].shape: second}
        for x in batches:  # but not of any number
            self.remembered(x, known, None, None, True, None, None)
        assert len(recent_of(known).calls) <= SHAPES

    def test_the_tensors_of_a_call_are_freed(self):
        """Their memory may belong to a CUDA graph of torch.compile, which refuses tensors that it does not know."""
        known, call = reference(), [last(torch.randn(2, 8, 14, 14)) for _ in range(2)] + [torch.rand(2)]
        x, beside, gate = call
        assert self.remembered(x, known, gate, beside, True, None, norm()) is not None
        kept = [weakref.ref(tensor) for tensor in call]
        del call, x, beside, gate
        assert [each() for each in kept] == [None] * 3


def test_a_copy_of_a_reference_remembers_nothing():
    known = reference()
    recent_of(known).remember(known.shape, lambda *_: None)
    assert recent_of(known).calls
    for copied in (copy.deepcopy(known), pickle.loads(pickle.dumps(known)), known.to(torch.float64)):
        assert not recent_of(copied).calls


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="nothing is launched in the interpreter")
@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 8, 7, 7), (2, 8, 14, 14), (3, 8, 112, 112)])
def test_the_same_bits_as_when_nothing_is_remembered(shape, dtype):
    device, bands = "cuda", 3 if shape[2] >= 8 else 2
    known, weights = reference(bands, device=device), norm(device=device)

    def answer(x, gate, beside, weights, known):
        return kernels.realign(x, known, gate, norm=weights, residual=beside, relu=True)

    calls = 0
    for gated in (False, True):
        for _ in range(3):
            x, beside = (last(torch.randn(shape, device=device)).to(dtype) for _ in range(2))
            gate = torch.rand(shape[0], device=device) if gated else None
            for some in (weights, weights, weights._replace(weight=weights.weight + 1)):
                again = recent_of(known).calls.get(x.shape)
                found = answer(x, gate, beside, some, known)
                calls += again is not None and recent_of(known).calls[x.shape] is again
                assert torch.equal(found, answer(x, gate, beside, some, known.clone()))
            weights.weight.mul_(1.5)  # in place: the next call reads the new values
    assert calls >= 6


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="nothing is launched in the interpreter")
@torch.inference_mode()
def test_the_operator_that_compiled_models_call_remembers_too():
    known, weights = reference(device="cuda"), norm(device="cuda")
    x = last(torch.randn(2, 8, 14, 14, device="cuda"))
    call = torch.ops.trueup.realign_after_norm.default
    wanted = kernels.realign(x, known.clone(), norm=weights, relu=True)
    for _ in range(2):
        assert call(x, *weights, known, None, None, True, None).equal(wanted)
    assert x.shape in recent_of(known).calls
    recent_of(known).remember(x.shape, lambda *_: torch.zeros(1))
    assert call(x, *weights, known, None, None, True, None).shape == (1,)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="nothing is launched in the interpreter")
@torch.inference_mode()
def test_a_captured_call_can_be_followed_by_others():
    known = reference(device="cuda")
    x = last(torch.randn(1, 8, 14, 14, device="cuda"))
    wanted = kernels.realign(x, known.clone())
    norms = LayerNorm(torch.ones(8, device="cuda"), torch.zeros(8, device="cuda"), 1e-5)
    kernels.realign(torch.randn(1, 9, 8, device="cuda"), reference(2, device="cuda"), norm=norms, channels=-1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.realign(x, known)
        captured_again = kernels.realign(x, known)
    del captured
    graph.replay()
    assert torch.equal(captured_again, wanted)
    assert torch.equal(kernels.realign(x, known), wanted)
