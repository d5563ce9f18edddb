# SPDX-License-Identifier: Apache-2.0
"""Records the responses in this folder anew from a real SGLang server on a CPU.

With the environment of ``examples/sglang_environment.sh``, from the repository's root:

    .venv-sglang/bin/python tests/data/rollout_responses/record.py

The model is a Qwen3 of two layers with random weights, its tokenizer the English one of
``tests/support/tiny_tokenizers.py``, which is written to ``tokenizer.json`` next to the responses. A file has the
request as it was sent, the HTTP status and the response as it came. ``generate_experts_*`` are of a mixture of eight
experts, two a token.
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
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PORT = 31517
PROMPT = "The answer is"
MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
CHAT = {"model": "tiny", "messages": MESSAGES, "logprobs": True, "max_tokens": 8, "seed": 1}
COMPLETION = {"model": "tiny", "logprobs": 1, "max_tokens": 8, "return_token_ids": True}
IDS_BESIDE = {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from tiny_tokenizers import encode, english_tokenizer

    tokenizer = english_tokenizer()
    prompt = encode(tokenizer, PROMPT)
    stop_token_ids = list(range(0, 400, 4))
    generate = {"input_ids": prompt, "return_logprob": True}
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "generate_length": ("/generate", {**generate, "sampling_params": {"max_new_tokens": 8}}),
        "generate_stop_token": (
            "/generate",
            {**generate, "sampling_params": {"max_new_tokens": 64, "stop_token_ids": stop_token_ids}},
        ),
        "generate_stop_string": (
            "/generate",
            {
                **generate,
                "rid": "chosen-by-the-client",
                "return_text_in_logprobs": True,
                "sampling_params": {"max_new_tokens": 64, "stop": ["e", "a"]},
            },
        ),
        "generate_empty": ("/generate", {**generate, "sampling_params": {"max_new_tokens": 0}}),
        "generate_input_log_probs": (
            "/generate",
            {**generate, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 4}},
        ),
        "generate_text_input_log_probs": (
            "/generate",
            {
                "text": PROMPT,
                "return_logprob": True,
                "logprob_start_len": 0,
                "sampling_params": {"max_new_tokens": 4},
            },
        ),
        "generate_text_prompt_ids": (
            "/generate",
            {
                "text": PROMPT,
                "return_logprob": True,
                "return_prompt_token_ids": True,
                "sampling_params": {"max_new_tokens": 4},
            },
        ),
        "generate_text": (
            "/generate",
            {"text": PROMPT, "return_logprob": True, "sampling_params": {"max_new_tokens": 4}},
        ),
        "generate_two": ("/generate", {**generate, "sampling_params": {"max_new_tokens": 3, "n": 2}}),
        "generate_error": ("/generate", {**generate, "sampling_params": {"temperature": -1.0}}),
        "chat_meta_info": (
            "/v1/chat/completions",
            {**CHAT, "return_meta_info": True, "return_token_ids": True},
        ),
        "chat_stop": (
            "/v1/chat/completions",
            {
                **CHAT,
                "max_tokens": 64,
                "return_meta_info": True,
                "return_prompt_token_ids": True,
                "stop_token_ids": stop_token_ids,
            },
        ),
        "chat_input_ids": (
            "/v1/chat/completions",
            {**CHAT, "input_ids": prompt, "return_meta_info": True},
        ),
        "chat_two": (
            "/v1/chat/completions",
            {**CHAT, "n": 2, "max_tokens": 3, "return_meta_info": True, "return_token_ids": True},
        ),
        "chat_plain": ("/v1/chat/completions", CHAT),
        "chat_ids_beside": ("/v1/chat/completions", {**CHAT, **IDS_BESIDE}),
        "chat_stream": ("/v1/chat/completions", {**CHAT, **STREAM, **IDS_BESIDE}),
        "chat_two_stream": ("/v1/chat/completions", {**CHAT, **STREAM, **IDS_BESIDE, "n": 2, "max_tokens": 3}),
        "completions_stream": ("/v1/completions", {**COMPLETION, "prompt": PROMPT, **STREAM}),
        "completions_token_ids": ("/v1/completions", {**COMPLETION, "prompt": PROMPT}),
        "completions_stop": (
            "/v1/completions",
            {**COMPLETION, "prompt": prompt, "max_tokens": 64, "stop": ["e", "a"]},
        ),
        "completions_plain": (
            "/v1/completions",
            {**COMPLETION, "prompt": PROMPT, "return_token_ids": False},
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, tokenizer)
        server = start(folder)
        try:
            wait_until_it_answers(server)
            post("/update_weight_version", {"new_version": "7", "abort_all_requests": False})
            for name, (endpoint, request) in cases.items():
                save(name, endpoint, request, post(endpoint, request))
            long = {**generate, "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}
            save("generate_abort", "/generate", long, meanwhile(long, ("/abort_request", {"abort_all": True})))
            short = {**generate, "sampling_params": {"max_new_tokens": 48, "ignore_eos": True}}
            update = (
                ("/pause_generation", {"mode": "retract"}),
                ("/update_weights_from_disk", {"model_path": f"{folder}/model", "weight_version": "8"}),
                ("/continue_generation", {}),
            )
            save("generate_two_versions", "/generate", short, meanwhile(short, *update))
        except BaseException:
            print(Path(folder, "log").read_text()[-6000:])
            raise
        finally:
            server.terminate()
            server.wait()
    tokenizer.backend_tokenizer.save(str(HERE / "tokenizer.json"), pretty=False)
    record_experts(tokenizer, prompt)


def record_experts(tokenizer: Any, prompt: list[int]) -> None:
    """A request that was aborted, and the one that goes on from there."""
    with tempfile.TemporaryDirectory() as folder:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        save_model(folder, tokenizer, kind="Qwen3Moe", **experts)
        server = start(folder, "--enable-return-routed-experts")
        try:
            wait_until_it_answers(server)
            params = {"max_new_tokens": 1500, "ignore_eos": True}
            asked = {"return_logprob": True, "return_routed_experts": True, "routed_experts_start_len": 0}
            request = {"input_ids": prompt, "sampling_params": params, **asked}
            aborted = meanwhile(request, ("/abort_request", {"abort_all": True}))
            save("generate_experts_abort", "/generate", request, aborted)
            known = prompt + aborted[1]["output_ids"]
            going_on = {
                **request,
                "input_ids": known,
                "sampling_params": {**params, "max_new_tokens": 8},
                "routed_experts_start_len": len(known) - 1,
            }
            save("generate_experts_continued", "/generate", going_on, post("/generate", going_on))
        finally:
            server.terminate()
            server.wait()


def save_model(folder: str, tokenizer: Any, *, kind: str = "Qwen3", **more: Any) -> None:
    import torch
    import transformers
    from transformers.models.auto import AutoModelForCausalLM

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **more,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(f"{folder}/model")
    Path(folder, "model", "generation_config.json").unlink(missing_ok=True)
    tokenizer.save_pretrained(f"{folder}/model")


def start(folder: str, *more: str) -> subprocess.Popen[bytes]:
    settings = {
        "model-path": f"{folder}/model",
        "served-model-name": "tiny",
        "port": str(PORT),
        "device": "cpu",
        "dtype": "float32",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "grammar-backend": "none",
        "max-total-tokens": "16384",
        "max-running-requests": "16",
        "random-seed": "0",
    }
    flags = ["--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle", "--skip-server-warmup", *more]
    arguments = [part for key, value in settings.items() for part in (f"--{key}", value)]
    environment = {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "examples/grpo/sglang_cpu"),
    }
    command = [sys.executable, "-m", "sglang.launch_server", *arguments, *flags]
    with Path(folder, "log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def wait_until_it_answers(server: subprocess.Popen[bytes]) -> None:
    for _ in range(180):
        assert server.poll() is None, "the server did not start"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health_generate", timeout=20).read()
            return
        except OSError:
            time.sleep(1)
    raise TimeoutError("the server does not answer")


def post(endpoint: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{endpoint}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            status, content = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, content = error.code, error.read()
    return status, json.loads(content) if content.startswith((b"{", b"[")) else content.decode().splitlines()


def meanwhile(request: dict[str, Any], *posts: tuple[str, dict[str, Any]]) -> tuple[int, Any]:
    """The answer to ``/generate`` when ``posts`` are made while it is under way."""
    answers: list[tuple[int, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(post("/generate", request)))
    thread.start()
    time.sleep(0.15)
    for endpoint, body in posts:
        post(endpoint, body)
    thread.join()
    return answers[0]


def save(name: str, endpoint: str, request: dict[str, Any], answer: tuple[int, Any]) -> None:
    record = {"endpoint": endpoint, "request": request, "status": answer[0], "response": answer[1]}
    (HERE / f"{name}.json").write_text(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
