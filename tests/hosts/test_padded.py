# SPDX-License-Identifier: Apache-2.0
"""Padded batches give, row by row, what the same responses give packed."""

import math
import runpy
from pathlib import Path

import pytest
import torch
from thread_ranks import run_ranks

import mis_ext
from mis_ext import CorrectionConfig, GroupNumber, Mean, PackedLayout, Session, Weight, config_from_mapping
from mis_ext.correction.config import GUARD_NAMES

LENGTHS = [5, 12, 1, 0, 9]
WIDTH = 14
CONFIGS = {
    "tokens": {"use_rs": True, "rs_lower_bound": 0.7, "rs_upper_bound": 1.4, "tis_batch_normalize": True},
    "sequences": {"tis_level": "sequence", "rs_veto_threshold": 0.3, "mis_denominator": "kept"},
    "geometric, masked": {"tis_level": "geometric", "tis_mode": "mask", "tis_upper_bound": 1.05},
    "measure": {"use_tis": False, "get_mismatch_metrics": True},
}
configs = pytest.mark.parametrize("keys", CONFIGS.values(), ids=CONFIGS)
sides = pytest.mark.parametrize("side", ["right", "left"])


def config_of(keys: dict, scope: str = "micro_batch") -> CorrectionConfig:
    return config_from_mapping({"use_tis": True, "mis_metrics": "all"} | keys).replace(scope=scope)


def draw(seed: int = 0, lengths: list[int] = LENGTHS) -> tuple[list[torch.Tensor], ...]:
    """Responses with a tool's tokens in the middle."""
    generator = torch.Generator().manual_seed(seed)
    proximal = [-torch.rand(length, generator=generator) * 3 for length in lengths]
    behavior = [(x + 0.3 * torch.randn(len(x), generator=generator)).clamp_max(0.0) for x in proximal]
    masks = [(torch.rand(length, generator=generator) < 0.8).long() for length in lengths]
    return proximal, behavior, masks


def pad(samples: list[torch.Tensor], *, side: str, value: float, width: int = WIDTH) -> torch.Tensor:
    out = torch.full((len(samples), width), value, dtype=samples[0].dtype)
    for row, sample in zip(out, samples, strict=True):
        row[: len(sample)] = sample
    return (
        out if side == "right" else torch.stack([row.roll(width - len(x)) for row, x in zip(out, samples, strict=True)])
    )


def padded(
    samples: tuple[list[torch.Tensor], ...], *, side: str = "right", garbage: float = 0.0
) -> dict[str, torch.Tensor]:
    proximal, behavior, masks = samples
    return {
        "proximal_logprobs": pad(proximal, side=side, value=garbage),
        "behavior_logprobs": pad(behavior, side=side, value=garbage),
        "response_mask": pad(masks, side=side, value=0),
    }


def packed(config: CorrectionConfig, samples: tuple[list[torch.Tensor], ...]) -> mis_ext.Correction:
    proximal, behavior, masks = map(torch.cat, samples)
    layout = PackedLayout.whole([len(mask) for mask in samples[2]])
    streams = {"proximal_logprobs_T": proximal, "behavior_logprobs_T": behavior, "response_mask_R": masks}
    return mis_ext.compute_correction(**streams, layout=layout, config=config)


@configs
@sides
def test_a_padded_batch_is_the_packed_one_row_by_row(keys, side) -> None:
    config, samples = config_of(keys), draw()
    expected = packed(config, samples)
    found = mis_ext.correct_padded(config, **padded(samples, side=side))
    live = pad([torch.ones_like(mask) for mask in samples[2]], side=side, value=0).bool()
    torch.testing.assert_close(found.weights[live], expected.weights_T, rtol=1e-6, atol=0.0)
    assert torch.equal(found.keep_mask[live], expected.keep_mask_T)
    assert not found.keep_mask[~live].any()
    assert config.metrics_only or not found.weights[~live].any()
    for name, metric in expected.metrics.items():
        torch.testing.assert_close(found.metrics[name].value(), metric.value(), rtol=1e-5, atol=1e-6, equal_nan=True)


@configs
@sides
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_what_lies_under_the_mask_changes_nothing(keys, side, garbage) -> None:
    config, samples = config_of(keys), draw()
    clean = mis_ext.correct_padded(config, **padded(samples, side=side))
    spoilt = padded(samples, side=side, garbage=garbage)
    for name in ("proximal_logprobs", "behavior_logprobs"):
        spoilt[name][spoilt["response_mask"] == 0] = garbage
    found = mis_ext.correct_padded(config, **spoilt)
    assert torch.equal(found.weights, clean.weights)
    assert torch.equal(found.keep_mask, clean.keep_mask)
    for name, metric in clean.metrics.items():
        torch.testing.assert_close(found.metrics[name].value(), metric.value(), rtol=0.0, atol=0.0, equal_nan=True)


