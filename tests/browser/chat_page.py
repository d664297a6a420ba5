"""The chat page in a headless browser, with methods for the actions of a user."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from tests.integration.fleet_process import ROOT

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SCREENSHOTS = ROOT / ".cache" / "screenshots"
WIRE_EVENT = "Network.requestWillBeSent"
PATIENCE_S = 30  # for a busy machine; an idle one needs a hundredth of it
DESK = (1180, 800)
PHONE = (390, 844)
SMALL = (320, 640)

AXE = ROOT / ".cache" / "axe" / "axe_playwright_python" / "axe.min.js"
RUN_AXE = """
const [done] = arguments;
axe.run().then(({violations}) => done(violations.flatMap(({id, nodes}) => nodes.map(({html}) => `${id}: ${html}`))));
"""

#: Passes files to the page as a drop or paste does, because such events cannot be created outside of a browser.
GIVE_FILES = """
const [kind, name, type, base64] = arguments;
const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
const data = new DataTransfer();
data.items.add(new File([bytes], name, {type}));
const options = {bubbles: true, cancelable: true};
if (kind === "drop") {
  document.body.dispatchEvent(new DragEvent("dragover", {...options, dataTransfer: data}));
  document.body.dispatchEvent(new DragEvent("drop", {...options, dataTransfer: data}));
} else {
  document.activeElement.dispatchEvent(new ClipboardEvent("paste", {...options, clipboardData: data}));
}
"""


def start_browser(profile: Path) -> Chrome:
    """Starts a headless browser with its own profile. Skips the test with the reason if there is none."""
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium with chromedriver here (Debian: chromium, chromium-driver)")
    options = ChromeOptions()
    options.binary_location = binary
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    arguments += ["--disable-background-networking", "--use-fake-device-for-media-stream"]
    arguments += ["--use-fake-ui-for-media-stream", f"--user-data-dir={profile}"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")
    for argument in arguments:
        options.add_argument(argument)
    return Chrome(options=options, service=ChromeService(driver))


class ChatPage:
    """An open page."""

    def __init__(self, browser: Chrome, url: str) -> None:
        self.browser = browser
        self.url = url

    def open(self, size: tuple[int, int] = DESK, scheme: str = "light") -> None:
        """Loads the page again on a screen of this size, in CSS pixels."""
        width, height = size
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        scheme_feature = {"name": "prefers-color-scheme", "value": scheme}
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme_feature]})
        self.browser.get("about:blank")  # the same address again would only reload
        self.browser.get(self.url)

    def forget(self) -> None:
        """Deletes the stored data of the page and loads it again."""
        self.browser.get("about:blank")
        stores = {"origin": self.url, "storageTypes": "indexeddb"}
        self.browser.execute_cdp_cmd("Storage.clearDataForOrigin", stores)
        self.open()
        self.wait_for_model()

    def wait_for(self, condition):
        """Waits until `condition` returns a true value; returns it."""
        return WebDriverWait(self.browser, PATIENCE_S, poll_frequency=0.05).until(
            lambda _: condition()
        )

    def find(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def find_all(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def wait_for_model(self) -> str:
        """Waits for the list of models; returns the selected one."""
        return self.wait_for(lambda: self.find("#model").get_property("value"))

    def attach(self, *images: Path) -> None:
        self.find("#files").send_keys("\n".join(map(str, images)))

    def give(self, kind: str, base64: str, name: str, media_type: str) -> None:
        self.browser.execute_script(GIVE_FILES, kind, name, media_type, base64)

    def drop(self, *paths: Path) -> None:
        """Drops files and folders by the browser itself, because events cannot contain folders."""
        data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            event = {"type": kind, "x": 200, "y": 300, "data": data}
            self.browser.execute_cdp_cmd("Input.dispatchDragEvent", event)

    def ask(self, question: str, *images: Path) -> None:
        """Types a question and presses Enter."""
        if images:
            self.attach(*images)
            self.wait_for(lambda: len(self.find_all("#tray img")) == len(images))
        self.find("#question").send_keys(question, Keys.ENTER)

    def answer_to(self, question: str, *images: Path) -> str:
        """Asks a question and waits for the end of the answer."""
        before = len(self.find_all(".answer"))
        self.ask(question, *images)
        self.wait_for(lambda: len(self.find_all(".answer")) > before)
        return self.wait_for_end()

    @property
    def answer(self) -> WebElement:
        """The latest answer."""
        return self.find_all(".answer")[-1]

    @property
    def answer_text(self) -> str:
        return self.answer.find_element(By.CSS_SELECTOR, ".text").text

    @property
    def note(self) -> str:
        return self.answer.find_element(By.CSS_SELECTOR, ".note").text

    @property
    def facts(self) -> str:
        """The timings of the latest answer: the line and its details."""
        details = self.answer.find_element(By.CSS_SELECTOR, "footer details")
        if not details.get_attribute("open"):
            details.find_element(By.CSS_SELECTOR, "summary").click()
        return details.text

    def wait_for_end(self) -> str:
        """Waits until the latest answer is complete, stopped or failed; returns its text."""
        self.wait_for(lambda: self.answer.get_attribute("aria-busy") == "false")
        return self.answer_text

    def names_from(self, first: str | None, to: str) -> list[str]:
        """Returns the names of the elements that Tab reaches from an element, or from the focus; all must have one."""
        if first:
            self.browser.execute_script(f"document.querySelector('{first}').focus()")
        names = []
        while True:
            element = self.browser.switch_to.active_element
            names.append(element.accessible_name)
            if element == self.find(to):
                break
            ActionChains(self.browser).send_keys(Keys.TAB).perform()
            assert len(names) < 60
        assert all(names[:-1]), names
        return names

    def complaints(self) -> list[str]:
        """Returns new messages of the browser's console: errors and policy violations."""
        return [entry["message"] for entry in self.browser.get_log("browser")]

    def sent(self) -> list[dict[str, Any]]:
        """Returns the bodies of the questions that were sent since the last call."""
        log = self.browser.get_log("performance")
        events = [json.loads(entry["message"])["message"] for entry in log]
        requests = [e["params"]["request"] for e in events if e["method"] == WIRE_EVENT]
        return [json.loads(r["postData"]) for r in requests if r["url"].endswith("/completions")]

    def barriers(self) -> list[str]:
        if not AXE.exists():
            pytest.skip("axe is not installed: make browser-test")
        self.browser.execute_script(AXE.read_text())
        return self.browser.execute_async_script(RUN_AXE)

    def keep(self, name: str) -> None:
        """Saves a screenshot for people to look at."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.browser.save_screenshot(str(SCREENSHOTS / f"{name}.png"))
