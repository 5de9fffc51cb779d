"""Checkpoints as others read and write them: four layouts in and out, and the validator for what engines accept in
silence.

    python export.py CHECKPOINT --to vllm --out DIR        also: sglang, speculators, deepspec
    python export.py validate DIR [--target T] [--fix]     exit code 0 fine, 1 errors, 3 an engine would have to guess

In memory a draft is one thing: flat config keys and tensors under DeepSpec's names (dspark.py). A `Layout` holds two
tables, one for keys and one for tensor names, and both are read in both directions. Stated here once: a draft that
samples from its anchor proposes as many tokens per step as its block has rows (`speculative_tokens`); SGLang counts the
anchor too and wants one more. Read next: serve_check.py, which asks a real engine.
"""
import argparse
import copy
import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from dspark import DSparkConfig, DSparkDraft, frozen_linear

WRAPPER_PREFIXES = ("_orig_mod.", "module.", "draft_model.", "model.")
FROZEN = ("embed_tokens.weight", "lm_head.weight")           # the target's own, may lie beside the draft's
SHARD = 5 << 30                                  # bytes per safetensors file, about
# What every draft of this project is. A checkpoint that says otherwise is refused, one that does not say is mended.
ALWAYS = {"model_type": "qwen3", "hidden_act": "silu", "tie_word_embeddings": False, "is_causal": False,
          "sample_from_anchor": True}


# ---------------------------------------------------------------------------------------------------------------------
# The layouts


class Layout(NamedTuple):
    """How others spell a draft. A place is a dotted path in config.json; "+1" at its end: the ids there are ours + 1.
    """
    fixed: dict[str, object]                     # place -> what this layout always says
    keys: dict[str, tuple[str, ...]]             # our key -> all its places; a key without an entry lies in `home`
    tensors: tuple[tuple[str, str], ...] = ()    # ends of tensor names: ours, theirs
    home: str = ""
    frozen: bool = True                          # whether embedding and head may lie in its files


def places(*keys: str, nested: str = "dflash_config") -> dict[str, tuple[str, ...]]:
    return {key: (key, f"{nested}.{key}") for key in keys}


FLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SERVING = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
ROPE = {"rope_theta": ("rope_theta", "rope_parameters.rope_theta"), "rope_type": ("rope_parameters.rope_type",)}
BLOCK = ("block_size", "mask_token_id", "target_layer_ids")
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
LAYERS = "transformer_layer_config"
LAYOUTS = {
    "deepspec": Layout({"architectures": ["Qwen3DSparkModel"]}, places(*BLOCK) | ROPE),
    "vllm": Layout({"architectures": ["Qwen3DSparkModel"]}, places(*BLOCK) | ROPE),
    "sglang": Layout({"architectures": ["DSparkDraftModel"]},
                     places(*BLOCK, *HEADS, "num_target_layers", "sample_from_anchor") | ROPE, frozen=False),
    "zlab": Layout({"sample_from_anchor": False, "use_cache": True},
                   places(*BLOCK, *FLASH2, *SERVING) | ROPE, frozen=False),
    "speculators": Layout(
        {"architectures": ["Qwen3DSparkModel"], "speculators_model_type": "dspark", "speculators_config": {
            "algorithm": "dspark", "default_proposal_method": "greedy", "verifier": {},
            "proposal_methods": [{"proposal_type": "greedy"}]}},
        {key: (key,) for key in ("block_size", "mask_token_id", "draft_vocab_size", "sample_from_anchor", "num_anchors",
                                 "num_target_layers", *HEADS)}
        | {"target_layer_ids": ("aux_hidden_state_layer_ids+1",),
           "verifier": ("speculators_config.verifier.name_or_path",),
           "speculative_tokens": ("speculators_config.proposal_methods.0.speculative_tokens",)}
        | {key: tuple(f"{LAYERS}.{place}" for place in where) for key, where in ROPE.items()}, home=LAYERS),
}


def layout_of(raw: dict) -> str:
    """Name of the layout of a config.json. What vLLM reads is DeepSpec's layout, with or without embedding and head."""
    if "speculators_model_type" in raw:
        return "speculators"
    if {"DFlashDraftModel", "DFlash2DraftModel"}.intersection(raw.get("architectures") or ()):
        return "zlab"
    return "sglang" if raw.get("architectures") == ["DSparkDraftModel"] else "deepspec"


