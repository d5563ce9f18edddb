# SPDX-License-Identifier: Apache-2.0
"""Whether a position's output depends on how its sequence was fed."""

import importlib.util
import inspect

import pytest
import torch
import torch.nn.functional as F
from batch_probes import outcomes, probe_of

from mis_ext.onpolicy.batch_invariant import batch_invariant_mode
from mis_ext.onpolicy.invariance import check_sequence_invariance

NUM_TOKENS = 20
FED_IN_PARTS = {
    "decode",
    "prefill 10, then decode",
    "chunked prefill of 2",
    "chunked prefill of 3",
    "chunked prefill of 16",
}
pytestmark = pytest.mark.usefixtures("one_thread")


class Attention:
    """Causal self-attention: over a whole sequence, over chunks with a cache, and over padded batches."""

    def __init__(self, width=32, num_heads=2):
        generator = torch.Generator().manual_seed(0)
        self.projections = [torch.randn(width, width, generator=generator) / width**0.5 for _ in range(3)]
        self.num_heads = num_heads

    def heads(self, x):
        projected = (x @ projection.to(x.dtype) for projection in self.projections)
        return [part.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2) for part in projected]

    def merge(self, x):
        return x.transpose(-3, -2).flatten(-2)

    def full(self, x):
        return self.merge(F.scaled_dot_product_attention(*self.heads(x), is_causal=True))

    def make_decoder(self):
        keys, values = [], []

        def decode(x):
            query, key, value = self.heads(x)
            keys.append(key)
            values.append(value)
            key, value = torch.cat(keys, -2), torch.cat(values, -2)
            num_new, num_all = query.shape[-2], key.shape[-2]
            mask = torch.ones(num_new, num_all, dtype=torch.bool).tril(num_all - num_new)
            return self.merge(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))

        return decode

    def padded(self, batch, lengths_B, side):
        num_positions = batch.shape[1]
        causal = torch.ones(num_positions, num_positions, dtype=torch.bool).tril()
        mask = causal & is_real(batch, lengths_B, side)[:, None, None]
        # A padding query attends to itself, so that it has something to attend to.
        mask = mask | torch.eye(num_positions, dtype=torch.bool)
        return self.merge(F.scaled_dot_product_attention(*self.heads(batch), attn_mask=mask))


def is_real(batch, lengths_B, side):
    position = torch.arange(batch.shape[1])
    return position < lengths_B[:, None] if side == "right" else position >= batch.shape[1] - lengths_B[:, None]


@pytest.mark.whole_run
def test_decode_against_prefill_varies_as_a_direct_comparison_says_and_not_in_the_mode():
    attention = Attention()
    # More keys than a block has.
    x = torch.randn(70, 32, generator=torch.Generator().manual_seed(1))
    report = check_sequence_invariance(attention.full, x, make_decoder=attention.make_decoder)
    decode, full = attention.make_decoder(), attention.full(x)
    decoded = torch.cat([decode(token[None]) for token in x])
    different = (decoded != full).any(1).nonzero().flatten()
    probe = probe_of(report, "decode")
    assert probe.num_different == len(different)
    assert probe.max_abs_diff == (decoded.double() - full.double()).abs().max()
    assert probe.outcome == ("rounding" if len(different) else "equal")
    assert report.kind == ("rounding" if outcomes(report, "rounding") else "invariant")
    with batch_invariant_mode():
        report = check_sequence_invariance(
            attention.full, x, make_decoder=attention.make_decoder, padded=attention.padded
        )
    assert report.invariant


def running_sum(x):
    """Exact for small integers, so equal bits whatever the order."""
    return x.cumsum(-2)


def summing_decoder(*, forgets_chunks=False):
    def make_decoder():
        seen = []

        def decode(x):
            if forgets_chunks:
                seen.clear()
            seen.extend(x)
            start = len(seen) - len(x)
            return torch.stack([sum(seen[: start + offset + 1]) for offset in range(len(x))])

        return decode

    return make_decoder


def padded_sum(batch, lengths_B, side):
    return running_sum(torch.where(is_real(batch, lengths_B, side)[..., None], batch, 0))


def tokens():
    return torch.arange(1.0, NUM_TOKENS + 1)[:, None] * torch.ones(3)


def test_an_exact_function_is_invariant_in_every_probe():
    report = check_sequence_invariance(running_sum, tokens(), make_decoder=summing_decoder(), padded=padded_sum)
    assert report.invariant
    assert outcomes(report, "equal") == FED_IN_PARTS | {
        "full forward, again",
        "prefixes",
        "left padding",
        "right padding",
    }


def test_probes_that_cannot_run_are_listed_and_have_not_passed():
    report = check_sequence_invariance(running_sum, tokens())
    assert outcomes(report, "not run") == FED_IN_PARTS | {"left padding", "right padding"}
    assert outcomes(report, "equal") == {"full forward, again", "prefixes"}
    assert probe_of(report, "decode").note == "needs make_decoder"
    assert probe_of(report, "left padding").note == "needs padded"
    assert str(report).startswith("invariant: 2 of 2 probes found equal bits, 7 not run")


