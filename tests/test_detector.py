"""A detector as torchvision has them: a list of pictures in, per picture a dictionary with any number of boxes out."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trueup

KINDS = 3
COLOURS = torch.tensor([[0.9, 0.2, 0.2], [0.2, 0.8, 0.3], [0.2, 0.3, 0.9]])


class Detector(nn.Module):
    """A backbone, a head that scores cells of 4 x 4 pixels, and boxes around the cells that are surely something."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv3, self.bn3 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Conv2d(16, 1 + KINDS, 1)

    def scores(self, pictures: list[Tensor]) -> Tensor:
        height, width = (max(p.shape[k] for p in pictures) for k in (1, 2))
        x = torch.stack([F.pad(p, (0, width - p.shape[2], 0, height - p.shape[1])) for p in pictures])
        x = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu()
        return self.head(self.bn3(self.conv3(x)).relu())

    def forward(self, pictures: list[Tensor], targets: object = None) -> list[dict[str, Tensor]]:
        found = []
        for p in self.scores(pictures).softmax(1):
            score, label = p.max(dim=0)
            rows, columns = torch.nonzero((label > 0) & (score > 0.6), as_tuple=True)
            order = score[rows, columns].argsort(descending=True)
            rows, columns = rows[order], columns[order]
            boxes = 4 * torch.stack([columns, rows, columns + 1, rows + 1], dim=1).float()
            found.append({"boxes": boxes, "labels": label[rows, columns], "scores": score[rows, columns]})
        return found


