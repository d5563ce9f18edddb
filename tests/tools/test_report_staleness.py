# SPDX-License-Identifier: Apache-2.0
"""Stale weights are named: on what the example dumped (`tests/data/example_dumps/record.py`), and where it is hard."""

import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from archived import unpacked
from engines import COUNT, Engines, collected, engines, sampled_ids

from mis_ext.rollout.custom_generate import host
from mis_ext.tools.diagnosis import Diagnosis
from mis_ext.tools.diagnosis.steps import Step, story_of
from mis_ext.tools.dumps import Dumps
from mis_ext.tools.dumps.formats import CANARY
from mis_ext.tools.report import Collector, Origin, Part, Parts

Sides = tuple[list[torch.Tensor], list[torch.Tensor]]

ROOT = Path(__file__).parents[2]
ARCHIVE = Path(__file__).parents[1] / "data" / "example_dumps" / "dumps.tar.xz"
VERSIONS = ("weight_versions", "train_weight_version")


@pytest.fixture(scope="module")
def dumps(tmp_path_factory) -> Path:
    return unpacked(ARCHIVE, tmp_path_factory.mktemp("dumps"))


def files(dumps: Path, interval: int) -> list[Path]:
    return sorted((dumps / f"sync_every_{interval}").iterdir(), key=lambda path: (len(path.name), path.name))


def without_versions(paths: list[Path], folder: Path) -> list[Path]:
    for path in paths:
        content = torch.load(path)
        for key in VERSIONS:
            del content["rollout_data"][key]
        torch.save(content, folder / path.name)
    return [folder / path.name for path in paths]


def only(collector: Collector) -> Diagnosis:
    (found,) = collector.diagnoses()
    return found


def step_of(seed: int, kernels: float, *, behind: float = math.nan) -> Part:
    proximal, behavior = engines(seed, kernels=kernels).sampled()
    origins = [Origin(versions_behind=behind)] * COUNT
    return Part.of_lists(proximal=proximal, behavior=behavior, origins=origins, step=str(seed))


def test_recorded_versions_make_stale_weights_likely(dumps) -> None:
    found = only(collected(*Parts(Dumps(files(dumps, 4)))))
    assert (found.cause, found.confidence) == ("stale_weights", "likely")
    assert all(words in found.evidence for words in (": fresh 1", ", 1 behind 0.00", "% of the tokens"))


@pytest.mark.parametrize("interval", [2, 4])
def test_without_versions_k3_that_returns_to_its_floor_is_possibly_stale(dumps, interval, tmp_path) -> None:
    paths = without_versions(files(dumps, interval), tmp_path)
    found = only(collected(*Parts(Dumps(paths))))
    assert (found.cause, found.confidence) == ("stale_weights", "possible")
    assert f"a weight sync every {interval} steps (from step 0, {interval}, {2 * interval}" in found.evidence


@pytest.mark.parametrize("has_versions", [True, False])
def test_a_sync_at_every_step_is_not_stale(dumps, has_versions, tmp_path) -> None:
    paths = files(dumps, 1)
    found = only(collected(*Parts(Dumps(paths if has_versions else without_versions(paths, tmp_path)))))
    assert found.cause == "bf16_kernels"


def test_only_stale_steps_are_possibly_stale_by_their_versions(dumps) -> None:
    found = only(collected(*Parts(Dumps([path for path in files(dumps, 4) if int(path.name[0]) % 4 == 3]))))
    assert (found.cause, found.confidence) == ("stale_weights", "possible")
    assert "lower precision on one side" in found.alternatives


@pytest.mark.parametrize(("kernels", "is_usual"), [(0.09, True), (0.12, False)])
def test_tokens_that_are_all_stale_may_differ_as_a_pretrained_model_in_bfloat16_does(kernels, is_usual) -> None:
    found = only(collected(step_of(0, kernels, behind=1.0)))
    usual = ("kernels in bfloat16 of a pretrained model, the usual case",) if is_usual else ()
    assert (found.cause, found.alternatives) == ("stale_weights", (*usual, "lower precision on one side"))


