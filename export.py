"""Checkpoints in the layouts that others read and write.

In memory a draft is one thing: a DSparkConfig and tensors under DeepSpec's names (dspark.py). On disk it is a
config.json and safetensors files. Read next: dspark.py.
"""
import dataclasses
import json
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from dspark import DSparkConfig

WRAPPER_PREFIXES = ("_orig_mod.", "module.", "draft_model.")


def read_config(folder: str | Path) -> dict:
    """The fields of a DSparkConfig from config.json; keys may also be nested under `dflash_config` or `dspark_config`
    (the latter wins). Raises ValueError for what is missing or contradicts itself."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no config.json in {folder}; expected the folder of a draft checkpoint")
    raw = json.loads(path.read_text())
    raw = {**raw, **(raw.get("dflash_config") or {}), **(raw.get("dspark_config") or {})}
    rope = raw.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"{path}: rope_type {rope['rope_type']!r} is not implemented; a draft needs plain RoPE")
    thetas = {float(t) for t in (raw.get("rope_theta"), rope.get("rope_theta")) if t is not None}
    if len(thetas) != 1:
        raise ValueError(f"{path}: rope_theta is {sorted(thetas) or 'missing'} (top level and rope_parameters); "
                         "write the one value in both places")
    raw["rope_theta"] = thetas.pop()
    for key in ("target_layer_ids", "layer_types", "eos_token_id"):
        value = raw.get(key)
        raw[key] = tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)
    if not raw.get("use_sliding_window", raw.get("sliding_window") is not None):
        raw["sliding_window"] = None
    if not raw.get("head_dim") and raw.get("hidden_size") and raw.get("num_attention_heads"):
        raw["head_dim"] = raw["hidden_size"] // raw["num_attention_heads"]
    fields = dataclasses.fields(DSparkConfig)
    required = {f.name for f in fields if f.default is dataclasses.MISSING}
    if missing := sorted(k for k in required if raw.get(k) in (None, ())):
        raise ValueError(f"{path} lacks {missing}; it is not the config of a DSpark draft")
    return {f.name: raw[f.name] for f in fields if f.name in raw}


def save_config(config: DSparkConfig, folder: str | Path) -> None:
    """Write config.json in the DeepSpec layout, with every key that an engine would otherwise guess."""
    shared = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids),
              "block_size": config.block_size}
    values = dataclasses.asdict(config) | {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_act": "silu",
        "sample_from_anchor": True,
        "tie_word_embeddings": False, "use_sliding_window": config.sliding_window is not None,
        "layer_types": list(config.layer_types) or ["full_attention"] * config.num_hidden_layers,
        "eos_token_id": list(config.eos_token_id), "dtype": "float32", **shared, "dflash_config": shared,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"}}
    (Path(folder) / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def load_draft_tensors(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files, wrapper prefixes stripped. Raises on none, unreadable or
    colliding ones."""
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
    return tensors


def tensor_problems(own: dict[str, Tensor], tensors: dict[str, Tensor]) -> list[str]:
    """Every missing, unknown or wrongly shaped name among `tensors`, in words; `own` is what a draft has."""
    problems = [f"missing {n} {tuple(own[n].shape)}" for n in own if n not in tensors]
    problems += [f"unknown {n} {tuple(tensors[n].shape)}" for n in tensors if n not in own]
    return problems + [f"{n} is {tuple(tensors[n].shape)}, expected {tuple(own[n].shape)}"
                       for n in own if n in tensors and tensors[n].shape != own[n].shape]
