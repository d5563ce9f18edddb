"""Of which distribution a log-prob is, and what makes the trainer's comparable with it."""

import math

import pytest
import torch

from mis_ext.rollout.definitions.definition import define_log_probs
from mis_ext.rollout.definitions.distribution import Distribution, Truncation
from mis_ext.rollout.definitions.kept_tokens import kept_mask
from mis_ext.rollout.definitions.sampling_parameters import SamplingParameters
from mis_ext.rollout.definitions.scoring import behavior_log_probs, trainer_log_probs
from mis_ext.rollout.definitions.servers import Speculation
from mis_ext.rollout.definitions.vocabulary import check_vocabulary, padded_vocab_size, padding_log_mass

# softmax of these is 1/2, 1/4, 1/8, 1/8; at temperature 1/2 it is 16/22, 4/22, 1/22, 1/22.
PROBABILITIES = (0.5, 0.25, 0.125, 0.125)
LOGITS = [math.log(p) + 3.0 for p in PROBABILITIES]


def read(server="sglang", **request) -> SamplingParameters:
    return SamplingParameters.from_request(request, server=server)


def define(server="sglang", *, mode="raw_logprobs", original=False, backend=None, speculation=None, **request):
    return define_log_probs(
        read(server, **request),
        server=server,
        logprobs_mode=mode,
        return_original=original,
        sampling_backend=backend,
        speculation=speculation,
    )


def score(token_ids, distribution, logits=LOGITS, **kwargs) -> list[float]:
    """Probabilities, from float64 logits."""
    logits_TV = torch.tensor([logits] * len(token_ids), dtype=torch.float64)
    return trainer_log_probs(logits_TV, token_ids, distribution, **kwargs).log_probs_T.exp().tolist()


def test_probabilities_by_hand() -> None:
    every = [0, 1, 2, 3]
    assert score(every, Distribution()) == pytest.approx(PROBABILITIES)
    assert score(every, Distribution(temperature=0.5)) == pytest.approx([16 / 22, 4 / 22, 1 / 22, 1 / 22])
    assert score(every, Distribution(truncation=Truncation(top_k=2))) == pytest.approx([2 / 3, 1 / 3, 0, 0])
    bias = Distribution(logit_bias=((3, math.log(4)), (0, -math.log(2))))
    assert score(every, bias) == pytest.approx([2 / 9, 2 / 9, 1 / 9, 4 / 9])
    # The bias is divided by the temperature too: weights 2/8, 2/8, 1/8, 4/8 are squared.
    both = Distribution(logit_bias=bias.logit_bias, temperature=0.5)
    assert score(every, both) == pytest.approx([4 / 25, 4 / 25, 1 / 25, 16 / 25])
    # The temperature comes before the truncation: 16/22 and 4/22 are kept, 20/22 >= 0.9.
    tempered = Distribution(temperature=0.5, truncation=Truncation(top_p=0.9))
    assert score(every, tempered) == pytest.approx([16 / 20, 4 / 20, 0, 0])


KEPT = {
    "top_k": (Truncation(top_k=3), [0, 1, 2]),
    "top_k above the vocabulary": (Truncation(top_k=9), [0, 1, 2, 3]),
    "top_k with ties": (Truncation(top_k=3, keeps_ties="top_k"), [0, 1, 2, 3]),
    "top_p drops ties": (Truncation(top_p=0.8), [0, 1, 2]),
    "top_p drops ties that top_k keeps": (Truncation(top_k=3, top_p=0.8, keeps_ties="top_k"), [0, 1, 2]),
    "top_p with ties": (Truncation(top_p=0.8, keeps_ties="all"), [0, 1, 2, 3]),
    "both with ties": (Truncation(top_k=3, top_p=0.8, keeps_ties="all"), [0, 1, 2, 3]),
    "top_p": (Truncation(top_p=0.6), [0, 1]),
    "top_p below the first": (Truncation(top_p=0.1), [0]),
    "top_p met exactly": (Truncation(top_p=0.75), [0, 1]),
    "top_p met exactly, pytorch": (Truncation(top_p=0.75, keeps_next=True), [0, 1, 2]),
    "min_p": (Truncation(min_p=0.4), [0, 1]),
    "min_p met exactly": (Truncation(min_p=0.25), [0, 1, 2, 3]),
    "all three, joint": (Truncation(top_k=3, top_p=0.8, min_p=0.1), [0, 1, 2]),
    # Of the 3/4 within top_k=2, the first token has 2/3.
    "top_p of top_k": (Truncation(top_k=2, top_p=0.6, mass_of="top_k"), [0]),
    "top_p beside top_k": (Truncation(top_k=2, top_p=0.6), [0, 1]),
    "top_p of top_k, not of min_p": (Truncation(top_k=3, min_p=0.4, top_p=0.6, mass_of="top_k"), [0, 1]),
    "top_p of both": (Truncation(top_k=3, min_p=0.4, top_p=0.6, mass_of="top_k_and_min_p"), [0]),
}


