"""Damage files as disks, transfers and editors do, for benchmarks/faults.py, and see whether a reader notices."""

from __future__ import annotations

import random
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import trueup
from fault_commands import MAKES, MODEL, digest, run
from fault_trials import Bench, noted
from trueup.decide.search import CANDIDATES
from trueup.monitor import Snapshot
from trueup.targets.decision import LEFT_ALONE, Decision, Trial
from trueup_lab.data import digits
from trueup_lab.data.images import NORMALISATION
from trueup_lab.models import Record, ResNet20, read_models, save_models, zoo
from trueup_lab.models.weights import weights_of
from trueup_lab.training.checkpoint import load_checkpoint
from trueup_lab.training.run import load_run


def mutate(content: bytes, chance: random.Random) -> bytes:
    """Return a file's content after a random damage by a disk, a transfer or an editor."""
    at, size = chance.randrange(len(content)), chance.choice([1, 8, 64, 4096])
    kinds: list[Callable[[], bytes]] = [
        lambda: content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :],  # a bit
        lambda: content[:at] + chance.randbytes(size) + content[at + size :],  # a block of something else
        lambda: content[:at] + bytes(len(content[at : at + size])) + content[at + size :],  # a block of zeros
        lambda: content[:at],  # cut short
        lambda: content[:at] + content[at + size :],  # a block is missing
        lambda: content[:at] + chance.randbytes(size) + content[at:],  # a block too many
        lambda: content + chance.randbytes(size),
        lambda: content[size:] + content[:size],
    ]
    # Most faults of the header are found by its JSON; half of the trials are single bits, which are found last.
    return kinds[0]() if chance.random() < 0.5 else chance.choice(kinds)()


@dataclass(frozen=True)
class Kept:
    """A kind of file: how one is written, and what it says, for comparison."""

    name: str
    write: Callable[[Path], Path]
    read: Callable[[Path], object]


def damage_and_read(kept: Kept, path: Path, content: bytes, chance: random.Random, wanted: object) -> str:
    """Damage a file, and read it."""
    path.write_bytes(mutate(content, chance))
    try:
        found = kept.read(path)
    except (ValueError, FileNotFoundError) as error:
        named = any(str(place) in str(error) for place in (path, path.parent, path.parents[1]))
        return "clear" if named else noted("unexplained", kept.name, str(error))
    except Exception:
        return noted("unexplained", kept.name, traceback.format_exc())
    return "survived" if found == wanted else noted("silent", kept.name, "")


def _calibrated(kind: str) -> trueup.Targets:
    images = [NORMALISATION["digits"](digits.load("train").images[:16])]
    return trueup.calibrate(zoo.load(MODEL), images, decide=False, resolution=33, select=lambda site: site.kind == kind)


def _decided() -> trueup.Targets:
    """Targets with every part that calibration can record: gate, drift, and a decision among all candidates."""
    targets = _calibrated("norm")
    norms = {name: replace(t, drift=torch.rand_like(t.total[:4]), drifted=64) for name, t in targets.norms.items()}
    trials = [
        Trial(rule, 16, changed=0.0, kept=(12.0 + k / 10, 8.0), gain=k / 10, gain_square=k / 100, moved=k / 50)
        for k, rule in enumerate((LEFT_ALONE, *CANDIDATES))
    ]
    return replace(targets, norms=norms, decision=Decision(tuple(trials)))


def _targets(make: Callable[[], trueup.Targets], *, small: bool = False) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        make().save(folder / "targets.safetensors", small=small)
        return folder / "targets.safetensors"

    return write


def _monitor() -> trueup.Monitor:
    """A monitor that has seen 64 images, the last of them very unusual."""
    monitor = trueup.Monitor(_calibrated("norm"), unusual=0.2, clock=lambda: 1.7e9)
    p = torch.cat([torch.linspace(0.15, 1, 44), torch.full((20,), 0.12)])
    monitor.update({"p": p, "gate": 1 - p, "evidence": p[:, None].expand(-1, len(monitor.norms))})
    return monitor


def _snapshot_file(folder: Path) -> Path:
    _monitor().snapshot().save(folder / "snapshot.json")
    return folder / "snapshot.json"


def _monitor_file(folder: Path) -> Path:
    _monitor().save(folder / "monitor.json")
    return folder / "monitor.json"


def _read_monitor(path: Path) -> object:
    monitor = trueup.Monitor.load(path)
    monitor.save(path.with_name("again.json"))
    return path.with_name("again.json").read_text(encoding="utf-8")


def _read_models(path: Path) -> object:
    return {s: [digest(v) for v in model.state_dict().values()] for s, model in read_models(path).items()}


def _model_file(folder: Path) -> Path:
    torch.manual_seed(0)
    record = Record("digits", "bn", channels=1, accuracy={0: 0.5})
    save_models(folder / "models.safetensors", {0: weights_of(ResNet20("bn", channels=1))}, record)
    return folder / "models.safetensors"


def _read_checkpoint(path: Path) -> object:
    tensors, _ = load_checkpoint(path)
    load_run(path.parent)
    return {name: digest(tensor) for name, tensor in tensors.items()}


def kept_files(bench: Bench) -> list[Kept]:
    """The kinds of files that trueup writes and reads again."""

    def checkpoint(folder: Path) -> Path:
        for file in bench.trained.iterdir():
            shutil.copy(file, folder)
        return folder / "checkpoint.safetensors"

    def made(family: str, file: str) -> Callable[[Path], Path]:
        def write(folder: Path) -> Path:
            for entry in bench.root.iterdir():
                (folder / entry.name).symlink_to(entry)
            ended = run(*MAKES[family][0].command(folder))
            assert ended.status == 0, ended.output
            return folder / file

        return write

    def read(family: str, depth: int) -> Callable[[Path], object]:
        return lambda path: MAKES[family][0].result(path.parents[depth])

    return [
        Kept("targets of activations", _targets(lambda: _calibrated("activation")), trueup.Targets.load),
        Kept("targets of norms, decided", _targets(_decided), trueup.Targets.load),
        Kept("small targets of norms", _targets(_decided, small=True), trueup.Targets.load),
        Kept("snapshot of a monitor", _snapshot_file, Snapshot.load),
        Kept("saved monitor", _monitor_file, _read_monitor),
        Kept("model file", _model_file, _read_models),
        Kept("training checkpoint", checkpoint, _read_checkpoint),
        Kept("array of CIFAR-10-C", made("cifar10-c", "CIFAR-10-C/shot_noise.npy"), read("cifar10-c", 1)),
        Kept("manifest of CIFAR-10-C", made("cifar10-c", "CIFAR-10-C/trueup-manifest.json"), read("cifar10-c", 1)),
        Kept(
            "image of ImageNet-C",
            made("imagenet-c", "ImageNet-C/noise/shot_noise/3/n01440764/n01440764_0.JPEG"),
            read("imagenet-c", 5),
        ),
    ]
