# SPDX-License-Identifier: Apache-2.0
"""How far vLLM's log-probs are from those of transformers on a GPU, setting by setting.

    python lab/peers/vllm/on_gpu.py MODEL_FOLDER OUT.jsonl [--settings eager graphs ...]

16 prompts share 256 tokens and are asked twice, so that a prefix cache has them; the second answers count. Each
setting is a process, and one line of the file: k3, mean and largest absolute log-ratio, against transformers in
bfloat16 and in float32 with the same weights, one sequence after the other. ``alone`` asks the same greedily in
one batch and one by one: how many rows have the same ids, how many the same bits. ``prefill`` is the engine's own
prefill of the answers, in one batch and one by one. ``sglang`` is SGLang with the same prompts, where its packages are
found.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

import torch
from torch import Tensor, nn

PROMPTS, SHARED, ANSWER = 16, 256, 48
LONGEST = SHARED + 64 + ANSWER
WHOLE = {"max_num_batched_tokens": 8192, "enable_chunked_prefill": False, "enable_prefix_caching": False}
EAGER = WHOLE | {"enforce_eager": True}
# What is different, and variables of the environment. A GPU has other users: vLLM would measure how much they leave.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "eager": (EAGER, {}),
    "graphs": (WHOLE | {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}}, {}),
    "invariant": (EAGER, {"VLLM_BATCH_INVARIANT": "1"}),
    "chunks of 64": (EAGER | {"enable_chunked_prefill": True, "max_num_batched_tokens": 64}, {}),
    "prefix cache": (EAGER | {"enable_prefix_caching": True}, {}),
    "fp8 cache": (EAGER | {"kv_cache_dtype": "fp8"}, {}),
    "fp8 weights": (EAGER | {"quantization": "fp8"}, {}),
    "compiled, graphs": (WHOLE, {}),
    "Triton attention": (EAGER | {"attention_backend": "TRITON_ATTN"}, {}),
    "chunks, prefix cache": (
        EAGER | {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "enable_prefix_caching": True},
        {},
    ),
    "compiled, graphs, invariant": (WHOLE, {"VLLM_BATCH_INVARIANT": "1"}),
    "older runner": (EAGER, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "float32": (EAGER | {"dtype": "float32"}, {}),
    "fp8 cache, fp8 weights": (EAGER | {"kv_cache_dtype": "fp8", "quantization": "fp8"}, {}),
    "sglang": ({}, {}),
    "sglang graphs": ({}, {}),
}
Answers = list[tuple[list[int], list[float]]]


def prompts_of(folder: Path) -> list[list[int]]:
    """Sentences behind one long text, or random ids where there is no tokenizer."""
    from transformers import AutoConfig, AutoTokenizer

    if not (folder / "tokenizer.json").exists():
        generator, size = torch.Generator().manual_seed(1), AutoConfig.from_pretrained(folder).vocab_size
        ids = torch.randint(2, size, (PROMPTS, SHARED + 24), generator=generator)
        ids[:, :SHARED] = ids[0, :SHARED]
        return ids.tolist()
    encode = AutoTokenizer.from_pretrained(folder).encode
    shared = encode(" ".join(f"On day {day} the ship sailed {7 * day} miles." for day in range(1, 60)))[:SHARED]
    tails = [encode(f"\nOn the {night}th night the captain told a story of") for night in range(4, PROMPTS + 4)]
    return [shared + tail for tail in tails]


class VLLM:
    """``vllm.LLM`` with the folder's weights."""

    def __init__(self, folder: Path, chosen: dict[str, Any]) -> None:
        from vllm import LLM

        settings = {"dtype": "bfloat16", "gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 2**30} | chosen
        if settings["dtype"] == "float32":
            # Flash attention has none.
            settings["attention_backend"] = "TRITON_ATTN"
        self.engine = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            max_model_len=LONGEST,
            max_num_seqs=PROMPTS,
            seed=1,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            distributed_executor_backend="uni",
            disable_log_stats=True,
            **settings,
        )

    def told(self) -> dict[str, str]:
        """What it resolved."""
        found = self.engine.llm_engine.vllm_config
        worker = self.engine.llm_engine.model_executor.driver_worker.worker
        backends = {
            group.backend.__name__ for groups in getattr(worker.model_runner, "attn_groups", ()) for group in groups
        }
        return {
            "attention": str(found.attention_config.backend),
            "groups": str(backends),
            "runner": type(worker.model_runner).__module__,
            "graphs": str(found.compilation_config.cudagraph_mode),
            "cache": str(found.cache_config.cache_dtype),
        }

    def answers(self, prompts: list[list[int]], **parameters: Any) -> tuple[Answers, int]:
        """Ids and log-probs, and how many tokens of the prompts came out of the cache."""
        outputs = self._asked(prompts, max_tokens=ANSWER, ignore_eos=True, logprobs=0, **parameters)
        found = [
            (list(o.outputs[0].token_ids), _chosen(o.outputs[0].token_ids, o.outputs[0].logprobs)) for o in outputs
        ]
        return found, sum(output.num_cached_tokens or 0 for output in outputs)

    def prefill(self, prompt: list[list[int]], answers: Answers) -> list[list[float]]:
        """The log-probs of the answers as parts of prompts."""
        outputs = self._asked(
            [p + a for p, (a, _) in zip(prompt, answers, strict=True)], max_tokens=1, prompt_logprobs=0
        )
        pairs = zip(prompt, answers, outputs, strict=True)
        return [_chosen(ids, output.prompt_logprobs[len(p) :]) for p, (ids, _), output in pairs]

    def _asked(self, prompts: list[list[int]], **parameters: Any) -> list[Any]:
        from vllm import SamplingParams

        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self.engine.generate(requests, SamplingParams(detokenize=False, **parameters), use_tqdm=False)


