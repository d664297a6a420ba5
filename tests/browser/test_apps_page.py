"""The page of deployments, on a fleet with a deployment and a canary."""

from collections.abc import Iterator

import pytest
from selenium.webdriver.common.keys import Keys

from tests.browser.chat_page import DESK, PHONE, ChatPage
from tests.integration.deployer import Deployer
from tests.integration.fleet_process import Served, start_fleet
from tests.long import long

ROWS = """return [...document.querySelectorAll(arguments[0])].map(
    (row) => [...row.cells].map((cell) => cell.textContent))"""


@pytest.fixture(scope="module")
def deployed(browser, tmp_path_factory) -> Iterator[tuple[Served, str]]:
    """A fleet, and its deploy key."""
    folder = tmp_path_factory.mktemp("apps")
    with start_fleet(folder) as fleet:
        deployer = Deployer(fleet, folder)
        for version, more in ((1, ("--min-instances", "1")), (2, ("--canary", "25%"))):
            done = deployer.deploy(version, *more)
            assert done.returncode == 0, done.stderr
        yield fleet, deployer.key
        browser.get("about:blank")  # the page would log errors after the end of the fleet
        browser.get_log("browser")


@long("browser-test")
def test_versions_instances_and_events_are_shown_with_a_deploy_key(browser, deployed):
    fleet, key = deployed
    page = ChatPage(browser, f"{fleet.url}/apps")
    page.open(DESK)
    page.wait_for(lambda: page.find("#key-dialog").is_displayed())
    page.find("#key").send_keys("wrong", Keys.ENTER)
    page.wait_for(lambda: "refused" in page.find("#key-error").text)
    page.find("#key").send_keys(key, Keys.ENTER)

    def rows(kind: str) -> list[list[str]]:
        return browser.execute_script(ROWS, f".app .{kind} tbody tr")  # all rows at one moment

    page.wait_for(lambda: len(rows("versions")) == 2)
    assert page.find(".app .name").text == "cap"
    assert page.find(".app .state").text == "canary"
    assert [row[0] for row in rows("versions")] == ["active", "candidate"]
    assert [row[3] for row in rows("versions")] == ["75 %", "25 %"]
    assert {row[2] for row in rows("slots")} == {"ready"}
    assert "canary: 25% of the requests" in page.find(".app .events").text
    page.wait_for(lambda: rows("versions")[0][6] == "0.0")  # a rate needs two refreshes
    for name, size in (("desk", DESK), ("phone", PHONE)):
        screen = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        page.wait_for(lambda: len(rows("versions")) == 2)
        wide = "return document.documentElement.scrollWidth > innerWidth"
        assert not browser.execute_script(wide)
        page.keep(f"apps-{name}")
    browser.refresh()
    page.wait_for(lambda: len(rows("versions")) == 2)
    assert not page.find("#key-dialog").is_displayed()
    refused = ("401 (Unauthorized)", "403 (Forbidden)")  # first no key, then a wrong one
    assert [each for each in page.complaints() if not any(r in each for r in refused)] == []
