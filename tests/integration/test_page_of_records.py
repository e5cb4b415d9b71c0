"""The page of records in a real browser: a newer run takes the place of an older one, and a pipeline has its chart."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import open_browser
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from zmqtrain.cli.sim import pipeline_records
from zmqtrain.page.server import PageServer, open_socket
from zmqtrain.page.sources import FolderSource
from zmqtrain.sim.pipeline import SimPipeline
from zmqtrain.transport.memory import LinkModel

WAIT_SECONDS = 60.0
HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m\u202e"


class Shown:
    """A folder of records, and a browser that shows its page."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, listening = folder, open_socket("127.0.0.1", 0, 1)
        source = stack.enter_context(contextlib.closing(FolderSource(folder)))
        server = PageServer(source.picture, listening, "")
        thread = threading.Thread(target=server.run)
        stack.enter_context(contextlib.closing(listening))
        stack.callback(thread.join)
        stack.callback(server.stop)
        source.start()
        thread.start()
        self.driver: webdriver.Chrome = open_browser(stack)
        self.driver.set_window_size(1280, 1600)
        self.driver.get(f"http://127.0.0.1:{listening.getsockname()[1]}/")

    def write(self, name: str, *records: dict[str, Any]) -> None:
        with (self.folder / name).open("a") as file:
            file.writelines(json.dumps(one) + "\n" for one in records)

    def ask(self, script: str) -> Any:
        return self.driver.execute_script(f"return {script}")

    def wait(self, condition: Callable[[], Any]) -> None:
        WebDriverWait(self.driver, WAIT_SECONDS, poll_frequency=0.1).until(lambda driver: condition())


def lines_of(chart: str) -> str:
    return f"document.querySelectorAll('#{chart} .scatterlayer .trace').length"


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    with contextlib.ExitStack() as stack:
        yield Shown(tmp_path, stack)


def run(name: str, began: float) -> list[dict[str, Any]]:
    node = {"node": HOSTILE, "peer": "pc#a", "run": name, "version": -1}
    steps = [{"node": HOSTILE, "step": step, "loss": 3.0 / step, "samples": 8 * step} for step in range(1, 9)]
    first = {"kind": "node", "seconds": 0.0, "began": began, **node}
    return [first, *({"kind": "step", "seconds": float(one["step"]), **one} for one in steps)]


def test_nothing_of_an_older_run_is_left_when_a_newer_one_begins(shown: Shown) -> None:
    shown.write("pc1.jsonl", *run("run-1", 1000.0))
    shown.wait(lambda: shown.ask(lines_of("by-seconds")) == 1)
    assert "broker" in shown.ask("document.getElementById('by-samples').textContent")
    newer = run("run-2", 2000.0)
    shown.write("pc2.jsonl", newer[0])
    shown.wait(lambda: "run-2" in shown.ask("document.getElementById('where').textContent"))
    shown.wait(lambda: "No loss" in shown.ask("document.getElementById('by-seconds').textContent"))
    assert shown.ask(lines_of("by-seconds")) == 0
    shown.write("pc2.jsonl", *newer[1:])
    shown.wait(lambda: shown.ask(lines_of("by-seconds")) == 1)
    assert shown.ask("document.querySelectorAll('main img').length") == 0
    assert "<img" in shown.ask("document.querySelector('#nodes tbody').textContent")
    assert [one for one in shown.driver.get_log("browser") if one["level"] in ("SEVERE", "WARNING")] == []


def test_a_simulated_pipeline_has_the_chart_of_its_last_step(shown: Shown) -> None:
    costs = {"forward_seconds": 0.1, "backward_seconds": 0.2}
    for number in range(2):
        pipeline = SimPipeline(schedule="1f1b", stages=3, micro_batches=4, steps=2, **costs)
        shown.write("sim.jsonl", *pipeline_records(number, pipeline.run(LinkModel(), 0)))
    names = "[...document.getElementById('pipeline').options].map(one => one.textContent)"
    shown.wait(lambda: shown.ask(names) == ["pipeline 1, step 2", "pipeline 2, step 2"])
    bars = "document.querySelectorAll('#gantt .barlayer .point').length"
    shown.wait(lambda: shown.ask(bars) >= 3 * 4 * 2)
    assert shown.ask("document.getElementById('pipeline').selectedIndex") == 1
    assert shown.ask("document.getElementById('charts').hidden") is True
    stages = "[...document.querySelectorAll('#gantt .ytick')].map(one => one.textContent)"
    assert sorted(shown.ask(stages)) == ["stage 1", "stage 2", "stage 3"]
    shown.driver.save_screenshot(str(shown.folder / "pipeline.png"))
    assert [one for one in shown.driver.get_log("browser") if one["level"] in ("SEVERE", "WARNING")] == []
