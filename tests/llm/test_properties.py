"""Any interleaving of everything that can be done to many continuations gives each what it would have had alone."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, multiple, rule, run_state_machine_as_test
from tests.llm.conftest import Folders
from tests.llm.models import load, some_tokens

from forkpoint.llm import Continuation, Sampling, TransformersEngine
from forkpoint.repo.repository import Repository

pytestmark = pytest.mark.model

ENDLESS = ((1, -100.0),)
SAMPLINGS = (
    Sampling(logit_bias=ENDLESS),
    Sampling(temperature=0.9, seed=1, frequency_penalty=0.5, logit_bias=ENDLESS),
    Sampling(temperature=0.7, seed=2, stream=4, repetition_penalty=1.2, logit_bias=ENDLESS),
)
LENGTHS = (1, 2, 250, 255, 256, 257, 270)

Step: TypeAlias = tuple[str, int, int]
"""``start``, ``extend`` or ``generate``, a length, and which tokens or sampling."""


@dataclass
class Held:
    """A value and the steps by which it would have been made alone."""

    value: Continuation
    steps: tuple[Step, ...]


def machine_of(engine: TransformersEngine) -> type[RuleBasedStateMachine]:
    @cache
    def alone(steps: tuple[Step, ...]) -> tuple[tuple[int, ...], bytes]:
        """Tokens and next logits of a value made by these steps with nobody else there."""
        value: Continuation | None = None
        for kind, size, which in steps:
            if value is None:
                value = engine.start(some_tokens(size, seed=which))
            elif kind == "extend":
                value = value.extend(some_tokens(size, seed=which))
            else:
                value = value.generate(size, sampling=SAMPLINGS[which])
        assert value is not None
        return value.tokens, value.logits().tobytes()

    class Machine(RuleBasedStateMachine):
        held = Bundle("held")

        def __init__(self) -> None:
            super().__init__()
            self.folder = tempfile.TemporaryDirectory()
            self.repository = Repository.create(self.folder.name)
            self.commits: dict[str, Held] = {}

        def teardown(self) -> None:
            engine._open().strategy.check()
            self.repository.close()
            self.folder.cleanup()

        @rule(target=held, size=st.sampled_from(LENGTHS), which=st.integers(0, 1), warm=st.booleans())
        def start(self, size: int, which: int, warm: bool) -> Held:
            value = engine.start(some_tokens(size, seed=which), repository=self.repository if warm else None)
            return Held(value, (("start", size, which),))

        @rule(target=held, one=held, size=st.sampled_from((1, 2, 7, 256)), which=st.integers(0, 3))
        def extend(self, one: Held, size: int, which: int) -> Held:
            return Held(one.value.extend(some_tokens(size, seed=which)), (*one.steps, ("extend", size, which)))

        @rule(target=held, one=held, size=st.integers(1, 4), which=st.integers(0, 2))
        def generate(self, one: Held, size: int, which: int) -> Held:
            return Held(one.value.generate(size, sampling=SAMPLINGS[which]), (*one.steps, ("generate", size, which)))

        @rule(target=held, one=held, size=st.integers(1, 4), which=st.integers(0, 2))
        def stream_and_abandon(self, one: Held, size: int, which: int) -> Held:
            stream = one.value.stream(9, sampling=SAMPLINGS[which])
            items = [next(stream) for _ in range(size)]
            return Held(items[-1].continuation, (*one.steps, ("generate", size, which)))

        @rule(target=held, ones=st.lists(held, min_size=2, max_size=4), size=st.integers(1, 3), which=st.integers(0, 2))
        def generate_together(self, ones: list[Held], size: int, which: int) -> object:
            values = engine.generate_many([one.value for one in ones], size, sampling=SAMPLINGS[which])
            steps = ("generate", size, which)
            return multiple(*(Held(value, (*one.steps, steps)) for value, one in zip(values, ones, strict=True)))

        @rule(num_pages=st.sampled_from((1, 16, None)))
        def evict(self, num_pages: int | None) -> None:
            engine._open().strategy.evict(num_pages)

        @rule(target=held, one=held, count=st.integers(1, 3))
        def fork(self, one: Held, count: int) -> object:
            return multiple(*(Held(value, one.steps) for value in one.value.fork(count)))

        @rule(one=held)
        def score(self, one: Held) -> None:
            one.value.score([[5, 6, 7], [8]])

        @rule(one=held, name=st.sampled_from(("a", "b")))
        def commit(self, one: Held, name: str) -> None:
            publication = one.value.commit(self.repository, name, expect="anything")
            assert publication.manifest_id == one.value.id
            self.commits[name] = one

        @rule(target=held, name=st.sampled_from(("a", "b")))
        def checkout(self, name: str) -> object:
            if name not in self.commits:
                return multiple()
            value = engine.checkout(self.repository, name)
            assert value.id == self.commits[name].value.id
            return Held(value, self.commits[name].steps)

        @rule(target=held, one=held)
        def restore(self, one: Held) -> Held:
            return Held(engine.restore(one.value.snapshot()), one.steps)

        @rule(one=consumes(held))
        def free(self, one: Held) -> None:
            del one

        @rule(one=held)
        def check(self, one: Held) -> None:
            assert (one.value.tokens, one.value.logits().tobytes()) == alone(one.steps)
            at_once = engine.start(one.value.tokens)
            assert at_once.logits().tobytes() == one.value.logits().tobytes()

        @rule(one=held)
        def check_what_was_committed(self, one: Held) -> None:
            for name, committed in self.commits.items():
                tokens, logits = alone(committed.steps)
                value = engine.checkout(self.repository, name)
                assert (value.tokens, value.logits().tobytes()) == (tokens, logits)
            del one

    return Machine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_interleaving_gives_each_what_it_would_have_had_alone(
    folders: Folders, model_cache: Path, dtype: str
) -> None:
    with load(folders("llama"), model_cache, dtype=dtype, lanes=3) as engine:
        assert engine.exactness.claim == "invariance"
        run_state_machine_as_test(machine_of(engine), settings=settings(stateful_step_count=30))
