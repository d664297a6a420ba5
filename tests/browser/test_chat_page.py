"""The chat page with a real fleet: questions, streams, stopping, follow-ups, and errors."""

import base64
import json
import re
from collections.abc import Iterator

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select

from shared.telemetry.metrics import STAGES
from tests.browser.chat_page import DESK, PHONE, SMALL, ChatPage
from tests.browser.conftest import NUM_TOKENS
from tests.integration.fleet_process import SAMPLE, Served, start_fleet
from tests.long import long

SAMPLES = sorted(SAMPLE.parent.glob("*.png"))


#: Records the text and the busy state of the latest answer at each change of the page.
WATCH = """
window.shown = [];
new MutationObserver(() => {
  const answer = [...document.querySelectorAll(".answer")].at(-1);
  if (answer) window.shown.push([answer.querySelector(".text").innerText, answer.ariaBusy]);
}).observe(document.querySelector("#log"), {subtree: true, childList: true, characterData: true, attributes: true});
"""


def is_dark(page: ChatPage) -> bool:
    color = page.find("html").value_of_css_property("background-color")
    return int(color.split("(")[1].split(",")[0]) < 128


def test_an_answer_about_an_image_is_streamed_with_its_stage_times(page: ChatPage):
    page.browser.execute_script(WATCH)
    answer = page.answer_to("What is it?", SAMPLE)
    shown = page.browser.execute_script("return window.shown")
    busy = [text for text, is_busy in shown if is_busy == "true"]
    assert all(answer.startswith(text.rstrip()) for text in busy)
    assert any(0 < len(text.rstrip()) < len(answer) for text in busy)
    assert not page.find(".bar").is_displayed()
    facts = page.facts.replace("\u00a0", " ")
    assert f"{NUM_TOKENS} tokens" in facts
    assert "tokens/s" in facts
    whole = re.findall(r"([\d.]+)\s(ms|s)\b", facts)[0]
    first = re.findall(r"first token after ([\d.]+)\s(ms|s)\b", facts)[0]
    assert in_milliseconds(*first) < in_milliseconds(*whole)
    times = {
        row.get_attribute("class"): in_milliseconds(
            *row.find_element(By.TAG_NAME, "dd").text.split()
        )
        for row in page.find_all(".stages div")
    }
    assert {f"stage-{name}" for name in STAGES} >= set(times) > {"stage-vision", "stage-decode"}
    spans = page.find_all(".bar span")
    widths = {span.get_attribute("class"): span.size["width"] for span in spans}
    assert max(widths, key=widths.__getitem__) == max(times, key=times.__getitem__)
    assert page.find("#announcer").get_property("textContent") == answer


def in_milliseconds(value: str, unit: str) -> float:
    return float(value) * (1000 if unit == "s" else 1)


def test_a_follow_up_carries_the_conversation(page: ChatPage):
    page.answer_to("What is it?", *SAMPLES[:2])
    first = prompt_tokens(page)
    page.answer_to("And the other?")
    assert prompt_tokens(page) > first + NUM_TOKENS
    assert page.find_all("#tray img") == []
    page.find("#new").click()
    assert page.find_all(".answer") == []
    assert page.find("#welcome").is_displayed()


def prompt_tokens(page: ChatPage) -> int:
    return int(re.findall(r"(\d+) prompt tokens", page.facts)[0])


#: Runs an action in the browser when the first text of the next answer is shown: the answer may end before Selenium acts.
AT_FIRST_TEXT = """
new MutationObserver((_, observer) => {
  if (document.querySelector(".answer .text")?.textContent) {
    observer.disconnect();
    ACTION;
  }
}).observe(document.body, {childList: true, subtree: true, characterData: true});
"""
ESCAPE = 'new KeyboardEvent("keydown", {key: "Escape", bubbles: true})'


@pytest.mark.parametrize("stop", ["#stop').click()", f"#question').dispatchEvent({ESCAPE})"])
def test_an_answer_can_be_stopped_and_its_text_is_kept(page: ChatPage, stop: str):
    page.browser.execute_script(AT_FIRST_TEXT.replace("ACTION", f"document.querySelector('{stop}"))
    page.ask("What is it?", SAMPLE)
    page.wait_for(lambda: page.find_all(".answer"))
    text = page.wait_for_end()
    assert page.note == "Stopped."
    assert 0 < len(text.split()) < NUM_TOKENS - 1
    assert page.find("#send").is_displayed()
    assert page.browser.switch_to.active_element == page.find("#question")


