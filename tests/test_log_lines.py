"""Lines of logs are read as the JSON parser of the standard library reads them, only faster."""

import json
import math
import pickle
import random

import pytest

pytest.importorskip("msgspec", reason="logs are read with msgspec: pip install mis_ext[cli]")

from hypothesis import given, settings
from hypothesis import strategies as st
from responses import recorded, vllm_chat, vllm_completions

from mis_ext.rollout.generation import CheckedIds
from mis_ext.rollout.logs import lines
from mis_ext.rollout.logs.json_parts import RepeatedIds
from mis_ext.rollout.logs.lines import LogLineError, parse_line

GENUINE = [recorded(name) for name in ("generate_length", "generate_two", "chat_two", "completions_token_ids")]
EXCHANGES = [*GENUINE, vllm_chat(), vllm_completions()]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(10**30) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
rows = st.fixed_dictionaries(
    {},
    optional={
        "conversation": st.just("a") | json_values,
        "format": st.sampled_from([*lines.READERS, "slang"]) | json_values,
        "request": st.sampled_from([request for request, _ in EXCHANGES]) | json_values,
        "response": st.sampled_from([response for _, response in EXCHANGES]) | json_values,
        "request_id": st.text(max_size=3) | json_values,
        "text": st.text(max_size=3) | json_values,
        "choice": st.integers(0, 1) | json_values,
        "prompt_ids": st.lists(st.integers(0, 9), max_size=3) | json_values,
        "unknown": json_values,
    },
)


def outcome(content: bytes) -> str:
    """The call, types and NaN included, or the error."""
    try:
        return repr(parse_line(content, file="f", line=1).decode(RepeatedIds()))
    except LogLineError as error:
        return str(error)


def refuse(content: bytes) -> None:
    raise lines.msgspec.DecodeError("by the test")


@settings(max_examples=150, deadline=None)
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
        patch.setattr(lines, "_DECODE_LINE", refuse)
        assert fast == outcome(content)


@pytest.mark.parametrize("seed", range(30))
def test_repeated_ids_are_those_of_each_list(seed) -> None:
    rng, ids, decoder = random.Random(seed), list[object](), RepeatedIds()
    separators = rng.choice([(", ", ": "), (",", ":"), (" , ", ": ")])
    for _ in range(40):
        kept = ids[: rng.choice([0, len(ids) // 2, max(len(ids) - 1, 0), len(ids), len(ids)])]
        odd = rng.choice([-1, True, 1.0, None, "1, 2", [3, 4], {"a": 1}, 2**31, math.inf])
        ids = kept + [rng.randrange(rng.choice([3, 300, 2**31])) for _ in range(rng.randrange(6))]
        ids += [odd] * (rng.random() < 0.2)
        found = decoder.decode_ids(json.dumps(ids, separators=separators).encode())
        assert repr([*found]) == repr(ids)
        all_ids = all(type(each) is int and 0 <= each < 2**31 for each in ids)
        assert isinstance(found, CheckedIds) == all_ids
        # What is wrong is not taken for known in the next list, nor missing from it.
        ids = [each for each in ids if rng.random() < 0.9 or type(each) is int]


def test_ids_that_begin_alike_are_told_apart() -> None:
    decoder = RepeatedIds()
    for ids in ([1, 2, 3], [1, 25], [1, 2], [1, 2, 3, 4], [12], [1], [], [1, 2, 34], [1, 2, 3]):
        assert decoder.decode_ids(json.dumps(ids).encode()) == ids


def test_ids_that_are_repeated_are_the_same_objects() -> None:
    decoder = RepeatedIds()
    first = decoder.decode_ids(b"[1000, 1001, 1002]")
    second = decoder.decode_ids(b"[1000, 1001, 1002, 1003]")
    # The last of a list is read again: it might have more digits now.
    assert [a is b for a, b in zip(first, second, strict=False)] == [True, True, False]


def test_an_error_survives_the_way_out_of_a_process() -> None:
    error = pickle.loads(pickle.dumps(LogLineError("f", 7, "no JSON")))
    assert (str(error), error.line) == ("f, line 7: no JSON", 7)
