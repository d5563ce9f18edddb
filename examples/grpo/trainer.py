# SPDX-License-Identifier: Apache-2.0
"""The trainer: a Megatron-Core model, its data-parallel wrapper, optimizer and forward-backward schedule."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mis_ext.onpolicy import RoutingLayout, replay_routing
from mis_ext.onpolicy.routing.routing_layout import LocalRouting

from .conversion import export_weights, load_weights, named_weights
from .cpu import megatron_device
from .distributed import Ranks
from .layout import ModelInputs, build_inputs
from .loss import PolicyBatch, Reducer, load_function, policy_loss
from .model import ModelShape, build_model, transformer_config
from .transfer import moved

# For fp16. Megatron-LM's own value, 2^32, would skip the first steps.
FIRST_LOSS_SCALE = 2.0**16


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The samples of one forward pass.

    Attributes:
        samples: Indices in the rank's rollout data.
        inputs: Input of the model.
        routing: The experts that the engine chose for them, if recorded.
    """

    samples: slice
    inputs: ModelInputs
    routing: LocalRouting | None = None


class Trainer:
    """Scores and trains on one data-parallel rank's share of a rollout."""

    def __init__(
        self, args: Namespace, shape: ModelShape, ranks: Ranks, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """Start from ``weights`` with transformers names, or from random weights."""
        self._args, self._shape, self._ranks = args, shape, ranks
        config = transformer_config(
            shape,
            context_parallel_size=ranks.cp_size,
            calculate_per_token_loss=args.calculate_per_token_loss,
            dtype=_dtype_of(args),
        )
        config.perform_initialization = weights is None
        config.finalize_model_grads_func = finalize_model_grads
        with megatron_device(ranks.device):
            self._model = DistributedDataParallel(
                config,
                DistributedDataParallelConfig(grad_reduce_in_fp32=True),
                self._build_model(config).to(device=ranks.device, dtype=config.params_dtype),
            )
        if weights is not None:
            load_weights(self._model.module, weights, shape)
        self._forward_backward, self._config = get_forward_backward_func(), config
        self.reset_optimizer(lr=args.warmup_lr)

    def _build_model(self, config: TransformerConfig) -> GPTModel:
        """Build the model on the CPU, for a subclass to change."""
        return build_model(self._shape, config, seed=self._args.seed)

    def reset_optimizer(self, *, lr: float) -> None:
        """Start a new phase with a new optimizer, because the second moments of the old one belong to another loss.

        For bf16 or fp16 weights it updates a float32 copy. In fp16 the loss is scaled, by less after non-finite
        gradients.
        """
        dtype = _dtype_of(self._args)
        config = OptimizerConfig(
            optimizer="adam",
            lr=lr,
            adam_beta2=self._args.adam_beta2,
            weight_decay=0.0,
            clip_grad=self._args.clip_grad,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            params_dtype=dtype,
            initial_loss_scale=FIRST_LOSS_SCALE,
        )
        with megatron_device(self._ranks.device):
            self._optimizer = get_megatron_optimizer(config, [self._model])
        if dtype == torch.float16:
            self._config.grad_scale_func = self._optimizer.scale_loss

    def micro_batches(self, data: dict[str, Any]) -> list[MicroBatch]:
        """Cut a rank's rollout data into micro-batches, each laid out for this context-parallel rank."""
        size, batches = self._args.micro_batch_size, []
        for start in range(0, len(data["tokens"]), size):
            samples = slice(start, start + size)
            inputs = build_inputs(
                data["tokens"][samples],
                data["response_lengths"][samples],
                max_seq_lens=data["max_seq_lens"][samples] if "max_seq_lens" in data else None,
                cp_rank=self._ranks.cp_rank,
                cp_size=self._ranks.cp_size,
                device=self._ranks.device,
            )
            batches.append(MicroBatch(samples=samples, inputs=inputs, routing=self._routing(data, samples, inputs)))
        return batches

    def score(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probs of this rank's response tokens, one tensor per sample, without gradient."""

        def step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Tensor]]:
            batch = next(iterator)
            return self._logits(model, batch), lambda logits, non_loss_data: self._log_probs(logits, batch)

        with torch.no_grad():
            log_probs = self._run(step, batches, forward_only=True, collect_non_loss_data=True)
        pieces = zip(batches, log_probs, strict=True)
        return [piece for batch, log_probs_T in pieces for piece in split_samples(log_probs_T, batch)]

    @torch.no_grad()
    def next_logits(self, sequences: Sequence[list[int]]) -> tuple[Tensor, list[int]]:
        """Return the logits of the token after each sequence that ends on this rank, and the indices of the sequences.

        Returns:
            Logits, ``[R, V]`` in float32, and the indices of these R sequences among all.
        """
        # The token to score is not known yet, so use any token.
        inputs = build_inputs(
            [torch.tensor([*sequence, 0]) for sequence in sequences],
            [1] * len(sequences),
            max_seq_lens=[max(map(len, sequences)) + 1] * len(sequences),
            cp_rank=self._ranks.cp_rank,
            cp_size=self._ranks.cp_size,
            device=self._ranks.device,
        )
        batch = MicroBatch(samples=slice(len(sequences)), inputs=inputs)
        with megatron_device(self._ranks.device):
            logits_RV = self._rows(self._logits(self._model, batch), batch)
        held = [place for place, index in enumerate(inputs.response_indices) if len(index)]
        return logits_RV.float(), held

    def own_tokens(self, responses: list[list[float]], batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Select the values of this rank's tokens from values of whole responses, one tensor per sample."""
        indices = [index for batch in batches for index in batch.inputs.response_indices]
        values = moved([torch.tensor(response) for response in responses], self._ranks.device)
        return [value[index] for value, index in zip(values, indices, strict=True)]

    def train(self, data: dict[str, Any], batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Make one optimizer step with the policy loss and return what it logged, averaged over all samples."""
        return self._step(data, batches, loss=partial(self._policy_loss, data))

    def imitate(self, data: dict[str, Any], batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Make one optimizer step towards the given responses."""
        return self._step(data, batches, loss=partial(self._imitation_loss, data))

    def weights(self) -> dict[str, Tensor]:
        """Return the current weights by transformers name, on the device. The next step changes them."""
        return named_weights(self._model.module, self._shape)

    def export_weights(self) -> dict[str, Tensor]:
        """Return the current weights by transformers name."""
        return export_weights(self._model.module, self._shape)

    def state_dict(self) -> dict[str, Any]:
        """Return the full state to continue training."""
        return {
            "model": self._model.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of ``state_dict``."""
        self._model.module.load_state_dict(state["model"])
        with megatron_device(self._ranks.device):
            self._optimizer.load_state_dict(state["optimizer"])

    def _logits(self, model: torch.nn.Module, batch: MicroBatch) -> Tensor:
        inputs = batch.inputs
        return model(inputs.tokens, inputs.positions, None, packed_seq_params=inputs.packed_seq_params)

    def _rows(self, logits: Tensor, batch: MicroBatch) -> Tensor:
        """Return the logits that score response tokens, ``[T, V]``."""
        return logits.flatten(0, 1)[batch.inputs.logit_index_R]

    def _log_probs(self, logits: Tensor, batch: MicroBatch) -> Tensor:
        """Return the log-probs of the response tokens under the sampling temperature, ``[T]``."""
        rows_TV = self._rows(logits, batch).float() / self._args.rollout_temperature
        return rows_TV.log_softmax(-1).gather(-1, batch.inputs.target_R[:, None]).squeeze(-1)

    def _policy_loss(self, data: dict[str, Any], batch: MicroBatch, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        samples = batch.samples
        indices = batch.inputs.response_indices
        advantages = [
            torch.full((len(index),), advantage, device=self._ranks.device)
            for index, advantage in zip(indices, data["advantages"][samples], strict=True)
        ]
        if self._args.loss_type == "custom_loss":
            return self._custom_loss(data, batch, logits, advantages)
        policy_batch = PolicyBatch(
            train_log_probs=data["log_probs"][samples],
            rollout_log_probs=data["rollout_log_probs"][samples],
            advantages=advantages,
            loss_masks=data["loss_masks"][samples],
            response_indices=indices,
            total_lengths=data["total_lengths"][samples],
            response_lengths=data["response_lengths"][samples],
            max_seq_lens=data["max_seq_lens"][samples] if "max_seq_lens" in data else None,
        )
        return policy_loss(self._args, policy_batch, self._log_probs(logits, batch))

    def _custom_loss(
        self, data: dict[str, Any], batch: MicroBatch, logits: Tensor, advantages: list[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Call the user's full policy loss as slime and Miles do. Its metrics are on the CPU."""
        lists = ("log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths", "max_seq_lens")
        host_batch = {key: data[key][batch.samples] for key in lists if key in data}
        masks = host_batch["loss_masks"]
        host_batch |= {
            "unconcat_tokens": data["tokens"][batch.samples],
            "advantages": advantages,
            "rollout_mask_sums": torch.stack([mask.sum() for mask in masks]),
        }
        loss, logged = load_function(self._args.custom_loss_function_path)(
            self._args, host_batch, logits, self._reducer(masks, batch)
        )
        return loss, {name: value.to(loss.device) for name, value in logged.items()}

    def _reducer(self, masks: list[Tensor], batch: MicroBatch) -> Reducer:
        return Reducer.build(
            masks,
            original_masks=masks,
            response_indices=batch.inputs.response_indices,
            per_token=self._args.calculate_per_token_loss,
        )

    def _imitation_loss(
        self, data: dict[str, Any], batch: MicroBatch, logits: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -self._reducer(data["loss_masks"][batch.samples], batch)(self._log_probs(logits, batch))
        return loss, {"loss": loss.detach()}

    def _step(
        self,
        data: dict[str, Any],
        batches: Sequence[MicroBatch],
        *,
        loss: Callable[[MicroBatch, Tensor], tuple[Tensor, dict[str, Tensor]]],
    ) -> dict[str, float]:
        """Run forward and backward over the micro-batches and update the weights.

        Megatron divides a micro-batch's loss by their number and averages gradients over all ranks; the scale below
        undoes both and divides by the samples of the whole step. With ``calculate_per_token_loss`` it sums gradients
        and divides by the number of tokens that the loss functions report.
        """
        num_ranks = self._ranks.dp_size * self._ranks.cp_size
        num_samples = self._ranks.dp_size * sum(len(batch.inputs.response_indices) for batch in batches)
        per_token = self._args.calculate_per_token_loss
        scale = 1.0 if per_token else len(batches) * num_ranks / num_samples

        def step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(iterator)

            def loss_function(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                value, logged = loss(batch, logits)
                num_tokens = self._num_tokens(data, batch)
                return value * scale, num_tokens if per_token else torch.ones_like(num_tokens), logged

            return self._logits(model, batch), loss_function

        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        logged = self._run(step, batches, forward_only=False)
        self._forget_graph()
        with megatron_device(self._ranks.device):
            _, grad_norm, _ = self._optimizer.step()
        # None: in fp16 a gradient was not finite, and the step was skipped.
        grad_norm = math.nan if grad_norm is None else float(grad_norm)

        values = torch.stack([torch.stack(list(entry.values())) for entry in logged]).sum(0)
        count = sum(self._num_tokens(data, batch) for batch in batches).reshape(1)
        totals = torch.cat([values, count.to(values)])
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        means = totals[:-1] / (totals[-1] if per_token else num_samples)
        return dict(zip(logged[0], means.tolist(), strict=True)) | {"grad_norm": grad_norm}

    def _forget_graph(self) -> None:
        """Detach the tensors that expert dispatchers keep from the last pass.

        Their graph refers to the parameters, and the hooks of these refer to the model. Python does not see this cycle,
        and would never free a trained MoE model.
        """
        for module in self._model.modules():
            dispatcher = getattr(module, "token_dispatcher", None)
            for name, value in vars(dispatcher).items() if dispatcher is not None else ():
                if isinstance(value, Tensor):
                    setattr(dispatcher, name, value.detach())

    def _routing(self, data: dict[str, Any], samples: slice, inputs: ModelInputs) -> LocalRouting | None:
        """The engine's experts of a micro-batch in the order of this rank's routers."""
        if "rollout_routed_experts" not in data:
            return None
        lengths = data["total_lengths"][samples]
        ranks = {"cp_rank": self._ranks.cp_rank, "cp_size": self._ranks.cp_size}
        if inputs.packed_seq_params is None:
            layout = RoutingLayout.padded(lengths, padded_length=inputs.tokens.shape[1] * ranks["cp_size"], **ranks)
        else:
            layout = RoutingLayout.packed(lengths, **ranks)
        return layout.local(data["rollout_routed_experts"][samples])

    def _replayed(self, batches: Sequence[MicroBatch]) -> AbstractContextManager[None]:
        """With slime's ``--use-rollout-routing-replay``, every pass uses the engine's experts."""
        if not getattr(self._args, "use_rollout_routing_replay", False):
            return nullcontext()
        routings = [batch.routing for batch in batches if batch.routing is not None]
        if len(routings) < len(batches):
            raise ValueError("use_rollout_routing_replay: the engine did not return the experts of this rollout")
        return replay_routing(self._model, routings)

    def _run(self, step: Callable[..., Any], batches: Sequence[MicroBatch], **options: Any) -> list[Any]:
        with megatron_device(self._ranks.device), self._replayed(batches):
            return self._forward_backward(
                forward_step_func=step,
                data_iterator=iter(batches),
                model=[self._model],
                num_microbatches=len(batches),
                seq_length=self._shape.max_length,
                micro_batch_size=self._args.micro_batch_size,
                **options,
            )

    def _num_tokens(self, data: dict[str, Any], batch: MicroBatch) -> Tensor:
        """Count the trainable tokens of a micro-batch on this rank."""
        masks = zip(data["loss_masks"][batch.samples], batch.inputs.response_indices, strict=True)
        return torch.cat([mask[index] for mask, index in masks]).count_nonzero().int()


def _dtype_of(args: Namespace) -> torch.dtype:
    """Dtype of the trainer's weights."""
    if getattr(args, "fp16", False):
        return torch.float16
    return torch.bfloat16 if args.bf16 else torch.float32


def split_samples(values_T: Tensor, batch: MicroBatch) -> tuple[Tensor, ...]:
    """Split a micro-batch's token values into one tensor per sample."""
    return values_T.split([len(index) for index in batch.inputs.response_indices])
