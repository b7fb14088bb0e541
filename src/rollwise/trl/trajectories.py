"""What a `rollout_func` may say of its episodes beyond what TRL takes: pictures of later turns, turns as messages.

TRL takes pictures inside completions from tools alone: `_generate` returns them twice, as all images of each row and as
those of tools, and where there are tools it lets the image processor make the model's inputs of them and marks their
tokens in the completion. A `rollout_func` can return no images, so they travel as a column of its own, and TRL is told
that there is a tool for as long as it looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import trl

from rollwise.errors import ConfigError, InexactSettingError

#: Columns of what a `rollout_func` returns: all images of each row, in order; the turns after the prompt as messages.
IMAGES, MESSAGES = "episode_images", "episode_messages"

_COMPLETIONS, _EXTRA_FIELDS, _NUM_RETURNED = 3, 5, 8


def loss_lengths(generated: Sequence[Any]) -> list[int]:
    """Tokens that the policy wrote in each completion of what TRL's `_generate` returned."""
    completion_ids, tool_mask = generated[1], generated[2]
    return [sum(mask) for mask in tool_mask] if tool_mask is not None else [len(ids) for ids in completion_ids]


def has_pictures(generated: Sequence[Any]) -> bool:
    """Whether a `rollout_func` returned images."""
    return any(any(fields.get(IMAGES, ())) for fields in generated if isinstance(fields, dict))


def with_trajectories(generated: Sequence[Any], processing_class: Any) -> tuple[Any, ...]:
    """What TRL's `_generate` returned, with the episodes' images and messages where TRL looks for such.

    Raises:
        ConfigError: There are images, and TRL is too old to take them.
        InexactSettingError: The model's processor says nothing about where in a completion its images are.
    """
    edited = list(generated)
    fields = next((fields for fields in edited if isinstance(fields, dict)), {})
    messages, images = fields.pop(MESSAGES, None), fields.pop(IMAGES, None)
    if messages is not None and isinstance(edited[_COMPLETIONS][0], list):
        edited[_COMPLETIONS] = messages
    if images is not None and any(images):
        if len(edited) != _NUM_RETURNED:
            raise ConfigError(f"TRL {trl.__version__} takes no pictures in later turns; install trl>=1.11")
        if not hasattr(processing_class.image_processor, "merge_size"):
            raise InexactSettingError(
                f"pictures in later turns work with models that cut images by image_grid_thw (Qwen2-VL and those after "
                f"it), and not with {type(processing_class).__name__}: TRL marks their image tokens in completions for "
                "no others; use such a model"
            )
        edited[_EXTRA_FIELDS + 1 :] = images, images
    return tuple(edited)


def suppress_image_tokens(trainer: Any) -> None:
    """Keep the policy from writing tokens that stand for images or videos: there would be none behind them.

    TRL does so for the image token alone. With vLLM, which is not told, they stay possible.
    """
    config = trainer.accelerator.unwrap_model(trainer.model).config
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = {int(getattr(config, name)) for name in names if getattr(config, name, None) is not None}
    generation_config = getattr(trainer, "generation_config", None)
    if generation_config is not None and tokens:
        suppressed = sorted(tokens | set(generation_config.suppress_tokens or ()))
        generation_config.suppress_tokens = suppressed
        trainer.generation_kwargs["suppress_tokens"] = suppressed


def check_pictures_stayed(output: Mapping[str, Any]) -> None:
    """Refuse TRL's batch if TRL left out the images it was given.

    Raises:
        InexactSettingError: TRL has found another number of image tokens than the images have.
    """
    if "pixel_values" not in output:
        raise InexactSettingError(
            "TRL left the images out, because completions hold other numbers of image tokens than their images; let "
            "the model write none of the tokens that stand for images: generation_kwargs {'suppress_tokens': [...]}"
        )
