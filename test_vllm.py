"""What the real vLLM makes of our drafts, on a CPU: bash run.sh test engines runs this in .venv-vllm.

Two starts serve all tests: one process under Triton's interpreter (DSpark), one without (plain decoding and DFlash).
Read next: serve_check.py.
"""
import contextlib
import dataclasses
import json
import os
import random
import runpy
import signal
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import data_glm
from capture import HFTarget
from chat import render
from conftest import end, output_of, own_port, program
from decode import speculative_decode
from dflash2 import DFlash2Config, read_draft
from dspark import DSparkConfig, DSparkDraft
from export import convert, findings
from layouts import save_config
from serve_check import check_prompt, compare, engine
from targets import target_path

SERVE = Path(__file__).parent / "testdata" / "golden" / "serve"
CASES = json.loads((SERVE / "eval_traces.json").read_text())
NEW, K = 48, 7
PROMPTS = [case["prompt_ids"] for case in CASES]
ORACLE_TOKENS = 40


def make_oracle(folder: Path) -> dict[str, str]:
    """A target whose next token is a function of the last one, and a draft whose Markov head knows that function."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    V = 64
    follower = torch.randperm(V, generator=torch.Generator().manual_seed(0))
    config = Qwen3Config(vocab_size=V, hidden_size=V, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
                         num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False)
    target = Qwen3ForCausalLM(config).float()
    draft = DSparkDraft(DSparkConfig(
        vocab_size=V, hidden_size=V, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        intermediate_size=64, block_size=K, mask_token_id=V - 1, target_layer_ids=(0, 1), num_target_layers=4,
        rope_theta=10_000.0, max_position_embeddings=512, markov_rank=V))
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        target.model.embed_tokens.weight.copy_(torch.eye(V))
        target.lm_head.weight.copy_(torch.eye(V)[follower.argsort()])        # row follower[v] reads channel v
        draft.markov_head.markov_w1.weight.copy_(torch.eye(V))
        draft.markov_head.markov_w2.weight.copy_(100 * torch.eye(V)[follower.argsort()])
    target.save_pretrained(folder / "target")
    (folder / "plain").mkdir()
    draft.config.save(folder / "plain")
    save_file(draft.state_dict(), folder / "plain" / "model.safetensors")
    return {"target": str(folder / "target"), "draft": str(convert(folder / "plain", folder / "draft", "vllm"))}


def make_dflash(folder: Path) -> str:
    """The golden draft's backbone as a plain DFlash draft: one row that proposes nothing, seven that do."""
    dspark = DSparkConfig.from_pretrained(SERVE / "draft_vanilla")
    plain = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False,
             "block_size": K + 1}
    config = DFlash2Config(**dataclasses.asdict(dspark) | plain)
    folder.mkdir()
    save_config(config, folder)
    tensors = load_file(SERVE / "draft_vanilla" / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k.startswith(("fc", "hidden_norm", "norm", "layers"))},
              folder / "model.safetensors")
    assert [f for f in findings(folder, SERVE / "target") if f.level == "error"] == []
    return str(folder)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What the engine said, by name of the job."""
    folder = tmp_path_factory.mktemp("engine")
    golden = {"target": str(SERVE / "target"), "tokens": K, "prompts": PROMPTS, "new": NEW + K + 1, "temperature": 0.0}
    with_triton = {
        "dspark": golden | {"method": "dspark", "triton": True,
                            "draft": str(convert(SERVE / "draft_vanilla", folder / "vllm", "vllm"))},
        "oracle": make_oracle(folder) | {"method": "dspark", "tokens": K, "prompts": [[1], [5, 9, 2]], "triton": True,
                                         "new": ORACLE_TOKENS, "temperature": 0.0}}
    dflash = golden | {"method": "dflash", "draft": make_dflash(folder / "dflash")}
    without = {"plain": golden | {"method": "", "draft": None, "new": NEW},
               "dflash": dflash, "dflash, T = 1": dflash | {"temperature": 1.0},
               "dflash, many": dflash | {"temperature": 1.0, "prompts": PROMPTS[:1], "n": 600, "new": 6}}
    said = {"dflash folder": dflash["draft"]}
    for jobs in (with_triton, without):
        said |= dict(zip(jobs, engine(*jobs.values()), strict=True))
    return said


@pytest.fixture(scope="module")
def target():
    return HFTarget.from_pretrained(SERVE / "target", (1, 2, 4))


def test_dspark_reference_loop_and_engine_agree_step_by_step(answers, target):
    """Outputs, accept lengths and each of the drafted tokens: DeepSpec's traces, our loop, the engine."""
    draft = DSparkDraft.from_pretrained(SERVE / "draft_vanilla")
    for case, output, drafts in zip(CASES, answers["dspark"]["outputs"], answers["dspark"]["drafts"], strict=True):
        trace = speculative_decode(target, draft, torch.tensor([case["prompt_ids"]]), max_new_tokens=NEW,
                                   temperature=0.0, stop_token_ids=None)
        checked = check_prompt(target, draft, case["prompt_ids"], output, drafts)
        assert checked["ties"] == [] and checked["drafted"] > 50
        assert case["prompt_ids"] + output[:NEW] == trace.output_ids == case["output_ids"]
        n = len(trace.acceptance_lengths)
        assert checked["lengths"][:n] == trace.acceptance_lengths == case["acceptance_lengths"]
    assert max(checked["lengths"]) > 1


