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
        ("temperature", [0, 0.0, 1e-9, 100.0], [-0.1, float("nan"), float("inf"), "1", True]),
        ("top_k", [0, 1, 10**6], [-1, 1.0, None]),
        ("top_p", [1e-9, 1, 1.0], [0, -1.0, 1.01, float("nan")]),
        ("min_p", [0, 1], [-0.01, 1.01]),
        ("repetition_penalty", [0.1, 2.0], [0, -1.0, float("inf")]),
        ("presence_penalty", [-2, 2.0], [-2.1, 2.1]),
        ("frequency_penalty", [-2, 2.0], [-2.1, 2.1]),
        ("seed", [0, 2**64 - 1], [-1, 2**64, None, 1.5]),
        ("max_tokens", [1, 10**6], [0, -1, 2.0]),
        ("stop_tokens", [(), (0, 5)], [(-1,), [1], ("a",), (True,)]),
        ("stop", [(), ("a", "bc")], [("",), "abc", (1,), ("x",) * 17]),
        ("logprobs", [None, 0, 20], [-1, 21, True, 1.0]),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, good, bad):
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(SamplingError, match=f"^{name} = .* is out of range"):
            SamplingParams(**{name: value})


def test_parameters_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().seed = 1


def test_an_output_ends_at_a_stop_token_or_at_its_length():
    params = SamplingParams(max_tokens=3, stop_tokens=(7, 8))
    assert params.finish(1, num_tokens=1) is None
    assert params.finish(8, num_tokens=2) == "stop"
    assert params.finish(1, num_tokens=3) == "length"
    assert params.finish(7, num_tokens=3) == "stop"
