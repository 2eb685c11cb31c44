"""One promise for every place that may keep the lease: a record is replaced by one at a time."""

import asyncio
import json
from dataclasses import asdict, replace

import pytest
from aiohttp import web
from kubernetes.aio import client
from redis import Redis

from equipoise.balancer.leadership.elector import Elector
from equipoise.balancer.leadership.kubernetes_register import KubernetesRegister
from equipoise.balancer.leadership.lease import Candidate, LeaseRecord, LeaseTiming
from equipoise.balancer.leadership.redis_register import RedisRegister
from equipoise.balancer.leadership.register import (
    RegisterError,
    SoleRegister,
    record_from_text,
    record_to_text,
)
from equipoise.balancer.store.redis_store import HASH_TAG
from equipoise.wire.checks import MAX_TERM
from tests.support.redis_replica import promote, replicated, until_replicated
from tests.support.redis_server import free_port

PATIENT_S = 20.0
RECORD = LeaseRecord(holder="a", address="a:7070", term=4, renewals=0, duration_s=3.0)


class LeaseServer:
    """What a Kubernetes API server does with Leases: versions, conflicts, rejections at will."""

    def __init__(self) -> None:
        self.lease = None
        self.version = 0
        self.rejection = 0
        self.answering = asyncio.Event()
        self.answering.set()
        application = web.Application()
        leases = "/apis/coordination.k8s.io/v1/namespaces/moe/leases"
        application.router.add_get(leases + "/eq", self.get)
        application.router.add_post(leases, self.post)
        application.router.add_put(leases + "/eq", self.put)
        self.runner = web.AppRunner(application, shutdown_timeout=0.1)

    async def start(self) -> str:
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def get(self, request):
        return await self.answer(200 if self.lease else 404)

    async def post(self, request):
        return await self.take(await request.json(), fits=self.lease is None, status=201)

    async def put(self, request):
        lease = await request.json()
        fits = self.lease and lease["metadata"]["resourceVersion"] == str(self.version)
        return await self.take(lease, fits=fits, status=200)

    async def take(self, lease, *, fits, status):
        if lease["spec"]["leaseTransitions"] >= 2**31:  # It is an int32.
            return web.json_response({"kind": "Status", "code": 400}, status=400)
        if fits and not self.rejection:
            self.version += 1
            lease["metadata"]["resourceVersion"] = str(self.version)
            self.lease = lease
        return await self.answer(status if fits else 409)

    async def answer(self, status):
        await self.answering.wait()
        status = self.rejection or status
        body = self.lease if status < 300 else {"kind": "Status", "code": status}
        return web.json_response(body, status=status)


@pytest.fixture
async def lease_server():
    server = LeaseServer()
    yield server
    await server.runner.cleanup()


@pytest.fixture
async def open_kubernetes(lease_server):
    address = await lease_server.start()
    opened = []

    def open_register(timeout_s=PATIENT_S):
        api = client.ApiClient(client.Configuration(host=address))
        opened.append(KubernetesRegister(api, namespace="moe", name="eq", timeout_s=timeout_s))
        return opened[-1]

    yield open_register
    for register in opened:
        await register.close()


@pytest.fixture
async def open_redis(redis_url):
    opened = []

    def open_register(timeout_s=PATIENT_S):
        opened.append(RedisRegister(redis_url, timeout_s=timeout_s))
        return opened[-1]

    yield open_register
    for register in opened:
        await register.close()


@pytest.fixture(params=["redis", "kubernetes"])
def open_register(request):
    """Opens the same register, as another process would."""
    return request.getfixturevalue(f"open_{request.param}")


async def test_what_one_writes_all_read(open_register):
    one, other = open_register(), open_register()
    assert await one.read() is None
    written = await one.write(RECORD, replacing=None)
    assert written.record == RECORD
    assert await one.read() == written
    assert await other.read() == written


