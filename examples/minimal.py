# SPDX-License-Identifier: Apache-2.0
"""Correct a padded batch of log-probs and compute its loss: python examples/minimal.py."""

import torch

import mis_ext

session = mis_ext.Session(mis_ext.preset("icepop"))  # once per run
# [B, T] log-probs of the sampled tokens from the engine and from the trainer. Masked positions may hold any value.
engine = torch.tensor([[-0.5, -1.0, -2.0, 0.0], [-0.3, -9.0, 0.0, 0.0]])
trainer = torch.tensor([[-0.6, -0.9, -2.1, 0.0], [-0.3, -1.0, 0.0, 0.0]], requires_grad=True)
mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
advantages = torch.tensor([[1.0], [-1.0]])

out = mis_ext.correct_padded(session, proximal_logprobs=trainer.detach(), behavior_logprobs=engine, response_mask=mask)
token_loss = -advantages * trainer * out.weights  # weights: exp(trainer - engine), detached
loss = token_loss[out.keep_mask].sum() / mask.sum()  # icepop masks the token whose ratio is exp(8)
loss.backward()
print(out.weights, out.keep_mask, mis_ext.scalars(out.metrics), loss.item(), sep="\n")
