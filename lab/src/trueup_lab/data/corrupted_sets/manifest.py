"""The manifest of a folder with generated files: their names, their checksums, and how they were generated.

Published files that were in the folder before are listed too. A file's origin is known if the file is listed, or if
the folder has no manifest. Any other file is of unknown origin, and never taken for published.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trueup.atomic import write_atomically
from trueup_lab.data.corrupted_sets.recipe import GenerationRecipe
from trueup_lab.data.marks import mark_of
from trueup_lab.locks import locked

NAME = "trueup-manifest.json"
Origin = Literal["published", "generated"]


@dataclass(frozen=True)
class Made:
    """A generated file, or folder of images. While it is being written, `sha256` is empty."""

    sha256: str
    bytes: int
    generator: int
    seed: int
    constants: list[list[float]]

    @property
    def recipe(self) -> GenerationRecipe:
        """Recipe that the file was made from."""
        return GenerationRecipe(self.generator, self.seed, self.constants)

    @classmethod
    def by(cls, recipe: GenerationRecipe, sha256: str = "", size: int = 0) -> Made:
        """Return the entry of a file of this recipe; without a checksum, the file is still being written."""
        return cls(sha256, size, recipe.generator, recipe.seed, recipe.constants)


@dataclass
class Manifest:
    """Manifest of a folder. Names are relative paths with forward slashes."""

    folder: Path
    files: dict[str, Made] = field(default_factory=dict)
    published: set[str] = field(default_factory=set)
    exists: bool = False

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of `folder`; if there is none, return an empty one with `exists` False."""
        path = folder / NAME
        if not path.exists():
            return cls(folder)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.get("sha256", _digest(content)) != _digest(content):
                raise ValueError("its contents do not match its checksum")
            files = {name: Made(**made) for name, made in content["files"].items()}
            return cls(folder, files, set(content.get("published", ())), exists=True)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path} is damaged, or not a manifest of trueup ({error}); without it nobody knows which files of "
                f"{folder} are generated: move that folder away, and make the set again with `trueup data make`"
            ) from error

    def write(self) -> None:
        """Write the manifest atomically."""
        content: dict[str, Any] = {
            "origin": "generated",
            "by": "trueup data make",
            "files": {name: asdict(made) for name, made in sorted(self.files.items())},
            "published": sorted(self.published),
        }
        content["sha256"] = _digest(content)
        write_atomically(self.folder / NAME, (json.dumps(content, indent=1) + "\n").encode())
        self.exists = True

    @classmethod
    @contextmanager
    def changing(cls, folder: Path) -> Iterator[Manifest]:
        """Read the manifest, and write it when the block ends. Other processes wait, so no entry is lost."""
        with locked(folder / NAME):
            manifest = cls.read(folder)
            yield manifest
            manifest.write()

    def start(self, names: Iterable[str]) -> None:
        """Write a new manifest. The files among `names` that exist and carry no mark are listed as published."""
        self.published = {name for name in names if (self.folder / name).exists() and self._mark(name) is None}
        self.write()

    def origin(self, name: str) -> Origin:
        """Return whether an existing file or folder was generated or published."""
        if name in self.files or self._mark(name) is not None:
            return "generated"
        if not self.exists or name in self.published:
            return "published"
        raise ValueError(
            f"{self.folder / name} is not listed in {self.folder / NAME}, so it may be generated or published: delete "
            "it and run `trueup data make`; or, if it is the published file, move it to a folder without a manifest"
        )

    def usable(self, name: str, recipe: GenerationRecipe) -> bool:
        """Whether a generated file is listed as complete and of this recipe."""
        made = self.files.get(name)
        return made is not None and made.recipe == recipe and bool(made.sha256)

    def check_mark(self, name: str) -> None:
        """Raise ValueError if a listed file or folder carries the mark of another recipe."""
        if self._mark(name) not in (None, self.files[name].recipe.mark):  # earlier versions wrote no marks
            raise ValueError(
                f"{self.folder / name} is damaged: its mark names another recipe than its manifest; run "
                "`trueup data make` again"
            )

    def check(self, name: str) -> None:
        """Raise ValueError if a listed file differs from its checksum."""
        path, made = self.folder / name, self.files[name]
        if path.stat().st_size != made.bytes or _seen(path, path.stat().st_mtime_ns, made.bytes) != made.sha256:
            raise ValueError(f"{path} is damaged: it differs from its checksum; run `trueup data make` again")

    def holds(self, name: str, recipe: GenerationRecipe) -> bool:
        """Whether a file exists, is undamaged, and is of this recipe."""
        path = self.folder / name
        if not path.is_file() or not self.usable(name, recipe):
            return False
        made = self.files[name]
        return path.stat().st_size == made.bytes and checksum(path) == made.sha256

    def _mark(self, name: str) -> bytes | None:
        path = self.folder / name
        if path.is_dir():
            path = next(iter(sorted(path.glob("*/*"))), path)
        return mark_of(path)


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.lru_cache(maxsize=256)
def _seen(path: Path, _changed: int, _size: int) -> str:
    """Return the SHA-256 of a file, which is read once as long as it does not change."""
    return checksum(path)


def _digest(content: dict[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
