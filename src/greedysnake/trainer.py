"""Trains as a configuration says: steps, evaluation, checkpoints, and an orderly end when a signal asks for it."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from rich.console import Console

from greedysnake.config import METRICS, RUN_ID, Config, load_config
from greedysnake.errors import ConfigError, StorageError, explained
from greedysnake.preparation import Prepared, open_engine, prepare, require_same_model, why_not_compiled
from greedysnake.report.metrics import MetricsFile, as_json, step_record
from greedysnake.report.progress import (
    Progress,
    Prospect,
    Summary,
    data_text,
    home_table,
    lost_terminal,
    prospect_text,
    summary_text,
)
from greedysnake.report.trackers import Tracker, numbers_of, open_trackers
from greedysnake.runs import Run, begin_run, note_run, one_at_a_time
from greedysnake.runtime.engine import Engine
from greedysnake.settings import Plain, plain
from greedysnake.threads import torch_threads

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TOKENISING_LINE_S = 10.0
UNWRITTEN = "unwritten_metrics"
"""In a checkpoint: the line of its step, where metrics.jsonl had no room for it."""


class Trainer:
    """One run: continues from the checkpoint in its output_dir if there is one, else begins.

    Everything is checked when it is made; nothing but the cache of tokenised data is written before `train`.
    """

    def __init__(
        self, config: Config | str | Path | Mapping[str, Plain] | None = None, *, console: Console | None = None
    ) -> None:
        """`config` may be a file or a mapping as well; None is the default configuration."""
        self.config = config if isinstance(config, Config) else load_config(config)
        self._console = console or Console()
        self._spoke_s = time.monotonic()
        self.prepared: Prepared = prepare(self.config, self._tokenised)

    def train(self) -> Summary:
        """Trains to the end, or until SIGTERM, SIGINT or SIGHUP, after which the step under way is finished and saved.

        A second signal ends the process at once.
        """
        prepared, config = self.prepared, self.config
        directory = Path(config.output_dir)
        with ExitStack() as resources:
            with explained("use", directory):
                directory.mkdir(parents=True, exist_ok=True)
                resources.enter_context(one_at_a_time(directory))
            resources.enter_context(torch_threads(config.engine.compute_threads))
            engine = resources.enter_context(
                open_engine(
                    config,
                    prepared.model,
                    device=prepared.device,
                    ram=prepared.ram,
                    resume=prepared.resume,
                    plan=prepared.footprint.plan,
                )
            )
            first = engine.num_steps
            if prepared.run:
                prepared.run.require_own(engine.metadata, config.storage[0])
            if prepared.resume:
                require_same_model(engine, prepared.model_values, config.output_dir)
                _require_same_data(engine, prepared)
            run = begin_run(config, prepared.run)
            with lost_terminal():
                self._console.print(home_table(prepared.footprint))
            validation = prepared.validation.report if prepared.validation else None
            self._say(data_text(prepared.train.report, validation))
            self._say(prospect_text(prepared.footprint, self._prospect(first)))
            metrics = resources.enter_context(MetricsFile(directory / METRICS, last_step=first))
            trackers = open_trackers(
                config.training.report_to,
                directory,
                run_name=config.training.run_name or directory.absolute().name,
                settings=plain(config),
                first_step=first,
            )
            for tracker in trackers:
                resources.callback(tracker.close)
            progress = resources.enter_context(
                Progress(self._console, num_steps=prepared.num_steps, every=config.training.logging_steps)
            )
            summary = _Training(prepared, run, engine, metrics, trackers, progress).go()
        self._say(summary_text(summary))
        return summary

    def _say(self, text: str) -> None:
        with lost_terminal():
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _tokenised(self, num_rows: int, num_tokens: int) -> None:
        """A line now and then: large data take a while."""
        if time.monotonic() - self._spoke_s >= TOKENISING_LINE_S:
            self._spoke_s = time.monotonic()
            self._say(f"tokenising: {num_rows:,} rows, {num_tokens:,} tokens so far")

    def _prospect(self, first_step: int) -> Prospect:
        training = self.config.training
        return Prospect(
            output_dir=self.config.output_dir,
            device=self.prepared.device,
            dtype=self.config.dtype,
            num_steps=self.prepared.num_steps,
            first_step=first_step,
            num_micro_batches=training.gradient_accumulation_steps,
            micro_batch_size=training.per_device_train_batch_size,
            sequence_length=training.sequence_length,
            not_compiled=why_not_compiled(self.config, self.prepared.device),
        )


def _require_same_data(engine: Engine, prepared: Prepared) -> None:
    """A position in other data than those of the checkpoint means nothing, nor a loss on other held-out data."""
    had, had_held_out = (engine.metadata.get(name) for name in ("data_fingerprint", "validation_fingerprint"))
    if had != prepared.train.fingerprint:
        key = "data.paths"
    elif prepared.validation and had_held_out and had_held_out != prepared.validation.fingerprint:
        key = "data.validation_paths"
    else:
        return
    raise ConfigError(
        f"{key}: the data are not those of the checkpoint of step {engine.num_steps} in "
        f"{prepared.config.output_dir}: files or tokenizer changed since: restore them, or start anew in another "
        "output_dir"
    )


class _Training:
    """The loop, with what it counts."""

    def __init__(
        self,
        prepared: Prepared,
        run: Run,
        engine: Engine,
        metrics: MetricsFile,
        trackers: list[Tracker],
        progress: Progress,
    ) -> None:
        self._prepared = prepared
        self._run = run
        self._training = prepared.config.training
        self._engine = engine
        self._metrics = metrics
        self._trackers = trackers
        self._progress = progress
        self._num_tokens = int(str(engine.metadata.get("num_tokens", 0)))
        self._saved_step = engine.num_steps if prepared.resume else -1
        had = engine.metadata.get("validation_fingerprint")  # kept by a part of the run that does not evaluate
        self._validation_fingerprint = prepared.validation.fingerprint if prepared.validation else had
        self._loss: float | None = None
        self._eval_loss: float | None = None

    def go(self) -> Summary:
        start_s = time.monotonic()
        self._write_what_found_no_room()
        with stop_requests() as requests, ExitStack() as afterwards:
            freezes = not gc.get_freeze_count()  # asked once: it counts all that is frozen, one by one
            while self._engine.num_steps < self._prepared.num_steps and not requests:
                record = self._step()
                if freezes:  # all is loaded now: looking through it again would stop the lanes
                    gc.collect()
                    gc.freeze()
                    freezes = False
                    afterwards.callback(gc.unfreeze)
                if self._is_due(self._training.eval_steps):
                    loss = self._evaluate(requests)
                    if loss is not None:
                        record["eval_loss"] = self._eval_loss = loss
                self._report(record)
                if self._is_due(self._training.save_steps):
                    self._save()
            self._save()
            if self._lacks_last_loss() and not requests:
                self._make_up_evaluation(requests)
            is_done = self._engine.num_steps >= self._prepared.num_steps and not self._lacks_last_loss()
        return Summary(
            output_dir=self._prepared.config.output_dir,
            num_steps=self._engine.num_steps,
            total_steps=self._prepared.num_steps,
            loss=self._loss,
            eval_loss=self._eval_loss,
            num_tokens=self._num_tokens,
            num_skipped=self._engine.num_skipped,
            elapsed_s=time.monotonic() - start_s,
            ssd_written_bytes=self._engine.ssd_written_bytes,
            stopped_by=requests[0] if requests and not is_done else None,
            overwrites=self._prepared.config.overwrite_output_dir,
        )

    def _step(self) -> dict[str, object]:
        """The data and the rate of a step follow from its number alone, so a resumed run has the same."""
        step, count = self._engine.num_steps, self._prepared.num_micro_batches
        batches = self._prepared.train.micro_batches(step * count, count)
        lr = self._prepared.rate.at(step)
        result = self._engine.step(batches, lr=lr)
        self._num_tokens += result.num_tokens
        self._loss = result.loss
        if result.skipped:
            self._progress.say(f"step {step + 1} is skipped: its gradient is not finite")
        return step_record(step + 1, result, lr=lr, ssd_written_total_bytes=self._engine.ssd_written_bytes)

    def _is_due(self, every: int | None) -> bool:
        step = self._engine.num_steps
        return bool(every) and (step % (every or 1) == 0 or step == self._prepared.num_steps)

    def _evaluate(self, requests: list[str]) -> float | None:
        """The loss on held-out data, as many micro-batches at a time as in a step; None when asked to stop."""
        batches = self._prepared.validation
        assert batches is not None
        count = batches.num_micro_batches_per_epoch
        count = min(self._training.max_eval_batches or count, count)
        total, num_targets = 0.0, 0
        for position in range(0, count, self._prepared.num_micro_batches):
            if requests:
                return None
            group = batches.micro_batches(position, min(self._prepared.num_micro_batches, count - position))
            targets = sum(int(self._prepared.model.num_targets(batch)) for batch in group)
            total += self._engine.evaluate(group) * targets
            num_targets += targets
        return total / num_targets

    def _lacks_last_loss(self) -> bool:
        """Whether all steps are done but the evaluation at the end, as when a signal came during it."""
        last, step = self._metrics.last, self._engine.num_steps
        evaluates = self._prepared.validation is not None and step == self._prepared.num_steps
        return evaluates and last is not None and last["step"] == step and "eval_loss" not in last

    def _make_up_evaluation(self, requests: list[str]) -> None:
        loss = self._evaluate(requests)
        if loss is None:
            return
        self._eval_loss = loss
        self._metrics.amend({"eval_loss": loss})
        for tracker in self._trackers:
            tracker.log(self._engine.num_steps, {"eval_loss": loss})

    def _report(self, record: Mapping[str, object]) -> None:
        try:
            self._metrics.write(record)
        except StorageError:
            # The drive of the metrics is full, not that of the state: neither the steps done need be lost nor the line.
            self._save(unwritten=as_json(record))
            raise
        step = int(str(record["step"]))
        for tracker in self._trackers:
            tracker.log(step, numbers_of(record))
        self._progress.step(record)

    def _write_what_found_no_room(self) -> None:
        """The line of the step that is continued from, if its drive was full then."""
        record, last = self._engine.metadata.get(UNWRITTEN), self._metrics.last
        if isinstance(record, dict) and (last is None or int(str(last["step"])) < record["step"]):
            self._metrics.write(record)

    def _save(self, unwritten: Mapping[str, object] | None = None) -> None:
        """Publishes a checkpoint, unless this step has one, with the line of the last step if it is in no file."""
        if self._saved_step == self._engine.num_steps:
            return
        try:
            if unwritten is None:
                self._metrics.sync()
        finally:  # the metrics' drive failed, not that of the state
            self._publish(unwritten)

    def _publish(self, unwritten: Mapping[str, object] | None) -> None:
        position = self._engine.num_steps * self._prepared.num_micro_batches
        self._engine.save(
            {
                "num_tokens": self._num_tokens,
                "data_position": position,
                "data_fingerprint": self._prepared.train.fingerprint,
                "validation_fingerprint": self._validation_fingerprint,
                "model": self._prepared.model_values,
                RUN_ID: self._run.run_id,
                **({} if unwritten is None else {UNWRITTEN: unwritten}),
            }
        )
        if not self._run.has_checkpoint:
            self._run = replace(self._run, has_checkpoint=True)
            note_run(self._run)
        self._saved_step = self._engine.num_steps


@contextmanager
def stop_requests() -> Iterator[list[str]]:
    """The names of the signals that arrived. From the first one on, SIGTERM and SIGINT do what they do by default.

    Only the main thread is told of signals; elsewhere the list stays empty.
    """
    requests: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return

    def note(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        requests.append(name)
        with suppress(OSError):  # not print, which may be what was interrupted
            os.write(2, f"\n{name}: the step under way is finished and saved; a second signal ends at once\n".encode())
        for other in SIGNALS:  # a terminal that closes sends SIGHUP more than once, without being impatient
            signal.signal(other, signal.SIG_IGN if other == signal.SIGHUP else signal.SIG_DFL)

    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as nohup asks for
    noted = [number for number in SIGNALS if number != signal.SIGHUP or not ignores_hangup]
    before = {number: signal.signal(number, note) for number in noted}
    try:
        yield requests
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
