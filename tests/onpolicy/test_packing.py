# SPDX-License-Identifier: Apache-2.0
"""The check of packed rows: leaks planted in three kinds of models are found, and the sound ones pass."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from mis_ext.onpolicy import check_packing, packed_megatron, packed_transformers

LENGTHS = (29, 5, 64, 3, 17)
VOCABULARY, WIDTH = 40, 16


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS]


class Tiny(nn.Module):
    """Embedding, one mixer over the tokens, output layer; ``leak`` says what the mixer forgets at a boundary."""

    def __init__(self, leak: str | None = None) -> None:
        super().__init__()
        self.leak = leak
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
            self.make()

    def forward(self, ids_T: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return self.head(self.mix(self.embedding(ids_T), lengths))


class Gru(Tiny):
    def make(self) -> None:
        self.gru = nn.GRU(WIDTH, WIDTH)

    def mix(self, states: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        parts = [states] if self.leak == "state" else states.split(lengths)
        return torch.cat([self.gru(part)[0] for part in parts])


class MambaLike(Tiny):
    """A causal convolution over four tokens, and a state that decays by a gate of the token."""

    def make(self) -> None:
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH)
        self.gate, self.into = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def mix(self, states: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        def whole(leak: str) -> list[torch.Tensor]:
            return [states] if self.leak == leak else list(states.split(lengths))

        padded = [nn.functional.pad(part.T, (3, 0))[None] for part in whole("convolution")]
        states = torch.cat([self.conv(part)[0].T for part in padded])
        out = []
        for part in whole("state"):
            state = torch.zeros(WIDTH)
            for keep, new in zip(self.gate(part).sigmoid(), self.into(part), strict=True):
                state = keep * state + (1 - keep) * new
                out.append(state)
        return torch.stack(out)


class Attention(Tiny):
    def make(self) -> None:
        self.qkv, self.place = nn.Linear(WIDTH, 3 * WIDTH), nn.Embedding(200, WIDTH)

    def mix(self, states: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        total = sum(lengths)
        ends = [total] if self.leak == "positions" else lengths
        states = states + self.place(torch.cat([torch.arange(length) for length in ends]))
        query, key, value = self.qkv(states).chunk(3, -1)
        index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        mask = torch.ones(total, total).tril().bool()
        if self.leak != "mask":
            mask &= index[:, None] == index
        scores = (query @ key.T / WIDTH**0.5).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Gru, MambaLike, Attention])
def test_a_sound_model_passes(kind, dtype) -> None:
    with torch.autocast("cpu", torch.bfloat16) if dtype == torch.bfloat16 else nullcontext():
        report = check_packing(kind(), sequences())
    assert report.passed, report
    assert report.differing == []
    assert report.explain().startswith(f"no difference above {report.allowed:.2g} nats between sequences")


LEAKS = [
    *((Gru, "state"), (MambaLike, "state"), (MambaLike, "convolution"), (Attention, "mask"), (Attention, "positions")),
]


@pytest.mark.parametrize(("kind", "leak"), LEAKS)
def test_a_planted_leak_is_found_with_its_sequences_and_positions(kind, leak) -> None:
    report = check_packing(kind(leak), sequences())
    assert not report.passed
    assert len(report.differing) == len(LENGTHS)
    for each, length in zip(report.sequences, LENGTHS, strict=True):
        assert each.length == length
        # The first log-prob is that of the second token, after the first.
        assert each.first_position == 1
        assert each.max_abs_diff > 100 * report.rounding
    if leak == "convolution":
        # Its output at one token reaches back three; then the state carries it on.
        assert report.sequences[2].max_abs_diff > 1e-3
    assert "read earlier sequences" in report.explain()
    with torch.autocast("cpu", torch.bfloat16):
        report = check_packing(kind(leak), sequences())
    assert len(report.differing) == len(LENGTHS), report


class Window(Tiny):
    """A convolution alone."""

    make = MambaLike.make

    def mix(self, states: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return self.conv(nn.functional.pad(states.T, (3, 0))[None])[0].T


def test_a_window_at_the_start_is_told_from_a_state() -> None:
    report = check_packing(Window(), sequences())
    # A window of four tokens: the outputs at 0, 1, and 2 are those of the log-probs at 1, 2, and 3.
    assert [(each.first_position, each.last_position) for each in report.sequences] == [
        (1, min(3, length - 1)) for length in LENGTHS
    ]
    assert "positions up to 3 differ" in report.explain()
    assert str(report).splitlines()[2].startswith("sequence 0, 29 tokens: differs by ")
    assert str(report).splitlines()[2].endswith(", positions 1 to 3")


def test_log_probs_may_be_returned_and_only_those_that_leak_are_named() -> None:
    model = Attention()

    def score(ids_T: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        log_probs = model(ids_T, lengths)[:-1].log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0]
        out = torch.cat([torch.zeros(1), log_probs])
        # The third sequence reads from position 10 on.
        if len(lengths) > 1 and lengths.index(64) > 0:
            start = sum(lengths[: lengths.index(64)])
            out[start + 10 : start + 20] += 0.01
        return out

    report = check_packing(score, sequences())
    assert [(each.index, each.first_position, each.last_position) for each in report.differing] == [(2, 10, 19)]


@pytest.mark.parametrize("rounding", [0.0, 0.01])
@pytest.mark.parametrize(("share", "passes"), [(0.99, True), (1.01, False)])
def test_four_times_the_rounding_of_the_first_places_is_allowed_behind_others(rounding, share, passes) -> None:
    most = 4 * rounding + 1e-5

    def score(ids_T: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        out = torch.zeros(len(ids_T), dtype=torch.float64)
        if len(lengths) > 1:
            out[: lengths[0]] = rounding
            out[lengths[0] :] = share * most
        return out

    report = check_packing(score, sequences())
    assert (report.rounding, report.allowed) == pytest.approx((rounding, most))
    assert report.passed is passes


def test_a_function_that_keeps_or_draws_something_is_no_leak_and_does_not_pass() -> None:
    generator, model = torch.Generator().manual_seed(0), Attention()
    report = check_packing(
        lambda ids, lengths: model(ids, lengths) + torch.randn(len(ids), VOCABULARY, generator=generator), sequences()
    )
    assert not report.passed
    assert "keeps a state between calls, is random" in report.explain()


@pytest.mark.parametrize(
    ("score", "error", "message"),
    [
        (lambda ids, lengths: None, TypeError, "must return a tensor"),
        (lambda ids, lengths: torch.zeros(3, 4), ValueError, "must return .T."),
        (lambda ids, lengths: torch.full((len(ids),), torch.nan), ValueError, "not finite"),
    ],
)
def test_what_is_no_log_prob_is_refused(score, error, message) -> None:
    with pytest.raises(error, match=message):
        check_packing(score, sequences())
    with pytest.raises(ValueError, match="at least 2 sequences"):
        check_packing(score, sequences()[:1])


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([3, 4], TypeError, r"sequences\[1\] must be a tensor, got list"),
        (torch.ones(1, 2).long(), ValueError, r"sequences\[1\] must be \[n\], got shape \[1, 2\]"),
        (torch.ones(2), TypeError, r"sequences\[1\] must be int64 or int32, got torch.float32"),
    ],
)
def test_what_is_no_sequence_of_ids_is_refused_by_name(ids, error, message) -> None:
    with pytest.raises(error, match=message):
        check_packing(Attention(), [torch.tensor([1, 2]), ids])


SHAPE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
PASSES = {
    "Qwen3Config": HEADS,
    "Qwen3MoeConfig": HEADS | EXPERTS,
    "GPT2Config": {"n_embd": 32, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0},
}
FAILS = {
    "MambaConfig": {"state_size": 8},
    "Mamba2Config": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1},
    "Qwen3NextConfig": HEADS | EXPERTS | DELTA | {"layer_types": ["linear_attention", "full_attention"]},
    "Lfm2Config": HEADS | {"layer_types": ["conv", "full_attention"]},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*PASSES, *FAILS])
def test_transformers_models_as_they_are(name) -> None:
    """Attention finds the boundaries in the positions; states and convolutions do not look for them."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, name)(**SHAPE, **(PASSES | FAILS)[name])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    report = check_packing(packed_transformers(model), sequences())
    assert report.passed is (name in PASSES)
    assert bool(report.differing) is (name in FAILS)


