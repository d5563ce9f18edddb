# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine beside Megatron-Core's local layers: mismatch, hook and whole loss, FP8, several GPUs, refusals.

    python te_study.py prepare --work DIR [--gguf FOLDER]     # weights, samples, transformers' scores
    python te_study.py score step alone refuse --work DIR     # one GPU; ends with the tables
    torchrun --standalone --nproc-per-node 2 te_study.py score step --work DIR --cp 2 --only "te, packed"
    torchrun --standalone --nproc-per-node 2 te_study.py score step --work DIR --model random --tp 2
    torchrun --standalone --nproc-per-node 8 te_study.py score step --work DIR --model random --cp 2 --tp 2  # and DP 2
    python te_study.py table --work DIR

A run that has a result in DIR/MODEL/results.jsonl is not made again; one that failed is. ``--model tiny --only "local*"
"gathered*"`` runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

# Transformer Engine rounds factors in float32 to TF32 otherwise, and torch does not.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")

import torch
import torch.distributed as dist
from te_models import VARIANTS, Decoder, Variant, megatron_device, parallel_state
from te_rollout import Rollout, load, prepare, scores_file
from te_step import CORRECTIONS, inputs_of, parameter_norms, score, step
from te_tables import print_tables
from torch import Tensor

from mis_ext.onpolicy import batch_invariant_forward, batch_invariant_mode

OF_KIND = {
    "step": [name for name in VARIANTS if "cold" not in name],
    "alone": ["local", "gathered, packed", "te", "te, packed", "te, packed, fp8 current"],
    "refuse": ["local", "te, packed"],
}
"""Not every question is for every variant."""


class Study:
    """The runs of one model on the ranks of this process, and their results."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder, self.device = folder, device
        self.shape, self.weights, self.rollout = load(folder)
        sizes = {
            "CP": parallel_state.get_context_parallel_world_size(),
            "TP": parallel_state.get_tensor_model_parallel_world_size(),
            "DP": parallel_state.get_data_parallel_world_size(),
        }
        self.place = "".join(f", {name} {size}" for name, size in sizes.items() if size > 1)
        share, rest = divmod(len(self.rollout.tokens), sizes["DP"])
        if rest:
            raise ValueError(f"{len(self.rollout.tokens)} samples: {sizes['DP']} data-parallel ranks need equal shares")
        first = share * parallel_state.get_data_parallel_rank()
        self.share = self._samples(slice(first, first + share))

    def run(self, kind: str, name: str, function: Callable[[str], dict[str, Any]]) -> None:
        """Make a run whose result is not there yet; an error is its result, and the next run begins."""
        if any(
            (row["kind"], row["name"]) == (kind, name + self.place)
            for row in results(self.folder)
            if "error" not in row
        ):
            return
        start, row = time.monotonic(), {"kind": kind, "name": name + self.place}
        try:
            row |= function(name)
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"[:500]
        row["seconds"] = round(time.monotonic() - start, 1)
        if dist.get_rank() == 0:
            with (self.folder / "results.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            shown = {key: value for key, value in row.items() if key != "steps"}
            print(json.dumps(shown), flush=True)

    def decoder(self, name: str, **options: Any) -> Decoder:
        """The model of a variant; scales of FP8 are those after one pass where it says so."""
        variant = VARIANTS[name]
        decoder = Decoder(variant, self.shape, self.weights, self.device, **options)
        if variant.warm:
            for _, inputs, _ in inputs_of(self.share, decoder):
                decoder.log_probs(decoder.logits(inputs), inputs).mean().div(len(self.share.tokens)).backward()
        return decoder

    def score(self, name: str) -> dict[str, Any]:
        """Log-probs of the rollout, kept for the tables."""
        decoder = self.decoder(name)
        scores = self._whole(decoder, score(decoder, self.share))
        if dist.get_rank() == 0:
            torch.save(scores, scores_file(self.folder, name + self.place))
        return {"attention": _attention_of_te(VARIANTS[name])}

    def step(self, name: str) -> dict[str, Any]:
        """Loss, metrics and gradients: of the hook, of the hook again (kernels add in any order), of the whole loss."""
        decoder, found = self.decoder(name), {}
        proximal = score(decoder, self.share)
        for correction, keys in CORRECTIONS.items():
            once = step(decoder, self.share, proximal, keys, "hook")
            norms = parameter_norms(decoder, once.gradients)
            again = step(decoder, self.share, proximal, keys, "hook")
            noise = self._distance(decoder, again.gradients, once.gradients)
            del again
            whole = step(decoder, self.share, proximal, keys, "whole loss")
            shared = [key for key in once if key in whole and key != "loss"]
            found[correction] = {
                "hook": dict(once),
                "whole loss": dict(whole),
                "gradient norm": float(norms.norm()),
                "gradient norm, whole loss": float(parameter_norms(decoder, whole.gradients).norm()),
                "gradients, hook again": noise,
                "gradients, whole loss": self._distance(decoder, whole.gradients, once.gradients),
                "metrics": max(abs(once[key] - whole[key]) for key in shared),
                "num_metrics": len(shared),
                "parameter norms": norms.tolist(),
            }
        return {"steps": found}

    def alone(self, name: str) -> dict[str, Any]:
        """Whether a sample has the same log-probs alone and among others, without any batch-invariant mode."""
        decoder = self.decoder(name)
        among = torch.cat(score(decoder, self._samples(slice(0, 8))))
        alone = torch.cat([score(decoder, self._samples(slice(i, i + 1)))[0] for i in range(8)])
        difference = (among - alone).abs()
        return {"equal": float((difference == 0).double().mean()), "largest": float(difference.max())}

    def refuse(self, name: str) -> dict[str, Any]:
        """What the batch-invariant mode says to the model, and to Megatron-Core's choice of the last norm."""
        variants = {"": {}, ", layer alone": {"layer_alone": True}}
        rollout, found = self._samples(slice(0, 8)), {}
        for what, options in variants.items():
            decoder = self.decoder(name, **options)
            found[f"batch_invariant_forward{what}"] = _answer(partial(_forward_in_mode, decoder, rollout))
            found[f"batch_invariant_mode{what}"] = _answer(partial(_call_in_mode, decoder, rollout))
        return found

    def _samples(self, which: slice) -> Rollout:
        rollout = self.rollout
        return Rollout(
            tokens=rollout.tokens[which],
            response_lengths=rollout.response_lengths[which],
            behavior=rollout.behavior[which],
            advantages=rollout.advantages[which],
        )

    def _whole(self, decoder: Decoder, parts: list[Tensor]) -> list[Tensor]:
        """The whole responses of all samples from the parts of all context- and data-parallel ranks."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        indices = [index.cpu() for _, inputs, _ in inputs_of(self.share, decoder) for index in inputs.response_indices]
        first = parallel_state.get_data_parallel_rank() * len(self.share.tokens)
        mine = list(zip(range(first, first + len(parts)), indices, (part.cpu() for part in parts), strict=True))
        ranks: list[Any] = [None] * group.size()
        dist.all_gather_object(ranks, mine, group=group)
        whole = [torch.full((length,), torch.nan) for length in self.rollout.response_lengths]
        for sample, index, values in (part for rank in ranks for part in rank):
            whole[sample][index] = values
        return whole

    @staticmethod
    def _distance(decoder: Decoder, gradients: list[Tensor], reference: list[Tensor]) -> float:
        """Of all gradients as one vector, relative to the reference's length."""
        differences = [a - b for a, b in zip(gradients, reference, strict=True)]
        return float(parameter_norms(decoder, differences).norm() / parameter_norms(decoder, reference).norm())


