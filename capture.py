"""The frozen target: its hidden states for training, its cached sessions for evaluation.

`capture` runs whole samples and hands out what a draft trains on: the concatenated outputs of k chosen layers (the
context) and the post-norm final state (what lm_head reads). `session` keeps the keys and values of committed tokens,
so that a verification step computes only the new ones.

The layer-id convention, stated once: id i is the *output* of decoder layer i, which Hugging Face stores at
hidden_states[i + 1]; -1 is the embedding output; the last decoder layer is forbidden, because hidden_states[-1] holds
its output after the final norm and engines disagree about it. Ids are strictly increasing. Read next: train.py (who
captures and when it drains), eval_deepspec.py (sessions at work).
"""
import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipe import get_recipe
from targets import decoder_of, load_model, plain_errors, target_path


@dataclass(frozen=True)
class Captured:
    """What the target hands out for a batch; padding rows are zero and never read."""
    context: Tensor                              # [B, S, k*H] the requested layers, concatenated in order
    final: Tensor                                # [B, S, H] post-norm final state


def check_layer_ids(layer_ids, num_layers: int) -> tuple[int, ...]:
    """The one rule about layer ids (see the top of this file). Raises ValueError naming the offending id and the mend.
    """
    ids = tuple(int(i) for i in layer_ids)
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < -1:
        raise ValueError(f"target_layer_ids {list(ids)} must be strictly increasing, without repeats, and at least -1")
    if ids[-1] >= num_layers - 1:
        raise ValueError(f"target_layer_ids {list(ids)} reach layer {ids[-1]} of a target with {num_layers} layers; "
                         f"the largest usable id is {num_layers - 2}: the last layer is never captured raw")
    return ids


