"""Record events of a real vLLM for `test_recorded.py`: `python -m tests.engines.upstream.record`, after `make test-vllm`.

Each line of the file is one request: what was sent, the events of its stream, and the answer without streaming.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import httpx

from engines.core.sequence import ImageInput
from engines.upstream.dialect import UpstreamRequest
from engines.upstream.vllm import Vllm
from shared.protocol import Grammar, SamplingParams
from tests.engines.upstream.build_vllm import VERSION
from tests.engines.upstream.vllm import make_settings, run_vllm, write_model
from tests.factories_images import encoded

FILE = Path(__file__).with_name(f"vllm-{VERSION}.jsonl")
IMAGE_ID, EOS_ID = 320, 2


def requests() -> dict[str, UpstreamRequest]:
    """By name: one for each form of an event."""

    def make(prompt: list[int], *images: ImageInput, **sampling: Any) -> UpstreamRequest:
        grammar = sampling.pop("grammar", None)
        wanted = SamplingParams(temperature=0.0, **sampling)
        return UpstreamRequest("r", prompt, wanted, images, grammar=grammar, max_tokens=6)

    image = ImageInput(1, 1, "hash", encoded(1, size=(64, 48)))
    schema = Grammar("choice", '["red", "green"]', "guided_choice")
    return {
        "length": make([40, 41, 42], ignore_eos=True),
        "logprobs": make([40, 41, 42], ignore_eos=True, num_logprobs=2),
        "stop token": make([40, 41, 42], logit_bias={EOS_ID: 100.0}),
        "image": make([40, IMAGE_ID, 42], image, ignore_eos=True),
        "grammar": make([40, 41, 42], grammar=schema),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "tiny")
        dialect = Vllm(make_settings(model, upstream_model=str(model)), IMAGE_ID)
        with run_vllm(model, arguments="--enforce-eager") as (url, _), FILE.open("w") as file:
            for name, request in requests().items():
                print(json.dumps({"name": name, **_record(url, dialect, request)}), file=file)


def _record(url: str, dialect: Vllm, request: UpstreamRequest) -> dict[str, Any]:
    address, body = url + dialect.path, dialect.body(request, [])
    streamed = httpx.post(address, json=body, timeout=60.0, trust_env=False)
    lines = [line for line in streamed.text.splitlines() if line]
    body |= {"stream": False}
    body.pop("stream_options")
    whole = httpx.post(address, json=body, timeout=60.0, trust_env=False).json()
    return {"status": streamed.status_code, "lines": lines, "whole": whole}


if __name__ == "__main__":
    main()
