"""Answers: the recursion without gradients, for each puzzle until its answer stands."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from macbook_optimization.errors import ConfigError
from trm.backends.base import Answers
from trm.backends.pytorch.lanes import Lanes
from trm.backends.pytorch.memory import allocations
from trm.backends.pytorch.model import TinyRecursiveModel, load_weights
from trm.config import ModelConfig, TrainingConfig
from trm.tasks.base import TaskShape

SETTLE = 2  # steps for which an answer stands that was found by guesses, if nothing else is asked for


class TorchAnswerer:
    def __init__(self, model: TinyRecursiveModel, training: TrainingConfig, lanes: Lanes) -> None:
        self.model, self.lanes = model, lanes
        # Terminal supervision may stop after any recursion.
        self.cycles = 1 if training.supervision == "terminal" else model.config.cycles_per_step

    def answer(
        self,
        inputs: NDArray[np.int64],
        puzzle_identifiers: NDArray[np.int64],
        *,
        depth: int,
        settle: int | None = None,
        halt: bool = False,
        tries: int = 1,
        noise: float = 0.0,
        guesses: int = 0,
    ) -> Answers:
        shape = self.model.shape
        if guesses and shape.output_vocab_size != shape.vocab_size:
            raise ConfigError("Guesses are for tasks whose answers have the same tokens as their questions.")
        limits = depth, settle, halt
        pieces: list[Answers] = []

        def think(cut: slice) -> Answers:
            questions, identifiers = inputs[cut], puzzle_identifiers[cut]
            answers = self._answer(questions, identifiers, *limits)
            for attempt in range(1, tries):
                doubted = np.flatnonzero((answers.halt_logits[-1] < 0) | (answers.steps == depth))
                if not len(doubted):
                    break
                luck = torch.Generator().manual_seed(attempt)
                others = self._answer(questions[doubted], identifiers[doubted], *limits, luck, noise, guesses)
                answers.reconsider(doubted, others)
            return answers

        with allocations(torn=False):
            if len(inputs) < self.lanes.count:  # then all cores work on the same products
                return think(slice(None))
            self.lanes.each(len(inputs), lambda done: len(inputs), think, pieces.append)
        return Answers(
            np.concatenate([piece.tokens for piece in pieces], axis=1),
            np.concatenate([piece.halt_logits for piece in pieces], axis=1),
            np.concatenate([piece.steps for piece in pieces]),
        )

    @torch.no_grad()
    def _answer(
        self,
        inputs: NDArray[np.int64],
        puzzle_identifiers: NDArray[np.int64],
        depth: int,
        settle: int | None,
        halt: bool,
        luck: torch.Generator | None = None,
        noise: float = 0.0,
        guesses: int = 0,
    ) -> Answers:
        """Without `luck`, neither noise nor guesses. It is the same for every puzzle: no batch changes an
        answer."""
        questions = _Questions(torch.from_numpy(inputs), depth, 0 if luck is None else guesses)
        rows = None
        if self.model.config.puzzle_emb_ndim:
            rows = self.model.puzzle_emb.weights[torch.from_numpy(puzzle_identifiers)]
        tokens = np.zeros((depth, *inputs.shape), dtype=np.int32)
        halt_logits = np.zeros((depth, len(inputs)), dtype=np.float32)
        unchanged = np.zeros(len(inputs), dtype=np.int64)
        steps = np.zeros(len(inputs), dtype=np.int64)
        active = torch.arange(len(inputs))
        latents = self.model.start(len(inputs))
        if luck is not None and noise:
            latents = latents + noise * self.model.noise(luck)
        for step in range(depth):
            latents = self.model(
                questions.asked[active], None if rows is None else rows[active], latents, self.cycles
            )
            here = active.numpy()
            if step:
                tokens[step], halt_logits[step] = tokens[step - 1], halt_logits[step - 1]
            logits = self.model.token_logits(self.model.answer_positions(latents[0]))
            tokens[step, here] = logits.argmax(-1)
            halt_logits[step, here] = self.model.halt_logits(latents[0])[:, 0]
            steps[here] += 1
            if step:
                same = (tokens[step, here] == tokens[step - 1, here]).all(-1)
                unchanged[here] = np.where(same, unchanged[here] + 1, 0)
            believed = halt_logits[step, here] >= 0
            if luck is not None and guesses:
                guessed = questions.guessed[here]
                stands = believed & (unchanged[here] >= (settle or SETTLE))
                done = stands & ~guessed
                unchanged[questions.take_back(here[stands])] = 0
                doubted = ~believed | (guessed & ~stands)
                questions.guess(step + 1, here[doubted], logits[doubted], luck)
            else:
                done = unchanged[here] >= (settle or depth)
                if halt:
                    done |= believed
            if done.any():
                going_on = torch.from_numpy(~done)
                active, latents = active[going_on], latents[:, :, going_on]
                if not len(active):
                    tokens[step + 1 :], halt_logits[step + 1 :] = tokens[step], halt_logits[step]
                    break
        if luck is not None and guesses:
            halt_logits[:, active.numpy()] = -np.inf  # what still hangs on guesses is no answer
        return Answers(tokens, halt_logits, steps)


class _Questions:
    """With guesses in them, of which there is one more whenever a share of the depth has passed."""

    def __init__(self, questions_BL: Tensor, depth: int, guesses: int) -> None:
        self.questions = questions_BL
        self.asked = questions_BL.clone() if guesses else questions_BL
        self.guessed = np.zeros(len(questions_BL), dtype=bool)
        every = max(1, depth // (guesses + 1))
        self.moments = range(every, guesses * every + 1, every)

    def take_back(self, puzzles: NDArray[np.int64]) -> NDArray[np.int64]:
        """The guesses in these puzzles; returns those that had any."""
        puzzles = puzzles[self.guessed[puzzles]]
        self.asked[puzzles] = self.questions[puzzles]
        self.guessed[puzzles] = False
        return puzzles

    def guess(self, step: int, puzzles: NDArray[np.int64], logits_BLV: Tensor, luck: torch.Generator) -> None:
        if step in self.moments and len(puzzles):
            self.asked[puzzles] = with_a_guess(self.asked[puzzles], logits_BLV.float().softmax(-1), luck)
            self.guessed[puzzles] = True


def with_a_guess(questions_BL: Tensor, beliefs_BLV: Tensor, luck: torch.Generator) -> Tensor:
    """One belief more in each, drawn with the weight p^2 (1 - p): a likely one, but none that is certain, for
    that would help nobody."""
    weights = (beliefs_BLV.square() * (1 - beliefs_BLV)).scatter(-1, questions_BL[..., None], 0)
    race = (weights / torch.empty(weights.shape[1:]).exponential_(generator=luck)).flatten(1)
    chosen = race.argmax(1, keepdim=True)
    position, token = chosen // weights.shape[-1], chosen % weights.shape[-1]
    nothing = race.gather(1, chosen) == 0
    return questions_BL.scatter(1, position, torch.where(nothing, questions_BL.gather(1, position), token))


def answerer(
    model: ModelConfig,
    training: TrainingConfig,
    shape: TaskShape,
    weights: Mapping[str, Tensor],
    lanes: int = 1,
) -> TorchAnswerer:
    network = TinyRecursiveModel(model, shape)
    load_weights(network, weights)
    return TorchAnswerer(network.requires_grad_(False), training, Lanes(lanes))