def test_images_are_dropped_pasted_and_removed(page: ChatPage):
    data = base64.b64encode(SAMPLE.read_bytes()).decode()
    page.give("drop", data, "dropped.png", "image/png")
    page.wait_for(lambda: len(page.find_all("#tray img")) == 1)
    page.give("paste", data, "pasted.png", "image/png")
    page.wait_for(lambda: len(page.find_all("#tray img")) == 2)
    page.find("#samples button").click()
    page.wait_for(lambda: len(page.find_all("#tray img")) == 3)
    page.find('[aria-label="Remove dropped.png"]').click()
    names = [image.get_attribute("alt") for image in page.find_all("#tray img")]
    assert names == ["pasted.png", "Sample: star, circle and square on white"]
    page.answer_to("What are they?")
    assert len(page.find_all(".question img")) == 2


def ask_about_medium(page: ChatPage, size: str) -> None:
    """Asks about a video or audio, whose `size` the page shows before."""
    assert re.fullmatch(size, page.wait_for(lambda: page.find("#hint").text))
    page.answer_to("What is it?")
    assert "media decode" in page.facts


def test_a_video_is_sent_and_shown(page: ChatPage):
    from tests.factories_video import clip  # noqa: PLC0415 - it skips the test without PyAV

    data = base64.b64encode(clip("vp9")).decode()
    page.give("drop", data, "clip.webm", "video/webm")
    page.wait_for(lambda: len(page.find_all("#tray video")) == 1)
    ask_about_medium(page, r"clip\.webm takes [\d,]+ of [\d,]+ frames, [\d,]+ of [\d,]+ tokens\.")
    page.find('[aria-label="Enlarge clip.webm"]').click()
    page.wait_for(lambda: page.find("#zoom video").get_property("controls"))


def test_audio_is_sent_and_can_be_played(page: ChatPage):
    from tests.factories_audio import sound  # noqa: PLC0415 - it skips the test without PyAV

    page.give("drop", base64.b64encode(sound("wav")).decode(), "speech.wav", "audio/wav")
    ask_about_medium(page, r"speech\.wav takes [\d,]+ of [\d,]+ tokens\.")
    page.find('[aria-label="Listen to speech.wav"]').click()
    page.wait_for(lambda: page.find("#zoom audio").get_property("controls"))
    page.open()
    page.wait_for_model()
    page.find("#record").click()  # the microphone
    page.wait_for(lambda: page.find("#record").get_attribute("aria-pressed") == "true")
    page.find("#record").click()
    page.wait_for(lambda: page.find_all('#tray [aria-label="Listen to recording"]'))
    ask_about_medium(page, r"recording takes [\d,]+ of [\d,]+ tokens\.")


def test_other_formats_are_converted_and_other_files_refused(page: ChatPage):
    gif = "R0lGODlhAQABAIAAAP8AAP///yH5BAAAAAAALAAAAAABAAEAAAICRAEAOw=="
    page.give("drop", gif, "dot.gif", "image/gif")
    page.wait_for(lambda: len(page.find_all("#tray img")) == 1)
    assert page.find("#tray img").get_attribute("src").startswith("data:image/png;base64,")
    page.give("drop", base64.b64encode(b"hello").decode(), "notes.txt", "text/plain")
    hint = page.wait_for(lambda: page.find("#hint").text)
    assert hint == "notes.txt is not an image that this browser can read."
    broken = base64.b64encode(SAMPLE.read_bytes()[:20]).decode()
    page.give("drop", broken, "broken.png", "image/png")
    page.wait_for(lambda: page.find("#hint").text.startswith("broken.png is not an image"))
    page.find('[aria-label="Remove dot.gif"]').click()
    page.find("#send").click()
    assert page.find("#hint").text == "Type a question first."
    for size in ('viewBox="0 0 9 9" width="5000" height="100"', 'width="20" height="10"'):
        svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><rect width="9" height="9"/></svg>'
        page.give("drop", base64.b64encode(svg.encode()).decode(), "wide.svg", "image/svg+xml")
    page.wait_for(lambda: len(page.find_all("#tray img")) == 2)
    images = page.find_all("#tray img")
    page.wait_for(lambda: all(image.get_property("complete") for image in images))
    widths = [image.get_property("naturalWidth") for image in images]
    assert sorted(widths) == [20, 2048]
    assert all(image.get_attribute("src").startswith("data:image/png") for image in images)


