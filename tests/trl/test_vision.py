"""Vision-language models: rows keep their images, and train on them exactly."""

from functools import partial

import pyarrow.ipc
import pytest
import releases
import torch
import trl
from datasets import concatenate_datasets
from trl import GRPOTrainer

from rollwise import InexactSettingError
from rollwise.trl import RollwiseGRPOTrainer

pytest.importorskip("PIL", reason="images need Pillow")

import tiny_vision
from vision_reference import VisionReference

if not releases.HAS_IMAGES:
    pytest.skip("images need TRL 1.11, and processors without torchvision transformers 5", allow_module_level=True)

FAMILIES = [
    family if family == "qwen2_vl" else pytest.param(family, marks=pytest.mark.slow) for family in tiny_vision.FAMILIES
]
ALL = {"allocation": "pilot_commit", "pilot_rollouts": 3, "p_lower": 0.1, "replay_ratio": 1.0}


def check(tmp_path, family, train_dataset=None, **settings):
    reference = VisionReference(family)
    trainer = tiny_vision.trainer(
        tmp_path, family, callbacks=[reference], train_dataset=train_dataset, **({"learning_rate": 3e-3} | settings)
    )
    reference.watch(trainer).train()
    assert max(reference.errors) < 1e-5
    return reference


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_replay_is_the_references(tmp_path, family):
    reference = check(tmp_path, family, replay_ratio=1.0, max_steps=3, gradient_accumulation_steps=2)
    assert len(reference.errors) >= 2
    assert {"uniform", "replay"} == set(reference.sources)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["grpo", "dapo"])
@pytest.mark.parametrize("family", tiny_vision.FAMILIES)
def test_the_gradient_of_replay_and_pilot_commit_is_the_references(tmp_path, family, loss):
    reference = check(
        tmp_path,
        family,
        max_steps=6,
        loss_type=loss,
        per_device_train_batch_size=8,
        steps_per_generation=2,
        gradient_accumulation_steps=2,
        num_iterations=2,
        **ALL,
    )
    assert len(reference.errors) >= 5
    assert {"pilot", "commit", "replay"} <= set(reference.sources)
    assert max(reference.ages) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({"qwen2_vl", "llava", "gemma3", "idefics3"} & set(tiny_vision.FAMILIES)))
def test_batches_of_text_alone_may_stand_between_those_with_images(tmp_path, family):
    """TRL takes no batch in which only some prompts have images; here each batch is one prompt."""
    with_images = tiny_vision.dataset(6, num_images=(1,))
    without = tiny_vision.dataset(6, num_images=(0,)).cast(with_images.features)
    reference = check(
        tmp_path,
        family,
        train_dataset=concatenate_datasets([with_images, without]).shuffle(seed=0),
        max_steps=10,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        replay_ratio=1.0,
    )
    assert len(reference.errors) >= 3
    assert {0, 1} <= set(reference.images_per_micro_batch)


@pytest.mark.slow
def test_off_means_off(tmp_path):
    runs = []
    for trainer_class in (GRPOTrainer, RollwiseGRPOTrainer):
        trainer = tiny_vision.trainer(
            tmp_path, "qwen2_vl", trainer_class=trainer_class, max_steps=6, gradient_accumulation_steps=2
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        runs.append((losses, [parameter.tolist() for parameter in trainer.model.parameters()]))
    assert runs[0] == runs[1]
    assert len(runs[0][0]) == 6


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({"qwen2_vl", "idefics3"} & set(tiny_vision.FAMILIES)))
def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path, family):
    settings = ALL | {"max_steps": 6, "gradient_accumulation_steps": 2}
    whole = tiny_vision.trainer(tmp_path, family, save_strategy="steps", save_steps=3, **settings)
    # transformers saves some of these models under the names of older weights, and does not find them at a resume.
    whole.model.save_pretrained = partial(whole.model.save_pretrained, save_original_format=False)
    whole.train()
    resumed = tiny_vision.trainer(tmp_path, family, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert resumed.ledger.records() == whole.ledger.records()
    kept, again = whole.scheduler.buffer.rollouts, resumed.scheduler.buffer.rollouts
    assert len(kept) > 0
    for rollout, other in zip(kept, again, strict=True):
        assert rollout.payload.keys() == other.payload.keys()
        for name, array in rollout.payload.items():
            assert array.dtype == other.payload[name].dtype
            assert array.tobytes() == other.payload[name].tobytes()
        assert rollout.nbytes == sum(array.nbytes for array in rollout.payload.values())
    with pyarrow.memory_map(str(tmp_path / "checkpoint-3" / "rollwise-00000-of-00001.arrow")) as file:
        columns = pyarrow.ipc.open_file(file).schema.names
    assert {"payload.pixel_values", "payload.pixel_values.shape"} <= set(columns)


def test_a_processor_that_pads_on_the_right_is_refused(tmp_path, monkeypatch):
    processor = tiny_vision.processor("llava")
    processor.tokenizer.padding_side = "right"
    monkeypatch.setattr(tiny_vision, "processor", lambda family: processor)
    with pytest.raises(InexactSettingError, match="pads on the right.*padding_side to 'left'"):
        tiny_vision.trainer(tmp_path, "llava", replay_ratio=1.0)
    tiny_vision.trainer(tmp_path, "llava")  # off: TRL's business


def test_releases_of_trl_that_mix_images_up_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trl, "__version__", "1.10.0")
    with pytest.raises(InexactSettingError, match="TRL 1.10.0 mixes images up.*install trl>=1.11"):
        tiny_vision.trainer(tmp_path, "llava", replay_ratio=1.0)
    tiny_vision.trainer(tmp_path, "llava")  # off: TRL's business
