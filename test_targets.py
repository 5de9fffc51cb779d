"""Every recipe on a tiny stand-in of its target, through every stage; `recipe.py check` and `recipe.py new`.

A stand-in is the family's own transformers model with random weights: narrow, but with the recipe's layers and taps,
its vocabulary, its special tokens at their ids, and windows of 16 tokens where layers slide. Read next:
recipe_check.py.
"""
import json
import shutil
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as T
from safetensors.torch import save_file

import data_glm
import decode
import eval_deepspec
import export
import recipe_check
import targets
from capture import TargetEmbeddingsAndHead, applied_head, load_target, table_options
from conftest import output_of, program
from dspark import DSparkConfig, DSparkDraft
from plan import count_parameters, memory_plan
from recipe import RECIPES, Recipe, load_recipe
from recipe_check import as_constants, check_embedding, findings, mask_candidates, propose, read_target, require_fit
from targets import byte_tokenizer
from train import train

HERE = Path(__file__).parent
TEMPLATES = HERE / "testdata" / "chat"
WIDTHS = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
          "intermediate_size": 64}
WINDOW = 16
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
SMALL_RUN = {"num_draft_layers": 2, "markov_rank": 8, "num_anchors": 4, "global_batch": 2, "micro_batch": 2,
             "epochs": 2, "min_supervised": 8, "max_length": 256, "save_every": 1, "evals_per_epoch": 0,
             "cache_captures": False, "markov_init": "random", "corpus": "chats.jsonl", "eval_tasks": ("little",),
             "eval_limit": 1, "eval_max_new_tokens": 6, "max_position_embeddings": 512}


def text(recipe: Recipe, **changes) -> dict:
    """Arguments of a family's text config."""
    return {"num_hidden_layers": recipe.num_target_layers, "vocab_size": recipe.vocab_size, "rope_parameters": ROPE,
            "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
            **WIDTHS, **changes}


# ---- stand-ins of the recipes' targets: (model, special tokens at their real ids, template)

QWEN_TOKENS = {"<|endoftext|>": 151_643, "<|im_start|>": 151_644, "<|im_end|>": 151_645, "<think>": 151_667,
               "</think>": 151_668}
GLM_TOKENS = {"<|endoftext|>": 154_820, "[gMASK]": 154_822, "<sop>": 154_824, "<|system|>": 154_826,
              "<|user|>": 154_827, "<|assistant|>": 154_828, "<|observation|>": 154_829, "<think>": 154_841,
              "</think>": 154_842}


def qwen3(recipe):
    return T.Qwen3ForCausalLM(T.Qwen3Config(**text(recipe), tie_word_embeddings=recipe.name == "qwen3-4b")), \
        QWEN_TOKENS, "qwen3"


def glm(recipe):
    """Compressed keys, an indexer that picks 16 of them, mixtures of experts."""
    config = T.GlmMoeDsaConfig(**text(recipe, num_key_value_heads=4), **MOE, n_routed_experts=4, kv_lora_rank=16,
                               q_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
                               index_topk=WINDOW, index_head_dim=16, index_n_heads=16)
    return T.GlmMoeDsaForCausalLM(config), GLM_TOKENS, "glm-5.2"


