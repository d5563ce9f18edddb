# SPDX-License-Identifier: Apache-2.0
"""A batch in which the guards find nothing, and a call of the hook with it."""

import argparse

import torch

import mis_ext


def make_batch(num_samples: int = 4, length: int = 40, *, noise: float = 0.01, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    train = [-torch.rand(length, generator=generator) * 3 for _ in range(num_samples)]
    rollout = [(x + noise * torch.randn(length, generator=generator)).clamp_max(0.0) for x in train]
    return {
        "pg_loss": torch.randn(num_samples * length, generator=generator),
        "train_log_probs": train,
        "rollout_log_probs": rollout,
        "loss_masks": [torch.ones(length, dtype=torch.int32) for _ in range(num_samples)],
        "total_lengths": [length + 5] * num_samples,
        "response_lengths": [length] * num_samples,
    }


def call(batch: dict, **keys: object) -> tuple:
    return mis_ext.compute_mis_weights_with_cp(argparse.Namespace(**({"use_tis": True} | keys)), **batch)