class Target:
    """What a frozen target offers, whoever runs it. A subclass brings `_whole` (the states of whole samples), `_fits`
    (which samples one forward takes together), `plain` and `session`."""

    def __init__(self, layer_ids, config, embed_tokens: nn.Module, lm_head: nn.Linear, generation_config):
        self.layer_ids = check_layer_ids(layer_ids, config.num_hidden_layers)
        self.num_layers, self.hidden_size = config.num_hidden_layers, config.hidden_size
        self.embed_tokens, self.lm_head, self.generation_config = embed_tokens, lm_head, generation_config
        self.vocab_size = embed_tokens.weight.shape[0]
        self.device, self.dtype = embed_tokens.weight.device, embed_tokens.weight.dtype

    def capture(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Captured:
        """input_ids [B, S], right-padded; attention_mask [B, S]. No padding is computed."""
        B, S = input_ids.shape
        lengths = [S] * B if attention_mask is None else [int(n) for n in attention_mask.sum(1)]
        context = torch.zeros(B, S, len(self.layer_ids) * self.hidden_size, dtype=self.dtype, device=self.device)
        final = torch.zeros(B, S, self.hidden_size, dtype=self.dtype, device=self.device)
        rows = [b for b in range(B) if lengths[b]]
        while rows:
            part = [rows.pop(0)]
            while rows and self._fits([lengths[b] for b in (*part, rows[0])]):
                part.append(rows.pop(0))
            states, n = self._whole([input_ids[b:b + 1, :lengths[b]] for b in part]), [lengths[b] for b in part]
            for b, c, f in zip(part, states.context[0].split(n), states.final[0].split(n), strict=True):
                context[b, :len(c)], final[b, :len(f)] = c, f
        return Captured(context, final)

    def drain(self) -> None:
        """Wait for all device work; nothing to wait for on a CPU. The training loop calls it twice per micro-step.

        An engine resets its pools on streams of its own. Work of its capture that is still queued when the draft's
        forward launches FSDP's all-gathers races these, and what the forward leaves queued races those of backward:
        either way some ranks never launch a collective that the others wait in.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Session(contextlib.AbstractContextManager):
    """Growing sequences with cached keys and values, one or (slots > 1) many at once.

    A session of one slot is one sequence. One of many slots is empty at first: `admit` adds a sequence as the last
    row, `drop` takes one out (the last row moves to its place), `extend` and `rollback` work on all rows.
    """

    def __exit__(self, *exc) -> None:
        self.close()


class HFTarget(Target):
    """Any transformers causal LM, read through forward hooks: no layer but the requested ones is kept, no logits are
    made."""

    def __init__(self, model: nn.Module, layer_ids):
        self.model = model.eval().requires_grad_(False)
        self.decoder = decoder_of(model)
        if not hasattr(self.decoder, "layers"):
            raise ValueError(f"{type(model).__name__} has no stack of decoder layers that this version can find")
        super().__init__(layer_ids, model.config.get_text_config(), model.get_input_embeddings(),
                         model.get_output_embeddings(), model.generation_config)

    @classmethod
    def from_pretrained(cls, path: str | Path, layer_ids, dtype: torch.dtype | None = None, device="cpu") -> "HFTarget":
        """Load from a folder or hub name. dtype None: float32 on a CPU (bf16 is slower there), the file's own
        elsewhere."""
        from transformers.utils import is_flash_attn_2_available

        cuda = torch.device(device).type == "cuda"
        attention = ("flash_attention_2" if is_flash_attn_2_available() else "sdpa") if cuda else None
        return cls(load_model(path, dtype or ("auto" if cuda else torch.float32), device, attention), layer_ids)

    @torch.no_grad()
    def _run(self, ids: Tensor, **cached) -> Captured:
        """The decoder without its head on ids [1, n]. A layer's output is what goes into the next one."""
        seen = []

        def keep(module, args, kwargs):
            seen.append(args[0] if args else kwargs["hidden_states"])

        hooks = [self.decoder.layers[i + 1].register_forward_pre_hook(keep, with_kwargs=True) for i in self.layer_ids]
        try:
            final = self.decoder(input_ids=ids.to(self.device), use_cache=bool(cached), **cached).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return Captured(torch.cat(seen, -1), final)

    def _fits(self, lengths: list[int]) -> bool:
        """One by one: a sample's states do not depend, to the bit, on what it is batched with."""
        return False

    def _whole(self, samples: list[Tensor]) -> Captured:
        return self._run(*samples)

    @torch.no_grad()
    def plain(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """For `probe`: what the target computes by itself, capture off, on ids [1, S]: final [S, H], and the logits
        [V] behind the last token."""
        ids = input_ids.to(self.device)
        return (self.decoder(input_ids=ids, use_cache=False).last_hidden_state[0],
                self.model(ids, use_cache=False).logits[0, -1])

    def session(self, slots: int = 1) -> "HFSession":
        return HFSession(self, slots)


class HFSession(Session):
    """Keys and values in memory that is allocated once and doubled when it is full (kvcache.py)."""

    def __init__(self, target: HFTarget, slots: int):
        from kvcache import SlotCache, register_attention
        if slots > 1:                            # rows of different lengths need our own masks
            if target.model.config._attn_implementation == "eager":
                raise ValueError("this target brings an attention of its own, which runs one sequence at a time: "
                                 "decode it with a batch size of 1")
            target.model.set_attn_implementation(register_attention())
        self.target = target
        self.cache = SlotCache(target.num_layers, slots, 512, target.device)
        self.cache.use(0, slots if slots == 1 else 0)

    @property
    def length(self) -> int:
        return self.cache.longest

    def extend(self, ids: Tensor) -> Captured:
        """Append ids [B, n] to the B rows; returns the states of the new tokens only."""
        n = ids.shape[1]
        self.cache = self.cache.with_room(n)
        captured = self.target._run(ids, position_ids=self.cache.positions(n), past_key_values=self.cache)
        self.cache.advance(n)
        return captured

    def admit(self, ids: Tensor) -> Captured:
        """A new row that begins with ids [1, n]."""
        row = self.cache.new_row()
        captured = self.extend(ids)
        self.cache.use(0, row + 1)
        return captured

    def drop(self, row: int) -> None:
        self.cache.drop_row(row)

    def rollback(self, length: int | list[int]) -> None:
        """Forget everything from absolute position `length` on (of every row, or a list of one for each)."""
        rows = range(self.cache.first, self.cache.last)
        for row, keep in zip(rows, [length] * len(rows) if isinstance(length, int) else length, strict=True):
            self.cache.truncate(keep, row)

    def close(self) -> None:
        self.cache = None


def applied_head(head: nn.Linear, recipe) -> nn.Linear:
    """lm_head as the target applies it: the recipe's head_scale folded into the weight (muP), and a bias that no logit
    outweighs on ids from output_vocab_size on, the padding. The head itself where there is neither."""
    end = recipe.output_vocab_size or head.weight.shape[0]
    if recipe.head_scale == 1 and end >= head.weight.shape[0]:
        return head
    applied = nn.Linear(*head.weight.shape[::-1], device="meta").requires_grad_(False)
    applied.weight = nn.Parameter((head.weight.float() * recipe.head_scale).to(head.weight.dtype), requires_grad=False)
    bias = head.weight.new_zeros(len(head.weight)) if head.bias is None else head.bias.detach() * recipe.head_scale
    bias[end:] = -1e30                           # finite: bf16 holds it, and its softmax is 0 all the same
    applied.bias = nn.Parameter(bias, requires_grad=False)
    return applied


class TargetEmbedding(nn.Embedding):
    """A table whose rows pass through what the target's own embedding module does to them: a norm, a factor."""
    scale, norm, eps = 1.0, None, 0.0

    def forward(self, ids: Tensor) -> Tensor:
        rows = super().forward(ids)
        if self.norm is not None:
            rows = nn.functional.rms_norm(rows, rows.shape[-1:], self.norm, self.eps)
        return rows if self.scale == 1 else rows * torch.tensor(self.scale, dtype=rows.dtype)


class TargetEmbeddingsAndHead:
    """The two tensors that a draft borrows from its target, read alone by key: an engine holds the rest, in shards.

    embed_tokens, lm_head: frozen modules over tables [V, H]; one table when the keys are equal or config.json ties
    them. embed_norm_key (of the norm's weight; its eps is the config's) and embed_scale: what the target's embedding
    module does to a row. rows: allocate so many, zeros behind what the file holds (vocabularies that engines pad); 0:
    what it holds.
    Raises ValueError when a key is missing, naming the ones that could be meant.
    """

    def __init__(self, path: str | Path, dtype: torch.dtype, device="cpu", *,
                 embed_key: str = "model.embed_tokens.weight", head_key: str = "lm_head.weight",
                 embed_scale: float = 1.0, embed_norm_key: str = "", rows: int = 0):
        def read(key: str, rows: int = rows) -> Tensor:
            weight = read_tensor(Path(path), key)
            if not weight.is_floating_point() or weight.element_size() < 2:
                raise ValueError(f"{key} in {path} is stored as {weight.dtype}; embedding and head must not be "
                                 "quantised")
            missing = weight.new_zeros(max(0, rows - len(weight)), *weight.shape[1:])
            return torch.cat((weight, missing)).to(device, dtype) if len(missing) else weight.to(device, dtype)

        config = json.loads((Path(path) / "config.json").read_text())
        tied = config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False))
        table = read(embed_key)
        head = table if tied or head_key == embed_key else read(head_key)
        if head.shape != table.shape:
            raise ValueError(f"{embed_key} and {head_key} in {path} have shapes {tuple(table.shape)} and "
                             f"{tuple(head.shape)}; they must be equal")
        self.embed_tokens = TargetEmbedding.from_pretrained(table)
        self.embed_tokens.scale = embed_scale
        if embed_norm_key:
            self.embed_tokens.norm = read(embed_norm_key, 0)
            self.embed_tokens.eps = config.get("text_config", config)["rms_norm_eps"]
        self.lm_head = nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(head, requires_grad=False)


