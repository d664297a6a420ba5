"""What a worker says of the model that it serves."""

from shared.protocol.content import Report
from shared.protocol.version import PROTOCOL_VERSION


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
    tasks: tuple[str, ...] = ("generate",)  #: tags of the tasks that it takes
    dimensions: int = 0  #: of its vectors; 0: it makes none
    shorter_dimensions: tuple[int, ...] = ()  #: that a vector may be cut to
    prompts: tuple[str, ...] = ()  #: names of the prompts that may stand before a text
    version: int = PROTOCOL_VERSION  #: of the protocol that its workers speak
