"""What the commands print: progress on stderr (live on a terminal, lines when piped), results on stdout."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from optuna_dsat import progress
from optuna_dsat.export import TuneResult
from optuna_dsat.outcome import Outcome
from optuna_dsat.spec import StudySpec
from optuna_dsat.words import bytes_in_words, duration_in_words, metric_in_words

__all__ = ["Lines", "LiveView", "make_observer", "show_plan", "show_result"]


def lines_of(news: progress.News, metric: str) -> list[str]:
    """Return the lines that a piece of news is worth."""
    if isinstance(news, progress.Message):
        return [news.text]
    if isinstance(news, progress.ProfileStarted):
        return [f"Profile launch at micro-batch 1, {news.rung} ..."]
    if isinstance(news, progress.ProfileFinished):
        return _profile_lines(news)
    if isinstance(news, progress.SearchStarted):
        before = f", {news.launched} made before" if news.launched else ""
        return [f"Study {news.study}: {news.max_trials} launches{before}, optimising {news.metric}."]
    if isinstance(news, progress.TrialStarted):
        again = f" (attempt {news.attempt + 1})" if news.attempt else ""
        return [f"Trial {news.number}{again}: {news.words} ..."]
    if isinstance(news, progress.TrialFinished):
        return [_finished_line(news, metric)]
    if isinstance(news, progress.FinalistMeasured):
        return [_finalist_line(news, metric)]
    return []


def _profile_lines(news: progress.ProfileFinished) -> list[str]:
    profile = news.profile
    how = "measured before, no launch needed" if news.reused else f"measured with {news.rung}"
    largest = ", ".join(f"ZeRO {stage}: {size}" for stage, size in sorted(news.largest_micro_batches.items()))
    return [
        f"Profile ({how}): {profile.params / 1e6:.4g} M parameters ({profile.trainable_params / 1e6:.4g} M trainable), "
        f"{bytes_in_words(profile.activation_bytes_per_sample)} of activations and "
        f"{profile.flops_per_sample / 1e9:.4g} GFLOP per sample, "
        f"{bytes_in_words(profile.device_memory_bytes)} of memory per rank.",
        f"Largest micro-batch by the memory model: {largest}.",
    ]


def _finished_line(news: progress.TrialFinished, metric: str) -> str:
    text = f"Trial {news.number}: {news.words}: {news.outcome.value}"
    if news.value is not None:
        text += f", {metric_in_words(metric, news.value)}"
    if news.speed_up is not None:
        text += f", {news.speed_up:.2f}x your config"
    if news.best:
        text += ", best so far"
    if news.outcome not in (Outcome.MEASURED, Outcome.PRUNED):
        text += f" ({news.message})"
    return text


def _finalist_line(news: progress.FinalistMeasured, metric: str) -> str:
    if news.value is None or news.low is None or news.high is None:
        return f"Finalist {news.number}: {news.words}: {news.message}"
    return (
        f"Finalist {news.number}: {news.words}: {metric_in_words(metric, news.value)} "
        f"(95 % between {metric_in_words(metric, news.low)} and {metric_in_words(metric, news.high)})"
    )


class Lines:
    """Prints each piece of news as plain lines: for pipes and logs."""

    def __init__(self) -> None:
        self._metric = ""

    def __call__(self, news: progress.News) -> None:
        """Print what is worth a line; single steps are not."""
        if isinstance(news, progress.SearchStarted):
            self._metric = news.metric
        for line in lines_of(news, self._metric):
            print(line, file=sys.stderr, flush=True)


class LiveView:
    """A table of the launches in flight below the lines of those that ended: for terminals."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._running: dict[int, tuple[progress.TrialStarted, float, progress.TrialStepped | None]] = {}
        self._search: progress.SearchStarted | None = None
        self._best: progress.TrialFinished | None = None
        self._launched = 0
        self._started = time.monotonic()
        self._live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._render)

    def __enter__(self) -> LiveView:
        """Start drawing."""
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing and leave the terminal clean."""
        self._live.stop()

    def __call__(self, news: progress.News) -> None:
        """Take in a piece of news."""
        if isinstance(news, progress.SearchStarted):
            self._search = news
            self._launched = news.launched
            self._started = time.monotonic()
        elif isinstance(news, progress.TrialStarted):
            self._running[news.number] = (news, time.monotonic(), None)
            return
        elif isinstance(news, progress.TrialStepped) and news.number in self._running:
            started, since, _ = self._running[news.number]
            self._running[news.number] = (started, since, news)
        elif isinstance(news, progress.TrialFinished):
            self._running.pop(news.number, None)
            self._launched = news.launched
            if news.best:
                self._best = news
        metric = self._search.metric if self._search else ""
        for line in lines_of(news, metric):
            self._console.print(Text(line))

    def _render(self) -> Table | Text:
        if self._search is None:
            return Text("")
        table = Table(title=self._title(), title_justify="left", show_edge=False, pad_edge=False, expand=False)
        for heading in ("trial", "configuration", "step", "samples/s", "running"):
            table.add_column(heading)
        for number, (started, since, step) in sorted(dict(self._running).items()):  # a copy: this runs in a thread
            table.add_row(
                str(number),
                started.words,
                f"{0 if step is None else step.step}/{started.end_profile_step}",
                "" if step is None else f"{step.samples_per_s:.4g}",
                duration_in_words(time.monotonic() - since),
            )
        return table

    def _title(self) -> str:
        search = self._search
        if search is None:
            return ""
        done_here = self._launched - search.launched
        text = f"{self._launched} of {search.max_trials} launches, {len(self._running)} running"
        if self._best is not None and self._best.value is not None:
            text += f"; best {metric_in_words(search.metric, self._best.value)} (trial {self._best.number})"
        if done_here > 0:
            left = (time.monotonic() - self._started) / done_here * (search.max_trials - self._launched)
            text += f"; about {duration_in_words(max(0.0, left))} left"
        return text


@contextmanager
def make_observer(*, quiet: bool) -> Iterator[progress.Observer]:
    """Yield the observer that suits stderr: a live view on a terminal, lines when piped, nothing when quiet."""
    console = Console(stderr=True)
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        with LiveView(console) as view:
            yield view
    else:
        yield Lines()


def show_result(result: TuneResult, *, as_json: bool) -> None:
    """Print what a study found: for people, or as one JSON object."""
    if as_json:
        print(json.dumps(asdict(result), indent=2))
        return
    ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.launches.items()))
    value = metric_in_words(result.metric, result.value)
    if result.low is not None and result.high is not None:
        low, high = metric_in_words(result.metric, result.low), metric_in_words(result.metric, result.high)
        value += f" (95 % between {low} and {high})"
    print(f"The search ended: {result.reason}. Launches: {ended}; {result.slot_minutes:.1f} GPU (or rank) minutes.")
    print(f"Best: trial {result.trial}, {value}")
    if result.speed_up is not None and result.user_value is not None:
        print(
            f"Your own config: {metric_in_words(result.metric, result.user_value)}; "
            f"the best is {result.speed_up:.2f} times as good."
        )
    if result.learning_rate_advice is not None:
        print(result.learning_rate_advice)
    if result.loss_check is not None:
        print(result.loss_check["message"])
    print(json.dumps(dict(result.config), indent=2))
    print(f"Written to {result.config_path}")
    print(f"Metrics in {result.metrics_path}")
    if result.command_names_config:
        print("Train with it:")
    else:
        print(f"Train with it, once your script reads {result.config_path}:")
    print(f"  {result.command}")
    if result.advice:
        print(result.advice)


def show_plan(spec: StudySpec) -> None:
    """Print the space, the profile launch and the first configurations of a study that is not started."""
    import optuna

    from optuna_dsat import ds_config
    from optuna_dsat.profiling import rungs
    from optuna_dsat.study_space import space_of
    from optuna_dsat.tuner import user_config
    from optuna_dsat.words import config_in_words

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = space_of(spec, None)
    console = Console(highlight=False)
    table = Table(title="Search space (bucket sizes are capped by the model's size after the profile launch)")
    for heading in ("knob", "", "where it applies", "choices"):
        table.add_column(heading, overflow="fold")
    for row in space.describe():
        table.add_row(row.knob, row.role, row.where, ", ".join(str(choice) for choice in row.choices))
    console.print(table)
    console.print(f"{space.classes()} classes of configurations beside the micro-batch.")
    words = [rung.words for rung in rungs(spec)]
    console.print(
        f"Profile launch: {spec.slots_per_trial} {'GPUs' if spec.device == 'cuda' else 'CPU ranks'}, micro-batch 1, "
        f"{words[0]}; while memory is short: {', then '.join(words[1:]) or 'nothing else'}."
    )
    config, _ = user_config(spec)
    console.print(f"Your own config: {config_in_words(config)}")
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=spec.random_seed))
    console.print("Configurations such as these follow, their micro-batch bounded by memory:")
    for _ in range(3):
        params = space.suggest(study.ask())
        sample = ds_config.merge(ds_config.effective(spec.ds_config), space.overlay(params))
        sample.pop("train_micro_batch_size_per_gpu", None)
        console.print_json(json.dumps(sample["zero_optimization"]))
