"""Peers of the embedding engine, each run by the interpreter of its environment."""

import asyncio
import base64
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Encode = Callable[[list[str]], "np.ndarray[Any, Any]"]


def sentence_transformers(directory: str, dtype: str) -> Encode:
    """sentence-transformers through its public API."""
    from sentence_transformers import (  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
        SentenceTransformer,
    )

    model = SentenceTransformer(directory, device="cpu", model_kwargs={"dtype": dtype})
    return lambda texts: np.asarray(
        model.encode(texts, show_progress_bar=False, convert_to_tensor=True).float().cpu()
    )


def infinity(directory: str, dtype: str) -> Encode:
    """Infinity's engine. It gets all texts at once, as from its server."""
    from infinity_emb import (  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
        AsyncEmbeddingEngine,
        EngineArgs,
    )

    loop = asyncio.new_event_loop()
    arguments = EngineArgs(
        model_name_or_path=directory, engine="torch", device="cpu", dtype=dtype, bettertransformer=False,
        model_warmup=False,
    )  # fmt: skip
    engine = AsyncEmbeddingEngine.from_args(arguments)
    loop.run_until_complete(engine.astart())
    return lambda texts: np.asarray(loop.run_until_complete(engine.embed(texts))[0], np.float32)


EMBEDDERS = {"sentence-transformers": sentence_transformers, "infinity": infinity}


class Embedder:
    def __init__(self, maker: str, directory: str, dtype: str) -> None:
        """Load and warm up."""
        torch.set_num_threads(1)
        self._encode = EMBEDDERS[maker](directory, dtype)
        self._encode(["w1 w2 w3"] * 2)

    def embed(self, texts: list[str]) -> tuple[float, str]:
        """Seconds of CPU time, and the vectors in base64."""
        began_s = time.process_time()
        vectors = self._encode(texts)
        took_s = time.process_time() - began_s
        data = np.ascontiguousarray(vectors, np.float32).tobytes()
        return took_s, base64.b64encode(data).decode()
