"""The API reference shows every operation and schema of the document, using only files of this gateway."""

import httpx

from tests.browser.chat_page import DESK, PHONE, ChatPage

TEXTS = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
LOADED = "return performance.getEntriesByType('resource').map((each) => new URL(each.name).origin)"


def test_the_reference_needs_no_other_host(browser, fleet):
    document = httpx.get(f"{fleet.url}/openapi.json", trust_env=False).json()
    page = ChatPage(browser, f"{fleet.url}/docs")
    page.open(DESK)
    page.wait_for(lambda: page.find_all("#schemas details"))
    operations = [
        f"{method.upper()} {path}" for path, each in document["paths"].items() for method in each
    ]
    shown = browser.execute_script(TEXTS, "#operations summary code")
    assert sorted(shown) == sorted(operations)
    schemas = browser.execute_script(TEXTS, "#schemas summary code")
    assert schemas == list(document["components"]["schemas"])
    assert set(browser.execute_script(LOADED)) == {fleet.url}

    summary = "POST /v1/chat/completions"
    place = shown.index(summary)
    page.find_all("#operations summary")[place].click()
    page.find("#operations details[open] a").click()
    page.wait_for(lambda: page.find("#schema-ChatCompletionRequest").get_property("open"))
    page.open(PHONE)
    page.wait_for(lambda: page.find_all("#schemas details"))
    assert browser.execute_script(
        "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
    assert page.complaints() == []
