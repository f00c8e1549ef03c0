"""How a study says what it is doing while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dsflash_jax.training.metrics import DraftMetrics, StepMetrics

Progress = Callable[..., None]  # progress(label, done, total, **metrics), see `experiments.registry.Study.run`
PROGRESS_EVERY = 10  # steps between two reports of a training


def training_report(
    progress: Progress, label: str, also: Callable[[int], Mapping[str, float]] = lambda step: {}
) -> Callable[[StepMetrics | DraftMetrics], None]:
    """What a training calls with the metrics of every step: loss, tokens/s and time left are reported.

    also: called with every step, gives more values to report.
    """

    def report(metrics: StepMetrics | DraftMetrics) -> None:
        more = also(metrics.step)
        if metrics.step % PROGRESS_EVERY == 0 or metrics.step == metrics.steps:
            progress(
                label, metrics.step, metrics.steps, loss=metrics.loss, tokens_per_second=metrics.tokens_per_second,
                seconds_left=metrics.seconds_left, **more,
            )  # fmt: skip

    return report
