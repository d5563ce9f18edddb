# SPDX-License-Identifier: Apache-2.0
"""Two streams of log-probs in; weights, masks, metrics and a loss out: python examples/minimal.py."""

import torch

import mis_ext

session = mis_ext.Session(mis_ext.preset("icepop"))  # once per run; mis_ext.list_presets() names the others
# [B, T]: what the engine reported of each sampled token, and what the trainer scores. Under the mask may be anything.
engine = torch.tensor([[-0.5, -1.0, -2.0, 0.0], [-0.3, -9.0, 0.0, 0.0]])
trainer = torch.tensor([[-0.6, -0.9, -2.1, 0.0], [-0.3, -1.0, 0.0, 0.0]], requires_grad=True)
mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
advantages = torch.tensor([[1.0], [-1.0]])

out = mis_ext.correct_padded(session, proximal_logprobs=trainer.detach(), behavior_logprobs=engine, response_mask=mask)
loss_of_tokens = -advantages * trainer * out.weights  # weights: exp(trainer - engine); PPO's loss takes them too
loss = loss_of_tokens[out.keep_mask].sum() / mask.sum()  # without the token whose ratio is exp(8)
loss.backward()
print(out.weights, out.keep_mask, mis_ext.scalars(out.metrics), loss.item(), sep="\n")
