"""Checkpoints on disk, in the layouts that others write: tables, and reading and writing by them.

All of them name the tensors alike (dspark.py); a `Layout` is a table of where our flat keys lie in config.json, read in
both directions. Stated here once: a draft that samples from its anchor proposes as many tokens per step as its block
has rows (`speculative_tokens`); SGLang counts the anchor too and wants one more. Read next: export.py, which converts
and validates.
"""
import copy
import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from corpus import write_atomic
from dspark import DSparkConfig, DSparkDraft, frozen_linear

WRAPPER_PREFIXES = ("_orig_mod.", "module.", "draft_model.", "model.")
FROZEN = ("embed_tokens.weight", "lm_head.weight")           # the target's own, may lie beside the draft's
# What every draft of this project is. A checkpoint that says otherwise is refused, one that does not say is mended.
ALWAYS = {"model_type": "qwen3", "hidden_act": "silu", "tie_word_embeddings": False, "is_causal": False,
          "sample_from_anchor": True}


# ---------------------------------------------------------------------------------------------------------------------
# The layouts


class Layout(NamedTuple):
    """How others spell a draft. A place is a dotted path in config.json; "+1" at its end: the ids there are ours + 1.
    """
    fixed: dict[str, object]                     # what this layout always says at top level
    keys: dict[str, tuple[str, ...]]             # our key -> all its places; a key without an entry lies in `home`
    home: str = ""
    frozen: bool = True                          # whether embedding and head may lie in its files


def places(*keys: str) -> dict[str, tuple[str, ...]]:
    return {key: (key, f"dflash_config.{key}") for key in keys}


FLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SERVING = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
ROPE = {"rope_theta": ("rope_theta", "rope_parameters.rope_theta"), "rope_type": ("rope_parameters.rope_type",)}
BLOCK = ("block_size", "mask_token_id", "target_layer_ids")
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
TRAINED = (*BLOCK, "rope_theta", "rms_norm_eps", "sliding_window")
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


def read_config(folder: str | Path) -> dict:
    """config.json of a draft as it is."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no config.json in {folder}; expected the folder of a draft checkpoint")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); it is damaged, use another checkpoint") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} is a {type(raw).__name__}, not a JSON object; use another checkpoint")
    return raw


def read_values(folder: str | Path) -> tuple[dict, dict, str]:
    """(our flat keys, config.json as it is, name of its layout). ValueError for one that contradicts itself or whose
    draft is none of ours."""
    raw = read_config(folder)
    name = layout_of(raw)
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
        raise ValueError(f"{Path(folder) / 'config.json'}: " + "; ".join(problems))
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


def stamp(config: DSparkConfig) -> dict[str, str]:
    """Metadata for the tensors' files: what training fixed and no shape tells, so that a config.json that was edited,
    mixed up or converted wrongly is found."""
    return {"format": "pt", "trained": json.dumps({key: getattr(config, key) for key in TRAINED})}


def write_json(path: Path, value: dict) -> None:
    write_atomic(path, [json.dumps(value, indent=2, sort_keys=True) + "\n"])


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


def load_draft_tensors(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files, wrapper prefixes stripped. Raises on none, unreadable or colliding
    ones."""
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
            if name in tensors:
                raise ValueError(f"{folder} holds {name} twice (a file too many, or prefixed and unprefixed copies)")
            tensors[name] = tensor
    tensors.pop("t2d", None)                     # the inverse of d2t, which only training reads
    return tensors


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
    config = kind.config_class.from_pretrained(folder)
    tensors, bias = full_vocabulary(load_draft_tensors(folder), config.vocab_size)
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