def look(config, place: str):
    """The value at a place, None where there is none."""
    path, _, shift = place.partition("+")
    for part in path.split("."):
        index = int(part) if isinstance(config, list) else part
        try:
            config = config[index]
        except (KeyError, IndexError, TypeError):
            return None
    return [i - int(shift) for i in config] if shift and config is not None else config


def put(config: dict, place: str, value) -> None:
    path, _, shift = place.partition("+")
    *parents, last = path.split(".")
    for part in parents:
        config = config[int(part)] if isinstance(config, list) else config.setdefault(part, {})
    config[last] = [i + int(shift) for i in value] if shift else value


def speculative_tokens(values: dict) -> int:
    """Tokens proposed per step: one per row of the block; without sampling from the anchor its row proposes none."""
    return values["block_size"] - (not values.get("sample_from_anchor", True))


def read_values(folder: str | Path, source: str | None = None) -> tuple[dict, dict, str]:
    """(our flat keys, config.json as it is, name of its layout). ValueError for one that contradicts itself or whose
    draft is none of ours."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no config.json in {folder}; expected the folder of a draft checkpoint")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); it is damaged, use another checkpoint") from error
    name = layout_of(raw)
    if source not in (None, name) and (source, name) != ("vllm", "deepspec"):
        raise ValueError(f"{path} is in the {name} layout, not {source}")
    layout = LAYOUTS[name]
    values = dict(look(raw, layout.home) or {}) if layout.home else dict(raw)
    nested = [values.pop(key, None) or {} for key in ("dflash_config", "dspark_config")]
    values = {k: v for k, v in (values | nested[0] | nested[1]).items() if k not in layout.fixed}
    problems = []
    for key, where in layout.keys.items():
        found = [v for v in (look(raw, place) for place in (*where, f"dspark_config.{key}")) if v is not None]
        if any(v != found[0] for v in found):
            problems.append(f"{key} is {found} in its places {', '.join(where)}; write the one value in all of them")
        if found:
            values[key] = found[0]
    scaling = values.get("rope_scaling") or {}
    rope = scaling.get("rope_type") or scaling.get("type") or values.pop("rope_type", "default")
    values.pop("rope_parameters", None)
    if rope != "default":
        problems.append(f"rope_type {rope!r} is not implemented; a draft needs plain RoPE")
    if values.get("rope_theta") is None:
        problems.append("rope_theta is missing; write it at top level and in rope_parameters")
    said = {"sample_from_anchor": False} | values if name == "speculators" else values
    for key, why in (("sample_from_anchor", "its blocks fill in behind the anchor, drafts here predict from it"),
                     ("is_causal", "blocks here are bidirectional"), ("hidden_act", "the MLP here is SwiGLU")):
        if said.get(key) not in (None, ALWAYS[key]):
            problems.append(f"{key} is {said[key]!r}, not {ALWAYS[key]!r}: {why}")
    if problems:
        raise ValueError(f"{path}: " + "; ".join(problems))
    return values, raw, name


def write_values(values: dict, name: str) -> dict:
    """config.json in a layout: every key in all its places, so that no engine has to guess."""
    layout, config = LAYOUTS[name], {}
    values = ALWAYS | {"rope_type": "default"} | values
    values["speculative_tokens"] = speculative_tokens(values)
    home = config.setdefault(layout.home, {}) if layout.home else config
    home |= {k: v for k, v in values.items() if k not in layout.keys and k not in ("verifier", "speculative_tokens")}
    config |= copy.deepcopy(layout.fixed)
    for key, where in layout.keys.items():
        for place in where if key in values else ():
            put(config, place, values[key])
    return config


def fields_of(values: dict, kind=DSparkConfig) -> dict:
    """Arguments of a config class from flat keys."""
    values = dict(values)
    for key in ("target_layer_ids", "layer_types", "eos_token_id"):
        value = values.get(key)
        values[key] = tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)
    if not values.get("use_sliding_window", values.get("sliding_window") is not None):
        values["sliding_window"] = None
    if not values.get("head_dim") and values.get("hidden_size") and values.get("num_attention_heads"):
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    fields = dataclasses.fields(kind)
    required = {f.name for f in fields if f.default is dataclasses.MISSING}
    if missing := sorted(k for k in required if values.get(k) in (None, ())):
        raise ValueError(f"config.json lacks {missing}; it is not the config of a draft")
    return {f.name: values[f.name] for f in fields if values.get(f.name) is not None}


def save_config(config: DSparkConfig, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json in the config's own layout, with every key that an engine would otherwise guess."""
    values = config.keys() | {
        "use_sliding_window": config.sliding_window is not None, "dtype": str(dtype).removeprefix("torch."),
        "layer_types": list(config.layer_types) or ["full_attention"] * config.num_hidden_layers}
    write_json(Path(folder) / "config.json", write_values(values, config.layout))


