"""Checkpoints keep their meaning in every layout, and what an engine would swallow in silence is found.

The drafts of testdata/golden go through every layout and back; configs as other projects write them are built here
from their key lists. Read next: export.py, test_vllm.py (what a real engine makes of an exported draft).
"""
import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import export
from capture import HFTarget
from dspark import DSparkConfig, DSparkDraft
from eval_deepspec import speculative_decode
from export import LAYOUTS, convert, findings, fix
from recipe import TINY, save_recipe
from test_dspark import make_draft, same_weights, without, write_draft

GOLDEN = Path(__file__).parent / "testdata" / "golden"
TARGET = GOLDEN / "target"
DRAFTS = ("draft_plain", "draft_vanilla", "draft_gated", "draft_rnn", "draft_block4", "extra/draft_bias",
          "extra/draft_noconf", "extra/draft_nowm")
WINDOW = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 4}


def content(folder: Path) -> dict:
    """Files as they are; of tensor files the values and the metadata, which the format writes in any order."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".safetensors"}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found[path.name] = file.metadata(), {k: file.get_tensor(k).numpy().tobytes() for k in file.keys()}                 # noqa: SIM118
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Layouts


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "zlab"])
def test_a_round_trip_changes_no_bit(tmp_path, name, layout):
    """deepspec -> layout -> deepspec: tensors as in the source, files as those of deepspec -> deepspec."""
    there = convert(GOLDEN / name, tmp_path / "there", layout)
    back = convert(there, tmp_path / "back", "deepspec", target=TARGET)
    before, after = (load_file(folder / "model.safetensors") for folder in (GOLDEN / name, back))
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    assert content(back) == content(convert(GOLDEN / name, tmp_path / "plain", "deepspec"))
    loaded = DSparkDraft.from_pretrained(there)
    assert loaded.config == DSparkConfig.from_pretrained(GOLDEN / name)
    assert loaded.attached is LAYOUTS[layout].frozen
    assert findings(there, TARGET) == []


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "zlab"])
def test_our_own_checkpoint_comes_back_file_for_file(tmp_path, layout):
    source = tmp_path / "source"
    source.mkdir()
    write_draft(source, make_draft(1, markov_rank=3, **WINDOW), config=lambda values: values)
    back = convert(convert(source, tmp_path / "there", layout), tmp_path / "back", "deepspec")
    config = json.loads((back / "config.json").read_text())
    assert config == json.loads((source / "config.json").read_text())
    assert config["is_causal"] is False          # engines take sliding layers for causal ones where nothing is said


def test_what_each_layout_says(tmp_path):
    """The keys that engines read, at the places where they look for them (names from their sources)."""
    read = {layout: json.loads((convert(GOLDEN / "draft_gated", tmp_path / layout, layout, target=TARGET)
                                / "config.json").read_text()) for layout in LAYOUTS if layout != "zlab"}
    for layout in ("deepspec", "vllm", "sglang"):
        raw = read[layout]
        assert raw["architectures"] == ["DSparkDraftModel" if layout == "sglang" else "Qwen3DSparkModel"]
        assert raw["model_type"] == "qwen3" and raw["sample_from_anchor"] is True
        assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 10000.0
        for key, value in (("block_size", 7), ("mask_token_id", 3), ("target_layer_ids", [1, 2, 4])):
            assert raw[key] == raw["dflash_config"][key] == value
        assert raw["markov_rank"] > 0 and raw["num_target_layers"] == 6
    assert read["sglang"]["dflash_config"]["markov_head_type"] == "gated"
    raw = read["speculators"]
    assert raw["speculators_model_type"] == "dspark" and raw["aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert raw["speculators_config"]["verifier"]["name_or_path"] == str(TARGET)
    assert raw["transformer_layer_config"]["hidden_size"] == 64 and raw["sample_from_anchor"] is True
    assert "hidden_size" not in raw and "target_layer_ids" not in raw


def test_a_draft_can_be_cast_and_sharded_and_overflow_is_refused(tmp_path, monkeypatch):
    source = GOLDEN / "draft_vanilla"
    monkeypatch.setattr(export, "SHARD", 20_000)
    small = convert(source, tmp_path / "small", "vllm", dtype=torch.bfloat16)
    assert len(list(small.glob("*.safetensors"))) > 3 and (small / "model.safetensors.index.json").is_file()
    assert json.loads((small / "config.json").read_text())["dtype"] == "bfloat16"
    want = DSparkDraft.from_pretrained(source).to(torch.bfloat16)
    assert same_weights(DSparkDraft.from_pretrained(small), want) and findings(small) == []
    big = tmp_path / "big"
    shutil.copytree(source, big)
    tensors = load_file(big / "model.safetensors")
    tensors["norm.weight"][0] = 1e5
    save_file(tensors, big / "model.safetensors")
    with pytest.raises(ValueError, match=r"norm.weight.*overflow.*float16"):
        convert(big, tmp_path / "half", "vllm", dtype=torch.float16)
    assert not (tmp_path / "half").exists()


def test_embedding_and_head_are_included_or_shared(tmp_path):
    has = lambda folder: "lm_head.weight" in load_file(folder / "model.safetensors")          # noqa: E731
    shared = convert(GOLDEN / "draft_vanilla", tmp_path / "shared", "vllm", head="share")
    assert not has(shared) and not DSparkDraft.from_pretrained(shared).attached
    assert not has(convert(shared, tmp_path / "still", "speculators"))
    again = convert(shared, tmp_path / "again", "vllm", head="include", target=TARGET)
    assert same_weights(DSparkDraft.from_pretrained(again), DSparkDraft.from_pretrained(GOLDEN / "draft_vanilla"))
    with pytest.raises(ValueError, match="has no embedding and head: name the target"):
        convert(shared, tmp_path / "none", "deepspec", head="include")
    with pytest.raises(ValueError, match="the sglang layout always shares"):
        convert(again, tmp_path / "none", "sglang", head="include")
    with pytest.raises(ValueError, match="has no config.json; name the target's folder"):
        findings(again, tmp_path / "nowhere")


def test_a_folder_that_exists_is_not_overwritten(tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(ValueError, match="exists already"):
        convert(GOLDEN / "draft_plain", tmp_path, "vllm")
    with pytest.raises(ValueError, match="in the deepspec layout, not speculators"):
        convert(GOLDEN / "draft_plain", tmp_path / "new", "vllm", source="speculators")


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints of others


GEOMETRY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "rms_norm_eps": 1e-6, "model_type": "qwen3",
            "max_position_embeddings": 1024}
ROPE = {"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
MARKOV = {"markov_rank": 12, "markov_head_type": "vanilla", "enable_confidence_head": True,
          "confidence_head_with_markov": True}
FOREIGN = {
    "SpecForge, all nested": {
        "architectures": ["DSparkDraftModel"], **GEOMETRY, **ROPE, "num_target_layers": 6,
        "dflash_config": {"block_size": 7, "mask_token_id": 3, "target_layer_ids": [1, 2, 4], **MARKOV}},
    "SpecForge, dspark_config wins": {
        "architectures": ["DSparkDraftModel"], **GEOMETRY, **ROPE, "block_size": 7, "num_target_layers": 6,
        "dspark_config": {"mask_token_id": 3, "target_layer_ids": [1, 2, 4], **MARKOV}},
    "vLLM, the least it reads": {
        "architectures": ["Qwen3DSparkModel"], **GEOMETRY, "rope_theta": 10000.0, "block_size": 7, "mask_token_id": 3,
        "target_layer_ids": [1, 2, 4], "markov_rank": 12, "enable_confidence_head": True,
        "confidence_head_with_markov": True},
    "speculators": {
        "speculators_model_type": "dspark", "speculators_version": "0.6.0", "block_size": 7, "mask_token_id": 3,
        "aux_hidden_state_layer_ids": [2, 3, 5], "sample_from_anchor": True, "draft_vocab_size": 96, **MARKOV,
        "speculators_config": {"algorithm": "dspark", "default_proposal_method": "greedy",
                               "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
                               "verifier": {"name_or_path": "some/model", "architectures": ["Qwen3ForCausalLM"]}},
        "transformer_layer_config": {**GEOMETRY, "rope_parameters": ROPE["rope_parameters"]}},
}


def foreign(folder: Path, config: dict, edit=lambda tensors: tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(edit(load_file(GOLDEN / "draft_vanilla" / "model.safetensors")), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", FOREIGN)
def test_checkpoints_of_others_load_and_draft_the_same(tmp_path, name):
    draft = DSparkDraft.from_pretrained(foreign(tmp_path / "foreign", FOREIGN[name]))
    ours = DSparkDraft.from_pretrained(GOLDEN / "draft_vanilla")
    assert draft.config.target_layer_ids == (1, 2, 4) and draft.config.block_size == 7
    assert all(torch.equal(a, b) for a, b in zip(draft.state_dict().values(), ours.state_dict().values(), strict=True))
    target = HFTarget.from_pretrained(TARGET, (1, 2, 4))
    traces = [speculative_decode(target, d, torch.tensor([[5, 6, 7]]), max_new_tokens=24, temperature=0.0,
                                 stop_token_ids=None) for d in (draft, ours)]
    assert traces[0] == traces[1] and sum(traces[0].accepted_draft_lengths) > 0
    back = convert(tmp_path / "foreign", tmp_path / "back", "deepspec")
    assert same_weights(DSparkDraft.from_pretrained(back), draft)


def test_a_reduced_vocabulary_is_spread_over_the_whole_one(tmp_path):
    """The draft says only every third token; its logits for those are rows of the reduced head, the others -inf."""
    kept = torch.arange(0, 96, 3)

    def reduce(t):
        return t | {"lm_head.weight": t["lm_head.weight"][kept].contiguous(), "d2t": kept - torch.arange(32),
                    "markov_head.markov_w2.weight": t["markov_head.markov_w2.weight"][kept].contiguous(),
                    "t2d": torch.isin(torch.arange(96), kept)}
    config = FOREIGN["speculators"] | {"draft_vocab_size": 32}
    folder = foreign(tmp_path / "reduced", config, reduce)
    draft, whole = (DSparkDraft.from_pretrained(f) for f in (folder, GOLDEN / "draft_vanilla"))
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    logits, want = draft.lm_head(hidden), whole.lm_head(hidden)
    assert torch.equal(logits[:, kept], want[:, kept]) and logits.isinf().sum() == 5 * 64
    trace = speculative_decode(HFTarget.from_pretrained(TARGET, (1, 2, 4)), draft, torch.tensor([[5, 6, 7]]),
                               max_new_tokens=24, temperature=1.0, stop_token_ids=None)
    assert len(trace.output_ids) == 27
    assert [f.what for f in findings(folder) if f.level == "error"] == []
    again = convert(folder, tmp_path / "vllm", "vllm")
    assert json.loads((again / "config.json").read_text())["draft_vocab_size"] == 32
    assert torch.equal(DSparkDraft.from_pretrained(again).lm_head.bias, draft.lm_head.bias)
    with pytest.raises(ValueError, match="reduced vocabulary, which the sglang layout cannot hold"):
        convert(folder, tmp_path / "sglang", "sglang")
    foreign(folder, config, lambda t: reduce(t) | {"d2t": torch.zeros(32, dtype=torch.long) + 70})
    with pytest.raises(ValueError, match="d2t does not map its 32 tokens"):
        DSparkDraft.from_pretrained(folder)


@pytest.mark.parametrize("change, message", [
    (lambda v: without(v, "sample_from_anchor"), "sample_from_anchor is False, not True: its blocks fill in"),
    (lambda v: v | {"aux_hidden_state_layer_ids": [1, 2, 6]}, "the largest usable id"),
    (lambda v: v | {"transformer_layer_config": v["transformer_layer_config"] | {"is_causal": True}}, "bidirectional"),
    (lambda v: v | {"transformer_layer_config": v["transformer_layer_config"] | {"rope_scaling": {"type": "yarn"}}},
     "rope_type 'yarn' is not implemented"),
])
def test_a_foreign_draft_of_another_kind_is_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        DSparkDraft.from_pretrained(foreign(tmp_path / "foreign", change(FOREIGN["speculators"]
                                                                         | {"num_target_layers": 6})))


# ---------------------------------------------------------------------------------------------------------------------
# Sabotage: each was somebody's checkpoint that trained well and served at 1%


def of_tensors(edit):
    def apply(folder):
        save_file({k: v.contiguous() for k, v in edit(load_file(folder / "model.safetensors")).items()},
                  folder / "model.safetensors")
    return apply


def of_config(edit):
    def apply(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    return apply


def deep(values: dict, **changes) -> dict:
    """Changed consistently: at top level and in dflash_config."""
    return values | changes | {"dflash_config": values["dflash_config"] | changes}


SABOTAGE = {
    "markov_w2 removed": (of_tensors(lambda t: without(t, "markov_head.markov_w2.weight")), "error",
                          r"missing markov_head\.markov_w2\.weight"),
    "transposed fc": (of_tensors(lambda t: t | {"fc.weight": t["fc.weight"].T}), "error",
                      r"fc\.weight is \(192, 64\), expected \(64, 192\)"),
    "rope only nested": (of_config(lambda v: without(v, "rope_theta")), "serving",
                         "rope_theta is absent from rope_theta"),
    "rope only flat": (of_config(lambda v: without(v, "rope_parameters")), "serving",
                       r"rope_theta is absent from rope_parameters\.rope_theta"),
    "no sample_from_anchor": (of_config(lambda v: without(v, "sample_from_anchor")), "serving",
                              "sample_from_anchor is absent"),
    "layer ids shifted": (of_config(lambda v: deep(v, target_layer_ids=[0, 1, 3])), "error",
                          r"target_layer_ids is \[0, 1, 3\], recipe.json says it was trained with \[1, 2, 4\]"),
    "layer ids shifted in one place": (of_config(lambda v: v | {"target_layer_ids": [0, 1, 3]}), "error",
                                       r"target_layer_ids is \[\[0, 1, 3\], \[1, 2, 4\]\]"),
    "layer ids shifted to the last": (of_config(lambda v: deep(v, target_layer_ids=[2, 3, 5])), "error",
                                      "the largest usable id is 4"),
    "mask id beyond the vocabulary": (of_config(lambda v: deep(v, mask_token_id=96)), "error",
                                      "mask_token_id 96 is outside the embedding of 96 rows"),
    "block 8 of a 7-draft": (of_config(lambda v: deep(v, block_size=8)), "error",
                             "block_size is 8, recipe.json says it was trained with 7"),
    "block 8 in one place": (of_config(lambda v: v | {"block_size": 8}), "error", r"block_size is \[8, 7\]"),
    "fp16 overflow": (of_tensors(lambda t: t | {"norm.weight": (t["norm.weight"] * 1e6).half()}), "error",
                      r"norm\.weight \(torch\.float16\) holds \d+ values that are inf"),
    "another target's head": (of_tensors(lambda t: t | {"lm_head.weight": t["lm_head.weight"] + 1}), "error",
                              "lm_head.weight is not the one of"),
    "stop id outside": (of_config(lambda v: v | {"eos_token_id": [2, 96]}), "error", "eos_token_id .* outside"),
    "mask id that stops": (of_config(lambda v: v | {"eos_token_id": [2, 3]}), "error", "mask_token_id 3 is a stop id"),
    "no config": (lambda folder: (folder / "config.json").write_text("{"), "error", "not valid JSON"),
    "a list": (lambda folder: (folder / "config.json").write_text("[1]"), "error", "is a list, not a JSON"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An exported draft with its recipe beside it, in which the validator finds nothing."""
    folder = convert(GOLDEN / "draft_vanilla", tmp_path_factory.mktemp("whole") / "draft", "vllm", target=TARGET)
    config = DSparkConfig.from_pretrained(folder)
    same = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)
            if f.name in {g.name for g in dataclasses.fields(TINY)}}
    save_recipe(dataclasses.replace(TINY, **same, num_draft_layers=config.num_hidden_layers,
                                    stop_token_ids=config.eos_token_id), folder / "recipe.json")
    assert findings(folder, TARGET) == []
    return folder


