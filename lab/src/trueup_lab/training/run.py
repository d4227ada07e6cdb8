"""A training run: epochs, checkpoints, progress, and a record of all choices.

A run lives in one folder: `checkpoint.safetensors` (everything needed to continue), `record.json` (the choices, the
device, the results) and `history.csv` (loss and accuracies by epoch and seed). A run whose folder holds a checkpoint
continues from it.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from trueup.atomic import write_atomically
from trueup_lab.data.images import Images
from trueup_lab.data.sets import SETS
from trueup_lab.devices import device_name
from trueup_lab.durations import duration
from trueup_lab.locks import locked
from trueup_lab.models.architectures import check_variant
from trueup_lab.models.files import Record, shipped
from trueup_lab.models.resnet20 import GROUPS, Shortcut
from trueup_lab.models.weights import load_weights, weights_of
from trueup_lab.tables import write_table
from trueup_lab.training.accuracy import share_correct
from trueup_lab.training.checkpoint import damaged, load_checkpoint, save_checkpoint
from trueup_lab.training.engine import Engine
from trueup_lab.training.fleet import Fleet
from trueup_lab.training.recipes import Recipe

CHECKPOINT, RECORD, HISTORY = "checkpoint.safetensors", "record.json", "history.csv"
RESERVE = 2.0  # seconds before a time limit, for the checkpoint


@dataclass(frozen=True)
class Choices:
    """Everything that determines the trained models. Two runs with the same choices train the same models."""

    set: str
    norm: str
    seeds: tuple[int, ...]
    recipe: Recipe
    shortcut: Shortcut = "projection"
    groups: int = GROUPS
    precision: str = "float32"
    architecture: str = "resnet20"

    def __post_init__(self) -> None:
        check_variant(self.architecture, self.norm)
        if self.set not in SETS:
            raise ValueError(f"unknown set {self.set!r}; known: {', '.join(SETS)}")
        if self.shortcut not in get_args(Shortcut):
            raise ValueError(f"unknown shortcut {self.shortcut!r}; known: {', '.join(get_args(Shortcut))}")
        if self.norm == "gn" and (self.groups < 1 or 16 % self.groups):
            raise ValueError(f"groups={self.groups}: expected 1, 2, 4, 8 or 16, so that 16 channels are divisible")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"Choices(seeds={self.seeds}): expected one or more different seeds")

    def record(self) -> Record:
        """Return the record of the models, without accuracies and training, which are not known yet."""
        chosen = SETS[self.set]
        return Record(
            self.set,
            self.norm,
            channels=chosen.image_channels,
            classes=chosen.classes,
            shortcut=self.shortcut,
            groups=self.groups,
            architecture=self.architecture,
        )


@dataclass(frozen=True)
class HistoryRow:
    """One model after one epoch. Accuracies are shares; `test` is None if it was not measured."""

    epoch: int
    seed: int
    loss: float
    train: float
    test: float | None


@dataclass(frozen=True)
class TrainingProgress:
    """State of a run after an epoch. Loss and accuracies are means over its models."""

    epoch: int
    epochs: int
    loss: float
    train_accuracy: float
    test_accuracy: float | None
    seconds: float
    steps: int
    models: int
    stopped: bool = False

    def __str__(self) -> str:
        test = "" if self.test_accuracy is None else f"  test {100 * self.test_accuracy:.2f} %"
        each = 1000 * self.seconds / (self.steps * self.models)
        left = (self.epochs - self.epoch) * self.seconds
        return (
            f"epoch {self.epoch}/{self.epochs}  loss {self.loss:.4f}"
            f"  train {100 * self.train_accuracy:.2f} %{test}"
            f"  {each:.2f} ms per model and step  {duration(left)} left"
        )


def train(
    choices: Choices,
    train_images: Images,
    test_images: Images,
    engine: Engine,
    *,
    out: Path | None = None,
    time_limit: float | None = None,
    checkpoint_every: int = 1,
    test_every: int = 10,
    report: Callable[[TrainingProgress], None] = lambda _: None,
) -> dict[int, nn.Module] | None:
    """Train the models that `choices` describe, and return them by seed, in evaluation mode.

    With `out`, write a checkpoint there every `checkpoint_every` epochs, and continue from a checkpoint found there.
    With a `time_limit` in seconds, stop with a checkpoint when another epoch might not fit, and return None; a limit
    that is too short for one epoch is an error.
    """
    if out is None:
        return _train(
            choices, train_images, test_images, engine, None, time_limit, checkpoint_every, test_every, report
        )
    with locked(out / CHECKPOINT, wait=False):
        for left in out.glob(f".{CHECKPOINT}.[0-9]*"):
            left.unlink()  # half a file of a process that was killed
        return _train(choices, train_images, test_images, engine, out, time_limit, checkpoint_every, test_every, report)


def _train(
    choices: Choices,
    train_images: Images,
    test_images: Images,
    engine: Engine,
    out: Path | None,
    time_limit: float | None,
    checkpoint_every: int,
    test_every: int,
    report: Callable[[TrainingProgress], None],
) -> dict[int, nn.Module] | None:
    began = time.monotonic()
    recipe = choices.recipe
    if engine.precision != choices.precision:
        raise ValueError(
            f"the choices ask for {choices.precision} but the engine computes in {engine.precision}; give both the same"
        )
    if time_limit is not None and out is None:
        raise ValueError(f"train(time_limit={time_limit}): a time limit needs a folder for the checkpoint; give out=")
    first, history, states = 0, list[HistoryRow](), dict[str, Tensor]()
    if out is not None and (out / CHECKPOINT).exists():
        first, history, states = _read_checkpoint(out / CHECKPOINT, choices)
    normalisation = SETS[choices.set].normalisation
    fleet = Fleet(choices.record().build, choices.seeds, train_images, normalisation, recipe, engine)
    if states:
        for trainee in fleet.trainees:
            trainee.load_state(_below(f"{trainee.seed}/", states))
    test = test_images.to(engine.device)

    def watch(steps: int) -> None:
        """Stop the first epoch at the time limit; later ones begin only if they fit."""
        if time_limit is not None and epoch == first and steps and time.monotonic() - began > time_limit:
            needed = (time.monotonic() - started) * fleet.steps / steps
            raise ValueError(
                f"the time limit of {time_limit:g} s ended epoch {epoch + 1} after {steps} of {fleet.steps} steps, and "
                f"an epoch cannot be continued; it takes about {needed:.0f} s: give it more time"
            )

    slowest = 0.0
    for epoch in range(first, recipe.epochs):
        started = time.monotonic()
        results = fleet.train_epoch(epoch, watch=watch)
        seconds = time.monotonic() - started
        done = epoch + 1
        last = done == recipe.epochs
        tested: list[float | None] = [None] * len(results)
        if last or done % test_every == 0:
            tested = [share_correct(t.model, test, normalisation) for t in fleet.trainees]
        for seed, (loss, right), test_right in zip(choices.seeds, results, tested, strict=True):
            history.append(HistoryRow(done, seed, loss, right, test_right))
        slowest = max(slowest, time.monotonic() - started)
        spent = time.monotonic() - began
        # Twice the slowest epoch, because the next may be slower.
        stop = not last and time_limit is not None and spent + 2 * slowest + RESERVE > time_limit
        if out is not None and (last or stop or done % checkpoint_every == 0):
            _save(out, choices, engine, fleet, done, history)
        means = [sum(values) / len(values) for values in zip(*results, strict=True)]
        mean_test = None if tested[0] is None else sum(t for t in tested if t is not None) / len(tested)
        report(
            TrainingProgress(
                done, recipe.epochs, means[0], means[1], mean_test, seconds, fleet.steps, len(results), stop
            )
        )
        if stop:
            return None
    models = {trainee.seed: _finished(choices, trainee.state()) for trainee in fleet.trainees}
    if out is not None:
        accuracies = {
            seed: share_correct(model.to(engine.device), test, normalisation) for seed, model in models.items()
        }
        _save(out, choices, engine, fleet, recipe.epochs, history, accuracies)
    return {seed: model.cpu() for seed, model in models.items()}


def load_run(out: Path) -> tuple[Choices, dict[int, dict[str, Tensor]], dict[str, Any]]:
    """Read a finished run from its folder: the choices, the weights by seed in float32, and the record."""
    if not (out / CHECKPOINT).exists():
        raise FileNotFoundError(f"no training run at {out}: {out / CHECKPOINT} is missing; make one with trueup train")
    tensors, facts = load_checkpoint(out / CHECKPOINT)
    choices = _choices(out / CHECKPOINT, facts)
    if facts["epoch"] != choices.recipe.epochs:
        raise ValueError(
            f"the run at {out} is at epoch {facts['epoch']} of {choices.recipe.epochs}; run the same train command "
            "again to continue"
        )
    record = _read_record(out / RECORD)
    if untested := [seed for seed in choices.seeds if str(seed) not in record["test_accuracy"]]:
        raise ValueError(
            f"the run at {out} has no test accuracy of seeds {untested}; run the same train command again to add it"
        )
    return choices, {seed: _below(f"{seed}/weights/", tensors) for seed in choices.seeds}, record


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if missing := {"choices", "device", "versions", "test_accuracy"} - record.keys():
            raise ValueError(f"no {min(missing)}")
        return record
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); delete it, and the same train command writes it again"
        ) from error


def _finished(choices: Choices, state: dict[str, Tensor]) -> nn.Module:
    """Build the published model from the state of training."""
    weights = {key: value.cpu() for key, value in _below("weights/", state).items()}
    return load_weights(choices.record().build(), shipped(weights)).eval()


def _read_checkpoint(path: Path, choices: Choices) -> tuple[int, list[HistoryRow], dict[str, Tensor]]:
    """Return the epoch, the history and the tensors of a checkpoint. Refuse a checkpoint of another run."""
    tensors, facts = load_checkpoint(path)
    # Through `Choices`, because an older checkpoint lacks newer choices and was made with their defaults.
    there, wanted = _flat(_plain(_choices(path, facts))), _flat(_plain(choices))
    different = [f"{k} {there[k]} there, {wanted[k]} asked for" for k in wanted if there[k] != wanted[k]]
    if different:
        raise ValueError(f"{path} belongs to another run: {'; '.join(different)}. Choose another folder")
    try:
        history = [HistoryRow(**row) for row in facts["history"]]
        shapes = {
            f"{seed}/weights/{key}": tensor.shape
            for seed in choices.seeds
            for key, tensor in weights_of(choices.record().build()).items()
        }
        wrong = [name for name, shape in shapes.items() if name not in tensors or tensors[name].shape != shape]
        if wrong or not 0 <= facts["epoch"] <= choices.recipe.epochs:
            raise ValueError(f"{wrong[0] if wrong else 'epoch'} is missing or wrong")
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, error) from error
    return facts["epoch"], history, tensors


def _save(
    out: Path,
    choices: Choices,
    engine: Engine,
    fleet: Fleet,
    epoch: int,
    history: list[HistoryRow],
    accuracies: dict[int, float] | None = None,
) -> None:
    tensors = {f"{t.seed}/{key}": value for t in fleet.trainees for key, value in t.state().items()}
    facts = {"choices": _plain(choices), "epoch": epoch, "history": [dataclasses.asdict(row) for row in history]}
    save_checkpoint(out / CHECKPOINT, tensors, facts)
    record = {
        "choices": _plain(choices),
        "engine": dataclasses.asdict(engine),
        "epoch": epoch,
        "device": device_name(engine.device),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "test_accuracy": {str(seed): value for seed, value in (accuracies or {}).items()},
    }
    write_atomically(out / RECORD, (json.dumps(record, indent=1) + "\n").encode())
    write_table(out / HISTORY, HistoryRow, history)


def _plain(choices: Choices) -> dict[str, Any]:
    """Return the choices as JSON would return them."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(choices)))
    return plain


def _choices(path: Path, facts: dict[str, Any]) -> Choices:
    try:
        plain = facts["choices"]
        recipe = Recipe(**{**plain["recipe"], "decay_after": tuple(plain["recipe"]["decay_after"])})
        return Choices(**{**plain, "seeds": tuple(plain["seeds"]), "recipe": recipe})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(path, error) from error


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _flat(plain: dict[str, Any]) -> dict[str, Any]:
    recipe: dict[str, Any] = plain["recipe"]
    return {key: value for key, value in plain.items() if key != "recipe"} | recipe
