"""Detect what has to see a call: autograd, a compiler, a tracer, a mode or a function transform.

In plain eager inference nothing does, and kernels are called without torch's dispatcher: a call
through it costs the host 8 to 20 microseconds, as much as a small layer of a network.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_plain_eager(a: Tensor, *others: object) -> bool:
    """Return whether no gradient, compiler, tracer, mode or transform is active and all tensors are ordinary ones."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or type(a) is not Tensor:
        return False
    for other in others:
        if other is not None and type(other) is not Tensor:
            return False
    return (
        forward_ad._current_level < 0
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )


def is_jit_tracing() -> bool:
    """Return whether torch.jit.trace is recording."""
    return torch._C._get_tracing_state() is not None


def has_tangent(*tensors: Tensor | None) -> bool:
    """Return whether a tensor carries a forward-mode derivative, which torch takes as zero in custom operators."""
    if forward_ad._current_level < 0:  # the check that `unpack_dual` begins with, once for all tensors
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in given)  # type: ignore[no-untyped-call]
