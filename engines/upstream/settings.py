"""Settings of engines that run in another process."""

from typing import ClassVar

from pydantic import Field, SecretStr

from engines.pooling.settings import PoolingSettings
from engines.settings import EngineSettings


class ServerSettings(EngineSettings):
    """A running server."""

    url: str = Field(default="", pattern="^(https?://.+)?$")
    """Address of a running server, such as http://127.0.0.1:8001; if it is empty, engines with `command` start one."""
    api_key: SecretStr = SecretStr("")
    """API key of that server."""
    upstream_model: str = ""
    """Name of the model at that server; empty: its first model."""
    start_s: float = Field(default=1800.0, gt=0)
    """Time limit for the server to become ready."""


class UpstreamSettings(ServerSettings):
    """The address of a server, or how the worker starts one."""

    command: str = ""
    """Executable or container that starts the server, such as `/opt/vllm/bin/vllm serve`; the worker appends
    the arguments."""
    arguments: str = ""
    """More arguments for the started server."""
    tokenizer: str = ""
    """Directory or Hugging Face id of tokenizer and chat template; empty: those of the model."""
    media_kinds: ClassVar[tuple[str, ...]] = ("image",)  #: kinds that the server's API accepts
    silence_s: float = Field(default=30.0, gt=0)
    """Seconds without data from a stream after which the server's health is checked."""


class GpuServerSettings(UpstreamSettings):
    """Settings of both vLLM and SGLang."""

    dtype: str = "auto"
    """`auto`, float32, bfloat16 or float16."""
    quantization: str = ""
    """Quantization method of the server; empty: the checkpoint's own."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """GPUs that share the model."""


class VllmSettings(GpuServerSettings):
    """vLLM, in its own environment."""

    media_kinds: ClassVar[tuple[str, ...]] = ("image", "video", "audio")


class SglangSettings(GpuServerSettings):
    """SGLang, in its own environment."""

    media_kinds: ClassVar[tuple[str, ...]] = ("image", "video")


class LlamaServerSettings(UpstreamSettings):
    """llama.cpp's server. The model is a GGUF file."""

    mmproj: str = ""
    """GGUF file of the vision tower and projector."""


class OpenAiSettings(UpstreamSettings):
    """Any server of OpenAI's chat completions API, at `url`."""

    takes_images: bool = False
    """Whether the model supports images."""
    takes_videos: bool = False
    """Whether the model supports videos; the frames are sent as JPEG in one `video_url`."""
    takes_audio: bool = False
    """Whether the model supports audio; it is sent as `input_audio` in WAV."""


class VectorSettings(PoolingSettings, ServerSettings):
    """Any server of OpenAI's embeddings API, or of Jina's rerank API, at `url`."""
