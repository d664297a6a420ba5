"""Messages on their way to the fleet, whatever an API calls them: texts, and images told apart."""

from msgspec import Struct, field

from gateway.http.errors import InvalidRequest
from gateway.images.loader import ImageSource
from shared.protocol import ChatMessage, ImagePart, ImageRef, TextPart
from shared.settings.limits import LimitSettings


class Conversation(Struct):
    """The messages as the worker wants them, and the images in the order of their indexes."""

    messages: list[ChatMessage] = field(default_factory=list)
    sources: list[ImageSource] = field(default_factory=list)
    num_chars: int = 0

    def text(self, text: str) -> TextPart:
        """The part of a text."""
        self.num_chars += len(text)
        return TextPart(text)

    def image(self, url: str, param: str) -> ImagePart:
        """The part of an image. `param` names its place in the request."""
        self.sources.append(ImageSource(url, param))
        return ImagePart(len(self.sources) - 1)

    def kept_image(self, ref: ImageRef, param: str) -> ImagePart:
        """The part of an image that an earlier request brought."""
        self.sources.append(ImageSource("", param, ref))
        return ImagePart(len(self.sources) - 1)

    def check_chars(self, param: str, limits: LimitSettings) -> None:
        """Raises: InvalidRequest if all texts together are too long."""
        check_text_chars(self.num_chars, param, limits)


def check_text_chars(num_chars: int, param: str, limits: LimitSettings) -> None:
    """Raises: InvalidRequest if the texts of a prompt are too long."""
    if num_chars > limits.max_text_chars:
        raise InvalidRequest(
            f"The texts are too long: send at most {limits.max_text_chars} characters.",
            param=param,
            code="context_length_exceeded",
        )
