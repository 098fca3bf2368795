"""Which devices a command runs on: what is there, simulated ones, a cluster's."""

import dataclasses
import os
import pathlib
from typing import Literal

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh

Device = Literal["cpu", "default"]

# A process that shows no sign of life for so long is taken for dead; JAX's default is
# 100 s, and 300 s more until the others have left.
_HEARTBEAT_SECONDS = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The processes that share a mesh; each is started with the same command.

    Raises:
      ValueError: if only a part is given.
    """

    coordinator: str | None = None
    """HOST:PORT on which the first process listens; auto lets JAX ask SLURM, Open MPI
    or Kubernetes. Default: this process is alone."""
    processes: int | None = None
    """Number of processes, with --coordinator HOST:PORT."""
    process: int | None = None
    """Index of this process, from 0; with --coordinator HOST:PORT."""

    def __post_init__(self):
        processes, process = self.processes, self.process
        if self.coordinator in (None, "auto"):
            if processes is not None or process is not None:
                raise ValueError(
                    f"processes={processes} and process={process} go with "
                    "coordinator=HOST:PORT, where the first process listens."
                )
        elif processes is None or process is None or not 0 <= process < processes:
            raise ValueError(
                f"coordinator={self.coordinator!r} needs processes, how many there "
                f"are, and process, from 0 to one less; got {processes} and {process}."
            )

    def join(self) -> None:
        """Waits for the other processes; returns at once if this one is alone.

        When one of them dies, the others end with an error within a minute.

        Raises:
          ValueError: if they did not come together, with JAX's reason.
        """
        if self.coordinator is None:
            return
        address = None if self.coordinator == "auto" else self.coordinator
        try:
            jax.distributed.initialize(
                address,
                self.processes,
                self.process,
                heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=_HEARTBEAT_SECONDS,
            )
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"the processes of this run did not come together: {error}"
            ) from error


def tensor_mesh(
    ranks: int | None, device: Device = "default", cluster: Cluster = Cluster()
) -> Mesh:
    """A mesh of one axis, ``tensor``. Before any computation.

    Args:
      ranks: of the axis; None for all devices, or 1 with ``device="cpu"``.
      device: "cpu" makes the CPU look like so many devices, or like one in each of
        several processes; "default" takes JAX's own.
      cluster: the processes that the devices belong to.

    Raises:
      ValueError: if there are fewer devices, or a process would be left out.
    """
    if ranks is not None and ranks < 1:
        raise ValueError(f"tensor_ranks={ranks} must be at least 1.")
    if cluster.coordinator is not None:
        if device == "cpu":
            jax.config.update("jax_platforms", "cpu")
        cluster.join()
    elif device == "cpu":
        ranks = ranks or 1
        use_cpu_devices(ranks)
    found = jax.device_count()
    ranks = ranks or found
    if ranks > found or (jax.process_count() > 1 and ranks < found):
        raise ValueError(
            f"tensor_ranks={ranks} needs as many devices, {found} are here: use fewer, "
            "or --device cpu, which simulates them."
            if ranks > found
            else f"tensor_ranks={ranks} leaves some of {found} devices of several "
            "processes out: leave it away."
        )
    devices = jax.devices()[:ranks]
    return jax.make_mesh(
        (ranks,), ("tensor",), axis_types=(AxisType.Auto,), devices=devices
    )


def use_cpu_devices(count: int) -> None:
    """Makes the CPU look like ``count`` devices. Before any computation.

    Raises:
      ValueError: if JAX has been set up with fewer.
    """
    # With fewer threads than devices the ranks' rendezvous can dead-lock.
    os.environ.setdefault("NPROC", str(max(16, 2 * count)))
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        if jax.device_count() < count:
            raise ValueError(
                f"{count} CPU devices are needed, JAX is already set up with "
                f"{jax.device_count()}: start a fresh process."
            ) from error


def use_compilation_cache(folder: pathlib.Path) -> None:
    """Keeps every compiled program in a folder, for this process and later ones.

    Works after programs have been compiled too, also into another folder.

    Raises:
      ValueError: if it is a file.
      OSError: if it cannot be made.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"compilation_cache={folder} is a file: give a folder.")
    folder.mkdir(parents=True, exist_ok=True)  # JAX would only warn, and keep nothing
    # JAX opens its cache at the first compilation and would keep to that folder.
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
