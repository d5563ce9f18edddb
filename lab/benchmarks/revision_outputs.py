# SPDX-License-Identifier: Apache-2.0
"""Write the outputs of this revision on drawn inputs by name to a file, for ``compare_revisions.py``.

    PYTHONPATH=../before python lab/benchmarks/revision_outputs.py before.pt --seed 7

Only public names are used, so that two revisions can be asked the same. Every part draws its inputs from the seed and
its own name, and a refusal is an output like any other: what is compared are numbers, masks, gradients and texts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import math
import os
import re
import sys
import tempfile
import types
import warnings
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import yaml
from torch import Tensor

import mis_ext
from mis_ext.methods import METHODS

NUM_CONFIGS = 200
POLICIES = ("current", "proximal", "behavior", "reference")
QUIET = {"mis_guard": "warn", "mis_metrics": "all"}
SPECIAL = (math.nan, math.inf, -math.inf, -1e4)
VOCABULARY = 11

Found = dict[str, Any]


class Draw:
    """Inputs of one name."""

    def __init__(self, seed: int, name: str, device: str) -> None:
        self.random = Random(f"{seed} {name}")
        self.device = device
        self._generator = torch.Generator().manual_seed(self.random.randrange(2**32))

    def normal(self, *size: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(*size, generator=self._generator).to(self.device)

    def uniform(self, *size: int) -> Tensor:
        """Numbers in [0, 1)."""
        return torch.rand(*size, generator=self._generator).to(self.device)

    def integers(self, high: int, *size: int) -> Tensor:
        """Integers below ``high``."""
        return torch.randint(high, size, generator=self._generator).to(self.device)

    def lengths(self) -> list[int]:
        """A layout of a few responses; some are empty, or one token long."""
        random = self.random
        return [random.choice((0, 1, random.randrange(2, 12), random.randrange(2, 70))) for _ in range(6)] + [9]

    def samples(
        self, *, specials: bool = True, lengths: list[int] | None = None, around: list[Tensor] | None = None
    ) -> dict[str, list[Tensor]]:
        """Log-probs of all policies, advantages, values and masks, a tensor per response."""
        lengths, scale = lengths or self.lengths(), self.random.choice((0.001, 0.01, 0.1, 0.5))
        found: dict[str, list[Tensor]] = defaultdict(list)
        masks = self.random.choice(((1.0,), (0.0, 1.0, 1.0), (0.0, 0.5, 1.0, 2.0)))
        for place, length in enumerate(lengths):
            behavior = around[place] if around else -self.uniform(length).mul(9).exp_().log1p_()
            for policy in POLICIES:
                values = behavior if policy == "behavior" else behavior + scale * self.normal(length)
                if specials:
                    chance, which = self.uniform(length), self.integers(len(SPECIAL), length)
                    values = torch.where(chance < 0.03, torch.tensor(SPECIAL, device=self.device)[which], values)
                found[policy].append(values)
            found["advantages"].append(self.normal(1).expand(length) + 0.1 * self.normal(length))
            found["state_values"].append(self.uniform(length))
            mask = torch.tensor(masks, device=self.device)[self.integers(len(masks), length)]
            found["masks"].append(mask if 0.5 in masks else mask.int())
        return found


def flat(tensors: list[Tensor]) -> Tensor:
    """One after the other."""
    return torch.cat(tensors)


def quiet(keys: Mapping[str, Any]) -> dict[str, Any]:
    """With metrics: all of them, with warnings instead of errors, and no warning about the rejected share."""
    corrects = bool(keys.get("use_tis"))
    found = QUIET if corrects or keys.get("get_mismatch_metrics") else {}
    return {**found, **({"mis_max_reject_fraction": 1.0} if corrects else {}), **keys}


def attempt(found: Found, name: str, call: Callable[[], Any]) -> None:
    """Note what a call gives, warns of or refuses."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            note(found, name, call())
        except (ValueError, TypeError, RuntimeError, NotImplementedError, SystemExit) as error:
            found[f"{name} refused"] = f"{type(error).__name__}: {error}"
    said = [str(each.message) for each in caught if "mis_ext" in each.filename or __file__ == each.filename]
    found[f"{name} warned"] = "\n".join(said)


def note(found: Found, name: str, value: Any) -> None:
    """Note a number, or every number in what holds several."""
    if isinstance(value, Tensor):
        found[name] = value.detach().cpu().clone()
    elif isinstance(value, Mapping):
        found[f"{name} names"] = ", ".join(map(str, value))
        for key, each in value.items():
            note(found, f"{name}.{key}", each)
    elif hasattr(value, "_asdict"):
        note(found, name, value._asdict())
    elif dataclasses.is_dataclass(value):
        note(found, name, {each.name: getattr(value, each.name) for each in dataclasses.fields(value)})
    elif isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            note(found, f"{name}[{place}]", each)
    elif isinstance(value, float):
        found[name] = torch.tensor(value, dtype=torch.float64)
    else:
        found[name] = str(value)


def with_gradient(loss: Tensor, by: Tensor, *more: Any) -> dict[str, Any]:
    """The loss, its gradient and the norm of that."""
    total = loss.sum()
    gradient = torch.autograd.grad(total, by)[0] if total.requires_grad else torch.zeros_like(by)
    return {"loss": loss, "gradient": gradient, "gradient norm": gradient.double().norm(), "more": more}


