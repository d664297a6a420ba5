"""The kinds of media that a message can contain: their names, limits and capabilities, in one table."""

from collections.abc import Callable, Mapping
from operator import attrgetter

from msgspec import Struct

from shared.protocol import MediaKind, ModelCard
from shared.settings.limits import LimitSettings


class Medium(Struct, frozen=True):
    plural: str
    formats: str  #: formats that the gateway recognizes
    media_type: str  #: an example of a MIME type
    max_count: Callable[[LimitSettings], int]  #: maximum in a request
    max_bytes: Callable[[LimitSettings], int]
    is_taken: Callable[[ModelCard], bool]


MEDIA: Mapping[MediaKind, Medium] = {
    "image": Medium(
        "images", "PNG, JPEG, WebP, GIF or AVIF", "image/png",
        attrgetter("max_images"), attrgetter("max_image_bytes"), attrgetter("supports_images"),
    ),
    "video": Medium(
        "videos", "MP4, WebM, AVI or MPEG-TS", "video/mp4",
        attrgetter("max_videos"), attrgetter("max_video_bytes"), attrgetter("supports_video"),
    ),
    "audio": Medium(
        "audio files", "WAV, MP3, FLAC, Ogg, M4A, AAC or WebM", "audio/wav",
        attrgetter("max_audios"), attrgetter("max_audio_bytes"), attrgetter("supports_audio"),
    ),
}  # fmt: skip
