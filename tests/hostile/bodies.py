"""Attacks by the body of one chat request, grouped by kind."""

import base64
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tests.factories_hostile_images import CASES, ihdr, png
from tests.factories_images import data_url, encoded
from tests.faults.processes import MODEL
from tests.gateway.api.test_refusals import FIELDS
from tests.hostile.fleet import CANARY

#: A body as JSON or bytes, and the allowed statuses.
Attack = tuple[dict[str, Any] | bytes, set[int]]

BAD, FINE, EITHER = {400}, {200}, {200, 400}


def body(content: Any = CANARY, **changes: Any) -> dict[str, Any]:
    message = {"role": "user", "content": content}
    return {"model": MODEL, "messages": [message], "max_tokens": 4, **changes}


def raw(text: str) -> bytes:
    return json.dumps(body())[:-1].encode() + b", " + text.encode() + b"}"


def image(url: Any, *more: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, *more]
    return body([*parts, {"type": "text", "text": "?"}])


def encoded_image(data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    return image(f"data:{media_type};base64,{base64.b64encode(data).decode()}")


def values(name: str, *values: Any, statuses: set[int] = BAD) -> list[Attack]:
    return [(body(**{name: value}), statuses) for value in values]


def samplings() -> Iterator[Attack]:
    """Combines every sampling parameter with every kind of answer, to find pairs that fail in an engine."""
    shapes = [
        {}, {"n": 2}, {"stop": [" "]}, {"logprobs": True, "top_logprobs": 3}, {"stream": True},
    ]  # fmt: skip
    samplings = [
        {"presence_penalty": 2}, {"frequency_penalty": -2}, {"repetition_penalty": 1.5},
        {"temperature": 0}, {"temperature": 2, "top_k": 1}, {"logit_bias": {"5": -100}},
    ]  # fmt: skip
    for shape, sampling in itertools.product(shapes, samplings):
        yield body(**shape, **sampling), FINE


def messages(*messages: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages), "max_tokens": 4}


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


