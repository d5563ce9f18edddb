# SPDX-License-Identifier: Apache-2.0
"""What happened to the text between the sampler and the trainer."""

import pytest
from tiny_tokenizers import TOKENIZERS, TURN_END, encode, encode_bytewise, english_tokenizer, multibyte_tokenizer
from tokenizers import decoders

from mis_ext.rollout.generation import Generation
from mis_ext.rollout.post_processing import PostProcessing, PostProcessingKind, detect_post_processing

ANSWER = "Let me think about the weather.\n\nThe answer is 42, I think."


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def generate(ids, finish_reason="length", stop_match=None, prompt_ids=(5, 6, 7)) -> Generation:
    return Generation(
        request_id="r1",
        prompt_ids=list(prompt_ids),
        sampled_ids=list(ids),
        log_probs=[-0.25 * (i + 1) for i in range(len(ids))],
        finish_reason=finish_reason,
        stop_match=stop_match,
        text="as the server returned it",
    )


def ended(tokenizer, text) -> Generation:
    """A turn that ended with the end token."""
    end = tokenizer.eos_token_id
    return generate([*encode(tokenizer, text), end], "stop", end)


def kind_of(generation, text, tokenizer, **kwargs) -> str:
    return detect_post_processing(generation, text, tokenizer, **kwargs).kind.value


CASES = {
    "raw": (lambda t: t + TURN_END, "exact"),
    "end token trimmed": (lambda t: t, "stop_trimmed"),
    "cut in the middle": (lambda t: t[: t.index("answer")], "prefix_truncated"),
    "cut to nothing": (lambda t: "", "prefix_truncated"),
    "right strip": (lambda t: t[:-1], "prefix_truncated"),
    "newline added": (lambda t: t + "\n", "suffix_added"),
    "newline added behind the end token": (lambda t: t + TURN_END + "\n", "suffix_added"),
    "reasoning removed": (lambda t: t[t.index("The answer") :], "prefix_removed"),
    "reasoning removed, end token left": (lambda t: t[t.index("The answer") :] + TURN_END, "prefix_removed"),
    "both ends removed": (lambda t: t[4:-4], "edited"),
    "a word replaced": (lambda t: t.replace("answer", "result"), "edited"),
    "spaces collapsed": (lambda t: t.replace("\n\n", " "), "edited"),
    "another text": (lambda t: "no", "edited"),
    "another text that ends inside a character": (lambda t: "no\ufffd", "edited"),
}


@pytest.mark.parametrize(("change", "kind"), CASES.values(), ids=CASES)
def test_each_change_of_a_text_has_its_class(tokenizer, change, kind) -> None:
    found = detect_post_processing(ended(tokenizer, ANSWER), change(ANSWER), tokenizer)
    assert found.kind.value == kind
    # After the longest text that the server may have returned.
    assert kind != "suffix_added" or found.detail == r"'\n' was not sampled"


@pytest.mark.parametrize("kind", PostProcessingKind)
def test_every_class_but_exact_has_a_cure_and_three_keep_all_ids(kind) -> None:
    found = PostProcessing(kind=kind, detail="why")
    assert bool(found.cure) == (kind.value != "exact")
    assert found.keeps_ids == (kind.value in ("exact", "stop_trimmed", "special_tokens_stripped"))


def test_a_cut_at_every_character_is_shown_with_what_was_sampled_after_it(tokenizer) -> None:
    generation = ended(tokenizer, ANSWER)
    for length in range(1, len(ANSWER)):
        text = ANSWER[:length]
        found = detect_post_processing(generation, text, tokenizer)
        if not ANSWER.endswith(text):
            assert found.kind.value == "prefix_truncated"
            assert f"cut after {text if length <= 40 else '…' + text[-40:]!r}; " in found.detail
            assert f"{ANSWER[length:][:20]!r}"[1:-1] in found.detail


@pytest.mark.parametrize("stop_is_known_to", ["server", "caller"])
def test_a_stop_string_that_the_server_left_out_is_trimmed_although_its_last_token_goes_on(stop_is_known_to) -> None:
    tokenizer = english_tokenizer()
    ids = encode(tokenizer, "The answer is 42.\n\n")
    assert tokenizer.decode(ids[-1:]) == ".\n\n"
    match = "\n" if stop_is_known_to == "server" else None
    stop = [] if match else ["Observation:", "\n"]
    generation = generate(ids, "stop", match)
    assert kind_of(generation, "The answer is 42.", tokenizer, stop=stop) == "stop_trimmed"
    # no_stop_trim and include_stop_str_in_output cut behind the stop string.
    assert kind_of(generation, "The answer is 42.\n", tokenizer, stop=stop) == "stop_trimmed"
    assert kind_of(generation, "The answer is 42.\n\n", tokenizer, stop=stop) == "exact"
    assert kind_of(generation, "The answer is 4", tokenizer, stop=stop) == "prefix_truncated"
    assert kind_of(generation, "The answer is 42. </answer>", tokenizer, stop=stop) == "suffix_added"
    assert kind_of(generation, "answer is 42.", tokenizer, stop=stop) == "prefix_removed"


