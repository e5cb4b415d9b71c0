"""The page in a real browser, Chromium without a window: a live run of two nodes, faults, two widths, no other host.

One run and one browser for all tests, which go through its story in their order. The pictures are in the run's folder.
Needs Debian's packages chromium and chromium-driver.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import open_browser
from runs import BrokerProcess
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from zmqtrain.core.settings import RunSettings

HERE = Path(__file__).parent
NAMES = ("pc1", "<b>pc2</b>")
SETTINGS = RunSettings(every=2, delay=1, codec="int8", release="quorum", evaluate_seconds=1.0)
WAIT_SECONDS, GREY_SECONDS = 30.0, 5.0


class Page:
    """The page of one run in one tab, and all that can happen to the run."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.broker = stack.enter_context(BrokerProcess(SETTINGS, folder / "run"))
        self.nodes = {name: self._start([str(HERE / "page_node.py"), self.broker.address, name]) for name in NAMES}
        command = ["-m", "zmqtrain.cli", "page", self.broker.address, "--bind", "127.0.0.1:0"]
        self.process = self._start(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]
        self.driver = open_browser(stack)

    def _start(self, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        process = subprocess.Popen([sys.executable, *command], **options)

        def end() -> None:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

        self._stack.callback(end)
        return process

    # ------------------------------------------------------------------ what is seen

    def size(self, width: int, height: int) -> None:
        facts = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", facts)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def picture(self, name: str) -> None:
        self.driver.save_screenshot(str(self.folder / f"{name}.png"))

    def wait_for_charts(self) -> None:
        """Wait until each chart fills its place."""
        script = """return [...document.querySelectorAll('.js-plotly-plot')].every(
            plot => Math.abs(plot._fullLayout.width - plot.clientWidth) <= 1
                && Math.abs(plot._fullLayout.height - plot.clientHeight) <= 1)"""
        self.wait(lambda: self.driver.execute_script(script))

    def text(self, selector: str) -> str:
        return str(self.driver.execute_script(
            "return document.querySelector(arguments[0])?.textContent ?? ''", selector
        ))  # fmt: skip

    def tile(self, name: str) -> str:
        script = "return [...document.querySelectorAll('.tile')].find(t => t.children[0].textContent == arguments[0])"
        return str(self.driver.execute_script(f"{script}?.textContent ?? ''", name))

    def row(self, name: str) -> tuple[str, str]:
        """Return state and text of a node's row."""
        script = """const row = [...document.querySelectorAll('#nodes tbody tr')].find(
            one => one.cells[0].textContent === arguments[0]);
            return row ? [row.dataset.state, row.textContent] : ['', '']"""
        state, text = self.driver.execute_script(script, name)
        return state, text

    def events(self) -> list[tuple[str, str]]:
        script = (
            "return [...document.querySelectorAll('#events tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
        )
        return [(what, node) for _, what, node, _ in self.driver.execute_script(script)]

    def wait(self, condition: Callable[[], Any], seconds: float = WAIT_SECONDS) -> Any:
        return WebDriverWait(self.driver, seconds, poll_frequency=0.1).until(lambda driver: condition())

    def hover_event(self, what: str) -> str:
        """Move the mouse to the newest mark of a kind in the time line; return what is shown then."""
        script = """const plot = document.getElementById('timeline');
            const index = plot.data.findIndex(trace => trace.name === arguments[0]);
            const marks = plot.querySelectorAll('.scatterlayer .trace');
            const marked = [...marks].find(mark => mark.__data__[0].trace.index === index);
            const points = marked.querySelectorAll('.point'); return points[points.length - 1]"""

        def shown() -> str:
            chain = ActionChains(self.driver, duration=50)
            chain.move_to_element(self.driver.execute_script(script, what)).perform()
            return self.text("#timeline .hoverlayer")

        element = self.driver.find_element(By.ID, "timeline")
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        return str(self.wait(shown))

    def loss_curves(self) -> list[tuple[str, float]]:
        """Return of each line of the first chart its name and the time of its last point."""
        script = "return (document.getElementById('by-seconds').data ?? []).map(t => [t.name, t.x[t.x.length - 1]])"
        return [(name, end) for name, end in self.driver.execute_script(script)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with contextlib.ExitStack() as stack:
        yield Page(tmp_path_factory.mktemp("page"), stack)


def test_the_first_screen_shows_a_run_whose_numbers_change(page: Page) -> None:
    page.size(1280, 800)
    page.prefer("light")
    page.driver.get(page.address)
    page.driver.execute_script("window.first = true")
    page.wait(lambda: all(page.row(name)[0] == "live" for name in NAMES) and "version" in page.tile("running for"))
    before = page.tile("running for"), page.tile("samples/s"), page.row("pc1")
    page.wait(lambda: page.tile("running for") != before[0] and page.row("pc1") != before[2])
    page.wait(lambda: "held-out" in page.tile("held-out loss") and len(page.loss_curves()) == 3)
    names = [name for name, _ in page.loss_curves()]
    assert names[-1] == "shared parameters, held-out"  # the thick one is drawn above the others
    assert {name.replace("&lt;", "<").replace("&gt;", ">") for name in names[:2]} == set(NAMES)
    assert "1.0" not in page.tile("speed-up")[:11] and "over one" in page.tile("speed-up")
    assert "k = 2" in page.text("#sentences") and "half of the live nodes" in page.text("#sentences")
    bottom = page.driver.execute_script(
        "return Math.max(...['tiles', 'charts', 'key', 'sentences'].map("
        "id => document.getElementById(id).getBoundingClientRect().bottom))"
    )
    assert bottom <= 800
    page.picture("1280-light")


def test_a_name_is_text(page: Page) -> None:
    assert page.row("<b>pc2</b>")[0] == "live"
    assert page.driver.execute_script("return document.querySelectorAll('td b, th b, .hoverlayer b').length") == 0


def test_a_killed_node_turns_grey_with_its_reason_and_is_an_event(page: Page) -> None:
    joined = page.hover_event("joined")
    assert "joined" in joined and "at version" in joined
    colour = "return getComputedStyle(document.querySelectorAll('#nodes tbody tr')[arguments[0]]).color"
    index = [page.row(name)[0] for name in NAMES].index("live")
    usual = page.driver.execute_script(colour, index)
    page.nodes[NAMES[1]].send_signal(signal.SIGKILL)
    page.wait(lambda: page.row(NAMES[1])[0] == "lost", GREY_SECONDS)
    assert "lost at" in page.row(NAMES[1])[1] and "gone" in page.row(NAMES[1])[1]
    order = [row.text for row in page.driver.find_elements(By.CSS_SELECTOR, "#nodes tbody th .name")]
    assert page.driver.execute_script(colour, order.index(NAMES[1])) != usual
    assert ("lost", NAMES[1]) in page.events()
    page.wait(lambda: "lost" in page.driver.execute_script(
        "return document.getElementById('timeline').data.map(trace => trace.name)"
    ))  # fmt: skip
    told = page.hover_event("lost")
    assert "lost" in told and "<b>pc2</b>" in told
    page.picture("1280-lost")


def test_a_broker_that_restarts_is_found_again_without_reloading(page: Page) -> None:
    port = page.broker.port
    page.broker.kill()
    page.wait(lambda: page.text("#state") == "broker lost")
    assert "the broker is away" in page.text("#note")
    with BrokerProcess(SETTINGS, page.folder / "run", port) as again:
        page.wait(lambda: page.text("#state") == "live" and page.row("pc1")[0] == "live")
        ended = dict(page.loss_curves())["pc1"]
        page.wait(lambda: dict(page.loss_curves())["pc1"] > ended)
        assert ("broker found", "") in page.events() and ("broker lost", "") in page.events()
        assert not page.text("#note")
        assert page.driver.execute_script("return window.first") is True
        page.prefer("dark")
        page.wait(lambda: page.driver.execute_script("return document.documentElement.dataset.theme") == "dark")
        page.size(1280, 1500)
        page.wait_for_charts()
        page.picture("1280-dark-whole")
        page.size(400, 900)
        width = "return Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
        page.wait(lambda: page.driver.execute_script(width) <= 400)
        page.driver.execute_script("window.scrollTo(0, 0)")
        page.wait_for_charts()
        page.picture("400-dark")
        page.prefer("light")
        page.size(400, 3200)
        page.wait_for_charts()
        page.picture("400-light-whole")
        again.kill()


def test_no_request_to_another_host_and_no_error_in_the_console(page: Page) -> None:
    asked = [json.loads(entry["message"])["message"] for entry in page.driver.get_log("performance")]
    urls = [one["params"]["request"]["url"] for one in asked if one["method"] == "Network.requestWillBeSent"]
    assert any(url.endswith("/events") for url in urls) and any(url.endswith("/plotly.js") for url in urls)
    assert [url for url in urls if not url.startswith((page.address, "data:", "blob:"))] == []
    said = [entry for entry in page.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    assert said == []


def test_the_page_ends_with_ctrl_c(page: Page) -> None:
    page.process.send_signal(signal.SIGINT)
    assert page.process.wait(WAIT_SECONDS) == 0
    page.wait(lambda: page.text("#state") == "page ended")
