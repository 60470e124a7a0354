"""The dashboard: its data agree with the memory report, the page asks nobody else, and it works in a real browser."""

from __future__ import annotations

import re
import shutil
from typing import Any

import pytest
from server_fixtures import Running

from rimuru.base.units import human_bytes
from rimuru.engine.room import ExpertRoom
from rimuru.memory.adjuster import ForecastLog, StepForecast
from rimuru.memory.decisions import DecisionLog, FillLog, Record
from rimuru.server.dashboard import FILL_PAUSE_S, MOST_FILL_LINES, RUN_STEPS, STATIC, ChangeLog


def test_the_picture_agrees_with_the_report(script: Any) -> None:
    connection = script.request_socket({"prompt": "0" * 60, "temperature": 0, "max_tokens": 400, "stream": True})
    script.wait_until(lambda: script.http.get("/v1/dashboard").json()["running"] == 1)
    state = script.http.get("/v1/dashboard").json()
    connection.close()
    pool, memory = state["pool"], state["memory"]
    assert len(pool["cells"]) * pool["huge_per_cell"] >= pool["n_huge"] > 0
    shares: dict[str, float] = {}
    for cell in pool["cells"]:
        assert sum(share for _, share in cell) <= 1.001
        for owner, share in cell:
            kind = re.sub(r"\d", "", owner)
            shares[kind] = shares.get(kind, 0) + share * pool["huge_bytes"] * pool["huge_per_cell"]
    views = {name: view["bytes"] for name, view in memory["views"].items()}
    assert shares["e"] == pytest.approx(views["expert"], rel=0.01)
    assert shares["buffer"] == pytest.approx(views["buffer"], rel=0.01)
    assert shares["r"] + shares.get("prefix", 0) == pytest.approx(views["kv"], rel=0.01)
    layers = {int(owner[1:]) for cell in pool["cells"] for owner, _ in cell if owner[0] == "e"}
    assert layers == {0, 1}


def test_the_page_asks_nobody_else(script: Any) -> None:
    page = script.http.get("/")
    assert page.headers["content-type"].startswith("text/html") and "default-src 'none'" in page.headers[
        "content-security-policy"
    ]  # fmt: skip
    for name in ("dashboard.css", "dashboard.js"):
        assert script.http.get(f"/static/{name}").status_code == 200 and f'"static/{name}"' in page.text
    for file in STATIC.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//cdn" not in text and not re.search(r"https?://", text), file.name


def test_every_control_has_a_name(script: Any) -> None:
    page = script.http.get("/").text
    ids = set(re.findall(r'<(?:input|textarea) id="([^"]+)"', page))
    wrapped = set(re.findall(r'<label class="inline">[^<]*<input id="([^"]+)"', page))
    assert ids == wrapped | set(re.findall(r'<label for="([^"]+)"', page)) and len(ids) == 4
    assert 'lang="en"' in page and 'name="viewport"' in page


