"""DraftModel: the draft model's steps. They are sent one behind another; the host reads the guesses when all are done.

    sequences ──rows──▶ step ──its samples stay on the device──▶ step ──▶ … ──▶ guesses of all requests

Nothing here waits for the device. All calls come from the step thread.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxctx.cache.context_cache import Context
from jaxctx.engine.core.request import Request
from jaxctx.engine.drafting.sequences import DraftRows, DraftSequences
from jaxctx.engine.runner.model_runner import ModelRunner
from jaxctx.engine.runner.step import StepInputs, read_output, write_metadata
from jaxctx.model.sampling_options import ROW
from jaxctx_kernels import Segment


@dataclass(frozen=True, slots=True)
class _Part:
    """One request in a round."""

    request: Request
    run_number: int  # of the request when the round began
    length: int  # of its context then
    guesses: int  # how many are made
    context: Context  # of the draft model


@dataclass(frozen=True, slots=True)
class DraftRound:
    """Guesses that are being made: those of the requests with most of them first."""

    parts: Sequence[_Part]


class DraftModel:
    """See the module docstring."""

    def __init__(self, runner: ModelRunner, sequences: DraftSequences, vocab_size: int) -> None:
        """`runner` has compiled its steps. `vocab_size`: of the served model; a guess beyond it is none.

        The two models may have different numbers of rows behind the entries that both of their tokenizers have.
        """
        self.sequences = sequences
        self._runner = runner
        self._vocab_size = vocab_size

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Compute tokens of these requests that the draft model has not seen, as many as one step holds."""
        rows = self.sequences.catch_up(requests)
        if rows:
            self._send(rows, (), ())
            self.sequences.mark_sent(rows)

    def start(self, wanted: Mapping[Request, int]) -> tuple[DraftRound, Sequence[jax.Array]] | None:
        """Send the steps that guess so many tokens for each request; None if there are no pages for any.

        Returns the round, and the device's arrays where its guesses will be: for each step, int32 `[samples, words]`.
        """
        parts: list[_Part] = []
        first: list[DraftRows] = []
        rows_left = self.sequences.config.max_batch_tokens
        for request, guesses in sorted(wanted.items(), key=lambda item: -item[1]):
            rows = self.sequences.begin_drafts(request, guesses, rows_left)
            if rows is None:
                continue
            rows_left -= len(rows.tokens)
            first.append(rows)
            parts.append(_Part(request, request.run_number, request.context.length, guesses, rows.context))
        if not parts:
            return None
        outputs = [self._send(first, parts, [part.length for part in parts])]
        self.sequences.mark_sent(first)
        for ahead in range(1, parts[0].guesses):
            drafting = [part for part in parts if part.guesses > ahead]
            rows_of = [
                # What the step before sampled for the slot of this place.
                DraftRows(part.context, np.array([-1 - slot], np.int32), part.length + ahead - 1)
                for slot, part in enumerate(drafting)
            ]
            outputs.append(self._send(rows_of, drafting, [part.length + ahead for part in drafting]))
        return DraftRound(parts), outputs

    def finish(self, round_: DraftRound, outputs: Iterable[np.ndarray]) -> Mapping[Request, Sequence[int]]:
        """The guesses of a round, by request, from the arrays of `start` as numpy arrays; without ended requests."""
        tokens = [read_output(packed).tokens for packed in outputs]
        found: dict[Request, Sequence[int]] = {}
        for place, part in enumerate(round_.parts):
            if part.request.run_number != part.run_number:
                continue
            guesses = [int(each[place]) for each in tokens[: part.guesses]]
            self.sequences.end_drafts(part.request, part.length, guesses)
            beyond = next((number for number, guess in enumerate(guesses) if guess >= self._vocab_size), len(guesses))
            found[part.request] = guesses[:beyond]
        return found

    def _send(self, rows: Sequence[DraftRows], sampled: Sequence[_Part], positions: Sequence[int]) -> jax.Array:
        """Send one step; a sample behind the last row of each of the first `sampled`, which draws for its position."""
        shape = self._runner.select_bucket(sum(len(each.tokens) for each in rows))
        packed, views = self._runner.make_step_inputs(shape)
        segments = _write_rows(rows, views, self.sequences.config.page_size)
        for slot, (part, segment, position) in enumerate(zip(sampled, segments, positions, strict=False)):
            output = part.request.output
            assert output is not None
            views.sample_rows[slot] = segment.first_row + segment.rows - 1
            views.slots[slot] = slot
            output.sampler.write(views.sampling[slot], position=position)
            views.sampling[slot].view(ROW)["logprobs"] = False  # nobody reads those of a guess
        write_metadata(segments, shape, views)
        _, output_array = self._runner.run(shape, packed)
        return output_array


def _write_rows(rows: Sequence[DraftRows], views: StepInputs, page_size: int) -> list[Segment]:
    """Write tokens, positions and where their KV goes; returns what the rows of each sequence attend to."""
    segments: list[Segment] = []
    first = 0
    for each in rows:
        stop = first + len(each.tokens)
        pages = each.context.page_table()
        positions = np.arange(each.position, each.position + len(each.tokens), dtype=np.int32)
        views.tokens[first:stop] = each.tokens
        views.positions[first:stop] = positions
        views.kv_slots[first:stop] = pages[positions // page_size] * page_size + positions % page_size
        segments.append(Segment(first, len(each.tokens), each.position, pages))
        first = stop
    return segments
