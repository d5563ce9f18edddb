# SPDX-License-Identifier: Apache-2.0
"""Where the batch-invariant mode holds: blocks, threads and wrapped models; and what it refuses."""

import copy
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from batch_invariant_support import equal_bits, randn
from rows import for_each
from torch._subclasses.fake_tensor import FakeTensorMode

from mis_ext.onpolicy.batch_invariant import batch_invariant_forward, batch_invariant_mode, is_batch_invariant
from mis_ext.onpolicy.batch_invariant.overrides import kind_of


@pytest.mark.parametrize(
    "function",
    [lambda x: x.double() @ x.double(), lambda x: x.sum(-1, dtype=torch.float64)],
)
def test_float64_on_cuda_is_an_error_that_names_the_dtypes_with_kernels(function):
    with FakeTensorMode():
        x = torch.empty(2, 2, device="cuda")
    with pytest.raises(NotImplementedError, match="float64 on cuda: use float32"), batch_invariant_mode():
        function(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_over_everything_are_no_concern_of_a_row(dtype):
    with FakeTensorMode():
        x = torch.empty(2, 2, dtype=dtype, device="cuda")
    with batch_invariant_mode():
        assert x.sum().dtype == x.mean().dtype == dtype


def test_what_has_no_invariant_form_on_a_cpu_has_none_on_cuda():
    with FakeTensorMode():
        x = torch.empty(1, 3, 4, device="cuda")
    with pytest.raises(NotImplementedError, match="convolution"), batch_invariant_mode():
        F.conv1d(x, x)


def test_what_an_operator_of_another_library_is_made_of_is_judged_in_inference_mode_too():
    library = torch.library.Library("made_of_others", "DEF")
    library.define("convolved(Tensor x) -> Tensor")
    library.impl("convolved", lambda x: F.conv1d(x, x), "CompositeImplicitAutograd")
    with pytest.raises(NotImplementedError, match="convolution"), torch.inference_mode(), batch_invariant_mode():
        torch.ops.made_of_others.convolved(randn(1, 3, 4))


def test_what_has_no_invariant_form_is_an_error_and_the_mode_is_gone_after_it():
    linear, x = torch.nn.Linear(8, 4), randn(2, 8)
    before = linear(x)
    with pytest.raises(NotImplementedError, match="convolution"), batch_invariant_mode():
        torch.nn.Conv1d(3, 3, 1)(randn(1, 3, 4))
    with pytest.raises(NotImplementedError, match=r"dropout_p=0\.1"), batch_invariant_mode():
        F.scaled_dot_product_attention(*[randn(1, 2, 4, 8)] * 3, dropout_p=0.1)
    with (
        pytest.raises(NotImplementedError, match=r"boolean masks, got a Tensor of torch\.float32"),
        batch_invariant_mode(),
    ):
        F.scaled_dot_product_attention(*[randn(1, 2, 4, 8)] * 3, attn_mask=torch.zeros(4, 4))
    assert not is_batch_invariant()
    assert equal_bits(linear(x), before)
    torch.nn.Conv1d(3, 3, 1)(randn(1, 3, 4))


def dynamically_quantized(x):
    with warnings.catch_warnings():
        # Of torch's, that it will be moved to another package.
        warnings.simplefilter("ignore")
        return torch.ao.nn.quantized.dynamic.Linear(3, 4)(x)


def refused():
    a, b, vector, out = randn(2, 3), randn(3, 4), randn(3), randn(2, 4)
    a3, b3, out3 = a[None], b[None], out[None]
    chain, square, picture = [a, b, randn(4, 5)], torch.eye(3) + 3, randn(1, 1, 3, 3)
    places, z = torch.tensor([[0, 0, 1]]), torch.complex(a, a)
    return {
        "mm.out": lambda: torch.mm(a, b, out=out),
        "bmm.out": lambda: torch.bmm(a3, b3, out=out3),
        "addmm.out": lambda: torch.addmm(out, a, b, out=out),
        "addmm_.default": lambda: out.addmm_(a, b),
        "baddbmm_.default": lambda: out3.baddbmm_(a3, b3),
        "addbmm.default": lambda: torch.addbmm(out, a3, b3),
        "mv.default": lambda: torch.mv(a, vector),
        "dot.default": lambda: torch.dot(vector, vector),
        "addmv.default": lambda: torch.addmv(randn(2), a, vector),
        "addr.default": lambda: torch.addr(square, vector, vector),
        "linear.out": lambda: torch.ops.aten.linear.out(a, b.t(), out=out),
        "softmax.int_out": lambda: torch.softmax(a, 1, out=a),
        "add.out": lambda: torch.add(a, a, alpha=0.7, out=torch.empty(0)),
        "sigmoid.out": lambda: torch.sigmoid(a, out=torch.empty(0)),
        "_trilinear": lambda: F.bilinear(a, a, randn(4, 3, 3)),
        "_cdist_forward": lambda: torch.cdist(a, a),
        "dist": lambda: torch.dist(a, a),
        "mkldnn_rnn_layer": lambda: torch.nn.LSTM(3, 4)(a3),
        "convolution": lambda: F.conv1d(a3, a3),
        "multi_dot": lambda: torch.linalg.multi_dot(chain),
        "chain_matmul": lambda: torch.chain_matmul(*chain),
        "tensordot": lambda: torch.tensordot(a, b, 1),
        "inner": lambda: torch.inner(a, a),
        "einsum": lambda: torch.einsum("ab,bc,cd->ad", *chain),
        "mul.Tensor of complex numbers": lambda: z * z,
        "mm.default of complex numbers": lambda: z @ z.t(),
        "quantized.linear_dynamic": lambda: dynamically_quantized(a),
        "linalg_solve_triangular": lambda: torch.linalg.solve_triangular(square, square, upper=True),
        "_fft_r2c": lambda: torch.fft.fft(a),
        "embedding_renorm_": lambda: F.embedding(places, a, max_norm=1.0),
        "var.correction": lambda: a.var(-1),
        "std.correction": lambda: a.std(-1),
        "prod.dim_int": lambda: a.prod(-1),
        "linalg_vector_norm": lambda: torch.linalg.vector_norm(a, dim=-1),
        "isin": lambda: torch.isin(a, a),
        "glu": lambda: F.glu(out),
        "mse_loss": lambda: F.mse_loss(a, a),
        "_foreach_exp": lambda: torch._foreach_exp([a, a]),
        "_foreach_sigmoid_": lambda: torch._foreach_sigmoid_([a, a]),
        "scatter_reduce": lambda: a.scatter_reduce(1, places, a[:1], "mean"),
        "scatter.reduce": lambda: a.scatter(1, places, a[:1], reduce="multiply"),
        "group_norm": lambda: F.group_norm(a[..., None], 3),
        "batch_norm": lambda: F.batch_norm(a, randn(3), randn(3).abs()),
        "upsample_bilinear2d": lambda: F.interpolate(picture, (2, 2), mode="bilinear"),
        "grid_sampler_2d": lambda: F.grid_sample(picture, torch.zeros(1, 2, 2, 2), align_corners=False),
        "max_unpool2d": lambda: F.max_unpool2d(picture, torch.zeros_like(picture, dtype=torch.int64), 1),
    }


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.inference_mode])
@for_each("name", refused())
def test_what_has_no_invariant_form_is_refused_by_name(name, grad):
    call, message = refused()[name], rf"{name}\S* has no batch-invariant form here"
    with pytest.raises(NotImplementedError, match=message), grad(), batch_invariant_mode():
        call()


