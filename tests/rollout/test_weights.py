# SPDX-License-Identifier: Apache-2.0
"""The comparison of weights by an engine's own check; SGLang's real server is in `test_sglang_rollout.py`."""

import hashlib
import math
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from host_samples import loopback_server

from mis_ext.rollout import compare_weights

MESSAGE = """check tensor equality failed:
name=model.layers.1.mlp.down_proj.weight max_abs_err=0.001 mean_abs_err=0.0001 num_exceed=3 expect=raw(a) actual=raw(b)
name=model.norm.weight max_abs_err=0.5 mean_abs_err=0.2 num_exceed=3 expect=raw(a) actual=raw(b)
name=model.norm.weight max_abs_err=0.1 mean_abs_err=0.1 num_exceed=3 expect=raw(a) actual=raw(b) """


@contextmanager
def sglang(answers):
    """A server that gives its answers in order; the requests that reached it."""
    left = iter(answers)
    with loopback_server(lambda number, request: next(left)) as server:
        yield f"http://127.0.0.1:{server.port}/", server.requests
    assert not list(left)


OK = (200, {"success": True, "message": "Success."})
# Snapshot, a first load, reset, the load again, compare.
UP_TO_COMPARE = [OK] * 4


def test_the_tensors_that_sglang_names_come_with_the_largest_difference_first() -> None:
    with sglang([*UP_TO_COMPARE, (400, {"success": False, "message": MESSAGE})]) as (url, requests):
        found = compare_weights(url, "/models/step_7")
    assert found == [("model.norm.weight", 0.5), ("model.layers.1.mlp.down_proj.weight", 0.001)]
    load = {"path": "/update_weights_from_disk", "model_path": "/models/step_7"}
    check = {"path": "/weights_checker"}
    actions = [check | {"action": action} for action in ("snapshot", "reset_tensors", "compare")]
    assert requests == [actions[0], load, actions[1], load, actions[2]]


def test_a_tensor_with_a_nan_comes_first_whatever_another_rank_has_of_it() -> None:
    message = MESSAGE.replace("max_abs_err=0.5", "max_abs_err=nan")
    with sglang([*UP_TO_COMPARE, (400, {"success": False, "message": message})]) as (url, _):
        assert compare_weights(url, "/models/step_7")[0] == ("model.norm.weight", math.inf)


def test_the_trainer_may_be_a_function_and_equal_weights_give_nothing() -> None:
    sent = []
    with sglang([OK] * 3) as (url, _):
        assert compare_weights(url, lambda: sent.append(True)) == []
    assert len(sent) == 2


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([(400, {"message": "no such action"})], "no such action"),
        # Nothing was reset yet.
        ([OK, (400, {"message": "no such folder"})], "update_weights_from_disk refused: no such folder"),
        ([*UP_TO_COMPARE, (400, {"message": "out of memory"})], "out of memory"),
        ([*UP_TO_COMPARE, (500, b"Internal Server Error")], "Internal Server Error"),
    ],
)
def test_what_an_engine_refuses_is_an_error_and_not_a_list(answers, message) -> None:
    with sglang(answers) as (url, _), pytest.raises(ConnectionError, match=message):
        compare_weights(url, "/models/step_7")
    with pytest.raises(ConnectionError, match="no response"):
        compare_weights(url, "/models/step_7")


class Vllm:
    """vLLM's endpoints over the models of two ranks, after its code."""

    def __init__(self, *models: nn.Module, trained: list[nn.Module]) -> None:
        self.models, self.folders = models, {"trained": trained}

    def checksums(self) -> dict[str, str]:
        return {
            f"dp0:pp0:pcp0:tp{rank}:{name}": hashlib.sha256(values.detach().numpy().tobytes()).hexdigest()
            for rank, model in enumerate(self.models)
            for name, values in model.named_parameters()
        }

    def reply(self, request: dict):
        action = request.get("action")
        if action == "reset":
            for model in self.models:
                for values in model.parameters():
                    values.data.zero_()
        elif action == "checksum":
            return 200, {"checksums": self.checksums()}
        elif action == "compare":
            now, before = self.checksums(), request["baseline"]
            mismatches = sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
            return 200, {"match": not mismatches, "mismatches": mismatches}
        elif action is None:
            assert request["method"] == "reload_weights"
            if request["kwargs"]["weights_path"] not in self.folders:
                return 500, {"error": {"message": "no such folder"}}
            for model, loaded in zip(self.models, self.folders[request["kwargs"]["weights_path"]], strict=True):
                model.load_state_dict(loaded.state_dict())
        else:
            # The path of SGLang.
            return 404, {"detail": "Not Found"}
        return 200, {}

    def served(self):
        return loopback_server(lambda number, request: self.reply(request))


def layers(seed: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def test_vllm_names_the_tensors_of_all_ranks_by_checksums() -> None:
    held = layers(0), layers(1)
    held[0][1].bias.data += 0.25
    held[1][1].bias.data += 0.5
    held[1][0].weight.data *= 2.0
    with Vllm(*held, trained=[layers(0), layers(1)]).served() as server:
        url = f"http://127.0.0.1:{server.port}"
        with pytest.raises(ConnectionError, match="no such folder"):
            compare_weights(url, "absent")
        found = compare_weights(url, "trained")
        assert compare_weights(url, "trained") == []
    assert [name for name, _ in found] == ["0.weight", "1.bias"]
    assert all(math.isnan(largest) for _, largest in found)
    assert torch.equal(held[1][1].bias, layers(1)[1].bias)


def test_weights_that_kernels_have_packed_are_refused() -> None:
    model = layers(0)
    model[0].weight.data = torch.empty(0)
    with Vllm(model, trained=[model]).served() as server, pytest.raises(ValueError, match="1 tensors are packed"):
        compare_weights(f"http://127.0.0.1:{server.port}", "trained")


@pytest.mark.parametrize("action", ["checksum", "compare"])
def test_a_field_that_vllm_does_not_send_is_named(action) -> None:
    vllm = Vllm(layers(0), trained=[layers(0)])
    reply = vllm.reply
    vllm.reply = lambda request: (200, {"ok": True}) if request.get("action") == action else reply(request)
    field = {"checksum": "checksums", "compare": "mismatches"}[action]
    with vllm.served() as server, pytest.raises(ConnectionError, match=f"weight_checker: the response has no {field}"):
        compare_weights(f"http://127.0.0.1:{server.port}", "trained")
