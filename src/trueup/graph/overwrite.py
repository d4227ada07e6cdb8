"""Decide whether a placed module may write its result over its input, which then needs no memory of its own.

Writing a map where it was read is a tenth of a small network's time on a CPU. It is allowed only for the output of one
of torch's own convolutions, which is always new memory, and only if nothing else can see that output. The graph shows
the operations that read it (`source_of`). Hooks and modes may be added at any time, so each call looks for them
(`is_unseen`).
"""

from __future__ import annotations

import torch
from torch import fx, nn
from torch.nn.modules import module as torch_modules

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def source_of(root: nn.Module, call: fx.Node) -> fx.Node | None:
    """Call of a convolution whose output the placed module at `call` alone reads, as its first argument; or None."""
    first, *others = call.args
    if not isinstance(first, fx.Node) or first.op != "call_module" or list(first.users) != [call]:
        return None
    # A residual is read while the result is written.
    if first in others or first in call.kwargs.values():
        return None
    return first if type(root.get_submodule(str(first.target))) in _CONVOLUTIONS else None


def is_unseen(source: nn.Module, placed: nn.Module) -> bool:
    """Whether nothing can keep what `source` returns before it reaches `placed`: no hook, mode or other module.

    `source` is the module that is now where `source_of` found a convolution.
    """
    return (
        type(source) in _CONVOLUTIONS
        and _runs_alone(source)
        and _runs_alone(placed)  # its hooks are shown its input
        and not torch_modules._global_forward_hooks
        and not torch_modules._global_forward_pre_hooks
        and torch._C._len_torch_function_stack() == 0
    )


def _runs_alone(module: nn.Module) -> bool:
    """Whether a module has no forward hooks and no `forward` set on the object. Backward hooks need gradients."""
    own = module.__dict__
    return not own["_forward_hooks"] and not own["_forward_pre_hooks"] and "forward" not in own
