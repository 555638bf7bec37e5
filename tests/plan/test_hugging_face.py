"""Parameters counted from a ``config.json`` against the models that transformers builds of it, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.cost.gpus import find_gpu
from optuna_dsat.errors import UsageError
from optuna_dsat.plan.families import FAMILIES, KNOWN_MODELS
from optuna_dsat.plan.from_shape import Machine, plan_shape
from optuna_dsat.plan.hugging_face import shape_of_config
from optuna_dsat.plan.rows import Plan
from optuna_dsat.plan.transformer import TransformerShape

SMALL = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 8000}
GQA = {**SMALL, "intermediate_size": 1536, "num_key_value_heads": 2}
ENCODER = {**SMALL, "intermediate_size": 2048}
IGNORED = {"num_key_value_heads": 2, "intermediate_size": 999, "head_dim": 80}
"""Keys that these models do not read."""
LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-biases": ("llama", "LlamaForCausalLM", {**GQA, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", "LlamaForCausalLM", {**GQA, "tie_word_embeddings": True, "head_dim": 80}),
    "llama-classes": ("llama", "LlamaForSequenceClassification", {**GQA, "num_labels": 5}),
    "llama-base": ("llama", "LlamaModel", GQA),
    "mistral": ("mistral", "MistralForCausalLM", GQA),
    "mixtral": ("mixtral", "MixtralForCausalLM", {**GQA, "num_local_experts": 8}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", GQA),
    "qwen2-moe": (
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**GQA, "num_experts": 12, "moe_intermediate_size": 300, "shared_expert_intermediate_size": 900},
    ),
    "qwen2-moe-dense-layers": ("qwen2_moe", "Qwen2MoeForCausalLM", {**GQA, "num_experts": 8, "mlp_only_layers": [0]}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", GQA),
    "qwen3-moe": ("qwen3_moe", "Qwen3MoeForCausalLM", {**GQA, "num_experts": 12, "moe_intermediate_size": 300}),
    "gemma": ("gemma", "GemmaForCausalLM", GQA),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", GQA),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM", GQA),
    "gpt2-xl": ("gpt2", "GPT2LMHeadModel", {"n_embd": 1600, "n_layer": 48, "n_head": 25, **IGNORED}),
    "gpt-neo": (
        "gpt_neo",
        "GPTNeoForCausalLM",
        {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "attention_types": [[["global", "local"], 2]]},
    ),
    "gptj": ("gptj", "GPTJForCausalLM", {"n_embd": 512, "n_layer": 4, "n_head": 8, "rotary_dim": 32, **IGNORED}),
    "gpt-neox": ("gpt_neox", "GPTNeoXForCausalLM", {**SMALL, "intermediate_size": 2048}),
    "opt": ("opt", "OPTForCausalLM", {**SMALL, "ffn_dim": 2048, **IGNORED}),
    "opt-350m": (
        "opt",
        "OPTForCausalLM",
        {**SMALL, "ffn_dim": 2048, "word_embed_proj_dim": 256, "do_layer_norm_before": False},
    ),
    "bloom": (
        "bloom",
        "BloomForCausalLM",
        {"hidden_size": 512, "n_layer": 6, "n_head": 8, "vocab_size": 8000, **IGNORED},
    ),
    "falcon-7b": ("falcon", "FalconForCausalLM", {"intermediate_size": 999, "num_key_value_heads": 2}),
    "falcon-40b": ("falcon", "FalconForCausalLM", {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-rw": (
        "falcon",
        "FalconForCausalLM",
        {**SMALL, "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
    ),
    "phi": ("phi", "PhiForCausalLM", {**GQA, "num_key_value_heads": None}),
    "phi3": ("phi3", "Phi3ForCausalLM", {**GQA, "pad_token_id": 0}),
    "bert": ("bert", "BertForMaskedLM", {**ENCODER, "num_key_value_heads": 2}),
    "bert-pretraining": ("bert", "BertForPreTraining", ENCODER),
    "bert-classes": ("bert", "BertForSequenceClassification", {**ENCODER, "num_labels": 4}),
    "bert-tokens": ("bert", "BertForTokenClassification", {**ENCODER, "num_labels": 9}),
    "bert-choices": ("bert", "BertForMultipleChoice", ENCODER),
    "bert-untied": ("bert", "BertForMaskedLM", {**ENCODER, "tie_word_embeddings": False}),
    "roberta": ("roberta", "RobertaForMaskedLM", ENCODER),
    "xlm-roberta": ("xlm-roberta", "XLMRobertaForSequenceClassification", ENCODER),
    "distilbert": ("distilbert", "DistilBertForMaskedLM", IGNORED),
    "t5": ("t5", "T5ForConditionalGeneration", {"d_model": 512, "num_layers": 6, "vocab_size": 8000}),
    "t5-uneven": (
        "t5",
        "T5ForConditionalGeneration",
        {"d_model": 512, "d_kv": 48, "num_layers": 3, "num_decoder_layers": 5, "feed_forward_proj": "gated-gelu"},
    ),
    "t5-encoder": ("t5", "T5EncoderModel", {"d_model": 512, "num_layers": 6, "vocab_size": 8000}),
    "mt5": ("mt5", "MT5ForConditionalGeneration", {"d_model": 512, "num_layers": 4, "vocab_size": 8000}),
    "vit": ("vit", "ViTForImageClassification", {"num_labels": 1000}),
    "vit-large": ("vit", "ViTModel", {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}),
}


def shape(folder: Path, *, seq_length: int | None = None, share: float = 1.0) -> TransformerShape:
    return shape_of_config(
        folder, seq_length=seq_length, dropout=False, fused_attention=True, recompute="none", trainable_share=share
    )


def planned(model: TransformerShape) -> Plan:
    machine = Machine(
        gpu=find_gpu("a100-80g"), gpus_per_node=8, nodes=1, given_network_gbit_per_s=None, given_host_bytes=None
    )
    return plan_shape(model, machine, config=None, memory_margin=0.05)


def write(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_as_many_parameters_as_transformers_builds(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    kind, architecture, values = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **values)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config)
    built = sum(parameter.numel() for parameter in model.parameters())
    result = shape(tmp_path)
    assert result.params == pytest.approx(built, rel=0.01)
    largest = max(
        sum(parameter.numel() for parameter in module.parameters(recurse=False)) for module in model.modules()
    )
    assert result.largest_layer_params == pytest.approx(largest, rel=0.35)
    outputs = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Linear)}
    tables = {id(each.weight): each.weight for each in model.modules() if isinstance(each, torch.nn.Embedding)}
    looked_up = sum(table.numel() for place, table in tables.items() if place not in outputs)
    assert result.looked_up == pytest.approx(looked_up, rel=0.01, abs=4096)  # T5's relative positions are small
    auto = transformers.models.auto.modeling_auto
    causal, masked = (getattr(auto, f"MODEL_FOR_{kind}_LM_MAPPING_NAMES") for kind in ("CAUSAL", "MASKED"))
    assert result.causal == (kind in causal and kind not in masked)


def test_every_family_is_compared() -> None:
    assert {kind for kind, _, _ in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("bert-base", 109.5e6), ("bert-large", 335.2e6), ("gpt2", 124.4e6), ("gpt2-medium", 354.8e6),
        ("gpt2-large", 774.0e6), ("gpt2-xl", 1557.6e6), ("llama-2-7b", 6.738e9), ("llama-2-13b", 13.016e9),
        ("llama-2-70b", 68.977e9), ("llama-3.1-8b", 8.030e9), ("llama-3.1-70b", 70.554e9), ("llama-3.2-1b", 1.236e9),
        ("llama-3.2-3b", 3.213e9), ("mistral-7b", 7.242e9), ("mixtral-8x7b", 46.70e9), ("qwen2.5-0.5b", 494.0e6),
        ("qwen2.5-1.5b", 1.544e9), ("qwen2.5-7b", 7.616e9),
    ],
)  # fmt: skip
def test_known_models_have_the_parameters_that_their_cards_state(name: str, params: float) -> None:
    assert shape(Path(name)).params == pytest.approx(params, rel=2e-3)


def test_every_known_model_is_compared() -> None:
    (mark,) = test_known_models_have_the_parameters_that_their_cards_state.pytestmark  # type: ignore[attr-defined]
    assert {name for name, _ in mark.args[1]} == set(KNOWN_MODELS)


def test_experts_that_a_token_does_not_reach_are_stored_and_not_computed() -> None:
    llama, experts = shape(Path("LLaMA-3.1-8B")), shape(Path("mixtral-8x7b"))
    assert experts.active_params == pytest.approx(12.9e9, rel=0.01)
    assert experts.model_flops_per_sample < 0.3 * 6 * experts.params * experts.seq_length
    assert llama.kv_width == llama.q_width // 4
    assert "llama, 8.03 B parameters: 32 layers" in llama.words
    assert "46.7 B parameters, 12.9 B of them for each token" in experts.words


def test_lora_trains_a_share_and_computes_no_gradients_of_the_rest(tmp_path: Path) -> None:
    folder = write(tmp_path, model_type="llama", **LLAMA_3_8B)
    whole, adapted = shape(folder), shape(folder, share=0.005)
    assert adapted.trainable_params == pytest.approx(0.005 * whole.params, rel=1e-6)
    assert 0.66 < adapted.model_flops_per_sample / whole.model_flops_per_sample < 0.72
    assert adapted.params == whole.params


def test_a_sample_has_as_many_tokens_as_the_model_takes(tmp_path: Path) -> None:
    learned = write(
        tmp_path / "gpt2", model_type="gpt2", n_embd=768, n_layer=12, n_head=12, n_positions=1024, vocab_size=9
    )
    assert shape(learned).seq_length == 1024
    with pytest.raises(UsageError, match="takes 1024 tokens at most"):
        shape(learned, seq_length=4096)
    rotary = write(tmp_path / "llama", model_type="llama", **LLAMA_3_8B, max_position_embeddings=512)
    assert shape(rotary, seq_length=4096).seq_length == 4096
    image = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    vit = write(tmp_path / "vit", model_type="vit", **image, image_size=[224, 112], patch_size=16)
    assert shape(vit).seq_length == 14 * 7 + 1
    assert shape(vit).logits == 2


def test_a_model_of_the_cache_is_found_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "models--meta-llama--Llama-3.1-8B" / "snapshots" / "0e9e39f"
    folder.mkdir(parents=True)
    write(folder, model_type="llama", **LLAMA_3_8B)
    assert shape(Path("meta-llama/Llama-3.1-8B")).params == 8_030_261_248
    with pytest.raises(UsageError, match="Nothing is downloaded"):
        shape(Path("meta-llama/Llama-3.1-70B"))


BAD: dict[str, tuple[str, str]] = {
    "multimodal": (
        '{"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": {"model_type": "clip"}}',
        "'llava', a model of several parts .text_config of model_type 'llama', vision_config of model_type 'clip'.*"
        "Give --params",
    ),
    "unknown": ('{"model_type": "mamba"}', "is of model_type 'mamba'.*known are llama.*Give --params"),
    "no-kind": ("{}", "has no model_type"),
    "missing": ('{"model_type": "llama", "hidden_size": 64}', "lacks num_attention_heads, .*vocab_size"),
    "text": ('{"model_type": "llama", "hidden_size": "64"}', "hidden_size is '64'; it must be a whole number"),
    "negative": ('{"model_type": "gpt2", "n_embd": -1}', "n_embd is -1; it must be a whole number"),
    "heads": (
        '{"model_type": "gpt2", "n_embd": 100, "n_head": 7, "n_layer": 1, "vocab_size": 10, "n_positions": 8}',
        "hidden_size is 100, not divisible by the heads, 7",
    ),
    "list": ("[]", "is not a JSON object"),
    "no-json": ("{", "is not JSON"),
    "patch": (
        '{"model_type": "vit", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, '
        '"intermediate_size": 128}',
        "lacks image_size, patch_size",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_config_that_cannot_be_counted_says_why(tmp_path: Path, name: str) -> None:
    text, words = BAD[name]
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=words):
        shape(tmp_path)


def test_a_place_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a folder without config\.json"):
        shape(tmp_path)
    with pytest.raises(UsageError, match="neither there nor known"):
        shape(tmp_path / "none.json")


SMALL_LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, "bitsandbytes, 4 bits"),
        ({"load_in_8bit": True, "quant_method": "bitsandbytes"}, "bitsandbytes, 8 bits"),
        ({"bits": 4, "quant_method": "gptq"}, "gptq, 4 bits"),
        ({"quant_method": "fp8"}, "fp8, 8 bits"),
        ({"quant_method": "mxfp4"}, "mxfp4, 4 bits"),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 3}}}, "hqq, 3 bits"),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "torchao, 4 bits"),
        ({"bits": "4", "quant_method": "gptq"}, "gptq, 4 bits"),
        ({"w_bit": 4, "quant_method": "awq"}, "awq, 4 bits"),
        (
            {"config_groups": {"0": {"input_activations": {"num_bits": 8, "x": {}}, "weights": {"num_bits": 4}}}},
            "unknown method, 4 bits",
        ),
        (
            {"quant_method": "torchao", "quant_type": {"_type": "Int8DynamicActivationInt4WeightConfig"}},
            "torchao, 4 bits",
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, "modelopt, 8 bits"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt, 4 bits"),
        ({"load_in_4bit": False, "load_in_8bit": False, "quant_method": "bitsandbytes"}, ""),
        ({"quant_method": "bitnet"}, "bitnet"),
        (None, ""),
    ],
)
def test_quantized_weights_that_are_trained_are_stated_as_not_counted(
    tmp_path: Path, section: dict[str, Any] | None, words: str
) -> None:
    """Weights in 4 bits were counted with 16 without a word."""
    given = {} if section is None else {"quantization_config": section}
    result = shape(write(tmp_path, **SMALL_LLAMA, **given))
    assert result.quantized == words
    assert shape(write(tmp_path, **SMALL_LLAMA, quantization=section)).quantized == words, "MLX's key"
    plan = planned(result)
    about = " ".join(plan.about)
    assert ("does not account for that" in about) == ("each weight takes 16 bits here" in about) == bool(words)
    assert words in about
    assert plan.subject.profile.params == result.params, "what is trained is not quantized"


@pytest.mark.parametrize(("bits", "bits_stored"), [(4, 4.5), (8, 8.5), (None, 16)])
def test_frozen_weights_are_counted_in_the_bits_that_the_config_names(
    tmp_path: Path, bits: int | None, bits_stored: float
) -> None:
    given = {} if bits is None else {"quantization_config": {"bits": bits, "quant_method": "gptq"}}
    result = shape(write(tmp_path, **{**SMALL_LLAMA, "vocab_size": 100}, **given), share=0.01)
    plan = planned(result)
    frozen = result.params - result.trainable_params - 2 * result.vocab * result.hidden
    saved = frozen * (1 - bits_stored / 16)
    assert plan.subject.profile.params == pytest.approx(result.params - saved, abs=1)
    assert ("frozen parameters are counted at that size" in " ".join(plan.about)) == (bits is not None)


def test_an_adapter_is_refused_with_its_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "big/model"}')
    with pytest.raises(UsageError, match=r"of an adapter.*--model big/model.*--trainable-share"):
        shape(tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    with pytest.raises(UsageError, match=r"of diffusers' UNet2DConditionModel.*--params"):
        shape(tmp_path)