def methods(found: Found, draw: Callable[[str], Draw]) -> None:
    """Every published method, alone and as the whole loss, with its defaults and with drawn parameters."""
    for name, row in METHODS.items():
        for turn in range(3):
            drawn = draw(f"{name} {turn}")
            parameters = _parameters(row.defaults, drawn.random) if turn else {}
            samples = drawn.samples(specials=turn != 1)
            attempt(found, f"{name} {turn}", partial(_method, row, parameters, samples, drawn.device))
            keys = quiet({"mis_loss_method": {"name": name, **parameters}})
            attempt(found, f"{name} {turn} whole loss", partial(_whole_loss, keys, samples, drawn.device))


def _parameters(defaults: Mapping[str, Any], random: Random) -> dict[str, Any]:
    """Others than the defaults; some are not legal, which is said by both revisions."""
    return {
        name: value * random.choice((0.7, 0.9, 1.0, 1.1))
        for name, value in defaults.items()
        if isinstance(value, float) and math.isfinite(value)
    }


def _streams(samples: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    return {f"{policy}_logprobs": flat(samples[policy]) for policy in POLICIES}


def _method(row: Any, parameters: dict[str, Any], samples: dict[str, list[Tensor]], device: str) -> Any:
    layout = mis_ext.PackedLayout.whole([len(mask) for mask in samples["masks"]], device=device)
    streams = {f"{name}_T": values for name, values in _streams(samples).items()}
    current_T = streams["current_logprobs_T"].requires_grad_()
    result = row(**parameters)(
        **streams,
        advantages_T=flat(samples["advantages"]),
        state_values_T=flat(samples["state_values"]),
        response_mask_T=flat(samples["masks"]),
        layout=layout,
    )
    return with_gradient(result.loss_T, current_T, result)


def _whole_loss(keys: dict[str, Any], samples: dict[str, list[Tensor]], device: str, **more: Any) -> Any:
    streams = _streams(samples)
    current_T = streams["current_logprobs"].requires_grad_()
    result = mis_ext.policy_loss_from_log_probs(
        keys,
        **streams,
        advantages=flat(samples["advantages"]),
        state_values=flat(samples["state_values"]),
        response_mask=flat(samples["masks"]),
        layout=mis_ext.PackedLayout.whole([len(mask) for mask in samples["masks"]], device=device),
        **more,
    )
    return with_gradient(result.total, current_T, result)


BANDS: dict[str, tuple[float | None, float | None]] = {
    "ratio": (0.8, 1.25),
    "abs_log_ratio": (None, 0.2),
    "k2": (None, 0.05),
    "k3": (None, 0.05),
    "exp_abs_log_ratio": (None, 1.25),
    "probability_gain": (-0.2, 0.2),
    "probability_difference": (None, 0.1),
    "proximal_probability": (0.05, None),
    "behavior_probability": (0.05, None),
}


def flat_keys(random: Random) -> dict[str, Any]:
    """A configuration with the frameworks' keys."""
    level, mode = random.choice(("token", "sequence", "geometric")), random.choice((*mis_ext.BOUNDS,))
    bound = mis_ext.BOUNDS[mode]
    keys: dict[str, Any] = {"use_tis": True, "tis_level": level, "tis_mode": mode}
    keys |= {"tis_upper_bound": random.choice((1.2, 2.0, 5.0))} if bound.has_high else {}
    keys |= {"tis_lower_bound": random.choice((0.3, 0.9))} if bound.has_low else {}
    if random.random() < 0.5:
        low, high = random.choice(((0.5, 2.0), (0.9, 1.1), (0.0, 1.5)))
        keys |= {"use_rs": True, "rs_level": random.choice(("token", "sequence", "geometric"))}
        keys |= {"rs_lower_bound": low, "rs_upper_bound": high}
    vetoes = {"rs_veto_threshold": 0.01, "rs_veto_upper_threshold": 50.0, "rs_veto_probability": 1e-4}
    keys |= {name: value for name, value in vetoes.items() if random.random() < 0.2}
    if random.random() < 0.4:
        scope = random.choice(("micro_batch", "data_parallel"))
        # If nothing is rejected both are equal, and the second is an error.
        rejects = bound.rejects or "use_rs" in keys or not vetoes.keys().isdisjoint(keys)
        over = random.choice(("kept", "valid")) if rejects else "kept"
        keys |= {"tis_batch_normalize": True, "tis_normalize_scope": scope, "tis_normalize_over": over}
    keys |= {"mis_denominator": "kept"} if random.random() < 0.3 else {}
    return keys


def keys_with_gates(random: Random) -> dict[str, Any]:
    """A configuration with filters that have no key of their own."""
    gates = []
    for number in range(random.randrange(1, 4)):
        statistic = random.choice((*BANDS,))
        low, high = BANDS[statistic]
        reduce = random.choice(("token", "sum", "mean", "max", "min", "segment_sum", "segment_mean"))
        gate = {
            "statistic": statistic,
            "reduce": reduce,
            "action": random.choice(("reject", "zero")),
            "name": f"g{number}",
        }
        gates.append(gate | ({"low": low} if low is not None else {}) | ({"high": high} if high is not None else {}))
    found: dict[str, Any] = {"use_tis": True, "tis_level": "none"}
    found |= {"use_rs": True, "rs_lower_bound": 0.1, "rs_upper_bound": 9.0, "rs_gates": gates}
    if random.random() < 0.7:
        found |= {"tis_level": random.choice(("token", "sequence", "geometric")), "tis_upper_bound": 2.0}
        if random.random() < 0.5:
            found |= {
                "tis_batch_normalize": True,
                "tis_normalize_over": random.choice(("kept", "valid")),
                "tis_normalize_scope": random.choice(("micro_batch", "data_parallel")),
            }
    return found


def hook(found: Found, draw: Callable[[str], Draw]) -> None:
    """The function that slime and Miles call: presets, and drawn configurations, several calls each."""
    configs = {f"preset {name}": _preset(name) for name in mis_ext.list_presets()}
    for number in range(NUM_CONFIGS):
        random = draw(f"configuration {number}").random
        keys = quiet((keys_with_gates if number % 2 else flat_keys)(random))
        configs[f"drawn {number}"] = keys | {"calculate_per_token_loss": random.random() < 0.3}
    for name, keys in configs.items():
        args = Namespace(**keys, qkv_format="thd")
        drawn = draw(name)
        attempt(
            found, f"{name} prepared", lambda args=args, drawn=drawn: mis_ext.prepare_rollout(args, 0, _rollout(drawn))
        )
        for turn in range(2):
            attempt(found, f"{name} {turn}", partial(call_hook, args, drawn.samples(specials=turn > 0)))


def _preset(name: str) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        import_module("mis_ext.tools.cli").main(["presets", name])
    keys: dict[str, Any] = yaml.safe_load(printed.getvalue())
    return quiet({"use_tis": True} | keys)


def _rollout(drawn: Draw) -> dict[str, Any]:
    samples = drawn.samples(specials=False)
    return {
        "log_probs": samples["proximal"],
        "rollout_log_probs": samples["behavior"],
        "loss_masks": samples["masks"],
        "total_lengths": [len(mask) + 3 for mask in samples["masks"]],
        "response_lengths": [len(mask) for mask in samples["masks"]],
    }


def call_hook(args: Any, samples: dict[str, list[Tensor]], **more: Any) -> Any:
    """Loss, masks, metrics and the gradient of the loss that was handed over."""
    lengths = [len(mask) for mask in samples["masks"]]
    pg_loss = flat(samples["advantages"]).requires_grad_()
    loss, masks, metrics = mis_ext.compute_mis_weights_with_cp(
        args=args,
        pg_loss=pg_loss,
        train_log_probs=samples["proximal"],
        rollout_log_probs=samples["behavior"],
        loss_masks=samples["masks"],
        **{"total_lengths": [length + 3 for length in lengths], "response_lengths": lengths} | more,
    )
    return with_gradient(torch.where(loss.isfinite(), loss, 0.0), pg_loss, loss, masks, metrics)


KL = {"use_kl_loss": True, "kl_loss_coef": 0.3}
GATED = {"use_tis": True, "tis_upper_bound": 1.15, "use_rs": True, "rs_lower_bound": 0.8, "rs_upper_bound": 1.25}
LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "dual clip": {"eps_clip_c": 1.2},
    "entropy": {"entropy_coef": 0.1},
    **{f"{kind}": KL | {"kl_loss_type": kind} for kind in ("k1", "k2", "k3", "low_var_kl")},
    "unbiased k3": KL | {"kl_loss_type": "k3", "use_unbiased_kl": True},
    "unbiased kl, behavior": KL | {"kl_loss_type": "k3", "mis_loss_unbiased_kl": True},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.02},
    "gspo, gates": GATED | {"advantage_estimator": "gspo"},
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0},
    "tokens": {"calculate_per_token_loss": True, "entropy_coef": 0.1},
    "opsm": {"use_opsm": True, "opsm_delta": 0.01},
    "rollout log-probs": {"use_rollout_logprobs": True},
    "measured": {"use_tis": False, "get_mismatch_metrics": True},
    "gates, entropy, kl": GATED | KL | {"kl_loss_type": "k3", "entropy_coef": 0.1},
    "kept tokens": GATED | KL | {"mis_loss_kl_tokens": "kept", "mis_loss_entropy_tokens": "all", "entropy_coef": 0.1},
    **{f"mode {mode}": GATED | {"mis_loss_mode": mode} for mode in ("decoupled", "bypass", "reinforce")},
    "current": GATED | {"mis_loss_proximal": "current"},
    **{f"denominator {each}": GATED | {"mis_loss_denominator": each} for each in ("kept", "sequence")},
    "denominator constant": GATED | {"mis_loss_denominator": "constant", "mis_loss_constant": 30.0},
    "inplace": GATED | {"mis_loss_inplace": True},
    "temperature": {"rollout_temperature": 0.7, "entropy_coef": 0.1},
    "padded": GATED | {"qkv_format": "bshd"},
}


