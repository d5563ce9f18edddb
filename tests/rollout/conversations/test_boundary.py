# SPDX-License-Identifier: Apache-2.0
"""Every class of turn boundary, found by proof; and no class where the proof fails."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="real tokenizers: pip install transformers")
pytest.importorskip("jinja2", reason="chat templates: pip install jinja2")

from conversations import ANSWER, CASES, MORE, QUESTION, call, merged_across_the_end
from tiny_tokenizers import PLAIN, STRIP_REASONING, TOKENIZERS, TURN_END, encode, encode_bytewise, render
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mis_ext.rollout.conversations.builder import build_samples, find_mismatch
from mis_ext.rollout.generation import Boundary
from mis_ext.rollout.vocabulary import BYTE_LEVEL_ALPHABET, TokenBytes

TEXT = "a naïve 天気, Погода 🙂👩‍🚀\n\n  <think>x</think><|im_end|>"


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


def boundary_of(
    tokenizer, sampled, history, *, head="<|im_start|>user\nhi<|im_end|>\n", tail="\n", **settings
) -> Boundary:
    """The boundary after ``sampled`` (text or ids), if the next prompt renders it as ``history``."""
    opening = settings.pop("opening", "<|im_start|>assistant\n")
    reopening = settings.pop("reopening", opening)
    finish_reason = settings.pop("finish_reason", "stop")
    ids = encode(tokenizer, sampled) if isinstance(sampled, str) else sampled
    calls = [
        call("first", encode(tokenizer, head + opening), ids, finish_reason=finish_reason),
        call("second", encode(tokenizer, head + reopening + history + tail), encode(tokenizer, "ok")),
    ]
    (boundary,) = build_samples(calls, policy="split", tokenizer=tokenizer, **settings).boundaries
    return boundary


def kind_of(*args, **settings) -> str | None:
    kind = boundary_of(*args, **settings).kind
    return kind and kind.value


@pytest.mark.parametrize("name", CASES)
def test_every_class_is_found(tokenizer, name) -> None:
    case = CASES[name](tokenizer)
    (boundary,) = build_samples(case.calls, policy="split", tokenizer=tokenizer).boundaries
    assert boundary.kind == case.kind


def test_the_first_mismatch_is_told_with_both_ids_and_both_texts(tokenizer) -> None:
    end, other = tokenizer.convert_tokens_to_ids(["<think>", "<tool_call>"])
    prompt = encode(tokenizer, "<|im_start|>system\nabc")
    calls = [call("first", [*prompt, end], encode(tokenizer, "yes")), call("second", [*prompt, other, end], [end])]
    (boundary,) = build_samples(calls, policy="split", tokenizer=tokenizer).boundaries
    assert (boundary.earlier, boundary.later) == ("first", "second")
    assert (boundary.position, boundary.expected_id, boundary.found_id) == (len(prompt), end, other)
    assert boundary.expected_text.endswith("\nabc<think>yes")
    assert boundary.found_text.endswith("\nabc<tool_call><think>")


def test_a_prompt_that_ends_early_has_no_id_at_the_mismatch(tokenizer) -> None:
    calls = [call("first", [5, 6], [7, 8]), call("second", [5, 6, 7], [9])]
    (boundary,) = build_samples(calls, policy="split", tokenizer=tokenizer).boundaries
    assert (boundary.kind, boundary.position, boundary.expected_id, boundary.found_id) == ("history_edited", 3, 8, None)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_the_first_mismatch_is_found_wherever_it_is(size) -> None:
    known = [*range(1000, 1000 + size)]
    for position in range(size):
        prompt = [*known, 5]
        prompt[position] = 7
        assert find_mismatch(known, prompt) == position
        assert find_mismatch(known, known[:position]) == position
    assert find_mismatch(known, known) is None
    assert find_mismatch(known, [*known, 5]) is None


REWRITTEN = {
    "white space at the end": ("yes \n<|im_end|>", "yes<|im_end|>"),
    "white space at the beginning": ("\n\nyes<|im_end|>", "yes<|im_end|>"),
    "white space beside a tag": ("<think>a</think>yes<|im_end|>", "<think>\na\n</think>\n\nyes<|im_end|>"),
    "space in JSON": ('x {"a":[1,2]}<|im_end|>', 'x {"a": [1, 2]}<|im_end|>'),
    "order of keys": ('{"a": 1, "b": 2}<|im_end|>', '{"b": 2, "a": 1}<|im_end|>'),
    "escapes in JSON": ('["\\u5929 \\ud83d\\ude42"]<|im_end|>', '["天 🙂"]<|im_end|>'),
    "Unicode normalization": ("cafe\u0301<|im_end|>", "caf\u00e9<|im_end|>"),
}
CHANGED = {
    "another word": ("It rains today<|im_end|>", "It rained today<|im_end|>"),
    "a word less": ("It rains today<|im_end|>", "It rains<|im_end|>"),
    "a word more": ("It rains<|im_end|>", "It rains today<|im_end|>"),
    "space between words": ("every one<|im_end|>", "everyone<|im_end|>"),
    "indentation": ("if x:\n    a\n    b<|im_end|>", "if x:\n    a\nb<|im_end|>"),
    "true for 1 in JSON": ('{"a": 1}<|im_end|>', '{"a": true}<|im_end|>'),
    "1.0 for 1 in JSON": ('{"a": 1}<|im_end|>', '{"a": 1.0}<|im_end|>'),
    "a key that was there twice": ('{"a": 1, "a": 2}<|im_end|>', '{"a": 2}<|im_end|>'),
    "space in a string of JSON": ('{"a": "b c"}<|im_end|>', '{"a": "bc"}<|im_end|>'),
    "another tag": ("<think>a</think>b<|im_end|>", "<tool_call>a</think>b<|im_end|>"),
    "a character for U+FFFD": ("a \ufffd b<|im_end|>", "a x b<|im_end|>"),
    "the turn is gone": ("It rains<|im_end|>", "<|im_end|>"),
}


@pytest.mark.parametrize(("sampled", "history"), REWRITTEN.values(), ids=REWRITTEN)
def test_a_turn_written_another_way_is_retemplated(tokenizer, sampled, history) -> None:
    assert kind_of(tokenizer, sampled, history) == "retemplated"
    # With another turn behind it, and in a turn behind another one.
    assert kind_of(tokenizer, f"hm<|im_end|>\n{sampled}", f"hm<|im_end|>\n{history}") == "retemplated"


@pytest.mark.parametrize(("sampled", "history"), CHANGED.values(), ids=CHANGED)
def test_a_turn_with_other_words_is_an_edit(tokenizer, sampled, history) -> None:
    assert kind_of(tokenizer, sampled, history) == "history_edited"


@pytest.mark.parametrize("depth", [10, 10_000])
def test_json_that_never_ends_is_compared_as_it_stands(tokenizer, depth) -> None:
    assert kind_of(tokenizer, "[" * depth + " <|im_end|>", "[" * depth + "<|im_end|>") == "retemplated"
    assert kind_of(tokenizer, "[" * depth + "<|im_end|>", "[" * (depth - 1) + "<|im_end|>") == "history_edited"


STRIPPED = {
    "block": ("<think>\na\n</think>\n\nyes<|im_end|>", "yes<|im_end|>", {}),
    "two blocks": ("<think>a</think>\nb\n<think>c</think>\nyes<|im_end|>", "b\n\nyes<|im_end|>", {}),
    "up to the last end marker": ("a</think>\nb</think>\nyes<|im_end|>", "yes<|im_end|>", {}),
    "other markers": ("[T]a[/T]yes<|im_end|>", "yes<|im_end|>", {"reasoning": ("[T]", "[/T]")}),
    "opened by the template": (
        "a\n</think>\n\nyes<|im_end|>",
        "yes<|im_end|>",
        {"opening": "<|im_start|>assistant\n<think>\n", "reopening": "<|im_start|>assistant\n"},
    ),
    "opened by tokens that the answer shares": (
        "a\n[/T]\n\n[x] yes<|im_end|>",
        "[x] yes<|im_end|>",
        {
            "reasoning": ("[T]", "[/T]"),
            "opening": "<|im_start|>assistant\n[T]\n",
            "reopening": "<|im_start|>assistant\n",
        },
    ),
    "ended by another special token": ("<think>a</think>yes<|endoftext|>", "yes<|im_end|>", {}),
    "empty block of the template": (
        "yes<|im_end|>",
        "yes<|im_end|>",
        {"opening": "<|im_start|>assistant\n<think>\n\n</think>\n\n", "reopening": "<|im_start|>assistant\n"},
    ),
}


@pytest.mark.parametrize(("sampled", "history", "settings"), STRIPPED.values(), ids=STRIPPED)
def test_a_turn_without_its_reasoning_is_found(tokenizer, sampled, history, settings) -> None:
    assert kind_of(tokenizer, sampled, history, **settings) == "reasoning_stripped"


@pytest.mark.parametrize(
    "history", ["no<|im_end|>", "a yes<|im_end|>", "yes</think><|im_end|>", "<think>yes<|im_end|>"]
)
def test_lost_reasoning_excuses_no_other_change(tokenizer, history) -> None:
    assert kind_of(tokenizer, "<think>\na\n</think>\n\nyes<|im_end|>", history) == "history_edited"


@pytest.mark.parametrize(
    "sampled", ["yes<|endoftext|>", "<think>a</think>no<|endoftext|>", "<think>a</think>yes<|im_end|>"]
)
def test_another_end_of_a_turn_is_an_edit_where_it_is_not_all(tokenizer, sampled) -> None:
    history = "yes<|im_end|>" if "endoftext" in sampled else "yes"
    assert kind_of(tokenizer, sampled, history) == "history_edited"


def test_reasoning_without_an_end_is_no_block(tokenizer) -> None:
    assert kind_of(tokenizer, "<think>\na yes<|im_end|>", "yes<|im_end|>") == "history_edited"


def test_a_template_that_strips_in_a_later_turn_is_found_there(tokenizer) -> None:
    tokenizer.chat_template = STRIP_REASONING
    answer = {"role": "assistant", "content": f"<think>\nhm\n</think>\n\n{ANSWER}"}
    tool = {"role": "tool", "content": "17"}
    prompts = [QUESTION, [*QUESTION, answer, tool], [*QUESTION, answer, tool, answer, *MORE]]
    sampled = encode(tokenizer, answer["content"] + TURN_END)
    calls = [call(str(n), render(tokenizer, prompt), sampled) for n, prompt in enumerate(prompts)]
    boundaries = build_samples(calls, policy="split", tokenizer=tokenizer).boundaries
    assert [each.kind for each in boundaries] == ["contiguous", "reasoning_stripped"]
    # The first of the two turns that lost it.
    assert boundaries[1].position == len(calls[0].prompt_ids)


TRUNCATED = {
    "ids continue": ("It is", "It is<|im_end|>", "truncated_generation"),
    "ends in white space": ("It is \n", "It is<|im_end|>", "truncated_generation"),
    "goes on from there": ("It is", "It is", "contiguous"),
    "another word": ("It is", "It was<|im_end|>", "history_edited"),
    "lost its reasoning": ("<think>a</think>It is", "It is<|im_end|>", "reasoning_stripped"),
}


@pytest.mark.parametrize(("sampled", "history", "kind"), TRUNCATED.values(), ids=TRUNCATED)
def test_what_the_token_limit_ended(tokenizer, sampled, history, kind) -> None:
    assert kind_of(tokenizer, sampled, history, tail="", finish_reason="length") == kind


def test_a_change_before_the_truncated_turn_keeps_its_own_class(tokenizer) -> None:
    ids = encode_bytewise(tokenizer, "hello there")
    calls = [
        call("0", encode(tokenizer, "user: "), ids),
        call(
            "1",
            encode(tokenizer, "user: ") + ids + encode(tokenizer, "\n\nuser: "),
            encode(tokenizer, "It is"),
            finish_reason="length",
        ),
        call("2", encode(tokenizer, "user: hello there\n\nuser: It is<|im_end|>"), [5]),
    ]
    kinds = [each.kind for each in build_samples(calls, policy="split", tokenizer=tokenizer).boundaries]
    assert kinds == ["contiguous", "retokenized"]


PARTIAL = {
    "as U+FFFD": ("ab \ufffd", True),
    "one for each byte": ("ab \ufffd\ufffd", True),
    "left out": ("ab", True),
    "as another character": ("ab 天", False),
    "another word": ("ac \ufffd", False),
}


@pytest.mark.parametrize(("history", "same"), PARTIAL.values(), ids=PARTIAL)
def test_a_character_that_the_token_limit_cut(tokenizer, history, same) -> None:
    ids = encode_bytewise(tokenizer, "ab 🙂")[:-2]
    kind = kind_of(tokenizer, ids, history + TURN_END, finish_reason="length")
    assert kind == ("truncated_generation" if same else "history_edited")
    # Without the limit there is no reason to leave anything out.
    if history == "ab":
        assert kind_of(tokenizer, ids, history + TURN_END) == "history_edited"


def test_other_broken_bytes_are_not_the_same_text(tokenizer) -> None:
    """Both decode to U+FFFD: only bytes tell them apart."""
    prompt, end = encode(tokenizer, "hi "), encode(tokenizer, TURN_END)
    sampled, other = encode_bytewise(tokenizer, "🙂")[:2], encode_bytewise(tokenizer, "天")[:2]
    assert tokenizer.decode(sampled) == tokenizer.decode(other)
    calls = [call("first", prompt, sampled, finish_reason="length"), call("second", prompt + other + end, [5])]
    (boundary,) = build_samples(calls, policy="split", tokenizer=tokenizer).boundaries
    assert (boundary.kind, boundary.action) == ("history_edited", "split")


def test_a_character_in_other_tokens_is_the_same_text() -> None:
    """No sampled token alone decodes to a character."""
    tokenizer = TOKENIZERS["multibyte"]()
    assert kind_of(tokenizer, encode_bytewise(tokenizer, "天気"), "天気<|im_end|>") == "retokenized"


def test_a_token_across_the_end_of_a_turn_is_retokenized() -> None:
    tokenizer = TOKENIZERS["english"](PLAIN)
    case = merged_across_the_end(tokenizer)
    built = build_samples(case.calls, policy="split", tokenizer=tokenizer)
    (boundary,) = built.boundaries
    assert (boundary.kind, boundary.action) == ("retokenized", "split")
    assert [sample.tokens for sample in built.samples] == [[*each.prompt_ids, *each.sampled_ids] for each in case.calls]


EDITS = {
    "system prompt": lambda messages: [{"role": "system", "content": "Be brief."}, *messages[1:]],
    "tool result": lambda messages: [*messages[:3], {"role": "tool", "content": "18"}, *messages[4:]],
    "removed turn": lambda messages: [*messages[:2], *messages[4:]],
    "summary": lambda messages: [messages[0], {"role": "user", "content": "So far: 17."}, *messages[4:]],
    "injected turn": lambda messages: [*messages[:2], {"role": "assistant", "content": "Hm."}, *messages[2:]],
    "swapped turns": lambda messages: [*messages[:2], messages[4], *messages[3:4], messages[2], *messages[5:]],
    "shorter": lambda messages: messages[:3],
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_history_is_named_so(tokenizer, name) -> None:
    answers = [{"role": "assistant", "content": text} for text in (ANSWER, "It is 17 degrees.")]
    tool = {"role": "tool", "content": "17"}
    messages = [*QUESTION, answers[0], tool, answers[1], *MORE]
    prompts = [render(tokenizer, part) for part in (messages[:2], messages[:4], EDITS[name](messages))]
    samples = [encode(tokenizer, each["content"] + TURN_END) for each in [*answers, answers[0]]]
    calls = [call(str(n), *pair) for n, pair in enumerate(zip(prompts, samples, strict=True))]
    built = build_samples(calls, policy="split", tokenizer=tokenizer)
    # An edit behind the first answer leaves that: its ids are those of a fork.
    kind = "fork" if name in ("tool result", "shorter") else "history_edited"
    assert [(each.kind, each.action) for each in built.boundaries] == [("contiguous", "continued"), (kind, "split")]
    assert built.samples[1].tokens == prompts[2] + samples[2]


@pytest.mark.parametrize("head", ["\n<|im_start|>user\nhi<|im_end|>\n", "<|im_start|>user\nhi <|im_end|>\n"])
def test_white_space_that_nobody_sampled_is_no_ones_to_change(tokenizer, head) -> None:
    first = encode(tokenizer, "<|im_start|>user\nhi<|im_end|>\n")
    second = encode(tokenizer, f"{head}yes")
    calls = [call("first", first, encode(tokenizer, "yes")), call("second", second, [5])]
    (boundary,) = build_samples(calls, policy="split", tokenizer=tokenizer).boundaries
    assert boundary.kind == "history_edited"


def test_the_bytes_of_tokens_are_the_text_however_it_is_split(tokenizer) -> None:
    table = TokenBytes(tokenizer)
    plain = TEXT.replace(TURN_END, "")
    for ids, text in ((encode(tokenizer, TEXT), TEXT), (encode_bytewise(tokenizer, plain), plain)):
        assert b"".join(table[each] for each in ids) == text.encode()


@pytest.mark.parametrize("text", ["Ġé", "a▁x"])
def test_an_added_token_is_its_own_text(tokenizer, text) -> None:
    """Whatever its characters mean in the names of other tokens."""
    assert tokenizer.add_tokens([text]) == 1
    assert TokenBytes(tokenizer)[tokenizer.convert_tokens_to_ids(text)] == text.encode()


def test_ids_beyond_the_vocabulary_equal_only_themselves(tokenizer) -> None:
    table = TokenBytes(tokenizer)
    assert len({table[each] for each in (10_000, 10_001, 1000, 0)}) == 4


def test_the_alphabet_of_bytes_is_that_of_the_tokenizers_library() -> None:
    assert BYTE_LEVEL_ALPHABET.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_LEVEL_ALPHABET.values()) == [*range(256)]
    for text in ("é\n \x7f\xad", "天", "\x00!~"):
        ((pieces, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
        assert bytes(BYTE_LEVEL_ALPHABET[each] for each in pieces) == text.encode()


def test_a_tokenizer_whose_bytes_are_unknown_is_refused() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(ValueError, match=r"tokenizer \w+ must be byte-level BPE or BPE with byte"):
        TokenBytes(PreTrainedTokenizerFast(tokenizer_object=words))
    with pytest.raises(ValueError, match="tokenizer Tokenizer must have convert_ids_to_tokens"):
        TokenBytes(words)
