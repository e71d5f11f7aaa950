"""The emulated functions of TransformerEngine's extension (tests/support/te) compute what PyTorch's own functions do.

The laws over TransformerEngine's modules rest on them. Not covered: the compiled functions, which need a device.
"""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quant.registry import make_codec
from quant.spec import QuantFormat, QuantSpec
from tests.support.te import attention, casts, context_parallel, extension, gemm, norms, optimizers, permutation, rope

SOURCES = Path(__file__).parent / "support" / "te"


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product(a: Tensor, b: Tensor, layout: str, out: Tensor | None = None, **how: Any) -> tuple[Any, ...]:
    arguments: dict[str, Any] = {"bias": None, "grad": False, "accumulate": False, "out_dtype": None} | how
    return gemm.generic_gemm(
        a,
        layout[0] == "T",
        b,
        layout[1] == "T",
        out,
        None,
        arguments["out_dtype"],
        arguments["bias"],
        None,
        False,
        None,
        arguments["grad"],
        torch.empty(0),
        0,
        arguments["accumulate"],
        False,
        beta=1.0 if arguments["accumulate"] else 0.0,
    )


def test_the_emulation_imports_nothing_of_this_project() -> None:
    """It would otherwise agree with the code that it is compared with. `process` alone joins both."""
    for path in SOURCES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            mine = [n for n in names if n.startswith(("megatron_bridge", "miles_like", "quant", "rollout", "routing"))]
            assert not mine or path.name == "process.py", (path.name, mine)


def test_products_are_those_of_a_linear_and_its_gradients() -> None:
    """In each layout, with leading dimensions, a bias and a sum into a tensor."""
    x, w, b = numbers(5, 2, 8).requires_grad_(), numbers(6, 8, seed=1).requires_grad_(), numbers(6, seed=2)
    b.requires_grad_()
    y = F.linear(x, w, b)
    grad = numbers(5, 2, 6, seed=3)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), grad)
    assert torch.allclose(product(w.detach(), x.detach(), "TN", bias=b.detach())[0], y, atol=1e-6)
    assert torch.allclose(product(w.detach(), grad, "NN")[0], dx, atol=1e-6)
    flat = x.detach().reshape(-1, 8), grad.reshape(-1, 6)
    mine, bias_grad, *_ = product(*flat, "NT", bias=b.detach(), grad=True)
    assert torch.allclose(mine, dw, atol=1e-5) and torch.allclose(bias_grad, db, atol=1e-6)
    main = numbers(6, 8, seed=4)
    want = main + dw
    assert product(*flat, "NT", out=main, accumulate=True)[0] is main and torch.allclose(main, want, atol=1e-5)