def losses(found: Found, draw: Callable[[str], Draw]) -> None:
    """The whole loss from logits, as slime, Miles and a loop of Megatron-Core call it: also the first gradient norm."""
    for host in ("slime", "miles", "megatron"):
        with running(host):
            for name, keys in LOSSES.items():
                for turn in range(2):
                    is_padded = keys.get("qkv_format") == "bshd"
                    batch, logits = _batch(draw(f"{name} {turn}"), is_padded=is_padded, specials=turn > 0)
                    attempt(found, f"{host} {name} {turn}", partial(_from_logits, host, keys, batch, logits))
    for name, keys in LOSSES.items():
        drawn = draw(f"{name} from log-probs")
        samples = drawn.samples()
        entropy = drawn.uniform(len(flat(samples["masks"])))
        attempt(found, f"log-probs {name}", partial(_whole_loss, quiet(keys), samples, drawn.device, entropy=entropy))


def _from_logits(host: str, keys: dict[str, Any], batch: dict[str, Any], logits: Tensor) -> Any:
    logits.requires_grad_()
    given = logits.clone()
    args = Namespace(**{"eps_clip": 0.1, "rollout_top_p": 1.0} | quiet(keys))
    if host != "megatron":
        loss, metrics = mis_ext.policy_loss(args, batch, given)
        return with_gradient(loss, logits, metrics)
    loss, number, metrics = mis_ext.make_loss_func(args, batch)(given)
    return with_gradient(loss, logits, number, metrics)


