"""Continuous batching over one model. Single-threaded: `worker.py` gives it a thread of its own.

Letters: B running samples, P prompt tokens, S tokens of a sample, V vocabulary.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_like.types import Finish
from rollout.embedded.admission import Admission, Admitted
from rollout.embedded.batch import ForwardBatch
from rollout.embedded.capture import RouteCapture, RoutingRows
from rollout.embedded.kv_cache import KVCache
from rollout.embedded.layout import SequenceRows, joined, lay_out, lay_out_decode
from rollout.embedded.model import Model
from rollout.embedded.requests import Completed, Entry, Group, Job, PromptSpec
from rollout.embedded.rows import Rows
from rollout.embedded.sampler import sample, stream_keys
from rollout.embedded.turns import in_turn
from rollout.wire import GenerateReply, reply_id
from rollout.wire_control import PauseMode
from rollout.wire_scores import PromptTop

_PIECE = 1024  # tokens of one prompt in one forward pass
_GATHER_BYTES = 1 << 20  # of a layer's cache in one attention call: stays in a core's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    max_running: int = 512  # samples in a batch
    max_total_tokens: int = 65536  # cache slots
    context_length: int = 1024  # tokens of a sample
    prefill_tokens: int = 4096  # in one forward pass; a longer prompt takes several
    page: int = 16
    routes: bool = True  # keep the experts' ids
    gates: bool = False  # keep their gate weights beside them
    prefixes: bool = True  # find pages of ended sequences again


class Engine:
    """`step` until it returns False; results go to each group's `deliver`."""

    def __init__(self, model: Model, limits: EngineLimits, *, version: str = "default") -> None:
        self.model = model
        self.limits = limits
        self.cache = KVCache(
            model.arch,
            slots=limits.max_total_tokens,
            page=limits.page,
            dtype=model.dtype,
            width=model.cache_width,
            routes=limits.routes,
            gates=limits.gates,
            prefixes=limits.prefixes,
        )
        self.version = version
        self.paused = False
        self.hold = False  # start nothing new, so that the running ones drain
        self.generated = 0  # tokens, ever
        self._requests = 0  # ever
        self._rows = Rows(limits.max_running)
        self._admission = Admission(
            self.cache, self._rows, prefill_tokens=limits.prefill_tokens, eos_ids=model.arch.eos_ids
        )
        self._capture = RouteCapture(self.cache, version) if limits.routes else None
        self._active: NDArray[np.int64] = np.zeros(0, np.int64)  # rows, shortest first
        element = torch.finfo(model.dtype).bits // 8
        self._gather = {"width_bytes": _GATHER_BYTES, "token_bytes": model.cache_width * element}

    # ---- requests

    def submit(self, spec: PromptSpec, deliver: Callable[[list[Completed]], None]) -> None:
        """Raises ValueError when the request can never run."""
        self.queue([self.made(spec, deliver)])

    def made(self, spec: PromptSpec, deliver: Callable[[list[Completed]], None]) -> Entry:
        """Everything of a request that can fail, and nothing of the engine changed. Raises ValueError when the request
        can never run."""
        self.check(spec)
        group = Group(spec=spec, deliver=deliver, done=[None] * spec.n)
        seed = spec.sampling.sampling_seed
        keys = stream_keys(secrets.randbits(63) if seed is None else seed, np.arange(spec.n) + spec.first_index)
        jobs = deque(Job(group=group, index=i, key=int(k)) for i, k in enumerate(keys))
        for job in jobs:
            job.note_version(self.version, 0)
        return self._entry(group, np.array(spec.token_ids, np.int64), jobs)

    def queue(self, entries: Sequence[Entry]) -> None:
        """The prompts of one request, `made` since the last step, in order."""
        self._requests += 1
        asked = sum(len(e.jobs) for e in entries if e.spec.sampling.max_new_tokens)
        for entry in entries:
            entry.group.request, entry.group.asked = self._requests, asked
        self._admission.queue.extend(entries)

    def _entry(self, group: Group, tokens: NDArray[np.int64], jobs: deque[Job]) -> Entry:
        return Entry(group=group, tokens=tokens, jobs=jobs, names=self.cache.prefixes.names(tokens))

    def check(self, spec: PromptSpec) -> None:
        """Raises ValueError, with both numbers, for what can never run."""
        p, arch = len(spec.token_ids), self.model.arch
        if spec.limit > self.limits.context_length:
            raise ValueError(
                f"{p} prompt tokens and max_new_tokens = {spec.sampling.max_new_tokens} make {spec.limit}, over "
                f"the context length {self.limits.context_length}: shorten the prompt or lower max_new_tokens"
            )
        if spec.routing_start is not None and self._capture is None:
            raise ValueError(
                "return_routed_experts: this server keeps no expert ids: start it with --enable-return-routed-experts"
            )
        if spec.gates and not self.limits.gates:
            raise ValueError(
                "return_routed_weights: this server keeps no gate weights: start it with --enable-return-routed-weights"
            )
        if spec.top > arch.vocab:
            raise ValueError(f"top_logprobs_num = {spec.top}, the vocabulary has {arch.vocab} tokens: ask for fewer")
        for what, ids in (("token id", spec.token_ids), ("stop token id", spec.sampling.stop_token_ids)):
            if ids and not (min(ids) >= 0 and max(ids) < arch.vocab):
                wrong = min(ids) if min(ids) < 0 else max(ids)
                raise ValueError(f"{what} {wrong} is outside this model's vocabulary of {arch.vocab}")
        need, have = self._admission.slots_needed(spec), self.cache.pages * self.cache.page
        if need > have:
            raise ValueError(
                f"a sample of {spec.limit} tokens needs {need} cache slots, the cache has {have}: "
                "raise max_total_tokens or lower max_new_tokens"
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
        """Nothing holds cache pages (requests may wait)."""
        return not self.running and not any(e.pages for e in self._admission.queue)

    def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """Samples end with what they have. Matches rids by prefix, as SGLang's scheduler does; unknown: nothing."""
        self._abort(lambda group: everything or (rid != "" and group.spec.rid.startswith(rid)))

    def abort_groups(self, groups: Collection[Group]) -> None:
        """Samples of these groups alone end with what they have, whatever names others have."""
        wanted = set(map(id, groups))
        self._abort(lambda group: id(group) in wanted)

    def _abort(self, meant: Callable[[Group], bool]) -> None:
        def hit(job: Job) -> bool:
            return meant(job.group)

        rows = np.array([r for r in self._active if hit(self._admission.jobs[r])], np.int64)
        self._finish(rows, [Finish.ABORT] * len(rows))
        for entry in list(self._admission.queue):
            dropped = [j for j in entry.jobs if hit(j)]
            entry.jobs = deque(j for j in entry.jobs if not hit(j))
            if not entry.jobs:
                self._admission.queue.remove(entry)
                self.cache.release(entry.pages)
            for job in dropped:
                self._complete(job, job.kept_ids, job.kept_logprobs, Finish.ABORT, job.kept_rows)

    # ---- pause, flush, weights

    def pause(self, mode: PauseMode) -> None:
        """ABORT ends everything; RETRACT puts the running back into the queue and frees the cache; IN_PLACE freezes."""
        self.paused = True
        if mode is PauseMode.ABORT:
            self.abort(everything=True)
        elif mode is PauseMode.RETRACT:
            self._retract()

    def resume(self) -> None:
        self.paused = False

    def flush(self) -> bool:
        """Forgets all prefixes. False, and nothing done, while requests hold pages."""
        if self.idle:
            self.cache.forget_prefixes()
        return self.idle

    def weights_changed(self) -> None:
        """No prefix is found any more, and prompts that were fed for samples yet to start are fed again."""
        self._admission.drop_prefixes()
        self._next_epoch()

    def _next_epoch(self) -> None:
        self.cache.next_epoch()
        if self._capture is not None:
            self._capture.next_epoch(self.version)

    def set_version(self, version: str) -> None:
        """Tokens sampled and routes computed from now on carry it."""
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
        # computed anew they would be other routes than those that gave the log-probs, if the weights change
        captured = self._captured(jobs, rows)
        for row, job, kept in zip(rows, jobs, captured, strict=True):
            job.kept_ids, job.kept_logprobs = self._rows.response(row)
            job.kept_rows = kept
            self._give_back(job, row)
            job.retractions += 1
            tokens = np.concatenate([np.array(job.group.spec.token_ids, np.int64), job.kept_ids])
            entries.append(self._entry(job.group, tokens, deque([job])))
        self._rows.release(rows)
        self._active = np.zeros(0, np.int64)
        self._admission.queue.extendleft(reversed(entries))

    # ---- the loop

    @torch.inference_mode()
    def step(self) -> bool:
        """Feeds the prompts that there is room for, and decodes one token of every running sample whose turn it is, in
        one forward pass. False: there was nothing to do."""
        if self.paused:
            return False
        admitted = Admitted() if self.hold else self._admission.admit()
        turn = self._turn()
        if not (len(turn) or admitted.fresh or admitted.started):
            return False
        decoded = self._feed(admitted.fresh, turn)
        if admitted.copies:
            self.cache.copy([s for s, _ in admitted.copies], [t for _, t in admitted.copies])
        if len(turn) or admitted.started:  # else prompts were only scored
            self._draw(turn, decoded, admitted.started)
        return True

    def _draw(self, turn: NDArray[np.int64], decoded: Tensor, started: list[tuple[Entry, NDArray[np.int64]]]) -> None:
        """The next token of each row of `turn`, after its logits, and the first of each row that started."""
        rows = np.concatenate([turn, *(r for _, r in started)])
        first = [e.logits for e, r in started for _ in r if e.logits is not None]
        alike = not started and len(turn) == len(self._active)  # all grow by one: they stay in order
        self._active = np.concatenate([self._active, rows[len(turn) :]])
        self._commit(rows, torch.cat([decoded, torch.stack(first)]) if first else decoded)
        if not alike:
            self._active = self._active[np.argsort(self._rows.length[self._active], kind="stable")]

    def _turn(self) -> NDArray[np.int64]:
        """The running samples that this step decodes, shortest first."""
        rows, active = self._rows, self._active
        return active[in_turn(rows.request[active], rows.asked[active], rows.length[active] - rows.prompt[active])]

    def _commit(self, rows: NDArray[np.int64], logits: Tensor) -> None:
        """Draws the next token of each row and ends the rows that it ends."""
        tokens, logprobs = sample(logits, self._rows.draw(rows), self.model.ops)
        stopped, full = self._rows.append(rows, tokens, logprobs)
        self.generated += len(rows)
        over = stopped | full
        if over.any():
            reasons = [Finish.STOP if s else Finish.LENGTH for s in stopped[over]]
            self._finish(rows[over], reasons)

    def _feed(self, entries: list[Entry], turn: NDArray[np.int64]) -> Tensor:
        """Feeds those of the entries' tokens that are not cached, in pieces when they are many, and keeps the logits
        after the last one. With the first piece goes the last token of each row of `turn` -> logits [len(turn), V]."""
        found: list[list[tuple[Tensor, PromptTop | None]]] = [[] for _ in entries]
        longest = max((len(e.tokens) - e.cached for e in entries), default=0)
        decoded = torch.zeros(0, self.model.arch.vocab)
        for piece in range(0, max(longest, min(1, len(turn))), _PIECE):
            mine = [(i, e) for i, e in enumerate(entries) if len(e.tokens) - e.cached > piece]
            fed = [self._piece(e, e.cached + piece) for _, e in mine]
            x, last = self._logits(fed, turn if piece == 0 else turn[:0])
            ends = np.cumsum([len(r.tokens) for r in fed]).tolist()
            for (i, e), row, end, logits in zip(mine, fed, ends, last[: len(fed)], strict=True):
                if row.start + len(row.tokens) == len(e.tokens):
                    e.logits = logits.clone()  # a view would keep all of them while samples wait to start
                found[i].append(self._prompt_scores(e, x[end - len(row.tokens) : end], row.start))
            if piece == 0:
                decoded = last[len(fed) :]
        self._fed(entries, found)
        return decoded

    def _logits(self, fed: list[SequenceRows], decoded: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """One forward pass -> what came of all tokens [T, D], and the logits after the last token of each of `fed` and
        after each of the rows `decoded` [len(fed) + len(decoded), V]."""
        batches = [lay_out(fed, **self._gather)] if fed else []
        if len(decoded):
            batches.append(self._decoded(decoded))
        x = self.model.forward(joined(batches), self.cache)
        ends = np.cumsum([len(r.tokens) for r in fed] + [1] * len(decoded)) - 1
        return x, self.model.logits(x[torch.from_numpy(ends)] if fed else x)

    def _piece(self, entry: Entry, start: int) -> SequenceRows:
        assert entry.slots is not None
        return SequenceRows(
            tokens=torch.from_numpy(entry.tokens[start : start + _PIECE]), start=start, slots=entry.slots
        )

    def _decoded(self, turn: NDArray[np.int64]) -> ForwardBatch:
        """The last token of each row, which has not been fed yet."""
        rows, pos = torch.from_numpy(turn), self._rows.length[turn] - 1
        return lay_out_decode(
            self._rows.tokens[rows, torch.from_numpy(pos)], pos, self._rows.slots, rows, **self._gather
        )

    def _fed(self, entries: list[Entry], found: list[list[tuple[Tensor, PromptTop | None]]]) -> None:
        """Prompts whose tokens are all in the cache; `found` for each piece of each of them."""
        for i, entry in enumerate(entries):
            assert entry.slots is not None
            self.cache.keep(self.cache.pages_of(entry.slots), entry.names)
            if entry.group.prompt_logprobs is None:
                entry.group.prompt_logprobs = tuple(torch.cat([own for own, _ in found[i]]).tolist())
                entry.group.prompt_top = PromptTop.joined([top for _, top in found[i] if top is not None])
            if not entry.spec.sampling.max_new_tokens:
                self._score(entry)

    def _prompt_scores(self, entry: Entry, x: Tensor, start: int) -> tuple[Tensor, PromptTop | None]:
        """Log-probs of the prompt tokens after those at positions start.. of x [n, D], and the likeliest tokens there,
        where they are wanted."""
        spec = entry.spec
        first = max(start, spec.logprob_start)
        stop = min(start + len(x), len(spec.token_ids) - 1)
        if spec.logprob_start < 0 or entry.group.prompt_logprobs is not None or first >= stop:
            return torch.zeros(0), PromptTop.nowhere(spec.top) if spec.top else None
        logits = self.model.logits(x[first - start : stop - start])
        ops, top = self.model.ops, None
        if spec.top:
            values, ids = logits.float().log_softmax(-1).topk(spec.top)
            top = PromptTop(ids.numpy(), values.numpy())
        return ops.logprob(logits, torch.from_numpy(entry.tokens[first + 1 : stop + 1]), ops.parts), top

    def _score(self, entry: Entry) -> None:
        """Samples of no tokens: the prompt was only to be scored."""
        assert entry.slots is not None
        nothing, no_logprobs = np.zeros(0, np.int64), np.zeros(0, np.float32)
        routes = None
        if self._capture is not None and entry.spec.routing_start is not None:
            (routes,) = self._capture.read([entry.slots.numpy()[entry.spec.routing_start : len(entry.tokens) - 1]])
        for job in entry.jobs:
            self._complete(job, nothing, no_logprobs, Finish.LENGTH, routes)
        self.cache.release(entry.pages)
        entry.pages = []

    # ---- results

    def _captured(self, jobs: Sequence[Job], rows: Sequence[int]) -> list[RoutingRows | None]:
        """Of running jobs, each in its row, the routes of what was fed: before a retraction as they were then, the
        others as the cache has them. None where they are not wanted."""
        found = [job.kept_rows for job in jobs]
        wanted = [i for i, job in enumerate(jobs) if job.group.spec.routing_start is not None]
        if self._capture is None or not wanted:
            return found
        slots, ends = self._rows.slots.numpy(), (self._rows.length[rows] - 1).tolist()
        new = self._capture.read([slots[rows[i], jobs[i].first_row : ends[i]] for i in wanted])
        for i, more in zip(wanted, new, strict=True):
            kept = found[i]
            found[i] = more if kept is None else kept.then(more)
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
            self._give_back(job, row)
        self._rows.release(ended)

    def _give_back(self, job: Job, row: int) -> None:
        """The pages of a running sample. What they hold of tokens that were fed can be found."""
        fed = self._rows.tokens[row, : int(self._rows.length[row]) - 1].numpy()
        self.cache.keep(job.pages, self.cache.prefixes.names(fed))
        self.cache.release(job.pages)
        job.pages = []

    def _complete(
        self,
        job: Job,
        ids: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        finish: Finish,
        routes: RoutingRows | None,
    ) -> None:
        """`routes`: None where none are wanted, and of a sample that was never fed.

        A model without experts has no routes: the reply then has no `routed_experts`, as SGLang's without a capturer.
        """
        spec, told = job.group.spec, None
        if self._capture is not None and routes is not None and self.model.arch.routed:
            told = self._capture.told(routes, spec.routing_start or 0, gates=spec.gates)
        reply = GenerateReply(
            rid=reply_id(spec.rid, job.index, spec.n),
            output_ids=ids,
            logprobs=logprobs,
            finish=finish,
            prompt_tokens=len(spec.token_ids),
            weight_version=self.version,
            weight_versions=job.spans(len(ids)),
            matched=int(ids[-1]) if finish is Finish.STOP else None,
            routed_experts=told and told.experts,
            row_versions=told and told.versions,
            routed_weights=told and told.gates,
            num_retractions=job.retractions,
            cached_tokens=job.cached,
            abort_message="aborted" if finish is Finish.ABORT else "",
        )
        group = job.group
        done = Completed(reply=reply, prompt_logprobs=group.prompt_logprobs or (), prompt_top=group.prompt_top)
        group.finish(job.index, done)
