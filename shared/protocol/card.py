"""What a worker says of the model that it serves."""

from shared.protocol.content import Report
from shared.protocol.version import PROTOCOL_VERSION

#: Variables by which chat templates let the model think or not.
THINKING_SWITCHES = frozenset({"enable_thinking", "thinking"})


class SamplingDefaults(Report, frozen=True, omit_defaults=True):
    """How a model's makers sample it; None where they say nothing. What a client says goes before."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


class AdapterCard(Report, frozen=True, omit_defaults=True):
    """An adapter that a worker holds, or why it does not."""

    name: str
    digest: str = ""  #: of its files; empty where it is not loaded
    created_at: int = 0  #: epoch seconds at which the worker loaded it
    revision: str = ""  #: of the fleet's list; empty: of the worker's own settings
    error: str = ""


class ModelCard(Report, frozen=True):
    """What a model can do; the gateway's `/v1/models` is made of these.

    Of a card of another version only `name` and `version` are known: the rest is zero.
    """

    name: str
    created_at: int  #: epoch seconds at which the worker loaded it, for the wire's `created`
    max_model_len: int
    vocab_size: int
    supports_images: bool = True
    image_tokens: int = 0  #: the most that one image may come to, for quotas; 0: unknown
    max_image_pixels: int = 0  #: to which larger images are scaled; 0: as their processor does
    tasks: tuple[str, ...] = ("generate",)  #: tags of the tasks that it takes
    dimensions: int = 0  #: of its vectors; 0: it makes none
    shorter_dimensions: tuple[int, ...] = ()  #: that a vector may be cut to
    prompts: tuple[str, ...] = ()  #: names of the prompts that may stand before a text
    sampling: SamplingDefaults = SamplingDefaults()  #: where a request says nothing
    dtype: str = ""  #: of its arithmetic; empty: unknown
    quantization: str = ""  #: of its weights; empty: none, or unknown
    format: str = ""  #: in which its weights were read: `safetensors`
    #: How it marks what it thinks before it answers; empty: it does not, or unknown.
    reasoning: str = ""
    always_thinks: bool = False  #: its prompts begin the thinking, whatever the request says
    template_options: tuple[str, ...] = ()  #: variables of its chat template that a request may set
    supports_grammars: bool = False  #: whether an answer can be held to a schema
    adapters: tuple[AdapterCard, ...] = ()  #: each is served as `name:adapter`
    parent: str = ""  #: of an adapter's card: the model that it changes, whose queue it shares
    adapter: str = ""  #: of an adapter's card: its digest
    digest: str = ""  #: of the files that decide its vectors; empty: unknown
    package: str = ""  #: of a deployment: its name, `@` and the digest of what it runs; empty: none
    version: int = PROTOCOL_VERSION  #: of the protocol that its workers speak

    @property
    def queue(self) -> str:
        """The model whose queue takes its calls."""
        return self.parent or self.name
