"""Batches cut into rows and rows put together again."""

import numpy as np
import pytest
import torch

from rollwise import InexactSettingError
from rollwise.trl.rows import batch_to_rows, loss_tokens, neutral_row, row_nbytes, rows_to_batch

PAD = 9


def trl_batch():
    """Two rollouts as TRL pads them: prompts on the left, completions on the right."""
    return {
        "prompt_ids": torch.tensor([[PAD, PAD, 5], [6, 7, 8]]),
        "prompt_mask": torch.tensor([[0, 0, 1], [1, 1, 1]]),
        "completion_ids": torch.tensor([[1, 2, 3, PAD], [4, 1, PAD, PAD]]),
        "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]),
        "tool_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]),
        "old_per_token_logps": torch.tensor([[-1.0, -2.0, -3.0, 0.0], [-4.0, -5.0, 0.0, 0.0]]),
        "ref_per_token_logps": None,
        "advantages": torch.tensor([1.0, -1.0]),
        "num_items_in_batch": torch.tensor(4),
    }


def test_rows_hold_no_padding():
    first, second = batch_to_rows(trl_batch())
    assert first["prompt_ids"].tolist() == [5]
    assert first["completion_ids"].tolist() == [1, 2, 3]
    assert first["tool_mask"].tolist() == [1, 0, 1]
    assert first["old_per_token_logps"].tolist() == [-1.0, -2.0, -3.0]
    assert second["prompt_ids"].tolist() == [6, 7, 8]
    assert second["completion_ids"].tolist() == [4, 1]
    assert loss_tokens(first) == 2
    assert loss_tokens(second) == 2
    assert row_nbytes(first) == 4 * 1 + 4 * 3 + 3 + 3 + 4 * 3
    assert first["completion_ids"].base is None  # a view would keep the whole batch alive


def test_round_trip_gives_the_batch_again():
    batch = trl_batch()
    again = rows_to_batch(batch_to_rows(batch), pad_token_id=PAD, device=torch.device("cpu"))
    for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "old_per_token_logps"):
        assert torch.equal(again[key], batch[key][:, :3]), key  # the last column was padding alone
        assert again[key].dtype == batch[key].dtype, key


def test_padding_to_a_multiple():
    again = rows_to_batch(
        batch_to_rows(trl_batch()), pad_token_id=PAD, device=torch.device("cpu"), pad_to_multiple_of=8
    )
    assert again["prompt_ids"].shape == again["completion_ids"].shape == (2, 8)
    assert again["prompt_ids"][0].tolist() == [PAD] * 7 + [5]


def test_masked_truncated_completion_has_no_loss_tokens():
    batch = trl_batch()
    batch["completion_mask"][0] = 0
    first, second = batch_to_rows(batch)
    assert loss_tokens(first) == 0
    assert len(first["completion_ids"]) == 1
    assert loss_tokens(second) == 2


def test_neutral_rows_level_a_batch_without_loss():
    rows = batch_to_rows(trl_batch())
    again = rows_to_batch([*rows, neutral_row(PAD, like=rows[0])], pad_token_id=PAD, device=torch.device("cpu"))
    assert again["completion_mask"][2].sum() == 0
    assert again["prompt_mask"][2].sum() == 1  # one token to attend to: no row of all masked keys
    alone = rows_to_batch([neutral_row(PAD)], pad_token_id=PAD, device=torch.device("cpu"))
    assert alone["completion_mask"].sum() == 0


def test_importance_ratios_per_token_and_per_sequence():
    per_token = trl_batch() | {"importance_sampling_ratio": torch.tensor([[1.0, 2.0, 3.0, 1.0], [4.0, 5.0, 1.0, 1.0]])}
    again = rows_to_batch(batch_to_rows(per_token), pad_token_id=PAD, device=torch.device("cpu"))
    assert torch.equal(again["importance_sampling_ratio"], torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 1.0]]))
    per_sequence = trl_batch() | {"importance_sampling_ratio": torch.tensor([[0.5], [0.25]])}
    rows = [*batch_to_rows(per_sequence), neutral_row(PAD, like=batch_to_rows(per_sequence)[0])]
    again = rows_to_batch(rows, pad_token_id=PAD, device=torch.device("cpu"), per_sequence_ratio=True)
    assert torch.equal(again["importance_sampling_ratio"], torch.tensor([[0.5], [0.25], [1.0]]))


def test_half_precision_logps_are_kept():
    batch = trl_batch()
    batch["old_per_token_logps"] = batch["old_per_token_logps"].bfloat16()
    assert batch_to_rows(batch)[0]["old_per_token_logps"].dtype == np.float32


def test_unknown_keys_are_refused_with_trls_version():
    with pytest.raises(InexactSettingError, match=r"TRL \d+\.\d+\.\d+ returned .*\['spatial_shapes'\]"):
        batch_to_rows(trl_batch() | {"spatial_shapes": torch.zeros(2, 2)})
