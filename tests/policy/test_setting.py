"""Every value of `Policy` has a place, a form and a range in a policy file."""

import re
from dataclasses import fields

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from equipoise.cli.main import app
from equipoise.planning.policy import Policy
from equipoise.policy.document import PoolPolicy
from equipoise.policy.setting import SETTINGS
from equipoise.settings.fields import ranges_of

BALANCER_OPTIONS = {
    option
    for parameter in typer.main.get_command(app).commands["balancer"].params
    for option in parameter.opts
}


def test_every_value_of_the_planning_policy_can_be_written_exactly_once():
    assert [one.name for one in SETTINGS] == [field.name for field in fields(Policy)]
    assert len({one.path for one in SETTINGS}) == len(SETTINGS)
    assert PoolPolicy().written() == {}


def words_of(text):
    return set(re.sub("([A-Z])", r"_\1", text).lower().split("_"))


def test_a_value_has_the_same_words_in_the_file_and_as_an_option():
    """An option may add the section's words and its unit: timeouts.report, --report-timeout-s."""
    for one in SETTINGS:
        section, _, key = one.path.rpartition(".")
        option = words_of(re.sub("(_bytes_per)?_s$", "", one.name))
        assert words_of(key) <= option, one.path
        assert option - words_of(key) <= words_of(section.removesuffix("s")), one.path
        assert one.option in BALANCER_OPTIONS


def test_every_field_is_explained():
    assert all(len(one.explanation) > 20 for one in SETTINGS)


def test_every_number_has_a_range_and_every_plain_number_a_unit():
    for one in SETTINGS:
        assert (one.range is None) == (one.form.unit in {"word", "true or false"}), one.name
        assert one.form.unit, one.name


@given(st.sampled_from(sorted(ranges_of(Policy))), st.floats(0.0, 1.0))
def test_what_is_written_reads_as_the_same_value(name, part):
    (setting,) = (one for one in SETTINGS if one.name == name)
    low, high = setting.range.low, setting.range.high
    value = low + part * (high - low)
    if setting.form.unit == "bytes" or isinstance(getattr(Policy(), name), int):
        value = int(value)
    assert setting.checked(setting.form.write(value)) == pytest.approx(value, rel=1e-9, abs=1e-9)
