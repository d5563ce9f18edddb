# SPDX-License-Identifier: Apache-2.0
"""slime's and Miles' own loss functions, from checkouts of their public code; ray alone is a stand-in."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from scoring_work import Part
from torch import Tensor
from workload import World

from mis_ext.hosts.groups import initialized_megatron

MODULES = {"slime": "slime.backends.megatron_utils.loss", "miles": "miles.backends.training_utils.loss"}
SEEN_BY_MIS_EXT = {
    "slime": "slime.backends.megatron_utils.loss",
    "miles": "miles.backends.training_utils.loss_hub.logit_processors",
}
"""By these modules ``mis_ext`` knows which host a process is."""
EXAMPLES = {
    "slime": "examples/train_infer_mismatch_helper/mis.py",
    "miles": "examples/infra_features/train_infer_mismatch_helper/mis.py",
}
ARGUMENTS = {
    "advantage_estimator": "grpo",
    "allgather_cp": False,
    "calculate_per_token_loss": False,
    "custom_loss_function_path": None,
    "custom_pg_loss_reducer_function_path": None,
    "custom_tis_function_path": None,
    "entropy_coef": 0.01,
    "eps_clip": 0.2,
    "eps_clip_c": None,
    "eps_clip_high": 0.28,
    "get_mismatch_metrics": False,
    "kl_loss_coef": 0.01,
    "kl_loss_type": "k3",
    "log_probs_chunk_size": -1,
    "loss_type": "policy_loss",
    "observe_training_entropy": True,
    "opsm_delta": 1e-4,
    "qkv_format": "thd",
    "recompute_loss_function": False,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "skip_actor_forward_only": False,
    "tis_clip": 2.0,
    "tis_clip_low": 0,
    "true_on_policy_mode": False,
    "use_dynamic_global_batch_size": False,
    "use_kl_loss": True,
    "use_opsm": False,
    "use_rollout_logprobs": False,
    "use_tis": False,
    "use_unbiased_kl": False,
}
"""PPO clip, entropy and a k3 penalty in the loss."""
NEEDED_BY_EXAMPLES = ("tis_lower_bound", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold")


def host_args(keys: dict[str, Any]) -> argparse.Namespace:
    """The frameworks' ``args`` with keys of a YAML file set on them."""
    return argparse.Namespace(**ARGUMENTS | dict.fromkeys(NEEDED_BY_EXAMPLES) | keys)


class Host(NamedTuple):
    """A host's own functions.

    ``loss(args, batch, logits)``: its ``loss_function``: the scaled loss, and its dictionary of names and values.
    ``scores(logits [T, V], token_T, with_entropy)``: its log-probs and entropy. ``example``: where its example's hook
    can be loaded from, or None.
    """

    name: str
    loss: Callable[[argparse.Namespace, dict[str, Any], Tensor], tuple[Tensor, dict[str, Any]]]
    scores: Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
    example: str | None


class _Stub(types.ModuleType):
    """Replacement for ray, which Miles imports only for decorators and annotations here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **_: arguments[0] if arguments and callable(arguments[0]) else lambda f: f


def load_hosts(folders: dict[str, Path], world: World, *, tp_size: int = 1, cp_size: int = 1) -> dict[str, Host]:
    """The frameworks whose folders are given, with their groups of this process.

    A folder is a checkout's root, in which ``slime/`` or ``miles/`` lies.
    """
    if not dist.is_initialized():
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    warnings.simplefilter("ignore")
    _initialize_megatron(tp_size, cp_size)
    makers = {"slime": _slime, "miles": _miles}
    hosts = {}
    for name, folder in folders.items():
        sys.path.insert(0, str(folder.resolve()))
        hosts[name] = makers[name](importlib.import_module(_needed(name)))
        hosts[name] = hosts[name]._replace(example=_example(name, folder))
    return hosts


def _needed(name: str) -> str:
    if name == "miles" and importlib.util.find_spec("ray") is None:
        sys.modules["ray"] = _Stub("ray")
    return MODULES[name]


def _initialize_megatron(tp_size: int, cp_size: int) -> None:
    from megatron.core import mpu

    if not mpu.model_parallel_is_initialized():
        # Gloo looks for the machine's name, which a machine without a network may not have.
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=tp_size, context_parallel_size=cp_size, create_gloo_process_groups=False
        )


def vocabulary_part() -> Part:
    """This rank among Megatron-Core's tensor-parallel ones, where it is initialized."""
    megatron = initialized_megatron()
    if megatron is None or megatron.get_tensor_model_parallel_world_size() == 1:
        return Part()
    rank, size = megatron.get_tensor_model_parallel_rank(), megatron.get_tensor_model_parallel_world_size()
    return Part(rank, size, megatron.get_tensor_model_parallel_group())


