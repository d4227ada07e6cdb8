"""Every error of a command is one sentence: what, where, and the way out."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import trueup
from trueup.cli import prepare_process
from trueup.monitor.binomial import share_of
from trueup_lab.data import digits
from trueup_lab.data.sets import SETS, ImageSet
from trueup_lab.evaluation import read_rows
from trueup_lab.models import zoo
from trueup_lab.tables import append_rows

MODEL = zoo.FOLDER / "resnet20-bn-digits.safetensors"
QUICK = ("--images", 12, "--calibrate", 30, "--corruption", "fog", "--method", "uncorrected")


def words(result):
    """The output on one line, without boxes around it."""
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture
def few_digits(monkeypatch):
    few = ImageSet("digits", lambda split, _: digits.load(split).first(16), image_channels=1)
    monkeypatch.setitem(SETS, "digits", few)


TRAIN = ("train", "--set", "digits", "--device", "cpu", "--epochs", 1, "--batch", 8)
EVALUATE = ("evaluate", "resnet20-bn-digits", *QUICK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "alexnet", "--device", "cpu"), "like alexnet; names are made of ResNet-50, batch 64, bfloat16,"),
        ((*TRAIN, "--precision", "fp16"), "precision='fp16': expected one of bfloat16, float32"),
        ((*TRAIN, "--epochs", 0), "--epochs"),
        ((*TRAIN, "--epochs", -1), "--epochs"),
        ((*TRAIN, "--batch", 0), "--batch"),
        ((*TRAIN, "--rate", "nan"), "rate=nan: expected a number above 0"),
        ((*TRAIN, "--rate", "inf"), "rate=inf: expected a number above 0"),
        ((*TRAIN, "--momentum", 1), "momentum=1.0: expected 0 or more, and less than 1"),
        ((*TRAIN, "--weight-decay", -1), "weight_decay=-1.0: expected 0 or more"),
        ((*TRAIN, "--warmup-epochs", 2), "warmup_epochs=2: expected 0 to 1"),
        ((*TRAIN, "--time-limit", "nan"), "--time-limit"),
        ((*TRAIN, "--checkpoint-every", 0), "--checkpoint-every"),
        ((*TRAIN, "--test-every", 0), "--test-every"),
        ((*TRAIN, "--shortcut", "none"), "unknown shortcut 'none'"),
        ((*TRAIN, "--groups", 4), "--groups 4 is for group norm, and this model has bn"),
        ((*TRAIN, "--norm", "gn", "--groups", 3), "divisible"),
        ((*TRAIN, "--image-size", 64), "--image-size has no effect here: digits is read at once"),
        ((*TRAIN, "--workers", 2), "--workers has no effect here"),
        ((*TRAIN, "--streams", 2), "streams and autotune need a CUDA device"),
        ((*TRAIN, "--combo"), "combo needs a compiler"),
        ((*TRAIN, "--seeds", "5-2"), "seeds='5-2': expected seeds such as 0-9"),
        ((*TRAIN, "--device", "gpu"), "device='gpu': expected cpu, cuda or cuda:1"),
        ((*TRAIN, "--device", "meta"), "device='meta' does not work here"),
        (("train", "--set", "imagenet", "--compile", "none"), "--compile has no effect here: ImageNet is trained in"),
        (("train", "--set", "imagenet", "--seeds", "0-3"), "one model at a time"),
        ((*EVALUATE, "--origin", "publishd"), "origin='publishd': expected one of published, generated"),
        ((*EVALUATE, "--seeds", "5-2"), "seeds='5-2'"),
        ((*EVALUATE, "--severity", 3), "--severity has no effect on MNIST-C"),
        ((*EVALUATE, "--batch", 0), "--batch"),
        ((*EVALUATE, "--device", "gpu"), "device='gpu': expected cpu, cuda or cuda:1"),
        ((*EVALUATE, "--device", "cuda:77"), "device='cuda:77'"),
        ((*EVALUATE, "--time-limit", "nan"), "--time-limit"),
        ((*EVALUATE, "--method", "os:getcwd"), "'os:getcwd' is not a method but builtin_function_or_method"),
        ((*EVALUATE, "--method", "no.such:THING"), "no method 'no.such:THING': ModuleNotFoundError"),
        (("evaluate", "resnet20-gn-mnist", "--method", "bn-mix"), "nothing to measure: resnet20-gn-mnist has"),
        (("data", "make", "mnist-c", "--severity", 2), "--severity is for imagenet-c"),
        (("data", "make", "mnist-c", "--device", "gpu"), "device='gpu'"),
        (("data", "show", "mnist-c", "--first", 99, "--data", "{root}"), "the set has 12 images"),
        (("export", "somewhere"), "nothing to write: give --models, --zoo or --table"),
        (("export", "somewhere", "--table", "t.csv", "--seed", 3), "--seed 3 chooses the model for --zoo"),
        (("export", "somewhere", "--table", "t.csv"), "no training run at somewhere"),
        (("bench", "--device", "gpu"), "device='gpu'"),
        (("targets", "nowhere"), "no targets at nowhere"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_in_a_sentence(call, few_digits, small_root, tmp_path, arguments, message):
    arguments = [str(each).format(root=small_root) for each in arguments]
    out = {"train": tmp_path / "runs", "evaluate": tmp_path / "rows.csv"}.get(arguments[0])
    result = call(*arguments, *(() if out is None else ("--out", out)))
    assert result.exit_code == 2, result.output
    assert message in words(result)
    assert "Traceback" not in result.output
    assert out is None or not out.exists()


def damage(path, how):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if how == "cut" else bytes(100) + content[100:])


@pytest.mark.parametrize("how", ["cut", "other"])
def test_damaged_files_are_named(call, few_digits, small_root, tmp_path, how):
    out = ("--out", tmp_path / "rows.csv")
    shutil.copy(MODEL, tmp_path / "model.safetensors")
    damage(tmp_path / "model.safetensors", how)
    result = call("evaluate", tmp_path / "model.safetensors", *QUICK, *out)
    assert result.exit_code == 2
    assert "model.safetensors is not a safetensors file, or is damaged or cut short" in words(result)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "model.pth")
    assert "safetensors.torch.save_file" in words(call("evaluate", tmp_path / "model.pth", *QUICK, *out))

    assert call(*TRAIN, "--out", tmp_path).exit_code == 0
    damage(tmp_path / "digits-bn" / "checkpoint.safetensors", how)
    for again in ((*TRAIN, "--out", tmp_path), ("export", tmp_path / "digits-bn", "--models", tmp_path)):
        result = call(*again)
        assert result.exit_code == 2
        assert "checkpoint.safetensors is not a safetensors file, or is damaged" in words(result)

    damage(small_root / "cifar-10-batches-py" / "test_batch", how)
    result = call("data", "make", "cifar10-c", "--data", small_root, "--only", "fog")
    assert result.exit_code == 2
    assert "test_batch is damaged" in words(result)


def test_a_place_that_cannot_be_written_is_named_before_the_work(call, few_digits, small_root, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setattr("trueup_lab.training.run.Fleet", lambda *_: pytest.fail("work began"))
    monkeypatch.setattr("trueup_lab.demo.run", lambda *_, **__: pytest.fail("work began"))
    monkeypatch.setattr("trueup_lab.evaluation.runner.Workbench", lambda *_: pytest.fail("work began"))
    for arguments in (
        (*TRAIN, "--out", blocked),
        (*EVALUATE, "--out", blocked / "rows.csv"),
        ("demo", "--out", blocked),
        ("data", "get", "mnist", "--data", blocked),
        ("data", "make", "mnist-c", "--data", blocked),
        ("data", "show", "mnist-c", "--count", 1, "--data", small_root, "--out", blocked / "a.png"),
    ):
        result = call(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert words(result).startswith("error: "), result.output
        assert str(blocked) in words(result)
        assert "Traceback" not in result.output


def test_a_missing_extra_is_reported_before_the_work(call, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = call("demo", "--out", tmp_path)
    assert result.exit_code == 2
    assert "error: figures need matplotlib: pip install 'trueup-lab[figures]'" in words(result)


def test_a_fault_of_ours_is_called_so_and_debug_shows_where(call, tmp_path, monkeypatch):
    monkeypatch.setattr("trueup_lab.demo.run", lambda *_, **__: 1 / 0)
    result = call("demo", "--out", tmp_path)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)  # and no traceback
    assert "this should not happen (ZeroDivisionError: division by zero, test_faults.py:" in words(result)
    assert "--debug" in words(result)
    for debugging in (lambda: call("demo", "--out", tmp_path, "--debug"), lambda: call("--debug", "demo")):
        assert isinstance(debugging().exception, ZeroDivisionError)
    monkeypatch.setenv("TRUEUP_DEBUG", "1")
    assert isinstance(call("demo", "--out", tmp_path).exception, ZeroDivisionError)


def refuse_to_trace(*_, **__):
    raise trueup.TraceError("Router cannot be traced")


@pytest.mark.parametrize(
    ("work", "status", "message"),
    [
        (refuse_to_trace, 2, "error: Router cannot be traced"),
        (lambda *_, **__: trueup.calibrate("resnet", []), 2, "error: the model is a str: expected a torch.nn.Module"),
        # An operation inside the library that fails, rather than a refusal of it.
        (lambda *_, **__: share_of("1", 2), 1, "error: this should not happen (TypeError"),
    ],
    ids=["TraceError", "refusal", "operation"],
)
def test_what_the_library_refuses_is_no_fault_of_ours(call, tmp_path, monkeypatch, work, status, message):
    monkeypatch.setattr("trueup_lab.demo.run", work)
    result = call("demo", "--out", tmp_path)
    assert result.exit_code == status
    assert words(result).startswith(message), result.output
    assert not isinstance(call("demo", "--out", tmp_path, "--debug").exception, SystemExit)


def test_the_table_is_that_of_this_command(call, tmp_path):
    """Other corruptions, image counts and versions that are in the same file are no part of it."""
    where = ("--out", tmp_path / "rows.csv", "--targets", tmp_path)
    first = call(*EVALUATE, *where)
    assert "1 rows of this command" in words(first)
    call("evaluate", "resnet20-bn-digits", "--images", 60, "--corruption", "zigzag", "--method", "uncorrected", *where)
    (row,) = (row for row in read_rows(tmp_path / "rows.csv") if row.images == 12)
    strange = [
        replace(row, images=11, accuracy=0.0),
        replace(row, data_seed=5, accuracy=0.0),
        replace(row, accuracy=1.0),
    ]
    append_rows(tmp_path / "rows.csv", strange)
    again = call(*EVALUATE, *where)
    tables = ["\n".join(run.output.partition("resnet20-bn-digits, 1 model")[2].splitlines()) for run in (first, again)]
    assert tables[0] == tables[1]


def test_rows_of_another_version_are_called_so(call, tmp_path):
    where = ("--out", tmp_path / "rows.csv", "--targets", tmp_path)
    assert "were measured by trueup" not in call(*EVALUATE, *where).output
    path = tmp_path / "rows.csv"
    path.write_text(path.read_text().replace(f",{trueup.__version__},", ",0.0.9,"))
    assert read_rows(path)[0].trueup == "0.0.9"
    said = words(call(*EVALUATE, *where))
    assert f"1 of these 1 rows were measured by trueup 0.0.9, not by {trueup.__version__}; another --out" in said


def test_methods_that_were_left_out_are_named(call, tmp_path, monkeypatch):
    monkeypatch.setattr("trueup_lab.evaluation.subjects.has_batch_norm", lambda _: False)
    where = ("--out", tmp_path / "rows.csv", "--targets", tmp_path)
    result = call(*EVALUATE, "--method", "bn-mix", "--method", "bn-batch", *where)
    assert result.exit_code == 0, result.output
    assert "resnet20-bn-digits has no batch norm, so these were left out: bn-mix, bn-batch" in words(result)


def test_two_runs_that_share_a_file_do_not_double_its_rows(call, tmp_path, monkeypatch):
    """The other run adds the same row after this one has looked which are missing."""
    other = tmp_path / "other.csv"
    call(*EVALUATE, "--out", other, "--targets", tmp_path)
    path, seen = tmp_path / "rows.csv", []

    def meanwhile(out, rows, **options):
        if not seen:
            seen.append(append_rows(out, read_rows(other)))
        return append_rows(out, rows, **options)

    monkeypatch.setattr("trueup_lab.evaluation.runner.append_rows", meanwhile)
    assert call(*EVALUATE, "--out", path, "--targets", tmp_path).exit_code == 0
    assert len(seen) == 1
    assert [row.key for row in read_rows(path)] == [row.key for row in read_rows(other)]


def test_a_second_training_in_the_same_folder_is_refused(call, few_digits, tmp_path):
    from trueup_lab.locks import locked

    with locked(tmp_path / "digits-bn" / "checkpoint.safetensors"):
        result = call(*TRAIN, "--out", tmp_path)
    assert result.exit_code == 2
    assert "another process is writing" in words(result)


def test_a_time_limit_binds_the_first_epoch(call, few_digits, tmp_path):
    result = call(*TRAIN, "--time-limit", 0, "--out", tmp_path / "runs")
    assert result.exit_code == 2
    assert "the time limit of 0 s ended epoch 1 after 1 of 2 steps" in words(result)


def test_a_time_limit_binds_the_calibration(call, tmp_path, monkeypatch):
    """The limit passes after the first batch: no piece of work is asked about then, only the time."""
    monkeypatch.setattr("trueup_lab.evaluation.clock.Clock.stops", lambda _, *pieces: not pieces)
    calibrating = [each if each != "uncorrected" else "correct" for each in EVALUATE]
    calibrating[calibrating.index("--calibrate") + 1] = 1400
    where = ("--out", tmp_path / "rows.csv", "--targets", tmp_path)
    result = call(*calibrating, *where, "--time-limit", 60)
    assert result.exit_code == 2
    assert "the time limit of 60 s ended the calibration of resnet20-bn-digits after" in words(result)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_run_off_a_terminal_gives_a_sign_of_life_before_the_first_pass(call, tmp_path):
    where = ("--out", tmp_path / "rows.csv", "--targets", tmp_path)
    assert "0/1 1 passes to do, over 12 images in all" in words(call(*EVALUATE, *where))


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        (("evaluate",), ["uncorrected, default, correct, evidence, bn-mix, bn-batch"]),
        (("data", "make"), ["may be repeated (default: all)", "cuda if available"]),
        (("data", "show"), ["NAME.png"]),
        ((), ["--version", "--debug"]),
    ],
)
def test_help_does_not_lose_text_to_markup(call, command, texts):
    shown = words(call(*command, "--help"))
    assert [text for text in texts if text not in shown] == []


def environment(**more):
    sources = os.pathsep.join(str(Path(__file__).parents[3] / part) for part in ("src", "lab/src"))
    return {**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1", **more}


def test_help_and_version_do_not_import_torch():
    """Importing torch takes seconds, more than everything else together."""
    code = """
