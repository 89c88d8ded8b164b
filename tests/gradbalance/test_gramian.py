import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbalance import gramian as module
from gradbalance.gramian import gramian


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 6),
    sizes=st.lists(st.integers(0, 300), min_size=0, max_size=6),
    block=st.sampled_from([8, 64, 2**17]),
)
def test_equals_the_stacked_product(seed, count, sizes, block):
    generator = torch.Generator().manual_seed(seed)
    rows = [[torch.randn(n, generator=generator) for n in sizes] for _ in range(count)]
    holes = [[torch.rand((), generator=generator) < 0.2 for _ in sizes] for _ in range(count)]
    flat = [
        torch.cat([torch.zeros(0), *[torch.zeros_like(g) if h else g for g, h in zip(row, hole, strict=True)]]).double()
        for row, hole in zip(rows, holes, strict=True)
    ]
    rows = [[None if h else g for g, h in zip(row, hole, strict=True)] for row, hole in zip(rows, holes, strict=True)]
    original, module._BLOCK_CPU = module._BLOCK_CPU, block
    try:
        result = gramian(rows)
    finally:
        module._BLOCK_CPU = original
    torch.testing.assert_close(result, torch.stack(flat) @ torch.stack(flat).T, rtol=1e-12, atol=1e-9)
    assert result.dtype == torch.float64


@pytest.mark.parametrize("scale", [1e-30, 1e-19, 1e19, 1e30])
def test_float32_gradients_neither_under_nor_overflow(scale):
    g = torch.full((10,), scale)
    torch.testing.assert_close(gramian([[g], [2 * g]])[0, 1], torch.tensor(20.0).double() * float(g[0]) ** 2)


def test_low_precision_mixed_complex_sparse_and_strided_gradients():
    torch.manual_seed(0)
    pieces = [
        torch.randn(7).bfloat16(),
        torch.randn(3, 4).T,
        torch.randn(5, dtype=torch.complex64),
        torch.randn(1).expand(6),
        torch.eye(4).to_sparse(),
        torch.randn(2, dtype=torch.float64),
    ]
    dense = torch.cat(
        [(torch.view_as_real(p) if p.is_complex() else p.to_dense()).double().reshape(-1) for p in pieces]
    )
    result = gramian([pieces, [2 * p for p in pieces]])
    expected = torch.stack([dense, 2 * dense])
    torch.testing.assert_close(result, expected @ expected.T)


def test_autocast_and_reduced_matmul_precision_do_not_reach_it():
    torch.manual_seed(0)
    rows = [[torch.randn(1000)] for _ in range(3)]
    exact = gramian(rows)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(gramian(rows), exact)
    finally:
        torch.set_float32_matmul_precision(before)
