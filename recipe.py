"""Every number of a run, as constants.

A `Recipe` is one frozen dataclass. Its defaults are the published DeepSpec values for DSpark; an instance per target
overrides only what that target dictates, and the CPU recipes say beside each shrunk value why it is smaller. Nothing
here is read from the environment: fork the file and edit it. `torchrun train.py` runs DEFAULT, `torchrun train.py
qwen3-8b` another one. Read next: dspark.py (the draft and its objective), then train.py (the loop).
"""
import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Recipe:
    """One run. Lengths are in tokens, batches in samples, steps are optimizer steps."""
    name: str

    # The target: what the checkpoint dictates.
    target: str                                  # Hugging Face name or folder; targets.py knows where it comes from
    num_target_layers: int
    target_layer_ids: tuple[int, ...]            # i = output of decoder layer i (capture.py states the convention)
    hidden_size: int
    num_attention_heads: int                     # draft geometry; follows the target's unless stated
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int                              # rows of the target's embedding, padding included
    mask_token_id: int                           # a row of the embedding that the tokenizer never produces
    stop_token_ids: tuple[int, ...] = ()         # empty: the target's generation config knows them
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40_960
    output_vocab_size: int = 0                   # ids from here on never come out of the target; 0: vocab_size
    head_scale: float = 1.0                      # muP: the target multiplies its logits by this; folded into the head
    embed_scale: float = 1.0                     # what its embedding module multiplies by, where only the table is read
    embed_norm_key: str = ""                     # the norm that its embedding module applies, likewise
    embed_key: str = "model.embed_tokens.weight"  # the two tensors of its checkpoint that the draft borrows
    head_key: str = "lm_head.weight"             # the embedding's when the two are tied
    engine: str = "transformers"                 # who runs the target: "transformers" or "sglang"
    engine_args: dict = dataclasses.field(default_factory=dict)   # for the engine, under its own names
    dtype: str = "bfloat16"                      # compute dtype on CUDA; CPUs always compute in float32

    # The draft.
    draft: str = "dspark"                        # dspark, dflash or dflash2
    block_size: int = 7
    num_draft_layers: int = 5
    markov_rank: int = 256                       # 0: no Markov head
    markov_head_type: str = "vanilla"            # vanilla, gated or rnn
    markov_init: str = "random"                  # "bigram": start from the target's own bigrams (train.py, CPU recipes)
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    conv_kernel_size: int = 2                    # DFlash2: taps of the convolutions
    conv_group_size: int = 16                    # channels that share a dynamic kernel
    selector_rank: int = 256
    selector_top_k: int = 16                     # candidates per slot

    # The objective.
    num_anchors: int = 512                       # blocks per sample
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    loss_decay_gamma: float = 4.0                # weight of slot t is exp(-t / gamma)
    selector_loss_weight: float = 1.0            # DFlash2

    # The optimizer.
    optimizer: str = "adamw"                     # "muon" on the CPU recipes: for matrices, AdamW for the rest
    lr: float = 6e-4
    muon_lr: float = 0.02                        # for the matrices when optimizer is "muon"; follows the same schedule
    lr_scale: float = 1.0                        # 0.5 is the remedy if a run collapses at the schedule's peak
    warmup_ratio: float = 0.04
    weight_decay: float = 0.0
    grad_clip: float = 1.0                       # global norm over all ranks
    rewarm_steps: int = 64                       # linear ramp after a resume that lost Adam's moments
    rollback_steps: int = 0                      # back to the last good checkpoint when CE doubles within so many steps

    # The batch: global_batch = streams x micro-batch x accumulation; the loop derives the accumulation.
    global_batch: int = 512
    micro_batch: int = 1                         # samples per forward over all ranks of one target replica
    epochs: int = 10
    max_steps: int = 0                           # 0: epochs decide
    max_length: int = 4096
    min_supervised: int = 14                     # 2 x block: samples with fewer supervised tokens are left out
    min_retention: float = 0.9                   # fewer survivors than this abort the run: the mask is wrong
    seed: int = 42

    # Checkpoints, logging, evaluation.
    save_every: int = 16
    keep_checkpoints: int = 3
    log_every: int = 1
    wandb: str = ""                              # project to log to, beside the files in out/; needs the package wandb
    cache_captures: bool = False                 # keep captured states on disk between epochs (small targets only)
    evals_per_epoch: int = 10
    eval_tasks: tuple[str, ...] = ()             # empty: every task file in eval_datasets/
    eval_limit: int = 32                         # prompts per task of the in-loop evaluation
    eval_seed: int = 980406
    eval_max_new_tokens: int = 2048
    eval_temperature: float = 1.0

    # The corpus.
    corpus: str = ""                             # a file, folder or Hugging Face data set; "regen:" before it: the
                                                 # target's answers to it; "own:gsm_symbolic": its answers to prompts
    corpus_size: int = 0                         # prompts of an "own:" corpus; a sample of others (0: all)
    corpus_max_new_tokens: int = 256
    corpus_temperature: float = 1.0
    chat_family: str = "chatml"                  # chat.py: FAMILIES
    thinking: str = "none"                       # none, off, on: recorded with every evaluation result