class SGLang:
    """``sglang.Engine`` as the example starts it on a GPU."""

    def __init__(self, folder: Path, *, graphs: bool) -> None:
        from sglang import Engine

        self.engine = Engine(
            model_path=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            attention_backend="triton",
            sampling_backend="pytorch",
            grammar_backend="none",
            mem_fraction_static=0.1,
            max_total_tokens=65536,
            max_running_requests=PROMPTS,
            disable_cuda_graph=not graphs,
            disable_prefill_cuda_graph=True,
            random_seed=1,
            log_level="warning",
        )

    def told(self) -> dict[str, str]:
        """What it resolved."""
        return {
            name: str(getattr(self.engine.server_args, name, ""))
            for name in ("attention_backend", "disable_cuda_graph")
        }

    def answers(self, prompts: list[list[int]], **parameters: Any) -> tuple[Answers, int]:
        """Ids and log-probs, and how many tokens of the prompts came out of the cache."""
        parameters = {"max_new_tokens": ANSWER, "ignore_eos": True} | parameters
        outputs = self.engine.generate(input_ids=prompts, sampling_params=parameters, return_logprob=True)
        found = [
            (list(o["output_ids"]), [entry[0] for entry in o["meta_info"]["output_token_logprobs"]]) for o in outputs
        ]
        return found, sum(o["meta_info"].get("cached_tokens", 0) for o in outputs)

    def prefill(self, prompt: list[list[int]], answers: Answers) -> list[list[float]]:
        """The log-probs of the answers as parts of prompts."""
        whole = [p + a for p, (a, _) in zip(prompt, answers, strict=True)]
        outputs = self.engine.generate(
            input_ids=whole,
            sampling_params={"max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=[0] * len(whole),
        )
        return [
            [entry[0] for entry in o["meta_info"]["input_token_logprobs"][len(p) :]]
            for p, o in zip(prompt, outputs, strict=True)
        ]


def _chosen(token_ids: Any, places: Any) -> list[float]:
    return [place[token].logprob for token, place in zip(token_ids, places, strict=True)]


@torch.no_grad()
def scored(model: nn.Module, prompts: list[list[int]], answers: Answers) -> list[list[float]]:
    """The log-probs of transformers, one sequence after the other."""
    device, found = next(model.parameters()).device, []
    for prompt, (ids, _) in zip(prompts, answers, strict=True):
        logits = model(torch.tensor([prompt + ids], device=device)).logits[0, len(prompt) - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(-1, torch.tensor(ids, device=device)[:, None])[:, 0].tolist())
    return found


def difference(ours: list[list[float]], sampled: list[list[float]]) -> dict[str, float]:
    """Of log-probs of the trainer's side from the engine's."""
    ours_, theirs = (
        torch.tensor([value for row in rows for value in row], dtype=torch.float64) for rows in (ours, sampled)
    )
    log_ratio: Tensor = ours_ - theirs
    sums = torch.tensor([sum(a) - sum(b) for a, b in zip(ours, sampled, strict=True)]).exp()
    return {
        "k3": float((log_ratio.expm1() - log_ratio).mean()),
        "mean": float(log_ratio.abs().mean()),
        "largest": float(log_ratio.abs().max()),
        "equal": float((log_ratio == 0).double().mean()),
        "ess": float(sums.sum() ** 2 / (sums**2).sum() / len(sums)),
        "tokens": len(log_ratio),
    }


def same(together: Answers, alone: Answers) -> dict[str, int]:
    """In how many rows ids and bits are the same."""
    pairs = list(zip(together, alone, strict=True))
    return {"rows": len(pairs), "ids": sum(a[0] == b[0] for a, b in pairs), "bits": sum(a == b for a, b in pairs)}


def run(folder: Path, name: str) -> dict[str, Any]:
    """One line of the file."""
    from transformers import AutoModelForCausalLM

    began = time.monotonic()
    row: dict[str, Any] = {"setting": name, "settings": {k: str(v) for k, v in SETTINGS[name][0].items()}}
    prompts = prompts_of(folder)
    is_sglang = name.startswith("sglang")
    engine: Any = SGLang(folder, graphs="graphs" in name) if is_sglang else VLLM(folder, SETTINGS[name][0])
    row |= {
        "version": version("sglang" if is_sglang else "vllm"),
        "torch": torch.__version__,
    }
    row |= {"transformers": version("transformers"), "started": round(time.monotonic() - began, 1)}

    def tried(key: str, make: Any) -> None:
        """What fails alone leaves the rest."""
        try:
            row[key] = make()
        except Exception as error:
            row[key] = f"{type(error).__name__}: {str(error)[-300:]}"
            traceback.print_exc()

    tried("told", engine.told)
    engine.answers(prompts, temperature=1.0)
    second = time.monotonic()
    answers, row["cached"] = engine.answers(prompts, temperature=1.0)
    row["seconds"] = round(time.monotonic() - second, 3)
    sampled = [log_probs for _, log_probs in answers]
    tried(
        "alone",
        lambda: same(
            engine.answers(prompts, temperature=0.0)[0], [engine.answers([p], temperature=0.0)[0][0] for p in prompts]
        ),
    )

    def prefilled() -> dict[str, Any]:
        together = engine.prefill(prompts, answers)
        one_by_one = [engine.prefill([p], [a])[0] for p, a in zip(prompts, answers, strict=True)]
        return {"sampled": difference(together, sampled), "alone": difference(one_by_one, together)}

    tried("prefill", prefilled)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for key, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):

        def compared(dtype: torch.dtype = dtype) -> dict[str, float]:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
            found = difference(scored(model, prompts, answers), sampled)
            del model
            gc.collect()
            return found

        tried(key, compared)
    if is_sglang:
        engine.engine.shutdown()
    return row | {"whole": round(time.monotonic() - began, 1)}


