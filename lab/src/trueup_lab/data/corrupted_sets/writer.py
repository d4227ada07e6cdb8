"""Write a generated set in the published layout. Resumable; a file appears only when it is complete."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace as changed
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trueup.atomic import write_atomically
from trueup_lab.data.corrupted_sets import clean
from trueup_lab.data.corrupted_sets.arrays import folder
from trueup_lab.data.corrupted_sets.folders import GROUP_OF, UNFINISHED, ImageNetC, clean_folder
from trueup_lab.data.corrupted_sets.manifest import Made, Manifest
from trueup_lab.data.corruptions import GENERATOR, corrupt, corruption_names
from trueup_lab.data.corruptions.families import FAMILIES
from trueup_lab.data.imagenet import Crop, ImageFolder
from trueup_lab.data.images import Images
from trueup_lab.data.root import DataRoot

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

    Published files, which are not in the manifest, are never touched. Generated files are kept if their checksum,
    seed, generator version and constants match, and made again otherwise. `severities` applies to ImageNet-C only,
    where each severity has its own folder.
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
    jobs = _mnist_jobs(source, names) if family == "mnist-c" else _cifar_jobs(source, names)
    manifest = Manifest.read(top)
    written = []
    for path, shape, name, levels in jobs:
        wanted = _recipe(family, name, seed)
        there = (top / path).exists()
        if (there and path not in manifest.files) or manifest.holds(path, wanted):
            continue
        parts = _parts(source, family, name, levels, seed, device, root) if levels else _labels(source, shape)
        manifest.files[path] = wanted  # listed first, so that the file is never taken for a published one
        manifest.write()
        made = _write_array(top / path, shape, parts, _counter(progress, path, shape[0]))
        manifest.files[path] = changed(wanted, sha256=made[0], bytes=made[1])
        manifest.write()
        written.append(path)
    return written


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


def _recipe(family: str, name: str, seed: int) -> Made:
    levels = FAMILIES[family].levels.get(name, ())
    if name in FAMILIES[family].published:
        levels = levels[FAMILIES[family].published[name] - 1 :][:1]
    return Made("", 0, GENERATOR, seed, [[float(c) for c in level] for level in levels])


def _parts(
    source: Images,
    family: str,
    name: str,
    levels: Iterable[int | None],
    seed: int,
    device: torch.device | str,
    root: DataRoot,
    size: int = 1000,
) -> Iterator[np.ndarray]:
    for severity in levels:
        for first in range(0, len(source), size):
            images = source.images[first : first + size].to(device)
            numbers = range(first, first + len(images))
            made = corrupt(images, name, severity, family=family, indices=numbers, seed=seed, root=root)
            yield _channels_last(made)


def _labels(source: Images, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    for _ in range(shape[0] // len(source)):
        yield source.labels.numpy().astype(np.uint8)


def _channels_last(images: Tensor) -> np.ndarray:
    return np.ascontiguousarray(images.permute(0, 2, 3, 1).cpu().numpy())


def _write_array(
    path: Path, shape: tuple[int, ...], parts: Iterable[np.ndarray], progress: Callable[[int], None]
) -> tuple[str, int]:
    """Write a .npy file of bytes part by part and return its SHA-256 and size.

    It is not memory-mapped, because on a full disk a mapped file kills the process, while a write raises an error.
    """
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    size = len(header.getvalue()) + int(np.prod(shape))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # left by a process that was killed
    _check_space(path.parent, size)
    digest = hashlib.sha256()
    done = 0
    try:
        with part.open("wb") as file:
            digest.update(header.getvalue())
            file.write(header.getvalue())
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
    manifest = Manifest.read(top)
    levels = tuple(severities)
    written = []
    for name in names:
        for severity in levels:
            unit = f"{GROUP_OF[name]}/{name}/{severity}"
            recipe = _recipe("imagenet-c", name, seed)
            wanted = changed(recipe, constants=recipe.constants[severity - 1 : severity])
            place = top / unit
            made = manifest.files.get(unit)
            if made is None and any(place.glob("*/*")) and not (place / UNFINISHED).exists():
                continue  # published
            if made is not None and made.same_recipe(wanted) and _listing(place) == (made.sha256, made.bytes):
                (place / UNFINISHED).unlink(missing_ok=True)
                continue
            if made is not None and not made.same_recipe(wanted):
                shutil.rmtree(place, ignore_errors=True)
            manifest.files.pop(unit, None)
            place.mkdir(parents=True, exist_ok=True)
            (place / UNFINISHED).touch()
            data = ImageNetC(source, name, severity, "generated", seed, root)
            _write_images(data, place, device, _counter(progress, unit, len(source)))
            digest, size = _listing(place)
            manifest.files[unit] = changed(wanted, sha256=digest, bytes=size)
            manifest.write()
            (place / UNFINISHED).unlink()
            written.append(unit)
    return written


def _write_images(
    data: ImageNetC,
    place: Path,
    device: torch.device | str,
    progress: Callable[[int], None],
    size: int = 64,
) -> None:
    """Write the missing images, each atomically."""
    for first in range(0, len(data), size):
        numbers = range(first, min(first + size, len(data)))
        files = {k: place / data.source.files[k][0].parent.name / data.source.files[k][0].name for k in numbers}
        todo = [k for k in numbers if not files[k].exists()]
        if todo:
            clean_images = torch.stack([data.source[k][0] for k in todo]).to(device)
            made = data.corrupted(clean_images, todo)
            for k, pixels in zip(todo, _channels_last(made), strict=True):
                content = io.BytesIO()
                Image.fromarray(pixels).save(content, "JPEG", quality=85, optimize=True)
                files[k].parent.mkdir(parents=True, exist_ok=True)
                write_atomically(files[k], content.getvalue())
        progress(numbers.stop)


def _listing(place: Path) -> tuple[str, int]:
    """Return a digest of the names and sizes of a folder's images, and their total size."""
    if not place.is_dir():
        return "", 0
    files = sorted(file for file in place.glob("*/*") if not file.name.startswith("."))
    sizes = [file.stat().st_size for file in files]
    lines = (f"{file.relative_to(place)} {size}\n" for file, size in zip(files, sizes, strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest(), sum(sizes)
