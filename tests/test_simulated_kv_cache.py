"""A trainer that rounds keys and values as its engine's cache: equal bits with that engine, and what is refused."""

import sys
import warnings
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mis_ext
from mis_ext.onpolicy import simulate_kv_cache
from mis_ext.onpolicy.kv_cache import DTYPES

HOOKS = {
    "custom_megatron_before_log_prob_hook_path": "mis_ext.simulate_engine_cache",
    "custom_megatron_before_train_step_hook_path": "mis_ext.simulate_engine_cache",
}


class Core(nn.Module):
    """What it was given."""

    def forward(self, query, key, value, attention_mask, **options):
        self.given = query, key, value
        return query + key + value


class Layer(nn.Module):
    def __init__(self, **config) -> None:
        super().__init__()
        self.core_attention, self.config = Core(), Namespace(**config)

    def forward(self, query, key, value):
        return self.core_attention(query, key, value, None, attn_mask_type=None)


def model(**config) -> nn.ModuleDict:
    return nn.ModuleDict({"decoder": nn.ModuleList([Layer(**config), Layer(**config)]), "mtp": Layer(**config)})


def streams() -> list[torch.Tensor]:
    return [torch.randn(5, 2, 4, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [False, True])
def test_values_are_rounded_and_the_gradient_is_not(dtype, queries) -> None:
    found, given = model(), streams()
    own = [values.detach().clone() for values in given]
    rounded = [values.to(DTYPES[dtype]).to(values.dtype) for values in own]
    with simulate_kv_cache(found, dtype, queries=queries) as cache:
        assert cache.num_layers == 2
        for layer in found["decoder"]:
            layer(*given).sum().backward()
            seen = layer.core_attention.given
            expected = [rounded[0] if queries else own[0], *rounded[1:]]
            assert all(torch.equal(*pair) for pair in zip(seen, expected, strict=True))
        found["mtp"](*given)
        assert all(torch.equal(*pair) for pair in zip(found["mtp"].core_attention.given, own, strict=True))
    assert not torch.equal(rounded[1], own[1])
    assert all(torch.equal(values.grad, torch.full_like(values, 2)) for values in given)
    found["decoder"][0](*given)
    assert all(torch.equal(*pair) for pair in zip(found["decoder"][0].core_attention.given, own, strict=True))


def test_what_cannot_be_simulated_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="dtype='fp4': a cache is simulated in fp8_e4m3 or fp8_e5m2"):
        simulate_kv_cache(model(), "fp4")
    with pytest.raises(ValueError, match="no layer has a core_attention"):
        simulate_kv_cache(nn.Linear(2, 2), "fp8_e4m3")
    with pytest.raises(ValueError, match=r"decoder.0: the cache of multi-latent attention \(MLA\) holds latents"):
        simulate_kv_cache(model(multi_latent_attention=True), "fp8_e4m3")
    found = model()
    cache = simulate_kv_cache([found], "fp8_e4m3")
    with pytest.raises(ValueError, match=r"decoder.0: the model simulates a cache already: remove that first"):
        simulate_kv_cache(found, "fp8_e5m2")
    cache.remove()
    simulate_kv_cache(found, "fp8_e5m2").remove()


