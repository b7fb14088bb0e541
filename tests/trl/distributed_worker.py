"""One of several processes of one training run after another; `test_distributed.py` starts them."""

import os

import pytest
import tiny
from processes import serve
from reference import GradientReference

from rollwise.trl import packing

ALL = {"allocation": "pilot_commit", "pilot_rollouts": 3, "pilot_prompts": 5, "p_lower": 0.1, "replay_ratio": 0.5}
SCENARIOS = {
    "all": ALL | {"loss_type": "grpo", "gradient_accumulation_steps": 2},
    "replay": {"replay_ratio": 1.0, "loss_type": "dapo", "per_device_train_batch_size": 16},
    "measured ages": {
        "replay_ratio": 0.5,
        "replay_updates_per_fresh": 1,
        "replay_decay_tau_steps": "auto",
        "replay_max_age_kl": 0.05,
        "replay_per_beta": 0.5,
        "replay_correction": "truncated",
        "per_device_train_batch_size": 16,
    },
    # Process 1 never sees two different rewards: it has no row of its own to train on.
    "none on one process": {"replay_ratio": 1.0, "loss_type": "grpo"},
}
# With "family": a vision-language model. Its prompts have one or two images, of several sizes.
IMAGES = {"per_device_train_batch_size": 4, "num_generations": 4, "replay_ratio": 1.0, "replay_warmup_steps": 0}
IMAGE_SCENARIOS = {
    "images": IMAGES | {"loss_type": "dapo", "gradient_accumulation_steps": 2},
    "images, all": IMAGES | ALL | {"loss_type": "grpo", "gradient_accumulation_steps": 2},
    # One prompt a process at a time: TRL's own batches are with images or without, and the library's hold both.
    # TRL gathers images for its log only on processes that have some, and the others do not come.
    "images and text": IMAGES | {"loss_type": "grpo", "log_multimodal": False, "max_steps": 12},
}
# Episodes of several turns; processes have other numbers of live ones in most turns.
EPISODE_SCENARIOS = {
    "episodes": ALL | {"loss_type": "grpo", "gradient_accumulation_steps": 2, "success_threshold": 0.5},
    "episodes, pictures": IMAGES | {"loss_type": "grpo", "max_steps": 3},
}


def prompts_with_and_without_images():
    from datasets import concatenate_datasets
    from tiny_vision import dataset

    with_images = dataset(12, num_images=(1, 2))
    without = dataset(12, seed=1, num_images=(0,)).cast(with_images.features)
    return concatenate_datasets([with_images, without]).shuffle(seed=0)


def make_trainer(scenario, folder, settings, rank, monkeypatch):
    if scenario in IMAGE_SCENARIOS:
        import tiny_vision
        from vision_reference import VisionReference

        family = settings.pop("family")
        reference = VisionReference(family)
        train_dataset = prompts_with_and_without_images() if scenario == "images and text" else None
        trainer = tiny_vision.trainer(folder, family, callbacks=[reference], train_dataset=train_dataset, **settings)
        return reference.watch(trainer), reference
    if scenario in EPISODE_SCENARIOS:
        import tiny_episodes

        picture = "pictures" in scenario
        reference = (tiny_episodes.VisionEpisodeReference if picture else tiny_episodes.EpisodeReference)()
        trainer = tiny_episodes.trainer(folder, picture=picture, callbacks=[reference], **settings)
        return reference.watch(trainer), reference
    if scenario == "none on one process" and rank == 1:
        # Groups do not span processes here: 8 rollouts a process, 8 a group.
        reward = lambda completions, **kwargs: [0.0] * len(completions)  # noqa: E731
        reward.__name__ = "contains_answer"
        monkeypatch.setattr(tiny, "contains_answer", reward)
    reference = GradientReference()
    trainer = tiny.trainer(folder, callbacks=[] if scenario == "none on one process" else [reference], **settings)
    if scenario != "none on one process":
        reference.watch(trainer)
    return trainer, reference


def run(scenario, folder, family=None):
    rank = int(os.environ["RANK"])
    settings = {"per_device_train_batch_size": 8, "max_steps": 5, "learning_rate": 3e-3, "ddp_timeout": 60}
    settings |= (SCENARIOS | IMAGE_SCENARIOS | EPISODE_SCENARIOS)[scenario] | ({"family": family} if family else {})
    sent_images, travelled = 0, 0
    gather = packing.gather_object

    def counting_gather(items):
        nonlocal sent_images, travelled
        travelled += len(items)
        sent_images += sum("pixel_values" in row for _, row in items)
        return gather(items)

    packed_rows, packed_images, decisions = [], [], []

    def recording_pack(batch):
        output = pack(batch)
        packed_rows.append(len(output["advantages"]))
        packed_images.append(sum(output.get("num_images", [])))
        decisions.append(
            [
                {
                    "prompt": row.rollout.prompt_id,
                    "birth_step": row.rollout.birth_step,
                    "owner": row.rollout.owner,
                    "source": row.source,
                    "advantage": row.advantage,
                }
                for row in batch.rows
            ]
        )
        return output

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(packing, "gather_object", counting_gather)
        trainer, reference = make_trainer(scenario, folder, settings, rank, monkeypatch)
        pack, trainer._pack = trainer._pack, recording_pack
        trainer.train()
    return {
        "errors": reference.errors,
        "weights": [p.double().sum().item() for p in trainer.model.parameters()],
        "packed_rows": packed_rows,
        "packed_images": packed_images,
        "decisions": decisions,
        "generator": trainer.scheduler.rng.bit_generator.state,
        "totals": trainer.ledger.totals(),
        "purposes": trainer.ledger.by_purpose(),
        "owned": sum(r.owner == rank for r in trainer.scheduler.buffer.rollouts),
        "payloads": sum(r.payload is not None for r in trainer.scheduler.buffer.rollouts),
        "stored": len(trainer.scheduler.buffer),
        "travelled": travelled,
        "sent_images": sent_images,
        "image_shapes": image_shapes(trainer),
        "steps": trainer.state.global_step,
    }


def image_shapes(trainer):
    payloads = [r.payload for r in trainer.scheduler.buffer.rollouts if r.payload is not None]
    return [payload["pixel_values.shape"].tolist() for payload in payloads if "pixel_values.shape" in payload]


if __name__ == "__main__":
    serve(run)
