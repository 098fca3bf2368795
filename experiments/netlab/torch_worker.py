"""PyTorch's own gloo all-reduce: ``torch_worker.py RANK PROCESSES ADDRESS INTERFACE``.

Runs where torch is installed, and needs nothing of this package.
"""

import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from netlab.processes import serve


class Worker:
    """What the controller can ask for."""

    def hello(self) -> dict:
        return {"torch": torch.__version__}

    def time_sums(self, dtypes: list[str], values: int, rounds: int) -> list:
        """Seconds of each dtype in each round, in turns."""
        tensors = [torch.randn(values).to(getattr(torch, name)) for name in dtypes]
        seconds: list[list[float]] = [[] for _ in dtypes]
        for _ in range(rounds):
            for times, tensor in zip(seconds, tensors, strict=True):
                tensor.zero_()  # sums of sums would overflow
                dist.barrier()
                start = time.perf_counter()
                dist.all_reduce(tensor)
                times.append(time.perf_counter() - start)
        return seconds


def main() -> None:
    rank, processes, address, interface = sys.argv[1:]
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}",
        rank=int(rank),
        world_size=int(processes),
    )
    serve(Worker())


if __name__ == "__main__":
    main()
