# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core scores what transformers' Qwen3-MoE sampled, to the bit, and what leaving a piece out costs."""

import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from mis_ext.onpolicy import audit_logprobs
from mis_ext.onpolicy.batch_invariant import batch_invariant_mode

pytest.importorskip("megatron.core")
pytest.importorskip("transformers.integrations.moe")

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

with warnings.catch_warnings():
    # Megatron-Core reports at import that Transformer Engine and Apex are not installed.
    warnings.simplefilter("ignore")
    from onpolicy.mixture import align_experts, align_routers
    from onpolicy.pieces import align_norms
    from toy_moe import MoEShape, build_engine, build_trainer, sample, score, single_process


pytestmark = pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning")

SHAPE = MoEShape(num_layers=2, hidden_size=64, expert_size=64, num_experts=8, topk=3, vocab_size=64)
PIECES = {"mode", "norms", "routers", "experts"}
PROMPT, NEW = 7, 9


def audit(dtype, pieces, *, batch_size=5):
    """Sample from the engine, score with the trainer after a step of training and a weight sync, compare bits."""
    trainer = build_trainer(SHAPE, seed=0, params_dtype=dtype, bf16=dtype == torch.bfloat16).to(dtype)
    prompts = torch.randint(SHAPE.vocab_size, (5, PROMPT), generator=torch.Generator().manual_seed(1))
    with batch_invariant_mode() if "mode" in pieces else nullcontext():
        if "norms" in pieces:
            align_norms(trainer)
        (-score(trainer, prompts)).mean().backward()
        with torch.no_grad():
            for name, parameter in trainer.named_parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                if name.endswith("router.weight"):
                    # Experts in pairs with equal scores: every choice of an odd number cuts through a tie.
                    parameter[1::2] = parameter[::2]
            engine = build_engine(trainer, SHAPE, dtype=dtype)
            for piece, align in (("norms", align_norms), ("routers", align_routers), ("experts", align_experts)):
                if piece in pieces:
                    align(engine)
            torch.manual_seed(2)
            rollout = sample(engine, prompts, new_tokens=NEW)
            log_probs = torch.cat([score(trainer, tokens) for tokens in rollout.tokens_BT.split(batch_size)])
    masks = [torch.ones(NEW)] * 5
    behavior = list(rollout.log_probs_BR)
    return audit_logprobs(list(log_probs[:, PROMPT - 1 :]), behavior, masks=masks, engine_records=behavior)


@pytest.fixture(scope="module", autouse=True)
def _process():
    with single_process():
        yield


@pytest.mark.parametrize(("dtype", "batch_size"), [(torch.float32, 3), (torch.bfloat16, 1)])
def test_every_sampled_token_has_the_same_bits_once_everything_is_aligned(dtype, batch_size):
    report = audit(dtype, PIECES, batch_size=batch_size)
    assert (report.verdict, report.num_active_tokens) == ("EXACT", 5 * NEW), report


@pytest.mark.parametrize("piece", sorted(PIECES))
def test_without_a_piece_tokens_differ(piece):
    # Without AVX2, torch's kernels round bfloat16 so seldom that a token has the same bits in any batch.
    dtype = torch.float32 if piece == "mode" else torch.bfloat16
    assert audit(dtype, PIECES - {piece}).verdict == "DIFFERENT"