def _batch(drawn: Draw, *, is_padded: bool, specials: bool = False) -> tuple[dict[str, Any], Tensor]:
    lengths = [length or 1 for length in drawn.lengths()]
    totals = [length + drawn.random.randrange(1, 5) for length in lengths]
    tokens = [drawn.integers(VOCABULARY, total) for total in totals]
    rows = [drawn.normal(max(totals) if is_padded else total, VOCABULARY) for total in totals]
    around = [
        row[:total].log_softmax(-1)[total - length - 1 : -1].gather(-1, ids[-length:, None])[:, 0]
        for row, ids, total, length in zip(rows, tokens, totals, lengths, strict=True)
    ]
    samples = drawn.samples(lengths=lengths, specials=specials, around=around)
    names = {"log_probs": "proximal", "rollout_log_probs": "behavior", "ref_log_probs": "reference"}
    batch: dict[str, Any] = {key: samples[name] for key, name in names.items()}
    batch |= {"advantages": samples["advantages"], "loss_masks": samples["masks"]}
    batch |= {"unconcat_tokens": tokens, "total_lengths": totals, "response_lengths": lengths}
    if is_padded:
        batch["max_seq_lens"] = [max(totals)] * len(totals)
    return batch, torch.stack(rows) if is_padded else torch.cat(rows).unsqueeze(0)


@contextlib.contextmanager
def running(host: str) -> Iterator[None]:
    """The modules of a host by which mis_ext knows it, of one rank."""
    alone = types.SimpleNamespace(rank=0, size=1, group=None)
    state = types.SimpleNamespace(cp=alone, intra_dp=alone, tp=alone)
    contents: dict[str, dict[str, dict[str, Any]]] = {
        "slime": {"slime.backends.megatron_utils.loss": {"_LOG_PROB_CAPTURE": None}},
        "miles": {
            "miles.backends.training_utils.loss_hub.logit_processors": {},
            "miles.backends.training_utils.parallel": {"get_parallel_state": lambda: state},
        },
    }
    with _modules(contents.get(host, {})):
        yield


@contextlib.contextmanager
def _modules(contents: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Modules that stand for a host's, with their packages."""
    before = dict(sys.modules)
    for path in contents:
        for name in accumulate(path.split("."), "{}.{}".format):
            sys.modules.setdefault(name, types.ModuleType(name))
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, sys.modules[name])
    for path, names in contents.items():
        vars(sys.modules[path]).update(names)
    try:
        yield
    finally:
        for name in {path.split(".")[0] for path in contents}:
            for module in [each for each in sys.modules if each.split(".")[0] == name and each not in before]:
                del sys.modules[module]


def scoring(found: Found, draw: Callable[[str], Draw]) -> None:
    """Log-probs and entropy from logits, with their gradients."""
    for number in range(40):
        drawn = draw(str(number))
        choose = drawn.random.choice
        num, vocabulary = choose((0, 1, 7, 33)), choose((2, 11, 300, 1025))
        logits = (4 * drawn.normal(num, vocabulary)).to(choose((torch.float32, torch.float32, torch.bfloat16)))
        keywords: dict[str, Any] = {"temperature": choose((1.0, 0.7)), "entropy": choose(("none", "value", "gradient"))}
        token_T, rows = drawn.integers(vocabulary, num), drawn.uniform(num) < 0.7
        if choose((False, True)):
            keywords["row_T"], token_T = rows.nonzero()[:, 0], token_T[rows]
        if choose((False, False, True)) and num:
            ids, places = drawn.integers(vocabulary, 3 * len(token_T)), torch.arange(len(token_T), device=drawn.device)
            is_recorded_T = drawn.uniform(len(token_T)) < 0.8
            keywords["kept"] = mis_ext.KeptColumns(ids, places.repeat_interleave(3), is_recorded_T)
        attempt(found, str(number), partial(_scores, logits, token_T, keywords))


def _scores(logits: Tensor, token_T: Tensor, keywords: dict[str, Any]) -> Any:
    logits.requires_grad_()
    scores = mis_ext.score_tokens(logits, token_T, **keywords)
    total = scores.log_prob_T * torch.linspace(-1, 1, len(token_T), device=logits.device)
    if scores.entropy_T is not None and keywords["entropy"] == "gradient":
        total = total + 0.3 * scores.entropy_T
    return with_gradient(torch.where(total.isfinite(), total, 0.0), logits, scores)