@pytest.mark.parametrize(("truncation", "kept"), KEPT.values(), ids=KEPT)
def test_the_kept_tokens_by_hand(truncation, kept) -> None:
    # Exact in binary, so that equality at the edge is equality.
    probabilities = torch.tensor([PROBABILITIES])
    assert kept_mask(probabilities, truncation)[0].nonzero()[:, 0].tolist() == kept
    shuffled = kept_mask(probabilities[:, [2, 0, 1, 3]], truncation)[0]
    # Of two ties, a sort that is stable keeps the first.
    assert sorted([2, 0, 1, 3][i] for i in shuffled.nonzero()[:, 0]) == kept


def flashinfer_keeps(probabilities_V, k, p) -> list[bool]:
    """By its rejection: a drawn token is taken unless k tokens, or a mass of p, are strictly more probable."""
    above_VV = probabilities_V > probabilities_V[:, None]
    return ((above_VV.sum(1) < k) & ((probabilities_V * above_VV).sum(1) < p)).tolist()


def vllm_pytorch_keeps(probabilities_V, k, p) -> list[bool]:
    """By its sort: what is below the k-th goes, then the least probable, up to a mass of 1 - p."""
    ascending = probabilities_V.sort(stable=True)
    left = ascending.values.where(ascending.values >= ascending.values[-k], torch.tensor(0.0))
    gone = (left / left.sum()).cumsum(0) <= 1 - p
    gone[-1] = False
    return torch.zeros_like(gone).scatter(0, ascending.indices, ~gone & (left > 0)).tolist()