def test_an_image_is_enlarged_and_escape_closes_it(page: ChatPage):
    page.ask("What is it?", SAMPLE)
    page.wait_for(lambda: page.answer_text)
    small = page.find('[aria-label="Enlarge shapes.png"]')
    small.send_keys(Keys.ENTER)
    page.wait_for(lambda: page.find("#zoom").is_displayed())
    assert page.find("#zoom img").size["width"] > 2 * small.size["width"]
    page.find("#zoom .size").click()
    assert page.find("#zoom img").size["width"] == page.find("#zoom img").get_property(
        "naturalWidth"
    )
    page.find("#zoom .size").send_keys(Keys.ESCAPE)
    page.wait_for(lambda: not page.find("#zoom").is_displayed())
    assert page.browser.switch_to.active_element == small
    page.wait_for_end()
    assert page.note == ""  # Escape closed the image and did not stop the answer


def test_limits_are_reported_before_a_request_is_sent(page: ChatPage):
    data = base64.b64encode(SAMPLE.read_bytes()).decode()
    for number in range(9):
        page.give("drop", data, f"{number}.png", "image/png")
    page.wait_for(lambda: len(page.find_all("#tray img")) == 9)
    told = "A conversation has at most 8 images; with these it has 9. Remove some, or start a new chat."
    assert page.find("#hint").text == told
    page.sent()
    page.ask("What are they?")
    assert page.find("#hint").text == told
    page.find('[aria-label="Remove 3.png"]').click()
    assert page.find("#hint").text == ""
    fill = "const box = document.querySelector('#question'); box.value = 'a'.repeat(arguments[0])"
    page.browser.execute_script(fill, 200_001)
    page.find("#send").click()
    assert "200,001 characters; at most 200,000" in page.find("#hint").text
    assert (page.find_all(".answer"), page.sent()) == ([], [])
    page.browser.execute_script(fill, 3)
    page.find("#send").click()
    page.wait_for(lambda: page.find_all(".answer"))
    assert page.wait_for_end()


def test_an_answer_is_copied_regenerated_and_an_earlier_question_edited(page: ChatPage):
    first = page.answer_to("What is it?", SAMPLE)
    page.find('[aria-label="Copy answer"]').click()
    page.wait_for(lambda: page.find("#announcer").get_property("textContent") == "Copied.")
    page.find("#question").send_keys(Keys.CONTROL, "v")
    assert page.find("#question").get_property("value") == first
    page.find("#question").clear()
    page.answer_to("And then?")
    assert not page.find_all(".again")[0].is_displayed()
    page.sent()
    page.find_all(".again")[1].click()
    page.wait_for_end()
    assert last_texts(page) == ["What is it?", "And then?"]
    page.find_all(".edit")[0].click()
    field = page.browser.switch_to.active_element
    assert field.get_property("value") == "What is it?"
    field.send_keys(Keys.ESCAPE)
    assert page.browser.switch_to.active_element == page.find_all(".edit")[0]
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    page.browser.switch_to.active_element.send_keys(" Say more.", Keys.ENTER)
    page.wait_for(lambda: len(page.find_all(".answer")) == 1)
    page.wait_for_end()
    assert last_texts(page) == ["What is it? Say more."]
    assert len(page.find_all(".question img")) == 1


def last_texts(page: ChatPage) -> list[str]:
    """Returns the user's texts in the last request."""
    users = [m["content"] for m in page.sent()[-1]["messages"] if m["role"] == "user"]
    return [part["text"] for content in users for part in content if part["type"] == "text"]


