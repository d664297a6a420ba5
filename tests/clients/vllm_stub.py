"""A pytest plugin that replaces vLLM, torch and similar modules, and sends vLLM's HTTP tests to `VLM_URL`.

It is loaded within vLLM's sources, by an interpreter without these modules, and imports nothing of the project.
"""

import base64
import importlib
import importlib.abc
import importlib.machinery
import io
import os
import sys
import types
from typing import Any
from unittest.mock import MagicMock

import anthropic
import httpx
import openai
import pytest
from PIL import Image

URL = os.environ["VLM_URL"]
ABSENT = (
    "lm_eval", "mistral_common", "numba", "openai_harmony", "safetensors", "schemathesis", "tensorizer",
    "torch", "torchvision", "transformers", "vllm",
)  # fmt: skip


class _Module(types.ModuleType):
    """A module with every name; each is a mock."""

    __path__ = ()
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that are not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


class Server:
    """Replaces the server of the tests by the one at `VLM_URL`."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, *arguments: object, **options: object) -> None:
        self.url_root = URL
        self.host, _, port = URL.removeprefix("http://").partition(":")
        self.port = int(port)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        """The server continues."""

    def url_for(self, *parts: str) -> str:
        return "/".join([URL, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> Any:
        return self._openai(openai.OpenAI, options)

    def get_async_client(self, **options: Any) -> Any:
        return self._openai(openai.AsyncOpenAI, options)

    def _openai(self, kind: Any, options: dict[str, Any]) -> Any:
        base_url = self.url_for("v1")
        return kind(base_url=base_url, api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_client_anthropic(self, **options: Any) -> Any:
        return anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, **options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        return anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0, **options)


class Tokenizer:
    """The tokenizer of the served model."""

    eos_token_id = 256
    chat_template = ""

    def __init__(self, name: str) -> None:
        self.name = name

    def _post(self, path: str, **body: Any) -> Any:
        answer = httpx.post(URL + path, json={"model": self.name, **body}, trust_env=False)
        answer.raise_for_status()
        return answer.json()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._post("/tokenize", prompt=text, add_special_tokens=add_special_tokens)["tokens"]

    def __call__(self, text: str, **options: Any) -> Any:
        return types.SimpleNamespace(input_ids=self.encode(text))

    def decode(self, token_ids: Any, **options: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [*token_ids]
        return self._post("/detokenize", tokens=ids)["prompt"]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.decode(each) for each in ids]

    def apply_chat_template(
        self, conversation: Any = None, *, tokenize: bool = False, **options: Any
    ) -> Any:
        names = ("add_generation_prompt", "continue_final_message", "tools")
        wish = {name: options[name] for name in names if options.get(name) is not None}
        wish.setdefault("add_generation_prompt", False)
        ids = self._post("/tokenize", messages=conversation, **wish)["tokens"]
        return ids if tokenize else self.decode(ids)


def _tokenizer(tokenizer_name: str = "", *_: object, **__: object) -> Tokenizer:
    return Tokenizer(tokenizer_name)


def _to_url(image: Any, format: str = "PNG", **_: object) -> str:
    data = io.BytesIO()
    getattr(image, "media", image).convert("RGB").save(data, format)
    return f"data:image/{format.lower()};base64,{base64.b64encode(data.getvalue()).decode()}"


def _utils() -> types.ModuleType:
    module = _Module("tests.utils")
    for name in ("RemoteOpenAIServer", "RemoteLaunchRenderServer", "RemoteVLLMServer"):
        setattr(module, name, Server)
    module.ROCM_EXTRA_ARGS, module.ROCM_ENV_OVERRIDES = [], {}
    module.create_new_process_for_each_test = lambda *_: lambda function: function
    return module


class Configuration:
    """Replaces vLLM's model configuration."""

    def __init__(self, *_: object, **__: object) -> None:
        """Loads nothing."""

    def get_vocab_size(self) -> int:
        models = httpx.get(f"{URL}/v1/models", trust_env=False).json()["data"]
        return models[0].get("vocab_size", 514)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Deselects tests of vLLM's functions, which need no server."""
    apart = [
        item
        for item in items
        if not any(each.endswith(("server", "client")) for each in item.fixturenames)
    ]
    config.hook.pytest_deselected(items=apart)
    items[:] = [item for item in items if item not in apart]


def pytest_configure(config: Any) -> None:
    config.addinivalue_line("markers", "asyncio")


class Assets:
    """Images that the suite would download and serve."""

    def get_image_asset(self, name: str) -> Image.Image:
        return Image.linear_gradient("L").convert("RGB")

    def url_for(self, name: str) -> str:
        return _to_url(self.get_image_asset(name))


@pytest.fixture(scope="session")
def local_asset_server() -> Assets:
    return Assets()


@pytest.fixture
def image_url(local_asset_server: Assets) -> str:
    return local_asset_server.url_for("")


@pytest.fixture
def image_urls(request: Any, image_url: str) -> list[str]:
    return [image_url for _ in request.param]


#: Attributes of absent modules that the tests need.
NEEDED = {
    "torch": {"iinfo": lambda _: types.SimpleNamespace(min=-(2**63), max=2**63 - 1)},
    "transformers": {"AutoTokenizer": types.SimpleNamespace(from_pretrained=_tokenizer)},
    "vllm.config": {"ModelConfig": Configuration},
    "vllm.exceptions": {"VLLMValidationError": type("VLLMValidationError", (ValueError,), {})},
    "vllm.multimodal.media": {"MediaWithBytes": type("MediaWithBytes", (), {})},
    "vllm.multimodal.utils": {"encode_image_url": _to_url},
    "vllm.platforms": {"current_platform": MagicMock(is_rocm=lambda: False)},
    "vllm.tokenizers": {"get_tokenizer": _tokenizer},
}
sys.meta_path.insert(0, _Finder())
sys.modules["tests.utils"] = _utils()
for _module, _names in NEEDED.items():
    importlib.import_module(_module).__dict__.update(_names)
