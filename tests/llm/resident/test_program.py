"""A program gives the bits that transformers' own code gives through the same kernels, however its rows are passed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.llm.models import ARCHITECTURES, VOCABULARY, decoder_config, make_model, model_of, some_tokens
from torch import Tensor
from transformers import AutoConfig

from forkpoint.errors import InvalidInput
from forkpoint.llm import TransformersEngine
from forkpoint.llm.engines.attention import ATTENTION
from forkpoint.llm.engines.inspection import find_groups
from forkpoint.llm.engines.replacement import replace_modules
from forkpoint.llm.kernels.native import find_native
from forkpoint.llm.resident.base import GroupSpec
from forkpoint.llm.resident.program import Program, build_program
from forkpoint.llm.resident.routed import STEP_KEYWORD, RoutedStep
from forkpoint.llm.resident.tracing import Refusal

pytestmark = pytest.mark.skipif(find_native() is None, reason="the native kernels were not built")

_PAGE_TOKENS, _PAGES, _CONTEXT = 16, 24, 64
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LOWERED = ["llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt2", "phi3", "olmo2"]


def _config(name: str) -> Any:
    return ARCHITECTURES[name]() if name in ARCHITECTURES else decoder_config(name)


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """A model whose modules were replaced, and pages for it."""

    model: Any
    groups: Sequence[GroupSpec]

    def pages(self) -> list[Tensor]:
        return [
            torch.full(
                (_PAGES, len(group.layers), _PAGE_TOKENS * group.num_heads * (group.key_dim + group.value_dim)),
                torch.nan,
                dtype=group.dtype,
            )
            for group in self.groups
        ]

    def program(self, pages: Sequence[Tensor]) -> Program:
        built = build_program(
            self.model, self.groups, pages, page_tokens=_PAGE_TOKENS, max_context=_CONTEXT, max_rows=64
        )
        assert isinstance(built, Program), built
        return built


def _setting(config: Any, dtype: str = "float32") -> _Setting:
    model = make_model(config).to(_DTYPES[dtype])
    model.set_attn_implementation(ATTENTION)
    replace_modules(model)
    return _Setting(model=model, groups=find_groups(model))


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """Lanes of (tokens, first position, pages), laid end to end, and the rows whose logits are wanted."""

    lanes: Sequence[tuple[Sequence[int], int, Sequence[int]]]
    wanted: Sequence[int]

    @property
    def tokens(self) -> NDArray[np.int64]:
        return np.array([token for tokens, _, _ in self.lanes for token in tokens], np.int64)

    @property
    def positions(self) -> NDArray[np.int64]:
        return np.concatenate([np.arange(start, start + len(tokens)) for tokens, start, _ in self.lanes])

    @property
    def segments(self) -> NDArray[np.int64]:
        found, row = [], 0
        for tokens, start, _ in self.lanes:
            found.append((row, len(tokens), start))
            row += len(tokens)
        return np.array(found, np.int64).reshape(-1, 3)

    @property
    def table(self) -> NDArray[np.int32]:
        width = max(len(pages) for _, _, pages in self.lanes)
        return np.array([[*pages, *[-1] * (width - len(pages))] for _, _, pages in self.lanes], np.int32)


def _run(program: Program, it: _Pass, num_groups: int, *, threads: int = 1) -> NDArray[np.float32]:
    wanted = np.array(it.wanted, np.int64)
    logits = program.run(it.tokens, it.positions, it.segments, [it.table] * num_groups, wanted, threads=threads)
    assert not np.isnan(logits).any()
    return logits


def _eager(setting: _Setting, pages: Sequence[Tensor], it: _Pass) -> NDArray[np.float32]:
    table = torch.from_numpy(it.table)
    step = RoutedStep(
        groups=setting.groups,
        pages=pages,
        segments=torch.from_numpy(it.segments),
        tables=[table] * len(setting.groups),
    )
    with torch.no_grad():
        out = setting.model(
            input_ids=torch.from_numpy(it.tokens)[None],
            position_ids=torch.from_numpy(it.positions)[None],
            use_cache=False,
            **{STEP_KEYWORD: step},
        )
    return np.asarray(out.logits[0, list(it.wanted)].float().numpy())


_PREFILL = _Pass(lanes=[(some_tokens(21), 0, [3, 1]), (some_tokens(9, seed=1), 0, [7])], wanted=[20, 29, 4])
_DECODE = _Pass(lanes=[([5], 21, [3, 1]), ([6], 9, [7])], wanted=[0, 1])


def _bits(tensors: Sequence[Tensor]) -> list[bytes]:
    return [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("name", _LOWERED)
def test_prefill_and_decode_have_the_bits_of_transformers_own_code(name: str, dtype: str) -> None:
    setting = _setting(_config(name), dtype)
    own, theirs = setting.pages(), setting.pages()
    program = setting.program(own)
    for it in (_PREFILL, _DECODE):
        logits = _run(program, it, len(setting.groups))
        assert logits.tobytes() == _eager(setting, theirs, it).tobytes()
        assert _bits(own) == _bits(theirs)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("name", ["gemma2", "gpt_neox"])
def test_functions_of_torch_that_were_not_replaced_are_close(name: str, dtype: str) -> None:
    """torch's own tanh and gelu round otherwise than ours, so that what comes after them is equal but for its last bits."""
    setting = _setting(_config(name), dtype)
    own, theirs = setting.pages(), setting.pages()
    program = setting.program(own)
    epsilon = torch.finfo(_DTYPES[dtype]).eps
    for it in (_PREFILL, _DECODE):
        logits, expected = _run(program, it, len(setting.groups)), _eager(setting, theirs, it)
        np.testing.assert_allclose(logits, expected, atol=float(np.abs(expected).max()) * 16 * epsilon, rtol=0)