def test_without_a_fresh_token_a_large_difference_may_be_low_precision_of_another_model() -> None:
    found = only(collected(step_of(0, 0.65, behind=2.0), step_of(1, 0.65, behind=2.0)))
    assert (found.cause, found.confidence) == ("stale_weights", "possible")
    assert "low precision of another model" in found.alternatives[0]


@pytest.mark.parametrize(("kernels", "cause"), [(0.02, "bf16_kernels"), (0.12, "low_precision")])
def test_a_mismatch_that_is_the_same_at_every_version_is_not_stale(kernels, cause) -> None:
    assert only(collected(*(step_of(lag, kernels, behind=float(lag)) for lag in range(3)))).cause == cause


@pytest.mark.parametrize("behind", [lambda number: number % 2, lambda number: 1, lambda number: 0])
def test_steps_are_asked_where_recorded_versions_do_not_tell(behind) -> None:
    """k3 jumps in step 1; versions of half of the responses differ, or all do, or none does."""
    parts = []
    for step, kernels in enumerate((0.02, 0.14, 0.14, 0.14)):
        proximal, behavior = engines(step, kernels=kernels).sampled()
        origins = [Origin(versions_behind=float(behind(number))) for number in range(COUNT)]
        parts.append(Part.of_lists(proximal=proximal, behavior=behavior, origins=origins, step=str(step)))
    found = only(collected(*parts))
    assert found.cause == "stale_weights"
    assert "from step 1 on" in found.evidence


def test_stale_tokens_that_differ_as_little_as_kernels_are_not_named() -> None:
    assert only(collected(step_of(0, 0.02, behind=1.0), step_of(1, 0.02, behind=1.0))).cause == "bf16_kernels"


def test_a_sure_but_small_growth_is_not_named() -> None:
    parts = (step_of(0, 0.02, behind=0.0), step_of(1, 0.028, behind=1.0))
    assert only(collected(*parts)).cause == "bf16_kernels"


@pytest.mark.parametrize(
    ("count", "apart", "is_sure"),
    # Three standard errors of many responses; 9.2 of four, by Student's t with 3 degrees of freedom; of one nothing.
    [(1000, 3.1, True), (1000, 2.9, False), (4, 12.0, True), (4, 5.0, False), (1, 100.0, False)],
)
def test_steps_of_few_responses_differ_by_chance(count, apart, is_sure) -> None:
    few, many = (
        Step(0, "0", 4096, k3, 0.1, level, 0.1, num) for k3, level, num in ((4.0, 0.0, count), (1.0, 0.0, 1000))
    )
    far = few._replace(level=apart * math.hypot(few.error, many.error))
    assert far.is_above(many, 3.0) == is_sure
    assert not far.is_above(many, 4.1)


@pytest.mark.parametrize(("count", "cause"), [(2, "low_precision"), (20, "stale_weights")])
def test_versions_and_steps_of_few_responses_are_judged_alike(count, cause) -> None:
    """The same responses, called steps or versions."""
    made = [engines(seed, kernels=size).sampled() for seed, size in ((0, 0.05), (1, 0.15))]
    sides = [{"proximal": proximal[:count], "behavior": behavior[:count]} for proximal, behavior in made]
    steps = [Part.of_lists(**each, step=str(step)) for step, each in enumerate(sides)]
    versions = [
        Part.of_lists(**each, origins=[Origin(versions_behind=float(lag))] * count) for lag, each in enumerate(sides)
    ]
    assert [collected(*parts).diagnoses()[0].cause for parts in (steps, versions)] == [cause] * 2


def test_equal_log_probs_of_older_weights_are_equal() -> None:
    assert only(collected(step_of(0, 0.0, behind=0.0), step_of(1, 0.0, behind=1.0))).cause == "equal"


def experts(seed: int, share: float) -> Part:
    made = engines(seed, kernels=0.02)
    hit = torch.rand(*made.behavior.shape[:2], 1, generator=made.generator) < share
    proximal, behavior = made._replace(behavior=made.behavior + made.noise(1.0) * hit).sampled()
    return Part.of_lists(proximal=proximal, behavior=behavior, step=str(seed))


