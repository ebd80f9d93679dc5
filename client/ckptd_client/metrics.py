"""Metrics of a save, as the manifest keeps them."""

from __future__ import annotations

from collections.abc import Mapping

from ckptd.errors import Invalid

MAX_METRICS, MAX_METRIC_NAME = 64, 64


def numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics as the manifest keeps them: NaN and infinities too, for a diverged loss is worth recording."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or len(name) > MAX_METRIC_NAME:
            raise Invalid(
                f"metric name {name!r}: expected a text of at most {MAX_METRIC_NAME} characters", field="metrics"
            )
        try:
            found[name] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise Invalid(f"metric {name}: expected one number, found {value!r}"[:500], field="metrics") from error
    if len(found) > MAX_METRICS:
        raise Invalid(f"{len(found)} metrics: expected at most {MAX_METRICS}", field="metrics")
    return found
