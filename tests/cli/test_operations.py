"""Operators' requests from the command line: to the leader, with an identity and an exit status."""

import json
import socket
import threading
import time
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import replace

import grpc
import pytest

from equipoise.cli.live import operations
from equipoise.cli.live.client import LEADER_METADATA, BalancerRejectedError
from equipoise.cli.live.settings import (
    Access,
    OperationSettings,
    PinSettings,
    PreviewSettings,
    RebalanceSettings,
    RollbackSettings,
)
from equipoise.planning.policy import Policy
from equipoise.pool.counters import answer_timeout_s
from equipoise.settings.errors import InvalidSettingsError
from equipoise.settings.fields import explanations
from equipoise.trust.settings import Tls
from equipoise.trust.tokens import AcceptedKeys
from equipoise_api.v1 import admin_pb2, admin_pb2_grpc, status_pb2
from tests.support.authority import write_keys

BOUND_S = 120.0


class Answering(admin_pb2_grpc.AdminServicer):
    """Notes what is asked; a follower if it knows a leader."""

    def __init__(self, *, accepted=True, leader=""):
        self.outcome = admin_pb2.Outcome(accepted=accepted, reason="as you wish", generation=7)
        self.leader = leader
        self.asked = []
        self.metadata = []

    def _answer(self, request, context):
        if self.leader:
            context.set_trailing_metadata(((LEADER_METADATA, self.leader),))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this balancer follows")
        self.asked.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        return self.outcome

    def TriggerRebalance(self, request, context):  # noqa: N802 - the contract's name
        return admin_pb2.TriggerRebalanceResponse(outcome=self._answer(request, context))

    def RebalanceAll(self, request, context):  # noqa: N802
        outcome = self._answer(request, context)
        for pool in ("decode", "prefill"):
            yield admin_pb2.RebalanceAllResponse(pool=pool, outcome=outcome)

    def Pause(self, request, context):  # noqa: N802
        return admin_pb2.PauseResponse(outcome=self._answer(request, context))

    def Resume(self, request, context):  # noqa: N802
        return admin_pb2.ResumeResponse(outcome=self._answer(request, context))

    def Rollback(self, request, context):  # noqa: N802
        return admin_pb2.RollbackResponse(outcome=self._answer(request, context))

    def Pin(self, request, context):  # noqa: N802
        return admin_pb2.PinResponse(outcome=self._answer(request, context))

    def Unpin(self, request, context):  # noqa: N802
        return admin_pb2.UnpinResponse(outcome=self._answer(request, context))

    def Preview(self, request, context):  # noqa: N802
        return admin_pb2.PreviewResponse(
            outcome=self._answer(request, context),
            decision=status_pb2.Decision(algorithm="global", moves=12, balancedness_current=0.5),
            num_waves=2 if self.outcome.accepted else 0,
        )


