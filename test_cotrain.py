"""Co-training without an engine: what must hold before one starts, windows, decisions, versions, the allocator guard.

The loop itself, with the real vLLM, is in test_vllm_cotrain.py.
"""
import dataclasses
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rollout
from cotrain import (
    advantages,
    collect,
    decide,
    draw,
    problems,
    tell_idle,
    token_logp,
    train_drafter,
    update_actor,
)
from dflash2 import new_draft
from dspark import frozen_linear
from optimizers import make_optimizers
from recipe import COTRAIN, TOY
from rollout import check_contract, engine_has_dflash2, ipc_safe_allocator, send, tensor_hash

RECIPE = dataclasses.replace(TOY, hidden_size=16, head_dim=8, num_attention_heads=2, intermediate_size=24,
                             vocab_size=20, mask_token_id=19, draft="dflash2", conv_group_size=4, selector_rank=4,
                             selector_top_k=4, block_size=4)
C = dataclasses.replace(COTRAIN["toy"], recipe=RECIPE, window=8, context=4, drafter_steps=3, drafter_batch=2)


# ---------------------------------------------------------------------------------------------------------------------
# The contract


def drafter(folder, edit=lambda raw: raw):
    folder.mkdir(exist_ok=True)
    new_draft(RECIPE).config.save(folder)
    raw = edit(json.loads((folder / "config.json").read_text()))
    (folder / "config.json").write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return folder


def without(raw: dict, *keys: str) -> dict:
    return {k: v for k, v in raw.items() if k not in keys} | {
        "dflash_config": {k: v for k, v in raw["dflash_config"].items() if k not in keys}}


def test_a_good_drafter_gives_exactly_this_config(tmp_path):
    folder = drafter(tmp_path / "draft")
    assert check_contract(C, folder, True) == {"method": "dflash", "model": str(folder), "num_speculative_tokens": 3,
                                               "draft_sample_method": "greedy"}
    flat = drafter(tmp_path / "flat", lambda raw: {k: v for k, v in raw.items() if k != "dflash_config"})
    assert check_contract(C, flat, None)["num_speculative_tokens"] == 3
    nested = drafter(tmp_path / "nested", lambda raw: {k: v for k, v in raw.items() if k not in raw["dflash_config"]})
    assert check_contract(C, nested, True)["num_speculative_tokens"] == 3
    unknown = ("block_size", "target_layer_ids", "num_target_layers", "draft_vocab_size")    # null: nothing is said
    null = drafter(tmp_path / "null", lambda raw: without(raw, *unknown) | {
        "dflash_config": raw["dflash_config"] | dict.fromkeys(unknown)})
    assert check_contract(C, null, True)["num_speculative_tokens"] == 3


@pytest.mark.parametrize("change, edit, message", [
    ({}, None, "drafter.model_path is required"),
    ({}, lambda raw: "{", "config.json is not valid JSON"),
    ({}, lambda raw: raw | {"architectures": ["DFlashDraftModel"]},
     r"no DFlash2 drafter checkpoint: architectures \['DFlashDraftModel'\].*set draft = 'dflash'"),
    ({}, lambda raw: raw | {"architectures": ["Qwen3DFlash2Model"]}, r"allowed \['DFlash2DraftModel'\]"),
    ({}, lambda raw: without(raw, "conv_kernel_size", "selector_rank"),
     r"missing \['conv_kernel_size', 'selector_rank'\]"),
    ({"spec_verify_tokens": 0}, lambda raw: raw, "spec_verify_tokens must be a positive int, got 0"),
    ({"spec_verify_tokens": 2.5}, lambda raw: raw, "spec_verify_tokens must be a positive int"),
    ({"spec_verify_tokens": 16}, lambda raw: raw, "spec_verify_tokens=16 but block_size=4"),
    ({"speculative_args": {"num_speculative_tokens": 7}}, lambda raw: raw, "=7, but block_size=4 needs 3"),
    ({}, lambda raw: raw | {"block_size": 8, "dflash_config": raw["dflash_config"] | {"block_size": 8}},
     "trained with block_size=8, recipe toy says 4"),
    ({}, lambda raw: raw | {"selector_rank": 7}, "selector_rank conflicts with dflash_config.selector_rank: 7 and 4"),
    ({}, lambda raw: raw | {"target_layer_ids": [0, 1, 3]},
     r"target_layer_ids conflicts with dflash_config.target_layer_ids: \[0, 1, 3\] and \[0, 1, 2\]"),
    ({}, lambda raw: raw | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, r"\[0, 1, 2\] are not .* plus one"),
    ({"recipe": dataclasses.replace(RECIPE, draft="dflash")}, lambda raw: raw,
     r"no DFlash drafter checkpoint: .*allowed \['DFlashDraftModel'\]"),
    ({"speculative_args": {"posterior_alpha": 0.3, "rejection_sample_method": "synthetic"}}, lambda raw: raw,
     r"\['rejection_sample_method', 'posterior_alpha'\] make verification lossy.*allow_lossy"),
    ({"engine": "sglang"}, lambda raw: raw, "not an engine-level speculative algorithm of sglang.*'vllm'"),
    ({}, lambda raw: raw | {"draft_vocab_size": 10}, "draft_vocab_size 10 of 20.*full_vocab"),
    ({"recipe": dataclasses.replace(RECIPE, draft="dspark")}, lambda raw: raw, "'dspark' cannot be co-trained"),
    ({}, lambda raw: raw | {"hidden_size": 32}, "another target: hidden_size is 32, recipe toy has 16"),
    ({}, lambda raw: raw | {"num_target_layers": 9}, "another target: num_target_layers is 9"),
])
def test_what_would_serve_badly_is_refused_before_the_engine_starts(tmp_path, change, edit, message):
    folder = None if edit is None else drafter(tmp_path / "draft", edit)
    with pytest.raises(ValueError, match=message):
        check_contract(dataclasses.replace(C, **change), folder, True)