def results(folder: Path) -> list[dict[str, Any]]:
    """What was made so far, the newest last."""
    file = folder / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _forward_in_mode(decoder: Decoder, rollout: Rollout) -> list[Tensor]:
    with batch_invariant_forward(decoder.model):
        return score(decoder, rollout)


def _call_in_mode(decoder: Decoder, rollout: Rollout) -> list[Tensor]:
    with batch_invariant_mode():
        return score(decoder, rollout)


def _answer(function: Callable[[], Any]) -> str:
    try:
        function()
    except NotImplementedError as error:
        return f"refused: {error}"
    return "ran"


def _attention_of_te(variant: Variant) -> str:
    """Which kernel Transformer Engine chose for the last call of its attention."""
    if variant.layers != "te":
        return variant.layers
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    chosen = dot_product_attention._attention_backends
    names = [name for name in ("flash", "fused", "unfused") if chosen.get(f"use_{name}_attention")]
    return f"{' '.join(names)} {chosen.get('fused_attention_backend') or ''}".strip()


@contextmanager
def ranks(*, cp: int, tp: int, device: torch.device) -> Iterator[None]:
    """Join the processes of torchrun, or be the only one."""
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=120))
    if dist.get_world_size() % (cp * tp):
        raise ValueError(f"{dist.get_world_size()} processes: --cp {cp} times --tp {tp} need a multiple of {cp * tp}")
    with megatron_device(device):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    if device.type == "cuda":
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(0)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Make the runs that were asked for, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="+", choices=["prepare", "score", "step", "alone", "refuse", "table"])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--model", choices=["smollm2", "random", "tiny"], default="smollm2")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--engine", help="host:port of SGLang with these weights, which samples in transformers' place")
    parser.add_argument("--only", nargs="*", default=["*"], help="names of variants; * stands for anything")
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args()
    folder, device = options.work / options.model, torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "prepare" in options.commands and not (folder / "rollout.pt").exists():
        prepare(options.model, folder, gguf=options.gguf, engine=options.engine, device=device)
    names = [name for name in VARIANTS if any(fnmatchcase(name, pattern) for pattern in options.only)]
    if not names:
        sys.exit(f"--only {options.only}: no variant has such a name, there are {list(VARIANTS)}")
    kinds = [kind for kind in options.commands if kind not in ("prepare", "table")]
    if kinds:
        with ranks(cp=options.cp, tp=options.tp, device=device):
            study = Study(folder, device)
            for kind in kinds:
                for name in (name for name in names if name in OF_KIND.get(kind, VARIANTS)):
                    study.run(kind, name, getattr(study, kind))
    if os.environ.get("RANK", "0") == "0":
        print_tables(folder, results(folder))


if __name__ == "__main__":
    main()
