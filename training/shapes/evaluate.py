"""Evaluates a checkpoint through `transformers`, one question at a time, greedily.

python -m training.shapes.evaluate engines/packages/shapes/checkpoint --num-scenes 300
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from training.shapes.evaluation import Message, evaluate, make_cases, report
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


def main(
    checkpoint: Annotated[Path, typer.Argument(help="folder of the model")] = Path(
        "engines/packages/shapes/checkpoint"
    ),
    num_scenes: int = 300,
    seed: int = 1_000_000,
    show_mistakes: Annotated[int, typer.Option(help="how many")] = 0,
    num_threads: int = 2,
) -> None:
    """Print the accuracy by topic, on scenes that training never saw."""
    console = Console()
    score = evaluate(LocalAnswerer(checkpoint, num_threads), list(make_cases(num_scenes, seed)))
    report(score, console)
    for case, said in score.mistakes[:show_mistakes]:
        question = case.messages[-1].question
        console.print(f"{case.topic}: {question!r} -> {said!r}, right is {case.answer!r}")


if __name__ == "__main__":
    typer.run(main)