def table_options(recipe) -> dict:
    """How TargetEmbeddingsAndHead reads the tables of a recipe's target."""
    return {"embed_key": recipe.embed_key, "head_key": recipe.head_key, "embed_scale": recipe.embed_scale,
            "embed_norm_key": recipe.embed_norm_key,
            "rows": recipe.vocab_size if recipe.output_vocab_size else 0}


def read_tensor(folder: Path, key: str) -> Tensor:
    """One tensor of a safetensors checkpoint. ValueError naming the likely ones when there is none of that name."""
    from safetensors import safe_open
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        file_of = json.loads(index.read_text())["weight_map"]
    else:
        file_of = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as content:
                file_of |= dict.fromkeys(content.keys(), file.name)
    if key not in file_of:
        likely = [name for name in file_of if any(part in name for part in ("emb", "head", "wte"))]
        raise ValueError(f"{folder} has no tensor {key!r}; of its {len(file_of)} tensors these could be meant: "
                         f"{', '.join(likely) or 'none'}; set embed_key and head_key in the recipe (the same key twice "
                         "when they are tied)")
    with safe_open(folder / file_of[key], "pt") as content:
        return content.get_tensor(key)


def load_target(recipe, device="cpu", path: str | Path | None = None):
    """The recipe's target on the recipe's engine, checked against the recipe before any compute.

    With SGLang this is a collective of a node's ranks, over which the target is spread.
    """
    dtype = getattr(torch, recipe.dtype) if torch.device(device).type == "cuda" else torch.float32
    path, options = path or target_path(recipe), {"dtype": dtype, "device": device}
    if recipe.engine == "transformers":
        target = HFTarget.from_pretrained(path, recipe.target_layer_ids, **options)
    elif recipe.engine == "sglang":
        from sglang_target import SGLangTarget
        target = SGLangTarget.from_pretrained(path, recipe.target_layer_ids, heads=table_options(recipe), **options,
                                              **recipe.engine_args)
    else:
        raise ValueError(f"recipe {recipe.name} asks for engine {recipe.engine!r}; there are 'transformers' and "
                         "'sglang'")
    if target.vocab_size != recipe.vocab_size:       # layers and width: target_path
        raise ValueError(f"recipe {recipe.name} says {recipe.vocab_size} embedding rows, the target has "
                         f"{target.vocab_size}; correct recipe.py")
    target.lm_head = applied_head(target.lm_head, recipe)
    return target


