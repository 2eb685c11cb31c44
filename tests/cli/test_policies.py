import pytest

from equipoise.cli.offline.policies import policies_of
from equipoise.planning.policy import Algorithm, Policy
from equipoise.settings.errors import InvalidSettingsError


def test_without_a_policy_it_is_the_balancers_own():
    assert policies_of([]) == {"default": Policy()}


def test_options_are_named_with_or_without_their_unit():
    assert policies_of(["calm=interval=20,min-gain=0.05,algorithm=global", "default"]) == {
        "calm": Policy(interval_s=20.0, min_gain=0.05, algorithm=Algorithm.GLOBAL),
        "default": Policy(),
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("calm.toml", "interval_s = 20\nmin_gain = 0.05"),
        ("calm.json", '{"interval": 20, "min_gain": 0.05}'),
    ],
)
def test_a_file_is_a_policy_by_its_name(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert policies_of([str(tmp_path / name)]) == {"calm": Policy(interval_s=20.0, min_gain=0.05)}


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (["x"], "--policy x must be name=option=value,option=value, a BalancePolicy .yaml"),
        (
            ["a=speed=3"],
            "--policy a=speed=3: unknown option 'speed'; options are pause, interval_s, ",
        ),
        (["a=interval=fast"], "--policy a=interval=fast: interval must be a number, not 'fast'"),
        (["a=interval"], "--policy a=interval: interval needs a value, as in interval=20"),
        (["=interval=20"], "--policy =interval=20 must begin with a name: NAME=option=value"),
        (["a=interval=-1"], "--policy a=interval=-1: interval_s must be from 0.05 to 86400"),
        (["a=algorithm=best"], "algorithm must be one of auto, "),
        (["a=", "a=min_gain=1"], "another policy is already named 'a'"),
        (["nowhere.toml"], "--policy nowhere.toml: No such file"),
    ],
)
def test_an_invalid_policy_is_rejected(specs, words):
    with pytest.raises(InvalidSettingsError, match=words):
        policies_of(specs)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.toml", "interval_s = ", r"p\.toml: Invalid value"),
        ("p.json", "[1]", r"p\.json: the file must contain options by name"),
        ("p.json", '{"interval_s": [1]}', r"interval_s must be a number, not \[1\]"),
        ("p.json", '{"max_wave_bytes": 1e999}', "max_wave_bytes must be a number, not inf"),
    ],
)
def test_a_faulty_file_is_named(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidSettingsError, match=words):
        policies_of([str(tmp_path / name)])


def test_a_balance_policy_file_is_a_policy_named_like_the_file(tmp_path):
    path = tmp_path / "careful.yaml"
    head = "apiVersion: equipoise.dev/v1alpha1\nkind: BalancePolicy\n"
    path.write_text(head + "defaults: {judging: {minGain: 0.25}}\n")
    assert policies_of([str(path)]) == {"careful": Policy(min_gain=0.25)}