CORRECTIONS = ({"tis_upper_bound": 1.3}, {"use_rs": True, "rs_lower_bound": 0.8, "rs_upper_bound": 1.25})
WHOLE = ({"mis_loss_method": "decoupled_token_tis"}, {"mis_loss_method": "gspo"}, {"mis_loss_method": "reinforce"})


def adapters(found: Found, draw: Callable[[str], Draw]) -> None:
    """The seven other frameworks' entries, with what of them is looked at."""
    for name, entry in ADAPTERS.items():
        for number, keys in enumerate((*CORRECTIONS, *WHOLE)):
            drawn = draw(f"{name} {number}")
            rows = [
                torch.stack(each) for each in (drawn.samples(lengths=[12] * 5, specials=False)[key] for key in PADDED)
            ]
            batch = dict(zip(PADDED, rows, strict=True))
            batch["masks"] = (batch["masks"] > 0).to(batch["masks"].dtype)
            attempt(found, f"{name} {number}", partial(entry, quiet({"use_tis": True} | keys), batch))
    for number, keys in enumerate(CORRECTIONS):
        drawn = draw(f"padded {number}")
        samples = drawn.samples(lengths=[12] * 5)
        streams = {f"{name}_logprobs": torch.stack(samples[name]) for name in ("proximal", "behavior")}
        given = streams | {"response_mask": torch.stack(samples["masks"])}
        attempt(found, f"padded {number}", partial(mis_ext.correct_padded, quiet({"use_tis": True} | keys), **given))
        lists = {"train_log_probs": samples["proximal"], "rollout_log_probs": samples["behavior"]}
        lists |= {"loss_masks": samples["masks"]}
        attempt(
            found, f"lists {number}", partial(mis_ext.compute_mis_weights, quiet({"use_tis": True} | keys), **lists)
        )


PADDED = (*POLICIES, "advantages", "masks")


def _verl(keys: dict[str, Any], batch: dict[str, Tensor]) -> Any:
    registry: dict[str, Any] = {"vanilla": None}
    algorithms = {"POLICY_LOSS_REGISTRY": registry}
    algorithms["register_policy_loss"] = lambda name: partial(registry.__setitem__, name)
    proto = types.SimpleNamespace(from_dict=lambda tensors: tensors)
    with _modules(
        {
            "verl.protocol": {"DataProto": proto},
            "verl.trainer.ppo.core_algos": algorithms,
            "verl.trainer.ppo.rollout_corr_helper": {},
        }
    ):
        import_module("mis_ext.hosts.verl").register(keys)
        helper = sys.modules["verl.trainer.ppo.rollout_corr_helper"]
        corrected = vars(helper)["compute_rollout_correction_and_rejection_mask"](
            batch["proximal"], batch["behavior"], batch["masks"]
        )
    if "mis_ext" not in registry:
        return corrected
    current = batch["current"].requires_grad_()
    found = []
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        loss, metrics = registry["mis_ext"](
            config=Namespace(global_batch_info={"dp_size": 2, "batch_num_tokens": 100, "global_batch_size": 14}),
            loss_agg_mode=mode,
            old_log_prob=batch["proximal"],
            log_prob=current,
            advantages=batch["advantages"],
            response_mask=batch["masks"],
            rollout_is_weights=batch["behavior"],
        )
        found.append(with_gradient(loss, current, metrics))
    return found


def _trl(keys: dict[str, Any], batch: dict[str, Tensor]) -> Any:
    inputs = {
        "completion_mask": batch["masks"],
        "old_per_token_logps": batch["proximal"],
        "sampling_per_token_logps": batch["behavior"],
        "ref_per_token_logps": batch["reference"],
        "advantages": batch["advantages"][:, 0],
        "num_items_in_batch": batch["masks"].sum(),
    }
    current = batch["current"].requires_grad_()

    class Host:
        def __init__(self) -> None:
            self.loss_type, self.beta, self.use_vllm, self.rollout_func = "dapo", 0.0, True, None
            self.vllm_importance_sampling_correction = True
            self.args = types.SimpleNamespace(
                delta=None, generation_kwargs=None, use_bias_correction_kl=True, steps_per_generation=2
            )
            self.max_completion_length, self.current_gradient_accumulation_steps = 12, 2
            self.accelerator = types.SimpleNamespace(num_processes=1, reduce=lambda numbers, _: numbers)
            self.model = types.SimpleNamespace(training=True)
            self._metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}

        def _generate_and_score_completions(self, _: Any) -> dict[str, Any]:
            return inputs

        def _get_per_token_logps_and_entropies(self) -> Any:
            return current, None

        def _compute_loss(self, *_: Any) -> Tensor:
            self._get_per_token_logps_and_entropies()
            return current.sum()

    trainer_of: Any = import_module("mis_ext.hosts.trl").MisTrainer
    trainer = type("Trainer", (trainer_of, Host), {})(mis_keys=keys)
    prepared = trainer._generate_and_score_completions(None)
    loss = trainer._compute_loss(None, inputs)
    return with_gradient(loss, current, prepared, dict(trainer._metrics["train"]))


