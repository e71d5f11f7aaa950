"""Continuous batching over one model. Single-threaded: `worker.py` runs it in a separate thread.

Letters: B running samples, P prompt tokens, S tokens of a sample, V vocabulary.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_like.types import Finish
from rollout.embedded.cache.kv_cache import KVCache
from rollout.embedded.device.transfers import Transfers
from rollout.embedded.engine.admission import Admission, Admitted
from rollout.embedded.engine.capture import RouteCapture, RoutingRows
from rollout.embedded.engine.fair_share import DEVICE_STEP_ROWS, STEP_ROWS, in_turn
from rollout.embedded.engine.requests import Completed, Entry, Group, Job, PromptSpec, SampledToken
from rollout.embedded.engine.running import Rows
from rollout.embedded.engine.sampler import Draw, likeliest, sample, stream_keys
from rollout.embedded.model.batch import ForwardBatch
from rollout.embedded.model.layout import SequenceRows, joined, lay_out, lay_out_decode
from rollout.embedded.model.model import Model
from rollout.wire.control import PauseMode
from rollout.wire.generate import GenerateReply, reply_id
from rollout.wire.layer_states import FLAG
from rollout.wire.scores import PromptTop

_PIECE = 1024  # tokens of one prompt in one forward pass
_GATHER_BYTES = 1 << 20  # of a layer's cache in one attention call: fits in a core's cache
_DEVICE_GATHER_BYTES = 1 << 24, 1 << 28  # the same of prompts, of which all scores are in memory, and of decoded tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    max_running: int = 512  # samples in a batch
    max_total_tokens: int = 65536  # cache slots
    context_length: int = 1024  # tokens of a sample
    prefill_tokens: int = 4096  # in one forward pass; a longer prompt takes several
    page: int = 16
    routes: bool = True  # keep the experts' ids
    gates: bool = False  # keep their gate weights too
    prefixes: bool = True  # reuse pages of ended sequences
    states: bool = False  # serve requests for the residual stream at every layer


class Engine:
    """Runs prompts on one model by continuous batching. Call `step` until it returns False; results are passed to each
    group's `deliver`."""

    def __init__(self, model: Model, limits: EngineLimits, *, version: str = "default") -> None:
        self.model = model
        self.limits = limits
        self._transfers = Transfers(model.device)
        self.cache = KVCache(
            model.arch,
            slots=limits.max_total_tokens,
            page=limits.page,
            dtype=model.dtype,
            width=model.cache_width,
            routes=limits.routes,
            gates=limits.gates,
            prefixes=limits.prefixes,
            transfers=self._transfers,
        )
        self.version = version
        self.paused = False
        self.hold = False  # start no new samples, so that the running ones drain
        self.refusal = ""  # why no prompt is taken, as one sentence; "": prompts are taken
        self.generated = 0  # tokens since the start
        self._requests = 0  # since the start
        self._rows = Rows(limits.max_running)
        self._admission = Admission(
            self.cache, self._rows, prefill_tokens=limits.prefill_tokens, eos_ids=model.arch.eos_ids
        )
        self._capture = RouteCapture(self.cache, version, self._transfers) if limits.routes else None
        self._active: NDArray[np.int64] = np.zeros(0, np.int64)  # rows, shortest first
        self._step_rows = STEP_ROWS if self._transfers.on_host else DEVICE_STEP_ROWS
        token = model.cache_width * torch.finfo(model.dtype).bits // 8
        fed, decoded = (_GATHER_BYTES, _GATHER_BYTES) if self._transfers.on_host else _DEVICE_GATHER_BYTES
        self._fed = {"width_bytes": fed, "token_bytes": token}
        self._gather = {"width_bytes": decoded, "token_bytes": token}

    # ---- requests

    def submit(self, spec: PromptSpec, deliver: Callable[[list[Completed]], None]) -> None:
        """Queues one prompt; `deliver` is called with its samples. Raises ValueError when the request can never run."""
        self.queue([self.make_entry(spec, deliver)])

    def make_entry(self, spec: PromptSpec, deliver: Callable[[list[Completed]], None]) -> Entry:
        """Prepares an entry for `queue` without changing the engine. Raises ValueError when the request can never
        run, and while prompts are refused."""
        if self.refusal:
            raise ValueError(self.refusal)
        self.check(spec)
        group = Group(spec=spec, deliver=deliver, done=[None] * spec.n)
        seed = spec.sampling.sampling_seed
        keys = stream_keys(secrets.randbits(63) if seed is None else seed, np.arange(spec.n) + spec.first_index)
        jobs = deque(Job(group=group, index=i, key=int(k)) for i, k in enumerate(keys))
        for job in jobs:
            job.note_version(self.version, 0)
        return self._entry(group, np.array(spec.token_ids, np.int64), jobs)

    def queue(self, entries: Sequence[Entry]) -> None:
        """Queues the prompts of one request, in order; the entries were made since the last step."""
        self._requests += 1
        samples = sum(len(e.jobs) for e in entries if e.spec.sampling.max_new_tokens)
        for entry in entries:
            entry.group.request, entry.group.request_samples = self._requests, samples
        self._admission.queue.extend(entries)

    def _entry(self, group: Group, tokens: NDArray[np.int64], jobs: deque[Job]) -> Entry:
        return Entry(group=group, tokens=tokens, jobs=jobs, hashes=self.cache.prefixes.hashes(tokens))

    def check(self, spec: PromptSpec) -> None:
        """Raises ValueError, with both numbers, for a request that can never run."""
        p, arch = len(spec.token_ids), self.model.arch
        if spec.limit > self.limits.context_length:
            raise ValueError(
                f"{p} prompt tokens and max_new_tokens = {spec.sampling.max_new_tokens} make {spec.limit} tokens, "
                f"more than the context length {self.limits.context_length}: shorten the prompt or lower "
                "max_new_tokens"
            )
        if spec.routing_start is not None and self._capture is None:
            raise ValueError(
                "return_routed_experts: this server does not keep expert ids: start it with "
                "--enable-return-routed-experts"
            )
        if spec.gates and not self.limits.gates:
            raise ValueError(
                "return_routed_weights: this server does not keep gate weights: start it with "
                "--enable-return-routed-weights"
            )
        if spec.states and not self.limits.states:
            raise ValueError(f"return_layer_states: this server does not return layer states: start it with {FLAG}")
        if spec.top > arch.vocab:
            raise ValueError(
                f"top_logprobs_num = {spec.top}, but the vocabulary has {arch.vocab} tokens: request fewer"
            )
        for what, ids in (("token id", spec.token_ids), ("stop token id", spec.sampling.stop_token_ids)):
            if ids and not (min(ids) >= 0 and max(ids) < arch.vocab):
                wrong = min(ids) if min(ids) < 0 else max(ids)
                raise ValueError(f"{what} {wrong} is outside this model's vocabulary of {arch.vocab}")
        need, have = self._admission.slots_needed(spec), self.cache.pages * self.cache.page
        if need > have:
            raise ValueError(
                f"a sample of {spec.limit} tokens needs {need} cache slots, but the cache has {have}: raise "
                "max_total_tokens or lower max_new_tokens"
            )
        for what, start, lowest in (
            ("logprob_start_len", spec.logprob_start, -1),
            ("routed_experts_start_len", spec.routing_start or 0, 0),
        ):
            if not lowest <= start <= p:
                raise ValueError(f"{what} = {start} is outside the prompt's {p} tokens")

    @property
    def running(self) -> int:
        return len(self._active)

    @property
    def waiting(self) -> int:
        return sum(len(e.jobs) for e in self._admission.queue)

    @property
    def idle(self) -> bool:
        """Whether no request holds cache pages; requests may wait."""
        return not self.running and not any(e.pages for e in self._admission.queue)

    def has_request(self, rid: str) -> bool:
        """Whether samples of a prompt with this rid run or wait."""
        running = (self._admission.jobs[row].group for row in self._active.tolist())
        waiting = (entry.group for entry in self._admission.queue)
        return any(group.spec.rid == rid for group in itertools.chain(running, waiting))

    def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """Ends samples with the tokens they have. Matches rids by prefix, like SGLang's scheduler; an unknown rid has
        no effect."""
        self._abort(lambda group: everything or (rid != "" and group.spec.rid.startswith(rid)))

    def abort_groups(self, groups: Collection[Group]) -> None:
        """Ends the samples of these groups with the tokens they have."""
        wanted = set(map(id, groups))
        self._abort(lambda group: id(group) in wanted)

    def _abort(self, matches: Callable[[Group], bool]) -> None:
        rows = np.array([r for r in self._active if matches(self._admission.jobs[r].group)], np.int64)
        self._finish(rows, [Finish.ABORT] * len(rows))
        for entry in list(self._admission.queue):
            dropped = [j for j in entry.jobs if matches(j.group)]
            entry.jobs = deque(j for j in entry.jobs if not matches(j.group))
            if not entry.jobs:
                self._admission.queue.remove(entry)
                self.cache.release(entry.pages)
            for job in dropped:
                self._complete(job, job.kept_ids, job.kept_logprobs, Finish.ABORT, job.kept_rows)

    # ---- pause, flush, weights

    def pause(self, mode: PauseMode) -> None:
        """ABORT ends all samples; RETRACT returns running samples to the queue and frees the cache; IN_PLACE keeps them
        and their cache."""
        self.paused = True
        if mode is PauseMode.ABORT:
            self.abort(everything=True)
        elif mode is PauseMode.RETRACT:
            self._retract()

    def resume(self) -> None:
        self.paused = False

    def flush(self) -> bool:
        """Drops all prefixes. Returns False, without effect, while requests hold pages."""
        if self.idle:
            self.cache.forget_prefixes()
        return self.idle

    def weights_changed(self) -> None:
        """Drops all prefixes; prompts that were fed for samples yet to start will be fed again."""
        self._admission.drop_prefixes()
        self._next_epoch()

    def _next_epoch(self) -> None:
        self.cache.next_epoch()
        if self._capture is not None:
            self._capture.next_epoch(self.version)

    def set_version(self, version: str) -> None:
        """Sets the version of tokens sampled and routes computed from now on."""
        self.version = version
        self._next_epoch()
        for row, job in self._admission.jobs.items():
            job.note_version(version, int(self._rows.length[row] - self._rows.prompt[row]))
        for entry in self._admission.queue:
            for job in entry.jobs:
                job.note_version(version, len(job.kept_ids))

    def _retract(self) -> None:
        self._admission.drop_prefixes()
        entries, rows = [], self._active.tolist()
        jobs = [self._admission.jobs.pop(row) for row in rows]
        # routes that are recomputed under changed weights would not belong to the log-probs
        captured = self._captured(jobs, rows)
        for row, job, kept in zip(rows, jobs, captured, strict=True):
            job.kept_ids, job.kept_logprobs = self._rows.response(row)
            job.kept_rows = kept
            self._release_pages(job, row)
            job.retractions += 1
            tokens = np.concatenate([np.array(job.group.spec.token_ids, np.int64), job.kept_ids])
            entries.append(self._entry(job.group, tokens, deque([job])))
        self._rows.release(rows)
        self._active = np.zeros(0, np.int64)
        self._admission.queue.extendleft(reversed(entries))

    # ---- the loop

    @torch.inference_mode()
    def step(self) -> bool:
        """Feeds the prompts that fit, and decodes one token of every running sample whose turn it is, in one forward
        pass. Returns False when there was nothing to do."""
        if self.paused:
            return False
        admitted = Admitted() if self.hold else self._admission.admit()
        turn = self._turn()
        if not (len(turn) or admitted.fresh or admitted.started):
            return False
        decoded = self._feed(admitted.fresh, turn)
        if admitted.copies:
            self.model.copy_pages(self.cache, [s for s, _ in admitted.copies], [t for _, t in admitted.copies])
        if len(turn) or admitted.started:  # else prompts were scored without sampling
            self._draw(turn, decoded, admitted.started)
        return True

    def _draw(self, turn: NDArray[np.int64], decoded: Tensor, started: list[tuple[Entry, NDArray[np.int64]]]) -> None:
        """Samples the next token of each row of `turn` from `decoded`, and the first token of each started row."""
        rows = np.concatenate([turn, *(r for _, r in started)])
        first = [e.logits for e, r in started for _ in r if e.logits is not None]
        ordered = not started and len(turn) == len(self._active)  # all lengths grow by one: the order stays
        self._active = np.concatenate([self._active, rows[len(turn) :]])
        self._commit(rows, torch.cat([decoded, torch.stack(first)]) if first else decoded)
        if not ordered:
            self._active = self._active[np.argsort(self._rows.length[self._active], kind="stable")]

    def _turn(self) -> NDArray[np.int64]:
        """The running samples that this step decodes, shortest first."""
        rows, active = self._rows, self._active
        sampled = rows.length[active] - rows.prompt[active]
        return active[in_turn(rows.request[active], rows.request_samples[active], sampled, rows=self._step_rows)]

    def _commit(self, rows: NDArray[np.int64], logits: Tensor) -> None:
        """Samples the next token of each row and finishes rows that end with it."""
        draw = self._rows.draw(rows)
        drawn = sample(logits, draw, self.model.ops, self._transfers)
        tokens, logprobs = self._transfers.fetch(*drawn)
        stopped, full = self._rows.append(rows, tokens, logprobs)
        if self._rows.watched[rows].any():
            stopped = stopped | self._watched(rows, logits, draw, tokens, logprobs, stopped, full)
        self.generated += len(rows)
        over = stopped | full
        if over.any():
            reasons = [Finish.STOP if s else Finish.LENGTH for s in stopped[over]]
            self._finish(rows[over], reasons)

    def _watched(
        self,
        rows: NDArray[np.int64],
        logits: Tensor,
        draw: Draw,
        tokens: Tensor,
        logprobs: Tensor,
        stopped: NDArray[np.bool_],
        full: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """Gives the tokens of watched rows to their watches -> [len(rows)] those that end their sample."""
        ended = np.zeros(len(rows), np.bool_)
        for i in np.flatnonzero(self._rows.watched[rows]).tolist():
            job = self._admission.jobs[int(rows[i])]
            watch = job.group.spec.watch
            assert watch is not None
            finish = Finish.STOP if stopped[i] else Finish.LENGTH if full[i] else None
            top = likeliest(logits, draw, i, watch.top, self._transfers)
            ended[i] = watch(job.index, SampledToken(int(tokens[i]), float(logprobs[i]), top, finish))
        return ended

    def _feed(self, entries: list[Entry], turn: NDArray[np.int64]) -> Tensor:
        """Feeds the uncached tokens of the entries, long ones in pieces, and keeps the logits after the last token. The
        first pass also feeds the last token of each row of `turn`. Returns their logits [len(turn), V]."""
        found: list[list[tuple[Tensor, PromptTop | None]]] = [[] for _ in entries]
        longest = max((len(e.tokens) - e.cached for e in entries), default=0)
        decoded = torch.zeros(0, self.model.arch.vocab, device=self.model.device)
        for piece in range(0, max(longest, min(1, len(turn))), _PIECE):
            mine = [(i, e) for i, e in enumerate(entries) if len(e.tokens) - e.cached > piece]
            fed = [self._piece(e, e.cached + piece) for _, e in mine]
            states: list[Tensor] | None = [] if any(e.spec.states for _, e in mine) else None
            x, last = self._logits(fed, turn if piece == 0 else turn[:0], states)
            ends = np.cumsum([len(r.tokens) for r in fed]).tolist()
            for (i, e), row, end, logits in zip(mine, fed, ends, last[: len(fed)], strict=True):
                if row.start + len(row.tokens) == len(e.tokens):
                    e.logits = logits.clone()  # a view would keep the logits of all rows in memory
                found[i].append(self._prompt_scores(e, x, row, end - len(row.tokens)))
                if states and e.spec.states:
                    e.states.append(torch.stack([s[end - len(row.tokens) : end] for s in states], 1))
            if piece == 0:
                decoded = last[len(fed) :]
        self._complete_prefill(entries, found)
        return decoded

    def _logits(
        self, fed: list[SequenceRows], decoded: NDArray[np.int64], states: list[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """One forward pass -> hidden states of all tokens [T, D], and the logits [len(fed) + len(decoded), V] after the
        last token of each of `fed` and of each of the rows `decoded`. states: as in `Model.forward`."""
        batches = [lay_out(fed, **self._fed)] if fed else []
        if len(decoded):
            batches.append(self._decoded(decoded))
        ends = np.cumsum([len(r.tokens) for r in fed] + [1] * len(decoded)) - 1
        batch, (rows,) = joined(batches).sent(self._transfers, torch.from_numpy(ends))
        x = self.model.forward(batch, self.cache, states)
        return x, self.model.logits(x, rows if fed else None)

    def _piece(self, entry: Entry, start: int) -> SequenceRows:
        assert entry.slots is not None
        return SequenceRows(
            tokens=torch.from_numpy(entry.tokens[start : start + _PIECE]), start=start, slots=entry.slots
        )

    def _decoded(self, turn: NDArray[np.int64]) -> ForwardBatch:
        """Layout of the last token of each row, which has not been fed yet."""
        rows, pos = torch.from_numpy(turn), self._rows.length[turn] - 1
        return lay_out_decode(
            self._rows.tokens[rows, torch.from_numpy(pos)], pos, self._rows.slots, rows, **self._gather
        )

    def _complete_prefill(self, entries: list[Entry], found: list[list[tuple[Tensor, PromptTop | None]]]) -> None:
        """For entries whose tokens are all in the cache. found: log-probs of each piece of each entry."""
        for i, entry in enumerate(entries):
            assert entry.slots is not None
            self.cache.keep(self.cache.pages_of(entry.slots), entry.hashes)
            if entry.group.prompt_logprobs is None:
                scored = [own for own, _ in found[i] if len(own)]
                entry.group.prompt_logprobs = tuple(p for own in self._transfers.fetch(*scored) for p in own.tolist())
                entry.group.prompt_top = PromptTop.joined([top for _, top in found[i] if top is not None])
            if not entry.spec.sampling.max_new_tokens:
                self._score(entry)

    def _prompt_scores(self, entry: Entry, x: Tensor, fed: SequenceRows, at: int) -> tuple[Tensor, PromptTop | None]:
        """Log-probs of the prompt tokens that follow those of `fed`, whose hidden states x [T, D] has from row `at` on,
        and the likeliest tokens there, if requested."""
        spec, start = entry.spec, fed.start
        first = max(start, spec.logprob_start)
        stop = min(start + len(fed.tokens), len(spec.token_ids) - 1)
        if spec.logprob_start < 0 or entry.group.prompt_logprobs is not None or first >= stop:
            return torch.zeros(0), PromptTop.empty(spec.top) if spec.top else None
        logits = self.model.logits(x, slice(at + first - start, at + stop - start))
        ops, top = self.model.ops, None
        if spec.top:
            values, ids = self._transfers.fetch(*logits.float().log_softmax(-1).topk(spec.top))
            top = PromptTop(ids.numpy(), values.numpy())
        (targets,) = self._transfers.send(torch.from_numpy(entry.tokens[first + 1 : stop + 1]))
        return ops.logprob(logits, targets, ops.tp_shards), top

    def _score(self, entry: Entry) -> None:
        """Completes samples of no tokens, whose prompt is scored only."""
        assert entry.slots is not None
        nothing, no_logprobs = np.zeros(0, np.int64), np.zeros(0, np.float32)
        routes = None
        if self._capture is not None and entry.spec.routing_start is not None:
            (routes,) = self._capture.read([entry.slots.numpy()[entry.spec.routing_start : len(entry.tokens) - 1]])
        states = None
        if entry.states:
            (fetched,) = self._transfers.fetch(torch.cat(entry.states).float())
            states = fetched.numpy()
        for job in entry.jobs:
            self._complete(job, nothing, no_logprobs, Finish.LENGTH, routes, states)
        self.cache.release(entry.pages)
        entry.pages = []

    # ---- results

    def _captured(self, jobs: Sequence[Job], rows: Sequence[int]) -> list[RoutingRows | None]:
        """The routes of the fed tokens of running jobs, each in its row: those saved at a retraction, then those in the
        cache. None where they are not requested."""
        found = [job.kept_rows for job in jobs]
        wanted = [i for i, job in enumerate(jobs) if job.group.spec.routing_start is not None]
        if self._capture is None or not wanted:
            return found
        slots, ends = self._rows.slots.numpy(), (self._rows.length[rows] - 1).tolist()
        new = self._capture.read([slots[rows[i], jobs[i].first_row : ends[i]] for i in wanted])
        for i, more in zip(wanted, new, strict=True):
            kept = found[i]
            found[i] = more if kept is None else kept.append(more)
        return found

    def _finish(self, rows: NDArray[np.int64], reasons: list[Finish]) -> None:
        if not len(rows):
            return
        self._active = self._active[~np.isin(self._active, rows)]
        ended = rows.tolist()
        jobs = [self._admission.jobs.pop(row) for row in ended]
        for row, job, reason, routes in zip(ended, jobs, reasons, self._captured(jobs, ended), strict=True):
            ids, logprobs = self._rows.response(row)
            self._complete(job, ids, logprobs, reason, routes)
            self._release_pages(job, row)
        self._rows.release(ended)

    def _release_pages(self, job: Job, row: int) -> None:
        """Releases the pages of a running sample, which stay findable by its fed tokens."""
        fed = self._rows.tokens[row, : int(self._rows.length[row]) - 1].numpy()
        self.cache.keep(job.pages, self.cache.prefixes.hashes(fed))
        self.cache.release(job.pages)
        job.pages = []

    def _complete(
        self,
        job: Job,
        ids: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        finish: Finish,
        routes: RoutingRows | None,
        states: NDArray[np.float32] | None = None,
    ) -> None:
        """routes, states: None if not requested, and for a sample that was never fed.

        The reply of a model without experts has no `routed_experts`, as that of SGLang without a capturer.
        """
        spec, encoded = job.group.spec, None
        if self._capture is not None and routes is not None and self.model.arch.routed:
            encoded = self._capture.encode(routes, spec.routing_start or 0, gates=spec.gates)
        reply = GenerateReply(
            rid=reply_id(spec.rid, job.index, spec.n),
            output_ids=ids,
            logprobs=logprobs,
            finish=finish,
            prompt_tokens=len(spec.token_ids),
            weight_version=self.version,
            weight_versions=job.spans(len(ids)),
            matched=int(ids[-1]) if finish is Finish.STOP and spec.watch is None else None,  # else its watch knows
            routed_experts=encoded and encoded.experts,
            row_versions=encoded and encoded.versions,
            routed_weights=encoded and encoded.gates,
            num_retractions=job.retractions,
            cached_tokens=job.cached,
            abort_message="aborted" if finish is Finish.ABORT else "",
        )
        group = job.group
        done = Completed(
            reply=reply,
            prompt_logprobs=group.prompt_logprobs or (),
            prompt_top=group.prompt_top,
            states=states,
        )
        group.finish(job.index, done)