@pytest.fixture
def megatron(tmp_path, monkeypatch):
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("leaks", [False, True])
def test_a_megatron_core_model_gets_its_boundaries(megatron, leaks) -> None:
    from grpo.attention import GatheredAttention
    from grpo.cpu import megatron_device
    from grpo.model import ModelShape, build_model, transformer_config

    class OneSequence(GatheredAttention):
        def forward(self, query, key, value, attention_mask, *given, packed_seq_params=None, **others):
            ends = packed_seq_params.cu_seqlens_q[[0, -1]]
            whole = dataclasses.replace(packed_seq_params, cu_seqlens_q=ends, cu_seqlens_kv=ends)
            return super().forward(query, key, value, attention_mask, *given, packed_seq_params=whole, **others)

    shape = ModelShape(vocab_size=64, num_layers=2, hidden_size=32, ffn_hidden_size=64, num_heads=2, num_kv_heads=1)
    config = transformer_config(shape, context_parallel_size=1, calculate_per_token_loss=False)
    with megatron_device(torch.device("cpu")):
        model = build_model(shape, config, seed=0, core_attention=OneSequence if leaks else GatheredAttention).eval()
        report = check_packing(packed_megatron(model), sequences())
    assert report.passed is not leaks


@pytest.mark.parametrize(("shift", "passed"), [(1e-6, True), (1e-4, False)])
def test_where_first_places_have_equal_bits_the_last_digits_of_float32_are_rounding(shift, passed) -> None:
    def score(ids_T: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        out = torch.full((len(ids_T),), -2.0, dtype=torch.float64)
        out[lengths[0] :] -= shift
        return out

    report = check_packing(score, sequences())
    assert report.rounding == 0.0
    assert report.passed is passed


# Of a largest logit of 8 the last digits in bf16 and fp16 are 1/16 and 1/128: 2 and 8 of them are allowed.
@pytest.mark.parametrize(
    ("last", "shift", "dtype", "passed"),
    [
        (8, 1 / 8, torch.bfloat16, True),
        (8, 1 / 8, torch.float32, True),
        (8, 1 / 2, torch.bfloat16, False),
        (8 - 1 / 128, 1 / 16, torch.float16, True),
        (8 - 1 / 128, 1 / 16, torch.float64, True),
        (8 - 1 / 128, 1 / 4, torch.float16, False),
        (8 - 1e-5, 1 / 64, torch.float32, False),
    ],
)
def test_where_first_places_have_equal_bits_logits_of_16_bits_are_rounded(last, shift, dtype, passed) -> None:
    def score(ids_T: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        # The third column is outside the vocabulary.
        logits = torch.tensor([[8, last, -torch.inf]], dtype=torch.float64).repeat(len(ids_T), 1)
        # Log-probs change by half of it.
        logits[lengths[0] :, 0] -= shift
        return logits.to(dtype)

    report = check_packing(score, sequences=[torch.tensor([0, 1, 0]), torch.tensor([1, 0])])
    assert report.rounding == 0.0
    assert report.passed is passed


def behind_others(first: float, second: float, shift: float, dtype: torch.dtype, last: float | None = None):
    """A model of two logits, of which the first is less by ``shift`` behind others; ``last`` where none is scored."""

    def score(ids_T: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        logits = torch.tensor([first, second], dtype=torch.float64).repeat(len(ids_T), 1)
        logits[lengths[0] :, 0] -= shift
        if last is not None:
            logits[torch.tensor(lengths).cumsum(0) - 1, 0] = last
        return logits.to(dtype)

    return score


SHORT = [torch.tensor([0, 1, 0]), torch.tensor([1, 0])]


@pytest.mark.parametrize("last", [torch.inf, torch.nan, 60000.0])
def test_logits_that_score_no_token_do_not_count_as_rounding(last) -> None:
    report = check_packing(behind_others(8, 7, 4, torch.bfloat16, last), SHORT)
    assert report.allowed == pytest.approx(8 / 64 + 1e-5)
    assert len(report.differing) == 2
    with pytest.raises(ValueError, match="not finite"):
        check_packing(behind_others(torch.inf, 7, 0, torch.bfloat16), SHORT)


# Of bf16 logits a 64th of the largest is allowed: 0.48 and 0.52 nats.
@pytest.mark.parametrize(("largest", "passed"), [(31, True), (33, False), (-300, False)])
def test_logits_too_coarse_to_tell_do_not_pass(largest, passed) -> None:
    report = check_packing(behind_others(largest, largest, 0, torch.bfloat16), SHORT)
    assert report.differing == []
    assert report.passed is passed
    too_coarse = f"too coarse to tell: {report.allowed:.2g} nats can be rounding; check in float32"
    assert (report.explain() == too_coarse) is not passed
    # More than this is a leak all the same.
    found = check_packing(behind_others(largest, largest, 32, torch.bfloat16), SHORT).explain()
    assert "read earlier sequences" in found or "positions up to" in found


def test_the_sentence_says_how_large_a_leak_can_be_missed() -> None:
    # A difference of 0.13 nats, where the largest logit of 23 allows 23 / 64.
    report = check_packing(behind_others(23, 23, 0.25, torch.bfloat16), SHORT)
    assert report.passed
    assert report.sequences[0].max_abs_diff > 0.1
    assert report.explain().startswith("no difference above 0.36 nats")
