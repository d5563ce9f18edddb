# SPDX-License-Identifier: Apache-2.0
"""Command line. Flags are named as in slime and Miles if they exist there.

Its import needs no package, so a wrong command fails before anything is installed.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .engine_settings import FIXED, VLLM_COLDEST, check_not_fixed, parse_setting
from .output_dir import refuse_to_replace


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, because the usage of about fifty flags would hide the reason."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def parse_command_line(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse only the flags, with the standard library.

    Raises:
        SystemExit: If a flag is not valid, or the output folder has a run that may not be replaced.
    """
    return _parse_flags(_parser(), argv)


def parse_args(argv: Sequence[str] | None = None, *, world_size: int | None = None) -> argparse.Namespace:
    """Parse the command line, then apply the custom configuration to it.

    Args:
        argv: The flags; None: those of this process.
        world_size: Number of ranks; None: from torchrun.

    Raises:
        SystemExit: If a flag or a combination of flags is not valid, or the output folder has a run.
    """
    parser = _parser()
    args = _parse_flags(parser, argv)
    args.engine_settings = _as_dict(parser, args.engine_settings)
    if args.custom_config_path is not None:
        apply_custom_config(args, args.custom_config_path)
    if args.eps_clip_high is None and getattr(args, "mis_loss_method", None) is None:
        args.eps_clip_high = 0.28
    _check(parser, args, world_size or int(os.environ.get("WORLD_SIZE", "1")))
    _set_model_defaults(parser, args)
    return args


