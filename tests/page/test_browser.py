"""The page in a real Chromium, on a real server process."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
QUIET += ["--disable-sync", "--no-first-run"]
SOON = 60_000  # ms that nobody waits unless something is lost
FOREVER = "30000"  # tokens: longer than any test

expect.set_options(timeout=SOON)

Open = Callable[..., Page]


class Server:
    """A server process; see `tests.page.serve`."""

    def __init__(self, *api_keys: str, port: int = 0, config: str = "{}") -> None:
        command = [sys.executable, "-m", "tests.page.serve", str(port), config, *api_keys]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url, "the server did not start"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        """As an operator does, with a page open."""
        self._process.send_signal(signal.SIGTERM)
        with self._process:
            assert self._process.wait(60) == 0

    def kill(self) -> None:
        with self._process:
            self._process.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    assert shutil.which(CHROMIUM), f"no Chromium at {CHROMIUM}: run `make {CHROMIUM}`, or set CHROMIUM to where it is"
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET) as browser:
        yield browser


@pytest.fixture
def visit(chromium: Browser) -> Iterator[Open]:
    """Opens the page; in the end nothing may stand in the console that the test has not named."""
    pages: list[tuple[Page, list[str], str]] = []

    def visit(server: Server, expected: str = "$^", width: int = 1440, height: int = 900, **context: Any) -> Page:
        page = chromium.new_context(viewport={"width": width, "height": height}, **context).new_page()
        page.set_default_timeout(SOON)
        said: list[str] = []
        page.on("console", lambda message: said.append(_line(message)))
        page.on("pageerror", lambda error: said.append(str(error)))
        pages.append((page, said, expected))
        page.goto(server.url)
        return page

    yield visit
    for page, said, expected in pages:
        page.context.close()
        assert [line for line in said if not re.search(expected, line)] == []


def _line(message: ConsoleMessage) -> str:
    return f"{message.type}: {message.text} {message.location['url']}"


def live(page: Page) -> None:
    expect(page.locator("#state[data-is=live]")).to_be_visible()


def set_field(page: Page, card: int, name: str, value: str) -> None:
    settings = page.locator(".settings").nth(card)
    if settings.get_attribute("open") is None:
        settings.locator("summary").click()
    settings.locator(f"[name={name}]").fill(value)


def say(page: Page, text: str) -> None:
    """By keyboard, into whatever has the focus."""
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def at_rest(page: Page) -> None:
    expect(page.locator("#scene .caption p")).to_have_text("at rest")


def test_an_answer_streams_and_says_how_fast_it_was(visit: Open, server: Server) -> None:
    page = visit(server)
    live(page)
    expect(page.locator("#model")).to_have_text("tiny")
    set_field(page, 0, "max_tokens", "900")
    page.get_by_label("Message to conversation 1").fill("Why does a chairlift never stop?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".said")).to_have_text("Why does a chairlift never stop?")
    expect(page.locator(".answer.open .text")).to_have_text(re.compile(r"\w"))
    shown = len(page.locator(".answer .text").inner_text())
    expect(page.locator(".answer:not(.open)")).to_be_visible()
    assert len(page.locator(".answer .text").inner_text()) > shown
    meta = page.locator(".meta").inner_text()
    assert re.search(r"900 tokens · [\d.,]+ tok/s · first token [\d.]+ m?s .*token limit reached", meta)
    page.get_by_role("button", name="Again").click()
    expect(page.locator(".answer:not(.open) .meta")).to_contain_text("prompt tokens cached")
    assert page.locator(".answer").count() == 1
    at_rest(page)


def test_two_conversations_share_the_lift_in_their_own_colours(visit: Open, server: Server) -> None:
    page = visit(server)
    live(page)
    set_field(page, 0, "max_tokens", FOREVER)
    page.locator(".composer textarea").focus()
    say(page, "The first to ride")
    page.keyboard.press("Alt+n")
    say(page, "The second to ride")
    expect(page.locator(".answer.open")).to_have_count(2)
    expect(page.locator("#scene .caption p")).to_have_text("2 riding, nobody waiting")
    rows = page.locator("#rows .row.own")
    expect(rows).to_have_count(2)
    for i, title in enumerate(["The first to ride", "The second to ride"]):
        row, card = rows.nth(i), page.locator(".card").nth(i)
        expect(row).to_contain_text(title)
        expect(row).to_contain_text(re.compile(r"\d+ of 30k tok"))
        hues = {element.evaluate("e => getComputedStyle(e).getPropertyValue('--c')") for element in (row, card)}
        assert len(hues) == 1
        expect(card.locator(".now")).to_have_text(re.compile(r"\d+ of 30000"))
    assert int(page.locator("#legend li", has_text="used").locator("b").inner_text()) > 0
    page.keyboard.press("Escape")
    expect(page.locator(".card").nth(1).locator(".meta")).to_contain_text("stopped here")
    expect(rows).to_have_count(1)
    page.locator(".card").nth(0).get_by_role("button", name="Stop").click()
    at_rest(page)
    expect(page.locator("#rows .row")).to_have_count(0)
    assert page.locator("#legend li", has_text="used").locator("b").inner_text() == "0"
    assert re.search(r"now [1-9]|at most [1-9]", page.locator("#chart-speed").get_attribute("aria-label") or "")
    assert re.search(r"at most \d", page.locator("#chart-first").get_attribute("aria-label") or "")


def test_settings_travel_with_the_conversation(visit: Open, server: Server) -> None:
    page = visit(server)
    live(page)
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    fields = {"system": "Be brief.", "temperature": "1.5", "top_p": "0.9", "top_k": "20", "max_tokens": "12"}
    for name, value in (fields | {"seed": "7"}).items():
        set_field(page, 0, name, value)
    page.locator(".composer textarea").focus()
    say(page, "Hello")
    expect(page.locator(".meta")).to_contain_text("12 tokens")
    page.keyboard.press("Alt+n")  # takes the settings along
    say(page, "Hello")
    expect(page.locator(".card").nth(1).locator(".meta")).to_contain_text("12 tokens")
    texts = page.locator(".answer .text").all_inner_texts()
    assert texts[0] == texts[1] != ""
    say(page, "And more")
    expect(page.locator(".card").nth(1).locator(".meta").nth(1)).to_contain_text("12 tokens")
    system, hello = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    sampling = {"temperature": 1.5, "top_p": 0.9, "top_k": 20, "max_tokens": 12, "seed": 7}
    for body in bodies:
        assert {name: body[name] for name in sampling} == sampling
    assert [body["messages"][:2] for body in bodies] == [[system, hello]] * 3
    assert [message["role"] for message in bodies[2]["messages"]] == ["system", "user", "assistant", "user"]
    set_field(page, 1, "temperature", "3")
    page.locator(".card").nth(1).locator(".composer textarea").fill("too hot")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.name") == "temperature" and len(bodies) == 3


def test_everything_by_keyboard(visit: Open, server: Server) -> None:
    page = visit(server)
    live(page)
    focused = "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
    assert page.evaluate(focused) == "Message to conversation 1"
    page.keyboard.press("Alt+s")
    assert page.evaluate("document.activeElement.name") == "system"
    for _ in range(4):
        page.keyboard.press("Tab")
    page.keyboard.press("Control+a")
    page.keyboard.type("8")
    assert page.evaluate("document.activeElement.name") == "max_tokens"
    page.keyboard.press("Alt+s")
    page.keyboard.press("Alt+n")
    assert page.evaluate(focused) == "Message to conversation 2"
    page.keyboard.type("To all")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".answer:not(.open) .meta")).to_have_count(2)
    assert page.locator(".said").all_inner_texts() == ["To all", "To all"]
    page.keyboard.press("Alt+1")
    assert page.evaluate(focused) == "Message to conversation 1"
    page.keyboard.press("Alt+r")
    expect(page.locator(".card").nth(0).locator(".answer:not(.open) .meta")).to_contain_text("cached")
    expect(page.locator("#say")).not_to_be_empty()
    page.keyboard.press("Shift+Enter")
    assert page.locator(".composer textarea").first.input_value() == "\n"
    page.keyboard.press("Alt+l")
    assert page.evaluate("document.activeElement.id") == "panels"
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_hidden()
    page.keyboard.press("Alt+l")
    page.keyboard.press("Alt+w")
    expect(page.locator(".card")).to_have_count(1)
    assert page.evaluate(focused) == "Message to conversation 2"
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate(focused).strip())
        visible = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(f"document.activeElement === document.body || {visible} !== 'none'")
    assert {"API key", "Keyboard shortcuts", "+ New", "Send", "Close conversation 2"} <= seen


def test_everything_has_a_name(visit: Open, server: Server) -> None:
    page = visit(server)
    live(page)
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, input, textarea, canvas, section, nav, [role]")].filter((element) =>
          !element.hidden && !element.ariaLabel && !element.labels?.length && !element.textContent.trim()
          && !document.getElementById(element.getAttribute("aria-labelledby"))).map((element) => element.outerHTML)"""
    )
    assert nameless == []
    assert page.evaluate("new Set([...document.querySelectorAll('[id]')].map((element) => element.id)).size") == (
        page.locator("[id]").count()
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(360, 740), (768, 1024), (1440, 900)])
def test_it_fits_and_is_light_or_dark(
    visit: Open, server: Server, tmp_path: Path, width: int, height: int, scheme: str
) -> None:
    page = visit(server, width=width, height=height, color_scheme=scheme, reduced_motion="reduce")
    live(page)
    set_field(page, 0, "max_tokens", FOREVER)
    page.locator("summary").first.click()
    page.locator(".composer textarea").focus()
    say(page, "An_unbreakable_word" * 20)
    expect(page.locator(".answer .text")).to_have_text(re.compile(r"\w"))
    views = ["talk", "lift"] if width < 900 else ["talk"]
    for view in views:
        if width < 900:
            page.locator(f"#views [data-view={view}]").click()
        expect(page.locator("#panels" if view == "lift" else "#play")).to_be_visible()
        page.screenshot(path=tmp_path / f"{view}.png")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        wide = "[...document.querySelectorAll('.card, .panel, #scene, header')].filter((e) => e.clientWidth)"
        assert page.evaluate(f"{wide}.every((e) => e.getBoundingClientRect().right <= innerWidth)")
    light = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(light)
    assert (sum(map(float, re.findall(r"[\d.]+", before)[:3])) > 380) == (scheme == "light")
    page.get_by_role("button", name=re.compile("Use (light|dark) colours")).click()
    assert page.evaluate(light) != before
    page.reload()
    live(page)
    assert page.evaluate(light) != before
    at_rest(page)  # whoever reloads lets go of the answer