#: Each row is generated when it is used, because some take seconds.
BODIES: dict[str, Callable[[], Iterable[Attack]]] = {
    # Refused by the gateway, or accepted and left to a decoder.
    "images": lambda: [
        *[(encoded_image(case.make()), BAD if case.door else EITHER) for case in CASES],
        (encoded_image(png(ihdr(1, 65_500))), BAD),
        (image(data_url(), *[{"type": "image_url", "image_url": data_url()}] * 999), BAD),
        *[(encoded_image(encoded(seed)), FINE) for seed in (*range(12), 1)],
    ],
    "media types": lambda: [
        (encoded_image(encoded(format="JPEG"), "image/png"), FINE),
        (encoded_image(encoded(), "image/svg+xml"), FINE),
        (encoded_image(encoded(), "IMAGE/PNG;charset=x"), FINE),
        (encoded_image(b"<svg/>", "image/png"), BAD),
    ],
    "urls": lambda: [(image(url), BAD) for url in (
        "http://169.254.169.254/latest", "http://[fd00:ec2::254]/", "http://metadata.google.internal",
        "http://127.1/", "http://2130706433/", "http://0x7f.1/", "http://①②⑦.⓪.⓪.①/",
        "http://[::ffff:169.254.169.254]/", "http://[2002:a9fe:a9fe::]/", "http://[fe80::1%25eth0]/",
        "https://good.com\\@127.0.0.1/", "http://127.0.0.1#@good.com", "http://a%00b/",
        "http://x/\r\nHost: y", "//host/x.png", "https://" + "x" * 70_000,
        "file:///etc/passwd", "ftp://x/y", "gopher://x", "dict://x", "HTTP://x/y", "javascript:alert(1)",
    )],
    # The gateway's own table, whose limits are smaller than those of this fleet.
    "fields": lambda: [({**body(), **row[1]}, {row[2], 200}) for row in FIELDS],
    "values": lambda: [
        *values("an_unknown_field", 1, statuses=FINE), *values("max_tokens", 32_000, statuses=EITHER),
        *values("seed", -1, 2**63 - 1, statuses=FINE), *values("logit_bias", {"99999999": 1}),
        *values("temperature", 1e-45, 1e-4, 2, statuses=FINE), *values("top_p", 1e-9, 1, statuses=FINE),
        *values("top_k", -1, 0, 1, 2**31 - 1, statuses=EITHER),
        (body(logprobs=True, top_logprobs=20), FINE), *values("image_embeds", CANARY),
        *values("prompt", [1, 2, 32_000], statuses=FINE),
        *values("structured_outputs", {"json": {"a": CANARY}}, statuses=EITHER),
        *values("structured_outputs", {"json": {"type": CANARY}}, {"json": {"$ref": CANARY}}, CANARY),
        *[(body(**{name: CANARY}), FINE) for name in ("cache_salt", "priority", "request_id", "attempt")],
        *[(body(model=name), {404, 400}) for name in (CANARY, "../../etc", "\n", "🙂", "")],
    ],
    "samplings": samplings,
    "json": lambda: [
        *[(raw(f'"{name}": {value}'), BAD) for value in ("NaN", "Infinity", "-Infinity", "1e999")
          for name in ("n", "temperature", "top_p", "seed", "max_tokens", "frequency_penalty")],
        (raw('"user": "\\ud83d"'), BAD), (raw('"stop": ["\\ud800"]'), BAD),
        *[(raw('"store": ' + "[" * depth + "]" * depth), BAD) for depth in (10_000, 100_000)],
        (raw('"store": ' + "[" * 100 + "]" * 100), FINE), (raw('"n": 1, "n": 1'), FINE),
        (raw('"store": [' + "1," * 300_000 + "1]"), {413}),
        (raw('"metadata": {' + ",".join(f'"{i}": ""' for i in range(100_000)) + "}"), BAD),
        (raw('"n": ' + "9" * 5000), BAD), (raw('"' + "k" * 1_000_000 + '": 1'), FINE),
        *[(json.dumps(body()).encode(code), BAD) for code in ("utf-16", "utf-32", "utf-8-sig")],
        (raw('"user": "x').replace(b'"x', b'"\xff'), BAD),
        *[(text, BAD) for text in (b"", b"null", b"[]", b'"x"', b"{}", raw('"n": 1') + b"{}", raw('"n": 1') + b"x")],
    ],
    "long": lambda: [
        (body("x " * 50_000), BAD), (body("x" * 200_001), BAD), *values("n", CANARY * 30_000),
        *values("tools", [{"type": "function"}] * 5000), *values("stop", ["x"] * 10_000, "x" * 1_000_000),
        (messages(*[turn("user", "x")] * 10_000), BAD), (body(model="x" * 1_000_000), {404, 400}),
        *values("user", CANARY * 200_000),
        *[(body(text), EITHER) for text in (" " * 199_000, "🙂" * 190_000, "x" * 199_000, "e\u0301" * 90_000)],
        (body(max_tokens=200, ignore_eos=True, logit_bias={"2": -100}), FINE),
        (body("x " * 3950, max_tokens=32_000, ignore_eos=True), EITHER),
    ],
    "text": lambda: [
        *[(body(f"{odd}{CANARY}"), FINE) for odd in ("\0", "\ufffe", "\u202e", "e" + "\u0301" * 500)],
        *[(body(f"<image>{CANARY}" * count), FINE) for count in (1, 8)],
        *[(body(f"{token} {CANARY}"), FINE)
          for token in ("</s>", "<s>", "<unk>", "[INST]", "<|im_end|>", "<0x0A>", "USER: ASSISTANT:")],
        (body(f"say data: [DONE]\n\nevent: error {CANARY}", stream=True), FINE),
        (body(""), EITHER), (body("  \n "), FINE), (body([]), BAD), (image(data_url()), FINE),
        (messages(turn("user", "x"), turn("assistant", f"<image>{CANARY}"), turn("user", "y")), FINE),
    ],
}  # fmt: skip
