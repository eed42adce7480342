"""Attention with a trained relative position bias on a GPU: forward and backward passes in Triton.

Only one of torch's fused kernels gives a bias its gradient. It was written for older GPUs and writes the gradient once
for each image: on an H100 it takes a fifth of a compiled pretraining step. Here a program holds whole rows of scores,
up to MAX_TOKENS of them, and goes through many images to add up their gradients of the bias. No sum is atomic: the same
inputs give the same bits.

Shapes: B images, N tokens, H heads, D channels of one head, C = H * D. `qkv` is (B, N, 3 * C).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOKENS = 256  # scores of a few queries with so many keys fit the registers of a program
HEAD_DIMS = (16, 32, 64, 128)
IMAGE_GROUPS = 8  # into which a batch is split where the gradient of the bias is added up
# Queries (of KEYS: keys) and warps of a program, as measured on an H100.
FORWARD = dict(ROWS=64, num_warps=8)
QUERIES = dict(ROWS=32, num_warps=8, num_stages=2)
KEYS = dict(ROWS=64, num_warps=8)


def takes(qkv: Tensor, bias: Tensor | None, num_heads: int) -> bool:
    """Whether `attention_with_bias` takes these: a trained bias, half precision, an NVIDIA GPU from Ampere on."""
    return (
        bias is not None
        and bias.requires_grad
        and qkv.is_cuda
        and qkv.dtype in (torch.bfloat16, torch.float16)
        and qkv.shape[1] <= MAX_TOKENS
        and len(qkv) % IMAGE_GROUPS == 0
        and qkv.shape[2] // (3 * num_heads) in HEAD_DIMS
        and _is_new_enough(qkv.device)
    )


@torch.compiler.assume_constant_result
def _is_new_enough(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)


def attention_with_bias(qkv: Tensor, bias: Tensor) -> Tensor:
    """softmax(q @ k^T / sqrt(D) + bias) @ v.

    Args:
        qkv: (B, N, 3 * C) queries, keys and values, each of all heads.
        bias: (1, H, N, N), of the same type; its rows may be padded in memory.

    Returns:
        (B, N, C).
    """
    return _attend(qkv, bias[0])[0]


@torch.library.custom_op('beit_mm::attention_with_bias', mutates_args=())
def _attend(qkv: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The output (B, N, C), and of each row of scores the log of its exponentials' sum, float32 (B, H, N)."""
    qkv = qkv.contiguous()
    out, log_sums = _empty_outputs(qkv, bias)
    padded = _pad(bias)
    grid = (padded.shape[1] // FORWARD['ROWS'], len(bias), len(qkv))
    _forward_kernel[grid](qkv, padded, out, log_sums, **_constants(qkv, padded), **FORWARD)
    return out, log_sums


@_attend.register_fake
def _empty_outputs(qkv: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    num_images, num_tokens, channels = qkv.shape
    out = qkv.new_empty(num_images, num_tokens, channels // 3)
    return out, qkv.new_empty(num_images, len(bias), num_tokens, dtype=torch.float32)


@torch.library.custom_op('beit_mm::attention_with_bias_backward', mutates_args=())
def _attend_backward(
    qkv: Tensor, bias: Tensor, out: Tensor, log_sums: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of qkv, and of bias, float32 (H, N, N)."""
    qkv, grad_out, padded = qkv.contiguous(), grad_out.contiguous(), _pad(bias)
    num_images, num_tokens, _ = qkv.shape
    num_heads, columns, _ = padded.shape
    grad_qkv = torch.empty_like(qkv)
    grad_bias = padded.new_empty(IMAGE_GROUPS, *padded.shape, dtype=torch.float32)
    arguments, constants = (qkv, padded, out, log_sums, grad_out, grad_qkv), _constants(qkv, padded)
    grid = (columns // QUERIES['ROWS'], num_heads, IMAGE_GROUPS)
    _query_and_bias_kernel[grid](*arguments, grad_bias, num_images // IMAGE_GROUPS, **constants, **QUERIES)
    grid = (columns // KEYS['ROWS'], num_heads, num_images)
    _key_and_value_kernel[grid](*arguments, **constants, **KEYS)
    return grad_qkv, grad_bias[..., :num_tokens, :num_tokens].sum(dim=0)


@_attend_backward.register_fake
def _(qkv: Tensor, bias: Tensor, out: Tensor, log_sums: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor]:
    return qkv.new_empty(qkv.shape), bias.new_empty(bias.shape, dtype=torch.float32)


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: torch.autograd.function.FunctionCtx, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
    grad_qkv, grad_bias = _attend_backward(*ctx.saved_tensors, grad_out)
    return grad_qkv, grad_bias.to(ctx.saved_tensors[1].dtype)


_attend.register_autograd(_backward, setup_context=_setup_context)


def _pad(bias: Tensor) -> Tensor:
    """The bias in whole tiles, (H, rows, COLUMNS), with -inf where there is no query or no key."""
    num_heads, num_tokens, _ = bias.shape
    columns = max(64, triton.next_power_of_2(num_tokens))
    padded = bias.new_full((num_heads, columns, columns), -torch.inf)
    padded[:, :num_tokens, :num_tokens] = bias
    return padded


def _constants(qkv: Tensor, padded: Tensor) -> dict:
    """What the kernels are compiled for."""
    num_heads, columns = padded.shape[0], padded.shape[2]
    dims = qkv.shape[2] // (3 * num_heads)
    return dict(N=qkv.shape[1], H=num_heads, D=dims, COLUMNS=columns, SCALE=dims**-0.5)


# In the kernels `rows` and `columns` are token numbers, and `dims` the channels of a head. Tokens from N on, which fill
# the last tile, are read as zeros and have a bias of -inf: their exponential is 0. Products of half precision add up in
# float32.


@triton.jit
def _tile(pointer, tokens, dims, stride, N: tl.constexpr):
    """Rows `tokens` of a matrix of heads, (tokens, dims)."""
    return tl.load(pointer + tokens[:, None] * stride + dims[None, :], mask=tokens[:, None] < N, other=0.0)


@triton.jit
def _square(pointer, head, rows, columns, COLUMNS: tl.constexpr):
    """Pointers to a tile of (H, COLUMNS, COLUMNS)."""
    return pointer + (head * COLUMNS + rows[:, None]) * COLUMNS + columns[None, :]


@triton.jit
def _forward_kernel(
    qkv, bias, out, log_sums,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Output of ROWS queries of a head of an image."""
    head, image = tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns, dims = tl.arange(0, COLUMNS), tl.arange(0, D)
    qkv += image * N * 3 * H * D + head * D
    q = _tile(qkv, rows, dims, 3 * H * D, N)
    k = _tile(qkv + H * D, columns, dims, 3 * H * D, N)
    v = _tile(qkv + 2 * H * D, columns, dims, 3 * H * D, N)

    scores = tl.dot(q, tl.trans(k)) * SCALE + tl.load(_square(bias, head, rows, columns, COLUMNS))
    # A row beyond the last token has -inf alone, and -inf - -inf would be NaN.
    largest = tl.maximum(tl.max(scores, axis=1), -1e30)
    exponentials = tl.exp(scores - largest[:, None])
    sums = tl.maximum(tl.sum(exponentials, axis=1), 1e-30)
    result = tl.dot(exponentials.to(v.dtype), v) / sums[:, None]

    inside = rows < N
    out += image * N * H * D + head * D
    tl.store(out + rows[:, None] * (H * D) + dims[None, :], result.to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(log_sums + (image * H + head) * N + rows, largest + tl.log(sums), mask=inside)


@triton.jit
def _grad_scores(q, k, v, bias, grad, log_sum, along_itself, SCALE: tl.constexpr):
    """Gradient of a tile of scores, of q @ k^T, and the attention there."""
    attention = tl.exp(tl.dot(q, tl.trans(k)) * SCALE + bias - log_sum[:, None])
    return attention * (tl.dot(grad, tl.trans(v)) - along_itself[:, None]), attention


@triton.jit
def _query_and_bias_kernel(
    qkv, bias, out, log_sums, grad_out, grad_qkv, grad_bias, IMAGES: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of ROWS queries of a head, of each image of a group, and their bias's of the whole group."""
    head, group = tl.program_id(1), tl.program_id(2)
    rows, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    inside = rows < N
    # In two halves, so that what is computed beside the totals stays in registers.
    left = tl.arange(0, COLUMNS // 2)
    right = left + COLUMNS // 2
    total_left = tl.zeros((ROWS, COLUMNS // 2), dtype=tl.float32)
    total_right = tl.zeros((ROWS, COLUMNS // 2), dtype=tl.float32)
    for step in range(IMAGES):
        image = (group * IMAGES + step).to(tl.int64)
        queries = qkv + image * N * 3 * H * D + head * D
        keys, values = queries + H * D, queries + 2 * H * D
        offset = image * N * H * D + head * D
        q = _tile(queries, rows, dims, 3 * H * D, N)
        grad = _tile(grad_out + offset, rows, dims, H * D, N)
        result = _tile(out + offset, rows, dims, H * D, N)
        along_itself = tl.sum(grad.to(tl.float32) * result.to(tl.float32), axis=1)
        log_sum = tl.load(log_sums + (image * H + head) * N + rows, mask=inside, other=0.0)

        k, v = _tile(keys, left, dims, 3 * H * D, N), _tile(values, left, dims, 3 * H * D, N)
        tile = tl.load(_square(bias, head, rows, left, COLUMNS))
        grad_scores, _ = _grad_scores(q, k, v, tile, grad, log_sum, along_itself, SCALE)
        total_left += grad_scores
        grad_q = tl.dot(grad_scores.to(k.dtype), k)

        k, v = _tile(keys, right, dims, 3 * H * D, N), _tile(values, right, dims, 3 * H * D, N)
        tile = tl.load(_square(bias, head, rows, right, COLUMNS))
        grad_scores, _ = _grad_scores(q, k, v, tile, grad, log_sum, along_itself, SCALE)
        total_right += grad_scores
        grad_q += tl.dot(grad_scores.to(k.dtype), k)

        target = grad_qkv + image * N * 3 * H * D + head * D + rows[:, None] * (3 * H * D) + dims[None, :]
        tl.store(target, (grad_q * SCALE).to(q.dtype), mask=inside[:, None])
    tl.store(_square(grad_bias, group * H + head, rows, left, COLUMNS), total_left)
    tl.store(_square(grad_bias, group * H + head, rows, right, COLUMNS), total_right)


@triton.jit
def _key_and_value_kernel(
    qkv, bias, out, log_sums, grad_out, grad_qkv,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of ROWS keys and values of a head of an image. Here `rows` are keys and `columns` queries."""
    head, image = tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns, dims = tl.arange(0, COLUMNS), tl.arange(0, D)
    qkv += image * N * 3 * H * D + head * D
    offset = image * N * H * D + head * D
    q = _tile(qkv, columns, dims, 3 * H * D, N)
    k = _tile(qkv + H * D, rows, dims, 3 * H * D, N)
    v = _tile(qkv + 2 * H * D, rows, dims, 3 * H * D, N)
    grad = _tile(grad_out + offset, columns, dims, H * D, N)
    result = _tile(out + offset, columns, dims, H * D, N)
    log_sum = tl.load(log_sums + (image * H + head) * N + columns, mask=columns < N, other=0.0)

    along_itself = tl.sum(grad.to(tl.float32) * result.to(tl.float32), axis=1)
    tile = tl.load(_square(bias, head, columns, rows, COLUMNS))
    grad_scores, attention = _grad_scores(q, k, v, tile, grad, log_sum, along_itself, SCALE)  # COLUMNS, ROWS
    grad_v = tl.dot(tl.trans(attention.to(grad.dtype)), grad)
    grad_k = tl.dot(tl.trans(grad_scores.to(q.dtype)), q) * SCALE
    target = grad_qkv + image * N * 3 * H * D + head * D + rows[:, None] * (3 * H * D) + dims[None, :]
    inside = rows[:, None] < N
    tl.store(target + H * D, grad_k.to(q.dtype), mask=inside)
    tl.store(target + 2 * H * D, grad_v.to(q.dtype), mask=inside)
