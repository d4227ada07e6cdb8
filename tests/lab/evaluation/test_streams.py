"""Streams: orders that are what they are called."""

from __future__ import annotations

import pytest
import torch

from trueup_lab.evaluation.streams import STREAMS, order

LABELS = torch.arange(200) % 7


@pytest.mark.parametrize("stream", STREAMS)
def test_every_image_arrives_once_in_an_order_of_the_seed(stream):
    assert order(stream, LABELS).sort().values.equal(torch.arange(200))
    assert order(stream, LABELS).equal(order(stream, LABELS))
    assert not order(stream, LABELS, seed=1).equal(order(stream, LABELS))


def test_sorted_is_sorted_by_class_and_random_within():
    arriving = order("sorted", LABELS)
    assert (LABELS[arriving].diff() >= 0).all()
    first = arriving[: int((LABELS == 0).sum())]
    assert not first.sort().values.equal(first)


def test_others_are_not_sorted_even_where_the_set_is():
    labels = LABELS.sort().values  # as in a folder of ImageNet's
    batch = labels[order("corruption", labels)][:50]
    assert len(batch.unique()) == 7


def test_an_unknown_stream_is_refused():
    with pytest.raises(ValueError, match="unknown stream 'shuffled'; known: single, corruption, mixed, sorted"):
        order("shuffled", LABELS)