@contextmanager
def listening(servicer):
    server = grpc.server(futures.ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


ORDERS = [
    (operations.rebalance, RebalanceSettings, {"force": True}),
    (operations.pause, OperationSettings, {}),
    (operations.resume, OperationSettings, {}),
    (operations.rollback, RollbackSettings, {"generation": 3, "keep_planning": True}),
    (operations.pin, PinSettings, {"generation": 3}),
    (operations.unpin, OperationSettings, {}),
    (operations.preview, PreviewSettings, {"algorithm": "global"}),
]


@pytest.mark.parametrize(("order", "settings", "fields"), ORDERS)
def test_an_operation_sends_every_option(order, settings, fields, capsys):
    servicer = Answering()
    with listening(servicer) as address:
        status = order(settings(address=address, pool="p", reason="because", **fields))
    assert status == 0
    (request,) = servicer.asked
    assert (request.pool, request.reason) == ("p", "because")
    assert all(getattr(request, name) == value for name, value in fields.items())
    assert "as you wish\n" in capsys.readouterr().out


def test_the_default_timeout_exceeds_the_longest_operation():
    assert OperationSettings().timeout_s > answer_timeout_s(Policy())
    assert (
        "three times the policy's plan timeout plus 20 s"
        in explanations(OperationSettings)["timeout_s"]
    )
    assert answer_timeout_s(Policy(plan_timeout_s=1000.0)) == 3020.0


def test_a_rejection_is_exit_status_3(capsys):
    with listening(Answering(accepted=False)) as address:
        assert operations.pause(OperationSettings(address=address)) == 3
    assert capsys.readouterr().out == "rejected: as you wish\n"


@pytest.mark.parametrize("accepted", [True, False])
def test_all_pools_are_planned_in_one_call_and_each_answer_is_printed(accepted, capsys):
    servicer = Answering(accepted=accepted)
    with listening(servicer) as address, listening(Answering(leader=address)) as follower:
        asked = RebalanceSettings(address=follower, all_pools=True, reason="because", force=True)
        assert operations.rebalance(asked) == (0 if accepted else 3)
        assert operations.rebalance(replace(asked, json=True)) == (0 if accepted else 3)
    assert servicer.asked[0] == admin_pb2.RebalanceAllRequest(reason="because", force=True)
    *lines, shown = capsys.readouterr().out.split("\n", 3)
    word = "done" if accepted else "rejected"
    assert lines == [
        f"decode: {word}: as you wish",
        f"prefill: {word}: as you wish",
        f"{2 if accepted else 0} of 2 pools accepted",
    ]
    assert [one["pool"] for one in json.loads(shown)["pools"]] == ["decode", "prefill"]


def test_a_pool_without_an_answer_is_reported_as_unknown(capsys):
    class Unsure(Answering):
        def RebalanceAll(self, request, context):  # noqa: N802
            yield admin_pb2.RebalanceAllResponse(pool="decode", unanswered="ask for the status")

    with listening(Unsure()) as address:
        assert operations.rebalance(RebalanceSettings(address=address, all_pools=True)) == 3
    assert "decode: unknown: ask for the status\n" in capsys.readouterr().out


def test_a_preview_tells_the_plan_in_a_line_and_in_json(capsys):
    servicer = Answering()
    with listening(servicer) as address:
        operations.preview(PreviewSettings(address=address, set=("min-gain=0.5",)))
        out = capsys.readouterr().out
        assert "balancedness 0.500 -> 0.000, 12 moves (0 B) in 2 generations\n" in out
        operations.preview(PreviewSettings(address=address, json=True))
    shown = json.loads(capsys.readouterr().out)
    assert shown["outcome"]["generation"] == 7
    assert shown["decision"]["moves"] == 12
    assert dict(servicer.asked[0].policy) == {"min_gain": 0.5}


def test_a_preview_of_a_rejected_plan_names_no_generations(capsys):
    with listening(Answering(accepted=False)) as address:
        assert operations.preview(PreviewSettings(address=address)) == 3
    assert "12 moves (0 B)\n" in capsys.readouterr().out


def test_a_follower_redirects_an_operation_to_the_leader(capsys):
    leader = Answering()
    with listening(leader) as address, listening(Answering(leader=address)) as follower:
        assert operations.pause(OperationSettings(address=follower)) == 0
    assert len(leader.asked) == 1


def test_the_token_is_sent(tmp_path):
    keys, accepted = write_keys(tmp_path, "admin/ann")
    servicer, access = Answering(), Access(signing_key=keys["admin/ann"])
    with listening(servicer) as address:
        operations.pause(OperationSettings(address=address, access=access))
    token = servicer.metadata[0]["authorization"].removeprefix("Bearer ")
    known = AcceptedKeys(str(accepted)).identify(token, audience="balancer", now=time.time())
    assert str(known) == "admin/ann"


def test_an_unreachable_balancer_is_one_sentence():
    with pytest.raises(BalancerRejectedError, match=r"no balancer answers at 127.0.0.1:9: start"):
        operations.pause(OperationSettings(address="127.0.0.1:9"))


def test_a_timeout_warns_that_the_operation_may_complete():
    released = threading.Event()

    class Slow(Answering):
        def _answer(self, request, context):
            assert released.wait(BOUND_S)
            return super()._answer(request, context)

    with listening(Slow()) as address:
        with pytest.raises(BalancerRejectedError, match=r"within 0.5 s; the request may still"):
            operations.pause(OperationSettings(address=address, timeout_s=0.5))
        released.set()


@contextmanager
def breaking(servicer):
    """Listen behind a proxy; yields its address, and a function that breaks its connections."""
    opened = []
    with listening(servicer) as target, socket.create_server(("127.0.0.1", 0)) as server:
        host, port = target.split(":")

        def carry(source, sink):
            with suppress(OSError):
                while data := source.recv(65536):
                    sink.sendall(data)

        def accept():
            near, _ = server.accept()
            far = socket.create_connection((host, int(port)))
            opened.extend((near, far))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=carry, args=pair, daemon=True).start()

        def cut():
            for one in opened:
                one.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}", cut
        finally:
            for one in opened:
                one.close()