SHOW_MARKDOWN = """
const [text, done] = arguments;
import("/page/markdown.js").then(({MarkdownView}) => {
  const shown = document.querySelector(".answer .text");
  const view = new MarkdownView(shown);
  shown.replaceChildren();
  for (let end = 0; end <= text.length; end++) view.show(text.slice(0, end));
  const whole = document.createElement("div");
  new MarkdownView(whole).show(text);
  done([shown.innerHTML, whole.innerHTML]);
}, (error) => done([String(error), ""]));
"""
MARKDOWN = """## Found
Two *shapes*, **no** text_in_it, `a < b`, 2 * 3 * 4.
1. a [link](https://example.com/a_(b)?c "title")
   - inner
2. https://example.com/x.

> quoted

| a | b |
|---|--:|
| x\\|y | 2 |

```python
<b>code</b>
```
<img src=x onerror=alert(1)> [bad](javascript:alert(1)) ![far](data:image/png;base64,AA)"""


SHOW_LARGE = """
const [text, done] = arguments;
import("/page/markdown.js").then(({MarkdownView}) => {
  const shown = document.querySelector(".answer .text");
  const began = performance.now();
  new MarkdownView(shown).show(text);
  shown.getBoundingClientRect();
  const lengthS = (performance.now() - began) / 1000;
  done([lengthS, shown.querySelectorAll("*").length, shown.textContent.includes("the end")]);
}, (error) => done([String(error), 0, false]));
"""
LARGE = {
    "columns": "|" + "-|" * 1000 + "\n|" + "-|" * 1000 + "\n|" * 1000 + "the end",
    "rows": "|a|b|\n|-|-|\n" + "|1|2|\n" * 20_000 + "|the end|",
    "rule": "|a|\n" + "-" * 60_000 + "x\nthe end",
    "heading": "# " + "#" * 20_000 + "x\nthe end",
    "paragraphs": "a\n\n" * 20_000 + "the end",
    "items": "* a\n" * 30_000 + "* the end",
    "nested items": "* " * 30_000 + "the end",
    "nested items of one line": "* " * 2_400 + "the end",
    "emphasis": "_a" * 2_400 + " the end",
    "cells": "|" + "-|" * 90 + "\n|" + "-|" * 90 + "\n|" * 4_000 + "the end",
}


def test_no_answer_freezes_the_page(page: ChatPage):
    page.answer_to("What is it?")
    for name, text in LARGE.items():
        shown = page.browser.execute_async_script(SHOW_LARGE, text)
        length_s, num_elements, is_whole = shown
        assert (length_s < 5, num_elements < 10_000, is_whole) == (True, True, True), (name, shown)


def test_markdown_of_answers_becomes_elements_without_scripts(page: ChatPage):
    markup = "<img src=x onerror=alert(1)><b>bold</b>"
    page.answer_to(markup)
    assert page.find(".question .text").text == markup
    assert page.find_all(".question .text *") == []
    grown, whole = page.browser.execute_async_script(SHOW_MARKDOWN, MARKDOWN)
    assert grown == whole
    shown = page.answer.find_element(By.CSS_SELECTOR, ".text")
    for name, texts in {
        "h4": ["Found"], "em": ["shapes"], "strong": ["no"], "p > code": ["a < b"],
        "ol > li > ul > li": ["inner"], "td": ["x|y", "2"], "blockquote": ["quoted"],
        "pre": ["<b>code</b>"], "img, script, b": [],
    }.items():  # fmt: skip
        assert [e.text for e in shown.find_elements(By.CSS_SELECTOR, name)] == texts
    links = shown.find_elements(By.CSS_SELECTOR, "a")
    hrefs = [link.get_attribute("href") for link in links]
    assert hrefs == ["https://example.com/a_(b)?c", "https://example.com/x"]
    assert all("noopener" in link.get_attribute("rel") for link in links)
    assert "<img src=x onerror=alert(1)>" in shown.text
    shown.find_element(By.CSS_SELECTOR, '[aria-label="Copy code"]').click()
    page.wait_for(lambda: page.find("#announcer").get_property("textContent") == "Copied.")
    page.find("#question").send_keys(Keys.CONTROL, "v")
    assert page.find("#question").get_property("value") == "<b>code</b>"
    width = page.find("#main").get_property("scrollWidth")
    assert width <= page.find("#main").get_property("clientWidth")


