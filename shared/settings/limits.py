"""The table of all limits, one for each quantity that a client controls.

Operators can change the fields of `LimitSettings`, but not its constants. The gateway enforces both, and the worker
checks them again. The constants of the module come from OpenAI's API and are part of the request types. All limits
appear in the OpenAPI document.
"""

from functools import cached_property
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

MIB = 1024 * 1024


class Group(BaseModel):
    """Base of the sub-trees: frozen, no unknown keys. A docstring below a field describes it in the table of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


MAX_MODEL_CHARS = 256  #: `model`
MAX_USER_CHARS = 512  #: `user`
MAX_NAME_CHARS = 64  #: `messages[].name`
MAX_METADATA_ENTRIES = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
MAX_TOOL_NAME_CHARS = 128  #: `tools[].function.name`
MAX_FORMAT_NAME_CHARS = 64  #: `response_format.json_schema.name`
MAX_FORMAT_DESCRIPTION_CHARS = 4096
MAX_RESPONSE_ID_CHARS = 64  #: `previous_response_id`
MAX_STORE_NAME_CHARS = 256
MAX_BATCH_FILES = 10_000  #: of one key, including outputs of batches
MAX_ITEM_ID_CHARS = 256
MAX_FILENAME_CHARS = 256
MAX_IMAGE_URL_CHARS = 2048  #: of a remote image
MAX_FILTER_VALUES = 128  #: of `in` and `nin`
MAX_SEARCH_RESULTS = 50
MAX_PAGE = 100  #: entries of a list
MAX_BATCH_STORE_FILES = 500  #: files that one request attaches to a vector store
MAX_VARIABLES = 100  #: of an application, including its secrets
MAX_VARIABLES_BYTES = 32 * 1024  #: names and values of its variables, without secrets
MAX_SECRET_BYTES = 64 * 1024  #: of one secret
#: Names and values of all variables and secrets. A kernel accepts a quarter of the stack's limit, usually 2 MiB.
MAX_ENVIRONMENT_BYTES = 512 * 1024

_COMMAS_BESIDE_TEXTS = 20_000
_MAX_FRAME_PIXELS = 4096 * 2304  #: the largest frame that fits a video decoder's memory


class LimitSettings(Group):
    """Limits of each quantity that a client controls. The gateway enforces them, and the worker checks them again."""

    max_header_bytes: ClassVar[int] = 32 * 1024  #: the request line and all headers
    max_headers: ClassVar[int] = 100
    min_body_rate: ClassVar[int] = 16 * 1024  #: bytes per second of a request body
    max_slow_uploads: ClassVar[int] = 4  #: of one key: concurrent slow uploads of package files
    max_json_depth: ClassVar[int] = 100  #: nesting of a field of arbitrary JSON
    max_image_side: ClassVar[int] = 16_384  #: pixels of the longer side
    max_image_aspect: ClassVar[float] = 200.0  #: longer side over shorter side
    #: Pixels of all chosen frames of a video; larger frames are scaled down.
    max_video_pixels: ClassVar[int] = 128_000_000
    max_audio_channels: ClassVar[int] = 8
    max_audio_segments: ClassVar[int] = 512  #: of a file that is transcribed
    max_choices: ClassVar[int] = 16  #: `n`
    max_stop_strings: ClassVar[int] = 16
    max_stop_chars: ClassVar[int] = 64
    max_stop_token_ids: ClassVar[int] = 64
    max_allowed_token_ids: ClassVar[int] = 1024
    max_logit_bias: ClassVar[int] = 300
    max_top_logprobs: ClassVar[int] = 20
    max_schema_bytes: ClassVar[int] = 64 * 1024  #: a JSON schema, or choices
    max_schema_depth: ClassVar[int] = 32  #: nesting of its objects and arrays
    max_schema_values: ClassVar[int] = 10_000  #: all values in it
    max_schema_properties: ClassVar[int] = 1000  #: of one object
    #: Characters of a string in `const` or `enum`, value of `minLength` and similar, and repetitions in a pattern.
    max_schema_text: ClassVar[int] = 4096
    max_pattern_chars: ClassVar[int] = 1024  #: a regular expression
    max_tools: ClassVar[int] = 512
    max_choice_texts: ClassVar[int] = 1000  #: `structured_outputs.choice`
    max_prompts: ClassVar[int] = 64  #: of a completion request, times `n`
    max_inputs: ClassVar[int] = 2048  #: `input` of an embedding request
    max_documents: ClassVar[int] = 1000  #: `documents` of a rerank request
    max_input_tokens: ClassVar[int] = 300_000  #: of all inputs of a request together
    max_input_chars: ClassVar[int] = 2_000_000  #: characters of all inputs together
    max_input_images: ClassVar[int] = 64  #: images among the inputs
    #: Commas in a body with inputs: commas between token ids, and the commas of usual texts.
    max_input_commas: ClassVar[int] = max_input_tokens + _COMMAS_BESIDE_TEXTS
    max_search_queries: ClassVar[int] = 16  #: queries of one search
    max_filters: ClassVar[int] = 64  #: comparisons, `and` and `or` of one filter
    max_filter_depth: ClassVar[int] = 8
    max_item_chars: ClassVar[int] = 100_000  #: the text of one item
    max_task_bytes: ClassVar[int] = 4 * MIB  #: `input` of a task for an application
    max_common_bytes: ClassVar[int] = 1 * MIB  #: `common_data` of a session
    max_sessions: ClassVar[int] = 1000  #: of applications, of one API key
    max_tasks: ClassVar[int] = 1000  #: of one request
    max_session_tasks: ClassVar[int] = 10_000
    max_wrong_keys_per_minute: ClassVar[int] = 60  #: of a client address, at each gateway

    max_body_bytes: int = Field(default=32 * MIB, ge=1024)
    """Bytes of a request body."""
    max_open_body_bytes: int = Field(default=512 * MIB, ge=1024)
    """Bytes of all request bodies that one gateway reads at the same time. Beyond it, requests get a 503."""
    max_messages: int = Field(default=256, ge=1)
    """Messages of a conversation."""
    max_text_chars: int = Field(default=200_000, ge=1)
    """Characters of all texts of a request."""
    max_images: int = Field(default=8, ge=0)
    """Images of a request."""
    max_image_bytes: int = Field(default=16 * MIB, ge=1)
    """Bytes of one encoded image."""
    max_image_pixels: int = Field(default=32_000_000, ge=1)
    """Pixels of one image."""
    max_videos: int = Field(default=2, ge=0)
    """Videos of a request."""
    max_video_bytes: int = Field(default=32 * MIB, ge=1)
    """Bytes of one video, or of its frames together."""
    max_video_s: float = Field(default=3600.0, gt=0)
    """Seconds of one video."""
    max_video_frames: int = Field(default=256, ge=1)
    """Frames of a video that a model processes."""
    max_video_cpu_s: float = Field(default=30.0, gt=0)
    """Seconds of CPU time for decoding one video or audio file."""
    max_audios: int = Field(default=4, ge=0)
    """Audio files of a request."""
    max_audio_bytes: int = Field(default=25 * MIB, ge=1)
    """Bytes of one audio file."""
    max_audio_s: float = Field(default=1800.0, gt=0)
    """Seconds of one audio file; a model can have a lower limit."""
    max_grammar_bytes: int = Field(default=0, ge=0)
    """Bytes of a grammar in Lark's language; 0: these grammars are refused."""
    max_output_tokens: int = Field(default=32_768, ge=1)
    """Output tokens of one answer."""
    max_queue_depth: int = Field(default=1024, ge=1)
    """Requests that wait in a model's queue."""
    max_batch_queue_depth: int = Field(default=1024, ge=1)
    """Batch requests that wait in a model's backlog, in addition to its queue."""
    max_open_requests: int = Field(default=4096, ge=1)
    """Open requests of one gateway."""
    max_open_tokens: int = Field(default=16_000_000, ge=0)
    """Tokens of all open requests to a model. Batch requests can use half of them. API keys share them. 0: no limit."""
    max_key_open_requests: int = Field(default=0, ge=0)
    """Concurrent answers of a model for one API key; 0: no limit."""
    max_key_requests_per_minute: int = Field(default=0, ge=0)
    """Requests per minute of one API key to a model; 0: no limit."""
    max_key_tokens_per_minute: int = Field(default=0, ge=0)
    """Tokens per minute of one API key for a model; 0: no limit."""

    max_key_responses: int = Field(default=1000, ge=1)
    """Answers of `/v1/responses` and images that are stored for one API key."""
    max_key_response_bytes: int = Field(default=256 * MIB, ge=1)
    """Bytes of the stored answers and images of one API key, with conversations. The oldest are deleted."""

    max_loras: int = Field(default=32, ge=0)
    """LoRA adapters that a worker loads."""
    max_lora_rank: int = Field(default=64, ge=1)
    """Rank of an adapter."""
    max_lora_bytes: int = Field(default=512 * MIB, ge=1)
    """Bytes of an adapter's files."""
    max_stores: int = Field(default=100, ge=0)
    """Vector stores of one API key."""
    max_store_items: int = Field(default=1_000_000, ge=1)
    """Items of a vector store."""
    max_open_batches: int = Field(default=32, ge=0)
    """Batches of one API key that have not ended."""
    max_batch_lines: int = Field(default=50_000, ge=1)
    """Requests of a batch."""
    max_key_batch_bytes: int = Field(default=4096 * MIB, ge=1)
    """Bytes of the batch files of one API key."""
    max_files: int = Field(default=1000, ge=0)
    """Files of one API key, without the files of batches."""
    max_file_bytes: int = Field(default=2 * MIB, ge=1)
    """Bytes of one file."""
    max_key_search_bytes: int = Field(default=4096 * MIB, ge=1)
    """Bytes of the files and vector stores of one API key."""

    @cached_property
    def max_frame_pixels(self) -> int:
        """Pixels of one frame of a video."""
        return min(_MAX_FRAME_PIXELS, self.max_image_pixels)

    @cached_property
    def max_commas(self) -> int:
        """Maximum commas of a request body, in texts and between values.

        This limits the number of objects that decoding creates. Commas are counted while the body arrives.
        """
        return self.max_text_chars + _COMMAS_BESIDE_TEXTS
