"""Helpers for tests of engines behind HTTP."""

import math
from array import array
from collections.abc import Sequence
from typing import Any

import httpx
from PIL import Image

from engines.base import AudioInfo, Engine, EngineCall, EngineOutput, PreparedImage, VideoInfo
from engines.image_decoder import decode_image
from shared.protocol import (
    ChatMessage,
    Generate,
    Grammar,
    ImagePart,
    ImageRef,
    SamplingParams,
    TextPart,
    TokensPart,
    Tools,
    VideoOptions,
)
from tests.factories_images import encoded


def make_call(
    request_id: str = "r",
    output_token_ids: tuple[int, ...] = (),
    *,
    text: str = "hello",
    num_images: int = 0,
    prompt: TokensPart | None = None,
    grammar: Grammar | None = None,
    tools: Tools | None = None,
    tenant: str = "",
    adapter: str = "",
    **sampling: Any,
) -> EngineCall:
    """Returns a greedy call with images and a text, or with token IDs."""
    parts = (*(ImagePart(index) for index in range(num_images)), TextPart(text))
    messages = (ChatMessage("user", parts),) if prompt is None else ()
    wanted = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling})
    task = Generate(messages, wanted, prompt=prompt, grammar=grammar, tools=tools)
    return EngineCall(request_id, task, tenant, output_token_ids=output_token_ids, adapter=adapter)


def prepare_image(engine: Engine[Any], seed: int = 1) -> PreparedImage:
    data = encoded(seed, size=(64, 48))
    ref = ImageRef(f"sha-{seed}", len(data), "image/png", 64, 48)
    return PreparedImage(f"hash-{seed}", engine.prepare_image(data, ref, decode_image))


def run(engine: Engine[Any]) -> list[EngineOutput]:
    """Steps until no request is left; returns all outputs."""
    outputs: list[EngineOutput] = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def answer(engine: Engine[Any], call: EngineCall, *images: PreparedImage) -> list[EngineOutput]:
    engine.add(engine.prepare(call, images))
    return run(engine)


def ids_of(outputs: list[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def text_of(outputs: list[EngineOutput]) -> str:
    return "".join(output.text for output in outputs)


def read_metric(url: str, name: str) -> float:
    """Returns a metric of a server, summed over its labels."""
    text = httpx.get(f"{url}/metrics", trust_env=False, verify=False, follow_redirects=True).text
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


class Tone:
    """Open audio of half a second."""

    info = AudioInfo(0.5)

    def samples(self, rate: int) -> bytes:
        return array("f", (math.sin(i / 9) for i in range(rate // 2))).tobytes()


class Clip:
    """An open video. The gray level of a frame is its index times `shade`."""

    max_frames = 100

    def __init__(
        self,
        size: int = 8,
        num_frames: int = 30,
        num_sampled: int | None = 3,
        length_s: float = 1.0,
        shade: int = 1,
    ) -> None:
        self.info = VideoInfo(size, size, num_frames, length_s)
        self.options = VideoOptions(num_frames=num_sampled)
        self._shade = shade

    def frames(self, indices: Sequence[int]) -> list[Image.Image]:
        size = (self.info.width, self.info.height)
        return [Image.new("RGB", size, (index * self._shade,) * 3) for index in indices]
