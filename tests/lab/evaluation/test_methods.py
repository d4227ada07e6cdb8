"""Methods: each against an oracle of its own, and none leaves a trace on the model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trueup
from trueup_lab.evaluation import BatchStatistics, Correct, CorrectMixed, Mixed, Needs, Tent, Uncorrected, parse_method
from trueup_lab.evaluation.methods import METHODS, Forgetful, Realign, as_method

from .conftest import small_network

ALL = [Uncorrected(), Correct(), Realign(), BatchStatistics(), Mixed(), CorrectMixed(), Tent(), Tent(continual=True)]
names = {"ids": lambda method: method.name}


def state_of(model):
    tensors = {k: v.clone() for k, v in model.state_dict().items()}
    return tensors, [(p.grad, p.requires_grad) for p in model.parameters()], [m.training for m in model.modules()]


@pytest.mark.parametrize("method", ALL, **names)
@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_untouched(method, training, network, inputs, targets):
    network.train(training)
    before = state_of(network)
    prepared = method.prepare(network, targets)
    for _ in range(2):
        prepared(inputs)
    after = state_of(network)
    assert all(before[0][key].equal(after[0][key]) for key in before[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize("method", [m for m in ALL if m.needs.stateless], **names)
def test_a_stateless_method_treats_each_image_on_its_own(method, network, inputs, targets):
    prepared = method.prepare(network, targets)
    together, alone = prepared(inputs), torch.cat([prepared(x[None]) for x in inputs])
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("method", [m for m in ALL if not m.needs.stateless], **names)
def test_a_method_that_needs_a_batch_depends_on_it(method, network, inputs, targets):
    prepared = method.prepare(network, targets)
    together = prepared(inputs)
    alone = torch.cat([method.prepare(network, targets)(x[None]) for x in inputs])
    assert (together - alone).abs().max() > 1e-3


def test_needs_are_told_truly():
    assert [m.needs.memory for m in ALL] == [isinstance(m, Tent) for m in ALL]
    assert str(Tent().needs) == "batch norm, batch, gradients, memory"
    assert str(Mixed().needs) == "batch norm"


def test_batch_statistics_are_those_of_training(network, inputs):
    """The oracle is torch's own training mode."""
    reference = copy.deepcopy(network).train()
    torch.testing.assert_close(BatchStatistics().prepare(network, None)(inputs), reference(inputs))


def test_mixing_with_no_prior_is_training_on_one_image(network, inputs):
    reference = copy.deepcopy(network).train()
    mixed = Mixed(prior=0).prepare(network, None)(inputs)
    for image, logits in zip(inputs, mixed, strict=True):
        torch.testing.assert_close(reference(image[None])[0], logits)


def test_mixing_with_an_endless_prior_is_the_model(network, inputs):
    torch.testing.assert_close(Mixed(prior=1e9).prepare(network, None)(inputs), network(inputs))


@pytest.mark.parametrize("prior", [0.5, 8, 16])
def test_mixing_follows_the_formula(prior):
    """Schneider et al. (2020), equation 1 with n = 1, for one image and one channel, by hand."""
    norm = nn.BatchNorm2d(1, eps=0.0)
    norm.running_mean.fill_(2.0)
    norm.running_var.fill_(9.0)
    nn.init.constant_(norm.weight, 3.0)
    nn.init.constant_(norm.bias, -1.0)
    image = torch.tensor([[[[0.0, 2.0], [4.0, 10.0]]]])  # mean 4, variance 14
    mean = (prior * 2 + 4) / (prior + 1)
    var = (prior * 9 + 14) / (prior + 1)
    wanted = 3 * (image - mean) / var**0.5 - 1
    mixed = Mixed(prior).prepare(nn.Sequential(norm), None)(image)
    torch.testing.assert_close(mixed, wanted)


def test_a_norm_without_scales_and_one_used_twice_are_mixed(inputs):
    norm = nn.BatchNorm2d(1, affine=False)
    twice = nn.Sequential(norm, nn.ReLU(), norm).eval()
    prepared = Mixed(0).prepare(twice, None)
    torch.testing.assert_close(prepared(inputs[:1]), copy.deepcopy(twice).train()(inputs[:1]))


