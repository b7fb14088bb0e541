"""Rows of verl as arrays, and arrays as rows again. Needs neither verl nor Ray."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollwise import InexactSettingError, RolloutError
from rollwise.verl.rows import (
    behaviour_log_probs,
    nbytes,
    pieces,
    sessions,
    split_key,
    stored_nbytes,
    tag,
    to_arrays,
    to_rows,
)


@st.composite
def verl_rows(draw, dense=None):
    """The rows of one session, as verl's agent loop writes them."""

    def tensor(length, largest):
        return torch.tensor(draw(st.lists(st.integers(0, largest), min_size=length, max_size=length)))

    rows = []
    dense = draw(st.booleans()) if dense is None else dense
    for _ in range(draw(st.integers(1, 3))):
        prompt_length, length = draw(st.integers(1, 6)), draw(st.integers(1, 7))
        scores = torch.zeros(length)
        scores[-1] = draw(st.floats(-2, 2, width=32))
        if dense:
            scores[0] = 0.25
        rows.append(
            {
                "prompts": tensor(prompt_length, 150_000),
                "responses": tensor(length, 150_000),
                "response_mask": tensor(length, 1),
                "rollout_log_probs": -torch.rand(length),
                "rm_scores": scores,
                "num_turns": draw(st.integers(1, 5)),
                "multi_modal_inputs": {},
                "position_ids": torch.arange(prompt_length + length),
            }
        )
    return rows


@given(verl_rows())
def test_rows_come_back_as_they_were(rows):
    again = to_rows(to_arrays(rows))
    assert len(again) == len(rows)
    for row, copy in zip(rows, again, strict=True):
        assert copy["num_turns"] == row["num_turns"]
        for name in ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "position_ids"):
            assert copy[name].tolist() == row[name].tolist(), name
            assert copy[name].dtype == row[name].dtype, name
        assert copy["loss_mask"].tolist() == row["response_mask"].tolist()
        assert copy["input_ids"].tolist() == row["prompts"].tolist() + row["responses"].tolist()


@given(verl_rows(dense=False))
def test_the_size_is_known_before_and_the_trained_models_log_probs_count(rows):
    arrays = to_arrays(rows)
    sizes = len(rows), sum(len(row["prompts"]) for row in rows), sum(len(row["responses"]) for row in rows)
    assert nbytes(arrays) == stored_nbytes(*sizes, with_old_log_probs=False)
    arrays["old_log_probs"] = np.zeros(sizes[2], dtype=np.float32)
    assert nbytes(arrays) == stored_nbytes(*sizes, with_old_log_probs=True)


def row(**changes):
    fields = {
        "prompts": torch.tensor([5, 6]),
        "responses": torch.tensor([7, 8, 9]),
        "response_mask": torch.tensor([1, 1, 0]),
        "rollout_log_probs": torch.tensor([-0.5, -1.0, -2.0]),
        "rm_scores": torch.tensor([0.0, 0.0, 1.0]),
        "num_turns": 2,
    }
    return fields | changes


def test_arrays_do_not_hold_on_to_the_batch_they_came_from():
    whole = torch.arange(1000)
    arrays = to_arrays([row(responses=whole[10:13])])
    whole[10:13] = 0
    assert arrays["response_ids"].tolist() == [10, 11, 12]
    assert arrays["response_ids"].base is None or arrays["response_ids"].base.nbytes < 100


def test_the_behaviour_policys_log_probs_are_the_trained_models_own_once_it_has_them():
    arrays = to_arrays([row(), row(rollout_log_probs=torch.tensor([-3.0, -4.0, -5.0]))])
    assert behaviour_log_probs(arrays).tolist() == [-0.5, -1.0, -2.0, -3.0, -4.0, -5.0]
    arrays["old_log_probs"] = np.array([-0.5, -1.0, -2.0, -3.0, -4.0, -5.5], dtype=np.float32)
    assert behaviour_log_probs(arrays).tolist()[-1] == -5.5
    assert [piece.tolist() for piece in pieces(arrays, "old_log_probs")] == [[-0.5, -1.0, -2.0], [-3.0, -4.0, -5.5]]


def test_rows_without_log_probs_are_refused():
    with pytest.raises(InexactSettingError, match="calculate_log_probs"):
        to_arrays([row(rollout_log_probs=None)])


def test_keys_are_sorted_into_sessions():
    keys = ["a-b_0_1", "a-b_0_0", "c_12_0", "a-b_1_0", "c_12_10", "c_12_2"]
    assert sessions(keys) == {
        ("a-b", 0): ["a-b_0_0", "a-b_0_1"],
        ("c", 12): ["c_12_0", "c_12_2", "c_12_10"],
        ("a-b", 1): ["a-b_1_0"],
    }


@pytest.mark.parametrize("key", ["a-b", "a_b_0", "a_0_b", ""])
def test_a_key_of_another_form_is_refused(key):
    with pytest.raises(RolloutError, match="no key of verl's"):
        split_key(key)


def test_a_tag_says_how_long_the_row_is_and_which_weights_made_it():
    made = tag(3, 4, 7)
    assert (made["seq_len"], made["min_global_steps"], made["max_global_steps"], made["global_steps"]) == (7, 7, 7, 8)
