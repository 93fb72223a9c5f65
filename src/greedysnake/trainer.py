"""Trains as a configuration says: steps, evaluation, checkpoints, and an orderly end when a signal asks for it.

Of several ranks each trains on micro-batches of its own. The first one alone writes and prints; where it cannot, it
tells the others, who would wait for it.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console

from greedysnake.config import METRICS, RUN_ID, Config, load_config
from greedysnake.data.batches import deal
from greedysnake.errors import ConfigError, RankError, StorageError, explained
from greedysnake.preparation import (
    Prepared,
    leaving_nothing,
    open_engine,
    prepare,
    why_not_compiled,
)
from greedysnake.preplanning import plan_apart, require_one_process
from greedysnake.report.journal import Journal
from greedysnake.report.metrics import MetricsFile, as_json, of_all_ranks, step_record
from greedysnake.report.progress import (
    Progress,
    Prospect,
    Summary,
    data_text,
    home_table,
    lost_terminal,
    prospect_text,
    stop_notice,
    summary_text,
)
from greedysnake.report.trackers import open_trackers
from greedysnake.run_model import require_same_model
from greedysnake.runs import Run, begin_run, note_run, one_at_a_time
from greedysnake.runtime.engine import Engine
from greedysnake.runtime.ranks import Ranks
from greedysnake.settings import Plain, plain
from greedysnake.threads import torch_threads

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TOKENISING_LINE_S = 10.0
UNWRITTEN = "unwritten_metrics"
"""In a checkpoint: the line of its step, where metrics.jsonl had no room for it."""
HOST = torch.device("cpu")
CALL = "train()"
"""What ranks are in when they tell each other something here."""


class Trainer:
    """One run: continues from the checkpoint in its output_dir if there is one, else begins.

    Everything is checked when it is made; nothing but the cache of tokenised data is written before `train`.
    Where torch.distributed is set up with several ranks, all of them make one and call `train`.
    """

    def __init__(
        self, config: Config | str | Path | Mapping[str, Plain] | None = None, *, console: Console | None = None
    ) -> None:
        """`config` may be a file or a mapping as well; None is the default configuration."""
        self.config = config if isinstance(config, Config) else load_config(config)
        self._console = console or Console()
        self._spoke_s = time.monotonic()
        self.prepared: Prepared = self._prepare()

    def _prepare(self) -> Prepared:
        with leaving_nothing(self.config), closing(Ranks(HOST, lanes=())) as ranks, ranks.together(CALL):
            prepared = prepare(self.config, self._tokenised, ranks.share)
            held_out = prepared.validation and prepared.validation.fingerprint
            fingerprints = {"the data": prepared.train.fingerprint, "the held-out data": held_out}
            ranks.agree(CALL, {f"the fingerprint of {name}": value for name, value in fingerprints.items()})
            return prepared

    def train(self, *, plan_first: bool = False) -> Summary:
        """Trains to the end, or until SIGTERM, SIGINT or SIGHUP, after which the step under way is finished and saved.

        A second signal ends the process at once. Of several ranks, one that gets a signal stops all. `plan_first` is
        for one process: if steps are left, they are planned, and done as planned.
        """
        if plan_first:
            require_one_process(self.prepared.share.num_ranks)
        with ExitStack() as resources:
            self._take_folder(resources)
            if plan_first and self.prepared.num_done < self.prepared.num_steps:
                self.config = plan_apart(self.config)
                self.prepared = self._prepare()
            prepared = self.prepared
            config = prepared.config
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
            with engine.ranks.together(CALL):
                if prepared.run:
                    prepared.run.require_own(engine.metadata, config.storage[0])
                if prepared.resume:
                    require_same_model(engine, prepared.model_values, config.output_dir)
                    _require_same_data(engine, prepared)
                run = begin_run(config, prepared.run) if self._is_first else None
                journal = self._open_journal(engine.num_steps, resources) if self._is_first else None
                summary = _Training(prepared, engine, run, journal).go()
        self._say(summary_text(summary))
        return summary

    @property
    def _is_first(self) -> bool:
        """Whether this rank writes and prints for all."""
        return self.prepared.share.rank == 0

    def _take_folder(self, resources: ExitStack) -> None:
        """Before anything is stored. All ranks are told if another training has it."""
        directory = Path(self.config.output_dir)
        with closing(Ranks(HOST, lanes=())) as ranks, ranks.together(CALL):
            if self._is_first:
                with explained("use", directory):
                    directory.mkdir(parents=True, exist_ok=True)
                    resources.enter_context(one_at_a_time(directory))
            ranks.exchange(CALL, None)

    def _open_journal(self, first: int, resources: ExitStack) -> Journal:
        """Says what is about to happen, then opens what `first` and later steps are written to."""
        prepared, config, directory = self.prepared, self.config, Path(self.config.output_dir)
        with lost_terminal():
            self._console.print(home_table(prepared.footprint, prepared.share.num_ranks))
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
        progress = Progress(self._console, num_steps=prepared.num_steps, every=config.training.logging_steps)
        return Journal(metrics, trackers, resources.enter_context(progress))

    def _say(self, text: str) -> None:
        if self._is_first:
            self._print(text)

    def _print(self, text: str) -> None:
        with lost_terminal():
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _tokenised(self, num_rows: int, num_tokens: int) -> None:
        """A line now and then: large data take a while. Whichever rank it is that tokenises says so."""
        if time.monotonic() - self._spoke_s >= TOKENISING_LINE_S:
            self._spoke_s = time.monotonic()
            self._print(f"tokenising: {num_rows:,} rows, {num_tokens:,} tokens so far")

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
            num_ranks=self.prepared.share.num_ranks,
            num_gpus=torch.cuda.device_count() if self.prepared.device == "cuda" else 0,
            moments=training.adam_moments,
            layers_per_block=self.prepared.model.layers_per_block,
            keeps_on_device=self.config.engine.keeps_on_device,
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

    def __init__(self, prepared: Prepared, engine: Engine, run: Run | None, journal: Journal | None) -> None:
        """The first rank has the folder of the run and the journal."""
        self._prepared = prepared
        self._training = prepared.config.training
        self._engine = engine
        self._run = run
        self._journal = journal
        self._num_tokens = int(str(engine.metadata.get("num_tokens", 0)))
        self._saved_step = engine.num_steps if prepared.resume else -1
        had = engine.metadata.get("validation_fingerprint")  # kept by a part of the run that does not evaluate
        self._validation_fingerprint = prepared.validation.fingerprint if prepared.validation else had
        self._loss: float | None = None
        self._eval_loss: float | None = None
        self._requests: list[str] = []
        self._stopped_by: str | None = None
        self._problem: StorageError | None = None
        """Why the metrics could not be kept: their drive is full, say, not that of the state."""
        self._unwritten: Mapping[str, object] | None = None
        """The line of the last step, if it is in no file."""

    def go(self) -> Summary:
        start_s = time.monotonic()
        self._write_what_found_no_room()
        with stop_requests(aloud=self._journal is not None) as self._requests, ExitStack() as afterwards:
            freezes = not gc.get_freeze_count()  # asked once: it counts all that is frozen, one by one
            while not self._is_asked_to_stop() and self._engine.num_steps < self._prepared.num_steps:
                record = self._step()
                if freezes:  # all is loaded now: looking through it again would stop the lanes
                    gc.collect()
                    gc.freeze()
                    freezes = False
                    afterwards.callback(gc.unfreeze)
                if self._is_due(self._training.eval_steps):
                    loss = self._evaluate()
                    if loss is not None:
                        record["eval_loss"] = self._eval_loss = loss
                self._report(record)
                if self._is_due(self._training.save_steps):
                    self._save()
            self._save()
            lacks_loss = self._lacks_last_loss()
            if lacks_loss and not self._is_asked_to_stop():
                lacks_loss = not self._make_up_evaluation()
            is_done = self._engine.num_steps >= self._prepared.num_steps and not lacks_loss
            self._is_asked_to_stop()  # after the last line and checkpoint: none ends well unless all do
        elapsed_s = time.monotonic() - start_s
        return Summary(
            output_dir=self._prepared.config.output_dir,
            num_steps=self._engine.num_steps,
            total_steps=self._prepared.num_steps,
            loss=self._loss,
            eval_loss=self._eval_loss,
            num_tokens=self._num_tokens,
            num_skipped=self._engine.num_skipped,
            elapsed_s=elapsed_s,
            ssd_written_bytes=sum(self._engine.ranks.exchange(CALL, self._engine.ssd_written_bytes)),
            stopped_by=None if is_done else self._stopped_by,
            overwrites=self._prepared.config.overwrite_output_dir,
        )

    def _is_asked_to_stop(self) -> bool:
        """Whether any rank was: all of them end after the same step. So they do where the first could not keep the
        metrics, with a checkpoint: neither the steps done need be lost nor the line."""
        problem = None if self._problem is None else f"{type(self._problem).__name__}: {self._problem}"
        asked, problems = zip(*self._engine.ranks.exchange(CALL, (self._requests[:1], problem)), strict=True)
        if problems[0] is not None:
            self._save()
            raise self._problem or RankError(f"rank 0 failed: {problems[0]}")
        self._stopped_by = next((name for names in asked for name in names), None)
        return self._stopped_by is not None

    def _step(self) -> dict[str, object]:
        """The data and the rate of a step follow from its number alone, so a resumed run has the same."""
        step, count, share = self._engine.num_steps, self._prepared.num_micro_batches, self._prepared.share
        batches = self._prepared.train.micro_batches((step * share.num_ranks + share.rank) * count, count)
        lr = self._prepared.rate.at(step)
        own = self._engine.step(batches, lr=lr)
        results, written = zip(*self._engine.ranks.exchange(CALL, (own, self._engine.ssd_written_bytes)), strict=True)
        result = of_all_ranks(results)
        self._num_tokens += result.num_tokens
        self._loss = result.loss
        if result.skipped and self._journal:
            self._journal.say(f"step {step + 1} is skipped: its gradient is not finite")
        return step_record(step + 1, result, lr=lr, ssd_written_total_bytes=sum(written))

    def _is_due(self, every: int | None) -> bool:
        step = self._engine.num_steps
        return bool(every) and (step % (every or 1) == 0 or step == self._prepared.num_steps)

    def _evaluate(self) -> float | None:
        """The loss on held-out data, as many micro-batches at a time as in a step; None when asked to stop."""
        batches, share = self._prepared.validation, self._prepared.share
        assert batches is not None
        count = batches.num_micro_batches_per_epoch
        count = min(self._training.max_eval_batches or count, count)
        total, num_targets = 0.0, 0
        for position in range(0, count, self._prepared.num_step_micro_batches):
            if self._is_asked_to_stop():
                break
            if self._journal:
                self._journal.evaluating(position, count)
            group = batches.micro_batches(position, min(self._prepared.num_step_micro_batches, count - position))
            targets = sum(int(self._prepared.model.num_targets(batch)) for batch in group)
            total += self._engine.evaluate(deal(group, share.rank, share.num_ranks)) * targets
            num_targets += targets
        if self._journal:
            self._journal.evaluated()
        return None if self._stopped_by else total / num_targets

    def _lacks_last_loss(self) -> bool:
        """Whether all steps are done but the evaluation at the end, as when a signal came during it."""
        last, step = self._journal.last if self._journal else None, self._engine.num_steps
        lacks = last is not None and last["step"] == step and "eval_loss" not in last
        evaluates = self._prepared.validation is not None and step == self._prepared.num_steps
        return evaluates and self._engine.ranks.exchange(CALL, lacks)[0]

    def _make_up_evaluation(self) -> bool:
        """Whether it was done."""
        loss = self._evaluate()
        if loss is None:
            return False
        self._eval_loss = loss
        if self._journal:
            self._journal.amend({"eval_loss": loss})
        return True

    def _report(self, record: Mapping[str, object]) -> None:
        """A line that cannot be written is kept with a checkpoint, which all ranks make when they hear of it."""
        if self._journal is None:
            return
        try:
            self._journal.write(record)
        except StorageError as error:
            self._problem, self._unwritten = error, as_json(record)

    def _write_what_found_no_room(self) -> None:
        """The line of the step that is continued from, if its drive was full then."""
        record = self._engine.metadata.get(UNWRITTEN)
        if self._journal is None or not isinstance(record, dict):
            return
        last = self._journal.last
        if last is None or int(str(last["step"])) < record["step"]:
            self._journal.write_late(record)

    def _save(self) -> None:
        """Publishes a checkpoint, unless this step has one, with the line of the last step if it is in no file."""
        if self._saved_step == self._engine.num_steps:
            return
        if self._journal and self._unwritten is None:
            try:
                self._journal.sync()
            except StorageError as error:  # of the metrics' drive, not of that of the state
                self._problem = error
        self._engine.save(self._metadata(self._run) if self._run else None)
        if self._run and not self._run.has_checkpoint:
            self._run = replace(self._run, has_checkpoint=True)
            note_run(self._run)
        self._saved_step = self._engine.num_steps

    def _metadata(self, run: Run) -> dict[str, object]:
        """That of the first rank is every rank's."""
        return {
            "num_tokens": self._num_tokens,
            "data_position": self._engine.num_steps * self._prepared.num_step_micro_batches,
            "data_fingerprint": self._prepared.train.fingerprint,
            "validation_fingerprint": self._validation_fingerprint,
            "model": self._prepared.model_values,
            RUN_ID: run.run_id,
            **({} if self._unwritten is None else {UNWRITTEN: self._unwritten}),
        }


@contextmanager
def stop_requests(*, aloud: bool = True) -> Iterator[list[str]]:
    """The names of the signals that arrived. From the first one on, SIGTERM and SIGINT do what they do by default. What
    happens then is said `aloud`, or by another rank.

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
            if aloud:
                os.write(2, stop_notice(name, is_terminal=os.isatty(2)).encode())
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