def write_json(path: Path, value: dict) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    partial.replace(path)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


def load_draft_tensors(folder: str | Path, layout: str = "deepspec") -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files under our names, wrapper prefixes stripped. Raises on none,
    unreadable or colliding ones."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no .safetensors file in {folder}; expected the folder of a draft checkpoint")
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}                 # noqa: SIM118
        except Exception as error:
            raise ValueError(f"{path} cannot be read ({error}); it is damaged, use another checkpoint") from error
        for name, tensor in found.items():
            while prefix := next((p for p in WRAPPER_PREFIXES if name.startswith(p)), None):
                name = name[len(prefix):]
            name = renamed(name, [(theirs, ours) for ours, theirs in LAYOUTS[layout].tensors])
            if name in tensors:
                raise ValueError(f"{folder} holds {name} twice (a file too many, or prefixed and unprefixed copies)")
            tensors[name] = tensor
    tensors.pop("t2d", None)                     # the inverse of d2t, which only training reads
    return tensors


def renamed(name: str, table) -> str:
    return next((name.removesuffix(old) + new for old, new in table if name.endswith(old)), name)


def tensor_problems(own: dict[str, Tensor], tensors: dict[str, Tensor]) -> list[str]:
    """Every missing, unknown or wrongly shaped name among `tensors`, in words; `own` is what a draft has."""
    problems = [f"missing {n} {tuple(own[n].shape)}" for n in own if n not in tensors]
    problems += [f"unknown {n} {tuple(tensors[n].shape)}" for n in tensors if n not in own]
    return problems + [f"{n} is {tuple(tensors[n].shape)}, expected {tuple(own[n].shape)}"
                       for n in own if n in tensors and tensors[n].shape != own[n].shape]


def full_vocabulary(tensors: dict[str, Tensor], vocab_size: int) -> tuple[dict[str, Tensor], Tensor | None]:
    """Undo a reduced draft vocabulary: row i of lm_head and markov_w2 moves to token i + d2t[i].

    Also returns the head's bias [V], -inf for tokens that the draft cannot say; None when there is no d2t.
    """
    if "d2t" not in tensors:
        return tensors, None
    d2t = tensors["d2t"].long()
    token, tensors = torch.arange(len(d2t)) + d2t, {k: v for k, v in tensors.items() if k != "d2t"}
    if len(d2t) == 0 or token.min() < 0 or token.max() >= vocab_size or len(token.unique()) != len(token):
        raise ValueError(f"d2t does not map its {len(d2t)} tokens to different ones below {vocab_size}")
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if name in tensors and len(tensors[name]) == len(d2t):
            rows = tensors[name]
            tensors[name] = rows.new_zeros(vocab_size, rows.shape[1]).index_copy(0, token, rows)
    return tensors, torch.full((vocab_size,), float("-inf")).index_fill(0, token, 0.0)


def draft_kind(layout: str) -> type[DSparkDraft]:
    """The class of the drafts that a layout holds."""
    if layout != "zlab":
        return DSparkDraft
    from dflash2 import DFlash2Draft
    return DFlash2Draft


def load_draft(kind: type[DSparkDraft], folder: str | Path, dtype: torch.dtype | None = None, device="cpu"):
    """A draft of class `kind` from a folder in any layout; see DSparkDraft.from_pretrained."""
    values, _, layout = read_values(folder)
    config = kind.config_class(**fields_of(values, kind.config_class)).validate()
    tensors, bias = full_vocabulary(load_draft_tensors(folder, layout), config.vocab_size)
    dtype = dtype or next(iter(tensors.values())).dtype
    with torch.device("meta"):                   # no random initialisation: loading leaves the random stream alone
        draft = kind(config)
    frozen = {name: tensors.pop(name) for name in FROZEN if name in tensors}
    draft.load_tensors(tensors, where=str(folder))
    if FROZEN[0] in frozen:
        head = frozen_linear(frozen.get(FROZEN[1], frozen[FROZEN[0]]).to(device, dtype))
        if bias is not None:
            head.bias = nn.Parameter(bias.to(device, dtype), requires_grad=False)
        draft.attach(nn.Embedding.from_pretrained(frozen[FROZEN[0]].to(device, dtype)), head)
    elif frozen:
        raise ValueError(f"{folder} has lm_head.weight without embed_tokens.weight; expected both or none")
    return draft.to(device=device, dtype=dtype).eval()


