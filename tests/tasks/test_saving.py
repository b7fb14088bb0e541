import json
from pathlib import Path

import pytest

import rollwise

pytest.importorskip("transformers")
from transformers import AutoTokenizer

from rollwise.tasks.agents import AGENT, IMAGE, USER, VIDEO, build_tokenizer
from rollwise.tasks.saving import save_tokenizer

ASSETS = sorted((Path(rollwise.__file__).parent / "tasks" / "assets").glob("*/tokenizer_config.json"))


def is_read_by_transformers_4(config):
    """Classes and kinds of values that 5 writes and 4.57 raises on."""
    extra = config.get("extra_special_tokens", {})
    return config["tokenizer_class"] == "PreTrainedTokenizerFast" and isinstance(extra, dict)


@pytest.mark.parametrize("file", ASSETS, ids=lambda file: file.parent.name)
def test_shipped_tokenizers_are_written_for_every_supported_transformers(file):
    assert is_read_by_transformers_4(json.loads(file.read_text()))
    assert AutoTokenizer.from_pretrained(file.parent).pad_token == "<pad>"


def test_a_saved_tokenizer_loads_as_it_was(tmp_path):
    made = build_tokenizer()
    save_tokenizer(made, tmp_path)
    assert is_read_by_transformers_4(json.loads((tmp_path / "tokenizer_config.json").read_text()))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = f"{USER}1 + 2{AGENT}3{IMAGE}</s>"
    assert loaded(text)["input_ids"] == made(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True) == "1 + 23"
    assert (loaded.image_token, loaded.video_token, loaded.padding_side) == (IMAGE, VIDEO, "left")
    assert set(loaded.all_special_tokens) == set(made.all_special_tokens)
    assert loaded.chat_template == made.chat_template
    assert len(loaded) == len(made)
