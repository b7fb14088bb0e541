"""Images of rows as arrays, and again. Needs neither verl nor Ray."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollwise import InexactSettingError, Replay, Rollout, RolloutScheduler
from rollwise.storage import load_state, save_state
from rollwise.verl.media import media_nbytes
from rollwise.verl.rows import nbytes, stored_nbytes, to_arrays, to_rows


@st.composite
def picture_rows(draw):
    """Rows of one session of a model such as Qwen2-VL: patches of all images in one matrix, four positions a token."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        prompt_length, length = draw(st.integers(1, 6)), draw(st.integers(1, 7))
        patches = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(0, 2)))]
        media = {}
        if patches:
            media = {
                "pixel_values": torch.randn(sum(patches), 5),
                "image_grid_thw": torch.tensor([[1, count, 1] for count in patches]),
            }
        if draw(st.booleans()):
            media["image_sizes"] = torch.zeros(2, 0, dtype=torch.int32)
        rows.append(
            {
                "prompts": torch.arange(prompt_length),
                "responses": torch.arange(length),
                "response_mask": torch.ones(length, dtype=torch.int64),
                "rollout_log_probs": torch.randn(length),
                "rm_scores": torch.nn.functional.pad(torch.ones(1), (length - 1, 0)),
                "num_turns": 2,
                "multi_modal_inputs": media,
                "position_ids": torch.randint(0, 99, (4, prompt_length + length)),
            }
        )
    return rows


def check_same(rows, again):
    for row, copy in zip(rows, again, strict=True):
        assert torch.equal(copy["position_ids"], row["position_ids"])
        assert copy["multi_modal_inputs"].keys() == row["multi_modal_inputs"].keys()
        for name, tensor in row["multi_modal_inputs"].items():
            copied = copy["multi_modal_inputs"][name]
            assert (copied.dtype, copied.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(copied, tensor)


@given(picture_rows())
def test_rows_come_back_as_they_were_and_their_bytes_are_counted(rows):
    arrays = to_arrays(rows)
    assert all(array.ndim == 1 for array in arrays.values())
    check_same(rows, to_rows(arrays))
    tokens = [(len(row["prompts"]), len(row["responses"])) for row in rows]
    text = stored_nbytes(len(rows), *(sum(column) for column in zip(*tokens, strict=True)), with_old_log_probs=False)
    assert nbytes(arrays) == text + media_nbytes(arrays)


def plain_row():
    return {
        "prompts": torch.arange(3),
        "responses": torch.arange(2),
        "response_mask": torch.ones(2, dtype=torch.int64),
        "rollout_log_probs": torch.randn(2),
        "rm_scores": torch.tensor([0.0, 1.0]),
        "num_turns": 2,
    }


def test_rows_with_and_without_images_come_back_from_a_checkpoint(tmp_path):
    torch.manual_seed(0)
    picture = plain_row() | {
        "multi_modal_inputs": {"pixel_values": torch.randn(6, 4), "image_grid_thw": torch.tensor([[1, 2, 3]])},
        "position_ids": torch.arange(20).reshape(4, 5),
    }
    text = picture | {"multi_modal_inputs": {}}
    scheduler = RolloutScheduler(range(2), replay=Replay(warmup_steps=0))
    sessions = [[picture], [text], [text, picture]]
    rollouts = [Rollout(0, 1.0, to_arrays(rows), advantage=1.0, birth_step=0, num_tokens=1) for rows in sessions]
    scheduler.buffer.insert(rollouts)
    save_state(tmp_path, scheduler.state_dict())
    for rows, rollout in zip(sessions, load_state(tmp_path)["rollouts"], strict=True):
        check_same(rows, to_rows(rollout.payload))


def test_text_alone_takes_no_room():
    row = plain_row() | {
        "multi_modal_inputs": {},
        "position_ids": torch.arange(5),
    }
    arrays = to_arrays([row])
    assert media_nbytes(arrays) == 0
    assert to_rows(arrays)[0]["position_ids"].tolist() == list(range(5))


@pytest.mark.parametrize("value", [torch.ones(2, dtype=torch.bfloat16), [[0, 4]]])
def test_what_cannot_be_stored_is_refused(value):
    row = {
        "prompts": torch.arange(1),
        "responses": torch.arange(1),
        "response_mask": torch.ones(1),
        "rollout_log_probs": torch.zeros(1),
        "rm_scores": torch.ones(1),
        "num_turns": 2,
        "multi_modal_inputs": {"image_bound": value},
    }
    with pytest.raises(InexactSettingError, match=r"multi_modal_inputs\['image_bound'\] .* is of type"):
        to_arrays([row])
