"""What the real SGLang reads of our exported drafts: its config parser, its draft class, every tensor by value.

It serves DSpark on GPUs only, so nothing is decoded here; test_vllm.py does that. Read next: serve_check.py.
"""
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from export import convert
from serve_check import sglang_reads

GOLDEN = Path(__file__).resolve().parent / "testdata" / "golden"
TARGET = GOLDEN / "target"


@pytest.mark.parametrize("name", ["draft_vanilla", "draft_gated", "draft_rnn", "draft_block4", "extra/draft_nowm"])
def test_sglang_takes_every_exported_tensor(tmp_path, name):
    folder = convert(GOLDEN / name, tmp_path / "draft", "sglang", target=TARGET)
    assert sglang_reads(folder, TARGET) == []


def test_the_check_would_notice(tmp_path):
    """A tensor of another name is ignored by SGLang without a word, a key that is not where it looks is not read."""
    folder = convert(GOLDEN / "draft_vanilla", tmp_path / "draft", "sglang", target=TARGET)
    tensors = load_file(folder / "model.safetensors")
    tensors["hidden_norm.scale"] = tensors.pop("hidden_norm.weight")
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = config["mask_token_id"] = 4
    (folder / "config.json").write_text(json.dumps(config | {"sample_from_anchor": True}))
    assert sglang_reads(folder, TARGET) == ["hidden_norm.scale did not arrive",
                                            "hidden_norm.weight is in SGLang's draft and not in ours"]
