"""Attacks that are one body of a chat request each, by their id."""

import base64
import itertools
import json
from collections.abc import Iterator
from typing import Any

from tests.factories_hostile_images import CASES, ihdr, png
from tests.factories_images import data_url, encoded
from tests.faults.processes import MODEL
from tests.gateway.api.test_refusals import FIELDS
from tests.hostile.fleet import CANARY

#: A body as JSON or as bytes, and the statuses that it may get.
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


def corpus(*words: str) -> Iterator[Attack]:
    """Files of the corpus whose names begin so: refused at the door, or let in for a decoder to judge."""
    for case in CASES:
        if case.name.startswith(words):
            yield encoded_image(case.make()), BAD if case.door else EITHER


def fields(*names: str) -> list[Attack]:
    """The rows of the gateway's own table of bad fields, for these fields."""
    found = [row for row in FIELDS if row[0].removeprefix("unsupported ").startswith(names)]
    assert found, names
    return [({**body(), **row[1]}, {row[2]}) for row in found]


def values(name: str, *values: Any, statuses: set[int] = BAD) -> list[Attack]:
    return [(body(**{name: value}), statuses) for value in values]


def urls(*urls: str) -> list[Attack]:
    return [(image(url), BAD) for url in urls]


def penalties() -> Iterator[Attack]:
    """Every sampling parameter with every shape of answer: no two of them meet in an engine that fails."""
    shapes = [
        {},
        {"n": 2},
        {"stop": [" "]},
        {"logprobs": True, "top_logprobs": 3},
        {"stream": True},
    ]
    samplings = [
        {"presence_penalty": 2}, {"frequency_penalty": -2}, {"repetition_penalty": 1.5},
        {"temperature": 0}, {"temperature": 2, "top_k": 1}, {"logit_bias": {"5": -100}},
    ]  # fmt: skip
    for shape, sampling in itertools.product(shapes, samplings):
        yield body(**shape, **sampling), FINE


def messages(*messages: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages), "max_tokens": 4}


