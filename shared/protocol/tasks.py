"""What a call asks an engine to do: a tagged union, opaque to the queue."""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from shared.protocol.content import (
    BlobRef,
    ChatMessage,
    ImagePart,
    ImageRef,
    Message,
    TextPart,
    TokensPart,
    Tools,
)


class SamplingParams(Message, frozen=True, omit_defaults=True):
    """How to sample tokens. Neutral values are the defaults, so that greedy text needs only `temperature=0`.

    Units: probabilities and temperatures are pure numbers, `max_tokens` counts output tokens.
    """

    #: None: as many as the context holds. 0: the prompt is computed and nothing is sampled.
    max_tokens: int | None = None
    temperature: float = 1.0  #: 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  #: 0: all
    min_p: float = 0.0
    #: Always set by the gateway; the noise is a pure function of (seed, output position).
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  #: end the answer, whatever `ignore_eos` is
    keeps_stop: bool = False  #: the text includes what stopped it
    allowed_token_ids: tuple[int, ...] = ()  #: empty: all
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    num_logprobs: int | None = None  #: None: none; k: the chosen token's and the k best
    num_prompt_logprobs: int | None = None  #: the same of each token of the prompt
    ignore_eos: bool = False
    min_tokens: int = 0  #: the end of the answer is not sampled before so many
    skip_special_tokens: bool = True  #: false: special tokens are part of the text
    returns_prompt_ids: bool = False  #: the first event has the token ids of the prompt


#: `json`: any JSON object, or what conforms to the schema that `source` is; `choice`: one of the texts of a JSON array.
GrammarKind = Literal["json", "regex", "choice", "lark"]


#: Keywords of JSON schemas that would be ignored, and answers be accepted that the schema forbids.
UNSUPPORTED_KEYWORDS = frozenset(
    [
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "propertyNames",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$dynamicAnchor",
        "$dynamicRef",
        "$recursiveRef",
        "contentSchema",
    ]
)


class Grammar(Message, frozen=True, omit_defaults=True):
    """What an answer must be. An engine that cannot see to it refuses the call."""

    kind: GrammarKind
    source: str
    param: str  #: where the client put it, in the words of the wire
    is_lenient: bool = False  #: keywords of a schema that are not supported are ignored


#: A variable of a chat template that a client sets.
TemplateOption = bool | int | float | str | None


#: How a rendered conversation ends: with the head of an answer, within its last message, or after it.
Ending = Literal["answer", "message", "none"]


class Generate(Message, frozen=True, tag_field="task", tag="generate", omit_defaults=True):
    """Continue a conversation, or a prompt: one answer.

    `n` choices are `n` calls that share their images.
    """

    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams
    images: tuple[ImageRef, ...] = ()
    #: Further variables of the chat template, by name.
    template_options: dict[str, TemplateOption] = msgspec.field(default_factory=dict)
    grammar: Grammar | None = None
    tools: Tools | None = None
    ending: Ending = "answer"
    #: In place of messages, without the chat template: special tokens spelled in it are tokens.
    prompt: TextPart | TokensPart | None = None
    #: Whether the tokenizer puts its own around a prompt of text, such as BOS.
    add_special_tokens: bool = True

    @property
    def param(self) -> str:
        """The field that holds all that is read, in the words of the wire."""
        return "messages" if self.prompt is None else "prompt"

    def texts(self) -> Iterator[str]:
        if isinstance(self.prompt, TextPart):
            yield self.prompt.text
        yield from (value for value in self.template_options.values() if isinstance(value, str))
        for function in self.tools.functions if self.tools is not None else ():
            yield from (function.description, function.parameters)
        for message in self.messages:
            if message.reasoning:
                yield message.reasoning
            yield from (call.arguments for call in message.tool_calls)
            yield from (part.text for part in message.parts if isinstance(part, TextPart))

    def with_images(self, images: Sequence[ImageRef]) -> "Generate":
        """The same task with its images: all choices share them."""
        return replace(self, images=tuple(images))

    def param_of_image(self, index: int) -> str | None:
        """Where the client put an image, in the words of the wire."""
        for i, message in enumerate(self.messages):
            for j, part in enumerate(message.parts):
                if isinstance(part, ImagePart) and part.image == index:
                    return f"messages.[{i}].content.[{j}].image_url"
        return None


#: What to do with an input that is longer than the model's context: refuse it, or cut that end off.
Truncate = Literal["none", "start", "end"]