def test_a_connection_that_breaks_leaves_the_outcome_of_an_operation_open():
    class Dying(Answering):
        def Pause(self, request, context):  # noqa: N802
            self.asked.append(request)
            cut()
            return admin_pb2.PauseResponse(outcome=self.outcome)

    servicer = Dying()
    with breaking(servicer) as (address, cut), pytest.raises(BalancerRejectedError) as caught:
        operations.pause(OperationSettings(address=address))
    assert len(servicer.asked) == 1
    assert "rejected" not in str(caught.value)
    assert "may still be carried out: check `equipoise audit`" in str(caught.value)


@pytest.mark.parametrize(
    ("code", "reason", "is_open"),
    [
        (grpc.StatusCode.UNAVAILABLE, "for a reason", True),
        (grpc.StatusCode.UNAVAILABLE, "nothing was done: the store is full", False),
        (grpc.StatusCode.CANCELLED, "for a reason", True),
        (grpc.StatusCode.UNKNOWN, "for a reason", True),
        (grpc.StatusCode.FAILED_PRECONDITION, "for a reason", False),
        (grpc.StatusCode.PERMISSION_DENIED, "for a reason", False),
    ],
)
def test_only_a_balancers_own_rejection_says_that_nothing_was_done(code, reason, is_open):
    class Failing(Answering):
        def _answer(self, request, context):
            context.abort(code, reason)

    with listening(Failing()) as address:
        with pytest.raises(BalancerRejectedError, match=reason) as caught:
            operations.pause(OperationSettings(address=address))
        with pytest.raises(BalancerRejectedError, match=reason) as previewed:
            operations.preview(PreviewSettings(address=address))
    assert ("may still be carried out" in str(caught.value)) is is_open
    assert "may still" not in str(previewed.value), "it changes nothing"


@pytest.mark.parametrize("address", ["127.0.0.1:9", "no-such-host.invalid:7070"])
def test_a_request_that_was_never_sent_is_not_carried_out(address):
    access = Access(tls=Tls(insecure=True))
    with pytest.raises(BalancerRejectedError, match="no balancer answers at") as caught:
        operations.pause(OperationSettings(address=address, access=access))
    assert "may still" not in str(caught.value)


def test_the_answers_of_some_pools_are_printed_although_others_give_none_in_time(capsys):
    released = threading.Event()

    class Slow(Answering):
        def RebalanceAll(self, request, context):  # noqa: N802
            yield admin_pb2.RebalanceAllResponse(pool="decode", outcome=self.outcome)
            assert released.wait(BOUND_S)

    with listening(Slow()) as address:
        asked = RebalanceSettings(address=address, all_pools=True, json=True, timeout_s=2.0)
        with pytest.raises(BalancerRejectedError, match="may still be carried out"):
            operations.rebalance(asked)
        released.set()
    assert [one["pool"] for one in json.loads(capsys.readouterr().out)["pools"]] == ["decode"]


def test_a_balancer_without_pools_answers_in_json_too(capsys):
    class Empty(Answering):
        def RebalanceAll(self, request, context):  # noqa: N802
            yield from ()

    with listening(Empty()) as address:
        assert (
            operations.rebalance(RebalanceSettings(address=address, all_pools=True, json=True)) == 0
        )
    assert json.loads(capsys.readouterr().out) == {"pools": []}


@pytest.mark.parametrize(
    ("settings", "fields", "words"),
    [
        (OperationSettings, {"address": "h"}, "address must be host:port"),
        (OperationSettings, {"timeout_s": 0}, "timeout_s must be above 0"),
        (PinSettings, {"generation": -1}, "generation must be from 0"),
        (RebalanceSettings, {"all_pools": True, "pool": "p"}, "'p' cannot be combined"),
        (PreviewSettings, {"set": ("min_gain",)}, "set must be NAME=NUMBER"),
    ],
)
def test_contradictory_settings_are_rejected(settings, fields, words):
    with pytest.raises(InvalidSettingsError, match=words):
        settings(**fields)
