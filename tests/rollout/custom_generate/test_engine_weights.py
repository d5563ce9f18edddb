# SPDX-License-Identifier: Apache-2.0
"""Which weights the engines have, asked before a request: a cache key of their version, and a canary."""

import asyncio
import sys
import threading
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from generate_runs import CONTEXT, LIMITS, QUESTION
from host_samples import loopback_server
from sglang_answers import TOKENIZER, aborted, stopped
from tokens.sample import Sample, Status, host_args

from mis_ext.rollout import StaleWeightsError, StaleWeightsWarning
from mis_ext.rollout.custom_generate.engine_weights import CANARY_TEXT, EngineWeights
from mis_ext.rollout.custom_generate.function import generate

pytestmark = pytest.mark.usefixtures("short_pauses")

CANARY_IDS = TOKENIZER.encode(CANARY_TEXT, add_special_tokens=False)
BY_VERSION = {"cache_by_version": True}


async def step(sample, text):
    """Answers once."""
    sample.metadata["turns"] = sample.metadata.get("turns", 0) + 1
    return [{"role": "tool", "content": "rain"}] if sample.metadata["turns"] < 2 else None


class Engine:
    """A server that has weights, and may call them otherwise.

    Attributes:
        version: What it calls its weights.
        weights: Which it has.
        cached: Tokens of a prompt that it finds in its cache.
        before: What happens before it begins a request that is no canary.
    """

    def __init__(self, version="1", weights=1, *, cached=0, has_spans=True):
        self.version, self.weights, self.cached, self.has_spans = version, weights, cached, has_spans
        self.before = lambda: None
        self.num_reads = 0

    def page(self, path):
        self.num_reads += path == "/model_info"
        return {"weight_version": self.version} if path == "/model_info" else None

    def answer(self, number, request):
        if request["sampling_params"]["max_new_tokens"] == 0:
            assert request["logprob_start_len"] == 0
            return 200, self.scored(request["input_ids"])
        self.before()
        response = stopped(request, "mild", version=self.version)
        response["meta_info"]["cached_tokens"] = self.cached
        if not self.has_spans:
            del response["meta_info"]["weight_versions"]
        return 200, response

    def scored(self, ids):
        rows = [[None, ids[0], None], *([-1.0 - 0.05 * self.weights, each, None] for each in ids[1:])]
        return {"text": "", "meta_info": {"weight_version": self.version, "input_token_logprobs": rows}}

    def sample(self, tokenizer_folder, settings, *, samples=1, updates=(), evaluation=False):
        """The samples of rollouts between updates, and the requests that are no canary."""
        made = []
        with loopback_server(self.answer, self.page) as server:
            args = host_args(server.port, tokenizer_folder, on_policy_tokens=settings, rollout_max_context_len=CONTEXT)

            async def rollout():
                of_it = [Sample(prompt=QUESTION, index=index) for index in range(samples)]
                made.extend(of_it)
                await asyncio.gather(*(generate(args, each, LIMITS, evaluation) for each in of_it))

            asyncio.run(rollout())
            for self.version, self.weights in updates:
                asyncio.run(rollout())
        self.num_canaries = sum(each["sampling_params"]["max_new_tokens"] == 0 for each in server.requests)
        return made, [each for each in server.requests if each["sampling_params"]["max_new_tokens"]]


def counts(sample):
    return {
        name: count
        for name, count in sample.metadata["on_policy_tokens"].items()
        if name.startswith(("canary", "outdated"))
    }


def test_without_a_setting_nobody_is_asked_and_a_request_has_no_key(tokenizer_folder):
    engine = Engine()
    _, asked = engine.sample(tokenizer_folder, None)
    assert engine.num_reads == engine.num_canaries == 0
    assert "extra_key" not in asked[0]


def test_requests_of_one_version_share_a_key_and_an_update_changes_it(tokenizer_folder):
    engine = Engine()
    samples, asked = engine.sample(tokenizer_folder, BY_VERSION, samples=3, updates=[("2", 2), ("2", 2), ("3", 3)])
    assert [each["extra_key"] for each in asked] == ["1"] * 3 + ["2"] * 6 + ["3"] * 3
    assert [sample.weight_versions for sample in samples[::3]] == [["1"], ["2"], ["2"], ["3"]]
    # One question for all that begin at one time.
    assert engine.num_reads == 4
    assert engine.num_canaries == 0
    assert not any(counts(sample) for sample in samples)


