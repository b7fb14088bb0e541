"""Answers are read as the docstring says, and no text makes the reader fail."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwise.tasks.actions import DIRECTIONS, after_thinking, numbered, parse_action, tagged


@pytest.mark.parametrize(
    "text",
    [
        "left",
        " Left.\n",
        "L",
        "←",
        "<action>left</action>",
        "<action> LEFT </action>",
        "I go <action>right</action>, no: <action>left</action> it is",
        "<think>right? <action>up</action></think>left",
        "<think>...</think> <action>left</action> right",
        "action: left",
        "Action = left",
        "\\boxed{left}",
        '"left"',
        "move left",
        "go  left!",
        "west",
    ],
)
def test_spellings_of_left(text):
    assert parse_action(text, DIRECTIONS) == "left"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lefty",
        "left right",
        "left, then right",
        "<action></action>",
        "<action>jump</action> left",
        "<action>left",
        "left</action>",
        "</action>left<action>",
        "4",
        "left" * 100,
        "<think>left</think>",
        "x" * 70 + " left",
    ],
)
def test_malformed(text):
    assert parse_action(text, DIRECTIONS) is None


PIECES = st.lists(
    st.sampled_from(
        ["<action>", "</action>", "<think>", "</think>", "left", "r", " ", "\\boxed{", "}", "\n", "action:"]
    )
    | st.text(max_size=5)
)


@settings(max_examples=60, deadline=None)
@given(PIECES.map("".join))
def test_any_text_gives_an_action_or_none(text):
    assert parse_action(text, DIRECTIONS) in (None, "left", "down", "right", "up")


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=20), st.sampled_from(["left", "down", "right", "up"]), st.text(max_size=20))
def test_a_tag_at_the_end_wins_over_what_stands_before(before, action, thought):
    assert parse_action(f"<think>{thought}</think>{before}<action>{action}</action>", DIRECTIONS) == action


def test_reading_takes_linear_time():
    hostile = "<action>" * 200_000 + "</think>" * 200_000 + " \\boxed{" * 200_000
    assert parse_action(hostile, DIRECTIONS) is None
    assert tagged("<action>" * 200_000 + "</action>", "action") == ""


def test_after_thinking():
    assert after_thinking("a</think>b</think>c") == "c"
    assert after_thinking("abc") == "abc"


def test_numbers():
    known = numbered(["up", "right"])
    assert [parse_action(text, known) for text in ("0", "<action>1</action>", "2")] == ["up", "right", None]
