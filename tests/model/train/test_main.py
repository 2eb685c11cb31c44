import json
import shlex

import numpy as np
import pytest

from equipoise_model.checkpoint import Checkpoint
from equipoise_model.train import __main__ as command
from equipoise_model.train import loads, loop
from equipoise_model.train.data import DOMAINS
from equipoise_model.train.loop import DivergedError


@pytest.fixture(autouse=True)
def quick(monkeypatch, small_config):
    """A small model on noise, so that nothing but the command itself takes time."""
    noise = np.random.default_rng(0).integers(97, 123, size=48 * 256, dtype=np.uint8)

    def sample(rng, *, num_sequences, num_tokens):
        return rng.integers(97, 123, size=(num_sequences, num_tokens))

    monkeypatch.setattr(command, "TINY", small_config)
    monkeypatch.setattr(loop, "sample_batch", sample)
    monkeypatch.setattr(loads, "text", lambda domain, split: noise)


def _run(out, *options):
    return command.main(
        [
            f"--out={out}",
            "--threads=1",
            "--steps=3",
            "--settling-steps=2",
            "--num-sequences=3",
            *options,
        ]
    )


def test_a_run_writes_a_checkpoint_that_opens_and_its_record(tmp_path, small_config, capsys):
    assert _run(tmp_path / "new" / "folder", "--sequence-tokens=16") == 0
    out = tmp_path / "new" / "folder"
    assert Checkpoint.open(out).config == small_config
    record = json.loads((out / "training.json").read_text())
    assert [point["step"] for point in record["curve"]] == [0, 1, 2]
    assert set(record["heldout_loss"]) == set(DOMAINS)
    assert record["settings"]["sequence_tokens"] == 16
    num_layers = small_config.num_moe_layers
    assert all(len(record["experts"][name]["layers"]) == num_layers for name in (*DOMAINS, "mixed"))
    trace = loads.LoadTrace.read(out / "loads.json")
    assert record["experts"]["code"]["layers"] == pytest.approx(
        trace.max_over_mean("code").tolist(), abs=1e-4
    )
    assert "held-out loss" in capsys.readouterr().err


def test_the_recorded_command_asks_for_the_same_run(tmp_path):
    assert _run(tmp_path, "--seed=4", "--bias-speed=0.01", "--sequence-tokens=16") == 0
    record = json.loads((tmp_path / "training.json").read_text())
    program, *options = shlex.split(record["command"].partition("equipoise_model.train ")[2])
    parsed = vars(command._parser().parse_args([program, *options]))
    assert parsed["threads"] == record["threads"] == 1
    assert {name: parsed[name] for name in record["settings"]} == record["settings"]


def test_the_figures_are_those_of_the_rounded_weights(tmp_path):
    assert _run(tmp_path, "--sequence-tokens=16") == 0
    record = json.loads((tmp_path / "training.json").read_text())
    checkpoint = Checkpoint.open(tmp_path)
    model = loop.new_model(checkpoint.config, seed=99)
    checkpoint.load_dense(model)
    checkpoint.load_slots(model, [list(range(8))] * checkpoint.config.num_expert_layers)
    again = loads.measure(model, seed=command._HELDOUT_SEED)
    assert record["heldout_loss"] == {name: round(loss, 4) for name, loss in again.loss_of.items()}


def test_a_setting_out_of_range_is_a_one_line_error(tmp_path, capsys):
    assert _run(tmp_path, "--num-sequences=4") == 1
    message = capsys.readouterr().err
    assert "num_sequences = 4" in message
    assert "Traceback" not in message
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_created_is_a_one_line_error(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert _run(tmp_path / "file") == 1
    assert "training failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (DivergedError("the loss is nan"), 1)]
)
def test_a_run_that_ends_early_writes_nothing(tmp_path, monkeypatch, capsys, error, status):
    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(command, "train", fail)
    assert _run(tmp_path / "out") == status
    assert not list((tmp_path / "out").iterdir())
    assert "Traceback" not in capsys.readouterr().err
