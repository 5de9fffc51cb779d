"""Co-training with the real vLLM, on a CPU: bash run.sh test engines runs this in .venv-vllm (about four minutes).

Every run is a process of its own, as the engine wants it. There is no engine of ours: what is served is read back from
vLLM's own draft module. The base tests of the same code are in test_cotrain.py and test_dflash2.py.
"""
import contextlib
import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from capture import HFTarget
from conftest import output_of, program
from cotrain import draw
from decode import speculative_decode
from dflash2 import DFlash2Config, DFlash2Draft, read_draft, serving_names
from dspark import DSparkConfig
from rollout import tensor_hash
from serve_check import check_prompt, engine

HERE = Path(__file__).parent
SERVE = HERE / "testdata" / "golden" / "serve"
PROMPTS = [case["prompt_ids"] for case in json.loads((SERVE / "eval_traces.json").read_text())]

RUN = """
import dataclasses, sys
sys.path.insert(0, {here!r})
from pathlib import Path
from cotrain import cotrain
from recipe import COTRAIN
c = dataclasses.replace(COTRAIN["toy"], **{changes})
{before}
cotrain(c, Path({out!r}))
"""


def start(where: Path, out: str = "", changes: str = "{}", before: str = "", arguments=()):
    """cotrain.py with command line arguments, or the loop itself with a changed toy recipe."""
    script = RUN.format(here=str(HERE), changes=changes, before=before, out=out)
    command = [str(HERE / "cotrain.py"), *arguments] if arguments else ["-c", script]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with (where / f"{out or '-'.join(arguments)}.log").open("w") as log:
        return program(*command, cwd=where, env=environment, stdout=log, stderr=log)


def finish(process, where: Path, name: str, code: int = 0) -> str:
    with contextlib.suppress(AssertionError):    # what it says about itself is in the log
        output_of(process, timeout=3000)
    log = (where / f"{name}.log").read_text()
    assert process.returncode == code, log[-6000:]
    return log


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A working directory with the three runs of `bash run.sh cotrain toy` in out/cotrain."""
    where = tmp_path_factory.mktemp("runs")
    for arguments in (["toy-drafter"], ["toy"], ["toy", "--frozen"]):
        finish(start(where, arguments=arguments), where, "-".join(arguments))
    return where


# ---------------------------------------------------------------------------------------------------------------------
# The engine drafts what we draft


def make_dflash2(folder: Path) -> Path:
    """The golden draft's backbone with convolutions and a selector that matter."""
    golden = DSparkConfig.from_pretrained(SERVE / "draft_vanilla").keys() | {
        "markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False, "block_size": 8}
    torch.manual_seed(3)
    draft = DFlash2Draft(DFlash2Config(**golden, conv_kernel_size=3, conv_group_size=golden["hidden_size"] // 4,
                                       selector_rank=8, selector_top_k=6, output_multiplier=1.5,
                                       final_logit_softcapping=20.0, input_embedding_scale=0.75))
    with torch.no_grad():
        for name, p in draft.named_parameters():
            if "conv." in name or "selector" in name:
                p.add_(0.4 * torch.randn(p.shape))
    tensors = load_file(SERVE / "draft_vanilla" / "model.safetensors")
    own = draft.state_dict()
    draft.load_state_dict(own | {k: v for k, v in tensors.items() if k in own})
    folder.mkdir()
    draft.config.save(folder)
    save_file(draft.state_dict(), folder / "model.safetensors")
    return folder


def test_vllm_drafts_what_our_dflash2_drafts(tmp_path):
    """Greedy, step by step and token by token: three taps in blocks of eight, selector, multiplier, soft cap, scale."""
    folder = make_dflash2(tmp_path / "draft")
    job = {"target": str(SERVE / "target"), "draft": str(folder), "method": "dflash", "tokens": 7, "triton": True,
           "prompts": PROMPTS[:4], "new": 48, "temperature": 0.0}
    answer, = engine(job)
    target, draft = HFTarget.from_pretrained(SERVE / "target", (1, 2, 4)), read_draft(folder)
    selected = 0
    for ids, output, drafts in zip(PROMPTS[:4], answer["outputs"], answer["drafts"], strict=True):
        checked = check_prompt(target, draft, ids, output, drafts)
        assert checked["ties"] == [] and checked["drafted"] > 50
        trace = speculative_decode(target, draft, torch.tensor([ids]), max_new_tokens=40, temperature=0.0,
                                   stop_token_ids=None)
        assert trace.output_ids[len(ids):] == output[:40]
        n = len(trace.acceptance_lengths) - 1
        assert checked["lengths"][:n] == trace.acceptance_lengths[:n]
        selected += sum(len(set(step)) for step in drafts)
    assert selected > 40                         # not one token over and over


# ---------------------------------------------------------------------------------------------------------------------
# Co-training end to end


@pytest.mark.parametrize("keep_window", [False, True])
def test_vllm_reads_the_config_of_a_converted_draft(tmp_path, keep_window):
    """Its own parser finds the architecture, the block, the taps and the windows that the converter wrote."""
    from vllm.config import ModelConfig

    from export import from_speculators
    from test_dflash2 import foreign, foreign_folder, make_draft
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"num_hidden_layers": 5, "hidden_size": 8, "vocab_size": 11}))
    source = foreign_folder(tmp_path / "source", make_draft(17, torch.float32), foreign())
    out = from_speculators(source, tmp_path / "out", target, keep_window=keep_window)
    model = ModelConfig(model=str(out), skip_tokenizer_init=True, dtype="float32", runner="draft")
    found = model.hf_config
    assert model.architectures == ["DFlash2DraftModel"] and model.get_vocab_size() == 11
    assert found.dflash_config["target_layer_ids"] == [0, 2] and found.dflash_config["block_size"] == 4
    assert (found.sliding_window, found.layer_types[0]) == ((64, "sliding_attention") if keep_window else
                                                            (None, "full_attention"))
    assert model.get_hidden_size() == 8 and model.get_head_size() == 4 and model.get_total_num_kv_heads() == 2


