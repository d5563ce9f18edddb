# SPDX-License-Identifier: Apache-2.0
"""Data, settings and comparisons that the tests share.

Log-probs are multiples of 1/64, so that differences and their sums are exact in float32. The tolerance covers only one
division, one `exp` and the means after it.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence

import hypothesis.strategies as st
import torch
from reference import Corrected, Samples

import mis_ext

# float32 `exp` at |x| <= 20 and a few means after it.
RTOL = 1e-5
# Differences of numbers near 1 (k3, chi-square, total variation) lose digits in float32.
ATOL = 2e-6

WEIGHTS = [(level, mode) for level in ("token", "sequence", "geometric") for mode in mis_ext.BOUNDS]
WEIGHTS.append(("none", "unbounded"))
GATES = ["no gate", "token gate", "sequence gate", "geometric gate"]
VETOES: dict[str, dict] = {
    "no veto": {},
    "low veto": {"rs_veto_threshold": 0.05},
    "high veto": {"rs_veto_upper_threshold": 20.0},
    "probability veto": {"rs_veto_probability": 0.03},
    "all vetoes": {"rs_veto_threshold": 0.01, "rs_veto_upper_threshold": 100.0, "rs_veto_probability": 0.02},
}
NORMALIZERS: dict[str, dict] = {
    "no normalizer": {},
    "kept": {"tis_batch_normalize": True},
    "kept, micro-batch": {"tis_batch_normalize": True, "tis_normalize_scope": "micro_batch"},
    "valid": {"tis_batch_normalize": True, "tis_normalize_over": "valid"},
    "valid, micro-batch": {
        "tis_batch_normalize": True,
        "tis_normalize_scope": "micro_batch",
        "tis_normalize_over": "valid",
    },
}
SPECIALS = [math.nan, math.inf, -math.inf, -1e4]


def correction_keys(
    weight: tuple[str, str], *, gate: str = "no gate", veto: str = "no veto", normalizer: str = "no normalizer", **more
) -> dict:
    """Flat keys of one point of the grid, without keys that would have no effect there."""
    level, mode = weight
    if level == "none" and gate == "no gate" and veto == "no veto":
        # A configuration without a weight and without a gate is an error.
        veto = "low veto"
    keys = {"use_tis": True, "tis_level": level, "mis_guard": "warn", "mis_metrics": "all"}
    narrow = {"token": (0.75, 1.5), "sequence": (0.5, 2.5), "geometric": (0.95, 1.0625)}
    if level != "none":
        keys["tis_mode"] = mode
        low, high = narrow[level]
        if mis_ext.BOUNDS[mode].has_low:
            keys["tis_lower_bound"] = low
        if mis_ext.BOUNDS[mode].has_high:
            keys["tis_upper_bound"] = high
        keys |= NORMALIZERS[normalizer]
    if gate != "no gate":
        rs_level = gate.split()[0]
        low, high = {"token": (0.5, 2.0), "sequence": (0.3, 3.0), "geometric": (0.92, 1.09)}[rs_level]
        keys |= {"use_rs": True, "rs_level": rs_level, "rs_lower_bound": low, "rs_upper_bound": high}
    rejects = gate != "no gate" or veto != "no veto" or mode == "mask"
    if not rejects and keys.get("tis_normalize_over") == "valid":
        del keys["tis_normalize_over"]
    return keys | VETOES[veto] | more


def random_samples(
    lengths: Sequence[int], *, seed: int, mask: float = 0.8, spread: float = 12.0, outliers: float = 0.06
) -> Samples:
    """Samples with mostly close log-probs, a few far ones, and masked tokens; the first token is always trainable."""
    generator = torch.Generator().manual_seed(seed)
    train, rollout, masks = [], [], []
    for length in lengths:
        steps = torch.randint(1, 256, (length,), generator=generator)
        difference = (torch.randn(length, generator=generator) * spread).round()
        far = torch.rand(length, generator=generator) < outliers
        difference = torch.where(far, torch.randint(-400, 400, (length,), generator=generator), difference)
        train.append(-steps / 64)
        rollout.append((-steps - difference) / 64)
        keep = (torch.rand(length, generator=generator) < mask).int()
        keep[:1] = 1
        masks.append(keep)
    return Samples(train, rollout, masks)


def sprinkle(samples: Samples, *, seed: int, share: float = 0.08) -> Samples:
    """Replace some log-probs of either engine by NaN, infinities and -1e4."""
    generator = torch.Generator().manual_seed(seed)

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        out = tensor.clone()
        for index in range(out.numel()):
            if torch.rand((), generator=generator) < share:
                out[index] = SPECIALS[int(torch.randint(len(SPECIALS), (), generator=generator))]
        return out

    return Samples([spoil(t) for t in samples.train], [spoil(r) for r in samples.rollout], samples.masks)


def drawn_samples(*, specials: bool = True, max_sequences: int = 5, max_length: int = 6) -> st.SearchStrategy[Samples]:
    """Hypothesis: samples with empty, one-token and fully masked responses."""
    steps = st.integers(1, 255).map(lambda k: -k / 64)
    gaps = st.one_of(st.integers(-40, 40), st.integers(-400, 400)).map(lambda k: k / 64)
    token = st.tuples(steps, gaps, st.booleans(), st.just(None), st.just(None))
    if specials:
        special = st.one_of(st.none(), st.sampled_from(SPECIALS))
        token = st.one_of(token, token, st.tuples(steps, gaps, st.booleans(), special, special))

    def build(sequences: list[list[tuple]]) -> Samples:
        def column(pick: Callable) -> list[torch.Tensor]:
            return [torch.tensor([pick(*token) for token in tokens], dtype=torch.float32) for tokens in sequences]

        return Samples(
            column(lambda t, d, m, a, b: t if a is None else a),
            column(lambda t, d, m, a, b: t - d if b is None else b),
            column(lambda t, d, m, a, b: m),
        )

    return st.lists(st.lists(token, max_size=max_length), min_size=1, max_size=max_sequences).map(build)


def drawn_keys(**more) -> st.SearchStrategy[dict]:
    """Hypothesis: any point of the grid."""
    return st.builds(
        correction_keys,
        st.sampled_from(WEIGHTS),
        gate=st.sampled_from(GATES),
        veto=st.sampled_from(list(VETOES)),
        normalizer=st.sampled_from(list(NORMALIZERS)),
        mis_denominator=st.sampled_from(["fixed", "kept"]),
        **more,
    )


def gates_only(*gates: dict) -> dict:
    """Flat keys of several gates only. The first gate of `use_rs` is so wide that it rejects nothing."""
    keys = {"use_tis": True, "tis_level": "none", "use_rs": True, "rs_level": "token", "mis_guard": "warn"}
    keys["mis_metrics"] = "all"
    return keys | {"rs_lower_bound": 0.0, "rs_upper_bound": 1e30, "rs_gates": list(gates)}


def args_of(keys: Mapping, *, per_token_loss: bool = False, qkv_format: str = "thd") -> Namespace:
    """The `args` of slime and Miles with the keys of a YAML file set on it."""
    host = {"calculate_per_token_loss": per_token_loss, "qkv_format": qkv_format, "use_rollout_logprobs": False}
    return Namespace(**host, **keys)


def call_hook(
    keys: Mapping,
    samples: Samples,
    *,
    per_token_loss: bool = False,
    pg_loss: torch.Tensor | None = None,
    args: Namespace | None = None,
    prompt_length: int = 3,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """The hook on whole responses, as slime calls it without context parallelism; `pg_loss` defaults to ones."""
    lengths = [m.numel() for m in samples.masks]
    return mis_ext.compute_mis_weights_with_cp(
        args=args_of(keys, per_token_loss=per_token_loss) if args is None else args,
        pg_loss=torch.ones(sum(lengths)) if pg_loss is None else pg_loss,
        train_log_probs=samples.train,
        rollout_log_probs=samples.rollout,
        loss_masks=samples.masks,
        total_lengths=[length + prompt_length for length in lengths],
        response_lengths=lengths,
    )


def flat(values: Sequence) -> torch.Tensor:
    """Lists of lists or of tensors as one float64 tensor."""
    if values and isinstance(values[0], torch.Tensor):
        return torch.cat([value.detach().double() for value in values])
    return torch.tensor([x for value in values for x in value], dtype=torch.float64)


def pick(values: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]) -> list[list[float]]:
    """The values of the tokens of a rank."""
    return [[value[index] for index in own] for value, own in zip(values, tokens, strict=True)]


SIGNED = ("mis_kl", "mis_log_ppl_diff")
"""Metrics that are means of numbers of both signs; the statistic of a gate may have both signs too."""


def tolerance(name: str, samples: Samples) -> float:
    """The absolute tolerance of a metric, for log-probs of -10,000 that cancel in float32.

    Half of the last of 24 bits, twice (of the difference and of each response's metric), of twice the largest log-prob.
    """
    if name not in SIGNED and not name.endswith("_value"):
        return ATOL
    log_probs = torch.cat([*samples.train, *samples.rollout]).double()
    return ATOL + 2.0**-22 * max(log_probs[log_probs.isfinite()].abs().tolist(), default=0.0)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, *, what: str, atol: float = ATOL) -> None:
    """Equality up to float32, NaN equal to NaN."""
    actual = actual.detach().double()
    if what.endswith("_std"):
        # The root of a difference of numbers up to 1 has half of their digits.
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=2e-3, equal_nan=True)
        return
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    close = torch.isclose(actual, expected, rtol=RTOL, atol=atol, equal_nan=True)
    if not close.all():
        worst = (~close).nonzero()[0].tolist()
        found, wanted = float(actual[tuple(worst)]), float(expected[tuple(worst)])
        raise AssertionError(f"{what}: {found} at {worst}, expected {wanted}; {int((~close).sum())} of {close.numel()}")


def assert_hook_output(
    output: tuple,
    expected: Corrected,
    samples: Samples,
    *,
    pg_loss: torch.Tensor,
    tokens: Sequence[Sequence[int]] | None = None,
) -> None:
    """The hook's loss, masks and metrics are the expected ones; `tokens` lists this rank's tokens of every response."""
    loss, masks, metrics = output
    own = [range(m.numel()) for m in samples.masks] if tokens is None else tokens
    assert_close(loss, flat(pick(expected.weights, own)) * pg_loss.detach().double(), what="loss")
    assert [m.numel() for m in masks] == [m.numel() for m in samples.masks]
    assert torch.cat(masks).tolist() == flat(expected.masks).tolist(), "masks"
    assert_hook_metrics(metrics, expected, samples, tokens=own)


def assert_hook_metrics(
    metrics: Mapping[str, torch.Tensor],
    expected: Corrected,
    samples: Samples,
    *,
    tokens: Sequence[Sequence[int]] | None = None,
) -> None:
    """Each metric is the expected one on response tokens, unless nothing was measured, and finite elsewhere."""
    own = [range(m.numel()) for m in samples.masks] if tokens is None else tokens
    response = flat(pick([m.tolist() for m in samples.masks], own)) != 0
    assert set(metrics) == set(expected.tokens), set(metrics) ^ set(expected.tokens)
    names = list(metrics)
    assert all(metrics[name].shape == response.shape for name in names)
    assert not any(metrics[name].requires_grad for name in names)
    table = torch.stack([metrics[name] for name in names])
    assert table[:, ~response].isfinite().all(), "a metric is not finite under the mask"
    wanted = torch.stack([flat(pick(expected.tokens[name], own)) for name in names])
    if torch.isclose(table.double(), wanted, rtol=RTOL, atol=ATOL, equal_nan=True)[:, response].all():
        return
    for name, row, wanted_row in zip(names, table, wanted, strict=True):
        assert_close(row[response], wanted_row[response], what=name, atol=tolerance(name, samples))


def assert_values(metrics: Mapping[str, torch.Tensor], expected: Corrected, samples: Samples | None = None) -> None:
    """Metrics as one number each are the expected ones, NaN when nothing was measured."""
    assert set(metrics) == set(expected.values), set(metrics) ^ set(expected.values)
    assert all(value.shape == () for value in metrics.values())
    table = torch.stack(list(metrics.values())).double()
    wanted = torch.tensor([expected.values[name] for name in metrics], dtype=torch.float64)
    for name, value, wanted_value in zip(metrics, table, wanted, strict=True):
        atol = ATOL if samples is None else tolerance(name, samples)
        assert_close(value, wanted_value, what=name, atol=atol)
