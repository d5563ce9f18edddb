# SPDX-License-Identifier: Apache-2.0
"""Runs of the custom generate function, against a loopback server that responds like SGLang 0.5.23."""

import asyncio

from host_samples import loopback_server
from tokens.sample import host_args

from mis_ext.rollout.custom_generate.function import generate

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
LIMITS = {"max_new_tokens": 32, "temperature": 0.7, "top_p": 1.0, "no_stop_trim": True, "skip_special_tokens": False}
TOOL_RESULT = [{"role": "tool", "content": "rain"}]
WITH_ENVIRONMENT = {"environment": "an_environment.step"}
CONTEXT = 100_000


def run(script, tokenizer_folder, sample, *, params=LIMITS, settings=None, **others):
    """The server's requests after ``generate``. It responds with the scripts, in order."""
    scripts = iter(script)

    def serve(number, request):
        reply = next(scripts)(request)
        return reply if isinstance(reply, tuple) else (200, reply)

    others.setdefault("rollout_max_context_len", CONTEXT)
    with loopback_server(serve) as server:
        args = host_args(server.port, tokenizer_folder, on_policy_tokens=settings, **others)
        assert asyncio.run(generate(args, sample, params)) is sample
    assert not list(scripts)
    return server


# --- routed experts of a small mixture

NUM_LAYERS, DENSE_LAYER, TOPK, NUM_EXPERTS = 3, 1, 2, 8
REPLAYED = {
    "use_rollout_routing_replay": True,
    "num_layers": NUM_LAYERS,
    "moe_router_topk": TOPK,
    "num_experts": NUM_EXPERTS,
}


def experts(version, position, token):
    """The two experts of a token in each layer. They differ by weight version, position and token."""
    row = []
    for layer in range(NUM_LAYERS):
        first = 1 + (7 * token + 3 * position + 2 * version + layer) % 7
        other = (first + 1 + (token + position + version) % 6) % NUM_EXPERTS
        row.append([0, 0] if layer == DENSE_LAYER else [first, other])
    return row
