"""Calibration and `choose` under torchrun: every rank gets the result of all ranks' images."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trueup
from architectures import images, make

SCRIPT = """
import sys, torch
from torch import distributed
from architectures import images, make
from test_distributed import STRONG, rounded
import trueup

distributed.init_process_group("gloo")
rank, compact, new = distributed.get_rank(), make("compact"), images(60, seed=5)
shards = {"half": images(24)[rank::2], "idle": images(24)[: 24 * (rank == 0)]}
unseen = {"half": new[:10] if rank else new[10:], "idle": new[: 60 * (rank == 0)]}
for share in shards:
    targets = trueup.calibrate(compact, shards[share].split(5), decide=False)
    targets.save(f"{sys.argv[1]}/{share}{rank}.safetensors")
    rule = trueup.choose(compact, targets, unseen[share].split(7), 0.2, STRONG, answer=rounded)
    open(f"{sys.argv[1]}/{share}{rank}.rule", "w").write(repr(rule))
distributed.destroy_process_group()
"""
STRONG = trueup.Evidence(budget=1, strength=0.9, base=0.9)


def rounded(output):
    """An answer that changes more often than the most likely class of a network that was never trained."""
    return (50 * output[:, 0]).round()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Results of two processes: with half of the images each, and with one that has none."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    source = Path(trueup.__file__).parents[1]
    subprocess.run(
        [*torchrun, str(folder / "script.py"), str(folder)],
        check=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{source}", "OMP_NUM_THREADS": "1"},
    )
    return folder


@pytest.mark.parametrize("share", ["half", "idle"], ids=["half each", "one rank without data"])
def test_two_processes_calibrate_and_choose_as_one_does(ranks, share):
    model = make("compact")
    whole, new = trueup.calibrate(model, [images(24)], decide=False), images(60, seed=5)

    def chosen(few):
        return trueup.choose(model, whole, [few], 0.2, STRONG, answer=rounded)

    assert len({chosen(new), chosen(new[:10]), chosen(new[10:])}) > 1
    for rank in (0, 1):
        merged = trueup.Targets.load(ranks / f"{share}{rank}.safetensors")
        assert merged.images == 24
        assert merged.sampled.equal(whole.sampled)
        for name, site in whole.activations.items():
            torch.testing.assert_close(merged.activations[name].target, site.target, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(merged.activations[name].sample, site.sample, atol=1e-5, rtol=1e-5)
        for name, site in whole.norms.items():
            torch.testing.assert_close(merged.norms[name].total, site.total, atol=1e-4, rtol=1e-4)
        assert (ranks / f"{share}{rank}.rule").read_text() == repr(chosen(new))
    assert trueup.Targets.load(ranks / f"{share}0.safetensors") == trueup.Targets.load(ranks / f"{share}1.safetensors")