def test_conversations_stay_in_the_browser_until_they_are_removed(page: ChatPage, tmp_path):
    page.forget()
    answer = page.answer_to("What is it?", SAMPLE)
    wait_for_kept(page, ["What is it?"])
    page.browser.refresh()
    page.wait_for_model()
    page.wait_for(lambda: page.find_all(".answer"))
    assert page.answer_text == answer
    assert "prompt tokens" in page.facts
    page.sent()
    page.answer_to("And then?")
    assert last_texts(page) == ["What is it?", "And then?"]
    page.find("#new").click()
    page.answer_to("Another one?")
    wait_for_kept(page, ["Another one?", "What is it?"])
    page.find("#show-history").click()
    page.wait_for(lambda: page.find("#history").is_displayed())
    page.find_all("#history .open")[1].click()
    page.wait_for(lambda: len(page.find_all(".answer")) == 2)
    assert len(page.find_all(".question img")) == 1
    page.find("#show-history").click()
    page.wait_for(lambda: page.find("#history").is_displayed())
    downloads = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.browser.execute_cdp_cmd("Browser.setDownloadBehavior", downloads)
    page.find('[aria-label="Save What is it? as a file"]').click()
    file = tmp_path / "What-is-it.md"
    page.wait_for(file.exists)
    text = file.read_text()
    assert text.startswith("## Question\n\n![shapes.png](data:image/png;base64,")
    assert f"\n\nWhat is it?\n\n## Answer\n\n{answer}\n\n## Question\n\nAnd then?" in text
    page.find('[aria-label="Remove What is it?"]').click()
    page.wait_for(lambda: len(page.find_all("#history .open")) == 1)
    assert page.find("#welcome").is_displayed()
    page.find("#history .clear").click()
    assert len(page.find_all("#history .open")) == 1
    page.find("#history .clear").click()
    page.wait_for(lambda: not page.find_all("#history .open"))
    page.find("#history .close").send_keys(Keys.ESCAPE)
    page.browser.refresh()
    page.wait_for_model()
    assert page.find("#welcome").is_displayed()
    wait_for_kept(page, [])


def wait_for_kept(page: ChatPage, titles: list[str]) -> None:
    page.wait_for(lambda: page.browser.execute_async_script(LIST_KEPT) == titles)


LIST_KEPT = """
const [done] = arguments;
import("/page/history.js")
  .then(({KeptConversations}) => new KeptConversations().list())
  .then((entries) => done(entries.map(({title}) => title)), (error) => done(String(error)));
"""
COUNT_KEPT = """
const [done] = arguments;
import("/page/history.js")
  .then(({KeptConversations}) => new KeptConversations().get(history.state.conversation))
  .then((exchanges) => done(exchanges?.length ?? 0), (error) => done(String(error)));
"""


def test_an_error_is_shown_in_words_and_the_question_can_be_asked_again(page: ChatPage):
    page.find("#show-settings").click()
    page.find("[name=seed]").send_keys("1e30")
    page.answer_to("What is it?")
    assert "seed" in page.note
    assert "{" not in page.note
    page.answer.find_element(By.CSS_SELECTOR, ".again").click()
    page.wait_for_end()
    assert len(page.find_all(".answer")) == 1
    page.find("[name=seed]").clear()
    longest = page.find("[name=max_tokens]")
    longest.send_keys("0")
    page.ask("And without it?")
    assert len(page.find_all(".answer")) == 1
    assert page.find("#settings").is_displayed()
    longest.clear()
    longest.send_keys("5")
    page.find("#question").send_keys(Keys.ENTER)
    page.wait_for(lambda: len(page.find_all(".answer")) == 2)
    assert len(page.wait_for_end().split()) == 5
    assert page.note == "Cut at the maximum length."
    assert [line for line in page.complaints() if "400 (Bad Request)" not in line] == []


