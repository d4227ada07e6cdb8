"""Training of ResNet-50 on ImageNet, in as many processes as `torchrun` starts.

    torchrun --nproc-per-node 4 -m trueup train --set imagenet --norm gn --data ROOT --out runs

Each process takes a part of every batch. The images of a batch and their crops depend on (seed, epoch) only, not on
the number of processes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from trueup.atomic import write_atomically
from trueup_lab.data.imagenet import Crop, ImageFolder
from trueup_lab.data.images import IMAGENET
from trueup_lab.data.root import data_root
from trueup_lab.devices import device_name
from trueup_lab.durations import duration
from trueup_lab.models.norms import NormName
from trueup_lab.models.resnet50 import GROUPS, ResNet50
from trueup_lab.models.weights import weights_of
from trueup_lab.processes import own_device, together
from trueup_lab.training.checkpoint import damaged, load_checkpoint, save_checkpoint
from trueup_lab.training.recipes import Recipe, learning_rate


@dataclass(frozen=True)
class ImageNetChoices:
    """Everything that determines the trained model."""

    norm: NormName
    seed: int
    recipe: Recipe
    groups: int = GROUPS
    size: int = 224


def train_imagenet(
    choices: ImageNetChoices,
    out: Path,
    *,
    data: str | os.PathLike[str] | None = None,
    device: str | None = None,
    workers: int = 8,
    time_limit: float | None = None,
) -> bool:
    """Train on `<data root>/imagenet/{train,val}`; continue from a checkpoint in `out`.

    Return True if all epochs are done, and False if the time limit (in seconds) came first.
    """
    began = time.monotonic()
    place = torch.device(own_device(device))
    if place.type == "cuda":
        torch.cuda.set_device(place)
    with together("nccl" if place.type == "cuda" else "gloo") as processes:
        rank, world = processes.rank, processes.world
        recipe, root = choices.recipe, data_root(data) / "imagenet"
        if recipe.batch % world:
            raise ValueError(
                f"a batch of {recipe.batch} cannot be shared equally by {world} processes; choose a multiple of {world}"
            )
        train = ImageFolder(root / "train", Crop(choices.size, random=True), seed=choices.seed)
        test = ImageFolder(root / "val", Crop(choices.size, round(choices.size * 256 / 224)))
        sampler: DistributedSampler[tuple[Tensor, int]] = DistributedSampler(
            train, world, rank, seed=choices.seed, drop_last=True
        )
        options: dict[str, Any] = {"num_workers": workers, "pin_memory": place.type == "cuda"}
        loader = DataLoader(train, recipe.batch // world, sampler=sampler, drop_last=True, **options)
        part = Subset(test, range(rank, len(test), world))
        test_loader = DataLoader(part, recipe.batch // world, **options)
        if len(loader) == 0:
            raise ValueError(
                f"{len(train)} training images are fewer than a batch of {recipe.batch}; choose a smaller batch"
            )

        torch.manual_seed(choices.seed)
        model = ResNet50(choices.norm, classes=len(train.synsets), groups=choices.groups).to(place)
        if place.type == "cuda":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        momentum = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=recipe.rate,
            momentum=recipe.momentum,
            nesterov=recipe.nesterov and recipe.momentum > 0,
            weight_decay=recipe.weight_decay,
        )
        for name, parameter in model.named_parameters():
            optimizer.state[parameter]["momentum_buffer"] = momentum[name]
        first, history = _resume(out, choices, model, momentum)
        shared: nn.Module = DistributedDataParallel(model) if world > 1 else model

        for epoch in range(first, recipe.epochs):
            started = time.monotonic()
            train.set_epoch(epoch)
            sampler.set_epoch(epoch)
            sums = _train_epoch(shared, optimizer, loader, recipe, epoch, place)
            right = _count_right(model, test_loader, place)
            totals = torch.stack([*sums, right, torch.tensor(time.monotonic() - started, device=place)])
            if world > 1:
                dist.all_reduce(totals)
            loss, train_right, test_right, seconds = (totals / world).tolist()
            row = {
                "epoch": epoch + 1,
                "loss": loss / len(loader),
                "train": world * train_right / (len(loader) * recipe.batch),
                "test": world * test_right / len(test),
            }
            history.append(row)
            left = (recipe.epochs - epoch - 1) * seconds
            # All processes must decide alike: `seconds` is their mean, and rank 0 broadcasts the time spent.
            spent = torch.tensor(time.monotonic() - began, device=place)
            if world > 1:
                dist.broadcast(spent, 0)
            stop = time_limit is not None and left > 0 and float(spent) + 1.5 * seconds > time_limit
            if rank == 0:
                _save(out, choices, model, momentum, history, place, world)
                print(
                    f"epoch {epoch + 1}/{recipe.epochs}  loss {row['loss']:.4f}"
                    f"  train {100 * row['train']:.2f} %  test {100 * row['test']:.2f} %"
                    f"  {duration(left)} left",
                    flush=True,
                )
            if world > 1:
                dist.barrier()
            if stop:
                return False
        return True


def _train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[tuple[Tensor, int]],
    recipe: Recipe,
    epoch: int,
    place: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the loss over this process's batches, and the number of images classified correctly."""
    model.train()
    loss_sum, right = torch.zeros((), device=place), torch.zeros((), device=place)
    for step, (images, labels) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, epoch, step, len(loader))
        x, target = _input(images, place), labels.to(place, non_blocking=True)
        with torch.autocast(place.type, dtype=torch.bfloat16, enabled=place.type == "cuda"):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), target)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss_sum += loss.detach()
        right += (logits.detach().argmax(1) == target).sum()
    return loss_sum, right


