"""Small agents for the environments: a text transformer and a vision-language model of a real architecture.

Both are built from code, with a chat template and a tokenizer of single characters and a few words: the map of a lake
is one token per cell, a move is one token. The template leaves system messages out, for the agents have learnt what to
do from demonstrations (`rollwise.tasks.imitation`), not from instructions.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from rollwise.errors import ConfigError, VersionError
from rollwise.tasks.saving import save_model

__all__ = [
    "PICTURE_PATCH_PIXELS",
    "agent_path",
    "build_processor",
    "build_text_agent",
    "build_tokenizer",
    "build_vision_agent",
    "load_processor",
    "save_agent",
]

PAD, EOS, UNKNOWN, USER, AGENT = "<pad>", "</s>", "<unk>", "<user>", "<agent>"
# Qwen-VL's own names: TRL looks for them.
IMAGE_START, IMAGE, IMAGE_END, VIDEO = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
SPECIAL_TOKENS = (PAD, EOS, UNKNOWN, USER, AGENT, IMAGE_START, IMAGE, IMAGE_END, VIDEO)
WORDS = ("left", "down", "right", "up")
CHARACTERS = "\n " + "".join(chr(code) for code in range(33, 127))

SHIPPED = ("frozen_lake", "frozen_lake_vision", "sokoban", "search_qa", "countdown")
"""Names of the agents that come with the package; `rollwise.tasks.imitation.AGENTS` says how they are made."""

PICTURE_PATCH_PIXELS = 16
"""Side of what one token of a picture stands for: a 64x64 picture of a 4x4 map has one token per cell."""

MAX_TOKENS = 1024
_VISION_WIDTH = 32

_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<agent>{% elif message.role != 'system' %}<user>"
    "{% endif %}{% if message.role != 'system' %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endif %}"
    "{% if message.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<agent>{% endif %}"
)


def build_tokenizer(words: tuple[str, ...] = ()) -> Any:
    """Build the agents' tokenizer: special tokens, the moves, `words`, and single printable ASCII characters.

    Text is cut into words of letters that are in the vocabulary, and single characters otherwise. Other characters
    become `<unk>`. There is a chat template; padding is on the left.

    Args:
        words: Further words that are one token each.

    Returns:
        A `transformers.PreTrainedTokenizerFast`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    whole = tuple(dict.fromkeys((*WORDS, *words)))
    tokens = (*SPECIAL_TOKENS, *whole, *(c for c in CHARACTERS if c not in whole))
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN))
    longest_first = sorted((word for word in whole if len(word) > 1), key=lambda word: (-len(word), word))
    alternatives = "|".join(rf"(?<![A-Za-z]){word}(?![A-Za-z])" for word in longest_first)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{alternatives}|[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=MAX_TOKENS,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        extra_special_tokens={"image_token": IMAGE, "video_token": VIDEO},
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [USER, AGENT, IMAGE_START, IMAGE, IMAGE_END, VIDEO]})
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _text_config(tokenizer: Any, hidden_size: int, num_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": hidden_size // 4,
        "max_position_embeddings": MAX_TOKENS,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }


def build_text_agent(seed: int = 0, *, hidden_size: int = 64, num_layers: int = 2, tokenizer: Any = None) -> Any:
    """Build an untrained text agent: `LlamaForCausalLM` with 4 heads and tied embeddings, fp32.

    Args:
        seed: Seed of the random weights. The global generator of torch is left as it was.
        hidden_size: Width.
        num_layers: Layers.
        tokenizer: Its tokenizer; None for `build_tokenizer()`.
    """
    import torch
    import transformers

    tokenizer = build_tokenizer() if tokenizer is None else tokenizer
    config = transformers.LlamaConfig(**_text_config(tokenizer, hidden_size, num_layers))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(config)


def build_vision_agent(seed: int = 0, *, hidden_size: int = 64, num_layers: int = 2) -> Any:
    """Build an untrained agent that sees pictures: `Qwen2VLForConditionalGeneration`, one vision layer, fp32.

    Args:
        seed: Seed of the random weights. The global generator of torch is left as it was.
        hidden_size: Width of the language model.
        num_layers: Layers of the language model.
    """
    import torch
    import transformers

    tokenizer = build_tokenizer()
    half = hidden_size // 8  # of a head: its frequencies go to time, height and width
    sections = [half // 4, (half - half // 4) // 2, half - half // 4 - (half - half // 4) // 2]
    rope = {"rope_type": "default", "type": "mrope", "mrope_section": sections}
    config = transformers.Qwen2VLConfig(
        text_config=_text_config(tokenizer, hidden_size, num_layers) | {"rope_scaling": rope},
        vision_config={
            "depth": 1,
            "embed_dim": _VISION_WIDTH,
            "hidden_size": hidden_size,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": PICTURE_PATCH_PIXELS // 2,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
        },
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        video_token_id=tokenizer.convert_tokens_to_ids(VIDEO),
        vision_start_token_id=tokenizer.convert_tokens_to_ids(IMAGE_START),
        vision_end_token_id=tokenizer.convert_tokens_to_ids(IMAGE_END),
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.Qwen2VLForConditionalGeneration(config)


def build_processor() -> Any:
    """Build the processor of `build_vision_agent`: the agents' tokenizer, and images prepared with Pillow.

    Raises:
        VersionError: Pillow is missing, or transformers is too old to prepare images with it.
        ConfigError: The class cannot be made.
    """
    import transformers

    try:
        from transformers import Qwen2VLImageProcessorPil
    except ImportError as error:
        raise VersionError(
            f"the embedded vision agent needs Pillow and transformers>=5.6 (found {transformers.__version__}): "
            "pip install -U pillow transformers"
        ) from error
    patch = PICTURE_PATCH_PIXELS // 2
    images = Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=2, temporal_patch_size=1, min_pixels=64, max_pixels=64 * 64
    )
    return picture_processor_class()(images, build_tokenizer(), chat_template=_TEMPLATE)


def picture_processor_class() -> type[Any]:
    """`Qwen2VLProcessor` without the processor of videos, which would need torchvision."""
    import transformers

    if not hasattr(transformers, "Qwen2VLProcessor"):
        raise ConfigError("transformers has no Qwen2VLProcessor; install transformers>=5.6")

    class PictureQwen2VLProcessor(transformers.Qwen2VLProcessor):
        def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **kw: Any):
            super().__init__(image_processor, tokenizer, chat_template=chat_template, **kw)

    return PictureQwen2VLProcessor


def save_agent(model: Any, processor: Any, folder: Path) -> Path:
    """Write an agent so that `from_pretrained` loads it; `load_processor` gives a vision agent's processor."""
    save_model(model, getattr(processor, "tokenizer", processor), folder)
    return folder


def load_processor(folder: str | Path) -> Any | None:
    """The processor of a folder of the embedded vision agent, trained or not; None of anything else.

    transformers would load one that reads videos, too, for which it needs torchvision.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    return build_processor() if config.get("vision_config", {}).get("embed_dim") == _VISION_WIDTH else None


def agent_path(name: str) -> Path:
    """Return the folder of a shipped agent, for `from_pretrained`.

    Raises:
        ConfigError: There is none of this name.
    """
    path = Path(str(resources.files("rollwise.tasks") / "assets" / name))
    if not (path / "model.safetensors").is_file():
        raise ConfigError(
            f"no agent {name!r} comes with the package (looked in {path}): make it with `rollwise pretrain OUTPUT_DIR "
            f"--task {name}` and pass that folder"
        )
    return path