import sys
sys.modules |= dict.fromkeys(["torch", "numpy", "safetensors", "matplotlib", "PIL", "sklearn", "numba"])
from trueup.cli import application, prepare_process
from trueup_lab.cli import add_commands
prepare_process()
app = application()
add_commands(app)
app(sys.argv[1:])
"""
    for arguments in (["--help"], ["evaluate", "--help"], ["--version"]):
        run = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            # A terminal of another system: an encoding without λ.
            env=environment(PYTHONIOENCODING="cp1252"),
            check=False,
        )
        assert run.returncode == 0, run.stderr
    assert run.stdout.decode().split() == ["trueup", trueup.__version__]


def test_waiting_threads_sleep_unless_the_user_says_otherwise(monkeypatch):
    """Spinning threads take busy cores from the thread that they wait for."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    prepare_process()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    prepare_process()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_nothing_depends_on_the_systems_encoding(tmp_path):
    """Python warns where a text file is opened without an encoding; here that is an error."""
    code = ["-X", "warn_default_encoding", "-W", "error::EncodingWarning", "-m", "trueup_lab"]
    out = tmp_path / "rows.csv"
    command = [str(each) for each in (*EVALUATE, "--out", out, "--targets", tmp_path)]
    run = subprocess.run([sys.executable, *code, *command], capture_output=True, env=environment(), check=False)
    assert run.returncode == 0, run.stderr
    assert len(read_rows(out)) == 1


