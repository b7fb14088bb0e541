"""Writing small models so that every supported release of transformers loads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def save_model(model: Any, tokenizer: Any, folder: Path, **sampling: Any) -> None:
    """Write a model and its tokenizer, without a progress bar, for `from_pretrained`.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        folder: Made if it is not there.
        sampling: Added to `sampling_settings`.
    """
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = transformers.GenerationConfig(**sampling_settings(tokenizer), **sampling)
    with _no_progress_bar():
        # Not under the names of older releases' weights, which a resumed run would not find.
        model.save_pretrained(folder, save_original_format=False)
    save_tokenizer(tokenizer, folder)


def sampling_settings(tokenizer: Any) -> dict[str, Any]:
    """Generation settings to sample from a model's own distribution, nothing cut off."""
    return {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer, in the words that transformers 4 knows too: 5 reads those, 4 cannot read what 5 writes."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(special := config.get("extra_special_tokens"), list):
        names = {config[name]: name for name in ("image_token", "video_token") if name in config}
        config["extra_special_tokens"] = {
            names.get(token, f"special_token_{i}"): token for i, token in enumerate(special)
        }
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers from printing a progress bar inside the block."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