@torch.no_grad()
def bigram_markov_init(lm_head: nn.Linear, samples, rank: int) -> tuple[Tensor, Tensor]:
    """Markov factors (w1 [V, r], w2 [V, r]) that start a draft as the target's own bigram model on its corpus.

    samples: pairs (input_ids [n], final [n, H]). With f_v the mean final state behind token v and f the mean over all
    tokens, w2 w1[v] is the best rank-r approximation, weighted by counts, of the logits lm_head (f_v - f). The metric
    of lm_head comes from its Gram matrix, so nothing of size V x V is made; tokens that never occur get a zero row.
    """
    weight = lm_head.weight.double()                                                          # [V, H]
    V, H = weight.shape
    sums, counts = torch.zeros(V, H, dtype=torch.float64), torch.zeros(V, dtype=torch.float64)
    for ids, final in samples:
        sums.index_add_(0, ids.long().cpu(), final.double().cpu())
        counts.index_add_(0, ids.long().cpu(), torch.ones(len(ids), dtype=torch.float64))
    seen = counts > 0
    mean = sums.sum(0) / counts.sum()
    states = sums[seen] / counts[seen, None] - mean                                           # [v, H]
    states *= (counts[seen] / (counts[seen] + 2))[:, None]       # rare tokens lean to the mean
    root = torch.linalg.cholesky(weight.T @ weight + 1e-6 * torch.eye(H, dtype=torch.float64))
    _, strength, directions = torch.linalg.svd(counts[seen, None].sqrt() * (states @ root), full_matrices=False)
    basis = directions[:rank].T                                                               # [H, r], orthonormal
    w1 = torch.zeros(V, rank, dtype=torch.float64)
    w1[seen] = states @ root @ basis
    w2 = weight @ torch.linalg.solve_triangular(root.T, basis, upper=True)                    # W root^-T basis
    scale = (w1[seen].square().mean() / w2.square().mean()) ** 0.25                           # equal sizes
    return (w1 / scale).float(), (w2 * scale).float()


# ---------------------------------------------------------------------------------------------------------------------
# python capture.py probe


PROBE_TEXTS = ("A farmer has 12 hens. Each lays 5 eggs a week. How many eggs are there after 3 weeks?",
               "Write a Python function that returns the n-th Fibonacci number.", "Why is the sky blue?")
