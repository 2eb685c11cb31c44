"""The page in a real browser: what it shows of a large fleet, and how it is read."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from equipoise.balancer.web import server, stream
from equipoise.balancer.web.server import serving_page
from tests.balancer.test_web import state_of
from tests.support.browser import browsing, require_axe, require_chromium
from tests.support.pictured_fleet import BEGAN_S, PicturedFleet, empty_pool, pictured_pool

HEAT = "document.querySelector('[data-part=heat] canvas')"
HEAT_READ = "document.querySelector('[data-part=heat-read]').textContent"
CHART = "document.querySelector('[data-part=chart] svg')"
CHART_READ = "document.querySelector('[data-part=balance-read]').textContent"
FRAME_MS = 1000 / 60
NUM_MOVES = 60
PHASES = ("prefill", "decode")


@asynccontextmanager
async def looking_at(fleet, *, width=1440, height=1000, dark=False, of=""):
    """A browser that shows this fleet."""
    chromium = require_chromium()
    async with serving_page(fleet, listen="127.0.0.1:0") as where, browsing(chromium) as page:
        await page.look(width=width, height=height, dark=dark)
        await page.goto(f"http://{where}/{of}")
        await page.until("document.querySelector('#live').dataset.state === 'on'")
        yield page
        assert page.faults == []


def all_of(part, what="textContent"):
    return f"[...document.querySelectorAll('[data-part={part}]')].map((one) => one.{what})"


async def middle_of(page, element):
    box = json.loads(await page.value(f"JSON.stringify({element}.getBoundingClientRect())"))
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


@pytest.fixture
def large():
    return PicturedFleet(pictured_pool(ranks=320, layers=58))


async def test_both_pools_of_a_disaggregated_fleet_stand_side_by_side():
    pools = (
        pictured_pool("decode", ranks=16, layers=4),
        pictured_pool("prefill", phase="prefill", ranks=8, layers=4),
        pictured_pool("others", phase="mixed", ranks=8, layers=4),
    )
    async with looking_at(PicturedFleet(*pools)) as page:
        await page.until(f"{all_of('heat-read')}.filter((one) => one.includes('mean')).length == 2")
        assert await page.value(all_of("name")) == ["prefill", "decode"]
        prefill, decode = await page.value(all_of("figures"))
        assert "prompts handed over1,951 · 12,288 tokens held now" in prefill
        assert "prompts received1,947 · 99.9 % of their latents" in decode
        tops = await page.value(all_of("name", "getBoundingClientRect().top"))
        assert tops[0] == tops[1]
        assert await page.value("document.querySelectorAll('#pools [aria-current]').length") == 2
        await page.value("document.querySelectorAll('#pools a')[2].click()")
        await page.until(f"{all_of('name')}.join() === 'others'")
        assert await page.value("document.documentElement.scrollWidth") == 1440


async def test_pools_that_do_not_understand_each_other_are_not_shown_as_one_fleet():
    first, second = (
        [pictured_pool(f"{fleet}-{phase}", phase=phase, ranks=8, layers=2) for phase in PHASES]
        for fleet in "ab"
    )
    fleet = PicturedFleet(*first, *second)
    fleet.latent_forms = {key: ["61 layers of 576"] for key in ("b-decode", "b-prefill")}
    async with looking_at(fleet, of="#pool=b-decode") as page:
        await page.until(f"{all_of('name')}.join() === 'b-prefill,b-decode'")
    fleet.latent_forms = {}  # Now any of two could be the partner.
    async with looking_at(fleet, of="#pool=b-decode") as page:
        await page.until(f"{all_of('name')}.join() === 'b-decode'")


async def test_a_page_keeps_its_pool_when_others_come_and_go():
    fleet = PicturedFleet(pictured_pool("moe", phase="mixed", ranks=8, layers=2))
    pools = fleet.pools
    async with looking_at(fleet) as page:
        await page.until(f"{all_of('name')}.join() === 'moe'")
        fleet.pools = {**PicturedFleet(pictured_pool("deepseek", ranks=8, layers=2)).pools, **pools}
        await page.until("document.querySelectorAll('#pools a').length === 2")
        await asyncio.sleep(2)
        assert await page.value(all_of("name")) == ["moe"]
        fleet.pools = {}
        await page.until("document.querySelector('article').hidden")
        assert "No pools yet" in await page.value("document.querySelector('#notice').textContent")
        fleet.pools = pools
        await page.until(f"{all_of('name')}.join() === 'moe'")


@pytest.mark.parametrize("part", ["#pool=100%", "#pool=gone"])
async def test_an_address_of_no_pool_shows_the_first(part):
    fleet = PicturedFleet(pictured_pool("moe", phase="mixed", ranks=8, layers=2))
    async with looking_at(fleet, of=part) as page:
        await page.until(f"{all_of('name')}.join() === 'moe'")


async def test_a_page_too_many_says_so_and_is_shown_later(monkeypatch):
    fleet = PicturedFleet(pictured_pool("moe", phase="mixed", ranks=8, layers=2))
    monkeypatch.setattr(stream, "_RETRY_AFTER_S", "1")
    monkeypatch.setattr(server, "EventStreams", lambda state: streams[0])
    streams = [stream.EventStreams(fleet, max_clients=0)]
    live = "document.querySelector('#live').textContent"
    chromium = require_chromium()
    async with serving_page(fleet, listen="127.0.0.1:0") as where, browsing(chromium) as page:
        await page.goto(f"http://{where}/")
        await page.until(f"{live} === '0 pages are open: try again in 1 s'")
        streams[0]._max_clients = 8
        await page.until(f"{live} === 'live'")


async def test_readouts_survive_live_updates_and_obey_the_keyboard(large):
    async with looking_at(large) as page:
        await page.until(f"{HEAT_READ}.startsWith('busiest: layer 0, rank 106 on node-13')")
        await page.value(f"{HEAT}.focus()")
        for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
            await page.press(key)
        read = await page.value(HEAT_READ)
        assert read.startswith("layer 1, rank 107 on node-13: ")
        await page.value(f"{CHART}.scrollIntoView()")
        await page.point(*await middle_of(page, CHART))
        chart_read = await page.value(CHART_READ)
        pool, heat = large.pools["decode"]
        newer = {**pool["windows"][-1], "window": 99, "closed_unix_s": 1_790_000_610.0}
        pool["windows"].append(newer)
        heat["window"] = 99
        await page.until(f"{CHART}.ariaLabel.startsWith('Balancedness of 61 windows')")
        await page.until(f"{HEAT}.ariaLabel.includes('in window 99')")
        assert await page.value(HEAT_READ) == read
        assert await page.value(CHART_READ) == chart_read
        assert await page.value(f"document.activeElement === {HEAT}")
        await page.press("Escape")
        assert (await page.value(HEAT_READ)).startswith("busiest: ")
        await page.value(f"{HEAT}.scrollIntoView({{ block: 'center' }})")
        await page.point(*await middle_of(page, HEAT))
        assert (await page.value(HEAT_READ)).startswith("layer 29, rank 15")
        await page.value(f"{CHART}.focus()")
        await page.press("ArrowLeft")
        await page.press("ArrowLeft")
        assert await page.value(CHART_READ) != chart_read


@pytest.mark.parametrize("width", [390, 820, 1440, 2100])
async def test_tiles_never_touch_and_nothing_overflows(large, width):
    large.pools["decode"][0]["generation"] = 1_234_567
    async with looking_at(large, width=width) as page:
        await page.until(f"{HEAT_READ}.includes('mean')")
        assert await page.value("document.documentElement.scrollWidth") == width
        touching = """(() => {
          const boxes = [...document.querySelectorAll('[data-part=figures] > div')].map((one) => {
            const range = document.createRange();
            range.selectNodeContents(one);
            return range.getBoundingClientRect();
          });
          return boxes.flatMap((a, i) => boxes.slice(i + 1).filter((b) =>
            a.left < b.right + 10 && b.left < a.right + 10 &&
            a.top < b.bottom && b.top < a.bottom));
        })().length"""
        assert await page.value(touching) == 0


async def test_ranks_are_listed_worst_first_and_sorted_by_any_column(large):
    rows = "[...document.querySelectorAll('[data-part=ranks] tr')]"
    ranks = f"{rows}.map((one) => +one.cells[0].textContent)"
    async with looking_at(large) as page:
        await page.until(f"{ranks}.length === 320")
        assert (await page.value(ranks))[0] == 160  # It is silent.
        assert await page.value(f"{all_of('ranks-read')}[0]") == "worst first"
        await page.value("document.querySelector('[data-key=rank] button').click()")
        assert (await page.value(ranks))[:3] == [0, 1, 2]
        await page.value("document.querySelector('[data-key=rank] button').click()")
        assert (await page.value(ranks))[:3] == [319, 318, 317]
        sort = "document.querySelector('[data-key=rank]').ariaSort"
        assert await page.value(sort) == "descending"
        large.pools["decode"][0]["generation"] = 13
        await page.until(f"{all_of('figures')}[0].includes('13 · epoch')")
        assert (await page.value(ranks))[:3] == [319, 318, 317]


async def test_paused_and_pinned_are_as_loud_as_serving(large):
    large.pools["decode"][0]["hold"] = {"paused": "admin/ann", "pinned": "admin/bob"}
    async with looking_at(large) as page:
        await page.until(f"{HEAT_READ}.includes('mean')")
        pills = """[...document.querySelectorAll('.pill')]
          .map((one) => [one.textContent, getComputedStyle(one).fontSize])"""
        words, sizes = zip(*await page.value(pills), strict=True)
        assert words == ("degraded", "paused", "pinned")
        assert len(set(sizes)) == 1
        why = (await page.value(all_of("why")))[0]
        assert why.endswith(" · paused by admin/ann · pinned by admin/bob")


async def test_quarantined_workers_and_poison_requests_are_shown(large):
    pool = large.pools["decode"][0]
    async with looking_at(large) as page:
        await page.until(f"{HEAT_READ}.includes('mean')")
        assert await page.value(all_of("pills")) == ["degraded"]
        assert "poison" not in (await page.value(all_of("events")))[0]
        reason = "layer 3, slot 5 has other bytes than the checkpoint"
        pool["quarantined"] = [
            {"worker": "decode-7", "boot_id": "b", "reason": reason, "since_unix_s": BEGAN_S,
             "until_restart": True}
        ]  # fmt: skip
        pool["poison_requests"] = 3
        await page.until(f"{all_of('pills')}[0] === 'degraded1 quarantined'")
        events = (await page.value(all_of("events")))[0]
        assert events.startswith(f"quarantined14:13:20decode-7: {reason}until it restarts")
        assert " poisonrequests that gateways rejected" in events


async def test_the_axis_starts_where_its_lowest_label_says(large):
    async with looking_at(large) as page:
        await page.until(f"{HEAT_READ}.includes('mean')")
        lowest = f"[...{CHART}.querySelectorAll('.guide')].at(-1).getAttribute('y1')"
        area = f"{CHART}.querySelector('.area').getAttribute('points')"
        assert (await page.value(area)).endswith(f",{await page.value(lowest)}")
        labels = f"[...{CHART}.querySelectorAll('text')].map((one) => one.textContent)"
        assert (await page.value(labels))[:5] == ["1.0", "0.9", "0.8", "0.7", "0.6"]
        times = f"[...{CHART}.querySelectorAll('.time')].map((one) => one.textContent)"
        assert await page.value(times) == [f"14:{minute}" for minute in range(14, 24)]


@pytest.mark.parametrize(("ranks", "layers"), [(320, 58), (16, 4)])
async def test_the_heat_map_shows_nodes_and_clips_no_label(ranks, layers):
    pixels = f"""(() => {{
      const canvas = {HEAT}, {{ width, height }} = canvas;
      const image = canvas.getContext('2d').getImageData(0, 0, width, height).data;
      const inked = (x, y) => image[4 * (y * width + x) + 3] > 0;
      const all = (number) => Array.from({{ length: number }}, (_, i) => i);
      const left = 32, cell = (width - left) / {ranks};
      const row = Math.max(5, Math.min(44, Math.floor(330 / {layers})));
      return {{
        clipped: all(width).some((x) => inked(x, 0) || inked(x, height - 1))
          || all(height).some((y) => inked(0, y)),
        label: all(24).some((x) => all(row).some((y) => inked(x, 22 + y))),
        borders: all({ranks}).filter((rank) => inked(Math.round(left + rank * cell - 0.5), 19)),
        // Labels below the map, by the rank whose column is above their middle.
        ticks: all(width - left).map((x) => x + left - 3)
          .filter((x) => all(14).some((y) => inked(x, 22 + row * {layers} + 6 + y)))
          .reduce((runs, x) => x - runs.at(-1)?.at(-1) < 7
            ? [...runs.slice(0, -1), [...runs.at(-1), x]] : [...runs, [x]], [])
          .map((run) => Math.round(((run[0] + run.at(-1) + 1) / 2 - left) / cell - 0.5)),
      }};
    }})()"""
    pool = pictured_pool(ranks=ranks, layers=layers)
    async with looking_at(PicturedFleet(pool)) as page:
        await page.until(f"{HEAT_READ}.includes('mean')")
        found = await page.value(pixels)
    assert not found["clipped"]
    assert found["label"], "layer 0 has no label"
    assert found["borders"] == list(range(8, ranks, 8))
    first, *ticks = found["ticks"]
    assert first <= 1, "beside the word rank"
    assert ticks == list(range(0, ranks, 8 if ranks == 320 else 1))[1:]


async def test_a_shared_expert_in_slots_is_counted_apart(large):
    large.pools["decode"][0]["model"] |= {"num_experts": 257, "has_shared_expert": True}
    async with looking_at(large) as page:
        await page.until(f"{all_of('figures')}[0].includes('58 · 256 experts and the shared one')")


async def test_what_had_no_traffic_shows_no_data():
    pool, heat = pictured_pool(ranks=8, layers=3)
    heat["percent"][1] = None
    async with looking_at(PicturedFleet((pool, heat))) as page:
        await page.until(f"{HEAT_READ}.startsWith('busiest: layer 0')")
        await page.value(f"{HEAT}.focus()")
        for key in ("ArrowDown", "ArrowDown"):
            await page.press(key)
        assert (await page.value(HEAT_READ)).endswith(": no data")
        await page.press("Escape")
        heat["percent"] = [None] * 3
        heat["window"] += 1
        pool["balancedness"] = pool["balancedness_min_layer"] = None
        for rank in pool["ranks"]:
            rank["load_share"] = None
        pool["decisions"] = [
            {**pool["decisions"][0], "balancedness_current": None, "balancedness_proposed": None}
        ]
        await page.until(f"{HEAT_READ} === 'The latest window had no traffic.'")
        assert not await page.value(f"{HEAT}.offsetWidth")
        figures = (await page.value(all_of("figures")))[0]
        for name in ("balancedness", "worst layer", "busiest rank"):
            assert f"{name}no data" in figures
        cells = "[...document.querySelectorAll('[data-part=ranks] tr')].map((one) => one.innerText)"
        assert all("no data" in row for row in await page.value(cells))
        decisions = (await page.value(all_of("decisions")))[0]
        assert decisions.endswith("640 moves · 26.2 GiB · planned in 1.84 s")


async def test_the_line_of_balance_ends_where_traffic_did(large):
    windows = large.pools["decode"][0]["windows"]
    for window in [*windows[20:30], *windows[50:]]:
        window |= {"assignments": 0, "balancedness": None}
    async with looking_at(large) as page:
        await page.until(f"{CHART}?.ariaLabel.startsWith('Balancedness of 40 windows')")
        lines = f"[...{CHART}.querySelectorAll('.now')].map((one) => [...one.points])"
        first, second = await page.value(f"{lines}.map((one) => [one[0].x, one.at(-1).x])")
        # Nothing between them, and the axis goes on to the latest window.
        assert 10 < (second[0] - first[1]) / (first[1] - first[0]) * 19 < 12
        assert await page.value(f"{CHART}.viewBox.baseVal.width - 12 - {second[1]}") > 100
        times = f"[...{CHART}.querySelectorAll('.time')].map((one) => one.textContent)"
        assert (await page.value(times))[-1] == "14:23"


async def test_fewer_ranks_than_intended_and_long_names_are_shown(large):
    pool = large.pools["decode"][0]
    pool["intended_ranks"] = 324
    long = "eq-equipoise-worker-deepseek-v3-decode-ep320-160"
    pool["ranks"][160] |= {"worker": long, "node": "ip-10-0-20-17.eu-central-1.compute.internal"}
    async with looking_at(large) as page:
        await page.until(f"{all_of('figures')}[0].includes('ranks320 of 324 · decode')")
        cells = "[...document.querySelector('[data-part=ranks] tr').cells]"
        name, node = (await page.value(f"{cells}.map((one) => one.innerText)"))[1:3]
        assert name.splitlines()[0] == "eq-equipoise-wo…decode-ep320-160 silent"
        assert node == "ip-10-0-20…te.internal"
        assert await page.value(f"{cells}[1].firstChild.title") == long


@pytest.mark.parametrize(("ranks", "beside"), [(4, "ranks"), (16, "decisions")])
async def test_other_events_stand_where_there_is_room(ranks, beside):
    pool = pictured_pool(ranks=ranks, layers=2)
    async with looking_at(PicturedFleet(pool)) as page:
        await page.until(f"document.querySelectorAll('[data-part=ranks] tr').length === {ranks}")
        left = "document.querySelector('.card.{}').getBoundingClientRect().left"
        assert await page.value(left.format("events")) == await page.value(left.format(beside))
        assert await page.value(left.format("ranks")) < await page.value(left.format("decisions"))


async def test_every_column_of_ranks_fits_a_phone(large):
    async with looking_at(large, width=390) as page:
        await page.until("document.querySelectorAll('[data-part=ranks] tr').length === 320")
        table = "document.querySelector('.scroll')"
        assert await page.value(f"{table}.scrollWidth - {table}.clientWidth") == 0


async def test_every_empty_part_says_what_is_missing():
    async with looking_at(PicturedFleet(empty_pool())) as page:
        await page.until(f"{all_of('name')}.join() === 'new'")
        text = await page.value("document.querySelector('main').innerText")
        for words in (
            "1 of 8 workers is connected",
            "No window with traffic has closed yet.",
            "No window has closed yet.",
            "No worker has a rank yet",
            "No decision yet.",
            "None yet: no switch",
            "no data",
        ):
            assert words in text
        for words in ("undefined", "NaN", "null", "below the mean", "a new layout"):
            assert words not in text
    async with looking_at(PicturedFleet()) as page:
        await page.until("!document.querySelector('#notice').hidden")
        assert "No pools yet" in await page.value("document.querySelector('#notice').innerText")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_axe_finds_nothing(dark):
    axe = require_axe()
    pool, heat = pictured_pool("decode", ranks=16, layers=4)
    pool["hold"] = {"paused": "admin/ann", "pinned": ""}
    prefill = pictured_pool("prefill", phase="prefill", ranks=8, layers=4)
    async with looking_at(PicturedFleet((pool, heat), prefill), dark=dark) as page:
        await page.until(f"{all_of('heat-read')}.filter((one) => one.includes('mean')).length == 2")
        await page.value(f"{axe}; 0")
        found = "axe.run().then((all) => all.violations.map((one) => [one.id, one.nodes[0].html]))"
        assert await page.value(found) == []


@pytest.mark.benchmark
async def test_the_heat_map_of_320_ranks_answers_the_pointer_within_a_frame(large, capsys):
    async with looking_at(large) as page:
        await page.until(f"{HEAT_READ}.includes('mean')")
        box = json.loads(await page.value(f"JSON.stringify({HEAT}.getBoundingClientRect())"))

        async def cost_ms(y, *, step):
            """Main thread's CPU time for a move of the pointer and the frame that follows."""
            began_s = await page.cpu_s()
            for move in range(NUM_MOVES):
                await page.point(box["x"] + 40 + 10 * move, y + step * move)
                await page.value("new Promise(requestAnimationFrame)")
            return 1000 * (await page.cpu_s() - began_s) / NUM_MOVES

        over_map = await cost_ms(box["y"] + 30, step=4)
        assert (await page.value(HEAT_READ)).startswith("layer ")
        elsewhere = await cost_ms(5, step=0)
    with capsys.disabled():
        print(f"\na move over 320 ranks: {over_map:.1f} ms of CPU, elsewhere {elsewhere:.1f} ms")
    assert over_map < FRAME_MS


def test_the_pictured_fleet_has_what_the_balancer_sends(busy_events):
    """The fields of the made-up pool are those of a real one."""
    pool, heat = pictured_pool(ranks=8, layers=3)
    real = json.loads(busy_events["pool"])
    assert set(pool) <= set(real)
    assert set(heat) == set(json.loads(busy_events["heat"]))
    for part in ("ranks", "windows", "switches", "epochs", "timeouts"):
        assert set(pool[part][0]) <= set(real[part][0]), part


@pytest.fixture
def busy_events(serving_harness, skewed):
    serving_harness.run_traffic(skewed(1), seconds=40)
    return asyncio.run(state_of(serving_harness.pool).events(""))