STORED = "Object.keys(localStorage).filter((key) => key.startsWith('chairlift-talk-'))"


def test_conversations_are_there_again_after_a_reload(visit: Open, server: Server) -> None:
    page = visit(server)
    live(page)
    set_field(page, 0, "max_tokens", "12")
    set_field(page, 0, "system", "Be brief.")
    page.locator(".composer textarea").focus()
    for text in ("The first", "and more"):
        say(page, text)
        expect(page.locator(".answer:not(.open) .meta").last).to_contain_text("12 tokens")
    page.keyboard.press("Alt+n")
    set_field(page, 1, "max_tokens", FOREVER)
    page.locator(".composer textarea").nth(1).focus()
    say(page, "The second")
    expect(page.locator(".answer.open .text")).to_have_text(re.compile(r"\w"))
    page.keyboard.press("Alt+n")  # nothing is said here: not kept
    before = page.locator(".card").first.locator(".log").inner_text()

    page.reload()
    live(page)
    expect(page.locator(".card")).to_have_count(2)
    first, second = page.locator(".card").all()
    assert first.locator(".log").inner_text() == before
    assert second.locator(".meta").inner_text().endswith("cut off when the page was left")
    assert second.locator(".text").inner_text()
    at_rest(page)
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    first.get_by_role("button", name="Again").click()  # with its settings and all that was said
    expect(first.locator(".answer:not(.open) .meta").last).to_contain_text("12 tokens")
    assert bodies[0]["max_tokens"] == 12
    assert [message["role"] for message in bodies[0]["messages"]] == ["system", "user", "assistant", "user"]

    first.get_by_role("button", name="Close").click()
    assert page.evaluate(f"{STORED}.length") == 1
    page.get_by_role("button", name="Forget all").click()
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".said")).to_have_text("The second")
    page.get_by_role("button", name="Forget all").click()
    page.get_by_role("button", name="Forget them").click()
    expect(page.locator(".said")).to_have_count(0)
    expect(page.get_by_role("button", name="Forget all")).to_be_hidden()
    assert page.evaluate(STORED) == []
    page.reload()
    live(page)
    expect(page.locator(".card")).to_have_count(1)


