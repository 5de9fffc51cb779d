"""Benchmarks: where the time and the memory go. Never a test: nothing here passes or fails.

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
memory) that a small run of it left behind. Read next: objective.py.
"""
import argparse
import dataclasses
import functools
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

import dspark
import objective
from attention import Attention, Visibility, rope_tables
from capture import load_target
from decode import Clock, Proposal, accept, decode
from dspark import DSparkConfig, DSparkDraft, Supervision, frozen_linear
from optimizers import make_optimizers
from ranks import end_world, start_world
from recipe import DEFAULT, load_recipe
from targets import load_model, target_path
from train import shard

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MB = 1e6


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def peak_mb() -> float:
    """Highest memory of this process so far."""
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated() / MB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / MB


def measure(make, args) -> dict:
    """In a process of a form's own: what its first run adds to the peak, then the times of a second one, with what it
    counted."""
    small = {"vocab": 1000, "blocks": 1, "length": 8, "prompts": 1, "new": 1}
    make(argparse.Namespace(**vars(args) | small))()         # loads what any run needs, leaves no high-water mark
    run, before = make(args), peak_mb()
    run()
    memory, clock, cpu = peak_mb() - before, Clock(), time.process_time()
    counted = run() or {}
    clock.lap("seconds")
    return clock.seconds | {"cpu_seconds": time.process_time() - cpu, "peak_mb": memory} | counted      # of all threads


def in_processes(args, forms: list[str]) -> dict[str, dict]:
    """Each form measured in `args.runs` fresh processes, in turns: medians. For `scaling` a form is a number of
    processes, of which rank 0 speaks."""
    found: dict[str, list[dict]] = {form: [] for form in forms}
    for _ in range(args.runs):
        for form in forms:
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", form]
            out = subprocess.run([sys.executable, *torchrun * (args.what == "scaling"), __file__, *sys.argv[1:],
                                  "--form", form], check=True, text=True, stdout=subprocess.PIPE).stdout
            found[form].append(json.loads(out.splitlines()[-1]))
    result = {}
    for form, runs in found.items():
        result[form] = {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "outputs"}
        if "tokens" in runs[0]:
            result[form]["tokens_per_s"] = result[form]["tokens"] / result[form]["seconds"]
        if "outputs" in runs[0]:
            pairs = zip(runs[0]["outputs"], found[forms[0]][0]["outputs"], strict=True)
            result[form]["same_outputs"] = sum(a == b for a, b in pairs)
    return result


def show(result: dict, ratios: dict) -> None:
    """A row per number, a column per form; behind every number its ratio."""
    keys = list(next(iter(result.values())))
    left = max(map(len, keys))
    print(" " * left + "".join(f"{form:>17}" for form in result))
    for key in keys:
        cells = (f"{r[key]:.4g}" + (f" ({ratios[form][key]:.3f})" if ratios else "") for form, r in result.items())
        print(f"{key:<{left}}" + "".join(f"{cell:>17}" for cell in cells))


