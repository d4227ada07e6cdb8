"""Download published data sets: resumable, checked against their MD5, and unpacked safely."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trueup_lab.data.corrupted_sets.manifest import Manifest
from trueup_lab.data.corruptions import corruption_names
from trueup_lab.data.root import DataRoot, data_root
from trueup_lab.locks import locked

DownloadProgress = Callable[[str, int, int | None], None]
"""Called with (file name, bytes downloaded, bytes in total, None if unknown)."""


@dataclass(frozen=True)
class Remote:
    """A published file: its URL, its published MD5, and where it is unpacked."""

    url: str
    md5: str
    into: str
    """Folder under the data root that the file is unpacked into."""
    makes: tuple[str, ...]
    """Paths under the data root that unpacking creates. If all exist, nothing is downloaded."""

    @property
    def name(self) -> str:
        """Name of the file.

        >>> Remote("https://example.org/a/b.tar?download=1", "", "", ()).name
        'b.tar'
        """
        return PurePosixPath(self.url.partition("?")[0]).name


def _mnist(name: str, md5: str) -> Remote:
    url = f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz"
    return Remote(url, md5, "MNIST/raw", (f"MNIST/raw/{name}",))


def _imagenet_c(group: str, md5: str, *corruptions: str) -> Remote:
    url = f"https://zenodo.org/records/2235448/files/{group}.tar"
    makes = tuple(f"ImageNet-C/{group}/{corruption}" for corruption in corruptions)
    return Remote(url, md5, f"ImageNet-C/{group}", makes)


REMOTES: dict[str, tuple[Remote, ...]] = {
    "mnist": (
        _mnist("train-images-idx3-ubyte", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        _mnist("train-labels-idx1-ubyte", "d53e105ee54ea40749a09fcbcd1e9432"),
        _mnist("t10k-images-idx3-ubyte", "9fb629c4189551a2d022fa330f9573f3"),
        _mnist("t10k-labels-idx1-ubyte", "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    "cifar10": (
        Remote(
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            "",
            tuple(f"cifar-10-batches-py/{name}" for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")),
        ),
    ),
    "mnist-c": (
        Remote(
            "https://zenodo.org/records/3239543/files/mnist_c.zip",
            "4b34b33045869ee6d424616cd3a65da3",
            "MNIST-C",
            tuple(
                f"MNIST-C/{name}/test_{what}.npy"
                for name in corruption_names("mnist-c")
                for what in ("images", "labels")
            ),
        ),
    ),
    "cifar10-c": (
        Remote(
            "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar",
            "56bf5dcef84df0e2308c6dcbcbbd8499",
            "",
            tuple(f"CIFAR-10-C/{name}.npy" for name in (*corruption_names("cifar10-c"), "labels")),
        ),
    ),
    "imagenet-c": (
        _imagenet_c("noise", "e80562d7f6c3f8834afb1ecf27252745", "gaussian_noise", "shot_noise", "impulse_noise"),
        _imagenet_c(
            "blur",
            "2d8e81fdd8e07fef67b9334fa635e45c",
            *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
        ),
        _imagenet_c("weather", "33ffea4db4d93fe4a428c40a6ce0c25d", *("snow", "frost", "fog", "brightness")),
        _imagenet_c(
            "digital",
            "89157860d7b10d5797849337ca2e5c03",
            *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
        ),
        _imagenet_c(
            "extra",
            "d492dfba5fc162d8ec2c3cd8ee672984",
            *("speckle_noise", "spatter", "gaussian_blur", "saturate"),
        ),
    ),
}
"""Files of each data set, by its name."""


class DownloadError(OSError):
    """A download failed or is not the published file. The message names the file and the next step."""


def get(
    name: str,
    root: DataRoot = None,
    *,
    report: DownloadProgress = lambda *_: None,
) -> list[Path]:
    """Download the data set `name` into the data root, unless it is there already, and return its paths.

    An archive is kept until all of it is unpacked, so that an interrupted call is noticed and continued.
    """
    if name not in REMOTES:
        raise ValueError(f"unknown data set {name!r}; known: {', '.join(REMOTES)}")
    base = data_root(root)
    for folder in {base / made.partition("/")[0] for remote in REMOTES[name] for made in remote.makes}:
        if Manifest.read(folder).files:
            raise DownloadError(
                f"{folder} holds files made by `trueup data make`; move it away to download the published ones"
            )
    for remote in REMOTES[name]:
        archive = base / ".downloads" / remote.name
        if all((base / made).exists() for made in remote.makes) and not archive.exists():
            continue
        with locked(archive):
            if all((base / made).exists() for made in remote.makes) and not archive.exists():
                continue  # another process got it
            fetch(remote.url, archive, md5=remote.md5, report=report)
            unpack(archive, base / remote.into)
            missing = [made for made in remote.makes if not (base / made).exists()]
            if missing:
                raise DownloadError(f"{remote.url} was unpacked, but {base / missing[0]} is missing; report this")
            archive.unlink()
    return [base / made for remote in REMOTES[name] for made in remote.makes]


def fetch(url: str, path: Path, *, md5: str, report: DownloadProgress = lambda *_: None) -> None:
    """Download `url` to `path`, resuming an earlier attempt. A file with another MD5 is refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and _md5(path) == md5:
        return
    part = path.with_name(path.name + ".part")
    try:
        _transfer(url, part, report)
    except urllib.error.HTTPError as error:
        raise DownloadError(
            f"could not download {url}: the server answers {error.code} {error.reason}. Try again later, or put the "
            f"file at {path}"
        ) from error
    except (http.client.HTTPException, OSError) as error:
        kept = part.stat().st_size if part.exists() else 0
        again = f"{kept} bytes are kept: run the same command again to resume" if kept else "Try again"
        reason = str(error) or type(error).__name__
        raise DownloadError(f"could not download {url}: {reason}. {again}, or put the file at {path}") from error
    found = _md5(part)
    if found != md5:
        part.unlink()
        raise DownloadError(f"{url} has MD5 {found}, expected {md5}; the file was deleted. Try again, or report this")
    os.replace(part, path)


