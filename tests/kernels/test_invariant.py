"""Code that calls PyTorch itself gives each row the same bits in any company, inside `BatchInvariant`."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chairlift.kernels.invariant import BatchInvariant

ROWS = [1, 2, 3, 5, 7, 9, 11, 16, 31, 33, 64]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


class Router(nn.Module):
    """A mixture of experts with everything inline, as models write it: tokens [n, 30] to [n, 30]."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(6, 30))
        self.up = nn.Parameter(torch.randn(6, 30, 2 * 33) / 5)
        self.down = nn.Parameter(torch.randn(6, 33, 30) / 5)
        self.bias = nn.Parameter(torch.randn(30))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = F.linear(x, self.gate).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for expert in range(6):
            token, place = torch.where(chosen == expert)
            if len(token):
                gate, up = (x[token] @ self.up[expert]).chunk(2, -1)
                hidden = gate * torch.sigmoid(gate * 1.702) * (up + 1)
                result = torch.addmm(self.bias, hidden, self.down[expert])
                out.index_add_(0, token, result * weights[token, place, None])
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mixture_of_experts_gives_a_token_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    router = Router().to(dtype).requires_grad_(False)
    x = torch.randn(80, 30).to(dtype)
    with BatchInvariant():
        whole = router(x)
        torch.testing.assert_close(whole, router(x), atol=0, rtol=0)
        for rows in ROWS:
            assert torch.equal(bits(router(x[80 - rows :])), bits(whole[80 - rows :])), rows
    torch.testing.assert_close(whole, router(x), atol=0.1 if dtype == torch.bfloat16 else 5e-3, rtol=0.05)


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": lambda x: F.softplus(x, beta=2.0),
    "sigmoid": lambda x: x.sigmoid(),
    "rsqrt": lambda x: torch.rsqrt(x * x + 0.1),
    "pow": lambda x: (x * x) ** 1.5,
    "pow of tensors": lambda x: torch.pow(x * x, torch.ones_like(x)),
    "vectors": lambda x: x @ torch.ones(x.shape[-1], dtype=x.dtype),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_functions_mean_what_they_did(name: str) -> None:
    function = ELEMENTWISE[name]
    x = torch.randn(7, 33)
    with BatchInvariant():
        result = function(x)
        rows = torch.cat([function(x[row : row + 1]) for row in range(7)])
    torch.testing.assert_close(result, function(x))
    if name != "vectors":
        assert torch.equal(result, rows)


def test_addmm_keeps_its_factors() -> None:
    bias, x, weight = torch.randn(5, 7), torch.randn(5, 3), torch.randn(3, 7)
    with BatchInvariant():
        result = torch.addmm(bias, x, weight, beta=0.5, alpha=2.0)
    torch.testing.assert_close(result, torch.addmm(bias, x, weight, beta=0.5, alpha=2.0))


def test_it_ends_with_its_context() -> None:
    """On plain float32 rows PyTorch's own matmul differs between one row and many, or this module has no purpose."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 576), torch.randn(64, 576)
    assert not torch.equal(F.linear(x[:1], weight), F.linear(x, weight)[:1])
    with BatchInvariant():
        assert torch.equal(F.linear(x[:1], weight), F.linear(x, weight)[:1])
    assert not torch.equal(F.linear(x[:1], weight), F.linear(x, weight)[:1])