def test_a_text_cut_at_a_string_that_did_not_end_the_generation_is_a_cut() -> None:
    tokenizer = english_tokenizer()
    text = "The answer is 42.\n\nThe answer is 17.\n\n"
    generation = generate(encode(tokenizer, text), "stop", "\n\n")
    assert kind_of(generation, "The answer is 42.", tokenizer) == "prefix_truncated"
    at_limit = generate(encode(tokenizer, text), "length")
    assert kind_of(at_limit, text[:-2], tokenizer, stop=["\n\n"]) == "prefix_truncated"


def test_the_last_token_is_an_end_token_only_where_the_server_stopped_at_it() -> None:
    tokenizer = english_tokenizer()
    ids = encode(tokenizer, "The weather")
    assert kind_of(generate(ids, "stop", ids[-1]), "The", tokenizer) == "stop_trimmed"
    assert kind_of(generate(ids, "stop", None), "The", tokenizer) == "prefix_truncated"
    assert kind_of(generate(ids, "length", None), "The", tokenizer) == "prefix_truncated"
    special = [*ids, tokenizer.eos_token_id]
    assert kind_of(generate(special, "stop", None), "The weather", tokenizer) == "stop_trimmed"
    assert kind_of(generate(special, "tool_calls", None), "The weather", tokenizer) == "stop_trimmed"
    assert kind_of(generate(special, "stop", ids[0]), "The weather", tokenizer) == "special_tokens_stripped"
    assert kind_of(generate(special, "length", None), "The weather", tokenizer) == "special_tokens_stripped"


def test_special_tokens_inside_the_text_that_the_decoder_skipped_have_their_own_class(tokenizer) -> None:
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    body = [*encode(tokenizer, "The weather"), start, *encode(tokenizer, " is nice")]
    generation = generate([*body, tokenizer.eos_token_id], "stop", tokenizer.eos_token_id)
    assert kind_of(generation, "The weather is nice", tokenizer) == "special_tokens_stripped"
    assert kind_of(generation, "The weather<|im_start|> is nice", tokenizer) == "stop_trimmed"
    with_stop_string = generate([*body, *encode(tokenizer, "\n")], "stop", "\n")
    assert kind_of(with_stop_string, "The weather is nice", tokenizer) == "special_tokens_stripped"
    assert kind_of(generation, "The weather is nice today", tokenizer) == "suffix_added"
    assert kind_of(generation, " is nice", tokenizer) == "prefix_removed"


def test_a_cut_character_at_the_end_that_is_not_in_the_text_is_undecidable(tokenizer) -> None:
    ids = encode_bytewise(tokenizer, "Погода 今日")[:-1]
    generation = generate(ids)
    raw = tokenizer.decode(ids)
    assert raw.endswith("\ufffd")
    assert kind_of(generation, raw, tokenizer) == "exact"
    # Byte fallback makes every byte of the run unknown, a server that decodes as it samples shows the whole characters.
    assert kind_of(generation, "Погода 今", tokenizer) == "undecidable"
    assert kind_of(generation, "Погода 今\ufffd\ufffd\ufffd", tokenizer) == "undecidable"
    assert kind_of(generation, "Погода", tokenizer) == "prefix_truncated"


def test_a_text_that_is_both_the_beginning_and_the_end_is_undecidable(tokenizer) -> None:
    generation = generate(encode(tokenizer, "rain, rain"))
    assert kind_of(generation, "rain", tokenizer) == "undecidable"
    assert kind_of(generation, "rain,", tokenizer) == "prefix_truncated"
    assert kind_of(generation, ", rain", tokenizer) == "prefix_removed"


def test_a_decoder_that_drops_the_first_space_gives_the_same_class_with_and_without_it() -> None:
    tokenizer = multibyte_tokenizer()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)
    ids = encode(tokenizer, " The weather is nice")
    generation = generate(ids, prompt_ids=encode(tokenizer, "user: hello"))
    assert tokenizer.decode(ids) == "The weather is nice"
    for space in ("", " "):
        assert kind_of(generation, f"{space}The weather is nice", tokenizer) == "exact"
        assert kind_of(generation, f"{space}The weather", tokenizer) == "prefix_truncated"
    assert kind_of(generate(ids, prompt_ids=[]), " The weather is nice", tokenizer) == "edited"


def test_nothing_sampled_and_nothing_said_is_exact_and_anything_else_was_added(tokenizer) -> None:
    assert kind_of(generate([]), "", tokenizer) == "exact"
    assert kind_of(generate([]), "The", tokenizer) == "suffix_added"
    assert kind_of(generate([tokenizer.eos_token_id], "stop", tokenizer.eos_token_id), "", tokenizer) == "stop_trimmed"


def test_a_text_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="response_text must be a str, got NoneType"):
        detect_post_processing(generate([1]), None, english_tokenizer())


def test_a_cut_among_bytes_that_are_no_character_is_undecidable() -> None:
    tokenizer = multibyte_tokenizer()
    broken = [*encode_bytewise(tokenizer, "🙂" * 3), *encode_bytewise(tokenizer, "🙂")[:2], *encode(tokenizer, "abc")]
    text = tokenizer.decode(broken)[:3]
    assert kind_of(generate(broken, prompt_ids=encode(tokenizer, "hi")), text, tokenizer) == "undecidable"
