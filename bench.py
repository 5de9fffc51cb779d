"""Benchmarks: where the time and the memory of a training step go. Never a test: nothing here passes or fails.

    python bench.py objective [--blocks 512 --length 1000 --head gated --json FILE]     the three forms of the objective
    python bench.py objective --dry --blocks 1024 --vocab 154880 --length 8192          its memory, by formula, no run
    python bench.py attention                   grouped attention against one dense mask, from 64 to 512 blocks
    python bench.py capture                     HFTarget.capture against output_hidden_states=True and logits
    python bench.py step                        one training step of the default recipe, phase by phase
    python bench.py scaling                     a sample each on 1, 2, 4 processes of one thread: what sharding costs
    python bench.py generate                    answers for a corpus, against `generate` of transformers
    python bench.py eval                        decoding: the plain way, ours one prompt at a time, ours eight at a time

Every form runs in processes of its own, in turns with the others, so that its peak is its own and a busy machine slows
all forms alike. Seconds are medians; peak_mb is what a form adds to the highest resident set (on CUDA: to the allocated
memory) that the process had before its first forward. Read next: objective.py.
"""
import argparse
import functools
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

import dspark
import objective
from attention import Attention, Visibility, rope_tables
from decode import GREEDY_BELOW, Clock, Proposal, Trace, accept, decode
from dspark import DSparkConfig, DSparkDraft, Supervision, frozen_linear
from recipe import DEFAULT

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MB = 1e6
FORMS = ("full", "recompute", "chunked")
ATTENTION_FORMS = [f"{form}@{blocks}" for blocks in (64, 128, 256, 512) for form in ("dense", "grouped")]


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def resident_mb() -> float:
    """Highest memory of this process so far."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated() / MB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / MB


def timed(run) -> dict:
    """Wall clock and processor seconds (all threads) of one call."""
    wait = torch.cuda.synchronize if DEVICE.type == "cuda" else lambda: None
    wait()
    start, cpu = time.perf_counter(), time.process_time()
    run()
    wait()
    return {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}


def measure(run, warm, repeats: int) -> dict:
    """What the first call of `run` adds to the peak, and the times of `repeats` later calls (the first one also faults
    pages in); `warm` is a small run that loads what any run needs."""
    warm()
    before = resident_mb()
    run()
    return {"peak_mb": resident_mb() - before, "times": [timed(run) for _ in range(repeats)]}


def medians(runs: list[dict]) -> dict:
    """One record of several runs of a form: the median of each time and of the peak."""
    times = [t for r in runs for t in r["times"]]
    return {key: statistics.median(t[key] for t in times) for key in ("seconds", "cpu_seconds")} | {
        "peak_mb": statistics.median(r["peak_mb"] for r in runs)}


def in_processes(args, names: list[str]) -> dict[str, dict]:
    """Each name measured in `args.processes` fresh processes, in turns. Medians."""
    found: dict[str, list[dict]] = {name: [] for name in names}
    for _ in range(args.processes):
        for name in names:
            out = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--form", name], check=True, text=True,
                                 stdout=subprocess.PIPE).stdout
            found[name].append(json.loads(out.splitlines()[-1]))
    return {name: medians(runs) for name, runs in found.items()}


def machine() -> dict:
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if DEVICE.type == "cpu" and cpuinfo.exists():
        name = next((x.split(":")[1].strip() for x in cpuinfo.read_text().splitlines() if "model name" in x), name)
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


# The objective


def supervised(args, blocks: int):
    """One sequence of random tokens, all supervised, and its anchors, drawn as in training."""
    ids = torch.randint(args.vocab, (1, args.length), device=DEVICE)
    anchors, keep = dspark.sample_anchors(torch.ones_like(ids), blocks)
    return ids, anchors, keep, Supervision.build(ids, torch.ones_like(ids), anchors, keep, args.block_size, 4.0)


def objective_step(args, form: str, blocks: int):
    """A function that runs one forward and backward of the objective on random hidden rows and random weights."""
    torch.manual_seed(0)
    config = DSparkConfig(
        vocab_size=args.vocab, hidden_size=args.hidden, num_hidden_layers=0, num_attention_heads=1,
        num_key_value_heads=1, head_dim=64, intermediate_size=1, block_size=args.block_size, mask_token_id=0,
        target_layer_ids=(0,), num_target_layers=2, markov_rank=0 if args.head == "none" else args.rank,
        markov_head_type="vanilla" if args.head == "none" else args.head, enable_confidence_head=True,
        confidence_head_with_markov=True, num_anchors=blocks)
    head = frozen_linear(torch.randn(args.vocab, args.hidden).mul_(0.1)).to(DEVICE)
    draft, (_, anchors, _, sup) = DSparkDraft(config).to(DEVICE).attach(head, head), supervised(args, blocks)
    hidden = torch.randn(1, anchors.shape[1], args.block_size, args.hidden, device=DEVICE, requires_grad=True)
    final = torch.randn(1, args.length, args.hidden, device=DEVICE)
    draft.chunk_blocks = None if form == "chunked" else 0

    def step():
        hidden.grad = None
        draft.zero_grad()
        dspark.vocabulary_terms_full = terms_recompute if form == "recompute" else objective.vocabulary_terms_full
        draft.objective(hidden, final, sup, sup.weight.sum() + 1e-6, torch.zeros((), device=DEVICE))[0].backward()
    return step


def terms_recompute(hidden, latent, w2, head, final, sup, ce_scale, l1_scale) -> objective.Terms:
    """The form to beat: slices of blocks whose vocabulary-sized tensors are made a second time in backward."""
    vocab_size, block_size = head.weight.shape[0], hidden.shape[2]
    slices = objective.slice_rows([block_size] * hidden.shape[1], None, vocab_size, block_size, hidden.device.type)
    parts = []
    for a, b in slices:
        cut = lambda x: None if x is None else x[0, a // block_size:b // block_size][None]    # noqa: B023, E731
        part = Supervision(**{name: cut(x) for name, x in vars(sup).items()})
        parts.append(checkpoint(lambda h, z, w, part=part: tuple(vars(objective.vocabulary_terms_full(
            h, z, w, head, final, part, ce_scale, l1_scale)).values()), cut(hidden), cut(latent), w2,
            use_reentrant=False))
    loss, *rest = zip(*parts, strict=True)
    return objective.Terms(sum(loss), *(torch.cat(x, 1) for x in rest))


def vocabulary_memory(args, device_type: str) -> dict:
    """Vocabulary-sized memory of the chunked objective in fp32, from the slices that training uses. MB."""
    torch.manual_seed(0)
    _, _, _, sup = supervised(args, args.blocks)
    valid = sup.valid[0]
    slices = objective.slice_rows(valid.sum(1).tolist(), None, args.vocab, args.block_size, device_type)
    source = sup.source[0][valid]
    distinct = [len(source[a:b].unique()) for a, b in slices]
    draft, teacher, scratch = objective.buffer_rows(slices, distinct, args.vocab, device_type)
    row = args.vocab * 4 / MB
    rank = 0 if args.head == "none" else args.rank
    return {"slices": len(slices), "rows": len(source), "draft_rows": draft, "teacher_rows": teacher,
            "scratch_rows": 2 * scratch, "buffers_mb": (draft + teacher + 2 * scratch) * row,
            "w2_gradient_mb": rank * row, "unsliced_mb": sup.valid.numel() * row}


def dry(args) -> dict:
    result = {device: vocabulary_memory(args, device) for device in ("cuda", "cpu")}
    for device, m in result.items():
        print(f"{device}: {m['slices']} slices for {m['rows']} rows; buffers of {m['draft_rows']} rows + "
              f"{m['teacher_rows']} of the teacher + {m['scratch_rows']} scratch: {m['buffers_mb']:.0f} MB = "
              f"{m['buffers_mb'] * MB / 2**30:.2f} GiB; W2's gradient {m['w2_gradient_mb']:.0f} MB "
              f"(one unsliced buffer: {m['unsliced_mb']:.0f} MB)")
    return result


# ---------------------------------------------------------------------------------------------------------------------
# The draft's attention and a whole step


def attention_step(args, form: str, blocks: int):
    """Forward and backward of one attention layer of the recipe, with training's visibility or the same as one mask."""
    torch.manual_seed(0)
    layer = Attention(DSparkConfig.from_recipe(DEFAULT), 0).to(DEVICE)
    _, anchors, keep, _ = supervised(args, blocks)
    K, S, D = args.block_size, args.length, DEFAULT.head_dim
    rows = anchors.shape[1] * K
    x = torch.randn(1, rows, DEFAULT.hidden_size, device=DEVICE, requires_grad=True)
    context = torch.randn(1, S, DEFAULT.hidden_size, device=DEVICE, requires_grad=True)
    positions = (anchors[..., None] + torch.arange(K, device=DEVICE)).flatten(1)
    rope = rope_tables(positions, D, DEFAULT.rope_theta, x.dtype)
    context_rope = rope_tables(torch.arange(S, device=DEVICE), D, DEFAULT.rope_theta, x.dtype)

    def step():
        visible = Visibility(anchors, keep, S, K)
        if form == "dense":
            block = torch.arange(rows, device=DEVICE) // K
            seen = torch.arange(S, device=DEVICE) < anchors[0].repeat_interleave(K)[:, None]
            visible = [(S, torch.cat((seen, block[:, None] == block), 1))]                    # [rows, S + rows]
        layer(x, rope, layer.keys_values(context, context_rope), visible).sum().backward()
    return step