def inkling(recipe):
    """Nested, sliding, with short convolutions, biases by distance, a scaled head and padded rows that would win."""
    config = T.InklingConfig(
        text_config={k: v for k, v in text(recipe).items() if k != "rope_parameters"} | MOE | {
            "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
            "sliding_window_size": WINDOW, "d_rel": 4, "rel_extent": 32, "n_routed_experts": 4, "n_shared_experts": 1,
            "logits_mup_width_multiplier": 1 / recipe.head_scale, "unpadded_vocab_size": recipe.output_vocab_size},
        vision_config={"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "patch_size": 2},
        audio_config={"n_mel_bins": 4, "mel_vocab_size": 8})
    model = T.InklingForConditionalGeneration(config)
    with torch.no_grad():
        model.lm_head.weight *= 50
        model.lm_head.weight[recipe.output_vocab_size:] *= 20
    names = ("<|endoftext|>", "<|start|>", "<|text|>", "<|thinking|>", "<|stop2|>", "<|stop3|>")
    return model, {"<|end|>": 200_006} | dict(zip(names, (200_000, 200_004, 200_007, 200_008, 200_002, 200_003),
                                                  strict=True)), "inkling"


def gemma(recipe):
    """Nested, tied, sliding, with an embedding that scales."""
    rope = {"full_attention": ROPE | {"rope_theta": 1e6}, "sliding_attention": ROPE}
    config = T.Gemma3Config(
        text_config=text(recipe, rope_parameters=rope) | {"sliding_window": WINDOW}, mm_tokens_per_image=4,
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 28, "patch_size": 14})
    return T.Gemma3ForConditionalGeneration(config), {
        "<eos>": 1, "<bos>": 2, "<start_of_turn>": 105, "<end_of_turn>": 106}, "gemma"


def smollm2(recipe):
    config = T.LlamaConfig(**text(recipe), tie_word_embeddings=True)
    return T.LlamaForCausalLM(config), {"<|im_start|>": 1, "<|im_end|>": 2}, "chatml"


STAND_INS = {"smollm2-demo": smollm2, "smollm2": smollm2, "qwen3-4b": qwen3, "qwen3-8b": qwen3, "qwen3-14b": qwen3,
             "gemma-3-4b": gemma, "glm-5.2": glm, "inkling": inkling}


def write_target(folder: Path, model, tokens: dict[str, int], template: str, stops, **options) -> None:
    """Save model, generation config and a byte tokenizer with these special tokens and testdata's template."""
    model.generation_config = T.GenerationConfig(eos_token_id=list(stops))
    model.save_pretrained(folder, **options)
    chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    byte_tokenizer(tokens, first=1000, chat_template=chat_template).save_pretrained(folder)


