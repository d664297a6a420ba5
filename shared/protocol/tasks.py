"""What a call asks an engine to do: a tagged union, opaque to the queue."""

import msgspec

from shared.protocol.content import ChatMessage, ImageRef, Message


class SamplingParams(Message, frozen=True, omit_defaults=True):
    """How to draw tokens. Neutral values are the defaults, so that greedy text needs only `temperature=0`.

    Units: probabilities and temperatures are pure numbers, `max_tokens` counts output tokens.
    """

    max_tokens: int | None = None  #: None: as many as the context holds
    temperature: float = 1.0  #: 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  #: 0: all
    min_p: float = 0.0
    #: Always set by the gateway; the noise is a pure function of (seed, output position).
    seed: int = 0
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    num_logprobs: int | None = None  #: None: none; k: the chosen token's and the k best
    ignore_eos: bool = False


class Generate(Message, frozen=True, tag_field="task", tag="generate", omit_defaults=True):
    """Continue a conversation: one answer. `n` choices are `n` calls that share their images."""

    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams
    images: tuple[ImageRef, ...] = ()


Task = Generate