def test_rows_have_the_same_bits_in_pieces_and_on_any_number_of_threads() -> None:
    setting = _setting(_config("qwen3"), "bfloat16")
    tokens = some_tokens(40)
    pages = setting.pages()
    program = setting.program(pages)
    whole = _run(program, _Pass(lanes=[(tokens, 0, [0, 1, 2])], wanted=range(40)), 1)
    for threads, size in ((1, 7), (2, 16), (2, 1), (2, 40)):
        again = setting.pages()
        assert program.rebind(again) is None
        for start in range(0, 40, size):
            part = tokens[start : start + size]
            it = _Pass(lanes=[(part, start, [5, 4, 9])], wanted=range(len(part)))
            found = _run(program, it, 1, threads=threads)
            assert found.tobytes() == whole[start : start + len(part)].tobytes()
        for page, other in zip((0, 1, 2), (5, 4, 9), strict=True):
            filled = slice(None) if page < 2 else slice(0, 0)
            assert torch.equal(pages[0][page][filled], again[0][other][filled])


def test_a_program_may_be_built_in_inference_mode() -> None:
    setting = _setting(_config("llama"))
    own, theirs = setting.pages(), setting.pages()
    with torch.inference_mode():
        program = setting.program(own)
    assert _run(program, _PREFILL, 1).tobytes() == _eager(setting, theirs, _PREFILL).tobytes()


def test_weights_that_are_replaced_in_place_are_used_from_then_on() -> None:
    setting = _setting(_config("llama"))
    program = setting.program(setting.pages())
    before = _run(program, _PREFILL, 1)
    layer = setting.model.model.layers[1].mlp.down_proj
    layer.load(layer.unpacked() * 2)
    after = _run(program, _PREFILL, 1)
    assert after.tobytes() != before.tobytes()
    assert after.tobytes() == _eager(setting, setting.pages(), _PREFILL).tobytes()


def test_more_rows_than_a_block_of_the_tail_may_be_wanted() -> None:
    setting = _setting(_config("llama"))
    built = build_program(
        setting.model, setting.groups, setting.pages(), page_tokens=_PAGE_TOKENS, max_context=256, max_rows=200
    )
    assert isinstance(built, Program)
    it = _Pass(lanes=[(some_tokens(150), 0, range(10))], wanted=range(149, -1, -1))
    expected = _eager(setting, setting.pages(), it)
    assert _run(built, it, 1, threads=2).tobytes() == expected.tobytes()


def test_a_pass_that_wants_no_logits_appends_the_same_state() -> None:
    setting = _setting(_config("llama"))
    own, theirs = setting.pages(), setting.pages()
    program = setting.program(own)
    assert _run(program, replace(_PREFILL, wanted=[]), 1).shape == (0, VOCABULARY)
    _eager(setting, theirs, _PREFILL)
    assert _bits(own) == _bits(theirs)


