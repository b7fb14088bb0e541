"""Episodes whose every turn has a picture: all of them in one row, and the gradient exact."""

import pytest
import releases
import torch

pytest.importorskip("gymnasium", reason="environments need gymnasium")
pytest.importorskip("PIL", reason="images need Pillow")
if not releases.HAS_IMAGES:
    pytest.skip("pictures in later turns need TRL 1.11 and transformers 5.6", allow_module_level=True)

import tiny_episodes
import tiny_vision
from tiny_episodes import VisionEpisodeReference

from rollwise import InexactSettingError
from rollwise.trl.episodes import EpisodeRollouts
from rollwise.trl.trajectories import check_pictures_stayed

REPLAY = {"replay_ratio": 1.0}


@pytest.mark.parametrize("settings", [{"loss_type": "grpo", "gradient_accumulation_steps": 2}])
def test_the_gradient_of_replayed_episodes_with_pictures_is_the_references(tmp_path, settings):
    reference = VisionEpisodeReference()
    trainer = tiny_episodes.trainer(tmp_path, picture=True, callbacks=[reference], max_steps=3, **REPLAY, **settings)
    reference.watch(trainer).train()
    assert len(reference.errors) == 3
    assert max(reference.errors) < 1e-5
    assert {"uniform", "replay"} == set(reference.sources)
    assert len(set(reference.pictures)) > 2  # one to four
    assert trainer.scheduler.buffer.nbytes == sum(rollout.nbytes for rollout in trainer.scheduler.buffer.rollouts)
    assert min(rollout.nbytes for rollout in trainer.scheduler.buffer.rollouts) > 3 * 64 * 64


def test_models_whose_images_trl_does_not_mark_in_completions_are_refused(tmp_path):
    rollouts = EpisodeRollouts("frozen_lake", picture=True, **tiny_episodes.SETTINGS)
    trainer = tiny_vision.trainer(tmp_path, "llava", max_steps=1, max_completion_length=1)
    trainer.rollout_func = rollouts
    trainer.train_dataset = tiny_episodes.dataset(picture=True).remove_columns("images")
    with pytest.raises(InexactSettingError, match="not with LlavaProcessor"):
        trainer.train()


def test_images_that_trl_leaves_out_are_noticed():
    with pytest.raises(InexactSettingError, match="TRL left the images out.*suppress_tokens"):
        check_pictures_stayed({"prompt_ids": torch.zeros(1, 1)})