def test_few_tokens_that_come_and_go_are_not_stale() -> None:
    assert only(collected(*(experts(seed, 0.025 * (seed % 2)) for seed in range(6)))).cause == "expert_routing"


def test_what_kernels_give_may_come_and_go() -> None:
    parts = (step_of(seed, (0.004, 0.02)[seed % 2]) for seed in range(6))
    assert only(collected(*parts)).cause == "bf16_kernels"


@pytest.mark.parametrize(
    ("sizes", "where"),
    [
        ((0.02, 0.14, 0.14, 0.14), r"in step 0 and \S+ from step 1 on: the first update broke one side$"),
        ((0.02, 0.021, 0.14, 0.14, 0.14), r"up to step 1 and \S+ from step 2 on$"),
        # One step of another k3 before it is no growth.
        ((0.02, 0.02, 0.04, 0.02, 0.14, 0.14, 0.14, 0.14, 0.14), r"up to step 3 and \S+ from step 4 on$"),
        ((0.01, 0.02, 0.021, 0.02, 0.14, 0.14, 0.14, 0.14, 0.14), r"up to step 3 and \S+ from step 4 on$"),
        ((0.02, 0.021, 0.026, 0.026), None),
    ],
)
def test_a_jump_of_k3_is_told_with_its_step(sizes, where) -> None:
    found = collected(*(step_of(seed, size) for seed, size in enumerate(sizes))).diagnoses()[0]
    assert (found.cause == "stale_weights") == (where is not None)
    if where:
        assert re.search(where, found.evidence)
        assert "an adapter that one side scales twice or merges differently" in found.alternatives
        assert found.advice.startswith("Compare the weights of both sides tensor by tensor")


@pytest.mark.parametrize("sizes", [(0.02, 0.14), (0.02, 0.05, 0.14)])
def test_steps_that_are_far_from_each_other_have_no_jump(sizes) -> None:
    """Between them training itself may let it grow: it is told beside the size."""
    parts = [step_of(40 * number, size) for number, size in enumerate(sizes)]
    found = collected(*parts).diagnoses()[0]
    assert "from step 40 on" not in found.evidence
    if len(sizes) == 2:
        assert re.search(r"k3 is \S+ in step 0 and \S+ in step 40, more than by chance$", found.evidence)
        assert found.advice.startswith("Look at the steps first")


def test_syncs_at_no_fixed_interval_are_named_without_one() -> None:
    sizes = (0.02, 0.3, 0.02, 0.3, 0.3, 0.02, 0.3)
    found = only(collected(*(step_of(seed, size) for seed, size in enumerate(sizes))))
    assert found.cause == "stale_weights"
    assert "and rises again (from step 0, 2, 5)" in found.evidence


def test_a_step_whose_samples_all_differ_is_of_other_weights_not_of_another_text() -> None:
    found = only(collected(*(step_of(seed, 1.5 if seed == 3 else 0.02) for seed in range(5))))
    assert found.cause == "stale_weights"
    assert "returns to its floor" in found.evidence


def test_k3_that_rises_from_step_to_step_is_possibly_of_weights_that_are_never_synced() -> None:
    sizes = (0.01, 0.02, 0.04, 0.07, 0.11, 0.16)
    found = only(collected(*(step_of(seed, size) for seed, size in enumerate(sizes))))
    assert (found.cause, found.confidence) == ("stale_weights", "possible")
    assert "a rise in 5 of 5 steps, as if weights were never synced" in found.evidence
    # Above the first step.
    k3s = [size**2 for size in sizes]
    assert found.k3_share == pytest.approx(1.0 - 6 * k3s[0] / sum(k3s), abs=0.02)
    assert "a mismatch that grows during training without a fault" in found.alternatives


