# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train a tiny model
#
# The same decoder is trained three times on the same text in the same order: with exact
# sums, with 4 bits and feedback, and with 4 bits without feedback. `echo-jax train`
# does the same with a progress bar.

# %%
import pathlib
import tempfile

import matplotlib.pyplot as plt
import numpy as np

from echo_jax.devices import use_cpu_devices

use_cpu_devices(4)  # before any computation; leave out on GPUs

from echo_jax.models import DecoderConfig
from echo_jax.records import RecordWriter, read_records
from echo_jax.training import DataConfig, MeshConfig, TrainConfig, compare, prepare

# %%
CONFIG = TrainConfig(
    model=DecoderConfig(
        num_layers=3, width=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_width=128
    ),
    data=DataConfig(batch_size=8, length=64, heldout_batches=4),
    mesh=MeshConfig(data_ranks=1, tensor_ranks=4),
    steps=60,
)
metrics = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
results, _ = compare(prepare(CONFIG), RecordWriter(metrics), progress=lambda *_: None)

# %%
plt.figure(figsize=(6, 3.2))
for result in results:
    plt.plot(np.arange(1, CONFIG.steps + 1), result.losses, label=result.variant)
plt.xlabel("step")
plt.ylabel("training loss, nats a byte")
plt.legend()
plt.grid(alpha=0.3)
plt.show()

# %% [markdown]
# A single seed of such a short run says nothing about quality
# (`experiments/train_seeds.py` runs several); it shows that training works, and how
# many bytes it sends.

# %%
for result in results:
    sent = sum(result.bytes_per_token.values())
    print(
        f"{result.variant:12} held-out {result.heldout_loss:.4f}, {sent:,.0f} B a token"
    )
print(len(read_records(metrics)), "records")
assert all(result.losses[-1] < result.losses[0] for result in results)
