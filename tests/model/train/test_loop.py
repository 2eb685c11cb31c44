import dataclasses
import math

import pytest
import torch

from equipoise_model.train import loop
from equipoise_model.train.loop import (
    DivergedError,
    TrainSettings,
    TrainSettingsError,
    learning_rate,
    new_model,
    settle_bias,
    steering,
    train,
)

SETTINGS = TrainSettings(steps=8, num_sequences=3, sequence_tokens=32, warmup_steps=2)


@pytest.fixture(autouse=True)
def letters(monkeypatch):
    """Rows of the alphabet: text that is learnt in a few steps and needs no library."""

    def sample(rng, *, num_sequences, num_tokens):
        starts = rng.integers(26, size=num_sequences)
        return (starts[:, None] + torch.arange(num_tokens).numpy()) % 26 + 97

    monkeypatch.setattr(loop, "sample_batch", sample)


def test_the_same_seed_gives_the_same_losses_and_weights(small_config):
    runs = []
    for _ in range(2):
        model = new_model(small_config, seed=5)
        runs.append((list(train(model, SETTINGS)), model.state_dict()))
    (first, first_weights), (second, second_weights) = runs
    assert first == second
    assert all(torch.equal(first_weights[name], second_weights[name]) for name in first_weights)


def test_another_seed_gives_other_losses(small_config):
    first, second = (
        next(train(new_model(small_config, seed=seed), dataclasses.replace(SETTINGS, seed=seed)))
        for seed in (1, 2)
    )
    assert first.loss != second.loss


def test_a_new_model_leaves_the_global_generator_alone(small_config):
    before = torch.random.get_rng_state()
    new_model(small_config, seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_training_lowers_both_losses_from_that_of_a_guess(small_config):
    settings = dataclasses.replace(SETTINGS, steps=60, learning_rate=1e-2)
    records = list(train(new_model(small_config, seed=0), settings))
    assert [record.step for record in records] == list(range(60))
    assert records[0].loss == pytest.approx(math.log(256), rel=0.05)
    assert records[-1].loss < 1.0
    assert records[-1].mtp_loss < 1.0


def test_every_router_s_bias_moves_by_gamma_in_the_first_step(small_config):
    model = new_model(small_config, seed=0)
    next(train(model, dataclasses.replace(SETTINGS, bias_speed=0.25)))
    biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2  # one MoE layer and one MTP module
    for bias_E in biases:
        assert set(bias_E.abs().tolist()) <= {0.0, 0.25}
        assert bias_E.abs().max() == 0.25


def test_gradients_do_not_reach_the_selection_bias(small_config):
    model = new_model(small_config, seed=0)
    list(train(model, dataclasses.replace(SETTINGS, bias_speed=0.0)))
    biases = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert all(bias_E.abs().max() == 0 for bias_E in biases)


def test_the_learning_rate_warms_up_peaks_and_falls_to_a_tenth():
    settings = dataclasses.replace(SETTINGS, steps=1000, warmup_steps=10, learning_rate=1e-3)
    rates = [learning_rate(step, settings) for step in range(1000)]
    assert rates[0] == pytest.approx(1e-4)
    assert rates[10] == pytest.approx(1e-3) == max(rates)
    assert rates[-1] == pytest.approx(1e-4, rel=0.01)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_steering_fades_and_leaves_the_last_steps_alone():
    settings = dataclasses.replace(SETTINGS, steps=10, unsteered_share=0.2)
    factors = [steering(step, settings) for step in range(10)]
    assert factors == pytest.approx([(8 - step) / 8 for step in range(8)] + [0.0, 0.0])


def test_without_steering_steps_nothing_is_steered():
    settings = dataclasses.replace(SETTINGS, unsteered_share=1.0)
    assert [steering(step, settings) for step in range(8)] == [0.0] * 8


def test_settling_evens_the_load_and_leaves_the_weights_alone(small_config):
    model = new_model(small_config, seed=0)
    layer = model.moe_layers[0]
    before = {name: value.clone() for name, value in model.named_parameters()}
    settings = dataclasses.replace(SETTINGS, settling_steps=40, settling_speed=0.08)

    def unevenness():
        tokens = torch.arange(3 * 32).view(3, 32) % 26 + 97
        (routing,) = model.forward_train(tokens).routings
        load_E = torch.bincount(routing.expert_ids_TK.flatten(), minlength=8).double()
        return (load_E.max() / load_E.mean()).item()

    layer.gate.e_score_correction_bias.copy_(torch.tensor([1.0] * 2 + [0.0] * 6))
    at_first = unevenness()
    assert list(settle_bias(model, settings)) == list(range(40))
    assert at_first > 3
    assert unevenness() < at_first / 1.5
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())


def test_a_nan_loss_ends_the_training_with_the_step(small_config):
    model = new_model(small_config, seed=0)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(DivergedError, match=r"step 0.*learning rate"):
        next(train(model, SETTINGS))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("num_sequences", 4),
        ("sequence_tokens", 3),
        ("learning_rate", 0.0),
        ("clip_norm", -1.0),
        ("unsteered_share", 1.5),
        ("bias_speed", -1e-3),
        ("balance_weight", -1.0),
        ("specialization_weight", -1.0),
        ("specialization_target", -1.0),
        ("mtp_weight", -0.1),
        ("weight_decay", -0.1),
        ("warmup_steps", -1),
        ("settling_steps", -1),
        ("settling_speed", -1.0),
        ("seed", -1),
    ],
)
def test_settings_out_of_range_are_rejected_by_name(name, value):
    with pytest.raises(TrainSettingsError, match=name):
        dataclasses.replace(SETTINGS, **{name: value})


def test_sequences_longer_than_the_model_s_positions_are_rejected(small_config):
    with pytest.raises(TrainSettingsError, match="sequence_tokens = 257"):
        next(
            train(
                new_model(small_config, seed=0), dataclasses.replace(SETTINGS, sequence_tokens=257)
            )
        )