@pytest.mark.parametrize(
    ("sizes", "where"),
    [
        (
            (0.02, 0.021, 0.02, 0.021, 0.02, 0.04, 0.08, 0.14),
            r"k3 is \S+ up to step 4 and grows to \S+ in step 7, with a rise in 3 of 3 steps",
        ),
        # Twice as much is told beside the size.
        ((0.02, 0.021, 0.02, 0.024, 0.027, 0.03), None),
        ((0.02, 0.021, 0.02, 0.02, 0.021, 0.02), None),
    ],
)
def test_k3_that_grows_from_a_later_step_on_is_possibly_of_weights_that_are_no_longer_synced(sizes, where) -> None:
    found = collected(*(step_of(seed, size) for seed, size in enumerate(sizes))).diagnoses()[0]
    assert (found.cause == "stale_weights") == (where is not None)
    assert where is None or re.search(f"{where}, as if weights were no longer synced", found.evidence)


def made_steps(k3s: tuple[float, ...], *, typical: float, errors: dict[int, float]) -> list[Step]:
    """Steps of which typical tokens are so many times as far apart where k3 has at least doubled."""
    return [
        Step(n, str(n), 4096, k3, typical if k3 >= 2.0 else 1.0, math.log(k3) / 2.0, errors.get(n, 0.01), 64)
        for n, k3 in enumerate(k3s)
    ]


@pytest.mark.parametrize(
    ("k3s", "where"),
    [((1.0, 2.0, 4.0, 8.0), "k3 grows from 1 in step 0 to 8"), ((1.0, 1.0, 9.0, 9.0), "k3 is 1 up to step 1 and 9 ")],
)
def test_k3_changes_by_other_weights_where_typical_tokens_differ_more_and_not_by_chance(k3s, where) -> None:
    assert story_of(made_steps(k3s, typical=1.45, errors={})).evidence.startswith(where)
    assert story_of(made_steps(k3s, typical=1.35, errors={})) is None
    assert story_of(made_steps(k3s, typical=1.45, errors=dict.fromkeys(range(4), 10.0))) is None


def test_a_growth_begins_behind_steps_that_are_above_the_first_by_little_or_by_chance() -> None:
    found = story_of(made_steps((1.0, 1.6, 1.4, 1.0, 2.0, 4.0, 8.0), typical=2.0, errors={1: 10.0}))
    assert found.evidence.startswith("k3 is 1.2 up to step 3 and grows to 8 in step 6")
    assert (found.floor, found.reference) == (pytest.approx(1.25), (0, 1, 2, 3))


# --- what the canary of mis_ext.rollout.generate said


def dump_of(seed: int, path: Path, canaries: list[str | None], *, kernels: list[float], versions: bool) -> Path:
    """A dump as slime writes it, a third of its samples for each word of the canary; the versions all say fresh."""
    samples = []
    for word, size in zip(canaries, kernels, strict=True):
        for proximal, behavior in zip(*engines(seed, kernels=size).sampled(), strict=True):
            sample = {"log_probs": proximal, "rollout_log_probs": behavior}
            if word is not None:
                sample["metadata"] = {"mine": 1, CANARY: word}
            if versions:
                sample |= {"weight_versions": ["8"], "train_weight_version": 8}
            samples.append(sample)
    torch.save({"format_version": 2, "rollout_id": 3, "samples": samples}, path)
    return path


@pytest.mark.parametrize("versions", [False, True])
def test_the_canary_is_believed_before_versions_and_the_contradiction_is_said(tmp_path, versions) -> None:
    path = dump_of(0, tmp_path / "0.pt", ["arrived", "old"], kernels=[0.01, 0.3], versions=versions)
    found = collected(*Parts(Dumps([path]))).diagnoses()[0]
    assert (found.cause, found.confidence) == ("stale_weights", "likely")
    assert f"{COUNT} of {2 * COUNT} samples" in found.evidence
    assert ("although the weight versions agree" in found.evidence) == versions
    assert found.k3_share > 0.9
    assert "an update that changed no weight, as at a learning rate of 0" in found.alternatives