def _nemo_rl(keys: dict[str, Any], batch: dict[str, Tensor]) -> Any:
    def pad(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (1, 0))

    streams = {"prev_logprobs": "proximal", "generation_logprobs": "behavior", "reference_policy_logprobs": "reference"}
    data = {name: pad(batch[key]) for name, key in streams.items()} | {"advantages": pad(batch["advantages"])}
    data |= {"token_mask": pad(batch["masks"]), "sample_mask": torch.ones_like(batch["masks"][:, 0])}
    current = batch["current"].requires_grad_()
    found = []
    for level in ("token_level", "sequence_level"):
        host = types.SimpleNamespace(loss_type=types.SimpleNamespace(value=level), force_on_policy_ratio=False)
        ours = import_module("mis_ext.hosts.nemo_rl").MisLoss(_Callable(host, lambda *_: (None, {})), keys)
        loss, metrics = ours(current, data, torch.tensor(14.0), torch.tensor(100.0))
        found.append(with_gradient(loss, current, metrics))
    return found


class _Callable:
    """A function with the attributes of ``host``."""

    def __init__(self, host: Any, function: Callable[..., Any]) -> None:
        self.function = function
        vars(self).update(vars(host))

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.function(*given, **named)


def _skyrl(keys: dict[str, Any], batch: dict[str, Tensor]) -> Any:
    registered: dict[str, Any] = {}
    registry = types.SimpleNamespace(list_available=lambda: [*registered], unregister=registered.pop)
    path = "skyrl.backends.skyrl_train.utils.ppo_utils"
    register = {"register_policy_loss": lambda name: partial(registered.__setitem__, name)}
    with _modules({path: {"PolicyLossRegistry": registry} | register}):
        import_module("mis_ext.hosts.skyrl").register(keys)
    current = batch["current"].requires_grad_()
    streams = current, batch["proximal"], batch["advantages"]
    loss, metrics = registered["mis_ext"](*streams, None, batch["masks"], batch["behavior"])
    return with_gradient(loss, current, metrics)


def _openrlhf(keys: dict[str, Any], batch: dict[str, Tensor]) -> Any:
    current, found = batch["current"].requires_grad_(), []
    streams = current, batch["proximal"], batch["advantages"], batch["masks"], batch["behavior"]
    for of_tokens in (True, False):
        host = _Callable(types.SimpleNamespace(token_level_loss=of_tokens), lambda *_, **__: (None, 0.0, 0.0))
        ours = import_module("mis_ext.hosts.openrlhf").MisLoss(host, keys)
        for sizes in ({}, {"dp_size": 2, "batch_num_tokens": 100.0, "global_batch_size": 14.0}):
            loss, *more = ours(*streams, **sizes)
            found.append(with_gradient(loss, current, more, ours.metrics))
    return found


def _roll(keys: dict[str, Any], batch: dict[str, Tensor]) -> Any:
    path = "roll.utils.train_infer_corrections"
    with _modules({path: {}}):
        import_module("mis_ext.hosts.roll").register(keys)
        correct = vars(sys.modules[path])["compute_train_infer_correction"]
    config = types.SimpleNamespace(is_weight=types.SimpleNamespace(enabled=True))
    return correct(config, batch["masks"], batch["proximal"], batch["behavior"])


def _prime_rl(keys: dict[str, Any], batch: dict[str, Tensor]) -> Any:
    found = []
    with _modules({"prime_rl.trainer.rl.loss": {"LossOutputs": Namespace}}):
        for row in range(2):
            current = batch["current"][row].detach().requires_grad_()
            inputs = types.SimpleNamespace(
                trainer_logprobs=current,
                inference_logprobs=batch["behavior"][row],
                ref_logprobs=batch["reference"][row],
                advantages=batch["advantages"][row],
                loss_mask=batch["masks"][row] > 0,
                loss_weights=None if row else torch.linspace(0.5, 2.0, 12, device=current.device),
            )
            outputs = import_module("mis_ext.hosts.prime_rl").loss(inputs, keys=keys)
            found.append(with_gradient(outputs.loss, current, outputs.metrics))
    return found


ADAPTERS: dict[str, Callable[[dict[str, Any], dict[str, Tensor]], Any]] = {
    "verl": _verl,
    "trl": _trl,
    "nemo_rl": _nemo_rl,
    "skyrl": _skyrl,
    "openrlhf": _openrlhf,
    "roll": _roll,
    "prime_rl": _prime_rl,
}


NOT_OF_A_DUMP = ("grpo_k3", "grpo_k2", "grpo_unbiased_kl", "drift_control")
"""They look at log-probs of a reference policy, or at state values, which no dump holds."""