class Embed(Message, frozen=True, tag_field="task", tag="embed", omit_defaults=True):
    """A vector for each input. The inputs of one request may be several calls."""

    inputs: tuple[TextPart | ImagePart | TokensPart, ...]
    images: tuple[ImageRef, ...] = ()
    #: One of the model's prompts, to stand before each text; empty: the model's default; None: none.
    prompt_name: str | None = ""
    dimensions: int | None = None  #: so many leading ones; None: all
    is_normalized: bool = True  #: to length 1
    truncate: Truncate = "none"
    first: int | None = 0  #: where these inputs begin in the request's list; None: it is no list
    max_tokens: int | None = None  #: of an input, special ones included; None: the model's

    def texts(self) -> Iterator[str]:
        return (part.text for part in self.inputs if isinstance(part, TextPart))

    def with_images(self, images: Sequence[ImageRef]) -> "Embed":
        """The same task with those images of the request that it has, counted anew."""
        used: dict[int, int] = {}
        inputs = tuple(
            ImagePart(used.setdefault(part.image, len(used)))
            if isinstance(part, ImagePart)
            else part
            for part in self.inputs
        )
        return replace(self, inputs=inputs, images=tuple(images[index] for index in used))

    def param(self, index: int) -> str:
        """Where the client put an input, in the words of the wire."""
        return "input" if self.first is None else f"input.[{self.first + index}]"

    def param_of_image(self, index: int) -> str | None:
        """Where the client put an image, in the words of the wire."""
        for i, part in enumerate(self.inputs):
            if isinstance(part, ImagePart) and part.image == index:
                return f"{self.param(i)}.image"
        return None


class Rerank(Message, frozen=True, tag_field="task", tag="rerank", omit_defaults=True):
    """A score for each document: how well it answers the query. Documents may be several calls."""

    queries: tuple[str, ...]  #: one for all documents, or one for each
    documents: tuple[str, ...]
    max_document_tokens: int | None = None  #: what is beyond is cut off
    truncate: Truncate = "none"  #: of a pair; a document is cut, never a query
    is_raw: bool = False  #: the model's number itself, without its activation
    name: str = "documents"  #: the field that holds the documents
    first: int | None = 0  #: where these begin in the request's list; None: it is no list
    images: tuple[ImageRef, ...] = ()

    def texts(self) -> Iterator[str]:
        yield from self.queries
        yield from self.documents

    def with_images(self, images: Sequence[ImageRef]) -> "Rerank":
        """The same task: it has no images."""
        return self

    def param(self, index: int) -> str:
        """Where the client put a document, in the words of the wire."""
        return self.name if self.first is None else f"{self.name}.[{self.first + index}]"

    def param_of_image(self, index: int) -> str | None:
        return None


class Tokenize(Message, frozen=True, tag_field="task", tag="tokenize", omit_defaults=True):
    """The token ids that a model reads of a request, or the text of ids. Nothing is computed."""

    of: Generate | None = None  #: None: `token_ids` are to be text
    token_ids: tuple[int, ...] = ()
    with_ids: bool = True  #: else their number is told alone
    with_strings: bool = False  #: each as the vocabulary spells it

    @property
    def images(self) -> tuple[ImageRef, ...]:
        return () if self.of is None else self.of.images

    def texts(self) -> Iterator[str]:
        return iter(()) if self.of is None else self.of.texts()

    def with_images(self, images: Sequence[ImageRef]) -> "Tokenize":
        """The same task with its images."""
        return self if self.of is None else replace(self, of=self.of.with_images(images))

    def param_of_image(self, index: int) -> str | None:
        """Where the client put an image, in the words of the wire."""
        return None if self.of is None else self.of.param_of_image(index)


class Run(Message, frozen=True, tag_field="task", tag="run", omit_defaults=True):
    """A task of an application, in its own words."""

    input: msgspec.Raw  #: JSON in one line
    session: str = ""  #: in which it runs; empty: in none
    common: BlobRef | None = None  #: the session's common data: JSON in one line
    is_streamed: bool = False  #: pieces are wanted as they come
    keep_s: float = 0.0  #: so long its result is kept at least
    id: str = ""  #: within its session

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """It has none that we know of."""
        return ()

    def texts(self) -> Iterator[str]:
        """All that there is to read."""
        yield bytes(self.input).decode()

    def with_images(self, images: Sequence[ImageRef]) -> "Run":
        return self

    def param_of_image(self, index: int) -> str | None:
        return None


class RunOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of what a task came to: a piece of it, or its end."""

    item: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    output: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


Task = Generate | Embed | Rerank | Tokenize | Run
