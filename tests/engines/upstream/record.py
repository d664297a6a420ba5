"""Records events of real servers for `test_recorded.py`: `TESTS_LONG=1 python -m tests.engines.upstream.record vllm`.

The argument is `vllm` or `sglang`, installed by `make test-vllm` and `make test-sglang`. Each line of the file has one
request: the events of its stream, and the answer without streaming. The last line has the server's description.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from engines.core.sequence import ImageInput
from engines.upstream.dialect import Dialect, UpstreamRequest
from engines.upstream.sglang import Sglang
from engines.upstream.vllm import Vllm
from shared.protocol import Grammar, SamplingParams
from tests.engines.upstream import sglang, vllm
from tests.engines.upstream.test_wheels import WHEELS
from tests.factories_images import encoded

EOS_ID, STOP_ID = 2, 70
ABORTED = "aborted"


#: By name: the function that runs it, its dialect, a prompt with an image, the context, and paths that describe it.
SERVERS = {
    "vllm": (
        lambda model: vllm.run_vllm(model, arguments="--enforce-eager"),
        lambda model: Vllm(vllm.make_settings(model, upstream_model=str(model)), [vllm.IMAGE_ID]),
        (40, vllm.IMAGE_ID, 42),
        vllm.CONTEXT,
        ("/version", "/v1/models"),
    ),
    "sglang": (
        sglang.run_sglang,
        lambda model: Sglang(sglang.make_settings(model), [sglang.IMAGE_ID]),
        (40, sglang.IMAGE_ID + 2, sglang.IMAGE_ID, sglang.IMAGE_ID + 3, 42),
        sglang.CONTEXT,
        ("/server_info", "/v1/models"),
    ),
}


def requests(name: str, image_prompt: tuple[int, ...], context: int) -> dict[str, UpstreamRequest]:
    """Returns requests by name, one for each form of an event."""

    def make(
        prompt: tuple[int, ...] = (40, 41, 42), *images: ImageInput, max_tokens: int = 6, **sampling: Any
    ) -> UpstreamRequest:  # fmt: skip
        grammar = sampling.pop("grammar", None)
        wanted = SamplingParams(temperature=0.0, **sampling)
        return UpstreamRequest(
            "r", list(prompt), wanted, images, grammar=grammar, max_tokens=max_tokens
        )

    image = ImageInput(1, 1, "hash", encoded(1, size=(64, 48)))
    found = {
        "length": make(ignore_eos=True),
        "logprobs": make(ignore_eos=True, num_logprobs=2),
        "stop token": make(logit_bias={EOS_ID: 100.0}),
        "stop token of the request": make(logit_bias={STOP_ID: 100.0}, stop_token_ids=(STOP_ID,)),
        "image": make(image_prompt, image, ignore_eos=True),
        "grammar": make(grammar=Grammar("choice", '["red", "green"]', "guided_choice")),
        "too long": make((40,) * context),
        "bad grammar": make(grammar=Grammar("regex", "(", "guided_regex")),
    }
    if name == "sglang":
        found[ABORTED] = make(ignore_eos=True, max_tokens=context - 8)
    return found


def main(name: str) -> None:
    run, create, image_prompt, context, paths = SERVERS[name]
    version = WHEELS[name].rpartition("==")[2]
    file = Path(__file__).with_name(f"{name}-{version}.jsonl").open("w")
    with tempfile.TemporaryDirectory() as directory, file:
        os.chdir(directory)  # answers contain the path of the model
        model = {"vllm": vllm, "sglang": sglang}[name].write_model(Path("tiny"))
        dialect = create(model)
        with run(model) as (url, _):
            for each, request in requests(name, image_prompt, context).items():
                abort_url = f"{url}/abort_request" if each == ABORTED else ""
                line = {"name": each, **_record(url, dialect, request, abort_url)}
                print(json.dumps(line), file=file)
            gets = {path: httpx.get(url + path, trust_env=False).json() for path in paths}
            print(json.dumps({"name": "server", "gets": gets}), file=file)


def _record(url: str, dialect: Dialect, request: UpstreamRequest, abort_url: str) -> dict[str, Any]:
    address, body = url + dialect.path, dialect.body(request, [])
    lines = []
    with httpx.stream("POST", address, json=body, timeout=120.0, trust_env=False) as streamed:
        for line in filter(None, streamed.iter_lines()):
            lines.append(line)
            if abort_url and len(lines) == 1:
                httpx.post(abort_url, json={"rid": body["rid"]}, trust_env=False)
    found = {"status": streamed.status_code, "lines": lines}
    if not abort_url:
        body |= {"stream": False}
        body.pop("stream_options", None)
        answer = httpx.post(address, json=body, timeout=120.0, trust_env=False)
        found["whole"] = answer.json()
    return found


if __name__ == "__main__":
    main(sys.argv[1])
