"""Answers the questions of `evaluation` through `transformers`, one at a time, greedily."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from training.shapes.evaluation import Message
from training.shapes.llava import AutoProcessor, LlavaForConditionalGeneration


class LocalAnswerer:
    """Calls a checkpoint in fp32; see `evaluation.Answerer`."""

    def __init__(self, checkpoint: Path, num_threads: int = 2) -> None:
        torch.set_num_threads(num_threads)
        self.model = LlavaForConditionalGeneration.from_pretrained(
            checkpoint, dtype=torch.float32
        ).eval()
        self.processor = AutoProcessor.from_pretrained(checkpoint)

    @torch.inference_mode()
    def __call__(self, messages: Sequence[Message]) -> str:
        """The answer to the last message."""
        chat = [part for message in messages for part in _turn(message)]
        images = [image for message in messages for image in message.images]
        prompt = self.processor.apply_chat_template(chat[:-1], add_generation_prompt=True)
        inputs = self.processor(text=prompt, images=images or None, return_tensors="pt")
        model: Any = self.model  # its mixins are beyond a type checker
        generated = model.generate(**inputs, max_new_tokens=128, do_sample=False)
        return self.processor.decode(
            generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )


def _turn(message: Message) -> list[dict]:
    images = [{"type": "image"} for _ in message.images]
    return [
        {"role": "user", "content": [*images, {"type": "text", "text": message.question}]},
        {"role": "assistant", "content": [{"type": "text", "text": message.answer}]},
    ]
