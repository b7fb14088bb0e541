"""Batches cut into rows and rows put together again."""

import numpy as np
import pytest
import torch
from trl.trainer.utils import (
    shuffle_sequence_dict,
    split_pixel_values_by_grid,
    split_tensor_dict,
    unsplit_pixel_values_by_grid,
)

from rollwise import InexactSettingError
from rollwise.trl.rows import (
    batch_to_rows,
    loss_tokens,
    neutral_row,
    neutral_template,
    row_nbytes,
    rows_to_batch,
    without_empty_images,
)

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


# --- images -------------------------------------------------------------------------------------------------------


def batch_of(lengths, images):
    """A batch of rows with prompts 1, 2, 3, ... tokens long, completions as long as `lengths`, and image keys."""
    rows = len(lengths)
    completion_mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    prompt_mask = (torch.arange(rows) >= rows - 1 - torch.arange(rows)[:, None]).long()
    return {
        "prompt_ids": torch.where(prompt_mask.bool(), 5, PAD),
        "prompt_mask": prompt_mask,
        "completion_ids": torch.where(completion_mask.bool(), 6, PAD),
        "completion_mask": completion_mask,
        "advantages": torch.zeros(rows),
        "num_items_in_batch": torch.tensor(sum(lengths)),
        **images,
    }


def ramp(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def types(rows):
    """Marks image tokens in prompts of 1, 2, 3, ... tokens, padded on the left; completions of 2 have none."""
    marks = torch.zeros(rows, rows + 2, dtype=torch.long)
    marks[1:, rows - 1] = 2
    return marks


#: As the releases of TRL return them, for three rows with 1, 0 and 2 images, or with one each.
IMAGES = {
    "patches": {
        "pixel_values": ramp(4 + 8 + 4, 3),
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 4], [1, 2, 2]]),
        "mm_token_type_ids": types(3),
        "num_images": [1, 0, 2],
    },
    "one image each": {"pixel_values": ramp(3, 3, 2, 2), "token_type_ids": types(3), "num_images": [1, 1, 1]},
    "several views": {
        "pixel_values": ramp(3, 4, 3, 2, 2) * (torch.arange(4) < torch.tensor([[2], [4], [3]]))[..., None, None, None],
        "image_sizes": torch.tensor([[2, 4], [4, 4], [4, 2]]),
        "num_images": [1, 1, 1],
    },
    "positions": {
        "pixel_values": ramp(3, 4, 2),
        "image_position_ids": torch.tensor([[[0, 0], [1, 0], [-1, -1], [-1, -1]]] * 3),
        "num_images": [1, 0, 2],
    },
    "padded rows": {
        "pixel_values": ramp(3, 2, 3, 2, 2) * torch.tensor([[1, 0], [0, 0], [1, 1]])[..., None, None, None],
        "pixel_attention_mask": torch.tensor([[1, 0], [0, 0], [1, 1]])[..., None, None].expand(3, 2, 2, 2),
        "num_images": [1, 0, 2],
    },
    "tiles": {"pixel_values": ramp(7, 3, 2, 2), "num_images": [1, 0, 2], "num_tiles": [3, 0, 4]},
}


def split_supports(images):
    """Whether this release of TRL cuts these tensors."""
    is_cut = isinstance(split_pixel_values_by_grid(batch_of([2, 2, 2], images))["pixel_values"], list)
    return is_cut or "pixel_attention_mask" in images or images["num_images"] == [1, 1, 1]


@pytest.fixture(params=IMAGES)
def images(request):
    if not split_supports(IMAGES[request.param]):
        pytest.skip("this release of TRL cannot tell these images apart")
    return IMAGES[request.param]


def test_rows_with_images_give_the_batch_again(images):
    batch = batch_of([2, 2, 2], images)
    again = rows_to_batch(batch_to_rows(batch), pad_token_id=PAD, device=torch.device("cpu"))
    for key, value in images.items():
        if torch.is_tensor(value):
            assert torch.equal(again[key], value), key
            assert again[key].dtype == value.dtype, key
        elif "pixel_attention_mask" not in images:
            assert again[key] == value, key
    assert set(again) == set(batch) - {"advantages", "num_items_in_batch"}


