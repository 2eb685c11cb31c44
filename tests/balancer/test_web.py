"""The web page: its content, who may see it, and that a real browser draws it."""

import asyncio
import json
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import replace
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from equipoise.balancer.settings import BalancerSettings
from equipoise.balancer.store.store import StoreError
from equipoise.balancer.web import state as state_module
from equipoise.balancer.web.server import _TYPE_OF_FILE, HEADERS, page_routes, serving_page
from equipoise.balancer.web.state import MAX_COLUMNS, MAX_RANKS, PageState, heat_of
from equipoise.balancer.web.stream import EventStreams
from equipoise.settings.errors import InvalidSettingsError
from equipoise.trust.settings import Tls
from tests.support.browser import browsing, require_chromium

WAIT_S = 120.0


class Seat:
    """Leads the pools it is given, or follows and remembers them."""

    def __init__(self, *pools, leader=""):
        self.sources = {pool.name: SimpleNamespace(pool=pool, redundancy=None) for pool in pools}
        self.unreadable = {}
        self.leader_address = leader or None
        self.elsewhere = f"this balancer follows the leader at {leader}: connect there"

    @property
    def pools(self):
        return SimpleNamespace(
            names=lambda: tuple(self.sources),
            find=self.sources.__getitem__,
            unreadable=self.unreadable,
        )

    @property
    def led(self):
        return None if self.leader_address else self.pools


class Store:
    """Remembers one decision a pool."""

    async def decisions(self, pool, *, limit):
        return ()


def named(pool, name):
    """The same pool by another name."""
    other = copy(pool)
    other.name = name
    return other


def state_of(*pools, leader=""):
    return PageState(Seat(*pools, leader=leader), store=Store(), clock=lambda: 0.0)


@pytest.fixture
def busy(serving_harness, skewed):
    """A pool that was balanced once."""
    serving_harness.run_traffic(skewed(1), seconds=40)
    return serving_harness.pool


def browse(state, **settings):
    streams = EventStreams(state, **settings)
    hosts = frozenset({"testserver"})
    return TestClient(Starlette(routes=[page_routes(state, streams, hosts=hosts)]))


