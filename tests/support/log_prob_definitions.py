# SPDX-License-Identifier: Apache-2.0
"""Requests, definitions, and logits whose probabilities are known by hand."""

import math

from mis_ext.rollout.definition import define_log_probs
from mis_ext.rollout.sampling_parameters import SamplingParameters

# softmax of these is 1/2, 1/4, 1/8, 1/8; at temperature 1/2 it is 16/22, 4/22, 1/22, 1/22.
PROBABILITIES = (0.5, 0.25, 0.125, 0.125)
LOGITS = [math.log(p) + 3.0 for p in PROBABILITIES]
NUCLEUS = {"temperature": 0.7, "top_p": 0.9}


def read(server="sglang", **request) -> SamplingParameters:
    return SamplingParameters.from_request(request, server=server)


def define(server="sglang", *, mode="raw_logprobs", original=False, backend=None, **request):
    return define_log_probs(
        read(server, **request),
        server=server,
        logprobs_mode=mode,
        return_original=original,
        sampling_backend=backend,
    )
