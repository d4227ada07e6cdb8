"""`trueup report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    model: Annotated[
        str,
        typer.Argument(
            help="package.module:function that returns the model, or (model, preprocess). With trueup-lab also a "
            "model file, or the name of a bundled model."
        ),
    ],
    targets: Annotated[Path, typer.Argument(help="Targets file, as Targets.save writes it.")],
    images: Annotated[Path, typer.Argument(help="Folder of images, or .npy file of model inputs.")],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    against: Annotated[Path | None, typer.Option(help="A second set to compare with, such as last week's.")] = None,
    classes: Annotated[Path | None, typer.Option(help="Text file with one class name per line.")] = None,
    limit: Annotated[
        int | None, typer.Option(help="Use only the first N images of each set.", metavar="N", min=1)
    ] = None,
    batch: Annotated[int, typer.Option(help="Images per forward pass.", min=1)] = 32,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    title: Annotated[str | None, typer.Option(help="Heading of the report.")] = None,
) -> None:
    """Write one HTML file on how images differ from clean ones, and what the correction does with them."""
    from trueup import Targets
    from trueup.cli.loading import load_model
    from trueup.report import write_report
    from trueup.report.images import read_images

    loaded = load_model(model)
    sets = [images] if against is None else [images, against]
    first, *others = (read_images(path, loaded.preprocess, batch=batch, limit=limit) for path in sets)
    names = [path.name or str(path) for path in sets]
    found = write_report(
        out,
        loaded.model.to(device),
        Targets.load(targets),
        first,
        against=others[0] if others else None,
        names=(names[0], names[1] if others else ""),
        classes=None if classes is None else classes.read_text(encoding="utf-8").splitlines(),
        title=title,
    )
    for some in found.sets:
        seen = some.snapshot
        verdict = "" if seen is None else f": {seen.unusual.value:.1%} unusual"
        if seen is not None and seen.drifted:
            verdict += ", unlike those of calibration"
        typer.echo(f"{some.name}: {some.images} images{verdict}")
    typer.echo(f"{out}  {out.stat().st_size / 1e3:.0f} kB")
