"""The optimiser of a recipe, with all its state allocated in advance, as a CUDA graph requires."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trueup_lab.training.recipes import Recipe


def make_optimiser(
    model: nn.Module, recipe: Recipe, rate: Tensor, *, capturable: bool
) -> tuple[torch.optim.Optimizer, dict[str, Tensor]]:
    """Return the optimiser of `recipe`, and its initial state by name.

    The learning rate is read from the tensor `rate` at every step, so that a step needs nothing from the host.
    """
    groups = _groups(model, recipe)
    if recipe.optimiser == "sgd":
        optimiser: torch.optim.Optimizer = torch.optim.SGD(
            groups,
            lr=rate,
            momentum=recipe.momentum,
            nesterov=recipe.nesterov and recipe.momentum > 0,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        names = {"momentum_buffer": "momentum"}
    else:
        optimiser = torch.optim.AdamW(
            groups,
            lr=rate,
            betas=(recipe.momentum, recipe.second_momentum),
            weight_decay=recipe.weight_decay,
            fused=True,
            capturable=capturable,
        )
        names = {"exp_avg": "momentum", "exp_avg_sq": "squares", "step": "step"}
    state = {}
    for name, parameter in model.named_parameters():
        for slot, ours in names.items():
            # Optimisers start from zero. Allocated here, because a graph must not allocate it.
            start = torch.zeros((), device=parameter.device) if slot == "step" else torch.zeros_like(parameter)
            optimiser.state[parameter][slot] = state[f"{ours}/{name}"] = start
    return optimiser, state


def _groups(model: nn.Module, recipe: Recipe) -> list[dict[str, object]]:
    parameters = list(model.parameters())
    if recipe.decay_vectors:
        return [{"params": parameters}]
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
