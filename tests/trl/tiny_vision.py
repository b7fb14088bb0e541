"""Tiny vision-language models, their processors, a data set of coloured images and a reward.

Everything is built from code; images are resized with Pillow, so that torchvision is not needed.
"""

import random

import tiny
import torch
import transformers
from datasets import Dataset
from packaging.version import Version
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback

from rollwise.trl import RollwiseGRPOTrainer

COLOURS = {"red": (255, 0, 0), "green": (0, 200, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
SPECIAL = ["<pad>", "<eos>", "<user>", "<image>", "<start>", "<end>", "<video>"]
TOKENS = [*SPECIAL, *COLOURS, "first", "second", "what", "?"]
TOKENS += ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]  # Idefics3's own
PAD, EOS, IMAGE, START, END, VIDEO = 0, 1, 3, 4, 5, 6
TEMPLATE = (
    "{% for message in messages %}<user> {% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<start><image><end>{% else %} {{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def tokenizer():
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        extra_special_tokens={
            "image_token": "<image>",
            "video_token": "<video>",
            "boi_token": "<start>",
            "eoi_token": "<end>",
            "start_image_token": "<start>",
            "end_image_token": "<end>",
            "context_image_token": "<image>",
        },
    )
    made.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    return made


def with_pillow(name):
    """An image processor that works without torchvision."""
    return getattr(transformers, f"{name}Pil")


def text_settings():
    return {
        "vocab_size": len(TOKENS),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "tie_word_embeddings": True,
    }


def clip_settings():
    return {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }


def qwen2_vl():
    """Patches of all images in one matrix, cut by `image_grid_thw`."""
    config = transformers.Qwen2VLConfig(
        text_config=text_settings()
        | {"rope_scaling": {"rope_type": "default", "type": "mrope", "mrope_section": [1, 1, 2]}},
        vision_config={
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=True,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


class ImageOnlyQwen2VLProcessor(transformers.Qwen2VLProcessor):
    """Qwen2-VL's processor without the one for videos, which needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def qwen2_vl_processor():
    images = with_pillow("Qwen2VLImageProcessor")(
        patch_size=4, merge_size=2, temporal_patch_size=1, min_pixels=64, max_pixels=256
    )
    return ImageOnlyQwen2VLProcessor(images, tokenizer(), chat_template=TEMPLATE)


def llava():
    """One entry of `pixel_values` per image, cut by `num_images`; no other image key."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**clip_settings()),
        text_config=transformers.LlamaConfig(**text_settings()),
        image_token_index=IMAGE,
        image_seq_length=4,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    return transformers.LlavaForConditionalGeneration(config)


def llava_processor():
    images = with_pillow("CLIPImageProcessor")(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    return transformers.LlavaProcessor(
        images,
        tokenizer(),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=TEMPLATE,
    )


def llava_next():
    """As LLaVA, with several views of an image in the second axis, padded to the most, and `image_sizes`."""
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**clip_settings()),
        text_config=transformers.LlamaConfig(**text_settings()),
        image_token_index=IMAGE,
        image_seq_length=4,
        vision_feature_layer=-1,
        image_grid_pinpoints=[[8, 16], [16, 16]],
        tie_word_embeddings=True,
    )
    return transformers.LlavaNextForConditionalGeneration(config)


def llava_next_processor():
    images = with_pillow("LlavaNextImageProcessor")(
        size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}, image_grid_pinpoints=[[8, 16], [16, 16]]
    )
    return transformers.LlavaNextProcessor(
        images,
        tokenizer(),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=TEMPLATE,
    )


def gemma3():
    """As LLaVA, with `token_type_ids`, by which the tokens of one image attend to each other both ways."""
    config = transformers.Gemma3Config(
        text_config=text_settings() | {"sliding_window": 32},
        vision_config=clip_settings() | {"vision_use_head": False},
        mm_tokens_per_image=4,
        boi_token_index=START,
        eoi_token_index=END,
        image_token_index=IMAGE,
        tie_word_embeddings=True,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def gemma3_processor():
    images = with_pillow("Gemma3ImageProcessor")(size={"height": 8, "width": 8})
    return transformers.Gemma3Processor(
        images, tokenizer(), image_seq_length=4, chat_template=TEMPLATE.replace("<start><image><end>", "<start>")
    )


def idefics3():
    """One entry of `pixel_values` per row; its images and their parts in the second axis, padded to the most."""
    config = transformers.Idefics3Config(
        text_config=transformers.LlamaConfig(**text_settings()),
        vision_config=clip_settings(),
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=PAD,
        tie_word_embeddings=True,
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def idefics3_processor():
    images = with_pillow("Idefics3ImageProcessor")(
        size={"longest_edge": 16}, max_image_size={"longest_edge": 8}, do_image_splitting=True
    )
    return transformers.Idefics3Processor(
        images, tokenizer(), image_seq_len=1, chat_template=TEMPLATE.replace("<start><image><end>", "<image>")
    )


def internvl():
    """Tiles of all images in the first axis, cut by `num_tiles`, which TRL leaves out where each has one tile."""
    config = transformers.InternVLConfig(
        text_config=transformers.LlamaConfig(**text_settings()),
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": [8, 8],
            "patch_size": [4, 4],
        },
        image_token_id=IMAGE,
        image_seq_length=1,
        downsample_ratio=0.5,
        tie_word_embeddings=True,
    )
    return transformers.InternVLForConditionalGeneration(config)


class ImageOnlyInternVLProcessor(transformers.InternVLProcessor):
    """InternVL's processor without the one for videos, which needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, image_seq_length=1, chat_template=None, **kwargs):
        super().__init__(image_processor, tokenizer, image_seq_length=image_seq_length, chat_template=chat_template)


def internvl_processor():
    images = with_pillow("GotOcr2ImageProcessor")(
        size={"height": 8, "width": 8}, crop_to_patches=True, min_patches=1, max_patches=2
    )
    return ImageOnlyInternVLProcessor(
        images, tokenizer(), chat_template=TEMPLATE.replace("<start><image><end>", "<image>")
    )


FAMILIES = {
    "qwen2_vl": (qwen2_vl, qwen2_vl_processor),
    "llava": (llava, llava_processor),
    "llava_next": (llava_next, llava_next_processor),
    "gemma3": (gemma3, gemma3_processor),
    "idefics3": (idefics3, idefics3_processor),
    "internvl": (internvl, internvl_processor),
}
if Version(transformers.__version__) < Version("5.20"):  # there, these processors do not do without torchvision
    del FAMILIES["idefics3"], FAMILIES["internvl"]


def model(family, seed=0):
    torch.manual_seed(seed)
    made = FAMILIES[family][0]()
    for name, parameter in made.named_parameters():
        if "llava" in family and "post_layernorm" in name:  # LLaVA takes the vision tower's output before it
            parameter.requires_grad_(False)
    return made


def processor(family):
    return FAMILIES[family][1]()


def dataset(num_prompts=24, seed=0, num_images=(1, 2), sizes=((8, 8), (8, 16), (16, 16))):
    """Questions for the colour of one of a prompt's images, of several sizes."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num_prompts):
        names = [rng.choice(list(COLOURS)) for _ in range(rng.choice(num_images))]
        asked = rng.randrange(max(len(names), 1))
        question = "what ?" if len(names) < 2 else f"{('first', 'second')[asked]} what ?"
        rows.append(
            {
                "prompt": [{"role": "user", "content": question}],
                "images": [Image.new("RGB", rng.choice(sizes), COLOURS[name]) for name in names],
                "answer": names[asked] if names else "red",
            }
        )
    return Dataset.from_list(rows)


def names_the_colour(completions, answer, **kwargs):
    """Right if the colour is the first or the second word."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(right in text.split()[:2]) for right, text in zip(answer, texts, strict=True)]


def trainer(
    output_dir,
    family,
    *,
    trainer_class=RollwiseGRPOTrainer,
    callbacks=None,
    train_dataset=None,
    **settings,
):
    # In a completion these would stand for an image that is not there; newer releases of TRL prevent the first.
    defaults = {"max_completion_length": 4, "generation_kwargs": {"suppress_tokens": [IMAGE, START, END, VIDEO]}}
    made = trainer_class(
        model=model(family),
        reward_funcs=names_the_colour,
        args=tiny.config(output_dir, **(defaults | settings)),
        train_dataset=dataset() if train_dataset is None else train_dataset,
        processing_class=processor(family),
        callbacks=callbacks,
    )
    made.remove_callback(PrinterCallback)
    return made