def test_grouped_products_are_those_of_each_expert() -> None:
    """Into the rows of one tensor, an expert without rows among them, and into a tensor for each."""
    splits, weights = [3, 0, 4], [numbers(6, 8, seed=i) for i in range(3)]
    x = numbers(7, 8, seed=9)
    parts = list(x.split(splits))
    want = torch.cat([F.linear(p, w) for p, w in zip(parts, weights, strict=True)])
    none = [torch.empty(0)] * 3

    def grouped(a: Any, b: Any, out: Any, layout: str, single: bool, accumulate: bool = False) -> None:
        turned = layout[0] == "T", layout[1] == "T"
        rows = splits if single else None
        rest = (None, rows, none, None, single, none, False, None, 0, accumulate, False, 0)
        gemm.te_general_grouped_gemm(a, turned[0], b, turned[1], out, *rest)

    out = torch.empty(7, 6)
    grouped(weights, parts, [out], "TN", True)
    assert torch.allclose(out, want, atol=1e-6)
    grads = list(numbers(7, 6, seed=8).split(splits))
    found = [torch.ones(6, 8) for _ in weights]
    grouped(parts, grads, found, "NT", False, accumulate=True)
    for dw, p, g in zip(found, parts, grads, strict=True):
        assert torch.allclose(dw, 1 + g.t() @ p, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_torchs_with_their_gradients(dtype: torch.dtype) -> None:
    x, w = numbers(7, 16).to(dtype), (1 + 0.1 * numbers(16, seed=1)).to(dtype)
    exact = [t.float().requires_grad_() for t in (x, w)]
    y = F.rms_norm(exact[0], (16,), exact[1], eps=1e-6)
    grad = numbers(7, 16, seed=2).to(dtype)
    dx, dw = torch.autograd.grad(y, exact, grad.float())
    mine, _, rsigma = norms.rmsnorm_fwd(x, w, 1e-6, None, None, dtype, 0, False)
    found = (mine, *norms.rmsnorm_bwd(grad, x, rsigma, w, 0, False))
    bound = 1e-5 if dtype is torch.float32 else 2**-7
    for got, want in zip(found, (y, dx, dw), strict=True):
        assert got.dtype == dtype and torch.allclose(got.float(), want, rtol=bound, atol=bound)


@pytest.mark.parametrize(("heads", "groups", "size", "value_size"), [(4, 2, 8, 8), (2, 2, 12, 8)])
def test_packed_attention_is_torchs_of_each_sequence(heads: int, groups: int, size: int, value_size: int) -> None:
    """Grouped heads, and values of another size than keys, as latent attention has them."""
    codes = extension.make()
    attention.use_codes(codes)
    lengths = [5, 1, 7]
    q, k, v = (
        numbers(13, n, d, seed=i).requires_grad_()
        for i, (n, d) in enumerate(((heads, size), (groups, size), (groups, value_size)))
    )

    def whole(*parts: Tensor) -> Tensor:
        own = [t.transpose(0, 1)[None] for t in parts]
        out = F.scaled_dot_product_attention(own[0], own[1], own[2], is_causal=True, scale=0.3, enable_gqa=True)
        return out[0].transpose(0, 1)

    want = torch.cat([whole(*parts) for parts in zip(*(t.split(lengths) for t in (q, k, v)), strict=True)])
    grad = numbers(13, heads, value_size, seed=7)
    gradients = torch.autograd.grad(want, (q, k, v), grad)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    plain = [t.detach() for t in (q, k, v)]
    mask, softmax = codes.NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK, codes.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
    layout, none = codes.NVTE_QKV_Layout.NVTE_THD_THD_THD, (None,) * 8
    rest = (mask, softmax, (-1, 0), False)
    out, *aux = attention.fused_attn_fwd(
        7, 7, True, 0.3, 0.0, True, layout, 0, 0, 0, *rest, cu, cu, *plain, q.dtype, cu, cu, *none
    )
    assert torch.allclose(out, want, atol=1e-6)
    back = attention.fused_attn_bwd(
        *(7, 7, 0.3, 0.0, True, layout, 0, 0, layout, 0, 0, 0, *rest, False, cu, cu, *plain, out, grad, q.dtype),
        *(aux, cu, cu, None, None, None, False),
    )
    for got, exact in zip(back[:3], gradients, strict=True):
        assert got is not None and torch.allclose(got, exact, atol=1e-5)


def test_padded_sequences_are_those_that_were_packed() -> None:
    packed, cu = numbers(6, 2, 3), torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    padded = attention.convert_thd_to_bshd(packed, cu, 3, 4)
    want = torch.nn.utils.rnn.pad_sequence(list(packed.split([2, 0, 4])), batch_first=True)
    assert torch.equal(padded, want) and torch.equal(attention.convert_bshd_to_thd(padded, cu, 6), packed)


def test_attention_over_parts_of_the_keys_is_put_together() -> None:
    """The second halves of two sequences attend to the first halves of the keys, then to the second; the first halves
    only to their own. Outputs and logarithms of sums are those over all keys at once, which softmax itself says."""
    cu, heads = torch.tensor([0, 4, 10], dtype=torch.int32), 3
    scores, values = numbers(10, heads, 10), numbers(10, heads, 5, seed=1)
    second = torch.tensor([2, 3, 7, 8, 9])
    first = torch.tensor([0, 1, 4, 5, 6])

    def over(rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        part = scores[rows][:, :, keys]
        return torch.einsum("nhm,mhv->nhv", part.softmax(-1), values[keys]), part.logsumexp(-1).t().contiguous()

    rows = torch.arange(10)
    out, lse = over(rows, first)
    more, of_step = over(second, second)
    old = lse.clone()
    context_parallel.thd_second_half_lse_correction(lse, of_step, cu, True)
    context_parallel.thd_out_correction(out, more, old, lse, of_step, cu, True, True)
    want, of_all = over(second, torch.cat([first, second]))
    assert torch.allclose(out[second], want, atol=1e-6) and torch.equal(out[first], over(first, first)[0])
    assert torch.allclose(context_parallel.thd_read_second_half_lse(lse, cu, True, 5), of_all, atol=1e-6)
    assert torch.equal(context_parallel.thd_read_half_tensor(values, cu, 0), values[first])
    grad, given, half = numbers(10, 2), numbers(10, 2, seed=3), numbers(5, 2, seed=4)
    want = grad.clone()
    want[first], want[second] = given[first], want[second] + given[second]
    context_parallel.thd_grad_correction(grad, given, cu, "copy", "add")
    assert torch.equal(grad, want)
    want[first], want[second] = 0, half
    context_parallel.thd_grad_correction(grad, half, cu, "zero", "copy")
    assert torch.equal(grad, want)
    want[first] += half
    context_parallel.thd_grad_correction(grad, half, cu, "add", "none")
    assert torch.equal(grad, want)


def test_the_ranks_parts_of_sequences_are_those_that_are_fed() -> None:
    """The first and last chunk of each sequence on the first rank, as megatron divides them."""
    cu = torch.tensor([0, 8, 12], dtype=torch.int32)
    parts = [context_parallel.thd_get_partitioned_indices(cu, 12, 2, rank).tolist() for rank in range(2)]
    assert parts == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


def test_rows_are_permuted_as_a_mask_says() -> None:
    """By experts, then tokens; back with and without probabilities; gradients are autograd's of the plain sums."""
    routed = torch.rand(6, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    routed[2] = False
    x, probs = numbers(6, 3).requires_grad_(), (torch.rand(6, 4) * routed).requires_grad_()
    n = int(routed.sum())
    expert, token = routed.t().nonzero().unbind(1)
    where = permutation.make_row_id_map(routed, 6, 4)
    rows, _, of_rows = permutation.permute_with_mask_map(x.detach(), where, probs.detach(), None, None, 6, 4, n, 3, 0)
    assert of_rows is not None
    assert torch.equal(rows, x.detach()[token]) and torch.equal(of_rows, probs.detach()[token, expert])
    plain = torch.zeros(6, 3).index_add(0, token, x[token] * probs[token, expert][:, None])
    got, back = permutation.unpermute_with_mask_map(rows, where, probs.detach(), of_rows, None, 6, 4, 3)
    assert back is not None and torch.allclose(got, plain, atol=1e-6) and torch.equal(back, probs.detach())
    leaf = rows.clone().requires_grad_()
    merged = torch.zeros(6, 3).index_add(0, token, leaf * probs[token, expert][:, None])
    grad = numbers(6, 3, seed=5)
    want = torch.autograd.grad(merged, (leaf, probs), grad)
    mine = permutation.unpermute_with_mask_map_bwd_with_merging_probs(
        grad, where, rows, probs.detach(), None, 6, 4, n, 3
    )
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(mine, want, strict=True))


def test_chunks_of_rows_are_put_in_order() -> None:
    x, p, sizes, order = numbers(7, 2), numbers(7), torch.tensor([2, 0, 4, 1]), torch.tensor([3, 2, 0, 1])
    want = torch.cat([x.split(sizes.tolist())[i] for i in order.tolist()])
    where = permutation.make_chunk_sort_map(sizes, order, 7, 4)
    got, of_rows = permutation.sort_chunks_by_map(x, where, p, 7, 2, True)
    assert torch.equal(got, want) and of_rows is not None
    back, of_back = permutation.sort_chunks_by_map(got, where, of_rows, 7, 2, False)
    assert of_back is not None and torch.equal(back, x) and torch.equal(of_back, p)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations_are_products_of_complex_numbers(interleaved: bool) -> None:
    """Of the first elements of a head, by a token's place in its own sequence; the gradient turns back."""
    x, cu = numbers(7, 2, 8), torch.tensor([0, 3, 7], dtype=torch.int32)
    angles = torch.outer(torch.arange(9.0), torch.tensor([1.0, 0.1, 0.01]))
    freqs = angles.repeat_interleave(2, 1) if interleaved else torch.cat((angles, angles), 1)
    got = rope.fused_rope_forward(x, freqs[:, None, None], None, None, interleaved, cu, 1, 0)
    turned, places = x[..., :6], torch.tensor([0, 1, 2, 0, 1, 2, 3])
    pairs = turned.unflatten(-1, (3, 2)) if interleaved else turned.unflatten(-1, (2, 3)).transpose(-1, -2)
    turn = torch.polar(torch.ones(7, 3), angles[places])[:, None]
    done = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    want = done.flatten(-2) if interleaved else done.transpose(-1, -2).flatten(-2)
    assert torch.allclose(got, torch.cat((want, x[..., 6:]), -1), atol=1e-6)
    back = rope.fused_rope_backward(got, freqs[:, None, None], None, None, interleaved, cu, 1, 0)
    assert torch.allclose(back, x, atol=1e-6)


def test_the_optimizer_is_torchs_adamw() -> None:
    p, mine = numbers(5, 3).requires_grad_(), numbers(5, 3)
    torchs = torch.optim.AdamW([p], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)
    moments = torch.zeros(5, 3), torch.zeros(5, 3)
    for step in range(1, 4):
        p.grad = numbers(5, 3, seed=step)
        torchs.step()
        lists = [[t] for t in (p.grad, mine, *moments)]
        optimizers.multi_tensor_adam(0, torch.zeros(1), lists, 0.1, 0.8, 0.9, 1e-3, step, 1, 1, 0.2)
        assert torch.allclose(mine, p.detach(), atol=1e-6)


def test_norms_and_scales_of_many_tensors_are_torchs() -> None:
    parts = [numbers(3), numbers(2, 2, seed=1)]
    whole, each = optimizers.multi_tensor_l2norm(0, torch.zeros(1), [parts], True)
    assert torch.allclose(whole, torch.nn.utils.get_total_norm(parts)) and torch.allclose(each[0], parts[0].norm())
    out, noop = [torch.zeros_like(x) for x in parts], torch.zeros(1, dtype=torch.int)
    optimizers.multi_tensor_scale(0, noop, [parts, out], 0.5)
    assert torch.equal(out[1], parts[1] * 0.5) and not noop.any()
    optimizers.multi_tensor_scale(0, noop, [[torch.tensor([torch.inf])], [torch.zeros(1)]], 0.5)
    assert noop.all()


# ---- casts, against the codecs of quant/


def decoded(codes: Tensor, factors: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float() * factors


def by_codec(w: Tensor, format: QuantFormat, block: tuple[int, int]) -> Tensor:
    return make_codec(QuantSpec(format=format, block=block)).fake({"w": w})["w"].float()


@pytest.mark.parametrize(("format", "powers"), [(QuantFormat.FP8, False), (QuantFormat.FP8_UE8M0, True)])
def test_blocks_are_rounded_as_published_weights_are(format: QuantFormat, powers: bool) -> None:
    """128 x 128 blocks with FP32 scales: a value may differ by the last bit of its scale, whose formula is 448 / amax
    on one side and amax / 448 on the other. With powers of two one side rounds the factor down and the other the scale
    up, which is the same."""
    w = numbers(200, 256).bfloat16()
    how = SimpleNamespace(dtype=5, block_scaling_dim=2, force_pow_2_scales=powers, amax_epsilon=0.0)
    codes, scales = casts._blockwise(w, how)
    mine = decoded(codes, casts._spread(scales, 128, 128, w.shape)).bfloat16().float()
    want = by_codec(w, format, (128, 128))
    if powers:
        assert torch.equal(mine, want)
    else:
        away = (mine - want).abs() > 2**-7 * want.abs()
        assert away.float().mean() < 1e-3  # of which a tie falls to the other side
    assert not torch.equal(mine, w.float())


def test_a_whole_tensor_is_rounded_as_one_block_is() -> None:
    """Tensorwise scaling: FP8 with one block; a value may differ as in the test above. Delayed scaling multiplies by
    the factor of its history, saturates, and notes the magnitude."""
    w = numbers(96, 80, seed=2).bfloat16()
    current = SimpleNamespace(
        dtype=5, force_pow_2_scales=False, amax_epsilon=0.0, with_amax_reduction=False, amax_reduction_group=None
    )
    codes, factor = casts._of_tensor(w, current)
    mine, want = decoded(codes, factor).bfloat16().float(), by_codec(w, QuantFormat.FP8, (96, 80))
    assert ((mine - want).abs() > 2**-7 * want.abs()).float().mean() < 1e-3
    late = SimpleNamespace(dtype=5, scale=torch.tensor([256.0]), amax=torch.zeros(1))
    codes, factor = casts._of_tensor(w, late)
    assert float(late.amax) == float(w.abs().max()) > 448 / 256
    want = (w.float() * 256).clamp(-448, 448).to(torch.float8_e4m3fn).float() / 256
    assert torch.equal(decoded(codes, factor), want)


def test_delayed_factors_are_those_of_the_largest_magnitude_remembered() -> None:
    history, scales = torch.tensor([[0.0, 0.0], [2.0, 0.5], [4.0, 0.0]]), torch.tensor([1.0, 3.0])
    amaxes = torch.tensor([1.0, 0.25])
    casts.fused_amax_and_scale_update_after_reduction(amaxes, [history], [scales], "max", 5, 0.0)
    assert scales.tolist() == [448 / 4, 448 / 0.5]
    assert history.tolist() == [[0, 0], [4, 0], [1, 0.25]]


def test_mxfp8_is_rounded_as_published_weights_are() -> None:
    w = numbers(96, 128, seed=3).bfloat16() * torch.logspace(-4, 4, 96)[:, None].bfloat16()
    codes, exponents = casts._mx(w, SimpleNamespace(dtype=5), 1, 32)
    mine = decoded(codes, casts._spread(torch.exp2(exponents.float() - 127), 1, 32, w.shape))
    assert torch.equal(mine.bfloat16().float(), by_codec(w, QuantFormat.MXFP8, (1, 32)))