@functools.cache
def loaded_target():
    from capture import load_target
    return load_target(DEFAULT, DEVICE)


def capture_step(args, form: str, blocks: int):
    """Captures a micro-batch of the default recipe, by hooks or as a transformers user would; 8 tokens to warm up."""
    target = loaded_target()
    ids = torch.randint(1000, (DEFAULT.micro_batch, args.length if blocks > 1 else 8), device=DEVICE)

    @torch.no_grad()
    def everything():
        out = target.model(ids, output_hidden_states=True, use_cache=False)
        return torch.cat([out.hidden_states[i + 1] for i in target.layer_ids], -1), out.hidden_states[-1], out.logits
    return everything if form == "all+logits" else lambda: target.capture(ids)


def step_phases(args) -> dict:
    """One optimizer step of the default recipe on one micro-batch of random tokens, phase by phase."""
    from train import make_optimizers
    target = loaded_target()
    draft = DSparkDraft(DSparkConfig.from_recipe(DEFAULT)).configure_objective(DEFAULT).to(DEVICE)
    draft.attach(target.embed_tokens, target.lm_head)
    optimizers = make_optimizers(draft, DEFAULT)
    ids = torch.randint(DEFAULT.vocab_size, (DEFAULT.micro_batch, args.length), device=DEVICE)
    state = {}

    def capture():
        state["captured"] = target.capture(ids)

    def forward():
        captured = state["captured"]
        state["loss"] = draft(ids, captured.context, torch.ones_like(ids), captured.final)[0]

    def optimizer():
        for each in optimizers:
            each.step()
        draft.zero_grad()

    phases = {"capture": capture, "forward": forward, "backward": lambda: state["loss"].backward(),
              "optimizer": optimizer}
    found = {name: {"times": []} for name in phases}
    for i in range(args.repeats + 1):
        for name, run in phases.items():
            before, times = resident_mb(), timed(run)
            if i == 0:
                found[name]["peak_mb"] = resident_mb() - before      # what this phase is the first to need
            else:
                found[name]["times"].append(times)
    result = {name: medians([r]) for name, r in found.items()}
    return result | {"step": {key: sum(r[key] for r in result.values()) for key in result["forward"]}}