BODIES: dict[str, list[Attack]] = {
    "A1": list(corpus("text", "svg", "html", "pdf", "elf", "empty", "zip", "gzip")),
    "A2": list(corpus("png of 60000", "png of 2^31")),
    "A3": list(corpus("png of 13000")),
    "A4": list(corpus("png of 8000")),
    "A5": list(corpus("png cut", "png header", "png of junk", "png of a bad", "jpeg cut", "webp cut")),
    "A6": [
        *corpus("png of 65500", "png of 1 x", "png of 0", "png of one", "png of 2 x"),
        (encoded_image(png(ihdr(1, 65_500))), BAD),
    ],
    "A7": list(corpus("png of bomb")),
    "A8": list(corpus("gif", "tiff", "png animated", "webp animated", "avif animated")),
    "A9": list(corpus("fits", "psd", "eps", "jpeg 2000", "heic", "bmp", "ico", "ppm", "wav")),
    "A10": [(image(data_url(), *[{"type": "image_url", "image_url": data_url()}] * 999), BAD)],
    "A11": fields("base64"),
    "A13": list(corpus("jpeg of broken exif", "jpeg of looping", "jpeg of 60 kB")),
    "A14": list(corpus("png of hidden", "png of a transparent", "png of half")),
    "A15": list(corpus("png of 1 bit", "png of grey", "png of 16", "jpeg of cmyk", "jpeg of grey")),
    "A16": [
        (encoded_image(encoded(format="JPEG"), "image/png"), FINE),
        (encoded_image(encoded(), "image/svg+xml"), FINE),
        (encoded_image(encoded(), "IMAGE/PNG;charset=x"), FINE),
        (encoded_image(b"<svg/>", "image/png"), BAD),
    ],
    "A17": list(corpus("png, then")),
    "A21": [(encoded_image(encoded(seed)), FINE) for seed in range(12)],
    "B2": urls("http://169.254.169.254/latest", "http://[fd00:ec2::254]/", "http://metadata.google.internal"),
    "B3": urls("http://127.1/", "http://2130706433/", "http://0x7f.1/", "http://①②⑦.⓪.⓪.①/"),
    "B4": urls("http://[::ffff:169.254.169.254]/", "http://[2002:a9fe:a9fe::]/", "http://[fe80::1%25eth0]/"),
    "B8": urls("https://good.com\\@127.0.0.1/", "http://127.0.0.1#@good.com", "http://a%00b/",
               "http://x/\r\nHost: y", "//host/x.png", "https://" + "x" * 70_000),
    "B9": urls("file:///etc/passwd", "ftp://x/y", "gopher://x", "dict://x", "HTTP://x/y", "javascript:alert(1)"),
    "C1": fields("n "),
    "C2": [*fields("best_of", "use_beam_search"), *values("an_unknown_field", 1, statuses=FINE)],
    "C3": [*fields("max_tokens"), *values("max_tokens", 32_000, statuses=EITHER)],
    "C4": [(body("x " * 50_000), BAD), (body("x" * 200_001), BAD)],
    "C5": fields("min_tokens"),
    "C6": [*fields("seed"), *values("seed", -1, 2**63 - 1, statuses=FINE)],
    "C7": [*fields("logit_bias", "stop_token_ids", "bad_words", "allowed_token_ids"),
           *values("logit_bias", {"99999999": 1})],
    "C8": [
        *fields("temperature", "top_p", "top_k", "min_p"),
        *values("temperature", 1e-45, 1e-4, 2, statuses=FINE), *values("top_p", 1e-9, 1, statuses=FINE),
        *values("top_k", -1, 0, 1, 2**31 - 1, statuses=EITHER),
    ],
    "C9": [(raw(f'"{name}": {value}'), BAD) for value in ("NaN", "Infinity", "-Infinity", "1e999")
           for name in ("n", "temperature", "top_p", "seed", "max_tokens", "frequency_penalty")],
    "C10": list(penalties()),
    "C11": [*fields("top_logprobs", "logprobs"), (body(logprobs=True, top_logprobs=20), FINE)],
    "C12": fields("chat_template", "documents"),
    "C13": [*fields("prompt_embeds"), *values("image_embeds", CANARY),
            *values("prompt", [1, 2, 32_000], statuses=FINE)],
    "C14": [  # the mock can be held to grammars; what it is asked for here is one, or none
        *[(attack, EITHER) for attack, _ in fields("response_format", "structured_outputs")],
        *values("structured_outputs", {"json": {"a": CANARY}}, statuses=EITHER),
        *values("structured_outputs", {"json": {"type": CANARY}}, {"json": {"$ref": CANARY}}, CANARY),
    ],
    "C15": [*fields("tools", "tool_choice"), *values("tools", [{"type": "function"}] * 5000)],
    "C16": [*fields("stop"), *values("stop", ["x"] * 10_000, "x" * 1_000_000)],
    "C17": [
        (raw('"user": "\\ud83d"'), BAD), (raw('"stop": ["\\ud800"]'), BAD),
        *[(body(f"{odd}{CANARY}"), FINE) for odd in ("\0", "\ufffe", "\u202e", "e" + "\u0301" * 500)],
    ],
    "C18": [
        *[(raw('"store": ' + "[" * depth + "]" * depth), BAD) for depth in (10_000, 100_000)],
        (raw('"store": ' + "[" * 100 + "]" * 100), FINE), (raw('"n": 1, "n": 1'), FINE),
        (raw('"store": [' + "1," * 300_000 + "1]"), {413}),
        (raw('"metadata": {' + ",".join(f'"{i}": ""' for i in range(100_000)) + "}"), BAD),
        (raw('"n": ' + "9" * 5000), BAD),
        (raw('"' + "k" * 1_000_000 + '": 1'), FINE),
    ],
    "C19": [(json.dumps(body()).encode(code), BAD) for code in ("utf-16", "utf-32", "utf-8-sig")]
           + [(raw('"user": "x').replace(b'"x', b'"\xff'), BAD)],
    "C20": [(text, BAD) for text in (b"", b"null", b"[]", b'"x"', b"{}", raw('"n": 1') + b"{}", raw('"n": 1') + b"x")],
    "C21": values("n", CANARY * 30_000),
    "C22": [
        *fields("messages []", "messages c", "messages None", "role", "no role", "no content", "null content", "nested content",
                "image of system", "image without", "image url null", "file id"),
        (messages(*[{"role": "user", "content": "x"}] * 10_000), BAD),
    ],
    "C23": fields("stream"),
    "C24": [(body(model=name), {404, 400}) for name in (CANARY, "x" * 1_000_000, "../../etc", "\n", "🙂", "")],
    "C25": [*fields("user", "metadata"), *values("user", CANARY * 200_000)],
    "C26": [(body(**{name: CANARY}), FINE) for name in ("cache_salt", "priority", "request_id", "attempt")],
    "H1": [(body(f"<image>{CANARY}" * count), FINE) for count in (1, 8)],
    "H2": [(body(f"{token} {CANARY}"), FINE)
           for token in ("</s>", "<s>", "<unk>", "[INST]", "<|im_end|>", "<0x0A>", "USER: ASSISTANT:")],
    "H4": [(body(f"say data: [DONE]\n\nevent: error {CANARY}", stream=True), FINE)],
    "H6": [(body(text), EITHER) for text in (" " * 199_000, "🙂" * 190_000, "x" * 199_000, "e\u0301" * 90_000)],
    "H8": [(body(max_tokens=200, ignore_eos=True, logit_bias={"2": -100}), FINE)],
    "H10": [(encoded_image(encoded(seed)), FINE) for seed in (1, 2, 1)],
    "H11": [(body(""), EITHER), (body("  \n "), FINE), (body([]), BAD), (image(data_url()), FINE)],
    "H12": [(messages({"role": "user", "content": "x"}, {"role": "assistant", "content": f"<image>{CANARY}"},
                      {"role": "user", "content": "y"}), FINE)],
    "J8": [(body("x " * 3950, max_tokens=32_000, ignore_eos=True), EITHER)],
}  # fmt: skip