@pytest.mark.parametrize("seed", range(40))
def test_servers_keep_the_tied_tokens_that_their_own_rules_keep(seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Weights of 1 to 5 sixty-fourths: many ties, and every sum exact.
    weights_V = torch.randint(1, 6, (16,), generator=generator).double()
    weights_V[0] += 64 - weights_V.sum()
    probabilities_V = weights_V / 64
    k = int(torch.randint(1, 17, (), generator=generator))
    # Never a sum of weights, so that no rule meets its limit exactly.
    p = (int(torch.randint(1, 64, (), generator=generator)) + 0.5) / 64
    kept = kept_mask(probabilities_V[None], define(top_k=k, top_p=p).sampled.truncation or Truncation())[0].tolist()
    assert k == 1 or kept == flashinfer_keeps(probabilities_V, k, p)
    for top_k in (None, k):
        definition = define("vllm", mode="processed_logprobs", backend="pytorch", top_k=top_k, top_p=p)
        kept = kept_mask(probabilities_V[None], definition.sampled.truncation)[0]
        expected = vllm_pytorch_keeps(probabilities_V, top_k or 16, p)
        # Which of the tied ones stay depends on the sort.
        assert k == 1 or sorted(probabilities_V[kept].tolist()) == sorted(probabilities_V[expected].tolist())


def test_a_token_outside_the_kept_ones_is_reported_and_has_probability_0() -> None:
    logits = torch.tensor([LOGITS, LOGITS], requires_grad=True)
    scored = trainer_log_probs(logits, [1, 2], Distribution(truncation=Truncation(top_k=2)))
    assert scored.outside_T.tolist() == [False, True]
    assert scored.log_probs_T[1] == -torch.inf
    torch.where(scored.outside_T, 0.0, scored.log_probs_T).sum().backward()
    # d log p_1 = (0, 1) - (2/3, 1/3) within the kept tokens, nothing elsewhere.
    assert logits.grad == pytest.approx(torch.tensor([[-2 / 3, 2 / 3, 0, 0], [0, 0, 0, 0]]))


def test_the_kept_tokens_of_the_server_take_the_place_of_the_trainers() -> None:
    top_1 = Distribution(truncation=Truncation(top_k=1))
    assert score([2, 0], top_1, kept_ids=[[0, 2], [0]]) == pytest.approx([0.2, 1.0])
    for kept_ids, message in (
        ([[0]], "2 positions and 1 lists of kept ids"),
        ([[], [0]], r"at least one, from 0 to 3, got \[\]"),
        ([[0, 4], [0]], r"from 0 to 3, got \[0, 4\]"),
        ([[-1], [0]], r"from 0 to 3, got \[-1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            score([2, 0], top_1, kept_ids=kept_ids)


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_half_precision_is_scored_in_float32_and_float64_stays(dtype, expected) -> None:
    logits = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    scored = trainer_log_probs(logits, torch.tensor([1, 2, 3, 4]), Distribution(temperature=0.7)).log_probs_T
    assert scored.dtype == expected
    wide = (logits.double() / 0.7).log_softmax(-1)[range(4), [1, 2, 3, 4]]
    assert scored.tolist() == pytest.approx(wide.tolist(), abs=1e-6)


def test_what_cannot_be_scored_is_refused() -> None:
    logits = torch.tensor([LOGITS])
    with pytest.raises(ValueError, match=r"whole vocabulary .*, got shape \[4\]: .* cannot be moved to another temp"):
        trainer_log_probs(logits[0], [1, 2, 3, 0], Distribution(temperature=0.7))
    with pytest.raises(ValueError, match=r"logits of 1 positions and token ids of shape \[2\]"):
        trainer_log_probs(logits, [1, 2], Distribution())
    with pytest.raises(ValueError, match="token ids from 4 to 4, legal are 0 to 3"):
        trainer_log_probs(logits, [4], Distribution())
    with pytest.raises(ValueError, match="token ids from 3 to 3, legal are 0 to 2"):
        trainer_log_probs(logits, [3], Distribution(), vocab_size=3)
    with pytest.raises(ValueError, match=r"vocab_size must be in \[1, 4\], the width of the logits, got 5"):
        trainer_log_probs(logits, [3], Distribution(), vocab_size=5)
    with pytest.raises(ValueError, match="the trainer cannot compute this: because"):
        trainer_log_probs(logits, [3], Distribution(unrepeatable=("because",)))


# Server, its switches, the request, what the tokens were drawn from, and what was returned.
NUCLEUS = {"temperature": 0.7, "top_p": 0.9}
DEFINITIONS = {
    "sglang, plain": ("sglang", {}, {}, "softmax(logits)", "softmax(logits)"),
    "sglang": (
        *("sglang", {}, NUCLEUS),
        *("softmax(logits / 0.7), renormalised over top_p=0.9", "softmax(logits / 0.7)"),
    ),
    "sglang, original": (
        *("sglang", {"original": True}, NUCLEUS),
        *("softmax(logits / 0.7), renormalised over top_p=0.9", "softmax(logits)"),
    ),
    "sglang, bias and original": (
        *("sglang", {"original": True}, {"temperature": 0.7, "logit_bias": {"3": 1.5}}),
        *("softmax((logits + logit_bias) / 0.7)", "softmax(logits + logit_bias)"),
    ),
    "sglang, greedy": (
        *("sglang", {}, {"temperature": 0.0, "top_p": 0.9}),
        *("softmax(logits), renormalised over top_k=1", "softmax(logits)"),
    ),
    "sglang, penalty": (
        *("sglang", {}, {"presence_penalty": 0.5}),
        *("softmax(changed logits)", "softmax(changed logits)"),
    ),
    "vllm, raw": (
        *("vllm", {}, {**NUCLEUS, "logit_bias": {"3": 1.5}}),
        *("softmax((logits + logit_bias) / 0.7), renormalised over top_p=0.9", "softmax(logits)"),
    ),
    "vllm, processed": (
        *("vllm", {"mode": "processed_logprobs"}, {**NUCLEUS, "top_k": 40, "min_p": 0.1}),
        *(["softmax(logits / 0.7), renormalised over top_k=40, top_p=0.9, min_p=0.1"] * 2),
    ),
    "vllm, greedy and processed": (
        *("vllm", {"mode": "processed_logprobs"}, {"temperature": 0.0}),
        *("softmax(logits), renormalised over top_k=1", "softmax(logits)"),
    ),
    "vllm, grammar and raw": (
        *("vllm", {}, {"structured_outputs": {"regex": "[0-9]"}, "repetition_penalty": 1.2}),
        *("softmax(changed logits)", "softmax(changed logits)"),
    ),
}


@pytest.mark.parametrize(
    ("server", "switches", "request_", "sampled", "returned"), DEFINITIONS.values(), ids=DEFINITIONS
)
def test_the_truth_and_what_is_returned(server, switches, request_, sampled, returned) -> None:
    definition = define(server, **switches, **request_)
    assert (str(definition.sampled), str(definition.returned)) == (sampled, returned)
    lines = definition.explain()
    assert lines[:2] == [f"sampled from {sampled}", f"returned: log-probs of {returned}"]


def test_which_numbers_are_those_of_the_behavior_policy() -> None:
    for is_behavior, definition in (
        (True, define()),
        (True, define(temperature=0.7)),
        (False, define(**NUCLEUS)),
        (False, define(temperature=0.7, original=True)),
        (True, define("vllm")),
        (False, define("vllm", temperature=0.7)),
        (True, define("vllm", mode="processed_logprobs", **NUCLEUS)),
        (False, define("vllm", mode="processed_logits", **NUCLEUS)),
        (False, define("vllm", presence_penalty=0.5)),
        (True, define("vllm", mode="processed_logprobs", presence_penalty=0.5)),
    ):
        assert definition.is_behavior == is_behavior
        assert any("not those of the behavior policy" in line for line in definition.explain()) != is_behavior


def test_the_correction_is_named() -> None:
    assert "the trainer's log_softmax(logits) is comparable as it is" in define("vllm", **NUCLEUS).explain()
    assert "to compare: divide the trainer's logits by 0.7 before log_softmax" in define(**NUCLEUS).explain()
    everything = define("vllm", mode="processed_logprobs", **NUCLEUS, logit_bias={"1": 2}).explain()
    assert everything[2] == (
        "to compare: add logit_bias to the trainer's logits, then divide the trainer's logits by 0.7 before "
        "log_softmax, then renormalise over the tokens that top_p=0.9 keeps"
    )
    assert any("return_sampling_mask: true" in line for line in define(**NUCLEUS).explain())
    assert any("processed_logprobs" in line for line in define("vllm", temperature=0.7).explain())


def test_what_cannot_be_repeated_is_named_with_the_reason_and_refused() -> None:
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    definition = define(**penalties, regex="a+", min_new_tokens=4, custom_logit_processor="code")
    lines = "\n".join(definition.explain())
    assert not definition.is_comparable
    assert "the trainer's log-probs cannot be made comparable" in lines
    for reason in (
        "repetition_penalty=1.2: it scales the logits of tokens that occur in the response by their sign",
        "frequency_penalty=0.5: it lowers logits by the count",
        "presence_penalty=0.25: it lowers the logits",
        "regex='a+': which tokens it forbids",
        "min_new_tokens=4: it changes logits inside the server",
        "custom_logit_processor='code'",
    ):
        assert lines.count(reason) == 1
    with pytest.raises(ValueError, match="cannot compute this: regex"):
        trainer_log_probs(torch.tensor([LOGITS]), [0], definition.returned)
    in_vllm = define("vllm", **penalties)
    assert in_vllm.is_comparable
    assert "repetition_penalty=1.2: it scales the logits of tokens that occur in the prompt and response" in "\n".join(
        in_vllm.explain()
    )
    watermarked = define(watermark={"key": 1}, temperature=0.7)
    assert watermarked.is_comparable
    assert not watermarked.is_behavior


def test_logits_are_never_comparable() -> None:
    for mode in ("raw_logits", "processed_logits"):
        definition = define("vllm", mode=mode)
        assert not definition.is_comparable
        assert not definition.is_behavior
        assert definition.explain()[1] == "returned: logits of softmax(logits)"
        assert "--logprobs-mode processed_logprobs" in definition.explain()[2]
        with pytest.raises(ValueError, match="not a matter of renormalisation"):
            behavior_log_probs(definition, [1.0], [[1.0]])


def test_greedy_is_no_draw_and_a_top_k_of_1_at_a_temperature_is_doubtful_in_sglang() -> None:
    for definition in (define(temperature=0.0), define("vllm", temperature=1e-6), define("vllm", top_k=1)):
        assert definition.is_greedy
        assert any("no importance weight" in line for line in definition.explain())
        assert not definition.doubts
    assert not define(temperature=5e-6).is_greedy
    doubtful = define(temperature=0.7, top_k=1)
    assert doubtful.is_greedy
    assert "SGLang divides by temperature=0.7 only where the batch holds a request" in doubtful.explain()[-1]


def test_a_trainers_log_probs_agree_after_the_correction_and_not_before() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(64, 100, dtype=torch.float64, generator=generator)
    # A server in plain float32: temperature, then softmax, then the truncated weights.
    tempered = (logits.float() / 0.7).softmax(-1)
    order = tempered.sort(dim=-1, descending=True)
    weights = order.values.masked_fill(order.values.cumsum(-1) - order.values >= 0.9, 0.0)
    ids = order.indices.gather(1, torch.multinomial(weights, 1, generator=generator))[:, 0]
    returned = tempered.gather(1, ids[:, None])[:, 0].log().double()
    drawn_from = torch.zeros_like(weights).scatter(1, order.indices, weights / weights.sum(-1, keepdim=True))
    behavior = drawn_from.gather(1, ids[:, None])[:, 0].log().double()

    definition = define(**NUCLEUS)
    plain = trainer_log_probs(logits, ids, Distribution()).log_probs_T
    assert (plain - returned).abs().max() > 0.1
    assert (trainer_log_probs(logits, ids, definition.returned).log_probs_T - returned).abs().max() < 1e-6
    sampled = trainer_log_probs(logits, ids, definition.sampled)
    assert not sampled.outside_T.any()
    assert (sampled.log_probs_T - behavior).abs().max() < 1e-6
    assert (sampled.log_probs_T - returned).abs().max() > 0.05

    told = behavior_log_probs(definition, returned.tolist(), tempered.log().tolist())
    assert (told.num_unproven, told.num_outside) == (0, 0)
    assert told.log_probs == pytest.approx(behavior.tolist(), abs=1e-6)


def test_behavior_log_probs_by_hand() -> None:
    logs = [math.log(p) for p in PROBABILITIES]
    definition = define(top_p=0.6)
    proven_by_next = pytest.approx(math.log(2 / 3))
    # Two are kept, with 3/4 of the mass; the third proves it.
    told = behavior_log_probs(definition, [logs[1]] * 4, [logs, logs[:3], logs[:2], logs[:1]])
    assert told.num_unproven == 2
    assert told.log_probs == [pytest.approx(math.log(1 / 3)), pytest.approx(math.log(1 / 3)), None, None]
    outside = behavior_log_probs(definition, [logs[2], logs[0]], [logs, logs[::-1]])
    assert (outside.num_outside, outside.num_unproven) == (1, 0)
    assert outside.log_probs == [None, pytest.approx(math.log(2 / 3))]
    assert behavior_log_probs(definition, [logs[0]], [[]]).num_unproven == 1
    for backend, proven in (("pytorch", [pytest.approx(math.log(2 / 3))] * 2), ("flashinfer", [None, proven_by_next])):
        top_2 = behavior_log_probs(define(top_k=2, backend=backend), [logs[0]] * 2, [logs[:2], logs[:3]])
        assert top_2.log_probs == proven
    # Half the first's probability: the third is too small, the second alone does not say so.
    min_p = define(min_p=0.5)
    assert behavior_log_probs(min_p, [logs[0]] * 2, [logs[:3], logs[:2]]).num_unproven == 1


def test_a_share_of_a_mass_that_is_not_in_the_list_is_unproven() -> None:
    logs = [math.log(p) for p in PROBABILITIES]
    # FlashInfer's top-p is of the mass within top-k here, of which a list of two does not tell.
    definition = define(top_k=2, top_p=0.4, min_p=0.01)
    assert definition.sampled.truncation.mass_of == "top_k"
    told = behavior_log_probs(definition, [logs[0]] * 2, [logs[:3], logs[:2]])
    assert told.log_probs == [pytest.approx(0.0), None]
    # With ties, the k-th is no proof.
    in_vllm = define("vllm", top_k=3)
    told = behavior_log_probs(in_vllm, [logs[0]] * 2, [logs, logs[:3]])
    assert told.log_probs == [pytest.approx(logs[0]), None]


def test_behavior_log_probs_that_are_returned_are_handed_on_and_others_refused() -> None:
    assert behavior_log_probs(define(temperature=0.7), [-1.0], [[]]).log_probs == [-1.0]
    with pytest.raises(ValueError, match="not a matter of renormalisation: sampled from"):
        behavior_log_probs(define(**NUCLEUS, original=True), [-1.0], [[-1.0]])
    with pytest.raises(ValueError, match="2 log-probs and 1 lists"):
        behavior_log_probs(define(**NUCLEUS), [-1.0, -2.0], [[-1.0]])


def test_the_servers_keep_different_tokens_at_the_edge() -> None:
    request = {"top_k": 3, "top_p": 0.5, "min_p": 0.1}
    rules = {
        "flashinfer": define(**request).sampled.truncation,
        "pytorch": define(**request, backend="pytorch").sampled.truncation,
        "vllm": define("vllm", **request).sampled.truncation,
    }
    limits = {"top_k": 3, "top_p": 0.5, "min_p": 0.1}
    assert rules == {
        "flashinfer": Truncation(**limits, mass_of="top_k", keeps_ties="all"),
        "pytorch": Truncation(**limits, keeps_next=True),
        "vllm": Truncation(**limits, mass_of="top_k_and_min_p", keeps_ties="all"),
    }
    # What the processed modes return is cut by Triton, since FlashInfer cannot return it, or by PyTorch.
    for backend, ties in ((None, "none"), ("triton", "none"), ("pytorch", "top_k")):
        processed = define("vllm", mode="processed_logprobs", backend=backend, **request)
        assert processed.returned.truncation == Truncation(**limits, mass_of="top_k_and_min_p", keeps_ties=ties)
    for alone in ({"top_k": 3, "top_p": 0.5}, {"top_p": 0.5, "min_p": 0.1}):
        assert define(**alone).sampled.truncation.mass_of == "all"
        # One kernel for the whole batch, which another request with min-p changes.
        doubts = " ".join(define(**alone).doubts)
        assert ("where the batch holds a request with min_p" in doubts) is ("top_k" in alone)
        assert not define(**alone, backend="pytorch").doubts
    assert not define(top_p=0.5).doubts
    assert define("vllm", top_p=0.5).sampled.truncation.mass_of == "all"
    assert define("vllm", top_p=0.5, top_k=3).sampled.truncation.mass_of == "top_k_and_min_p"


def test_a_list_of_nearly_all_the_mass_counts_as_whole_to_the_stated_precision() -> None:
    # Of the mass within top_k=50 the list of two says all but 9e-7.
    definition = define(top_k=50, top_p=0.999_999_9, min_p=1e-9)
    top = [math.log(0.6), math.log(0.4 - 9e-7)]
    (told,) = behavior_log_probs(definition, top[:1], [top]).log_probs
    assert told == pytest.approx(math.log(0.6), abs=1e-6)
    short = [math.log(0.6), math.log(0.4 - 2e-6)]
    assert behavior_log_probs(definition, short[:1], [short]).log_probs == [None]


def test_speculative_decoding_truncates_in_another_order_without_min_p() -> None:
    request = {"top_k": 3, "top_p": 0.5, "min_p": 0.1}
    speculative = define(**request, speculation=Speculation())
    kept = Truncation(top_k=3, top_p=0.5, mass_of="top_k", keeps_ties="all")
    assert speculative.sampled.truncation == kept
    assert define(**request, backend="pytorch", speculation=Speculation()).sampled.truncation == kept
    assert define(min_p=0.1, speculation=Speculation()).sampled.truncation is None
    lines = "\n".join(speculative.explain())
    for told in (
        "the most probable token",
        "min_p=0.1: verification ignores it",
        "verification takes top_p of the mass",
    ):
        assert lines.count(told) == 1
    plain = define(temperature=0.7, speculation=Speculation())
    assert plain.is_behavior
    assert plain.sampled == define(temperature=0.7).sampled


@pytest.mark.parametrize("thresholds", [{"threshold_acc": 0.9}, {"threshold_single": 0.5}])
def test_acceptance_thresholds_of_drafts_change_what_is_drawn_and_not_what_is_returned(thresholds) -> None:
    definition = define(temperature=0.7, speculation=Speculation(**thresholds))
    assert not definition.is_behavior
    assert definition.is_comparable
    assert "how likely a token is depends on what was drafted; set both to 1" in "\n".join(definition.explain())
    with pytest.raises(ValueError, match="the trainer cannot compute this: speculative_accept_threshold"):
        trainer_log_probs(torch.tensor([LOGITS]), [0], definition.sampled)
    # A greedy request is not drawn, whatever is accepted.
    assert not define(temperature=0.0, speculation=Speculation(**thresholds)).sampled.unrepeatable


@pytest.mark.parametrize(("value", "error"), [(0.0, ValueError), (1.5, ValueError), ("1", TypeError)])
def test_a_threshold_out_of_range_is_named(value, error) -> None:
    with pytest.raises(error, match=r"threshold_acc must be .*in \(0, 1\]"):
        Speculation(threshold_acc=value)


def test_slimes_request_for_the_kept_tokens_is_known() -> None:
    request = {**NUCLEUS, "custom_params": {"return_top_p_token_ids": True}}
    definition = define(**request)
    assert read(**request).unknown == ()
    # slime's SGLang renormalises over what it returns.
    assert definition.is_behavior
    assert definition.returned.truncation == define(**NUCLEUS).sampled.truncation
    assert any("only slime's SGLang knows it" in doubt for doubt in definition.doubts)
    assert not define(custom_params={"return_top_p_token_ids": False}, **NUCLEUS).is_behavior
    assert read(custom_params={"seed_of_mine": 1}).unknown == ("custom_params.seed_of_mine",)
    with pytest.raises(TypeError, match="custom_params must be a mapping, got 3"):
        read(custom_params=3)


def test_a_request_is_read_with_nulls_and_absent_keys_as_neutral() -> None:
    neutral = SamplingParameters()
    assert read() == neutral
    nulls = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "logit_bias", "repetition_penalty", "regex"))
    assert read(**nulls) == neutral
    harmless = {"max_new_tokens": 5, "stop": ["a"], "messages": [], "response_format": {"type": "text"}}
    assert read(**harmless, tool_choice="auto", min_new_tokens=0, json_schema="") == neutral
    for all_tokens in (0, -1):
        assert read(top_k=all_tokens).top_k is None
    assert read(logit_bias={"7": 1, "3": -2.5, "4": 0}).logit_bias == ((3, -2.5), (7, 1.0))


def test_what_constrains_the_tokens_is_read() -> None:
    assert read(tool_choice="required").grammars == ("tool_choice='required'",)
    assert read(response_format={"type": "json_object"}).grammars == ("response_format={'type': 'json_object'}",)
    assert read(min_tokens=3, bad_words=["x"]).processors == ("min_tokens=3", "bad_words=['x']")
    read_unknown = read(temprature=0.7, mirostat=2)
    assert read_unknown.unknown == ("mirostat", "temprature")
    assert define(mirostat=2).explain()[-1] == "mirostat: unknown, it may change what is sampled"


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({"temperature": -0.1}, ValueError, r"temperature must be in \[0, inf\], got -0.1"),
        ({"temperature": math.inf}, ValueError, "temperature must be finite, got inf"),
        ({"temperature": math.nan}, ValueError, "temperature must be in"),
        ({"temperature": "0.7"}, TypeError, "temperature must be a number"),
        ({"temperature": True}, TypeError, "temperature must be a number"),
        ({"top_p": 0.0}, ValueError, "top_p must be above 0"),
        ({"top_p": 1.5}, ValueError, r"top_p must be in \[0, 1\], got 1.5"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty must be above 0"),
        ({"presence_penalty": 3}, ValueError, r"presence_penalty must be in \[-2, 2\], got 3"),
        ({"top_k": -2}, ValueError, "top_k must be at least 1, or 0 or -1 for all tokens, got -2"),
        ({"top_k": 1.0}, TypeError, "top_k must be a whole number"),
        ({"top_k": True}, TypeError, "top_k must be a whole number"),
        ({"logit_bias": [1]}, TypeError, r"logit_bias must map token ids to numbers, got \[1\]"),
        ({"logit_bias": {"1": math.nan}}, ValueError, r"logit_bias\[1\] must be in"),
    ],
)
def test_a_parameter_out_of_range_is_named(request_, error, message) -> None:
    with pytest.raises(error, match=message):
        read(**request_)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"server": "sglagn"}, r"server must be one of sglang \| vllm, got 'sglagn' \(did you mean 'sglang'\?\)"),
        ({"mode": "raw"}, "logprobs_mode must be one of raw_logprobs"),
        ({"backend": "torch"}, r"sampling_backend must be one of flashinfer \| pytorch, got"),
        ({"backend": "triton"}, r"sampling_backend must be one of flashinfer \| pytorch, got"),
        (
            {"server": "vllm", "mode": "processed_logits", "backend": "flashinfer"},
            r"sampling_backend must be one of triton \| pytorch, got 'flashinfer'",
        ),
        (
            {"server": "vllm", "speculation": Speculation()},
            "speculation is described for sglang only, got server 'vllm'",
        ),
    ],
)
def test_an_unknown_server_mode_or_backend_is_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        define(**change)


