"""Captions of images by the built-in model. Input: `{"image": BASE64}`; output: the caption, in pieces."""

import base64
import hashlib
import io
from collections.abc import Iterator

from PIL import Image

from engines.base import EngineCall, PreparedImage, RequestError
from engines.image_decoder import decode_image
from engines.registry import create_engine
from shared.protocol import ChatMessage, Generate, ImagePart, ImageRef, SamplingParams, TextPart
from vlm_app import Application, Context, TaskError


class Captioner(Application):
    """Writes one sentence per shape. A session's common data can replace the `question`."""

    question = "Describe the image."

    def setup(self, context: Context) -> None:
        """Load the model."""
        values = {"model": "shapes", "device": context.device, "disabled_ops": "cpu"}
        self.engine = create_engine(values).engine

    def enter(self, common_data: dict) -> None:
        """Use the question of the session."""
        self.question = common_data["question"]

    def run(self, task: dict) -> Iterator[str]:
        """Yield the pieces of the caption. Raises: TaskError."""
        try:
            data = base64.b64decode(task["image"], validate=True)
            width, height = Image.open(io.BytesIO(data)).size
            digest = hashlib.sha256(data).hexdigest()
            ref = ImageRef(digest, len(data), "image/png", width, height)
            image = PreparedImage(digest, self.engine.prepare_image(data, ref, decode_image))
            message = ChatMessage("user", (ImagePart(0), TextPart(self.question)))
            asked = Generate((message,), SamplingParams(temperature=0), (ref,))
            self.engine.add(self.engine.prepare(EngineCall("caption", asked), [image]))
        except (KeyError, TypeError, ValueError, OSError, RequestError) as error:
            raise TaskError(f'send {{"image": BASE64 of a PNG or JPEG}}: {error}') from None
        try:
            while self.engine.has_work():
                yield from (output.text for output in self.engine.step() if output.text)
        finally:
            self.engine.abort("caption")


class Counter(Captioner):
    """Another version of the application, to deploy as a canary."""

    question = "How many shapes are there?"
