"""SGLang as the frozen target, in this very process: the engine holds and runs the model, we read its hidden states.

One model runner per rank, tensor parallel over the ranks of a node, data parallel across nodes. Nothing of the engine
is copied here. Its names move with every release, so all calls into it stand in this one file, for the releases that
SUPPORTED lists; any other one is refused before it can capture the wrong layer. Read next: capture.py (the interface,
the layer-id convention, `probe`).
"""
import contextlib
import difflib
import inspect
import logging
import os
import sys
import warnings
from array import array
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from capture import Captured, Session, Target, TargetEmbeddingsAndHead, check_layer_ids
from ranks import GROUP_TIMEOUT, start_world

SUPPORTED = ("0.5.23",)
FORWARD_TOKENS = 16_384                          # of one engine forward; a longer batch runs in several
CPU_ARGS = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "max_total_tokens": 8192,
            "mem_fraction_static": 0.9}


# ---------------------------------------------------------------------------------------------------------------------
# The adapter: everything that knows the engine's names


@cache
def import_engine() -> None:
    """Import SGLang (half a minute), after its version and before anything else of it."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise ValueError("this recipe's engine is SGLang, which this environment lacks: bash run.sh setup sglang, then "
                         f"use .venv-sglang/bin/python instead of {sys.executable}") from None
    if found not in SUPPORTED:
        raise ValueError(f"SGLang {found} is installed, but its names move with every release and this code knows "
                         f"{', '.join(SUPPORTED)}; install one of these, or mend sglang_target.py and run "
                         "python capture.py probe")
    logging.getLogger("sglang").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sglang.srt.layers.rotary_embedding.base as rotary
        import sglang.srt.model_executor.model_runner  # noqa: F401
    rotary._is_cpu |= not torch.cuda.is_available()     # else the rotary layer imports vLLM


def check_engine_args(engine_args: dict) -> None:
    """ValueError for a name that the installed engine does not know; none is ever dropped."""
    from sglang.srt.server_args import ServerArgs
    known = inspect.signature(ServerArgs).parameters
    for name in engine_args:
        if name not in known:
            near = difflib.get_close_matches(name, known, 3)
            raise ValueError(f"SGLang {version('sglang')} has no argument {name!r}"
                             + (f" (near: {', '.join(near)})" if near else "") + "; correct engine_args in the recipe")


@contextlib.contextmanager
def node_as_world(tp: int):
    """Inside, torch's default process group is this node's part of it: the engine takes the whole world for its own."""
    world = distributed_c10d._get_default_group()
    if tp == world.size():
        yield
        return
    node, _ = dist.new_subgroups(group_size=tp, timeout=GROUP_TIMEOUT)
    distributed_c10d._update_default_pg(node)
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(world)


@contextlib.contextmanager
def shards_in_turn(tp: int, rank: int):
    """Inside, the ranks of a node read the weights one after the other, so that the host holds one shard at a time."""
    from sglang.srt.model_executor import model_runner
    load = model_runner.load_model_with_memory_saver

    def in_turn(**kwargs):
        for turn in range(tp):
            if turn == rank:
                loaded = load(**kwargs)
            dist.barrier()
        return loaded

    model_runner.load_model_with_memory_saver = in_turn
    try:
        yield
    finally:
        model_runner.load_model_with_memory_saver = load


def start_runner(path: str, layer_ids: tuple[int, ...], native: bool, dtype: torch.dtype, device: torch.device, tp: int,
                 rank: int, engine_args: dict):
    """A ModelRunner with weights, memory pool and attention, ready to forward. The order of calls is the engine's own
    (its benchmark/one_batch.py)."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap, parallel_state
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, get_device, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs, ServerArgs
    capture = {"enable_return_aux_hidden_states": True, "speculative_algorithm": "DFLASH",  # names the id convention
               "return_aux_hidden_state_layer_ids": list(layer_ids)}
    if device.type == "cpu" and tp > 1:          # else it wants one memory bank per rank; binds nothing without AMX
        cores = sorted(os.sched_getaffinity(0))
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(cores[i % len(cores)]) for i in range(tp)))
    gpu = (device.index or 0) if device.type == "cuda" else rank
    args = ServerArgs(**{
        "model_path": path, "device": device.type, "dtype": str(dtype).removeprefix("torch."), "tp_size": tp,
        "skip_tokenizer_init": True, "skip_server_warmup": True, "disable_cuda_graph": True, "log_level": "error",
        "disable_overlap_schedule": True, "chunked_prefill_size": FORWARD_TOKENS,
        **(CPU_ARGS if device.type == "cpu" else {}),
        **(capture if native else {"enable_return_hidden_states": True}), **engine_args})
    args.resolve_once()
    ports = PortArgs.init_new(args)
    publish(args, role="scheduler",
            ranks=SpawnRanks(world_rank=spawn_world_rank(args, tp_rank=rank, pp_rank=0), gpu_id=gpu))
    for initialize in (initialize_moe_config, initialize_fp8_gemm_config, initialize_bf16_gemm_config,
                       initialize_fp4_gemm_config):
        initialize()
    config = ModelConfig.from_server_args(args)
    with node_as_world(tp), shards_in_turn(tp, rank):
        parallel_state._MODEL_PARALLEL_GROUP_TIMEOUT = GROUP_TIMEOUT    # it only sets this where it makes the world
        bootstrap.init_parallel_runtime(server_args=args, device=get_device().device, dist_port=ports.nccl_port)
        bootstrap.init_layer_runtime(model_config=config)
        runner = ModelRunner(model_config=config, mem_fraction_static=resolving_view(args).mem_fraction_static,
                             gpu_id=gpu, nccl_port=ports.nccl_port, server_args=args)
        runner.alloc_memory_pool()
        if not native:
            capture_by_hook(runner.model, layer_ids)
        runner.init_attention_backends()
        runner.init_cuda_graphs()
    return runner