def documents(found: Found, draw: Callable[[str], Draw]) -> None:
    """The output of the commands with ``--json``: reports, audits and comparisons of drawn dumps, explanations."""
    plants: dict[str, Callable[[dict[str, list[Tensor]]], dict[str, list[Tensor]]]] = {
        "noise": lambda samples: samples,
        "temperature": lambda samples: samples | {"proximal": [1.2 * each for each in samples["proximal"]]},
        "shifted": lambda samples: samples | {"behavior": [each.roll(1) for each in samples["proximal"]]},
        "copied": lambda samples: samples | {"behavior": samples["proximal"]},
        "broken": lambda samples: samples | {"behavior": [torch.zeros_like(each) for each in samples["proximal"]]},
    }
    for name, plant in plants.items():
        drawn = draw(name)
        rows = []
        for step in range(3):
            samples = plant(drawn.samples(specials=False, lengths=[drawn.random.randrange(1, 90) for _ in range(12)]))
            rows += [_row(samples, place, step) for place in range(12)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        _document(found, "audit", f"{name}.jsonl")
        _document(found, "report", f"{name}.jsonl", "--preset", "geometric_mis", "--against", "noise.jsonl")
    tried = [name for name in METHODS if name not in NOT_OF_A_DUMP]
    _document(found, "report", "noise.jsonl", *(word for name in tried for word in ("--method", name)))
    for name in dict.fromkeys((*mis_ext.list_presets(), *METHODS)):
        _document(found, "explain", name, "--k3", "0.01")
    for name in mis_ext.list_presets():
        _document(found, "presets", name)
    for name in METHODS:
        _document(found, "methods", name)
    Path("verl.yaml").write_text(
        "rollout_is: token\nrollout_is_threshold: 3.0\nrollout_rs: seq_mean_k3\nrollout_rs_threshold: 0.02\n"
    )
    _document(found, "convert", "verl", "verl.yaml")


def _row(samples: dict[str, list[Tensor]], place: int, step: int) -> dict[str, Any]:
    names = {"log_probs": "proximal", "rollout_log_probs": "behavior", "loss_mask": "masks", "advantages": "advantages"}
    row: dict[str, Any] = {key: samples[name][place].tolist() for key, name in names.items()}
    row["loss_mask"] = [int(value > 0) for value in row["loss_mask"]]
    return row | {
        "rollout_id": step,
        "group_id": place // 4,
        "reward": float(place % 3),
        "weight_versions": [str(step)],
    }


def _document(found: Found, *arguments: str) -> None:
    def printed() -> Any:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
            try:
                import_module("mis_ext.tools.cli").main([*arguments, "--json"])
            except SystemExit as left:
                raise ValueError(error.getvalue()) from left
        return json.loads(out.getvalue())

    attempt(found, " ".join(arguments[:2]), lambda: dict(_numbers_and_text(printed())))


def _numbers_and_text(content: Any, path: str = "", depth: int = 2) -> Iterator[tuple[str, Any]]:
    """By key, as far down as ``depth``: every number below it, and everything else."""
    if isinstance(content, dict) and depth:
        for key, each in content.items():
            yield from _numbers_and_text(each, f"{path}.{key}", depth - 1)
        return
    numbers: list[float] = []
    text = json.dumps(content, default=str)
    # Only numbers with a point or an exponent are results of arithmetic in floats.
    text = re.sub(r"-?\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)", lambda each: numbers.append(float(each[0])) or "#", text)
    yield f"{path} text", text
    yield f"{path} numbers", torch.tensor(numbers, dtype=torch.float64)


def ranks(found: Found, draw: Callable[[str], Draw], *, seed: int) -> None:
    """Two ranks over gloo that share sequences, a batch or a vocabulary."""
    del draw
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_rank, (seed, folder), nprocs=2)
        for rank in range(2):
            of_rank = unpacked(torch.load(Path(folder) / f"{rank}.pt", weights_only=True))
            found |= {f"rank {rank} {name}": value for name, value in of_rank.items()}


