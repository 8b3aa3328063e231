"""Makes a tokenizer from text: byte-level BPE with the words of GPT-2 (Sennrich et al. 2016, Radford et al. 2019)."""

import json
from collections.abc import Iterable, Sequence

from jaxstack.common.counts import plural
from jaxstack.config import ConfigError
from jaxstack.data.text_pieces import pieces
from jaxstack.data.tokenizers import JsonObject

END_OF_TEXT = "<|endoftext|>"
CHAT_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
"""Special tokens of `CHAT_TEMPLATE`: each role begins a turn, and the last one ends every turn."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{{- '<|' + message['role'] + '|>' -}}\n"
    "{%- if message['role'] == 'assistant' -%}\n"
    "{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}\n"
    "{%- else -%}\n"
    "{{- message['content'] + '<|end|>' -}}\n"
    "{%- endif -%}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}\n"
)
"""A chat template in which an answer is a message with the token that ends it, and turns follow without white space."""

_BYTES = 256


def train_bpe(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str]) -> JsonObject:
    """Returns the content of a tokenizer.json whose tokens are the most frequent parts of words of the texts.

    Special tokens have the first ids, and the 256 bytes follow. The same texts give the same content on every machine,
    whatever the number of cores is.

    Args:
      vocab_size: the number of tokens. There are fewer if the texts have too few different words.
      special_tokens: tokens that are never split: a text that spells one gets its id.

    Raises:
      ConfigError: the vocabulary is too small, a special token is empty or named twice, or a package is missing.
    """
    if not special_tokens or "" in special_tokens or len({*special_tokens}) < len(special_tokens):
        raise ConfigError(
            f"--special_tokens={[*special_tokens]} is empty, or names an empty token or one twice. Name each once."
        )
    least = _BYTES + len(special_tokens)
    if vocab_size < least:
        raise ConfigError(
            f"--vocab_size={vocab_size} is less than {_BYTES} bytes and "
            f"{plural(len(special_tokens), 'special token')}. Use {least} or more."
        )
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise ConfigError(
            "jaxstack data tokenizer needs the tokenizers library. Run pip install 'jaxstack[hf]', or use bytes or "
            "chars."
        ) from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Pieces have the words of the whole text, and need less memory.
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    content: JsonObject = json.loads(tokenizer.to_str())
    return content
