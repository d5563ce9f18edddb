# SPDX-License-Identifier: Apache-2.0
"""Drawn conversations through the custom generate function, four of each kind, with an engine that knows the truth.

The engine remembers by place what it sampled, with which weights, from which kept tokens, and which experts each token
had when it was first fed. What a sample holds is that, place by place, and nothing else is trained.
"""

import asyncio
import base64
import itertools
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from generate_runs import CONTEXT, QUESTION, REPLAYED, WITH_ENVIRONMENT, experts
from host_samples import SlimeSample, loopback_server
from sglang_answers import TOKENIZER, aborted, cut, stopped
from tokens.sample import Sample, Status, host_args

from mis_ext.rollout.custom_generate.function import generate

pytestmark = pytest.mark.usefixtures("short_pauses")

KINDS = (
    "one turn",
    "tools",
    "continued",
    "updated",
    "tools, continued, updated",
    "experts",
    "tools, continued, experts",
)
NUM_CONVERSATIONS = 4


def encoded(numbers):
    return base64.b64encode(np.array(numbers, np.int32).tobytes()).decode()


class Engine:
    """Answers as drawn: ``plan`` says of each request that is left whether it is aborted."""

    def __init__(self, kind, seed):
        self.draw = random.Random(f"{kind} {seed}")
        draw, self.kind = self.draw, kind
        self.version, self.knows_start = draw.choice([0, 3, 41]), draw.random() < 0.5
        self.turns = draw.randint(2, 5) if "tools" in kind else 1
        self.plan = []
        for _ in range(self.turns):
            self.plan += [True] * (draw.randint(0, 2) if "continued" in kind else 0) + [False]
        if "continued" in kind and True not in self.plan:
            self.plan.insert(0, True)
        self.said = [self.observation() for _ in range(self.turns - 1)]
        # By place in the sample: id, log-prob, version, and for top-p the kept ids. By place: experts.
        self.sampled, self.fed, self.contexts = {}, [], []

    def words(self):
        return " ".join(self.draw.choices(["rain", "mild", "look", "it is", "no"], k=self.draw.randint(1, 6)))

    def observation(self):
        text = self.words()
        return self.draw.choice([f"[{text}]", [{"role": "tool", "content": text}]])

    def answer(self, _number, request):
        draw, known, is_cut = self.draw, request["input_ids"], self.plan.pop(0)
        # Some are aborted before their first token.
        text = "" if is_cut and draw.random() < 0.3 else self.words()
        kind = aborted if is_cut else cut if not self.plan and draw.random() < 0.2 else stopped
        reply = kind(request, text, version=str(self.version))
        ids, meta_info = reply["output_ids"], reply["meta_info"]
        size = len(ids)
        updates = "updated" in self.kind and size > 1
        starts = sorted(draw.sample(range(1, size), draw.randint(1, size - 1))) if updates else []
        spans, kept, offsets = [], [], [0]
        for start, end in itertools.pairwise([0, *starts, size]):
            spans.append({"version": str(self.version), "start": start, "end": end})
            for place in range(start, end):
                kept.append(sorted({ids[place], *draw.sample(range(500), draw.randint(0, 4))}))
                offsets.append(offsets[-1] + len(kept[-1]))
                row = meta_info["output_token_logprobs"][place]
                row[0] = -draw.expovariate(1.0)
                self.sampled[len(known) + place] = (ids[place], row[0], float(self.version), kept[-1])
            self.version += draw.choice([1, 2]) if end < size else 0
        meta_info |= {"weight_version": spans[-1]["version"], "weight_versions": spans}
        meta_info |= {
            "top_p_token_ids": encoded([*itertools.chain(*kept)]),
            "top_p_token_offsets": encoded(offsets),
        }
        self.contexts.append(known)
        if "experts" in self.kind:
            # The cache was dropped with the weights: all of it is computed anew, and only what is new counts.
            rows = [experts(self.version, place, token) for place, token in enumerate([*known, *ids][:-1])]
            assert request["routed_experts_start_len"] == len(self.fed)
            # An answer without a token fed nothing that anything was sampled behind.
            self.fed += rows[len(self.fed) :] if size else []
            start = request["routed_experts_start_len"] if self.knows_start else 0
            meta_info["routed_experts"] = encoded(rows[start:])
        self.version += draw.choice([1, 2]) if is_cut else draw.choice([0, 0, 1])
        return 200, reply


def check(sample, engine):
    """What the sample holds by now is what the engine knows of it, place by place."""
    prompt = len(sample.tokens) - sample.response_length
    places = range(prompt, len(sample.tokens))
    assert [place for place, mask in zip(places, sample.loss_mask, strict=True) if mask] == [*engine.sampled]
    # Nobody sampled an observation.
    truth = [engine.sampled.get(place, (sample.tokens[place], 0.0, math.nan, None)) for place in places]
    assert sample.tokens[prompt:] == [token for token, *_ in truth]
    assert (sample.rollout_log_probs or []) == [log_prob for _, log_prob, *_ in truth]
    assert repr(getattr(sample, "teacher_log_probs", [])) == repr([version for *_, version, _ in truth])
    # Each request was the beginning of what will be trained.
    assert all(sample.tokens[: len(context)] == context for context in engine.contexts)
    if "experts" in engine.kind:
        rows = sample.rollout_routed_experts
        assert rows is None or isinstance(rows, torch.Tensor if isinstance(sample, SlimeSample) else np.ndarray)
        assert ([] if rows is None else rows.tolist()) == engine.fed
        assert engine.plan or len(engine.fed) == len(sample.tokens) - 1
    if isinstance(sample, SlimeSample):
        found = [each["meta_info"] for each in sample.appended if each["meta_info"] is not None]
        kept = [kept for *_, kept in engine.sampled.values()]
        assert [ids for meta_info in found for ids in kept_ids(meta_info)] == kept


def kept_ids(meta_info):
    """Of each token of an answer the kept ids, as slime's own method reads them."""
    ids, offsets = (
        np.frombuffer(base64.b64decode(meta_info[f"top_p_token_{name}"]), np.int32).tolist()
        for name in ("ids", "offsets")
    )
    return [ids[start:end] for start, end in itertools.pairwise(offsets)]


@pytest.mark.parametrize("sample_class", [Sample, SlimeSample], ids=["miles", "slime"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_holds_what_the_engine_knows_place_by_place(kind, sample_class, tokenizer_folder, environment):
    options = {"on_policy_tokens": WITH_ENVIRONMENT, "rollout_max_context_len": CONTEXT, "partial_rollout": True}
    options |= {"mis_staleness": True} | (REPLAYED if "experts" in kind else {})
    params = {"max_new_tokens": 5_000, "temperature": 0.7, "top_p": 1.0, "no_stop_trim": True}
    with loopback_server(lambda *given: engine.answer(*given)) as server:
        args = host_args(server.port, tokenizer_folder, **options)
        for seed in range(NUM_CONVERSATIONS):
            engine, sample = Engine(kind, seed), sample_class(prompt=QUESTION)
            environment(*engine.said, None)
            while engine.plan:
                asyncio.run(generate(args, sample, dict(params)))
                assert (sample.status is Status.ABORTED) == bool(engine.plan)
                check(sample, engine)
            held = zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True)
            observed = TOKENIZER.decode([token for token, mask in held if not mask])
            for said in engine.said:
                text = said if isinstance(said, str) else said[0]["content"]
                assert text in observed
            assert ("tools" in kind) == (0 in sample.loss_mask)