def test_what_is_kept_has_bounds_and_no_keys(visit: Open, server: Server) -> None:
    page = visit(server)
    live(page)
    page.evaluate("sessionStorage.setItem('chairlift-key', 'sesame')")
    turn = "{text: `question ${i}`, answer: 'x'.repeat(size), thought: '', meta: ''}"
    talk = f"{{at: i, settings: {{}}, turns: [{turn}]}}"
    fill = f"([from, to, size]) => {{ for (let i = from; i < to; i++) shelf.put(`id${{i}}`, {talk}); }}"
    page.evaluate(fill, [0, 20, 10])
    assert sorted(page.evaluate(STORED)) == sorted(f"chairlift-talk-id{i}" for i in range(11, 20))
    page.evaluate(fill, [20, 24, 300_000])
    assert sorted(page.evaluate(STORED)) == [f"chairlift-talk-id{i}" for i in (21, 22, 23)]
    page.evaluate(fill, [24, 25, 20_000_000])  # more than a browser keeps
    page.evaluate("localStorage.setItem('chairlift-talk-bad', '{\"turns\": [{\"text\": 1}]}')")
    page.reload()
    live(page)
    assert page.locator(".said").all_inner_texts() == [f"question {i}" for i in (21, 22, 23)]
    assert "chairlift-talk-bad" not in page.evaluate(STORED)
    assert not page.evaluate("Object.values(localStorage).some((text) => text.includes('sesame'))")