@pytest.mark.parametrize("is_scoring", [True, False])
def test_the_hosts_flags_round_once_with_the_engines_dtype(is_scoring) -> None:
    def before(args: Namespace, chunks: list[nn.Module]) -> None:
        given = (chunks, "") if is_scoring else (3, 0, chunks, None, None)
        mis_ext.simulate_engine_cache(args, *given)

    args = Namespace(**HOOKS, sglang_kv_cache_dtype="fp8_e5m2", sglang_attention_backend=None)
    found, given = model(), streams()
    for _ in range(2):
        before(args, [found])
    layer = found["decoder"][0]
    layer(*given)
    query, key, _ = layer.core_attention.given
    assert torch.equal(query, given[0])
    assert torch.equal(key, given[1].to(torch.float8_e5m2).bfloat16())
    # FlashAttention 3 rounds queries too.
    found = model()
    before(Namespace(**{**vars(args), "sglang_kv_cache_dtype": "fp8_e4m3", "sglang_attention_backend": "fa3"}), [found])
    found["decoder"][1](*given)
    assert torch.equal(found["decoder"][1].core_attention.given[0], given[0].to(torch.float8_e4m3fn).bfloat16())


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_the_first_rank_says_what_is_rounded(rank, caplog, monkeypatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: rank is not None)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    with caplog.at_level("INFO"):
        mis_ext.simulate_engine_cache(Namespace(**HOOKS, sglang_kv_cache_dtype="fp8_e5m2"), [model()], "")
    said = ["mis_ext: 2 attention layers round keys and values to fp8_e5m2"]
    assert [record.message for record in caplog.records] == ([] if rank else said)


def test_flags_that_would_do_nothing_or_half_are_refused() -> None:
    args = {**HOOKS, "sglang_kv_cache_dtype": "auto"}
    with pytest.raises(ValueError, match=r"with --debug-train-only slime does not read SGLang's flags. Write it"):
        mis_ext.simulate_engine_cache(Namespace(**HOOKS), [model()], "")
    for dtype in ("auto", "bfloat16"):
        with pytest.raises(ValueError, match="there is nothing to simulate"):
            mis_ext.simulate_engine_cache(Namespace(**{**args, "sglang_kv_cache_dtype": dtype}), [model()], "")
    with pytest.raises(ValueError, match="dtype='fp4_e2m1': a cache is simulated in"):
        mis_ext.simulate_engine_cache(Namespace(**{**args, "sglang_kv_cache_dtype": "fp4_e2m1"}), [model()], "")
    for flag in HOOKS:
        with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')} is not set"):
            mis_ext.simulate_engine_cache(Namespace(**{**args, flag: None}), [model()], "")
    with pytest.raises(ValueError, match="called with 3 arguments behind args"):
        mis_ext.simulate_engine_cache(Namespace(**args), [model()], "", None)


@pytest.fixture(scope="module")
def device():
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformers")
    sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("examples", "benchmarks")]
    with warnings.catch_warnings():
        # Megatron-Core reports at import what is not installed.
        warnings.simplefilter("ignore")
        from grpo.distributed import Ranks
        from megatron.core import parallel_state
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks.start(context_parallel_size=1, seed=0).device
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("cache", "dtype", "num_steps"), [("fp8_e4m3", torch.bfloat16, 1), ("fp8_e5m2", torch.float32, 0)]
)
def test_an_aligned_engine_with_a_cache_of_8_bits_agrees_bit_for_bit(device, cache, dtype, num_steps) -> None:
    from onpolicy.demonstration import WORKLOADS, Experiment, Setting
    from onpolicy.pieces import ALL
    from simulated_cache import cache_of

    setting = Setting(engine="transformers", dtype=dtype, pieces=ALL)
    with cache_of(cache), Experiment(setting, WORKLOADS["short"], device) as experiment:
        simulation = simulate_kv_cache(experiment._trainer.model, cache)
        reports = [step.report for step in experiment.steps(num_steps)]
        simulation.remove()
        (without,) = experiment.steps(0)
    assert [report.verdict for report in reports] == ["EXACT"] * (num_steps + 1)
    assert without.report.mean_abs_diff > 0.01


@pytest.mark.whole_run
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_without_alignment_a_part_of_the_mismatch_goes(device) -> None:
    from onpolicy.demonstration import WORKLOADS
    from simulated_cache import rollout

    rows = [
        rollout(
            WORKLOADS["short"], device, dtype=torch.float32, aligned="nothing", cache="fp8_e5m2", simulated=simulated
        )
        for simulated in (False, True)
    ]
    before, after = (float(row["k3"]) for row in rows)
    assert before > 1e-3 > 1e-6 > after
    assert [row["the trainer"] for row in rows] == ["does not round", "rounds too"]