def stand_in(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe on a stand-in of its target written to `folder`; all that changes are widths and the size of the run.
    """
    torch.manual_seed(0)
    write_target(folder, *STAND_INS[recipe.name](recipe), recipe.stop_token_ids)
    narrow = replace(recipe, target=str(folder), engine="transformers", engine_args={}, **WIDTHS, **SMALL_RUN)
    return replace(narrow, embed_scale=WIDTHS["hidden_size"] ** 0.5) if recipe.embed_scale != 1 else narrow


# ---- every stage


def chats() -> str:
    """Four talks of ASCII."""
    rows = [{"id": i, "messages": [{"role": "user", "content": f"Count to {i + 2}."},
                                   {"role": "assistant", "content": ", ".join(map(str, range(i + 3))) + ", done."}]}
            for i in range(4)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def every_stage(recipe: Recipe) -> None:
    """prepare, tokenize, train a step, resume for another, evaluate, export, validate; in the working directory."""
    Path("chats.jsonl").write_text(chats())
    Path("eval_datasets").mkdir()
    Path("eval_datasets/little.jsonl").write_text('{"turns": ["Count to four."]}\n')
    assert [row for row in findings(recipe, read_target(Path(recipe.target))) if row[1] != "ok"] == []
    data_glm.prepare(recipe)
    assert len(data_glm.load_tokens(recipe)) == 4
    train(replace(recipe, max_steps=1))
    out = train(replace(recipe, max_steps=2))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and all(0 < line["loss"] < 100 for line in lines)
    assert load_recipe(out / "latest/recipe.json") == replace(recipe, max_steps=2)
    assert json.loads((out / "latest/trainer.json").read_text())["skipped_steps"] == 0
    results = eval_deepspec.run(Namespace(
        draft=str(out / "latest"), target=None, task=None, limit=None, temperature=None, max_new_tokens=None,
        confidence_threshold=None, datasets="eval_datasets", out="results"))
    [sample] = results["samples"]["little"]
    assert results["settings"]["stop_token_ids"] == list(recipe.stop_token_ids)
    assert sample["prompt_tokens"] > WINDOW and 1 <= len(sample["new_ids"]) <= 6
    assert all(0 <= i < (recipe.output_vocab_size or recipe.vocab_size) for i in sample["new_ids"])
    for layout in ("vllm", "deepspec"):
        folder = export.convert(out / "latest", Path(layout), layout, target=recipe.target)
        assert export.validate(folder, recipe.target) == []
    config = DSparkConfig.from_pretrained("vllm")
    assert (config.mask_token_id, config.target_layer_ids) == (recipe.mask_token_id, recipe.target_layer_ids)


def sessions_agree(recipe: Recipe) -> None:
    """States of a session that grows past the window and is rolled back on the way equal those of one pass."""
    target = load_target(recipe)
    ids = torch.randint(1000, 1256, (1, 3 * WINDOW), generator=torch.Generator().manual_seed(1))
    whole = target.capture(ids)
    with target.session() as session:
        parts = [session.extend(ids[:, :WINDOW + 3])]
        for start in range(WINDOW + 3, 3 * WINDOW, 5):
            session.extend(ids[:, :6])           # drafted and not accepted
            session.rollback(start)
            parts.append(session.extend(ids[:, start:start + 5]))
    for seen, want in ((torch.cat([p.context for p in parts], 1), whole.context),
                       (torch.cat([p.final for p in parts], 1), whole.final)):
        assert (seen - want).abs().max() < 1e-5 * want.abs().max()


def tables_agree(recipe: Recipe) -> None:
    """Embedding and head read alone, as beside an engine, say what the whole model says, to the bit."""
    target, ids = load_target(recipe), torch.tensor([[1000, 1100, recipe.mask_token_id]])
    alone = TargetEmbeddingsAndHead(recipe.target, torch.float32, **table_options(recipe))
    embedded = alone.embed_tokens(ids)
    assert torch.equal(embedded, target.embed_tokens(ids))
    assert torch.equal(applied_head(alone.lm_head, recipe)(embedded), target.lm_head(embedded))


@pytest.mark.parametrize("name", ["gemma-3-4b", "glm-5.2", "inkling", "qwen3-14b", "qwen3-4b", "qwen3-8b", "smollm2"])
def test_a_recipe_goes_through_every_stage_on_a_stand_in_of_its_target(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = stand_in(RECIPES[name], tmp_path / "target")
    for field in ("target_layer_ids", "num_target_layers", "vocab_size", "output_vocab_size", "mask_token_id",
                  "stop_token_ids", "chat_family", "thinking", "head_scale", "embed_key", "head_key", "block_size"):
        assert getattr(recipe, field) == getattr(RECIPES[name], field)
    proposed, _ = propose(tmp_path / "target")
    for field in ("target_layer_ids", "num_target_layers", "hidden_size", "vocab_size", "output_vocab_size",
                  "head_scale", "embed_scale", "embed_norm_key", "embed_key", "head_key",
                  "stop_token_ids", "chat_family", "thinking"):
        if field != "target_layer_ids" or name not in ("glm-5.2", "inkling"):      # these have taps of their own
            assert getattr(proposed, field) == getattr(recipe, field)
    sessions_agree(recipe)
    tables_agree(recipe)
    every_stage(recipe)


# ---- recipes for targets of other families


OTHERS = {                                       # (class of the config and its arguments, tokens, template, stop ids)
    "Llama-3.1-8B-Instruct": (
        T.LlamaConfig, {"vocab_size": 128_256, "attention_bias": True, "mlp_bias": True},
        {"<|begin_of_text|>": 128_000, "<|end_of_text|>": 128_001, "<|reserved_special_token_0|>": 128_002,
         "<|start_header_id|>": 128_006, "<|end_header_id|>": 128_007, "<|eot_id|>": 128_009}, "llama3",
        (128_001, 128_009)),
    "Qwen3-30B-A3B": (T.Qwen3MoeConfig, {"vocab_size": 151_936, "num_experts": 4, **MOE}, QWEN_TOKENS, "qwen3",
                      (151_645, 151_643)),
    "GLM-4.5-Air": (
        T.Glm4MoeConfig, {"vocab_size": 151_552, "n_routed_experts": 4, "attention_bias": True, **MOE},
        {token: i - 3491 for token, i in GLM_TOKENS.items()}, "glm-5.2", (151_329, 151_336, 151_338)),
    "Mistral-7B-Instruct": (T.MistralConfig, {"vocab_size": 32_768, "sliding_window": WINDOW},
                            {"<s>": 1, "</s>": 2, "[INST]": 3, "[/INST]": 4}, "mistral", (2,)),
    "gpt-oss-20b": (
        T.GptOssConfig, {"vocab_size": 201_088, "num_local_experts": 4, "num_experts_per_tok": 2,
                         "sliding_window": WINDOW, "intermediate_size": 32, "rope_parameters": {
                             "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0,
                             "beta_slow": 1.0, "original_max_position_embeddings": 64}},
        {"<|im_start|>": 200_006, "<|im_end|>": 200_002}, "chatml", (200_002,)),
}


def other_target(name: str, folder: Path) -> None:
    kind, changes, tokens, template, stops = OTHERS[name]
    torch.manual_seed(0)
    config = kind(**text(RECIPES["tiny"], num_hidden_layers=6) | changes)
    write_target(folder, T.AutoModelForCausalLM.from_config(config), tokens, template, stops, max_shard_size="4MB")
    if name.startswith("Llama"):                 # a tokenizer that uses every row
        inner = json.loads((folder / "tokenizer.json").read_text())
        used = set(inner["model"]["vocab"].values())
        inner["model"]["vocab"] |= {f"word{i}": i for i in range(128_256) if i not in used}
        (folder / "tokenizer.json").write_text(json.dumps(inner))


def test_a_name_that_no_text_yields_is_the_last_mask_proposed():
    class Tokenizer:
        def get_vocab(self):
            return {"<left>": 0, "<kept>": 1, "word": 2, "<0xF5>": 3}

        def __call__(self, text, add_special_tokens):
            return {"input_ids": [2, 1] if "<kept>" in text else [2]}

    assert [i for i, _ in mask_candidates(Namespace(tokenizer=Tokenizer()), 4)][:2] == [3, 0]


@pytest.mark.parametrize("name", OTHERS)
def test_a_proposed_recipe_goes_through_every_stage(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other_target(name, tmp_path / name)
    proposed, notes = propose(tmp_path / name)
    pasted: dict = {"Recipe": Recipe}
    exec(as_constants(proposed, notes), pasted)
    [recipe] = [value for value in pasted.values() if isinstance(value, Recipe)]
    assert recipe == proposed
    assert recipe.stop_token_ids == OTHERS[name][4] and recipe.target_layer_ids == (1, 2, 3)
    assert recipe.chat_family == OTHERS[name][3] and "UNKNOWN" not in " ".join(notes.values())
    if name.startswith("Llama"):
        assert recipe.mask_token_id == 1000 + 0xF5, notes["mask_token_id"]
    recipe = replace(recipe, **SMALL_RUN)        # a small run; what the target dictates stays as proposed
    sessions_agree(recipe)
    every_stage(recipe)


def test_new_and_check_are_commands(tmp_path, monkeypatch, capsys):
    other_target("Mistral-7B-Instruct", tmp_path / "Mistral")
    shown = output_of(program(HERE / "recipe.py", "new", tmp_path / "Mistral", stderr=None))
    assert shown.startswith("MISTRAL = Recipe(\n")

    def run(*arguments) -> str:
        monkeypatch.setattr(sys, "argv", ["recipe.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            recipe_check.main()
        assert stopped.value.code not in (0, None)
        return capsys.readouterr().out or str(stopped.value)

    assert "WRONG" in run("check", "tiny", "--target", tmp_path / "Mistral")
    assert "has no config.json" in run("check", "tiny", "--target", tmp_path)
    T.T5Config().save_pretrained(tmp_path / "T5")
    assert "decoder-only" in run("new", tmp_path / "T5")
    config = json.loads((tmp_path / "Mistral/config.json").read_text())
    for change, sentence in (({"final_logit_softcapping": 30.0}, "# logits: the target caps its logits"),
                             ({"layer_types": ["linear_attention"] * 6}, "# layers: the target has layers of type")):
        (tmp_path / "Mistral/config.json").write_text(json.dumps(config | change))
        printed = run("new", tmp_path / "Mistral")
        assert printed.startswith("MISTRAL = Recipe(") and sentence in printed


# ---- the plan of a run


def test_check_prints_the_plan_of_glm_from_its_config_alone(tmp_path, monkeypatch, capsys):
    T.GlmMoeDsaConfig(rope_parameters=ROPE).save_pretrained(tmp_path)              # the published geometry
    monkeypatch.setattr(sys, "argv", ["recipe.py", "check", "glm-5.2", "--target", str(tmp_path / "config.json")])
    with pytest.raises(SystemExit) as stopped:
        recipe_check.main()
    printed = capsys.readouterr().out
    assert stopped.value.code == 0 and "WRONG" not in printed
    assert "parameters: 3.8 B in all, 1.9 B trained" in printed and "for 16 GPUs" in printed
    plan = memory_plan(RECIPES["glm-5.2"], 16, 4)
    for what, size in plan.items():
        assert f"{size / 2**30:6.2f} GiB  {what}\n" in printed
    peaks = [memory_plan(replace(RECIPES["glm-5.2"], num_anchors=n), 16, 4)["objective"] / 2**30 for n in (512, 1024)]
    assert f"objective's peak: {peaks[0]:.2f} GiB at 512, {peaks[1]:.2f} GiB at 1024 anchors" in printed
    assert peaks[1] < 1.3 * peaks[0] < 4


@pytest.mark.parametrize("name", ["glm-5.2", "qwen3-4b", "inkling", "smollm2"])
def test_parameters_by_hand(name):
    recipe = RECIPES[name]
    H, D, V, r = recipe.hidden_size, recipe.head_dim, recipe.vocab_size, recipe.markov_rank
    attention = 2 * H * D * (recipe.num_attention_heads + recipe.num_key_value_heads) + 2 * D
    layer = attention + 3 * H * recipe.intermediate_size + 2 * H
    backbone = len(recipe.target_layer_ids) * H * H + 2 * H + recipe.num_draft_layers * layer
    tables = V * H * (1 if name in ("qwen3-4b", "smollm2") else 2)
    assert count_parameters(recipe) == (backbone + 2 * V * r + H + r + 1, tables)


def test_the_memory_of_a_run_by_hand():
    """GLM-5.2 on 16 GPUs, four to a target: P trained parameters, two tables of 154,880 x 6144."""
    plan, (P, tables) = memory_plan(RECIPES["glm-5.2"], 16, 4), count_parameters(RECIPES["glm-5.2"])
    assert tables == 2 * 154_880 * 6144 and P + tables == 3_807_067_009
    assert plan["embedding and head, bf16"] == 2 * tables and plan["gathered weights, bf16"] == 2 * P
    assert plan["masters, fp32"] == 4 * P // 16 and plan["Adam's moments, fp32"] == 8 * P // 16
    assert plan["gradients, fp32"] == 4 * P + 4 * P // 16
    assert plan["captured states, bf16"] == (4 + 1) * 4096 * 6 * 6144 * 2       # four samples held, one trained on
    # 512 blocks of 7 in five slices of 103 blocks: draft's and teacher's rows and two scratch buffers of 216 rows in
    # fp32, the draft's once more in bf16; the gradient of W2 in both; hidden rows and latents with their gradients.
    assert plan["objective"] == (154_880 * (4 * (721 + 721 + 2 * 216) + 2 * 721) + 154_880 * 256 * 6
                                 + 512 * 7 * (6144 + 256) * 2 * 2)


def test_planned_activations_are_what_autograd_keeps():
    """One attention group, so that keys are laid out as on a GPU; float32, so twice the plan's bytes."""
    recipe = replace(RECIPES["tiny"], hidden_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
                     intermediate_size=512, block_size=7, num_anchors=16, max_length=192, micro_batch=1)
    draft = DSparkDraft(DSparkConfig.from_recipe(recipe))
    draft.attach(torch.nn.Embedding(recipe.vocab_size, 256), torch.nn.Linear(256, recipe.vocab_size, bias=False))
    captured, kept = torch.randn(1, 192, 3 * 256), {}
    weights = {p.untyped_storage().data_ptr() for p in draft.parameters()}

    def keep(x):
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    anchors = torch.arange(150, 182, 2)[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        draft.backbone(torch.zeros(1, 192, dtype=torch.long), captured, anchors, torch.ones_like(anchors).bool())
    # Off CUDA an RMSNorm keeps its normalised input besides its input.
    R, S, H, queries, keys = 16 * 7, 192, 256, 256, 128
    norms = 4 * (2 * (2 * R * H + R * queries + (R + S) * keys) + (R + S) * H)
    planned = 2 * memory_plan(recipe, 1)["activations, bf16"] + norms
    assert 0.9 < sum(kept.values()) / planned < 1.1


# ---- a scaled head and padded rows


def test_a_folded_head_says_what_the_engine_says_and_padding_never_comes_out(tmp_path):
    recipe = stand_in(RECIPES["inkling"], tmp_path / "target")
    end, target = recipe.output_vocab_size, load_target(recipe)
    ids = torch.randint(1000, 1256, (1, 40), generator=torch.Generator().manual_seed(1))
    final = target.capture(ids).final
    with torch.no_grad():
        engine = target.model(ids).logits                                          # scaled, cut at the tokenizer's end
        ours, unfolded = target.lm_head(final), target.model.lm_head(final)
    assert engine.shape[-1] == end == 200_058 and ours.shape[-1] == 201_024
    assert torch.equal(ours.argmax(-1), engine.argmax(-1))
    assert (unfolded.argmax(-1) >= end).float().mean() > 0.9                       # the padding would have won
    assert (ours.softmax(-1)[..., :end] - engine.softmax(-1)).abs().max() < 1e-5
    assert ours.softmax(-1)[..., end:].max() == 0

    draft = DSparkDraft(DSparkConfig.from_recipe(recipe)).attach(target.embed_tokens, target.lm_head).eval()
    with torch.no_grad():
        draft.markov_head.markov_w2.weight[end:] = 100 * draft.markov_head.markov_w2.weight[end:].abs()
    torch.manual_seed(0)
    trace = decode.speculative_decode(target, draft, ids, max_new_tokens=30, temperature=1.0, stop_token_ids=None)
    assert len(trace.output_ids) == 70 and max(trace.output_ids) < end
    with target.session() as session, torch.no_grad():
        drafting = draft.session()
        drafting.extend(session.extend(ids).context)
        proposals = [decode.propose(draft, drafting, ids[:, -1:], 1.0, 0.0)[0].tokens for _ in range(20)]
    assert max(int(tokens.max()) for tokens in proposals) < end

    # Training in slices and as a whole agree about rows that are never proposed.
    captured, losses = target.capture(ids), []
    for draft.chunk_blocks in (0, None):
        draft.zero_grad()
        loss, metrics = draft(ids, captured.context, torch.ones_like(ids), captured.final, seeds=[0], lengths=[40])
        loss.backward()
        losses.append([loss.detach(), draft.fc.weight.grad.clone(), draft.markov_head.markov_w2.weight.grad.clone()])
        assert draft.markov_head.markov_w2.weight.grad[end:].abs().max() == 0
    for full, chunked in zip(*losses, strict=True):
        torch.testing.assert_close(torch.as_tensor(chunked), torch.as_tensor(full), rtol=1e-4, atol=1e-7)

    # The target's own answers, as `prepare` makes them, past the window and rows of different length.
    model = targets.load_model(tmp_path / "target", torch.float32)
    model.set_output_embeddings(applied_head(model.get_output_embeddings(), recipe))
    prompts = [ids[0, :5].tolist(), ids[0, :30].tolist()]
    for row, new, _ in data_glm.generate(model, prompts, 6, [0.0, 0.0], [0, 1], []):
        with target.session() as session, torch.no_grad():
            last, want = torch.tensor([prompts[row]]), []
            for _ in range(6):
                last = target.lm_head(session.extend(last).final[:, -1:]).argmax(-1)
                want.append(int(last))
        assert new == want and max(new) < end


# ---- recipes that are wrong


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return stand_in(RECIPES["qwen3-8b"], tmp_path_factory.mktemp("qwen") / "target")


@pytest.mark.parametrize("changes, sentence", [
    ({"num_target_layers": 40, "target_layer_ids": (1, 10, 19, 28, 37)}, "num_hidden_layers = 36"),
    ({"target_layer_ids": (1, 9, 17, 25, 35)}, "the largest usable id is 34"),
    ({"mask_token_id": 151_644}, "is the token '<|im_start|>', which text can contain"),
    ({"mask_token_id": 151_936}, "outside the embedding of 151936 rows"),
    ({"num_attention_heads": 6, "num_key_value_heads": 4}, "6 query heads are not a multiple of 4 key/value heads"),
    ({"stop_token_ids": (151_645,)}, "lack [151643], with which the target ends its answers"),
    ({"stop_token_ids": (151_645, 151_643, 99)}, "hold [99], which the tokenizer does not know"),
    ({"chat_family": "gemma", "thinking": "none"}, "gemma"),
    ({"thinking": "on"}, "says thinking = 'on', its chat family 'qwen3' renders with 'off'"),
    ({"head_key": "score.weight"}, "no tensor 'score.weight'"),
    ({"head_scale": 0.5}, "head_scale = 0.5, the target's config says 1"),
    ({"output_vocab_size": 150_000}, "output_vocab_size = 150000"),
    ({"hidden_size": 64}, "hidden_size = 32"),
    ({"max_length": 1024}, "max_length 1024 of recipe 'qwen3-8b' exceeds the 512 positions of the target"),
    ({"embed_scale": 2.0}, "embed_scale = 2, the target's embedding module multiplies by 1"),
])
def test_a_wrong_recipe_fails_in_check_and_when_training_starts(qwen, changes, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text(chats())
    wrong = replace(qwen, **changes)
    complaints = [text for _, state, text in findings(wrong, read_target(Path(qwen.target))) if state == "WRONG"]
    assert any(sentence in text for text in complaints), complaints
    data_glm.load_tokens(qwen)                   # also where there are tokens already
    with pytest.raises(SystemExit) as stopped:
        train(wrong)
    assert any(text in str(stopped.value) for text in complaints)
    assert sentence in str(stopped.value)


def test_stop_ids_that_nobody_knows_are_a_complaint(qwen, tmp_path):
    shutil.copytree(qwen.target, tmp_path / "target")
    (tmp_path / "target/generation_config.json").unlink()
    silent = replace(qwen, target=str(tmp_path / "target"), stop_token_ids=())
    with pytest.raises(ValueError, match="no stop token: neither"):
        require_fit(silent, tmp_path / "target")
    require_fit(replace(silent, stop_token_ids=(151_645,)), tmp_path / "target")


def test_quantised_layers_are_fine_and_quantised_tables_are_not(qwen, tmp_path):
    table, eight = torch.zeros(qwen.vocab_size, 32, dtype=torch.bfloat16), torch.float8_e4m3fn
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(qwen.target) / name, tmp_path)
    tensors = {"model.embed_tokens.weight": table, "lm_head.weight": table.clone(),
               "model.layers.0.mlp.up_proj.weight": torch.zeros(64, 32, dtype=eight)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert check_embedding(qwen, read_target(tmp_path))
    read = TargetEmbeddingsAndHead(tmp_path, torch.bfloat16, **table_options(qwen))
    assert torch.equal(read.lm_head.weight, table)
    save_file(tensors | {"lm_head.weight": table.to(eight)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="lm_head.weight of the target is F8_E4M3"):
        check_embedding(qwen, read_target(tmp_path))
