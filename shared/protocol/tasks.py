"""Tasks for engines, with messages, media references and sampling parameters. The queue does not decode them."""

from collections.abc import Iterator, Sequence
from typing import Literal, Self

import msgspec
from msgspec.structs import replace


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the structs that gateways send. Unknown fields are an error, so that workers ignore no field."""


class Report(msgspec.Struct, frozen=True):
    """Base of the structs that workers send. Fields that newer workers add are ignored."""


class TextPart(Message, frozen=True, tag_field="type", tag="text"):
    """Plain text. Special tokens in it are tokenized as ordinary text."""

    text: str


class ImagePart(Message, frozen=True, tag_field="type", tag="image"):
    """An image, video or audio file, by its index in the task's `images`."""

    image: int


class TokensPart(Message, frozen=True, tag_field="type", tag="tokens"):
    """Token ids of the model's vocabulary, special tokens included."""

    token_ids: tuple[int, ...]


class ToolCall(Message, frozen=True):
    """A function call of the assistant. `arguments` is JSON, unless the model wrote something else."""

    id: str
    name: str
    arguments: str


class ChatMessage(Message, frozen=True, omit_defaults=True):
    """A message of the conversation. One of role `tool` is the result of a call."""

    role: Literal["system", "user", "assistant", "tool"]
    parts: tuple[TextPart | ImagePart, ...]
    reasoning: str = ""  #: the assistant's reasoning before `parts`
    tool_calls: tuple[ToolCall, ...] = ()  #: the assistant's calls after `parts`
    tool_call_id: str = ""  #: the call whose result this is


class Function(Message, frozen=True, omit_defaults=True):
    name: str
    parameters: str  #: a JSON schema
    description: str = ""
    is_strict: bool = False  #: unsupported schema keywords are an error


class Tools(Message, frozen=True, omit_defaults=True):
    functions: tuple[Function, ...]
    is_required: bool = False  #: the answer must be a call
    is_parallel: bool = True  #: the answer may be several calls


class _Located(Message, frozen=True, kw_only=True, omit_defaults=True):
    url: str = ""  #: signed URL from which a worker reads the blob; empty: read it from Redis


class BlobRef(_Located, frozen=True, omit_defaults=True):
    """A blob in the blob store, by its SHA-256 (hexadecimal)."""

    sha256: str
    num_bytes: int


#: Media type of a video that is sent as JPEG frames; its blob is a MessagePack list of them.
FRAMES_TYPE = "video/jpeg"


class VideoOptions(Message, frozen=True, omit_defaults=True):
    """How frames of a video are sampled. Units: seconds."""

    fps: float | None = None  #: frames per second to sample; of a list of frames: their rate
    num_frames: int | None = None
    start_s: float = 0.0
    end_s: float = 0.0  #: 0: the end of the video


#: Kinds of media parts of a message.
MediaKind = Literal["image", "video", "audio"]


class ImageRef(BlobRef, frozen=True, omit_defaults=True):
    """An encoded image, video or audio in the blob store. Units: pixels, 0 for a video or audio."""

    media_type: str
    width: int
    height: int
    min_pixels: int = 0  #: smaller images are scaled up to this; 0: the model's minimum
    max_pixels: int = 0  #: larger images are scaled down to this; 0: the model's maximum
    video: VideoOptions | None = None  #: only for videos
    param: str = ""  #: path of the field in the request; empty: the `KIND_url` of a message
    start_s: float = 0.0  #: start of the part of an audio file to use
    end_s: float = 0.0  #: end of that part; 0: the end of the file

    @property
    def kind(self) -> MediaKind:
        if self.media_type.startswith("audio/"):
            return "audio"
        return "image" if self.video is None else "video"


class SamplingParams(Message, frozen=True, omit_defaults=True):
    """Sampling parameters. The defaults are no-op values: greedy text needs only `temperature=0`."""

    #: None: up to the context length. 0: compute only the prompt, such as for its logprobs.
    max_tokens: int | None = None
    temperature: float = 1.0  #: 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  #: 0: all
    min_p: float = 0.0
    #: Set by the gateway. Random numbers depend only on the seed and the output position.
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  #: end the answer, even with `ignore_eos`
    keeps_stop: bool = False  #: include the stop string in the text
    allowed_token_ids: tuple[int, ...] = ()  #: empty: all
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    num_logprobs: int | None = None  #: k: the sampled token and the k most probable; None: none
    num_prompt_logprobs: int | None = None  #: the same for each prompt token
    ignore_eos: bool = False
    min_tokens: int = 0  #: no end of sequence before this many tokens
    skip_special_tokens: bool = True  #: False: special tokens are part of the text
    returns_prompt_ids: bool = False  #: `Started` has the token ids of the prompt


#: json: a JSON object, or the schema in `source`; choice: one string of the JSON array in `source`.
GrammarKind = Literal["json", "regex", "choice", "lark"]


#: JSON schema keywords that grammars cannot enforce.
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
    """A grammar that the answer must match. Engines that do not support grammars refuse the call."""

    kind: GrammarKind
    source: str
    param: str  #: path of the field in the client's request
    is_lenient: bool = False  #: ignore unsupported schema keywords


#: The value of a chat template variable that a client sets.
TemplateOption = bool | int | float | str | None


#: End of the rendered conversation: a generation prompt, the last message to be continued, or its closed form.
Ending = Literal["answer", "message", "none"]


