# SPDX-License-Identifier: Apache-2.0
"""What holds of every sample, whatever agents do: 720 conversations, with a scorer that knows every context."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("transformers", reason="real tokenizers: pip install transformers")
pytest.importorskip("jinja2", reason="chat templates: pip install jinja2")

from agents import TEMPLATES, Conversation
from tiny_tokenizers import TOKENIZERS
from truth import check_ancestors, check_prompts, check_strict, check_tokens

from mis_ext.rollout.conversations.builder import build_samples
from mis_ext.rollout.generation import BoundaryKind

CONVERSATIONS = 120


@pytest.mark.whole_run
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_whatever_agents_do_every_sampled_token_is_trained_once_in_its_own_context(tokenizer, template) -> None:
    seen = Counter[str]()
    for seed in range(CONVERSATIONS):
        talk = Conversation(seed, tokenizer, template)
        built = build_samples(talk.calls, policy="split", tokenizer=talk.tokenizer)
        check_tokens(talk.calls, built)
        check_ancestors(talk.calls, built)
        check_prompts(talk.calls, built)
        check_strict(talk.calls, talk.tokenizer, built)
        seen.update(each.kind.value for each in built.boundaries)
    # A turn that lost its reasoning is of that class, whatever else was done to it.
    absent = {"retemplated"} if template == "strip" else {"reasoning_stripped"}
    absent |= {"retemplated", "retokenized"} if template == "plain" else set()
    assert {kind.value for kind in BoundaryKind} - {*seen} <= absent, seen
    assert template == "plain" or seen["retokenized"] > 10, seen
