"""Scores as a table for people and as lines for programs."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from echo_jax.records import Record, RecordWriter

Rows = Mapping[str, Mapping[str, float]]  # by set, from ``evaluate_tasks``

_METRICS = ("acc", "acc_norm")


def score_table(rows: Rows, *, model: str, plan: str) -> Table:
    """Accuracies with standard errors, and the bytes that they took.

    Args:
      rows: of each set.
      model: its name.
      plan: its name.
    """
    table = Table(
        *(
            "set",
            "questions",
            "accuracy, %",
            "a character, %",
            "bytes a token and rank",
        ),
        title=f"{model}, plan {plan}",
    )
    for task, row in rows.items():
        cells = [_with_error(row, metric) for metric in _METRICS]
        sent = f"{row['bytes_per_token']:,.0f}"
        table.add_row(task, f"{row['questions']:.0f}", *cells, sent)
    return table


def write_scores(writer: RecordWriter, rows: Rows, config: Mapping[str, Any]) -> None:
    """A record for each metric of each set.

    Args:
      writer: of the file.
      rows: of each set.
      config: what all of them were measured with.
    """
    for task, row in rows.items():
        counts = {key: row[key] for key in ("questions", "bytes_per_token")}
        for metric in _METRICS:
            if metric in row:
                record = Record(
                    experiment="evaluate",
                    metric=metric,
                    value=row[metric],
                    unit="1",
                    spread=row.get(f"{metric}_stderr"),
                    config={**config, "task": task, **counts},
                )
                writer.write(record)


def _with_error(row: Mapping[str, float], metric: str) -> str:
    if metric not in row:
        return "-"
    text, error = f"{100 * row[metric]:.2f}", row.get(f"{metric}_stderr")
    return text if error is None else f"{text} +- {100 * error:.2f}"