@pytest.mark.parametrize("word", [None, "first", "arrived", "unknown"])
def test_a_canary_that_found_nothing_old_changes_nothing(tmp_path, word) -> None:
    path = dump_of(0, tmp_path / "0.pt", [word], kernels=[0.01], versions=True)
    assert [each.cause for each in collected(*Parts(Dumps([path]))).diagnoses()] == ["bf16_kernels"]


def test_where_all_samples_are_of_such_an_engine_nothing_tells_how_much_it_is(tmp_path) -> None:
    path = dump_of(0, tmp_path / "0.pt", ["old"], kernels=[0.3], versions=True)
    found = collected(*Parts(Dumps([path]))).diagnoses()[0]
    assert (found.cause, found.confidence, found.k3_share, found.is_up_to) == ("stale_weights", "possible", 1.0, True)


@pytest.mark.parametrize("lags", [(0, 0, 0), (0, 4, 0)])
def test_samples_of_old_weights_that_differ_no_more_do_not_hide_the_versions(tmp_path, lags) -> None:
    """As in a warm-up from a learning rate of 0: the log-probs are those of earlier weights, and no mismatch."""
    kernels = [0.01, 0.3 if any(lags) else 0.01, 0.01]
    path = dump_of(0, tmp_path / "0.pt", ["arrived", "arrived", "old"], kernels=kernels, versions=True)
    content = torch.load(path)
    for index, sample in enumerate(content["samples"]):
        sample["weight_versions"] = [str(8 - lags[index // COUNT])]
    torch.save(content, path)
    found = collected(*Parts(Dumps([path]))).diagnoses()[0]
    if any(lags):
        assert (found.cause, found.confidence) == ("stale_weights", "likely")
        assert "k3 by version: fresh" in found.evidence
        assert found.k3_share > 0.9
    else:
        assert found.cause == "bf16_kernels"


@pytest.mark.parametrize("metadata", [7, "old", {"on_policy_tokens_canary": None}, {}])
def test_metadata_of_anybody_else_is_passed_over(tmp_path, metadata) -> None:
    path = dump_of(0, tmp_path / "0.pt", [None], kernels=[0.01], versions=True)
    content = torch.load(path)
    content["samples"][0]["metadata"] = metadata
    torch.save(content, path)
    assert {sample.canary for sample in Dumps([path])} == {None}


def test_steps_that_look_stale_contradict_versions_that_say_fresh() -> None:
    parts = [step_of(seed, 0.3 if seed == 2 else 0.01, behind=0.0) for seed in range(4)]
    found = only(collected(*parts))
    assert found.cause == "stale_weights"
    assert found.evidence.endswith(", although the weight versions agree")


def test_the_key_of_the_canary_is_the_one_that_generate_writes() -> None:
    assert host.CANARY == CANARY


# --- a nearly certain policy, of which one update moves few samples far


def certain_steps(
    seed: int, count: int, length: int, *, certainty: float = 14.0, rate: float = 1.0, is_async: bool = True
) -> list[Sides]:
    """Log-probs of three steps of policy gradients by Adam; the engine of each has the weights of the step before."""
    generator = torch.Generator().manual_seed(seed)
    drawn = partial(torch.randn, generator=generator, dtype=torch.float64)
    prompt_S, one_hot = torch.arange(count) % 16, partial(torch.nn.functional.one_hot, num_classes=40)
    states_SLD, older_VD = drawn(16, length, 16)[prompt_S] / 4.0, drawn(40, 16)
    certain_SLV = (one_hot(drawn(16, length, 40).argmax(-1)) * certainty * (1.0 + drawn(16, length, 1).abs() / 2))[
        prompt_S
    ]
    weights_VD, mean, square, steps = older_VD, 0.0, 0.0, []
    for step in range(1, 4):
        engine, trainer = (
            certain_SLV + states_SLD @ each.T for each in (older_VD if is_async else weights_VD, weights_VD)
        )
        made = Engines(engine + 0.02 * drawn(engine.shape), trainer, generator)
        ids_SL1 = sampled_ids(made.behavior.softmax(-1), generator)
        sides = (logits.float().log_softmax(-1).gather(-1, ids_SL1) for logits in (made.proximal, made.behavior))
        steps.append(tuple([*side[..., 0]] for side in sides))
        score_SLV = one_hot(ids_SL1[..., 0]) - trainer.softmax(-1)
        gradient_VD = torch.einsum("s,slv,sld->vd", drawn(count), score_SLV, states_SLD)
        mean, square = 0.9 * mean + 0.1 * gradient_VD, 0.98 * square + 0.02 * gradient_VD**2
        update_VD = rate * (mean / (1.0 - 0.9**step)) / (square / (1.0 - 0.98**step)).sqrt()
        older_VD, weights_VD = weights_VD, weights_VD + update_VD
    return steps


def with_another_text(sides: Sides, samples: slice) -> Sides:
    """Of some samples the trainer scores ids that it finds improbable."""
    texts = -8.0 * torch.rand(len(sides[0]), len(sides[0][0]), generator=torch.Generator().manual_seed(0))
    return [*sides[0][: samples.start], *texts[samples], *sides[0][samples.stop :]], sides[1]


def diagnosed(steps: list[Sides], *, has_versions: bool = False, has_ids: bool = False) -> list[Diagnosis]:
    parts = []
    for step, (proximal, behavior) in enumerate(steps):
        origin = Origin(
            versions_behind=float(step > 0) if has_versions else math.nan, has_other_ids=False if has_ids else None
        )
        origins = [origin] * len(proximal)
        parts.append(Part.of_lists(proximal=proximal, behavior=behavior, origins=origins, step=str(step)))
    return collected(*parts).diagnoses()


@pytest.mark.parametrize(
    ("count", "length", "certainty", "rate", "known"),
    [
        (32, 3, 8.0, 0.5, {}),
        (128, 3, 10.0, 1.0, {}),
        (128, 3, 10.0, 1.0, {"has_versions": True}),
        (128, 30, 12.0, 2.0, {"has_ids": True}),
    ],
)
def test_few_samples_that_an_update_sets_far_apart_are_of_old_weights_and_not_of_another_text(
    count, length, certainty, rate, known
) -> None:
    steps = certain_steps(0, count, length, certainty=certainty, rate=rate)
    causes = [each.cause for each in diagnosed(steps, **known)]
    assert causes[0] == "stale_weights"
    assert not {*causes} & {"other_text", "top_p_or_top_k"}


def test_samples_that_are_apart_with_old_weights_are_evidence_of_these() -> None:
    (found, *_) = diagnosed(certain_steps(1, 128, 3, certainty=10.0))
    assert (found.cause, found.confidence, found.is_fault) == ("stale_weights", "possible", False)
    assert "a mismatch that grows during training without a fault" in found.alternatives
    (found, *_) = diagnosed(certain_steps(0, 128, 3, certainty=12.0))
    assert found.cause == "stale_weights"
    assert found.alternatives[0] == "another text, or samples that were truncated or mixed up"


@pytest.mark.parametrize(
    ("before", "then", "count"),
    # Mean differences rise, as tokens can move more, or were rounded to certain before.
    [(14.0, 8.0, 10), (20.0, 8.0, 10)],
)
def test_another_text_from_one_step_on_is_named_however_certain_the_policy_is_then(before, then, count) -> None:
    first, *_ = certain_steps(0, 128, 3, certainty=before, is_async=False)
    _, *later = certain_steps(0, 128, 3, certainty=then, is_async=False)
    steps = [first, *(with_another_text(sides, slice(40, 40 + count)) for sides in later)]
    assert "other_text" in {each.cause for each in diagnosed(steps)}


def test_a_first_step_that_is_far_above_the_others_is_told() -> None:
    found = only(collected(step_of(0, 0.3), *(step_of(step, 0.01) for step in range(1, 5))))
    assert (found.cause, found.confidence) == ("stale_weights", "possible")
    assert found.evidence.startswith("in step 0 k3 is ")
