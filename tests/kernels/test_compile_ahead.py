"""What compiles for GPUs that are not here: launches, copies, wire, instructions."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
MISSING = [
    package
    for package in ("jax_cuda13_plugin", "jax_plugins.xla_cuda13", "jax_triton")
    if importlib.util.find_spec(package.partition(".")[0]) is None
    or importlib.util.find_spec(package) is None
] + ([] if shutil.which("nvlink") else ["a CUDA toolkit"])

GATHER = "all-gather"

needs_compiler = pytest.mark.skipif(
    bool(MISSING), reason=f"compiling for a GPU needs {', '.join(MISSING)}"
)


def describe(
    *arguments: str, script: str = "compile_ahead.py", xla_flags: str = ""
) -> dict:
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "XLA_FLAGS": xla_flags,
    }
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_compiler
@pytest.mark.parametrize(
    ("residual_dtype", "onto", "bits"),
    [
        ("int8", "nothing", "4"),
        ("int8", "onto", "6"),
        ("int4", "nothing", "4"),
        ("bfloat16", "nothing", "6"),
        ("float32", "nothing", "4"),
    ],
)
@pytest.mark.parametrize("rotation", ["rotated", "plain"])
@pytest.mark.parametrize("target", ["a100", "h200"])
def test_three_launches_and_two_exchanges_of_bytes_are_all(
    target, rotation, residual_dtype, onto, bits
):
    """Also where the sum is added to a stream: no addition comes after them."""
    facts = describe(target, residual_dtype, rotation, "1", onto, bits, "two-shot")
    assert facts["codec"] == "triton on cuda, xla elsewhere"
    # Older versions of XLA split an exchange into its start and its end.
    operations = [
        (name.removesuffix("-start"), result)
        for name, result in facts["operations"]
        if not name.endswith("-done")
    ]
    assert [name for name, _ in operations] == [
        "custom-call",
        "all-to-all",
        "custom-call",
        "all-gather",
        "custom-call",
    ]
    exchanged = [
        result for name, result in operations if name in ("all-to-all", "all-gather")
    ]
    sent = facts["wire_bytes"]
    for result, others in zip(
        exchanged, (sent["all_to_all"], sent["all_gather"]), strict=True
    ):
        # One payload for each of eight ranks, of which seven are others.
        assert f"u8[8,{others // 7}]" in result
        assert re.search(r"(bf16|f16|f32)\[", result) is None
    assert facts["aliased_bytes"] == facts["residual_bytes"]


@needs_compiler
@pytest.mark.parametrize("residual_dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("target", ["a100", "h200"])
def test_pieces_work_in_place_and_travel_while_others_are_made(target, residual_dtype):
    pieces = 4
    call = (target, residual_dtype, "rotated", str(pieces), "onto", "4", "two-shot")
    # See docs/howto/choose.md.
    needed = {"h200": "", "a100": "--xla_gpu_enable_latency_hiding_scheduler=true"}
    facts = describe(*call, xla_flags=needed[target])
    names = [name for name, _ in facts["operations"]]
    assert names.count("custom-call") == 3 * pieces
    others = {name for name in names if not re.match("all-(to-all|gather)", name)}
    assert others == {"custom-call"}, "something is copied, sliced or joined"
    assert facts["aliased_bytes"] == facts["residual_bytes"]
    # Between the start and the end of every exchange a kernel runs.
    hidden = re.findall(
        r"all-(to-all|gather)-start (?:custom-call )+all-\1-done", " ".join(names)
    )
    assert hidden.count("to-all") == hidden.count("gather") == pieces


@needs_compiler
@pytest.mark.parametrize(("rotation", "pieces"), [("plain", 1), ("rotated", 4)])
@pytest.mark.parametrize("target", ["a100", "h200"])
def test_one_shot_is_two_launches_and_one_exchange_a_piece(target, rotation, pieces):
    call = (target, "int8", rotation, str(pieces), "onto", "4", "one-shot")
    needed = {"h200": "", "a100": "--xla_gpu_enable_latency_hiding_scheduler=true"}
    facts = describe(*call, xla_flags=needed[target])
    names = [name for name, _ in facts["operations"] if not name.endswith("-done")]
    assert names.count("custom-call") == 2 * pieces
    exchanges = [result for name, result in facts["operations"] if "start" in name]
    exchanges += [result for name, result in facts["operations"] if name == GATHER]
    assert len(names) == 3 * pieces == 3 * len(exchanges)
    gathered = facts["wire_bytes"]["all_gather"] // 7 // pieces
    for result in exchanges:
        # The payloads of eight chunks from each of eight ranks.
        assert f"u8[8,8,{gathered // 8}]" in result
    assert facts["aliased_bytes"] == facts["residual_bytes"]
    if pieces > 1:
        hidden = re.findall(
            r"all-gather-start (?:custom-call )+all-gather-done",
            " ".join(name for name, _ in facts["operations"]),
        )
        assert len(hidden) == pieces


@needs_compiler
@pytest.mark.parametrize("target", ["a100", "h200"])
def test_a_training_step_of_simulated_ranks_runs_the_kernels(target):
    """``vmap`` over data and tensor ranks: each stage is one launch for all of them."""
    called = describe(target, script="compile_step.py")
    # Three stages of six sums: the embedding's forward, the readout's backward, and in
    # the loops over layers that of attention and that of the MLP, each way.
    assert called["triton_kernel_call"] == 3 * 6


def _compile(kernel, capability: int, constants: dict, pointers: dict):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = f"*{pointers[name]}"
            attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
    return compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 2, "enable_fp_fusion": False},
    )


SHARED = {"SIZE": 64, "ALIGN": 16, "TILE": 32}
ROWS = {"RAGGED": False, "ROW_ALIGN": 16, "ROTATE": True, "STAGES": 3}
OWED = {"owed": "i8", "owed_scales": "bf16"}
PLACES = {"new_owed": None, "new_owed_scales": None}
KERNELS = {
    "send_kernel": (
        {"KIND": "bytes", "SCALE_FACTOR": 1 / 7.5, **ROWS, **PLACES},
        {"x": "bf16", "matrix": "bf16", "payloads": "u8", **OWED},
    ),
    "reduce_kernel": (
        {"KIND": "bytes", "SCALE_FACTOR": 1 / 7.5, "RANKS": 8, **PLACES},
        {"payloads": "u8", "sums": "u8", **OWED},
    ),
    "return_kernel": (
        {"RANKS": 2, "ADD": True, "UNROTATE_SCALE": 0.125, "new_out": None, **ROWS},
        {"payloads": "u8", "stream": "bf16", "matrix": "bf16", "out": "bf16"},
    ),
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("bits", "width"), [(3, 16), (4, 32), (6, 16)])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_need_no_instruction_that_an_a100_lacks(name, bits, width, capability):
    pytest.importorskip("triton", reason="Triton is not installed")
    from echo_jax.kernels import triton_kernels

    constants, pointers = KERNELS[name]
    constants = {"BITS": bits, "WIDTH": width, **SHARED, **constants}
    kernel = getattr(triton_kernels, name)
    compiled = _compile(kernel, capability, constants, pointers)
    ptx = compiled.asm["ptx"]
    assert f".target sm_{capability}" in ptx
    assert re.search(r"e4m3|e5m2|e2m1|e3m2|e2m3|ue8m0", ptx) is None
    assert "cubin" in compiled.asm  # ptxas took it