async def test_only_the_version_that_was_read_can_be_replaced(open_register):
    one, other = open_register(), open_register()
    first = await one.write(RECORD, replacing=None)
    assert await other.write(RECORD, replacing=None) is None
    renewed = replace(RECORD, renewals=1)
    second = await one.write(renewed, replacing=first.version)
    assert second.version != first.version
    assert await other.write(replace(RECORD, holder="b"), replacing=first.version) is None
    assert await other.read() == second


async def test_of_many_that_replace_at_once_one_succeeds(open_register):
    first = await open_register().write(RECORD, replacing=None)
    written = await asyncio.gather(
        *(
            open_register().write(replace(RECORD, holder=holder), replacing=first.version)
            for holder in "bcdef"
        )
    )
    (winner,) = [sighting for sighting in written if sighting]
    assert await open_register().read() == winner


async def test_a_lease_that_was_written_before_a_failover_may_not_be_the_latest(tmp_path):
    async with replicated(tmp_path) as (primary, _, replica):
        old, new = (RedisRegister(one.url, timeout_s=PATIENT_S) for one in (primary, replica))
        first = await old.write(RECORD, replacing=None)
        assert first.is_latest
        assert await old.read() == first
        with Redis.from_url(primary.url) as client:
            await until_replicated(client)
        promote(replica)
        found = await new.read()
        assert (found.record, found.is_latest) == (RECORD, False)
        assert await new.write(RECORD, replacing=first.version) is None, "read before the failover"
        renewed = await new.write(replace(RECORD, renewals=1), replacing=found.version)
        assert renewed.is_latest
        assert await new.read() == renewed
        await old.close()
        await new.close()


async def test_a_lease_in_a_redis_that_does_not_identify_itself_is_never_the_latest(
    redis_url, open_redis
):
    with Redis.from_url(redis_url) as server:
        server.execute_command("ACL", "SETUSER", "default", "-info")
        try:
            written = await open_redis().write(RECORD, replacing=None)
            found = await open_redis().read()
        finally:
            server.execute_command("ACL", "SETUSER", "default", "+info")
    assert (found.record, found.version, found.is_latest) == (RECORD, written.version, False)


async def test_a_register_of_one_process_keeps_the_terms_of_its_store():
    register = SoleRegister(term=7)
    before = await register.read()
    assert (before.record.term, before.record.holder) == (7, "")
    written = await register.write(RECORD, replacing=before.version)
    assert await register.read() == written
    assert await register.write(RECORD, replacing=before.version) is None
    await register.close()


async def test_a_redis_that_is_down_is_named_with_the_remedy():
    register = RedisRegister(f"redis://127.0.0.1:{free_port()}", timeout_s=PATIENT_S)
    with pytest.raises(RegisterError, match="check that it is running"):
        await register.read()
    with pytest.raises(RegisterError, match="check that it is running"):
        await register.write(RECORD, replacing=None)
    await register.close()


def lease_text(**changes):
    """A lease with other JSON in some fields."""
    values = {name: json.dumps(value) for name, value in asdict(RECORD).items()} | changes
    return "{" + ", ".join(f'"{name}": {value}' for name, value in values.items()) + "}"


SENSELESS = [
    *("", "{}", "[]", "null", "\xff", '{"holder": "a"}', "[" * 100_000, "1" * 5000),
    *(lease_text(term=value) for value in ("1e999", "NaN", "1.5", "true", '"7"', "9" * 5000, "{}")),
    *(lease_text(renewals=value) for value in ("1e999", "-1", "false", "null", str(2**53 + 1))),
    *(lease_text(duration_s=value) for value in ("1e999", "NaN", "true", '"3"', "0", "-0.0", "[]")),
    *(lease_text(holder=value) for value in ("7", "null", '"\\ud800"')),
    *(lease_text(address=value) for value in ("7", "[]", '"\\udfff"')),
]


@pytest.mark.parametrize("text", SENSELESS, ids=lambda text: text[:60])
def test_a_senseless_lease_is_named_with_the_remedy(text):
    with pytest.raises(RegisterError, match=r"key a .*: remove it if no balancer is running"):
        record_from_text(text, where="key a")


