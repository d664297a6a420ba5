"""A peer of the embedding engine, run by the interpreter of its own environment: texts come in as lines of JSON, seconds of
CPU and vectors go out. It imports nothing of ours.
"""

import asyncio
import base64
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Encode = Callable[[list[str]], "np.ndarray[Any, Any]"]


def sentence_transformers(directory: str, dtype: str) -> Encode:
    """As its users call it."""
    import torch  # noqa: PLC0415 - each environment has its own
    from sentence_transformers import (  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
        SentenceTransformer,
    )

    torch.set_num_threads(1)
    options = {"dtype": dtype} if dtype != "default" else {}
    model = SentenceTransformer(directory, device="cpu", model_kwargs=options)
    return lambda texts: np.asarray(
        model.encode(texts, show_progress_bar=False, convert_to_tensor=True).float().cpu()
    )


def infinity(directory: str, dtype: str) -> Encode:
    """Its engine, all texts at once, as its server gives them to it."""
    import torch  # noqa: PLC0415
    from infinity_emb import (  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
        AsyncEmbeddingEngine,
        EngineArgs,
    )

    torch.set_num_threads(1)
    loop = asyncio.new_event_loop()
    arguments = EngineArgs(
        model_name_or_path=directory, engine="torch", device="cpu", dtype=dtype, bettertransformer=False,
        model_warmup=False,
    )  # fmt: skip
    engine = AsyncEmbeddingEngine.from_args(arguments)
    loop.run_until_complete(engine.astart())
    return lambda texts: np.asarray(loop.run_until_complete(engine.embed(texts))[0], np.float32)


def main() -> None:
    """Serve until the input ends. Arguments: the peer, a directory, a dtype."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    makers = {"sentence-transformers": sentence_transformers, "infinity": infinity}
    encode = makers[sys.argv[1]](*sys.argv[2:])
    encode(["w1 w2 w3"] * 2)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        texts = json.loads(line)
        began_s = time.process_time()
        vectors = encode(texts)
        took_s = time.process_time() - began_s
        data = base64.b64encode(np.ascontiguousarray(vectors, np.float32).tobytes()).decode()
        print(json.dumps({"seconds": took_s, "vectors": data}), file=answers, flush=True)


if __name__ == "__main__":
    main()
