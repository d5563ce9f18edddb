# SPDX-License-Identifier: Apache-2.0
"""Where the batch-invariant mode holds: blocks, threads and wrapped models; and what it refuses."""

import asyncio
import copy
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from batch_invariant_support import equal_bits, randn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.backends import opt_einsum
from torch.utils._pytree import tree_leaves

from mis_ext.onpolicy.batch_invariant import batch_invariant_forward, batch_invariant_mode, is_batch_invariant
from mis_ext.onpolicy.batch_invariant.overrides import kind_of


def test_float64_on_cuda_is_an_error_that_names_the_dtypes_with_kernels():
    with FakeTensorMode():
        x = torch.empty(2, 2, dtype=torch.float64, device="cuda")
    with pytest.raises(NotImplementedError, match="float64 on cuda: take float32"), batch_invariant_mode():
        x @ x


@pytest.mark.parametrize(("name", "value"), [("OMP_DYNAMIC", "TRUE"), ("OMP_THREAD_LIMIT", "2")])
def test_an_openmp_that_may_take_fewer_threads_than_torch_says_is_an_error(name, value, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=f"{name}={value}"), batch_invariant_mode():
        pass
    monkeypatch.setenv(name, "false" if name == "OMP_DYNAMIC" else "3")
    with batch_invariant_mode():
        pass


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
    with pytest.raises(NotImplementedError, match=r"boolean masks, got torch\.float32"), batch_invariant_mode():
        F.scaled_dot_product_attention(*[randn(1, 2, 4, 8)] * 3, attn_mask=torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"4 heads, key 2, value 2: pass enable_gqa=True"), batch_invariant_mode():
        F.scaled_dot_product_attention(randn(1, 4, 4, 8), *[randn(1, 2, 4, 8)] * 2)
    assert not is_batch_invariant()
    assert equal_bits(linear(x), before)
    torch.nn.Conv1d(3, 3, 1)(randn(1, 3, 4))


def refused():
    a, b, vector, out = randn(2, 3), randn(3, 4), randn(3), randn(2, 4)
    a3, b3, out3 = a[None], b[None], out[None]
    return {
        "mm.out": lambda: torch.mm(a, b, out=out),
        "mm.out of matmul": lambda: torch.matmul(a, b, out=out),
        "bmm.out": lambda: torch.bmm(a3, b3, out=out3),
        "addmm.out": lambda: torch.addmm(out, a, b, out=out),
        "addmm_.default": lambda: out.addmm_(a, b),
        "baddbmm.out": lambda: torch.baddbmm(out3, a3, b3, out=out3),
        "baddbmm_.default": lambda: out3.baddbmm_(a3, b3),
        "addbmm.default": lambda: torch.addbmm(out, a3, b3),
        "addbmm.out": lambda: torch.addbmm(out, a3, b3, out=out),
        "addbmm_.default": lambda: out.addbmm_(a3, b3),
        "mv.out": lambda: torch.mv(a, vector, out=randn(2)),
        "addmv_.default": lambda: randn(2).addmv_(a, vector),
        "linear.out": lambda: torch.ops.aten.linear.out(a, b.t(), out=out),
        "softmax.int_out": lambda: torch.softmax(a, 1, out=a),
        "_trilinear.default": lambda: F.bilinear(a, a, randn(4, 3, 3)),
        "_cdist_forward.default": lambda: torch.cdist(a, a),
        "_euclidean_dist.default": lambda: torch.cdist(randn(64, 3), randn(64, 3)),
        "mkldnn_rnn_layer.default": lambda: torch.nn.LSTM(3, 4)(a3),
    }


def test_the_advice_for_a_convolution_of_each_channel_is_exact() -> None:
    weight, x = torch.randn(6, 4), torch.randn(5, 6, 30)

    def by_rows(x: torch.Tensor) -> torch.Tensor:
        return (F.pad(x, (3, 0)).unfold(-1, 4, 1) * weight[:, None]).sum(-1)

    expected = F.conv1d(F.pad(x, (3, 0)), weight[:, None], groups=6)
    with batch_invariant_mode():
        with pytest.raises(NotImplementedError, match=r"as in Mamba, is \(x\.unfold.*true_on_policy\.md#state-space"):
            F.conv1d(x, weight[:, None], groups=6)
        whole = by_rows(x)
        assert torch.equal(whole[:1], by_rows(x[:1]))
        assert torch.equal(whole[..., :9], by_rows(x[..., :9]))
    torch.testing.assert_close(whole, expected)


