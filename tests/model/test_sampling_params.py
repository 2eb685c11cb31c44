import dataclasses

import pytest

from equipoise_model.sampling_params import SamplingError, SamplingParams


def test_the_defaults_are_the_models_own_distribution():
    params = SamplingParams()
    assert not params.greedy
    assert not params.penalizes
    assert SamplingParams(temperature=0).greedy


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "temperature",
            [0, -0.0, 0.01, 100.0],
            [-0.1, 1e-300, 0.009, 100.1, float("nan"), float("inf"), "1", True],
        ),
        ("top_k", [0, 1, 10**6], [-1, 1.0, None]),
        ("top_p", [1e-9, 1, 1.0], [0, -1.0, 1.01, float("nan")]),
        ("min_p", [0, 1], [-0.01, 1.01]),
        ("repetition_penalty", [0.01, 100.0], [0, 1e-38, 101, -1.0, float("inf")]),
        ("presence_penalty", [-2, 2.0], [-2.1, 2.1]),
        ("frequency_penalty", [-2, 2.0], [-2.1, 2.1]),
        ("seed", [0, 2**64 - 1], [-1, 2**64, None, 1.5]),
        ("logprobs", [None, 0, 20], [-1, 21, True, 1.0]),
    ],
)
def test_a_value_out_of_range_is_rejected_by_name(name, good, bad):
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(SamplingError, match=f"^{name} = .* is out of range"):
            SamplingParams(**{name: value})


def test_parameters_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().seed = 1
