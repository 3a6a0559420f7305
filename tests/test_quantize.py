"""`simplellm quantize`: what it writes, others load."""

import json
import os
import shutil

import pytest
import torch
from checkpoints import TINY, write_checkpoint
from families import case, put
from families import write as write_family
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from simplellm.api.load import load_model
from simplellm.apps import quantize as command
from simplellm.apps.cli import main
from simplellm.apps.quantize import quantize_checkpoint
from simplellm.checkpoint.checkpoint import INDEX, Checkpoint
from simplellm.checkpoint.formats import read_quantization
from simplellm.checkpoint.stored import decode_weight, encode_weight, tensors

HIDDEN, ROWS, VOCABULARY, EXPERTS = 128, 256, 200, 2
LAYERS = {"self_attn.q_proj": (ROWS, HIDDEN), "self_attn.o_proj": (HIDDEN, ROWS)}
LAYERS |= {
    f"mlp.experts.{n}.{name}": shape
    for n in range(EXPERTS)
    for name, shape in (
        ("gate_proj", (ROWS, HIDDEN)),
        ("up_proj", (ROWS, HIDDEN)),
        ("down_proj", (HIDDEN, ROWS)),
    )
}


def moe_tensors():
    """A tiny Qwen3-MoE in the hub's layout, the experts apart."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).mul(0.1).bfloat16()

    head_dim = 64
    layer = "model.layers.0."
    tensors = {f"{layer}{name}.weight": normal(*s) for name, s in LAYERS.items()}
    for name in ("k_proj", "v_proj"):
        tensors[f"{layer}self_attn.{name}.weight"] = normal(128, HIDDEN)
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{layer}{name}.weight"] = normal(HIDDEN)
    for name in ("q_norm", "k_norm"):
        tensors[f"{layer}self_attn.{name}.weight"] = normal(head_dim)
    tensors[f"{layer}mlp.gate.weight"] = normal(EXPERTS, HIDDEN)
    tensors["model.norm.weight"] = normal(HIDDEN)
    tensors["model.embed_tokens.weight"] = normal(VOCABULARY, HIDDEN)
    tensors["lm_head.weight"] = normal(VOCABULARY, HIDDEN)
    return tensors


def dense_tensors():
    """A tiny Qwen3: the first expert is all that there is."""
    return {
        name.replace("experts.0.", ""): tensor
        for name, tensor in moe_tensors().items()
        if ".experts.1." not in name and not name.endswith("mlp.gate.weight")
    }


CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "intermediate_size": ROWS,
    "moe_intermediate_size": ROWS,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 1,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """In two shards, with an index and a tokenizer."""
    folder = tmp_path_factory.mktemp("moe")
    tensors = moe_tensors()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:9], names[9:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        metadata = {"format": "pt"}
        save_file({name: tensors[name] for name in part}, folder / file, metadata)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    return folder


def read_all(folder):
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.fixture(scope="module", params=["fp8", "int8", "mxfp4"])
def written(request, source, tmp_path_factory):
    target = tmp_path_factory.mktemp("out") / request.param
    before, after = quantize_checkpoint(source, target, request.param)
    tensors = moe_tensors()
    assert before == sum(tensor.nbytes for tensor in tensors.values())
    assert after == sum(tensor.nbytes for tensor in read_all(target).values())
    return target


def test_linear_layers_are_rounded_and_all_else_is_as_it_was(source, written):
    before, after = read_all(source), read_all(written)
    config = json.loads((written / "config.json").read_text())
    quantization = read_quantization(config.pop("quantization_config"))
    assert config == CONFIG
    names = set()
    for name, tensor in before.items():
        form = quantization.format_of(name)
        linear = name.removeprefix("model.layers.0.").removesuffix(".weight")
        assert (form is not None) == (
            linear in LAYERS or linear in ("self_attn.k_proj", "self_attn.v_proj")
        )
        if form is None:
            assert torch.equal(after[name], tensor)
            names.add(name)
            continue
        parts = [name + suffix for suffix in form.suffixes]
        names |= {*parts}
        got = decode_weight(form, [after[part] for part in parts])
        expected = encode_weight(form, tensor)
        for part, wanted in zip(tensors(got), tensors(expected), strict=True):
            assert torch.equal(part.view(torch.uint8), wanted.view(torch.uint8))
    assert names == after.keys()


def test_shards_index_and_other_files_are_kept(source, written):
    files = {file.name for file in source.iterdir()} - {"pytorch_model.bin"}
    assert {file.name for file in written.iterdir()} == files
    assert written.stat().st_mode == written.parent.parent.stat().st_mode | 0o055
    index = json.loads((written / INDEX).read_text())["weight_map"]
    for file in written.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in sorted(opened.keys()):
                assert index.pop(name) == file.name
    assert index == {}


@pytest.mark.parametrize(
    ("format", "experts"),
    [("fp8", True), ("fp8", False), ("int8", False), ("mxfp4", False)],
)
def test_transformers_loads_it(tmp_path, format, experts):
    """As ordinary numbers, on a CPU. (Of fp8 alone it has experts that lie apart.)"""
    transformers = pytest.importorskip("transformers")
    options = {"dtype": torch.float32, "device_map": "cpu"}
    if format != "fp8":
        pytest.importorskip("compressed_tensors")
        given = transformers.CompressedTensorsConfig(dequantize=True)
        options["quantization_config"] = given
    tensors, config = moe_tensors(), CONFIG
    if not experts:
        tensors = dense_tensors()
        of_experts = "num_experts", "num_experts_per_tok", "moe_intermediate_size"
        config = {k: v for k, v in CONFIG.items() if k not in of_experts}
        config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    source = tmp_path / "in"
    source.mkdir()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps(config))
    written = tmp_path / "out"
    quantize_checkpoint(source, written, format)
    # Of what is not quantized, nothing is rounded: it was bfloat16.
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(written, **options).float()
    dense = load(source, dtype=torch.float32)
    tokens = torch.arange(12)[None]
    with torch.inference_mode():
        before = dense(tokens).logits
    config = json.loads((written / "config.json").read_text())
    quantization = read_quantization(config["quantization_config"])
    after, state = read_all(written), dense.state_dict()
    for name in tensors:
        if form := quantization.format_of(name):
            parts = [after[name + suffix] for suffix in form.suffixes]
            put(state, name, decode_weight(form, parts).dequantize(torch.float32))
    with torch.inference_mode():
        got, expected = model(tokens).logits, dense(tokens).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert (before - expected).abs().max() > 1e-3


def test_experts_of_gpt_oss_become_mxfp4(tmp_path):
    source = tmp_path / "dense"
    write_checkpoint(source, TINY, quantized=False)
    assert (
        main(["quantize", str(source), str(tmp_path / "x"), "--format", "mxfp4"]) == 0
    )
    before, after = Checkpoint(source), Checkpoint(tmp_path / "x")
    assert after.config.formats and not before.config.formats
    for name in before.names():
        old, new = before[name], after[name]
        if isinstance(new, torch.Tensor):
            assert torch.equal(old, new)
        else:
            expected = command.quantize(old)
            assert torch.equal(new.blocks, expected.blocks)
            assert torch.equal(new.scales, expected.scales)
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"


def test_the_command_tells_sizes(source, tmp_path, capsys):
    assert main(["quantize", str(source), str(tmp_path / "x"), "--format", "int8"]) == 0
    said = capsys.readouterr().out
    assert "bytes of weights are now" in said and "%)" in said


def write(folder, tensors, **changes):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


@pytest.mark.parametrize(("format", "columns"), [("fp8", 192), ("mxfp4", 144)])
def test_what_engines_join_has_one_format(tmp_path, format, columns):
    """Experts of which a part has no whole tiles stay as they are; so do q, k and v."""
    tensors = moe_tensors()
    layer = "model.layers.0."
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in tensors if ".experts." in name]:
        shape = (128, columns) if "down" in name else (columns, 128)
        tensors[name] = torch.randn(*shape, generator=generator)
    for name in ("k_proj", "v_proj"):
        tensors[f"{layer}self_attn.{name}.weight"] = torch.randn(64, 128)
    tensors |= {
        f"{layer}self_attn.{name}.weight": torch.randn(*shape)
        for name, shape in (("q_proj", (256, 128)), ("o_proj", (128, 256)))
    }
    changes = {"num_key_value_heads": 1, "moe_intermediate_size": columns}
    source = write(tmp_path / "in", tensors, **changes)
    quantize_checkpoint(source, tmp_path / "out", format)
    config = Checkpoint(tmp_path / "out").config
    kinds = {name.removeprefix("layers.0.") for name in config.formats}
    whole = {"attn.o.weight"}
    if format == "mxfp4":  # whose tiles are not high
        whole |= {"attn.qkv.weight", "experts.gate_up"}
    assert kinds == whole
    model = load_model(tmp_path / "out", device="cpu")
    assert model.logits([1, 2, 3]).isfinite().all()


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o027])
def test_files_get_the_mode_that_is_asked_for(umask, tmp_path):
    """Those that are copied, too, whatever theirs is."""
    write_checkpoint(tmp_path / "dense", TINY, quantized=False)
    card = tmp_path / "dense/README.md"
    card.touch()
    card.chmod(0o604)
    before = os.umask(umask)
    try:
        quantize_checkpoint(tmp_path / "dense", tmp_path / "out", "mxfp4")
    finally:
        os.umask(before)
    files = [*(tmp_path / "out").iterdir()]
    assert card.name in [file.name for file in files]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~umask}


def test_tiles_that_fit_nowhere_are_named(tmp_path):
    """SmolLM2's hidden size is 4.5 times 128."""
    write_family(
        tmp_path / "dense",
        case("Llama", hidden_size=576, intermediate_size=192).build(),
    )
    message = r"of whole tiles, 128 x 128, where hidden_size is 576 \(int8's are 1 x 16"
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(tmp_path / "dense", tmp_path / "out", "fp8")


