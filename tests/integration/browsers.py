"""A real browser for tests: Chromium without a window, of Debian's packages chromium and chromium-driver."""

from __future__ import annotations

import contextlib
import os

from selenium import webdriver

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"


def open_browser(stack: contextlib.ExitStack) -> webdriver.Chrome:
    """Return a browser that notes what it asks for and what its console says; the stack ends it."""
    assert os.path.exists(CHROMIUM) and os.path.exists(DRIVER), "install chromium and chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run",
                     "disable-background-networking", "disable-component-update", "disable-sync"):  # fmt: skip
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    stack.callback(driver.quit)
    return driver