@pytest.mark.parametrize("name", refused())
def test_an_operator_that_would_run_unchanged_is_an_error_in_any_of_its_forms(name):
    with pytest.raises(NotImplementedError, match=name.split()[0]), torch.no_grad(), batch_invariant_mode():
        refused()[name]()


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "chain",
    [
        torch.linalg.multi_dot,
        lambda x: torch.chain_matmul(*x),
        torch.ops.aten.linalg_multi_dot.default,
        # One number is a sum of products to it, and more are a product of matrices.
        lambda x: torch.tensordot(*x[:2], 1),
        lambda x: torch.inner(x[0], x[1][:, 0]),
        lambda x: x[0].inner(x[1][:, 0]),
    ],
)
# Of torch, that chain_matmul is deprecated.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_chain_of_products_whose_order_depends_on_the_number_of_rows_is_refused(chain, grad):
    factors = [randn(300, 64), randn(64, 70, seed=1), randn(70, 33, seed=2)]
    message = r"(multi_dot|chain_matmul|tensordot|inner)\S* has no batch-invariant form here, .*: write them with @"
    with pytest.raises(NotImplementedError, match=message), grad(), batch_invariant_mode():
        chain(factors)


def test_einsum_takes_its_operands_from_left_to_right_or_is_refused(monkeypatch):
    a, b, c = randn(30, 64), randn(64, 70, seed=1), randn(70, 33, seed=2)
    # Torch 2.6 imports it at its first einsum only.
    monkeypatch.delattr(torch.backends, "opt_einsum", raising=False)
    with batch_invariant_mode():
        monkeypatch.setattr(opt_einsum, "is_available", lambda: True)
        monkeypatch.setattr(opt_einsum, "enabled", True)
        message = r"einsum of 3 operands .* set torch\.backends\.opt_einsum\.enabled = False"
        for operands in ((a, b, c), ([a, b, c],)):
            with pytest.raises(NotImplementedError, match=message):
                torch.einsum("ab,bc,cd->ad", *operands)
        assert equal_bits(torch.einsum("ab,bc->ac", a, b), a @ b)
        monkeypatch.setattr(opt_einsum, "enabled", False)
        assert equal_bits(torch.einsum("ab,bc,cd->ad", a, b, c), a @ b @ c)


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


def test_the_mode_ends_with_the_last_of_the_blocks_that_coroutines_of_a_thread_have_open():
    states = []

    async def first(entered, leave):
        with batch_invariant_mode():
            entered.set()
            await leave.wait()

    async def second(entered, leave):
        await entered.wait()
        with batch_invariant_mode():
            leave.set()
            while len(asyncio.all_tasks()) > 2:
                await asyncio.sleep(0)
            states.append(is_batch_invariant())
        states.append(is_batch_invariant())

    async def both():
        entered, leave = asyncio.Event(), asyncio.Event()
        await asyncio.gather(first(entered, leave), second(entered, leave))

    asyncio.run(both())
    assert states == [True, False]


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