def target_tables(folder: str | Path, draft: Path) -> dict[str, Tensor]:
    """Embedding and head of the target as its draft reads them, the only two tensors that are read of it.

    By the keys of the draft's recipe.json, a scale or a norm worked in; without one by their usual names.
    """
    if (draft / "recipe.json").is_file():
        from capture import TargetEmbeddingsAndHead, applied_head, read_tensor, table_options
        from recipe import load_recipe
        recipe = load_recipe(draft / "recipe.json")
        dtype = read_tensor(Path(folder), recipe.embed_key).dtype
        own = TargetEmbeddingsAndHead(folder, dtype, **table_options(recipe))
        embedding = own.embed_tokens(torch.arange(recipe.vocab_size)).detach()
        return {FROZEN[0]: embedding, FROZEN[1]: applied_head(own.lm_head, recipe).weight.detach().clone()}
    tables = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tables |= {ours: file.get_tensor(name) for ours in FROZEN for name in file.keys()
                       if name == ours or name.endswith("." + ours)}
    if FROZEN[0] not in tables:
        raise ValueError(f"no embed_tokens.weight in the safetensors files of {folder}; name the target's folder")
    return {FROZEN[0]: tables[FROZEN[0]], FROZEN[1]: tables.get(FROZEN[1], tables[FROZEN[0]]).clone()}


# ---------------------------------------------------------------------------------------------------------------------
# Conversion