TRAINING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
from trueup.cli import application
from trueup_lab.cli import add_commands
from trueup_lab.data import digits
from trueup_lab.data.sets import SETS, ImageSet
SETS["digits"] = ImageSet("digits", lambda split, _: digits.load(split).first(16), image_channels=1)
app = application()
add_commands(app)
app(["train", "--set", "digits", "--device", "cpu", "--epochs", "5000", "--batch", "8", "--out", sys.argv[1]])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_after_an_interruption_a_command_says_that_it_continues(tmp_path):
    run = subprocess.Popen(
        [sys.executable, "-c", TRAINING, tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(PYTHONUNBUFFERED="1"),
    )
    with run:
        first = run.stdout.readline()
        run.send_signal(signal.SIGINT)
        _, said = run.communicate()
    assert "epoch 1/5000" in first
    assert run.returncode == 130
    assert said.strip() == "interrupted; run the same command again to continue"
    record = json.loads((tmp_path / "digits-bn" / "record.json").read_text(encoding="utf-8"))
    assert record["epoch"] >= 1
    assert [path.name for path in (tmp_path / "digits-bn").iterdir() if path.name.startswith(".")] == []


def test_an_unknown_data_set_is_one_line(call):
    assert call("data", "get", "cifar").output.startswith("error: unknown data set 'cifar'")


def test_the_terminal_breaks_the_lines_of_help(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert "--iterations and --location), and with evidence" in words(call("demo", "--help"))
    lines = [line for line in call("demo", "--help").output.splitlines() if "compares three networks" in line]
    assert len(lines) == 1
    assert len(lines[0].rstrip()) > 150
