"""What every engine is asked to compute."""

from __future__ import annotations

from peers.protocol import lane_prompts, tokens


def test_the_same_salt_gives_the_same_tokens_and_another_differs_from_the_first_on() -> None:
    assert tokens(40, 7) == tokens(40, 7)
    assert tokens(40, 7)[:10] == tokens(10, 7)
    firsts = [tokens(1, salt)[0] for salt in (0, 1, *range(100, 140), *range(10_000, 10_010))]
    assert len(set(firsts)) == len(firsts)
    assert all(100 <= token < 48_100 for token in tokens(5_000, 3))


def test_forks_share_all_but_their_last_token() -> None:
    prompts = lane_prompts(8, 32, True)
    assert {len(prompt) for prompt in prompts} == {33}
    assert len({tuple(prompt[:-1]) for prompt in prompts}) == 1
    assert len({prompt[-1] for prompt in prompts}) == 8


def test_unrelated_lanes_share_nothing() -> None:
    assert len({prompt[0] for prompt in lane_prompts(8, 32, False)}) == 8