def has_native_capture(architectures: list[str], layer_ids: tuple[int, ...]) -> bool:
    """Whether the engine itself returns these layers: not the embedding output, and only models with the setter."""
    from sglang.srt.models.registry import ModelRegistry
    model, _ = ModelRegistry.resolve_model_cls(architectures)
    return layer_ids[0] >= 0 and any(hasattr(model, f"set_{kind}_layers_to_capture") for kind in ("dspark", "dflash"))


def capture_by_hook(model, layer_ids: tuple[int, ...]) -> None:
    """Without native capture: read the layers' inputs (layer i's output is layer i + 1's), and the final state where
    the model hands it to its logits processor."""
    layers, seen = model.model.layers, []

    def given(module, args, kwargs):
        return inspect.signature(module.forward).bind(*args, **kwargs).arguments

    def keep_input(module, args, kwargs):
        state = given(module, args, kwargs)
        seen.append(state["hidden_states"] + (0 if state["residual"] is None else state["residual"]))

    def keep_final(module, args, kwargs):
        state = given(module, args, kwargs)
        parts = list(seen) or state.get("aux_hidden_states")
        seen.clear()
        model.captured = torch.cat(parts, -1) if isinstance(parts, list) else parts, state["hidden_states"]

    if "residual" in inspect.signature(layers[0].forward).parameters:
        for i in layer_ids:                      # some of these models, asked for a layer, forget the residual
            layers[i + 1].register_forward_pre_hook(keep_input, with_kwargs=True)
    else:                                        # the residual travels unseen, so the model must add it
        model.model.layers_to_capture, model.capture_aux_hidden_states = [i + 1 for i in layer_ids], True
    model.logits_processor.register_forward_pre_hook(keep_final, with_kwargs=True)


@contextlib.contextmanager
def capture_off(model):
    """Inside, the model captures no layers, as it does when it serves."""
    before = model.model.layers_to_capture, model.capture_aux_hidden_states
    model.model.layers_to_capture, model.capture_aux_hidden_states = [], False
    try:
        yield
    finally:
        model.model.layers_to_capture, model.capture_aux_hidden_states = before