def scaling_step(args) -> dict:
    """In one of the processes: steps of the default recipe's draft, sharded as in training, on a random sample."""
    from ranks import start_world
    from train import make_optimizers, shard
    world, r = start_world(), DEFAULT
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = frozen_linear(torch.randn(r.vocab_size, r.hidden_size).mul_(0.05))
    draft = DSparkDraft(DSparkConfig.from_recipe(r)).configure_objective(r)
    draft.attach(torch.nn.Embedding.from_pretrained(head.weight.detach()), head)
    shard(draft, world, torch.float32)
    optimizers, S = make_optimizers(draft, r), args.length
    ids = torch.randint(r.vocab_size, (1, S))
    context, final = torch.randn(1, S, len(r.target_layer_ids) * r.hidden_size), torch.randn(1, S, r.hidden_size)

    def step():
        draft(ids, context, torch.ones_like(ids), final, seeds=[world.rank], lengths=[S])[0].backward()
        for each in optimizers:
            each.step()
        draft.zero_grad()
    return measure(step, lambda: None, args.repeats)


def scaling(args) -> dict:
    """Medians of rank 0 by number of processes. On fewer cores than processes only the processor seconds compare."""
    found = {}
    for n in (1, 2, 4):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        world = {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                 "OMP_NUM_THREADS": "1"}
        processes = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--form", "scaling"], text=True,
                                      env=os.environ | world | {"RANK": str(i), "LOCAL_RANK": str(i)},
                                      stdout=subprocess.PIPE) for i in range(n)]
        said = [process.communicate()[0] for process in processes]
        found[str(n)] = medians([json.loads(said[0].splitlines()[-1])])
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Decoding


