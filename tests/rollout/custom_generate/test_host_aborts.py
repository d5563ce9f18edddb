# SPDX-License-Identifier: Apache-2.0
"""The custom generate function where the host aborts its rollout, at whatever moment."""

import asyncio
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from host_samples import SlimeSample, loopback_server
from sglang_answers import TOKENIZER, aborted, stopped
from tiny_tokenizers import TURN_END, encode
from tokens.sample import Sample, Status, host_args

from mis_ext.rollout import generate
from mis_ext.rollout.custom_generate.function import UNFINISHED

LIMITS = {"max_new_tokens": 32, "temperature": 1.0, "no_stop_trim": True}
TURNS = ("look", "think", "say")
OBSERVATIONS: tuple[Any, ...] = ("[rain]", [{"role": "tool", "content": "mild"}], None)


@dataclass(frozen=True)
class GenerateFnInput:
    """As in Miles."""

    state: Any
    sample: Sample
    sampling_params: dict[str, Any]
    evaluation: bool = False

    @property
    def args(self) -> Any:
        return self.state.args


@dataclass(frozen=True)
class GenerateFnOutput:
    """As in Miles."""

    samples: Sample


class State:
    """A host's, which has aborted its rollout from the ``aborts_at``-th look at the flag on."""

    def __init__(self, args: Any, aborts_at: int | None = None) -> None:
        self.args, self.aborts_at, self.looks = args, aborts_at, 0

    @property
    def aborted(self) -> bool:
        self.looks += 1
        return self.aborts_at is not None and self.looks > self.aborts_at


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """What the environment was told; it has as many answers as the model has turns."""
    module, texts = types.ModuleType("an_environment"), list[str]()

    async def step(sample, text):
        texts.append(text)
        return OBSERVATIONS[(len(texts) - 1) % len(OBSERVATIONS)]

    module.step = step
    monkeypatch.setitem(sys.modules, "an_environment", module)
    return texts


def arguments(port: int, tokenizer_folder: Path, *, partial: bool = True) -> Any:
    settings = {"environment": "an_environment.step"}
    others = {"rollout_max_context_len": 10_000, "partial_rollout": partial, "mis_staleness": True}
    return host_args(port, tokenizer_folder, on_policy_tokens=settings, **others)


def serve(number: int, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return 200, stopped(request, TURNS[number % len(TURNS)])


def run(args: Any, sample: Sample, aborts_at: int | None = None) -> State:
    state = State(args, aborts_at)
    output = asyncio.run(generate(GenerateFnInput(state, sample, LIMITS)))
    assert isinstance(output, GenerateFnOutput)
    assert output.samples is sample
    return state


def trained(sample: Sample) -> dict[str, Any]:
    names = ("tokens", "response", "response_length", "loss_mask", "rollout_log_probs", "weight_versions", "status")
    return {name: getattr(sample, name) for name in names}


@pytest.mark.parametrize("sample_class", [Sample, SlimeSample])
def test_a_partial_rollout_is_the_same_wherever_the_host_aborted_it(tokenizer_folder, told, sample_class) -> None:
    with loopback_server(serve) as server:
        args = arguments(server.port, tokenizer_folder)
        whole = sample_class(prompt="The weather")
        num_looks = run(args, whole).looks
        expected, said = server.requests[:], told[:]
        # Before each request and before each word of the environment.
        assert num_looks == len(expected) + len(said) == 6
        for aborts_at in range(num_looks):
            server.requests.clear()
            told.clear()
            sample = sample_class(prompt="The weather")
            run(args, sample, aborts_at)
            assert sample.status is Status.ABORTED
            # The version of each token, observations that were not sent yet included.
            assert len(getattr(sample, "teacher_log_probs", [])) == sample.response_length
            assert (len(server.requests), len(told)) == ((aborts_at + 1) // 2, aborts_at // 2)
            if sample.response_length:
                assert UNFINISHED in sample.metadata
            run(args, sample)
            assert (server.requests, told) == (expected, said)
            assert trained(sample) == trained(whole)
            assert UNFINISHED not in sample.metadata
            assert sample.metadata["on_policy_tokens"]["aborted_requests"] == 0


def test_a_rollout_of_slime_looks_at_slimes_one_state(tokenizer_folder, told, monkeypatch) -> None:
    requests = []

    async def post(url, payload, max_retries=60, **options):
        requests.append(payload)
        # The host aborts while the environment has its turn: no request is running that could be aborted.
        states[0].aborts_at = states[0].looks + 1
        return stopped(payload, "look")

    def generate_state(args):
        if not states:
            states.append(State(args))
        return states[0]

    states: list[State] = []
    modules = {f"slime.utils.{name}": types.ModuleType(name) for name in ("http_utils", "processing_utils")}
    modules |= {name: types.ModuleType(name) for name in ("slime", "slime.utils", "slime.rollout")}
    modules["slime.rollout.sglang_rollout"] = rollout = types.ModuleType("sglang_rollout")
    modules["slime.utils.http_utils"].post = post
    modules["slime.utils.processing_utils"].load_tokenizer = lambda path, **options: AutoTokenizer.from_pretrained(path)
    rollout.GenerateState = generate_state
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    sample = type("Sample", (SlimeSample,), {"__module__": "slime.utils.types"})(prompt="The weather")
    asyncio.run(generate(arguments(9, tokenizer_folder), sample, LIMITS))
    assert sample.status is Status.ABORTED
    assert (len(requests), len(told)) == (1, 1)
    assert sample.response == f"look{TURN_END}[rain]"


def retracted(request: dict[str, Any], text: str) -> dict[str, Any]:
    """SGLang 0.5.23 gave up a request that it had retracted: its tokenizer manager answers, which knows less."""
    answer = aborted(request, text)
    known = ("id", "weight_version", "input_token_logprobs", "output_token_logprobs", "completion_tokens")
    answer["meta_info"] = {key: answer["meta_info"][key] for key in known}
    answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}
    return answer


@pytest.mark.parametrize("sample_class", [Sample, SlimeSample])
@pytest.mark.parametrize("text", ["", "lo"])
def test_a_request_that_was_retracted_and_then_aborted_leaves_a_partial_sample(
    tokenizer_folder, told, sample_class, text
) -> None:
    with loopback_server(lambda number, request: (200, retracted(request, text))) as server:
        sample = sample_class(prompt="The weather")
        run(arguments(server.port, tokenizer_folder), sample)
    assert sample.status is Status.ABORTED
    assert sample.response == text
    assert (sample.loss_mask or []) == [1] * len(text)
    assert len(sample.rollout_log_probs) == len(text)
    assert sample.tokens[: -len(text) or None] == encode(TOKENIZER, "The weather")
    assert sample.metadata["on_policy_tokens"]["aborted_requests"] == 1