def test_the_cotrained_drafter_follows_and_the_frozen_one_falls_behind(runs):
    """Same seed, same targets and prompts at every step: in the second half the margin is there each time, and larger
    on average than it ever changes from one step to the next."""
    toy, frozen = runs / "out/cotrain/toy", runs / "out/cotrain/toy-frozen"
    co, still = rows(toy), rows(frozen)
    assert [row["step"] for row in co] == [row["step"] for row in still] == list(range(1, len(co) + 1))
    assert len(co) >= 8 and sum(row["trained"] and row["published"] for row in co) >= 4
    assert [row["actor_hash"] for row in co] == [row["actor_hash"] for row in still]
    assert len({row["actor_hash"] for row in co}) == len(co)                 # the target really moves
    assert {row["served_version"] for row in still} == {0} and {row["reason"] for row in still} == {"frozen"}
    print(draw(toy, frozen, runs / "cotrain.png"))
    margins = torch.tensor([a["accept_len"] - b["accept_len"] for a, b in zip(co, still, strict=True)])[len(co) // 2:]
    assert margins.min() > 0 and margins.mean() > margins.diff().abs().max(), margins
    assert (runs / "cotrain.png").stat().st_size < 150_000


def test_the_engine_serves_the_newest_published_drafter_and_nothing_else(runs):
    """Between publishes the served weights stay those of the last one, whatever happens to target and trainer."""
    toy, version, served = runs / "out/cotrain/toy", 0, None
    for row in rows(toy):
        assert row["target_version"] == row["step"] - 1
        version += row["published"]
        assert row["served_version"] == version
        if not row["published"] and served:
            assert row["served_hash"] == served
        elif row["published"]:
            assert row["served_hash"] != served
        served = row["served_hash"]
    last = load_file(toy / "latest/drafter/model.safetensors")
    assert tensor_hash(serving_names(last)) == served                        # the trainer's, by hash, read from vLLM


def test_a_killed_run_resumes_with_drafter_target_step_and_versions(runs):
    """SIGKILL after two steps; the same command goes on, and steps 3 and 4 are those of a run that was not killed."""
    first = start(runs, "killed", "{'steps': 4}")
    folder = runs / "killed"
    while first.poll() is None and not (folder / "step_2").is_dir():
        time.sleep(0.1)
    first.kill()
    first.wait()
    assert (folder / "step_2").is_dir(), (runs / "killed.log").read_text()[-6000:]
    log = finish(start(runs, "killed", "{'steps': 4}"), runs, "killed")
    assert "resumed at step" in log and "target version" in log
    again, whole = rows(folder), rows(runs / "out/cotrain/toy")[:4]
    for key in ("step", "actor_hash", "served_hash", "served_version", "target_version", "accept_len", "reward"):
        assert [row[key] for row in again] == [row[key] for row in whole], key


def test_dflash2_is_trained_and_published_too(runs):
    """The shorter check, under Triton's interpreter: convolutions and codebooks reach the engine; the target stays."""
    finish(start(runs, arguments=["toy-dflash2"]), runs, "toy-dflash2")
    out = runs / "out/cotrain/toy-dflash2"
    found = rows(out)
    assert [row["published"] for row in found] == [True, True]
    last = load_file(out / "latest/drafter/model.safetensors")
    assert tensor_hash(last) == found[-1]["served_hash"] and "candidate_selector.predecessor_codebook" in last
    assert json.loads((out / "latest/drafter/config.json").read_text())["architectures"] == [
        "DFlash2DraftModel"]


# ---------------------------------------------------------------------------------------------------------------------
# Faults


FAULTS = """
from rollout import *
from cotrain import *
from dflash2 import read_draft
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
c = dataclasses.replace(c, temperature=0.0, group=1, prompts=4)
llm = start_engine(c, target_path(c.recipe), check_contract(c, c.drafter, True))
good = draft_tensors(read_draft(c.drafter))
other = {n: t + 0.01 * torch.randn_like(t) for n, t in good.items()}
publish_drafter(llm, good, 1)
module = llm.collective_rpc(lambda worker: worker.get_draft_model())[0].model
state = lambda: llm.collective_rpc(serving_state)[0]
places = lambda: {n: (id(p), p.data_ptr()) for n, p in module.named_parameters()}
before, where, prompts = state(), places(), [[0, 20, 9, 30, 31, 1, 0, 21]] * 2
said = generate(llm, prompts, c, 1)
written = []

def torn(owner, name, call):
    "Sends other weights, and so many calls of owner.name later the engine has no room."
    whole, calls = getattr(owner, name), []
    def broken(*arguments):
        calls.append(0)
        if len(calls) == call:
            found = {n: p for n, p in module.named_parameters() if n in other and p.numel() and not p.is_meta}
            written[:] = [n for n, p in found.items() if torch.equal(p, other[n])]
            raise MemoryError("no room")
        return whole(*arguments)
    setattr(owner, name, broken)
    try:
        send(llm, "draft", other, 2)
    finally:
        setattr(owner, name, whole)

results = {}
for name, action in {
    "between layers": lambda: torn(layerwise, "_layerwise_process", 4),
    "inside a layer": lambda: torn(layerwise, "_copy_and_restore_kernel_tensors", 4),
    "buffers": lambda: torn(DFlashQwen3Model, "_build_fused_kv_buffers", 2),
    "incomplete": lambda: send(llm, "draft", {n: t for n, t in good.items() if n != "fc.weight"}, 2),
    "another shape": lambda: send(llm, "draft", good | {"norm.weight": good["norm.weight"][:-1]}, 2),
}.items():
    try:
        action()
        text = "nothing was raised"
    except RuntimeError as error:
        text = str(error)
    results[name] = [text, written[:], state() == before, places() == where, generate(llm, prompts, c, 1) == said]
    written.clear()
send(llm, "draft", other, 3)
results["then"] = [state()["draft"], state()["hash"] == tensor_hash(other)]
Path("faults.json").write_text(json.dumps(results))
raise SystemExit
"""


def test_a_publish_that_breaks_off_leaves_the_old_draft_whole(runs):
    """Also when tensors of the new one were written: hash, addresses and accept length are those of before."""
    finish(start(runs, "faults", before=FAULTS), runs, "faults")
    results = json.loads((runs / "faults.json").read_text())
    torn = "version 2 could not be loaded (no room); the one before serves on"
    misfit = "does not fit the engine's draft"
    for name, message, count in (("between layers", torn, 2), ("inside a layer", torn, 2), ("buffers", torn, 6),
                                 ("incomplete", f"{misfit}: ['fc.weight']", 0),
                                 ("another shape", f"{misfit}: ['norm.weight']", 0)):
        said, written, *same = results[name]
        assert message in said and len(written) == count and same == [True] * 3, (name, results[name])
    assert results["then"] == [3, True]          # and the next whole one is installed


TEAR = """
import rollout
from vllm.model_executor.model_loader.reload import layerwise
load, process, layers = rollout.load_draft_module, layerwise._layerwise_process, []

def tear(*arguments):
    layers.append(0)
    if len(layers) == 4:
        raise MemoryError("no room")
    return process(*arguments)

def load_draft_module(worker, tensors):
    layerwise._layerwise_process = tear
    try:
        load(worker, tensors)
    finally:
        layerwise._layerwise_process = process
rollout.load_draft_module = load_draft_module
"""


def test_a_run_goes_on_after_a_torn_publish_and_the_next_one_arrives(runs):
    """The engine computes in bf16, the trainer in float32: what is read back is the rounded draft."""
    log = finish(start(runs, "torn", "{'steps': 4, 'engine_args': {'dtype': 'bfloat16'}}", TEAR), runs, "torn")
    assert "publish of step 2 failed: draft version 1 could not be loaded (no room); the one before serves on" in log
    found = rows(runs / "torn")
    assert [row["trained"] for row in found] == [False, True, False, True]
    assert [row["served_version"] for row in found] == [0, 0, 0, 1] and found[-1]["published"]
    first, last = (load_file(folder / "model.safetensors") for folder in (
        runs / "out/cotrain/toy-drafter/latest/drafter", runs / "torn/latest/drafter"))
    first, last = (tensor_hash({n: t.bfloat16() for n, t in tensors.items()}) for tensors in (first, last))
    assert [row["served_hash"] for row in found] == [first] * 3 + [last]


@pytest.mark.parametrize("name, changes, message", [
    ("engine", "{'max_model_len': 16}", "rollout of step 1 failed in the engine ("),
    ("windows", "{'window': 60, 'actor_lr': 0.0, 'owners': 2}",
     "128 of 128 answers are shorter than the window of 60 + 1 tokens"),
])
def test_a_run_that_cannot_go_on_says_why(runs, name, changes, message):
    log = finish(start(runs, name, changes), runs, name, code=1)
    assert message in log, log[-2000:]
    if name == "windows":
        assert log.count("drafter training was due and did not happen (no_trainable_batch)") == 3
        assert "3 due cycles in a row" in log and len(rows(runs / name)) == 6                # every second step is due