def _parser() -> Parser:
    parser = Parser(
        prog="train_grpo.py",
        description="Trains a small decoder by GRPO. Flags are named as in slime and Miles if they exist there.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_run(parser)
    _add_rollout(parser)
    _add_training(parser)
    _add_evaluation(parser)
    _add_correction(parser)
    return parser


COUNTS = (
    *("num_rollout", "num_steps_per_rollout", "rollout_batch_size", "n_samples_per_prompt", "micro_batch_size"),
    *("rollout_max_response_len", "update_weights_interval", "save_interval", "context_parallel_size"),
)


def _num_ranks(parser: argparse.ArgumentParser) -> int:
    """Return NPROC, the number of ranks to start."""
    said = os.environ.get("NPROC", "2")
    if not said.isdecimal() or int(said) < 1:
        parser.error(f"NPROC={said}: expected a number of ranks, at least 1")
    return int(said)


def _parse_flags(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    args = parser.parse_args(argv)
    for name in COUNTS:
        # With a single sample per prompt, the advantage would be NaN.
        least = 2 if name == "n_samples_per_prompt" else 1
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least {least}")
    world_size = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else _num_ranks(parser)
    if world_size % args.context_parallel_size:
        parser.error(f"--context-parallel-size {args.context_parallel_size} does not divide {world_size} ranks (NPROC)")
    if args.output_dir is not None and args.output_dir.exists() and not args.output_dir.is_dir():
        parser.error(f"--output-dir {args.output_dir} is not a folder")
    if args.resume and args.overwrite:
        parser.error("--resume continues the run in the output folder, --overwrite replaces it: choose one")
    for path in (args.custom_config_path, args.model):
        if path is not None and not path.exists():
            parser.error(f"{path} does not exist")
    _check_temperature(parser, args)
    try:
        check_not_fixed((key for key, _ in args.engine_settings), FIXED.get(args.rollout_engine, ()))
        refuse_to_replace(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _check_temperature(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    temperature, is_vllm = args.rollout_temperature, args.rollout_engine == "vllm"
    if not 0 < temperature < math.inf or (is_vllm and temperature < VLLM_COLDEST):
        legal = f"at least {VLLM_COLDEST}, below which vLLM samples at it" if is_vllm else "a number above 0"
        parser.error(f"--rollout-temperature {temperature}: expected {legal}")


def _set_model_defaults(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Set the defaults that depend on whether the model is pretrained."""
    import torch

    random = {"task": "counting", "num_layers": 2, "hidden_size": 64, "warmup_steps": 30, "lr": 1e-3, "bf16": False}
    pretrained = {"task": "arithmetic", "num_layers": None, "hidden_size": None, "warmup_steps": 0, "lr": 1e-5}
    pretrained["bf16"] = torch.cuda.is_available()
    for key, value in (random if args.model is None else pretrained).items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    if args.model is None and args.task != "counting":
        parser.error(f"--task {args.task} needs --model: the random decoder has no words")
    if args.model is not None and (args.task == "counting" or args.warmup_steps or args.num_layers or args.hidden_size):
        parser.error("--task counting, --warmup-steps, --num-layers and --hidden-size are for the random decoder")


def apply_custom_config(args: argparse.Namespace, path: Path) -> None:
    """Set or replace an attribute of ``args`` for every top-level key of a YAML file, as slime and Miles do."""
    import yaml

    for key, value in (yaml.safe_load(path.read_text()) or {}).items():
        setattr(args, key, value)


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument(
        "--output-dir",
        type=Path,
        help="folder of metrics, plot and checkpoint. None: a new one, runs/grpo_ENGINE_NUMBER; with --resume and "
        "--overwrite the last of these",
    )
    group.add_argument("--resume", action="store_true", help="continue from the checkpoint in the output folder")
    group.add_argument("--overwrite", action="store_true", help="replace the run in the output folder")
    group.add_argument("--num-rollout", type=int, default=30, help="steps: rollouts, each followed by training")
    group.add_argument("--save-interval", type=int, default=20, help="steps between checkpoints")
    group.add_argument("--seed", type=int, default=1)
    group.add_argument("--context-parallel-size", type=int, default=1)


def _add_rollout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rollout")
    group.add_argument(
        "--task",
        help="counting, for the random decoder; with --model arithmetic, arithmetic_steps, story, "
        "story_answer, prepared:FILE of examples/questions/prepare.py, or reasoning_gym:NAME with that package",
    )
    group.add_argument("--rollout-engine", choices=["transformers", "sglang", "vllm"], default="transformers")
    group.add_argument(
        "--engine-settings",
        type=_setting,
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="arguments of sglang.Engine or vllm.LLM, as in YAML: mem_fraction_static=0.1 kv_cache_dtype=fp8_e5m2",
    )
    group.add_argument("--rollout-batch-size", type=int, default=32, help="prompts per rollout")
    group.add_argument("--n-samples-per-prompt", type=int, default=8)
    group.add_argument("--rollout-temperature", type=float, default=1.0)
    group.add_argument(
        "--rollout-top-p",
        type=float,
        default=1.0,
        help="share of the probability to sample from, not with transformers",
    )
    group.add_argument("--rollout-max-response-len", type=int, default=40, help="tokens of a response")
    group.add_argument("--update-weights-interval", type=int, default=1, help="rollouts between weight updates")
    group.add_argument("--rollout-data-postprocess-path", help="module.function(args, rollout_id, rollout_data)")


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--model",
        type=Path,
        help="a pretrained Llama, Qwen2 or Qwen3: a folder in Hugging Face's format, or a GGUF file. None: a tiny "
        "random decoder of --num-layers and --hidden-size",
    )
    group.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        help="trainer weights in bf16, with a float32 copy for updates; the default with --model on a GPU",
    )
    group.add_argument("--num-layers", type=int, help="of the random decoder, 2 by default")
    group.add_argument("--hidden-size", type=int, help="of the random decoder, 64 by default")
    group.add_argument(
        "--warmup-steps",
        type=int,
        help="supervised steps of the random decoder before rollouts, 30 by default",
    )
    group.add_argument("--warmup-lr", type=float, default=3e-3)
    group.add_argument("--lr", type=float, help="1e-3 by default, with --model 1e-5")
    group.add_argument("--adam-beta2", type=float, default=0.98)
    group.add_argument("--clip-grad", type=float, default=1.0)
    group.add_argument("--num-steps-per-rollout", type=int, default=2, help="optimizer steps per rollout")
    group.add_argument("--micro-batch-size", type=int, default=16, help="samples per micro-batch and rank")
    group.add_argument("--qkv-format", choices=["thd", "bshd"], default="thd")
    group.add_argument("--eps-clip", type=float, default=0.2)
    group.add_argument("--eps-clip-high", type=float, help="0.28 without mis_loss_method")
    group.add_argument("--eps-clip-c", type=float, help="dual clip, with custom_loss only")
    group.add_argument("--entropy-coef", type=float, default=0.0, help="with custom_loss only")
    group.add_argument("--calculate-per-token-loss", action="store_true")
    group.add_argument(
        "--loss-type",
        choices=["policy_loss", "custom_loss"],
        default="policy_loss",
        help="the example's own PPO loss, or the full policy loss of --custom-loss-function-path",
    )
    group.add_argument(
        "--custom-loss-function-path",
        default="mis_ext.policy_loss",
        help="module.function(args, batch, logits, sum_of_sample_mean), with custom_loss only. For "
        "mis_ext.policy_loss the YAML gives mis_loss_mode (baseline, decoupled, bypass or reinforce) or "
        "mis_loss_method (a published method). decoupled and reinforce need --use-tis; with bypass, reinforce, "
        "methods without the proximal policy, and mis_loss_proximal: current, --use-rollout-logprobs skips the "
        "trainer's scoring pass",
    )


def _add_evaluation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("evaluation of the trainer's own policy on held-out questions, with --model only")
    group.add_argument("--eval-interval", type=int, help="steps between evaluations, before training. None: never")
    group.add_argument("--eval-temperature", type=float, default=0.0, help="0 takes the most probable token")
    group.add_argument("--num-eval-prompts", type=int, default=64)


def _add_correction(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("correction of the mismatch")
    group.add_argument("--use-tis", action="store_true", help="correct the loss with the custom function")
    group.add_argument("--custom-tis-function-path", help="dotted path of the correction")
    group.add_argument("--custom-config-path", type=Path, help="YAML whose keys are set on the arguments")
    group.add_argument("--get-mismatch-metrics", action="store_true", help="call the custom function for its metrics")
    group.add_argument("--use-rollout-logprobs", action="store_true", help="the engine's log-probs as PPO denominator")


def _setting(text: str) -> tuple[str, object]:
    try:
        return parse_setting(text)
    except ImportError:
        # Without PyYAML, before the installation; the value is read afterwards.
        return text.partition("=")[0], None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _as_dict(parser: argparse.ArgumentParser, settings: list[tuple[str, object]]) -> dict[str, object]:
    by_key = dict(settings)
    if len(by_key) < len(settings):
        parser.error(f"--engine-settings: a key is there twice: {', '.join(key for key, _ in settings)}")
    return by_key


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace, world_size: int) -> None:
    # Check again, because the configuration may have set it.
    _check_temperature(parser, args)
    if args.loss_type == "policy_loss":
        _check_own_loss(parser, args)
    if args.engine_settings and args.rollout_engine == "transformers":
        parser.error("--engine-settings are of --rollout-engine sglang or vllm, the engine is transformers")
    if args.eval_interval is not None:
        if args.model is None:
            parser.error("--eval-interval needs --model: the random decoder has no held-out questions")
        if min(args.eval_interval, args.num_eval_prompts) < 1 or args.eval_temperature < 0:
            parser.error("--eval-interval and --num-eval-prompts: expected at least 1; --eval-temperature: at least 0")
    if not 0 < args.rollout_top_p <= 1:
        parser.error(f"--rollout-top-p {args.rollout_top_p}: expected a number above 0, at most 1")
    if args.rollout_top_p != 1 and args.rollout_engine == "transformers":
        parser.error("--rollout-top-p needs --rollout-engine sglang or vllm, the engine is transformers")
    num_samples = args.rollout_batch_size * args.n_samples_per_prompt
    dp_size = world_size // args.context_parallel_size
    if num_samples % (dp_size * args.num_steps_per_rollout * args.micro_batch_size):
        parser.error(
            f"{num_samples} samples per rollout (--rollout-batch-size x --n-samples-per-prompt) do not divide into "
            f"{dp_size} data-parallel ranks x --num-steps-per-rollout {args.num_steps_per_rollout} x "
            f"--micro-batch-size {args.micro_batch_size}"
        )


def _check_own_loss(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.eps_clip_c is not None or args.entropy_coef != 0.0:
        parser.error("--eps-clip-c and --entropy-coef need --loss-type custom_loss")
    if (args.use_tis or args.get_mismatch_metrics) and args.custom_tis_function_path is None:
        parser.error("--use-tis and --get-mismatch-metrics need --custom-tis-function-path")
    if args.custom_tis_function_path is not None and not (args.use_tis or args.get_mismatch_metrics):
        parser.error(
            "--custom-tis-function-path is never called: with use_tis: false in the configuration add "
            "--get-mismatch-metrics to measure, else add --use-tis"
        )