def plain_decode(model, draft, ids, max_new_tokens: int, temperature: float, stops: set[int], clock) -> Trace:
    """The protocol of decode.py the way one writes it first: caches that grow by concatenation, all hidden states and
    logits of every layer and token, one-hot distributions, tensors made in every step. Draws from the
    default generator."""
    def distribution(logits):
        if temperature < GREEDY_BELOW:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        return torch.softmax(logits.float() / temperature, -1)

    def forward(new):
        out = model(input_ids=new, past_key_values=cache, use_cache=True, output_hidden_states=True)
        return out.logits[0], torch.cat([out.hidden_states[i + 1] for i in c.target_layer_ids], -1)

    c, trace, cache, prompt = draft.config, Trace(), DynamicCache(config=model.config), ids.shape[1]
    stored = [[] for _ in draft.layers]
    logits, new_context = forward(ids)
    last = torch.multinomial(distribution(logits[-1:]), 1)                                    # [1, 1]
    output, start = torch.cat((ids, last), 1), prompt
    clock.lap("prefill")
    while int(last) not in stops and start - prompt < max_new_tokens:
        first = start - new_context.shape[1]
        rope = rope_tables(torch.arange(first, start)[None], c.head_dim, c.rope_theta, torch.float32)
        context = draft.context(new_context)
        for i, layer in enumerate(draft.layers):
            new = layer.self_attn.keys_values(context, rope)
            stored[i] = [torch.cat(pair, 2) for pair in zip(stored[i], new, strict=True)] if stored[i] else list(new)
        rope = rope_tables(torch.arange(start, start + c.block_size)[None], c.head_dim, c.rope_theta, torch.float32)
        x = draft.embed_tokens(torch.tensor([[int(last)] + [c.mask_token_id] * (c.block_size - 1)]))
        for i, layer in enumerate(draft.layers):
            x = layer(x, rope, tuple(stored[i]), None, [(start, None)])
        hidden = draft.norm(x)
        base = draft.lm_head(hidden)[0]
        clock.lap("draft")
        tokens, p, state = [last[0]], [], None
        for t in range(c.block_size):
            row = base[t:t + 1]
            if draft.markov_head is not None:
                latent, state = draft.markov_head.step(tokens[-1], hidden[:, t], state)
                row = row + draft.markov_head.markov_w2(latent)
            p.append(distribution(row))
            tokens.append(torch.multinomial(p[-1], 1)[0])
        clock.lap("walk")
        drafted = torch.stack(tokens[1:], 1)                                                  # [1, K]
        logits, captured = forward(torch.cat((last, drafted), 1))
        clock.lap("verify")
        accepted, stopped, last = accept(Proposal(drafted, torch.cat(p)), distribution(logits), stops)
        length, last = accepted + (not stopped), last[None]
        for lengths, n in ((trace.acceptance_lengths, length), (trace.accepted_draft_lengths, accepted),
                           (trace.proposal_lengths, accepted if stopped else c.block_size)):
            lengths.append(n)
        output = torch.cat((output, drafted[:, :accepted], last[:, :1 - stopped]), 1)
        start, new_context = start + length, captured[:, :length]
        cache.crop(start - cache.get_seq_length())           # negative: how many to drop
        clock.lap("bookkeeping")
        if stopped:
            break
    generated = output[0, prompt:prompt + max_new_tokens].tolist()
    end = next((i + 1 for i, token in enumerate(generated) if token in stops), len(generated))
    trace.output_ids = ids[0].tolist() + generated[:end]
    return trace