def test_products_of_other_dtypes_and_the_kernels_of_attention_are_refused_where_torch_has_them():
    names = ["_flash_attention_forward", "_efficient_attention_forward", "_scaled_grouped_mm"]
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    products = [getattr(torch.ops.aten, name) for name in ("mm", "bmm", "addmm", "baddbmm")]
    expected = {packet.default for packet in packets} | {x.dtype for x in products if "dtype" in x.overloads()}
    assert {kind_of(func) for func in expected} == {"refused"}


def test_integers_may_be_multiplied_in_any_form():
    a, out = torch.arange(4).reshape(2, 2), torch.zeros(2, 2, dtype=torch.int64)
    with batch_invariant_mode():
        assert torch.equal(torch.mm(a, a, out=out), a @ a)


def test_the_mode_may_be_entered_again_and_ends_with_the_outermost_block():
    x, w = randn(3, 100), randn(70, 100, seed=1)
    with batch_invariant_mode():
        once = F.linear(x, w)
        with batch_invariant_mode():
            assert is_batch_invariant()
            assert equal_bits(F.linear(x, w), once)
        with pytest.raises(KeyError), batch_invariant_mode():
            raise KeyError("inner")
        assert is_batch_invariant()
        assert equal_bits(F.linear(x, w), once)
    assert not is_batch_invariant()
    torch.nn.Conv1d(3, 3, 1)(randn(1, 3, 4))