def test_padding_lowers_every_log_prob_by_its_log_mass() -> None:
    # Weights 1/2, 1/4, 1/8, 1/8 and two columns of padding with 1/4 each: 3/2 instead of 1.
    padded = [math.log(p) for p in (*PROBABILITIES, 0.25, 0.25)]
    logits = torch.tensor([padded], dtype=torch.float64)
    assert padding_log_mass(logits, 4).tolist() == pytest.approx([math.log(1.5)])
    # Squared: 22/64 and 8/64.
    assert padding_log_mass(logits, 4, temperature=0.5).tolist() == pytest.approx([math.log(30 / 22)])
    assert padding_log_mass(logits, 6).tolist() == [0.0]
    assert score([0], Distribution(), padded) == pytest.approx([1 / 3])
    assert score([0], Distribution(), padded, vocab_size=4) == pytest.approx([1 / 2])
    # The kept tokens are among the real ones, too.
    by_padding = Distribution(truncation=Truncation(top_k=3))
    assert score([2], by_padding, [math.log(p) for p in (*PROBABILITIES, 9.0)], vocab_size=4) == pytest.approx([1 / 7])


def test_megatrons_padding_is_that_of_its_own_formula() -> None:
    assert padded_vocab_size(50257) == 50304
    assert padded_vocab_size(50257, tensor_parallel_size=8) == 51200
    assert padded_vocab_size(151936) == 151936
    assert padded_vocab_size(100, divisible_by=1, tensor_parallel_size=2) == 100


def test_the_vocabularies_are_compared_with_the_numbers() -> None:
    assert check_vocabulary(tokenizer_size=50, model_size=50, trainer_size=50).messages == ()
    report = check_vocabulary(tokenizer_size=151669, model_size=151936, trainer_size=152064)
    assert (report.num_nameless, report.num_padding) == (267, 128)
    assert report.messages[0].startswith("267 rows from 151669 on have no token")
    assert report.messages[1].startswith("128 rows of padding from 151936 on take part in the trainer's softmax")
    with pytest.raises(ValueError, match="the tokenizer has 51 ids and the model 50 rows"):
        check_vocabulary(tokenizer_size=51, model_size=50, trainer_size=64)
    with pytest.raises(ValueError, match="the model has 50 rows and the trainer 49"):
        check_vocabulary(tokenizer_size=50, model_size=50, trainer_size=49)