def test_the_serve_check_passes_and_would_notice(answers, target):
    draft = DSparkDraft.from_pretrained(SERVE / "draft_vanilla")
    result = compare(target, draft, PROMPTS, NEW, answers["plain"], answers["dspark"])
    assert result["problems"] == [] and result["near_ties"] == []
    assert result["accept_len_engine"] == result["accept_len_ours"] > 1.5
    other = [[step[::-1] for step in steps] for steps in answers["dspark"]["drafts"]]
    result = compare(target, draft, PROMPTS, NEW, answers["plain"], answers["dspark"] | {"drafts": other})
    assert any("draft, step" in p for p in result["problems"]) and any("2%" in p for p in result["problems"])
    other = [[*output[:9], (output[9] + 1) % 96, *output[10:]] for output in answers["dspark"]["outputs"]]
    result = compare(target, draft, PROMPTS, NEW, answers["plain"], answers["dspark"] | {"outputs": other})
    assert any("parts from plain vLLM at token 9" in p for p in result["problems"])


def test_an_oracle_draft_is_accepted_to_the_last_token(answers):
    for output, drafts in zip(answers["oracle"]["outputs"], answers["oracle"]["drafts"], strict=True):
        at = 1
        for step in drafts:
            if at < len(output):
                assert step[:len(output) - at] == output[at:at + K]
                at += K + 1
        assert len(output) == ORACLE_TOKENS and len(set(output)) > 8


def test_dflash_drafts_what_ours_drafts(answers, target):
    """Greedy and at temperature 1: every drafted token; greedy: the text is the target's own."""
    draft = read_draft(answers["dflash folder"])
    for name in ("dflash", "dflash, T = 1"):
        for ids, output, drafts in zip(PROMPTS, answers[name]["outputs"], answers[name]["drafts"], strict=True):
            checked = check_prompt(target, draft, ids, output, drafts)
            assert [tie for tie in checked["ties"] if "draft" in tie[0]] == [] and checked["drafted"] > 50
    result = compare(target, draft, PROMPTS, NEW, answers["plain"], answers["dflash"])
    assert result["problems"] == [] and result["accept_len_engine"] == result["accept_len_ours"]


