"""Structured answers: what counts as the same call."""

from tests.cli.conftest import save_tiny

from karhunen.evaluation.tasks.tool_calls import parsed


def test_a_call_is_the_object_that_a_line_begins_with() -> None:
    assert parsed('{"a": 1, "b": [true]} and more') == {"a": 1, "b": [True]}
    assert parsed('{"b": [true], "a": 1}') == parsed('{"a":1,"b":[true]}')
    assert parsed('{"a": 1') is None
    assert parsed("") is None
    assert parsed("[1]") is None
    assert parsed("{" * 100_000) is None


def test_prompts_end_within_a_call_and_hold_the_records(tmp_path) -> None:  # type: ignore[no-untyped-def]
    import pytest

    from karhunen.evaluation.tasks.tool_calls import BEGINNING, ToolCalls
    from karhunen.hf.embedded import load

    model, tokenizer = load(save_tiny(tmp_path / "m", max_position_embeddings=4096))
    prepared = ToolCalls(n_requests=2, n_tokens=2500).prepare(model, tokenizer, 0, None)
    texts = [tokenizer.decode(tokens) for tokens in prepared.tokens]
    assert all(text.endswith(BEGINNING) for text in texts)
    assert texts[0] != texts[1]
    assert all(2200 < len(tokens) <= 2500 for tokens in prepared.tokens)
    assert texts[0].count('"tool": "book"') == 4
    wanted = prepared.wanted[0]
    assert f"Request: book number {wanted['id']} in {wanted['city']} for {wanted['seats']} people." in texts[0]
    assert texts[0].index('"confirm": true') < 2000 < texts[0].index(str(wanted["id"]))
    assert ToolCalls(n_requests=2, n_tokens=2500).prepare(model, tokenizer, 0, None).inputs == prepared.inputs
    with pytest.raises(ValueError, match="do not fit the model's 4096 positions"):
        ToolCalls(n_tokens=4096).prepare(model, tokenizer, 0, None)