@torch.inference_mode()
def decoding(args) -> dict:
    """Tokens per second of the three forms on the same prompts, in turns, and where the time goes (median turn)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from capture import load_target
    from data_glm import encode_prompt, load_task
    from recipe import load_recipe
    from targets import target_path
    recipe = load_recipe(Path(args.draft) / "recipe.json")
    home = target_path(recipe)
    tokenizer = AutoTokenizer.from_pretrained(home)
    prompts = [encode_prompt(text, tokenizer, recipe.chat_family).to(DEVICE)
               for text in load_task(recipe.eval_tasks[0], limit=args.prompts)]
    target, draft, plain_draft = (load_target(recipe, DEVICE), *(DSparkDraft.from_pretrained(args.draft, device=DEVICE)
                                                                 for _ in range(2)))
    model = AutoModelForCausalLM.from_pretrained(home, dtype=target.dtype).to(DEVICE).eval()
    plain_draft.attach(model.get_input_embeddings(), model.get_output_embeddings())
    seeds, stops = [recipe.eval_seed + i for i in range(len(prompts))], list(recipe.stop_token_ids)
    common = {"max_new_tokens": args.new, "temperature": args.temperature}

    def ours(slots, clock):
        return dict(decode(target, draft, prompts, stop_token_ids=stops, slots=slots, seeds=seeds, clock=clock,
                           **common))

    def plain(clock):
        result = {}
        for i, ids in enumerate(prompts):
            torch.manual_seed(seeds[i])
            result[i] = plain_decode(model, plain_draft, ids, stops=set(stops), clock=clock, **common)
        return result

    forms = {"plain": plain, "ours@1": lambda clock: ours(1, clock), "ours@8": lambda clock: ours(8, clock)}
    turns, traces = {name: [] for name in forms}, {}
    for _ in range(args.repeats):
        for name, run in forms.items():
            clock = Clock()
            traces[name] = run(clock)
            turns[name].append(clock.seconds)
    result = {}
    for name, runs in turns.items():
        seconds = sorted(runs, key=lambda r: sum(r.values()))[len(runs) // 2]
        tokens = sum(len(t.output_ids) - ids.shape[1] for t, ids in zip(traces[name].values(), prompts, strict=True))
        proposals = sum(len(t.acceptance_lengths) for t in traces[name].values())
        result[name] = {"tokens_per_s": tokens / sum(seconds.values()), "proposals": proposals, "seconds": seconds,
                        "equal_traces": sum(traces[name][i] == traces["plain"][i] for i in range(len(prompts)))}
    ratios = {name: r["tokens_per_s"] / result["plain"]["tokens_per_s"] for name, r in result.items()}
    phases = list(result["plain"]["seconds"])
    print(f"{'':>8}{'tokens/s':>10}{'ratio':>7}{'traces as plain':>17}   ms per proposal: " + ", ".join(phases))
    for name, r in result.items():
        print(f"{name:>8}{r['tokens_per_s']:>10.1f}{ratios[name]:>7.2f}{r['equal_traces']:>9} of {len(prompts):<4}"
              + "".join(f"{1000 * r['seconds'].get(p, 0) / r['proposals']:>10.1f}" for p in phases))
    return result | {"ratios": ratios}


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def generation(args) -> dict:
    """Greedy answers to the same prompts by `generate` of transformers, padded batches of 32, and by ours with as many
    slots: tokens per second in turns, and how many answers are the same."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from data_glm import TEST_SEED, encode_prompt, gsm_symbolic, load_model
    from regen import generate
    from targets import target_path
    home, batch = target_path(DEFAULT), 32
    tokenizer = AutoTokenizer.from_pretrained(home, padding_side="left")
    prompts = [encode_prompt(text, tokenizer, DEFAULT.chat_family)[0].tolist()
               for text in gsm_symbolic(TEST_SEED, args.prompts)]
    stops, ours_model = list(DEFAULT.stop_token_ids), load_model(home, DEFAULT.dtype)
    model = AutoModelForCausalLM.from_pretrained(home, dtype=ours_model.dtype).to(DEVICE).eval()

    def theirs():
        answers = {}
        for first in range(0, len(prompts), batch):
            rows = tokenizer.pad({"input_ids": prompts[first:first + batch]}, return_tensors="pt").to(DEVICE)
            with torch.inference_mode():
                new = model.generate(**rows, max_new_tokens=args.new, do_sample=False, eos_token_id=stops,
                                     pad_token_id=stops[0])[:, rows["input_ids"].shape[1]:].tolist()
            for i, row in enumerate(new, first):
                end = next((n for n, token in enumerate(row, 1) if token in stops), len(row))
                answers[i] = row[:end]
        return answers

    def ours():
        zeros = [0] * len(prompts)
        return {i: ids for i, ids, _ in generate(ours_model, prompts, args.new, zeros, zeros, stops, batch)}

    answers, runs, result = {}, {"transformers": [], "ours": []}, {}
    for turn in range(args.repeats):
        for name, run in (("transformers", theirs), ("ours", ours)):
            before = resident_mb()
            times = timed(lambda: answers.update({name: run()}))    # noqa: B023
            runs[name].append({"times": [times], "peak_mb": resident_mb() - before if turn == 0 else 0})
    for name, found in runs.items():
        tokens = sum(map(len, answers[name].values()))
        result[name] = medians(found) | {"tokens": tokens}
        result[name]["tokens_per_s"] = tokens / result[name]["seconds"]
        seconds, speed = result[name]["seconds"], result[name]["tokens_per_s"]
        print(f"{name:>14}: {tokens} tokens, {seconds:.1f} s, {speed:.0f} tokens/s")
    same = sum(answers["ours"][i] == answers["transformers"][i] for i in answers["ours"])
    speed = result["ours"]["tokens_per_s"] / result["transformers"]["tokens_per_s"]
    print(f"ratio {speed:.2f}; the same answer to {same} of {len(prompts)} prompts")
    return result | {"ratios": {"tokens_per_s": speed, "same_answers": same / len(prompts)}}