@pytest.mark.parametrize("name", SABOTAGE)
def test_sabotage_is_found_and_named(tmp_path, whole, name, capsys, monkeypatch):
    damage, level, message = SABOTAGE[name]
    folder = tmp_path / "draft"
    shutil.copytree(whole, folder)
    damage(folder)
    monkeypatch.setattr("sys.argv", ["export.py", "validate", str(folder), "--target", str(TARGET)])
    with pytest.raises(SystemExit) as end:
        export.main()
    assert end.value.code == (1 if level == "error" else 3)
    found = findings(folder, TARGET)
    named = [f for f in found if re.search(message, f.what)]
    assert len(named) == 1 and named[0].what in capsys.readouterr().err
    assert named[0].level == level and len(found) <= 3
    if level == "serving":                       # nobody has to edit a file by hand
        fix(folder)
        assert findings(folder, TARGET) == [] and content(folder) == content(whole)
    else:
        with pytest.raises(ValueError):
            convert(folder, tmp_path / "never", "sglang", target=TARGET)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "zlab"])
def test_numbers_that_no_shape_tells_travel_with_the_tensors(tmp_path, layout):
    """Without recipe.json too, a config that another draft's replaced is found."""
    folder = convert(GOLDEN / "draft_vanilla", tmp_path / "draft", layout)
    other = tmp_path / "other"
    shutil.copytree(GOLDEN / "draft_vanilla", other)
    of_config(lambda v: v | {"target_layer_ids": [0, 1, 3], "block_size": 8, "rms_norm_eps": 1e-5})(other)
    shutil.copy(convert(other, tmp_path / "converted", layout) / "config.json", folder)
    assert {f.what.split()[0] for f in findings(folder)} == {"block_size", "target_layer_ids", "rms_norm_eps"}
    assert all("model.safetensors says it was trained with" in f.what for f in findings(folder))


def test_an_exported_folder_of_speculators_that_contradicts_itself_is_found(tmp_path):
    folder = convert(GOLDEN / "draft_vanilla", tmp_path / "draft", "speculators")
    of_config(lambda v: v | {"block_size": 8})(folder)
    assert findings(folder)[0].what == "speculative_tokens is 7, block_size 8 makes 8"


def test_the_references_own_checkpoints_have_warnings_only(tmp_path):
    """They lack sample_from_anchor and write rope once: evaluation must not stop on them."""
    found = findings(GOLDEN / "draft_vanilla", TARGET)
    assert {f.level for f in found} == {"serving"}
    export.refuse_errors(GOLDEN / "draft_vanilla")
    with pytest.raises(SystemExit):
        export.refuse_errors(foreign(tmp_path / "bad", FOREIGN["speculators"], lambda t: without(t, "norm.weight")))
