"""Captured states on disk: what the target says about a sample does not change, so small targets say it once.

With `cache_captures` in the recipe the first epoch writes every sample's states to data/captures/<key>/, and later
epochs and runs on the same corpus read them. capture.py makes the states, train.py asks for them here.
"""
import contextlib
import hashlib
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence

from capture import Captured
from data_glm import DATA
from ranks import gather, say
from recipe import Recipe
from targets import target_path


def open_capture_cache(recipe: Recipe, target, tokens) -> Path | None:
    """The folder for the states of this target, these layers and this corpus: (k + 1) * hidden * 4 bytes per token
    (13.8 KB for SmolLM2). None, and a line saying so, when the disk has no room."""
    engine = "" if recipe.engine == "transformers" else f" {recipe.engine}"      # equal up to rounding is not equal
    digest = hashlib.sha256(f"{tokens.key} {recipe.min_supervised} {recipe.target_layer_ids} {target.dtype}{engine}"
                            .encode())
    for path in sorted(target_path(recipe).rglob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    folder = DATA / "captures" / digest.hexdigest()[:16]
    need = sum(len(tokens[i][0]) for i in range(len(tokens)))
    need *= (len(recipe.target_layer_ids) + 1) * recipe.hidden_size * 4
    have = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    fits = all(gather(need - have < 0.9 * free))
    say(f"captured states: {need / 1e6:.0f} MB in {folder}, of which {have / 1e6:.0f} are there "
        f"({free / 1e6:.0f} free)" + ("" if fits else ": too little room, so every epoch captures anew"))
    return folder if fits else None


def capture_batch(target, cache: Path | None, indices: list[int], input_ids: torch.Tensor,
                  lengths: torch.Tensor) -> Captured:
    """Captured states of samples `indices`, ids [B, S] up to lengths [B]; from disk where there is a cache."""
    if cache is None:
        attention_mask = torch.arange(input_ids.shape[1]) < lengths[:, None]
        return target.capture(input_ids, attention_mask.to(input_ids.device))
    states = [capture_sample(target, cache / f"{index}.safetensors", ids[None, :length]) for index, ids, length in
              zip(indices, input_ids, lengths.tolist(), strict=True)]
    return Captured(*(pad_sequence([state[key] for state in states], batch_first=True).to(input_ids.device)
                      for key in ("context", "final")))


def capture_sample(target, path: Path, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """One sample's states from its file, which is made when it is not there. In fp32: a run must not depend on whether
    a state came from disk."""
    if path.exists():
        with contextlib.suppress(Exception):     # damaged by a power failure: captured again below
            states = load_file(path)
            if len(states["final"]) == input_ids.shape[1]:
                return states
    captured = target.capture(input_ids, torch.ones_like(input_ids))
    states = {"context": captured.context[0].float().cpu(), "final": captured.final[0].float().cpu()}
    partial = path.with_suffix(f".{os.getpid()}.partial")
    save_file(states, partial)
    partial.replace(path)
    return states