def test_correction_on_mixed_norms_is_both(network, inputs, targets):
    full = trueup.Correction(lambda1=1.0, lambda2=0.0, location="match")
    method = CorrectMixed(lambda1=1.0, lambda2=0.0, location="match", prior=3)
    both = method.prepare(network, targets)
    mixed = Mixed(3).prepare(network, None)
    torch.testing.assert_close(both(inputs), trueup.correct(mixed, targets, full)(inputs))
    assert (both(inputs) - mixed(inputs)).abs().max() > 1e-3
    still = CorrectMixed(lambda1=0.0, lambda2=0.0, prior=3).prepare(network, targets)
    torch.testing.assert_close(still(inputs), mixed(inputs))


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_tent_is_the_textbook_loop(optimiser, inputs):
    """The oracle: the model in training mode, everything frozen but scales and shifts, backward() and step()."""
    model = small_network()
    learner = Tent(rate=0.01, optimiser=optimiser).prepare(model, None)
    reference = copy.deepcopy(model).train().requires_grad_(False)
    trained = []
    for module in reference.modules():
        if isinstance(module, nn.BatchNorm2d):
            trained += [module.weight.requires_grad_(True), module.bias.requires_grad_(True)]
    kinds = {"adam": lambda p: torch.optim.Adam(p, lr=0.01), "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9)}
    descent = kinds[optimiser](trained)
    for part in [inputs[:6], inputs[6:], inputs[3:9]]:
        logits = reference(part)
        p = F.softmax(logits, dim=1)
        descent.zero_grad()
        (-(p * p.log()).sum(dim=1).mean()).backward()
        descent.step()
        torch.testing.assert_close(learner(part), logits.detach())


def test_a_norm_used_twice_is_trained_as_one(inputs):
    norm = nn.BatchNorm2d(1)
    model = nn.Sequential(norm, nn.ReLU(), norm, nn.Flatten()).eval()
    learner = Tent().prepare(model, None)
    assert len(learner.trained) == 2  # a scale and a shift
    learner(inputs)
    assert learner.network[0] is learner.network[2]


def test_tent_forgets_when_reset(inputs):
    learner = Tent(rate=0.05).prepare(small_network(), None)
    assert isinstance(learner, Forgetful)
    first = [learner(part) for part in inputs.split(4)]
    assert (learner(inputs[:4]) - first[0]).abs().max() > 1e-3  # it had learned
    learner.reset()
    again = [learner(part) for part in inputs.split(4)]
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("method", [BatchStatistics(), Mixed(), CorrectMixed(), Tent()], **names)
def test_a_model_without_batch_norm_is_refused(method):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.ReLU())
    targets = trueup.calibrate(model, [torch.rand(2, 1, 8, 8)], decide=False)
    with pytest.raises(ValueError, match="Sequential has no batch norm"):
        method.prepare(model, targets)


def test_evidence_is_that_of_the_library(network, inputs, targets):
    wanted = trueup.correct(network, targets, trueup.Evidence(budget=0.5))(inputs + 2)
    assert Realign(budget=0.5).prepare(network, targets)(inputs + 2).equal(wanted)
    assert (wanted - network(inputs + 2)).abs().max() > 1e-3


def test_a_correction_without_targets_is_refused(network):
    with pytest.raises(ValueError, match="correct needs targets.*trueup.calibrate"):
        Correct().prepare(network, None)


@pytest.mark.parametrize(
    "text",
    [
        *METHODS,
        "correct:lambda1=1.0,lambda2=0.2",
        "correct+bn-mix:location=match,prior=16",
        "tent:continual=True",
        "evidence:budget=0.05,strength=0.02,base=0.05,least=0.0,bands=False",
    ],
)
def test_a_name_is_what_it_is_parsed_from(text):
    assert parse_method(text).name == text


def test_one_method_has_one_name():
    assert parse_method("evidence:budget=0.01,base=0.08").name == "evidence"
    assert Realign(strength=1).name == parse_method("evidence:strength=1").name == "evidence:strength=1.0"
    assert parse_method("evidence:budget=0.02,least=0").name == "evidence:budget=0.02,least=0.0"
    assert Mixed(16.0).name == Mixed(16).name == parse_method("bn-mix:prior=16.0").name
    assert Correct(lambda1=1, lambda2=0.2).name == Correct(lambda1=1.0, lambda2=0.2).name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mean", "no method 'mean'; known: uncorrected, default, correct"),
        ("bn-mix:weight=3", "bn-mix has no option 'weight'; it has prior"),
        ("bn-mix:prior=many", "prior='many': expected a number"),
        ("bn-mix:prior=-1", "0 or more"),
        ("tent:continual=perhaps", "True or False"),
        ("tent:optimiser=lbfgs", "adam, sgd"),
        ("tent:rate=0", "above 0"),
        ("correct:lambda1=2", "between 0 and 1"),
        ("evidence:budget=2", "between 0 and 1"),
        ("trueup.nowhere:METHOD", "No module named"),
    ],
)
def test_nonsense_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_method(text)


def test_a_function_and_a_class_of_ones_own_are_methods(network, inputs):
    @as_method("twice", needs=Needs(batch=True))
    def twice(model, _targets):
        return lambda x: 2 * model(x)

    assert not twice.needs.stateless
    assert twice.prepare(network, None)(inputs).equal(2 * network(inputs))
    assert parse_method("trueup_lab.evaluation.methods:Tent") == Tent()  # anything that can be imported