@configs
def test_data_parallel_ranks_share_one_scale_and_one_group_number(keys) -> None:
    samples = draw()
    whole = mis_ext.correct_padded(config_of(keys), **padded(samples))
    cut = (slice(2), slice(2, 5))

    def work(rank) -> mis_ext.hosts.own_trainer.PaddedCorrection:
        mine = tuple(column[cut[rank.dp_rank]] for column in samples)
        config = config_of(keys, scope="data_parallel")
        return mis_ext.correct_padded(config, **padded(mine), dp_group=rank.groups.dp_group)

    found = run_ranks(work, dp_size=2)
    torch.testing.assert_close(torch.cat([each.weights for each in found]), whole.weights, rtol=1e-6, atol=0.0)
    assert torch.equal(torch.cat([each.keep_mask for each in found]), whole.keep_mask)
    for name, metric in whole.metrics.items():
        both = [each.metrics[name] for each in found]
        if isinstance(metric, Mean):
            value = sum(each.total for each in both) / sum(each.count for each in both)
            torch.testing.assert_close(value, metric.value(), rtol=1e-5, atol=1e-6, equal_nan=True)
        else:
            for each in both:
                torch.testing.assert_close(each.value(), metric.value(), rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_session_checks_what_a_configuration_does_not() -> None:
    batch, session = padded(draw(lengths=[12, 14] * 4)), Session(CorrectionConfig())
    spoilt = batch | {"behavior_logprobs": torch.zeros(8, WIDTH)}
    mis_ext.correct_padded(CorrectionConfig(), **spoilt)
    for _ in range(2):
        with pytest.raises(ValueError, match="Engine log-probs are placeholders"):
            mis_ext.correct_padded(session, **spoilt)
    expected = mis_ext.correct_padded(session.config, **batch)
    for _ in range(2):
        assert torch.equal(mis_ext.correct_padded(session, **batch).weights, expected.weights)
    mis_ext.correct_padded(session, **spoilt)  # Has seen enough, which a session that is not kept never has.


@pytest.mark.parametrize("is_kept", [True, False], ids=["session", "configuration"])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("wrong", ["a short row", "None"])
def test_a_wrong_shape_on_one_rank_leaves_no_other_rank_waiting(wrong, failing, is_kept) -> None:
    config = config_of(CONFIGS["tokens"], scope="data_parallel")

    def work(rank) -> mis_ext.hosts.own_trainer.PaddedCorrection:
        batch = padded(draw(rank.number))
        if rank.number == failing:
            batch["response_mask"] = batch["response_mask"][:, :-1] if wrong == "a short row" else None
        session = Session(config.replace(warn_only=frozenset(GUARD_NAMES))) if is_kept else config
        return mis_ext.correct_padded(session, **batch, dp_group=rank.groups.dp_group)

    found = run_ranks(work, dp_size=2)
    with pytest.raises((ValueError, TypeError), match=r"both must be \[B, T\]|response_mask must be a tensor"):
        raise found[failing]
    if is_kept:
        with pytest.raises(RuntimeError, match=f"failed on rank {failing};"):
            raise found[1 - failing]
    else:
        alone = mis_ext.correct_padded(config, **padded(draw(1 - failing)))
        assert torch.equal(found[1 - failing].weights, alone.weights)


@pytest.mark.parametrize("name", ["proximal_logprobs", "behavior_logprobs", "response_mask"])
def test_other_shapes_are_refused(name) -> None:
    batch = padded(draw())
    for wrong in (batch[name][:, :-1], batch[name][:-1], batch[name].flatten(), batch[name][None], batch[name].mT):
        with pytest.raises(ValueError, match=r"has shape .*, and response_mask has .*: both must be \[B, T\]"):
            mis_ext.correct_padded(CorrectionConfig(), **batch | {name: wrong})


def test_three_tensors_of_another_shape_are_refused() -> None:
    for reshape in (torch.flatten, lambda x: x[None], lambda x: x[0, 0]):
        with pytest.raises(ValueError, match=r"both must be \[B, T\]"):
            mis_ext.correct_padded(CorrectionConfig(), **{name: reshape(x) for name, x in padded(draw()).items()})


@pytest.mark.parametrize("shape", [(0, 7), (3, 0), (0, 0)])
def test_an_empty_batch_comes_back_empty(shape) -> None:
    config = CorrectionConfig(weight=Weight(level="sequence"), metrics="all")
    names = ("proximal_logprobs", "behavior_logprobs", "response_mask")
    found = mis_ext.correct_padded(config, **{name: torch.zeros(shape) for name in names})
    assert found.weights.shape == found.keep_mask.shape == shape
    assert all(isinstance(metric, GroupNumber) or metric.count == 0 for metric in found.metrics.values())


def test_the_example_of_the_readme_is_its_file_and_what_its_formulas_say(capsys) -> None:
    root = Path(__file__).parents[2]
    code = (root / "examples" / "minimal.py").read_text(encoding="utf-8").split("\n\n", 1)[1]
    assert f"```python\n{code}```\n" in (root / "README.md").read_text(encoding="utf-8")
    found = runpy.run_path(str(root / "examples" / "minimal.py"))
    trainer, mask = found["trainer"], found["mask"].bool()
    ratio = (trainer.detach() - found["engine"]).exp()
    kept = mask & (ratio >= 0.5) & (ratio <= 5.0)
    assert torch.equal(found["out"].keep_mask, kept)
    assert int((mask & ~kept).sum()) == 1
    gradient = torch.where(kept, -found["advantages"] * ratio, 0.0) / 5
    torch.testing.assert_close(trainer.grad, gradient)
    torch.testing.assert_close(found["loss"], (gradient * trainer).sum())
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("mis_k3_kl", "2.9810e+03", "False", f"{found['loss'].item()}"))