def test_an_output_that_sees_later_tokens_is_true_dependence():
    report = check_sequence_invariance(lambda x: x - x.mean(0), tokens())
    assert report.kind == "batch-dependent"
    assert probe_of(report, "prefixes").judged_by == "float64"


@pytest.mark.parametrize("length", [1, 4, 7, 9, 17, 19])
def test_prefixes_are_tried_around_powers_of_two_and_at_the_end(length):
    report = check_sequence_invariance(lambda x: x + (len(x) == length), tokens())
    probe = probe_of(report, "prefixes")
    assert (probe.num_rows, probe.num_different, probe.first_different) == (NUM_TOKENS - 1, length, 0)


def test_a_cache_that_forgets_is_found_where_it_forgets():
    forgetful = check_sequence_invariance(
        running_sum, tokens(), make_decoder=summing_decoder(forgets_chunks=True), padded=padded_sum
    )
    assert outcomes(forgetful, "batch-dependent") == FED_IN_PARTS
    assert probe_of(forgetful, "decode").num_different == NUM_TOKENS - 1
    assert probe_of(forgetful, "prefill 10, then decode").first_different == 10
    assert probe_of(forgetful, "chunked prefill of 16").first_different == 16
    assert probe_of(forgetful, "chunked prefill of 3").num_different == NUM_TOKENS - 3


def test_a_decoder_is_fed_in_order_from_an_empty_cache_and_in_the_sizes_named():
    fed = []

    def make_decoder():
        fed.append([])
        total = torch.zeros(3)

        def decode(x):
            nonlocal total
            fed[-1].append(len(x))
            outputs = total + running_sum(x)
            total = outputs[-1]
            return outputs

        return decode

    assert check_sequence_invariance(running_sum, tokens(), make_decoder=make_decoder).invariant
    assert fed == [[1] * 20, [10] + [1] * 10, [2] * 10, [3] * 6 + [2], [16, 4]]


@pytest.mark.parametrize("forgets", ["left", "right"])
def test_a_mask_that_forgets_the_padding_is_found_on_its_side(forgets):
    def padded(batch, lengths_B, side):
        if side == "left" and forgets == "left":
            return running_sum(batch)
        if side == "right" and forgets == "right":
            return running_sum(batch) + batch[:, -1:]
        return padded_sum(batch, lengths_B, side)

    report = check_sequence_invariance(running_sum, tokens(), padded=padded)
    assert outcomes(report, "batch-dependent") == {f"{forgets} padding"}


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_holds_the_sequence_and_two_of_its_prefixes_and_legal_tokens(side):
    batches = {}

    def padded(batch, lengths_B, side):
        batches[side] = (batch.clone(), lengths_B)
        return batch + 0

    ids = torch.arange(100, 100 + NUM_TOKENS)
    assert check_sequence_invariance(lambda x: x + 0, ids, padded=padded).invariant
    batch, lengths_B = batches[side]
    assert lengths_B.tolist() == [20, 10, 1]
    assert batch.shape == (3, 23)
    for row, length in zip(batch, lengths_B.tolist(), strict=True):
        real, padding = (row[:length], row[length:]) if side == "right" else (row[-length:], row[:-length])
        assert torch.equal(real, ids[:length])
        assert torch.isin(padding, ids).all()


def test_a_decoder_that_raises_has_failed():
    def make_decoder():
        raise RuntimeError("no cache today")

    report = check_sequence_invariance(running_sum, tokens(), make_decoder=make_decoder)
    assert report.kind == "failed"
    assert outcomes(report, "failed") == FED_IN_PARTS
    assert probe_of(report, "decode").note == "RuntimeError: no cache today"


def test_a_function_that_never_works_passes_nothing():
    report = check_sequence_invariance(lambda x: x[:3], tokens(), make_decoder=summing_decoder())
    assert report.kind == "failed"
    assert outcomes(report, "equal") == set()


def test_noise_is_not_repeatable():
    report = check_sequence_invariance(lambda x: x + torch.rand_like(x), tokens())
    assert report.kind == "not repeatable"


def test_two_tokens_are_enough_and_one_is_an_error():
    assert check_sequence_invariance(
        running_sum, tokens()[:2], make_decoder=summing_decoder(), padded=padded_sum
    ).invariant
    with pytest.raises(ValueError, match=r"at least 2 tokens, got shape \[1, 3\]"):
        check_sequence_invariance(running_sum, tokens()[:1])


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@torch.no_grad()
def test_the_example_for_a_transformers_model_runs_and_finds_decoding_exact():
    from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 1}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=32, hidden_size=16, intermediate_size=24, **heads)).eval()
    example = inspect.cleandoc(check_sequence_invariance.__doc__).partition("::\n")[2].partition("\nArgs:")[0]
    reports = []
    names = {"model": model, "ids": torch.arange(NUM_TOKENS), "DynamicCache": DynamicCache}
    names["check_sequence_invariance"] = lambda *arguments, **named: reports.append(
        check_sequence_invariance(*arguments, **named)
    )
    with batch_invariant_mode():
        exec(inspect.cleandoc(example), names)
    assert outcomes(reports[0], "equal") >= FED_IN_PARTS
