# SPDX-License-Identifier: Apache-2.0
"""Settings of TRL's ``GRPOTrainer``, and our keys for an equal loss."""

from flat_keys import keys_of

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
NO_CORRECTION = {"vllm_importance_sampling_correction": False}
OF_SEQUENCES = {"importance_sampling_level": "sequence"}


def _mode(mode: str, low: float | None = None, high: float | None = None) -> dict:
    bounds = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    return {"vllm_importance_sampling_mode": mode} | bounds


def _weight(level: str, mode: str, *gates: dict, **bounds: float) -> dict:
    return keys_of(weight={"level": level, "mode": mode, **bounds}, gates=gates)


def _method(name: str, **parameters: object) -> dict:
    return {"mis_loss_method": {"name": name, **parameters}}


RATIOS = {
    "token_truncate": (_mode("token_truncate", high=1.2), _weight("token", "truncate", high=1.2)),
    "token_truncate, both bounds": (_mode("token_truncate", 0.9, 1.2), _weight("token", "clip", low=0.9, high=1.2)),
    "token_mask": (
        _mode("token_mask", 0.9, 1.2),
        _weight("token", "unbounded", {"reduce": "token", "action": "zero", "low": 0.9, "high": 1.2}),
    ),
    "token_mask, one bound": (
        _mode("token_mask", high=1.2),
        _weight("token", "unbounded", {"reduce": "token", "action": "zero", "high": 1.2}),
    ),
    "sequence_truncate": (_mode("sequence_truncate", high=1.2), _weight("sequence", "truncate", high=1.2)),
    "sequence_truncate, both bounds": (
        _mode("sequence_truncate", 0.9, 1.2),
        _weight("sequence", "clip", low=0.9, high=1.2),
    ),
    "sequence_mask": (
        _mode("sequence_mask", 0.8, 1.5),
        _weight("sequence", "unbounded", {"reduce": "sum", "low": 0.8, "high": 1.5}),
    ),
    "sequence_mask, the default": (
        _mode("sequence_mask", high=3.0),
        _weight("sequence", "unbounded", {"reduce": "sum", "high": 3.0}),
    ),
}
"""TRL's correction, and our keys, whose weights replace its ratio."""

_KL = {"beta": 0.1, "use_bias_correction_kl": False}
_PPO = {"mis_loss_method": "ppo"}
WHOLE = {
    **{name: ({"loss_type": name} | NO_CORRECTION, _PPO, {"loss_type": name}) for name in LOSS_TYPES[:4]},
    **{
        f"{name}, token_truncate": (
            {"loss_type": name} | _mode("token_truncate", high=1.2),
            _method("decoupled_token_tis", high=1.2),
            {"loss_type": name},
        )
        for name in LOSS_TYPES[:4]
    },
    "clips": (
        {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28} | NO_CORRECTION,
        _method("ppo", low=0.1, high=0.28),
        {"loss_type": "dapo"},
    ),
    "KL": ({"loss_type": "dapo", "beta": 0.1} | NO_CORRECTION, _PPO, {"loss_type": "dapo", "beta": 0.1}),
    "KL, no ratio": (_KL | {"loss_type": "grpo"} | NO_CORRECTION, _PPO, _KL | {"loss_type": "grpo"}),
    "token_truncate, both bounds": (
        {"loss_type": "dapo"} | _mode("token_truncate", 0.9, 1.2),
        _method("decoupled_token_clip", low=0.9, high=1.2),
        {"loss_type": "dapo"},
    ),
    "token_mask": (
        {"loss_type": "dapo"} | _mode("token_mask", 0.9, 1.2),
        _method("icepop", low=0.9, high=1.2),
        {"loss_type": "dapo"},
    ),
    "sequence_truncate": (
        {"loss_type": "grpo"} | _mode("sequence_truncate", high=1.2),
        _method("decoupled_sequence_tis", high=1.2),
        {"loss_type": "grpo"},
    ),
    "sequence_mask": (
        {"loss_type": "grpo"} | _mode("sequence_mask", 0.8, 1.5),
        _method("sequence_mis", low=0.8, high=1.5),
        {"loss_type": "grpo"},
    ),
    "gspo": (
        {"loss_type": "grpo"} | OF_SEQUENCES | NO_CORRECTION,
        _method("gspo", low=0.2, high=0.2),
        {"loss_type": "grpo"},
    ),
    "luspo": (
        {"loss_type": "luspo"} | OF_SEQUENCES | NO_CORRECTION,
        _method("luspo", low=0.2, high=0.2),
        {"loss_type": "luspo"},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.2} | NO_CORRECTION,
        _method("cispo", low=0.0, high=1.2),
        {"loss_type": "dapo"},
    ),
    "sapo": ({"loss_type": "sapo"} | NO_CORRECTION, _method("sapo"), {"loss_type": "grpo"}),
    "vespo": (
        {"loss_type": "vespo"} | _mode("token_truncate", high=1e9),
        _method("vespo"),
        {"loss_type": "dapo"},
    ),
    "off-policy mask": (
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.02} | NO_CORRECTION,
        _method("opsm", delta=0.02),
        {"loss_type": "dapo"},
    ),
}
"""Settings of TRL's own loss; keys of ours; settings of the trainer with which ours runs."""

STEPS = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_completion_length": 12}
"""The settings of the loss denominator."""
UNSCORED = 3
"""The token of the first row whose log-prob the engine did not return, in the batch ``close``."""


def faults_of_steps(steps: dict) -> list[str]:
    """Real steps of TRL in which our gradients differ from those of its own correction, or of no correction."""
    norms = {name: logged["grad_norm"] for name, logged in steps.items()}
    own = norms["TRL's own"]
    apart = {name: [abs(a / b - 1.0) for a, b in zip(found, own, strict=True)] for name, found in norms.items()}
    # float32, four steps in which differences of 1e-7 grow.
    faults = [f"{name}: {apart[name]}" for name in ("our ratio", "our whole loss") if not max(apart[name]) < 1e-5]
    if not max(apart["no correction"]) > 1e-3:
        faults.append(f"no correction: {apart['no correction']}")
    # The correction is computed once per rollout, which has two steps; the full loss measures in each step.
    for name, key, times in (("our ratio", "mis_k3_kl", 2), ("our whole loss", "mis_loss/pg_loss", 4)):
        if len(steps[name].get(key, [])) != times:
            faults.append(f"{name}: {key} is not {times} times in TRL's log")
    return faults