def test_rows_of_no_segment_change_nothing() -> None:
    setting = _setting(_config("llama"))
    own, theirs = setting.pages(), setting.pages()
    program = setting.program(own)
    expected = _run(program, _PREFILL, 1)
    assert program.rebind(theirs) is None
    padded = np.append(_PREFILL.tokens, [0, 0]), np.append(_PREFILL.positions, [0, 0])
    wanted = np.array(_PREFILL.wanted, np.int64)
    found = program.run(*padded, _PREFILL.segments, [_PREFILL.table], wanted, threads=1)
    assert found.tobytes() == expected.tobytes()
    assert _bits(own) == _bits(theirs)


def test_weights_that_are_no_numbers_show_in_the_logits() -> None:
    setting = _setting(_config("llama"))
    with torch.no_grad():
        setting.model.model.norm.weight[3] = torch.nan
    program = setting.program(setting.pages())
    logits = program.run(
        _PREFILL.tokens, _PREFILL.positions, _PREFILL.segments, [_PREFILL.table], np.array([2]), threads=1
    )
    assert np.isnan(logits).any()


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": np.array([VOCABULARY])},
        {"token_ids": np.array([-1])},
        {"positions": np.array([_CONTEXT])},
        {"output_rows": np.array([1])},
        {"token_ids": np.array([1, 2])},
        {"token_ids": np.arange(65), "positions": np.arange(65)},
        {"segments": np.array([[0, 2, 0]])},
        {"tables": [np.array([[_PAGES]], np.int32)]},
        {"tables": [np.array([[-1]], np.int32)]},
        {"tables": []},
        {"threads": 0},
    ],
)
def test_a_pass_that_cannot_run_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    setting = _setting(_config("llama"))
    pages = setting.pages()
    program = setting.program(pages)
    before = _bits(pages)
    arguments: dict[str, Any] = {
        "token_ids": np.array([1]),
        "positions": np.array([0]),
        "segments": np.array([[0, 1, 0]]),
        "tables": [np.array([[0]], np.int32)],
        "output_rows": np.array([0]),
        "threads": 1,
    }
    program.run(**arguments | {"segments": np.zeros((0, 3), np.int64), "tables": [np.zeros((0, 1), np.int32)]})
    with pytest.raises(InvalidInput) as refused:
        program.run(**arguments | change)
    assert refused.value.code == "invalid_input.pass"
    assert _bits(pages) == before


def test_pages_of_another_form_are_refused_and_the_old_ones_stay() -> None:
    setting = _setting(_config("llama"))
    pages = setting.pages()
    program = setting.program(pages)
    for code, others in (
        ("pages", []),
        ("pages", [pages[0][:, :2]]),
        ("pages", [pages[0][::2]]),
        ("dtype", [pages[0].half()]),
        ("device", [pages[0].to("meta")]),
    ):
        refusal = program.rebind(others)
        assert isinstance(refusal, Refusal)
        assert refusal.code == code
    expected = _eager(setting, setting.pages(), _PREFILL)
    assert _run(program, _PREFILL, 1).tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_model_without_a_program_says_why(name: str) -> None:
    setting = _setting(_config(name))
    built = build_program(
        setting.model, setting.groups, setting.pages(), page_tokens=_PAGE_TOKENS, max_context=_CONTEXT, max_rows=64
    )
    assert isinstance(built, Refusal)
    assert built.why


def test_weights_that_are_not_packed_are_refused_by_name() -> None:
    model = make_model(_config("llama"))
    model.set_attn_implementation(ATTENTION)
    setting = _Setting(model=model, groups=find_groups(model))
    built = build_program(
        model, setting.groups, setting.pages(), page_tokens=_PAGE_TOKENS, max_context=_CONTEXT, max_rows=64
    )
    assert isinstance(built, Refusal)
    assert built.code == "operation"
    assert built.operation.startswith("aten.")


@pytest.mark.model
def test_smollm2_has_the_bits_of_transformers_own_code(smollm2: TransformersEngine) -> None:
    model = model_of(smollm2)
    setting = _Setting(model=model, groups=find_groups(model))
    own, theirs = setting.pages(), setting.pages()
    program = setting.program(own)
    for it in (_PREFILL, _DECODE):
        assert _run(program, it, 1).tobytes() == _eager(setting, theirs, it).tobytes()
    assert _bits(own) == _bits(theirs)


def test_attention_beside_the_feed_forward_and_a_head_with_a_bias_are_served() -> None:
    config = AutoConfig.for_model(
        "phi", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    setting = _setting(config)
    own, theirs = setting.pages(), setting.pages()
    program = setting.program(own)
    assert _run(program, _PREFILL, 1).tobytes() == _eager(setting, theirs, _PREFILL).tobytes()
