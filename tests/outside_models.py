"""Architectures from outside of the project train on the device "flambeau" to the CPU's losses.

    python tests/outside_models.py --json results/outside-models.json          # needs `pip install transformers`

Each model of the transformers library, tiny and with random weights, takes ten steps with AdamW, clipping by norm and
with autocast to bfloat16 and without, from one state on the CPU and on the device. The optimizer is made before the
model moves, so parameters must stay the same objects, and tied weights must stay tied. Losses must be as near to
those in float64 as the CPU's own are; models that generate must give the CPU's tokens; and a checkpoint of the device,
loaded on the CPU, must give the loss that the device goes on with.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import io
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

STEPS, SEED, SEQUENCE, VOCABULARY, IMAGE = 10, 7, 12, 96, 32
# The names that configurations use for their sizes; each configuration gets those that it knows.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "n_layers",
                     "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "n_heads",
                     "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner",
                     "hidden_dim", "moe_intermediate_size"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    "vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "image_size": IMAGE, "patch_size": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0, "forced_eos_token_id": None,
    "rotary_dim": 4, "state_size": 8, "num_local_experts": 4, "num_experts": 4,
    "sliding_window": 8, "relative_attention_num_buckets": 8,
}
CAUSAL = ("GPT2", "GPTNeoX", "GPTJ", "OPT", "Bloom", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Gemma", "Gemma2",
          "Phi", "Falcon", "StableLm", "Olmo2", "Mamba", "CodeGen", "Starcoder2", "Cohere", "Granite")
MASKED = ("Bert", "Roberta", "Albert", "DistilBert", "Electra", "FNet", "SqueezeBert", "DebertaV2")
SEQUENCES = ("T5", "Bart", "Pegasus", "MBart", "Marian")
IMAGES = ("ViT", "DeiT", "Swin", "ConvNext", "ResNet", "RegNet", "MobileNetV2", "Segformer", "PoolFormer", "FocalNet")
SPECIAL: dict[str, dict[str, Any]] = {
    "SqueezeBert": {"embedding_size": 32}, "Albert": {"embedding_size": 16},
    "Swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "patch_size": 4},
    "ConvNext": {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "patch_size": 4},
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "RegNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8},
    "Segformer": {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
                  "num_attention_heads": [1, 2], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2],
                  "decoder_hidden_size": 16},
    "PoolFormer": {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3],
                   "strides": [4, 2], "padding": [2, 1], "patch_size": 7},
    "FocalNet": {"embed_dim": 16, "depths": [1, 1], "hidden_sizes": [16, 32], "focal_levels": [1, 1],
                 "focal_windows": [3, 3], "patch_size": 4},
    "MobileNetV2": {"depth_multiplier": 0.25, "min_depth": 4},
    "CodeGen": {"rotary_dim": 4}, "DebertaV2": {"max_position_embeddings": 64, "type_vocab_size": 0},
}


@dataclass
class Row:
    """The result for one model. Distances are relative differences of all steps' losses from the CPU's in float64."""

    name: str
    ok: bool = False
    loss: float = 0.0
    off: float = 0.0
    cpu_off: float = 0.0
    autocast_off: float = 0.0
    autocast_cpu_off: float = 0.0
    checkpoint_off: float = 0.0
    tied: bool = False  # parameters that are tied on the CPU are tied on the device
    moved: bool = False  # the losses change, so the optimizer has the model's parameters
    tokens: bool | None = None  # equal to the CPU's; None: the model does not generate
    fallbacks: list[str] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""


def configured(family: str) -> Any:
    import transformers

    kind = getattr(transformers, f"{family}Config")
    known = inspect.signature(kind.__init__).parameters
    made = kind(**{k: v for k, v in {**SMALL, **SPECIAL.get(family, {})}.items() if k in known})
    if family in SEQUENCES:
        made.decoder_start_token_id = 0
    return made


def built(name: str) -> Any:
    """A model in training mode without dropout, whose random numbers differ between devices."""
    import transformers

    ending = ("ForCausalLM" if name in CAUSAL else "ForMaskedLM" if name in MASKED
              else "ForConditionalGeneration" if name in SEQUENCES else "ForImageClassification")
    kind = next(k for k in (getattr(transformers, name + e, None) for e in (ending, "LMHeadModel", "MTModel")) if k)
    torch.manual_seed(SEED)
    model = kind(configured(name)).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for key, value in vars(module).items():
            if "drop" in key and isinstance(value, float):
                setattr(module, key, 0.0)
    return model


def inputs_of(name: str, step: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    if name in IMAGES:
        return {"pixel_values": torch.randn(2, 3, IMAGE, IMAGE, generator=draw),
                "labels": torch.randint(2, (2,), generator=draw)}
    words = torch.randint(3, VOCABULARY, (2, SEQUENCE), generator=draw)
    mask = torch.ones_like(words)
    mask[1, -3:] = 0
    out = {"input_ids": words, "labels": words.clone()}
    return out if name in ("Mamba", "FNet") else {**out, "attention_mask": mask}


@contextmanager
def autocasting(device: str, wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    with torch.autocast(device, torch.bfloat16):
        yield


def trained(name: str, device: str, dtype: torch.dtype = torch.float32, autocast: bool = False
            ) -> tuple[list[float], Any, Any]:
    """Trains a model that is moved after its optimizer was made. Returns all losses, the model and the optimizer."""
    model = copy.deepcopy(built(name)).to(dtype)
    if dtype == torch.float64 and hasattr(model.config, "num_local_experts"):
        model.set_experts_implementation("eager")  # grouped products do not support float64
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model.to(device)
    losses = []
    for step in range(STEPS):
        drawn = inputs_of(name, step).items()
        given = {k: v.to(device, dtype) if v.is_floating_point() else v.to(device) for k, v in drawn}
        optimizer.zero_grad()
        with autocasting(device, autocast):
            loss = model(**given).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer


def distance(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / max(abs(y), 1e-3) for x, y in zip(a, b, strict=True))


def checked(name: str) -> Row:
    import flambeau

    started, row = time.perf_counter(), Row(name)
    flambeau.enable_device()
    cpu, on_cpu, _ = trained(name, "cpu")
    ours, model, _ = trained(name, "flambeau")
    wide = trained(name, "cpu", torch.float64)[0]
    row.loss, row.off, row.cpu_off, row.moved = cpu[-1], distance(ours, wide), distance(cpu, wide), ours[-1] != ours[0]
    half, half_cpu = (trained(name, d, autocast=True)[0] for d in ("flambeau", "cpu"))
    row.autocast_off, row.autocast_cpu_off = distance(half, wide), distance(half_cpu, wide)
    tied = [[[k for k, p in m.state_dict(keep_vars=True).items() if p is q] for q in m.parameters()]
            for m in (on_cpu, model)]
    row.tied = tied[0] == tied[1]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    back, given = built(name), inputs_of(name, 0)
    back.load_state_dict(torch.load(file, map_location="cpu"))
    with torch.no_grad():
        there = model(**{k: v.to("flambeau") for k, v in given.items()}).loss.item()
        row.checkpoint_off = distance([there], [back(**given).loss.item()])
        if name in CAUSAL or name in SEQUENCES:
            row.tokens = torch.equal(*(written(m, given["input_ids"]) for m in (model, back)))
    row.fallbacks = sorted(map(str, flambeau.fallbacks()))
    # The device may round differently from the CPU, but must be as near to float64 as the CPU is.
    row.ok = (row.off <= max(4 * row.cpu_off, 1e-5) and row.autocast_off <= max(3 * row.autocast_cpu_off, 2e-2)
              and row.checkpoint_off < 1e-4 and row.tied and row.moved and row.tokens is not False)
    row.seconds = time.perf_counter() - started
    return row


def written(model: Any, words: torch.Tensor) -> torch.Tensor:
    """The tokens that the model generates after these, by greedy decoding."""
    model.eval()
    return model.generate(words.to(model.device), max_new_tokens=8, do_sample=False).cpu()


def apart(name: str, limit: float) -> Row:
    """Runs a model in its own process, so that a crash does not affect the others."""
    try:
        ran = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return Row(name, error=f"not done in {limit:.0f} s")
    line = next((x for x in reversed(ran.stdout.splitlines()) if x.startswith("{")), None)
    return Row(**json.loads(line)) if line else Row(name, error=ran.stderr[-2000:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", help="this model, here, with its row on standard output")
    parser.add_argument("--only", help="models whose name contains this")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=900, help="seconds for one model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.one:
        try:
            row = checked(args.one)
        except Exception:
            row = Row(args.one, error=traceback.format_exc()[-2000:])
        print(json.dumps(asdict(row)))
        return 0
    names = [n for n in (*CAUSAL, *MASKED, *SEQUENCES, *IMAGES) if not args.only or args.only in n]
    rows = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(lambda n: apart(n, args.limit), names):
            rows.append(row)
            print(json.dumps(asdict(row)), file=sys.stderr, flush=True)
            if args.json:
                from flambeau.results_file import write_results

                device = os.environ.get("FLAMBEAU_DEVICE", "opencl")
                write_results(args.json, "outside-models", rows, {"steps": STEPS}, device)
    print(f"{sum(r.ok for r in rows)} of {len(rows)} train as on the CPU")
    return 0 if all(r.ok for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
