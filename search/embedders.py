"""The embedders of the commands: an engine in this process, or a gateway."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from search.embed import Embedder, EmbedError, Source
from shared.gateway_client import Client

DOCUMENT_PROMPTS = ("document", "passage", "search_document")
QUERY_PROMPTS = ("query", "search_query")
TIMEOUT_S = 600.0
TRIES = 5  #: of a request to the gateway


class LocalEmbedder:
    def __init__(
        self,
        kind: str,
        model: str,
        prompt: str | None = None,
        usual: Sequence[str] = DOCUMENT_PROMPTS,
    ) -> None:
        """Raises: EngineStartError, EmbedError."""
        from engines.registry import create_engine  # noqa: PLC0415 (may load torch)

        loaded = create_engine({"kind": kind, "model": model} if model else {"kind": kind})
        self._engine, card = loaded.engine, loaded.card
        if "embed" not in card.tasks:
            raise EmbedError(f"{card.name} does not embed; it supports: {', '.join(card.tasks)}")
        self.model, self.digest, self.dimensions = card.name, card.digest, card.dimensions
        self.prompt = find_prompt(prompt, card.prompts, usual)
        self._capacity = self._engine.capabilities().max_num_seqs

    def embed(self, sources: Sequence[Source]) -> np.ndarray:
        """One call per input: the engine batches inputs of similar length."""
        rows: dict[str, bytes] = {}
        waiting = list(enumerate(sources))[::-1]
        num_running = 0
        while waiting or num_running:
            while waiting and num_running < self._capacity:
                self._start(*waiting.pop())
                num_running += 1
            for output in self._engine.step():
                if output.error is not None:
                    raise EmbedError(f"{sources[int(output.request_id)].id}: {output.error}")
                if output.finish_reason is not None:
                    rows[output.request_id] = output.values
                    num_running -= 1
        data = b"".join(rows[str(index)] for index in range(len(sources)))
        return np.frombuffer(data, "<f4").reshape(len(sources), self.dimensions)

    def _start(self, index: int, source: Source) -> None:
        """Raises: EmbedError."""
        from engines.base import EngineCall, PreparedImage, RequestError  # noqa: PLC0415
        from engines.image_decoder import decode_image  # noqa: PLC0415
        from shared.protocol import Embed, ImagePart, TextPart  # noqa: PLC0415

        task, images = Embed((TextPart(source.text),), prompt_name=self.prompt, truncate="end"), []
        try:
            if source.image is not None:
                data = _read(source.image)
                ref = _image_ref(source.image, data)
                content = self._engine.prepare_image(data, ref, decode_image)
                images = [PreparedImage(ref.sha256, content)]
                task = Embed((ImagePart(0),), (ref,), truncate="end")
            self._engine.add(self._engine.prepare(EngineCall(str(index), task), images))
        except RequestError as error:
            raise EmbedError(f"{source.image or source.id}: {error}") from None

    def close(self) -> None:
        self._engine.close()


def _image_ref(path: Path, data: bytes) -> Any:
    """Raises: EmbedError."""
    import io  # noqa: PLC0415

    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415

    from engines.image_decoder import FORMAT_NAMES, FORMATS  # noqa: PLC0415
    from shared.protocol import ImageRef  # noqa: PLC0415

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            kind, (width, height) = (image.format or "").lower(), image.size
    except (UnidentifiedImageError, OSError):
        raise EmbedError(f"{path}: use an image in {FORMAT_NAMES}") from None
    return ImageRef(hashlib.sha256(data).hexdigest(), len(data), f"image/{kind}", width, height)


def find_prompt(
    asked: str | None, prompts: Sequence[str], usual: Sequence[str] = DOCUMENT_PROMPTS
) -> str:
    """The given prompt, else the model's prompt for this use. Raises: EmbedError."""
    if asked is None:
        return next((name for name in usual if name in prompts), "")
    if asked and asked not in prompts:
        raise EmbedError(
            f"--prompt {asked}: unknown; prompts of this model: {', '.join(prompts) or 'none'}"
        )
    return asked


class RemoteEmbedder:
    """Embeds with a gateway. Documents are embedded at batch priority."""

    def __init__(
        self,
        url: str,
        model: str,
        api_key: str | None,
        prompt: str | None = None,
        usual: Sequence[str] = DOCUMENT_PROMPTS,
    ) -> None:
        """Raises: ApiFailed, EmbedError."""
        self._client = Client(url, api_key, TIMEOUT_S)
        is_batch = usual is DOCUMENT_PROMPTS
        self._options = {"service_tier": "flex"} if is_batch else {}
        card = self._find(model)
        self.model, self.digest = card["id"], card.get("digest", "")
        self.dimensions = card["dimensions"]
        self.prompt = find_prompt(prompt, card.get("prompts", ()), usual)

    def _find(self, model: str) -> dict[str, Any]:
        cards = self._client.ask("GET", "/v1/models", tries=TRIES)["data"]
        known = [card for card in cards if "embed" in card["tasks"]]
        if not model:
            known = [card for card in known if card["num_workers"]] or known
        for card in known:
            if card["id"] == model or (not model and len(known) == 1):
                return card
        names = ", ".join(card["id"] for card in known) or "none"
        raise EmbedError(f"give one of the gateway's embedding models with --model: {names}")

    def embed(self, sources: Sequence[Source]) -> np.ndarray:
        """Texts in one request, images 16 to a request."""
        rows: dict[int, np.ndarray] = {}
        texts = [index for index, source in enumerate(sources) if source.image is None]
        images = [index for index, source in enumerate(sources) if source.image is not None]
        prompt = {"prompt_name": self.prompt} if self.prompt else {}
        if texts:
            inputs = [sources[index].text for index in texts]
            rows |= zip(texts, self._ask(inputs, prompt), strict=True)
        for first in range(0, len(images), 16):
            some = images[first : first + 16]
            inputs = [
                {"image": base64.b64encode(_read(sources[index].image)).decode()} for index in some
            ]
            rows |= zip(some, self._ask(inputs, {}), strict=True)
        return np.stack([rows[index] for index in range(len(sources))])

    def _ask(self, inputs: Sequence[Any], prompt: Mapping[str, str]) -> list[np.ndarray]:
        body = {
            "model": self.model, "input": inputs, "encoding_format": "base64", "truncate": True,
            **prompt, **self._options,
        }  # fmt: skip
        answer = self._client.ask("POST", "/v1/embeddings", body, TRIES)
        return [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in answer["data"]]

    def close(self) -> None:
        self._client.close()


def _read(path: Path | None) -> bytes:
    """Raises: EmbedError."""
    assert path is not None
    try:
        return path.read_bytes()
    except OSError as error:
        raise EmbedError(f"{path} cannot be read ({error.strerror})") from None


def open_embedder(
    engine: str,
    model: str,
    url: str | None,
    api_key: str | None,
    prompt: str | None,
    usual: Sequence[str] = DOCUMENT_PROMPTS,
) -> Embedder:
    """A gateway if `url` is given, else an engine in this process. Raises: ApiFailed, EmbedError, EngineStartError."""
    if url is not None:
        return RemoteEmbedder(url, model, api_key, prompt, usual)
    return LocalEmbedder(engine, model, prompt, usual)
