"""Identities of callers."""

import pytest

from equipoise.trust.identity import Caller, Identity, Role, certified, parse_identity


@pytest.mark.parametrize(
    ("words", "identity"),
    [
        ("reader", Identity(role=Role.READER)),
        ("admin/ann", Identity(role=Role.ADMIN, name="ann")),
        ("gateway/eu-1", Identity(role=Role.GATEWAY, name="eu-1")),
        ("worker/*/*", Identity(role=Role.WORKER)),
        ("worker/p/%2A-%2A", Identity(role=Role.WORKER, pool="p", worker="*-*")),
        ("worker/p/w-0", Identity(role=Role.WORKER, pool="p", worker="w-0")),
        ("worker/p/*", Identity(role=Role.WORKER, pool="p")),
        ("worker/a%2Fb/w", Identity(role=Role.WORKER, pool="a/b", worker="w")),
    ],
)
def test_roles_are_read_from_names(words, identity):
    assert parse_identity(words) == identity


@pytest.mark.parametrize(
    "words",
    [
        *("", "root", "Admin", "worker", "worker/", "worker/p", "worker/p/w/x", "worker//w"),
        *("worker/p/%2A", "worker/%2a/w", "worker/%2A/%2A", "admin/a/b", "reader/"),
    ],
)
def test_a_name_without_a_role_is_no_identity(words):
    assert parse_identity(words) is None


def test_the_uri_of_a_certificate_takes_precedence_over_its_common_name():
    named = certified(
        common_name="reader",
        alternative_names=["10.0.0.1", "spiffe://corp/equipoise/worker/p/w-1"],
        trust_domain="corp",
    )
    assert named == Identity(role=Role.WORKER, pool="p", worker="w-1")
    named = certified(
        common_name="reader", alternative_names=["https://corp/other"], trust_domain="corp"
    )
    assert named == Identity(role=Role.READER)
    assert (
        certified(common_name="www.corp", alternative_names=["www.corp"], trust_domain="corp")
        is None
    )


def test_every_identity_must_allow_what_a_caller_does():
    worker = Identity(role=Role.WORKER, pool="p", worker="w-0")
    admin = Identity(role=Role.ADMIN)
    assert Caller(peer="x", identities=(worker,)).may({Role.WORKER})
    assert not Caller(peer="x", identities=(worker, admin)).may({Role.WORKER})
    assert Caller(peer="x", identities=(worker, admin)).may({Role.WORKER, Role.ADMIN})


@pytest.mark.parametrize(
    ("identity", "pool", "worker", "allowed"),
    [
        ("worker/p/w-0", "p", "w-0", True),
        ("worker/p/w-0", "p", "w-1", False),
        ("worker/p/w-0", "q", "w-0", False),
        ("worker/p/w-0", "p", "*", False),
        ("worker/p/w-0", "p", None, True),
        ("worker/p/*", "p", "w-7", True),
        ("worker/p/*", "q", "w-7", False),
        ("worker/*/*", "q", "w-7", True),
    ],
)
def test_a_worker_speaks_for_itself_only(identity, pool, worker, allowed):
    caller = Caller(peer="x", identities=(parse_identity(identity),))
    assert caller.may_speak_for(pool=pool, worker=worker) is allowed


@pytest.mark.parametrize(
    ("identity", "worker", "named"),
    [
        ("worker/p/w-0", "w-0", True),
        ("worker/p/w-0", "w-1", False),
        ("worker/q/w-0", "w-0", False),
        ("worker/p/*", "w-0", False),
        ("worker/p/*", "*", False),
        ("worker/*/*", "w-0", False),
        ("admin/w-0", "w-0", False),
    ],
)
def test_only_an_identity_of_its_own_names_a_worker(identity, worker, named):
    caller = Caller(peer="x", identities=(parse_identity(identity),))
    assert caller.is_worker(pool="p", worker=worker) is named
    assert not Caller(peer="x").is_worker(pool="p", worker=worker)


def test_callers_are_shown_with_their_identities_and_address():
    assert str(Caller(peer="ipv4:1.2.3.4:5")) == "anonymous at ipv4:1.2.3.4:5"
    ann = Identity(role=Role.ADMIN, name="ann")
    assert str(Caller(peer="p", identities=(ann, ann))) == "admin/ann at p"


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://evil.example/equipoise/admin/eve",
        "spiffe://corp.evil.example/equipoise/admin/eve",
        "spiffe://evil.example/spiffe://corp/equipoise/admin/eve",
        "spiffe://corp/other/equipoise/admin/eve",
    ],
)
def test_an_identity_of_another_trust_domain_is_none(uri):
    names = [uri, "spiffe://corp/equipoise/admin/eve"]
    assert certified(common_name="admin/eve", alternative_names=names, trust_domain="corp") is None


def test_a_uri_of_another_scheme_names_no_one():
    names = ["https://evil.example/equipoise/admin/eve"]
    assert certified(common_name="eve", alternative_names=names, trust_domain="corp") is None
