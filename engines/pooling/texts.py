"""Token ids of texts and pairs for embedding models. Needs no torch."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Encoding, Tokenizer

from engines.base import InvalidRequest, PromptTooLong, check_token_ids
from engines.pooling.checkpoint import SentenceConfig
from shared.protocol import Embed, ImagePart, Rerank, TextPart, Truncate


@dataclass(frozen=True, slots=True)
class Words:
    """Token ids of a text, and their types."""

    ids: Sequence[int]
    types: Sequence[int]

    @property
    def identity(self) -> bytes:
        return array("i", (*self.ids, *self.types)).tobytes()


class Texts:
    def __init__(
        self, tokenizer: Tokenizer, max_tokens: int, vocab_size: int, config: SentenceConfig
    ) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._config = config
        self.max_tokens = max_tokens
        self.vocab_size = vocab_size

    def words(self, task: Embed, index: int) -> Words:
        """Token ids of one input, which is a text or ids. Raises: PromptTooLong, InvalidRequest."""
        part, param = task.inputs[index], task.param(index)
        if isinstance(part, TextPart):
            name = self._config.default_prompt if task.prompt_name == "" else task.prompt_name
            prompt = self._config.prompts[name] if name else ""
            encoding = self._tokenizer.encode(prompt + part.text, add_special_tokens=False)
            num_special = self._tokenizer.num_special_tokens_to_add(False)
            room = max(0, self._most(task) - num_special)
            self._cut(encoding, room, task.truncate, param)
            return self._words(self._tokenizer.post_process(encoding), param)
        assert not isinstance(part, ImagePart)
        ids = part.token_ids
        check_token_ids(ids, self.vocab_size, param)
        if len(ids) > (most := self._most(task)):
            if task.truncate == "none":
                raise self._too_long(len(ids), param)
            ids = ids[-most:] if task.truncate == "start" else ids[:most]
        return Words(ids, (0,) * len(ids))

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[str]]:
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return encoding.ids, encoding.tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids with special tokens. Raises: InvalidRequest."""
        check_token_ids(token_ids, self.vocab_size, "tokens")
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def pair(self, task: Rerank, index: int) -> Words:
        """Token ids of a query and a document. Raises: PromptTooLong, InvalidRequest."""
        encoding = self._tokenizer.post_process(*self.encode_pair(task, index))
        return self._words(encoding, task.param(index))

    def encode_pair(self, task: Rerank, index: int) -> tuple[Encoding, Encoding]:
        """Encode a query and a document, truncated as the task requests. Raises: PromptTooLong."""
        query = task.queries[index if len(task.queries) > 1 else 0]
        first = self._tokenizer.encode(query, add_special_tokens=False)
        second = self._tokenizer.encode(task.documents[index], add_special_tokens=False)
        if task.max_document_tokens is not None:
            second.truncate(task.max_document_tokens)
        room = self.max_tokens - self._tokenizer.num_special_tokens_to_add(True) - len(first)
        if room < 1:
            raise PromptTooLong(
                f"The query has {len(first)} tokens: send at most {self.max_tokens // 2}.",
                "query" if task.name == "documents" else "text_1",
            )
        self._cut(second, room, task.truncate, task.param(index))
        return first, second

    def _words(self, encoding: Encoding, param: str) -> Words:
        """Raises: InvalidRequest."""
        if not encoding.ids:
            raise InvalidRequest(f"{param} has no tokens: send a text.", param)
        check_token_ids(encoding.ids, self.vocab_size, param)
        return Words(array("i", encoding.ids), bytes(encoding.type_ids))

    def _most(self, task: Embed) -> int:
        return min(self.max_tokens, task.max_tokens or self.max_tokens)

    def _cut(self, encoding: Encoding, room: int, truncate: Truncate, param: str) -> None:
        if len(encoding) <= room:
            return
        if truncate == "none":
            raise self._too_long(len(encoding) + self.max_tokens - room, param)
        encoding.truncate(room, direction="left" if truncate == "start" else "right")

    def _too_long(self, num_tokens: int, param: str) -> PromptTooLong:
        return PromptTooLong(
            f"The input has {num_tokens} tokens: send at most {self.max_tokens}, or truncate.",
            param,
        )