def _slime(module: Any) -> Host:
    from megatron.core import mpu

    functions = importlib.import_module("slime.utils.ppo_utils")

    def loss(args: argparse.Namespace, batch: dict[str, Any], logits: Tensor) -> tuple[Tensor, dict[str, Any]]:
        found, _, log = module.loss_function(args, batch, 1, len(batch["response_lengths"]), logits)
        return found, log

    def scores(logits: Tensor, token_T: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        group = mpu.get_tensor_model_parallel_group()
        found, entropy_T = functions.calculate_log_probs_and_entropy(
            logits, token_T, group, with_entropy=with_entropy, with_entropy_grad=with_entropy
        )
        return found.squeeze(-1), entropy_T

    return Host("slime", loss, scores, None)


def _miles(module: Any) -> Host:
    from megatron.core import mpu

    parallel = importlib.import_module("miles.backends.training_utils.parallel")
    functions = importlib.import_module("miles.backends.training_utils.loss_hub.math_utils")
    info = importlib.import_module("miles.utils.ft_utils.process_group_utils").GroupInfo

    def group_info(group: Any) -> Any:
        return info(rank=dist.get_rank(group), size=dist.get_world_size(group), group=group)

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    dp, dp_cp = mpu.get_data_parallel_group(), mpu.get_data_parallel_group(with_context_parallel=True)
    parallel.set_parallel_state(
        parallel.ParallelState(
            **{name: group_info(alone) for name in ("pp", "ep", "etp", "indep_dp")},
            tp=group_info(mpu.get_tensor_model_parallel_group()),
            cp=group_info(mpu.get_context_parallel_group()),
            intra_dp=group_info(dp),
            intra_dp_cp=group_info(dp_cp),
        )
    )

    def loss(args: argparse.Namespace, batch: dict[str, Any], logits: Tensor) -> tuple[Tensor, dict[str, Any]]:
        samples = len(batch["response_lengths"])
        found, _, log = module.loss_function(args, batch, 1, logits, True, samples)
        return found, log

    def scores(logits: Tensor, token_T: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        found, entropy_T = functions.calculate_log_probs_and_entropy(
            logits, token_T, mpu.get_tensor_model_parallel_group(), with_entropy=with_entropy
        )
        return found.squeeze(-1), entropy_T

    return Host("miles", loss, scores, None)


def _example(name: str, folder: Path) -> str | None:
    file = folder / EXAMPLES[name]
    if not file.exists():
        return None
    # Both frameworks and this repository have a package "examples".
    module_name = f"example_of_{name}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[module_name] = module
    return f"{module_name}.compute_mis_weights_with_cp"


@contextmanager
def in_process_of(host: Host) -> Iterator[None]:
    """For ``mis_ext`` this process is that host's, although the other's modules are loaded too."""
    hidden = [module for name, module in SEEN_BY_MIS_EXT.items() if name != host.name and module in sys.modules]
    modules = {name: sys.modules.pop(name) for name in hidden}
    try:
        yield
    finally:
        sys.modules.update(modules)


@contextmanager
def without_rounding_to_bfloat16() -> Iterator[None]:
    """Megatron-Core's fused cross entropy rounds the gradient to bfloat16, whatever the logits are; here it does not.

    Miles takes its log-probs from there. The comparison of gradients looks at everything but this one rounding.
    """
    module = importlib.import_module("megatron.core.fusions.fused_cross_entropy")
    plain = module.VocabParallelCrossEntropy

    def gradients(softmax: Tensor, grad_output: Tensor, target_mask: Tensor, masked_target_1d: Tensor) -> Tensor:
        grad_2d, rows, update, grad_input = plain.prepare_gradient_calculation_operands(softmax, target_mask)
        return plain.calculate_gradients(grad_2d, rows, masked_target_1d, update, grad_input, grad_output)

    before = module.calculate_gradients
    module.calculate_gradients = gradients
    try:
        yield
    finally:
        module.calculate_gradients = before
