"""What a user would otherwise pick on the same device: PyTorch's quantizers, timed.

Used by ``bench_kernels.py --others``; writes what is not installed as unavailable.
"""

import statistics
from collections.abc import Callable, Iterator

VALUES = 1 << 29  # 1 GiB of bfloat16
WIDTH = 4096
BLOCK_SIZE = 64
REPEATS = 20


def measure_others(write: Callable) -> None:
    """Times each codec that can be imported, both ways."""
    for name, make in (
        ("bitsandbytes_nf4", _bitsandbytes),
        ("torchao_int8", _torchao),
        ("torch_compile_int8", _torch_compile),
    ):
        config = {"backend": name, "message_bytes": 2 * VALUES}
        try:
            stages = dict(make())
            for stage, step in stages.items():
                value, spread = _time(step)
                details = {**config, "stage": stage, "block_size": BLOCK_SIZE}
                write("codec_ms", value, "ms", details, spread=spread, baseline="copy")
                print(f"{name} {stage} {value:.4f} ms", flush=True)
        except Exception as error:  # what is missing must not end the run
            reason = f"{type(error).__name__}: {error}"[:300]
            print(f"{name} unavailable: {reason}", flush=True)
            details = {**config, "unavailable": reason}
            write("unavailable", 1.0, "1", details)


def _message():
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    shape = (VALUES // WIDTH, WIDTH)
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    return x.normal_(generator=generator)


def _bitsandbytes() -> Iterator[tuple[str, Callable]]:
    """4-bit blockwise quantization without feedback or rotation."""
    from bitsandbytes import functional

    x = _message()
    packed, state = functional.quantize_4bit(x, blocksize=BLOCK_SIZE, quant_type="nf4")
    yield (
        "quantize",
        lambda: functional.quantize_4bit(x, blocksize=BLOCK_SIZE, quant_type="nf4"),
    )
    yield "dequantize", lambda: functional.dequantize_4bit(packed, state)


def _torchao() -> Iterator[tuple[str, Callable]]:
    """8-bit blockwise affine quantization, compiled, as its documentation advises."""
    import torch
    from torchao.quantization import quant_primitives as primitives

    x, block = _message(), (1, BLOCK_SIZE)
    mapping = primitives.MappingType.SYMMETRIC

    def quantize(x):
        scale, zero = primitives.choose_qparams_affine(x, mapping, block, torch.int8)
        codes = primitives.quantize_affine(x, block, scale, zero, torch.int8)
        return codes, scale, zero

    compiled = torch.compile(quantize)
    codes, scale, zero = compiled(x)
    read = torch.compile(
        lambda codes: primitives.dequantize_affine(
            codes, block, scale, zero, torch.int8, output_dtype=torch.bfloat16
        )
    )
    yield "quantize", lambda: compiled(x)
    yield "dequantize", lambda: read(codes)


def _torch_compile() -> Iterator[tuple[str, Callable]]:
    """8-bit symmetric blockwise quantization, the plain formula, compiled."""
    import torch

    x = _message()

    def quantize(x):
        blocks = x.reshape(-1, BLOCK_SIZE).float()
        scale = blocks.abs().amax(-1, keepdim=True) / 127
        codes = torch.round(blocks / scale).clamp(-127, 127).to(torch.int8)
        return codes, scale.to(torch.bfloat16)

    compiled = torch.compile(quantize)
    codes, scale = compiled(x)
    read = torch.compile(
        lambda codes, scale: (codes * scale.float()).to(torch.bfloat16)
    )
    yield "quantize", lambda: compiled(x)
    yield "dequantize", lambda: read(codes, scale)


def _time(step: Callable) -> tuple[float, float]:
    """Milliseconds between events: the median, and the distance of the quartiles."""
    import torch

    for _ in range(3):
        step()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    low, _, high = statistics.quantiles(times, n=4)
    return statistics.median(times), high - low