def test_json_is_formatted_and_tool_calls_are_shown(page: ChatPage):
    page.find("#show-settings").click()
    Select(page.find("[name=answer_as]")).select_by_value("schema")
    page.find("[name=schema]").send_keys("{")
    page.ask("How many?")
    assert page.find_all(".answer") == []
    assert "not JSON" in page.find("[name=schema]").get_property("validationMessage")
    page.find("[name=schema]").clear()
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    page.find("[name=schema]").send_keys(json.dumps(schema))
    page.find("#question").send_keys(Keys.ENTER)
    page.wait_for(lambda: page.find_all(".answer"))
    page.wait_for_end()
    assert page.answer.find_element(By.CSS_SELECTOR, ".text pre").text == '{\n  "a": 1\n}'
    Select(page.find("[name=answer_as]")).select_by_value("text")
    function = {"name": "keep_number", "parameters": schema, "strict": True}
    page.find("[name=tools]").send_keys(json.dumps([{"type": "function", "function": function}]))
    page.find("[name=must_call]").click()
    page.answer_to("And now?")
    calls = page.answer.find_elements(By.CSS_SELECTOR, ".calls .code")
    assert "keep_number" in calls[0].text
    assert calls[0].find_element(By.CSS_SELECTOR, "pre").text == '{\n  "a": 1\n}'
    page.find("#show-settings").click()
    page.sent()
    page.answer_to("Go on.")
    assert not page.find_all(".note.error")
    called = page.sent()[-1]["messages"][3]["tool_calls"][0]["function"]
    assert (called["name"], json.loads(called["arguments"])) == ("keep_number", {"a": 1})


RESULT = '{"value": "fünf"}'


def result_fields(page: ChatPage) -> list[WebElement]:
    return [each for each in page.find_all(".calls textarea") if each.is_displayed()]


def test_results_of_tool_calls_are_sent_and_stored(page: ChatPage):
    page.open(SMALL)
    page.wait_for_model()
    page.find("#show-settings").click()
    schema = {"type": "object", "additionalProperties": False}
    function = {"name": "look_up", "parameters": schema, "strict": True}
    page.find("[name=tools]").send_keys(json.dumps([{"type": "function", "function": function}]))
    page.find("#show-settings").click()
    page.answer_to("What is it?")
    fields = result_fields(page)
    assert len(fields) == len(page.find_all(".calls .code")) > 0
    fields[0].send_keys(Keys.ENTER)
    assert len(page.find_all(".answer")) == 1  # one result is missing
    page.sent()
    for field in fields:
        field.send_keys(RESULT)
    assert page.browser.execute_script("return document.documentElement.scrollWidth") <= SMALL[0]
    page.find(".calls > button").click()
    page.wait_for(lambda: len(page.find_all(".answer")) == 2)
    assert page.wait_for_end()
    assert result_fields(page) == []
    asked, called, *told = page.sent()[-1]["messages"]
    ids = [each["id"] for each in called["tool_calls"]]
    expected = [{"role": "tool", "tool_call_id": each, "content": RESULT} for each in ids]
    assert (asked["role"], told) == ("user", expected)
    page.wait_for(lambda: page.browser.execute_async_script(COUNT_KEPT) == 2)
    page.browser.refresh()
    page.wait_for_model()
    page.wait_for(lambda: len(page.find_all(".answer")) == 2)
    assert RESULT in page.find_all(".question")[1].text
    assert page.answer_to("And now?")
    assert page.sent()[-1]["messages"][2 : 2 + len(ids)] == expected


def test_all_controls_are_reachable_by_keyboard_and_have_names(page: ChatPage):
    page.find("#samples button").send_keys(Keys.ENTER)
    page.wait_for(lambda: page.find_all("#tray img"))
    names = page.names_from("#show-settings", to="#send")
    assert names.index("Settings") < names.index("Describe the image.") < names.index("Question")
    sample = "Remove Sample: star, circle and square on white"
    assert {"Add images, videos or audio", sample, "Send"} <= set(names)