def pictures(count: int, seed: int, size: tuple[int, int] = (32, 40)) -> tuple[list[Tensor], Tensor]:
    """Grey pictures with one to three coloured squares, and the kind of each cell (0 for none)."""
    draw = torch.Generator().manual_seed(seed)
    height, width = size
    kinds = torch.zeros(count, height // 4, width // 4, dtype=torch.long)
    colours = torch.full((count, 3, height, width), 0.45)
    for k in range(count):
        for _ in range(int(torch.randint(1, 4, (), generator=draw))):
            kind = int(torch.randint(KINDS, (), generator=draw))
            row, column = (int(torch.randint(side // 4 - 1, (), generator=draw)) for side in size)
            kinds[k, row : row + 2, column : column + 2] = 1 + kind
            there = (..., slice(4 * row, 4 * row + 8), slice(4 * column, 4 * column + 8))
            colours[k][there] = COLOURS[kind][:, None, None]
    return list((colours + 0.04 * torch.randn(colours.shape, generator=draw) - 0.5) / 0.25), kinds


def kinds_seen(found: list[dict[str, Tensor]]) -> Tensor:
    """A number for the set of kinds seen in each picture: the answer to be compared, as docs/any-model.md has it."""
    return torch.tensor([hash(frozenset(each["labels"][each["scores"] > 0.5].tolist())) for each in found])


def right(model: nn.Module, shown: list[Tensor], kinds: Tensor) -> float:
    """Share of pictures in which exactly the kinds that are there were seen."""
    truth = torch.tensor([hash(frozenset(some[some > 0].tolist())) for some in kinds])
    with torch.inference_mode():
        return float((kinds_seen(model(shown)) == truth).double().mean())


@pytest.fixture(scope="module")
def trained() -> Detector:
    torch.manual_seed(0)
    model, (shown, kinds) = Detector().train(), pictures(96, 0)
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(60):
        some = slice(24 * (step % 4), 24 * (step % 4) + 24)
        loss = F.cross_entropy(model.scores(shown[some]), kinds[some])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


@pytest.fixture(scope="module")
def loader() -> list[tuple[list[Tensor], list[dict[str, Tensor]]]]:
    """Pictures of two shapes, 64 in all, in batches as a detection loader has them."""
    shown = [p for pair in zip(pictures(32, 1)[0], pictures(32, 2, (40, 32))[0], strict=True) for p in pair]
    return [(shown[k : k + 16], [{}] * 16) for k in range(0, 64, 16)]


@pytest.fixture(scope="module")
def targets(trained, loader):
    return trueup.calibrate(trained, loader, answer=kinds_seen)


def test_calibration_decides_by_the_answer_that_it_is_given_and_helps(trained, targets):
    """Any number of boxes may be found, and a shift that was not shown fools the detector less."""
    assert targets.decision.trials[0].images == 64
    assert targets.rule.changes
    robust = trueup.correct(trained, targets)
    clean, kinds = pictures(200, 7)
    assert right(robust, clean, kinds) > right(trained, clean, kinds) - 0.03
    foggy = [0.5 * p + 0.5 for p in clean]
    assert right(robust, foggy, kinds) > right(trained, foggy, kinds) + 0.2


def test_what_comes_out_has_the_form_of_the_models(trained, targets):
    shown = [*pictures(2, 3)[0], *pictures(1, 4, (40, 32))[0]]
    with torch.inference_mode():
        found, plain = trueup.correct(trained, targets)(shown), trained(shown)
        still = trueup.correct(trained, targets, trueup.Evidence(strength=0, base=0))(shown)
    assert [sorted(each) for each in found] == [["boxes", "labels", "scores"]] * 3
    assert all(len(each["boxes"]) == len(each["labels"]) == len(each["scores"]) for each in found)
    assert all(a[key].equal(b[key]) for a, b in zip(still, plain, strict=True) for key in a)


def test_the_report_does_not_claim_that_scores_of_boxes_were_compared(targets):
    assert "clean scores: the outputs hold none that could be compared" in str(targets)
    assert all(trial.moved == 0 for trial in targets.decision.trials)


def test_with_many_pictures_fixed_settings_are_tried_without_a_warning(trained):
    """Boxes cannot be compared number by number, so there is nothing to learn weights from."""
    shown, _ = pictures(120, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        targets = trueup.calibrate(trained, [shown[:60], shown[60:]], answer=kinds_seen)
    assert all(norm.weights is None for norm in targets.norms.values())
    assert targets.rule.changes


def test_choose_takes_the_same_answer(trained, targets):
    shown, _ = pictures(60, 6)
    rule = trueup.Evidence(budget=1.0, strength=0.9, base=0.9)
    chosen = trueup.choose(trained, targets, [shown[:30], shown[30:]], 0.05, rule, answer=kinds_seen)
    assert 0 < chosen.strength < rule.strength
    with pytest.raises(ValueError, match="answer=lambda output"):
        trueup.choose(trained, targets, [shown[:30], shown[30:]], 0.05, rule)


class Rows(Detector):
    """A list of tensors `(boxes, 6)`, as some detectors return."""

    def forward(self, pictures: list[Tensor]) -> list[Tensor]:
        return [
            torch.cat([each["boxes"], each["scores"][:, None], each["labels"][:, None].float()], dim=1)
            for each in super().forward(pictures)
        ]


@pytest.mark.parametrize("kind", [Detector, Rows])
def test_without_an_answer_nothing_is_decided_and_the_reason_says_what_to_give(trained, loader, kind):
    model = kind()
    model.load_state_dict(trained.state_dict())
    with pytest.warns(UserWarning, match="the model's output is a list, not scores.*answer=lambda output"):
        found = trueup.calibrate(model.eval(), [shown for shown, _ in loader])
    assert not found.decision.trials
    assert not found.rule.changes


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda found: [each["labels"] for each in found], "answer= returned list for 16 images"),
        (lambda found: found[0]["labels"], r"answer= returned torch.int64 of shape \(.*\) for 16 images"),
        (lambda found: torch.stack([each["scores"].sum() for each in found]), "answer= returned torch.float32"),
    ],
    ids=["list", "boxes of the first", "numbers that are not whole"],
)
def test_an_answer_that_is_no_tensor_of_whole_numbers_per_picture_is_refused(trained, loader, answer, said):
    with pytest.raises(TypeError, match=said):
        trueup.calibrate(trained, [shown for shown, _ in loader], answer=answer)
