import itertools

from hypothesis import given
from hypothesis import strategies as st

from trimaran.engine.text import TextStream


def pieces(text: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def stream(tokens: list[bytes], **options: object) -> TextStream:
    return TextStream(tokens.__getitem__, **options)  # type: ignore[arg-type]


@given(st.text(), st.lists(st.integers(0, 60)))
def test_text_cut_anywhere_comes_out_whole(text: str, cuts: list[int]) -> None:
    tokens = pieces(text.encode(), cuts)
    out = stream(tokens)
    emitted = [out.push(i)[0] for i in range(len(tokens))]
    assert "".join(emitted) + out.finish() == text
    assert "\ufffd" in text or not any("\ufffd" in part for part in emitted)


@given(st.binary(max_size=30), st.lists(st.integers(0, 30)))
def test_any_bytes_become_what_python_decodes(data: bytes, cuts: list[int]) -> None:
    tokens = pieces(data, cuts)
    out = stream(tokens)
    text = "".join(out.push(i)[0] for i in range(len(tokens))) + out.finish()
    assert text == data.decode("utf-8", errors="replace")


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 30)),
    st.booleans(),
)
def test_stop_strings_cut_the_text_at_their_first_place(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    tokens = pieces(text.encode(), cuts)
    out = stream(tokens, stops=tuple(stops), include_stop=include)
    emitted, match, seen = "", None, ""
    for i, token in enumerate(tokens):
        part, match = out.push(i)
        emitted += part
        seen += token.decode()
        if match:
            break
        # whatever is held back could still begin a stop string, and nothing more is
        held = seen[len(emitted) :]
        assert seen.startswith(emitted)
        assert not held or any(stop.startswith(held) for stop in stops)
    if match is None:
        assert not any(stop in text for stop in stops)
        assert emitted + out.finish() == text
    else:
        assert match in stops
        place = min(seen.find(stop) for stop in stops if stop in seen)
        assert emitted == seen[:place] + (match if include else "")


def test_stop_strings_pass_before_min_tokens() -> None:
    tokens = [b"END", b" and ", b"EN", b"D."]
    out = stream(tokens, stops=("END",))
    assert out.push(0, look_for_stops=False) == ("END", None)
    assert out.push(1)[0] == " and "
    assert out.push(2) == ("", None)
    text, match = out.push(3)
    assert text == ""
    assert match is not None


def test_hidden_tokens_have_no_text() -> None:
    out = stream([b"<|im_end|>", b"hi"], hidden=frozenset({0}))
    assert out.push(0) == ("", None)
    assert out.push(1) == ("hi", None)
