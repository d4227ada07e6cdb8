"""`trueup train`: train source models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from trueup_lab.cli.options import DataRootOption

SEEDS_HELP = "Seeds, such as 0-9 or 0,3,7: one model per seed, all trained at once."
OUT_HELP = "Folder of runs. This run is OUT/<set>-<norm>, or OUT/<set>-<architecture>-<norm> if not resnet20."
NORM_HELP = "bn, gn, frn or frn-relu for resnet20; the other architectures have one norm."


def train_command(
    dataset: Annotated[str, typer.Option("--set", help="mnist, cifar10, digits, scenes or imagenet.")],
    out: Annotated[Path, typer.Option(help=OUT_HELP)],
    architecture: Annotated[
        str, typer.Option(help="resnet20, vgg, mobilenet, convnext, vit or unet (for scenes).")
    ] = "resnet20",
    norm: Annotated[str | None, typer.Option(help=NORM_HELP)] = None,
    seeds: Annotated[str, typer.Option(help=SEEDS_HELP)] = "0",
    data: DataRootOption = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="Number of epochs (default: the recipe's); the learning rate schedule is scaled.", min=1),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... (default: a GPU if there is one).")] = None,
    time_limit: Annotated[
        float | None, typer.Option(help="Stop with a checkpoint within this many seconds.", min=0)
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size.", min=1)] = None,
    rate: Annotated[float | None, typer.Option(help="Initial learning rate.")] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="Weight decay, on all parameters (AdamW: not on vectors).")
    ] = None,
    momentum: Annotated[
        float | None, typer.Option(help="Nesterov momentum (0: plain gradient descent), or AdamW's first beta.")
    ] = None,
    warmup_epochs: Annotated[int | None, typer.Option(help="Epochs during which the learning rate rises.")] = None,
    groups: Annotated[int | None, typer.Option(help="Number of groups of group norm.", min=1)] = None,
    shortcut: Annotated[str | None, typer.Option(help="Shortcut of ResNet-20: projection (default) or pad.")] = None,
    precision: Annotated[str | None, typer.Option(help="bfloat16 or float32.")] = None,
    compile_mode: Annotated[
        str | None,
        typer.Option("--compile", help="Mode of torch.compile: none, default or max-autotune-no-cudagraphs."),
    ] = None,
    streams: Annotated[int, typer.Option(help="Number of CUDA streams (0: one per model).", min=0)] = 0,
    channels_last: Annotated[bool | None, typer.Option(help="Use the channels-last memory layout.")] = None,
    combo: Annotated[bool, typer.Option(help="Let the compiler merge small kernels.")] = False,
    autotune: Annotated[bool, typer.Option(help="Let cuDNN time its algorithms and take the fastest.")] = False,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Epochs between checkpoints (default: 1).", min=1)
    ] = None,
    test_every: Annotated[int | None, typer.Option(help="Epochs between tests (default: 10).", min=1)] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Side of ImageNet images in pixels (default: 224).", min=32)
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that read ImageNet (default: 8).", min=0)] = None,
) -> None:
    """Train source models. After an interruption, run the same command again to continue.

    For ImageNet, train one ResNet-50 (the first seed), in as many processes as torchrun starts.
    """
    # Imported here because it takes seconds, for which other commands should not wait.
    from trueup_lab.data.sets import SETS
    from trueup_lab.models.architectures import check_variant, find_architecture
    from trueup_lab.training.engine import default_engine
    from trueup_lab.training.recipes import recipe_for, shortened
    from trueup_lab.training.run import Choices, TrainingProgress, train

    check_limit(time_limit)
    norm = norm or find_architecture(architecture).norms[0]
    check_variant(architecture, norm)
    recipe = recipe_for(dataset, architecture)
    recipe = recipe if epochs is None else shortened(recipe, epochs)
    changes = _given(batch=batch, rate=rate, weight_decay=weight_decay, momentum=momentum, warmup_epochs=warmup_epochs)
    recipe = replace(recipe, **changes)
    folder = out / (f"{dataset}-{norm}" if architecture == "resnet20" else f"{dataset}-{architecture}-{norm}")
    if groups is not None and norm != "gn":
        raise ValueError(f"--groups {groups} is for group norm, and this model has {norm}; leave it out")
    if dataset == "imagenet":
        from trueup_lab.training import imagenet

        _refuse(
            "ImageNet is trained in one way only",
            shortcut=shortcut,
            precision=precision,
            compile=compile_mode,
            streams=streams or None,
            channels_last=channels_last,
            combo=combo or None,
            autotune=autotune or None,
            checkpoint_every=checkpoint_every,
            test_every=test_every,
        )
        if len(parse_seeds(seeds)) > 1:
            raise ValueError(f"--seeds {seeds}: ImageNet is trained one model at a time; give one seed")
        chosen = imagenet.ImageNetChoices(
            norm,  # type: ignore[arg-type]
            parse_seeds(seeds)[0],
            recipe,
            **_given(groups=groups, size=image_size),
        )
        imagenet.train_imagenet(
            chosen, folder, data=data, device=device, time_limit=time_limit, **_given(workers=workers)
        )
        return
    _refuse(f"{dataset} is read at once, at its own size", image_size=image_size, workers=workers)
    if architecture != "resnet20":
        _refuse(f"{architecture} has no such choice", shortcut=shortcut)
    engine = replace(
        default_engine(device),
        streams=streams,
        combo=combo,
        autotune=autotune,
        **_given(precision=precision, compile=compile_mode, channels_last=channels_last),
    )
    choices = Choices(
        dataset,
        norm,
        parse_seeds(seeds),
        recipe,
        precision=engine.precision,
        architecture=architecture,
        **_given(groups=groups, shortcut=shortcut),
    )
    train_images, test_images = (SETS[dataset].load(split, data) for split in ("train", "test"))

    def report(progress: TrainingProgress) -> None:
        typer.echo(str(progress))
        if progress.stopped:
            typer.echo(f"stopped before the time limit; run the same command again to continue from {folder}")

    models = train(
        choices,
        train_images,
        test_images,
        engine,
        out=folder,
        time_limit=time_limit,
        report=report,
        **_given(checkpoint_every=checkpoint_every, test_every=test_every),
    )
    if models is not None:
        typer.echo(f"trained {len(models)} models in {folder}")


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse seeds, given as ranges and single numbers.

    >>> parse_seeds("0-3,7")
    (0, 1, 2, 3, 7)
    """
    seeds: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            found = range(int(first), int(last or first) + 1)
            if not found:
                raise ValueError
            seeds.extend(found)
    except ValueError:
        raise ValueError(f"seeds={text!r}: expected seeds such as 0-9 or 0,3,7, the smaller one first") from None
    return tuple(seeds)


def check_limit(seconds: float | None) -> None:
    """Raise unless a time limit is a number of seconds; typer's own check lets NaN pass."""
    if seconds is not None and not 0 <= seconds < float("inf"):
        raise ValueError(f"--time-limit {seconds}: expected a number of seconds")


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _refuse(why: str, **options: Any) -> None:
    for name in _given(**options):
        raise ValueError(f"--{name.replace('_', '-')} has no effect here: {why}; leave it out")
