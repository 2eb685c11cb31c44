"""A policy file is accepted or rejected as a whole; each fault is reported with its line."""

import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from equipoise.planning.phase import Phase
from equipoise.planning.policy import Policy
from equipoise.policy.errors import PolicyError
from equipoise.policy.reading import MAX_BYTES, read_policy

HEAD = "apiVersion: equipoise.dev/v1alpha1\nkind: BalancePolicy\n"


def faults_of(body, *, head=HEAD):
    with pytest.raises(PolicyError) as rejected:
        read_policy(head + body, source="policy.yaml")
    assert str(rejected.value).startswith("policy policy.yaml: ")
    return rejected.value.faults


def test_a_value_that_is_not_set_has_its_default():
    read = read_policy(HEAD, source="policy.yaml")
    assert read.defaults == Policy()
    assert not read.pools


def test_a_pool_overrides_single_fields_and_keeps_the_rest():
    read = read_policy(
        HEAD
        + """
defaults:
  interval: 20s
  averages: {slowHalfLife: 2m}
pools:
  decode:
    averages: {fastHalfLife: 500ms}
    waves: {maxBytes: 64Mi}
    planning: {algorithm: auto}
""",
        source="policy.yaml",
    )
    decode = read.pools["decode"]
    assert (decode.interval_s, decode.slow_half_life_s, decode.fast_half_life_s) == (20, 120, 0.5)
    assert decode.max_wave_bytes == 64 * 2**20
    assert decode.algorithm == "auto"
    assert read.defaults.fast_half_life_s == Policy().fast_half_life_s


def test_an_entry_with_a_phase_is_for_all_pools_of_that_phase_without_an_entry_of_their_own():
    read = read_policy(
        HEAD
        + """
defaults: {interval: 20s}
pools:
  readers: {phase: prefill, interval: 10m, planning: {algorithm: hierarchical}}
  special: {interval: 5s}
""",
        source="policy.yaml",
    )
    of_any = read.of("any", Phase.PREFILL)
    assert (of_any.interval_s, of_any.algorithm) == (600, "hierarchical")
    assert read.of("special", Phase.PREFILL).interval_s == 5
    assert read.of("readers", Phase.DECODE) == read.of("any", None) == read.defaults


def test_two_entries_for_one_phase_are_a_fault():
    body = "pools:\n  a: {phase: decode}\n  b:\n    phase: decode\n"
    [fault] = faults_of(body)
    assert (fault.line, fault.path) == (6, "pools.b.phase")
    assert "another entry is for the same phase" in fault.why


def test_options_apply_where_the_file_sets_nothing():
    read = read_policy(
        HEAD + "defaults: {interval: 20s}", source="f", base=Policy(min_gain=0.5, interval_s=7)
    )
    assert (read.defaults.min_gain, read.defaults.interval_s) == (0.5, 20)


