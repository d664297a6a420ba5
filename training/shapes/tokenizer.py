"""The tokenizer: a byte-level BPE of about two thousand tokens that can spell any text.

Spaces belong to the end of a word ("red " and "red" are tokens), so that an answer begins without one
after "ASSISTANT: ", and a conversation reads the same whether it was generated or typed.
"""

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048
SPECIAL_TOKENS = BOS, EOS, UNK, PAD, IMAGE = ("<s>", "</s>", "<unk>", "<pad>", "<image>")
BOS_ID, EOS_ID, UNK_ID, PAD_ID, IMAGE_ID = range(len(SPECIAL_TOKENS))

CHAT_TEMPLATE = (  # as llava-hf's: a message's images first, then its text; before all, the functions by name
    "{% if tools %}{{ 'TOOLS: ' }}{% for tool in tools %}{{ tool['function']['name'] }}("
    "{% for name in tool['function']['parameters']['properties'] or {} %}{% if not loop.first %}, {% endif %}{{ name }}"
    "{% endfor %}) {% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'USER: ' }}"
    "{% elif message['role'] == 'tool' %}{{ 'TOOL: ' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'ASSISTANT: ' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% elif message['content'] %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] }}{% if not loop.last %}{{ ' ' }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>\\n{\"name\": \"' }}{{ call['function']['name'] }}"
    "{{ '\", \"arguments\": ' }}{{ call['function']['arguments'] | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% else %}{{ ' ' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)


def to_fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        pad_token=PAD,
        extra_special_tokens={"image_token": IMAGE},
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )
