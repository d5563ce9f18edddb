# SPDX-License-Identifier: Apache-2.0
"""Show that the trainer gets exactly the tokens that SGLang sampled, and scores them with SGLang's definition.

SGLang's HTTP server samples multi-turn conversations with a tool, on the weights of a Megatron-Core model.
``mis_ext.rollout.generate`` makes the samples; some requests are aborted and continue later, some turns end at the
token limit. Then Megatron-Core scores every sampled token: as sampled, and after decoding and tokenizing again; with
the temperature, and without it. The exit code is 1 if the first of these differs by more than float32 rounding, or if
the others do not differ.
"""

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from grpo.distributed import Ranks
from grpo.sglang_engine import INSTALL_HINT
from rich import box
from rich.console import Console
from rich.table import Table
from tokens.model import Policy
from tokens.sample import Sample, Status, host_args
from tokens.server import call_server, sglang_server
from torch import Tensor, tensor
from transformers.utils.logging import disable_progress_bar

from mis_ext.onpolicy.audit.audit_report import AuditReport
from mis_ext.onpolicy.audit.log_probs import audit_logprobs
from mis_ext.rollout import (
    Distribution,
    SamplingParameters,
    define_log_probs,
    generate,
    trainer_log_probs,
)

SAMPLING = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": -1,
    "max_new_tokens": 40,
    "no_stop_trim": True,
    "skip_special_tokens": False,
}
WEIGHT_VERSION = "1"
# Two float32 implementations of one model agree to a few units in the last place of their logits.
ROUNDING = 1e-4
NUM_ABORTS = 3


class Arm(NamedTuple):
    """One row of the table."""

    tokens: str
    definition: str
    report: AuditReport


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=24)
    args = parser.parse_args()
    if args.conversations < 1:
        parser.error(f"--conversations must be at least 1, got {args.conversations}")
    if find_spec("sglang") is None:
        parser.error(INSTALL_HINT)
    return args


def main() -> int:
    """Run the demonstration, and return the exit code."""
    args, console = parse_args(), Console()
    if not console.is_terminal:
        console.width = 120
    disable_progress_bar()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    Ranks.start(context_parallel_size=1, seed=0)
    try:
        policy = Policy()
        with tempfile.TemporaryDirectory(prefix="on-policy-tokens-") as directory:
            policy.save(Path(directory))
            with sglang_server(Path(directory), weight_version=WEIGHT_VERSION) as port:
                samples = asyncio.run(sample_conversations(port, Path(directory), args.conversations))
        describe(samples, console)
        return compare(policy, samples, console)
    finally:
        dist.destroy_process_group()


async def sample_conversations(port: int, checkpoint: Path, number: int) -> list[Sample]:
    """Sample conversations of one to four turns of the model, some of them aborted meanwhile."""
    settings = {"environment": "tokens.lookup.step", "max_turns": 8}
    args = host_args(port, checkpoint, partial_rollout=True, rollout_max_context_len=900, on_policy_tokens=settings)
    samples = [
        Sample(
            index=index,
            prompt=[{"role": "user", "content": f"What does section {index} of the license grant?"}],
            metadata={"num_lookups": index % 4},
        )
        for index in range(number)
    ]
    aborting = asyncio.create_task(abort_some(port, samples))
    await asyncio.gather(*(until_finished(args, sample) for sample in samples))
    aborting.cancel()
    return samples


async def until_finished(args: argparse.Namespace, sample: Sample) -> None:
    """As a framework does: submit an aborted sample again in a later rollout."""
    while sample.status in (Status.PENDING, Status.ABORTED):
        await generate(args, sample, SAMPLING)


async def abort_some(port: int, samples: list[Sample]) -> None:
    """Abort all running requests until enough were aborted."""
    while count(samples)["aborted_requests"] < NUM_ABORTS:
        await asyncio.sleep(0.3)
        await asyncio.to_thread(call_server, port, "/abort_request", {"abort_all": True})


def count(samples: list[Sample]) -> Counter[str]:
    """Sum the counts of ``generate`` over all samples."""
    total: Counter[str] = Counter()
    for sample in samples:
        total.update(sample.metadata.get("on_policy_tokens", {}))
    return total


def describe(samples: list[Sample], console: Console) -> None:
    """Print what was sampled."""
    counts = count(samples)
    statuses = Counter(sample.status.value for sample in samples)
    console.print(
        f"{len(samples)} conversations in {counts['generations']} requests, {counts['aborted_requests']} aborted: "
        f"{counts['sampled_tokens']} tokens sampled, {counts['sampled_tokens/trained']} trained; "
        + ", ".join(f"{number} {status}" for status, number in sorted(statuses.items()))
    )
    boundaries = {name: number for name, number in counts.items() if name.startswith("boundaries") and number}
    console.print("between requests: " + ", ".join(f"{name} {number}" for name, number in boundaries.items()))


def compare(policy: Policy, samples: list[Sample], console: Console) -> int:
    """Score the samples in each way, print the table, and return the exit code."""
    parameters = SamplingParameters.from_request(SAMPLING, server="sglang")
    definition = define_log_probs(parameters, server="sglang", sampling_backend="pytorch")
    console.print(*(f"  {line}" for line in definition.explain()), sep="\n")
    arms = [
        Arm(tokens, corrected, audit(policy, samples, ids_of, distribution))
        for tokens, ids_of in (("as sampled", as_sampled), ("decoded, tokenized again", tokenized_again))
        for corrected, distribution in (("with", definition.returned), ("without", Distribution()))
    ]
    table = Table(title="Sampled tokens, Megatron-Core against SGLang", box=box.SIMPLE, title_justify="left")
    for name in ("tokens", "correction"):
        table.add_column(name)
    for name in ("compared", "nonzero", "mean abs diff", "max abs diff"):
        table.add_column(name, justify="right")
    for arm in arms:
        report = arm.report
        numbers = (f"{report.num_active_tokens}", f"{report.num_nonzero}")
        table.add_row(arm.tokens, arm.definition, *numbers, f"{report.mean_abs_diff:.1e}", f"{report.max_abs_diff:.1e}")
    console.print(table)
    other = [sample.index for sample in samples if tokenized_again(policy, sample) != sample.tokens]
    console.print(
        f"{len(other)} of {len(samples)} conversations have different token ids after decoding and tokenizing."
    )
    differences = [arm.report.max_abs_diff or 0.0 for arm in arms]
    return int(differences[0] > ROUNDING or min(differences[1:]) <= ROUNDING)


def as_sampled(policy: Policy, sample: Sample) -> list[int]:
    """The token ids of the sample."""
    return sample.tokens


def tokenized_again(policy: Policy, sample: Sample) -> list[int]:
    """The ids of an agent that keeps text instead."""
    text = policy.tokenizer.decode(sample.tokens, skip_special_tokens=False)
    ids: list[int] = policy.tokenizer.encode(text, add_special_tokens=False)
    return ids


def audit(
    policy: Policy, samples: list[Sample], ids_of: Callable[[Policy, Sample], list[int]], distribution: Distribution
) -> AuditReport:
    """Compare by position, up to the length of the shorter response."""
    train, rollout, masks = [], [], []
    for sample in samples:
        prompt_length = len(sample.tokens) - sample.response_length
        token_ids = ids_of(policy, sample)
        scored = score(policy, token_ids, prompt_length, distribution)
        length = min(len(scored), sample.response_length)
        train.append(scored[:length])
        rollout.append(tensor(sample.rollout_log_probs[:length]))
        masks.append(tensor(sample.loss_mask[:length]))
    return audit_logprobs(
        train,
        rollout,
        masks=masks,
        engine_records=rollout,
        train_weight_version=WEIGHT_VERSION,
        rollout_weight_versions=[sample.weight_versions for sample in samples],
    )


def score(policy: Policy, token_ids: list[int], prompt_length: int, distribution: Distribution) -> Tensor:
    """Megatron-Core's log-probs of a response, ``[T]``."""
    # The logits at a position score the token after it.
    logits = policy.logits(token_ids)[prompt_length - 1 : -1]
    return trainer_log_probs(logits, token_ids[prompt_length:], distribution).log_probs_T


if __name__ == "__main__":
    sys.exit(main())
