#!/usr/bin/env python3
"""Pictures of the dashboard in Chromium: the demo model in a small pool, under load from other clients.

    python tools/screenshots.py [--memory 22MiB] [--out tools/results]

Needs `pip install '.[server,browser]'` and a Chromium of the system. Writes dashboard_1280_light.png and
dashboard_390_dark.png.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rimuru import LLM
from rimuru.server.run import ServerThread
from rimuru.server.settings import ServerSettings

VIEWS = ((1280, 900, "light"), (390, 800, "dark"))
OPENINGS = (
    "Once upon a time",
    "A fox and a crow",
    "The king had three sons",
    "In a small village",
    "There was a miller",
)
LOADED_S = 6.0
"""How long the others have been at it when a picture is taken."""


def keep_asking(url: str, number: int, is_over: threading.Event) -> None:
    """One client that asks for stories, each after a history of its own, until told to end."""
    turn = 0
    while not is_over.is_set():
        turn += 1
        prompt = f"{OPENINGS[number % len(OPENINGS)]}, {'and on it went, ' * (turn % 5 * 4)}"
        body = {"prompt": prompt, "max_tokens": 150 + 40 * number, "temperature": 0.7, "seed": turn}
        httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        is_over.wait(0.2 * number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", default="22MiB")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    is_over = threading.Event()
    with (
        LLM("demo", device="cpu", threads=2, memory=args.memory) as llm,
        ServerThread(llm.loaded, ServerSettings(port=0)) as url,
        sync_playwright() as playwright,
    ):
        others = [threading.Thread(target=keep_asking, args=(url, i, is_over)) for i in range(args.clients)]
        for other in others:
            other.start()
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width, height, scheme in VIEWS:
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(f"{url}/")
            page.fill("#limit", "120")
            page.fill("#question", "Tell me a story about a fox.")
            page.press("#question", "Enter")
            page.locator("#stop[disabled]").wait_for()
            page.locator("#messages .rate").wait_for()
            time.sleep(LOADED_S)
            page.screenshot(path=Path(args.out) / f"dashboard_{width}_{scheme}.png", full_page=True)
            page.close()
        is_over.set()
        for other in others:
            other.join()
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