def test_other_refusals(tmp_path):
    with pytest.raises(TypeError, match="dflash_config must be a mapping, found list"):
        check_contract(C, drafter(tmp_path / "a", lambda raw: raw | {"dflash_config": [1]}), True)
    with pytest.raises(FileNotFoundError, match="no drafter in"):
        check_contract(C, tmp_path / "nowhere", True)
    good = drafter(tmp_path / "b")
    with pytest.raises(ValueError, match="vLLM 0.28.0: upgrade, or train offline"):
        check_contract(C, good, False)
    lossy = dataclasses.replace(C, speculative_args={"posterior_threshold": 0.1}, allow_lossy=True)
    assert check_contract(lossy, good, True)["posterior_threshold"] == 0.1


def test_the_engine_is_probed_by_its_modules(monkeypatch):
    for installed, answer in ((set(), None), ({"vllm"}, False),
                              ({"vllm", "vllm.model_executor.models.qwen3_dflash2"}, True)):
        monkeypatch.setattr(rollout.importlib.util, "find_spec", lambda name, have=installed: name in have or None)
        assert engine_has_dflash2() is answer


# ---------------------------------------------------------------------------------------------------------------------
# Sending


class Messages:
    """Records what would go to an engine's workers."""

    def __init__(self, failing=""):
        self.calls, self.failing, self.resets = [], failing, 0

    def collective_rpc(self, function, args=()):
        if function.__name__ == self.failing:
            raise ConnectionError("worker gone")
        self.calls.append((function.__name__, args))

    def reset_prefix_cache(self):
        self.resets += 1


def test_buckets_arrive_whole_before_anything_is_installed(monkeypatch):
    monkeypatch.setattr(rollout, "BUCKET", 100)
    tensors, llm = {str(i): torch.full((10,), float(i)) for i in range(6)}, Messages()       # 40 bytes each
    send(llm, "draft", tensors, 3)
    assert [name for name, _ in llm.calls] == ["receive"] * 3 + ["install"]
    assert llm.calls[-1][1] == ("draft", 3) and llm.resets == 0
    worker = type("Worker", (), {})()
    for _, args in llm.calls[:-1]:
        rollout.receive(worker, *args)
    assert list(worker.inbox) == list(tensors)
    rollout.receive(worker, {"new": tensors["0"]}, True, False)              # a new message forgets a half-sent one
    assert list(worker.inbox) == ["new"]
    send(llm, "target", tensors)
    assert llm.resets == 1


@pytest.mark.parametrize("launched, ipc, fails, switches", [
    ("expandable_segments:True", True, False, ["expandable_segments:False", "expandable_segments:True"]),
    ("expandable_segments:True", True, True, ["expandable_segments:False", "expandable_segments:True"]),
    ("", True, False, ["expandable_segments:False"]),
    ("expandable_segments:True", False, False, []),
])
def test_expandable_segments_are_off_around_a_send(monkeypatch, launched, ipc, fails, switches):
    said = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", said.append, raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", launched)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    try:
        with ipc_safe_allocator(ipc):
            assert said == switches[:1]
            if fails:
                raise ConnectionError
    except ConnectionError:
        pass
    assert said == switches