def test_the_time_to_the_first_token_is_the_engines(visit: Open, server: Server) -> None:
    page = visit(server)
    live(page)
    set_field(page, 0, "max_tokens", FOREVER)
    page.locator(".composer textarea").focus()
    say(page, "When did it begin?")
    expect(page.locator("#tile-first")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
    first, row, now = page.evaluate("[lift.firsts[0], lift.view.rows[0], performance.now() / 1000]")
    assert first["s"] == row["first"] <= row["age"] + 0.001  # of which the age is rounded to milliseconds
    assert first["t"] < now
    page.keyboard.press("Escape")
    at_rest(page)
    shown = page.locator("#tile-first").inner_text()
    assert shown == page.evaluate("seconds(lift.firsts[0].s)")


def test_a_dead_engine_says_why_and_another_is_found(visit: Open) -> None:
    fault = "a fault that a test asked for"
    server = Server()
    try:
        page = visit(server, expected=r"status of 503|ERR_CONNECTION|ERR_INCOMPLETE|ERR_EMPTY_RESPONSE")
        live(page)
        set_field(page, 0, "max_tokens", FOREVER)
        page.locator(".composer textarea").focus()
        say(page, "How long will it last?")
        expect(page.locator(".answer.open .text")).to_have_text(re.compile(r"\w"))
        said = page.locator(".answer .text").inner_text()
        httpx.post(f"{server.url}/test/crash")
        expect(page.get_by_role("alert")).to_contain_text("The engine is not serving")
        expect(page.get_by_role("alert")).to_contain_text(fault)
        assert page.locator(".answer:not(.open) .text").inner_text().startswith(said[:20])  # what came stays
        expect(page.locator("#state[data-is=gone]")).to_contain_text("The engine is not serving")
        expect(page.locator("#state[data-is=gone]")).to_contain_text(fault)
        expect(page.locator("#scene .caption p")).to_have_text("out of sight")
        page.get_by_role("button", name="Try again").click()
        expect(page.get_by_role("alert")).to_contain_text(fault)

        port = server.port
        server.kill()
        server = Server(port=port)
        live(page)
        set_field(page, 0, "max_tokens", "4")
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".answer:not(.open) .meta")).to_contain_text("4 tokens")
        expect(page.get_by_role("alert")).to_have_count(0)
        at_rest(page)
    finally:
        server.kill()


