"""A model that sees, and pictures for its prompts: none, one or two, of several sizes, always the same for a prompt."""

import hashlib
import random

import torch
from launch import make_inputs
from PIL import Image

from rollwise.tasks.agents import IMAGE, IMAGE_END, IMAGE_START, VIDEO, build_processor, build_vision_agent, save_agent

PROCESSOR = build_processor()
#: In a response these would stand for a picture that is not there.
SPECIAL_IDS = PROCESSOR.tokenizer.convert_tokens_to_ids(["<agent>", IMAGE, IMAGE_START, IMAGE_END, VIDEO])


def make_inputs_with_pictures(folder, **settings):
    """As `make_inputs`, with an untrained model that sees."""
    make_inputs(folder, **settings)
    save_agent(build_vision_agent(), PROCESSOR, folder / "seeing")
    return folder


def pictures_of(text):
    rng = random.Random(hashlib.sha256(text.encode()).digest())
    sizes = [rng.choice([(8, 8), (8, 16), (16, 16)]) for _ in range(rng.randrange(3))]
    return [Image.new("RGB", size, tuple(rng.randrange(256) for _ in range(3))) for size in sizes]


def prompt_of(text):
    """Token ids of a prompt with its pictures, and what the model takes beside them."""
    pictures = pictures_of(text)
    content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": text}]
    message = PROCESSOR.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    made = PROCESSOR(text=[message], images=pictures or None, return_tensors="pt")
    return made["input_ids"][0].tolist(), {k: made[k] for k in ("pixel_values", "image_grid_thw") if k in made}


def model_inputs(tokens):
    """Of a prompt's tokens and some that follow: the pictures come from the prompt's text, positions from the model."""
    input_ids = torch.tensor([tokens])
    is_picture = (input_ids == PROCESSOR.tokenizer.convert_tokens_to_ids(IMAGE)).int()
    start = tokens.index(PROCESSOR.tokenizer.convert_tokens_to_ids("<agent>"))
    text = PROCESSOR.tokenizer.decode(tokens[:start], skip_special_tokens=True)
    return {"input_ids": input_ids, "mm_token_type_ids": is_picture} | prompt_of(text)[1]


def positions(model, tokens, media):
    """Of each token four positions, as verl's agent loop has them: in the text, and in time, height and width."""
    inputs = model_inputs(tokens)
    of_pictures, _ = model.model.get_rope_index(
        input_ids=inputs["input_ids"],
        mm_token_type_ids=inputs["mm_token_type_ids"],
        image_grid_thw=media.get("image_grid_thw"),
        attention_mask=torch.ones_like(inputs["input_ids"]),
    )
    return torch.cat([torch.arange(len(tokens))[None], of_pictures[:, 0]])
