import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from deltaplane_kernels.rotary import apply_rotary, rotary_factors

POSITIONS = torch.tensor([0, 1, 5, 17, 4000])


def inverse_frequencies(head_dim: int) -> torch.Tensor:
    return 1.0 / (10000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim))


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_equals_transformers(head_dim: int, dtype: torch.dtype, atol: float) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(5, 6, head_dim).to(dtype), torch.randn(5, 2, head_dim).to(dtype)
    angles = POSITIONS[:, None].float() * inverse_frequencies(head_dim)
    angles = torch.cat((angles, angles), dim=-1)
    factors = ((angles.cos() * 1.3).to(dtype)[None], (angles.sin() * 1.3).to(dtype)[None])
    expected = apply_rotary_pos_emb(q[None], k[None], *factors, unsqueeze_dim=2)

    cos, sin = rotary_factors(POSITIONS, inverse_frequencies(head_dim), 1.3, dtype)
    apply_rotary(q, cos, sin)
    apply_rotary(k, cos, sin)

    torch.testing.assert_close(q, expected[0][0], rtol=0, atol=atol)
    torch.testing.assert_close(k, expected[1][0], rtol=0, atol=atol)


def test_rotates_a_view_and_nothing_beside_it() -> None:
    torch.manual_seed(0)
    packed = torch.randn(5, 4, 16)
    before = packed.clone()
    cos, sin = rotary_factors(POSITIONS, inverse_frequencies(16), 1.0, torch.float32)

    apply_rotary(packed[:, :3], cos, sin)

    assert torch.equal(packed[:, 3], before[:, 3])
    assert torch.equal(packed[0], before[0])  # position 0 is not turned
    assert not torch.equal(packed[1, :3], before[1, :3])


def test_keeps_distances_only() -> None:
    """The product of a query and a key depends on how far apart they are, not on where."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 32), torch.randn(1, 1, 32)

    def product(q_position: int, k_position: int) -> float:
        turned = []
        for x, position in ((q, q_position), (k, k_position)):
            y = x.clone()
            factors = rotary_factors(torch.tensor([position]), inverse_frequencies(32), 1.0, torch.float32)
            apply_rotary(y, *factors)
            turned.append(y)
        return float((turned[0] * turned[1]).sum())

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-4)