def test_dflash_at_temperature_1_samples_from_the_target(answers, target):
    """Chi-square of 600 x 5 sampled tokens against the target's probabilities behind the same prefixes."""
    outputs = torch.tensor(answers["dflash, many"]["outputs"])
    ids = torch.cat((torch.tensor(PROMPTS[0]).expand(600, -1), outputs), 1)
    with torch.inference_mode():
        final = target.capture(ids).final[:, len(PROMPTS[0]):-1]                              # behind the first token
        expected = torch.softmax(target.lm_head(final).double(), -1).sum((0, 1))
    seen = torch.bincount(outputs[:, 1:].flatten(), minlength=96).double()
    often = expected >= 5
    expected = torch.cat((expected[often], expected[~often].sum()[None].clamp(min=1e-9)))
    seen = torch.cat((seen[often], seen[~often].sum()[None]))
    chi, freedom = ((seen - expected) ** 2 / expected).sum(), len(expected) - 1
    assert freedom > 20 and chi < freedom + 5 * (2 * freedom) ** 0.5


# ---- regeneration through vLLM's OpenAI-compatible server ----------------------------------------------------------

REGEN = """
import dataclasses, os, signal, sys
import data_glm
from recipe import TINY
recipe = dataclasses.replace(TINY, corpus="regen:chats.jsonl", corpus_size=0, corpus_max_new_tokens=12, head_dim=32,
                             num_attention_heads=2, num_key_value_heads=1)
def dying(*args):
    for n, row in enumerate(ask(*args)):
        if n == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        yield row
if __name__ == "__main__":
    data_glm.prepare(recipe)
    ask, data_glm.ask_servers = data_glm.ask_servers, dying
    data_glm.regen(recipe, sys.argv[2:], concurrency=4, temperature=0.0, top_p=None, top_k=None)
"""


def test_regeneration_through_a_server_killed_half_way(tmp_path, monkeypatch):
    """50 conversations of two turns: no id lost or doubled, finished rows stay, second turns follow the new ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    (tmp_path / "job.py").write_text(REGEN)
    job = runpy.run_path("job.py")
    folder = target_path(job["recipe"])
    rng = random.Random(0)
    rows = [{"messages": [{"role": role, "content": " ".join(rng.choices("one two six ten red blue".split(), k=5))}
                          for role in ("user", "assistant") * 2]} for _ in range(50)]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = data_glm.corpus_path(job["recipe"])
    with own_port() as port, open("server.log", "w") as log:
        url = f"http://127.0.0.1:{port}/v1"
        server = program("-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--dtype", "float32", "--host",
                         "127.0.0.1", "--port", port, "--enforce-eager", "--max-model-len", 1024, stdout=log,
                         stderr=log, env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"})
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/models", timeout=60)
                break
            assert server.poll() is None, Path("server.log").read_text()[-6000:]
            time.sleep(0.5)
        first = program("job.py", 20, url)
        said = first.communicate()[0]
        assert first.returncode == -signal.SIGKILL and not train.exists(), said
        finished = train.with_name("answers.jsonl").read_bytes().splitlines()
        output_of(program("job.py", 1000, url))
        end(server.pid, signal.SIGKILL)
        server.wait()
    new = {row["id"]: row["messages"] for row in data_glm.read_rows(train)}
    old = {row["id"]: row["messages"] for row in data_glm.read_rows(data_glm.source_path(job["recipe"]))}
    assert list(new) == list(old) and len(new) == 50 and train.read_bytes().count(b"\n") == 50
    assert len(finished) == 20 and set(finished) <= set(train.read_bytes().splitlines())
    tokenizer, model = AutoTokenizer.from_pretrained(folder), data_glm.load_model(folder, "float32")

    def greedy(histories):
        texts = [render(messages, tokenizer, "chatml", True) for messages in histories]
        prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        found = data_glm.generate(model, prompts, 12, [0.0] * 50, [0] * 50, [257])
        return {i: tokenizer.decode(ids[:-1] if why == "stop" else ids) for i, ids, why in found}
    names = list(new)
    expected = [greedy([new[n][:turn] for n in names]) for turn in (1, 3)]
    for turn, texts in zip((1, 3), expected, strict=True):
        assert sum(texts[i] == new[n][turn]["content"] for i, n in enumerate(names)) >= 49   # but for a tie in fp32
    from_old = greedy([old[n][:3] for n in names])
    assert sum(from_old[i] == new[n][3]["content"] for i, n in enumerate(names)) < 40
