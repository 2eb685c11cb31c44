"""What `equipoise handover` says of a prompt that two pools have read."""

import pytest

from equipoise.cli.handover.run import Handover
from equipoise.cli.handover.settings import HandoverSettings
from equipoise.settings.errors import InvalidSettingsError


@pytest.mark.parametrize(
    ("num_handed_over", "worked", "text"),
    [
        (None, False, "was not handed over: the decode pool prefilled it"),
        (0, False, "the decode rank got the latents of 0 tokens only"),
        (31, False, "the decode rank got the latents of 31 tokens only"),
        (32, True, "the decode rank got the latents of 32 tokens and prefilled 32"),
        (64, True, "the decode rank got the latents of 64 tokens and prefilled 0"),
    ],
)
def test_at_least_half_of_a_prompt_must_be_handed_over(num_handed_over, worked, text):
    found = Handover(prompt_tokens=64, handed_over_tokens=num_handed_over)
    assert found.worked is worked
    assert text in str(found)


def test_a_url_without_a_scheme_is_rejected():
    with pytest.raises(InvalidSettingsError, match="--url must begin with http://"):
        HandoverSettings(url="127.0.0.1:8080")
