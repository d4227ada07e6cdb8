"""`trueup data make` and `trueup data show`: make corrupted sets and look at them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trueup_lab.cli.options import DataRootOption

Name = Annotated[str, typer.Argument(help="mnist-c, cifar10-c or imagenet-c", metavar="NAME")]
Seed = Annotated[int, typer.Option(help="Random seed for generated images.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda if available).")]


def make_set(
    name: Name,
    only: Annotated[list[str] | None, typer.Option(help="Corruption to make; may be repeated (default: all).")] = None,
    severity: Annotated[
        list[int] | None,
        typer.Option(help="Severity, for ImageNet-C only; may be repeated (default: all).", min=1, max=5),
    ] = None,
    data: DataRootOption = None,
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Make a corrupted set in the published layout. Complete files are kept, so running it again resumes."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from trueup_lab.data.corrupted_sets.arrays import folder
    from trueup_lab.data.corrupted_sets.writer import make
    from trueup_lab.data.corruptions import corruption_names
    from trueup_lab.devices import find_device

    corruption_names(name)
    if severity and name != "imagenet-c":
        raise ValueError(f"--severity is for imagenet-c; {name} is made with all its severities, so leave it out")
    place = find_device(device)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        written = make(
            name,
            root=data,
            only=only or (),
            severities=severity or (1, 2, 3, 4, 5),
            seed=seed,
            device=place,
            progress=progress,
        )
    where = folder(name, data)
    typer.echo(f"{where}: {len(written)} made" if written else f"{where}: all there, nothing to make")


def show(
    name: Name,
    out: Annotated[Path | None, typer.Option(help="PNG to write (default: NAME.png).")] = None,
    count: Annotated[int, typer.Option(help="Images per severity.", min=1)] = 3,
    first: Annotated[int, typer.Option(help="Number of the first image.", min=0)] = 0,
    data: DataRootOption = None,
    seed: Seed = 0,
) -> None:
    """Draw a contact sheet of every corruption and severity for a few images."""
    import torch

    from trueup_lab.data.corrupted_sets import clean
    from trueup_lab.data.corrupted_sets.folders import clean_folder
    from trueup_lab.data.corrupted_sets.sheet import contact_sheet
    from trueup_lab.data.corruptions import corrupt, corruption_names
    from trueup_lab.data.imagenet import Crop, ImageFolder

    numbers = list(range(first, first + count))
    corruption_names(name)
    if name == "imagenet-c":
        source = ImageFolder(clean_folder(data), Crop(224, 256))
        _check_numbers(numbers, len(source))
        images = torch.stack([source[k][0] for k in numbers])
    else:
        there = clean(name, data)
        _check_numbers(numbers, len(there))
        images = there.images[first : first + count]
    page = contact_sheet(
        name,
        lambda what, severity: corrupt(images, what, severity, family=name, indices=numbers, seed=seed, root=data),
    )
    path = out or Path(f"{name}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    page.save(path)
    typer.echo(f"{path}: {len(corruption_names(name))} corruptions, {count} images per severity")


def _check_numbers(numbers: list[int], there: int) -> None:
    if numbers[-1] >= there:
        raise ValueError(f"the set has {there} images, numbered from 0: --first and --count ask for {numbers[-1]}")
