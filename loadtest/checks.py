"""Whether an answer is the right one, complete and not cut.

Called for every answer. A wrong answer is a failure like a refused request: a fast server that mixes up its
requests is not fast.
"""

from loadtest.client import Answer
from loadtest.mock_answers import mock_answer
from loadtest.scenarios import Message, Question

MOCK = "mock"


def fault_of(
    answer: Answer, question: Question, model: str, max_tokens: int, is_salted: bool = False
) -> str:
    """What is wrong with an answer; empty: nothing that anyone could know.

    `is_salted`: an API key was given, so that the hashes of images are the server's secret.
    """
    if answer.finish_reason not in ("stop", "length"):
        return f"the answer ended with {answer.finish_reason}"
    if answer.num_tokens > max_tokens:
        return "the answer is longer than was asked for"
    if answer.finish_reason == "length" and answer.num_tokens < max_tokens:
        return "the answer is cut"
    if model == MOCK and not (is_salted and _has_images(question.messages)):
        return _fault_of_mock(answer, question.messages)
    if question.expected is not None and answer.text.strip() != question.expected:
        return "the answer is wrong"
    return ""


def _fault_of_mock(answer: Answer, messages: list[Message]) -> str:
    num_words = answer.num_tokens - (answer.finish_reason == "stop")  # the end is a token, no word
    if answer.text != mock_answer(messages, answer.usage, num_words):
        return "the answer is wrong"
    return ""


def _has_images(messages: list[Message]) -> bool:
    return any("image_url" in part for message in messages for part in message["content"])