def test_each_turn_has_the_key_of_its_own_version(tokenizer_folder):
    engine = Engine()
    engine.before = lambda: setattr(engine, "version", str(int(engine.version) + 1))
    settings = {**BY_VERSION, "environment": f"{__name__}.step"}
    samples, asked = engine.sample(tokenizer_folder, settings)
    assert [each["extra_key"] for each in asked] == ["1", "2"]
    assert asked[1]["input_ids"][: len(asked[0]["input_ids"])] == asked[0]["input_ids"]
    assert samples[0].weight_versions == ["2", "3"]


def updating(engine, times):
    """New weights come between the question for the version and the request, so many times."""

    def before():
        nonlocal times
        if times:
            times -= 1
            engine.version = str(int(engine.version) + 1)

    engine.before = before


@pytest.mark.parametrize(
    ("times", "cached", "has_spans", "keys", "outdated"),
    [
        (1, 5, True, ["1", "2"], {}),
        (2, 5, True, ["1", "2"], {"outdated_prefixes": 1}),
        (1, 0, True, ["1"], {}),
        (1, 5, False, ["1"], {"outdated_prefixes": 1}),
        (0, 5, True, ["1"], {}),
    ],
)
def test_a_prefix_of_weights_that_were_replaced_meanwhile_is_asked_for_again_or_counted(
    tokenizer_folder, times, cached, has_spans, keys, outdated
):
    engine = Engine(cached=cached, has_spans=has_spans)
    updating(engine, times)
    samples, asked = engine.sample(tokenizer_folder, BY_VERSION)
    assert [each["extra_key"] for each in asked] == keys
    assert counts(samples[0]) == outdated
    assert samples[0].status is Status.COMPLETED
    assert samples[0].weight_versions == [str(1 + times)]


def test_an_aborted_request_is_not_asked_for_again(tokenizer_folder):
    engine = Engine(cached=5)
    updating(engine, 1)
    answer = engine.answer

    def give_up(number, request):
        status, _ = answer(number, request)
        response = aborted(request, "mil", version=engine.version)
        response["meta_info"]["cached_tokens"] = 5
        return status, response

    engine.answer = give_up
    samples, asked = engine.sample(tokenizer_folder, BY_VERSION)
    assert len(asked) == 1
    assert samples[0].status is Status.ABORTED


def given_up(request, version="1"):
    """What a host that aborts all requests gets for one that waited."""
    return 200, aborted(request, "", version=version)


@pytest.mark.parametrize("which", [0, 1])
def test_an_aborted_canary_says_nothing_and_is_asked_again(tokenizer_folder, which):
    engine, ours = Engine(), []
    answer = engine.answer

    def give_up(number, request):
        if not request["sampling_params"]["max_new_tokens"]:
            ours.append(request)
            if len(ours) == which + 1:
                return given_up(request)
        return answer(number, request)

    engine.answer = give_up
    samples, _ = engine.sample(tokenizer_folder, {"canary": "stop"}, updates=[("1", 1)])
    assert [counts(sample) for sample in samples] == [{}, {"canary_first": 1}]
    assert getattr(samples[0], "train_metadata", None) is None
    assert len(ours) == which + 3


@pytest.mark.parametrize(("looks", "sent"), [(1, 0), (2, 1), (3, 2)])
def test_a_host_that_aborts_while_the_engines_are_asked_gets_no_request_more(
    tokenizer_folder, monkeypatch, looks, sent
):
    from mis_ext.rollout.custom_generate import function

    engine = Engine(cached=5)
    updating(engine, 1)
    # Before the engines are asked, and after, for a request and for the one that replaces it.
    flags = iter([False] * looks + [True] * 3)
    monkeypatch.setattr(function, "abort_flag", lambda *_: lambda: next(flags))
    samples, asked = engine.sample(tokenizer_folder, BY_VERSION)
    assert len(asked) == sent
    assert samples[0].status is (Status.COMPLETED if sent == 2 else Status.ABORTED)
    assert bool(samples[0].response) is (sent == 2)