def spread_layers(num_layers: int, taps: int) -> tuple[int, ...]:
    """Layer ids spread evenly from 1 to num_layers - 3 (DFlash's default rule): shallow, middle and deep, never the
    last layer."""
    if taps == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (taps - 1)) for i in range(taps))


def recipe_hash(recipe: Recipe) -> str:
    """Hash of every value: ranks compare it at start, checkpoints carry it."""
    return hashlib.sha256(json.dumps(dataclasses.asdict(recipe), sort_keys=True).encode()).hexdigest()[:16]


def save_recipe(recipe: Recipe, path: Path) -> None:
    path.write_text(json.dumps(dataclasses.asdict(recipe), indent=2) + "\n")


def load_recipe(path: Path) -> Recipe:
    """Read the recipe.json of a checkpoint. Unknown or missing keys are named: the file is from another version of
    this code."""
    try:
        values = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); the checkpoint is damaged, use an older one") from error
    known = {f.name for f in dataclasses.fields(Recipe)}
    if strangers := sorted(set(values) - known):
        raise ValueError(f"{path} has keys this version does not know: {strangers}; use the version that trained it")
    return Recipe(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def get_recipe(name: str | None = None) -> Recipe:
    """Recipe by name; the default one when nothing is named."""
    if name is None:
        return DEFAULT
    if name not in RECIPES:
        raise SystemExit(f"no recipe named {name!r}; there are: {', '.join(RECIPES)} (recipe.py)")
    return RECIPES[name]


# A random target made on the spot by targets.py. It learns nothing worth having; the whole pipeline runs in under a
# minute.
TINY = Recipe(
    name="tiny", target="tiny", num_target_layers=4, target_layer_ids=(0, 1, 2),
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=128,
    vocab_size=320, mask_token_id=300, stop_token_ids=(257,), rope_theta=10_000.0, max_position_embeddings=2048,
    block_size=4, num_draft_layers=2, markov_rank=16, num_anchors=16, min_supervised=8,
    lr=2e-3, global_batch=8, micro_batch=4, epochs=2, save_every=4, evals_per_epoch=0,
    max_length=704,                              # its tokens are bytes: a prompt has 300 to 600 of them
    eval_tasks=("gsm_symbolic",), eval_limit=4, eval_max_new_tokens=32,
    corpus="own:gsm_symbolic", corpus_size=32, corpus_max_new_tokens=48,
)

# A target trained from nothing on the spot (toy.py), with something to learn from rewards: for cotrain.py.
TOY = Recipe(
    name="toy", target="toy", num_target_layers=4, target_layer_ids=(0, 1, 2),
    hidden_size=96, num_attention_heads=3, num_key_value_heads=1, head_dim=32, intermediate_size=256,
    vocab_size=128, mask_token_id=127, stop_token_ids=(1,), rope_theta=10_000.0, max_position_embeddings=256,
    draft="dflash", block_size=8, num_draft_layers=1, num_anchors=16, loss_decay_gamma=7.0, selector_rank=16,
    selector_top_k=8, conv_group_size=8, lr=2e-3, optimizer="muon", global_batch=16, micro_batch=16,
)

# What a two-core laptop can train while its owner drinks a coffee. Same algorithm as the canonical recipe, fewer of
# everything.
SMOLLM2_DEMO = Recipe(
    name="smollm2-demo", target="HuggingFaceTB/SmolLM2-135M-Instruct",
    num_target_layers=30, target_layer_ids=spread_layers(30, 5),
    hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64, intermediate_size=1536,
    vocab_size=49_152, stop_token_ids=(2,), rope_theta=100_000.0, rms_norm_eps=1e-5,
    mask_token_id=4,                             # <reponame>, a leftover; targets.py: no text yields it
    max_position_embeddings=8192, head_key="model.embed_tokens.weight",   # tied
    num_draft_layers=2,                          # 5 in the canonical recipe: each costs 4 M parameters per forward
    markov_rank=64,                              # 256: rank 64 keeps 83% of the acceptance
    markov_init="bigram",
    num_anchors=64,                              # 512: vocabulary-sized work per sample is proportional to it
    optimizer="muon",                            # reaches AdamW's tau in a third of the steps at this size
    lr=2e-3,                                     # for parameters that Muon does not take; 6e-4 is for batches of 512
    global_batch=4, micro_batch=4, epochs=1,
    max_length=384, save_every=16, evals_per_epoch=0, cache_captures=True,
    eval_tasks=("gsm_symbolic", "humaneval"), eval_limit=8, eval_max_new_tokens=128, eval_temperature=0.0,
    corpus="own:gsm_symbolic", corpus_size=256, corpus_max_new_tokens=192,
)

# The small targets on SGLang: the training and evaluation of a cluster, small enough for a laptop (README, Engines).
TINY_SGLANG = dataclasses.replace(TINY, name="tiny-sglang", engine="sglang", engine_args={"page_size": 16})
SMOLLM2_SGLANG = dataclasses.replace(SMOLLM2_DEMO, name="smollm2-sglang", engine="sglang")

# The same target, about two hours on two cores: a drafter worth using.
SMOLLM2 = dataclasses.replace(
    SMOLLM2_DEMO, name="smollm2", corpus_size=768, epochs=3, eval_limit=32, eval_max_new_tokens=256,
    eval_tasks=("gsm_symbolic", "humaneval", "gsm8k"),
)

# DFlash2 on the same target and corpus. Blocks of 8 rows propose 7 tokens, as DSpark's of 7 do.
SMOLLM2_DFLASH2 = dataclasses.replace(
    SMOLLM2_DEMO, name="smollm2-dflash2", draft="dflash2", block_size=8, selector_rank=64, markov_init="random",
    loss_decay_gamma=7.0,
)

QWEN3_8B = Recipe(
    name="qwen3-8b", target="Qwen/Qwen3-8B", num_target_layers=36, target_layer_ids=spread_layers(36, 5),
    hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=12_288,
    vocab_size=151_936, mask_token_id=151_669,   # the first row past the tokenizer
    stop_token_ids=(151_645, 151_643), micro_batch=1, corpus="regen:mlabonne/open-perfectblend", chat_family="qwen3",
    thinking="off", corpus_max_new_tokens=4096, eval_tasks=("gsm8k", "mbpp", "mt-bench"),
)

QWEN3_4B = dataclasses.replace(
    QWEN3_8B, name="qwen3-4b", target="Qwen/Qwen3-4B", hidden_size=2560, intermediate_size=9728,
    head_key="model.embed_tokens.weight",        # tied
)

# The published co-training run: GRPO on GSM8K with mgoin/Qwen3-4B-speculator.dflash2 as the first drafter.
QWEN3_4B_DFLASH2 = dataclasses.replace(
    QWEN3_4B, name="qwen3-4b-dflash2", draft="dflash2", block_size=8, num_anchors=64, loss_decay_gamma=7.0, lr=1e-5,
    weight_decay=1e-2, max_length=2048,
)

QWEN3_14B = dataclasses.replace(
    QWEN3_8B, name="qwen3-14b", target="Qwen/Qwen3-14B", num_target_layers=40, target_layer_ids=spread_layers(40, 5),
    hidden_size=5120, num_attention_heads=40, intermediate_size=17_408,
)

GLM_52 = Recipe(
    name="glm-5.2", target="zai-org/GLM-5.2-FP8", num_target_layers=78, target_layer_ids=(1, 19, 38, 57, 76),
    hidden_size=6144, num_attention_heads=64, num_key_value_heads=64, head_dim=64, intermediate_size=12_288,
    vocab_size=154_880, mask_token_id=154_856,   # a padded slot: the tokenizer never emits it
    stop_token_ids=(154_820, 154_827, 154_829), rope_theta=8_000_000.0, rms_norm_eps=1e-5, max_position_embeddings=8192,
    engine="sglang", engine_args={"attention_backend": "dsa", "mem_fraction_static": 0.78, "context_length": 8192},
    micro_batch=4, corpus="mgoin/open-perfectblend-glm5.2-regen", chat_family="glm-5.2", thinking="on",
    eval_tasks=("gsm8k", "mbpp", "mt-bench"),
)

# The 42-layer model of the family with the second backbone: six layers, eight taps evenly spread, the target's own
# grouping of heads. Keys and values injected from the context, and attention local to the block, is what dspark.py
# always does. Loss decay goes with the block: gamma 4 up to 8, 5 at 10, 7 at 16.
INKLING = Recipe(
    name="inkling", target="inkling", num_target_layers=42, target_layer_ids=spread_layers(42, 8),
    hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=12_288,
    vocab_size=201_024, output_vocab_size=200_058,   # the tokenizer's end; the rows behind it are padding
    mask_token_id=200_064, stop_token_ids=(200_006, 200_000, 200_002, 200_003),  # the tokenizer defines none
    head_scale=1 / 16,                           # hidden_size / 256, inverted; `recipe.py check` reads the config's
    embed_key="model.llm.embed.weight", head_key="model.llm.unembed.weight",
    embed_norm_key="model.llm.embed_norm.weight",
    rope_theta=8_000_000.0, rms_norm_eps=1e-5, max_position_embeddings=8192, num_draft_layers=6, loss_decay_gamma=4.0,
    engine="sglang", engine_args={"context_length": 8192}, micro_batch=4, corpus="", chat_family="inkling",
    thinking="on",
)

# Layers that slide over 1024 tokens, embedding and head tied, the text model nested in one that also sees.
GEMMA3_4B = Recipe(
    name="gemma-3-4b", target="google/gemma-3-4b-it", num_target_layers=34, target_layer_ids=spread_layers(34, 5),
    hidden_size=2560, num_attention_heads=8, num_key_value_heads=4, head_dim=256, intermediate_size=10_240,
    vocab_size=262_208, mask_token_id=262_207,   # a padded row: texts contain the <unused...> tokens
    stop_token_ids=(1, 106), embed_scale=2560 ** 0.5, embed_key="language_model.model.embed_tokens.weight",
    head_key="language_model.model.embed_tokens.weight", micro_batch=1, corpus="regen:mlabonne/open-perfectblend",
    corpus_max_new_tokens=4096, chat_family="gemma", eval_tasks=("gsm8k", "mbpp", "mt-bench"),
)


@dataclass(frozen=True)
class Cotrain:
    """Reinforcement learning of a recipe's target with a drafter that follows it (cotrain.py). Intervals are RL steps.
    """
    name: str
    recipe: Recipe                               # target, draft, and the draft's objective and optimizer
    task: str                                    # of reasoning-gym, which also judges the answers
    drafter: str = ""                            # first checkpoint: folder, Hugging Face name, or "fresh"
    steps: int = 100
    seed: int = 42
    engine: str = "vllm"
    engine_args: dict = dataclasses.field(default_factory=dict)
    speculative_args: dict = dataclasses.field(default_factory=dict)
    allow_lossy: bool = False                    # let verification accept what the target would not say
    spec_verify_tokens: int | None = None        # None: block_size - 1, the only value that fits

    # Rollout and the target's update.
    prompts: int = 8
    group: int = 8                               # answers per prompt
    max_new_tokens: int = 512
    max_model_len: int = 2048
    temperature: float = 1.0
    actor_lr: float = 1e-6                       # 0: the target stays, only the drafter learns
    actor_batch: int = 16
    clip: float = 0.2

    # The drafter's share.
    enable_drafter_training: bool = True
    train_interval: int = 2                      # also how often hidden states are collected
    publish_interval: int = 2                    # 0: after each training
    drafter_steps: int = 10
    drafter_batch: int = 4                       # windows per owner and optimizer step
    window: int = 512                            # answer tokens per window; shorter answers are dropped
    context: int = 512                           # rows before a window that its blocks may attend to
    owners: int = 1                              # training workers that share the windows; each holds the newest
    samples_per_owner: int = 16
    tokens_per_owner: int = 16_384
    save_every: int = 1


RECIPES = {r.name: r for r in (TINY, TOY, TINY_SGLANG, SMOLLM2_DEMO, SMOLLM2_SGLANG, SMOLLM2, SMOLLM2_DFLASH2, QWEN3_4B,
                                QWEN3_4B_DFLASH2, QWEN3_8B, QWEN3_14B, GEMMA3_4B, GLM_52, INKLING)}
DEFAULT = SMOLLM2_DEMO

# The toy learns another manner of speaking within ten steps; at this actor_lr the drafter has to follow or lose.
TOY_DRAFTER = Cotrain(
    name="toy-drafter", recipe=TOY, task="chain_sum", drafter="fresh", steps=6, actor_lr=0.0, prompts=16, group=8,
    max_new_tokens=40, max_model_len=128, train_interval=1, publish_interval=1, drafter_steps=30,
    drafter_batch=16, window=26, samples_per_owner=1024, tokens_per_owner=65_536, save_every=6, seed=7,
)
TOY_COTRAIN = dataclasses.replace(
    TOY_DRAFTER, name="toy", drafter="out/cotrain/toy-drafter/latest/drafter", steps=20, actor_lr=1.5e-4,
    train_interval=2, publish_interval=2, save_every=1, seed=42,
)
# DFlash2 on a CPU runs under Triton's interpreter: slow, so a short and greedy run, in which the target stays.
TOY_DFLASH2 = dataclasses.replace(
    TOY_DRAFTER, name="toy-dflash2", recipe=dataclasses.replace(TOY, name="toy-dflash2", draft="dflash2"), steps=2,
    temperature=0.0, prompts=4, group=1, max_new_tokens=24, drafter_steps=10, drafter_batch=4, window=12,
)
COTRAIN = {c.name: c for c in (
    TOY_DRAFTER, TOY_COTRAIN, TOY_DFLASH2,
    Cotrain(name="smollm2-dflash2", recipe=SMOLLM2_DFLASH2, task="gsm_symbolic", drafter="out/smollm2-dflash2/latest",
            steps=8, prompts=2, group=4, max_new_tokens=96, max_model_len=512, actor_lr=1e-5, actor_batch=4, window=48,
            save_every=8),
    Cotrain(name="qwen3-4b-dflash2", recipe=QWEN3_4B_DFLASH2, task="gsm8k", drafter="out/qwen3-4b-dflash2/drafter",
            steps=100, prompts=16, group=8, max_new_tokens=1024, window=128),
)}


if __name__ == "__main__":
    from recipe_check import main
    main()
