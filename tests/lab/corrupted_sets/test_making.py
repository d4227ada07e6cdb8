"""Making a set: whole files only, resumed where it stopped, mended where it broke."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from trueup.atomic import write_atomically
from trueup_lab.data.corrupted_sets import clean, imagenet_c, load, writer
from trueup_lab.data.corrupted_sets.manifest import Manifest
from trueup_lab.data.corrupted_sets.writer import make
from trueup_lab.data.corruptions import GENERATOR, corrupt

MODULE = "trueup_lab.data.corrupted_sets.writer"
SOME = ["brightness", "contrast"]


def manifest(root, folder="CIFAR-10-C"):
    return json.loads((root / folder / "trueup-manifest.json").read_text())["files"]


def test_a_made_set_has_the_published_layout_and_reads_back(small_root):
    told = []
    written = make("cifar10-c", root=small_root, only=SOME, progress=lambda *news: told.append(news))
    assert written == ["brightness.npy", "contrast.npy", "labels.npy"]
    assert told[-1] == ("labels.npy", 60, 60)
    images = np.load(small_root / "CIFAR-10-C" / "contrast.npy")
    assert images.shape == (60, 32, 32, 3)
    assert np.load(small_root / "CIFAR-10-C" / "labels.npy").shape == (60,)
    found = load("cifar10-c", "contrast", 4, root=small_root)
    assert found.origin == "generated"
    shutil.rmtree(small_root / "CIFAR-10-C")
    assert torch.equal(found.images, load("cifar10-c", "contrast", 4, root=small_root).images)
    assert found.labels.tolist() == [k % 10 for k in range(12)]


def test_the_manifest_says_how_a_file_was_made(small_root):
    make("mnist-c", root=small_root, only=["shear"], seed=3)
    entry = manifest(small_root, "MNIST-C")["shear/test_images.npy"]
    assert entry["seed"] == 3
    assert entry["generator"] == GENERATOR
    assert entry["constants"] == [[0.4]]
    assert np.load(small_root / "MNIST-C" / "shear" / "test_images.npy").shape == (12, 28, 28, 1)


def test_a_whole_file_is_not_made_again(small_root):
    make("cifar10-c", root=small_root, only=SOME)
    assert make("cifar10-c", root=small_root, only=SOME) == []
    assert make("cifar10-c", root=small_root, only=["contrast", "saturate"]) == ["saturate.npy"]


@pytest.mark.parametrize("harm", ["cut", "flipped", "gone"])
def test_a_broken_file_is_mended(small_root, harm):
    make("cifar10-c", root=small_root, only=SOME)
    path = small_root / "CIFAR-10-C" / "contrast.npy"
    whole = path.read_bytes()
    if harm == "cut":
        path.write_bytes(whole[:-100])
    elif harm == "flipped":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    else:
        path.unlink()
    assert make("cifar10-c", root=small_root, only=SOME) == ["contrast.npy"]
    assert path.read_bytes() == whole


def test_another_seed_or_generator_makes_it_again(small_root, monkeypatch):
    make("cifar10-c", root=small_root, only=["contrast"])
    assert "contrast.npy" in make("cifar10-c", root=small_root, only=["contrast"], seed=1)
    monkeypatch.setattr("trueup_lab.data.corrupted_sets.recipe.GENERATOR", GENERATOR + 1)
    assert "contrast.npy" in make("cifar10-c", root=small_root, only=["contrast"], seed=1)


def test_published_files_are_never_touched(small_root):
    top = small_root / "CIFAR-10-C"
    top.mkdir()
    np.save(top / "contrast.npy", np.zeros((60, 32, 32, 3), dtype=np.uint8))
    before = (top / "contrast.npy").read_bytes()
    assert make("cifar10-c", root=small_root, only=SOME) == ["brightness.npy", "labels.npy"]
    assert (top / "contrast.npy").read_bytes() == before
    assert load("cifar10-c", "contrast", 1, root=small_root).origin == "published"
    assert load("cifar10-c", "brightness", 1, root=small_root).origin == "generated"


def test_a_full_disk_is_reported_before_it_is_full(small_root, monkeypatch):
    usage = shutil.disk_usage(small_root)
    monkeypatch.setattr(f"{MODULE}.shutil.disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(OSError, match=r"0 MB left.*run the same command again"):
        make("cifar10-c", root=small_root, only=SOME)


@pytest.mark.parametrize("stop", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_stop_in_the_middle_leaves_no_half_file_and_is_resumed(small_root, monkeypatch, stop):
    calls = []

    def failing(images, name, severity, **options):
        calls.append((name, severity))
        if (name, severity) == ("contrast", 3):
            raise stop
        return corrupt(images, name, severity, **options)

    monkeypatch.setattr(f"{MODULE}.corrupt", failing)
    with pytest.raises(type(stop)):
        make("cifar10-c", root=small_root, only=SOME)
    top = small_root / "CIFAR-10-C"
    assert sorted(path.name for path in top.iterdir()) == ["brightness.npy", "trueup-manifest.json"]
    monkeypatch.setattr(f"{MODULE}.corrupt", corrupt)
    assert make("cifar10-c", root=small_root, only=SOME) == ["contrast.npy", "labels.npy"]


def killed(*_, **__):
    raise KeyboardInterrupt


def test_a_process_killed_before_it_lists_a_file_does_not_make_it_published(small_root, monkeypatch):
    monkeypatch.setattr(f"{MODULE}._list", lambda top, name, made: killed() if made.sha256 else None)
    with pytest.raises(KeyboardInterrupt):
        make("cifar10-c", root=small_root, only=["contrast"])
    monkeypatch.undo()
    assert (small_root / "CIFAR-10-C" / "contrast.npy").exists()
    assert load("cifar10-c", "contrast", 1, root=small_root).origin == "generated"
    assert make("cifar10-c", root=small_root, only=["contrast"]) == ["contrast.npy", "labels.npy"]
    assert load("cifar10-c", "contrast", 1, root=small_root).origin == "generated"


def test_leftovers_of_a_killed_process_are_mended(small_root):
    """Half a file under another name, and a file that is listed without a checksum."""
    make("cifar10-c", root=small_root, only=SOME)
    top = small_root / "CIFAR-10-C"
    with Manifest.changing(top) as content:
        content.files["contrast.npy"] = replace(content.files["contrast.npy"], sha256="", bytes=0)
    (top / ".contrast.npy.part").write_bytes(b"half")
    assert load("cifar10-c", "contrast", 1, root=small_root).origin == "generated"
    assert make("cifar10-c", root=small_root, only=SOME) == ["contrast.npy"]
    assert not (top / ".contrast.npy.part").exists()
    assert make("cifar10-c", root=small_root, only=SOME) == []


@pytest.mark.parametrize("family", ["mnist-c", "cifar10-c"])
def test_a_new_seed_that_was_stopped_does_not_take_the_old_file_for_its_own(small_root, monkeypatch, family):
    make(family, root=small_root, only=["shot_noise"], seed=0)
    monkeypatch.setattr(f"{MODULE}._write_array", killed)
    with pytest.raises(KeyboardInterrupt):
        make(family, root=small_root, only=["shot_noise"], seed=7)
    monkeypatch.undo()
    for seed in (7, 0):
        found = load(family, "shot_noise", 5, root=small_root, seed=seed).images.clone()
        made = corrupt(clean(family, small_root).images, "shot_noise", 5, family=family, seed=seed)
        assert torch.equal(found, made)


def test_a_new_seed_that_was_stopped_before_it_is_listed_is_made_again(small_root, monkeypatch):
    make("cifar10-c", root=small_root, only=["shot_noise"], seed=0)
    listed = writer._list
    monkeypatch.setattr(writer, "_list", lambda *entry: killed() if entry[-1].sha256 else listed(*entry))
    with pytest.raises(KeyboardInterrupt):
        make("cifar10-c", root=small_root, only=["shot_noise"], seed=7)
    monkeypatch.undo()
    for seed in (0, 7):
        found = load("cifar10-c", "shot_noise", 5, root=small_root, seed=seed)
        made = corrupt(clean("cifar10-c", small_root).images, "shot_noise", 5, family="cifar10-c", seed=seed)
        assert torch.equal(found.images, made)


def test_an_unfinished_folder_is_not_read(small_root):
    unit = small_root / "ImageNet-C" / "weather" / "fog" / "3"
    make("imagenet-c", root=small_root, only=["fog"], severities=[3])
    assert imagenet_c("fog", 3, root=small_root).seed is None  # read
    (unit / ".unfinished").touch()
    assert imagenet_c("fog", 3, root=small_root).seed == 0  # generated


def test_a_new_manifest_does_not_list_generated_files_as_published(small_root):
    make("cifar10-c", root=small_root, only=["contrast"])
    path = small_root / "CIFAR-10-C" / "trueup-manifest.json"
    path.unlink()
    make("cifar10-c", root=small_root, only=["brightness"])
    assert json.loads(path.read_text())["published"] == []
    assert load("cifar10-c", "contrast", 1, root=small_root).origin == "generated"


@pytest.mark.parametrize("first", [0, 7])
def test_images_of_another_seed_are_not_kept_when_a_stopped_set_is_made_again(small_root, monkeypatch, first):
    """Stop after one image of four, then go on with the other seed: no image of the first may be left."""
    unit = small_root / "ImageNet-C" / "noise" / "shot_noise" / "3"
    options = {"root": small_root, "only": ["shot_noise"], "severities": [3]}
    make("imagenet-c", **options, seed=7 - first)
    wanted = [path.read_bytes() for path in sorted(unit.glob("*/*"))]
    written = []

    def stopped(path, content):
        write_atomically(path, content)
        written.append(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(f"{MODULE}.write_atomically", stopped)
    with pytest.raises(KeyboardInterrupt):
        make("imagenet-c", **options, seed=first)
    monkeypatch.undo()
    assert len(written) == 1
    assert imagenet_c("shot_noise", 3, root=small_root, seed=first).seed == first  # not read, but generated
    assert make("imagenet-c", **options, seed=7 - first) == ["noise/shot_noise/3"]
    assert [path.read_bytes() for path in sorted(unit.glob("*/*"))] == wanted


MAKE = """
import sys
from trueup_lab.data.corrupted_sets.writer import make
make(sys.argv[1], root=sys.argv[2], only=sys.argv[3:])
"""


def test_processes_make_one_set_together(small_root):
    names = ("contrast", "contrast", "brightness")
    processes = [subprocess.Popen([sys.executable, "-c", MAKE, "cifar10-c", small_root, name]) for name in names]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert set(manifest(small_root)) == {*(f"{name}.npy" for name in names), "labels.npy"}
    assert make("cifar10-c", root=small_root, only=names) == []
    left = {path.name for path in (small_root / "CIFAR-10-C").iterdir()}
    assert left == {*manifest(small_root), "trueup-manifest.json"}


def test_a_file_that_another_process_is_making_is_waited_for(small_root, waits):
    top = small_root / "CIFAR-10-C"
    assert waits(top / "contrast.npy", lambda: make("cifar10-c", root=small_root, only=["contrast"]))
    assert set(manifest(small_root)) == {"contrast.npy", "labels.npy"}
    unit = small_root / "ImageNet-C" / "weather" / "fog" / "3"
    assert waits(unit, lambda: make("imagenet-c", root=small_root, only=["fog"], severities=[3]))
    assert len(list(unit.glob("*/*.JPEG"))) == 4


def test_a_manifest_is_changed_by_one_process_at_a_time(small_root, waits):
    make("cifar10-c", root=small_root, only=["contrast"])
    top = small_root / "CIFAR-10-C"

    def add():
        with Manifest.changing(top) as content:
            content.files["other.npy"] = content.files["contrast.npy"]

    assert waits(top / "trueup-manifest.json", add)
    assert waits(top / "trueup-manifest.json", lambda: make("cifar10-c", root=small_root, only=["contrast"]))
    assert set(manifest(small_root)) == {"contrast.npy", "labels.npy", "other.npy"}


def test_a_manifest_that_an_earlier_version_wrote_is_read(small_root):
    make("cifar10-c", root=small_root, only=SOME)
    path = small_root / "CIFAR-10-C" / "trueup-manifest.json"
    content = json.loads(path.read_text())
    for new in ("sha256", "published"):
        del content[new]
    path.write_text(json.dumps(content))
    assert load("cifar10-c", "contrast", 1, root=small_root).origin == "generated"
    assert make("cifar10-c", root=small_root, only=SOME) == []


def test_names_in_a_manifest_have_forward_slashes(small_root):
    make("mnist-c", root=small_root, only=["shear"])
    make("imagenet-c", root=small_root, only=["fog"], severities=[3])
    assert set(manifest(small_root, "MNIST-C")) == {"shear/test_images.npy", "shear/test_labels.npy"}
    assert set(manifest(small_root, "ImageNet-C")) == {"weather/fog/3"}


def test_imagenet_c_is_resumed_image_by_image(small_root):
    unit = small_root / "ImageNet-C" / "weather" / "fog" / "3"
    assert make("imagenet-c", root=small_root, only=["fog"], severities=[3]) == ["weather/fog/3"]
    files = sorted(unit.glob("*/*.JPEG"))
    assert len(files) == 4
    assert make("imagenet-c", root=small_root, only=["fog"], severities=[3]) == []
    whole = files[1].read_bytes()
    kept = files[0].stat().st_mtime_ns
    files[1].unlink()
    assert make("imagenet-c", root=small_root, only=["fog"], severities=[3]) == ["weather/fog/3"]
    assert files[1].read_bytes() == whole
    assert files[0].stat().st_mtime_ns == kept
    assert not (unit / ".unfinished").exists()


def test_an_unknown_corruption_or_a_foreign_manifest_is_refused(small_root):
    with pytest.raises(ValueError, match="unknown corruption 'sheer' of mnist-c"):
        make("mnist-c", root=small_root, only=["sheer"])
    top = small_root / "MNIST-C"
    top.mkdir(exist_ok=True)
    (top / "trueup-manifest.json").write_text("[]")
    with pytest.raises(ValueError, match="not a manifest of trueup.*move that folder away"):
        make("mnist-c", root=small_root)
    make("cifar10-c", root=small_root, only=["contrast"], seed=8)
    path = small_root / "CIFAR-10-C" / "trueup-manifest.json"
    path.write_text(path.read_text().replace('"seed": 8', '"seed": 9'))
    with pytest.raises(ValueError, match="do not match its checksum"):
        load("cifar10-c", "contrast", 1, root=small_root, seed=9)


def test_the_command_line_makes_and_shows(call, small_root):
    made = call("data", "make", "mnist-c", "--only", "stripe", "--data", small_root)
    assert made.exit_code == 0, made.output
    assert "2 made" in made.output
    again = call("data", "make", "mnist-c", "--only", "stripe", "--data", small_root)
    assert "nothing to make" in again.output
    out = small_root / "sheet.png"
    shown = call("data", "show", "mnist-c", "--count", "2", "--data", small_root, "--out", out)
    assert shown.exit_code == 0, shown.output
    assert out.read_bytes().startswith(b"\x89PNG")
    wrong = call("data", "make", "mnistc", "--data", small_root)
    assert wrong.exit_code == 2
    assert "mnist-c" in wrong.output
