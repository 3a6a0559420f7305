"""The transformer: blocks of attention and experts on a residual stream.

T packed tokens, V vocabulary, H query heads, K kv heads, D head_dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from simplellm.attention import NoCache
from simplellm.checkpoint import (
    Checkpoint,
    Packed,
    RandomCheckpoint,
    Upload,
    count_parameters,
    find_shards,
)
from simplellm.config import MODELS, ConfigError, ModelConfig
from simplellm.moe import Experts, experts, route
from simplellm.mxfp4 import MXFP4, Weight, linear
from simplellm.rope import Rope, apply_rope


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N] divided by its root mean square, times weight [N], in x's dtype.

    Computed in float32, and multiplied by the weight before the cast back.
    """
    x32 = x.float()
    scale = torch.rsqrt(x32.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (x32 * scale * weight.float()).to(x.dtype)


@dataclass(frozen=True)
class Backend:
    """The functions that a model computes with; a faster record replaces entries.

    Attention is missing here because the cache, an argument of each forward pass,
    brings its own. ``prepare`` may bring a layer's experts into another layout, and
    ``model`` be another class than `Transformer`.
    """

    norm: Callable[[Tensor, Tensor, float], Tensor]
    linear: Callable[[Tensor, Weight, Tensor | None], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    route: Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
    experts: Callable[[Tensor, Tensor, Tensor, Experts], Tensor]
    prepare: Callable[[Experts], Experts] = lambda weights: weights
    model: "type[Transformer] | None" = None


TORCH = Backend(rms_norm, linear, apply_rope, route, experts)


class Cache(Protocol):
    """What attention needs of a cache: take a layer's q, k and v, give the output."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        window: int | None,
    ) -> Tensor: ...


Take = Callable[[str], Weight]  # a weight by its name, on the right device


def parameter(weight: Weight) -> nn.Parameter:
    """A dense weight as a parameter that asks for no gradient."""
    if isinstance(weight, MXFP4):
        raise TypeError("this weight is MXFP4; expected only experts to be packed")
    return nn.Parameter(weight, requires_grad=False)


class Norm(nn.Module):
    def __init__(self, take: Take, name: str, eps: float, backend: Backend) -> None:
        super().__init__()
        self.weight = parameter(take(f"{name}.weight"))
        self.eps = eps
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        return self.backend.norm(x, self.weight, self.eps)


class Linear(nn.Module):
    def __init__(
        self, take: Take, name: str, backend: Backend, bias: bool = True
    ) -> None:
        super().__init__()
        self.weight = parameter(take(f"{name}.weight"))
        self.bias = parameter(take(f"{name}.bias")) if bias else None
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        return self.backend.linear(x, self.weight, self.bias)


class Attention(nn.Module):
    """Project to queries, keys and values, rotate, let the cache attend, project."""

    def __init__(
        self, config: ModelConfig, layer: int, take: Take, backend: Backend
    ) -> None:
        super().__init__()
        name = f"layers.{layer}.attn"
        self.qkv = Linear(take, f"{name}.qkv", backend)
        self.o = Linear(take, f"{name}.o", backend)
        self.sinks = parameter(take(f"{name}.sinks"))
        self.layer = layer
        self.window = config.window(layer)
        kv_heads = config.num_key_value_heads
        self.heads = [config.num_attention_heads, kv_heads, kv_heads]
        self.head_dim = config.head_dim
        self.backend = backend

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # [T, H+2K, D]
        q, k, v = qkv.split(self.heads, dim=1)
        q, k = self.backend.rope(q, cos, sin), self.backend.rope(k, cos, sin)
        out = cache.attend(self.layer, q, k, v, self.sinks, self.window)
        return self.o(out.flatten(1))  # [T, H*D] -> [T, hidden]


class MoE(nn.Module):
    """Send each token to its experts and add up what they return."""

    def __init__(
        self, config: ModelConfig, layer: int, take: Take, backend: Backend
    ) -> None:
        super().__init__()
        router = f"layers.{layer}.router"
        self.router_weight = parameter(take(f"{router}.weight"))
        self.router_bias = parameter(take(f"{router}.bias"))
        name = f"layers.{layer}.experts"
        weights = Experts(
            gate_up=take(f"{name}.gate_up"),
            gate_up_bias=parameter(take(f"{name}.gate_up_bias")),
            down=take(f"{name}.down"),
            down_bias=parameter(take(f"{name}.down_bias")),
            limit=config.swiglu_limit,
            alpha=config.swiglu_alpha,
        )
        self.experts = backend.prepare(weights)
        self.top_k = config.num_experts_per_tok
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.backend.route(
            x, self.router_weight, self.router_bias, self.top_k
        )
        return self.backend.experts(x, ids, weights, self.experts)


class Block(nn.Module):
    """One layer: attention and experts, each added to the residual stream."""

    def __init__(
        self, config: ModelConfig, layer: int, take: Take, backend: Backend
    ) -> None:
        super().__init__()
        name, eps = f"layers.{layer}", config.rms_norm_eps
        self.attn_norm = Norm(take, f"{name}.attn_norm", eps, backend)
        self.attn = Attention(config, layer, take, backend)
        self.mlp_norm = Norm(take, f"{name}.mlp_norm", eps, backend)
        self.mlp = MoE(config, layer, take, backend)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin, cache)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """gpt-oss from token ids to hidden states, with weights that ``take`` delivers."""

    def __init__(
        self, config: ModelConfig, take: Take, backend: Backend = TORCH
    ) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = parameter(take("embed_tokens.weight"))  # [V, hidden]
        self.rope = Rope(config, self.device)
        self.layers = nn.ModuleList(
            Block(config, layer, take, backend)
            for layer in range(config.num_hidden_layers)
        )
        self.norm = Norm(take, "norm", config.rms_norm_eps, backend)
        if config.tie_word_embeddings:
            take = {"lm_head.weight": self.embed_tokens}.__getitem__
        self.lm_head = Linear(take, "lm_head", backend, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """tokens and positions int64 [T] -> hidden states [T, hidden], normed.

        The tokens of several sequences lie one behind the other; ``cache`` knows which
        belong together. ``lm_head(hidden)`` gives their logits.
        """
        x = F.embedding(tokens, self.embed_tokens)
        cos, sin = self.rope.cos_sin(positions)
        for layer in self.layers:
            x = layer(x, cos, sin, cache)
        return self.norm(x)

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """float32 logits [T, V] of one sequence: row t scores the token after t.

        Raises ValueError for an empty or too long sequence or an id out of range.
        """
        tokens = torch.as_tensor(token_ids, device=self.device)
        check_tokens(tokens, self.config)
        positions = torch.arange(len(tokens), device=self.device)
        return self.lm_head(self(tokens, positions, NoCache([len(tokens)]))).float()

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.dtype

    def _apply(self, fn: Callable, recurse: bool = True) -> "Transformer":
        # The experts are plain records: Module.to() would leave them behind.
        raise RuntimeError(
            "a loaded model cannot be moved or cast; expected dtype and device to be "
            "given to load_model()"
        )


def check_tokens(tokens: Tensor, config: ModelConfig) -> None:
    """Raise ValueError unless ``tokens`` is one sequence that the model can read."""
    if tokens.ndim != 1 or len(tokens) == 0:
        raise ValueError(
            f"token_ids has shape {list(tokens.shape)}; expected [T], T > 0"
        )
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"token_ids are {tokens.dtype}; expected integers")
    if len(tokens) > config.max_position_embeddings:
        raise ValueError(
            f"{len(tokens)} tokens; expected at most {config.max_position_embeddings}, "
            "the model's context"
        )
    low, high = (int(value) for value in tokens.aminmax())
    if low < 0 or high >= config.vocab_size:
        raise ValueError(
            f"token ids run from {low} to {high}; expected 0 to {config.vocab_size - 1}"
        )


EMBEDDED = Path(str(files("simplellm"))) / "embedded"
BIG = 2**28  # parameters from which on loading shows a progress bar
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Choice = Callable[[ModelConfig, torch.dtype, torch.device], Backend]


def config_of(path: str | Path | None, random_weights: bool = False) -> ModelConfig:
    """The config of what `load_model` loads for these arguments.

    Raises ConfigError for a folder that has none, and for a name that is not known.
    Raises CheckpointError for what is no checkpoint folder, as `load_model` does.
    """
    folder = EMBEDDED if path is None else Path(path)
    known = MODELS.get(str(path)) if random_weights else None
    if random_weights and known is None and not folder.is_dir():
        raise ConfigError(
            f"{path} is neither a checkpoint folder nor a known model; expected "
            f"one of {', '.join(MODELS)}"
        )
    if not random_weights:
        find_shards(folder)
    return known or ModelConfig.from_file(folder / "config.json")


def find_device(device: str | torch.device | None) -> torch.device:
    """The device to run on, the GPU if there is one. Raises ValueError."""
    gpu = torch.cuda.is_available()
    try:
        found = torch.device(device or ("cuda" if gpu else "cpu"))
    except RuntimeError:
        raise ValueError(
            f"device is {device!r}; expected a device's name, such as cpu or cuda"
        ) from None
    if found.type == "cuda" and not gpu:
        raise ValueError(f"device is {found}, but PyTorch finds no GPU; expected cpu")
    return found


def check_dtype(dtype: object) -> None:
    """Raise TypeError or ValueError unless a model can have this dtype."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}; expected a torch.dtype")
    if dtype not in DTYPES:
        raise ValueError(
            f"dtype is {dtype}; expected one of {', '.join(map(str, DTYPES))}"
        )


def load_model(
    path: str | Path | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    *,
    random_weights: bool = False,
    seed: int | None = None,
    backend: Backend | Choice = TORCH,
) -> Transformer:
    """Load a checkpoint folder, or the model that comes with the package.

    ``dtype`` is that of everything but the experts, which stay MXFP4, and the norms,
    which are float32: bfloat16 on a GPU and float32 on a CPU unless given. ``device``
    is the GPU if there is one. With ``random_weights``, ``path`` may also be the name
    of a known model, whose shapes are then filled with random numbers, always the same
    for a ``seed``. ``backend`` may be a function that chooses one for the model.
    Weights that fit as they are stay on the mapped file. Raises CheckpointError or
    ConfigError for a folder that is no checkpoint, ValueError for a device that is not
    there, and TypeError or ValueError for a dtype that no model has.
    """
    device = find_device(device)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    check_dtype(dtype)
    path = EMBEDDED if path is None else path
    checkpoint: Checkpoint | RandomCheckpoint
    if random_weights:
        config = config_of(path, random_weights)
        checkpoint = RandomCheckpoint(
            config, dtype=dtype, device=device, seed=seed or 0
        )
    elif seed is not None:
        raise ValueError(
            f"seed is {seed!r}; expected None without random_weights. The seed for "
            "drawing tokens is one of SamplingParams"
        )
    else:
        checkpoint = Checkpoint(path)
        config = checkpoint.config
    if not isinstance(backend, Backend):
        backend = backend(config, dtype, device)

    small = count_parameters(config).total < BIG
    total = len(checkpoint.names()) - config.tie_word_embeddings  # no head to load
    send = (
        Upload(device) if device.type == "cuda" else partial(Tensor.to, device=device)
    )
    with tqdm(desc="Loading", total=total, unit=" tensors", disable=small) as progress:

        def take(name: str) -> Weight:
            weight = checkpoint[name]
            progress.update()
            if isinstance(weight, Packed):
                return MXFP4(send(weight.blocks), send(weight.scales))
            exact = name.endswith("norm.weight")
            return send(weight.to(torch.float32 if exact else dtype))

        model = backend.model or Transformer
        return model(config, take, backend)
