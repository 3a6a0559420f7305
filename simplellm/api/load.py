"""From a checkpoint folder to a model that computes, in one straight line.

Every choice that depends on the machine is made here, once.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from simplellm.api.choose_operations import (
    TABLES,
    choose_operations,
    fused_operations,
    takes_packed,
)
from simplellm.api.input_processor import InputProcessor, LoadedModel
from simplellm.base.config import EngineConfig, expect
from simplellm.base.host_memory import host_pages
from simplellm.checkpoint.checkpoint import Upload, open_weights
from simplellm.checkpoint.families import title
from simplellm.checkpoint.folder import path_of
from simplellm.checkpoint.read_ahead import ReadAhead
from simplellm.checkpoint.source import Source
from simplellm.checkpoint.stored import move_weight
from simplellm.engine.build_runner import build_runner
from simplellm.engine.build_speculation import (
    capture_drafts,
    check_drafter,
    head_page_bytes,
    is_model,
    with_own_head,
)
from simplellm.engine.engine import Engine
from simplellm.engine.graphs import MIXED_SIZES, bucket_sizes, verify_shapes
from simplellm.engine.offloading import OffloadingPageManager
from simplellm.engine.page_manager import PageManager
from simplellm.engine.ranks import ALONE, Ranks
from simplellm.engine.start_ranks import start_ranks
from simplellm.engine.warmup import DRAWS, dummy_sampler_run
from simplellm.model.build import build, plain_norm
from simplellm.model.fp8_cache import kv_scales, make_pool
from simplellm.model.machine import find_device, find_dtype, name_of, on
from simplellm.model.memory import (
    Need,
    check_room,
    count_parameters,
    enough,
    num_host_pages,
    num_pages,
    sliding_groups,
)
from simplellm.model.model import Model
from simplellm.model.ops import PLAIN, Ops

LOGGER = logging.getLogger("simplellm")
BIG = 2**28  # parameters from which on loading shows a progress bar


def load(
    path: str | Path | None = None,
    config: EngineConfig | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    random_weights: bool = False,
    seed: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> LoadedModel:
    """Load what `LLM` needs; its arguments and errors."""
    device = find_device(device)
    ok = isinstance(config, EngineConfig | None)
    expect(ok, "config", config, "an EngineConfig", TypeError)
    config = (config or EngineConfig()).changed(options or {})
    source, config, dtype = open_model(
        path, config, dtype, device, random_weights, seed
    )
    input_processor = InputProcessor.open(path_of(path), source.config)
    given = path, dtype, device, random_weights, seed
    with ThreadPoolExecutor(1) as beside:  # it takes seconds, and so do the weights
        beside.submit(input_processor.grammars.prepare)
        ranks = start_ranks(config, source.config, *given)
        with ranks.guard_load():
            engine, why, seconds = load_engine(source, config, dtype, device, ranks)
    limit, compiler = engine.max_model_len, input_processor.grammars.compile
    input_processor = replace(input_processor, max_model_len=limit, compiler=compiler)
    return LoadedModel(engine, input_processor, why, seconds)


def open_model(
    path: str | Path | None,
    config: EngineConfig,
    dtype: torch.dtype | str | None,
    device: torch.device,
    random_weights: bool,
    seed: int | None,
) -> tuple[Source, EngineConfig, torch.dtype]:
    """Weights that are open and not read yet, and what `load_engine` takes with them.

    Raises the errors of `open_weights`, and ValueError for what can't draft for them.
    """
    config = with_own_head(config.resolved(device.type), path_of(path))
    packed = takes_packed(config, dtype, device)
    dtype = find_dtype(dtype, device)
    source = open_weights(path, dtype, device, random_weights, seed, packed)
    check_drafter(config, source.config)  # before anything takes long
    return source, config, dtype


def load_engine(
    source: Source,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> tuple[Engine, str, float]:
    """The engine; how it computes, and why; how many seconds the weights took.

    ``config`` has been resolved. Each of ``ranks`` loads its shard.
    """
    source = ranks.shard(source, config)
    operations, why = choose_operations(config, source, dtype, device)
    LOGGER.info(
        "computing %s on %s with %s", title(source.config), name_of(device), why
    )
    mapped = device.type == "cpu" and source.mapped
    need = Need.of(source.config, config, dtype.itemsize, mapped=mapped)
    if share := config.cpu_cache_bytes // ranks.size:
        check_room(torch.device("cpu"), share, "pages on the host (cpu_cache_bytes)")
    with on(device), enough(need, device):
        own = ranks.local_vocabulary(source.config)
        ops = TABLES.get(operations) or fused_operations(own, config, dtype, device)
        start = time.perf_counter()
        ops = ranks.operations(ops, source.config, dtype)
        scales = None
        if config.kv_cache_dtype == "fp8":
            scales = kv_scales(source.files, source.config.num_hidden_layers)
        model = read_weights(source, dtype, device, ops, config.max_model_len, scales)
        weights_seconds = time.perf_counter() - start
        engine = build_engine(model, config, ranks)
        if config.cuda_graphs and operations == "fused":
            seqs = engine.scheduler.max_num_seqs
            verifying = verify_shapes(seqs, config.max_drafts)
            engine.runner.capture(bucket_sizes(seqs), MIXED_SIZES, verifying)
            capture_drafts(engine.scheduler, engine.runner)
        if ranks.size > 1 and operations == "fused":
            for params in DRAWS:  # whose kernels are not those of a rank alone
                dummy_sampler_run(engine.runner, params, ops)
    return engine, why, weights_seconds


def load_model(
    path: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    *,
    random_weights: bool = False,
    seed: int | None = None,
    ops: Ops = PLAIN,
) -> Model:
    """Load a checkpoint folder, or the model that comes with the package.

    ``dtype`` is that of everything but the experts, which stay MXFP4, and the norms,
    which are float32: bfloat16 on a GPU and float32 on a CPU unless given. ``device``
    is the GPU if there is one. With ``random_weights``, ``path`` may also be the name
    of a known model, whose shapes are then filled with random numbers, always the same
    for a ``seed``. ``ops`` are the operations that compute. Weights that fit as they
    are stay on the mapped file. Raises CheckpointError or ConfigError for a folder that
    is no checkpoint, ValueError for a device that is not there, and TypeError or
    ValueError for a dtype that no model has.
    """
    device = find_device(device)
    dtype = find_dtype(dtype, device)
    source = open_weights(path, dtype, device, random_weights, seed)
    return read_weights(source, dtype, device, ops)


def read_weights(
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    longest: int | None = None,
    scales: Sequence[tuple[float, float]] | None = None,
) -> Model:
    """The model, with its weights on ``device`` in the layout that ``ops`` read.

    ``longest``: the tokens of the longest text, by which some RoPE is chosen.
    ``scales`` of keys and values, of each layer, are 1 unless given.
    """
    most = source.config.max_position_embeddings
    config = source.config.with_max_model_len(longest)
    if longest is None and config.max_position_embeddings < most:
        text = "texts of up to %d tokens; max_model_len allows LongRoPE's %d"
        LOGGER.warning(text, config.max_position_embeddings, most)
    tied = config.tie_word_embeddings and "lm_head.weight" not in config.formats
    total = len(source.names()) - tied  # no head to load
    small = count_parameters(config).total < BIG
    gpu = device.type == "cuda"
    send = Upload(device) if gpu else partial(Tensor.to, device=device)
    bar = tqdm(desc="Loading", total=total, unit=" tensors", disable=small)
    with bar as progress, ReadAhead(source) as weights:

        def take(name: str) -> Any:
            weight = weights[name]
            progress.update()
            if not isinstance(weight, Tensor):
                return move_weight(weight, send)
            if name == "embed_tokens.weight" and name in config.formats:
                return send(weight)  # its rows are converted once they are looked up
            exact = "norm." in name
            weight = weight.to(torch.float32 if exact else dtype)
            return send(plain_norm(weight, name, config) if exact else weight)

        return build(config, take, ops, scales, dtype)


def load_draft(config: EngineConfig, model: Model, ranks: Ranks) -> Model | None:
    """The smaller model that drafts, if any, whole, for the rank that schedules."""
    if not ranks.schedules or not is_model(config.speculative):
        return None
    ops = TABLES.get(model.ops.name, PLAIN)
    return load_model(config.speculative, model.dtype, model.device, ops=ops)


# The engine


def build_engine(model: Model, config: EngineConfig, ranks: Ranks = ALONE) -> Engine:
    """An engine for ``model``, with as much memory for keys and values as it may have.

    ``config`` has been resolved. Raises ValueError if there is no room for a prompt of
    one token and an answer of one.
    """
    draft = load_draft(config, model, ranks)  # before room for pages is looked for
    page_size, budget = config.page_size, config.max_num_batched_tokens
    itemsize = model.dtype.itemsize
    beside = head_page_bytes(config, model.config, itemsize)
    pages = num_pages(model.config, config, itemsize, model.device, beside)
    pages = ranks.min_once_loaded(pages)
    chunk = config.prefill_chunk if config.enable_chunked_prefill else None
    on_host = num_host_pages(model.config, config, itemsize, beside)
    on_host = on_host and ranks.min_of_all(on_host)
    offloading = partial(OffloadingPageManager, host_pages=on_host)
    make_manager = partial(
        offloading if on_host else PageManager,
        pages,
        page_size,
        window=model.config.windows[-1],
        sliding_groups=sliding_groups(model.config, itemsize, config.kv_cache_dtype),
        enable_caching=config.enable_prefix_caching,
        max_chunk=min(chunk or budget, budget),
    )
    manager = make_manager()
    limits = [model.config.max_position_embeddings]
    limits += [config.max_model_len] if config.max_model_len else []
    if manager.max_tokens < min(limits):
        level = logging.WARNING if config.max_model_len else logging.INFO
        text = "the cache has room for texts of %d tokens, not of %d: give cache_bytes"
        LOGGER.log(level, text, manager.max_tokens, min(limits))
    limits.append(manager.max_tokens)
    limits += [] if config.enable_chunked_prefill else [budget]  # one step a prompt
    expected = "2 or more, its answer included: more num_pages or cache_bytes, a "
    expected += "larger page_size or max_model_len"
    expect(min(limits) >= 2, "the limit of a request's tokens", min(limits), expected)
    pool = make_pool(model.config, config, pages, model.dtype, model.device)
    pool.host_pages = host_pages(pool.page(0), on_host)
    parts = model, pool, manager, config, min(limits)
    rules: dict[str, Any] = {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": budget,
        "prefill_chunk": chunk,
        "max_waiting": config.max_waiting,
        "overtakes": config.overtakes,
        "continuous": config.continuous,
    }
    runner, scheduler = build_runner(parts, ranks, rules, draft, make_manager)
    overlap = config.overlap and model.device.type == "cuda"
    return Engine(scheduler, runner, min(limits), overlap)
