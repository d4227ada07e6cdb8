"""Write a generated set in the published layout. Resumable; a file appears only when it is complete."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trueup.atomic import write_atomically
from trueup_lab.data.corrupted_sets import clean
from trueup_lab.data.corrupted_sets.arrays import folder
from trueup_lab.data.corrupted_sets.folders import GROUP_OF, UNFINISHED, ImageNetC, clean_folder, listing
from trueup_lab.data.corrupted_sets.manifest import NAME, Made, Manifest
from trueup_lab.data.corrupted_sets.recipe import GenerationRecipe, recipe_of
from trueup_lab.data.corruptions import corrupt, corruption_names
from trueup_lab.data.imagenet import Crop, ImageFolder
from trueup_lab.data.images import Images
from trueup_lab.data.marks import check_jpeg, mark_of, marked_header, marked_jpeg
from trueup_lab.data.root import DataRoot
from trueup_lab.locks import locked

MakeProgress = Callable[[str, int, int], None]
"""Called with (file or folder, images done, images in total)."""


def make(
    family: str,
    *,
    root: DataRoot = None,
    only: Sequence[str] = (),
    severities: Sequence[int] = (1, 2, 3, 4, 5),
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: MakeProgress | None = None,
) -> list[str]:
    """Make `family` (all corruptions, or `only` some) under the data root and return the paths that were written.

    Published files are never touched. Generated files are kept if their checksum, seed, generator version and
    constants match, and made again otherwise. `severities` applies to ImageNet-C only, where each severity has its own
    folder. Several processes may make parts of one set at the same time; each waits for files that another is making.
    """
    names = tuple(only) or corruption_names(family)
    for name in names:
        if name not in corruption_names(family):
            raise ValueError(f"unknown corruption {name!r} of {family}; known: {', '.join(corruption_names(family))}")
    top = folder(family, root)
    top.mkdir(parents=True, exist_ok=True)
    if family == "imagenet-c":
        return _make_folders(top, root, names, severities, seed, device, progress)
    source = clean(family, root)
    jobs = _mnist_jobs if family == "mnist-c" else _cifar_jobs
    names_of_all = [path for path, *_ in jobs(source, corruption_names(family))]
    _start_manifest(top, [*names_of_all, *(path.replace("test_", "") for path in names_of_all)])
    written = []
    for path, shape, name, levels in jobs(source, names):
        recipe = recipe_of(family, name, seed)
        tell = _counter(progress, path, shape[0])
        with locked(top / path, waiting=partial(tell, 0)):
            manifest = Manifest.read(top)
            there = (top / path).exists()
            if (there and manifest.origin(path) == "published") or manifest.holds(path, recipe):
                continue
            _list(top, path, Made.by(recipe))  # first, so that nobody reads the old file as one of this recipe
            parts = _parts(source, family, name, levels, seed, device, root) if levels else _labels(source, shape)
            _list(top, path, Made.by(recipe, *_write_array(top / path, shape, recipe, parts, tell)))
            written.append(path)
    return written


def _start_manifest(top: Path, names: Iterable[str]) -> None:
    """Make sure that there is a manifest, and that it lists the published files."""
    with locked(top / NAME):
        manifest = Manifest.read(top)
        if not manifest.exists:
            manifest.start(names)


def _list(top: Path, name: str, made: Made) -> None:
    with Manifest.changing(top) as manifest:
        manifest.files[name] = made


def _counter(progress: MakeProgress | None, what: str, total: int) -> Callable[[int], None]:
    def tell(done: int) -> None:
        if progress is not None:
            progress(what, done, total)

    return tell


_Job = tuple[str, tuple[int, ...], str, tuple[int | None, ...]]
"""(file, shape of its array, corruption, severities); without severities, the file holds the labels."""


def _mnist_jobs(source: Images, names: Iterable[str]) -> Iterator[_Job]:
    for name in names:
        yield f"{name}/test_images.npy", (len(source), 28, 28, 1), name, (None,)
        yield f"{name}/test_labels.npy", (len(source),), name, ()


def _cifar_jobs(source: Images, names: Iterable[str]) -> Iterator[_Job]:
    for name in names:
        yield f"{name}.npy", (5 * len(source), 32, 32, 3), name, (1, 2, 3, 4, 5)
    yield "labels.npy", (5 * len(source),), "", ()


def _parts(
    source: Images,
    family: str,
    name: str,
    levels: Iterable[int | None],
    seed: int,
    device: torch.device | str,
    root: DataRoot,
) -> Iterator[np.ndarray]:
    for severity in levels:
        for first in range(0, len(source), 1000):
            images = source.images[first : first + 1000].to(device)
            numbers = range(first, first + len(images))
            made = corrupt(images, name, severity, family=family, indices=numbers, seed=seed, root=root)
            yield _channels_last(made)


def _labels(source: Images, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    for _ in range(shape[0] // len(source)):
        yield source.labels.numpy().astype(np.uint8)


def _channels_last(images: Tensor) -> np.ndarray:
    return np.ascontiguousarray(images.permute(0, 2, 3, 1).cpu().numpy())


def _write_array(
    path: Path,
    shape: tuple[int, ...],
    recipe: GenerationRecipe,
    parts: Iterable[np.ndarray],
    progress: Callable[[int], None],
) -> tuple[str, int]:
    """Write a .npy file of bytes part by part and return its SHA-256 and size.

    It is not memory-mapped, because on a full disk a mapped file kills the process, while a write raises an error.
    """
    header = marked_header(shape, recipe.mark)
    size = len(header) + int(np.prod(shape))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # left by a process that was killed
    _check_space(path.parent, size)
    digest = hashlib.sha256()
    done = 0
    try:
        with part.open("wb") as file:
            digest.update(header)
            file.write(header)
            for array in parts:
                content = array.tobytes()
                digest.update(content)
                file.write(content)
                done += len(array)
                progress(done)
            file.flush()
            os.fsync(file.fileno())
        if part.stat().st_size != size:
            raise OSError(f"{part} has {part.stat().st_size} bytes, expected {size}")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return digest.hexdigest(), size


def _check_space(where: Path, needed: int) -> None:
    free = shutil.disk_usage(where).free
    if free < needed:
        raise OSError(
            f"{where} has {free / 1e6:.0f} MB left, but the next file needs {needed / 1e6:.0f} MB; "
            "free some space and run the same command again to resume"
        )


def _make_folders(
    top: Path,
    root: DataRoot,
    names: Iterable[str],
    severities: Iterable[int],
    seed: int,
    device: torch.device | str,
    progress: MakeProgress | None,
) -> list[str]:
    """Write ImageNet-C: one folder per corruption and severity, JPEGs of quality 85 as in the original."""
    source = ImageFolder(clean_folder(root), Crop(224, 256))
    _start_manifest(top, _folders_with_images(top))
    levels = tuple(severities)
    written = []
    for name in names:
        for severity in levels:
            unit = f"{GROUP_OF[name]}/{name}/{severity}"
            recipe = recipe_of("imagenet-c", name, seed, severity)
            place = top / unit
            tell = _counter(progress, unit, len(source))
            with locked(place, waiting=partial(tell, 0)):
                if not _wanted(Manifest.read(top), unit, recipe):
                    continue
                place.mkdir(parents=True, exist_ok=True)
                (place / UNFINISHED).touch()  # nobody reads it now
                _list(top, unit, Made.by(recipe))
                data = ImageNetC(source, name, severity, "generated", seed, root)
                _write_images(data, place, recipe, device, tell)
                _list(top, unit, Made.by(recipe, *listing(place)))
                (place / UNFINISHED).unlink()
                written.append(unit)
    return written


def _folders_with_images(top: Path) -> Iterator[str]:
    """Yield the finished folders of the set, in both layouts."""
    for name, group in GROUP_OF.items():
        for unit in (f"{part}{name}/{severity}" for part in (f"{group}/", "") for severity in range(1, 6)):
            if any((top / unit).glob("*/*")) and not (top / unit / UNFINISHED).exists():
                yield unit


def _wanted(manifest: Manifest, unit: str, recipe: GenerationRecipe) -> bool:
    """Whether a folder of images is still to be made."""
    place = manifest.folder / unit
    unfinished = (place / UNFINISHED).exists()
    if not unfinished and any(place.glob("*/*")) and manifest.origin(unit) == "published":
        return False
    if not manifest.usable(unit, recipe):
        return True
    made = manifest.files[unit]
    images = (path for path in place.glob("*/*") if mark_of(path) is not None)  # earlier versions wrote no marks
    if listing(place) != (made.sha256, made.bytes) or not all(_is_whole(path, recipe) for path in images):
        return True
    (place / UNFINISHED).unlink(missing_ok=True)
    return False


def _write_images(
    data: ImageNetC,
    place: Path,
    recipe: GenerationRecipe,
    device: torch.device | str,
    progress: Callable[[int], None],
) -> None:
    """Write the images, each atomically. Existing images are kept if they are undamaged and of the same recipe."""
    names = [(file.parent.name, file.name) for file, _ in data.source.files]
    for stray in {file.relative_to(place).parts for file in place.glob("*/*")} - set(names):
        place.joinpath(*stray).unlink()  # of other clean images
    for first in range(0, len(data), 64):
        numbers = range(first, min(first + 64, len(data)))
        files = {k: place.joinpath(*names[k]) for k in numbers}
        todo = [k for k in numbers if not _is_whole(files[k], recipe)]
        if todo:
            clean_images = torch.stack([data.source[k][0] for k in todo]).to(device)
            made = data.corrupted(clean_images, todo)
            for k, pixels in zip(todo, _channels_last(made), strict=True):
                content = io.BytesIO()
                Image.fromarray(pixels).save(content, "JPEG", quality=85, optimize=True)
                files[k].parent.mkdir(parents=True, exist_ok=True)
                write_atomically(files[k], marked_jpeg(content.getvalue(), recipe.mark))
        progress(numbers.stop)


def _is_whole(path: Path, recipe: GenerationRecipe) -> bool:
    """Whether an image exists, and is of this recipe and undamaged by its own mark."""
    if mark_of(path) != recipe.mark:
        return False
    try:
        check_jpeg(path, path.read_bytes())
    except ValueError:
        return False
    return True