def test_markup_stays_text(visit: Open, server: Server) -> None:
    page = visit(server)
    live(page)
    evil = "<img src=x onerror=\"document.title='gone'\"><script>document.title='gone'</script>"
    set_field(page, 0, "max_tokens", "4")
    page.locator(".composer textarea").fill(evil)
    page.keyboard.press("Enter")
    expect(page.locator(".said")).to_have_text(evil)
    expect(page.locator(".answer:not(.open)")).to_be_visible()
    text = f"{evil} and **bold {evil}** and `{evil}`\n\n```html\n{evil}\n```\nend"
    page.evaluate("text => renderText(document.querySelector('.answer .text'), text)", text)
    assert page.locator(".answer .text pre").inner_text() == evil
    assert page.locator(".answer .text code").inner_text() == evil
    assert page.locator("img, main script").count() == 0
    assert "gone" not in page.title()


def test_a_hidden_tab_does_not_listen(visit: Open, server: Server) -> None:
    page = visit(server)
    live(page)
    hide = "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true}); "
    hide += "document.dispatchEvent(new Event('visibilitychange')); }"
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/events")):
        page.evaluate(hide, True)
    expect(page.locator("#state")).to_contain_text("resting")
    page.evaluate(hide, False)
    live(page)


def test_keys_full_queues_and_servers_that_come_and_go(visit: Open) -> None:
    config = '{"max_requests_per_batch": 1, "max_queue_size": 1}'
    server = Server("sesame", config=config)
    try:
        page = visit(server, expected=r"status of (401|429|503)|ERR_CONNECTION|ERR_INCOMPLETE|ERR_EMPTY_RESPONSE")
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_be_visible()
        page.keyboard.type("simsalabim")
        page.keyboard.press("Enter")
        expect(dialog).to_be_visible()
        page.get_by_label("The key that").fill("sesame")
        page.keyboard.press("Enter")
        live(page)

        set_field(page, 0, "max_tokens", FOREVER)
        page.locator(".composer textarea").focus()
        say(page, "rides")
        expect(page.locator("#scene .caption p")).to_have_text("1 riding, nobody waiting")
        page.keyboard.press("Alt+n")
        say(page, "waits")
        expect(page.locator("#queue-note")).to_contain_text("1 request, the first for")
        expect(page.locator("#queue li")).to_have_count(1)
        page.keyboard.press("Alt+n")
        say(page, "finds it full")
        expect(page.get_by_role("alert")).to_have_text("The queue is full. Try again in 1 s.")
        page.keyboard.press("Alt+1")
        page.keyboard.press("Escape")
        page.keyboard.press("Alt+2")
        page.keyboard.press("Escape")
        at_rest(page)
        set_field(page, 2, "max_tokens", "4")
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".card").nth(2).locator(".meta")).to_contain_text("4 tokens")
        expect(page.get_by_role("alert")).to_have_count(0)

        port = server.port
        server.stop()  # with a page that listens: it must not hold the server up
        expect(page.locator("#state[data-is=gone]")).to_contain_text("trying again in")
        say(page, "is anybody there?")
        expect(page.get_by_role("alert")).to_have_text("The server does not answer.")
        server = Server("sesame", port=port, config=config)
        live(page)
    finally:
        server.kill()