def test_a_request_that_is_given_up_takes_the_answer_from_nobody_nor_from_another_loop(tokenizer_folder):
    engine, asked, go_on = Engine(), threading.Event(), threading.Event()
    page = engine.page

    def waiting(path):
        if path == "/model_info":
            asked.set()
            go_on.wait(60)
        return page(path)

    with loopback_server(engine.answer, waiting) as server:
        args = host_args(server.port, tokenizer_folder, on_policy_tokens=BY_VERSION)
        first, second, third = (Sample(prompt=QUESTION) for _ in range(3))

        async def elsewhere():
            go_on.set()
            await generate(args, third, LIMITS)

        async def rollout():
            tasks = [asyncio.create_task(generate(args, each, LIMITS)) for each in (first, second)]
            await asyncio.to_thread(asked.wait)
            tasks[0].cancel()
            # The reading of this loop is under way.
            await asyncio.to_thread(asyncio.run, elsewhere())
            return await asyncio.gather(*tasks, return_exceptions=True)

        given_up, answered = asyncio.run(rollout())
    assert isinstance(given_up, asyncio.CancelledError)
    assert answered is second
    assert [each.status for each in (second, third)] == [Status.COMPLETED] * 2


def test_only_the_version_with_which_an_answer_began_makes_it_outdated():
    weights, spans = EngineWeights(("7",)), [{"version": "7"}, {"version": "8"}]
    assert not weights.is_outdated({"cached_tokens": 5, "weight_versions": spans})
    assert weights.is_outdated({"cached_tokens": 5, "weight_versions": spans[1:]})
    assert weights.is_outdated({"cached_tokens": 5, "weight_version": "8"})


@pytest.mark.parametrize(("name", "key"), [("/workers", "workers"), ("/list_workers", "urls")])
def test_behind_a_router_each_engine_is_asked(tokenizer_folder, name, key):
    first, second = Engine("7", 7), Engine("8", 8)
    with loopback_server(first.answer, first.page) as one, loopback_server(second.answer, second.page) as two:
        urls = [f"http://127.0.0.1:{each.port}" for each in (one, two)]
        listed = [{"url": url} for url in urls] if key == "workers" else urls

        def pages(path):
            return {key: listed} if path == name else None

        with loopback_server(first.answer, pages) as router:
            settings = {**BY_VERSION, "canary": "warn"}
            args = host_args(router.port, tokenizer_folder, on_policy_tokens=settings)
            asyncio.run(generate(args, Sample(prompt=QUESTION), LIMITS))
        assert [each["extra_key"] for each in router.requests] == ["7,8"]
        assert [len(each.requests) for each in (one, two)] == [2, 2]


def test_data_parallel_ranks_of_one_server_are_asked_as_that_server(tokenizer_folder):
    engine = Engine("7")
    with loopback_server(engine.answer, engine.page) as server:
        # As sglang-router lists them with --dp-aware.
        listed = [{"url": f"http://127.0.0.1:{server.port}@{rank}"} for rank in (0, 1, 10)]
        with loopback_server(engine.answer, lambda path: {"workers": listed} if path == "/workers" else None) as router:
            args = host_args(router.port, tokenizer_folder, on_policy_tokens={**BY_VERSION, "canary": "warn"})
            asyncio.run(generate(args, Sample(prompt=QUESTION), LIMITS))
        assert [each["extra_key"] for each in router.requests] == ["7"]
        assert engine.num_reads == 1
        assert len(server.requests) == 2


@pytest.mark.parametrize("others", [1, 0])
def test_an_engine_that_the_router_calls_dead_is_asked_only_where_all_are(tokenizer_folder, others):
    engine, dead = Engine("7"), {"url": "http://127.0.0.1:9", "is_healthy": False}
    with loopback_server(engine.answer, engine.page) as alive:
        listed = [dead, *[{"url": f"http://127.0.0.1:{alive.port}", "is_healthy": True}] * others]
        with loopback_server(engine.answer, lambda path: {"workers": listed} if path == "/workers" else None) as router:
            settings = {**BY_VERSION, "canary": "warn", "max_attempts": 2}
            args = host_args(router.port, tokenizer_folder, on_policy_tokens=settings)
            if others:
                asyncio.run(generate(args, Sample(prompt=QUESTION), LIMITS))
                assert [each["extra_key"] for each in router.requests] == ["7"]
            else:
                with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9/model_info: no response after 2 attempts"):
                    asyncio.run(generate(args, Sample(prompt=QUESTION), LIMITS))


