"""Sites whose rows are not the batch: windows folded into it, and networks that see no image."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import trueup
from architectures import images

EVIDENCE = trueup.Evidence(budget=1, strength=0.2)
GATED = trueup.Evidence(strength=0.2)
PAPER = trueup.Correction(1, 0, location="match", method="sort")


class Windows(nn.Module):
    """A window transformer in small: windows are folded into the batch, and a network computes position biases."""

    def __init__(self, order: str = "image first", *, check: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order, self.check = order, check
        self.stem, self.bn = nn.Conv2d(3, 8, 4, stride=4), nn.BatchNorm2d(8)
        self.bias = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8))
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
        self.inside = nn.BatchNorm2d(8)
        self.last, self.head = nn.LayerNorm(8), nn.Linear(8, 10)
        self.register_buffer("places", torch.rand(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.stem(x))
        if self.check:
            assert x.shape[1] == 8
        b, c, h, w = x.shape
        windows = x.view(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1)
        if self.order == "window first":
            windows = windows.permute(1, 2, 0, 3, 4, 5)
        tokens = windows.reshape(-1, 16, c)
        tokens = tokens + self.bias(self.places)
        tokens = tokens + self.down(self.act(self.up(self.norm(tokens))))
        maps = self.inside(tokens.transpose(1, 2).reshape(-1, c, 4, 4))
        if self.order == "window first":
            maps = maps.view(-1, b, c, 4, 4).transpose(0, 1)
        return self.head(self.last(maps.reshape(b, -1, c, 16).mean((1, 3))))


FOLDED = ["norm", "act", "inside"]
ways = pytest.mark.parametrize("check", [False, True], ids=["traced", "watched"])


def names(sites):
    return [site.name for site in sites]


@ways
@pytest.mark.parametrize("first", [1, 4], ids=["one image first", "several"])
def test_windows_are_folded_and_what_sees_no_image_is_left_without_a_word(check, first):
    model = Windows(check=check).eval()
    targets = trueup.calibrate(model, [images(first), images(8, seed=2)], decide=False)
    assert targets.sites.traced is not check
    assert names(targets.sites) == ["bn", "norm", "act", "inside", "last"]
    assert names(site for site in targets.sites if site.folded) == FOLDED
    assert targets.sites.left == ()
    assert targets.norms["norm"].shape == targets.norms["inside"].shape == (8, 64)
    assert targets.images == first + 8


@ways
def test_windows_in_another_order_are_left_alone_and_listed(check):
    model = Windows("window first", check=check).eval()
    targets = trueup.calibrate(model, [images(4)], decide=False)
    assert names(targets.sites) == ["bn", "last"]
    assert targets.sites.left == tuple(FOLDED)
    assert "Left alone, because their rows are not images: norm, act, inside." in str(targets)
    assert trueup.correct(model, targets, EVIDENCE)(images(2)).shape == (2, 10)


class Tiles(nn.Module):
    """Takes a list of images and folds their tiles, more of them for a wider image, into the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, images: list[Tensor]) -> Tensor:
        tiles = [image.unfold(2, 8, 8).permute(2, 0, 1, 3) for image in images]
        rows = self.norm(self.conv(torch.cat(tiles))).mean((2, 3)).split([len(some) for some in tiles])
        return self.head(torch.stack([some.mean(0) for some in rows]))


def strips(*widths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 8, width, generator=generator) for width in widths]


def test_tiles_whose_number_depends_on_the_image_are_not_folded():
    model = Tiles().eval()
    with pytest.raises(ValueError, match="left alone, because their rows are not images: norm"):
        trueup.calibrate(model, [strips(8, 24)], decide=False)


def test_where_rows_cannot_be_shared_out_among_the_images_a_folded_site_is_left_alone():
    model = Tiles().eval()
    targets = trueup.calibrate(model, [strips(*[16] * 20)], decide=False)
    assert names(site for site in targets.sites if site.folded) == ["norm"]
    robust = trueup.correct(model, targets, EVIDENCE)
    even, odd = [3 * strip for strip in strips(16, 16)], strips(8, 16)
    assert not robust(even).isclose(model(even), atol=1e-4).all()
    assert robust(odd).equal(model(odd))


class FirstImage(nn.Module):
    """Normalises the first image of a batch again, for all of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.again = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        return (x + self.again(x[:1])).mean((2, 3))


def test_a_site_that_sees_the_first_image_only_is_left_alone_and_listed():
    targets = trueup.calibrate(FirstImage().eval(), [images(4)], decide=False)
    assert names(targets.sites) == ["norm"]
    assert targets.sites.left == ("again",)


@ways
@pytest.mark.parametrize("rule", [EVIDENCE, GATED, PAPER], ids=["evidence", "gated", "paper"])
def test_an_image_has_one_answer_in_any_batch(check, rule):
    model = Windows(check=check).eval()
    robust = trueup.correct(model, trueup.calibrate(model, images(24).split(8), decide=False), rule)
    x = images(5, seed=3) * 0.3 - 1
    together = robust(x)
    assert not together.isclose(model(x), atol=1e-4).all()
    torch.testing.assert_close(torch.cat([robust(image[None]) for image in x]), together, atol=1e-4, rtol=1e-3)
    wider = torch.cat([x, x], dim=3)  # more windows per image
    torch.testing.assert_close(robust(wider)[:1], robust(wider[:1]), atol=1e-4, rtol=1e-3)


@ways
def test_all_windows_of_an_image_land_on_the_target_together(check):
    model = Windows(check=check).eval().double()
    targets = trueup.calibrate(model, [images(24).double()], resolution=None, decide=False)
    rule = trueup.Correction(1, 0, location="match", sparse=False)
    robust = trueup.correct(model, targets, rule)
    seen = []
    robust.placed[robust.placed_at.index("act")].register_forward_hook(lambda _m, _i, out: seen.append(out.detach()))
    robust(images(3, seed=5).double() * 0.3)
    assert seen[0].shape == (3, 4 * 16 * 16)
    target = targets.activations["act"].target
    torch.testing.assert_close(seen[0].sort(dim=1).values, target.expand(3, -1))


def test_traced_and_watched_agree():
    plain, checked = Windows().eval(), Windows(check=True).eval()
    targets = trueup.calibrate(plain, [images(24)], decide=False)
    others = trueup.calibrate(checked, [images(24)], decide=False)
    x = images(4, seed=3) - 1
    for rule in (EVIDENCE, GATED, PAPER):
        torch.testing.assert_close(
            trueup.correct(plain, targets, rule)(x), trueup.correct(checked, others, rule)(x), atol=1e-5, rtol=1e-4
        )


@ways
def test_compiled_and_exported_with_a_free_batch(check):
    model = Windows(check=check).eval()
    robust = trueup.correct(model, trueup.calibrate(model, [images(24)], decide=False), EVIDENCE)
    torch._dynamo.reset()
    with torch.inference_mode():
        compiled = torch.compile(robust, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(images(3)), robust(images(3)), atol=1e-4, rtol=1e-4)
    free = {0: torch.export.Dim("batch", min=1, max=64)}
    program = torch.export.export(robust, (images(4),), dynamic_shapes={"x": free})
    torch.testing.assert_close(program.module()(images(3)), robust(images(3)), atol=1e-4, rtol=1e-4)


def test_the_distance_of_folded_sites_is_measured_per_image():
    model = Windows().eval()
    targets = trueup.calibrate(model, [images(24)], decide=False)
    shift = trueup.measure(model, targets, images(3))
    assert shift.norms == ("bn", "norm", "inside", "last")
    assert shift.evidence.shape == (3, 4)
    assert shift.distance.shape == (3, 1)
