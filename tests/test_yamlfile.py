"""Tests of the door from YAML: what it refuses, in one sentence with the line."""

import pytest
import yaml

from igcore.errors import ParameterError
from igstudy.yamlfile import parsed, read_yaml


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # the last of two values won in silence
        ("a: 1\nkeep: 2\nseed: 0\nkeep: 4\n", "line 4: the key 'keep' is given twice"),
        ("search: {rounds: 1, keep: 2, rounds: 3}", "line 1: the key 'rounds' is given twice"),
        ("points:\n  one: {eta: 0.5}\n  one: {eta: 2.0}\n", "line 3: the key 'one' is given twice"),
        # YAML 1.1 reads them as 15, 3723, 62.5, true, false and a date
        ("limit: 017", "line 1: '017' is another value in old YAML"),
        ("seed: -012", "'-012' is another value"),
        ("\nlimit: 1:02:03", "line 2: '1:02:03' is another value"),
        ("budget: 1:02.5", "'1:02.5' is another value"),
        ("strict: on", "'on' is another value"),
        ("grid: {strict: [No]}", "'No' is another value"),
        ("off: 3", "'off' is another value"),
        ("run: 2026-11-25", "'2026-11-25' is another value"),
        # tracebacks, and text of the parser's own with line ends and <unicode string>
        ("a: 1\nb: [1, 2\nc: 3\n", "line 3: expected"),
        ("a: b: c", "line 1: mapping values are not allowed here"),
        ("a: \x07", "unacceptable character #x0007"),
        ("a: !!int x", "invalid literal for int"),
        ("a: !!python/name:os.system", "line 1: could not determine a constructor"),
        ("? [1]\n: 2", "line 1: found unhashable key"),
        ("{" * 30_000, "recursion"),
        # a few lines that make a billion values, and a value without an end
        ("a: &x [1, 1]\nb: &y [*x, *x]\nc: [*y, *y]", "line 1: &x or its alias is not allowed"),
        ("a: 1\nb: &loop\n  c: *loop", "line 2: &loop or its alias is not allowed"),
        ("a: *none", "line 1: &none or its alias is not allowed"),
        ("? &key a\n: 1", "line 1: &key or its alias"),
    ],
)
def test_what_two_readers_would_take_for_two_things_is_refused(text, said):
    """Bug: a budget given twice, a seed of 010 that is 8, and errors in the parser's own words."""
    with pytest.raises(ParameterError) as caught:
        parsed(text, "x.yaml")
    assert str(caught.value).startswith("x.yaml cannot be read (") and said in str(caught.value)
    assert "\n" not in str(caught.value) and "unicode string" not in str(caught.value)


def test_what_has_one_meaning_is_read():
    """Guards plain settings, quoted text that looks like a value, and what is written by igcore."""
    text = "a: 10\nb: 0.5\nc: -3\nd: true\ne: null\nf: 1_000\ng: 0\nh: 'no'\ni: \"1:30\"\nj: 1.0e-5"
    plain = parsed(text, "")
    expected = [10, 0.5, -3, True, None, 1000, 0, "no", "1:30", 1e-5]
    assert list(plain.values()) == expected
    odd = {"x": ["010", "yes", "1:30", "2026-01-01", "<<", "&a", "*a"], "y": {"on": 1e-7}, "1": 2}
    assert parsed(yaml.safe_dump(odd), "") == odd
    assert parsed("{x: {a: 1}, y: {a: 1}}", "") == {"x": {"a": 1}, "y": {"a": 1}}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"- a\n- b\n", r"it is \['a', 'b'\]"),
        (b"\xff\xfe\x00", "can't decode byte"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_none_is_one_sentence(tmp_path, content, why):
    path = tmp_path / "x.yaml"
    if content:
        path.write_bytes(content)
    with pytest.raises(ParameterError, match=f"x.yaml cannot be read .*{why}.*; it must"):
        read_yaml(path)
