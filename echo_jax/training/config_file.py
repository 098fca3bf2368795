"""Configurations as JSON, and what differs between two of them."""

import dataclasses
import json
import pathlib
import types
import typing
from typing import Any, Literal, TypeVar

from echo_jax.files import write_text
from echo_jax.training.config import TrainConfig

Config = TypeVar("Config")

# A run may be continued with other values of these.
_FREE = (
    "checkpoint",
    "data.path",  # the same text may lie elsewhere; its checksum is compared
    "evaluate_every",
    "log_every",
    "model.attention",  # the same function, rounded otherwise
    "model.unroll",
    "mesh",  # the state is resharded
    "tensorboard",
    "variants",
)


def save_config(config: TrainConfig, path: pathlib.Path) -> None:
    """Writes a configuration as JSON; paths become text."""
    write_text(path, json.dumps(to_dict(config), indent=1) + "\n")


def load_config(path: pathlib.Path) -> TrainConfig:
    """Reads what :func:`save_config` wrote, or a file with a part of its fields.

    Raises:
      ValueError: if the file cannot be read, names a field that there is not, or
        holds a value that does not fit.
    """
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"{path} cannot be read as JSON ({reason}): give the config.json of a run, "
            "or a file with some of its fields."
        ) from error
    try:
        return from_dict(TrainConfig, entries)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def to_dict(config) -> dict[str, Any]:
    """A dataclass as what JSON can hold."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def from_dict(kind: type[Config], entries: Any, where: str = "") -> Config:
    """The dataclass that :func:`to_dict` took apart; what is missing is the default.

    Args:
      kind: the dataclass.
      entries: its fields.
      where: the name of the field that holds it, for messages.

    Raises:
      ValueError: naming the field that is wrong.
    """
    if not isinstance(entries, dict):
        raise ValueError(f"{where or 'the file'} must be an object, got {entries!r}.")
    known = {field.name for field in dataclasses.fields(typing.cast(Any, kind))}
    unknown = sorted(set(entries) - known)
    if unknown:
        raise ValueError(
            f"{where or kind.__name__} has no field {unknown[0]!r}: it has "
            f"{', '.join(sorted(known))}."
        )
    hints = typing.get_type_hints(kind)  # without what is there for the command line
    prefix = f"{where}." if where else ""
    fields = {
        name: _value(hints[name], value, prefix + name)
        for name, value in entries.items()
    }
    return kind(**fields)


def changed_fields(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The fields that a run cannot be continued with, each with both values.

    A field that only one of the two knows has its default in the other: a run goes on
    where an older version of this package, which had no such field, stopped.

    Args:
      saved: from :func:`to_dict`, of the run as it was.
      now: of the run as it is asked for.
    """
    default = dict(_flat(to_dict(TrainConfig())))
    before, after = default | dict(_flat(saved)), default | dict(_flat(now))
    return [
        f"{name} was {before.get(name)!r}, is {after.get(name)!r}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name) and not _is_free(name)
    ]


def _is_free(name: str) -> bool:
    return any(name == free or name.startswith(f"{free}.") for free in _FREE)


def _flat(entries: dict[str, Any], prefix: str = ""):
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _value(kind: Any, value: Any, where: str) -> Any:
    """One value as its annotation wants it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (kind,) = (kind for kind in arguments if kind is not type(None))
        return _value(kind, value, where)
    if dataclasses.is_dataclass(kind):
        return from_dict(typing.cast(type, kind), value, where)
    if origin is tuple:
        if isinstance(value, list):
            return tuple(_value(arguments[0], entry, where) for entry in value)
        raise ValueError(f"{where}={value!r} must be a list, such as [{value!r}].")
    if origin is Literal and value in arguments:
        return value
    if kind is pathlib.Path and isinstance(value, str):
        return pathlib.Path(value)
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(kind, type) and type(value) is kind:
        return value
    name = "text" if kind is pathlib.Path else getattr(kind, "__name__", kind)
    wanted = f"one of {arguments}" if arguments else name
    raise ValueError(f"{where}={value!r} must be {wanted}.")