def stop_runner() -> None:
    """Forget the engine's groups and configuration, so that the next target of this process can make its own."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import reset_context
    parallel_state.destroy_model_parallel()
    parallel_state._WORLD = None                 # the process group behind it is ours
    reset_context()


class Slots:
    """Sequences in the engine's key/value pool: rows of tokens that grow, shrink and are given back."""

    def __init__(self, runner):
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache
        self.runner, self.page, self.table = runner, runner.page_size, runner.req_to_token_pool
        self.tree = RadixCache(CacheInitParams(         # disabled: a sequence's keys are its own, computed once
            disable=True, req_to_token_pool=self.table,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator, page_size=self.page))

    def free(self) -> int:
        """Tokens that the pool has room for."""
        return self.runner.token_to_kv_pool_allocator.available_size()

    def fits(self, lengths: list[tuple[int, int]]) -> bool:
        """Whether sequences of (tokens held, tokens to come) can grow now: pages in the pool, rows in its table."""
        pages = sum(-(-(have + n) // self.page) + (-have // self.page) for have, n in lengths)
        return (pages * self.page <= self.free() and sum(not have for have, _ in lengths) <= self.table.available_size()
                and all(have + n <= self.table.req_to_token.shape[1] for have, n in lengths))

    def check(self, lengths: list[tuple[int, int]]) -> None:
        if not self.fits(lengths):
            raise ValueError(
                f"sequences of {[sum(pair) for pair in lengths]} tokens do not fit the engine: one may have "
                f"{self.table.req_to_token.shape[1]} tokens, and its cache has room for {self.free()} more; raise "
                "context_length, max_total_tokens or mem_fraction_static in the recipe's engine_args")

    def open(self):
        """An empty sequence."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams
        params = SamplingParams(temperature=0.0, max_new_tokens=1)
        params.normalize(None)
        req = Req(rid="", origin_input_text="", origin_input_ids=array("q"), sampling_params=params)
        req.logprob_start_len, req.last_node = -1, self.tree.root_node
        req.lock = self.tree.lock(req.last_node)
        return req

    def extend(self, reqs: list, new: list[list[int]]):
        """Append tokens to sequences in one forward; returns the engine's output, the rows of new tokens only."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
        runner = self.runner
        for req, ids in zip(reqs, new, strict=True):
            req.prefix_len = self.length(req)
            req.full_untruncated_fill_ids.extend(ids)
            req.extend_end = self.length(req)
        batch = ScheduleBatch.init_new(
            reqs=reqs, req_to_token_pool=self.table, tree_cache=self.tree,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator, model_config=runner.model_config,
            enable_overlap=False, spec_algorithm=SpeculativeAlgorithm.NONE)
        batch.prepare_for_extend()
        if batch.input_ids is None:
            batch.input_ids, batch.prefill_input_ids_cpu = batch.prefill_input_ids_cpu.to(batch.device), None
        forward = ForwardBatch.init_new(batch, runner, capture_hidden_mode=CaptureHiddenMode.FULL,
                                        return_hidden_states_before_norm=False)
        return runner.forward(forward).logits_output

    def length(self, req) -> int:
        return len(req.full_untruncated_fill_ids)

    def truncate(self, req, length: int) -> None:
        """Keep the first `length` tokens. The pool frees whole pages, so the page that `length` cuts stays ours, and
        the next extend writes into its rest: freeing any index of it would give it away while in use."""
        if length == 0:                          # a row without tokens must not be kept
            self.close(req)
            req.lock = self.tree.lock(req.last_node)
        elif (first := -(-length // self.page) * self.page) < req.kv.kv_allocated_len:
            self.tree.free_kv_row(req.kv, [(first, req.kv.kv_allocated_len)])
        req.kv.kv_allocated_len = req.kv.kv_committed_len = length
        del req.full_untruncated_fill_ids[length:]

    def close(self, req) -> None:
        """Give everything back, also after a forward that raised."""
        from sglang.srt.mem_cache.common import release_kv_cache
        if req.kv.holds_kv and not req.kv.kv_allocated_len:     # no tokens were to be had for it
            self.table.free(req)
        elif req.kv.holds_kv:
            release_kv_cache(req, self.tree, checkpoint=False)


# ---------------------------------------------------------------------------------------------------------------------
# The target


class SGLangTarget(Target):
    """A target that SGLang runs. One per process at a time (`close` it)."""

    def __init__(self, runner, layer_ids: tuple[int, ...], native: bool, heads: TargetEmbeddingsAndHead, path, tp: int):
        from transformers import GenerationConfig
        generation = (GenerationConfig.from_pretrained(path) if (Path(path) / "generation_config.json").is_file()
                      else GenerationConfig.from_model_config(runner.model_config.hf_config))
        super().__init__(layer_ids, runner.model_config.hf_text_config, heads.embed_tokens, heads.lm_head, generation)
        self.runner, self.native, self.tp, self.slots = runner, native, tp, Slots(runner)

    @classmethod
    def from_pretrained(cls, path: str | Path, layer_ids, dtype: torch.dtype | None = None, device="cpu",
                        heads: dict | None = None, **engine_args) -> "SGLangTarget":
        """Load a folder, on all ranks of a node together (collective).

        dtype None: float32 on a CPU, bfloat16 elsewhere. heads: keywords of TargetEmbeddingsAndHead. engine_args:
        SGLang's own names, e.g. page_size. ValueError for an engine version, an engine argument or a layer id that will
        not do.
        """
        from transformers import AutoConfig
        device, world = torch.device(device), start_world()
        dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        import_engine()
        check_engine_args(engine_args)
        config = AutoConfig.from_pretrained(path)
        layer_ids = check_layer_ids(layer_ids, config.get_text_config().num_hidden_layers)
        native = has_native_capture(config.architectures, layer_ids)
        # Read first: a checkpoint without these keys is known before an hour of loading.
        heads = TargetEmbeddingsAndHead(path, dtype, device, **heads or {})
        threads = torch.get_num_threads()
        runner = start_runner(str(path), layer_ids, native, dtype, device, world.local_size, world.local_rank,
                              engine_args)
        torch.set_num_threads(threads)           # the engine leaves one
        return cls(runner, layer_ids, native, heads, path, world.local_size)

    @torch.no_grad()
    def _run(self, reqs: list, new: list[list[int]]) -> Captured:
        """States of the new tokens of all sequences, [1, sum of n, ...]."""
        self.slots.check([(self.slots.length(req), len(ids)) for req, ids in zip(reqs, new, strict=True)])
        out = self.slots.extend(reqs, new)
        context, final = ((out.hidden_states, out.last_hidden_states) if self.native
                          else self.runner.model.__dict__.pop("captured"))
        wanted = (sum(map(len, new)), len(self.layer_ids) * self.hidden_size)
        if context.shape != wanted or final.shape != (wanted[0], self.hidden_size):
            raise ValueError(f"the engine returned states of shape {tuple(context.shape)} and {tuple(final.shape)}, "
                             f"expected {wanted} and {(wanted[0], self.hidden_size)}")
        return Captured(context[None], final[None])

    def _fits(self, lengths: list[int]) -> bool:
        return sum(lengths) <= FORWARD_TOKENS and self.slots.fits([(0, n) for n in lengths])

    def _whole(self, samples: list[Tensor]) -> Captured:
        reqs = [self.slots.open() for _ in samples]
        try:
            return self._run(reqs, [ids[0].tolist() for ids in samples])
        finally:
            for req in reqs:
                self.slots.close(req)

    @torch.no_grad()
    def plain(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """For `probe`: final [S, H] and the last token's logits [V] of ids [1, S], with capture off."""
        with self.session() as session, capture_off(self.runner.model):
            out = self.slots.extend(session.rows, input_ids.tolist())
        captured = self.runner.model.__dict__.pop("captured", (None, out.hidden_states))
        return captured[1], out.next_token_logits[0]

    def session(self, slots: int = 1) -> "SGLangSession":
        return SGLangSession(self, slots)

    def close(self) -> None:
        """Let go of the model and its pool; another target may then be loaded in this process."""
        self.runner = self.slots = None
        stop_runner()


class SGLangSession(Session):
    """Rows in the engine's pool; leaving the `with` gives their slots back."""

    def __init__(self, target: SGLangTarget, slots: int):
        self.target, self.slots = target, target.slots
        self.rows = [self.slots.open()] if slots == 1 else []

    @property
    def length(self) -> int:
        return max((self.slots.length(row) for row in self.rows), default=0)

    def extend(self, ids: Tensor) -> Captured:
        """Append ids [B, n] to the B rows; returns the states of the new tokens only."""
        return self._extend(self.rows, ids)

    def _extend(self, rows: list, ids: Tensor) -> Captured:
        states = self.target._run(rows, ids.tolist())
        return Captured(*(x[0].unflatten(0, tuple(ids.shape)) for x in (states.context, states.final)))

    def admit(self, ids: Tensor) -> Captured:
        """A new row that begins with ids [1, n]."""
        self.rows.append(self.slots.open())
        return self._extend(self.rows[-1:], ids)

    def drop(self, row: int) -> None:
        self.rows[row], dropped = self.rows[-1], self.rows[row]
        self.rows.pop()
        self.slots.close(dropped)

    def rollback(self, length: int | list[int]) -> None:
        """Forget everything from absolute position `length` on (of every row, or a list of one for each)."""
        lengths = [length] * len(self.rows) if isinstance(length, int) else length
        for row, keep in zip(self.rows, lengths, strict=True):
            if not 0 <= keep <= self.slots.length(row):
                raise ValueError(f"cannot roll back to {keep}: the sequence holds {self.slots.length(row)} tokens")
            self.slots.truncate(row, keep)

    def close(self) -> None:
        while self.rows:
            self.slots.close(self.rows.pop())