def convert(src: str | Path, dst: str | Path, to: str, *, source: str | None = None, target: str | Path | None = None,
            dtype: torch.dtype | None = None) -> Path:
    """Write the draft of `src` to the new folder `dst` in layout `to`; nothing but spelling changes.

    source: the layout that src must have (default: whatever it is). target: the target's folder, whose embedding and
    head a deepspec folder gets when src has none. Raises ValueError for a draft that `validate` finds wrong.
    """
    from huggingface_hub import save_torch_state_dict

    from checkpoint import flush
    src, dst, layout = Path(src), Path(dst), LAYOUTS[to]
    values, _, name = read_values(src, source)
    if (name == "zlab") != (to == "zlab"):
        raise ValueError(f"{src} is in the {name} layout, whose drafts the {to} layout cannot hold")
    tensors = load_draft_tensors(src, name)
    if errors := [f for f in findings(src, target) if f.level == "error"]:
        raise ValueError(f"{src} is not whole, nothing was written:\n" + table(errors))
    if "d2t" in tensors and "draft_vocab_size" not in layout.keys and to != "vllm":
        raise ValueError(f"the draft of {src} has a reduced vocabulary, which the {to} layout cannot hold; use vllm or "
                         "speculators")
    if not layout.frozen:
        tensors = {k: v for k, v in tensors.items() if k not in FROZEN}
    elif to == "deepspec" and target and FROZEN[0] not in tensors:
        tensors |= target_tables(target, src)
    cast = {k: (v.to(dtype) if dtype and v.is_floating_point() else v).contiguous() for k, v in tensors.items()}
    if lost := [k for k, v in cast.items() if not torch.isfinite(v).all()]:
        raise ValueError(f"{lost} overflow in {dtype}; export in bfloat16 or float32")
    if to == "speculators" and target:
        values["verifier"] = str(target)
    values["dtype"] = str(next(iter(cast.values())).dtype).removeprefix("torch.")
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise ValueError(f"{dst} exists already; name a folder that does not")
    partial = dst.with_name(f".{dst.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)   # left by a conversion that was killed
    partial.mkdir(parents=True)
    save_torch_state_dict({renamed(k, layout.tensors): v for k, v in cast.items()}, partial, max_shard_size=SHARD,
                          metadata={"format": "pt"})
    write_json(partial / "config.json", write_values(values, to))
    if (src / "recipe.json").is_file():
        shutil.copy(src / "recipe.json", partial)
    for path in partial.iterdir():
        shutil.copymode(partial / "config.json", path)       # safetensors makes its files private
    flush(*partial.iterdir(), partial)
    if dst.exists():
        dst.rmdir()
    partial.rename(dst)
    return dst


# ---------------------------------------------------------------------------------------------------------------------
# Validation


OTHER_TARGET = "this draft has another target"


class Finding(NamedTuple):
    level: str                                   # "error": the draft is not what its config says; "serving": a guess
    what: str
    mend: str


def findings(folder: str | Path, target: str | Path | None = None) -> list[Finding]:
    """What is wrong with a draft checkpoint, or left for an engine to guess. target: the target's folder."""
    folder, found = Path(folder), []

    def error(what: str, mend: str = "export or copy the checkpoint again from the one that was trained") -> None:
        found.append(Finding("error", what, mend))

    def serving(what: str, mend: str = "python export.py validate --fix writes it") -> None:
        found.append(Finding("serving", what, mend))

    try:
        values, raw, name = read_values(folder)
        kind = draft_kind(name)
        config = kind.config_class(**fields_of(values, kind.config_class))
    except (ValueError, TypeError) as problem:
        error(str(problem), "correct config.json by the recipe that trained the draft")
        return found
    layout = LAYOUTS[name]
    for problem in config.problems():
        error(problem, "correct config.json by the recipe that trained the draft")

    # The tensors: each one there, of its shape, finite.
    tensors = {}
    try:
        tensors = load_draft_tensors(folder, name)
        tensors, _ = full_vocabulary(tensors, config.vocab_size)
        with torch.device("meta"):
            own = kind(config).state_dict()
        table_shape = torch.empty(config.vocab_size, config.hidden_size, device="meta")
        own |= {key: table_shape for key in FROZEN if key in tensors}
        for problem in tensor_problems(own, tensors):
            error(problem)
    except (OSError, ValueError, RuntimeError, ZeroDivisionError) as problem:
        error(str(problem))
    for key, tensor in tensors.items():
        if bad := int((~torch.isfinite(tensor)).sum()):
            error(f"{key} ({tensor.dtype}) holds {bad} values that are inf or NaN", "export again in another dtype")
    if FROZEN[1] in tensors and FROZEN[0] not in tensors:
        error("lm_head.weight without embed_tokens.weight", "leave both out, or add both")

    # Numbers that are written more than once.
    if (tokens := values.get("speculative_tokens")) not in (None, speculative_tokens(values)):
        error(f"speculative_tokens is {tokens}, block_size {config.block_size} makes {speculative_tokens(values)}")
    if (folder / "recipe.json").is_file():
        from recipe import load_recipe
        ours = dataclasses.asdict(kind.config_class.from_recipe(load_recipe(folder / "recipe.json")))
        for key, value in dataclasses.asdict(config).items():
            if ours[key] != value and key != "layer_types":
                error(f"{key} is {value}, recipe.json trained it with {ours[key]}")

    # What an engine would guess.
    wanted = write_values(values, name)
    for key in ("rope_theta", "sample_from_anchor", "markov_head_type", "num_target_layers", "is_causal"):
        if key == "markov_head_type" and not config.markov_rank or key == "is_causal" and not config.sliding_window:
            continue
        where = layout.keys.get(key, (key,))
        if empty := [place for place in where[:2 if key == "rope_theta" else 1] if look(raw, place) is None]:
            can = any(look(wanted, place) is not None for place in empty)
            serving(f"{key} is absent from {', '.join(empty)}: engines take their own default",
                    *(() if can else ("name the target: validate --fix --target T",)))
    if config.eos_token_id and not all(0 <= i < config.vocab_size for i in config.eos_token_id):
        error(f"eos_token_id {list(config.eos_token_id)} reaches outside the vocabulary of {config.vocab_size}")
    if config.mask_token_id in config.eos_token_id:
        error(f"mask_token_id {config.mask_token_id} is a stop id", "train with a mask id that nothing produces")
    return found + (against_target(config, tensors, folder, Path(target)) if target else [])


def against_target(config: DSparkConfig, tensors: dict[str, Tensor], folder: Path, target: Path) -> list[Finding]:
    """Findings about a pair of draft and target."""
    theirs, found = text_config(target), []
    for ours, key in (("vocab_size", "vocab_size"), ("hidden_size", "hidden_size"),
                      ("num_target_layers", "num_hidden_layers")):
        have = getattr(config, ours) or theirs[key]          # num_target_layers may be unknown
        if have != theirs[key]:
            found.append(Finding("error", f"{ours} is {have}, {target} has {theirs[key]}", OTHER_TARGET))
    if (highest := max(config.target_layer_ids)) > (last := theirs["num_hidden_layers"] - 1) - 1:
        found.append(Finding("error", f"target_layer_ids reach {highest}, the target ends at {last}", OTHER_TARGET))
    for name, tensor in target_tables(target, folder).items() if FROZEN[0] in tensors else ():
        if name in tensors and not torch.equal(tensor.to(tensors[name].dtype), tensors[name]):
            found.append(Finding("error", f"{name} is not the one of {target}", OTHER_TARGET))
    if (longest := theirs.get("max_position_embeddings", 0)) > (own := config.max_position_embeddings):
        found.append(Finding("serving", f"max_position_embeddings is {own}, the target's {longest}: positions past "
                             f"{own} were never trained", f"serve with a length of at most {own}"))
    path = target / "generation_config.json"
    stops = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    stops = {stops} if isinstance(stops, int) else set(stops or ())
    if stops and config.eos_token_id and stops != set(config.eos_token_id):
        found.append(Finding("serving", f"stop ids are {sorted(config.eos_token_id)}, the target's {sorted(stops)}",
                             "engines stop at the target's: evaluate with those"))
    return found


def text_config(target: str | Path) -> dict:
    """config.json of a target, or the part about its text model."""
    whole = json.loads((Path(target) / "config.json").read_text())
    return whole.get("text_config", whole)


def fix(folder: str | Path, target: str | Path | None = None) -> None:
    """Write what config.json leaves for engines to guess; what it says stays."""
    values, raw, name = read_values(folder)
    if target and not values.get("num_target_layers"):
        values["num_target_layers"] = text_config(target)["num_hidden_layers"]
    if values.get("markov_rank"):
        values.setdefault("markov_head_type", "vanilla")
    write_json(Path(folder) / "config.json", raw | write_values(values, name))


def validate(folder: str | Path, target: str | Path | None = None) -> list[Finding]:
    """Print the findings about a checkpoint, if there are any, and return them."""
    found = findings(folder, target)
    if found:
        print(f"{folder}:\n{table(found)}", file=sys.stderr, flush=True)
    return found


def refuse_errors(folder: str | Path, target: str | Path | None = None, quiet: bool = False) -> None:
    """`validate` at the end of training and before an evaluation: SystemExit when a finding is an error."""
    if any(f.level == "error" for f in (findings if quiet else validate)(folder, target)):
        raise SystemExit(1)


def table(found: list[Finding]) -> str:
    return "\n".join(f"{f.level:8} {f.what}\n{'mend:':>8} {f.mend}" for f in found)


def main() -> None:
    from targets import plain_errors
    checking = sys.argv[1:2] == ["validate"]
    parser = argparse.ArgumentParser(description="Convert a draft checkpoint, or: export.py validate DIR.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--target", help="folder of the target")
    if checking:
        parser.add_argument("--fix", action="store_true", help="write into config.json what engines would guess")
    else:
        parser.add_argument("--to", choices=LAYOUTS, required=True)
        parser.add_argument("--from", dest="source", choices=LAYOUTS, help="default: whatever it is")
        parser.add_argument("--out", type=Path, required=True)
        parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as it is")
    options = parser.parse_args(sys.argv[1 + checking:])
    with plain_errors(ValueError):
        if not checking:
            dtype = getattr(torch, options.dtype) if options.dtype else None
            print(convert(options.checkpoint, options.out, options.to, source=options.source, target=options.target,
                          dtype=dtype))
            options.checkpoint = options.out
        elif options.fix:
            fix(options.checkpoint, options.target)
        levels = {f.level for f in validate(options.checkpoint, options.target)}
    if checking and not levels:
        print(f"{options.checkpoint} is whole")
    raise SystemExit(1 if "error" in levels else 3 if levels else 0)


if __name__ == "__main__":
    main()
