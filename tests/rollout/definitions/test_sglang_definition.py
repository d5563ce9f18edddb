# SPDX-License-Identifier: Apache-2.0
"""Of which distribution SGLang's log-probs are: a real engine against a teacher-forced float32 transformers model.

With SGLANG_RETURN_ORIGINAL_LOGPROB=1 in the environment, the same is tested of its log-probs at temperature 1.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed (requirements/sglang-cpu.txt)", allow_module_level=True)

from tiny_shape import TINY
from transformers import Qwen3Config
from transformers.models.auto import AutoModelForCausalLM

from mis_ext.rollout.comparable_log_probs import kept_mask, trainer_log_probs
from mis_ext.rollout.definition import Distribution, define_log_probs
from mis_ext.rollout.sampling_parameters import SamplingParameters

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
RETURNS_ORIGINAL = os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB") == "1"

# SGLang returns which tokens it kept only for a finite top-k; this one is the whole vocabulary.
NUCLEUS = {"temperature": 0.7, "top_p": 0.9, "top_k": 50}
REQUESTS = {
    "plain": {},
    "tempered": {"temperature": 0.7},
    "nucleus": NUCLEUS,
    "all three": {"temperature": 0.7, "top_k": 10, "top_p": 0.6, "min_p": 0.3},
    "bias": {"temperature": 0.7, "logit_bias": {"7": 2.0, "9": -1.0}},
    "greedy": {"temperature": 0.0},
    "top_k of 1": {"temperature": 0.7, "top_k": 1},
}
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14]] * 16
NUM_NEW_TOKENS = 6

# float32 against float32 differs by about 5e-7 in a log-prob.
TOLERANCE = 1e-5

ENGINE = """
import json, os, sys
def main(examples, model, requests, out):
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    sys.path[:0] = [examples, examples + "/grpo/sglang_cpu"]
    from grpo.sglang_engine import CPU_SETTINGS
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.io_struct import GenerateReqInput
    engine = Engine(
        model_path=model, skip_tokenizer_init=True, dtype="float32", sampling_backend="pytorch", grammar_backend="none",
        random_seed=0, log_level="warning", **CPU_SETTINGS,
    )
    async def ask(**fields):
        async for response in engine.tokenizer_manager.generate_request(GenerateReqInput(**fields), None):
            pass
        return [one["meta_info"] for one in response]
    answers = {name: engine.loop.run_until_complete(ask(**fields)) for name, fields in requests.items()}
    with open(out, "w") as file:
        json.dump(answers, file)
    engine.shutdown()
if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4])
"""


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(Qwen3Config(**TINY, head_dim=16), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def answers(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("definition")
    model.save_pretrained(folder / "model")
    # Its sampling defaults are for users who set none.
    (folder / "model" / "generation_config.json").unlink(missing_ok=True)
    script = folder / "engine.py"
    script.write_text(ENGINE)
    requests = {
        name: {
            "input_ids": PROMPTS,
            "sampling_params": {"max_new_tokens": NUM_NEW_TOKENS, **parameters},
            "return_logprob": True,
            "top_logprobs_num": 50,
            "return_sampling_mask": parameters is NUCLEUS,
        }
        for name, parameters in REQUESTS.items()
    }
    out = folder / "answers.json"
    arguments = [str(EXAMPLES), str(folder / "model"), json.dumps(requests), str(out)]
    log = folder / "engine.log"
    with log.open("wb") as file:
        finished = subprocess.run([sys.executable, str(script), *arguments], stdout=file, stderr=file, timeout=300)
    assert finished.returncode == 0, log.read_text()[-3000:]
    return json.loads(out.read_text())


def define(name):
    return define_log_probs(
        SamplingParameters.from_request(REQUESTS[name], server="sglang"),
        server="sglang",
        return_original=RETURNS_ORIGINAL,
        sampling_backend="pytorch",
    )


@torch.no_grad()
def logits_and_answers(model, answers, name):
    """The trainer's logits ``[T, V]``, the ids and the log-probs of all responses to one request."""
    logits, ids, log_probs = [], [], []
    for prompt, answer in zip(PROMPTS, answers[name], strict=True):
        returned, sampled, _ = zip(*answer["output_token_logprobs"], strict=True)
        assert len(sampled) == NUM_NEW_TOKENS
        logits.append(model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1])
        ids += sampled
        log_probs += returned
    return torch.cat(logits), torch.tensor(ids), torch.tensor(log_probs)


@pytest.mark.parametrize("name", [name for name in REQUESTS if name != "top_k of 1"])
def test_the_trainers_log_probs_by_the_stated_definition_are_those_that_sglang_returned(model, answers, name) -> None:
    logits, ids, returned = logits_and_answers(model, answers, name)
    definition = define(name)
    corrected = trainer_log_probs(logits, ids, definition.returned).log_probs_T
    assert (corrected - returned).abs().max() < TOLERANCE
    plain = trainer_log_probs(logits, ids, Distribution()).log_probs_T
    is_plain = definition.returned == Distribution()
    assert is_plain == ((RETURNS_ORIGINAL and name != "bias") or name in ("plain", "greedy"))
    assert is_plain or (plain - returned).abs().max() > 0.1


@pytest.mark.parametrize("name", ["nucleus", "all three", "greedy", "top_k of 1"])
def test_every_token_was_drawn_from_those_that_the_stated_truncation_keeps(model, answers, name) -> None:
    logits, ids, _ = logits_and_answers(model, answers, name)
    definition = define(name)
    assert not trainer_log_probs(logits, ids, definition.sampled).outside_T.any()
    # Had they been drawn from all tokens, so many draws would have hit the others: the chance is below 1e-9.
    kept = kept_mask((logits / definition.sampled.temperature).softmax(-1), definition.sampled.truncation)
    mass = ((logits / definition.sampled.temperature).softmax(-1) * kept).sum(-1)
    assert mass.log().sum() < -20


def test_sglangs_own_kept_tokens_and_their_log_probs_are_those_that_are_computed_here(model, answers) -> None:
    logits, ids, returned = logits_and_answers(model, answers, "nucleus")
    definition = define("nucleus")
    kept_ids = [row for answer in answers["nucleus"] for row in answer["output_token_sampling_mask"]]
    drawn = torch.tensor([x for answer in answers["nucleus"] for x in answer["output_token_sampling_logprobs"]])
    # The returned log-probs are not renormalized.
    assert (drawn - returned).abs().max() > 0.05
    for kept in (None, kept_ids):
        scored = trainer_log_probs(logits, ids, definition.sampled, kept_ids=kept).log_probs_T
        assert (scored - drawn).abs().max() < TOLERANCE


def test_a_top_k_of_1_among_greedy_requests_is_not_divided_by_its_temperature(model, answers) -> None:
    logits, ids, returned = logits_and_answers(model, answers, "top_k of 1")
    plain = trainer_log_probs(logits, ids, Distribution()).log_probs_T
    assert (plain - returned).abs().max() < TOLERANCE
    if not RETURNS_ORIGINAL:
        tempered = trainer_log_probs(logits, ids, define("top_k of 1").returned).log_probs_T
        assert (tempered - returned).abs().max() > 0.1
        assert "SGLang divides by temperature=0.7 only where" in define("top_k of 1").doubts[0]
