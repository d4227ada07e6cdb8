"""Every Triton kernel compiles to machine code for an H100 or H200. That takes Triton's compiler, and no GPU."""

from __future__ import annotations

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.backends import INTERPRETED
from trueup.functional.gate import Gate
from trueup.kernels import BatchNorm, LayerNorm
from trueup.kernels.cuda import gate, launch, maps, quantiles, tokens, transport

HOPPER, PROCESSORS = GPUTarget("cuda", 90, 32), 132
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.int32: "*i32",
}
BF16, HALF = torch.bfloat16, torch.float16

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter takes the compiler's place")


@pytest.fixture
def compiled(monkeypatch):
    """Names of the kernels that are launched, each of which is compiled instead."""
    names = set()

    def compile_kernel(self, tensors, *numbers):
        signature, constants, attributes = {}, {}, {}
        for place, (parameter, value) in enumerate(
            zip(self.kernel.params, (*tensors, *numbers, *self.constants), strict=True)
        ):
            if parameter.is_constexpr:
                signature[parameter.name], constants[place,] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = TYPES[value.dtype]
                attributes[place,] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
        source = ASTSource(self.kernel, signature, constants, attributes)
        assert triton.compile(source, target=HOPPER, options=self.options).asm["cubin"]
        names.add(self.kernel.__name__)

    monkeypatch.setattr(launch.Launch, "__call__", compile_kernel)
    for module in (maps, tokens, transport, quantiles):
        module._plan.cache_clear()
        for name, found in {
            "processors": lambda _: PROCESSORS,
            "has_ptx": lambda _: True,
            "starts_early": lambda _, programs: programs <= PROCESSORS,
        }.items():
            monkeypatch.setattr(module, name, found, raising=False)
    yield names
    for module in (maps, tokens, transport, quantiles):
        module._plan.cache_clear()


def batch_norm(channels: int) -> BatchNorm:
    return BatchNorm(*(torch.ones(channels) for _ in range(4)), 1e-5)


def last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def test_small_maps(compiled):
    """With all that can be fused, as single images of a convolutional network need them."""
    x = torch.empty(1, 64, 7, 7, dtype=HALF)
    maps.realign(x, torch.empty(5, 2, 64), torch.ones(1), x, True, 6.0, batch_norm(64))
    maps.moments(x, bands=False)
    assert compiled == {"realign_whole", "measure_whole"}


def test_large_maps_with_bands(compiled):
    x = last(torch.empty(64, 24, 112, 112, dtype=BF16))
    maps.realign(x, torch.empty(5, 3, 24), None, None, True, None, batch_norm(24))
    maps.moments(x, bands=True)
    assert compiled == {"sum_segments", "write_rows", "moments_from_sums"}


def test_tokens(compiled):
    x, affine = torch.empty(1, 784, 192, dtype=BF16), torch.ones(192, dtype=BF16)
    tokens.realign_after_layer_norm(x, torch.empty(5, 2, 192), None, LayerNorm(affine, affine, 1e-5))
    assert compiled == {"normalise_tokens", "write_tokens"}


@pytest.mark.parametrize(
    ("rows", "kernels"),
    [
        (1, {"_count_parts", "_make_tables", "_map_parts"}),  # shared by many programs
        (256, {"_transport_whole"}),  # a program each
    ],
)
def test_the_papers_rule(compiled, rows, kernels):
    curve = torch.zeros(3, 1025, dtype=torch.float64)
    x = torch.empty(rows, 64 * 256, dtype=BF16)
    transport.transport_rows(
        x, curve, 0.5, keep=True, sparse=True, relu=True, norm=batch_norm(64), residual=torch.empty_like(x)
    )
    assert compiled == kernels


@pytest.mark.parametrize(
    ("n", "kernels"),
    [
        (2000, {"_quantiles_of_short_rows"}),
        (50_000, {"_find_ranges", "_count_parts", "_quantiles_of_rows"}),
    ],
)
def test_quantiles(compiled, n, kernels):
    quantiles.quantile_rows(torch.empty(64, n), torch.linspace(0, 1, 2049, dtype=torch.float64))
    assert compiled == kernels


def test_the_gate(compiled):
    features = 4 * 24
    sizes = [(features, 65), (2, features), (), (features,), (features, features), (300,)]
    known = Gate(*(torch.zeros(size, dtype=torch.float64) for size in sizes))
    gate.gate_values([torch.empty(4, 5, 24)], [torch.empty(5, 24)], known, 0.01, 20.0, 0.05)
    assert compiled == {"_scores_of_norm", "_values_of_images"}