@pytest.mark.parametrize("text", ["\xff", lease_text(term="1e999")])
async def test_a_senseless_lease_in_redis_is_nobodys(redis_url, open_redis, text):
    with Redis.from_url(redis_url) as operator:
        operator.set(f"{HASH_TAG}:lease", text)
    with pytest.raises(RegisterError, match="remove it if no balancer is running"):
        await open_redis().read()


async def test_a_lease_in_redis_that_would_never_end_is_rejected(open_redis):
    register = open_redis()
    await register.write(replace(RECORD, duration_s=float("inf")), replacing=None)
    with pytest.raises(RegisterError, match="invalid lease"):
        await register.read()


@pytest.mark.parametrize("term", [-1, MAX_TERM + 1, 2**53])
async def test_a_lease_in_redis_with_a_term_that_no_leader_can_have_is_rejected(
    redis_url, open_redis, term
):
    with Redis.from_url(redis_url) as operator:
        operator.set(f"{HASH_TAG}:lease", record_to_text(replace(RECORD, term=term)))
    with pytest.raises(RegisterError, match="remove it if no balancer is running"):
        await open_redis().read()


async def test_a_kubernetes_lease_at_the_last_term_is_not_raised(open_kubernetes, lease_server):
    register = open_kubernetes()
    last = await register.write(replace(RECORD, holder="", term=MAX_TERM - 1), replacing=None)
    timing = LeaseTiming(duration_s=0.6, renew_deadline_s=0.4, retry_s=0.05, request_timeout_s=0.1)
    elector = Elector(
        register, candidate=Candidate(name="b", address="b:7070", term_offset=1), timing=timing
    )
    async with asyncio.timeout(PATIENT_S), elector.running():
        tenure = await elector.tenure()
        assert tenure.term == MAX_TERM, "which an int32 can have"
        tenure.give_up("to see what follows")
        await elector.until_over(tenure)
        await asyncio.sleep(3 * timing.retry_s)
        assert "the last one" in elector.state.reason
    assert lease_server.lease["spec"]["leaseTransitions"] == MAX_TERM
    assert (await register.read()).version != last.version


async def test_a_missing_right_in_the_cluster_is_named(open_kubernetes, lease_server):
    lease_server.rejection = 403
    with pytest.raises(RegisterError, match="needs get, create and update on leases"):
        await open_kubernetes().read()
    with pytest.raises(RegisterError, match="lease moe/eq"):
        await open_kubernetes().write(RECORD, replacing=None)


@pytest.mark.parametrize("status", [410, 429, 500])
async def test_an_api_server_in_trouble_is_no_register_without_a_lease(
    open_kubernetes, lease_server, status
):
    register = open_kubernetes()
    held = await register.write(RECORD, replacing=None)
    lease_server.rejection = status
    for call in (register.read(), register.write(RECORD, replacing=held.version)):
        with pytest.raises(
            RegisterError, match=f"rejects the request \\({status} .*: check its API server"
        ):
            await call
    lease_server.rejection = 0
    assert await register.read() == held


async def test_an_api_server_that_hangs_times_out(open_kubernetes, lease_server):
    lease_server.answering.clear()
    with pytest.raises(RegisterError, match="cannot be reached"):
        await open_kubernetes(timeout_s=0.2).read()
    lease_server.answering.set()


@pytest.mark.parametrize("renewals", ["9" * 5000, "1e999", "-1", "", "NaN"])
async def test_a_kubernetes_lease_with_a_senseless_annotation_is_read(
    open_kubernetes, lease_server, renewals
):
    register = open_kubernetes()
    await register.write(RECORD, replacing=None)
    lease_server.lease["metadata"]["annotations"]["equipoise/renewals"] = renewals
    assert (await register.read()).record == RECORD


async def test_people_can_read_the_lease_and_a_foreign_one_is_free(open_kubernetes, lease_server):
    register = open_kubernetes()
    first = await register.write(RECORD, replacing=None)
    spec = lease_server.lease["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("a", 4)
    assert spec["leaseDurationSeconds"] == 3
    lease_server.lease = {"metadata": {"name": "eq", "resourceVersion": first.version}}
    assert (await register.read()).record.holder == ""