def test_images_stay_with_their_rows_through_trls_shuffle_and_micro_batches(images):
    rows = batch_to_rows(batch_of([2, 2, 2], images))
    for i, row in enumerate(rows):
        row["completion_ids"][:] = i
    batch = rows_to_batch(rows * 4, pad_token_id=PAD, device=torch.device("cpu"))
    alone = [rows_to_batch([row], pad_token_id=PAD, device=torch.device("cpu")) for row in rows]
    torch.manual_seed(1)
    shuffled = shuffle_sequence_dict(split_pixel_values_by_grid(batch))
    assert shuffled["completion_ids"][:, 0].tolist() != batch["completion_ids"][:, 0].tolist()
    for piece in split_tensor_dict(shuffled, 12):
        piece = without_empty_images(unsplit_pixel_values_by_grid(piece))
        expected = without_empty_images(alone[piece["completion_ids"][0, 0]])
        assert ("pixel_values" in piece) == ("pixel_values" in expected)
        for key in set(images) & set(expected):
            if torch.is_tensor(expected[key]) and "type_ids" not in key:
                piece_part = piece[key][tuple(slice(size) for size in expected[key].shape)]
                assert torch.equal(piece_part, expected[key]), key  # the rest is padding up to other rows' images
            elif not torch.is_tensor(expected[key]):
                assert piece[key] == expected[key], key


def test_a_row_holds_its_own_images_alone(images):
    rows = batch_to_rows(batch_of([2, 2, 2], images))
    stored = [int(np.count_nonzero(row.get("pixel_values", 0))) for row in rows]
    assert sum(stored) == images["pixel_values"].count_nonzero()
    if images["num_images"] == [1, 0, 2]:
        assert stored[1] == 0 < stored[0]
    for row, count in zip(rows, stored, strict=True):
        assert row_nbytes(row) >= 4 * count
        for array in row.values():
            assert array.ndim == 1  # what can be saved
            assert array.base is None  # a view would keep the whole batch alive


def test_padding_at_the_end_of_images_is_not_stored():
    first, second, third = batch_to_rows(batch_of([2, 2, 2], IMAGES["padded rows"]))
    assert len(first["pixel_values"]) == 12
    assert first["pixel_values.shape"].tolist() == [1, 2, 3, 2, 2]
    assert len(second["pixel_values"]) == 0
    assert len(third["pixel_values"]) == 24
    kept = IMAGES["padded rows"] | {"pixel_values": torch.full((3, 2, 3, 2, 2), -0.0)}
    again = rows_to_batch(batch_to_rows(batch_of([2, 2, 2], kept)), pad_token_id=PAD, device=torch.device("cpu"))
    assert torch.signbit(again["pixel_values"]).all()


def test_images_of_several_batches_are_padded_to_the_largest():
    narrow = batch_of([2], {"pixel_values": ramp(1, 2, 3), "image_position_ids": ramp(1, 2, 2).long()})
    wide = batch_of([2], {"pixel_values": ramp(1, 4, 3), "image_position_ids": ramp(1, 4, 2).long()})
    rows = [*batch_to_rows(narrow | {"num_images": [1]}), *batch_to_rows(wide | {"num_images": [1]})]
    batch = rows_to_batch(rows, pad_token_id=PAD, device=torch.device("cpu"))
    assert batch["pixel_values"].shape == (2, 4, 3)
    assert batch["pixel_values"][0, 2:].eq(0).all()
    assert batch["image_position_ids"][0, 2:].eq(-1).all()


def test_a_batch_in_which_every_image_is_one_tile_joins_others():
    single = batch_to_rows(batch_of([2], {"pixel_values": ramp(1, 3, 2, 2), "num_images": [1]}))[0]
    tiled = {**single, "num_tiles": np.array([2], dtype=np.int32)}
    tiled |= {"pixel_values": np.ones(24, np.float32), "pixel_values.shape": np.array([2, 3, 2, 2])}
    text = batch_to_rows(batch_of([2], {}))[0]
    batch = rows_to_batch([single, tiled, text], pad_token_id=PAD, device=torch.device("cpu"))
    assert batch["num_tiles"] == [1, 2, 0]
    assert batch["num_images"] == [1, 1, 0]