@pytest.mark.parametrize("how", ["bilinear", "bicubic", "nearest", "nearest-exact"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_picture_is_interpolated_alike_or_refused_alike_in_inference_mode(dtype, how):
    """torch has kernels in Python too, which it would prefer there, and which round in another way."""
    x = (100 + 50 * randn(2, 3, 4, 4)).to(dtype)
    plain = F.interpolate(x, (3, 3), mode=how)
    for grad in (torch.no_grad, torch.inference_mode):
        with grad(), batch_invariant_mode():
            if dtype == torch.uint8 or how.startswith("nearest"):
                assert torch.equal(F.interpolate(x, (3, 3), mode=how), plain)
            else:
                with pytest.raises(NotImplementedError, match=rf"upsample_{how}2d\S* has no batch-invariant"):
                    F.interpolate(x, (3, 3), mode=how)


def test_another_thread_is_not_in_the_mode():
    states = []
    with batch_invariant_mode():
        thread = threading.Thread(target=lambda: states.append(is_batch_invariant()))
        thread.start()
        thread.join()
        assert is_batch_invariant()
    assert states == [False]


def test_ending_the_mode_in_another_thread_is_an_error():
    mode = batch_invariant_mode()
    errors = []

    def begin_and_leave():
        mode.__enter__()

    thread = threading.Thread(target=begin_and_leave)
    thread.start()
    thread.join()
    try:
        mode.__exit__(None, None, None)
    except RuntimeError as error:
        errors.append(str(error))
    assert errors == ["batch_invariant_mode must end in the thread that it began in"]
    assert not is_batch_invariant()


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
        with pytest.raises(ValueError, match="Sequential is batch-invariant already"), batch_invariant_forward(model):
            pass
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


LOSSES = (F.mse_loss, F.huber_loss, F.smooth_l1_loss, F.soft_margin_loss, F.binary_cross_entropy)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_of_a_mean_counts_the_numbers_that_there_are(loss):
    """And not those which fill the last vector."""
    for shape in ((), (5, 5), (3, 70)):
        x, target = torch.rand(shape).requires_grad_(), torch.rand(shape)

        def gradient(x=x, target=target, **reduction):
            return torch.autograd.grad(loss(x, target, **reduction).mean(), x)[0]

        plain = gradient()
        with batch_invariant_mode():
            ours = gradient(), gradient(reduction="mean"), gradient(reduction="none")
        for each in ours:
            torch.testing.assert_close(each, plain)


@pytest.mark.parametrize("layer", [torch.nn.RNN, torch.nn.GRU, torch.nn.RNNCell, torch.nn.GRUCell, torch.nn.LSTMCell])
def test_a_recurrent_layer_that_is_not_refused_gives_a_sequence_the_same_bits_in_any_batch(layer):
    """`nn.LSTM` is one operator of oneDNN, and refused: see above. So are those of cuDNN, and CUDA's fused cells."""
    aten = torch.ops.aten
    fused = (aten._cudnn_rnn, aten._thnn_fused_gru_cell, aten._thnn_fused_lstm_cell)
    assert {kind_of(each.default) for each in fused} == {"refused"}
    model, x = layer(48, 40), randn(*(() if "Cell" in layer.__name__ else (7,)), 33, 48)

    def output_and_gradient(x):
        x = x.detach().requires_grad_()
        output = tree_leaves(model(x))[0]
        return output, torch.autograd.grad((output * torch.arange(40.0)).sum(), x)[0]

    with batch_invariant_mode():
        whole = output_and_gradient(x)
        for num in (1, 5):
            for ours, theirs in zip(output_and_gradient(x[..., 3 : 3 + num, :]), whole, strict=True):
                assert equal_bits(ours, theirs[..., 3 : 3 + num, :])


def dynamically_quantized(x):
    with warnings.catch_warnings():
        # Of torch's, that it will be moved to another package.
        warnings.simplefilter("ignore")
        return torch.ao.nn.quantized.dynamic.Linear(8, 4)(x)


SQUARE, ONE_BAG = torch.eye(4) + 3, torch.tensor([[0, 1]])
REFUSED = {
    "a product of complex numbers": lambda x: torch.complex(x, x) @ torch.complex(x, x).t(),
    "quantized.linear_dynamic": dynamically_quantized,
    "mkldnn._linear_pointwise": lambda x: torch.ops.mkldnn._linear_pointwise(x, x, None, "none", [], ""),
    "linalg_solve_triangular": lambda x: torch.linalg.solve_triangular(SQUARE, x, upper=True),
    "cholesky_solve": lambda x: torch.cholesky_solve(x, SQUARE),
    "linalg_inv_ex": lambda x: torch.linalg.inv(SQUARE),
    "linalg_lu_factor_ex": lambda x: torch.linalg.lu_factor(SQUARE),
    "_fft_r2c": torch.fft.fft,
    "embedding_renorm_.* leave max_norm out": lambda x: F.embedding(ONE_BAG, x, max_norm=1.0),
    "embedding_renorm_.* and scale the table before": lambda x: F.embedding_bag(ONE_BAG, x, max_norm=1.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_multiplies_in_a_way_of_its_own_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=name), torch.no_grad(), batch_invariant_mode():
        REFUSED[name](randn(4, 8))


def test_what_nobody_has_reviewed_is_refused():
    message = r"aten\.grid_sampler_2d\.default has no .*: compute it outside"
    with pytest.raises(NotImplementedError, match=message), batch_invariant_mode():
        F.grid_sample(randn(1, 1, 3, 3), torch.zeros(1, 2, 2, 2), align_corners=False)


@pytest.mark.parametrize("dims", [2, 3])
def test_what_writes_several_numbers_to_one_place_in_any_order_is_refused(dims):
    x = randn(2, 3, *[4] * dims)
    unpool = F.max_unpool2d if dims == 2 else F.max_unpool3d
    with pytest.raises(NotImplementedError, match=f"max_unpool{dims}d"), batch_invariant_mode():
        unpool(x, torch.zeros_like(x, dtype=torch.int64), 1)