def machine() -> dict:
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if DEVICE.type == "cpu" and cpuinfo.exists():
        name = next((x.split(":")[1].strip() for x in cpuinfo.read_text().splitlines() if "model name" in x), name)
    return {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


# ---------------------------------------------------------------------------------------------------------------------
# The objective. Like all that follow: (options, form) -> a function that runs the form once.


def supervised(args) -> tuple[torch.Tensor, Supervision]:
    """Anchors of one sequence of random tokens, drawn as in training, all supervised; and their supervision."""
    ids = torch.randint(args.vocab, (1, args.length), device=DEVICE)
    anchors, keep = dspark.sample_anchors(torch.ones_like(ids), args.blocks)
    return anchors, Supervision.build(ids, torch.ones_like(ids), anchors, keep, args.block_size, 4.0)


def objective_step(args, form: str):
    """One forward and backward of the objective on random hidden rows and random weights."""
    torch.manual_seed(0)
    config = dataclasses.replace(
        DSparkConfig.from_recipe(DEFAULT), vocab_size=args.vocab, hidden_size=args.hidden, num_hidden_layers=0,
        block_size=args.block_size, markov_rank=0 if args.head == "none" else args.rank, markov_head_type=args.head)
    head = frozen_linear(torch.randn(args.vocab, args.hidden).mul_(0.1)).to(DEVICE)
    draft, (anchors, sup) = DSparkDraft(config).to(DEVICE).attach(head, head), supervised(args)
    hidden = torch.randn(*anchors.shape, args.block_size, args.hidden, device=DEVICE, requires_grad=True)
    final = torch.randn(1, args.length, args.hidden, device=DEVICE)
    draft.chunk_blocks = None if form == "chunked" else 0
    if form == "recompute":
        dspark.vocabulary_terms_full = terms_recompute

    def step():
        hidden.grad = None
        draft.zero_grad()
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
    _, sup = supervised(args)
    valid = sup.valid[0]
    slices = objective.slice_rows(valid.sum(1).tolist(), None, args.vocab, args.block_size, device_type)
    source = sup.source[0][valid]
    distinct = [len(source[a:b].unique()) for a, b in slices]
    draft, teacher, scratch = objective.buffer_rows(slices, distinct, args.vocab, device_type)
    row, rank = args.vocab * 4 / MB, 0 if args.head == "none" else args.rank
    return {"slices": len(slices), "rows": len(source), "draft_rows": draft, "teacher_rows": teacher,
            "scratch_rows": 2 * scratch, "buffers_mb": (draft + teacher + 2 * scratch) * row,
            "w2_gradient_mb": rank * row, "unsliced_mb": sup.valid.numel() * row}


# ---------------------------------------------------------------------------------------------------------------------
# Attention, capture, a training step


def attention_step(args, form: str):
    """Forward and backward of one attention layer of the recipe, with training's visibility or the same as one mask."""
    torch.manual_seed(0)
    kind, _, blocks = form.partition("@")
    layer, K, S = Attention(DSparkConfig.from_recipe(DEFAULT), 0).to(DEVICE), args.block_size, args.length
    anchors, keep = dspark.sample_anchors(torch.ones(1, S, device=DEVICE), int(blocks))
    rows = anchors.shape[1] * K
    x, context = (torch.randn(1, n, DEFAULT.hidden_size, device=DEVICE, requires_grad=True) for n in (rows, S))
    positions = (anchors[..., None] + torch.arange(K, device=DEVICE)).flatten(1)
    rope, context_rope = (rope_tables(at, DEFAULT.head_dim, DEFAULT.rope_theta, x.dtype)
                          for at in (positions, torch.arange(S, device=DEVICE)))

    def step():
        visible = Visibility(anchors, keep, S, K)
        if kind == "dense":
            block = torch.arange(rows, device=DEVICE) // K
            seen = torch.arange(S, device=DEVICE) < anchors[0].repeat_interleave(K)[:, None]
            visible = [(S, torch.cat((seen, block[:, None] == block), 1))]                    # [rows, S + rows]
        layer(x, rope, layer.keys_values(context, context_rope), visible).sum().backward()
    return step


@functools.cache
def loaded(folder: str = ""):
    """(recipe, its target) of a checkpoint, or the default ones."""
    recipe = load_recipe(Path(folder) / "recipe.json") if folder else DEFAULT
    return recipe, load_target(recipe, DEVICE)


def capture_step(args, form: str):
    """Captures a micro-batch of the default recipe, by hooks or as a transformers user would."""
    _, target = loaded()
    ids = torch.randint(1000, (DEFAULT.micro_batch, args.length), device=DEVICE)

    @torch.no_grad()
    def step():
        if form == "capture":
            target.capture(ids)
        else:
            out = target.model(ids, output_hidden_states=True, use_cache=False)
            torch.cat([out.hidden_states[i + 1] for i in target.layer_ids], -1)
        return {"tokens": ids.numel()}
    return step


def training_step(args, form: str):
    """One optimizer step of the default recipe on random tokens, sharded as in training: a micro-batch and its capture,
    phase by phase, or for `scaling` a captured sample in each process."""
    alone, world, (_, target) = form == "step", start_world(), loaded()
    if not alone:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    draft = DSparkDraft(DSparkConfig.from_recipe(DEFAULT)).configure_objective(DEFAULT).to(DEVICE)
    shard(draft.attach(target.embed_tokens, target.lm_head), world, torch.float32)
    optimizers = make_optimizers(draft, DEFAULT)
    ids = torch.randint(DEFAULT.vocab_size, (DEFAULT.micro_batch if alone else 1, args.length), device=DEVICE)
    captured = target.capture(ids)

    def step():
        clock = Clock()
        states = target.capture(ids) if alone else captured
        clock.lap("capture")
        loss, _ = draft(ids, states.context, torch.ones_like(ids), states.final)
        clock.lap("forward")
        loss.backward()
        clock.lap("backward")
        for optimizer in optimizers:
            optimizer.step()
        draft.zero_grad()
        clock.lap("optimizer")
        phases = clock.seconds | {"step": sum(clock.seconds.values())}
        return {f"{phase}_samples_per_s": len(ids) / seconds for phase, seconds in phases.items()} if alone else {}
    return step


# ---------------------------------------------------------------------------------------------------------------------
# Decoding


def prompts_for(recipe, count: int) -> list[torch.Tensor]:
    """Held-out prompts [1, S], as an evaluation asks them."""
    from transformers import AutoTokenizer

    from data_glm import TEST_SEED, encode_prompt, gsm_symbolic
    tokenizer = AutoTokenizer.from_pretrained(target_path(recipe))
    return [encode_prompt(text, tokenizer, recipe.chat_family).to(DEVICE) for text in gsm_symbolic(TEST_SEED, count)]


@functools.cache
def model_of(home: Path, dtype: torch.dtype, plain: bool):
    """The target as transformers has it, or with our attention and packed weights."""
    from transformers import AutoModelForCausalLM
    if plain:
        return AutoModelForCausalLM.from_pretrained(home, dtype=dtype).to(DEVICE).eval()
    return load_model(home, dtype, DEVICE)


def cut(generated: list[int], stops: set[int]) -> list[int]:
    """Up to and including the first stop token."""
    return generated[:next((n for n, token in enumerate(generated, 1) if token in stops), len(generated))]


def plain_decode(model, draft, ids: torch.Tensor, max_new_tokens: int, stops: set[int], clock: Clock):
    """The protocol of decode.py at temperature 0 the way one writes it first: caches that grow by concatenation, all
    hidden states and logits of every layer and token, one-hot distributions, tensors made in every step. Returns
    (generated ids, accept lengths)."""
    from transformers import DynamicCache
    c, prompt, cache, lengths = draft.config, ids.shape[1], DynamicCache(config=model.config), []
    stored = [(torch.empty(1, c.num_key_value_heads, 0, c.head_dim, device=DEVICE),) * 2 for _ in draft.layers]

    def one_hot(logits):
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()

    def forward(new):
        out = model(input_ids=new, past_key_values=cache, use_cache=True, output_hidden_states=True)
        return out.logits[0], torch.cat([out.hidden_states[i + 1] for i in c.target_layer_ids], -1)

    def rope(first: int, n: int):
        return rope_tables(torch.arange(first, first + n, device=DEVICE)[None], c.head_dim, c.rope_theta, torch.float32)

    logits, captured = forward(ids)
    ids, stopped = torch.cat((ids, torch.multinomial(one_hot(logits[-1:]), 1)), 1), False
    clock.lap("prefill")
    while not stopped and int(ids[0, -1]) not in stops and (start := ids.shape[1] - 1) - prompt < max_new_tokens:
        context, n = draft.context(captured), captured.shape[1]
        x = draft.embed(draft.block_rows(ids, torch.tensor([[start]], device=DEVICE))[:, 0])
        for i, layer in enumerate(draft.layers):
            new = layer.self_attn.keys_values(context, rope(start - n, n))
            stored[i] = tuple(torch.cat(pair, 2) for pair in zip(stored[i], new, strict=True))
            x = layer(x, rope(start, c.block_size), stored[i], None, [(start, None)])
        hidden = draft.norm(x)
        base = draft.lm_head(hidden)[0]
        clock.lap("draft")
        tokens, p, state = [ids[0, -1:]], [], None
        for t in range(c.block_size):
            row, state = draft.corrected(base[t:t + 1], hidden[:, t], tokens[-1], state)
            p.append(one_hot(row))
            tokens.append(torch.multinomial(p[-1], 1)[0])
        clock.lap("walk")
        drafted = torch.stack(tokens[1:], 1)                                                  # [1, K]
        logits, captured = forward(torch.cat((ids[:, -1:], drafted), 1))
        clock.lap("verify")
        accepted, stopped, last = accept(Proposal(drafted, torch.cat(p)), one_hot(logits), stops)
        lengths.append(accepted + (not stopped))
        ids = torch.cat((ids, drafted[:, :accepted], last[None, :1 - stopped]), 1)
        captured = captured[:, :lengths[-1]]
        cache.crop(start + lengths[-1] - cache.get_seq_length())         # negative: how many to drop
        clock.lap("bookkeeping")
    return cut(ids[0, prompt:prompt + max_new_tokens].tolist(), stops), lengths


def eval_step(args, form: str):
    """Greedy speculative decoding of a few prompts by the checkpoint --draft, with its target."""
    recipe, target = loaded(args.draft)
    prompts, stops = prompts_for(recipe, args.prompts), set(recipe.stop_token_ids)
    draft = DSparkDraft.from_pretrained(args.draft, device=DEVICE)
    if form == "plain":
        model = model_of(target_path(recipe), target.dtype, plain=True)
        draft.attach(model.get_input_embeddings(), model.get_output_embeddings())

    @torch.inference_mode()
    def step():
        clock = Clock()
        if form == "plain":
            outputs = [plain_decode(model, draft, ids, args.new, stops, clock) for ids in prompts]
        else:
            traces = dict(decode(target, draft, prompts, max_new_tokens=args.new, temperature=0.0, clock=clock,
                                 stop_token_ids=list(stops), slots=int(form.partition("@")[2])))
            outputs = [(traces[i].output_ids[ids.shape[1]:], traces[i].acceptance_lengths)
                       for i, ids in enumerate(prompts)]
        proposals = sum(len(lengths) for _, lengths in outputs)
        return {"tokens": sum(len(new) for new, _ in outputs), "proposals": proposals, "outputs": outputs} | {
            f"{phase}_ms_per_proposal": 1000 * seconds / proposals for phase, seconds in clock.seconds.items()}
    return step


def generate_step(args, form: str):
    """Greedy answers to the same prompts: by `generate` of transformers in padded batches of 32, or by ours with as
    many slots."""
    from transformers import AutoTokenizer

    from regen import generate
    home, stops, batch = target_path(DEFAULT), list(DEFAULT.stop_token_ids), 32
    prompts = [ids[0].tolist() for ids in prompts_for(DEFAULT, args.prompts)]
    dtype = getattr(torch, DEFAULT.dtype) if DEVICE.type == "cuda" else torch.float32
    model, tokenizer = model_of(home, dtype, form != "ours"), AutoTokenizer.from_pretrained(home, padding_side="left")

    @torch.inference_mode()
    def step():
        if form == "ours":
            zeros = [0] * len(prompts)
            answers = {i: ids for i, ids, _ in generate(model, prompts, args.new, zeros, zeros, stops, batch)}
            outputs = [answers[i] for i in range(len(prompts))]
        else:
            outputs = []
            for first in range(0, len(prompts), batch):
                rows = tokenizer.pad({"input_ids": prompts[first:first + batch]}, return_tensors="pt").to(DEVICE)
                new = model.generate(**rows, max_new_tokens=args.new, do_sample=False, eos_token_id=stops,
                                     pad_token_id=stops[0])[:, rows["input_ids"].shape[1]:].tolist()
                outputs += [cut(row, set(stops)) for row in new]
        return {"tokens": sum(map(len, outputs)), "outputs": outputs}
    return step


# ---------------------------------------------------------------------------------------------------------------------
# The command line

BENCHES = {                                      # what makes a run, and the forms; ratios are to the first (attention:
                                                 # to the same form with 64 blocks)
    "objective": (objective_step, ["full", "recompute", "chunked"]),
    "attention": (attention_step, [f"{form}@{blocks}" for blocks in (64, 128, 256, 512)
                                   for form in ("dense", "grouped")]),
    "capture": (capture_step, ["all+logits", "capture"]),
    "step": (training_step, ["step"]),
    "scaling": (training_step, ["1", "2", "4"]),
    "generate": (generate_step, ["transformers", "ours"]),
    "eval": (eval_step, ["plain", "ours@1", "ours@8"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=BENCHES)
    parser.add_argument("--dry", action="store_true", help="objective: only compute the memory of its buffers")
    parser.add_argument("--blocks", type=int, default=64, help="anchors of the sequence")
    parser.add_argument("--length", type=int, help="tokens of the sequence (attention 1000, others 250)")
    parser.add_argument("--vocab", type=int, default=DEFAULT.vocab_size)
    parser.add_argument("--hidden", type=int, default=DEFAULT.hidden_size)
    parser.add_argument("--rank", type=int, default=DEFAULT.markov_rank)
    parser.add_argument("--block-size", type=int, default=DEFAULT.block_size)
    parser.add_argument("--head", choices=("vanilla", "gated", "rnn", "none"), default="vanilla")
    parser.add_argument("--runs", type=int, default=3, help="of every form, each in a fresh process")
    parser.add_argument("--draft", default="out/smollm2/latest", help="eval: the checkpoint")
    parser.add_argument("--prompts", type=int, default=8, help="eval, generate: how many")
    parser.add_argument("--new", type=int, default=64, help="eval, generate: tokens per prompt")
    parser.add_argument("--threads", type=int, help="1 and the processor seconds tell forms apart on a busy machine")
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--form", help=argparse.SUPPRESS)    # set in the processes that this one starts
    args = parser.parse_args()
    if args.dry and args.what != "objective":
        parser.error("--dry is for objective only: the others have no formula")
    args.length = args.length or (1000 if args.what == "attention" else 250)
    if args.threads:
        torch.set_num_threads(args.threads)
    make, forms = BENCHES[args.what]
    if args.form:
        found = measure(functools.partial(make, form=args.form), args)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found))
        end_world()
        return
    ratios: dict[str, dict] = {}
    if args.dry:
        result = {device: vocabulary_memory(args, device) for device in ("cuda", "cpu")}
    else:
        result = in_processes(args, forms)
        for form, r in result.items():
            base = result[form.partition("@")[0] + "@64" if args.what == "attention" else forms[0]]
            ratios[form] = {key: r[key] / base[key] if base[key] else math.nan for key in r}
    show(result, ratios)
    if args.json:
        result |= {"ratios": ratios, "machine": machine()}
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