def test_without_a_setter_nothing_happens(monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", None, raising=False)
    with ipc_safe_allocator(True):
        pass


# ---------------------------------------------------------------------------------------------------------------------
# The target's update


def test_advantages_compare_siblings():
    a = advantages([1, 0, 0, 0, 1, 1, 1, 1], 4)
    assert a[0] == pytest.approx(3**0.5, rel=1e-4) and a[1:4] == pytest.approx([-(3**-0.5)] * 3, rel=1e-4)
    assert a[4:] == [0, 0, 0, 0] and advantages([0.1] * 3, 3) == [0, 0, 0]


def test_an_update_makes_good_answers_likelier_and_changes_nothing_at_zero_advantage():
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=2, num_key_value_heads=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)

    def logps() -> list[torch.Tensor]:
        with torch.no_grad():
            return [token_logp(model.lm_head, model.model(s["ids"][None]).last_hidden_state[0], s["ids"], s["prompt"])
                    for s in samples]
    samples = [{"ids": torch.tensor(ids), "prompt": 2, "advantage": a}
               for ids, a in (([1, 2, 3, 4, 5], 1.0), ([1, 2, 9, 8], -1.0))]
    before = logps()
    exact = F.log_softmax(model(samples[0]["ids"][None]).logits[0], -1)
    torch.testing.assert_close(before[0], exact[[1, 2, 3], [3, 4, 5]].detach())              # token t, from t-1
    for s, logp in zip(samples, before, strict=True):
        s["logp"] = logp
    update_actor(model, optimizer, samples, C)
    good, bad = (after.sum() - was.sum() for after, was in zip(logps(), before, strict=True))
    assert good > 0.01 and bad < -0.01
    weights = {n: p.clone() for n, p in model.named_parameters()}
    fresh = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    update_actor(model, fresh, [s | {"advantage": 0.0, "logp": p} for s, p in zip(samples, logps(), strict=True)], C)
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())


def test_rewards_judge_the_last_number():
    (question, judge), (other, _) = problems(dataclasses.replace(C, prompts=2), 1)
    a, sign, b = question.removesuffix(" =").split(": ")[1].split()
    right = int(a) + int(b) if sign == "+" else int(a) - int(b)
    assert question != other
    assert [judge(text) for text in (f"it is {right}", f"{right} , hence {right + 1}", "no number", f"= {right} .")
            ] == [1, 0, 0, 1]
    again = problems(dataclasses.replace(C, prompts=2, steps=99), 1)
    assert [text for text, _ in again] == [question, other]                  # the same for a longer run


# ---------------------------------------------------------------------------------------------------------------------
# Windows, buffers, decisions


def sample(prompt: int = 6, answer: int = 14, rows: int = 0) -> dict:
    """Token i is i, and so is the first channel of its hidden row."""
    context = torch.randn(prompt + answer + rows, 3 * RECIPE.hidden_size)
    context[:, 0] = torch.arange(len(context))
    return {"ids": torch.arange(prompt + answer) % 19, "prompt": prompt, "context": context, "advantage": 0.0}


def test_windows_leave_out_short_answers_take_turns_and_keep_to_limits():
    c = dataclasses.replace(C, window=8, context=4, owners=2, samples_per_owner=3, tokens_per_owner=30)
    buffer = [[], []]
    samples = [sample(*s) for s in ((10, 9), (10, 8), (3, 20), (0, 20), (10, 30), (9, 30), (8, 30))]
    assert collect(buffer, samples, 0, c) == (5, 2)        # 8 tokens are one too few, and an empty prompt
    spans = [[(int(i["context"][0, 0]), int(i["context"][-1, 0]) + 1) for i in owner] for owner in buffer]
    assert spans == [[(5, 18), (3, 16)], [(0, 11), (4, 17)]]             # three of 13 rows were too much
    assert collect([[], []], [sample(10, 7)] * 5, 0, c) == (0, 5)
    collect(buffer, [sample(answer=30)] * 8, 1, dataclasses.replace(c, samples_per_owner=1))
    assert [len(owner) for owner in buffer] == [1, 1]


