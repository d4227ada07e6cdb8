"""The other architectures train, stop, go on, and end up in the zoo, as ResNet-20s do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from trueup_lab import models
from trueup_lab.data.images import NORMALISATION, Images
from trueup_lab.models import ARCHITECTURES, Record, convnext, vit, zoo
from trueup_lab.models.weights import weights_of
from trueup_lab.training import fleet as module
from trueup_lab.training.augment import Mixing, crop_and_mirror, draw_epoch, draw_mixing, mix_and_blank
from trueup_lab.training.checkpoint import load_checkpoint
from trueup_lab.training.engine import Engine
from trueup_lab.training.export import export, gather
from trueup_lab.training.fleet import Fleet
from trueup_lab.training.recipes import learning_rate, recipe_for, shortened
from trueup_lab.training.run import Choices, train

OTHERS = ("vgg", "mobilenet", "convnext", "vit")


def few_choices(architecture: str, epochs: int = 1) -> Choices:
    recipe = replace(shortened(recipe_for("cifar10", architecture), epochs), batch=4)
    return Choices("cifar10", ARCHITECTURES[architecture].norms[0], (0,), recipe, architecture=architecture)


@pytest.fixture
def colours() -> Images:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (8, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return Images(images, torch.arange(8))


@pytest.mark.parametrize("architecture", OTHERS)
def test_a_run_of_every_architecture_loads_by_name_from_the_zoo(architecture, colours, tmp_path, monkeypatch):
    choices = few_choices(architecture)
    trained = train(choices, colours, colours, Engine(), out=tmp_path / "run")[0]
    monkeypatch.setattr(zoo, "FOLDER", tmp_path / "zoo")
    export(gather([tmp_path / "run"]), zoo=tmp_path / "zoo")
    name = f"{architecture}-{choices.norm}-cifar10"
    assert models.names() == (name,)
    x = NORMALISATION["cifar10"](colours.images)
    with torch.inference_mode():
        assert torch.equal(models.load(name)(x), trained(x))


def test_a_network_for_segmentation_trains_and_its_accuracy_is_over_pixels(tmp_path, monkeypatch):
    """Bright and dark halves: two classes, learnt in a few steps."""
    labels = torch.zeros(16, 32, 40, dtype=torch.uint8)
    labels[:, :, 20:] = 4
    data = Images((labels[:, None] * 50 + 20).repeat(1, 3, 1, 1), labels)
    recipe = replace(shortened(recipe_for("scenes", "unet"), 12), batch=4)
    choices = Choices("scenes", "bn", (0,), recipe, architecture="unet")
    seen = []
    trained = train(choices, data, data, Engine(), out=tmp_path / "run", report=seen.append)[0]
    assert 0 < seen[0].train_accuracy < seen[-1].train_accuracy <= 1
    with torch.inference_mode():
        right = (trained(NORMALISATION["scenes"](data.images)).argmax(1) == labels).double().mean().item()
    assert right > 0.9
    monkeypatch.setattr(zoo, "FOLDER", tmp_path / "zoo")
    export(gather([tmp_path / "run"]), zoo=tmp_path / "zoo")
    assert models.record("unet-bn-scenes").accuracy[0] == pytest.approx(right)


def test_adamw_goes_on_bit_for_bit_after_a_stop(colours, tmp_path, monkeypatch):
    choices = few_choices("convnext", 2)
    train(choices, colours, colours, Engine(), out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr("trueup_lab.training.run.RESERVE", 9000)  # so that another epoch does not fit
        assert train(choices, colours, colours, Engine(), out=tmp_path / "stopped", time_limit=900) is None
    train(choices, colours, colours, Engine(), out=tmp_path / "stopped")
    whole, stopped = (load_checkpoint(tmp_path / n / "checkpoint.safetensors")[0] for n in ("whole", "stopped"))
    assert whole.keys() == stopped.keys()
    assert {key.split("/")[1] for key in whole} == {"weights", "momentum", "squares", "step"}
    for key, value in whole.items():
        assert torch.equal(value, stopped[key]), key


def test_a_fleet_trains_what_a_textbook_loop_with_adamw_and_mixing_trains(colours):
    """The oracle mixes labels as vectors of probabilities and asks PyTorch's optimiser without fusion."""
    recipe = replace(few_choices("convnext").recipe, rate=1e-4, mixing=0.9, erasing=0.5)
    build = Record("cifar10", "ln", channels=3, architecture="convnext").build
    trained = Fleet(build, [3], colours, NORMALISATION["cifar10"], recipe, Engine())
    torch.manual_seed(3)
    model = build()
    optimiser = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        weight_decay=0.05,
        fused=False,
    )
    order, shift, mirror = draw_epoch(3, 0, 8, used=8, padding=4, mirror=True)
    mixing = draw_mixing(3, 0, used=8, size=(32, 32), mixing=0.9, erasing=0.5)
    for step in range(2):
        part = slice(4 * step, 4 * step + 4)
        pixels = crop_and_mirror(colours.images[order[part]], shift[part], mirror[part], 4)
        x, own = mix_and_blank(NORMALISATION["cifar10"](pixels), Mixing(*(t[part] for t in mixing)))
        one_hot = F.one_hot(colours.labels[order[part]], 10) * 0.9 + 0.01
        wanted = own[:, None] * one_hot + (1 - own[:, None]) * one_hot.roll(1, dims=0)
        loss = -(wanted * model(x).log_softmax(1)).sum(1).mean()
        optimiser.zero_grad()
        loss.backward()
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(recipe, 0, step, 2)
        optimiser.step()
    trained.train_epoch(0)
    got, want = weights_of(trained.trainees[0].model), weights_of(model)
    for key in want:
        # Where a gradient is rounding, Adam's step still has its full length: 1e-4 to either side.
        torch.testing.assert_close(got[key], want[key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("architecture", ["convnext", "vit"])
def test_one_compilation_serves_all_seeds_and_norms_keep_float32_weights(architecture, colours, monkeypatch):
    monkeypatch.setattr(vit, "DEPTH", 1)  # compiling takes time by the block
    monkeypatch.setattr(convnext, "STAGES", ((8, 1), (16, 1)))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module._batch_loss, fullgraph=True, dynamic=False, backend=counter)
    monkeypatch.setattr(module, "_compiled", lambda _: compiled)
    choices = few_choices(architecture)
    engine = Engine(channels_last=True, precision="bfloat16")
    build = choices.record().build
    fleet = Fleet(build, (0, 1), colours, NORMALISATION["cifar10"], choices.recipe, engine)
    fleet.train_epoch(0)
    assert counter.frame_count == 1
    assert {value.dtype for value in fleet.trainees[0].state().values()} == {torch.float32}


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", OTHERS)
def test_graphs_train_what_eager_steps_train(architecture, colours):
    choices = few_choices(architecture)
    build = choices.record().build
    recipe = replace(choices.recipe, rate=1e-4)
    graphs, eager = (
        Fleet(build, [0], colours, NORMALISATION["cifar10"], recipe, Engine("cuda", graphs=graph))
        for graph in (True, False)
    )
    for epoch in range(2):
        assert graphs.train_epoch(epoch)[0] == pytest.approx(eager.train_epoch(epoch)[0], rel=1e-2)


def test_mixing_is_a_weighted_sum_and_the_label_follows_the_pixels():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(3, 2, 4, 4, generator=generator)
    nothing = [0, 0, 0, 0]
    mixing = Mixing(
        torch.tensor([0.25, 1.0, 1.0]),
        torch.tensor([nothing, [0, 2, 4, 4], nothing]),
        torch.tensor([nothing, nothing, [1, 1, 3, 4]]),
    )
    mixed, own = mix_and_blank(x, mixing)
    assert own.tolist() == [0.25, 0.5, 1.0]
    torch.testing.assert_close(mixed[0], 0.25 * x[0] + 0.75 * x[2])
    assert torch.equal(mixed[1], torch.cat((x[1, :, :, :2], x[0, :, :, 2:]), dim=2))
    assert not mixed[2, :, 1:3, 1:].any()
    assert torch.equal(mixed[2, :, 0], x[2, :, 0])


def test_as_many_images_are_mixed_and_blanked_as_asked_for():
    mixing = draw_mixing(0, 1, used=4000, size=(32, 24), mixing=0.6, erasing=0.25)
    height, width = ((mixing.box[:, k + 2] - mixing.box[:, k]) for k in (0, 1))
    boxed, blended = height * width > 0, mixing.weight < 1
    assert not (boxed & blended).any()
    assert boxed.float().mean() == pytest.approx(0.3, abs=0.03)  # a few boxes round to nothing
    assert blended.float().mean() == pytest.approx(0.3, abs=0.03)
    blank = mixing.blank
    assert (blank[:, 2] > blank[:, 0]).float().mean() == pytest.approx(0.25, abs=0.03)
    assert mixing.box.min() >= 0
    assert mixing.box[:, 2].max() <= 32
    assert mixing.box[:, 3].max() <= 24
    assert torch.equal(mixing.box, draw_mixing(0, 1, used=4000, size=(32, 24), mixing=0.6, erasing=0.25).box)