def show(result: dict, base_of) -> dict:
    """Print a table; returns the result with the ratios of every name to the name that base_of gives for it."""
    ratios = {}
    print(f"{'':>14}{'seconds':>10}{'cpu s':>10}{'extra MB':>10}{'ratios: time':>14}{'cpu':>8}{'memory':>8}")
    for name, r in result.items():
        base = result[base_of(name)]
        ratios[name] = {key: r[key] / base[key] if base[key] else float("nan") for key in r}
        wall, cpu, memory = ratios[name].values()
        print(f"{name:>14}{r['seconds']:>10.3f}{r['cpu_seconds']:>10.3f}{r['peak_mb']:>10.0f}"
              f"{wall:>14.3f}{cpu:>8.3f}{memory:>8.3f}")
    return result | {"ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("objective", "attention", "capture", "step", "scaling", "eval", "generate"))
    parser.add_argument("--dry", action="store_true", help="objective: only compute the memory of its buffers")
    parser.add_argument("--blocks", type=int, default=64, help="anchors of the sequence")
    parser.add_argument("--length", type=int, help="tokens of the sequence (attention 1000, others 250)")
    parser.add_argument("--vocab", type=int, default=DEFAULT.vocab_size)
    parser.add_argument("--hidden", type=int, default=DEFAULT.hidden_size)
    parser.add_argument("--rank", type=int, default=DEFAULT.markov_rank)
    parser.add_argument("--block-size", type=int, default=DEFAULT.block_size)
    parser.add_argument("--head", choices=("vanilla", "gated", "rnn", "none"), default="vanilla")
    parser.add_argument("--processes", type=int, default=3, help="fresh processes per form")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs per process")
    parser.add_argument("--draft", default="out/smollm2/latest", help="eval: the checkpoint")
    parser.add_argument("--prompts", type=int, default=16, help="eval, generate: how many")
    parser.add_argument("--new", type=int, default=64, help="eval, generate: tokens per prompt")
    parser.add_argument("--temperature", type=float, default=0.0, help="eval")
    parser.add_argument("--threads", type=int, help="1 and the processor seconds tell forms apart on a busy machine")
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--form", help=argparse.SUPPRESS)    # set in the processes that this one starts
    args = parser.parse_args()
    if args.dry and args.what != "objective":
        parser.error("--dry is for objective only: the others have no formula")
    args.length = args.length or (1000 if args.what == "attention" else 250)
    if args.threads:
        torch.set_num_threads(args.threads)
    make = {"objective": objective_step, "attention": attention_step, "capture": capture_step}.get(args.what)
    if args.form == "scaling":
        print(json.dumps(scaling_step(args)))
        return
    if args.form:
        form, _, blocks = args.form.partition("@")
        small = argparse.Namespace(**vars(args) | {"vocab": 1000})    # a warm-up that leaves no high-water mark behind
        print(json.dumps(measure(make(args, form, int(blocks or args.blocks)), make(small, form, 1), args.repeats)))
        return
    if args.dry:
        result = dry(args)
    elif args.what == "eval":
        result = decoding(args)
    elif args.what == "generate":
        result = generation(args)
    elif args.what == "step":
        result = show(step_phases(args), lambda name: "step")
        rates = {name: DEFAULT.micro_batch / r["seconds"] for name, r in result.items() if name != "ratios"}
        print("samples/s: " + ", ".join(f"{name} {rate:.2f}" for name, rate in rates.items()))
        result["samples_per_s"] = rates
    elif args.what == "scaling":
        result = show(scaling(args), lambda name: "1")
    elif args.what == "capture":
        result = show(in_processes(args, ["all+logits", "capture"]), lambda name: "all+logits")
        print({name: f"{DEFAULT.micro_batch * args.length / result[name]['seconds']:.0f} tokens/s"
               for name in ("all+logits", "capture")})
    elif args.what == "attention":
        result = show(in_processes(args, ATTENTION_FORMS), lambda name: name.partition("@")[0] + "@64")
    else:
        result = show(in_processes(args, FORMS), lambda name: "full")
    if args.json:
        Path(args.json).write_text(json.dumps(result | {"machine": machine()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