def test_collected_rows_are_their_tokens_and_versions_do_not_mix():
    buffer, samples = [[], []], [sample(), sample(), sample()]
    collect(buffer, samples, 4, dataclasses.replace(C, owners=2))
    assert [len(owner) for owner in buffer] == [2, 1]
    item = buffer[0][0]
    assert all(torch.equal(item[key], samples[0][key][1:14]) for key in ("ids", "context"))
    assert item["mask"].tolist() == [0] * 5 + [1] * 8
    collect(buffer, samples[:1], 5, C)                                       # the target moved on: old states go
    assert [[i["version"] for i in owner] for owner in buffer] == [[5], []]
    with pytest.raises(ValueError, match="21 hidden rows for 20 tokens"):
        collect(buffer, [sample(rows=1)], 5, C)


def test_a_target_that_stays_does_not_fill_the_buffers_without_end():
    buffer = [[]]
    for _ in range(3):
        samples = [sample(), sample()]
        collect(buffer, samples, 0, dataclasses.replace(C, samples_per_owner=3))
    assert len(buffer[0]) == 3 and torch.equal(buffer[0][-1]["context"], samples[1]["context"][1:14])


def test_decisions_follow_what_the_owners_hold():
    item, c = {"version": 3}, dataclasses.replace(C, train_interval=2)
    assert decide(4, [[item], [item, item]], 3, c) == (True, "training_ready")
    assert decide(4, [[item]], 3, dataclasses.replace(c, enable_drafter_training=False)) == (False, "frozen")
    assert decide(3, [[item]], 3, c) == (False, "interval_not_reached")
    assert decide(4, [[item], []], 3, c) == (False, "owner_without_samples")
    assert decide(4, [[], []], 3, c) == (False, "no_trainable_batch")
    assert decide(4, [[item]], 4, c) == (False, "stale_data")
    assert decide(4, [[item], [{"version": 2}]], 3, c) == (False, "stale_data")


def test_three_idle_cycles_end_the_run_with_reason_and_mend(capsys):
    line = {"step": 8, "reason": "no_trainable_batch", "too_short": 120, "collected": 0}
    tell_idle(C, line, 1)
    assert "drafter training was due and did not happen (no_trainable_batch): 120 of" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match=r"shorter than the window of 8 \+ 1 tokens.*smaller.*3 due cycles"):
        tell_idle(C, line, 3)


def ready(kind: str = "dflash2"):
    torch.manual_seed(0)
    recipe = dataclasses.replace(RECIPE, draft=kind)
    draft = new_draft(recipe)
    draft.attach(nn.Embedding(20, 16), frozen_linear(torch.randn(20, 16)))
    buffer = [[]]
    collect(buffer, [sample() for _ in range(4)], 0, C)
    return draft, make_optimizers(draft, recipe), buffer


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_training_learns_and_repeats(kind):
    hashes = []
    for _ in range(2):
        draft, optimizers, buffer = ready(kind)
        losses, skipped = train_drafter(draft, optimizers, buffer, dataclasses.replace(C, drafter_steps=25), 2)
        assert skipped == 0 and len(losses) == 25 and sum(losses[-5:]) < 0.8 * sum(losses[:5])
        hashes.append(tensor_hash(dict(draft.named_parameters())))
    assert hashes[0] == hashes[1]


def test_a_nan_loss_is_skipped_and_named_and_moves_nothing(capsys):
    draft, optimizers, buffer = ready()
    with torch.no_grad():
        draft.norm.weight[3] = float("nan")
    before = tensor_hash({n: p for n, p in draft.named_parameters() if n != "norm.weight"})
    losses, skipped = train_drafter(draft, optimizers, buffer, C, 2)
    assert (losses, skipped) == ([], 3)
    assert tensor_hash({n: p for n, p in draft.named_parameters() if n != "norm.weight"}) == before
    said = capsys.readouterr().out
    assert "skipping optimizer step 1 of RL step 2, loss nan" in said and "norm.weight (1 of 16 entries)" in said


def test_the_picture_and_its_numbers(tmp_path):
    for name, lengths in (("co", [3.0, 2.0, 2.5, 2.6]), ("frozen", [3.0, 2.0, 1.5, 1.4])):
        (tmp_path / name).mkdir()
        rows = [{"step": i + 1, "accept_len": x, "published": name == "co" and i % 2 == 1, "reward": 0.1 * i,
                 "actor_hash": str(i)} for i, x in enumerate(lengths)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    numbers = draw(tmp_path / "co", tmp_path / "frozen", tmp_path / "picture.png")
    assert numbers["same targets"] and numbers["publishes"] == 2
    assert numbers["second half"]["co-trained"]["mean"] == pytest.approx(2.55)
    assert numbers["second half"]["frozen"]["spread"] == pytest.approx(0.1)
    assert 1000 < (tmp_path / "picture.png").stat().st_size < 150_000
