# SPDX-License-Identifier: Apache-2.0
"""The batch-invariant mode refuses modules of Transformer Engine by name.

Stand-ins: classes whose ``__module__`` is one of Transformer Engine's, and its empty package in ``sys.modules``. The
real ones need a GPU: ``lab/real_stack/te_study.py`` of 16a265ec asked them.
"""

import sys
import threading
import types

import pytest
import torch

from mis_ext.onpolicy import batch_invariant_forward, batch_invariant_mode


class StandInLinear(torch.nn.Linear):
    """Stands for ``transformer_engine.pytorch.Linear``."""

    __module__ = "transformer_engine.pytorch.module.linear"


class StandInOfMegatron(StandInLinear):
    """Stands for Megatron-Core's ``TELinear``, which derives from it in a module of Megatron-Core's."""

    __module__ = "megatron.core.extensions.transformer_engine"


class Neighbor(torch.nn.Linear):
    """Of a package whose name only begins like Transformer Engine's."""

    __module__ = "transformer_engine_like.linear"


@pytest.fixture
def imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))


def model(kind):
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Tanh(), kind(4, 4)))


@pytest.mark.parametrize("kind", [StandInLinear, StandInOfMegatron])
@pytest.mark.usefixtures("imported")
def test_a_call_of_such_a_module_in_the_mode_is_refused_and_outside_of_it_runs(kind):
    refused, x = model(kind), torch.ones(2, 4)
    expected = refused(x)
    for block in (batch_invariant_mode(), batch_invariant_forward(refused)):
        with pytest.raises(NotImplementedError, match=f"^a {kind.__name__} runs .* get_gpt_decoder_block_spec"), block:
            refused(x)
    assert torch.equal(refused(x), expected)


@pytest.mark.usefixtures("imported")
def test_another_thread_may_call_it_while_this_one_is_in_the_mode():
    refused, outputs = model(StandInLinear), []
    with batch_invariant_mode():
        thread = threading.Thread(target=lambda: outputs.append(refused(torch.ones(2, 4))))
        thread.start()
        thread.join()
    assert torch.equal(outputs[0], refused(torch.ones(2, 4)))


@pytest.mark.usefixtures("imported")
def test_a_module_of_another_package_runs_in_the_mode():
    with batch_invariant_mode():
        model(Neighbor)(torch.ones(2, 4))
    with batch_invariant_forward(model(Neighbor)):
        pass


def test_without_transformer_engine_torch_asks_nobody_before_a_call(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    before = dict(torch.nn.modules.module._global_forward_pre_hooks)
    with batch_invariant_mode():
        assert dict(torch.nn.modules.module._global_forward_pre_hooks) == before


@pytest.mark.usefixtures("imported")
def test_nobody_is_asked_after_the_last_block_however_it_ends():
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    before = len(hooks)
    with batch_invariant_mode(), batch_invariant_mode():
        assert len(hooks) == before + 1
    assert len(hooks) == before
    with pytest.raises(KeyError), batch_invariant_mode():
        raise KeyError("in the block")
    assert len(hooks) == before