def test_decisions_are_the_adjusters_own(script: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those taken together are one line, the newest first, each once; what gave way meanwhile is counted together."""
    loaded = script.llm.loaded
    assert isinstance(loaded.room, ExpertRoom)
    monkeypatch.setattr(loaded.room, "decisions", DecisionLog())
    monkeypatch.setattr("rimuru.server.dashboard.OBSERVE_S", 0.0)
    changes, decisions = ChangeLog(loaded), loaded.room.decisions
    changes.observe()
    for layer, expert in ((0, 1), (0, 5), (1, 2)):
        decisions.add(Record(7, "shrink", "request 4 needs 9 pages", layer, expert, 3, 1 << 20))
    decisions.add(Record(8, "expand", "30 pages are free", 1, 2, 3, 1 << 20))
    decisions.add(Record(9, "refuse", "request 5 would need 90 pages, worth giving: 12", -1, -1, 0, 0))
    for n_pages in (3, 2):
        decisions.add(Record(9, "move", "2 pages of kind ssm must be free", -1, -1, n_pages, n_pages << 20))
    for n in (1, 2):
        changes.observe()
        monkeypatch.setattr(loaded.engine.scheduler, "n_preemptions", loaded.engine.scheduler.n_preemptions + n)
    changes.observe()
    assert [entry["text"] for entry in changes.entries] == [
        "3 answers gave way to others",
        "moved 5 pages within the pool (5.0 MiB): 2 pages of kind ssm must be free",
        "kept the experts: request 5 would need 90 pages, worth giving: 12",
        "brought in 1 expert of layer 1 (1.0 MiB): 30 pages are free",
        "gave up 3 experts of layers 0 to 1 (3.0 MiB): request 4 needs 9 pages",
    ]


def test_the_same_decision_again_and_again_is_one_line(script: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs end with another kind, another sort of reason, another event or a pause; no expert is told twice."""
    loaded = script.llm.loaded
    assert isinstance(loaded.room, ExpertRoom)
    monkeypatch.setattr(loaded.room, "decisions", DecisionLog())
    monkeypatch.setattr("rimuru.server.dashboard.OBSERVE_S", 0.0)
    changes, decisions = ChangeLog(loaded), loaded.room.decisions

    def texts() -> list[str]:
        changes.observe()
        return [entry["text"] for entry in changes.entries]

    for step, request, pages, layer in ((1, 4, "2 pages", 3), (1, 5, "1 page", 2), (2, 4, "1 page", 2)):
        decisions.add(Record(step, "shrink", f"request {request} needs {pages}", layer, 0, 3, 1 << 20))
    assert texts() == ["gave up 3 experts of layers 2 to 3 (3.0 MiB) in 3 goes, last: request 4 needs 1 page"]
    decisions.add(Record(2 + RUN_STEPS, "shrink", "request 9 needs 12 pages", 5, 0, 3, 1 << 20))
    joined = "gave up 4 experts of layers 2 to 5 (4.0 MiB) in 4 goes, last: request 9 needs 12 pages"
    assert texts() == [joined]
    decisions.add(Record(3 + 2 * RUN_STEPS, "shrink", "request 9 needs 1 page", 5, 1, 3, 1 << 20))
    later = "gave up 1 expert of layer 5 (1.0 MiB): request 9 needs 1 page"
    assert texts() == [later, joined]
    decisions.add(Record(4 + 2 * RUN_STEPS, "shrink", "0 pages are free", 1, 1, 3, 1 << 20))
    decisions.add(Record(5 + 2 * RUN_STEPS, "shrink", "1 page is free", 1, 2, 3, 1 << 20))
    free = "gave up 2 experts of layer 1 (2.0 MiB) in 2 goes, last: 1 page is free"
    assert texts() == [free, later, joined]
    monkeypatch.setattr(loaded.engine.scheduler, "n_preemptions", loaded.engine.scheduler.n_preemptions + 1)
    told = ["1 answer gave way to others", free, later, joined]
    assert texts() == told
    decisions.add(Record(5 + 2 * RUN_STEPS, "shrink", "1 page is free", 1, 3, 3, 1 << 20))
    told = ["gave up 1 expert of layer 1 (1.0 MiB): 1 page is free", *told]
    for reason in (
        "1 expert would cost 0.5 ms of every step of 2 requests",
        "3 experts would cost 12.0 ms of every step of 1 request",
    ):
        decisions.add(Record(6 + 2 * RUN_STEPS, "refuse", reason, -1, -1, 0, 0))
    assert texts() == [f"kept the experts 2 times, last: {reason}", *told]


def test_a_thousand_fills_are_one_line(script: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside decisions, which stay one line as long as they go on; after a pause fills begin another."""
    loaded, now = script.llm.loaded, [1000.0]
    layout = loaded.layout.expert
    assert layout is not None and loaded.layout.expert is not None
    decisions = DecisionLog()
    decisions.fills = fills = FillLog(layout)
    monkeypatch.setattr(loaded.room, "decisions", decisions)
    monkeypatch.setattr("rimuru.server.dashboard.OBSERVE_S", 0.0)
    monkeypatch.setattr("rimuru.server.dashboard.time.time", lambda: now[0])
    changes = ChangeLog(loaded)

    def texts() -> list[str]:
        now[0] += 1
        changes.observe()
        return [entry["text"] for entry in changes.newest_first()]

    assert texts() == []
    first, last = layout.layers[0].layer, layout.layers[-1].layer
    size = [layer.n_pages * layout.page_bytes for layer in layout.layers]
    for number in range(1500):
        fills.add(7 + number, 0, number % 3, 3)
    decisions.add(Record(7, "shrink", "request 4 needs 9 pages", 1, 1, 3, 1 << 20))
    line = f"steps brought in 1500 experts of layer {first} ({human_bytes(1500 * size[0])}), last: "
    shrunk = "gave up 1 expert of layer 1 (1.0 MiB): request 4 needs 9 pages"
    assert texts() == [f"{line}expert 2 of layer {first}, missed, in place of expert 3", shrunk]
    fills.add(1600, len(size) - 1, 0)
    fills.n_foretold, fills.n_lost = 1, 20
    decisions.add(Record(8, "shrink", "request 4 needs 9 pages", 1, 2, 3, 1 << 20))
    of = f"1521 experts of layers {first} to {last} ({human_bytes(1500 * size[0] + size[-1])}, 1 of them foretold)"
    newest = f"expert 0 of layer {last}, missed, into an empty place"
    joined = f"steps brought in {of}, last: {newest}; of 20 of them nothing more is known"
    shrunk = "gave up 2 experts of layer 1 (2.0 MiB) in 2 goes, last: request 4 needs 9 pages"
    assert texts() == [joined, shrunk]
    for number in range(MOST_FILL_LINES + 2):
        now[0] += FILL_PAUSE_S
        fills.add(2000, 0, 1)
        lines = texts()
        assert lines[0].startswith(f"steps brought in 1 expert of layer {first} ("), number
    assert lines[-1] == shrunk and len(lines) == MOST_FILL_LINES + 1


def test_forecasts_are_told_beside_what_steps_took(script: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    store = script.llm.loaded.store
    assert store is not None
    forecasts = ForecastLog()
    forecasts.add(StepForecast("before", 8, 0.25, 0.5, 10, 10))
    forecasts.add(StepForecast("before", 8, 0.75, 0.5, 10, 10))
    monkeypatch.setattr(store.rates, "forecasts", forecasts)
    text = script.http.get("/metrics").text
    for name, value in (("forecasts", 2.0), ("forecast_expected_seconds", 1.0), ("forecast_took_seconds", 1.0)):
        assert f'rimuru_{name}_total{{way="before"}} {value}' in text


def test_fills_are_shown_over_http(script: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, decisions = script.llm.loaded, DecisionLog()
    assert loaded.layout.expert is not None
    decisions.fills = FillLog(loaded.layout.expert)
    decisions.fills.add(5, 1, 2, 3)
    decisions.fills.n_lost = 4
    monkeypatch.setattr(loaded.room, "decisions", decisions)
    text = script.http.get("/metrics").text
    assert 'rimuru_adjuster_decisions_total{action="fill"} 5.0' in text
    assert "rimuru_unrecorded_fills_total 4.0" in text
    told = script.http.get("/v1/memory").json()["decisions"]
    assert told["counts"]["fill"] == 5 and told["last"] == [] and told["fills"]["unrecorded"] == 4
    (record,) = told["fills"]["last"]
    assert (record["step"], record["action"], record["expert"]) == (5, "fill", 2)
    assert record["reason"] == "missed, in place of expert 3" and record["bytes"] > record["pages"] > 0

    def shown() -> list[str]:
        return [entry["text"] for entry in script.http.get("/v1/dashboard").json()["changes"]]

    script.wait_until(lambda: any(text.startswith("steps brought in 5 experts of layer 1") for text in shown()))


def test_reasons_say_one_page_and_two_pages(script: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    room = script.llm.loaded.room
    assert isinstance(room, ExpertRoom)
    told: list[str] = []
    monkeypatch.setattr(room, "shrink", lambda n, reason: told.append(reason) or 1)
    monkeypatch.setattr(room, "_compact", lambda *_: True)
    monkeypatch.setattr(room, "_unused_prefix_pages", lambda: 0)
    for name, value in (("policy", "paper"), ("pages_per_expert", 6.0), ("_is_short", False), ("_n_steps", 0)):
        monkeypatch.setattr(room, name, value)
    for n in (1, 2):
        monkeypatch.setattr(room, "pages_short", lambda *_, n=n: n)
        monkeypatch.setattr(ExpertRoom, "free_pages", n)
        room.make(7, 1)
        room._is_short = False
        room.adjust(1, 0, lambda: 0, 1.0)
    few = ", fewer than the reserve for the next request"
    assert told == [
        "request 7 needs 1 page",
        f"1 page is free{few}",
        "request 7 needs 2 pages",
        f"2 pages are free{few}",
    ]


def test_metrics_count_decisions_and_swapping(script: Running) -> None:
    text = script.http.get("/metrics").text
    for action in (actions := ("shrink", "expand", "refuse", "move", "fill")):
        assert f'rimuru_adjuster_decisions_total{{action="{action}"}}' in text
    assert script.metric("rimuru_swap_bytes") == script.metric("rimuru_swapped_requests") == 0
    assert script.http.get("/v1/memory").json()["decisions"]["counts"].keys() == set(actions)


@pytest.fixture(scope="module")
def browser() -> Any:
    api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium is installed")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (360, 740)])
def test_a_chat_by_keyboard_alone(script: Running, browser: Any, width: int, height: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": height})
    problems, foreign = [], []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda r: None if r.url.startswith((script.url, "data:")) else foreign.append(r.url))
    page.goto(f"{script.url}/")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the link that skips to the chat
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    page.locator("#messages").get_by_text("ABCDEFG").wait_for()
    page.locator("#numbers").get_by_text("Running").wait_for()
    page.locator("#legend").get_by_text("free").wait_for()
    assert page.evaluate("document.querySelector('#pool').height") > 1
    assert "script" in page.inner_text("#model") and "huge pages" in page.inner_text("#pool-size")
    assert "percent" in page.text_content("#pool-text")
    picture = page.locator("#pool")
    picture.focus()
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#pool-cell").startswith("Cell 0: ")
    page.keyboard.press("End")
    n_cells = len(script.http.get("/v1/dashboard").json()["pool"]["cells"])
    assert page.inner_text("#pool-cell").startswith(f"Cell {n_cells - 1}: ")
    assert not page.evaluate("document.documentElement.scrollWidth > window.innerWidth"), "the page scrolls sideways"
    assert (problems, foreign) == ([], [])
    page.close()


def test_a_new_chat_forgets_the_answer_that_runs(script: Running, browser: Any) -> None:
    """What had come of it must not be the beginning of the next conversation."""
    page = browser.new_page()
    sent: list[Any] = []
    page.on("request", lambda r: sent.append(r.post_data_json) if r.method == "POST" else None)
    # The first answer comes in part and then never ends.
    page.add_init_script("""
        const real = window.fetch; let first = true;
        window.fetch = async (url, options) => {
            if (!first || options?.method !== "POST") return real(url, options);
            first = false;
            const event = JSON.stringify({ choices: [{ delta: { content: "half an answer" } }] });
            const body = new ReadableStream({ start(controller) {
                controller.enqueue(new TextEncoder().encode("data: " + event + "\\n\\n"));
                options.signal.addEventListener("abort", () => controller.error(new DOMException("", "AbortError")));
            } });
            return new Response(body);
        };
    """)
    page.goto(f"{script.url}/")
    page.fill("#question", "first")
    page.press("#question", "Enter")
    page.locator("#messages").get_by_text("half an answer").wait_for()
    page.click("#reset")
    page.locator("#send:enabled").wait_for()
    assert page.inner_text("#messages") == ""
    page.fill("#question", "second")
    page.press("#question", "Enter")
    page.locator("#messages").get_by_text("ABCDEFG").wait_for()
    assert [request["messages"] for request in sent] == [[{"role": "user", "content": "second"}]]
    page.close()


def test_a_tap_tells_whose_a_cell_is(script: Running, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page.goto(f"{script.url}/")
    page.locator("#legend").get_by_text("free").wait_for()
    page.locator("#pool").tap(position={"x": 3, "y": 3})
    cell = page.locator("#pool-cell")
    assert cell.is_visible() and cell.inner_text().startswith("Cell 0: ")
    page.close()