def test_other_formats_are_not_for_gpt_oss(tmp_path):
    source = tmp_path / "dense"
    write_checkpoint(source, TINY, quantized=False)
    with pytest.raises(ValueError, match="format is 'int8'; expected mxfp4"):
        quantize_checkpoint(source, tmp_path / "out", "int8")


def test_what_is_quantized_already_is_refused(source, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for file in source.iterdir():
        os.link(file, folder / file.name)
    (folder / "config.json").unlink()
    change = {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ValueError, match="quantization_config is"):
        quantize_checkpoint(folder, tmp_path / "out", "fp8")
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("format", command.TARGETS)
def test_a_model_of_no_linear_layers_is_refused(tmp_path, format):
    """GPT-2's are stored the other way round, of whatever size they are."""
    sizes = {"n_embd": 128, "n_inner": 256, "n_head": 2, "vocab_size": 101}
    write_family(tmp_path / "in", case("GPT2", **sizes).build())
    expected = r"another family: GPT-2 stores its layers' weights \[in, out\]"
    with pytest.raises(ValueError, match=f"IN is .*; expected {expected}"):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out", format)
    assert os.listdir(tmp_path) == ["in"]


def test_refusals_leave_nothing(source, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    options = [str(source), str(out), "--format"]
    assert main(["quantize", *options, "fp8"]) == 2
    assert "expected a folder that does not exist yet" in capsys.readouterr().err
    out.rmdir()
    small = {k: v for k, v in dense_tensors().items() if "layers.0" not in k}
    small |= {f"{part}.weight": torch.randn(9, 24) for part in ("lm_head", "unknown")}
    few = write(tmp_path / "few", small)
    assert main(["quantize", str(few), str(out), "--format", "mxfp4"]) == 2
    assert "lacks 'model.layers.0.input" in capsys.readouterr().err
    shutil.rmtree(few)
    assert main(["quantize", *options, "int4"]) == 2
    for name, words in (
        ("Qwen/Q", "download it first: hf download Qwen/Q"),
        (str(tmp_path), f"{tmp_path}: is not a checkpoint; expected"),
    ):
        assert main(["quantize", name, str(out), "--format", "fp8"]) == 2
        assert words in capsys.readouterr().err
    missing = str(tmp_path / "missing" / "out")
    assert main(["quantize", str(source), missing, "--format", "fp8"]) == 2
    assert os.listdir(tmp_path) == []


def test_a_run_that_fails_leaves_nothing(source, tmp_path, monkeypatch):
    written = []

    def fail(tensors, path, **options):
        written.append(path)
        if len(written) == 2:
            raise OSError("no space")
        save_file(tensors, path, **options)

    monkeypatch.setattr(command, "save_file", fail)
    with pytest.raises(OSError, match="no space"):
        quantize_checkpoint(source, tmp_path / "out", "fp8")
    assert len(written) == 2 and os.listdir(tmp_path) == []


def test_weights_that_are_no_numbers_are_named(source, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    tensors = moe_tensors()
    tensors["model.layers.0.self_attn.o_proj.weight"][3, 5] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for format in ("fp8", "int8"):
        with pytest.raises(
            ValueError, match=r"o_proj.weight: its largest scale is nan"
        ):
            quantize_checkpoint(folder, tmp_path / "out", format)
    assert os.listdir(tmp_path) == ["in"]
