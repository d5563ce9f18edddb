# SPDX-License-Identifier: Apache-2.0
"""Small BPE tokenizers, trained on the text below in a fraction of a second, with chat templates like real ones.

Both know every byte: the English one through the bytes of GPT-2's alphabet, the multi-byte one through byte fallback
(``<0x00>`` to ``<0xFF>``), as SentencePiece models do. So tokens that hold a part of a character occur in both.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ENGLISH_TEXT = """
The weather in Paris is mild today, and the forecast for tomorrow says rain in the morning.
You are a helpful assistant. Answer the question of the user, and call a tool where a tool is needed.
Let me think about the question step by step before I answer it. First I look up the weather, then I answer.
To add two numbers, write them one above the other and add the digits from right to left: 17 + 25 = 42.
The answer is forty-two. The answer to the question is in the result of the tool that was called.
{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}
{"name": "run_python", "arguments": {"code": "print(sum(range(10)))"}}

def add(first, second):
    return first + second


for number in range(10):
    print(number, add(number, number))

user: What is the weather in London?

assistant: I will call the tool, think about its result and then answer the question.

system: Think first, then answer. Thinking is cheap; thinking again is cheaper.
"""

MULTIBYTE_TEXT = """
今日の天気は晴れです。明日の天気は雨です。東京の天気は晴れ、大阪の天気は雨です。
Das Wetter in München ist schön, und morgen fällt früh Regen über der Straße.
Погода сегодня хорошая, завтра утром будет дождь. Какая погода в Москве?
天气很好。我们去公园。今天天气很好、明天天气也很好。
Le café coûte trois euros à l'hôtel près du théâtre; ça va très bien, déjà là.
The weather is nice today and the forecast says rain tomorrow.
"""

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
"""One token each; a turn ends with ``<|im_end|>``, the ``eos_token``."""

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""One token each and, as in Qwen's tokenizers, not special: skip_special_tokens keeps them."""

_CHATML = """
{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}
{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- endif %}
{%- set turns = namespace(last_user=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set turns.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = message.content or '' %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
{%- else %}
{%- if STRIP_REASONING and message.role == 'assistant' and '</think>' in content and loop.index0 < turns.last_user %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\n' + content }}
{%- for call in message.tool_calls or [] %}
{%- if content or not loop.first %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

KEEP_REASONING = _CHATML.replace("STRIP_REASONING", "false")
"""ChatML: every message is rendered unchanged; ``tool_calls`` are rendered again from their arguments."""

STRIP_REASONING = _CHATML.replace("STRIP_REASONING", "true")
"""ChatML as Qwen3 renders it: assistant turns before the last user message lose what ends with ``</think>``."""

PLAIN = """
{%- for message in messages %}{{- message.role + ': ' + message.content + '\n\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""
"""No special tokens: a sampled token's text may merge with the template's text behind it."""


def english_tokenizer(chat_template: str = KEEP_REASONING) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer as GPT-2's and Qwen's, of 546 ids; ``\\n\\n`` is one token."""
    return _wrap(_train_english(), chat_template)


def multibyte_tokenizer(chat_template: str = KEEP_REASONING) -> PreTrainedTokenizerFast:
    """A BPE tokenizer with byte fallback as Llama's, of 607 ids: a character it never saw is several tokens."""
    return _wrap(_train_multibyte(), chat_template)


TOKENIZERS = {"english": english_tokenizer, "multibyte": multibyte_tokenizer}


def render(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    *,
    generate: bool = True,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """The token ids of a conversation, by the tokenizer's chat template; with the generation prompt at the end."""
    text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=generate, tokenize=False)
    return encode(tokenizer, text)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The ids of a text as the tokenizer itself would split it."""
    return tokenizer.encode(text, add_special_tokens=False)


def encode_bytewise(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """One id per byte of ``text``: always another tokenization of the same text (special tokens are not recognized)."""
    if "<0x00>" in tokenizer.get_vocab():
        return tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in text.encode()])
    alphabet = _bytes_to_unicode()
    return tokenizer.convert_tokens_to_ids([alphabet[byte] for byte in text.encode()])


def _wrap(tokenizer: Tokenizer, chat_template: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


@cache
def _train_english() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    words = r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([ENGLISH_TEXT] * 2, trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKERS])
    return tokenizer


@cache
def _train_multibyte() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    all_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", *all_bytes], show_progress=False)
    tokenizer.train_from_iterator([MULTIBYTE_TEXT] * 2, trainer)
    # Special tokens would be omitted from a decoded text; bytes are not special tokens.
    plain = models.BPE(**_vocabulary_and_merges(tokenizer), byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    rebuilt = Tokenizer(plain)
    rebuilt.normalizer, rebuilt.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    rebuilt.decoder = tokenizer.decoder
    rebuilt.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    rebuilt.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKERS])
    return rebuilt


def _vocabulary_and_merges(tokenizer: Tokenizer) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}


def _bytes_to_unicode() -> dict[int, str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
