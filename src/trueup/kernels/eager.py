"""Detection of plain eager execution, in which an operator's implementation can be called without torch's dispatcher.

A call through the dispatcher costs the host 8 to 20 microseconds, as much as a small layer of a network. It is needed
only if something must see the operator: a compiler, a tracer, autograd or a function transform.
"""

from __future__ import annotations

import torch
from torch import Tensor


def nothing_watches(*tensors: Tensor | None) -> bool:
    """Whether these tensors are ordinary, need no gradient, and no compiler, tracer, mode or transform is active."""
    if torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        if tensor is not None and (type(tensor) is not Tensor or (tensor.requires_grad and torch.is_grad_enabled())):
            return False
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )
