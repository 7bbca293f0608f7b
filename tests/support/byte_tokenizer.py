"""A tokenizer with a token for each byte and two special ones, so that tiny models read and write any text."""

from __future__ import annotations

from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

NUM_TOKENS = 258
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "<|turn|>{{ message['role'] }}:{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)


def byte_tokenizer() -> Any:
    """The tokenizer; ids 0 to 255 stand for bytes, in the order of the byte-level alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|turn|>", "<|end|>"])
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    wrapped.chat_template = _CHAT_TEMPLATE
    return wrapped
