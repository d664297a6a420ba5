"""The page of the admin, on a fleet with a root key."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta  # noqa: TID251 (days of the usage)

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select

from tests.browser.chat_page import DESK, PHONE, SMALL, ChatPage
from tests.integration.fleet_process import Served, start_fleet
from tests.long import long

ROOT_KEY = "the-root-key"
REFUSALS = ("401 (Unauthorized)", "403 (Forbidden)", "409 (Conflict)", "503 (Service")


@pytest.fixture(scope="module")
def managed(browser, tmp_path_factory) -> Iterator[Served]:
    fleet = start_fleet(tmp_path_factory.mktemp("admin"), VLM_GATEWAY__ROOT_KEY=ROOT_KEY)
    yield fleet
    browser.get("about:blank")
    fleet.end()


@pytest.fixture
def page(browser, managed) -> Iterator[ChatPage]:
    page = ChatPage(browser, f"{managed.url}/admin")
    page.open(DESK)
    browser.execute_script("sessionStorage.clear()")
    page.open(DESK)
    page.complaints()
    yield page
    assert [line for line in page.complaints() if not any(r in line for r in REFUSALS)] == []


def enter(page: ChatPage, key: str = ROOT_KEY) -> None:
    page.wait_for(lambda: page.find("#key-dialog").is_displayed())
    page.find("#key").send_keys(key, Keys.ENTER)
    page.wait_for(lambda: page.find_all("#models tr"))


def create(page: ChatPage, name: str, **fields: str) -> str:
    """Create a key; returns it."""
    page.find("#create").click()
    page.find("#create-dialog [name=name]").send_keys(name)
    for field, value in fields.items():
        page.find(f"#create-dialog [name={field}]").send_keys(value)
    page.find("#create-dialog [name=name]").send_keys(Keys.ENTER)
    page.wait_for(lambda: page.find("#new-dialog").is_displayed())
    return page.find("#new-key").get_property("value")


def item(page: ChatPage, name: str) -> WebElement:
    """The key in the list."""
    return page.wait_for(
        lambda: next((i for i in page.find_all(".keys > li") if i.text.startswith(name + "\n")), None)
    )


def status(fleet: Served, key: str) -> int:
    with fleet.client() as client:
        headers = {"authorization": f"Bearer {key}"}
        return client.get("/v1/models", headers=headers).status_code


def test_a_key_is_created_rotated_and_revoked(page: ChatPage, managed: Served):
    enter(page)
    key = create(page, "alice", models="mo*, shapes", requests_per_minute="60", expires_in_days="2")
    assert status(managed, key) == 200
    page.find('[aria-label="Copy the key"]').click()
    page.wait_for(lambda: page.find("#new-dialog .copy").text == "Copied")
    page.find("#new-dialog .primary").send_keys(Keys.ESCAPE)
    assert page.find("#new-dialog").is_displayed()  # the key is shown once
    page.find("#new-dialog .primary").click()
    assert page.find("#new-key").get_property("value") == ""
    told = item(page, "alice").text.replace("\n", " ")
    assert "roles use models mo*, shapes requests per minute 60" in told
    assert "expires" in told
    assert key not in page.browser.page_source

    page.find("#create").click()  # a name that is taken
    page.find("#create-dialog [name=name]").send_keys("alice", Keys.ENTER)
    refused = page.wait_for(lambda: page.find("#create-error").text)
    assert refused.startswith("There is a key of this name")
    assert page.browser.switch_to.active_element == page.find("#create-dialog [name=name]")
    page.find("#create-dialog .cancel").click()

    page.find('[aria-label="Rotate alice"]').click()
    page.find("#confirm-dialog .primary").click()
    page.wait_for(lambda: page.find("#new-dialog").is_displayed())
    rotated = page.find("#new-key").get_property("value")
    page.find("#new-dialog .primary").click()
    assert (status(managed, key), status(managed, rotated)) == (401, 200)

    page.find('[aria-label="Revoke alice"]').click()
    assert page.find("#confirm-title").text == "Revoke alice?"
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)  # Cancel has the focus
    page.wait_for(lambda: not page.find("#confirm-dialog").is_displayed())
    assert status(managed, rotated) == 200
    page.find('[aria-label="Revoke alice"]').click()
    page.find("#confirm-dialog .primary").click()
    page.wait_for(lambda: page.find("#ended summary").text == "Revoked and expired: 1")
    assert status(managed, rotated) == 401
    page.wait_for(lambda: page.find_all("#audit tr"))
    operations = [row.text.split(" alice")[0] for row in page.find_all("#audit tr")]
    page.wait_for(lambda: "revoke_key" in page.find("#audit tr").text)
    assert operations