PROBE_TOKENS = 48                                # of the target's own answer behind each text
TOLERANCE = 0.05                                 # of a state's RMS


def rms(x: Tensor) -> Tensor:
    """Of every row: [..., n] -> [...]."""
    return x.double().square().mean(-1).sqrt()


def apart(a: Tensor, b: Tensor) -> float:
    """How far a is from b, relative to b, on average over rows: one bound serves fp32, bf16 and quantised targets, and
    a first token a thousand times larger than the others hides none of them."""
    return float((rms(a.double() - b.double()) / rms(b).clamp(min=1e-30)).mean())


@torch.no_grad()
def own_answer(target, ids: list[int], num_tokens: int, seed: int) -> list[int]:
    """ids and the target's answer to them at temperature 1."""
    generator = torch.Generator().manual_seed(seed)
    with target.session() as session:
        new = ids
        for _ in range(num_tokens):
            logits = target.lm_head(session.extend(torch.tensor([new], device=target.device)).final[0, -1])
            new = torch.multinomial(torch.softmax(logits.float().cpu(), -1), 1, generator=generator).tolist()
            ids = ids + new
    return ids


@torch.no_grad()
def probe(target, reference: nn.Module | None, prompts: list[list[int]]) -> list[str]:
    """Whether `target` captures what it should: prints a table and a line per check, returns the failed checks' names.

    reference: the same checkpoint as a transformers model, read without hooks; None leaves out what compares with it.
    prompts: token ids. Read the measured values, too: a check that passes narrowly is worth a look.
    """
    k, H, failed = len(target.layer_ids), target.hidden_size, []

    def check(name: str, value, ok: bool, meaning: str) -> None:
        shown = f"{value:.2g}" if isinstance(value, float) else str(value)
        print(f"{'ok    ' if ok else 'FAILED'} {name:<12} {shown:<28} {meaning}")
        if not ok:
            failed.append(name)

    def streams(captured: Captured) -> list[Tensor]:
        return [*captured.context[0].split(H, -1), captured.final[0]]                         # k + 1 of [n, H]

    samples = [own_answer(target, ids, PROBE_TOKENS, seed) for seed, ids in enumerate(prompts)]
    rows = [*samples, samples[0][:len(samples[0]) // 2]]                                      # a batch of four
    tensors = [torch.tensor(ids, device=target.device) for ids in rows]
    input_ids, mask = (nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (
        tensors, [torch.ones_like(ids) for ids in tensors]))
    batch = target.capture(input_ids, mask)
    together = [Captured(batch.context[b:b + 1, :len(ids)], batch.final[b:b + 1, :len(ids)])
                for b, ids in enumerate(rows)]
    alone = [target.capture(ids[None]) for ids in tensors]
    widths = (batch.context.shape[-1], batch.final.shape[-1])
    check("widths", str(widths), widths == (k * H, H), f"{k} layers and the final state of {H} channels each")
    if failed:
        return failed

    one = [torch.cat([streams(c)[i] for c in alone]) for i in range(k + 1)]                   # [tokens, H] per stream
    four = [torch.cat([streams(c)[i] for c in together]) for i in range(k + 1)]
    names = [*map(str, target.layer_ids), "final"]
    cosine = [float(nn.functional.cosine_similarity(x.float(), one[-1].float(), dim=-1).mean()) for x in one]
    nearest, error = names, [float("nan")] * (k + 1)
    if reference is not None:
        hidden = [reference(ids[None], output_hidden_states=True, use_cache=False, logits_to_keep=1).hidden_states
                  for ids in tensors]
        truth = [torch.cat([h[i][0] for h in hidden]) for i in range(len(hidden[0]))]         # embedding, layer 0, ...
        far = [[apart(x, t) for t in truth] for x in one]
        error = [f[i + 1] for f, i in zip(far, (*target.layer_ids, len(truth) - 2), strict=True)]
        nearest = ["final" if (i := f.index(min(f))) == len(f) - 1 else str(i - 1) for f in far]
    print(f"{'stream':>8}{'RMS':>12}{'difference':>12}{'nearest':>9}{'cosine to final':>17}")
    for name, x, e, near, c in zip(names, one, error, nearest, cosine, strict=True):
        print(f"{name:>8}{float(rms(x).mean()):>12.4g}{e:>12.2e}{near:>9}{c:>17.3f}")

    if reference is not None:
        check("layers", max(error), max(error) <= TOLERANCE, "worst difference from transformers, relative to the RMS")
        check("offset", ",".join(nearest), nearest == names, "the layer of transformers that each stream is nearest to")
    pairs = [apart(one[i], one[j]) for i in range(k + 1) for j in range(i)]
    check("distinct", min(pairs), min(pairs) > 1e-3, "closest pair of streams; 0 is one buffer handed out twice")
    worst = max(apart(a, b) for a, b in zip(four, one, strict=True))
    check("batch", worst, worst <= TOLERANCE, "samples in a batch of 4 against the same ones alone")
    finals, logits = zip(*(target.plain(ids[None]) for ids in tensors), strict=True)
    worst = apart(one[-1], torch.cat(finals))
    check("capture off", worst, worst <= TOLERANCE, "the final state with capture and without")
    ours, theirs = torch.stack([target.lm_head(c.final[0, -1]) for c in alone]).float(), torch.stack(logits).float()
    real = ours[0] > -1e29                               # ids that can come out of the target: padding cannot
    ours, theirs = ours[:, real], theirs[:, real]
    regret = (ours.amax(-1) - ours.gather(1, theirs.argmax(-1, keepdim=True))[:, 0]) / rms(ours)
    check("next token", float(regret.max()), float(regret.max()) <= TOLERANCE,
          "how much lm_head(final) prefers another token than the target")
    worst = apart(ours, theirs)
    check("logits", worst, worst <= TOLERANCE, "lm_head(final) against the target's own logits")
    check("depth", f"{cosine[0]:.3f}..{cosine[-2]:.3f}", k == 1 or cosine[-2] > cosine[0],
          "the deepest stream is nearer to the final state than the shallowest")
    for name, captured in (("shift", alone), ("shift of 4", together)):
        hits = {d: [] for d in (-1, 0, 1, 2)}
        for ids, start, c in zip(samples, map(len, prompts), captured, strict=False):         # on their own answers
            best = target.lm_head(c.final[0]).argmax(-1).tolist()
            for d, found in hits.items():
                found += [best[t] == ids[t + d] for t in range(start, len(ids) - 2)]
        rate = {d: sum(found) / len(found) for d, found in hits.items()}
        check(name, " ".join(f"{d:+d}:{r:.2f}" for d, r in rate.items()),
              rate[1] > 0.2 + max(r for d, r in rate.items() if d != 1), "argmax meets the recorded token at +1 only")
    return failed


def main() -> None:
    """python capture.py probe [recipe] [--alone]; --alone: no transformers model to compare with, for what only an
    engine can hold."""
    from transformers import AutoTokenizer

    from data_glm import encode_prompt
    from ranks import first_here_then_others, start_world
    names = [name for name in sys.argv[2:] if name != "--alone"]
    if sys.argv[1:2] != ["probe"] or len(names) > 1:
        raise SystemExit("usage: python capture.py probe [recipe] [--alone]")
    recipe, world = get_recipe(*names), start_world()
    with plain_errors(ValueError):
        path = first_here_then_others(world, lambda: target_path(recipe))
        target, tokenizer = load_target(recipe, world.device, path), AutoTokenizer.from_pretrained(path)
    reference = None
    if "--alone" not in sys.argv:
        reference = getattr(target, "model", None) or load_model(path, target.dtype, world.device)
    prompts = [encode_prompt(text, tokenizer, recipe.chat_family)[0].tolist() for text in PROBE_TEXTS]
    print(f"{recipe.name} on {recipe.engine}, {str(target.dtype)[6:]}; {len(prompts)} prompts, each followed by "
          f"{PROBE_TOKENS} tokens of the target's own answer")
    failed = probe(target, reference, prompts)
    dist.destroy_process_group()
    if failed:
        raise SystemExit(f"probe failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
