"""`trueup train`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

SEEDS_HELP = "Seeds, such as 0-9 or 0,3,7: one model per seed, all trained at once."
OUT_HELP = "Folder of runs: this one in OUT/<set>-<norm>, or OUT/<set>-<architecture>-<norm> if not resnet20."
NORM_HELP = "bn, gn, frn or frn-relu for resnet20; the other architectures have one norm."


def train(
    dataset: Annotated[str, typer.Option("--set", help="mnist, cifar10, digits, scenes or imagenet.")],
    out: Annotated[Path, typer.Option(help=OUT_HELP)],
    architecture: Annotated[
        str, typer.Option(help="resnet20, vgg, mobilenet, convnext, vit or unet (for scenes).")
    ] = "resnet20",
    norm: Annotated[str | None, typer.Option(help=NORM_HELP)] = None,
    seeds: Annotated[str, typer.Option(help=SEEDS_HELP)] = "0",
    data: Annotated[Path | None, typer.Option(help="The data root.")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Number of epochs (default: the recipe's); the learning rate schedule is scaled.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ... (default: a GPU if there is one).")] = None,
    time_limit: Annotated[float | None, typer.Option(help="Stop with a checkpoint before this many seconds.")] = None,
    batch: Annotated[int | None, typer.Option(help="Batch size.")] = None,
    rate: Annotated[float | None, typer.Option(help="Initial learning rate.")] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="Weight decay, on all parameters (AdamW: not on vectors).")
    ] = None,
    momentum: Annotated[
        float | None, typer.Option(help="Nesterov momentum (0: plain gradient descent), or AdamW's first beta.")
    ] = None,
    warmup_epochs: Annotated[int | None, typer.Option(help="Epochs during which the learning rate rises.")] = None,
    groups: Annotated[int | None, typer.Option(help="Number of groups of group norm.")] = None,
    shortcut: Annotated[str, typer.Option(help="Shortcut of ResNet-20: projection or pad.")] = "projection",
    precision: Annotated[str | None, typer.Option(help="bfloat16 or float32.")] = None,
    compile_mode: Annotated[
        str | None,
        typer.Option("--compile", help="Mode of torch.compile: none, default or max-autotune-no-cudagraphs."),
    ] = None,
    streams: Annotated[int, typer.Option(help="Number of CUDA streams (0: one per model).")] = 0,
    channels_last: Annotated[bool | None, typer.Option(help="Use the channels-last memory layout.")] = None,
    combo: Annotated[bool, typer.Option(help="Let the compiler merge small kernels.")] = False,
    autotune: Annotated[bool, typer.Option(help="Let cuDNN time its algorithms and take the fastest.")] = False,
    checkpoint_every: Annotated[int, typer.Option(help="Epochs between checkpoints.")] = 1,
    test_every: Annotated[int, typer.Option(help="Epochs between tests.")] = 10,
    image_size: Annotated[int, typer.Option(help="Side of ImageNet images in pixels.")] = 224,
    workers: Annotated[int, typer.Option(help="Processes that read ImageNet.")] = 8,
) -> None:
    """Train source models. The same command continues after an interruption.

    For ImageNet, train one ResNet-50 (the first seed), in as many processes as torchrun starts.
    """
    # Imported here because it takes seconds, for which other commands should not wait.
    from trueup_lab.data.sets import SETS
    from trueup_lab.models.architectures import find_architecture
    from trueup_lab.training.engine import default_engine
    from trueup_lab.training.recipes import recipe_for, shortened
    from trueup_lab.training.run import Choices, TrainingProgress
    from trueup_lab.training.run import train as run

    try:
        norm = norm or find_architecture(architecture).norms[0]
        recipe = recipe_for(dataset, architecture)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    recipe = recipe if epochs is None else shortened(recipe, epochs)
    changes = _given(batch=batch, rate=rate, weight_decay=weight_decay, momentum=momentum, warmup_epochs=warmup_epochs)
    recipe = replace(recipe, **changes)
    folder = out / (f"{dataset}-{norm}" if architecture == "resnet20" else f"{dataset}-{architecture}-{norm}")
    if dataset == "imagenet":
        from trueup_lab.training import imagenet

        chosen = imagenet.Choices(
            norm,  # type: ignore[arg-type]
            parse_seeds(seeds)[0],
            recipe,
            size=image_size,
            **_given(groups=groups),
        )
        imagenet.train_imagenet(chosen, folder, data=data, device=device, workers=workers, time_limit=time_limit)
        return
    engine = replace(
        default_engine(device),
        streams=streams,
        combo=combo,
        autotune=autotune,
        **_given(precision=precision, compile=compile_mode, channels_last=channels_last),
    )
    try:
        choices = Choices(
            dataset,
            norm,
            parse_seeds(seeds),
            recipe,
            shortcut=shortcut,  # type: ignore[arg-type]
            precision=engine.precision,
            architecture=architecture,
            **_given(groups=groups),
        )
        train_images, test_images = (SETS[dataset].load(split, data) for split in ("train", "test"))

        def report(progress: TrainingProgress) -> None:
            typer.echo(str(progress))
            if progress.stopped:
                typer.echo(f"stopped before the time limit; the same command continues from {folder}")

        models = run(
            choices,
            train_images,
            test_images,
            engine,
            out=folder,
            time_limit=time_limit,
            checkpoint_every=checkpoint_every,
            test_every=test_every,
            report=report,
        )
    except (ValueError, FileNotFoundError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
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
            seeds.extend(range(int(first), int(last or first) + 1))
    except ValueError as error:
        raise typer.BadParameter(f"expected seeds such as 0-9 or 0,3,7, got {text!r}") from error
    return tuple(seeds)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
