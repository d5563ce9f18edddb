# SPDX-License-Identifier: Apache-2.0
"""Responses of inference servers for tests: SGLang's as recorded, vLLM's by hand (its own: ``test_vllm_responses``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parents[1] / "data" / "rollout_responses"


def recorded(name: str) -> tuple[dict[str, Any], Any]:
    """Request and response of a real SGLang server, as ``data/rollout_responses/README.md`` describes them."""
    record = json.loads((FOLDER / f"{name}.json").read_text())
    return record["request"], record["response"]


def recorded_tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """The tokenizer of the recorded responses."""
    return PreTrainedTokenizerFast(tokenizer_file=str(FOLDER / "tokenizer.json"), **settings)


def vllm_chat() -> tuple[dict[str, Any], dict[str, Any]]:
    """Written by hand after the format of vLLM; with the ids."""
    request = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "logprobs": True,
        "return_token_ids": True,
    }
    response = {
        "id": "chatcmpl-5f3c",
        "object": "chat.completion",
        "created": 1795284489,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "rain today",
                    "refusal": None,
                    "tool_calls": [],
                    "reasoning": None,
                },
                "logprobs": {
                    "content": [
                        {"token": "rain", "logprob": -0.25, "bytes": [114, 97, 105, 110], "top_logprobs": []},
                        {"token": " to", "logprob": -1.5, "bytes": [32, 116, 111], "top_logprobs": []},
                        {"token": "day", "logprob": -3.0625, "bytes": [100, 97, 121], "top_logprobs": []},
                        {"token": "", "logprob": 0.0, "bytes": [], "top_logprobs": []},
                    ]
                },
                "finish_reason": "stop",
                "stop_reason": 2,
                "token_ids": [17, 250, 9, 2],
            }
        ],
        "usage": {"prompt_tokens": 5, "total_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": None},
        "prompt_logprobs": None,
        "prompt_token_ids": [1, 382, 201, 406, 277],
        "kv_transfer_params": None,
    }
    return request, response


def vllm_completions() -> tuple[dict[str, Any], dict[str, Any]]:
    """Written by hand after the format of vLLM; with the ids."""
    request = {
        "model": "tiny",
        "prompt": [316, 284, 277],
        "logprobs": 0,
        "return_token_ids": True,
    }
    response = {
        "id": "cmpl-77aa",
        "object": "text_completion",
        "created": 1795284489,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": " two v",
                "logprobs": {
                    "text_offset": [0, 2, 4],
                    "token_logprobs": [-0.5, -2.75, -0.125],
                    "tokens": [" t", "wo", " v"],
                    "top_logprobs": [{" t": -0.5}, {"wo": -2.75}, {" v": -0.125}],
                },
                "finish_reason": "length",
                "stop_reason": None,
                "prompt_logprobs": None,
                "token_ids": [464, 116, 88],
                "prompt_token_ids": [316, 284, 277],
            }
        ],
        "usage": {"prompt_tokens": 3, "total_tokens": 6, "completion_tokens": 3, "prompt_tokens_details": None},
        "kv_transfer_params": None,
    }
    return request, response
