# SPDX-License-Identifier: Apache-2.0
"""Lines of logs are read as the JSON parser of the standard library reads them, only faster."""

import json

import pytest

pytest.importorskip("msgspec", reason="logs are read with msgspec: pip install msgspec")

from hypothesis import given
from hypothesis import strategies as st
from responses import recorded, vllm_chat, vllm_completions
from searching import searching

from mis_ext.rollout import rollout_log
from mis_ext.rollout.rollout_log import LogLineError, parse_line

GENUINE = [recorded(name) for name in ("generate_length", "generate_two", "chat_two", "completions_token_ids")]
EXCHANGES = [*GENUINE, vllm_chat(), vllm_completions()]

# Characters of one to four bytes, what JSON escapes, and half of one. All of Unicode would be read for seconds first.
text = st.text(st.sampled_from('a7"\\/\n\0\x7fé\u2028\ufffd🙂\ud800'), max_size=4)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text | st.just(10**30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
rows = st.fixed_dictionaries(
    {},
    optional={
        "conversation": st.just("a") | json_values,
        "format": st.sampled_from([*rollout_log.READERS, "slang"]) | json_values,
        "request": st.sampled_from([request for request, _ in EXCHANGES]) | json_values,
        "response": st.sampled_from([response for _, response in EXCHANGES]) | json_values,
        "request_id": text | json_values,
        "text": text | json_values,
        "choice": st.integers(0, 1) | json_values,
        "prompt_ids": st.lists(st.integers(0, 9), max_size=3) | json_values,
        "unknown": json_values,
    },
)


def outcome(content: bytes) -> str:
    """The call, types and NaN included, or the error."""
    try:
        return repr(parse_line(content, file="f", line=1))
    except LogLineError as error:
        return str(error)


def refuse(content: bytes) -> None:
    raise rollout_log.msgspec.DecodeError("by the test")


@searching(40)
@given(rows, st.booleans(), st.data())
def test_a_line_is_read_as_by_the_standard_library(row, ascii_only, data) -> None:
    content = json.dumps(row, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    if data.draw(st.booleans()):
        # Broken somewhere, by a byte more or less.
        position = data.draw(st.integers(0, len(content)))
        content = (
            content[:position] + data.draw(st.sampled_from([b"", b"\xff", b",", b"]", b"0"])) + content[position + 1 :]
        )
    with pytest.MonkeyPatch.context() as patch:
        fast = outcome(content)
        patch.setattr(rollout_log, "_DECODE", refuse)
        assert fast == outcome(content)