def test_every_file_of_the_page_comes_with_the_headers_that_fence_it_in(busy):
    client = browse(state_of(busy))
    for path in ("/", "/page.css", "/page.js", "/view.js", "/state.json"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert "'unsafe" not in HEADERS["Content-Security-Policy"]
    assert client.get("/../server.py").status_code == 404
    assert client.post("/").status_code == 405


async def test_a_pool_that_cannot_be_shown_hides_no_other(busy, monkeypatch, caplog):
    broken = named(busy, "a-broken")
    broken.counters = None
    monkeypatch.setattr(state_module, "_SHARE_OF_LOOP", 1e9)
    state = state_of(broken, named(busy, "b-whole"))
    events = await state.events("")
    fleet = json.loads(events["fleet"])["pools"]
    assert [one["pool"] for one in fleet] == ["a-broken", "b-whole"]
    assert "the page of pool a-broken failed (1 so far)" in caplog.text
    assert json.loads((await state.events("b-whole"))["pool"])["pool"] == "b-whole"
    broken.roster = None
    fleet = json.loads((await state.events(""))["fleet"])["pools"]
    assert [bool(one["unreadable"]) for one in fleet] == [True, False]
    assert "pool a-broken cannot be shown because of a bug" in fleet[0]["unreadable"]


def test_the_page_is_small_and_brings_all_it_needs():
    folder = files("equipoise.balancer.web")
    page = {
        one.name: one.read_text()
        for one in folder.iterdir()
        if one.name.endswith((".html", ".css", ".js"))
    }
    assert set(page) == set(_TYPE_OF_FILE)
    assert sum(map(len, page.values())) <= 55_000
    for text in page.values():
        links = text.replace("http://www.w3.org/2000/svg", "").replace("`http://${host}", "")
        assert "http://" not in links
        assert "https://" not in links
        assert "innerHTML" not in links


def test_a_page_of_this_machine_answers_to_no_other_name(busy):
    client = browse(state_of(busy))
    assert client.get("/state.json", headers={"Host": "evil.example"}).status_code == 421
    assert client.get("/state.json", headers={"Host": "testserver:8080"}).status_code == 200


def test_the_page_is_on_loopback_only_unless_insecure_is_set():
    with pytest.raises(InvalidSettingsError, match="does not authenticate"):
        BalancerSettings(web_listen="0.0.0.0:8080")
    BalancerSettings(web_listen="0.0.0.0:8080", tls=Tls(insecure=True))
    BalancerSettings(web_listen="127.0.0.1:8080")


def test_the_state_has_the_fleet_one_pool_and_its_load(busy):
    state = browse(state_of(busy)).get("/state.json").json()
    assert state["fleet"]["leads"]
    assert [pool["pool"] for pool in state["fleet"]["pools"]] == ["tiny"]
    pool, window = state["pool"], busy.windows.latest
    assert (pool["pool"], pool["num_ranks"]) == ("tiny", 4)
    assert pool["balancedness"] == pytest.approx(window.balancedness)
    assert [one["generation"] for one in pool["switches"]] == sorted(
        (one.generation for one in busy.rollouts.switches), reverse=True
    )
    percent = np.array(state["heat"]["percent"])
    assert percent.shape == window.rank_load.shape
    assert percent.mean(axis=1) == pytest.approx(100, abs=1)
    assert state["heat"]["nodes"] == [[0, "node-0"], [2, "node-1"]]


def test_one_of_several_pools_is_selected_by_name(busy, hello_of, policy):
    other = named(busy, "zebra")
    client = browse(state_of(busy, other))
    assert client.get("/state.json").json()["pool"]["pool"] == "tiny"
    assert client.get("/state.json?pool=zebra").json()["pool"]["pool"] == "zebra"
    assert list(client.get("/state.json?pool=gone").json()) == ["fleet"]


class SlowStore(Store):
    """Answers once it may, or fails."""

    def __init__(self):
        self.may_answer = asyncio.Event()
        self.error, self.num_reads = None, 0

    async def decisions(self, pool, *, limit):
        self.num_reads += 1
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return ()


def shown(events):
    return json.loads(events["pool"])["revision"]


async def test_a_store_that_hangs_holds_up_no_state(busy, monkeypatch):
    monkeypatch.setattr(state_module, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(state_module, "_SHARE_OF_LOOP", 1e9)
    store = SlowStore()
    state = PageState(Seat(busy), store=store, clock=lambda: 0.0)
    assert shown(await state.events("")) == busy.revision
    busy.revision += 1
    for _ in range(3):
        assert shown(await state.events("")) == busy.revision
    assert store.num_reads == 1, "all clients share one"
    store.may_answer.set()
    await state.events("")
    await state.events("")
    assert store.num_reads == 1


async def test_decisions_are_read_again_after_the_store_has_failed(busy, monkeypatch):
    monkeypatch.setattr(state_module, "_STORE_PAUSE_S", 0.0)
    store = SlowStore()
    store.error = StoreError("down")
    store.may_answer.set()
    state = PageState(Seat(busy), store=store, clock=lambda: 0.0)
    assert shown(await state.events("")) == busy.revision
    store.error = None
    for _ in range(3):  # The pool, a follower's, does not change.
        await state.events("")
    assert store.num_reads == 2


async def test_decisions_that_cannot_be_shown_hide_no_pool(busy, caplog):
    store = SlowStore()
    store.error = KeyError("a bug")
    store.may_answer.set()
    state = PageState(Seat(busy), store=store, clock=lambda: 0.0)
    for _ in range(3):
        assert shown(await state.events("")) == busy.revision
    assert store.num_reads == caplog.text.count("its decisions cannot be shown") == 1


async def test_a_viewer_that_leaves_takes_nothing_from_the_others(busy):
    store = SlowStore()
    state = PageState(Seat(busy), store=store, clock=lambda: 0.0)
    left = asyncio.create_task(state.events(""))
    await asyncio.sleep(0.01)
    left.cancel()
    store.may_answer.set()
    assert {"fleet", "pool", "heat"} == set(await state.events(""))


async def test_all_viewers_share_one_summary_of_the_fleet(busy, monkeypatch):
    made = []
    summaries = state_module.pool_summaries
    monkeypatch.setattr(
        state_module, "pool_summaries", lambda *args: made.append(1) or summaries(*args)
    )
    monkeypatch.setattr(state_module, "_SHARE_OF_LOOP", 1e-6)
    state = state_of(busy)
    for _ in range(5):
        assert json.loads((await state.events(""))["fleet"])["pools"]
    assert len(made) == 1


def test_a_pool_that_cannot_be_read_is_listed_with_the_reason(busy):
    state = state_of(busy)
    state._seat.unreadable["torn"] = "pool torn cannot be read: restore its keys"
    shown = browse(state).get("/state.json?pool=torn").json()
    assert [pool["pool"] for pool in shown["fleet"]["pools"]] == ["tiny", "torn"]
    assert shown["fleet"]["pools"][1]["unreadable"] == "pool torn cannot be read: restore its keys"
    assert "pool" not in shown


def test_a_follower_names_the_balancer_that_leads(busy):
    fleet = browse(state_of(busy, leader="balancer-1:7070")).get("/state.json").json()["fleet"]
    assert (fleet["leads"], fleet["leader"]) == (False, "balancer-1:7070")
    assert "follows the leader at balancer-1:7070" in fleet["words"]


def test_of_very_many_ranks_columns_show_the_busiest(busy):
    load = np.ones((3, 3 * MAX_COLUMNS + 1))
    load[1, 7] = 100.0
    heat = heat_of(replace(busy.windows.latest, rank_load=load))
    assert heat["ranks_per_column"] == 4
    assert len(heat["percent"][0]) <= MAX_COLUMNS
    assert np.argmax(heat["percent"][1]) == 1


def test_a_layer_without_load_has_no_cells(busy):
    load = np.ones((3, 2 * MAX_COLUMNS))
    load[1] = 0
    heat = heat_of(replace(busy.windows.latest, rank_load=load))
    assert [None if row is None else set(row) for row in heat["percent"]] == [{100}, None, {100}]


async def test_of_very_many_ranks_those_in_trouble_are_listed(busy):
    member = next(iter(busy.roster.members.values()))
    for rank in range(4, MAX_RANKS + 40):
        hello = replace(member.hello, worker=f"more-{rank}")
        busy.roster._members[hello.worker] = replace(member, hello=hello, rank=rank)
    busy.roster._note_seats()
    busy.roster._members["more-290"].gone_reason = "its stream ended"
    pool = json.loads((await state_of(busy).events(""))["pool"])
    assert pool["num_ranks"] == MAX_RANKS + 40
    assert len(pool["ranks"]) == MAX_RANKS
    assert "gone" in {rank["state"] for rank in pool["ranks"]}


# Streams ------------------------------------------------------------------------------------------


@asynccontextmanager
async def stream(address, path="/events"):
    """Events of a stream, as (event, value)."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)

    async def events():
        name = ""
        while line := await reader.readline():
            if line.startswith(b"event: "):
                name = line[7:].decode().strip()
            elif line.startswith(b"data: "):
                yield name, json.loads(line[6:])

    try:
        yield head.decode(), events()
    finally:
        writer.close()


async def until(events, name, holds=lambda value: True):
    async with asyncio.timeout(WAIT_S):
        async for event, value in events:
            if event == name and holds(value):
                return value
    raise AssertionError(f"the stream ended before {name}")


async def test_a_stream_begins_with_the_whole_state_and_continues_with_changes(
    serving_harness, skewed
):
    harness = serving_harness
    harness.run_traffic(skewed(1), seconds=10)
    async with (
        serving_page(state_of(harness.pool), listen="127.0.0.1:0") as address,
        stream(address) as (head, events),
    ):
        assert "text/event-stream" in head
        assert HEADERS["Content-Security-Policy"] in head
        assert (await until(events, "fleet"))["pools"][0]["pool"] == "tiny"
        await until(events, "pool", lambda pool: pool["windows_closed"] == 1)
        await until(events, "heat", lambda heat: heat["window"] == 1)
        harness.run_traffic(skewed(1), seconds=10)
        await until(events, "heat", lambda heat: heat["window"] == 2)


async def test_a_stream_without_changes_sends_beats(busy, monkeypatch):
    monkeypatch.setattr("equipoise.balancer.web.stream.BEAT_S", 0.0)
    async with (
        serving_page(state_of(busy), listen="127.0.0.1:0") as address,
        stream(address) as (_, events),
    ):
        await until(events, "beat")


async def test_viewers_are_limited_and_one_that_leaves_makes_room(busy, monkeypatch):
    monkeypatch.setattr("equipoise.balancer.web.server.EventStreams", _streams_for_two)
    async with serving_page(state_of(busy), listen="127.0.0.1:0") as address:
        async with stream(address) as (first, events), stream(address) as (second, _):
            assert "200 OK" in first
            assert "200 OK" in second
            async with stream(address) as (third, _):
                assert "503" in third
                assert "retry-after" in third
            await until(events, "pool")
        async with asyncio.timeout(WAIT_S):
            while True:
                async with stream(address) as (head, _):
                    if "200 OK" in head:
                        break


async def test_a_balancer_that_stops_lets_those_go_who_look(busy):
    async with asyncio.timeout(WAIT_S):
        async with serving_page(state_of(busy), listen="127.0.0.1:0") as address:
            looking = stream(address)
            _, events = await looking.__aenter__()
            await until(events, "pool")
        async for _ in events:
            pass
        await looking.__aexit__(None, None, None)


# A browser ----------------------------------------------------------------------------------------


async def test_a_real_browser_draws_the_page_at_three_sizes(busy):
    chromium = require_chromium()
    rank = next(iter(busy.roster.members.values()))
    busy.roster._members[rank.name] = replace(
        rank, hello=replace(rank.hello, node="<img src=x onerror=alert(1)>")
    )
    async with (
        serving_page(state_of(busy, named(busy, "<b>zebra")), listen="127.0.0.1:0") as where,
        browsing(chromium) as page,
    ):
        for width in (390, 820, 1440):
            await page.look(width=width, height=900, dark=width == 820)
            await page.goto(f"http://{where}/?{width}")
            await page.until("document.querySelector('#live').dataset.state === 'on'")
            await page.until("document.querySelectorAll('[data-part=ranks] tr').length === 4")
            await page.until(
                "document.querySelector('[data-part=heat-read]').textContent.includes('mean')"
            )
            words = await page.value("document.querySelector('[data-part=chart] svg').ariaLabel")
            assert words.startswith("Balancedness of 4 windows")
            assert (
                await page.value("document.querySelectorAll('[data-part=chart] .mark').length") >= 1
            )
            assert await page.value("document.documentElement.scrollWidth") == width
            assert await page.value("document.querySelectorAll('img, b b').length") == 0
        other = "[...document.querySelectorAll('#pools a')].find((one) => !one.ariaCurrent)"
        await page.value(f"{other}.click()")
        await page.until("document.querySelector('[data-part=name]').textContent === '<b>zebra'")
        assert page.faults == []


def _streams_for_two(state):
    return EventStreams(state, max_clients=2, interval_s=0.05)
