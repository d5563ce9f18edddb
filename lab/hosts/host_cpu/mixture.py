# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts, and rollouts of it by ``mis_ext.rollout.generate`` in the host's own samples and client.

The engine is transformers in bfloat16 behind SGLang's ``/generate``, so that its experts are those of the model: a
token keeps the choice with which it was fed first. Samples have two turns, and some requests are aborted and go on.
With one turn and no abort, the framework's own function must give the same experts.
"""

import asyncio
import base64
import importlib
import json
import threading
from argparse import Namespace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

from mis_ext.rollout import generate

from .cases import EXPERTS, MODEL, NUM_PROMPTS, SAMPLES_PER_PROMPT

NUM_EXPERTS, TOPK = EXPERTS["num-experts"], EXPERTS["moe-router-topk"]
STOPS = list(range(0, MODEL["vocab-size"], 12))
PARAMS = {"temperature": 1.0, "max_new_tokens": 24, "stop_token_ids": STOPS, "no_stop_trim": True}
ABORTED_AFTER = 4
CONTEXT = 100


class Args(Namespace):
    """Arguments of a framework; unset ones are None."""

    def __getattr__(self, name: str) -> None:
        return None


class Engine:
    """Samples token by token; optionally aborts every third request."""

    def __init__(self, folder: Path) -> None:
        self.model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.aborts, self.num_requests = False, 0

    @torch.no_grad()
    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The response of SGLang to a request."""
        ids, params = list(request["input_ids"]), request["sampling_params"]
        self.num_requests += 1
        limit = ABORTED_AFTER if self.aborts and self.num_requests % 3 == 0 else params["max_new_tokens"]
        # Equal requests get equal responses.
        generator = torch.Generator().manual_seed(sum(ids) + len(ids))
        sampled: list[list[Any]] = []
        rows: list[list[Any]] = []
        reason: dict[str, Any] = {"type": "length", "length": limit}
        if limit < params["max_new_tokens"]:
            reason = {"type": "abort", "message": "Aborted"}
        while len(sampled) < limit:
            output = self.model(torch.tensor([ids]), output_router_logits=True)
            # [layers, positions, topk], of which the earlier positions keep what they had.
            chosen = torch.stack([each.float().softmax(-1).topk(TOPK).indices for each in output.router_logits], 1)
            rows += chosen[len(rows) :].tolist()
            log_probs = output.logits[0, -1].float().log_softmax(-1)
            token = int(torch.multinomial(log_probs.exp(), 1, generator=generator))
            sampled.append([float(log_probs[token]), token, None])
            ids.append(token)
            if token in params["stop_token_ids"]:
                reason = {"type": "stop", "matched": token}
                break
        new_ids = [row[1] for row in sampled]
        meta_info = {
            "id": str(self.num_requests),
            "finish_reason": reason,
            "prompt_tokens": len(request["input_ids"]),
            "completion_tokens": len(sampled),
            "output_token_logprobs": sampled,
            "weight_version": "1",
        }
        if request.get("return_routed_experts"):
            kept = np.array(rows[request.get("routed_experts_start_len", 0) :], np.int32)
            meta_info["routed_experts"] = base64.b64encode(kept.tobytes()).decode()
        return {"text": self.tokenizer.decode(new_ids), "output_ids": new_ids, "meta_info": meta_info}


def serve(engine: Engine) -> ThreadingHTTPServer:
    """The engine behind HTTP, on its own port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.dumps(engine.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


async def step(sample: Any, _: str) -> str | None:
    """A tool that speaks once."""
    spoken = sample.metadata.get("spoken", False)
    sample.metadata["spoken"] = True
    return None if spoken else " t7 t8 t9"


async def generated(host: str, args: Args, sample: Any) -> Any:
    """A sample of our function, called as in the framework."""
    if host == "slime":
        return await generate(args, sample, dict(PARAMS))
    types = importlib.import_module("miles.rollout.base_types")
    state = Namespace(args=args, aborted=False)
    given = types.GenerateFnInput(state=state, sample=sample, sampling_params=dict(PARAMS), evaluation=False)
    return (await generate(given)).samples


async def rollout(host: str, args: Args, engine: Engine, rollout_id: int, sample_type: Any) -> list[Any]:
    """The samples of one rollout, of two turns each; those that were aborted go on."""
    args.on_policy_tokens, args.partial_rollout, engine.aborts = {"environment": f"{__name__}.step"}, True, True
    samples = []
    for index in range(NUM_PROMPTS * SAMPLES_PER_PROMPT):
        sample = sample_type(
            group_index=index // SAMPLES_PER_PROMPT,
            index=rollout_id * NUM_PROMPTS * SAMPLES_PER_PROMPT + index,
            prompt=" ".join(f"t{(index + 3) * (place + 7) % 500 + 2 + rollout_id}" for place in range(4 + index % 4)),
            reward=float(index % 2),
        )
        await generated(host, args, sample)
        while sample.status is sample_type.Status.ABORTED:
            await generated(host, args, sample)
        assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1
        samples.append(sample)
    return samples


async def agrees(host: str, args: Args, engine: Engine, sample_type: Any) -> None:
    """One turn without an abort: the framework's own function gives the same sample, including experts."""
    args.on_policy_tokens, engine.aborts = None, False
    own = importlib.import_module(f"{host}.rollout.sglang_rollout").generate
    ours, theirs = (sample_type(index=0, prompt="t5 t6 t7") for _ in range(2))
    await generated(host, args, ours)
    await own(args, theirs, dict(PARAMS))
    assert (ours.tokens, ours.rollout_log_probs, ours.status) == (
        theirs.tokens,
        theirs.rollout_log_probs,
        theirs.status,
    )
    rows, expected = ours.rollout_routed_experts, theirs.rollout_routed_experts
    assert (type(rows), rows.dtype, rows.tolist()) == (type(expected), expected.dtype, expected.tolist())
    print(f"{host}'s own function and mis_ext.rollout.generate agree on {len(rows)} rows of experts")


async def write_rollouts(host: str, folder: Path, sample_type: Any, num_rollouts: int) -> None:
    """Save rollouts of the model in a folder."""
    engine = Engine(folder / "model")
    server = serve(engine)
    args = Args(
        sglang_router_ip="127.0.0.1",
        sglang_router_port=server.server_port,
        hf_checkpoint=str(folder / "model"),
        rollout_max_context_len=CONTEXT,
        use_rollout_routing_replay=True,
        num_layers=MODEL["num-layers"],
        moe_router_topk=TOPK,
        num_experts=NUM_EXPERTS,
        sglang_server_concurrency=8,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        eval_num_gpus=0,
        lora_rank=0,
        rollout_top_p=1.0,
    )
    importlib.import_module(f"{host}.utils.http_utils").init_http_client(args)
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    for rollout_id in range(num_rollouts):
        samples = [each.to_dict() for each in await rollout(host, args, engine, rollout_id, sample_type)]
        torch.save({"rollout_id": rollout_id, "samples": samples}, folder / "rollouts" / f"{rollout_id}.pt")
        counts = [each["metadata"]["on_policy_tokens"] for each in samples]
        print(
            f"rollout {rollout_id}: {sum(each.get('aborted_requests', 0) for each in counts)} aborted requests, "
            f"{sum(each['response_length'] for each in samples)} tokens"
        )
    await agrees(host, args, engine, sample_type)
    server.shutdown()


def write(host: str, folder: Path, sample_type: Any, num_rollouts: int) -> None:
    """Write rollouts below a folder that has a model."""
    asyncio.run(write_rollouts(host, folder, sample_type, num_rollouts))
