"""The order of use, and who has to go."""

from hypothesis import given
from hypothesis import strategies as st

from deltaplane_controlplane.lru import LruOrder, choose_victims


def test_the_least_recently_used_is_first() -> None:
    order: LruOrder[str] = LruOrder()
    for name in ("a", "b", "c", "a"):
        order.touch(name)
    assert list(order) == ["b", "c", "a"]
    order.remove("c")
    assert list(order) == ["b", "a"]
    assert "c" not in order
    assert len(order) == 2


def test_takes_as_few_as_it_can_in_order_of_use() -> None:
    sizes = {"old": 1, "middle": 5, "new": 3}
    gain = lambda name: (1, sizes[name])  # noqa: E731
    assert choose_victims(sizes, (0, 0), gain) == []
    assert choose_victims(sizes, (1, 1), gain) == ["old"]
    assert choose_victims(sizes, (1, 5), gain) == ["middle"], "the old one would go in vain"
    assert choose_victims(sizes, (1, 9), gain) == ["old", "middle", "new"]
    assert choose_victims(sizes, (1, 10), gain) is None
    assert choose_victims(sizes, (4, 0), gain) is None


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), max_size=8),
    st.tuples(st.integers(-2, 10), st.integers(-2, 20)),
)
def test_covers_the_shortage_and_takes_nobody_in_vain(
    gains: list[tuple[int, int]], shortage: tuple[int, int]
) -> None:
    everyone = range(len(gains))

    def covers(victims: list[int]) -> bool:
        return all(sum(gains[v][i] for v in victims) >= shortage[i] for i in (0, 1))

    victims = choose_victims(everyone, shortage, gains.__getitem__)
    if victims is None:
        assert not covers(list(everyone))
        return
    assert victims == sorted(victims)
    assert covers(victims)
    assert not any(covers([other for other in victims if other != v]) for v in victims)