class _Task(Message, frozen=True, tag_field="task", tag=str.lower, omit_defaults=True):
    """Base of the tasks. Its methods are for tasks without images; each task has `texts`, all of its text."""

    def with_images(self, images: Sequence[ImageRef]) -> Self:
        """The same task with the images of its request."""
        return self

    def param_of_image(self, index: int) -> str | None:
        """The path of an image in the client's request."""
        return None


class Generate(_Task, frozen=True):
    """Generate one answer to a conversation or a prompt. `n` choices are `n` calls with the same images."""

    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams
    images: tuple[ImageRef, ...] = ()
    #: Chat template variables by name.
    template_options: dict[str, TemplateOption] = msgspec.field(default_factory=dict)
    grammar: Grammar | None = None
    tools: Tools | None = None
    ending: Ending = "answer"
    #: Replaces the messages and the chat template. Special tokens in its text are tokenized as such.
    prompt: TextPart | TokensPart | None = None
    #: Whether the tokenizer adds tokens such as BOS to a text prompt.
    add_special_tokens: bool = True

    @property
    def param(self) -> str:
        """The field of the client's request that holds the input."""
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

    def with_images(self, images: Sequence[ImageRef]) -> Self:
        return replace(self, images=tuple(images))

    def param_of_image(self, index: int) -> str | None:
        for i, message in enumerate(self.messages):
            for j, part in enumerate(message.parts):
                if isinstance(part, ImagePart) and part.image == index:
                    ref = self.images[index]
                    return ref.param or f"messages.[{i}].content.[{j}].{ref.kind}_url"
        return None


#: Which end of an input is truncated if the input is too long; none: refuse the input.
Truncate = Literal["none", "start", "end"]


class Embed(_Task, frozen=True):
    """Compute a vector for each input. A request may be split into several calls."""

    inputs: tuple[TextPart | ImagePart | TokensPart, ...]
    images: tuple[ImageRef, ...] = ()
    #: The model's prompt to prepend to each text; empty: its default; None: none.
    prompt_name: str | None = ""
    dimensions: int | None = None  #: truncate the vectors to this many; None: all
    is_normalized: bool = True  #: scale vectors to length 1
    truncate: Truncate = "none"
    first: int | None = (
        0  #: index of the first input in the request's list; None: the request has a single input
    )
    max_tokens: int | None = None  #: per input, special tokens included; None: the model's limit

    def texts(self) -> Iterator[str]:
        return (part.text for part in self.inputs if isinstance(part, TextPart))

    def with_images(self, images: Sequence[ImageRef]) -> Self:
        """The same task with the images that its inputs use, renumbered."""
        used: dict[int, int] = {}
        inputs = tuple(
            ImagePart(used.setdefault(part.image, len(used)))
            if isinstance(part, ImagePart)
            else part
            for part in self.inputs
        )
        return replace(self, inputs=inputs, images=tuple(images[index] for index in used))

    def param(self, index: int) -> str:
        """The path of an input in the client's request."""
        return "input" if self.first is None else f"input.[{self.first + index}]"

    def param_of_image(self, index: int) -> str | None:
        for i, part in enumerate(self.inputs):
            if isinstance(part, ImagePart) and part.image == index:
                return f"{self.param(i)}.image"
        return None


class Rerank(_Task, frozen=True):
    """Score documents by their relevance to the query. A request may be split into several calls."""

    queries: tuple[str, ...]  #: one query for all documents, or one query per document
    documents: tuple[str, ...]
    max_document_tokens: int | None = None  #: longer documents are truncated
    truncate: Truncate = "none"  #: of a query and a document, only the document is truncated
    is_raw: bool = False  #: raw logits without activation
    name: str = "documents"  #: field of the request that holds the documents
    first: int | None = (
        0  #: index of the first document in the request's list; None: the request has a single document
    )
    images: tuple[ImageRef, ...] = ()

    def texts(self) -> Iterator[str]:
        yield from self.queries
        yield from self.documents

    def param(self, index: int) -> str:
        """The path of a document in the client's request."""
        return self.name if self.first is None else f"{self.name}.[{self.first + index}]"


class Tokenize(_Task, frozen=True):
    """Tokenize a request, or detokenize ids, without running the model."""

    of: Generate | None = None  #: None: detokenize `token_ids`
    token_ids: tuple[int, ...] = ()
    with_ids: bool = True  #: False: return only the count
    with_strings: bool = False  #: also return each token as the vocabulary spells it
    finds_segments: bool = False  #: return only the segments of the audio file, without tokens

    @property
    def images(self) -> tuple[ImageRef, ...]:
        return () if self.of is None else self.of.images

    def texts(self) -> Iterator[str]:
        return iter(()) if self.of is None else self.of.texts()

    def with_images(self, images: Sequence[ImageRef]) -> Self:
        return self if self.of is None else replace(self, of=self.of.with_images(images))

    def param_of_image(self, index: int) -> str | None:
        return None if self.of is None else self.of.param_of_image(index)


class Run(_Task, frozen=True):
    """A task of an application; the input is opaque."""

    input: msgspec.Raw  #: one line of JSON
    session: str = ""  #: empty: without a session
    common: BlobRef | None = None  #: the session's common data: one line of JSON
    is_streamed: bool = False  #: stream the output
    keep_s: float = 0.0  #: minimum time to keep the result
    id: str = ""  #: id of the task in its session

    @property
    def images(self) -> tuple[ImageRef, ...]:
        return ()

    def texts(self) -> Iterator[str]:
        yield bytes(self.input).decode()


class RunOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a task's output: a streamed item, or the final output."""

    item: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    output: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


Task = Generate | Embed | Rerank | Tokenize | Run
