# SPDX-License-Identifier: Apache-2.0
"""Responses of a server, based on a recorded response of SGLang 0.5.23."""

from __future__ import annotations

import copy

from tiny_tokenizers import encode_bytewise, english_tokenizer

TOKENIZER = english_tokenizer()
END = TOKENIZER.eos_token_id

# A recorded response of SGLang 0.5.23 to input_ids [5, 6, 7].
GENUINE = {
    "text": ' today"}}\n    ',
    "output_ids": [470, 510, 305, 305],
    "meta_info": {
        "id": "3ab950bee0044a4fbe1349d6a1acae0b",
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 3,
        "weight_version": "7",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [
            [-5.627516269683838, 470, None],
            [-1.401016116142273, 510, None],
            [-2.424952745437622, 305, None],
            [-2.9641685485839844, 305, None],
        ],
        "output_token_logprobs_length": 4,
        "reasoning_tokens": 0,
        "completion_tokens": 4,
        "cached_tokens": 0,
        "weight_versions": [{"version": "7", "start": 0, "end": 4}],
        "cached_tokens_details": None,
        "dp_rank": None,
        "e2e_latency": 0.05665547399985371,
        "response_sent_to_client_ts": 1795284661.3810897,
    },
}


def answer(request, ids, reason, *, version="7"):
    """The genuine response with other tokens."""
    response = copy.deepcopy(GENUINE)
    response |= {"text": TOKENIZER.decode(ids), "output_ids": ids}
    rows = [[-0.1 - 0.01 * (number + len(request["input_ids"])), token, None] for number, token in enumerate(ids)]
    response["meta_info"] |= {
        "id": f"request of {len(request['input_ids'])}",
        "finish_reason": reason,
        "prompt_tokens": len(request["input_ids"]),
        "completion_tokens": len(ids),
        "output_token_logprobs": rows,
        "output_token_logprobs_length": len(ids),
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
    }
    return response


def stopped(request, text, *, ids=None, version="7"):
    """A turn that the model ended, by default in bytes, which never equal the tokenization of its text."""
    ids = [*(encode_bytewise(TOKENIZER, text) if ids is None else ids), END]
    return answer(request, ids, {"type": "stop", "matched": END}, version=version)


def cut(request, text, *, version="7"):
    ids = encode_bytewise(TOKENIZER, text)
    return answer(request, ids, {"type": "length", "length": len(ids)}, version=version)


def aborted(request, text, *, version="7"):
    reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    return answer(request, encode_bytewise(TOKENIZER, text), reason, version=version)
