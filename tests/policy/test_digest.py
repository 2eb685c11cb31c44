"""Digests and differences of policies."""

from equipoise.policy.digest import changes, digest
from equipoise.policy.reading import read_policy

HEAD = "apiVersion: equipoise.dev/v1alpha1\nkind: BalancePolicy\n"


def test_the_digest_depends_on_the_values_not_on_how_they_are_written():
    one = read_policy(HEAD + "defaults: {interval: 60s}", source="a").defaults
    same = read_policy(HEAD + "# said otherwise\ndefaults:\n  interval: 1m", source="b").defaults
    other = read_policy(HEAD + "defaults: {interval: 61s}", source="a").defaults
    assert digest(one) == digest(same) != digest(other)
    assert changes(one, other) == ("interval 1m → 61s",)
