"""What the real SGLang reads of our exported drafts: its config parser, its draft class, every tensor by value.

It serves DSpark on GPUs only, so nothing is decoded here; test_vllm.py does that. Read next: export.py.
"""
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dspark import DSparkConfig
from export import convert
from sglang_target import SGLangTarget

GOLDEN = Path(__file__).resolve().parent / "testdata" / "golden"
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
         "up_proj": "gate_up_proj"}


@pytest.fixture(scope="module")
def running():
    """The engine's parallel layers need its runtime; any target starts it."""
    target = SGLangTarget.from_pretrained(GOLDEN / "target", (1, 2, 4))
    yield target
    target.close()


def engine_value(parameters: dict, name: str, like: torch.Tensor, config: DSparkConfig) -> torch.Tensor:
    """What the engine holds for a tensor of ours; it keeps q, k, v and gate, up in one matrix each."""
    part = name.split(".")[-2]
    if not name.startswith("layers.") or part not in FUSED:
        return parameters[name]
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    first = {"q_proj": 0, "k_proj": q, "v_proj": q + kv, "gate_proj": 0, "up_proj": config.intermediate_size}[part]
    return parameters[name.replace(part, FUSED[part])][first:first + len(like)]


@pytest.mark.parametrize("name", ["draft_vanilla", "draft_gated", "draft_rnn", "draft_block4", "extra/draft_nowm"])
@torch.no_grad()
def test_sglang_takes_every_exported_tensor(tmp_path, running, monkeypatch, name):
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")       # the mode that uses the confidence head
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.speculative.dspark_components.dspark_config import (
        get_dspark_sample_from_anchor,
        parse_dspark_draft_config,
        resolve_runtime_config,
    )
    from sglang.srt.utils.hf_transformers_utils import get_config
    folder = convert(GOLDEN / name, tmp_path / "draft", "sglang", target=GOLDEN / "target")
    ours = DSparkConfig.from_pretrained(GOLDEN / name)
    config = get_config(str(folder), trust_remote_code=False)
    parsed = parse_dspark_draft_config(draft_hf_config=config)
    assert (parsed.gamma, tuple(parsed.target_layer_ids), parsed.mask_token_id, parsed.num_target_layers) == (
        ours.block_size, ours.target_layer_ids, ours.mask_token_id, ours.num_target_layers)
    assert (parsed.markov_rank, parsed.markov_head_type) == (ours.markov_rank, ours.markov_head_type)
    assert get_dspark_sample_from_anchor(config) is True
    runtime = resolve_runtime_config(draft_hf_config=config, speculative_num_draft_tokens=None, target_vocab_size=96)
    assert (runtime.gamma, runtime.verify_num_draft_tokens) == (ours.block_size, ours.block_size + 1)

    kind, _ = ModelRegistry.resolve_model_cls(config.architectures)
    draft = kind(config).float()
    for p in draft.parameters():
        p.fill_(float("nan"))                    # what stays NaN was not loaded
    tensors = load_file(folder / "model.safetensors")
    draft.load_weights(iter(tensors.items()))
    parameters = dict(draft.named_parameters())
    for key, tensor in tensors.items():
        assert torch.equal(engine_value(parameters, key, tensor, ours), tensor), key
    assert [key for key, p in parameters.items() if not p.isfinite().all()] == []
    rotary = draft.layers[0].self_attn.rotary_emb
    assert rotary.base == ours.rope_theta and rotary.head_size == ours.head_dim
