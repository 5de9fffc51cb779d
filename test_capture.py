"""Facts about the probe, which must name what is wrong with a capture, and about the two tensors read by key."""
import json
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Llama4ForCausalLM, Llama4TextConfig

import capture
import sglang_target
from capture import Captured, HFTarget, TargetEmbeddingsAndHead, probe
from recipe import TINY
from regen import generate
from targets import target_path


@pytest.fixture
def target():
    return HFTarget.from_pretrained(target_path(TINY), TINY.target_layer_ids)


PROMPTS = [list(b"Why is the sky blue?"), list(b"12 + 7 ="), list(b"def f(n):")]


class Broken:
    """A target with one thing wrong: `change(captured)`, or other attributes."""

    def __init__(self, target, change=lambda captured: captured, **attributes):
        self.target, self.change = target, change
        self.__dict__ |= attributes

    def __getattr__(self, name):
        return getattr(self.target, name)

    def capture(self, *args):
        return self.change(self.target.capture(*args))


def streams(*order):
    """Rearrange the three captured layers of a tiny target."""
    def change(captured):
        parts = captured.context.split(64, -1)
        return Captured(torch.cat([parts[i] for i in order], -1), captured.final)
    return change


def test_a_healthy_target_passes_every_check(target, capsys):
    assert probe(target, target.model, PROMPTS) == []
    names = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("ok")]
    assert names == ["widths", "layers", "offset", "distinct", "batch", "capture", "next", "logits", "depth", "shift",
                     "shift"]
    assert probe(target, None, PROMPTS) == []


@pytest.mark.parametrize("fault, names", [
    (lambda t: Broken(t, layer_ids=(1, 2, 3)), {"layers", "offset"}),                 # off by one
    (lambda t: Broken(t, streams(0, 0, 2)), {"layers", "offset", "distinct"}),        # one buffer, twice
    (lambda t: Broken(t, streams(2, 1, 0)), {"layers", "offset", "depth"}),           # another order
    (lambda t: Broken(t, streams(0, 1)), {"widths"}),
    (lambda t: Broken(t, lambda c: c if len(c.final) == 1 else Captured(c.context.roll(1, 0), c.final)),
     {"batch"}),                                                                      # a batch's rows exchanged
    (lambda t: Broken(t, lambda c: Captured(c.context, c.final * 1.1)),
     {"layers", "capture off", "logits"}),                                            # a final state of another scale
    (lambda t: Broken(t, lambda c: Captured(c.context, c.final.roll(1, 1))),
     {"layers", "offset", "capture off", "next token", "logits", "shift", "shift of 4"}),     # one position late
    (lambda t: Broken(t, lm_head=scaled(t.lm_head, 2.0)), {"logits"}),                # a scale forgotten, or twice
    (lambda t: Broken(t, lm_head=scaled(t.lm_head, -1.0)), {"next token", "logits"}),
    (lambda t: Broken(t, plain=lambda ids: (t.plain(ids)[0] + 1, t.plain(ids)[1])), {"capture off"})])
def test_a_fault_is_named(target, fault, names):
    assert set(probe(fault(target), target.model, PROMPTS)) == names


def scaled(head, factor):
    linear = torch.nn.Linear(*head.weight.shape[::-1], bias=False)
    linear.weight = torch.nn.Parameter(head.weight * factor)
    return linear


def test_the_command_exits_1_and_names_the_failed_check(target, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["capture.py", "probe", "tiny"])
    monkeypatch.setattr(capture, "load_target", lambda *a: target)
    capture.main()
    assert "ok     shift of 4" in capsys.readouterr().out
    monkeypatch.setattr(capture, "load_target", lambda *a: Broken(target, streams(0, 0, 2)))
    with pytest.raises(SystemExit, match="probe failed: layers, offset, distinct"):
        capture.main()
    assert "FAILED distinct     0 " in capsys.readouterr().out
    for wrong in (["capture.py"], ["capture.py", "prob"], ["capture.py", "probe", "tiny", "smollm2"]):
        monkeypatch.setattr(sys, "argv", wrong)
        with pytest.raises(SystemExit, match="usage"):
            capture.main()


