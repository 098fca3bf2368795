"""Training state on disk: written in the background, verified when it is read."""

import hashlib
import json
import math
import pathlib
import shutil
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from echo_jax.training.agreement import FailedTogether, from_first, together
from echo_jax.training.config_file import changed_fields
from echo_jax.training.fingerprint import fingerprint
from echo_jax.training.state import TrainState

_KEPT_FOR_ANY_MESH = ("step", "params", "opt_state", "key")
_RUNNING = "that was being written"
_CHANGED = "The run in {folder} cannot be continued with another configuration:\n"


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written or read; training went on."""


class CheckpointError(ValueError):
    """Checkpoints that are there do not fit what is asked for."""


class Snapshot(NamedTuple):
    """Everything that a run is continued from."""

    state: TrainState
    position: dict[str, Any]  # of the data iterator
    losses: list[float]  # of every step so far
    notes: tuple[str, ...] = ()  # what was not as it was saved, in words


class Identity(NamedTuple):
    """What makes two runs the same run."""

    config: dict[str, Any]  # from to_dict
    data: str  # checksum of the text
    ranks: dict[str, int]  # of the mesh; a state can be resharded


class Checkpoints:
    """The checkpoints of one run in a folder of its own.

    Orbax writes them in the background: training waits only until the state has left
    the device. A checkpoint gets its name when all of it is on disk, so that a process
    that is killed leaves those before it intact. Each holds a checksum of every array,
    which is compared when it is read.

    Args:
      folder: of this run alone.
      keep: newest checkpoints that stay.
      identity: of the run.

    Source: the atomic rename and the background writes are those of orbax-checkpoint.
    """

    def __init__(self, folder: pathlib.Path, *, keep: int, identity: Identity):
        """See the class."""
        self.folder, self.keep, self.identity = folder.absolute(), keep, identity
        self._manager = None
        self._fingerprint = jax.jit(fingerprint)

    def steps(self) -> list[int]:
        """Steps of which there is a complete checkpoint, in order."""
        self._guarded(_RUNNING, self._open().wait_until_finished)
        manager = self._open()
        manager.reload()  # what is on disk now
        return sorted(manager.all_steps())

    def check(self, *, resume: bool) -> None:
        """Refuses, before anything is computed, a folder of another run.

        Orbax saves no step that is not newer than those in the folder: a new run among
        the checkpoints of an older one would be saved nowhere.

        Args:
          resume: whether the run goes on from what is there. A checkpoint that cannot
            be read is then left to :meth:`restore`.

        Raises:
          CheckpointError: saying what is there.
        """
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        steps = [int(path.name) for path in found if path.name.isdecimal()]
        if not steps:
            return
        if not resume:
            raise CheckpointError(
                f"{self.folder} holds checkpoints of another run, the newest of step "
                f"{max(steps)}: choose another folder for them, remove them, or go on "
                "with --resume."
            )
        try:
            meta = self._read_meta(max(steps))
        except Exception:  # what a damaged file raises depends on where it is damaged
            return
        self._check_identity(meta)

    def save(self, snapshot: Snapshot) -> None:
        """Starts to write a checkpoint.

        An error of this one, or of the one before it, is only a warning. Older
        checkpoints are removed only when a newer one is complete.
        """
        import orbax.checkpoint as ocp

        step, (whole, owed) = int(snapshot.state.step), _parts(snapshot.state)
        meta = {
            "config": self.identity.config,
            "data": self.identity.data,
            "ranks": self.identity.ranks,
            "position": snapshot.position,
            "losses": snapshot.losses,
            "owed_shapes": [list(leaf.shape) for leaf in jax.tree.leaves(owed)],
            "fingerprint": _numbers(self._fingerprint((whole, owed))),
        }
        meta = {"content": meta, "sha256": _checksum(meta)}
        items = {"state": ocp.args.StandardSave(whole), "meta": ocp.args.JsonSave(meta)}
        if owed is not None:
            items["gradient_residual"] = ocp.args.StandardSave(owed)
        self._guarded(
            f"of step {step}",
            lambda: self._open().save(step, args=ocp.args.Composite(**items)),
        )

    def restore(self, shapes: TrainState, shardings: TrainState) -> Snapshot | None:
        """The newest checkpoint that can be read; None if there is none at all.

        One that cannot be read is renamed, with a warning, and the one before it is
        tried; of several processes all go on from the same one, which each of them
        could read. On another mesh the state is resharded, and ``notes`` say so. The
        residual of a gradient sync, which belongs to the ranks that saved it, is then
        returned replicated and with the shapes it was saved with, for ``fit_state``;
        or it is None, if its messages are other ones than those of this run.

        Args:
          shapes: shapes and dtypes of the run's state.
          shardings: where each of its leaves goes.

        Raises:
          CheckpointError: if the run was another one, or no checkpoint can be read.
          MemoryError, jax.errors.JaxRuntimeError: if host or device have no room for
            the state. No checkpoint is renamed then.
          RuntimeError: if one of these happened to another process.
        """
        step, failure = self._newest(), None
        while step >= 0:
            try:
                return self._restore(step, shapes, shardings)
            except FailedTogether as error:
                # What a damaged file raises depends on where it is damaged.
                failure = error.__cause__ or error
                self._set_aside(step, failure)
            step = self._newest(below=step)
        if failure is not None:
            raise CheckpointError(
                f"No checkpoint in {self.folder} can be read; they were set aside. "
                "Start the run again without --resume, in another folder."
            ) from failure
        return None

    def close(self) -> None:
        """Waits until everything is on disk."""
        if self._manager is not None:
            self._guarded(_RUNNING, self._manager.wait_until_finished)
            self._release()

    def abandon(self) -> None:
        """Lets go after an error.

        Of several processes others may have died, and a checkpoint that is being
        written is complete only when all of them say so: it is not waited for.
        """
        if jax.process_count() == 1:
            self.close()
        self._manager = None

    def _open(self):
        import orbax.checkpoint as ocp

        if self._manager is None:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self.keep, cleanup_tmp_directories=True
            )
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        return self._manager

    def _guarded(self, which: str, write: Callable[[], Any]) -> None:
        """Runs ``write``; a full disk must not end the training."""
        try:
            write()
        except (OSError, ValueError, RuntimeError) as error:
            self._release()
            warnings.warn(
                f"The checkpoint {which} in {self.folder}, or the one before it, could "
                f"not be written: {_first_line(error)}. Training goes on; "
                f"{self._what_is_left()}.",
                CheckpointWarning,
                stacklevel=4,
            )

    def _what_is_left(self) -> str:
        """The newest complete checkpoint, in words."""
        try:
            steps = self.steps()
        except (OSError, ValueError, RuntimeError):
            steps = []  # not even the folder could be made
        if not steps:
            return "there is no complete checkpoint yet"
        return f"the newest complete checkpoint is that of step {steps[-1]}"

    def _release(self) -> None:
        """Lets a manager go that has failed or is done; the next call makes another."""
        manager, self._manager = self._manager, None
        try:
            if manager is not None:
                manager.close()
        except (OSError, ValueError, RuntimeError):
            return  # the error that has been reported already

    def _restore(self, step: int, shapes: TrainState, shardings: TrainState):
        def read():
            return self._read_all(step, shapes, shardings)

        meta, found = together(read, fatal=_FATAL)
        # Checksums are sums over all processes: only now that all have their arrays.
        return together(lambda: self._snapshot(meta, found), fatal=_FATAL)

    def _newest(self, below: float | int = math.inf) -> int:
        """The newest step that the first process sees, which renames; or -1."""
        found = [step for step in self.steps() if step < below]
        return from_first(max(found, default=-1))

    def _read(self, step: int, items: dict[str, Any]):
        import orbax.checkpoint as ocp

        wanted = {name: ocp.args.StandardRestore(tree) for name, tree in items.items()}
        wanted = wanted or {"meta": ocp.args.JsonRestore()}
        with ocp.Checkpointer(_own_handler(), multiprocessing_options=_alone()) as own:
            args = ocp.args.Composite(**wanted)
            return own.restore(self.folder / str(step), args=args)

    def _read_meta(self, step: int) -> dict[str, Any]:
        meta = self._read(step, {})["meta"]
        if meta["sha256"] != _checksum(meta["content"]):
            raise ValueError("its description is not the one that was saved")
        return meta["content"]

    def _check_identity(self, meta: dict[str, Any]) -> None:
        changed = changed_fields(meta["config"], self.identity.config)
        if meta["data"] != self.identity.data:
            changed.append("the text is another one (its checksum differs)")
        if changed:
            raise _AnotherRun(
                _CHANGED.format(folder=self.folder)
                + "\n".join(f"  {line}" for line in changed)
            )

    def _read_all(self, step: int, shapes: TrainState, shardings: TrainState):
        """Description and arrays; waits for no other process."""
        meta = self._read_meta(step)
        self._check_identity(meta)
        targets = jax.tree.map(
            lambda shape, place: jax.ShapeDtypeStruct(
                shape.shape, shape.dtype, sharding=place
            ),
            shapes,
            shardings,
        )
        whole, owed = _parts(targets)
        items = {"state": whole}
        if owed is not None and meta["ranks"] != self.identity.ranks:
            owed = _as_saved(owed, meta["owed_shapes"])
        if owed is not None:
            items["gradient_residual"] = owed
        return meta, self._read(step, items)

    def _snapshot(self, meta: dict[str, Any], found) -> Snapshot:
        whole, owed = found["state"], found.get("gradient_residual")
        self._compare(meta["fingerprint"], whole, owed)
        same_ranks = meta["ranks"] == self.identity.ranks
        notes = () if same_ranks else (self._what_changed(meta),)
        state = TrainState(**whole, gradient_residual=owed)
        return Snapshot(state, meta["position"], meta["losses"], notes)

    def _compare(self, saved: list[list[int]], whole, owed) -> None:
        found = _numbers(self._fingerprint((whole, owed)))
        if found[0] != saved[0] or (owed is not None and found[1] != saved[1]):
            raise ValueError("an array is not the one that was saved")

    def _what_changed(self, meta: dict[str, Any]) -> str:
        before, now = (_in_words(r) for r in (meta["ranks"], self.identity.ranks))
        return (
            f"The checkpoint is from {before}: parameters and optimizer state were "
            f"resharded for {now}."
        )

    def _set_aside(self, step: int, error: BaseException) -> None:
        self._release()
        here = self.folder / str(step)
        aside = self.folder / f"unreadable-{step}"

        def rename() -> None:
            if jax.process_index() == 0:
                shutil.rmtree(aside, ignore_errors=True)
                here.rename(aside)

        together(rename, fatal=(OSError,))
        warnings.warn(
            f"The checkpoint of step {step} in {self.folder} cannot be read: "
            f"{_first_line(error)}. It was renamed to {aside.name}; the one before it "
            "is tried.",
            CheckpointWarning,
            stacklevel=3,
        )


class _AnotherRun(CheckpointError):
    """The checkpoint is fine, and not of this run."""


# No older checkpoint helps: a device without room says nothing about the files.
_FATAL = (_AnotherRun, MemoryError, jax.errors.JaxRuntimeError)


def _alone():
    """Options for reading that make orbax wait for no other process.

    One that fails would leave the others at a barrier; ``together`` waits instead.
    """
    import orbax.checkpoint as ocp

    process = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=process,
        active_processes={process},
        barrier_sync_key_prefix=f"process-{process}",
    )


def _own_handler():
    import orbax.checkpoint as ocp

    options = ocp.CompositeOptions(multiprocessing_options=_alone())
    return ocp.CompositeCheckpointHandler(composite_options=options)


def _numbers(fingerprints: tuple[Any, Any]) -> list[list[int]]:
    """As JSON holds it: for the state, then for what is owed."""
    # All of them in one transfer: each would wait for the device by itself.
    parts = jax.device_get([jax.tree.leaves(part) for part in fingerprints])
    return [[int(number) for number in part] for part in parts]


def _parts(state: TrainState) -> tuple[dict[str, Any], Any]:
    """What is the same for any mesh, and what belongs to its ranks."""
    whole = {name: getattr(state, name) for name in _KEPT_FOR_ANY_MESH}
    return whole, state.gradient_residual


def _checksum(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _as_saved(owed: Any, shapes: list[list[int]]) -> Any:
    """Targets for what other ranks owed, whole on every device; None if none fit."""
    leaves, tree = jax.tree.flatten(owed)
    if len(leaves) != len(shapes):
        return None
    targets = [
        jax.ShapeDtypeStruct(
            tuple(shape),
            leaf.dtype,
            sharding=NamedSharding(leaf.sharding.mesh, PartitionSpec()),
        )
        for leaf, shape in zip(leaves, shapes, strict=True)
    ]
    return jax.tree.unflatten(tree, targets)


def _in_words(ranks: dict[str, int]) -> str:
    return " x ".join(f"{count} {name}" for name, count in ranks.items()) + " ranks"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