@pytest.mark.parametrize("page", [{"workers": []}, {"urls": []}])
def test_a_router_that_has_no_engine_yet_is_called_so(tokenizer_folder, page):
    engine = Engine()
    engine.page = lambda path: page if path == ("/workers" if "workers" in page else "/list_workers") else None
    with pytest.raises(ConnectionError, match="the router has no workers yet"):
        engine.sample(tokenizer_folder, BY_VERSION)


@pytest.mark.parametrize("page", [None, {"weight_version": None}, {"model_path": "/model"}])
def test_an_engine_that_names_no_version_is_refused(tokenizer_folder, page):
    engine = Engine()
    engine.page = lambda path: page if path == "/model_info" else None
    with pytest.raises(ValueError, match=r"reports no weight_version in /model_info, which on_policy_tokens\.cache"):
        engine.sample(tokenizer_folder, BY_VERSION)


def test_the_canary_sings_at_each_new_version_and_says_when_the_weights_stayed(tokenizer_folder):
    engine = Engine()
    updates = [("2", 2), ("2", 2), ("3", 2), ("4", 4)]
    with pytest.warns(StaleWeightsWarning, match="the weights of version 3 are those of version 2") as warned:
        samples, asked = engine.sample(tokenizer_folder, {"canary": "warn"}, samples=2, updates=updates)
    assert len(warned) == 1
    found = [counts(sample) for sample in samples[::2]]
    assert found == [{f"canary_{each}": 1} for each in ("first", "arrived", "arrived", "old", "arrived")]
    assert [sample.train_metadata for sample in samples[::2]] == [
        {"on_policy_tokens_canary": each} for each in ("first", "arrived", "arrived", "old", "arrived")
    ]
    # Twice at each of four versions, however many requests.
    assert engine.num_canaries == 8
    assert not any("extra_key" in each for each in asked)


def test_the_canary_stops_the_run_before_a_token_is_sampled(tokenizer_folder):
    engine = Engine()
    with pytest.raises(StaleWeightsError, match="the weights of version 2 are those of version 1"):
        engine.sample(tokenizer_folder, {"canary": "stop"}, updates=[("2", 1)])
    engine = Engine()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samples, asked = engine.sample(tokenizer_folder, {"canary": "stop"}, updates=[("2", 2)])
    assert len(samples) == len(asked) == 2


def test_what_was_known_of_a_sample_stays_and_the_worst_word_of_the_canary_counts(tokenizer_folder):
    engine = Engine()
    with loopback_server(engine.answer, engine.page) as server:
        args = host_args(server.port, tokenizer_folder, on_policy_tokens={"canary": "warn"})
        known = {"mine": 1, "on_policy_tokens_canary": "old"}
        resumed, afresh, unasked = (Sample(prompt=QUESTION) for _ in range(3))
        for each in (resumed, afresh, unasked):
            each.train_metadata = known
        resumed.tokens, resumed.response_length = [*TOKENIZER.encode("it is", add_special_tokens=False), 5], 1
        resumed.response, resumed.rollout_log_probs = "a", [-1.0]
        for each in (resumed, afresh):
            asyncio.run(generate(args, each, LIMITS))
        # Nobody sang for it.
        args.on_policy_tokens = None
        asyncio.run(generate(args, unasked, LIMITS))
        args.on_policy_tokens = {"canary": "warn"}
        evaluated = Sample(prompt=QUESTION)
        asyncio.run(generate(args, evaluated, LIMITS, evaluation=True))
    assert resumed.train_metadata == known
    # The host has cleared the response of which it was said, and keeps the word.
    assert afresh.train_metadata == {"mine": 1, "on_policy_tokens_canary": "first"}
    assert unasked.train_metadata == {"mine": 1}
    assert getattr(evaluated, "train_metadata", None) is None


def test_an_engine_that_does_not_score_is_refused(tokenizer_folder):
    engine = Engine()
    engine.scored = lambda ids: {"meta_info": {"weight_version": "1", "input_token_logprobs": []}}
    with pytest.raises(ValueError, match=rf"did not score the canary: 0 log-probs of {len(CANARY_IDS)} tokens"):
        engine.sample(tokenizer_folder, {"canary": "warn"})