@pytest.mark.parametrize(
    ("body", "line", "path", "why"),
    [
        (
            "pools:\n  a: {phase: both}",
            4,
            "pools.a.phase",
            "must be 'prefill', 'decode'",
        ),
        ("defaults:\n  phase: decode", 4, "defaults.phase", "did you mean pause"),
        ("defaults:\n  intervall: 1s", 4, "defaults.intervall", "did you mean interval?"),
        (
            "defaults:\n  minGain: 0.1",
            4,
            "defaults.minGain",
            "unknown field here: did you mean judging.minGain?",
        ),
        (
            "defaults:\n  averages:\n    shiftThreshold: 0.15",
            5,
            "defaults.averages.shiftThreshold",
            "was replaced by averages.shiftFactor, a multiple of noise and not a share of the load",
        ),
        (
            "defaults:\n  planning:\n    targetBalancedness: 0.98",
            5,
            "defaults.planning.targetBalancedness",
            "was removed, because plans make the moves that pay for themselves: remove it, and set",
        ),
        ("policy: {}", 3, "policy", "the fields are apiVersion, kind, defaults, pools"),
        (
            "pools:\n  a:\n    waves:\n      maxByte: 1",
            6,
            "pools.a.waves.maxByte",
            "did you mean maxBytes?",
        ),
        ("defaults:\n  interval: 10", 4, "defaults.interval", "a duration needs a unit: write 10s"),
        ("defaults:\n  interval: 1ms", 4, "defaults.interval", "must be from 50ms to 24h"),
        ("defaults: {waves: {maxBytes: lots}}", 3, "defaults.waves.maxBytes", "such as 256Mi"),
        ("defaults: {planning: {riskZ: .nan}}", 3, "defaults.planning.riskZ", "from 0 to 10"),
        ("defaults: {planning: {algorithm: best}}", 3, "defaults.planning.algorithm", "one of"),
        ("defaults: {pause: 1}", 3, "defaults.pause", "must be true or false"),
        ("defaults: {judging: 3}", 3, "defaults.judging", "must be a mapping of fields"),
        ("pools: [a]", 3, "pools", "must be a mapping of fields"),
        (
            "defaults:\n  averages:\n    slowHalfLife: 2s",
            3,
            "defaults.averages.fastHalfLife",
            "averages.fastHalfLife must be below averages.slowHalfLife (2)",
        ),
        (
            "pools:\n  a:\n    timeouts:\n      report: 500ms",
            6,
            "pools.a.timeouts.report",
            "timeouts.report must be above heartbeatInterval (1)",
        ),
        (
            "defaults:\n  timeouts:\n    join: 20s\n    meet: 30s",
            5,
            "defaults.timeouts.join",
            "timeouts.join must be at least timeouts.meet (30), not 20",
        ),
        ("defaults: {}\ndefaults: {}", 4, "defaults", "is a duplicate of line 3"),
        ("defaults: [", 3, "", "is not valid YAML"),
        ("defaults: &a {}\npools: {b: *a}", 4, "", "aliases are not supported"),
        ("defaults: {interval: 2026-13-45}", 3, "defaults.interval", "must be a duration"),
        ("? {a: b}\n: c", 3, "", "keys must be strings"),
    ],
)
def test_a_fault_names_field_line_and_why(body, line, path, why):
    (fault,) = faults_of(body)
    assert (fault.line, fault.path) == (line, path)
    assert why in fault.why


def test_all_faults_are_reported_at_once_in_the_order_of_the_file():
    faults = faults_of("defaults:\n  interval: 1\n  pause: 3\npools:\n  a: {nope: 1}")
    assert [fault.line for fault in faults] == [4, 5, 7]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty or not a mapping"),
        ("- a", "is empty or not a mapping"),
        ("kind: BalancePolicy", "apiVersion: is missing"),
        (HEAD.replace("v1alpha1", "v9"), "must be 'equipoise.dev/v1alpha1'"),
        ("a: " + "[" * 2000, "nested"),
        ("#" * (MAX_BYTES + 1), "is larger than"),
        ("a: \x00", "is not valid YAML"),
        ("{a: !!python/object/apply:os.system [x]}", "a"),
    ],
)
def test_what_is_not_a_policy_is_rejected(text, why):
    assert why in "; ".join(map(str, faults_of("", head=text)))


# By default two seconds of CPU go into finding out what UTF-8 can encode: all but surrogates.
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@budget(max_examples=50)
@given(ANY_TEXT | st.sampled_from(["? ", "[[", "!!", "%", "a: &b"]))
def test_any_text_is_read_or_rejected(text):
    try:
        read_policy(HEAD + text, source="any")
    except PolicyError as error:
        assert error.faults  # noqa: PT017 - some texts are good


@pytest.mark.parametrize(
    "value",
    [
        *("9" * 400, "0x" + "f" * 5000, "!!bool maybe", '!!int ""', '!!float ""'),
        *("!!timestamp soon", "2026-13-45", "1e999", "!!binary x"),
    ],
)
def test_a_value_that_yaml_cannot_make_is_one_clear_fault(value):
    for field in ("minGain", "minAssignments"):
        with pytest.raises(PolicyError) as caught:
            read_policy(f"{HEAD}defaults:\n  judging:\n    {field}: {value}", source="f")
        (fault,) = caught.value.faults
        assert (fault.path, fault.line) == (f"defaults.judging.{field}", 5)
        assert len(str(fault)) < 500