def test_rows_of_text_alone_have_no_image_keys():
    rows = batch_to_rows(batch_of([2, 2, 2], IMAGES["patches"]))
    assert "pixel_values" not in rows[1]
    batch = rows_to_batch([rows[1]], pad_token_id=PAD, device=torch.device("cpu"))
    assert set(batch) & set(IMAGES["patches"]) == {"mm_token_type_ids"}


def test_token_types_default_to_text_and_follow_the_padding():
    with_images = batch_to_rows(batch_of([2, 2, 2], IMAGES["patches"]))
    text = batch_to_rows(batch_of([2], {}))[0]
    batch = rows_to_batch([with_images[2], text], pad_token_id=PAD, device=torch.device("cpu"), pad_to_multiple_of=4)
    assert batch["mm_token_type_ids"].tolist() == [[0, 0, 0, 2, 0, 0, 0, 0], [0] * 8]


def test_images_of_later_turns_keep_their_marks_and_neutral_rows_keep_them_whole():
    marks = torch.tensor([[0, 0, 1, 0, 2, 0], [0, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 3]])
    images = {"pixel_values": ramp(3, 3, 2, 2), "num_images": [1, 1, 1], "mm_token_type_ids": marks}
    trajectories = batch_of([2, 2, 3], images) | {"tool_mask": torch.ones(3, 3, dtype=torch.long)}
    rows = batch_to_rows(trajectories)
    assert [row["mm_token_type_ids"].tolist() for row in rows] == [[1, 0, 2], [1, 1], [1, 1, 0, 0, 0, 3]]
    neutral = neutral_row(PAD, like=rows[0])
    assert loss_tokens(neutral) == 0
    batch = rows_to_batch([*rows, neutral], pad_token_id=PAD, device=torch.device("cpu"))
    assert torch.equal(batch["mm_token_type_ids"], torch.cat([marks, marks[:1]]))
    assert batch["completion_mask"][3].tolist() == batch["completion_mask"][0].tolist()  # attended to as it was
    assert batch["tool_mask"][3].sum() == 1  # the padding's
    assert (batch["tool_mask"] * batch["completion_mask"])[3].sum() == 0


def test_neutral_rows_take_the_smallest_images():
    rows = batch_to_rows(batch_of([2, 2, 2], IMAGES["patches"]))
    template = neutral_template(rows)
    assert template is rows[0]
    neutral = neutral_row(PAD, like=template)
    assert loss_tokens(neutral) == 0
    assert len(neutral["completion_ids"]) == 1
    batch = rows_to_batch([neutral], pad_token_id=PAD, device=torch.device("cpu"))
    assert batch["num_images"] == [1]
    assert batch["pixel_values"].shape == (4, 3)
    text = neutral_row(PAD, like=neutral_template([rows[1]]))
    assert text["prompt_ids"].tolist() == [PAD]
    assert text["mm_token_type_ids"].tolist() == [0]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ({"pixel_values": ramp(5, 3), "num_images": [1, 1, 1]}, r"cannot be told apart, .*\(5, 3\)\} for 3 rows"),
        ({"pixel_values": ramp(3, 3)}, "cannot be told apart"),
    ],
)
def test_images_that_cannot_be_stored_are_refused(images, message):
    with pytest.raises(InexactSettingError, match=message):
        batch_to_rows(batch_of([2, 2, 2], images))


def test_images_of_different_sizes_are_refused_where_nothing_tells_their_size():
    rows = [
        batch_to_rows(batch_of([2], {"pixel_values": ramp(1, 3, size, 2), "num_images": [1]}))[0] for size in (2, 4)
    ]
    with pytest.raises(InexactSettingError, match=r"\(1, 3, 2, 2\), \(1, 3, 4, 2\).*resize all images"):
        rows_to_batch(rows, pad_token_id=PAD, device=torch.device("cpu"))
