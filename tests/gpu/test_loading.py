"""Weights and adapters on their way to the GPU: whole when they are said to be, and in nobody's way."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from adapter_files import LAYOUT, make_config, make_tensors, write_adapter
from deltaplane_kernels.lora import RankPagePool
from deltaplane_kernels.rank_pages import RankPageLayout
from deltaplane_server.adapters.adapter_pool import AdapterPool
from deltaplane_server.adapters.host_pages import HostPages
from deltaplane_server.adapters.peft_loader import PeftLoader
from deltaplane_server.config import EngineConfig
from deltaplane_server.models.config import load_decoder_config
from deltaplane_server.models.decoder import HEAD, Decoder
from deltaplane_server.models.upload import TensorBytes, Upload
from deltaplane_server.models.weights import Checkpoint
from in_process import Ask, in_process
from peft_factory import make_adapter, make_tiny_model

CUDA = torch.device("cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def keep_busy() -> torch.cuda.Event:
    """Occupies the current stream for a second or so; answers an event that passes at its end."""
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event()  # type: ignore[no-untyped-call]
    end.record()
    return end


@pytest.mark.parametrize("served", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_uploaded_tensors_are_those_of_the_file(
    tmp_path: Path, stored: torch.dtype, served: torch.dtype
) -> None:
    """Many pieces over few buffers, so that each buffer goes round often."""
    tensors = [torch.randn(size).to(stored) for size in (1, 1000, 3_000_001, 77)]
    (tmp_path / "file").write_bytes(b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors))
    targets = [torch.empty(len(tensor), dtype=served, device=CUDA) for tensor in tensors]
    upload = Upload(CUDA, num_readers=3, buffer_bytes=100_000)
    offset = 0
    for tensor, target in zip(tensors, targets, strict=True):
        upload.fill(target, TensorBytes(tmp_path / "file", offset, tuple(tensor.shape), stored))
        offset += tensor.nbytes
    upload.finish()
    for tensor, target in zip(tensors, targets, strict=True):
        assert torch.equal(target.cpu(), tensor.to(served))


def test_an_upload_waits_for_the_last_user_of_its_targets_memory(tmp_path: Path) -> None:
    values = torch.arange(1000, dtype=torch.float32)
    (tmp_path / "file").write_bytes(values.numpy().tobytes())
    target = torch.zeros(1000, device=CUDA)
    keep_busy()
    target.fill_(-1.0)
    upload = Upload(CUDA, num_readers=1)
    upload.fill(target, TensorBytes(tmp_path / "file", 0, (1000,), torch.float32))
    upload.finish()
    assert torch.equal(target.cpu(), values)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decoder_has_the_weights_of_its_checkpoint(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    folder = make_tiny_model(tmp_path, "llama", tie_word_embeddings=tied)
    tensors = load_file(folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    decoder = Decoder(load_decoder_config(folder), checkpoint, dtype, CUDA)
    checkpoint.finish()
    hidden = torch.randn(3, 64, dtype=dtype, device=CUDA)
    head = tensors.get(HEAD, tensors["model.embed_tokens.weight"]).to(CUDA, dtype)
    norm = tensors["model.norm.weight"].to(CUDA, dtype)
    eps = decoder.config.rms_norm_eps
    normed = torch.nn.functional.rms_norm(hidden.float(), (64,), norm.float(), eps).to(dtype)
    torch.testing.assert_close(decoder.logits(hidden), (normed @ head.T).float(), rtol=0.02, atol=0.02)


def test_a_load_waits_for_no_other_stream(tmp_path: Path) -> None:
    """Neither packing nor copying: the device is busy on the stream of the steps all the time."""
    host_pages = HostPages(2, RankPageLayout(LAYOUT).page_elements, torch.float32, pin_memory=True)
    loader = PeftLoader(LAYOUT, max_lora_rank=16, dtype=torch.float32, host_pages=host_pages)
    pool = AdapterPool(RankPagePool(LAYOUT, 4, 1, torch.float32, CUDA, max_tokens=8))
    folder = write_adapter(tmp_path, tensors=make_tensors(rank=16), config=make_config(r=16))
    torch.cuda.synchronize()
    busy_until = keep_busy()

    adapter = loader.pack(loader.inspect(folder))
    pool.copy_in(0, [3, 1], adapter)

    assert not busy_until.query()  # type: ignore[no-untyped-call]
    assert adapter.pages.is_pinned()
    assert torch.equal(pool._pool.pages[[3, 1]].cpu(), adapter.pages)


def test_without_graphs_the_same_tokens_come(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, "llama", head_dim=64)
    adapters = {"one": make_adapter(model, tmp_path / "one", rank=8)}
    rng = random.Random(0)
    asks = [
        Ask(adapter, [rng.randrange(256) for _ in range(length)], 20)
        for adapter in ("", "one")
        for length in (1, 17, 40)
    ]
    answers = {}
    for eager in (False, True):
        config = EngineConfig(
            str(model),
            "tiny",
            device="cuda",
            dtype="float32",
            max_num_seqs=8,
            kv_cache_bytes=16 << 20,
            enforce_eager=eager,
        )
        with in_process(config, model, adapters) as engine:
            answers[eager] = [answer.tokens for answer in engine.ask_all(asks)]
    assert answers[True] == answers[False]
