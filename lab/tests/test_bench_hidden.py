# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the head: what it compares, that an error shows, and a run on a CPU without anybody's checkout."""

import json
from dataclasses import dataclass

import hidden
import pytest
import torch

CPU = torch.device("cpu")
SHAPE = "12:8:23"


@pytest.fixture(scope="module")
def problem():
    return hidden.drawn(SHAPE, device=CPU, seed=0)


@pytest.fixture(scope="module")
def truth(problem):
    return hidden.exact(problem)


def test_float64_is_what_autograd_finds(problem, truth):
    states, weight = (leaf.detach().double().requires_grad_() for leaf in problem[:2])
    log_p = (states @ weight.T).log_softmax(-1)
    log_prob_T = log_p.gather(-1, problem.token_T.unsqueeze(-1)).squeeze(-1)
    entropy_T = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(truth.log_prob_T, log_prob_T.detach())
    torch.testing.assert_close(truth.entropy_T, entropy_T.detach())
    loss = (log_prob_T * problem.slope_T).sum()
    torch.testing.assert_close(truth.of_log_prob, torch.autograd.grad(loss, (states, weight), retain_graph=True))
    loss = loss + (entropy_T * problem.of_entropy_T).sum()
    torch.testing.assert_close(truth.of_both, torch.autograd.grad(loss, (states, weight)))


def test_a_head_that_is_wrong_shows(problem, truth):
    ours = hidden.Way("ours", lambda problem: hidden._score_hidden("gradient", problem), "both")
    row = hidden._errors(ours, problem, truth)
    assert row["log_prob_error"] < 1e-5
    assert row["entropy_error"] < 1e-5
    # Rounded once, and so are the slopes of the logits before.
    assert max(row["hidden_error"], row["weight_error"]) < 4e-3

    def without_entropy(problem):
        return hidden._score_hidden("value", problem)

    row = hidden._errors(hidden.Way("wrong", without_entropy, "both"), problem, truth)
    assert row["weight_error"] > 1e-2


def test_slopes_are_those_of_a_grpo_loss(problem):
    per_sequence = len(problem.token_T) // len(problem.advantages_S)
    expected = -problem.advantages_S.repeat_interleave(per_sequence) / len(problem.token_T)
    assert torch.equal(problem.slope_T, expected)


def test_a_run_measures_what_is_here_and_says_what_is_not(tmp_path, capsys):
    file = tmp_path / "hidden.json"
    command = ["--device", "cpu", "--shapes", SHAPE, "--exact", SHAPE, "--rounds", "1", "--json", str(file)]
    assert hidden.main(command) == 0
    printed = capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    said = {(row["part"], row["who"]): row for row in rows}
    for name in ("mis_ext.score_hidden", "mis_ext.score_tokens over logits", "torch, checkpointed chunks"):
        assert len(said["cost", name]["times"]) == 1
        assert said["exact", name]["gradient"] == "both"
    for part in ("cost", "exact"):
        assert said[part, "verl, linear_cross_entropy"]["missing"] == "its kernels need a GPU"
        assert "no checkout prime-rl" in said[part, "prime-rl, fused head"]["missing"]
    assert hidden.main(["--show", str(file)]) == 0
    shown = capsys.readouterr().out
    assert shown.partition("## Cost")[2].strip() == printed.partition("## Cost")[2].strip()


@dataclass
class World:
    device = CPU

    def synchronize(self):
        pass


def test_a_way_that_fails_takes_no_other_with_it():
    def fails(problem):
        raise RuntimeError("out of memory")

    both = [hidden.Way("broken", fails, "both"), hidden.Way("four bare matrix products", hidden._products, "none")]
    options = hidden.parsed(["--device", "cpu", "--rounds", "1"])
    record = hidden.Record({})
    hidden.part_cost(SHAPE, both, World(), options, record)
    rows = {row["who"]: row for row in record.rows}
    assert rows["broken"]["missing"] == "RuntimeError: out of memory"
    assert rows["four bare matrix products"]["times"]


def test_a_module_of_a_checkout_is_read_without_its_packages(tmp_path):
    folder = tmp_path / "elsewhere_rl" / "heads"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise ImportError('what the whole package needs')\n")
    (folder / "linear.py").write_text("from elsewhere_rl.logs import say\nANSWER = 42\n")
    module = hidden.from_checkout(tmp_path, "elsewhere", "elsewhere_rl.heads.linear", "elsewhere_rl.logs")
    assert module.ANSWER == 42
    with pytest.raises(ValueError, match="no checkout elsewhere"):
        hidden.from_checkout(None, "elsewhere", "elsewhere_rl.heads.linear")
