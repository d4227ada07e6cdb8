"""Models trained at once are the models that plain PyTorch would train one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from trueup_lab.data.images import NORMALISATION
from trueup_lab.models import ResNet20
from trueup_lab.models.weights import weights_of
from trueup_lab.training import fleet as module
from trueup_lab.training.augment import crop_and_mirror, draw_epoch
from trueup_lab.training.engine import Engine, default_engine
from trueup_lab.training.fleet import Fleet
from trueup_lab.training.recipes import Recipe, learning_rate

# A low rate, because a high one lets the last bit of a sum grow into another model.
RECIPE = Recipe(3, (2,), rate=2e-3, batch=8, crop_padding=2, mirror=True, warmup_epochs=1, warmup_from=1e-4)


def fleet(tiny, seeds, norm="bn", engine=Engine(), recipe=RECIPE):  # noqa: B008
    return Fleet(lambda: ResNet20(norm, channels=1, classes=2), seeds, tiny, NORMALISATION["mnist"], recipe, engine)


def textbook(tiny, seed, norm, epochs):
    """The same training, written as a tutorial would."""
    torch.manual_seed(seed)
    model = ResNet20(norm, channels=1, classes=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=1e-4)
    losses = []
    for epoch in range(epochs):
        order, shift, mirror = draw_epoch(seed, epoch, 37, used=32, padding=2, mirror=True)
        for step in range(4):
            part = slice(8 * step, 8 * step + 8)
            pixels = crop_and_mirror(tiny.images[order[part]], shift[part], mirror[part], 2)
            loss = F.cross_entropy(model(NORMALISATION["mnist"](pixels)), tiny.labels[order[part]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.param_groups[0]["lr"] = learning_rate(RECIPE, epoch, step, 4)
            optimizer.step()
            losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("norm", ["bn", "gn", "frn"])
def test_a_fleet_trains_what_a_textbook_loop_trains(tiny, norm):
    trained = fleet(tiny, [3], norm)
    results = [trained.train_epoch(epoch)[0] for epoch in range(2)]
    model, losses = textbook(tiny, 3, norm, 2)
    assert [loss for loss, _ in results] == pytest.approx([sum(losses[:4]) / 4, sum(losses[4:]) / 4], rel=1e-3)
    got, want = weights_of(trained.trainees[0].model), weights_of(model)
    assert got.keys() == want.keys()
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=1e-3, atol=1e-4)


def test_models_trained_together_are_those_trained_alone(tiny):
    together = fleet(tiny, [0, 1])
    alone = [fleet(tiny, [seed]) for seed in (0, 1)]
    for epoch in range(2):
        assert together.train_epoch(epoch) == [one.train_epoch(epoch)[0] for one in alone]
    for a, b in zip(together.trainees, (one.trainees[0] for one in alone), strict=True):
        for key, value in a.state().items():
            assert torch.equal(value, b.state()[key]), key


def test_building_a_fleet_leaves_the_random_state_alone(tiny):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    fleet(tiny, [0]).train_epoch(0)
    assert torch.equal(torch.get_rng_state(), before)


def test_state_taken_and_given_back_continues_bit_for_bit(tiny):
    one, other = fleet(tiny, [0]), fleet(tiny, [0])
    one.train_epoch(0)
    other.trainees[0].load_state({key: value.clone() for key, value in one.trainees[0].state().items()})
    assert one.train_epoch(1) == other.train_epoch(1)
    for key, value in one.trainees[0].state().items():
        assert torch.equal(value, other.trainees[0].state()[key]), key


@pytest.mark.parametrize("norm", ["bn", "gn", "frn"])
def test_one_compilation_serves_all_models(tiny, norm, monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module._batch_loss, fullgraph=True, dynamic=False, backend=counter)
    monkeypatch.setattr(module, "_compiled", lambda _: compiled)
    fleet(tiny, range(3), norm, Engine(channels_last=True)).train_epoch(0)
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("norm", ["bn", "gn", "frn"])
def test_bfloat16_activations_and_float32_weights(tiny, norm, device):
    trained = fleet(tiny, [0], norm, Engine(device, precision="bfloat16"))
    seen = []
    for block in trained.trainees[0].model.layer2:
        block.bn1.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    trained.train_epoch(0)
    assert set(seen) == {torch.bfloat16}
    assert {value.dtype for value in trained.trainees[0].state().values()} == {torch.float32}


def test_plain_descent_needs_no_momentum(tiny):
    trained = fleet(tiny, [0], recipe=replace(RECIPE, momentum=0.0))
    trained.train_epoch(0)
    assert not any(v.any() for k, v in trained.trainees[0].state().items() if k.startswith("momentum/"))


def test_too_few_images_for_a_batch_are_refused(tiny):
    with pytest.raises(ValueError, match="37 training images are fewer than a batch of 64"):
        fleet(tiny, [0], recipe=replace(RECIPE, batch=64))


def test_graphs_without_cuda_and_unknown_modes_are_refused():
    with pytest.raises(ValueError, match="CUDA graphs need a CUDA device, not 'cpu'"):
        Engine(graphs=True)
    with pytest.raises(ValueError, match="known: none, default"):
        Engine(compile="fast")


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["bn", "gn", "frn"])
def test_graphs_on_streams_train_what_eager_steps_train(tiny, norm):
    engine = Engine("cuda", graphs=True)
    graphs, eager = (
        fleet(tiny, [0, 1], norm, engine),
        fleet(tiny, [0, 1], norm, replace(engine, graphs=False)),
    )
    for epoch in range(2):
        for a, b in zip(graphs.train_epoch(epoch), eager.train_epoch(epoch), strict=True):
            assert a == pytest.approx(b, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:[\\s\\S]*Online softmax is disabled")  # the compiler, on so tiny a model
@pytest.mark.parametrize("norm", ["bn", "gn", "frn"])
def test_the_fastest_engine_repeats_itself_bit_for_bit(tiny, norm):
    first, second = (fleet(tiny, [0, 1], norm, default_engine("cuda")) for _ in range(2))
    for epoch in range(2):
        assert first.train_epoch(epoch) == second.train_epoch(epoch)
    for a, b in zip(first.trainees, second.trainees, strict=True):
        for key, value in a.state().items():
            assert torch.equal(value, b.state()[key]), key