def _rank(rank: int, seed: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    found: Found = {}
    group: Any = dist.group.WORLD
    shared = {"cp_rank": rank, "cp_size": 2}
    groups = mis_ext.Groups(**shared, cp_group=group)
    for name in METHODS:
        drawn = Draw(seed, f"ranks {name}", "cpu")
        samples = drawn.samples(specials=False)
        totals = [len(mask) + 3 for mask in samples["masks"]]
        own = local(samples, totals, rank)
        layout = mis_ext.PackedLayout.context_parallel([*map(len, samples["masks"])], total_lengths=totals, **shared)
        attempt(found, f"{name} cp", partial(_method_of_rank, name, own, layout, cp_group=group))
        halves = {key: values[rank::2] for key, values in samples.items()}
        layout = mis_ext.PackedLayout.whole([*map(len, halves["masks"])])
        attempt(found, f"{name} dp", partial(_method_of_rank, name, halves, layout, dp_group=group))
    alone = types.SimpleNamespace(rank=0, size=1, group=None)
    here = types.SimpleNamespace(rank=rank, size=2, group=group)
    for number in range(40):
        random = Random(f"{seed} ranks {number}")
        keys = quiet((keys_with_gates if number % 2 else flat_keys)(random))
        args = Namespace(**keys, qkv_format="thd")
        samples = Draw(seed, f"ranks {number}", "cpu").samples()
        totals = [len(mask) + 3 for mask in samples["masks"]]
        state = types.SimpleNamespace(cp=here, intra_dp=alone, effective_dp=alone, tp=alone)
        own = local(samples, totals, rank) | {"masks": samples["masks"]}
        lengths = {"total_lengths": totals, "parallel_state": state, "max_seq_lens": None}
        attempt(found, f"hook {number} cp", partial(call_hook, args, own, **lengths))
        halves = {key: values[rank::2] for key, values in samples.items()}
        state = types.SimpleNamespace(cp=alone, intra_dp=here, effective_dp=here, tp=alone)
        args = Namespace(**keys, qkv_format="thd")
        attempt(found, f"hook {number} dp", partial(call_hook, args, halves, parallel_state=state, max_seq_lens=None))
    for name, keys in LOSSES.items():
        if "qkv_format" not in keys:
            batch, logits = _batch(Draw(seed, f"ranks {name}", "cpu"), is_padded=False)
            attempt(found, f"loss {name} cp", partial(_loss_of_rank, keys, batch, logits, rank, groups))
    for number in range(6):
        drawn = Draw(seed, f"ranks scoring {number}", "cpu")
        logits, token_T = drawn.normal(9, 24), drawn.integers(24, 9)
        own_logits = logits.chunk(2, -1)[rank].clone()
        keywords = {"entropy": "gradient", "temperature": 0.7, "tp_group": group, "tp_rank": rank}
        attempt(found, f"scoring {number} tp", partial(_scores, own_logits, token_T, keywords))
    torch.save(packed(found), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def positions(total: int, rank: int) -> list[int]:
    """Of a sequence cut in four: the first and the last piece on the first rank, those between on the second."""
    piece = math.ceil(total / 4)
    return [*range(rank * piece, (rank + 1) * piece), *range((3 - rank) * piece, (4 - rank) * piece)]


def local(samples: dict[str, list[Tensor]], totals: list[int], rank: int) -> dict[str, list[Tensor]]:
    """The response tokens whose logits lie on a rank, of which each scores the next token."""
    found = {}
    for key, values in samples.items():
        found[key] = []
        for each, total in zip(values, totals, strict=True):
            places = [position + 1 - (total - len(each)) for position in positions(total, rank)]
            found[key].append(each[[place for place in places if 0 <= place < len(each)]])
    return found


def _method_of_rank(name: str, samples: dict[str, list[Tensor]], layout: Any, **groups: Any) -> Any:
    streams = {f"{key}_T": values for key, values in _streams(samples).items()}
    current_T = streams["current_logprobs_T"].requires_grad_()
    numbers = {f"{key}_T": flat(samples[key]) for key in ("advantages", "state_values")}
    mask_T = flat(samples["masks"])
    result = METHODS[name]()(**streams, **numbers, response_mask_T=mask_T, layout=layout, **groups)
    return with_gradient(result.loss_T, current_T, result)


def _loss_of_rank(keys: dict[str, Any], batch: dict[str, Any], logits: Tensor, rank: int, groups: Any) -> Any:
    totals = batch["total_lengths"]
    names = ("log_probs", "rollout_log_probs", "ref_log_probs", "advantages")
    own = batch | local({name: batch[name] for name in names}, totals, rank)
    rows = []
    for each, total in zip(logits[0].split(totals), totals, strict=True):
        padded = torch.nn.functional.pad(each, (0, 0, 0, 4 * math.ceil(total / 4) - total))
        rows.append(padded[positions(total, rank)])
    mine = torch.cat(rows).unsqueeze(0).requires_grad_()
    args = Namespace(**{"eps_clip": 0.1} | quiet(keys))
    loss, number, metrics = mis_ext.make_loss_func(args, own, groups=groups)(mine.clone())
    return with_gradient(loss, mine, number, metrics)


PARTS: dict[str, Callable[..., None]] = {
    "methods": methods,
    "hook": hook,
    "losses": losses,
    "scoring": scoring,
    "adapters": adapters,
    "documents": documents,
    "ranks": ranks,
}
OF_A_CPU = ("documents", "ranks")


def main() -> None:
    """Compute everything, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS])
    options = parser.parse_args()
    file, package = options.file.resolve(), Path(str(mis_ext.__file__)).parent
    torch.set_num_threads(1)
    everything: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for part in options.parts:
            if options.device == "cuda" and part in OF_A_CPU:
                continue
            found: Found = {}
            more = {"seed": options.seed} if part == "ranks" else {}
            PARTS[part](found, lambda name, part=part: Draw(options.seed, f"{part} {name}", options.device), **more)
            everything |= {f"{part}: {name}": value for name, value in found.items()}
        os.chdir(package)
    others = [
        module.__file__
        for name, module in sys.modules.items()
        if re.match(r"mis_ext(\.|$)", name) and not Path(str(module.__file__)).is_relative_to(package)
    ]
    assert not others, f"modules of another copy: {others}"
    torch.save({"cpu": torch.backends.cpu.get_cpu_capability(), **packed(everything)}, file)


def packed(found: Found) -> dict[str, Any]:
    """The same in a few large tensors: a file of a hundred thousand small ones takes minutes."""
    tensors: dict[str, list[Tensor]] = defaultdict(list)
    rows: dict[str, Any] = {}
    for name, value in found.items():
        rows[name] = value
        if isinstance(value, Tensor):
            kind = str(value.dtype)
            rows[name] = (kind, [*value.shape])
            tensors[kind].append(value.reshape(-1))
    return {"rows": rows, "tensors": {kind: torch.cat(each) for kind, each in tensors.items()}}


def unpacked(content: Mapping[str, Any]) -> Found:
    """The inverse of :func:`packed`."""
    begin: dict[str, int] = defaultdict(int)
    found: Found = {}
    for name, value in content["rows"].items():
        found[name] = value
        if isinstance(value, tuple):
            kind, shape = value
            end = begin[kind] + math.prod(shape)
            found[name], begin[kind] = content["tensors"][kind][begin[kind] : end].view(shape), end
    return found


if __name__ == "__main__":
    main()
