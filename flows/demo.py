"""The demo's input: a toy Llama, trained for a few steps, sharded by torch's own DCP over two gloo processes, with its logits recorded.

Nothing here knows the product: the checkpoint is written the way a trainer writes it.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

from reports.errors import RequestError

RANKS = 2
STEPS = 8
VOCAB = 256
_ROWS, _LENGTH = 4, 64
_MARKER = ".shardwright-demo"  # only a folder with this file in it is ever emptied


@dataclass(frozen=True, slots=True)
class Demo:
    """Where the demo's input is, and where its release goes."""

    checkpoint: Path
    assets: Path
    golden: Path
    release: Path


def make_demo(folder: Path) -> Demo:
    """Train and shard the toy; what an earlier demo left in `folder` is replaced.

    Args:
        folder: of the demo.

    Returns:
        Paths of the input.

    Raises:
        RequestError: the folder holds something that no demo made.
    """
    _claim(folder)
    demo = Demo(folder / f"step-{STEPS}", folder / "hf", folder / "golden.safetensors", folder / "release")
    for path in (demo.checkpoint, demo.assets, demo.release):
        shutil.rmtree(path, ignore_errors=True)
    demo.assets.mkdir(parents=True)
    rendezvous = folder / ".rendezvous"
    rendezvous.unlink(missing_ok=True)
    spawn(_train, (str(rendezvous.absolute()), str(demo.checkpoint), str(demo.assets), str(demo.golden)), nprocs=RANKS)  # type: ignore[no-untyped-call]
    rendezvous.unlink(missing_ok=True)
    return demo


def _claim(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RequestError("is a file", where=str(folder), remedy="Name a new or empty folder.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / _MARKER).exists():
        raise RequestError("holds what no demo made", where=str(folder), remedy="Name a new or empty folder.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARKER).touch()


def _train(rank: int, rendezvous: str, checkpoint: str, assets: str, golden: str) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        start = torch.randint(0, VOCAB, (_ROWS, 1), generator=generator)
        ids = (start + torch.arange(_LENGTH) * 3) % VOCAB  # a rule that can be learnt
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": model_state, "optim": optimizer_state}, checkpoint_id=checkpoint)
    ids = torch.arange(_ROWS * _LENGTH).reshape(_ROWS, _LENGTH) % VOCAB
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, use_cache=False).logits
    if rank == 0:
        config.save_pretrained(assets)
        _save_tokenizer(assets)
        save_file({"input_ids": ids, "logits": logits.contiguous()}, golden, {"computed_in": "float32"})
    dist.destroy_process_group()


def _save_tokenizer(assets: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(("<pad>", "<s>", "</s>", "<unk>", *(f"w{n}" for n in range(4, VOCAB))))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(assets)