def test_inference_mode_does_not_hide_products_from_the_mode():
    x, w, bias = randn(37, 1024), randn(70, 1024, seed=1), randn(70, seed=2)
    with batch_invariant_mode():
        expected = F.linear(x, w, bias)
        with torch.inference_mode():
            assert equal_bits(torch.cat([F.linear(row, w, bias) for row in x.split(1)]), expected)


def test_another_thread_is_not_in_the_mode():
    states = []
    with batch_invariant_mode():
        thread = threading.Thread(target=lambda: states.append(is_batch_invariant()))
        thread.start()
        thread.join()
        assert is_batch_invariant()
    assert states == [False]


def test_a_wrapped_forward_is_invariant_in_every_thread_and_restored():
    model = torch.nn.Sequential(torch.nn.Linear(100, 70), torch.nn.Tanh(), torch.nn.Linear(70, 30))
    x = randn(37, 100)
    with batch_invariant_mode():
        expected = model(x)
    outputs = []
    with batch_invariant_forward(model):
        thread = threading.Thread(target=lambda: outputs.append(torch.cat([model(row) for row in x.split(1)])))
        thread.start()
        thread.join()
        assert equal_bits(outputs[0], expected)
        with batch_invariant_forward(model):
            assert equal_bits(model(x), expected)
        assert equal_bits(model(x), expected)
    assert "forward" not in vars(model)
    with pytest.raises(KeyError), batch_invariant_forward(model):
        raise KeyError("in the block")
    assert "forward" not in vars(model)


def test_a_copy_of_a_wrapped_model_computes_with_its_own_weights():
    model, x = torch.nn.Linear(4, 4), randn(3, 4)
    with batch_invariant_forward(model):
        twin = copy.deepcopy(model)
        torch.nn.init.zeros_(twin.weight)
        torch.nn.init.zeros_(twin.bias)
        assert torch.equal(twin(x), torch.zeros(3, 4))
        assert not torch.equal(model(x), torch.zeros(3, 4))


def test_a_forward_of_the_instance_comes_back():
    model = torch.nn.Linear(4, 4)
    own = lambda x: x + 1  # noqa: E731
    model.forward = own
    with batch_invariant_forward(model):
        assert torch.equal(model(torch.zeros(2)), torch.ones(2))
    assert vars(model)["forward"] is own


def test_megatrons_own_mode_excludes_ours():
    kernels = pytest.importorskip("megatron.core.transformer.custom_layers.batch_invariant_kernels")
    kernels._batch_invariant_MODE = True
    try:
        assert kernels.is_batch_invariant_mode_enabled()
        with pytest.raises(RuntimeError, match="Megatron-Core's batch-invariant mode is on"), batch_invariant_mode():
            pass
        assert not is_batch_invariant()
    finally:
        kernels._batch_invariant_MODE = False
