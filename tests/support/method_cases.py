# SPDX-License-Identifier: Apache-2.0
"""Random data for methods, and parameters with which every part of a preset has an effect on it."""

import re

import torch
from method_losses import Data
from rows import for_each

from mis_ext import PackedLayout
from mis_ext.methods import METHODS, Method

# The preset's own numbers if they have an effect on random data, else wider or narrower ones.
PARAMETERS = {
    "ppo": {"low": 0.15, "high": 0.25},
    "bypass": {"low": 0.15, "high": 0.25},
    "dual_clip": {"low": 0.15, "high": 0.25, "dual": 1.5},
    "kimi_k2_5": {"tau": 0.1},
    "sequence_mis": {"low": 0.3, "high": 3.0},
    "geometric_rs": {"low": 0.92, "high": 1.08},
    "geometric_rs_token_tis": {"low": 0.92, "high": 1.08, "bound": 1.2},
    "sequence_mask_tis": {"low": 0.92, "high": 1.08},
    "icepop": {"high": 2.0},
    "glm_5_reasoning": {"beta": 1.5},
    "veto": {"low": 0.4},
    "trm": {"high_max": 0.5, "high_mean": 0.12},
    "sequence_error": {"high": 1.6},
    "aipo": {"high": 1.5},
    "reinforce_sequence_psis": {"high": 2.5},
    "cispo": {"low": 0.6, "high": 1.3},
    "minirl": {"cap": 1.5},
    "aspo": {"cap": 1.5},
    "ctpo": {"low": 0.2, "high": 0.3, "dual": 0.4},
    "kpop": {"phi": 0.03},
    "intellect_3": {"high": 2.0, "veto": 0.6},
    "mis_po": {"low_sequence": 0.92, "high_sequence": 1.08},
    "dppo_tv": {"delta": 0.05, "cap": 1.5},
    "dppo_kl": {"cap": 1.5},
    "prime_rl": {"low": 0.05, "high": 0.08, "tau": 0.1},
    "dro": {"beta": 0.3},
    "clip_cov": {"low": 0.15, "high": 0.25, "cov_low": 0.1, "cov_high": 0.6, "share": 0.1, "seed": 3},
    "kl_cov": {"share": 0.1, "scale": 0.5},
    "ipo": {"tau": 0.1},
    "gspo": {"low": 0.05, "high": 0.1},
    "gspo_token": {"low": 0.05, "high": 0.1},
    "luspo": {"low": 0.05, "high": 0.1},
    "dispo": {"positive": (0.8, 1.2), "negative": (0.7, 1.3)},
    "maspo": {"scale": 0.3, "power": 0.5, "high": 0.6, "positive": 8.0, "negative": 9.0},
    "m2po": {"budget": 0.1},
    "vaco": {"delta": 0.15},
    "grpo_k3": {"beta": 0.1},
    "grpo_k2": {"beta": 0.1},
    "grpo_unbiased_kl": {"beta": 0.1},
    "opsm": {"delta": 0.1},
}
# Bounds of the hook: wide enough that some sequences of random data pass.
HOOK_PARAMETERS = {
    "sequence_mis": {"low": 0.3, "high": 3.0},
    "geometric_rs": {"low": 0.92, "high": 1.08},
    "geometric_rs_token_tis": {"low": 0.92, "high": 1.08, "bound": 1.2},
    "sequence_mask_tis": {"low": 0.92, "high": 1.08},
    "veto": {"low": 0.5},
    "trm": {"high_max": 0.3, "high_mean": 0.1},
    "decoupled_token_tis": {"high": 1.25},
    "icepop": {"high": 1.5},
    "sequence_error": {"high": 1.4},
}
# Formulas that the hook can express: factors of rho, except a power or a mixture, times PPO of r.
HOOK = [
    name
    for name, row in METHODS.items()
    if re.match(r"(sg\(|1\[).*rho.* min\(r A, clip\(r, ", row.formula) and not re.search("power|mix", row.formula)
]
each_preset = for_each("name", METHODS)


def parameters(name: str) -> dict:
    return METHODS[name].defaults | PARAMETERS.get(name, {})


def make_data(*, seed: int = 0, token_advantages: bool = True, num_sequences: int = 32):
    """Responses of several turns, some masked through, log-probs apart by several tenths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 11, (num_sequences,), generator=generator).tolist()
    total = sum(lengths)

    def normal(scale, size=total):
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    behavior = -0.05 - 2 * torch.rand(total, generator=generator, dtype=torch.float64)
    proximal = (behavior + normal(0.4)).clamp_max(-1e-3)
    current = (proximal + normal(0.3)).clamp_max(-1e-3)
    advantages = normal(1.0)
    mask = torch.rand(total, generator=generator) < 0.75
    starts = [sum(lengths[:i]) for i in range(num_sequences)]
    sequences = [torch.arange(s, s + n)[mask[s : s + n]] for s, n in zip(starts, lengths, strict=True)]
    if not token_advantages:
        for s, n in zip(starts, lengths, strict=True):
            advantages[s : s + n] = normal(1.0, 1)
    sequences = [tokens for tokens in sequences if len(tokens)]
    data = Data(current, behavior, proximal, behavior + normal(0.5), advantages, sequences, values=normal(0.5))
    return data, mask, PackedLayout.whole(lengths)


def apply(method: Method, data: Data, mask, layout, **more):
    given = {
        "current_logprobs_T": data.x,
        "behavior_logprobs_T": data.behavior,
        "proximal_logprobs_T": data.proximal,
        "reference_logprobs_T": data.reference,
        "advantages_T": data.advantages,
        "state_values_T": data.values,
        "response_mask_T": mask,
    }
    return method(**given | more, layout=layout)
