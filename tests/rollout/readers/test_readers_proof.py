# SPDX-License-Identifier: Apache-2.0
"""Bytes, text and a tokenizer prove the ids that a server sampled, or nothing does."""

import pytest

pytest.importorskip("transformers")

from responses import recorded, recorded_tokenizer
from tiny_tokenizers import multibyte_tokenizer

from mis_ext.rollout.generation import Contradiction, CountMismatch, MalformedResponse, UnprovenTokenIds
from mis_ext.rollout.readers.servers import read_openai_chat, read_openai_completions, read_sglang_chat


@pytest.mark.parametrize("name", ["chat_meta_info", "chat_stop", "chat_input_ids"])
def test_bytes_and_a_tokenizer_prove_the_ids_that_the_server_sampled(name, tokenizer) -> None:
    request, response = recorded(name)
    known = read_sglang_chat(request, response)
    proven = read_openai_chat(request, response, tokenizer=tokenizer, prompt_ids=known.prompt_ids)
    assert any("\ufffd" in tokenizer.decode([i]) for i in known.sampled_ids) or name == "chat_stop"
    assert (proven.sampled_ids, proven.log_probs) == (known.sampled_ids, known.log_probs)


def ascii_tokens_only(response) -> list[int]:
    """Leave out other tokens; return the positions of those that stay."""
    scores = response["choices"][0]["logprobs"]
    kept = [position for position, text in enumerate(scores["tokens"]) if text.isascii()]
    for key in ("tokens", "token_logprobs"):
        scores[key] = [scores[key][position] for position in kept]
    response["usage"]["completion_tokens"] = len(kept)
    return kept


def test_ascii_text_and_a_tokenizer_prove_the_ids_of_a_completion(tokenizer) -> None:
    request, response = recorded("completions_token_ids")
    kept = ascii_tokens_only(response)
    generation = read_openai_completions(request, response, tokenizer=tokenizer, prompt_ids=[316, 284, 277])
    assert len(kept) >= 4
    assert generation.sampled_ids == [response["choices"][0]["token_ids"][position] for position in kept]


def test_the_prompt_of_a_completion_is_what_was_sent_as_ids(tokenizer) -> None:
    request, response = recorded("completions_stop")
    ascii_tokens_only(response)
    assert read_openai_completions(request, response, tokenizer=tokenizer).prompt_ids is request["prompt"]


def test_the_bytes_of_a_part_of_a_character_prove_its_id_whatever_its_text(tokenizer) -> None:
    request, response = recorded("chat_meta_info")
    known = read_sglang_chat(request, response)
    rows = response["choices"][0]["logprobs"]["content"]
    parts = [row for row in rows if row["token"] == "\ufffd"]
    for row in parts:
        row["token"] = "".join(f"\\x{byte:02x}" for byte in row["bytes"])
    assert parts
    proven = read_openai_chat(request, response, tokenizer=tokenizer, prompt_ids=known.prompt_ids)
    assert proven.sampled_ids == known.sampled_ids


def test_text_that_may_stand_for_a_part_of_a_character_proves_nothing(tokenizer) -> None:
    request, response = recorded("completions_plain")
    # SGLang writes a byte above 0x7F as the letter that it is in Latin-1.
    assert not all(text.isascii() for text in response["choices"][0]["logprobs"]["tokens"])
    with pytest.raises(
        UnprovenTokenIds, match=r"the bytes of response.choices\[0\].logprobs.tokens\[\d\] are not known"
    ):
        read_openai_completions(request, response, tokenizer=tokenizer)
    request, response = recorded("chat_plain")
    response["choices"][0]["logprobs"]["content"][0] |= {"token": "\ufffd", "bytes": [0xEF, 0xBF, 0xBD]}
    with pytest.raises(UnprovenTokenIds, match=r"bytes of response.choices\[0\].logprobs.content\[0\].token are not"):
        read_openai_chat(request, response, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("read", "name"), [(read_openai_chat, "chat_plain"), (read_openai_completions, "completions_plain")]
)
def test_text_without_a_tokenizer_or_a_prompt_proves_nothing(read, name, tokenizer) -> None:
    request, response = recorded(name)
    if read is read_openai_completions:
        ascii_tokens_only(response)
    with pytest.raises(UnprovenTokenIds, match="text and no token ids: ask the server for ids"):
        read(request, response)
    with pytest.raises(UnprovenTokenIds, match="prompt's token ids are not known: give prompt_ids="):
        read(request, response, tokenizer=tokenizer)
    with pytest.raises(CountMismatch, match=r"usage.prompt_tokens is \d+, but there are 2 ids of the prompt"):
        read(request, response, tokenizer=tokenizer, prompt_ids=[316, 284])


def test_tokenizers_whose_texts_lose_something_prove_nothing() -> None:
    request, response = recorded("chat_plain")
    with pytest.raises(UnprovenTokenIds, match=r"proves no ids: its decoder is .*, not ByteLevel"):
        read_openai_chat(request, response, tokenizer=multibyte_tokenizer())
    with pytest.raises(UnprovenTokenIds, match="clean_up_tokenization_spaces is true"):
        read_openai_chat(request, response, tokenizer=recorded_tokenizer(clean_up_tokenization_spaces=True))


def test_bytes_of_two_ids_or_of_none_prove_nothing() -> None:
    request, response = recorded("chat_plain")
    row = response["choices"][0]["logprobs"]["content"][0]
    row |= {"token": " the", "bytes": list(b" the")}
    tokenizer = recorded_tokenizer()
    (the,) = tokenizer.encode(" the")
    prompt = [1] * response["usage"]["prompt_tokens"]
    assert read_openai_chat(request, response, tokenizer=tokenizer, prompt_ids=prompt).sampled_ids[0] == the
    tokenizer.add_tokens([" the"])
    with pytest.raises(UnprovenTokenIds, match=rf"has the bytes b' the', which are those of ids \[.*{the}.*\]"):
        read_openai_chat(request, response, tokenizer=tokenizer, prompt_ids=prompt)
    row |= {"token": "qzx", "bytes": list(b"qzx")}
    with pytest.raises(UnprovenTokenIds, match=r"those of ids \[\]"):
        read_openai_chat(request, response, tokenizer=tokenizer, prompt_ids=prompt)


def test_the_id_of_an_added_token_is_proven_by_its_text(tokenizer) -> None:
    request, response = recorded("chat_plain")
    response["choices"][0]["logprobs"]["content"][0] |= {"token": "<|im_end|>", "bytes": list(b"<|im_end|>")}
    prompt = [1] * response["usage"]["prompt_tokens"]
    assert read_openai_chat(request, response, tokenizer=tokenizer, prompt_ids=prompt).sampled_ids[0] == 2


@pytest.mark.parametrize(
    ("spoiled", "error"), [([114, 97], Contradiction), ([300], MalformedResponse), (None, UnprovenTokenIds)]
)
def test_bytes_that_are_not_those_of_the_token_prove_nothing(spoiled, error, tokenizer) -> None:
    request, response = recorded("chat_plain")
    response["choices"][0]["logprobs"]["content"][1]["bytes"] = spoiled
    with pytest.raises(error, match=r"logprobs.content\[1\]"):
        read_openai_chat(request, response, tokenizer=tokenizer)