# ---------------------------------------------------------------------------------------------------------------------
# Embedding and head


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with two tables of 10 x 4, a norm, and what `config` changes; in one file or two behind an index."""
    def write(config=(), sharded=False, **tensors):
        generator = torch.Generator().manual_seed(0)
        tensors = {"model.embed_tokens.weight": torch.randn(10, 4, generator=generator),
                   "lm_head.weight": torch.randn(10, 4, generator=generator),
                   "model.embed_norm.weight": torch.randn(4, generator=generator)} | tensors
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        files = {name: f"model-{i % 2}.safetensors" if sharded else "model.safetensors"
                 for i, name in enumerate(tensors)}
        for file in set(files.values()):
            save_file({name: t for name, t in tensors.items() if files[name] == file}, tmp_path / file)
        if sharded:
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        (tmp_path / "config.json").write_text(json.dumps(dict(config)))
        return tmp_path, tensors
    return write


@pytest.mark.parametrize("sharded", [False, True])
def test_two_tensors_by_key(checkpoint, sharded):
    path, tensors = checkpoint(sharded=sharded)
    both = TargetEmbeddingsAndHead(path, torch.float32)
    assert torch.equal(both.embed_tokens.weight, tensors["model.embed_tokens.weight"])
    assert torch.equal(both.lm_head.weight, tensors["lm_head.weight"]) and both.lm_head.bias is None
    assert not both.lm_head.weight.requires_grad and not both.embed_tokens.weight.requires_grad
    other = TargetEmbeddingsAndHead(path, torch.bfloat16, embed_key="lm_head.weight",
                                    head_key="model.embed_tokens.weight")
    assert torch.equal(other.embed_tokens.weight, tensors["lm_head.weight"].bfloat16())


def test_tied_padded_scaled_and_normed(checkpoint):
    ids = torch.tensor([[1, 9]])
    eps = {"rms_norm_eps": 1e-6}
    for config, keys in ((eps | {"tie_word_embeddings": True}, {}),
                         ({"text_config": eps | {"tie_word_embeddings": True}}, {}),
                         (eps, {"head_key": "model.embed_tokens.weight"})):
        path, tensors = checkpoint(config)
        both = TargetEmbeddingsAndHead(path, torch.float32, rows=13, embed_scale=3.0, **keys,
                                       embed_norm_key="model.embed_norm.weight")
        assert both.lm_head.weight.data_ptr() == both.embed_tokens.weight.data_ptr()
        assert both.lm_head.weight.shape == (13, 4) and not both.lm_head.weight[10:].any()
        rows = tensors["model.embed_tokens.weight"][ids]
        rows = rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt() * tensors["model.embed_norm.weight"] * 3
        assert torch.allclose(both.embed_tokens(ids), rows, atol=1e-6)


def test_what_a_checkpoint_lacks_is_named_with_what_it_has(checkpoint):
    path, _ = checkpoint(**{"lm_head.weight": None, "transformer.unembed.weight": torch.zeros(10, 4)})
    with pytest.raises(ValueError, match="no tensor 'lm_head.weight'; of its 3.*model.embed_norm.weight, "
                                         "model.embed_tokens.weight, transformer.unembed.weight"):
        TargetEmbeddingsAndHead(path, torch.float32)
    path, _ = checkpoint(**{"lm_head.weight": torch.zeros(10, 4, dtype=torch.uint8)})
    with pytest.raises(ValueError, match="lm_head.weight.*stored as torch.uint8"):
        TargetEmbeddingsAndHead(path, torch.float32)
    path, _ = checkpoint(**{"lm_head.weight": torch.zeros(11, 4)})
    with pytest.raises(ValueError, match=r"\(10, 4\) and \(11, 4\)"):
        TargetEmbeddingsAndHead(path, torch.float32)


def test_they_are_those_of_the_model(target):
    both = TargetEmbeddingsAndHead(target_path(TINY), torch.float32)
    assert torch.equal(both.embed_tokens.weight, target.embed_tokens.weight)
    assert torch.equal(both.lm_head.weight, target.lm_head.weight)
    assert "lm_head.weight" in load_file(target_path(TINY) / "model.safetensors")


def test_bfloat16_stays_near(target):
    ids = torch.tensor([list(b"What is 12 + 7, and why?")])
    half = HFTarget.from_pretrained(target_path(TINY), TINY.target_layer_ids, dtype=torch.bfloat16)
    got, want = half.capture(ids), target.capture(ids)
    assert got.context.dtype == got.final.dtype == torch.bfloat16
    assert all(1e-4 < capture.apart(a, b) < 0.05 for a, b in ((got.context, want.context), (got.final, want.final)))


def test_a_model_whose_decoder_is_itself_is_read_and_decoded(tmp_path):
    """Llama 4's `get_decoder` returns the model with its head."""
    torch.manual_seed(0)
    Llama4ForCausalLM(Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_local_experts=2, interleave_moe_layer_step=2,
        attention_chunk_size=16, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )).save_pretrained(tmp_path)
    target, ids = HFTarget.from_pretrained(tmp_path, (0, 2)), torch.randint(3, 64, (1, 12))
    got, want = target.capture(ids), target.model(ids, output_hidden_states=True)
    assert torch.equal(got.context, torch.cat([want.hidden_states[i] for i in (1, 3)], -1))
    assert torch.equal(got.final, want.hidden_states[-1])
    [(_, answer, _)] = generate(target.model, ids.tolist(), 3, [0.0], [0], [])
    whole = target.model(torch.cat((ids, torch.tensor([answer])), 1)).logits[0, 11:-1]
    assert whole.argmax(-1).tolist() == answer


def test_engines_have_names():
    with pytest.raises(ValueError, match="'vllm'; there are 'transformers' and 'sglang'"):
        capture.load_target(replace(TINY, engine="vllm"))


def test_an_engine_that_is_not_installed_says_how_to_get_it(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)
    monkeypatch.setattr(sglang_target, "version", missing)
    with pytest.raises(ValueError, match="bash run.sh setup sglang, then use .venv-sglang/bin/python"):
        capture.load_target(replace(TINY, engine="sglang"))
