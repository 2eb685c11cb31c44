"""Redraws docs/images with Chromium: `python -m tests.support.page_pictures`."""

import asyncio
from pathlib import Path

from equipoise.balancer.web.server import serving_page
from tests.support.browser import browsing, require_chromium
from tests.support.pictured_fleet import PicturedFleet, pictured_pool

IMAGES = Path(__file__).parents[2] / "docs" / "images"
READ = "document.querySelector('[data-part=heat-read]').textContent.includes('mean')"


def fleets():
    """The fleet of each picture by file name, with the width and whether it is dark."""
    large = pictured_pool(ranks=320, layers=58)
    small = pictured_pool(ranks=16, layers=8, silent=False)
    paused, heat = pictured_pool("decode", ranks=32, layers=16, silent=False)
    paused["hold"] = {"paused": "admin/ann (network maintenance)", "pinned": ""}
    prefill = pictured_pool("prefill", phase="prefill", ranks=16, layers=16, seed=8, silent=False)
    return {
        "page-320-ranks": (PicturedFleet(large), 1440, False),
        "page-two-pools": (PicturedFleet(prefill, (paused, heat)), 1800, False),
        "page-1440-light": (PicturedFleet(small), 1440, False),
        "page-1440-dark": (PicturedFleet(small), 1440, True),
        "page-820-dark": (PicturedFleet(small), 820, True),
        "page-390-light": (PicturedFleet(small), 390, False),
    }


async def main():
    """Write every picture."""
    chromium = require_chromium()
    for name, (fleet, width, dark) in fleets().items():
        async with serving_page(fleet, listen="127.0.0.1:0") as where, browsing(chromium) as page:
            await page.look(width=width, height=1000, dark=dark)
            await page.goto(f"http://{where}/")
            await page.until(READ)
            await asyncio.sleep(0.3)  # The second pool, if there is one.
            (IMAGES / f"{name}.png").write_bytes(await page.screenshot())


if __name__ == "__main__":
    asyncio.run(main())