def main() -> int:
    """Start the settings, each with its time limit, and show what each gave."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of transformers; without a tokenizer the prompts are random")
    parser.add_argument("out", type=Path, help="one line a setting")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=[n for n in SETTINGS if n[:6] != "sglang"])
    parser.add_argument("--seconds", type=float, default=150, help="of a setting at most")
    parser.add_argument("--one", action="store_true", help="the setting alone, in this process")
    args = parser.parse_args()
    if args.one:
        with args.out.open("a") as file:
            row = run(args.folder, args.settings[0])
            file.write(json.dumps(row) + "\n")
        return 0
    failed = 0
    for name in args.settings:
        command = [sys.executable, __file__, str(args.folder), str(args.out), "--one", "--settings", name]
        log = args.out.with_name(f"{args.out.stem}_{name.replace(' ', '_').replace(',', '')}.log")
        with log.open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=os.environ | SETTINGS[name][1], start_new_session=True
            )
            try:
                code: int | str = process.wait(args.seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                code = f"longer than {args.seconds:.0f} s"
        if code:
            failed += 1
            print(f"{name}: {code}; {log.read_text(errors='replace').strip()[-600:]}", flush=True)
            continue
        row = json.loads(args.out.read_text().splitlines()[-1])
        print(name, json.dumps({k: v for k, v in row.items() if k not in ("setting", "settings")}), flush=True)
    return int(failed == len(args.settings))


if __name__ == "__main__":
    sys.exit(main())