def test_the_header_is_one_row(page: ChatPage):
    widths = (1180, 900, 700, 320)
    for width in widths:
        page.open((width, 700))
        page.wait_for_model()
        page.browser.execute_script(
            "document.querySelector('#model').options[0].text = 'm'.repeat(60)"
        )
        parts = [part.rect for part in page.find_all("header > *, #model") if part.is_displayed()]
        parts = [rect for rect in parts if rect["width"] > 1]
        assert len({round(rect["y"] + rect["height"] / 2) for rect in parts}) <= 2  # half a pixel
        assert max(rect["height"] for rect in parts) < 50
        select, buttons = page.find("#model").rect, page.find("#new").rect
        assert select["x"] + select["width"] < buttons["x"]
        assert page.find("html").get_property("scrollWidth") <= width
        assert page.find("#new").accessible_name == "New chat"
    for width in widths:
        page.open((width, 700))
        page.wait_for_model()
        barriers = page.barriers()
        page.find("#show-settings").click()
        assert barriers + page.barriers() == []
    page.find(".menu").send_keys(Keys.ENTER)
    barriers = page.barriers()
    page.find("#views a[href='#search']").send_keys(Keys.ENTER)
    page.wait_for(lambda: page.find("#search-main").is_displayed())
    assert not page.find("#views").is_displayed()
    assert barriers + page.barriers() == []


DUMP_KEPT = """
const [done] = arguments;
indexedDB.open("vlm-fleet").onsuccess = ({target: {result: database}}) => {
  const all = database.transaction("conversations").objectStore("conversations").getAll();
  all.onsuccess = () => done(JSON.stringify(all.result));
};
"""


@pytest.fixture
def keyed(browser, tmp_path) -> Iterator[Served]:
    """A fleet with an API key."""
    with start_fleet(
        tmp_path, VLM_GATEWAY__API_KEYS="sk-one", VLM_ENGINE__MOCK__DECODE_S="0.05",
        VLM_ENGINE__MOCK__NUM_OUTPUT_TOKENS="1000",
    ) as fleet:  # fmt: skip
        yield fleet


@long("browser-test")
def test_the_page_asks_for_a_key_and_reports_a_lost_gateway(browser, keyed):
    page = ChatPage(browser, keyed.url)
    page.open()
    page.wait_for(lambda: page.find("#key-dialog").is_displayed())
    page.find("#key").send_keys("sk-wrong", Keys.ENTER)
    refused = page.wait_for(lambda: page.find("#key-error").text)
    assert refused == "The gateway refused that key."
    page.find("#key").send_keys("sk-one", Keys.ENTER)
    assert page.wait_for_model() == "mock"
    assert not page.find("#key-dialog").is_displayed()
    page.ask("What is it?", SAMPLE)
    page.wait_for(lambda: page.answer_text)
    keyed.child("gateway").kill()
    assert page.wait_for_end()
    assert page.note == "The connection was lost before the answer was complete."
    page.answer.find_element(By.CSS_SELECTOR, ".again").click()
    page.wait_for(lambda: "cannot be reached" in page.note)
    back = "The gateway is back."  # after a restart
    page.wait_for(lambda: page.find("#announcer").get_property("textContent") == back)
    assert page.find("#fleet").text == "1 worker"
    page.answer.find_element(By.CSS_SELECTOR, ".again").click()
    page.wait_for(lambda: page.answer_text)
    page.find("#stop").click()
    assert page.browser.execute_script("return localStorage.length + sessionStorage.length") == 0
    kept = page.browser.execute_async_script(DUMP_KEPT)
    assert "What is it?" in kept
    assert "sk-one" not in kept
    expected = ("401 (Unauthorized)", "ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING")
    complaints = page.complaints()
    assert [line for line in complaints if not any(text in line for text in expected)] == []


@long("browser-test")
def test_the_page_fits_a_phone_and_has_a_dark_scheme(page: ChatPage):
    screens = (("small", SMALL, "light"), ("phone-dark", PHONE, "dark"), ("dark", DESK, "dark"))
    for name, size, scheme in screens:
        page.open(size, scheme)
        page.wait_for_model()
        page.keep(f"welcome-{name}")
        page.answer_to("What is it?", *SAMPLES[:2])
        root = page.find("html")
        assert root.get_property("scrollWidth") <= size[0]
        main = page.find("#main")
        assert main.get_property("scrollWidth") <= main.get_property("clientWidth")
        field = page.find("#question")  # without a scroll bar
        assert field.get_property("clientHeight") == field.get_property("offsetHeight")
        page.keep(f"answer-{name}")
    assert is_dark(page)
    page.open()
    page.wait_for_model()
    assert not is_dark(page)
