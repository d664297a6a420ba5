"""The admin page on a fleet with a root key."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta

import pytest
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
    folder = tmp_path_factory.mktemp("admin")
    with start_fleet(folder, VLM_GATEWAY__ROOT_KEY=ROOT_KEY) as fleet:
        yield fleet
        browser.get("about:blank")


@pytest.fixture
def page(browser, managed) -> Iterator[ChatPage]:
    page = ChatPage(browser, f"{managed.url}/admin")
    page.open(DESK)
    browser.execute_script("sessionStorage.clear()")
    page.open(DESK)
    page.complaints()
    yield page
    assert [line for line in page.complaints() if not any(r in line for r in REFUSALS)] == []


def enter(page: ChatPage) -> None:
    page.wait_for(lambda: page.find("#key-dialog").is_displayed())
    page.find("#key").send_keys(ROOT_KEY, Keys.ENTER)
    page.wait_for(lambda: page.find_all("#models tr"))


def create(page: ChatPage, name: str, **fields: str) -> str:
    page.find("#create").click()
    page.find("#create-dialog [name=name]").send_keys(name)
    for field, value in fields.items():
        page.find(f"#create-dialog [name={field}]").send_keys(value)
    page.find("#create-dialog [name=name]").send_keys(Keys.ENTER)
    page.wait_for(lambda: page.find("#new-dialog").is_displayed())
    return str(page.find("#new-key").get_property("value"))


def item(page: ChatPage, name: str) -> WebElement:
    return page.wait_for(
        lambda: next(
            (i for i in page.find_all(".keys > li") if i.text.startswith(name + "\n")), None
        )
    )


def status(fleet: Served, key: str) -> int:
    with fleet.client() as client:
        return client.get("/v1/models", headers=bearer(key)).status_code


def test_a_key_is_created_rotated_and_revoked(page: ChatPage, managed: Served):
    enter(page)
    key = create(
        page,
        "alice",
        models="mo*, shapes",
        requests_per_minute="60",
        expires_in_days="2",
        max_output_tokens="900",
        max_priority="batch",
    )
    assert status(managed, key) == 200
    page.find('[aria-label="Copy the key"]').click()
    page.wait_for(lambda: page.find("#new-dialog .copy").text == "Copied")
    page.find("#new-dialog .primary").send_keys(Keys.ESCAPE)
    assert page.find("#new-dialog").is_displayed()  # the key is shown only once
    page.find("#new-dialog .primary").click()
    assert page.find("#new-key").get_property("value") == ""
    told = item(page, "alice").text.replace("\n", " ")
    assert "roles use models mo*, shapes requests per minute 60" in told
    assert "expires" in told
    assert "max output tokens 900 max priority batch" in told
    assert key not in page.browser.page_source

    page.find("#create").click()  # the name is already used
    page.find("#create-dialog [name=name]").send_keys("alice", Keys.ENTER)
    refused = page.wait_for(lambda: page.find("#create-error").text)
    assert refused.startswith("There is a key of this name")
    assert page.browser.switch_to.active_element == page.find("#create-dialog [name=name]")
    page.find("#create-dialog .cancel").click()

    page.find('[aria-label="Rotate alice"]').click()
    page.find("#confirm-dialog .primary").click()
    page.wait_for(lambda: page.find("#new-dialog").is_displayed())
    rotated = str(page.find("#new-key").get_property("value"))
    page.find("#new-dialog .primary").click()
    assert (status(managed, key), status(managed, rotated)) == (401, 200)

    page.find('[aria-label="Revoke alice"]').click()
    assert page.find("#confirm-title").text == "Revoke alice?"
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)  # the focus is on Cancel
    page.wait_for(lambda: not page.find("#confirm-dialog").is_displayed())
    assert status(managed, rotated) == 200
    page.find('[aria-label="Revoke alice"]').click()
    page.find("#confirm-dialog .primary").click()
    page.wait_for(lambda: page.find("#ended summary").text == "Revoked and expired: 1")
    assert status(managed, rotated) == 401
    page.wait_for(lambda: cells(page, "#audit") and cells(page, "#audit")[0][1] == "revoke_key")
    assert [row[1:3] for row in cells(page, "#audit")] == [
        ["revoke_key", "alice"], ["rotate_key", "alice"], ["create_key", "alice"], ["create_key", "alice"],
    ]  # fmt: skip


def test_usage_is_drawn_by_day_and_available_as_a_table(page: ChatPage, managed: Served):
    enter(page)
    page.wait_for(lambda: page.find("#no-usage").text == "No usage in these days.")
    for name, count in (("carol", 2), ("dave", 1)):
        key = create(page, name, tag=f"team-{name}")
        page.find("#new-dialog .primary").click()
        ask(managed, key, count)
    day = today()
    page.browser.refresh()
    page.wait_for(lambda: page.find_all("#chart rect"))
    choose(page, "by", "key")
    page.wait_for(lambda: legend(page) == [["carol", "2"], ["dave", "1"]])
    stacked = bars(page)
    assert list(stacked) == [f"{day}, carol: 2", f"{day}, dave: 1"]
    assert stacked[f"{day}, carol: 2"] == pytest.approx(2 * stacked[f"{day}, dave: 1"], rel=0.01)
    assert "carol 2, dave 1" in page.find("#chart").accessible_name
    assert cells(page, "#usage tbody")[-1] == [str(day), "2", "1", "3"]
    assert len(cells(page, "#usage tbody")) == 28
    page.find("#legend button").send_keys(Keys.ENTER)
    assert list(bars(page)) == [f"{day}, carol: 2"]
    assert page.browser.switch_to.active_element.get_attribute("aria-pressed") == "true"
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert len(bars(page)) == 2

    choose(page, "measure", "output tokens")
    assert all(int(total) > 1 for _, total in legend(page))
    choose(page, "measure", "cost")
    assert page.find("#no-usage").text == "No cost in these days: no prices are set."
    choose(page, "measure", "requests")
    choose(page, "by", "tag")
    page.wait_for(lambda: [name for name, _ in legend(page)] == ["team-carol", "team-dave"])
    page.browser.execute_script(SET_DAY, "from", str(day - timedelta(days=2)))
    page.wait_for(lambda: len(cells(page, "#usage tbody")) == 3)
    page.browser.execute_script(SET_DAY, "to", str(day - timedelta(days=1)))
    page.wait_for(lambda: page.find("#no-usage").is_displayed())


def test_the_fleet_is_shown_with_its_requests(page: ChatPage, managed: Served):
    enter(page)
    [model] = cells(page, "#models")
    assert model[:2] == ["mock", "1"]
    [worker] = cells(page, "#workers")
    worker_id = worker[0]
    assert worker[1:4] == ["mock", "mock", "ready"]
    assert "ready. This gateway has" in page.find("#gateway").text
    worker = managed.child("worker")
    worker.suspend()
    try:
        key = create(page, "erin")
        page.find("#new-dialog .primary").click()
        with (
            managed.client() as client,
            client.stream("POST", CHAT, json=body(), headers=bearer(key)),
        ):
            page.wait_for(lambda: cells(page, "#models")[0][2] == "1")
            [request] = page.wait_for(lambda: cells(page, "#requests"))
            assert request[1:3] == ["erin", "mock"]
            # The worker can have claimed it already.
            assert request[3] in ("waits", worker_id)
            assert request[5] == "0"
    finally:
        worker.resume()
    page.wait_for(lambda: not cells(page, "#requests"))


@long("browser-test")
def test_the_page_is_accessible_by_keyboard_and_on_small_screens(page: ChatPage, managed: Served):
    enter(page)
    ask(managed, create(page, "frank", models="*", requests_per_minute="60", tag="blue"), 1)
    barriers = page.barriers()
    page.find("#new-dialog .primary").click()
    for name, size, scheme in (
        ("desk", DESK, "light"),
        ("dark", DESK, "dark"),
        ("phone", PHONE, "dark"),
        ("small", SMALL, "light"),
    ):
        page.open(size, scheme)
        page.wait_for(lambda: page.find_all("#chart rect"))
        item(page, "frank")
        assert page.browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
        barriers += page.barriers()
        page.keep(f"admin-{name}")
        page.find("#create").send_keys(Keys.ENTER)
        barriers += page.barriers()
        page.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
        page.find('[aria-label="Revoke frank"]').send_keys(Keys.ENTER)
        barriers += page.barriers()
        page.browser.switch_to.active_element.send_keys(Keys.ESCAPE)
        assert page.browser.switch_to.active_element.accessible_name == "Revoke frank"
    assert barriers == []
    names = {*page.names_from("#forget-key", to="body")}
    assert {"Create a key", "Rotate frank", "Revoke frank", "Changes, the latest first"} <= names


CHAT = "/v1/chat/completions"
SET_DAY = """
const field = document.querySelector(`#usage-form [name=${arguments[0]}]`);
field.value = arguments[1];
field.dispatchEvent(new Event("change", {bubbles: true}));
"""
READ_CELLS = """return [...document.querySelectorAll(`${arguments[0]} tr`)].map(
    (row) => [...row.cells].map((cell) => cell.textContent))"""


def cells(page: ChatPage, body: str) -> list[list[str]]:
    return page.browser.execute_script(READ_CELLS, body)  # all cells at one moment


READ_LEGEND = """return [...document.querySelectorAll("#legend button")].map(
    (button) => [...button.childNodes].map((node) => node.textContent.trim()).filter(Boolean))"""
READ_BARS = """return [...document.querySelectorAll("#chart rect")].map(
    (bar) => [bar.textContent, bar.height.baseVal.value])"""


def legend(page: ChatPage) -> list[list[str]]:
    return page.browser.execute_script(READ_LEGEND)


def bars(page: ChatPage) -> dict[str, float]:
    """Returns the height of each bar by its title."""
    return dict(page.browser.execute_script(READ_BARS))


def choose(page: ChatPage, name: str, text: str) -> None:
    Select(page.find(f"#usage-form [name={name}]")).select_by_visible_text(text)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def body() -> dict[str, object]:
    return {
        "model": "mock",
        "messages": [{"role": "user", "content": "What is it?"}],
        "stream": True,
    }


def ask(fleet: Served, key: str, num_requests: int) -> None:
    with fleet.client() as client:
        for _ in range(num_requests):
            assert client.post(CHAT, json=body(), headers=bearer(key)).status_code == 200


def today() -> date:
    return datetime.now(UTC).date()