@torch.no_grad()
def _count_right(model: nn.Module, loader: DataLoader[tuple[Tensor, int]], place: torch.device) -> Tensor:
    model.eval()
    right = torch.zeros((), device=place)
    for images, labels in loader:
        right += (model(_input(images, place)).argmax(1) == labels.to(place)).sum()
    return right


def _input(images: Tensor, place: torch.device) -> Tensor:
    x = IMAGENET(images.to(place, non_blocking=True))
    return x.contiguous(memory_format=torch.channels_last) if place.type == "cuda" else x


def _resume(
    out: Path, choices: ImageNetChoices, model: nn.Module, momentum: dict[str, Tensor]
) -> tuple[int, list[dict[str, float]]]:
    path = out / "checkpoint.safetensors"
    if not path.exists():
        return 0, []
    tensors, facts = load_checkpoint(path)
    if facts.get("choices") != _plain(choices):
        there = facts.get("choices")
        raise ValueError(f"{path} belongs to another run: {there}, not {_plain(choices)}. Choose another folder")
    try:
        for name, tensor in _state(model, momentum).items():
            tensor.copy_(tensors[name])
        return len(facts["history"]), facts["history"]
    except (KeyError, TypeError, RuntimeError) as error:
        raise damaged(path, error) from error


def _save(
    out: Path,
    choices: ImageNetChoices,
    model: nn.Module,
    momentum: dict[str, Tensor],
    history: list[dict[str, float]],
    place: torch.device,
    world: int,
) -> None:
    facts = {"choices": _plain(choices), "history": history}
    save_checkpoint(out / "checkpoint.safetensors", _state(model, momentum), facts)
    record = facts | {
        "set": "imagenet",
        "device": device_name(place),
        "processes": world,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    write_atomically(out / "record.json", (json.dumps(record, indent=1) + "\n").encode())


def _state(model: nn.Module, momentum: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return everything that later steps depend on, by name."""
    weights = {f"weights/{key}": value for key, value in weights_of(model).items()}
    return weights | {f"momentum/{key}": value for key, value in momentum.items()}


def _plain(choices: ImageNetChoices) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(choices)))
    return plain