def unpack(archive: Path, into: Path) -> None:
    """Unpack a tar or zip, or uncompress a `.gz`, into the folder `into`.

    Members that would land outside it are refused. Files appear in `into` only after everything is unpacked. A
    single folder around a zip's contents is dropped if its name is that of `into`, apart from case and dashes.
    """
    beside = archive.with_name(archive.name + ".unpacked")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        if archive.name.endswith(".zip"):
            _unpack_zip(archive, beside, into.name)
        elif archive.name.endswith((".tar", ".tar.gz", ".tgz")):
            with tarfile.open(archive) as tar:
                tar.extractall(beside, filter="data")
        elif archive.name.endswith(".gz"):
            with gzip.open(archive) as packed, (beside / archive.name.removesuffix(".gz")).open("wb") as file:
                shutil.copyfileobj(packed, file)
        else:
            raise DownloadError(f"{archive} cannot be unpacked; expected .tar, .tar.gz, .tgz, .zip or .gz")
        _move_contents(beside, into)
    except tarfile.FilterError as error:
        raise DownloadError(f"{archive} was not unpacked: {error}") from error
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DownloadError(f"{archive} is damaged ({error}); delete it and try again") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _move_contents(source: Path, into: Path) -> None:
    """Move the contents of `source` to `into`, merging folders."""
    into.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir():
        target = into / entry.name
        if entry.is_dir() and target.is_dir():
            _move_contents(entry, target)
        else:
            os.replace(entry, target)


def _transfer(url: str, part: Path, report: DownloadProgress) -> None:
    here = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "trueup"})
    if here:
        request.add_header("Range", f"bytes={here}-")
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # the range starts at the end: the file is complete
            return
        raise
    with response:
        resumed = response.status == 206
        here = here if resumed else 0
        length = response.headers.get("Content-Length")
        total = here + int(length) if length else None
        with part.open("ab" if resumed else "wb") as file:
            report(part.stem, here, total)
            while block := response.read1(
                1 << 20
            ):  # the bytes that have arrived, so that an interruption loses none of them
                file.write(block)
                here += len(block)
                report(part.stem, here, total)
    if total is not None and here != total:
        raise OSError(f"the connection ended after {here} of {total} bytes")


def _unpack_zip(archive: Path, into: Path, name: str) -> None:
    with zipfile.ZipFile(archive) as packed:
        members = [member for member in packed.infolist() if not member.is_dir()]
        parts = [PurePosixPath(member.filename).parts for member in members]
        for member, path in zip(members, parts, strict=True):
            if not path or ".." in path or member.filename.startswith(("/", "\\")) or ":" in path[0]:
                raise DownloadError(f"{archive} was not unpacked: {member.filename!r} would land outside the folder")
        around = {path[0] for path in parts} - {"__MACOSX"}
        skip = 1 if len(around) == 1 and _plain(next(iter(around))) == _plain(name) else 0
        for member, path in zip(members, parts, strict=True):
            if path[0] == "__MACOSX":  # macOS metadata
                continue
            target = into.joinpath(*path[skip:])
            target.parent.mkdir(parents=True, exist_ok=True)
            with packed.open(member) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
